"""TensorBoard, Weights & Biases and trackio: all get the same curves, over inner steps.

They are passive: each has a thread, so that one that fails, hangs or is unreachable neither ends nor delays training.

The curves by name, of each worker and their mean:

| curve | of |
|---|---|
| `train/loss`, `train/lr`, `train/tokens` | each worker, mean |
| `eval/loss`, `eval/disagreement`, `eval/tokens`, … | the mean model, or the server's |
| `eval/own_loss` | each worker's own model, mean |
| `validation/loss`, `validation/tokens` | a real worker's own model |
| `sent_bytes` | each worker in a round, mean |
| `seconds/compute`, `…/transfer`, `…/waiting`, `…/other` | each worker in a round, mean |

A worker's curve ends in `/worker-003`, that of their mean in `/mean`. A process that writes for one worker knows no mean. Seconds
of a declared network have its name, as in `seconds/waiting/home/mean`.
"""

import contextlib
import logging
import math
import sys
import threading
import tomllib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from gossamer.errors import first_line, require
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.whole_files import atomic_write, worker_suffix

log = logging.getLogger("gossamer")
_WORKER = "/worker-"


class CurvePoint(NamedTuple):
    """Values of some curves at one place."""

    round: int
    step: int
    values: Mapping[str, float]


def of_metrics(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The points of one line of metrics.

    >>> of_metrics("train", {"round": 0, "worker": 3, "step": 15, "loss": 2.5})
    {'train/loss/worker-003': 2.5}
    >>> of_metrics("eval", {"round": 0, "loss": 2.0, "worker_losses": [2.0, 3.0]})
    {'eval/loss': 2.0, 'eval/own_loss/worker-000': 2.0, 'eval/own_loss/worker-001': 3.0, 'eval/own_loss/mean': 2.5}
    """
    end = f"/worker{worker_suffix(fields['worker'])}" if "worker" in fields else ""
    points = {
        f"{kind}/{name}{end}": value
        for name, value in fields.items()
        if name not in ("round", "worker", "step") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if losses := [x for x in fields.get("worker_losses", ()) if x is not None]:
        points |= {f"{kind}/own_loss/worker{worker_suffix(i)}": x for i, x in enumerate(fields["worker_losses"])}
        points[f"{kind}/own_loss/mean"] = math.fsum(losses) / len(losses)
    return {name: value for name, value in points.items() if value is not None}


def of_bytes(worker: int, sent_bytes: int) -> dict[str, float]:
    """The point of the bytes that a worker sent in a round."""
    return {f"sent_bytes/worker{worker_suffix(worker)}": sent_bytes}


def of_seconds(seconds: RoundSeconds) -> dict[str, float]:
    """The points of the seconds of a worker's round.

    >>> list(of_seconds(RoundSeconds(0, 1, "home", 3.0, 0.5, {2: 1.5}, 0.0, 5.0)).items())[2]
    ('seconds/waiting/home/worker-001', 1.5)
    """
    where = "" if seconds.network is None else f"/{seconds.network}"
    kinds = ("compute", "transfer", "waiting", "other")
    return {
        f"seconds/{kind}{where}/worker{worker_suffix(seconds.worker)}": getattr(seconds, f"{kind}_s") for kind in kinds
    }


class Means:
    """The means over the workers of one process, emitted when the next round begins.

    >>> means = Means()
    >>> means.add(CurvePoint(0, 15, {"train/loss/worker-000": 2.0})), means.add(CurvePoint(0, 15, {"train/loss/worker-001": 3.0}))
    ([], [])
    >>> means.add(CurvePoint(1, 30, {"train/loss/worker-000": 1.0}))
    [CurvePoint(round=0, step=15, values={'train/loss/mean': 2.5})]
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int, list[float]]] = {}

    def add(self, point: CurvePoint) -> list[CurvePoint]:
        """Adds the values of workers; returns the means of completed rounds."""
        # All at once, to keep the values of one inner step together: a dashboard may accept steps only in order.
        over = [self._end(curve) for curve, (round, _, _) in [*self._open.items()] if round != point.round]
        for name, value in point.values.items():
            curve, separator, _ = name.partition(_WORKER)
            if not separator or f"{curve}/mean" in point.values:
                continue
            self._open.setdefault(curve, (point.round, point.step, []))[2].append(value)
        return over

    def end(self) -> list[CurvePoint]:
        """The means of unfinished rounds."""
        return [self._end(curve) for curve in [*self._open]]

    def _end(self, curve: str) -> CurvePoint:
        round, step, values = self._open.pop(curve)
        return CurvePoint(round, step, {f"{curve}/mean": math.fsum(values) / len(values)})


OPEN_S = 10.0
"""How long training waits for a dashboard at its start."""
END_S, END_FAILED_S = 20.0, 3.0
"""How long a dashboard may take for its last rows, in general and after an earlier failure."""
PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Between a failure and the next attempt: at first, doubled after each, and at most."""
MOST_POINTS = 20_000
"""The most points queued for a slow dashboard; beyond it the oldest are dropped."""
_THREAD = "gossamer-dashboard"


class _Sink(NamedTuple):
    """A dashboard that is open."""

    show: Callable[[CurvePoint], None]
    finish: Callable[[], None]


class _Observer:
    """Feeds one dashboard from a thread; a failure is warned of once, and retried after growing pauses.

    Args:
        name: of the dashboard.
        open: opens it; called with whether it was open before in this process.
    """

    def __init__(self, name: str, open: Callable[[bool], _Sink]) -> None:
        self._name, self._open = name, open
        self._points = deque[CurvePoint](maxlen=MOST_POINTS)
        self._changed = threading.Condition()
        self._closing, self._warned = False, False
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._feed, name=_THREAD, daemon=True)
        self._thread.start()
        if not self._tried.wait(OPEN_S):
            self._warn(f"has not answered for {OPEN_S:g} s")

    def show(self, point: CurvePoint) -> None:
        """Queues a point; never waits for the dashboard."""
        with self._changed:
            self._points.append(point)
            self._changed.notify()

    def close(self) -> None:
        """Waits for the last rows, up to a limit."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        limit_s = END_FAILED_S if self._warned else END_S
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._warn(f"has not taken its last rows within {limit_s:g} s")

    def _feed(self) -> None:
        pause_s, last, opened = PAUSE_S, False, False
        sink: _Sink | None = None
        point: CurvePoint | None = None
        while True:
            try:
                if sink is None:
                    sink = self._open(opened)
                opened = True
                self._tried.set()
                while point is not None or (point := self._next()) is not None:
                    sink.show(point)
                    point = None
                    pause_s = PAUSE_S
                sink.finish()
                return
            except Exception as error:  # each of these packages raises its own
                self._warn(f"failed ({first_line(error)})")
                self._tried.set()
            if last:
                return
            if sink is not None:  # which is opened again
                with contextlib.suppress(Exception):  # it was warned of already
                    sink.finish()
                sink = None
            with self._changed:  # once training has ended, there is one more attempt
                last = self._changed.wait_for(lambda: self._closing, pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _next(self) -> CurvePoint | None:
        """The next point, once there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._points or self._closing)
            return self._points.popleft() if self._points else None

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s %s; training continues, metrics.jsonl has all figures, and it is tried again from time to time and when the "
                "run is resumed",
                self._name,
                what,
            )


class _Stdout:
    """Standard output, reserved for results; threads of dashboards that print get standard error."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if threading.current_thread().name == _THREAD else self.stream, name)


class Dashboards:
    """The dashboards enabled for one process.

    Args:
        path: the run folder.
        worker: the number of the one worker that writes here; None when one process writes for all.
        run_toml: the resolved configuration.
        next_step: the first inner step that is taken again; None for a run that starts.
        tensorboard, wandb_project, trackio_project: as in the `[record]` table.
        traced_per_round: entries that a worker writes into the trace in one round.
    Raises: MissingPackageError when the package of one of them is missing.
    """

    def __init__(
        self,
        path: Path,
        worker: int | None,
        run_toml: str,
        next_step: int | None,
        *,
        tensorboard: bool,
        wandb_project: str | None,
        trackio_project: str | None,
        traced_per_round: int = 1,
    ) -> None:
        self._means = Means() if worker is None else None
        self._traced_per_round = traced_per_round
        self._step, self._steps = 0, dict[int, int]()
        self._sent: dict[int, int] = {}
        self._priced = -1
        # All packages are imported before the first thread starts, so that no sink is open if one is missing.
        ways = dict[str, Callable[[bool], _Sink]]()
        if wandb_project is not None:
            ways["Weights & Biases"] = _wandb(wandb_project, path, worker, run_toml)
        if trackio_project is not None:
            ways["trackio"] = _trackio(trackio_project, path, worker, run_toml, resumed=next_step is not None)
        if tensorboard:
            ways["TensorBoard"] = _tensorboard(path / "tensorboard", worker, next_step)
        self._stdout = _Stdout(sys.stdout)
        if ways:
            sys.stdout = cast(Any, self._stdout)
        self._observers = [_Observer(name, open) for name, open in ways.items()]

    def metrics(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows a line of metrics; its inner step is where all curves continue."""
        if self._observers:
            self._step = self._steps[fields["round"]] = fields.get("step", self._step)
            self._add(fields["round"], self._step, of_metrics(kind, fields))

    def sent(self, entry: int, worker: int, sent_bytes: int) -> None:
        """Adds the bytes of an entry of a worker's trace, and shows them at the end of its round."""
        if self._observers:
            round, part = divmod(entry, self._traced_per_round)
            self._sent[worker] = self._sent.get(worker, 0) + sent_bytes
            if part == self._traced_per_round - 1:
                self._add(round, self._step, of_bytes(worker, self._sent.pop(worker)))

    def seconds(self, seconds: RoundSeconds) -> None:
        """Shows the seconds of a worker's round."""
        if self._observers:
            self._add(seconds.round, self._step, of_seconds(seconds))

    def priced(self, seconds: list[RoundSeconds]) -> None:
        """Shows the seconds computed at the end, for rounds trained by this process and not shown yet."""
        if self._observers:
            new = sorted((one for one in seconds if one.round in self._steps), key=lambda one: one.round)
            for one in new:
                if one.round > self._priced:
                    self._add(one.round, self._steps[one.round], of_seconds(one))
            self._priced = max([self._priced, *(one.round for one in new)])

    def close(self) -> None:
        """Shows the last points and ends the dashboards' runs; may be called twice."""
        if self._means is not None:
            for point in self._means.end():
                self._put(point)
        for observer in self._observers:
            observer.close()
        self._observers.clear()
        if sys.stdout is self._stdout:
            sys.stdout = self._stdout.stream

    def _add(self, round: int, step: int, values: Mapping[str, float]) -> None:
        point = CurvePoint(round, step, values)
        for mean in [] if self._means is None else self._means.add(point):
            self._put(mean)
        self._put(point)

    def _put(self, point: CurvePoint) -> None:
        for observer in self._observers:
            observer.show(point)


def _tensorboard(folder: Path, worker: int | None, next_step: int | None) -> Callable[[bool], _Sink]:
    """Writes events that make viewers drop an interrupted run's points from `next_step` on."""
    board = require("torch.utils.tensorboard", "tensorboard", "record.tensorboard = true", "set it to false")
    # Viewers read one event file per folder, so each process needs its own.
    place = str(folder if worker is None else folder / f"worker{worker_suffix(worker)}")

    def open(again: bool) -> _Sink:
        writer = board.SummaryWriter(place, purge_step=None if again else next_step, flush_secs=30)

        def show(point: CurvePoint) -> None:
            for tag, value in point.values.items():
                writer.add_scalar(tag, value, point.step)

        return _Sink(show, writer.close)

    return open


def _wandb(project: str, path: Path, worker: int | None, run_toml: str) -> Callable[[bool], _Sink]:
    """Logs to a Weights & Biases run, which the same folder continues when it is resumed; a copy of the folder has a new one."""
    service = require("wandb", "wandb", f"record.wandb_project = '{project}'", "remove that key")
    id_path = path / f"wandb-id{worker_suffix(worker)}.txt"

    def open(again: bool) -> _Sink:
        known, _, owner = id_path.read_text(errors="replace").partition("\n") if id_path.exists() else ("", "", "")
        # A copy of a run folder includes this file, and both would write into one run.
        kept = known if owner in ("", path.resolve().name) else None
        run = service.init(
            **_described(project, path, worker, run_toml), id=kept or None, resume="allow", dir=str(path)
        )
        run.define_metric("*", step_metric="step")
        atomic_write(id_path, f"{run.id}\n{path.resolve().name}".encode())
        row, at = run.step - 1, -1

        def show(point: CurvePoint) -> None:
            """Logs into the row of this inner step, or a new one.

            W&B numbers rows by itself, offline from 0 in every process, so that a resumed one would overwrite the first
            rows; and it drops points for a row before its last. So a row has the number of its inner step, or the one
            after the last row.
            """
            nonlocal row, at
            if point.step != at:
                row, at = max(row + 1, point.step), point.step
            run.log({**point.values, "round": point.round, "step": point.step}, step=row)

        return _Sink(show, run.finish)

    return open


def _trackio(project: str, path: Path, worker: int | None, run_toml: str, *, resumed: bool) -> Callable[[bool], _Sink]:
    """Logs to a run of trackio on this machine, which a resumed run continues."""
    service = require("trackio", "trackio", f"record.trackio_project = '{project}'", "remove that key")

    def open(again: bool) -> _Sink:
        run = service.init(
            **_described(project, path, worker, run_toml),
            resume="allow" if resumed or again else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return _Sink(lambda point: run.log({**point.values, "round": point.round}, step=point.step), run.finish)

    return open


def _described(project: str, path: Path, worker: int | None, run_toml: str) -> dict[str, Any]:
    """The description of a run for Weights & Biases and trackio; the workers of a real run form a group."""
    group = path.resolve().name
    return {
        "project": project,
        "name": group + worker_suffix(worker),
        "group": group,
        "config": tomllib.loads(run_toml),
    }
