"""Measurement of the seconds of an inner step on this machine, for a network file."""

import statistics
import time
from typing import NamedTuple

import torch

from gossamer.data.tokenizer import load_tokenizer
from gossamer.network.links import StepOf
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of

_FEWEST, _MOST = 2, 20


class StepTime(NamedTuple):
    """A measured inner step."""

    seconds: float
    of: StepOf


def step_time(run: RunSettings, worker: int, device: torch.device, *, test_s: float = 2.0) -> StepTime:
    """Trains a few inner steps of a run on its data, and takes the median of their seconds.

    Args:
        worker: the worker whose data are used.
        test_s: seconds after which no further step is taken; at least two are, after a warm-up step.
    Raises: DataError when the data cannot be opened, ConfigError when a package is missing.
    Cost: a model, its gradients and its inner optimizer, for 3 to 21 inner steps.
    """
    replica = Replica(worker, run, task_of(run), device)
    replica.train(0, 0, 1)  # warm-up: the first step imports, allocates and tunes
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < _FEWEST or (len(took) < _MOST and time.perf_counter() - began < test_s):
        took.append(replica.train(0, 0, 1).compute_s)
    of = StepOf(
        model=run.model,
        vocab_size=load_tokenizer(run.data.tokenizer).vocab_size,
        seq_len=run.data.seq_len,
        batch_size=run.data.batch_size * run.data.accumulate,
    )
    return StepTime(statistics.median(took), of)
