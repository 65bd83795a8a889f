"""The record of a run: one folder with the resolved configuration, metrics, trace and what dashboards want.

```
run.toml              the resolved configuration
metrics[-003].jsonl   one JSON object a line; with a worker's number in a real run
trace[-003].jsonl     see `gossamer.record.trace`
seconds[-003].jsonl   see `gossamer.record.seconds`
stages-003-1.jsonl    see `gossamer.record.stages`
machines[-003].jsonl  see `gossamer.record.machines`
tensorboard/          TensorBoard events
```

Metrics come in kinds. Round r counts from 0 and a line of round r is about the end of that round; an evaluation
before training has round -1. A number that is not finite is written as null.

* `{"kind":"train","round":r,"worker":i,"step":s,"loss":x,"lr":y,"tokens":t}`: the mean loss of a local phase, and the
  steps and tokens that this worker has behind it. With `record.hash` also `"hashes":[...]`, see there.
* `{"kind":"eval","round":r,"step":s,"tokens":t,"loss":x,"worker_losses":[...],"disagreement":d}`: validation loss of
  the mean model and that of each worker's own, the tokens of all workers, and how far the workers are apart,
  `d = sqrt(mean_i |x_i - x_mean|² / P)` over P parameters; their list is empty without `run.eval_workers`; with `run.eval_js`
  also `"js_divergence":j`, how far their predictions are apart, in nats.
* `{"kind":"alignment","round":r,"alignment":a,"persistence":c}` with `record.alignment`: how far the workers' pseudo-gradients
  Δ_i of a round agree, `a = |mean Δ_i|² / mean |Δ_i|²`, and the cosine of mean Δ_i and that of the round before, or null.
"""

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import ConfigError, require
from gossamer.fields import AtLeastOne
from gossamer.record.files import Appender, atomic_write, make_folder, worker_suffix
from gossamer.record.jsonl import json_line, json_lines
from gossamer.record.machines import machine_line, this_machine
from gossamer.record.prometheus import Exporter
from gossamer.record.seconds import RoundSeconds, seconds_line, seconds_lines
from gossamer.record.trace import Entry, line_of
from gossamer.schema import RECORD, Records, settings

__all__ = ["RecordConfig", "RunFolder", "Unrecorded", "finite", "metrics_line", "read_metrics", "run_file"]


@settings("record")
class RecordConfig:
    """What a run writes besides its metrics and its trace."""

    tensorboard: bool = False
    """Whether to write TensorBoard events, with the extra `tensorboard`: losses, bytes and seconds."""
    wandb_project: str | None = None
    """The Weights & Biases project to log to; nothing leaves the machine when None."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The port at which worker 0 serves its figures to Prometheus, with the extra `prometheus`; worker i serves this port + i.
    0 serves nothing."""
    prometheus_host: str = "127.0.0.1"
    """The address on which it is opened: whoever reaches it can read the figures."""
    export: bool = True
    """Whether a simulated run ends by writing its mean model for `from_pretrained`, and a sample of its text."""
    keep_checkpoints: bool = True
    """Whether a simulated run that has ended keeps its checkpoints, from which `gossamer evaluate` scores a round and --resume
    goes on for more steps; without them it can be resumed until it ends, and leaves what it exports."""
    hash: bool = False
    """Whether each worker of a run in rounds records what it is about to send, as hashes that `gossamer audit` compares: of its
    parameters, its outer state and its place in the data. It reads these numbers once a round, at 1 GB/s of sha256: 12 ms for a
    million parameters with two outer vectors; on a GPU they are copied to the CPU first."""
    alignment: bool = False
    """Whether a simulation in rounds measures after each round how far the workers' local phases agree, and how far their mean
    agrees with that of the round before: what outer momentum lives on. It keeps two more copies of all workers' parameters."""
    print_every: AtLeastOne = 10
    """Rounds between two lines of the log where no terminal shows live progress; a validation has a line too, and so has a round
    that ends 30 s after the last one."""


@with_config({**RECORD, "extra": "allow"})
class _Line(TypedDict):
    round: Annotated[int, Field(ge=-1, lt=2**31)]


@with_config({**RECORD, "extra": "allow"})
class _Metric(_Line):
    kind: str


_LINES, _METRICS = Records[_Line](_Line), Records[_Metric](_Metric)


class RunFolder:
    """Writes one run, or one worker's part of it; every line is handed to the system at once, so a killed run keeps it.

    Args:
        path: the folder; made if missing.
        run_toml: the resolved configuration as TOML text.
        worker: the number of the one worker that writes here; None when one process writes for all.
        resume_round: the first round to run (again): lines of it and of later rounds are dropped. None starts a run.
        traced_per_round: entries that a worker writes into the trace in one round.
        void: whether a line of metrics of an earlier round is dropped too.
    Raises: ConfigError when a new run would mix with an old one, or a package that the config asks for is missing; DiskError,
        wherever it writes.
    """

    def __init__(
        self,
        path: Path,
        run_toml: str,
        config: RecordConfig | None = None,
        *,
        worker: int | None = None,
        resume_round: int | None = None,
        traced_per_round: int = 1,
        void: Callable[[Mapping[str, Any]], bool] = lambda line: False,
    ) -> None:
        self.path = Path(path)
        self._traced_per_round, self._void = traced_per_round, void
        self.worker = worker
        self._config = config or RecordConfig()
        self._run_toml = run_toml
        suffix = worker_suffix(worker)
        self._metrics_path = self.path / f"metrics{suffix}.jsonl"
        self._trace_path = self.path / f"trace{suffix}.jsonl"
        self._seconds_path = self.path / f"seconds{suffix}.jsonl"
        self._machines_path = self.path / f"machines{suffix}.jsonl"
        # Workers of one run start at different times, so the files of other workers may be there, those of a simulation not.
        others = "-*" if worker is None else ""
        foreign = [path for kind in ("metrics", "trace") for path in sorted(self.path.glob(f"{kind}{others}.jsonl"))]
        for old in (self._metrics_path, self._trace_path, *foreign):
            if resume_round is None and old.exists():
                raise ConfigError(
                    f"the run folder {self.path} already holds {old.name}; name a new folder, or resume that run"
                )
        make_folder(self.path)
        self.write_text("run.toml", run_toml)
        self._metrics: Appender
        self._trace: Appender
        self._seconds: Appender | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._prometheus: Exporter | None = None
        self._step = 0
        """Inner steps of the newest line of metrics."""
        self._open(None if resume_round is None else self._cut(resume_round))
        if self._config.hash:
            with closing(Appender(self._machines_path)) as machines:
                machines.write(machine_line(resume_round or 0, this_machine()))

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def log(self, kind: str, **fields: Any) -> None:
        """Appends one line of metrics; `fields` are plain JSON values and hold at least the round.

        >>> import tempfile
        >>> with RunFolder(Path(tempfile.mkdtemp()), "", RecordConfig(tensorboard=False)) as run:
        ...     run.log("eval", round=0, step=15, loss=2.5)
        >>> read_metrics(run.path)
        [{'kind': 'eval', 'round': 0, 'step': 15, 'loss': 2.5}]
        """
        self._metrics.write(metrics_line(kind, **fields))
        if self._prometheus is not None:
            self._prometheus.metrics(kind, fields)
        self._step = fields.get("step", fields["round"])
        if self._dashboards:
            self._chart(fields["round"], dict(_scalars(kind, fields)))

    def log_trace(self, entry: Entry) -> None:
        """Appends what one worker did in one round."""
        self._trace.write(line_of(entry))
        sent = sum(size for operation in entry.operations for _, size in operation.sends)
        if self._prometheus is not None:
            self._prometheus.sent(sent)
        if self._dashboards:
            self._chart(
                entry.round // self._traced_per_round, {f"sent_bytes/worker{worker_suffix(entry.worker)}": sent}
            )

    def show_exchanges(self, *, alive: int, made: int, missed: int, unsure: int) -> None:
        """Shows Prometheus, if it looks, how many took part in a round and what became of the exchanges of this worker."""
        if self._prometheus is not None:
            self._prometheus.exchanges(alive, made, missed, unsure)

    def log_seconds(self, seconds: RoundSeconds) -> None:
        """Appends where the seconds of one worker's round went."""
        if self._seconds is None:
            self._seconds = Appender(self._seconds_path)
        self._seconds.write(seconds_line(seconds))
        if self._prometheus is not None:
            self._prometheus.seconds(seconds)
        if self._dashboards:
            suffix = worker_suffix(seconds.worker)
            kinds = {name: getattr(seconds, f"{name}_s") for name in ("compute", "transfer", "waiting", "other")}
            self._chart(seconds.round, {f"seconds/{name}/worker{suffix}": value for name, value in kinds.items()})

    @property
    def _dashboards(self) -> bool:
        return self._tensorboard is not None or self._wandb is not None

    def _chart(self, round: int, scalars: Mapping[str, float]) -> None:
        """Continues curves at the inner step of the newest line of metrics, so that all curves have the same axis."""
        if self._tensorboard is not None:
            for tag, value in scalars.items():
                self._tensorboard.add_scalar(tag, value, self._step)
        if self._wandb is not None:
            self._wandb.log({**scalars, "round": round, "step": self._step})

    def write_seconds(self, seconds: Iterable[RoundSeconds]) -> None:
        """Replaces the record of seconds, of a simulation that finds those of all rounds at its end."""
        self.write_text(self._seconds_path.name, seconds_lines(seconds))

    def _cut(self, round: int) -> int:
        _cut(self._trace_path, round * self._traced_per_round)
        _cut(self._seconds_path, round)
        _cut(self._machines_path, round)
        return _cut(self._metrics_path, round, self._void)

    def write_text(self, name: str, text: str) -> None:
        """Puts a text file into the folder, all at once."""
        atomic_write(self.path / name, text.encode())

    def close(self) -> None:
        """Ends the dashboards' runs and closes the files; may be called twice."""
        self._metrics.close()
        self._trace.close()
        if self._seconds is not None:
            self._seconds.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None
        if self._prometheus is not None:
            self._prometheus.close()
            self._prometheus = None

    def _open(self, next_step: int | None) -> None:
        # Dashboards first: they are what can be missing, and no file is left open then.
        if self._config.prometheus_port:
            self._prometheus = Exporter(self._config.prometheus_host, self._config.prometheus_port, self.worker)
        if self._config.wandb_project is not None:
            self._wandb = _wandb(self._config.wandb_project, self.path, self.worker, self._run_toml)
        if self._config.tensorboard:
            self._tensorboard = _tensorboard(self.path / "tensorboard", self.worker, next_step)
        self._metrics, self._trace = Appender(self._metrics_path), Appender(self._trace_path)


class Unrecorded:
    """What a process has in place of a `RunFolder` when another process of its worker records what the worker does."""

    def log(self, kind: str, **fields: Any) -> None:
        """Writes nothing."""

    def log_trace(self, entry: Entry) -> None:
        """Writes nothing."""

    def log_seconds(self, seconds: RoundSeconds) -> None:
        """Writes nothing."""


def metrics_line(kind: str, **fields: Any) -> str:
    """One line of a metrics file; a number that is not finite becomes null."""
    assert isinstance(fields.get("round"), int), fields
    return json_line(finite({"kind": kind, **fields}))


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run from all its `metrics*.jsonl`, by round; inside a round file by file, metrics.jsonl first.

    Raises: DataError for a line that is not a JSON object with a kind and a round.
    """
    lines: list[dict[str, Any]] = []
    for path in sorted(Path(run_folder).glob("metrics*.jsonl"), key=lambda path: path.stem):
        for where, value in json_lines(path):
            _METRICS.of(value, where)
            lines.append(value)
    return sorted(lines, key=lambda line: line["round"])


def run_file(folder: Path) -> Path:
    """The file with the configuration of a run. Raises ConfigError, naming the runs inside the folder, when it holds none."""
    path = Path(folder) / "run.toml"
    if not path.is_file():
        inside = sorted(one.parent.name for one in Path(folder).glob("*/run.toml"))
        names = ", ".join(inside[:8]) + (f" and {len(inside) - 8} more" if len(inside) > 8 else "")
        instead = f"it holds runs: {names}; name one of them" if inside else "name one that gossamer wrote"
        raise ConfigError(f"'{folder}' is no run folder (no run.toml); {instead}")
    return path


def _cut(path: Path, round: int, void: Callable[[Mapping[str, Any]], bool] = lambda line: False) -> int:
    """Rewrites a JSONL file without the lines of `round` and later and without the void; returns the first step after it."""
    if not path.exists():
        return 0
    lines = json_lines(path)
    kept = [value for where, value in lines if _LINES.of(value, where)["round"] < round and not void(value)]
    atomic_write(path, "".join(map(json_line, kept)).encode())
    return max([0, *(value["step"] + 1 for value in kept if isinstance(value.get("step"), int))])


def finite(value: Any) -> Any:
    """The same value with null for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def _scalars(kind: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The curves that one line of metrics continues: "eval/loss", "train/loss/worker-003"."""
    suffix = f"/worker-{fields['worker']:03}" if "worker" in fields else ""
    for name, value in fields.items():
        if name not in ("round", "worker", "step") and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{kind}/{name}{suffix}", value


def _tensorboard(folder: Path, worker: int | None, next_step: int | None) -> Any:
    """A writer of events that makes viewers forget what an interrupted run wrote from `next_step` on."""
    board = require("torch.utils.tensorboard", "tensorboard", "record.tensorboard = true", "set it to false")
    # Viewers read one event file per folder, so each process needs its own.
    return board.SummaryWriter(
        str(folder if worker is None else folder / f"worker{worker_suffix(worker)}"),
        purge_step=next_step,
        flush_secs=30,
    )


def _wandb(project: str, path: Path, worker: int | None, run_toml: str) -> Any:
    """A Weights & Biases run that a resumed run continues; the workers of a real run form a group."""
    wandb = require("wandb", "wandb", f"record.wandb_project = '{project}'", "remove that key")
    suffix = worker_suffix(worker)
    id_path = path / f"wandb-id{suffix}.txt"
    run = wandb.init(
        project=project,
        group=path.resolve().name,
        name=path.resolve().name + suffix,
        id=id_path.read_text().strip() if id_path.exists() else None,
        resume="allow",
        dir=str(path),
        config=tomllib.loads(run_toml),
    )
    run.define_metric("*", step_metric="step")
    atomic_write(id_path, run.id.encode())
    return run
