"""Resumption of a run: its settings, which may have changed, and the round it resumes from.

`--resume RUN --set KEY=VALUE` branches a run. The changes, with round and old value, are kept in `branches.json` of the
run folder, written before `run.toml` gets the new settings, so that a kill between the two loses neither.
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
from gossamer.settings import over_time

log = logging.getLogger("gossamer")

Resume = bool | Literal["auto"]
"""Whether a run resumes from its checkpoints; "auto" starts it if there are none."""

_FIRST = ("rule", "server", "pair", "workers", "topology", "model")
"""What another run is named by: its differences are reported before those of the settings that follow from it."""


class History(NamedTuple):
    """The earlier settings of the run in a folder, and their changes on resume."""

    run: RunSettings
    before: RunSettings
    """The folder's settings."""
    branches: list[Branch]
    changes: dict[str, tuple[Any, Any]]
    """The changes to the folder's settings."""
    may_start: bool = False
    """Whether the run may restart if it has no checkpoint."""

    @property
    def lineage(self) -> Lineage:
        """The lineage of checkpoints from which the run may resume."""
        now = [(self.before.digest, 1 << 31)] if self.changes else []
        return self.run.lineage._replace(earlier=(*_earlier(self.branches), *now))

    def go_on(self, folder: Path, round: int) -> Lineage:
        """Records that the run resumes from this round, and returns the lineage of its checkpoints from now on."""
        kept: list[Branch] = [{**branch, "round": min(branch["round"], round)} for branch in self.branches]
        changes = {key: list(values) for key, values in self.changes.items()}
        known = kept and (kept[-1]["digest"], kept[-1]["changes"]) == (self.before.digest, changes)
        if changes and not known:  # another worker may have written it into the same folder
            kept.append({"round": round, "digest": self.before.digest, "changes": changes})
            log.warning("settings change %s%s", described(kept[-1]), self._lr_change(round) + self._shape_change(round))
        if kept != self.branches:
            write_branches(folder, kept)
        return self.run.lineage._replace(earlier=_earlier(kept))

    def _lr_change(self, round: int) -> str:
        """The change of the learning rate of the next inner step, in words; empty if unchanged."""
        step = self.run.timetable.begin(round)
        was, now = (one.inner.lr * lr_scale(one.inner, step, one.loop.steps) for one in (self.before, self.run))
        if math.isclose(was, now):
            return ""
        stretched = "run.steps" in self.changes and not any(key.startswith("inner.") for key in self.changes)
        why = f", as inner.schedule '{self.run.inner.schedule}' ends with the run" if stretched else ""
        return f"; the learning rate continues at {now:.3g}, where it would have been {was:.3g}{why}"

    def _shape_change(self, round: int) -> str:
        """The change of the place in each cosine of the method that another number of steps moves, in words; empty if none."""
        step = self.run.timetable.begin(round)
        was, now = (min(1.0, step / one.loop.steps) for one in (self.before, self.run))
        moved = [
            key
            for key, value in self.run.decisive.items()
            if over_time.changes(value) and value.get("shape") == "cosine" and "steps" not in value
        ]
        return "".join(
            f"; the cosine of {key}, which ends with the run, continues at {now:.0%} of it, where it would have been at {was:.0%}"
            for key in moved
            if was != now and key not in self.changes
        )


def resumed(run: RunSettings, folder: Path, resume: Resume) -> History | None:
    """The history of a resumed run; None for one that starts. Raises: as `history`."""
    return history(run, folder)._replace(may_start=resume == "auto") if resume else None


def history(run: RunSettings, folder: Path) -> History:
    """The history of the run in a folder, to be resumed with these settings.

    Raises: ConfigError, naming the keys that may change, when others differ; DataError for a spoilt record of branches.
    """
    # A dangling link is an unreadable run file rather than a missing one.
    before = settings_in(folder) if os.path.lexists(folder / "run.toml") else run
    changes = differences(before, run)
    kept = [key for key in changes if not may_change(key)]
    if kept:
        key = min(kept, key=lambda key: key.partition(".")[0] not in _FIRST)
        was, now = _apart(*changes[key])
        raise ConfigError(
            f"{key} is {was} in '{folder}' and {now} now, but a resumed run keeps it; may change: "
            f"{', '.join(CHANGEABLE)}; start again with another --out for anything else"
        )
    return History(run, before, read_branches(folder), changes)


def _apart(one: Any, other: Any) -> tuple[str, str]:
    """Two values in words, of long ones what is around their first difference.

    >>> _apart(None, 3), _apart(["/a/long/path/of/a/text.txt", "/b/c.txt"], ["/a/long/path/of/a/text.txt", "/b/d.txt"])
    (('not set', '3'), ("...t', '/b/c.txt']", "...t', '/b/d.txt']"))
    """
    was, now = ("not set" if value is None else repr(value) for value in (one, other))
    alike = next((k for k, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    start, dots = (alike - 8, "...") if alike > 30 else (0, "")
    return f"{dots}{was[start : start + 60]}", f"{dots}{now[start : start + 60]}"


def lineage_of(run: RunSettings, folder: Path) -> Lineage:
    """The lineage of the run in a folder with these settings."""
    return run.lineage._replace(earlier=_earlier(read_branches(folder)))


def _earlier(branches: Sequence[Branch]) -> tuple[tuple[str, int], ...]:
    """The earlier digests of a run, each with its last valid round: the run may have been rewound past a branch."""
    rounds = [branch["round"] for branch in branches]
    return tuple((branch["digest"], min(rounds[k:])) for k, branch in enumerate(branches))
