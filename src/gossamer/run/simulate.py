"""n workers in one process: a research run with every worker's replica on one CPU or one GPU.

The workers' parameters are the rows of one `[n, P]` tensor, their models views of it and their inner optimizers untouched. A
pool of threads with one intra-op thread each trains them: on small models that is faster than one process per worker, and
each worker computes exactly what its own process would.
"""

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.data.corpus import open_corpus
from gossamer.errors import ConfigError
from gossamer.network.links import Network, jitter_factors, links_of
from gossamer.network.pacing import PaceNote, links_at, uplinks_bps
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.progress import Progress
from gossamer.record.trace import Operation
from gossamer.rounds import exchange as sync
from gossamer.run.config import RunConfig, digest, dump
from gossamer.run.evaluate import Assessment, Probe, assess, mean_of, publish
from gossamer.run.worker import LocalPhase, Worker, joined, method
from gossamer.transport.launch import available_cores, one_device
from gossamer.transport.memory import MemoryNetwork

__all__ = ["Result", "simulate"]

log = logging.getLogger("gossamer")

Told = tuple[list[LocalPhase], list[list[Operation]]]  # what a worker did in a round: between its stops, and at them


class Result(NamedTuple):
    """What a finished simulation leaves behind."""

    final: Assessment
    tokens: int
    """Of all workers together, those of the rounds before a resume included."""
    tokens_per_s: float
    """Of the rounds that ran here: local phases and exchanges, without validation and checkpoints."""


@contextlib.contextmanager
def _pool(device: torch.device, threads: int, workers: int) -> Iterator[tuple[sync.Each, int]]:
    """A parallel map over workers: as many threads as the cores allow at `threads` intra-op threads each; one for a GPU."""
    cores = available_cores()
    lanes = 1 if device.type == "cuda" else max(1, min(workers, cores // threads))
    if lanes * threads > cores:
        log.warning(
            f"{lanes} x {threads} threads oversubscribe {cores} cores, which is several times slower; lower run.threads"
        )
    if (busy := _busy_cores()) > cores / 4:
        log.warning(f"other processes keep {busy:.1f} of {cores} cores busy; expect to be slower than alone")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(lanes, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            yield lambda fn, items: list(pool.map(fn, items)), lanes
    finally:
        torch.set_num_threads(before)


def _busy_cores(window_s: float = 0.1) -> float:
    """How many cores others use while this process waits a moment; 0 where the system does not tell."""

    def ticks() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all, and those idle or waiting for a disk

    if not Path("/proc/stat").exists():
        return 0.0
    (total, idle), _ = ticks(), time.sleep(window_s)
    total, idle = (after - before for after, before in zip(ticks(), (total, idle), strict=True))
    return (os.cpu_count() or 1) * (1 - idle / total) if total else 0.0


def simulate(
    config: RunConfig, folder: Path, *, resume: bool = False, progress: Progress | None = None, until: int | None = None
) -> Result:
    """Trains all workers of a run and records it in `folder`; bitwise what `gossamer train` computes on real processes.

    Only where local steps adapt (`run.adapt`) they follow the clock there, and here the seconds of the declared network.

    Args:
        resume: continue from the newest checkpoint in the folder.
        until: stop after this many rounds, as if killed there.
    Raises: ConfigError, DataError, CheckpointError; TrainingError when a loss is not finite.
    Cost: parameters, gradients, inner and outer state of every worker, and one message per worker in flight.
    """
    m, network = method(config), _paced_by(config)
    device = one_device(config.run.device)
    corpus = open_corpus(config.data, config.workers, config.seed)
    n, key, store = config.workers, digest(config), folder / "checkpoints"
    probe = Probe(config, corpus, device)
    stacked = torch.empty(n, probe.x.numel(), dtype=probe.x.dtype, device=device)
    workers = [Worker(i, config, corpus, device, stacked[i]) for i in range(n)]
    mailboxes = MemoryNetwork(n)
    for worker in workers:
        worker.join(m, mailboxes.transport(worker.index))
    start, busy_s = 0, 0.0

    if resume:
        owned = checkpoint.owned(store, config.owners, key)
        newest = checkpoint.newest_common(owned)
        if newest is None:
            raise checkpoint.nothing_to_resume(store, config.owners, owned)
        if newest == config.rounds:
            print(checkpoint.ended(folder, newest))
        for worker in workers:
            worker.restore(checkpoint.load(store, newest, worker.index, key))
            checkpoint.rewind(store, newest, worker.index)
        start = newest

    record = RunFolder(
        folder, dump(config), config.record, resume_round=start if resume else None,
        traced_per_round=config.schedule.fragments,
    )  # fmt: skip
    with record, _pool(device, config.run.threads or 1, n) as (each, lanes):
        probes: SimpleQueue[Probe] = SimpleQueue()
        for spare in [probe, *(Probe(config, corpus, device) for _ in range(lanes - 1))]:
            probes.put(spare)

        def score(x: Tensor) -> float:
            mine = probes.get()
            try:
                return mine.loss(x)
            finally:
                probes.put(mine)

        def tokens() -> int:
            return sum(worker.steps_taken for worker in workers) * config.step_tokens

        before, final = tokens(), None
        for round in range(start, config.rounds):
            began = time.perf_counter()
            told: list[Told] = [([], []) for _ in workers]
            for stops in zip(*(worker.segments(round) for worker in workers), strict=True):

                def train(worker: Worker) -> None:
                    stop, first, last = stops[worker.index]
                    worker.loop.announce(round, stop)
                    told[worker.index][0].append(worker.local_phase(round, first, last))

                def post(worker: Worker) -> None:
                    told[worker.index][1].append(worker.loop.post(round, stops[worker.index][0]))

                def take_in(worker: Worker) -> None:
                    worker.loop.hear_nothing(round, stops[worker.index][0])
                    worker.take_in()

                each(train, workers)
                each(post, workers)
                for due in zip(*(w.loop.due(round, stops[w.index][0]) for w in workers), strict=True):
                    sync.settle(due, each)
                each(take_in, workers)
            each(lambda w: w.apply(round), workers)

            finished = round + 1
            if finished == config.rounds:
                for due in zip(*(w.loop.rest() for w in workers), strict=True):
                    sync.settle(due, each)
                each(Worker.take_in, workers)
            busy_s += time.perf_counter() - began
            for worker, (phases, operations) in zip(workers, told, strict=True):
                worker.tell(record, round, phases, operations)
            if network is not None and finished < config.rounds:
                _pace(network, workers, round, told)
            if config.due(config.run.eval_every, finished):
                final = assess([w.evaluated for w in workers], lambda models: each(score, models))
                step = finished * config.full_steps
                record.log("eval", round=round, step=step, tokens=tokens(), **final._asdict())
            if config.due(config.run.checkpoint_every, finished):
                each(lambda w: checkpoint.save(store, finished, w.index, w.state(), digest=key), workers)
            if progress is not None:
                losses = [joined(phases).loss for phases, _ in told]
                figures = {"loss": sum(losses) / n, **({"val": final.loss} if final else {})}
                progress.update(config.name, finished, **figures)
            if finished == until:
                break
        if final is None:
            final = assess([w.evaluated for w in workers], lambda models: each(score, models))
        if until is None and config.record.export:
            publish(config, corpus, mean_of([w.evaluated for w in workers]), folder)
    return Result(final, tokens(), (tokens() - before) / busy_s if busy_s else 0.0)


def _paced_by(config: RunConfig) -> Network | None:
    """The network in whose seconds local steps adapt; None where they do not.

    Raises: ConfigError when it is not clear which, or its seconds are not all there.
    """
    adapt, declared = config.run.adapt, config.network
    if not adapt:
        return None
    if not isinstance(adapt, str) and len(declared) != 1:
        raise ConfigError(
            f"run.adapt is true and the run file declares {len(declared)} networks ({', '.join(declared) or 'none'}), where a "
            "simulation takes the seconds of one; declare one as [network.NAME], or name one in run.adapt"
        )
    network = declared[adapt] if isinstance(adapt, str) else next(iter(declared.values()))
    step_s = links_of(network, config.workers).step_s
    if step_s is None or not step_s.min() > 0:
        raise ConfigError(
            f"run.adapt needs the seconds of an inner step and the network gives step_s = {network.step_s}; set it above 0"
        )
    return network


def _pace(network: Network, workers: list[Worker], round: int, told: list[Told]) -> None:
    """Local steps for the next round, as seconds measured on this network would have them."""
    n, notes = len(workers), dict[int, PaceNote]()
    links = links_at(network, n, max(worker.pacer.clock_s for worker in workers if worker.pacer is not None))
    assert links.step_s is not None
    step_s = (links.step_s * jitter_factors(network, round, n)).tolist()
    uplink_bps = uplinks_bps(links).tolist()
    for i, (worker, (phases, operations)) in enumerate(zip(workers, told, strict=True)):
        assert worker.pacer is not None
        seen = {i: uplink_bps[i] / 8} if math.isfinite(uplink_bps[i]) else {}
        notes[i] = worker.measured(joined(phases), operations, seen, step_s[i])
    for worker in workers:
        assert worker.pacer is not None
        worker.take(worker.pacer.decided(notes, n))
