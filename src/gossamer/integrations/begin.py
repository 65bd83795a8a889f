"""The common part of all frameworks: an Outer around a model that may have been loaded from a checkpoint."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gossamer.errors import CheckpointError, ConfigError
from gossamer.integrations.place import Place, gathered
from gossamer.library import Outer, OuterMethod, OuterOptions
from gossamer.library.dtensors import as_dtensor
from gossamer.record import checkpoint
from gossamer.record.fault import FaultKind
from gossamer.rules import Rule
from gossamer.transport.processes.backend import backend_of

M = TypeVar("M", bound=nn.Module)
log = logging.getLogger("gossamer")
_UNKNOWN = 1 << 60
"""More steps than any training has, for one of unknown length."""


def begin_outer(
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
    Raises: what Outer raises; CheckpointError if the state is missing or does not fit, or workers resume from different steps;
        ConfigError for a store, whose parameters and rounds would differ from those of the trainer's own checkpoint.
    """
    if (store := options.get("store")) is not None:
        raise ConfigError(
            f"the callback of a trainer got store={str(store)!r:.80}, and trainers number workers and load parameters by "
            "themselves; use gossamer.Outer or gossamer.outer_loop in a loop of your own, or give site=... and join=..."
        )
    if step and saved is None:
        raise CheckpointError(
            f"training continues after step {step} and there is no outer state of that step; resume from a checkpoint that was "
            "saved with Gossamer's callback, or load the weights alone and begin at step 0"
        )
    must_resume_alike(step, model, options.get("process_group"))
    if options.get("site") is None:  # else the processes that the framework counts are one worker, of which one saves
        let_every_worker_save(model)
    if saved is None:
        return Outer(model, rule, **options)
    initial = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    options = {**options, "rest": "own"}  # buffers such as batch-norm statistics were alike at the start only
    outer = Outer(model, rule, **options)  # which begins with the parameters of worker 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in initial:
                p.copy_(initial[name])
    outer.load_state_dict(saved)
    return outer


def must_have_rounds(outer: Outer[Any], total: float) -> None:
    """Checks at the start that the optimizer steps of the whole training make rounds, the same on all workers.

    Args: `total` are the steps of this worker, those before a resume included; not above 0 or infinite where it is unknown.
    Raises: ConfigError, with the outer loop closed, when no round would end, so that workers would train apart, or when workers
        take unequally many steps; logs a warning when the last steps are not exchanged. PeerError as `common_steps` does.
    """
    known = 0 < total < _UNKNOWN
    steps = int(total) if known else _UNKNOWN
    fewest = outer.common_steps(steps)
    most = _UNKNOWN - outer.common_steps(_UNKNOWN - steps)
    if fewest == _UNKNOWN:
        return
    timetable, wrong = outer._timetable, ""
    left = steps - timetable.begin(rounds := timetable.rounds_within(steps))
    if fewest < most:
        wrong = (
            f"workers take {fewest} to {'an unknown number of' if most == _UNKNOWN else most} optimizer steps, and those that "
            "take more would wait for the others in vain; set max_steps to the same for all"
        )
    elif outer.n > 1 and not rounds:
        wrong = (
            f"training takes {steps} optimizer steps and a round has {timetable.begin(1)}, so that none would end and the "
            f"{outer.n} workers would train apart; set local_steps to at most {steps}, or train for longer"
        )
    if wrong:
        outer.close()
        raise ConfigError(wrong)
    if left:
        log.warning(
            "the last %d of %d optimizer steps of worker %d will not be exchanged, as a round has %d; let the number of steps be "
            "a multiple of local_steps",
            left,
            steps,
            outer.worker,
            timetable.at(rounds).full_steps,
        )


def warn_of_few_checkpoints(outer: Outer[Any], kept: int, every: float, where: str) -> None:
    """Warns where a death between the saves of two workers may leave no step of which both have a checkpoint.

    One may be ahead of another by as many steps as a round has.

    Args:
        kept: how many of its checkpoints a worker keeps; not above 0 for all of them.
        every: the steps between two of them; 0 where that is not known.
        where: the setting for that number, such as "save_total_limit".
    """
    needed = 1 + max(1, math.ceil(outer.local_steps / every) if every else 1)
    if outer.n > 1 and 0 < kept < needed:
        log.warning(
            "%s is %d, and where a worker dies after another has saved, none may be left from which both can resume: set it to "
            "at least %d",
            where,
            kept,
            needed,
        )


def let_every_worker_save(model: nn.Module) -> None:
    """Makes `save_pretrained` of transformers write weights on every worker; by itself it does so on torch's rank 0 only."""
    for module in model.modules():
        if hasattr(module, "should_save_on_this_rank"):
            vars(module)["should_save_on_this_rank"] = _save_where_asked


def _save_where_asked(is_main_process: bool) -> bool:
    return is_main_process


def must_be_alone(processes: int, framework: str, options: OuterOptions | None) -> None:
    """Raises ConfigError when a framework counts several processes that are not one worker, as those of a site are.

    It averages their gradients in every step.

    Args: `options` are None for a framework that saves the outer state of one process alone, so that a worker has no more.
    """
    if processes != 1 and (options is None or options.get("site") is None):
        several = (
            f"; a worker of several processes needs the Trainer, Accelerate or a loop of your own, as {framework} saves what a "
            "callback has of its first process alone"
            if options is None
            else "; or start each worker of several processes as its own world, and give site=(0, 2) and join='HOST:PORT'"
        )
        raise ConfigError(
            f"{framework} counts {processes} processes or GPUs and averages their gradients in every step, so that they train as "
            "one and rounds change nothing; call gossamer.integrations.as_worker() before anything of the framework is made, "
            f"and ask the framework for one process on one device{several}"
        )


def must_count_the_site(processes: int, framework: str, options: OuterOptions) -> None:
    """Raises ConfigError where the processes of a site are one worker, and a framework counts fewer of them.

    Each would train a separate model, and exchange it with one process of each other site.
    """
    here = dist.get_world_size() if dist.is_initialized() else 1
    if options.get("site") is not None and processes < here:
        raise ConfigError(
            f"{framework} counts {processes} and this site has {here} processes, as after as_worker(), so that they would train "
            "apart; leave as_worker() out, or start one process for each site"
        )


def warn_of_copies(model: nn.Module, processes: int, framework: str, *, asked: bool) -> None:
    """Warns where each of several processes of a worker has the whole model, and so exchanges it.

    Args: `asked` is whether the framework was asked to shard it. Accelerate does not on a CPU, without a warning.
    """
    if processes == 1 or any(as_dtensor(p) is not None for p in model.parameters()):
        return
    silently = "although it was asked for FSDP, which Accelerate ignores on a CPU without a word; " if asked else ""
    log.warning(
        "%s holds the whole model in each of the %d processes of this worker, %sso that each of them exchanges all of it; let "
        "FSDP2 shard it on GPUs, or shard it with fully_shard in a loop of your own",
        framework,
        processes,
        silently,
    )


def save_outer(outer: Outer[Any], folder: Path, options: OuterOptions) -> None:
    """Saves the outer state of this process next to a checkpoint of the framework; `load_outer` reads it."""
    store = _own_folder(folder, options)
    checkpoint.save(store, outer.rounds, outer.worker, outer.state_dict(), digest=_digest(outer.n))
    # An earlier training in this folder may have been after more rounds at this step, as with fewer local steps.
    checkpoint.rewind(store, outer.rounds, outer.worker)


def load_outer(folder: Path, options: OuterOptions) -> Any:
    """The outer state of this process. Raises CheckpointError if there is none, or it is damaged."""
    store, place = _own_folder(folder, options), place_in(options)
    digest = _digest(place.workers)
    faults = checkpoint.generation_faults(store, place.worker, digest)
    newest = max(faults, default=0)
    fault = faults.get(newest)
    if not faults or (fault is not None and fault.kind == FaultKind.FOREIGN):
        raise CheckpointError(
            f"'{store}' has no outer state of worker {place.worker} of {place.workers}; resume from a checkpoint of this worker "
            "that was saved with Gossamer, by as many processes, and name it to the framework if it is elsewhere"
        )
    if fault is not None:  # an older one there would not fit the new weights
        raise CheckpointError(
            f"'{store}' has an outer state of worker {place.worker} that is not whole: {fault.why}; resume all workers from an "
            "older checkpoint"
        )
    return checkpoint.load(store, newest, place.worker, digest)


def _own_folder(folder: Path, options: OuterOptions) -> Path:
    """The folder of this process, which is separate where several processes are one worker."""
    several = options.get("site") is not None and dist.is_initialized() and dist.get_world_size() > 1
    return folder / f"process-{dist.get_rank()}" if several else folder


def _digest(workers: int) -> str:
    return f"outer state, {workers} workers"


def must_resume_alike(step: int, model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Checks that all workers are at the same optimizer step.

    Raises: CheckpointError with the step of each worker, PeerError when one of them has ended.
    """
    if not dist.is_initialized():
        return
    device = next(model.parameters()).device if backend_of(group) == "nccl" else torch.device("cpu")
    steps = gathered(step, device, group)
    if len(set(steps)) > 1:
        each = ", ".join(f"worker {worker} from step {one}" for worker, one in enumerate(steps))
        raise CheckpointError(
            f"workers resume from different steps: {each}; name a checkpoint that all of them have, or start all of "
            "them from the beginning"
        )


def place_in(options: OuterOptions) -> Place:
    """The worker that this process is, or belongs to: a site, or one of a process group; the only one without either."""
    if (site := options.get("site")) is not None:
        return Place(*site)
    group = options.get("process_group")
    return Place(dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else Place(0, 1)
