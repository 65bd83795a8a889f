"""How a run that is resumed goes on: with which settings, which may differ from those it had, and from which of its rounds.

`--resume RUN --set KEY=VALUE` branches a run. What changed, at which round and from which value is kept in `branches.json` of the
run folder. It is written before `run.toml` gets the new settings, so that a kill between the two loses neither.
"""

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gossamer.errors import ConfigError
from gossamer.optimizers.inner import lr_scale
from gossamer.record.lineage import Branch, Lineage, described, read_branches, write_branches
from gossamer.run.config.resolve import CHANGEABLE, differences, may_change, settings_in
from gossamer.run.config.resolved import RunSettings

log = logging.getLogger("gossamer")

Resume = bool | Literal["auto"]
"""Whether a run goes on from its checkpoints; "auto" starts it where there are none."""


class History(NamedTuple):
    """The settings that the run in a folder has had before those it is resumed with."""

    config: RunSettings
    before: RunSettings
    """Those of the folder."""
    branches: list[Branch]
    changes: dict[str, tuple[Any, Any]]
    """What the settings of the folder are changed to now."""
    may_start: bool = False
    """Whether the run may start again where it has no checkpoint."""

    @property
    def lineage(self) -> Lineage:
        """Whose checkpoints the run may go on from."""
        now = [(self.before.digest, 1 << 31)] if self.changes else []
        return self.config.line._replace(earlier=(*_earlier(self.branches), *now))

    def go_on(self, folder: Path, round: int) -> Lineage:
        """Records that the run goes on from this round, and returns whose checkpoints belong to it from now on."""
        kept: list[Branch] = [{**branch, "round": min(branch["round"], round)} for branch in self.branches]
        changes = {key: list(values) for key, values in self.changes.items()}
        known = kept and (kept[-1]["digest"], kept[-1]["changes"]) == (self.before.digest, changes)
        if changes and not known:  # another worker may have written it into the same folder
            kept.append({"round": round, "digest": self.before.digest, "changes": changes})
            log.warning("settings change %s%s", described(kept[-1]), self._jump(round))
        if kept != self.branches:
            write_branches(folder, kept)
        return self.config.line._replace(earlier=_earlier(kept))

    def _jump(self, round: int) -> str:
        """What the changes make of the learning rate of the next inner step, in words; empty where they leave it as it is."""
        step = self.config.timetable.begin(round)
        was, now = (one.inner.lr * lr_scale(one.inner, step, one.run.steps) for one in (self.before, self.config))
        if math.isclose(was, now):
            return ""
        why = (
            f", as inner.schedule '{self.config.inner.schedule}' ends with the run"
            if "run.steps" in self.changes
            else ""
        )
        return f"; the learning rate goes on at {now:.3g}, where it would have been {was:.3g}{why}"


def resumed(config: RunSettings, folder: Path, resume: Resume) -> History | None:
    """The history of a run that is resumed; None for one that starts. Raises: as `history`."""
    return history(config, folder)._replace(may_start=resume == "auto") if resume else None


def history(config: RunSettings, folder: Path) -> History:
    """The history of the run in a folder, which shall go on with these settings.

    Raises: ConfigError, naming the keys that may change, when others differ; DataError for a spoilt record of branches.
    """
    # A link that leads nowhere is a run file that cannot be read, and not none.
    before = settings_in(folder) if os.path.lexists(folder / "run.toml") else config
    changes = differences(before, config)
    for key, (old, new) in changes.items():
        if not may_change(key):
            was, now = ("not set" if value is None else f"{value!r:.60}" for value in (old, new))
            raise ConfigError(
                f"{key} is {was} in '{folder}' and {now} now, but a resumed run keeps it; may change: "
                f"{', '.join(CHANGEABLE)}; start again with another --out for anything else"
            )
    return History(config, before, read_branches(folder), changes)


def lineage(config: RunSettings, folder: Path) -> Lineage:
    """Whose checkpoints belong to the run in a folder, which has these settings."""
    return config.line._replace(earlier=_earlier(read_branches(folder)))


def _earlier(branches: Sequence[Branch]) -> tuple[tuple[str, int], ...]:
    """The digests that a run had, each with the last round that counts: it may have gone back behind a branch since."""
    rounds = [branch["round"] for branch in branches]
    return tuple((branch["digest"], min(rounds[k:])) for k, branch in enumerate(branches))
