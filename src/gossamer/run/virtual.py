"""n workers in one process over virtual time: the counterpart of `synchronous` for asynchronous methods.

Real models train, and seconds are those of one of the run's networks. A run ends after `workers · run.steps` inner steps of all
workers together, the same number of tokens as a run in rounds. A round ends when one synchronous round's worth of inner
steps has been taken. Validations, checkpoints and the learning-rate schedule count these rounds.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.clock import GossipRun, LoopOptions, PairRun, ServerRun
from gossamer.data.corpus import Corpus, open_corpus
from gossamer.network.links import Network
from gossamer.record.events import EventWriter
from gossamer.record.folder import RunFolder
from gossamer.record.progress import Progress
from gossamer.run.config import RunConfig, digest, dump
from gossamer.run.evaluate import Probe, Result, assess, mean_of, publish
from gossamer.run.journal import EventJournal, Journal, saver
from gossamer.run.lanes import lanes
from gossamer.run.replica import LocalPhase, Replica
from gossamer.run.seconds import EventSeconds
from gossamer.run.settle import InPairs, InRounds, WithoutWaiting, WithServer, settle
from gossamer.transport.launch import one_device
from gossamer.tree import leaves

__all__ = ["simulate_events"]

logger = logging.getLogger("gossamer")


def simulate_events(
    config: RunConfig, folder: Path, *, progress: Progress | None = None, again: bool = False
) -> Result:
    """Trains all workers of a run over virtual time and records it in `folder`; a pure function of run file and seed.

    Args: `again` replaces what an interrupted run has left in the folder.
    Raises: ConfigError, PairingError and DataError; TrainingError when a loss is not finite.
    Cost: parameters, gradients and inner state of every worker, and what the method keeps of its own.
    """
    settled = settle(config)
    assert not isinstance(settled, InRounds) and settled.network is not None and settled.network_name is not None
    name = settled.network_name
    for sentence in () if isinstance(settled, WithServer) else settled.warnings:
        logger.warning(sentence)
    device = one_device(config.run.device)
    corpus = open_corpus(config.data, config.workers, config.seed)
    with lanes(device, config.workers, config.run.threads) as (pool, count):
        tally, began = _Tally(config), time.perf_counter()
        ahead = pool if count > 1 and _may_run_ahead(config) else None
        learners = [_Learner(i, settled.config, corpus, device, tally, ahead) for i in range(config.workers)]
        run = _loop(settled, settled.network, learners)
        probe = Probe(config, corpus, device)
        with (
            RunFolder(folder, dump(config), config.record, resume_round=0 if again else None) as record,
            EventWriter(folder, network=name, workers=config.workers, resume_round=0 if again else None) as log,
        ):
            save = saver(digest(config), folder, lambda: _snapshots(run, config.workers))
            journal = Journal(config, record, lambda: _assessed(run, probe), save, progress)
            events = EventJournal(journal, log, EventSeconds(config.workers, name))
            steps = [learner.local_steps for learner in learners]
            for event in run.run():
                events.enter(event, run.time_s, steps)
            events.end()
        tokens_per_s = events.tokens / (time.perf_counter() - began)
    if config.record.export:
        publish(config, corpus, _model(run), folder)
    return Result(events.loss, events.tokens, tokens_per_s, {name: events.time_s})


_Loop = ServerRun | PairRun | GossipRun


def _loop(settled: WithServer | InPairs | WithoutWaiting, network: Network, learners: "Sequence[_Learner]") -> _Loop:
    """The event loop of this run."""
    config = settled.config
    options = LoopOptions(
        absences=settled.absences,
        codec=settled.method.codec if isinstance(settled, WithoutWaiting) else settled.codec,
        seed=config.seed,
        budget=config.workers * config.run.steps,
        begins=lambda worker, number: learners[worker].begin(number),
    )
    match settled:
        case WithServer(rule=rule):
            spans, overlap = learners[0].spans, config.events.overlap
            return ServerRun(rule, learners, network, spans=spans, overlap=overlap, options=options)
        case InPairs(rule=rule, rates=rates):
            return PairRun(rule, learners, network, rates, options)
        case WithoutWaiting(method=m):
            return GossipRun(m.rule, m.topology, learners, network, options)


def _may_run_ahead(config: RunConfig) -> bool:
    """Whether threads may compute local phases ahead of virtual time.

    A phase is lost if its worker leaves during it, and gossip reads parameters in the middle of a phase.
    """
    return config.kind != "no waiting" and not config.events.absences


class _Tally:
    """The progress of the run."""

    def __init__(self, config: RunConfig) -> None:
        self.steps, self._per_round = 0, config.workers * config.full_steps

    @property
    def rounds(self) -> int:
        """Rounds that are over, by the phases that have ended."""
        return self.steps // self._per_round


class _Learner(Replica):
    """A replica whose local phase may be computed before the virtual time at which it ends."""

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
    """The states to save, by owner; the server comes after the workers."""
    if isinstance(run, ServerRun):
        return [(workers, {"x": run.model(), "outer": leaves(tuple(run.states()))})]
    return [(i, {"x": x}) for i, x in enumerate(run.models())]
