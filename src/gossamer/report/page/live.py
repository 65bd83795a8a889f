"""The runs of a live page: discovered in the given folders, followed, and shown as far as read."""

import json
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError, DataError
from gossamer.record.folder import finite
from gossamer.record.logs.pipeline_work import PIPELINE_FILE
from gossamer.record.logs.trace import read_trace
from gossamer.report.page.contents import page_contents, row_of_view
from gossamer.report.page.view import run_view, standings
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.reading.moment import moment_of
from gossamer.report.reading.runs import ends_of, prices_of
from gossamer.report.reading.stored import FollowedStore
from gossamer.report.table import seeds_are_alike

_LOOK_S, _LONG_LOOK_S = 0.5, 2.0
"""Time limits of the first read before data are shown, and of each further one."""
_MOST_RUNS = 64
_MOST_REPLAYED = 3000
"""The most messages of a running run to price by replay; `price` needs up to 1 ms for each."""
_MOST_PRICED = 1_000_000
"""The most messages of a running run to price at all."""


class LiveRuns:
    """Follows runs; thread-safe.

    Args:
        roots: run folders, or folders that hold run folders, also ones that appear later.
        stores: runs whose state lies in a store.
        command: the command that shows this page.
        awaited: whether a root may not exist yet.
    Raises: ConfigError for a root that is not a folder.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        stores: Sequence[FollowedStore] = (),
        command: str = "",
        awaited: bool = False,
    ) -> None:
        for root in roots:
            if not root.is_dir() and (root.exists() or not awaited):
                raise ConfigError(f"'{root}' is no folder; give run folders, or a folder that holds them")
        # A link is resolved once, when given; a later target would be another folder.
        self._roots = [root.resolve() for root in roots]
        self._stores, self._command = stores, command
        self._lock = threading.Lock()
        self._runs: dict[Path, FollowedRun] = {}
        self._prices: dict[Path, tuple[int, dict[str, NDArray[np.float64]]]] = {}
        self._answer: tuple[str, bytes] = "", b""
        self._empty: list[str] = []

    @property
    def _all(self) -> list[FollowedRun]:
        """Those in stores first, as run folders may be added."""
        return [*self._stores, *self._runs.values()]

    def data(self, have: str) -> bytes:
        """The page's contents as JSON; only time-dependent values if the page has this revision already."""
        with self._lock:
            self._look()
            now_s, runs = time.time(), self._all
            notes = [*self._empty, *(note for run in runs for note in run.notes())]
            revision = "-".join(str(run.revision) for run in runs) + f"/{len(self._empty)}"
            if revision == have:
                pulse = [{**_pulse(run, now_s), "progress": round(run.progress, 3)} for run in runs]
                return json.dumps({"revision": revision, "pulse": pulse, "notes": notes}).encode()
            if revision != self._answer[0]:
                self._answer = revision, self._contents(runs, now_s, revision, notes)
            return self._answer[1]

    def moment(self, run: int, round: int) -> bytes:
        """One round of the run at this index as JSON; empty if there is no such run or round."""
        with self._lock:
            runs = self._all
            if not 0 <= run < len(runs) or (one := runs[run]).file is None or not 0 <= round < 2**31:
                return b""
            return json.dumps(finite(moment_of(one, round))).encode()

    def _look(self) -> None:
        self._find()
        until_s = time.monotonic() + (_LONG_LOOK_S if self._answer[0] else _LOOK_S)
        for run in self._all:
            run.look(max(until_s, time.monotonic() + 0.02))  # so that the last of many gets some time too

    def _find(self) -> None:
        """Adds new run folders; removed ones keep their last data."""
        self._empty = []
        for root in self._roots:
            inside = sorted(path.parent for path in root.glob("*/run.toml") if not path.parent.is_symlink())
            folders = [root] if (root / "run.toml").is_file() else inside
            if not folders and not any(folder.is_relative_to(root) for folder in self._runs):
                self._empty.append(f"{root} holds no run so far; a run that begins there is shown")
            for folder in folders:
                if folder not in self._runs and len(self._runs) < _MOST_RUNS:
                    self._runs[folder] = FollowedRun(self._label(folder), folder)

    def _label(self, folder: Path) -> str:
        alike = [other for other in self._runs if other.name == folder.name]
        return f"{folder.parent.name}/{folder.name}" if alike else folder.name

    def _contents(self, runs: Sequence[FollowedRun], now_s: float, revision: str, notes: Sequence[str]) -> bytes:
        views = [run_view(run, now_s, self._priced(run)) for run in runs]
        names = [run.label if run.file is None else run.file.name for run in runs]
        alike = seeds_are_alike(names, ["" if run.file is None else _without_seed(run.file.text) for run in runs])
        for view, name in zip(views, names, strict=True):
            if alike and names.count(name) == 1:  # else its folder's name distinguishes it
                view["label"] = name
        title = views[0]["name"] if len(views) == 1 else f"{len(views)} runs" if views else "no run yet"
        contents = page_contents(
            views,
            [row_of_view(view) for view in views],
            title=title,
            live=True,
            command=self._command,
            date=f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%d %H:%M} UTC",
        )
        answer = {**contents, "revision": revision, "notes": notes}
        try:
            return json.dumps(answer, allow_nan=False).encode()
        except ValueError:  # a rare non-finite figure: checking for it in advance would dominate the cost
            return json.dumps(finite(answer), allow_nan=False).encode()

    def _priced(self, run: FollowedRun) -> dict[str, NDArray[np.float64]]:
        """The end of each round of a running simulation on its networks; priced again whenever it is half as long again."""
        if run.file is None or run.file.kind != "rounds" or run.clock or not run.traced_lines or not run.file.networks:
            return {}
        rounds, ends_s = self._prices.get(run.folder, (0, {}))
        if run.done >= max(2, 1.5 * rounds):
            ends_s = _prices(run)
            self._prices[run.folder] = run.done, ends_s
        return ends_s


def _pulse(run: FollowedRun, now_s: float) -> dict[str, Any]:
    """The time-dependent values."""
    if run.file is None:
        return {"age_s": None, "standings": []}
    return {"age_s": max(0.0, round(now_s - run.modified_s, 1)), "standings": standings(run, now_s)}


def _prices(run: FollowedRun) -> dict[str, NDArray[np.float64]]:
    assert run.file is not None
    if run.traced_lines > _MOST_PRICED or (run.folder / PIPELINE_FILE).is_symlink():
        return {}
    try:
        trace = read_trace(run.folder)
        count = len(trace.messages.round) + sum(mean.pairs for mean in trace.means)
        overlaps = trace.overlaps
        few = {
            name: network
            for name, network in run.file.networks.items()
            if count <= (_MOST_REPLAYED if network.shares or overlaps else _MOST_PRICED)
        }
        timelines = prices_of(run.folder, run.file.text, trace, few)
    except (ConfigError, DataError, OSError):
        # A worker may not have written its first line, or the file is being replaced.
        return {}
    return ends_of(timelines, run.parts)


def _without_seed(text: str) -> str:
    """A run file without its own name and its seed, which stand before its tables."""
    head, tables, rest = text.partition("\n[")
    return "\n".join(line for line in head.split("\n") if not line.startswith(("name =", "seed ="))) + tables + rest
