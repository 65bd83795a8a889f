"""Trunks: runs that differ only in their length, with a final learning-rate decay, share their training up to the decay."""

import dataclasses
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gossamer.record import checkpoint
from gossamer.run.config.document import load_run
from gossamer.run.config.run_file import RunConfig, digest, has_shape, parse
from gossamer.run.config.user_parts import own_parts
from gossamer.run.simulated.simulate import simulate_until_asked
from gossamer.run.simulated.simulation import Simulation

_ROUNDS = 1 << 20
"""Nominal rounds of a trunk, of which only the shared ones are trained."""


def shared_trunks(runs: Sequence[RunConfig]) -> list[str]:
    """The name of the trunk that each run may begin with; empty for a run without a shared start.

    A run with `inner.schedule = "wsd"` has a constant learning rate from its warm-up to the decay at its end. So what is before
    the decay is the same in a longer run. Asynchronous runs have no rounds, and are excluded.
    """
    names = [digest(_shared_run(run)) if _plateau(run) else "" for run in runs]
    many = Counter(names)
    return [name if many[name] > 1 else "" for name in names]


def anneal(config: RunConfig, folder: Path, trunk: Path, *, asked: Callable[[], bool] = lambda: False) -> Simulation:
    """Trains a run as a branch of its trunk, which is trained up to the last round before the decay and then copied.

    Bitwise equal to `simulate(config, folder)`. Shorter branches come first: one that leaves a trunk before the trunk's
    current round is trained whole.

    Args:
        trunk: its folder, created by the first branch.
        asked: as in `simulate_until_asked`.
    Raises: as `simulate_until_asked`.
    """
    at, wanted = max(checkpoint.rounds(trunk / "checkpoints", 0), default=0), _plateau(config)
    parts = own_parts(config)
    if at > wanted:
        return simulate_until_asked(config, parts, folder, asked=asked)
    if at < wanted:
        if not at:
            shutil.rmtree(trunk, ignore_errors=True)
        simulate_until_asked(_shared_run(config), parts, trunk, resume=at > 0, until=wanted, asked=asked)
    scratch = trunk.with_name("branch")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(trunk, scratch)
    scratch.rename(folder)
    return simulate_until_asked(config, parts, folder, resume=True, asked=asked)


def stands_at_its_trunk(config: RunConfig, folder: Path) -> bool:
    """Whether a run that was stopped at its very beginning left only the copy of its trunk here."""
    return (folder / "run.toml").exists() and digest(parse(load_run(folder))) == digest(_shared_run(config))


def _plateau(config: RunConfig) -> int:
    """Whole rounds before the learning rate decays; 0 for a run without a trunk."""
    if config.inner.schedule != "wsd" or config.event_driven or has_shape(config):
        return 0
    return config.length.timetable.rounds_within(
        math.floor((1 - config.inner.decay_fraction) * config.run.steps + 1e-9)
    )


def _shared_run(config: RunConfig) -> RunConfig:
    """The run without its end, with a checkpoint where this branch leaves it."""
    steps, leaves = config.length.timetable.begin(_ROUNDS), config.length.timetable.begin(max(1, _plateau(config)))
    batches = config.run.eval_batches if config.run.eval_every else 1  # no need to validate where it stops
    return dataclasses.replace(
        config,
        name="trunk",
        inner=dataclasses.replace(config.inner, schedule="constant"),
        run=dataclasses.replace(config.run, steps=steps, checkpoint_every=leaves, eval_batches=batches),
        record=dataclasses.replace(config.record, keep_checkpoints=True),
    )
