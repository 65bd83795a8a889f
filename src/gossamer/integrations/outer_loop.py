"""The outer loop around an optimizer, so that the body of a training loop stays as it is."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from gossamer.errors import ConfigError
from gossamer.integrations.environment import rule_and_options
from gossamer.library.outer import Outer
from gossamer.library.parts import OuterMethod, OuterOptions
from gossamer.rules import Rule

M = TypeVar("M", bound=nn.Module)


@contextlib.contextmanager
def outer_loop(
    model: M, optimizer: Optimizer, rule: str | Rule | OuterMethod | None = None, **options: Unpack[OuterOptions]
) -> Iterator[Outer[M]]:
    """An `Outer` whose `step` is called after every `optimizer.step()`, so that the body of the loop stays as it is.

        with gossamer.outer_loop(model, optimizer, "diloco", local_steps=30) as outer:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()

    When the block ends it finishes the exchanges in flight and closes; when it ends by an error it only closes.

    Args:
        optimizer: one of torch's that steps once a step, and has parameters of this model.
        rule: what `Outer` takes; None takes what GOSSAMER_OUTER asks for, and the options with it
            (`gossamer.integrations.environment`).
        options: as of `Outer`.
    Raises: ConfigError for what is no optimizer of this model, and what `Outer` raises.
    Cost: that of `Outer`.

    A `GradScaler` that skips a step skips its hook too, and workers would count differently: use `Outer` with it.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with outer_loop(model, optimizer, "gasloc", local_steps=1) as outer:
    ...     model(torch.ones(2)).sum().backward()
    ...     optimizer.step()
    ...     outer.rounds
    1
    """
    rule, options = rule_and_options(rule, options)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"outer_loop got a {type(optimizer).__name__} as optimizer, which cannot be followed; give a torch.optim.Optimizer, "
            "or make Outer and call its step() after each step of yours"
        )
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if trained.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"outer_loop got a {type(optimizer).__name__} that has none of the model's {len(trained)} trainable parameters; make "
            "it with model.parameters() of this model"
        )
    with Outer(model, rule, **options) as outer:
        outer.lr = lambda: float(optimizer.param_groups[0]["lr"])
        hook = optimizer.register_step_post_hook(lambda *_: _count(outer))
        try:
            yield outer
        finally:
            hook.remove()
        outer.finish()


def _count(outer: Outer[Any]) -> None:
    """Counts a step; what `Outer.step` returns would be taken for that of the hook."""
    outer.step()
