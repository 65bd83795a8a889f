"""What an exchange needs of a network: tickets that name messages, and the transport that carries them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from gossamer.errors import TransportError

if TYPE_CHECKING:  # who only looks at a run needs no torch, and its import takes seconds
    from torch import Tensor

WIRE_VERSION = 4
"""Of everything that processes of a run send each other; processes of two versions refuse each other."""


class IncompleteError(TransportError):
    """Messages that a mean over everyone needs have not come; in an elastic run its round is tried again over fewer workers."""


Sound = Callable[[Sequence["Tensor"]], bool]
"""Whether frames that have come may count."""


class Ticket(NamedTuple):
    """Names the messages of one exchange between workers, so that those of neighbouring rounds can never be confused."""

    round: int
    fragment: int = 0
    leg: int = 0
    """0 for a plain exchange and for the way to the chunk owners of a mean, 1 for the way back, two more for each attempt that
    has failed in an elastic run; a probe of the links counts the messages of its round."""


class Delivery(NamedTuple):
    """How long the transfer of one message took, without the wait before it began."""

    ticket: Ticket
    peer: int
    payload_bytes: int
    seconds: float
    """From the arrival of its header to that of its last byte."""
    began_s: float
    """When its header came, on the clock of `time.perf_counter`."""


class Wait(NamedTuple):
    """How long the messages of one ticket blocked a worker, on that clock."""

    ticket: Ticket
    start_s: float
    end_s: float


class Closes(Protocol):
    """How the workers of an elastic run agree over whom the mean of a round is taken (`gossamer.transport.elastic.closing`)."""

    def proposed(self, round: int) -> tuple[int, frozenset[int]]:
        """The next attempt of the round, and the workers over whom the mean is taken. Blocks until it is known."""
        ...

    def committed(self, attempt: int, *, whole: bool) -> bool:
        """Whether all of them have got everything, as this worker has if `whole`; if not, it is tried again. Blocks."""
        ...


Reduce = Callable[[Sequence["Tensor"], Ticket], None]
"""Sums each tensor over all workers in place, under the ticket of the exchange."""


class Transport(Protocol):
    """What an exchange needs of a network. Only `wait` and `close` block."""

    worker: int
    keeps_frames: bool
    """Whether posted frames are kept by reference; the caller must then not change them until all peers have collected."""

    def expect(self, ticket: Ticket, peer: int, like: Sequence["Tensor"], sound: Sound | None = None) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes under this ticket; may be called early.

        Args: `sound` is asked before an exchange counts at both ends, by a transport where it may count at neither.
        """
        ...

    def post(self, ticket: Ticket, peer: int, frames: Sequence["Tensor"]) -> None:
        """Starts sending; the frames must stay unchanged until `ready(ticket)`."""
        ...

    def ready(self, ticket: Ticket) -> bool:
        """Whether everything expected under the ticket has arrived and everything posted has left. Raises PeerError."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """Returns once `ready(ticket)`. Raises PeerError when a peer died or the deadline passed."""
        ...

    def collect(self, ticket: Ticket) -> dict[int, list["Tensor"]]:
        """The frames that arrived under a ready ticket, by peer; forgets the ticket."""
        ...

    def close(self) -> None:
        """Ends every transfer in flight and frees the memory of the transport."""
        ...


@runtime_checkable
class WaitingTransport(Transport, Protocol):
    """A transport between processes, which knows how long its caller has waited for messages."""

    def waits(self) -> list[Wait]:
        """The times that `wait` blocked its caller since the last call."""
        ...

    def deliveries(self) -> list[Delivery]:
        """The messages that came since the last call."""
        ...
