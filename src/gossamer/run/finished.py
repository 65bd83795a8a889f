"""Whether a run has ended in its folder."""

from pathlib import Path

from gossamer.errors import ConfigError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.run.assemble import stores_of
from gossamer.run.config import RunConfig, digest, parse
from gossamer.run.document import load, load_run
from gossamer.run.history import lineage

__all__ = ["is_finished", "must_be_record_of", "rounds_in_common"]


def rounds_in_common(config: RunConfig, folder: Path) -> int | None:
    """The newest round of this run that all owners have checkpoints of here; None without one."""
    line = lineage(config, folder)
    owned = [one for store in stores_of(config, folder) for one in checkpoint.owned(store, config.owners, line)]
    return checkpoint.newest_common(owned)


def must_be_record_of(config: RunConfig, recorded: Path) -> None:
    """Raises ConfigError unless the run in this folder, which shall be computed again, has the settings of this one."""
    before = parse(load_run(recorded))
    if digest(before) != digest(config):
        raise ConfigError(
            f"'{recorded}' is a run with digest {digest(before)} and the run file has {digest(config)}; replay it with its own "
            "run.toml"
        )


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Whether this very run has been evaluated after its last round here.

    Raises: ConfigError when the folder holds a run with other settings.
    """
    if not (folder / "run.toml").exists():
        return False
    there = parse(load(folder / "run.toml"))
    measured = [(run.eval_every, run.eval_batches, run.eval_js, run.pace_s) for run in (there.run, config.run)]
    lacks = config.run.eval_workers and not there.run.eval_workers  # losses of workers too many are no fault
    if digest(there) != digest(config) or measured[0] != measured[1] or lacks:
        raise ConfigError(
            f"'{folder}' holds a run with other settings than the file's; name another folder with --out, or remove it"
        )
    return any(line["kind"] == "eval" and line["round"] == config.rounds - 1 for line in read_metrics(folder))
