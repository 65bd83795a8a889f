"""Optimizers of torch's that do not import its compiler, which takes a second in each process, also where nothing is compiled."""

import functools
import inspect
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

__all__ = ["uncompiled"]

_GUARDED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
T = TypeVar("T", bound=Optimizer)


def uncompiled(kind: type[T]) -> type[T]:
    """The same optimizer, to the last bit, for steps that are not compiled.

    torch (2.13) imports its compiler in order to keep it out of these functions and around every step. What it wraps is called
    here instead, without gradients as torch does. Where torch wraps nothing, this is the optimizer itself.

    >>> issubclass(uncompiled(torch.optim.SGD), torch.optim.SGD)
    True
    """
    return cast(type[T], _uncompiled(kind))


@functools.cache
def _uncompiled(kind: type[Optimizer]) -> type[Optimizer]:
    own: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in _GUARDED}
    return type(kind.__name__, (kind,), {**own, "step": torch.no_grad()(inspect.unwrap(kind.step))})
