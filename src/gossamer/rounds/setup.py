"""The inputs of an exchange: a worker's tensors and state, codec and transport."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import NamedTuple, Protocol

from torch import Tensor

from gossamer.codecs import Codec, fitted
from gossamer.layout import Layout
from gossamer.rounds.kernel import PLAIN, Kernel
from gossamer.rounds.merging import Merge
from gossamer.rounds.together import Together
from gossamer.rules import Rule
from gossamer.transport.contract import Reduce, Ticket, Transport
from gossamer.tree import Tree


class Part(NamedTuple):
    """A worker's part of one fragment: the live parameters (or gradients), and the outer state; both updated in place."""

    x: Tensor
    s: Tree
    layout: Layout
    fragment: int = 0


class Setup(NamedTuple):
    """The settings shared by all exchanges of one fragment of one worker."""

    rule: Rule
    codec: Codec
    transport: Transport
    part: Part
    seed: int
    """For codecs that round at random. All workers use the payload that the sender encoded, so all decode the same."""
    kernel: Kernel = PLAIN
    """The implementation of the outer update."""
    reduce: Reduce | None = None
    """Sums tensors over all workers in place; if given, it makes every `mean` over everyone whose codec is exact."""
    together: Together | None = None
    """Computes such a mean once for all workers, where all of them are in this process."""
    overlap_steps: int = 0
    """Inner steps that x takes between `post` and `finish`; noted in the trace."""
    merge: Merge = "keep"
    """How the update is merged with those steps, as in `Schedule.merge`."""
    merge_strength: float = 0.5
    """As in `Schedule.merge_strength`."""
    attempt: int | None = None
    """The attempt number in an elastic run, which retries the mean of a round over fewer workers when one fails; else None."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context manager around the outer update."""
    compare: Callable[[Tree, Sequence[Tree]], None] | None = None
    """A read-only callback with each worker's message and the received ones, or the mean of all, as decoded."""
    declined: Callable[[int], None] = lambda sender: None
    """A callback with the sender of a message that was declined, as it is not finite or cannot be decoded."""
    sides: tuple["StageSide", ...] = ()
    """Where peers are in stages and this worker is not: a separate exchange with each stage; see `in_sides`."""


class Sent(NamedTuple):
    """The sent tensors of an exchange in flight; kept in checkpoints, and accepted by `begin` to resend them."""

    message: Tree
    """The rule's message."""
    x: Tree
    """The parameters at the time of sending, where the update needs them and they have changed since; () otherwise."""


class StageSide(NamedTuple):
    """The slice of a fragment that a worker in one piece exchanges with one stage of its peers."""

    transport: Transport
    """The transport to that stage of each peer, or to a peer in one piece."""
    codec: Codec
    """The codec fitted to that stage."""
    start: int
    stop: int
    layout: Layout
    """Of the slice."""


class Waits(Protocol):
    """The transport operations that an exchange needs to proceed."""

    def ready(self, ticket: Ticket) -> bool:
        """As of `Transport`."""
        ...

    def wait(self, ticket: Ticket) -> None:
        """As of `Transport`."""
        ...


class AllOf(NamedTuple):
    """The transports of several sides, which have tickets of the same names."""

    transports: tuple[Transport, ...]

    def ready(self, ticket: Ticket) -> bool:
        """Whether it is ready on all of them; each is polled, as polling starts posted operations."""
        ready = [one.ready(ticket) for one in self.transports]
        return all(ready)

    def wait(self, ticket: Ticket) -> None:
        """Returns once it is ready on all of them."""
        for one in self.transports:
            one.wait(ticket)


def in_sides(setup: Setup, codec: Codec, transports: Sequence[Transport], stage_of: Callable[[str], int]) -> Setup:
    """The setup of a worker in one piece whose peers are in stages: each stage exchanges only its tensors.

    The rule must be elementwise, and a stage's tensors contiguous in the fragment.

    Args:
        codec: that of the run, which each side fits to its slice.
        transports: of each stage.
        stage_of: the stage of the tensor with a name.
    Cost: one more copy of the message per exchange.
    """
    assert setup.rule.elementwise
    sides: list[StageSide] = []
    for stage, leaves in groupby(setup.part.layout.leaves, key=lambda leaf: stage_of(leaf.name)):
        start, *_, stop = [place for leaf in leaves for place in (leaf.start, leaf.stop)]
        layout = setup.part.layout.slice(start, stop)
        assert stage == len(sides), "the tensors of a stage are not one after the other"
        sides.append(StageSide(transports[stage], fitted(codec, layout), start, stop, layout))
    assert len(sides) == len(transports), "a stage has nothing of a fragment"
    return setup._replace(sides=tuple(sides))
