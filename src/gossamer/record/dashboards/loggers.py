"""TensorBoard, Weights & Biases and trackio: all get the same curves (`gossamer.record.dashboards.scalars`), over inner steps."""

import contextlib
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import require
from gossamer.record.dashboards.scalars import CurvePoint, Means, of_bytes, of_metrics, of_seconds
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.whole_files import atomic_write, worker_suffix

__all__ = ["Dashboards"]


class Dashboards:
    """The dashboards that one process writes to, as many as it was asked for.

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
        self, path: Path, worker: int | None, run_toml: str, next_step: int | None, *, tensorboard: bool,
        wandb_project: str | None, trackio_project: str | None, traced_per_round: int = 1,
    ) -> None:  # fmt: skip
        self._show: list[Callable[[CurvePoint], None]] = []
        self._means = Means() if worker is None else None
        self._traced_per_round = traced_per_round
        self._step, self._steps = 0, dict[int, int]()
        self._sent: dict[int, int] = {}
        self._priced = -1
        with contextlib.ExitStack() as opened:
            if wandb_project is not None:
                self._show.append(_wandb(wandb_project, path, worker, run_toml, opened))
            if trackio_project is not None:
                self._show.append(_trackio(trackio_project, path, worker, run_toml, next_step is not None, opened))
            if tensorboard:
                self._show.append(_tensorboard(path / "tensorboard", worker, next_step, opened))
            self._opened = opened.pop_all()

    def metrics(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows a line of metrics; its inner step is where all curves continue."""
        if self._show:
            self._step = self._steps[fields["round"]] = fields.get("step", self._step)
            self._add(fields["round"], self._step, of_metrics(kind, fields))

    def sent(self, entry: int, worker: int, sent_bytes: int) -> None:
        """Adds what a worker has sent in an entry of its trace, and shows it when its round is over."""
        if self._show:
            round, part = divmod(entry, self._traced_per_round)
            self._sent[worker] = self._sent.get(worker, 0) + sent_bytes
            if part == self._traced_per_round - 1:
                self._add(round, self._step, of_bytes(worker, self._sent.pop(worker)))

    def seconds(self, seconds: RoundSeconds) -> None:
        """Shows where the seconds of a worker's round went."""
        if self._show:
            self._add(seconds.round, self._step, of_seconds(seconds))

    def priced(self, seconds: list[RoundSeconds]) -> None:
        """Shows the seconds that were found at the end, of those rounds that this process has trained and not shown."""
        if self._show:
            new = sorted((one for one in seconds if one.round in self._steps), key=lambda one: one.round)
            for one in new:
                if one.round > self._priced:
                    self._add(one.round, self._steps[one.round], of_seconds(one))
            self._priced = max([self._priced, *(one.round for one in new)])

    def close(self) -> None:
        """Shows what is under way and ends the dashboards' runs; may be called twice."""
        if self._means is not None:
            for point in self._means.end():
                self._put(point)
        self._opened.close()
        self._show.clear()

    def _add(self, round: int, step: int, values: Mapping[str, float]) -> None:
        point = CurvePoint(round, step, values)
        for mean in [] if self._means is None else self._means.add(point):
            self._put(mean)
        self._put(point)

    def _put(self, point: CurvePoint) -> None:
        for show in self._show:
            show(point)


def _tensorboard(
    folder: Path, worker: int | None, next_step: int | None, opened: contextlib.ExitStack
) -> Callable[[CurvePoint], None]:
    """Writes events that make viewers forget what an interrupted run wrote from `next_step` on."""
    board = require("torch.utils.tensorboard", "tensorboard", "record.tensorboard = true", "set it to false")
    # Viewers read one event file per folder, so each process needs its own.
    place = str(folder if worker is None else folder / f"worker{worker_suffix(worker)}")
    writer = board.SummaryWriter(place, purge_step=next_step, flush_secs=30)
    opened.callback(writer.close)

    def show(point: CurvePoint) -> None:
        for tag, value in point.values.items():
            writer.add_scalar(tag, value, point.step)

    return show


def _wandb(
    project: str, path: Path, worker: int | None, run_toml: str, opened: contextlib.ExitStack
) -> Callable[[CurvePoint], None]:
    """Logs to a Weights & Biases run, which the same folder continues when it is resumed; a copy of the folder has a new one."""
    id_path = path / f"wandb-id{worker_suffix(worker)}.txt"
    known, _, owner = id_path.read_text().partition("\n") if id_path.exists() else ("", "", "")
    # Who copies a folder to go on from it in two ways copies this file too, and both would write into one run.
    kept = known if owner in ("", path.resolve().name) else None
    run = _opened_run(
        "wandb", project, path, worker, run_toml, opened, id=kept or None, resume="allow", dir=str(path)
    )  # fmt: skip
    run.define_metric("*", step_metric="step")
    atomic_write(id_path, f"{run.id}\n{path.resolve().name}".encode())
    row, at = run.step - 1, -1

    def show(point: CurvePoint) -> None:
        """Logs into the row of this inner step, or a new one.

        W&B numbers rows by itself, offline from 0 in every process, so that a resumed one would overwrite the first rows; and it
        drops what comes for a row before its last. So a row has the number of its inner step, or the next one behind the last.
        """
        nonlocal row, at
        if point.step != at:
            row, at = max(row + 1, point.step), point.step
        run.log({**point.values, "round": point.round, "step": point.step}, step=row)

    return show


def _trackio(
    project: str, path: Path, worker: int | None, run_toml: str, resumed: bool, opened: contextlib.ExitStack
) -> Callable[[CurvePoint], None]:
    """Logs to a run of trackio on this machine, which a resumed run continues."""
    run = _opened_run(
        "trackio", project, path, worker, run_toml, opened, resume="allow" if resumed else "never", embed=False,
        auto_log_gpu=False, auto_log_cpu=False,
    )  # fmt: skip
    return lambda point: run.log({**point.values, "round": point.round}, step=point.step)


def _opened_run(
    package: str, project: str, path: Path, worker: int | None, run_toml: str, opened: contextlib.ExitStack, **options: Any
) -> Any:  # fmt: skip
    """A run of Weights & Biases, or of trackio, which speaks its interface; the workers of a real run form a group."""
    service = require(package, package, f"record.{package}_project = '{project}'", "remove that key")
    group = path.resolve().name
    with contextlib.redirect_stdout(sys.stderr):  # it says where it logs, and stdout is for results
        run = service.init(
            project=project, name=group + worker_suffix(worker), group=group, config=tomllib.loads(run_toml), **options
        )

    def finish() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            run.finish()

    opened.callback(finish)
    return run
