"""The state of an inner optimizer by the names of parameters: optimizers of other partitions of the model can resume from it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from gossamer.optimizers.contract import InnerOptimizer, Joined
from gossamer.optimizers.gpa import GPA


class NamedState(NamedTuple):
    """The state of an optimizer, independent of parameter groups; a `Joined` one has a state for each part."""

    parameters: dict[str, tuple[Any, dict[str, Any]]]
    """The state of each parameter, None before its first step, and the options of its group."""
    rest: dict[str, Any]
    """State that belongs to no parameter."""
    inner: dict[str, "NamedState"]
    """States of the nested optimizers, by their keys in the state."""

    def joined(self, other: "NamedState") -> "NamedState":
        """This state merged with that of an optimizer of the same kind for other parameters."""
        both = {key: self.inner[key].joined(other.inner[key]) for key in self.inner.keys() & other.inner.keys()}
        inner = {**self.inner, **other.inner, **both}
        return NamedState({**self.parameters, **other.parameters}, self.rest, inner)


def named_state(optimizer: InnerOptimizer, saved: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> NamedState:
    """A saved state of this optimizer, by names. Raises: KeyError, TypeError or ValueError for another optimizer's state."""
    within = inside(optimizer)
    inner = {key: named_state(one, saved[key], names) for key, one in within.items()}
    if isinstance(optimizer, Joined):
        return NamedState({}, {}, inner)
    parameters: dict[str, tuple[Any, dict[str, Any]]] = {}
    for group, of in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        options = {key: value for key, value in of.items() if key != "params"}
        for p, index in zip(group["params"], of["params"], strict=True):
            parameters[names[p]] = saved["state"].get(index), options
    return NamedState(
        parameters, {k: v for k, v in saved.items() if k not in ("state", "param_groups", *within)}, inner
    )


def for_optimizer(optimizer: InnerOptimizer, known: NamedState, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """A state dict for this optimizer, with the known state of its parameters. Raises: KeyError."""
    inner = {key: for_optimizer(one, known.inner[key], names) for key, one in inside(optimizer).items()}
    if isinstance(optimizer, Joined):
        return inner
    groups, state, count = list[dict[str, Any]](), dict[int, Any](), 0
    for group in optimizer.param_groups:
        saved = [known.parameters[names[p]] for p in group["params"]]
        groups.append({**saved[0][1], "params": [*range(count, count + len(saved))]})
        state |= {count + k: one for k, (one, _) in enumerate(saved) if one is not None}
        count += len(saved)
    return {"state": state, "param_groups": groups, **known.rest, **inner}


def inside(optimizer: InnerOptimizer) -> Mapping[str, InnerOptimizer]:
    """The nested optimizers, by their keys in the state."""
    if isinstance(optimizer, Joined):
        return optimizer.parts
    return {"base": optimizer.base} if isinstance(optimizer, GPA) else {}
