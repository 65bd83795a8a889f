"""Sending frames between workers: `memory` inside one process, `group` over torch.distributed, `stream` over one socket.

A transport belongs to one worker. It knows tickets, peers and frames (flat tensors), but neither rules nor codecs.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Arrival", "Ticket", "Transport"]


class Ticket(NamedTuple):
    """Identifies one exchange, so that messages of neighbouring rounds cannot be confused."""

    round: int
    fragment: int = 0
    leg: int = 0
    """0 for a plain exchange and for sending to the chunk owners of a mean, 1 for sending the sums back."""


class Arrival(NamedTuple):
    """How long the bytes of one received message took to arrive, without the wait for them."""

    ticket: Ticket
    peer: int
    payload_bytes: int
    seconds: float
    """From the arrival of the header to that of the last byte."""


class Transport(Protocol):
    """Sends and receives frames for one worker. Only `wait` and `close` block."""

    worker: int
    keeps_frames: bool
    """Whether posted frames are kept by reference; the caller must then not change them until all peers have collected."""

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor]) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes under this ticket; may be called early."""
        ...

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Starts sending; the frames must stay unchanged until `ready(ticket)`."""
        ...

    def ready(self, ticket: Ticket) -> bool:
        """Whether everything expected under the ticket has arrived and everything posted has left. Raises PeerError."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Returns once `ready(ticket)`. Raises PeerError when a peer died or the deadline passed."""
        ...

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """The frames that arrived under a ready ticket, by peer; forgets the ticket."""
        ...

    def close(self) -> None:
        """Ends every transfer in flight and frees the memory of the transport."""
        ...
