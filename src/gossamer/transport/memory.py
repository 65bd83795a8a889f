"""Workers of one process: frames pass by reference through mailboxes, and a test may control their delivery."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from gossamer.errors import TransportError
from gossamer.transport.contract import Sound, Ticket


class Parcel(NamedTuple):
    """One posted message."""

    ticket: Ticket
    sender: int
    receiver: int
    frames: tuple[Tensor, ...]


class MemoryNetwork:
    """Mailboxes between n workers of one process.

    Args:
        n: number of workers.
        deliver: whether a parcel arrives at once; other parcels are kept in `held`, in posting order. A test can
            drop a parcel by leaving it there, delay it by releasing it later, or release several in another order.

    >>> import torch
    >>> network = MemoryNetwork(2)
    >>> a, b, ticket = network.transport(0), network.transport(1), Ticket(round=0)
    >>> b.expect(ticket, 0, [torch.empty(2)])
    >>> b.ready(ticket)
    False
    >>> a.post(ticket, 1, [torch.tensor([1.0, 2.0])])
    >>> b.collect(ticket)
    {0: [tensor([1., 2.])]}
    """

    def __init__(self, n: int, deliver: Callable[[Parcel], bool] = lambda _: True) -> None:
        self.n = n
        self.held: list[Parcel] = []
        self._deliver = deliver
        self._arrived: dict[tuple[Ticket, int, int], tuple[Tensor, ...]] = {}

    def transport(self, worker: int) -> "MemoryTransport":
        """The transport of one worker."""
        assert 0 <= worker < self.n, (worker, self.n)
        return MemoryTransport(self, worker)

    def release(self, parcel: Parcel) -> None:
        """Delivers a held parcel."""
        place = next(k for k, kept in enumerate(self.held) if kept is parcel)
        self._arrive(self.held.pop(place))

    def send(self, parcel: Parcel) -> None:
        """Delivers a parcel to its mailbox, or holds it."""
        if self._deliver(parcel):
            self._arrive(parcel)
        else:
            self.held.append(parcel)

    def has(self, ticket: Ticket, sender: int, receiver: int) -> bool:
        """Whether a parcel is in the mailbox."""
        return (ticket, sender, receiver) in self._arrived

    def take(self, ticket: Ticket, sender: int, receiver: int) -> tuple[Tensor, ...]:
        """Empties a mailbox."""
        return self._arrived.pop((ticket, sender, receiver))

    def _arrive(self, parcel: Parcel) -> None:
        assert not self.has(*parcel[:3]), f"{parcel[:3]} was posted twice"
        self._arrived[parcel[:3]] = parcel.frames


class MemoryTransport:
    """The transport of one worker of a `MemoryNetwork`; see `gossamer.transport.contract.Transport`."""

    keeps_frames = True

    def __init__(self, network: MemoryNetwork, worker: int) -> None:
        self.worker = worker
        self._network = network
        self._expected: dict[Ticket, dict[int, list[tuple[object, ...]]]] = {}

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        """Announces that `peer` will send frames of these shapes and dtypes under this ticket."""
        assert 0 <= peer < self._network.n and peer != self.worker, (peer, self.worker)
        kinds = self._expected.setdefault(ticket, {})
        assert peer not in kinds, f"{ticket} was expected from worker {peer} twice"
        kinds[peer] = _kinds(like)

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Puts the frames themselves into the mailbox of `peer`."""
        assert 0 <= peer < self._network.n and peer != self.worker, (peer, self.worker)
        self._network.send(Parcel(ticket, self.worker, peer, tuple(frames)))

    def ready(self, ticket: Ticket) -> bool:
        """Whether everything expected under the ticket has come."""
        return not self._missing(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Returns if `ready(ticket)`.

        Raises: TransportError otherwise, as no one can post while the only thread waits.
        """
        missing = self._missing(ticket)
        if missing:
            peers = ", ".join(map(str, missing))
            raise TransportError(
                f"worker {self.worker} would wait forever in {ticket} for what workers {peers} have not delivered; "
                "let every worker of the process post before any of them waits"
            )

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """The frames received under a ready ticket, by peer; forgets the ticket.

        Raises: TransportError when a peer sent other shapes or dtypes than were announced.
        """
        assert self.ready(ticket), f"{ticket} is not ready: {self._missing(ticket)}"
        frames: dict[int, list[Tensor]] = {}
        for peer, kinds in sorted(self._expected.pop(ticket, {}).items()):
            frames[peer] = list(self._network.take(ticket, peer, self.worker))
            if _kinds(frames[peer]) != kinds:
                raise TransportError(
                    f"worker {peer} sent worker {self.worker} frames {_kinds(frames[peer])} under {ticket}, where {kinds} "
                    "were announced; all workers must run the same rule, codec and model"
                )
        return frames

    def close(self) -> None:
        """Forgets all expected messages."""
        self._expected.clear()

    def _missing(self, ticket: Ticket) -> list[int]:
        expected = self._expected.get(ticket, {})
        return [peer for peer in sorted(expected) if not self._network.has(ticket, peer, self.worker)]


def _kinds(frames: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(tuple(frame.shape), frame.dtype) for frame in frames]
