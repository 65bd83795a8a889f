"""Stages that are laid anew between two rounds of a run, as fast ones should have more layers than slow ones.

The cuts are the same for all workers, as each stage exchanges with the same stage of its peers. A checkpoint after the round says
which they are, so that a run that is resumed goes on with them.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from gossamer.errors import CheckpointError, ConfigError, PeerError
from gossamer.models.llama import Llama
from gossamer.record.checkpoint import Lineage
from gossamer.record.packed import packed, unpacked
from gossamer.run.config.pipeline import cuts_of, suited_cuts, work_of_layers
from gossamer.run.config.run_file import RunConfig
from gossamer.run.worker.stages.checkpoints import (
    WHOLE,
    Partition,
    Store,
    joined_state,
    partition_of,
    state_of_part,
)
from gossamer.run.worker.task import Task
from gossamer.transport.processes.launch import agree
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.pipe import Pipe

__all__ = ["as_saved", "as_simulated", "exchanged", "laid_anew", "lays_anew", "measured_speeds", "with_cuts"]

log = logging.getLogger("gossamer")


def lays_anew(config: RunConfig, finished: int) -> bool:
    """Whether the stages may be laid anew after so many rounds."""
    every = config.pipeline.resplit_every
    return every > 0 and finished < config.rounds and config.due(every, finished)


def with_cuts(config: RunConfig, cuts: Sequence[int]) -> RunConfig:
    """The run with its stages cut before these layers. Raises ConfigError where they cannot be."""
    return replace(config, pipeline=replace(config.pipeline, cuts=tuple(cuts)))


def laid_anew(config: RunConfig, speeds: Sequence[float]) -> RunConfig:
    """The run with the cuts that suit stages of these speeds best; itself where they stay, or where others cannot be.

    Args: `speeds` are work per second, in any unit, as in `minimax`.
    """
    parts = config.pipeline, config.model, config.data
    cuts = suited_cuts(*parts, speeds)
    if cuts == cuts_of(*parts):
        return config
    try:
        return with_cuts(config, cuts)
    except ConfigError as error:
        log.warning(
            "the stages stay as they are: cut before the layers %s they would be faster, but %s", [*cuts], error
        )
        return config


def measured_speeds(config: RunConfig, said: Sequence[object]) -> list[float]:
    """Work per second of each stage, as `work_of_layers` counts it, of the slowest worker.

    Args: `said` is what each process says of itself under these cuts: its stage and the seconds that it computed; None for a
        whole worker.
    Raises: PeerError for anything else.

    >>> from gossamer.run.config.run_file import parse
    >>> two = parse({"pipeline": {"stages": 2, "cuts": [1]}, "data": {"accumulate": 2}})
    >>> work_of_layers(two.model, two.data)
    [200704.0, 200704.0, 200704.0, 233472.0]
    >>> measured_speeds(two, [[0, 1.0], [1, 6.0], [0, 2.0], [1, 3.0], None])
    [100352.0, 105813.33333333333]
    """
    pipeline, slowest = config.pipeline, [1e-9] * config.pipeline.stages
    for one in said:
        match one:
            case None:
                pass
            case [int(stage), float(seconds)] if 0 <= stage < pipeline.stages and math.isfinite(seconds):
                slowest[stage] = max(slowest[stage], seconds)
            case _:
                raise _foreign(one)
    work, cuts = work_of_layers(config.model, config.data), cuts_of(pipeline, config.model, config.data)
    pieces = [sum(work[a:b]) for a, b in pairwise([0, *cuts, len(work)])]
    return [sum(pieces[stage :: pipeline.stages]) / seconds for stage, seconds in enumerate(slowest)]


def exchanged(
    config: RunConfig, task: Task, pipe: Pipe, state: dict[str, Any], ways: tuple[Partition, Partition]
) -> dict[str, Any]:  # fmt: skip
    """What this process goes on with when the stages of its worker are laid anew: all of them tell each other their states.

    Args: `ways` are how the layers lay, and how they will lie.
    Raises: CheckpointError for what is no such state, PeerError when another process is gone.
    Cost: the state of this process to each other one, and in host memory that of a whole worker and a model.
    """
    before, after = ways
    own = torch.frombuffer(bytearray(packed(state)), dtype=torch.uint8)
    states = [unpacked(raw.numpy().tobytes()) for raw in pipe.gather_bytes(own)]
    model = cast(Llama, task.model())
    try:
        return state_of_part(config, model, after, pipe.part, joined_state(config, model, before, states))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the states of the {before.stages} stages do not fit each other ({error!r}); start all processes with the same run "
            "file and gossamer version"
        ) from None


def as_simulated(config: RunConfig, state: Mapping[str, Any]) -> RunConfig:
    """The run with the cuts of a worker's checkpoint; itself where that has none, or those of another number of stages."""
    cuts = sorted(state.get("boundaries", {}))
    return with_cuts(config, cuts) if len(cuts) == config.pipeline.pieces - 1 else config


def as_saved(config: RunConfig, folder: Path, member: Member, line: Lineage) -> RunConfig:
    """The run with the cuts of the newest round that all stages have saved; itself where there is none. All processes ask.

    Raises: PeerError when another process does not answer.
    """
    me, own = member.worker, partition_of(config, member.worker)
    held = None if own == WHOLE else Store(config, folder, own, member.part).held(me, line)
    said = agree(member, "the cuts of what all stages have saved", held, timeout_s=config.run.timeout_s)
    common = set.intersection(*({_cut_round(one) for one in some} for some in said if some is not None))
    found = max(common, default=None)
    return config if found is None else with_cuts(config, found[1])


def _cut_round(value: object) -> tuple[int, tuple[int, ...]]:
    """A round and cuts, as another process says them. Raises PeerError for anything else."""
    match value:
        case [int(round), [*cuts]] if all(isinstance(cut, int) for cut in cuts):
            return round, tuple(cut for cut in cuts if isinstance(cut, int))
    raise _foreign(value)


def _foreign(value: object) -> PeerError:
    return PeerError(f"a process says {value!r:.60} of its stage; install the same gossamer version everywhere")
