"""The record of a run: one folder with the resolved configuration, metrics, trace and files of dashboards.

```
run.toml              the resolved configuration
inputs[-003].json     see `gossamer.record.inputs`
metrics[-003].jsonl   one JSON object a line; with a worker's number in a real run, "evaluated" of `gossamer evaluate`
trace[-003].jsonl     see `gossamer.record.logs.trace`
seconds[-003].jsonl   see `gossamer.record.logs.seconds`
stages[-003-1].jsonl  see `gossamer.record.logs.stage_seconds`
machines[-003].jsonl  see `gossamer.record.machines`
tensorboard/          TensorBoard events
```

Metrics come in kinds. Round r counts from 0 and a line of round r is about the end of that round; a validation of the
initial values has round -1 and step 0. A number that is not finite, or from 1e300 on, is written as null.

* `{"kind":"train","round":r,"worker":i,"step":s,"loss":x,"lr":y,"tokens":t}`: the mean loss of a local phase, and the
  steps and tokens that this worker has completed. With `record.hash` also `"hashes":[...]`, see there. Where messages of
  others did not count, `"declined":{"3":k}` has their number by sender, and `"shortened":{"3":k}` the number that a rule
  has shortened. A rule that shortens the mean itself adds `"update_norm":a,"capped_norm":b`, its norm before and after.
  Where stages of it were lost before the round, `"recovered":{"1":"worker 2"}` has the source that each recovered from,
  or `"neighbours"`.
* `{"kind":"eval","round":r,"step":s,"tokens":t,"loss":x,"worker_losses":[...],"disagreement":d}`: validation loss of
  the mean model and of each worker's model, the tokens of all workers, and the disagreement of the workers,
  `d = sqrt(mean_i |x_i - x_mean|² / P)` over P parameters; their list is empty without `run.eval_workers`.
  That of an evaluation afterwards has `"branch":b`, the number of changes of settings before its round: it counts unless
  the run was rewound and changed again.
* `{"kind":"validation","round":r,"worker":i,"step":s,"tokens":t,"loss":x}`: the same of a real worker's own model.
* `{"kind":"diverged","round":r}`, with the worker in a real run: a number of round r is not finite, which ended the run. The
  last validation may be before it, and is then not its result.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Annotated, Any, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import ConfigError, DiskError, TrainingError
from gossamer.record.dashboards.loggers import Dashboards
from gossamer.record.dashboards.prometheus import Exporter
from gossamer.record.jsonl import JsonObjects, Seen, folder_lines, json_line, keep_before
from gossamer.record.lineage import Branch, branch_of, read_branches
from gossamer.record.logs.seconds import RoundSeconds, seconds_line, seconds_lines
from gossamer.record.logs.stage_seconds import STAGES_FILE
from gossamer.record.logs.trace import Entry, line_of
from gossamer.record.machines import Threads, machine_line, this_machine
from gossamer.record.whole_files import Appender, atomic_write, make_folder, worker_suffix
from gossamer.settings.options import Count
from gossamer.settings.schema import RECORD, Records, settings

log = logging.getLogger("gossamer")


@settings("record")
class RecordConfig:
    """What a run writes in addition to its metrics and its trace."""

    tensorboard: bool = False
    """Whether to write TensorBoard events, with the extra `tensorboard`: losses, disagreement, bytes and seconds of each worker,
    and means over the workers that this process writes for."""
    wandb_project: str | None = None
    """The Weights & Biases project to log the same curves to; nothing leaves the machine when None or WANDB_MODE=offline."""
    trackio_project: str | None = None
    """The trackio project to log the same curves to, with the extra `trackio`. They stay on this machine, unless the environment
    names a server for trackio."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The port at which worker 0 serves its figures to Prometheus, with the extra `prometheus`; worker i serves this port + i.
    0 serves nothing."""
    prometheus_host: str = "127.0.0.1"
    """The address on which it is opened: anyone who reaches it can read the figures."""
    export: bool = True
    """Whether a simulated run ends by writing its mean model for `from_pretrained`, and a sample of its text."""
    keep_checkpoints: bool = True
    """Whether a simulated run that has ended keeps its checkpoints, from which `gossamer evaluate` scores a round and
    --resume trains for more steps; without them it can be resumed until it ends, and leaves what it exports.
    """
    hash: bool = False
    """Whether each worker of a run in rounds records hashes before it sends, which `gossamer audit` compares: of its
    parameters, its outer state and its position in the data. It reads these numbers once a round, at 1 GB/s of sha256:
    12 ms for a million parameters with two outer vectors; on a GPU they are copied to the CPU first."""
    print_every: Count = 10
    """Rounds between two lines of the log where no terminal shows a live table; a validation has a line too, and a line
    is printed at least every 30 s.
    """


_LIMIT = 1e300
"""Sums and ratios of figures below it stay finite."""
_Figure = Annotated[float, Field(gt=-_LIMIT, lt=_LIMIT)]


@with_config({**RECORD, "extra": "allow"})
class _Metric(TypedDict):
    kind: str
    round: Annotated[int, Field(ge=-1, lt=2**31)]
    worker: NotRequired[Annotated[int, Field(ge=0, lt=2**20)]]
    loss: NotRequired[_Figure | None]
    step: NotRequired[_Figure]
    tokens: NotRequired[_Figure]
    worker_losses: NotRequired[list[_Figure | None]]
    disagreement: NotRequired[_Figure | None]


_LATER = 2**31
"""Above each round."""
_EVALUATED = "metrics-evaluated.jsonl"
METRICS = Records[_Metric](_Metric)
"""The lines of metrics; further keys of each kind are checked where they are used."""


class _AsWritten(JsonObjects):
    """Lines of metrics with their keys in file order, so that rewriting a line does not change it."""

    def parse(self, line: bytes | str, where: str) -> dict[str, Any]:
        """The line. Raises: DataError, which names `where`."""
        value = super().parse(line, where)
        METRICS.of(value, where)
        return value


class RunFolder:
    """Writes one run, or one worker's part of it; every line is flushed at once, so a killed run keeps it.

    Args:
        path: the folder; made if missing.
        run_toml: the resolved configuration as TOML text.
        worker: the number of the one worker that writes here; None when one process writes for all.
        resume_round: the first round to run (again): lines of it and of later rounds are dropped. None starts a run.
        traced_per_round: entries that a worker writes into the trace in one round.
        void: whether a line of metrics of an earlier round is dropped too.
        threads: the threads of all workers where one process computes for them, and the number of workers; None for one
            worker, with the threads of the calling thread.
        computes: whether this machine still has rounds to compute.
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
        threads: tuple[Threads, int] | None = None,
        computes: bool = True,
    ) -> None:
        self.path = Path(path)
        self._traced_per_round, self._void = traced_per_round, void
        self.worker = worker
        self._begun = resume_round or 0
        """The first round without a line of training."""
        self._config = config or RecordConfig()
        self._run_toml = run_toml
        if resume_round is None:
            must_be_new(self.path, worker)
        make_folder(self.path)
        self.write_text("run.toml", run_toml)
        self._metrics: Appender
        self._trace: Appender
        self._seconds: Appender | None = None
        self._prometheus: Exporter | None = None
        next_step = None if resume_round is None else self._cut(resume_round)
        with ExitStack() as opened:  # closed where the rest cannot be opened
            self._open(opened, next_step)
            if computes:
                since, here = resume_round or 0, this_machine()
                lines = machine_line(since, here) if threads is None else threads[0].lines(since, here, threads[1])
                with closing(Appender(self._file("machines"))) as machines:
                    machines.write(lines)
            opened.pop_all()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TrainingError):
            of = {} if self.worker is None else {"worker": self.worker}
            with suppress(DiskError):  # the first error is the one to report
                self._metrics.write(metrics_line("diverged", round=self._begun, **of))
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
        if kind == "train":
            self._begun = max(self._begun, fields["round"] + 1)
        for one in self._shown:
            one.metrics(kind, fields)

    def log_trace(self, entry: Entry) -> None:
        """Appends what one worker did in one round."""
        self._trace.write(line_of(entry))
        sent = sum(operation.sent_bytes for operation in entry.operations)
        for one in self._shown:
            one.sent(entry.round, entry.worker, sent)

    def drop(self, void: Callable[[Mapping[str, Any]], bool]) -> None:
        """Removes these lines of metrics; what dashboards show of them stays."""
        self._metrics.close()
        _cut(self._file("metrics"), _LATER, void)
        self._metrics = Appender(self._file("metrics"))

    def show_exchanges(self, *, alive: int, made: int, missed: int, unsure: int) -> None:
        """Reports the participants of a round and the outcomes of this worker's exchanges to Prometheus, if enabled."""
        if self._prometheus is not None:
            self._prometheus.exchanges(alive, made, missed, unsure)

    def log_seconds(self, seconds: RoundSeconds) -> None:
        """Appends the breakdown of the seconds of one worker's round."""
        if self._seconds is None:
            self._seconds = Appender(self._file("seconds"))
        self._seconds.write(seconds_line(seconds))
        for one in self._shown:
            one.seconds(seconds)

    def remain(self) -> None:
        """Makes the folder again, with the run file, if it was moved or removed, so that what is saved next can be used."""
        if (self.path / "run.toml").exists():
            return
        make_folder(self.path)
        self.write_text("run.toml", self._run_toml)
        log.warning(
            "the run folder '%s' was moved or removed while the run trains: checkpoints come into a new one of that name, and "
            "metrics stay with the old one; bring the files of both into one folder when the run has ended",
            self.path,
        )

    def write_seconds(self, seconds: Iterable[RoundSeconds]) -> None:
        """Replaces the record of seconds, for a simulation that computes all of them at its end."""
        rows = list(seconds)
        self.write_text(self._file("seconds").name, seconds_lines(rows))
        self._dashboards.priced(rows)

    def _file(self, kind: str) -> Path:
        return self.path / f"{kind}{worker_suffix(self.worker)}.jsonl"

    def _cut(self, round: int) -> int:
        # All workers cut this file, to the same content: an evaluation of what is trained again is void.
        _cut(self.path / _EVALUATED, round or -1)
        if self.worker is None:
            _cut(self.path / STAGES_FILE, round)
        # A simulation may resume from the checkpoints of real workers, and they from its own, and the lines of the
        # others about a round that is trained again would be duplicates. All workers cut the file of a simulation to
        # the same content.
        first_lines = {
            "trace": round * self._traced_per_round,
            "seconds": round,
            "metrics": round or -1,
            "machines": round,
        }
        for kind, first in first_lines.items():
            written = [] if kind == "metrics" else [self._file(kind)]
            for path in [*written, *self.path.glob(f"{kind}-[0-9]*.jsonl" if self.worker is None else f"{kind}.jsonl")]:
                _cut(path, first)
        return _cut(self._file("metrics"), round or -1, self._void)  # a restart validates its initial values again

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file into the folder atomically."""
        atomic_write(self.path / name, text.encode())

    def close(self) -> None:
        """Ends the dashboards' runs and closes the files; may be called twice."""
        self._metrics.close()
        self._trace.close()
        if self._seconds is not None:
            self._seconds.close()
        while self._shown:
            self._shown.pop().close()

    def _open(self, opened: ExitStack, next_step: int | None) -> None:
        if self._config.prometheus_port:
            self._prometheus = Exporter(self._config.prometheus_host, self._config.prometheus_port, self.worker)
            opened.callback(self._prometheus.close)
        self._dashboards = Dashboards(
            self.path,
            self.worker,
            self._run_toml,
            next_step,
            tensorboard=self._config.tensorboard,
            wandb_project=self._config.wandb_project,
            trackio_project=self._config.trackio_project,
            traced_per_round=self._traced_per_round,
        )
        opened.callback(self._dashboards.close)
        self._shown = [one for one in (self._prometheus, self._dashboards) if one is not None]
        """What shows the run elsewhere."""
        self._metrics, self._trace = (
            opened.enter_context(closing(Appender(self._file(kind)))) for kind in ("metrics", "trace")
        )


class Unrecorded:
    """A stand-in for `RunFolder` in a process whose worker is recorded by another process."""

    def log(self, kind: str, **fields: Any) -> None:
        """Writes nothing."""

    def log_trace(self, entry: Entry) -> None:
        """Writes nothing."""

    def log_seconds(self, seconds: RoundSeconds) -> None:
        """Writes nothing."""

    def remain(self) -> None:
        """Does nothing: the other process does it."""


def metrics_line(kind: str, **fields: Any) -> str:
    """One line of a metrics file; a number that is not finite becomes null."""
    assert isinstance(fields.get("round"), int), fields
    return json_line(finite({"kind": kind, **fields}))


def read_metrics(run_folder: Path, *, seen: Seen | None = None) -> list[dict[str, Any]]:
    """The metrics of a run from all its `metrics*.jsonl`, by round; inside a round file by file, metrics.jsonl first.

    Evaluations of abandoned branches are left out.

    Args: `seen` as in `folder_lines`.
    Raises: DataError for a line that is not a JSON object with a kind and a round.
    """
    branches, lines = read_branches(Path(run_folder)), _lines(run_folder, seen)
    kept = [line for name, line in lines if name != _EVALUATED or is_of_its_branch(line, branches)]
    return sorted(kept, key=lambda line: line["round"])


def _lines(run_folder: Path, seen: Seen | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of all files of metrics, each with the name of its file."""
    lines = folder_lines(run_folder, "metrics", _AsWritten(), seen=seen, owner=lambda line: line.get("worker"))
    return ((path.name, line) for path, _, line in lines)


def is_of_its_branch(line: Mapping[str, Any], branches: Sequence[Branch]) -> bool:
    """Whether an evaluation belongs to its round's current branch; lines of 0.1.0 have no branch."""
    return line.get("branch") in (None, branch_of(branches, line["round"] + 1))


def ended_diverged(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run ended as a number was not finite, by its lines of metrics; in an elastic run others may continue.

    >>> ended_diverged([{"kind": "diverged", "round": 6, "worker": 0}, {"kind": "train", "round": 7, "worker": 1}])
    False
    """
    newest = dict[str, int]()
    for line in lines:
        newest[line["kind"]] = max(line["round"], newest.get(line["kind"], -1))
    return newest.get("diverged", -1) >= newest.get("train", 0)


def recoveries(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """The rounds before which stages were lost, from lines of metrics, and their source of recovery, in words.

    >>> [*recoveries([{"kind": "train", "round": 6, "worker": 0, "recovered": {"1": "worker 2"}}])]
    [(6, 'stage 1 of worker 0 was lost, and went on from worker 2')]
    """
    for line in lines:
        if line["kind"] == "train" and isinstance(recovered := line.get("recovered"), dict):
            for stage, source in recovered.items():
                yield (
                    line["round"],
                    f"stage {stage:.8} of worker {line.get('worker')} was lost, and went on from {source!s:.20}",
                )


def newest_evaluation(lines: Iterable[Mapping[str, Any]], branches: Sequence[Branch] = ()) -> Mapping[str, Any] | None:
    """The newest evaluation of the mean model of a run that is trained, from its metrics; None without one.

    An evaluation before the last change of settings does not count, unless no round has been trained since.

    >>> lines = [{"kind": "eval", "round": 3, "loss": 2.5}, {"kind": "train", "round": 4, "worker": 0}]
    >>> newest_evaluation(lines)["loss"], newest_evaluation(lines, [{"round": 4, "digest": "", "changes": {}}])
    (2.5, None)
    """
    first = max((branch["round"] for branch in branches), default=0)
    newest, trained = None, 0
    for line in lines:
        if line["kind"] == "train":
            trained = max(trained, line["round"] + 1)
        elif line["kind"] == "eval" and "worker" not in line and line["round"] >= 0:
            newest = line if newest is None or line["round"] >= newest["round"] else newest
    return newest if newest is not None and (newest["round"] + 1 > first or newest["round"] + 1 >= trained) else None


def note_evaluation(run_folder: Path, *, round: int, **figures: Any) -> None:
    """Replaces the result of an earlier evaluation of a round.

    Writes nothing for a round that the run has validated itself. Raises: DataError for a spoilt record; DiskError.
    """
    branches, kept = read_branches(run_folder), list[str]()
    for name, line in _lines(run_folder):
        if name == _EVALUATED and line["round"] != round and is_of_its_branch(line, branches):
            kept.append(json_line(line))
        elif name != _EVALUATED and (line["kind"], line["round"]) == ("eval", round) and "loss" in line:
            return
    new = metrics_line("eval", round=round, branch=branch_of(branches, round + 1), **figures)
    atomic_write(run_folder / _EVALUATED, "".join([*kept, new]).encode())


def must_be_new(folder: Path, worker: int | None) -> None:
    """Raises ConfigError where an earlier run left files that this one would overwrite or mix with.

    Args: `worker` is that of this process; None for all of them.
    """
    # Workers of one run start at different times, so files of other workers are allowed, those of a simulation are not.
    suffix_here, others = worker_suffix(worker), "-*" if worker is None else ""
    names = [f"{kind}{suffix}.jsonl" for suffix in (suffix_here, others) for kind in ("metrics", "trace")]
    names += [f"{kind}{suffix_here}.jsonl" for kind in ("events", "outcomes", "order")]
    for old in (
        path for name in (*names, f"checkpoints/**/round-*/worker{suffix_here or '-*'}.*") for path in folder.glob(name)
    ):
        raise ConfigError(
            f"the run folder '{folder}' already holds {old.relative_to(folder)}; name a new one with --out, or go on with "
            f"--resume {quote(str(folder))}"
        )


def store_file(folder: Path) -> Path:
    """The file with the identity of the run in a store to which a run folder belongs; not there in folders of other runs."""
    return Path(folder) / "store.txt"


def run_file(folder: Path) -> Path:
    """The file with the configuration of a run. Raises ConfigError, naming the runs inside the folder, when it holds none."""
    path = Path(folder) / "run.toml"
    if Path(folder).is_file():
        instead = (
            f"name its folder, '{Path(folder).parent}'" if Path(folder).name == "run.toml" else "name a run's folder"
        )
        raise ConfigError(f"'{folder}' is a file and no run folder; {instead}")
    if (Path(folder) / "run").is_file() and not path.is_file():
        raise ConfigError(
            f"'{folder}' is the store of a run and no run folder; name the folder of one of its machines: only gossamer status "
            "and watch read stores"
        )
    if not path.is_file():
        inside = sorted(one.parent.name for one in Path(folder).glob("*/run.toml"))
        names = ", ".join(inside[:8]) + (f" and {len(inside) - 8} more" if len(inside) > 8 else "")
        instead = f"it holds runs: {names}; name one of them" if inside else "name one that gossamer wrote"
        why = "no run.toml" if Path(folder).exists() else "nothing is there"
        raise ConfigError(f"'{folder}' is no run folder ({why}); {instead}")
    return path


def _cut(path: Path, round: int, void: Callable[[Mapping[str, Any]], bool] = lambda line: False) -> int:
    """Removes the lines of `round` and later and the void ones from a JSONL file; returns the first step after it."""
    kept = keep_before(path, round, void)
    return max([0, *(step + 1 for line in kept if isinstance(step := line.get("step"), int))])


def finite(value: Any) -> Any:
    """The same value with null for every number that JSON cannot represent, or no line of metrics may have."""
    if isinstance(value, float):
        return value if abs(value) < _LIMIT else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value
