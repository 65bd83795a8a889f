"""Simulating a run: all workers in one process, in rounds or over virtual time."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Unpack

import psutil
import torch
from torch import Tensor

from gossamer.data.settings import must_fit_memory
from gossamer.data.tokenizer import vocabulary
from gossamer.errors import ConfigError
from gossamer.models.sizes import parameter_count
from gossamer.record import checkpoint
from gossamer.record.folder import newest_evaluation, read_metrics
from gossamer.record.locks import locked
from gossamer.record.progress import say
from gossamer.report.terminal import Terminal
from gossamer.run.bookkeeping.evaluate import Result
from gossamer.run.bookkeeping.finished import is_finished
from gossamer.run.bookkeeping.inputs import changed_code
from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.bookkeeping.which_round import ended
from gossamer.run.config.resolve import resolve
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.config.run_file import RunConfig
from gossamer.run.config.user_parts import KEYS, UserParts
from gossamer.run.simulated.keywords import Keywords, in_keywords, run_and_parts
from gossamer.run.simulated.rounds import Rounds
from gossamer.run.simulated.simulation import Engine, Simulation
from gossamer.run.simulated.virtual_time import VirtualTimeSimulation
from gossamer.run.worker.task import task_of
from gossamer.transport.processes.launch import one_device


@torch.inference_mode(False)  # it trains, wherever it is called
def simulate(
    run: str | Path | Mapping[str, Any] | RunConfig | None = None,
    out: str | Path | None = None,
    *,
    resume: Resume = False,
    until: int | None = None,
    progress: bool = False,
    **given: Unpack[Keywords],
) -> Simulation:
    """Trains all workers of a run in this process, and returns what it recorded.

        run = gossamer.simulate(model=net, data=batch, loss=loss, rule="gasloc", topology="ring", workers=8, rounds=50)
        run.loss, run.validation["disagreement"], run.mean_model(), run.trace

    Everything has a default: without arguments it trains a small Llama on the source of this machine's Python, with GASLoC
    among eight workers.

    Args:
        run: a run file, its settings as a dictionary, or a `RunConfig`; what is `given` by keyword overrides it.
        out: the run folder; None records into a temporary one, removed with the returned object.
        resume: continue from the newest sound checkpoint in `out`; "auto" starts where there is none.
        until: stop after this many rounds; `Simulation.go_on` continues.
        progress: show progress on stderr.
        given: see `gossamer.run.simulated.keywords.Keywords`: `model`, `data`, `loss`, `optimizer`, `rule`, `topology`, …
    Raises: ConfigError, PairingError, DataError, CheckpointError; UserCodeError when your code fails; TrainingError when a loss
        is not finite. It sets no handlers of signals: a KeyboardInterrupt ends it at once, and `out` keeps its last checkpoint,
        from which resume="auto" continues.
    Cost: parameters, gradients, inner and outer state of every worker, and one message per worker in flight.

    A run in rounds computes bit for bit what real processes compute: those of `gossamer train` on this machine, and at one thread
    those of your own loop with `gossamer.Outer` and the same functions, if it calls `torch.manual_seed(seed)` before it makes its
    model. Where a forward pass draws random numbers, your loop must take them from `outer.drawing()`. A run whose local steps
    adapt (`run.adapt`) follows the clock there, and the seconds of the declared network here. An asynchronous run takes place in
    virtual time.

    >>> import gossamer, torch
    >>> def batch(worker, step):
    ...     return torch.full((4, 2), float(worker))
    >>> def loss(model, x):
    ...     return (model(x) - 1).square().mean()
    >>> run = gossamer.simulate(model=lambda: torch.nn.Linear(2, 1), data=batch, loss=loss, rule="diloco", workers=2, rounds=3)
    >>> run.rounds, len(run.training["loss"])
    (3, 6)
    """
    with in_keywords(given):
        config, parts = run_and_parts(run, given)
        resolved, folder = resolve(config, parts), Path(mkdtemp(prefix="gossamer-")) if out is None else Path(out)
        if resume:  # objects given by keyword are trusted
            changed_code(resolved, folder, "resume", allowed=bool(KEYS.keys() & given.keys()))
        with ExitStack() as unless_ended, Terminal() if progress else nullcontext() as terminal, locked(folder, None):
            if out is None:
                unless_ended.callback(shutil.rmtree, folder, ignore_errors=True)
            if terminal is not None:
                terminal.follow(config.name, folder, config.record.print_every)
            recorded = recorded_beside(run) if isinstance(run, str | Path) and not resume else None
            engine = engine_of(resolved, folder, resume=resume, recorded=recorded)
            simulation = Simulation(config, engine, temporary=out is None)
            simulation.go_on(until, is_held=True)
            unless_ended.pop_all()
            return simulation


def simulate_until_asked(
    config: RunConfig,
    parts: UserParts,
    folder: Path,
    *,
    resume: Resume = False,
    until: int | None = None,
    recorded: Path | None = None,
    asked: Callable[[], bool] = lambda: False,
) -> Simulation:
    """Trains all workers of a run in this process, as `simulate`, until it is asked to stop.

    Args:
        recorded: the folder of a recorded run whose threads the workers take.
        asked: called after each round; returns whether to save and stop.
    Raises: as `simulate`; KeyboardInterrupt when it was asked to stop.
    """
    # Before the engine is created, which truncates records after the round of resumption.
    with locked(folder, None):
        simulation = Simulation(config, engine_of(resolve(config, parts), folder, resume=resume, recorded=recorded))
        return simulation.go_on(until, asked=asked, is_held=True)


def _must_fit(run: ResolvedRun) -> None:
    """Raises ConfigError where a batch, or the persistent state of all workers, exceeds this machine's memory."""
    must_fit_memory(run.data)
    must_fit_memory(run.data, run.loop.eval_batches)
    here = psutil.virtual_memory().total
    known = not run.model.own and run.model.experts is None and one_device(run.loop.device).type == "cpu"
    words = vocabulary(run.data.tokenizer) if known else None
    if words is None:
        return
    copies = 1 if run.inner.optimizer == "sgd" else 3  # lower bound: gradients, outer states and messages come on top
    need = 4 * copies * run.workers * parameter_count(run.model, words)
    if need > here:
        raise ConfigError(
            f"a simulation of {run.workers:,} workers holds at least {need / 1e9:,.3g} GB of parameters and inner states, and "
            f"this machine has {here / 1e9:,.3g} GB; take fewer workers or a smaller model"
        )


def recorded_beside(file: str | Path) -> Path | None:
    """The recorded run's folder of a run file or folder; None for any other file."""
    path = Path(file)
    return path if path.is_dir() else path.parent if path.name == "run.toml" else None


def engine_of(run: ResolvedRun, folder: Path, *, resume: Resume, recorded: Path | None = None) -> Engine:
    """The engine that trains a run in this process: in rounds, over virtual time, or a no-op for an ended run.

    Args: `recorded` is the folder of a recorded run whose workers' threads it takes; by default that of a run that is resumed.
    Raises: as `simulate`.
    """
    _must_fit(run)
    kept = run.record.keep_checkpoints
    emptied = not kept and not (folder / "checkpoints").exists()
    if resume and emptied and is_finished(run, folder):
        say(ended(folder, run.rounds, kept=kept))
        return _Ended(run, folder)
    if run.event_driven:
        return VirtualTimeSimulation(run, folder, resume=resume, recorded=recorded)
    return Rounds(run, folder, resume=resume, recorded=recorded)


class _Ended:
    """A run that has ended in its folder, without its checkpoints."""

    def __init__(self, run: ResolvedRun, folder: Path) -> None:
        self.run, self.folder, self.task, self.finished = run, folder, task_of(run), run.rounds

    def opened(self) -> AbstractContextManager[None]:
        """Opens nothing."""
        return nullcontext()

    def advance(self) -> None:
        """A no-op: no round is left."""

    def save(self) -> None:
        """Saves nothing."""

    def result(self) -> Result:
        """The figures of its last validation."""
        last = newest_evaluation(read_metrics(self.folder))
        assert last is not None  # guaranteed by `is_finished`
        return Result(last["loss"], last["tokens"], 0.0, {})

    def models(self) -> list[Tensor]:
        """The parameters of each worker, or of the server."""
        store, lineage = self.folder / "checkpoints", self.run.lineage
        return [checkpoint.load(store, self.finished, owner, lineage)["x"] for owner in self.run.owners]

    def buffers(self) -> list[list[Tensor]]:
        """None, as its checkpoints hold none."""
        return [[] for _ in self.run.owners]
