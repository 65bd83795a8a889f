"""The messages between a server and its workers, as letters."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.codecs import fitted
from gossamer.codecs.message import decode_received, payload_like
from gossamer.errors import RefusedError, TransportError
from gossamer.layout import arrange, layout_of
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import limits_of
from gossamer.run.served.protocol import Terms
from gossamer.run.served.session import Pushed, Reply
from gossamer.run.worker.task import warn_of_equal_batches
from gossamer.transport import wire
from gossamer.transport.contract import Ticket
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter
from gossamer.tree import leaves, refill


class Awaited(NamedTuple):
    """The only letter that a worker may send next."""

    ticket: Ticket
    size: int


class WorkerLetters:
    """The letters of a server, and what those of its workers hold; `hello` and `content` are called in threads of connections.

    Each starting point is answered with a push. Their frames are those of `gossamer.transport.wire.pack_frames`.
    """

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
