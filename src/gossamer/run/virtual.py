"""n workers in one process over virtual time: the twin of `simulate` for methods that look at the clock.

Real models train, and seconds are those of one of the run's networks. A run is over when all workers together have taken
the inner steps that they would take in step, `workers · run.steps`, so that every method sees the same number of tokens.
A round is a part of that: as many inner steps as a round of workers in step has. Validations, checkpoints and the
learning-rate schedule go by it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous import conditions, meeting_rates
from gossamer.clock import Absence, GossipRun, LoopOptions, PairRun, ServerRun
from gossamer.clock.durations import Durations
from gossamer.codecs import Codec, make_codec
from gossamer.data.corpus import Corpus, open_corpus
from gossamer.errors import PairingError
from gossamer.network.links import Network
from gossamer.record.events import EventWriter
from gossamer.record.folder import RunFolder
from gossamer.record.progress import Progress
from gossamer.run.config import RunConfig, dump
from gossamer.run.evaluate import Probe, assess, mean_of, publish
from gossamer.run.journal import Diary
from gossamer.run.learner import WorkerLearner
from gossamer.run.settle import clock, no_server_options, paced, pair_rule, server_rule
from gossamer.run.worker import LocalPhase, method, topology_of
from gossamer.transport.launch import available_cores, one_device
from gossamer.tree import leaves

__all__ = ["Outcome", "simulate_events"]


class Outcome(NamedTuple):
    """What a finished run leaves behind."""

    loss: float
    """Validation loss of the server's model, or of the mean of the workers."""
    tokens: int
    """Of all workers together."""
    time_s: float
    """Virtual seconds."""


def simulate_events(config: RunConfig, folder: Path, *, progress: Progress | None = None) -> Outcome:
    """Trains all workers of a run over virtual time and records it in `folder`; a pure function of run file and seed.

    Raises: ConfigError, PairingError and DataError; TrainingError when a loss is not finite.
    Cost: parameters, gradients and inner state of every worker, and what the method keeps beside.
    """
    name, network = clock(config)
    settled = paced(config, network)
    device = one_device(config.run.device)
    make = _prepare(config)  # before the data, so that a mistake is reported at once
    corpus = open_corpus(config.data, config.workers, config.seed)
    with _lanes(settled, device) as pool:
        tally = _Tally(config)
        learners = [_Learner(i, settled, corpus, device, tally, pool) for i in range(config.workers)]
        run = make(settled, network, learners)
        with (
            RunFolder(folder, dump(config), config.record) as record,
            EventWriter(folder, network=name, workers=config.workers) as log,
        ):
            probe = Probe(config, corpus, device)
            diary = Diary(
                config, folder, record, log, lambda: _assessed(run, probe), lambda: _snapshots(run, config.workers), progress
            )  # fmt: skip
            steps = [learner.local_steps for learner in learners]
            for event in run.run():
                diary.enter(event, run.time_s, steps)
            diary.close_round(config.rounds)
    if config.record.export:
        publish(config, corpus, _model(run), folder)
    return Outcome(diary.loss, diary.tokens, diary.time_s)


_Loop = ServerRun | PairRun | GossipRun
_Prepared = Callable[[RunConfig, Network, "Sequence[_Learner]"], _Loop]


def _prepare(config: RunConfig) -> _Prepared:
    """How the loop of this run is made; whatever can be wrong without data is found here."""
    codec = make_codec(config.codec.name, **config.codec.options)
    if config.server is not None:
        server = server_rule(config)
        return lambda settled, network, learners: ServerRun(
            server, learners, network, spans=learners[0].spans, overlap=config.events.overlap,
            options=_options(config, codec, learners),
        )  # fmt: skip
    if config.pair is not None:
        return _prepare_pairs(config, codec)
    if config.events.meetings is not None:
        raise PairingError(
            f"rule '{config.rule.name}' got events.meetings = {config.events.meetings}, but its workers read what their peers "
            "published last and never meet; leave it out, or take a [pair] method"
        )
    no_server_options(config, f"rule '{config.rule.name}'")
    m = method(config)
    return lambda settled, network, learners: GossipRun(
        m.rule, m.topology, learners, network, _options(config, codec, learners)
    )


def _prepare_pairs(config: RunConfig, codec: Codec) -> _Prepared:
    pair, topology = pair_rule(config), topology_of(config)
    if not topology.static:
        raise PairingError(
            f"pair '{pair.name}' on topology '{topology.name}' cannot work: pairs meet at random along the edges of one "
            "graph, and this one changes; use a static topology such as 'complete' or 'ring'"
        )

    def pairs(settled: RunConfig, network: Network, learners: Sequence[_Learner]) -> PairRun:
        step_s = Durations(network, config.workers).step_s
        phase_s = math.fsum(s * settled.local_steps(i) for i, s in enumerate(step_s)) / config.workers
        rates = meeting_rates(topology.mixing(0), (config.events.meetings or 1.0) / phase_s)
        conditions(config.workers, rates)  # refuses a graph that falls apart
        return PairRun(pair, learners, network, rates, _options(config, codec, learners))

    return pairs


def _options(config: RunConfig, codec: Codec, learners: "Sequence[_Learner]") -> LoopOptions:
    away = config.events.absences
    return LoopOptions(
        absences=[
            *(Absence(one.leave_s, one.worker, "leave") for one in away),
            *(Absence(one.return_s, one.worker, "return") for one in away if one.return_s < math.inf),
        ],
        codec=codec,
        seed=config.seed,
        budget=config.workers * config.run.steps,
        begins=lambda worker, number: learners[worker].begin(number),
    )


@contextlib.contextmanager
def _lanes(config: RunConfig, device: torch.device) -> Iterator[ThreadPoolExecutor | None]:
    """Threads that compute phases while others are still under way; None where nothing may be computed ahead.

    A phase that its worker leaves is lost, and parameters that gossip are looked at in the middle of one.
    """
    threads, before = config.run.threads or 1, torch.get_num_threads()
    lanes = 1 if device.type == "cuda" else min(config.workers, available_cores() // threads)
    gossips = config.server is None and config.pair is None
    torch.set_num_threads(threads)
    try:
        if lanes <= 1 or gossips or config.events.absences:
            yield None
        else:
            with ThreadPoolExecutor(lanes, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
                yield pool
    finally:
        torch.set_num_threads(before)


class _Tally:
    """How far the run is."""

    def __init__(self, config: RunConfig) -> None:
        self.steps, self._per_round = 0, config.workers * config.full_steps

    @property
    def rounds(self) -> int:
        """Rounds that are over, by the phases that have ended."""
        return self.steps // self._per_round


class _Learner(WorkerLearner):
    """A worker whose phase may be computed before the virtual time at which it ends."""

    def __init__(
        self, index: int, config: RunConfig, corpus: Corpus, device: torch.device, tally: _Tally, pool: Executor | None
    ) -> None:
        super().__init__(index, config, corpus, device)
        self._tally, self._pool = tally, pool
        self._ahead: Future[LocalPhase] | None = None

    def begin(self, number: int) -> None:
        """A phase begins; nothing but itself touches x until it ends."""
        self.round = self._tally.rounds
        if self._pool is not None:
            self._ahead = self._pool.submit(super().local_phase, number)

    def local_phase(self, round: int) -> LocalPhase:
        """The inner steps of a phase, which ends now."""
        phase = super().local_phase(round) if self._ahead is None else self._ahead.result()
        self._ahead = None
        self._tally.steps += self.local_steps
        return phase


def _assessed(run: _Loop, probe: Probe) -> dict[str, Any]:
    """The figures of a validation: of the server's model, or of the mean and each worker's own."""
    if isinstance(run, ServerRun):
        return {"loss": probe.loss(run.model())}
    return assess(run.models(), lambda models: [probe.loss(x) for x in models])._asdict()


def _model(run: _Loop) -> Tensor:
    return run.model() if isinstance(run, ServerRun) else mean_of(run.models())


def _snapshots(run: _Loop, workers: int) -> list[tuple[int, dict[str, Any]]]:
    """What is worth keeping, by owner; the server comes after the workers."""
    if isinstance(run, ServerRun):
        return [(workers, {"x": run.model(), "outer": leaves(tuple(run.states()))})]
    return [(i, {"x": x}) for i, x in enumerate(run.models())]
