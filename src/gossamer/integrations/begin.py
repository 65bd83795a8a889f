"""What all frameworks have in common: an Outer around a model that may have been loaded from a checkpoint."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gossamer.errors import CheckpointError, ConfigError, PeerError, first_line
from gossamer.integrations.place import Place
from gossamer.library import Outer, OuterMethod, OuterOptions
from gossamer.rules import Rule
from gossamer.transport.processes.backend import backend_of

__all__ = ["begin", "let_every_worker_save", "must_be_alone", "must_resume_alike", "place_in"]


M = TypeVar("M", bound=nn.Module)


def begin(
    model: M,
    rule: str | Rule | OuterMethod,
    options: OuterOptions,
    *,
    step: int,
    saved: Mapping[str, Any] | None,
) -> Outer[M]:
    """Makes the Outer of a model, which continues from a saved state if there is one.

    Args:
        step: optimizer steps that were taken; all workers must resume from the same.
        saved: of `Outer.state_dict`; the model's parameters were loaded before.
    Raises: what Outer raises; CheckpointError if the state is missing or does not fit, or workers resume from different steps.
    """
    if step and saved is None:
        raise CheckpointError(
            f"training continues after step {step} and there is no outer state of that step; resume from a checkpoint that was "
            "saved with Gossamer's callback, or load the weights alone and begin at step 0"
        )
    must_resume_alike(step, model, options.get("process_group"))
    let_every_worker_save(model)
    if saved is None:
        return Outer(model, rule, **options)
    own = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    options = {**options, "rest": "own"}  # buffers such as batch-norm statistics were alike at the start only
    outer = Outer(model, rule, **options)  # which begins with the parameters of worker 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in own:
                p.copy_(own[name])
    outer.load_state_dict(saved)
    return outer


def let_every_worker_save(model: nn.Module) -> None:
    """Makes `save_pretrained` of transformers write weights on every worker; by itself it does so on torch's rank 0 only."""
    for module in model.modules():
        if hasattr(module, "should_save_on_this_rank"):
            vars(module)["should_save_on_this_rank"] = _as_asked


def _as_asked(is_main_process: bool) -> bool:
    return is_main_process


def must_be_alone(processes: int, framework: str) -> None:
    """Raises ConfigError when a framework counts several processes, whose gradients it averages in every step."""
    if processes != 1:
        raise ConfigError(
            f"{framework} counts {processes} processes or GPUs and averages their gradients in every step, so that they train as "
            "one and rounds change nothing; call gossamer.integrations.as_worker() before anything of the framework is made, "
            "and ask the framework for one process on one device"
        )


def must_resume_alike(step: int, model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Checks that all workers are at the same optimizer step.

    Raises: CheckpointError with the step of each worker, PeerError when one of them has ended.
    """
    if not dist.is_initialized():
        return
    device = next(model.parameters()).device if backend_of(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor([step], device=device)
    steps = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(steps, mine, group=group)
    except RuntimeError as error:
        raise PeerError(
            f"another worker ended before training began ({first_line(error)}); look at the logs of the others"
        ) from error
    found = [int(one) for one in steps]
    if len(set(found)) > 1:
        theirs = ", ".join(f"worker {worker} from step {one}" for worker, one in enumerate(found))
        raise CheckpointError(
            f"workers resume from different steps: {theirs}; name a checkpoint that all of them have, or start all anew"
        )


def place_in(group: dist.ProcessGroup | None) -> Place:
    """Which worker of a process group this process is; the only one without a group."""
    return Place(dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else Place(0, 1)
