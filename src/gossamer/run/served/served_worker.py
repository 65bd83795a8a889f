"""One worker of a server: its work between two messages, and the process that runs it over a connection.

A worker that loses its connection drops its current phase, and rejoins like a restarted process: from the server's
starting points and its own last checkpoint. So the server's record of arrivals need not mention it.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from gossamer.clock import SERVER, Phase
from gossamer.clock.fragment import Push, StartingPoint
from gossamer.clock.server_worker import ServerWorker
from gossamer.codecs import fitted
from gossamer.codecs.message import encode
from gossamer.errors import ConfigError, DataError, LostConnectionError
from gossamer.finite import must_be_finite
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.lineage import Lineage
from gossamer.record.locks import locked
from gossamer.record.logs.events import EventWriter
from gossamer.record.logs.seconds import recorded_s
from gossamer.record.progress import say
from gossamer.record.whole_files import worker_suffix
from gossamer.rng import key as random_key
from gossamer.rounds.stopwatch import Stopwatch
from gossamer.run.bookkeeping.inputs import must_have_inputs, note_inputs
from gossamer.run.bookkeeping.journal import log_phase, saved_when_unreadable
from gossamer.run.bookkeeping.resume import History, Resume, lineage_of, resumed
from gossamer.run.bookkeeping.which_round import kept_by, must_lose_nothing, warn_unverified
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import (
    HERE,
    first_batch,
    limits_of,
    run_key,
    run_settings,
    use_recorded_threads,
    use_threads,
)
from gossamer.run.served.protocol import OWNED, Terms, decode_terms
from gossamer.run.worker.replica import LocalPhase, Replica
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import Task, task_of
from gossamer.stop_signals import leaving
from gossamer.transport import wire
from gossamer.transport.contract import Ticket
from gossamer.transport.keys import keys_for
from gossamer.transport.processes.launch import device_of
from gossamer.transport.secret import folder_secret
from gossamer.transport.sockets.addresses import shown
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter
from gossamer.transport.sockets.server_client import Patience, connect
from gossamer.tree import leaves, nbytes

log = logging.getLogger("gossamer")


class ServerLink(Protocol):
    """What a worker needs of its connection with the server; both methods raise PeerError when it is lost."""

    def send(self, letter: Letter, /) -> None:
        """Sends a letter."""
        ...

    def receive(self, kind: LetterKind, ticket: Ticket, size: int, /) -> Letter:
        """The next letter, which must have this kind and ticket, and so many bytes."""
        ...


class CompletedPhase(NamedTuple):
    """A completed local phase."""

    number: int
    round: int
    """The current round of the run."""
    report: LocalPhase
    push: Push


class ServedWorker:
    """A worker of a server with its model, data, records and checkpoints, and without a connection.

    Args: `line` is the lineage of checkpoints that it may resume from.
    """

    def __init__(
        self,
        index: int,
        run: ResolvedRun,
        folder: Path,
        task: Task,
        device: torch.device,
        line: Lineage | None = None,
    ) -> None:
        self.index, self.run, self.folder = index, run, folder
        self.learner = Replica(index, run, task, device)
        self._store, self._lineage = folder / "checkpoints", line or lineage_of(run, folder)
        self._damaged = 0
        """The newest round with a damaged checkpoint."""
        self._terms: Terms
        self._worker: ServerWorker

    @property
    def finished_rounds(self) -> int:
        """Completed rounds, as last reported by the server."""
        return min(self._terms.round, self.run.rounds)

    @property
    def phases(self) -> int:
        """Its local phases received by the server, as last reported."""
        return self._terms.phases

    @property
    def is_done(self) -> bool:
        """Whether the server has reported that no phase is left for it."""
        return not self._terms.go

    def owned(self) -> list[int]:
        """The newest rounds of which it has a sound checkpoint; reports damaged ones."""
        faults = checkpoint.generation_faults(self._store, self.index, self._lineage)
        newest = [r for r, why in faults.items() if why is None][-OWNED:]
        faults |= {r: checkpoint.fault(self._store, r, self.index, self._lineage) for r in newest}
        damaged = {r: fault for r, fault in faults.items() if fault is not None}
        for round, fault in damaged.items():
            log.warning("worker %d skips its round %d: %s", self.index, round, fault.why)
        self._damaged = max(damaged, default=0)
        return [r for r in newest if faults[r] is None]

    def join(self, starts: Mapping[int, StartingPoint], terms: Terms) -> None:
        """Starts from the server's reply, and its own checkpoint named there. Raises CheckpointError."""
        if terms.again:
            checkpoint.rewind(self._store, terms.checkpoint, self.index, aside=self._damaged > terms.checkpoint)
            if terms.checkpoint:
                warn_unverified(Store(self.run, self.folder), terms.checkpoint, [self.index])
                self.learner.restore(checkpoint.load(self._store, terms.checkpoint, self.index, self._lineage))
        self._terms, self._worker = terms, ServerWorker(self.learner, self.learner.spans, starts)

    def train(self) -> CompletedPhase:
        """The next local phase."""
        self.learner.round = self._terms.round
        report, push = self._worker.train(self._terms.phases)
        assert push is not None  # without overlap there is one after each phase
        assert isinstance(report, LocalPhase)
        return CompletedPhase(self._terms.phases, min(self._terms.round, self.run.rounds - 1), report, push)

    def log(
        self, record: RunFolder, events: EventWriter, trained: CompletedPhase, start_s: float, end_s: float
    ) -> None:
        """Writes a local phase into metrics and events."""
        phase = Phase(start_s, end_s, self.index, trained.number, trained.report)
        log_phase(record, events, trained.round, phase, self.learner.local_steps)

    def uncounted(self, terms: Terms) -> Callable[[Mapping[str, Any]], bool]:
        """Whether a line is about a phase that the server has not received, which is repeated."""
        steps = terms.phases * self.learner.local_steps

        def void(line: Mapping[str, Any]) -> bool:
            of_phase = line.get("event") == "phase" and line["number"] >= terms.phases
            return line.get("worker") == self.index and (
                of_phase or (line.get("kind") == "train" and line["step"] > steps)
            )

        return void

    def receive(self, trained: CompletedPhase, starts: Mapping[int, StartingPoint], terms: Terms) -> range:
        """Continues from the reply to a push, and saves if due; returns the newly completed rounds."""
        self._worker.receive(starts)
        self._terms = terms
        finished = range(trained.round + 1, min(terms.round, self.run.rounds) + 1)
        if any(self.run.due(self.run.loop.checkpoint_every, r) for r in finished):
            checkpoint.save(self._store, finished[-1], self.index, self.learner.state(), digest=self._lineage)
        return finished

    def save(self) -> None:
        """Saves its inner state on leaving, under the completed rounds, unless it has a checkpoint of them."""
        round = self.finished_rounds
        if round and round not in checkpoint.rounds(self._store, self.index, self._lineage):
            checkpoint.save(self._store, round, self.index, self.learner.state(), digest=self._lineage)


def work(run: ResolvedRun, folder: Path, host: str, port: int, worker: int, *, resume: Resume = False) -> None:
    """Trains one worker of the server at this address until no phase is left.

    Both ends authenticate with the secret of the run, from GOSSAMER_SECRET or the run folder. When the connection
    breaks it retries for `run.timeout_s`, in which the server may be resumed. On a stop signal it saves and returns
    once the server has answered the push of its local phase, or ends at once without a server.

    Args: `resume` lets settings differ from those in the folder, as the server does; with "auto" the run may also
        restart.
    Raises: ConfigError, DataError, TrainingError; PeerError when the server is gone or refuses it; KeyboardInterrupt on
        a stop request when its server is gone.
    Cost: one model, its gradients and inner state, and one starting point.
    """
    use_threads(run)
    if not 0 <= worker < run.workers:
        raise ConfigError(
            f"--worker got {worker} but the run file has workers = {run.workers}; give 0 to {run.workers - 1}"
        )
    if resume:
        use_recorded_threads(run, folder, worker)
    # The server decides about duplicates; the lock only shows that this worker is running.
    with locked(folder, worker, strict=False):
        _work(run, folder, host, port, worker, resume)


def _work(run: ResolvedRun, folder: Path, host: str, port: int, worker: int, resume: Resume) -> None:
    keys, task = keys_for(run.peers, run.workers), task_of(run)
    secret = folder_secret(folder) if keys is None else b""
    key, settings = run_key(run, task), run_settings(run, task)
    if resume:
        must_have_inputs(run, task, folder, "resume")
    patience, device = Patience(run.loop.timeout_s), device_of(run.loop.device, worker)
    while True:
        past = resumed(run, folder, resume)
        # Created before the connection, as it takes seconds during which the server would wait; and again for each
        # connection, as the state of an aborted phase is dropped.
        served = ServedWorker(worker, run, folder, task, device, past and past.lineage)
        hello = torch.tensor([first_batch(task, worker), *([0] * OWNED + served.owned())[-OWNED:]])
        client = connect(
            shown(host, port),
            secret=secret,
            run=key,
            me=worker,
            limits=limits_of(run),
            timeout_s=patience.left_s,
            settings=settings,
            keys=keys,
        )
        client.channel.wait_at_most(run.loop.timeout_s)
        was_asked = False
        try:
            with leaving(f"worker {worker} is asked to leave after its local phase") as asked:
                asked.left_s = lambda served=served: served.learner.phase_left_s
                client.send(Letter(LetterKind.HELLO, worker, body=hello.view(torch.uint8)))
                try:
                    return take_part(client, served, asked.is_set, past=past, auto=resume == "auto")
                finally:
                    was_asked = asked.is_set()
        except LostConnectionError as error:
            if was_asked:
                raise KeyboardInterrupt(f"worker {worker} was asked to leave: {error}") from None
            log.warning(
                "%s; worker %d tries again for %g s, and trains this phase again", error, worker, run.loop.timeout_s
            )
            patience.lost(client, error)
            resume = "auto"
        finally:
            client.close()


def take_part(
    client: ServerLink,
    served: ServedWorker,
    asked: Callable[[], bool],
    *,
    past: History | None = None,
    auto: bool = True,
) -> None:
    """Joins the server at the other end of a connection, and trains until no phase is left, or a stop is requested.

    Args:
        past: the settings that the run had before, where it is resumed.
        auto: whether the folder may hold the record of a run that starts again.
    """
    run, worker, folder = served.run, served.index, served.folder
    arrived = [_starting_point(client, served, p) for p in range(len(served.learner.spans))]
    terms = arrived[-1][1]
    served.join({p: start for p, (start, _) in enumerate(arrived)}, terms)
    # The server decides which rounds are valid, as its snapshot may be older than this worker's records.
    cut = terms.cut_round if terms.again else 0 if auto else None
    if auto and past is not None and not terms.again:
        store = Store(run, folder)
        must_lose_nothing(store, kept_by(store, [worker], past.lineage, past.before), past.before)
        checkpoint.rewind(store.path, 0, worker)
    if past is not None:
        past.go_on(folder, min(terms.cut_round, terms.round))
    void = served.uncounted(terms)

    with (
        RunFolder(folder, run.document, run.record, worker=worker, resume_round=cut, void=void) as record,
        EventWriter(
            folder, network=HERE, workers=run.workers, suffix=worker_suffix(worker), resume_round=cut, void=void
        ) as events,
    ):
        note_inputs(run, served.learner.task, folder, worker)
        stopwatch = Stopwatch(worker, recorded_s(folder, worker, cut))
        _train(client, served, terms, record, events, stopwatch, asked)


def _train(
    client: ServerLink,
    served: ServedWorker,
    terms: Terms,
    record: RunFolder,
    events: EventWriter,
    stopwatch: Stopwatch,
    asked: Callable[[], bool],
) -> None:
    """Trains and pushes until no phase is left, or a stop is requested."""
    run, layout = served.run, served.learner.layout
    codecs = [fitted(run.with_server.codec, layout.slice(*span)) for span in served.learner.spans]
    # The server's clock, up to the letter's latency, so that events of all workers share one axis.
    early_s = terms.elapsed_us / 1e6 - time.monotonic()
    while terms.go:
        began_s = time.monotonic() + early_s
        trained = served.train()
        p, number = trained.push.fragment, trained.number
        ended_s = time.monotonic() + early_s
        served.log(record, events, trained, began_s, ended_s)
        must_be_finite({f"the message of worker {served.index} in its phase {number}": trained.push.message})
        payload = encode(codecs[p], trained.push.message, random_key(run.seed, served.index, number, p, "codec"))
        packed = wire.pack_frames([frame.cpu() for frame in leaves(payload)])
        client.send(Letter(LetterKind.PUSH, served.index, Ticket(number, p), body=packed))
        sent_s = time.monotonic() + early_s
        start, terms = _starting_point(client, served, p, number)
        replied_s = time.monotonic() + early_s
        stopwatch.phase(trained.report.compute_s, sent_s - ended_s, replied_s - sent_s)
        # The reply confirms the push. If saved earlier, the inner optimizer could be a phase ahead of the server.
        finished = served.receive(trained, {p: start}, terms)
        events.write(
            trained.round,
            "fetch",
            source=SERVER,
            target=served.index,
            fragment=p,
            bytes=nbytes(start.x),
            start_s=sent_s,
            end_s=replied_s,
        )
        if finished or not terms.go:
            record.log_seconds(stopwatch.round(trained.round))
        # The server has all of this worker's phases, and grants no more once its connection ends.
        if terms.go:
            try:
                served.learner.read_ahead()
            except DataError as error:
                served.save()
                raise DataError(saved_when_unreadable(error, record.path)) from error
        if terms.go and asked():
            served.save()
            return say(f"worker {served.index} has left after {terms.phases} local phases, as it was asked to")


def _starting_point(client: ServerLink, served: ServedWorker, p: int, number: int = 0) -> tuple[StartingPoint, Terms]:
    """The next starting point of a fragment, with its terms. Raises PeerError and TransportError."""
    first, last = served.learner.spans[p]
    like = [torch.empty(len(Terms._fields), dtype=torch.int64), torch.empty(last - first, device="meta")]
    body = client.receive(LetterKind.START, Ticket(0, p), wire.frames_bytes(like)).body
    numbers, x = wire.unpack_frames(body, like)
    terms = decode_terms(numbers, limits_of(served.run))
    must_be_finite({f"the starting point of phase {number} from the server": x})
    return StartingPoint(x, terms.updates), terms
