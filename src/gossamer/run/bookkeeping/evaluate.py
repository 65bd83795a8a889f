"""Evaluation of a run: the loss of the mean model and of each worker, and how far parameters and predictions differ."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gossamer import rng
from gossamer.data.token_files import FileCorpus
from gossamer.errors import ConfigError, DiskError
from gossamer.layout import Layout, attach, layout_of, views
from gossamer.models.export import export, export_state, write_card
from gossamer.models.llama import Llama
from gossamer.models.sample import sample
from gossamer.record.folder import note_evaluation
from gossamer.record.progress import say
from gossamer.record.whole_files import atomic_write
from gossamer.rounds.exchange import Each
from gossamer.rounds.mean_model import mean_of
from gossamer.run.bookkeeping.inputs import changed_code, must_have_inputs
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.bookkeeping.which_round import to_evaluate
from gossamer.run.config.layouts import arranged
from gossamer.run.config.resolve import settings_in
from gossamer.run.config.resolved import RunSettings
from gossamer.run.config.user_parts import BUILT_IN, UserParts
from gossamer.run.worker.numerics import deterministic, threads_of, using_threads
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.stages.in_one_process import computing
from gossamer.run.worker.task import Task, buffers_of, on_device, task_of
from gossamer.run.worker.turns import Turns
from gossamer.settings.user_code import is_code
from gossamer.transport.processes.launch import one_device
from gossamer.version import __version__

log = logging.getLogger("gossamer")
T = TypeVar("T")

SCORED_TOKENS = 1 << 20
"""The most tokens, approximately, that are scored of another text."""
UNUSED = ("rule", "topology", "codec", "server", "pair", "optimizer")
"""The parts of a run that its evaluation does not need."""


class Assessment(NamedTuple):
    """Validation of one round, in nats per token."""

    loss: float
    """Loss of the mean model, each expert being the mean of its holders."""
    worker_losses: tuple[float, ...]
    """Empty unless `run.eval_workers`."""
    disagreement: float
    """Consensus distance per parameter, `sqrt((1/n) Σ_i ||x_i - x̄||² / P)`."""


class Result(NamedTuple):
    """The result of a finished simulation."""

    loss: float
    """Validation loss of the mean of the workers, or of the server's model."""
    tokens: int
    """Tokens of all workers together, including rounds before a resume."""
    tokens_per_s: float
    """Tokens per second of the rounds that ran here, without validation and checkpoints."""
    time_s: Mapping[str, float]
    """Seconds of the run on each network that it was priced on; for an asynchronous run, on its network."""


class Probe:
    """A model into which any parameter vector can be loaded, with the validation batches to score it."""

    def __init__(self, run: RunSettings, task: Task, device: torch.device):
        self.run, self.task, self.device = run, task, device
        self.threads: int | None = None
        """Intra-op threads; None for those of the calling thread."""
        self.model = task.model().to(device)
        self.x = attach(self.model, _layout(self.model, run))
        self.buffers = buffers_of(self.model)
        self._is_users = run.model.own or run.model.loss is not None
        self.turns: Turns | None = None
        """As those of `Replica`."""
        self.batches = [on_device(batch, device) for batch in task.data.validation(run.loop.eval_batches)]

    def loss(self, x: Tensor, buffers: Sequence[Tensor] = ()) -> float:
        """Mean loss of the model with parameters `x`, and these buffers if it has any, over the validation batches."""

        def score() -> float:
            with self._holding(x, buffers):
                return math.fsum(self.task.loss(self.model, batch).item() for batch in self.batches) / len(self.batches)

        return self._in_turn(score)

    def _in_turn(self, act: Callable[[], T]) -> T:
        """The result of model and loss, serialised with others if they are the user's and draw random numbers."""
        if not self._is_users:
            return act()
        if self.turns is not None:
            return self.turns.call(act, contextlib.nullcontext, lambda: lambda: None)  # `act` sets the buffers itself
        with rng.TURN:
            return act()

    @contextlib.contextmanager
    def _holding(self, x: Tensor, buffers: Sequence[Tensor]) -> Iterator[None]:
        """A context in which the model has these parameters and buffers, and computes as in the run, without gradients."""
        self.x.copy_(x)
        for buffer, given in zip(self.buffers, buffers, strict=False):
            buffer.copy_(given)
        self.model.eval()
        with torch.no_grad(), computing(self.run, self.device), using_threads(self.threads), deterministic():
            yield


def _layout(model: nn.Module, run: RunSettings) -> Layout:
    """The order in which the workers of a run hold their parameters."""
    return arranged(layout_of(model), run)[0]


def disagreement(vectors: Sequence[Tensor], mean: Tensor) -> float:
    """The root mean square distance of the workers from their mean, per parameter: `sqrt((1/n) Σ_i ||x_i - x̄||² / P)`."""
    squares = [(x.float() - mean.float()).square().sum(dtype=torch.float64).item() for x in vectors]
    return math.sqrt(math.fsum(squares) / len(vectors) / mean.numel())


Weights = tuple[Tensor, Sequence[Tensor]]
"""The parameters of a model, and its buffers."""


class Probes:
    """Evaluates several models at a time: each thread borrows a probe.

    Args:
        probes: as many as there are threads.
        each: the results of a function for all items, in their order; one after the other by default.
    """

    def __init__(self, probes: Sequence[Probe], each: Each | None = None) -> None:
        self._each: Each = each or (lambda function, items: [*map(function, items)])
        self._idle: SimpleQueue[Probe] = SimpleQueue()
        for probe in probes:
            self._idle.put(probe)
        self.task = probes[0].task
        self.each_worker = probes[0].run.loop.eval_workers

    def losses(self, models: Iterable[Weights]) -> list[float]:
        """The validation loss of each model."""

        def loss(weights: Weights) -> float:
            probe = self._idle.get()
            try:
                return probe.loss(*weights)
            finally:
                self._idle.put(probe)

        return self._each(loss, models)


def assess(vectors: Sequence[Tensor], probes: Probes, buffers: Sequence[Sequence[Tensor]] = ()) -> Assessment:
    """Scores the mean model and, if the run asks for it, each worker's; workers that are bitwise equal are scored once.

    Args: `buffers` are each worker's own, if the model has any.
    """
    workers = [*zip(vectors, buffers or [()] * len(vectors), strict=True)]
    mean = trained_model_of(probes.task, vectors), mean_buffers(buffers)
    held = probes.task.holding
    apart = disagreement(vectors if held is None else held.beside(vectors, mean[0]), mean[0])
    scored = workers if probes.each_worker else []
    if all(_are_equal(mean, weights) for weights in workers):
        (value,) = probes.losses([mean])
        return Assessment(value, (value,) * len(scored), apart)
    value, *each = probes.losses([mean, *scored])
    return Assessment(value, tuple(each), apart)


def _are_equal(one: Weights, other: Weights) -> bool:
    """Whether parameters and buffers are equal."""
    pairs = zip((one[0], *one[1]), (other[0], *other[1]), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def trained_model_of(task: Task, vectors: Sequence[Tensor]) -> Tensor:
    """The model trained by the workers: their mean, with each expert averaged over its holders."""
    return mean_of(vectors) if task.holding is None else task.holding.union(vectors)


def mean_buffers(buffers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The buffers of the mean model: the means of floating-point ones, and those of worker 0 otherwise."""
    return [mean_of(some) if some[0].is_floating_point() else some[0] for some in zip(*buffers, strict=True)]


def model_with(run: RunSettings, task: Task, x: Tensor, buffers: Sequence[Tensor] = ()) -> nn.Module:
    """A separate model with parameters `x` and these buffers, in evaluation mode."""
    model = task.model()
    with torch.no_grad():
        for parameter, value in views(model, _layout(model, run), x.cpu()).items():
            parameter.copy_(value)
        for buffer, given in zip(buffers_of(model), buffers, strict=False):
            buffer.copy_(given)
    return model.eval()


def publish(
    run: RunSettings,
    task: Task,
    x: Tensor,
    folder: Path,
    buffers: Sequence[Tensor] = (),
    *,
    finished: int,
    loss: float,
) -> None:
    """Writes the model with parameters `x` where `AutoModelForCausalLM.from_pretrained` opens it, with a model card, and a sample
    of its text.

    A user's model is written by its `save_pretrained` if it has one, and else as `model.safetensors`.

    Args: `loss` is the validation loss after the `finished` rounds.
    """
    model = model_with(run, task, x, buffers)
    facts = {
        "parameters": f"{x.numel():,}",
        **run.lineage.of,
        "rounds": f"{finished:,} of {run.rounds:,}",
        "tokens of all rounds": f"{'at most ' if run.loop.adapt or run.loop.elastic else ''}{sum(run.worker_tokens):,}",
        "validation loss": f"{loss:.4f} nats a token" if math.isfinite(loss) else "not known",
        "run": run.digest,
        "gossamer": __version__,
    }
    if not isinstance(model, Llama) or task.tokenizer is None:
        export_state(model, folder / "model")
        write_card(folder / "model", run.name, facts, opens=False)
        return
    export(model, folder / "model", task.tokenizer)
    write_card(folder / "model", run.name, facts, opens=True, needs_code=bool(model.model.cuts))
    if model.model.cuts:
        say(f"{folder / 'model'} is no plain Llama but has residual bottlenecks: open it with trust_remote_code=True")
    text = sample(model, task.tokenizer, prompt="def ", num_tokens=min(400, run.data.seq_len * 3), seed=run.seed)
    atomic_write(folder / "sample.txt", text.encode())


class Evaluation(NamedTuple):
    """The result of `evaluate`."""

    round: int
    """Completed rounds."""
    result: Assessment
    workers: tuple[int, ...]
    """The workers of these checkpoints, in the order of `worker_losses`; only the server's number for a run with a server."""


def evaluate(
    folder: Path,
    round: int | None = None,
    parts: UserParts = BUILT_IN,
    source: str | None = None,
    *,
    allow_code: bool = False,
) -> Evaluation:
    """The mean model of a run from the checkpoints of one round: its loss, the disagreement, and its export to `RUN/model`.

    On another text than the run's, or with changed code, it is only scored: no file is written.

    Args:
        round: the number of finished rounds; by default the newest that all workers have. For an elastic run, the
            newest that most of its participants have, and the mean is over those.
        parts: the user's parts, if the run names any.
        source: other text to score it on, as in data.source: whole files, up to `SCORED_TOKENS` spread evenly over
            them, or the validation part of a stream.
        allow_code: accept user code that has changed since the run began.
    Raises: ConfigError when its text, tokenizer or code are not those of the run, and for other text of a run whose
        data is a function; CheckpointError when no round has sound checkpoints of all workers, or, for an elastic run,
        of any.
    Cost: holds one model per worker in memory.
    """
    run = settings_in(folder, parts)
    is_changed = changed_code(run, folder, "evaluate", without=UNUSED, allowed=allow_code, speaks=False)
    key, store = lineage_of(run, folder), Store(run, folder)
    finished, owners = to_evaluate(store, key, round)
    if source is None:
        task = task_of(run)
    else:
        run = _on(run, source)
        task = task_of(run, scored=True)
    must_have_inputs(run, task, folder, "evaluate" if source is None else "score")
    if source is not None:
        for read in task.data.read:
            say(read.in_words())
        if isinstance(task.data, FileCorpus):
            run = replace(run, loop=replace(run.loop, eval_batches=task.data.batches_of_all(SCORED_TOKENS)))
    states = [store.load(task, finished, owner, key) for owner in owners]
    buffers = [state.get("buffers", ()) for state in states]
    vectors = [
        state["x"] if task.holding is None else task.holding.alone(owner, state["x"])
        for owner, state in zip(owners, states, strict=True)
    ]
    # Scored on the run's device if possible: servers score on the host, and a run on GPUs may be scored anywhere.
    host = run.kind == "server" or not torch.cuda.is_available()
    probe = Probe(run, task, one_device("cpu" if host else run.loop.device))
    probe.threads = threads_of(run, folder).at(run.owners[0], finished)
    result = assess(vectors, Probes([probe]), buffers)
    if source is None and not is_changed:
        union = trained_model_of(task, vectors)
        try:
            _note(run, folder, finished, states, result)
            publish(run, task, union, folder, mean_buffers(buffers), finished=finished, loss=result.loss)
        except DiskError as error:  # the seconds of scoring are not lost where a folder is read-only
            raise DiskError(
                f"the mean model of round {finished} has a loss of {result.loss:.4f} nats, but {error}"
            ) from None
    return Evaluation(finished, result, tuple(owners))


def _on(run: RunSettings, source: str) -> RunSettings:
    """The run on the text of another source, which only needs to be scorable."""
    if run.data.own or is_code(source):
        raise ConfigError(
            f"the other source is {source!r:.60} and data.source is {run.data.source!r:.60}, but neither may be a function; "
            "name files, a folder or a stream, or leave --source out"
        )
    return replace(run, data=replace(run.data, source=source, shards="iid", max_bytes=None, cache=None, windows=None))


def _note(
    run: RunSettings, folder: Path, finished: int, states: Sequence[Mapping[str, Any]], result: Assessment
) -> None:
    """Adds an evaluation to the metrics of a run."""
    per_round = sum(map(run.local_steps_of, range(run.workers)))
    steps = finished * per_round if run.event_driven else sum(state["steps_taken"] for state in states)
    note_evaluation(
        folder,
        round=finished - 1,
        step=run.timetable.begin(finished),
        tokens=run.step_tokens * steps,
        **result._asdict(),
    )
