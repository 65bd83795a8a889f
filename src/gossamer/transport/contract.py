"""What an exchange needs of a network: tickets that name messages, and the transport that carries them."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from gossamer.errors import TransportError

if TYPE_CHECKING:  # commands that only inspect a run need no torch, whose import takes seconds
    from torch import Tensor

WIRE_VERSION = 5
"""The version of all messages between processes of a run; processes of different versions refuse each other."""


class IncompleteError(TransportError):
    """Messages that a mean over everyone needs are missing; an elastic run retries the round over fewer workers.

    Args: `unsound` are the workers whose messages were declined, as they are not finite or cannot be decoded.
    """

    def __init__(self, message: str, unsound: Collection[int] = ()) -> None:
        super().__init__(message)
        self.unsound = frozenset(unsound)


Sound = Callable[[Sequence["Tensor"]], bool]
"""A predicate that accepts or declines received frames."""


class Ticket(NamedTuple):
    """The identifier of the messages of one exchange, which keeps those of neighbouring rounds apart."""

    round: int
    fragment: int = 0
    leg: int = 0
    """0 for a plain exchange and for the way to the chunk owners of a mean, 1 for the way back, two more for each attempt that
    has failed in an elastic run; a probe of the links counts the messages of its round."""


class Delivery(NamedTuple):
    """The duration of one message's transfer, without the wait before it."""

    ticket: Ticket
    peer: int
    payload_bytes: int
    seconds: float
    """From the arrival of its header to that of its last byte."""
    began_s: float
    """The arrival of its header, on the clock of `time.perf_counter`."""


class Wait(NamedTuple):
    """The time for which the messages of one ticket blocked a worker, on that clock."""

    ticket: Ticket
    start_s: float
    end_s: float


_MOST_TIMES = 1 << 14


class Times:
    """The waits and deliveries of a transport. Any thread may append to them, which needs no lock.

    Beyond a limit the oldest are dropped.
    """

    def __init__(self) -> None:
        self._waits, self._deliveries = deque[Wait](maxlen=_MOST_TIMES), deque[Delivery](maxlen=_MOST_TIMES)

    def waits(self) -> list[Wait]:
        """The times for which its caller waited for messages, since the last call."""
        return [self._waits.popleft() for _ in range(len(self._waits))]

    def deliveries(self) -> list[Delivery]:
        """The messages received since the last call; none on NCCL, where header and payload arrive together."""
        return [self._deliveries.popleft() for _ in range(len(self._deliveries))]


class Closes(Protocol):
    """The agreement of the workers of an elastic run on the participants of a round's mean
    (`gossamer.transport.elastic.closing`).
    """

    def proposed(self, round: int) -> tuple[int, frozenset[int]]:
        """The next attempt of the round, and the participants of its mean. Blocks until it is known."""
        ...

    def committed(self, attempt: int, *, whole: bool, unsound: Collection[int] = ()) -> bool:
        """Whether all participants have received everything, as this worker has if `whole`; if not, the round is
        retried, without those whose messages are `unsound`. Blocks.

        Raises: TrainingError where too few are left without these.
        """
        ...


Reduce = Callable[[Sequence["Tensor"], Ticket], None]
"""Sums each tensor over all workers in place, under the ticket of the exchange."""


class Transport(Protocol):
    """The interface between an exchange and a network. Only `wait` and `close` block."""

    worker: int
    keeps_frames: bool
    """Whether posted frames are kept by reference; the caller must then not change them until all peers have collected."""

    def expect(self, ticket: Ticket, peer: int, like: Sequence["Tensor"], sound: Sound | None = None) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes under this ticket; may be called early.

        Args: `sound` is called before an exchange is committed, by a transport in which it may fail at both ends.
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
class TimedTransport(Transport, Protocol):
    """A transport between processes that measures how long its caller waits for messages."""

    def waits(self) -> list[Wait]:
        """The times that `wait` blocked its caller since the last call."""
        ...

    def deliveries(self) -> list[Delivery]:
        """The messages that came since the last call."""
        ...
