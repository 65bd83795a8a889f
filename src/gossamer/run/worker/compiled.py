"""What of an inner step is compiled."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.rounds.kernel import must_have_compiler
from gossamer.run.config.resolved import RunSettings


def made_ready(forward: Callable[..., Tensor], config: RunSettings) -> Callable[..., Tensor]:
    """What computes losses, or the output of a stage given with its module, compiled where the run asks for it.

    It is compiled and run in `gossamer.run.worker.numerics.deterministic`, without which the gradient of an embedding would be a
    sum in the order in which threads come.

    Raises: ConfigError when there is no C++ compiler. Cost: ten seconds or more at the first step of a process.
    """
    return _compiled(forward) if config.inner.compile else forward


@functools.cache
def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    must_have_compiler("inner.compile")
    from torch._dynamo import config as dynamo  # takes seconds to import

    # Dropout shall drop what it drops without the compiler.
    compiled = torch.compile(forward, dynamic=False, options={"fallback_random": True})

    def within_limits(*args: Any) -> Tensor:
        # An experiment trains many shapes in one process, where the compiler would give up on a function at the ninth.
        with dynamo.patch(recompile_limit=1000):
            return compiled(*args)

    return within_limits
