"""How a run that is resumed goes on: with which settings, which may differ from those it had, and from which of its rounds.

`--resume RUN --set KEY=VALUE` branches a run. What changed, at which round and from which value is kept in `branches.json` of the
run folder. It is written before `run.toml` gets the new settings, so that a kill between the two loses neither.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gossamer.errors import ConfigError
from gossamer.record import checkpoint
from gossamer.record.branches import Branch, described, read_branches, write_branches
from gossamer.record.checkpoint import Lineage
from gossamer.run.config.resolve import CHANGEABLE, differences, settings_in
from gossamer.run.config.resolved import RunSettings

__all__ = ["History", "Resume", "history", "lineage", "may_restart", "must_go_on"]

log = logging.getLogger("gossamer")

Resume = bool | Literal["auto"]
"""Whether a run goes on from its checkpoints; "auto" starts it where there are none."""


class History(NamedTuple):
    """The settings that the run in a folder has had before those it is resumed with."""

    config: RunSettings
    branches: list[Branch]
    changes: dict[str, tuple[Any, Any]]
    """What the settings of the folder are changed to now."""
    digest: str
    """Of the settings of the folder."""

    @property
    def lineage(self) -> Lineage:
        """Whose checkpoints the run may go on from."""
        now = [(self.digest, 1 << 31)] if self.changes else []
        return Lineage(self.config.digest, (*_earlier(self.branches), *now))

    def go_on(self, folder: Path, round: int) -> Lineage:
        """Records that the run goes on from this round, and returns whose checkpoints belong to it from now on."""
        kept: list[Branch] = [{**branch, "round": min(branch["round"], round)} for branch in self.branches]
        changes = {key: list(values) for key, values in self.changes.items()}
        known = kept and (kept[-1]["digest"], kept[-1]["changes"]) == (self.digest, changes)
        if changes and not known:  # another worker may have written it into the same folder
            kept.append({"round": round, "digest": self.digest, "changes": changes})
            log.warning("settings change %s", described(kept[-1]))
        if kept != self.branches:
            write_branches(folder, kept)
        return Lineage(self.config.digest, _earlier(kept))

    def newest(
        self, folder: Path, owned: Sequence[Sequence[int]], faults: Callable[[int], Sequence[str | None]], *, auto: bool,
        owners: Sequence[int], speaks: bool = True, store: Path | None = None,
    ) -> int:  # fmt: skip
        """The round to go on from: the newest sound one of which all have a checkpoint; 0 to start.

        Args:
            owned: rounds of which each has a checkpoint.
            faults: the fault of each checkpoint of a round.
            auto: whether the run may start where there is none.
            owners: those whose checkpoints should be in this folder.
            speaks: whether this process says which rounds are skipped.
            store: where these checkpoints are, if not in those of the folder.
        Raises: CheckpointError when there is none, ConfigError when the run would end before it.
        """
        store = store or folder / "checkpoints"
        newest, skipped = checkpoint.newest_sound(checkpoint.common(owned), faults)
        for round, why in skipped.items():
            if speaks:
                log.warning("round %d is skipped: %s", round, why)
        if newest is None and not (auto and not skipped and may_restart(self.config, owned)):
            raise checkpoint.nothing_to_resume(store, owners, owned, skipped)
        _must_not_be_over(self.config, newest or 0)
        return newest or 0


def must_go_on(config: RunSettings, folder: Path, owned: Sequence[Sequence[int]], newest: int, *, auto: bool) -> None:
    """Raises CheckpointError where an elastic run has no round to go on from, ConfigError where it would end before that.

    Args: as of `History.newest`; `newest` is 0 where nobody has a checkpoint.
    """
    if not newest and not auto:
        raise checkpoint.nothing_to_resume(folder / "checkpoints", range(len(owned)), owned)
    _must_not_be_over(config, newest)


def _must_not_be_over(config: RunSettings, newest: int) -> None:
    if newest > config.rounds:
        raise ConfigError(
            f"run.steps is {config.run.steps}, which ends the run after round {config.rounds}, but it is at round {newest} "
            f"already; set at least {newest * config.full_steps}"
        )


def history(config: RunSettings, folder: Path) -> History:
    """The history of the run in a folder, which shall go on with these settings.

    Raises: ConfigError, naming the keys that may change, when others differ; DataError for a spoilt record of branches.
    """
    before = settings_in(folder) if (folder / "run.toml").exists() else config
    changes = differences(before, config)
    for key, (old, new) in changes.items():
        if not any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE):
            was, now = ("not set" if value is None else f"{value!r:.60}" for value in (old, new))
            raise ConfigError(
                f"{key} is {was} in '{folder}' and {now} now, but a resumed run keeps it; may change: "
                f"{', '.join(CHANGEABLE)}; start again with another --out for anything else"
            )
    return History(config, read_branches(folder), changes, before.digest)


def lineage(config: RunSettings, folder: Path) -> Lineage:
    """Whose checkpoints belong to the run in a folder, which has these settings."""
    return Lineage(config.digest, _earlier(read_branches(folder)))


def may_restart(config: RunSettings, owned: Sequence[Sequence[int]]) -> bool:
    """Whether nothing is lost by a start from the beginning: nobody has a checkpoint, or some have the first and others none."""
    first = next(r for r in range(1, config.rounds + 1) if config.due(config.run.checkpoint_every, r))
    return all(first in rounds for rounds in owned if rounds)


def _earlier(branches: Sequence[Branch]) -> tuple[tuple[str, int], ...]:
    """The digests that a run had, each with the last round that counts: it may have gone back behind a branch since."""
    rounds = [branch["round"] for branch in branches]
    return tuple((branch["digest"], min(rounds[k:])) for k, branch in enumerate(branches))
