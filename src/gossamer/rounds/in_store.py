"""A round of workers that share only a store: its messages and means as bytes, and the exchange after its outcome is there.

The store decides who takes part (`gossamer.transport.bucket.protocol`). A worker of `gossamer train` trains the local phases, or
the loop of a user.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from gossamer.errors import CheckpointError
from gossamer.record.packed import packed, unpacked
from gossamer.rounds.loop import Membership, OuterLoop
from gossamer.rounds.schedule import Stop
from gossamer.rounds.together import GivenMeans
from gossamer.transport.bucket.objects import Commit
from gossamer.transport.contract import Ticket, Transport
from gossamer.transport.elastic.common import common_hash
from gossamer.transport.memory import MemoryNetwork, Parcel
from gossamer.tree import Tree, leaves, must_fit, refill

ROUNDING = 1e-4
"""Largest distance of a mean from that of another machine, as a share of its norm, that counts as rounding."""


class RoundsInStore(ABC):
    """The part of `gossamer.transport.bucket.protocol.StoreWorker` that exchanges.

    Args:
        workers: slots of the run.
        device: of the parameters.
        gossip: whether each worker takes the messages of its peers, instead of a mean.
    """

    def __init__(self, workers: int, device: torch.device, *, gossip: bool) -> None:
        self._workers, self._device = workers, device
        self._present = frozenset[int]()
        self.together = None if gossip else GivenMeans(workers)
        """The means of rounds that are closed."""

    @property
    @abstractmethod
    def loop(self) -> OuterLoop:
        """The exchanges of this worker, over `transport`, `together` and `membership`."""

    @property
    def membership(self) -> Membership:
        """The participants of each round, which its outcome names before this worker exchanges."""
        return Membership(lambda round, fragment: self._present, closes=self)

    def transport(self, slot: int) -> Transport:
        """A new transport: it holds what this worker posts, and receives its peers' messages from the store."""
        self._network = MemoryNetwork(self._workers, lambda parcel: parcel.receiver == slot)
        return self._network.transport(slot)

    def proposed(self, round: int) -> tuple[int, frozenset[int]]:
        """See `gossamer.transport.contract.Closes`: the commit exists already."""
        return 0, self._present

    def committed(self, attempt: int, *, whole: bool, unsound: Collection[int] = ()) -> bool:
        """See `proposed`."""
        return whole

    def stop(self, round: int) -> Stop:
        """The only stop of a round, at its end."""
        (stop,) = self.loop.stops(round)
        return stop

    def common(self) -> str:
        """See `StoreWorker`."""
        return common_hash(0, self.loop.shared)

    def message(self, round: int) -> bytes:
        """The message of this worker, after its local phase."""
        return _packed_trees(self.loop.payloads(round, self.stop(round)))

    def is_sound(self, round: int, body: memoryview) -> bool:
        """See `StoreWorker`."""
        try:
            payloads = self._trees(round, body)
        except CheckpointError:
            return False
        return self.loop.are_sound(round, self.stop(round), payloads)

    def mean(self, round: int, messages: Mapping[int, bytes | memoryview]) -> bytes:
        """See `StoreWorker`."""
        trees = {slot: self._trees(round, body) for slot, body in messages.items()}
        return _packed_trees(self.loop.means(round, self.stop(round), trees))

    def is_mean(self, round: int, own: bytes, there: memoryview) -> bool:
        """See `StoreWorker`."""
        try:
            pairs = zip(*(leaves(tuple(self._trees(round, body, of="means"))) for body in (own, there)), strict=True)
        except CheckpointError:
            return False
        return all(bool((b - a).norm() <= ROUNDING * a.norm()) for a, b in pairs)

    def peers(self, round: int, parts: Collection[int]) -> Collection[int]:
        """See `StoreWorker`."""
        return self.loop.peers_in(round, frozenset(parts))

    def add(self, commit: Commit, mean: memoryview) -> None:
        """See `StoreWorker`."""
        means = self._trees(commit.round, mean, of="means")
        self.loop.take_means(commit.round, self.stop(commit.round), frozenset(commit.parts), means)

    def finish(self, commit: Commit, mean: memoryview) -> None:
        """See `StoreWorker`."""
        assert self.together is not None
        means = self._trees(commit.round, mean, of="means")
        self.together.means = dict(zip(self.stop(commit.round).sends, means, strict=True))
        self._present = frozenset(commit.parts)
        self.end_round(commit, len(commit.parts) - 1)

    def mix(self, commit: Commit, messages: Mapping[int, memoryview]) -> None:
        """See `StoreWorker`."""
        receiver = self.loop.worker
        for j, body in messages.items():
            for p, payload in zip(self.stop(commit.round).sends, self._trees(commit.round, body), strict=True):
                self._network.send(Parcel(Ticket(commit.round, p), j, receiver, tuple(leaves(payload))))
        self._present = frozenset(commit.parts)
        self.end_round(commit, len(messages))
        self._network.held.clear()

    @abstractmethod
    def end_round(self, commit: Commit, exchanges: int) -> None:
        """Exchanges, as everything to be received is there, and ends the round."""

    def _trees(self, round: int, body: bytes | memoryview, of: Literal["messages", "means"] = "messages") -> list[Tree]:
        """The messages or means of a round. Raises: CheckpointError for what is none of this run."""
        forms = (self.loop.mean_forms if of == "means" else self.loop.payload_forms)(round, self.stop(round))
        content = unpacked(bytes(body))
        try:
            read = iter(content["leaves"])
            some = [[next(read) for _ in leaves(form)] for form in forms]
            for tensors, form in zip(some, forms, strict=True):
                must_fit(tensors, leaves(form))
        except (AttributeError, LookupError, TypeError, ValueError, StopIteration) as error:
            raise CheckpointError(
                f"what lies in the store for round {round + 1} does not fit this model ({error}); start all with the same "
                "settings and gossamer"
            ) from None
        return [
            refill(form, [one.to(self._device) for one in tensors_here])
            for tensors_here, form in zip(some, forms, strict=True)
        ]


def _packed_trees(trees: Sequence[Tree]) -> bytes:
    """Messages or means as the body of an object."""
    tensors: list[Tensor] = [leaf.cpu() for tree in trees for leaf in leaves(tree)]
    return packed({"leaves": tensors})
