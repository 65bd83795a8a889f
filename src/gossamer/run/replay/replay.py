"""Replays any recorded run by its kind: from its event record, or from its settings only."""

import shutil
from collections.abc import Callable
from pathlib import Path

from gossamer.errors import ConfigError
from gossamer.record.lineage import read_branches
from gossamer.run.bookkeeping.evaluate import Result
from gossamer.run.bookkeeping.finished import must_be_record_of
from gossamer.run.bookkeeping.inputs import must_have_inputs
from gossamer.run.config.resolve import settings_in
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.replay.asynchronous import replay_asynchronous
from gossamer.run.replay.elastic import replay_elastic
from gossamer.run.replay.served import replay_server
from gossamer.run.replay.stretches import stretches
from gossamer.run.simulated.simulate import engine_of


def replay(resolved: Callable[[bool], ResolvedRun], folder: Path, recorded: Path) -> Result:
    """Replays the run in the folder `recorded` and records it in `folder`.

    Args: `resolved` returns the run resolved for real processes, or for a simulation (False).
    Raises: ConfigError when the record is of another run or of none, or cannot be followed; DataError for one that contradicts
        itself.
    Cost: as a simulation of the run.
    """
    if read_branches(recorded) and not any(recorded.glob("outcomes-*.jsonl")):
        there, simulated = settings_in(recorded), not any(recorded.glob("metrics-[0-9]*.jsonl"))
        calm = not there.event_driven and not there.loop.elastic
        if calm and not simulated and (there.loop.adapt or there.loop.reduction == "all_reduce"):
            reason = "run.adapt follows its seconds" if there.loop.adapt else "run.reduction is 'all_reduce'"
            raise ConfigError(
                f"'{recorded}' is a real run whose numbers no seed repeats ({reason}); simulate its run file"
            )
        if calm or simulated:
            return _resumed_alike(resolved(False), folder, recorded)
    run = resolved(True)
    replays = {"rounds": replay_elastic, "server": replay_server}
    return replays.get(run.kind, replay_asynchronous)(run, folder, recorded)


def _resumed_alike(run: ResolvedRun, folder: Path, recorded: Path) -> Result:
    """Replays a run determined by its settings, with the recorded settings of each round.

    It is simulated up to each change and resumed there, like the original, which had a checkpoint at that round.
    """
    must_be_record_of(run, recorded)
    some, result = stretches(run, recorded, real=False), None
    for one, until in zip(some, [*(after.first for after in some[1:]), run.rounds], strict=True):
        if until > one.first:  # else the run was rewound past it, and no round has these settings
            engine = engine_of(one.run, folder, resume=result is not None, recorded=recorded)
            must_have_inputs(one.run, engine.task, recorded, "repeat")
            with engine.opened():
                while engine.finished < until:
                    engine.advance()
                if until < run.rounds:  # a run that is asked to stop saves at once, whether a checkpoint is due or not
                    engine.save()
                result = engine.result()
    if result is None:
        raise ConfigError(f"'{recorded}' has no round to compute again; resume it, or simulate its run file")
    shutil.copyfile(recorded / "branches.json", folder / "branches.json")
    return result
