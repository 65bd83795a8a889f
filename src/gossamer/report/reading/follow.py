"""A growing run folder, followed in bounded memory for pages.

`FollowedRun.look` reads lines appended since the last call, each once. Truncated or replaced files (a resumed run is
rewound to a checkpoint) are read again from the start. A spoilt line is reported and skipped; the rest is shown. It
never writes, and follows no link out of the folder.

A report needs a run in two forms: from the strict readers of `gossamer.record`, and this one. The readers pass each
line to `FollowedRun.take`, so that each file is read once; `look` then reads the remaining files.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.errors import DataError
from gossamer.record.folder import is_of_its_branch, recoveries
from gossamer.record.lineage import Branch, changed_stages, read_branches, stages_sentence
from gossamer.record.logs.trace import sent_bytes_of
from gossamer.report.reading.lines import KINDS_OF_FILES, RunFile, kind_of, line_of_kind, run_file_of
from gossamer.report.reading.paces import Paces
from gossamer.report.reading.tail import Marks, Tail
from gossamer.report.reading.thinning import Grid, KeptLines

MOST_WORKERS = 4096
"""The most workers of a followed run."""
_NAME = re.compile(rf"({'|'.join(set(KINDS_OF_FILES) - {'outcomes'})})(-[\w-]+)?\.jsonl|outcomes-[0-9]+\.jsonl")
"""The names of followed files; lines of outcomes name no slot, so that of their file has to."""
_MOST_COMPLAINTS = 5
_MOST_HAPPENINGS = 400


class FollowedRun:
    """The data of one followed run.

    Args:
        label: its name on the page.
        folder: its run folder; with links resolved if it is read more than once.
    """

    def __init__(self, label: str, folder: Path) -> None:
        self.label, self.folder = label, folder
        self.revision = 0
        """Incremented by every new line."""
        self._restart()

    def _restart(self) -> None:
        self.file: RunFile | None = None
        self._run_toml: tuple[float, int] | None = None
        self.tails: dict[str, Tail] = {}
        self.marks = defaultdict[tuple[str, str | None], Marks](Marks)
        """Offsets of rounds, by file and, in a file of seconds, by network."""
        self.complaints: dict[str, None] = {}
        self.branches: list[Branch] = []
        """Its changes of settings."""
        self._forget()

    def _forget(self) -> None:
        workers = 1 if self.file is None else self.file.workers
        self.losses, self.tokens, self.steps = Grid(workers), Grid(workers), Grid(workers)
        self.validations = Grid(workers)
        self.untrained: dict[int, float] = {}
        """The validation loss of workers' initial values."""
        self.sent = Grid(workers, summed=True)
        """Sent bytes by trace entry, or by round for a run without a trace."""
        self.trained_lines = self.traced_lines = 0
        self.evaluations = KeptLines()
        self.clock: dict[str | None, Grid] = {}
        """The end of each round on each network; None for measured seconds."""
        self.spent_s: dict[str | None, np.ndarray] = {}
        """Seconds of compute, waiting, transfer and other things, `[workers, 4]`."""
        self._paces = Paces()
        self.waits_s: dict[str | None, dict[tuple[int, int], float]] = {}
        """Seconds that a worker waited for a peer."""
        self.rounds_of: list[int] = [0] * workers
        """The known completed rounds of each worker."""
        self._recorded = set[int]()
        """Workers with lines of training."""
        self.alive: tuple[int, list[int] | None] = (-1, None)
        """The newest list of live workers, with its round; None for all."""
        self.ended: dict[int, str] = {}
        """Why workers of an elastic run ended."""
        self.events: dict[str, int] = {}
        """The number of events of each kind in an asynchronous run."""
        self.happenings: list[tuple[int, str]] = []
        """Notable events, by round."""

    # --- reading ------------------------------------------------------------------------------------------------------

    def look(self, until_s: float = math.inf) -> bool:
        """Reads new lines until a time of `time.monotonic`; returns whether all were read."""
        if not self.begin():
            return True
        try:
            self._find()
        except OSError:  # the folder has just been removed
            return True
        if any(tail.rewound for tail in self.tails.values()):
            self._read_again()
        waiting = list(self.tails.values())
        while waiting:
            waiting = [tail for tail in waiting if self._read(tail)]
            if any(tail.rewound for tail in self.tails.values()):
                self._read_again()
                waiting = list(self.tails.values())
            if time.monotonic() >= until_s:
                return not waiting
        return True

    @property
    def progress(self) -> float:
        """The share of the bytes that were read, from 0 to 1."""
        total = sum(tail.size for tail in self.tails.values())
        return 1.0 if not total else sum(min(tail.offset, tail.size) for tail in self.tails.values()) / total

    @property
    def is_simulated(self) -> bool:
        """Whether one process has written the lines of all workers."""
        return "metrics.jsonl" in self.tails and not any(name.startswith("metrics-0") for name in self.tails)

    @property
    def modified_s(self) -> float:
        """The newest modification time of its files, Unix time."""
        return max((tail.modified_s for tail in self.tails.values()), default=0.0)

    @property
    def done(self) -> int:
        """Completed rounds of the most advanced worker."""
        return max(self.rounds_of, default=0)

    @property
    def parts(self) -> int:
        """Entries of the trace in a round: several where fragments, or updates and parameters, are sent apart."""
        return max(1, round(self.traced_lines / max(1, self.trained_lines)))

    @property
    def here(self) -> int:
        """The number of workers whose training is in this folder, at least 1: outcomes may be of others, elsewhere, too."""
        return max(1, len(self._recorded))

    def own_losses(self, training: Sequence[bool] | None = None) -> list[tuple[int, float]]:
        """The mean of the workers' validations of their own models, by round; the initial values have round -1.

        Args: `training` tells which workers are; then a round is left out while one of them may still add to it, and while
            any worker may until one has trained the next round.
        """
        untrained = [self.untrained.get(worker, math.nan) for worker in range(len(self.rounds_of))]
        rounds = np.concatenate([[-1], self.validations.rounds()])
        known = np.isfinite(np.vstack([untrained, self.validations.values()]))
        enough = np.array(known.any(axis=1))
        if training is not None:
            passed = np.array(self.rounds_of) >= rounds[:, None] + 2
            gone = ~np.array(training) & (self.done >= rounds[:, None] + 2)
            enough &= np.array((known | passed | gone).all(axis=1))
        means = [math.fsum(x for x in untrained if math.isfinite(x)) / max(1, known[0].sum())]
        means += map(self.validations.mean_at, rounds[1:].tolist())
        scored = zip(rounds, means, enough.tolist(), strict=True)
        return [(int(round), float(mean)) for round, mean, counts in scored if counts]

    # A source other than files knows these itself.

    def standings(self) -> list[str] | None:
        """The standing of each worker in one word; None where it follows from the files."""
        return None

    def moment(self, round: int) -> dict[str, Any] | None:
        """A round as `gossamer.report.reading.moment.moment_of` describes it; None where it is read from the files."""
        return None

    def more(self) -> dict[str, Any]:
        """Further values of its view."""
        return {}

    def notes(self) -> list[str]:
        """Sentences that hold now, and may not later."""
        priced = self.file is not None and self.file.networks and not self.clock
        changed = changed_stages(self.branches) if priced else ""
        return [stages_sentence(self.label, changed)] if changed else []

    def complain(self, sentence: str) -> None:
        """Records a sentence about data that cannot be shown."""
        if sentence not in self.complaints and len(self.complaints) < _MOST_COMPLAINTS:
            self.complaints[sentence] = None
            self.revision += 1

    def begin(self) -> bool:
        """Reads run.toml if new, and the changes of settings; returns whether the run can be followed."""
        if not self._look_at_run_file():
            return False
        try:
            if not (self.folder / "branches.json").is_symlink():
                self.branches = read_branches(self.folder)
        except (DataError, OSError) as error:
            self.complain(f"{self.label}: {error}")
        return True

    def _look_at_run_file(self) -> bool:
        path = self.folder / "run.toml"
        try:
            now = path.stat()
        except OSError:
            if self.file is not None:
                self._restart()
            self.complain(f"{self.label} holds no run.toml yet; the page shows the run when it begins")
            return False
        if self._run_toml == (now.st_mtime, now.st_ino):
            return self.file is not None
        self._restart()
        self._run_toml = (now.st_mtime, now.st_ino)
        try:
            self.file = run_file_of(path)
            if self.file.workers > MOST_WORKERS:
                workers, self.file = self.file.workers, None
                self.complain(f"{path} has {workers} workers and a page shows {MOST_WORKERS} at most")
        except (DataError, OSError, ValueError) as error:
            self.complain(f"{error}")
        self._forget()
        self.revision += 1
        return self.file is not None

    def take(self, path: Path, begin: int, end: int, line: dict[str, Any]) -> None:
        """Processes a line read by a strict reader between these offsets of a file (`gossamer.record.jsonl.Seen`)."""
        if path.name not in self.tails:
            if self.file is None or not _NAME.fullmatch(path.name):
                return
            self.tails[path.name] = Tail(path)
        self.tails[path.name].offset = end
        self._process(path.name, begin, line)

    def _find(self) -> None:
        for path in sorted(self.folder.iterdir()):
            if path.name not in self.tails and _NAME.fullmatch(path.name):
                self.tails[path.name] = Tail(path)
        for name in [name for name, tail in self.tails.items() if not tail.path.exists()]:
            del self.tails[name]  # removed, with its data
            self._read_again()

    def _read_again(self) -> None:
        for tail in self.tails.values():
            tail.restart()
        self.marks.clear()
        self._forget()
        self.revision += 1

    def _read(self, tail: Tail) -> bool:
        """Reads a chunk; returns whether there is more."""
        name, before = tail.path.name, tail.offset
        try:
            for begin, raw in tail.read():
                try:
                    line = line_of_kind(kind_of(name), raw, f"{name} at byte {begin}", name, len(self.rounds_of))
                except DataError as error:
                    self.complain(f"{self.label}: {error}")
                else:
                    self._process(name, begin, line)
        except (OSError, ValueError) as error:
            self.complain(f"{self.label}: {name} is not read ({getattr(error, 'strerror', None) or error})")
            return False
        if tail.offset > before:
            self.revision += 1
        return tail.offset > before and tail.behind > 0

    # --- what lines mean ----------------------------------------------------------------------------------------------

    def _process(self, name: str, begin: int, line: dict[str, Any]) -> None:
        """Processes a line at this offset of a file."""
        kind, workers = kind_of(name), len(self.rounds_of)
        try:
            if line.get("worker", 0) >= workers:
                raise DataError(f"{name} at byte {begin} names worker {line['worker']} of {workers}")
            match kind:
                case "metrics":
                    self._process_metric(line)
                case "trace":
                    self._process_trace(line)
                case "seconds":
                    self._process_seconds(line)
                case "outcomes":
                    self._process_outcome(int(name.removeprefix("outcomes-").removesuffix(".jsonl")), line)
                case _:
                    self._process_event(line)
        except DataError as error:
            self.complain(f"{self.label}: {error}")
            return
        key = name, line["network"] if kind == "seconds" else None
        self.marks[key].add(line["round"], begin)

    def _behind(self, worker: int, rounds: int) -> None:
        self.rounds_of[worker] = max(self.rounds_of[worker], rounds)

    def _process_metric(self, line: dict[str, Any]) -> None:
        round, worker = line["round"], line.get("worker")
        if line["kind"] == "train" and worker is not None:
            self.trained_lines += 1
            self._recorded.add(worker)
            self.losses.put(round, worker, figure_of(line.get("loss")))
            self.steps.put(round, worker, figure_of(line.get("step")))
            self.tokens.put(round, worker, figure_of(line.get("tokens")))
            self._behind(worker, round + 1)
            for _, sentence in recoveries([line]) if "recovered" in line else ():
                self._happen(round, sentence)
        elif line["kind"] == "diverged":
            ended = "the run" if worker is None else f"worker {worker}"
            self._happen(round, f"a number was not finite, which ended {ended}")
        elif line["kind"] == "validation" and worker is not None and round < 0:
            self.untrained[worker] = figure_of(line.get("loss"))
        elif line["kind"] == "validation" and worker is not None:
            self.validations.put(round, worker, figure_of(line.get("loss")))
        elif line["kind"] == "eval" and worker is None and is_of_its_branch(line, self.branches):
            # Only the worst worker is shown, as a run of many workers has many numbers.
            losses, shown = line.get("worker_losses"), {k: v for k, v in line.items() if k != "worker_losses"}
            if losses:
                shown["worst worker"] = max((x for x in map(figure_of, losses) if not math.isnan(x)), default=None)
            self.evaluations.add(shown)

    def _process_trace(self, line: dict[str, Any]) -> None:
        self.traced_lines += 1
        self.sent.put(line["round"], line["worker"], sum(map(sent_bytes_of, line["ops"])))

    def _process_seconds(self, line: dict[str, Any]) -> None:
        network, worker = line["network"], line["worker"]
        if network not in self.clock:
            self.clock[network] = Grid(len(self.rounds_of))
            self.spent_s[network] = np.zeros((len(self.rounds_of), 4))
            self.waits_s[network] = {}
        self.clock[network].put(line["round"], worker, line["end_s"])
        waiting_s = sum(line["waiting_for"].values())
        self.spent_s[network][worker] += (line["compute_s"], waiting_s, line["transfer_s"], line["other_s"])
        step_s = None if self.file is None or self.is_simulated else self.file.step_s(line)
        if step_s is not None and (times := self._paces.slowed(worker, step_s)) is not None:
            sentence = f"worker {worker} has slowed down: {times:.1f} times its usual seconds of a step"
            self._happen(line["round"], sentence)
        waits = self.waits_s[network]
        for peer, seconds in line["waiting_for"].items():
            waits[worker, peer] = waits.get((worker, peer), 0.0) + seconds

    def _process_outcome(self, slot: int, line: dict[str, Any]) -> None:
        if slot >= len(self.rounds_of):
            raise DataError(f"outcomes of slot {slot} are there and the run has {len(self.rounds_of)} workers")
        round, event = line["round"], line["event"]
        if event == "begin":
            self.ended.pop(slot, None)
            if round or line["after"]:
                source = "its own state" if line["donor"] == slot else f"the state of worker {line['donor']}"
                self._happen(round, f"worker {slot} comes with {source} after {line['after']} rounds")
        elif event == "end":
            self.ended[slot] = line["why"]
            if line["why"] != "finished":
                self._happen(round, f"worker {slot} has {line['why']}")
        elif event == "round":
            self._behind(slot, round + 1)
            if round >= self.alive[0]:
                self.alive = round, line["alive"]
        for word in ("missed", "unsure") if event == "round" else ():
            if line[word]:
                self._happen(round, f"worker {slot}: exchange with {', '.join(map(str, line[word]))} {word}")

    def _process_event(self, line: dict[str, Any]) -> None:
        event = line["event"]
        self.events[event] = self.events.get(event, 0) + 1
        if event in ("leave", "return"):
            self._happen(line["round"], f"worker {line['worker']} {'leaves' if event == 'leave' else 'returns'}")
        elif event in ("push", "fetch", "meet") and line["source"] >= 0:
            if line["source"] >= len(self.rounds_of):
                raise DataError(f"an event names worker {line['source']} of {len(self.rounds_of)}")
            self.sent.put(max(0, line["round"]), line["source"], line["bytes"])

    def _happen(self, round: int, sentence: str) -> None:
        self.happenings.append((round, sentence))
        if len(self.happenings) > _MOST_HAPPENINGS:
            self.happenings = self.happenings[-_MOST_HAPPENINGS // 2 :]


def figure_of(value: Any) -> float:
    """A figure of an untrusted line; NaN for an invalid one."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known else math.nan
