"""Whether a run has ended in its folder."""

from pathlib import Path

from gossamer.errors import ConfigError
from gossamer.record.folder import read_metrics
from gossamer.run.config.resolve import settings_in
from gossamer.run.config.resolved import RunSettings


def must_be_record_of(run: RunSettings, recorded: Path) -> None:
    """Raises ConfigError unless the recorded run, which is to be repeated, has the settings of this one."""
    before = settings_in(recorded)
    if before.digest != run.digest:
        now, then = run.decisive, before.decisive
        other = next((key for key in sorted(now.keys() | then.keys()) if now.get(key) != then.get(key)), None)
        what = "" if other is None else f": {other} is {then.get(other)!r:.60} there and {now.get(other)!r:.60} here"
        raise ConfigError(
            f"'{recorded}' is a run with other settings than the run file's{what}; replay it with its own "
            f"'{recorded / 'run.toml'}'"
        )


def is_finished(run: RunSettings, folder: Path) -> bool:
    """Whether a run with exactly these settings has been evaluated after its last round here.

    Raises: ConfigError when the folder holds a run with other settings.
    """
    if not (folder / "run.toml").exists():
        return False
    if not measures_alike(run, settings_in(folder)):
        raise ConfigError(
            f"'{folder}' holds a run with other settings than the file's; name another folder with --out, or remove it"
        )
    return is_evaluated(run, folder)


def is_of_other_settings(run: RunSettings, folder: Path) -> bool:
    """Whether a folder holds a run with other settings, or one whose settings this version does not read."""
    if not (folder / "run.toml").exists():
        return False
    try:
        return not measures_alike(run, settings_in(folder))
    except ConfigError:
        return True


def measures_alike(run: RunSettings, there: RunSettings) -> bool:
    """Whether the other run has the same results and validations as this one; extra losses of workers are allowed."""
    measured = [(one.eval_every, one.eval_batches, one.pace_s) for one in (there.loop, run.loop)]
    lacks = run.loop.eval_workers and not there.loop.eval_workers
    return there.digest == run.digest and measured[0] == measured[1] and not lacks


def is_evaluated(run: RunSettings, folder: Path) -> bool:
    """Whether the run in this folder, which has matching settings, has been evaluated after its last round."""
    return any(line["kind"] == "eval" and line["round"] == run.rounds - 1 for line in read_metrics(folder))
