"""Carrying frames between workers: `memory` inside one process, `group` over torch.distributed.

A transport belongs to one worker. It knows tickets, peers and frames (flat tensors), and nothing of rules or codecs.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Arrival", "Ticket", "Transport", "Wait"]


class Ticket(NamedTuple):
    """Names one exchange so that messages of neighbouring rounds can never be confused."""

    round: int
    fragment: int = 0
    leg: int = 0
    """0 for a plain exchange and for the way to the chunk owners of a mean, 1 for the way back."""


class Arrival(NamedTuple):
    """How long the bytes of one message took to come through, apart from how long it was waited for."""

    ticket: Ticket
    peer: int
    payload_bytes: int
    seconds: float
    """From the arrival of its header to that of its last byte."""
    began_s: float
    """When its header came, on the clock of `time.perf_counter`."""


class Wait(NamedTuple):
    """How long a worker was held up by what it had to receive and send under one ticket, on that clock."""

    ticket: Ticket
    start_s: float
    end_s: float


class Transport(Protocol):
    """What `sync` needs of a network. Nothing here blocks but `wait` and `close`."""

    worker: int
    keeps_frames: bool
    """Whether posted frames are held by reference, so that the caller must not change them until all have collected."""

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor]) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes under this ticket; may be called early."""
        ...

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Starts sending; the frames must stay unchanged until `ready(ticket)`."""
        ...

    def ready(self, ticket: Ticket) -> bool:
        """Whether everything expected under the ticket has come and everything posted has left. Raises PeerError."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Returns once `ready(ticket)`. Raises PeerError when a peer died or the deadline passed."""
        ...

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """The frames that came under a ticket that is ready, by peer; forgets the ticket."""
        ...

    def close(self) -> None:
        """Ends every transfer that is under way and frees what the transport holds."""
        ...
