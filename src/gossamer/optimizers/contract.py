"""The interface of inner optimizers, and several optimizers joined into one."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer


class InnerOptimizer(Protocol):
    """The interface of an optimizer that a worker needs; everything in `torch.optim` has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live groups of parameters: writing `group["lr"]` sets the learning rate."""
        ...

    def step(self) -> Any:
        """Takes one step along the gradients."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or sets them to zero where they are."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to continue bit for bit."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state. Raises ValueError when it does not fit."""
        ...


class PerParameter(Optimizer):
    """An optimizer that updates each parameter separately; one without a gradient is skipped, and its step count stays."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Takes one step along the gradients; returns the loss if a closure computes it."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group)
        return loss

    def _update(self, theta: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Updates a parameter and its state."""
        raise NotImplementedError


class Joined:
    """Optimizers over disjoint parameters that step as one."""

    def __init__(self, **parts: Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, in order."""
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        """Steps every part."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of every part, or sets them to zero where they are."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The states of the parts by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the states of all parts. Raises ValueError when they are of other parts."""
        if set(state_dict) != set(self.parts):
            raise ValueError(f"the state is of the optimizers {sorted(state_dict)} and not of {sorted(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """The loss of the closure given to `step`, evaluated with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
