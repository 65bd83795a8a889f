"""What of an inner step is compiled, and whether its products are fast in bf16."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.rounds.kernel import must_have_compiler
from gossamer.run.config.resolved import RunSettings

__all__ = ["has_bf16", "made_ready", "warn_of_slow_bf16"]

log = logging.getLogger("gossamer")


def made_ready(forward: Callable[..., Tensor], config: RunSettings) -> Callable[..., Tensor]:
    """What computes losses, or the output of a stage given with its module, compiled where the run asks for it.

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


def has_bf16() -> bool:
    """Whether torch has fast products in bf16 for this processor, as those with AVX-512 do."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # torch asks this too, and has no public name for it


def warn_of_slow_bf16(config: RunSettings, device: torch.device) -> None:
    """Warns once in a process where autocast makes steps slower instead of faster."""
    if config.inner.autocast == "bf16" and device.type == "cpu" and not has_bf16():
        _warn()


@functools.cache  # an experiment of many runs says it once
def _warn() -> None:
    log.warning(
        "inner.autocast is 'bf16' and this processor has no products in bf16, which torch then computes many times slower than "
        "in fp32; remove inner.autocast, or train where the processor has AVX-512 or on a GPU"
    )
