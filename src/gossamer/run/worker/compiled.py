"""What of an inner step is compiled."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.rounds.kernel import must_have_compiler
from gossamer.run.config.resolved import RunSettings
from gossamer.transport.processes.launch import one_device

__all__ = ["made_ready"]


def made_ready(forward: Callable[..., Tensor], config: RunSettings) -> Callable[..., Tensor]:
    """What computes losses, or the output of a stage given with its module, compiled where the run asks for it.

    Raises: ConfigError when there is no C++ compiler. Cost: ten seconds or more at the first step of a process.
    """
    on_gpu = config.inner.compile and one_device(config.run.device).type != "cpu"
    return _compiled(forward, on_gpu) if config.inner.compile else forward


@functools.cache
def _compiled(forward: Callable[..., Tensor], on_gpu: bool) -> Callable[..., Tensor]:
    must_have_compiler("inner.compile")
    from torch._dynamo import config as dynamo  # takes seconds to import
    from torch._inductor import config as inductor

    # Dropout shall drop what it drops without the compiler.
    options: dict[str, Any] = {"fallback_random": True}
    if on_gpu and hasattr(inductor, "deterministic"):  # not in torch 2.9
        # Each process would else time kernels that sum in different orders, and take the one that was faster just then.
        options["deterministic"] = True
    compiled = torch.compile(forward, dynamic=False, options=options)

    def within_limits(*args: Any) -> Tensor:
        # An experiment trains many shapes in one process, where the compiler would give up on a function at the ninth.
        with dynamo.patch(recompile_limit=1000):
            return compiled(*args)

    return within_limits
