"""Compilation of inner steps."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.rounds.kernel import must_have_compiler
from gossamer.run.config.resolved import RunSettings


def made_ready(forward: Callable[..., Tensor], run: RunSettings) -> Callable[..., Tensor]:
    """The forward function, or that of a stage given with its module, compiled if the run asks for it.

    It is compiled and run in `gossamer.run.worker.numerics.deterministic`, without which the gradient of an embedding
    would be summed in nondeterministic order.

    Raises: ConfigError when there is no C++ compiler. Cost: ten seconds or more at the first step of a process.
    """
    return _compiled(forward) if run.inner.compile else forward


@functools.cache
def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    must_have_compiler("inner.compile")
    from torch._dynamo import config as dynamo  # takes seconds to import

    # Dropout must draw the same as without the compiler.
    compiled = torch.compile(forward, dynamic=False, options={"fallback_random": True})

    def with_recompile_limit(*args: Any) -> Tensor:
        # An experiment trains many shapes in one process, and the compiler would stop recompiling a function at the
        # ninth.
        with dynamo.patch(recompile_limit=1000):
            return compiled(*args)

    return with_recompile_limit
