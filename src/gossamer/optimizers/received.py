"""Validation of the inner-optimizer state received from another worker: its bytes are untrusted.

A state that torch's `load_state_dict` accepts may still fail at the next step, or turn sound parameters into NaNs.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Muon

from gossamer.optimizers.by_name import inside
from gossamer.optimizers.contract import InnerOptimizer, Joined
from gossamer.optimizers.gpa import GPA

_CHANGING = {"lr", "largest_lr", "sum_of_weights"}
"""Options of a group that change from step to step."""
_OURS = (AdamW, Muon, SGD)
"""Optimizers of torch's that the settings name."""


def must_be_state_of(optimizer: InnerOptimizer, saved: object) -> None:
    """Raises ValueError unless a received state can be that of this optimizer, in another worker of the run.

    For a user's optimizer, the tensors it keeps are known only after its first step.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1, momentum=0.9)
    >>> must_be_state_of(optimizer, optimizer.state_dict())
    >>> must_be_state_of(optimizer, {**optimizer.state_dict(), "state": {0: {"momentum_buffer": torch.zeros(3)}}})
    Traceback (most recent call last):
        ...
    ValueError: momentum_buffer of parameter 0 is a tensor of (3,) torch.float32
    """
    current = optimizer.state_dict()
    if not isinstance(saved, dict) or saved.keys() != current.keys():
        raise ValueError(f"the inner optimizer has {_keys(current)} and {_keys(saved)} came")
    within = inside(optimizer)
    for key, one in within.items():
        must_be_state_of(one, saved[key])
    if isinstance(optimizer, Joined):
        return
    kind = vars(type(optimizer)).get("plain", type(optimizer))  # see `gossamer.optimizers.inner.uncompiled`
    is_ours = kind in _OURS or kind.__module__.startswith("gossamer.")
    groups, received = current["param_groups"], saved["param_groups"]
    if not isinstance(received, list) or len(received) != len(groups):
        raise ValueError(f"the inner optimizer has {len(groups)} groups of parameters, and other ones came")
    for group, other in zip(groups, received, strict=True):
        _must_be_group(group, other, is_ours)
    places = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    state = saved["state"]
    if not isinstance(state, dict) or not all(type(k) is int and 0 <= k < len(places) for k in state):
        raise ValueError(f"the inner optimizer has {len(places)} parameters, and states of {_keys(state)} came")
    for k, one in state.items():
        group, p = places[k]
        _must_be_of_parameter(
            k, one, p, _expected_state(optimizer, group, p) if is_ours else current["state"].get(k) or one
        )
    for key in current.keys() - {"state", "param_groups", *within}:
        if type(saved[key]) is not type(current[key]) or not _is_sound(saved[key]):
            raise ValueError(f"{key} of the inner optimizer is {saved[key]!r:.40}")


def _must_be_group(group: Mapping[str, Any], received: object, is_ours: bool) -> None:
    if not isinstance(received, dict) or not group.keys() <= received.keys() | _CHANGING:
        raise ValueError(f"a group of the inner optimizer has {_keys(group)} and {_keys(received)} came")
    for name, value in received.items():
        if name in group and type(value) is type(group[name]) and value == group[name]:
            continue
        may_differ = name in _CHANGING or not is_ours
        if not may_differ or isinstance(value, Tensor) or not _is_sound(value):
            raise ValueError(
                f"{name} of a group of the inner optimizer is {value!r:.40} and not {group.get(name)!r:.40}"
            )


def _expected_state(optimizer: InnerOptimizer, group: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """The state that one of our optimizers keeps for a parameter, with meta tensors, as after a step on a single number."""
    if isinstance(optimizer, GPA):
        return {name: torch.empty_like(p, device="meta") for name in optimizer.homes}
    one = torch.zeros((1,) * p.ndim, dtype=p.dtype, device=p.device)
    one.grad = torch.zeros_like(one)
    trial: Any = copy.copy(optimizer)
    trial.param_groups, trial.state = [{**group, "params": [one]}], defaultdict(dict)
    trial.step()
    return {
        name: torch.empty(p.shape if value.shape == one.shape else value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, Tensor)
        else value
        for name, value in trial.state[one].items()
    }


def _must_be_of_parameter(k: int, received: object, p: Tensor, like: Mapping[str, Any]) -> None:
    if not isinstance(received, dict) or received.keys() != like.keys():
        raise ValueError(f"the inner optimizer has {_keys(like)} of parameter {k} and {_keys(received)} came")
    for name, value in received.items():
        subject, current = f"{name} of parameter {k} is", like[name]
        if not isinstance(value, Tensor) or not isinstance(current, Tensor):
            if type(value) is not type(current) or not _is_sound(value):
                raise ValueError(f"{subject} {value!r:.40}")
            continue
        if (value.shape, value.dtype) != (current.shape, current.dtype):
            raise ValueError(f"{subject} a tensor of {tuple(value.shape)} {value.dtype}")
        if value.is_floating_point() and value.numel():
            low, high = (end.item() for end in value.float().aminmax())
            # An infinite second moment only stops a parameter; a negative one turns it into a NaN.
            ends = low >= 0.0 if name == "exp_avg_sq" else math.isfinite(low) and math.isfinite(high)
            if not ends or (name == "step" and low < 0):
                raise ValueError(f"{subject} between {low} and {high}")


def _is_sound(value: object) -> bool:
    """Whether it is a valid non-tensor state: a bool, a string, None, or numbers that are not negative."""
    if isinstance(value, list | tuple):
        return all(_is_sound(one) for one in value)
    if isinstance(value, int | float):
        return math.isfinite(value) and value >= 0
    return value is None or isinstance(value, str)


def _keys(value: object) -> str:
    return f"{sorted(map(str, value)) if isinstance(value, Mapping) else value!r}"[:60]
