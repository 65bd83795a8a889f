"""A simulation as an object that can be inspected, stopped and resumed."""

import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.data.corpus import text_fingerprint
from gossamer.errors import CheckpointError, ConfigError, MissingPackageError, choose
from gossamer.record.folder import read_metrics
from gossamer.record.locks import locked
from gossamer.record.logs.trace import Trace, read_trace
from gossamer.report.page.page import write_report
from gossamer.run.bookkeeping.evaluate import Result, mean_buffers, model_with, trained_model_of
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.config.run_file import RunConfig
from gossamer.run.worker.task import Task

if TYPE_CHECKING:
    import pandas


class Engine(Protocol):
    """The engine that trains the workers of a simulation, round by round."""

    run: ResolvedRun
    folder: Path
    task: Task
    finished: int
    """Completed rounds."""

    def opened(self) -> AbstractContextManager[None]:
        """Opens files and starts threads, in order to train."""
        ...

    def advance(self) -> None:
        """Trains the next round."""
        ...

    def save(self) -> None:
        """Saves after the rounds so far, whether a checkpoint is due or not."""
        ...

    def result(self) -> Result:
        """The figures of the rounds so far."""
        ...

    def models(self) -> list[Tensor]:
        """The parameters of each worker, or of the server."""
        ...

    def buffers(self) -> list[list[Tensor]]:
        """The buffers of each worker's model."""
        ...


class Columns(Mapping[str, list[Any]]):
    """A history as columns: one list for each name, all of the same length, with None where a line has no such field.

    >>> lines = Columns([{"round": 0, "loss": 2.5}, {"round": 1, "loss": 2.0}])
    >>> lines["loss"], list(lines), len(lines["round"])
    ([2.5, 2.0], ['round', 'loss'], 2)
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        names = dict.fromkeys(name for line in lines for name in line)
        self._columns = {name: [line.get(name) for line in lines] for name in names}

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._columns:
            raise KeyError(choose("column", name, self._columns))
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        rows = len(next(iter(self._columns.values()), []))
        return f"Columns({', '.join(self._columns)}; {rows} rows)"

    def to_pandas(self) -> "pandas.DataFrame":
        """The columns as a data frame. Raises MissingPackageError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise MissingPackageError(f"to_pandas() needs pandas ({error}); run pip install pandas") from None
        return pandas.DataFrame(self._columns)


def _forget(folder: Path) -> None:
    """Removes the checkpoints of an ended run. Raises CheckpointError if it fails."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in '{folder}' could not be removed ({error.strerror or error}), as record.keep_checkpoints = false "
            "asks for; remove them by hand: the run has ended"
        ) from error


class RecordedRun:
    """A run that is recorded in a folder: its histories, its trace, and its report."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder

    @property
    def training(self) -> Columns:
        """A row for each worker and round: round, worker, step, loss (the mean over its local steps), lr, tokens."""
        return self._lines("train")

    @property
    def validation(self) -> Columns:
        """A row for each validation: round, step, tokens, loss (of the mean model), worker_losses and disagreement."""
        return self._lines("eval")

    @property
    def trace(self) -> Trace:
        """The trace of messages, to be priced: `gossamer.price(simulation.trace, network)`. Only runs in rounds have one."""
        if self.config.event_driven:
            raise ConfigError(
                f"'{self.config.name}' is asynchronous ({self.config.kind}), so its network decided what was computed, and it "
                "cannot be priced on another; its events are in events.jsonl of its folder, and its seconds in time_s"
            )
        return read_trace(self.folder)

    def report(self, path: str | Path | None = None) -> Path:
        """Writes the report as one page, by default `report.html` in its folder; returns its path."""
        target = self.folder / "report.html" if path is None else Path(path)
        write_report({self.config.name: self.folder}, target, self.config.network)
        return target

    def _lines(self, kind: str) -> Columns:
        rows = [line for line in read_metrics(self.folder) if line["kind"] == kind]
        return Columns([{key: value for key, value in row.items() if key != "kind"} for row in rows])


class Simulation(RecordedRun):
    """A simulated run: its record so far, and the engine to continue it. Created by `gossamer.simulate`.

    It holds neither files nor threads between its calls.

    Args:
        config: the run, as `gossamer.simulate` takes one.
        engine: the workers.
        temporary: the folder of the record is removed with this object.
    """

    def __init__(self, config: RunConfig, engine: Engine, *, temporary: bool = False) -> None:
        super().__init__(config, engine.folder)
        self._engine = engine
        if temporary:
            weakref.finalize(self, shutil.rmtree, engine.folder, ignore_errors=True)
        self._result: Result | None = None

    @property
    def rounds(self) -> int:
        """Completed rounds."""
        return self._engine.finished

    @property
    def resolved(self) -> ResolvedRun:
        """The run with all its parts."""
        return self._engine.run

    @property
    def text(self) -> str:
        """The fingerprint of the training text; empty unless it is files."""
        return text_fingerprint(self._engine.task.data)

    @property
    def over(self) -> bool:
        """Whether all rounds are over."""
        return self.rounds >= self.config.length.rounds

    @torch.inference_mode(False)
    def go_on(
        self, until: int | None = None, *, asked: Callable[[], bool] = lambda: False, is_held: bool = False
    ) -> "Simulation":
        """Continues training up to round `until`, or to the end; returns itself.

        Args:
            asked: called after each round; returns whether to save and stop.
            is_held: whether the caller has the lock of the run folder, which is taken otherwise.
        Raises: TrainingError when a number is not finite; UserCodeError when code of the user's fails; ConfigError when
            another process trains in the folder; KeyboardInterrupt when it was asked to stop.
        """
        if until is not None and until < 0:
            raise ConfigError(
                f"until got {until}; give the number of rounds to stop after, of {self.config.length.rounds}"
            )
        last = self.config.length.rounds if until is None else min(until, self.config.length.rounds)
        with nullcontext() if is_held else locked(self.folder, None), self._engine.opened():
            while self._engine.finished < last:
                self._engine.advance()
                if asked() and self._engine.finished < last:
                    self._engine.save()
                    done = f"{self._engine.finished} of {self.config.length.rounds}"
                    raise KeyboardInterrupt(
                        f"stopped after round {done}, and saved; resume with --resume {quote(str(self.folder))}"
                    )
            self._result = self._engine.result()
        if self.over and not self.config.record.keep_checkpoints:
            _forget(self.folder / "checkpoints")
        return self

    @property
    def result(self) -> Result:
        """Loss, tokens, speed, and seconds on each network, of the rounds so far. Raises ConfigError before the first round."""
        if self._result is None:
            raise ConfigError(f"'{self.config.name}' has trained 0 rounds and has no result; call go_on() first")
        return self._result

    @property
    def loss(self) -> float:
        """Loss of the mean model (of the server's, where there is one) in the last validation."""
        return self.result.loss

    @property
    def tokens(self) -> int:
        """Tokens of all workers together."""
        return self.result.tokens

    @property
    def tokens_per_s(self) -> float:
        """Speed of this machine, without validation and checkpoints."""
        return self.result.tokens_per_s

    @property
    def time_s(self) -> Mapping[str, float]:
        """Seconds that the run would take on each of its networks."""
        return self.result.time_s

    @torch.inference_mode(False)
    def mean_model(self) -> nn.Module:
        """A new model with the mean of all workers' parameters (or the server's), in evaluation mode.

        Floating-point buffers are the means of the workers' own, others those of worker 0. Cost: one model.
        """
        engine = self._engine
        return model_with(
            engine.run, engine.task, trained_model_of(engine.task, engine.models()), mean_buffers(engine.buffers())
        )

    @torch.inference_mode(False)
    def model(self, worker: int) -> nn.Module:
        """A new model with the parameters and buffers of one worker (or the server's), in evaluation mode. Cost: one model.

        Experts that the worker does not hold are zeros, so that tokens skip them. Raises: ConfigError without such a worker.
        """
        engine = self._engine
        models = engine.models()
        if not 0 <= worker < len(models):
            raise ConfigError(
                f"model got worker {worker}, but the run keeps the models of 0 to {len(models) - 1}; name one of them"
            )
        return model_with(engine.run, engine.task, models[worker], engine.buffers()[worker])

    def __repr__(self) -> str:
        figures = "" if self._result is None else f", loss {self.loss:.4f}"
        return f"<Simulation '{self.config.name}': round {self.rounds} of {self.config.length.rounds}{figures}>"
