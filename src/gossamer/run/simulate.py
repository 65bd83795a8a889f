"""Simulating a run: all workers in one process, in rounds or over virtual time."""

import shutil
from pathlib import Path

from gossamer.errors import CheckpointError, ConfigError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.progress import Progress, say
from gossamer.run.config import RunConfig
from gossamer.run.evaluate import Result
from gossamer.run.finished import is_finished
from gossamer.run.history import Resume
from gossamer.run.synchronous import simulate_rounds
from gossamer.run.virtual import simulate_events

__all__ = ["simulate"]


def simulate(
    config: RunConfig,
    folder: Path,
    *,
    resume: Resume = False,
    progress: Progress | None = None,
    until: int | None = None,
) -> Result:
    """Trains all workers of a run and records it in `folder`.

    A run in rounds computes bit for bit what `gossamer train` computes on real processes, unless local steps adapt
    (`run.adapt`): those follow the clock there, and here the seconds of the declared network. An asynchronous run takes place
    in virtual time.

    Args:
        resume: continue from the newest sound checkpoint in the folder, with settings of which some may have changed; "auto"
            starts where there is none. An asynchronous run is only started, with "auto" again from the beginning.
        until: stop after this many rounds, as if killed there; only in rounds.
    Raises: ConfigError, PairingError, DataError, CheckpointError; TrainingError when a loss is not finite.
    Cost: parameters, gradients, inner and outer state of every worker, and one message per worker in flight.
    """
    if config.event_driven and (resume is True or until is not None):
        raise ConfigError(
            f"cannot {'resume' if resume else 'stop and resume'} '{folder}': an asynchronous run keeps no record of what was in "
            "flight when it stopped; start again with another --out"
        )
    kept = config.record.keep_checkpoints
    emptied = not kept and not (folder / "checkpoints").exists()
    if resume and (config.event_driven or emptied) and is_finished(config, folder):
        say(checkpoint.ended(folder, config.rounds, kept=kept))
        last = [line for line in read_metrics(folder) if line["kind"] == "eval"][-1]
        return Result(last["loss"], last["tokens"], 0.0, {})
    if config.event_driven:
        result = simulate_events(config, folder, progress=progress, again=bool(resume))
    else:
        result = simulate_rounds(config, folder, resume=resume, progress=progress, until=until)
    if until is None and not kept:
        _forget_checkpoints(folder / "checkpoints")
    return result


def _forget_checkpoints(folder: Path) -> None:
    """Removes the checkpoints of a run that has ended. Raises CheckpointError when the disk refuses."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in '{folder}' could not be removed ({error.strerror or error}), as record.keep_checkpoints = false "
            "asks for; remove them by hand: the run has ended"
        ) from error
