"""Evaluation of a run: the loss of the mean model, the loss of each worker, and their disagreement."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.data.corpus import Corpus, open_corpus
from gossamer.errors import CheckpointError
from gossamer.layout import Layout, arrange, attach, layout_of
from gossamer.models.export import export
from gossamer.models.llama import build_model, loss
from gossamer.models.sample import sample
from gossamer.record import checkpoint
from gossamer.record.files import Appender, atomic_write
from gossamer.record.folder import metrics_line, read_metrics
from gossamer.run.config import RunConfig, parse
from gossamer.run.document import load_run
from gossamer.run.history import lineage

__all__ = ["Assessment", "Probe", "Result", "assess", "disagreement", "evaluate", "mean_of", "publish"]


class Assessment(NamedTuple):
    """Validation of one round, in nats per token."""

    loss: float
    """Of the mean model."""
    worker_losses: tuple[float, ...]
    disagreement: float
    """Consensus distance per parameter, `sqrt((1/n) Σ_i ||x_i - x̄||² / P)`."""


class Result(NamedTuple):
    """What a finished simulation leaves behind."""

    loss: float
    """Validation loss of the mean of the workers, or of the server's model."""
    tokens: int
    """Of all workers together, those of the rounds before a resume included."""
    tokens_per_s: float
    """Of the rounds that ran here, without validation and checkpoints."""
    time_s: Mapping[str, float]
    """Seconds of the run on each network that it was priced on; of an asynchronous run, on the network that it ran on."""


class Probe:
    """A model that any parameter vector can be put into, with the validation batches to try it on."""

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device):
        self.config, self.device = config, device
        model = build_model(config.model, corpus.vocab_size, config.data.seq_len, config.seed)
        self.model = model.to(device)
        self.x = attach(self.model, _layout(self.model, config))
        self.batches = [batch.to(device) for batch in corpus.validation(config.run.eval_batches)]

    def loss(self, x: Tensor) -> float:
        """Mean loss of the model with parameters `x` over the validation batches."""
        self.x.copy_(x)
        self.model.eval()
        bf16 = self.config.inner.autocast == "bf16"
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return math.fsum(loss(self.model, batch).item() for batch in self.batches) / len(self.batches)


def _layout(model: nn.Module, config: RunConfig) -> Layout:
    """The order in which the workers of a run hold their parameters."""
    return arrange(layout_of(model), *config.fragments)[0]


def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    """The mean model, `(1/n) Σ_i x_i`, summed in worker order in fp32; equal vectors are their own mean, bit for bit."""
    if all(torch.equal(vectors[0], x) for x in vectors[1:]):
        return vectors[0].clone()
    total = vectors[0].float()
    for x in vectors[1:]:
        total = total + x.float()
    return (total / len(vectors)).to(vectors[0].dtype)


def disagreement(vectors: Sequence[Tensor], mean: Tensor) -> float:
    """How far the workers are from their mean, root mean square per parameter: `sqrt((1/n) Σ_i ||x_i - x̄||² / P)`."""
    squares = [(x.float() - mean.float()).square().sum(dtype=torch.float64).item() for x in vectors]
    return math.sqrt(math.fsum(squares) / len(vectors) / mean.numel())


def assess(vectors: Sequence[Tensor], score: Callable[[Iterable[Tensor]], Iterable[float]]) -> Assessment:
    """Scores the mean model and each worker's; workers that are bitwise equal are scored once."""
    mean = mean_of(vectors)
    apart = disagreement(vectors, mean)
    if all(torch.equal(mean, x) for x in vectors):
        (value,) = score([mean])
        return Assessment(value, (value,) * len(vectors), apart)
    value, *each = score([mean, *vectors])
    return Assessment(value, tuple(each), apart)


def publish(config: RunConfig, corpus: Corpus, x: Tensor, folder: Path) -> None:
    """Writes the model with parameters `x` where `AutoModelForCausalLM.from_pretrained` opens it, and a sample of its text."""
    model = build_model(config.model, corpus.vocab_size, config.data.seq_len, config.seed)
    attach(model, _layout(model, config)).copy_(x)
    export(model, folder / "model", corpus.tokenizer)
    text = sample(
        model, corpus.tokenizer, prompt="def ", num_tokens=min(400, config.data.seq_len * 3), seed=config.seed
    )
    atomic_write(folder / "sample.txt", text.encode())


def evaluate(folder: Path, round: int | None = None) -> tuple[int, Assessment]:
    """The mean model of a run from the checkpoints of one round: its loss, the disagreement, and its export to `RUN/model`.

    Args: `round` is the number of finished rounds; by default the newest that all workers have.
    Raises: CheckpointError when no round has the checkpoints of all workers.
    Cost: holds one model per worker in memory.
    """
    config = parse(load_run(folder))
    key = lineage(config, folder)
    finished = _whole_round(config, folder, key, round)
    states = [checkpoint.load(folder / "checkpoints", finished, owner, key) for owner in config.owners]
    vectors = [state["x"] for state in states]
    corpus = open_corpus(config.data, config.workers, config.seed)
    probe = Probe(config, corpus, torch.device("cpu"))
    result = assess(vectors, lambda models: [probe.loss(x) for x in models])
    _note(config, folder, finished, states, result)
    publish(config, corpus, mean_of(vectors), folder)
    return finished, result


def _whole_round(config: RunConfig, folder: Path, key: checkpoint.Lineage, round: int | None) -> int:
    """The newest round of which all checkpoints are here, or the requested one. Raises CheckpointError."""
    store, owners = folder / "checkpoints", config.owners
    owned = checkpoint.owned(store, owners, key)
    whole = checkpoint.common(owned)
    if round is not None and whole and round not in whole:
        raise CheckpointError(
            f"round {round} lacks some checkpoints; complete are: {', '.join(map(str, whole))}; name one of them"
        )
    if not any(owned) and any(checkpoint.rounds(store, owner) for owner in owners):
        raise checkpoint.nothing_to_resume(store, owners, owned)
    if not whole and not config.record.keep_checkpoints:
        raise CheckpointError(
            f"'{folder}' has no checkpoints, as its record.keep_checkpoints is false; gossamer report {folder} shows its last "
            "validation, and its mean model is in the folder 'model' if record.export was true"
        )
    if not whole:
        whose = f"all {config.workers} workers" if config.server is None else "the server"
        raise CheckpointError(
            f"'{folder}' has no round with checkpoints of {whose} (owned: {dict(zip(owners, owned, strict=True))}); "
            "bring the checkpoint folders of all machines together, or train past the first checkpoint"
        )
    return whole[-1] if round is None else round


def _note(
    config: RunConfig, folder: Path, finished: int, states: Sequence[Mapping[str, Any]], result: Assessment
) -> None:  # fmt: skip
    """Adds an evaluation to the metrics of a run that has none of this round."""
    if any(
        line["kind"] == "eval" and line["round"] == finished - 1 and "loss" in line for line in read_metrics(folder)
    ):
        return
    per_round = sum(map(config.local_steps_of, range(config.workers)))
    steps = finished * per_round if config.event_driven else sum(state["steps_taken"] for state in states)
    line = metrics_line(
        "eval", round=finished - 1, step=finished * config.full_steps, tokens=config.step_tokens * steps, **result._asdict()
    )  # fmt: skip
    with contextlib.closing(Appender(folder / "metrics-evaluated.jsonl")) as file:
        file.write(line)
