"""The process of a server: threads transport the frames of its workers' connections, and one session decides and
computes.

Every push is absorbed when it arrives, whatever its staleness. With one worker the result is bitwise equal to a
simulation's; with more, `gossamer.run.replay.served` recomputes them from the record of arrivals.

A worker may die, hang or arrive late: its connection ends, the other workers take its unfinished steps, and on its
return it receives the server's model and continues with its own last checkpoint of the inner optimizer. That may be
older than the server's, which is written first, as neither waits for the other.

The server may die too. A resumed one continues from its newest snapshot, and its workers, which retry for
`run.timeout_s`, rejoin. It grants every phase again, so phases in progress at its death, and pushes absorbed after its
snapshot, are repeated and count once.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from gossamer.codecs import fitted
from gossamer.codecs.message import decode_received, payload_like
from gossamer.errors import RefusedError, TransportError
from gossamer.layout import arrange, layout_of
from gossamer.record.locks import locked
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.inputs import note_inputs
from gossamer.run.bookkeeping.resume import Resume, resumed
from gossamer.run.bookkeeping.which_round import alone, begin_or_resume
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import limits_of, run_key, run_settings, use_recorded_threads, use_threads
from gossamer.run.served.protocol import HELLO_BYTES, Terms
from gossamer.run.served.session import Pushed, Reply, open_session
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import task_of, warn_of_equal_batches
from gossamer.stop_signals import leaving
from gossamer.transport import wire
from gossamer.transport.contract import Ticket
from gossamer.transport.keys import keys_for
from gossamer.transport.secret import SECRET_FILE, environment_secret, folder_secret
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.connection_server import Awaited, ConnectionServer, listener_at
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter
from gossamer.tree import leaves, refill

log = logging.getLogger("gossamer")


def serve(run: ResolvedRun, folder: Path, host: str, port: int, *, resume: Resume = False) -> None:
    """Serves workers until together they have taken all inner steps of the run.

    Workers authenticate with the secret of the run, from GOSSAMER_SECRET, or else from the run folder, where a new one
    is written if there is none.

    Args: `resume` continues from the newest sound checkpoint of the server; "auto" starts if there is none.
    Raises: ConfigError, CheckpointError; PeerError when no worker is left and none comes within `run.timeout_s`;
        KeyboardInterrupt on a stop signal, once the current round is over and saved, or no worker is connected.
    Cost: the rule's state; one message and one starting point per worker in flight.
    """
    use_threads(run)
    if resume:
        use_recorded_threads(run, folder, run.workers)
    with locked(folder, run.workers):
        _serve(run, folder, host, port, resume)


def _serve(run: ResolvedRun, folder: Path, host: str, port: int, resume: Resume) -> None:
    task, store = task_of(run), Store(run, folder)
    probe, past = Probe(run, task, torch.device("cpu")), resumed(run, folder, resume)
    start = begin_or_resume(store, task, past, alone(store, past, [run.workers]))
    if start.round == run.rounds:
        return
    start.go_on([run.workers])
    keys = keys_for(run.peers, run.workers)
    secret = folder_secret(folder, make=True) if keys is None else b""
    if keys is None and not environment_secret():
        log.warning(
            "the workers need the secret of the run: copy '%s' into the run folder of each machine",
            folder / SECRET_FILE,
        )
    key, settings = run_key(run, task), run_settings(run, task)
    with (
        leaving("the server is asked to save and to end after its round") as asked,
        open_session(run, folder, probe, start.cut) as session,
        listener_at(host, port) as listener,
    ):
        note_inputs(run, task, folder, run.workers)
        endpoint = Endpoint(listener, key, secret, run.loop.timeout_s, keys=keys)
        protocol = WorkerLetters(probe, run)
        server = ConnectionServer(endpoint, protocol, settings)
        try:
            server.open()
            session.records.asked = asked.is_set
            server.run(session, session.records.now_s, asked.is_set)
            if not session.is_finished:
                raise KeyboardInterrupt(
                    f"stopped without a worker that could end the round in progress, and {session.progress}; go on from the "
                    f"newest checkpoint with --resume {quote(str(folder))}, or auto where there is none"
                )
            protocol.compare_batches()  # also if some were too slow to join before the others had taken all steps
        finally:
            server.close()


class WorkerLetters:
    """The messages between a server and its workers (`gossamer.transport.sockets.connection_server.PeerProtocol`).

    Each starting point is answered with a push. Their frames are those of `gossamer.transport.wire.pack_frames`.
    """

    hello_bytes = HELLO_BYTES

    def __init__(self, probe: Probe, run: ResolvedRun) -> None:
        layout, spans = arrange(layout_of(probe.model), *run.fragments)
        self.limits = limits_of(run)
        self._codecs = [fitted(run.method.codec, layout.slice(*span)) for span in spans]
        self._likes = [torch.empty(b - a) for a, b in spans]
        self._payloads = [payload_like(codec, like) for codec, like in zip(self._codecs, self._likes, strict=True)]
        self._begin_with: dict[int, int] = {}
        """The fingerprint of each worker's first batch, if it has one."""
        self._compared = False

    def hello(self, peer: int, body: Tensor) -> list[int]:
        """The rounds of which a worker has checkpoints."""
        fingerprint, *owned = body.view(torch.int64).tolist()
        if not all(0 <= round <= self.limits.rounds for round in owned):
            raise RefusedError("bounds", f"it has checkpoints of rounds {owned} and the run has {self.limits.rounds}")
        if fingerprint and peer not in self._begin_with:
            # Called in threads of several connections; dictionary writes are atomic, and the last of them sees all.
            self._begin_with[peer] = fingerprint
            if len(self._begin_with) == self.limits.workers:
                self.compare_batches()
        return owned

    def compare_batches(self) -> None:
        """Warns once where all workers that have joined begin with the same batch."""
        if not self._compared:
            self._compared = True
            warn_of_equal_batches([*self._begin_with.values()])

    def letters(self, reply: Reply) -> list[Callable[[], Letter]]:
        """The starting points; copied in the sending thread, so that no other thread waits for the copy."""
        return [partial(self._start, reply.terms._replace(updates=u), p, x) for p, (x, u) in reply.send.starts.items()]

    def awaited(self, reply: Reply) -> Awaited | None:
        """The push that follows the next phase."""
        if not reply.terms.go:
            return None
        p = reply.terms.phases % len(self._codecs)
        return Awaited(Ticket(reply.terms.phases, p), self.push_bytes(p))

    def push_bytes(self, p: int) -> int:
        """The bytes of a push of a fragment."""
        return wire.frames_bytes(leaves(self._payloads[p]))

    def content(self, letter: Letter, start_s: float) -> Pushed:
        """The push in a letter. Raises TransportError when there is none."""
        p, name = letter.ticket.fragment, f"worker {letter.sender}"
        codec, like, payload = self._codecs[p], self._likes[p], self._payloads[p]
        frames = wire.unpack_frames(letter.body, leaves(payload))
        try:
            message = decode_received(codec, refill(payload, frames), like)
        except TransportError as error:
            raise TransportError(
                f"{name} pushed what is no update: {error}; lower inner.lr, or test its memory"
            ) from None
        return Pushed(p, message, sum(frame.numel() * frame.element_size() for frame in frames), start_s)

    def _start(self, terms: Terms, p: int, x: Tensor) -> Letter:
        body = wire.pack_frames([torch.tensor(terms, dtype=torch.int64), x.cpu()])
        return Letter(LetterKind.START, self.limits.workers, Ticket(0, p), body=body)
