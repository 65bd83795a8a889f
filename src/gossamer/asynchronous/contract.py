"""The interfaces of asynchronous methods: a server that absorbs each message as it arrives, and pairs of workers that meet.

Both see one flat vector of one fragment, never devices, bytes or clocks; `gossamer.clock` decides who communicates when.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.layout import Layout
from gossamer.settings.options import in_short
from gossamer.tree import Tree


class PushInfo(NamedTuple):
    """What a server knows about a push."""

    worker: int
    age: int
    """Updates the server has made since it sent this worker its starting point; 0 if it made none (the staleness)."""
    tokens: int
    """Tokens the worker trained on since it received the starting point."""
    local_steps: int
    """Inner steps it took for them."""
    layout: Layout
    """Names, shapes and offsets of the tensors in the push."""


class Slack(NamedTuple):
    """The time that a worker can continue without the reply to its push; zero for one that waits for the reply."""

    overlap_steps: int = 0
    """Inner steps it takes while the reply is in flight (τ)."""
    step_s: float = 0.0
    """Seconds of an inner step (ξ_step), as measured over its last phase."""
    sync_s: float = 0.0
    """Seconds of its push and of the reply (ξ_sync)."""


class Window(NamedTuple):
    """A server that gathers messages before it makes one update of them."""

    quorum: int
    """The number of messages it needs; with fewer workers present, one from each."""
    grace_s: Callable[[Slack, float], float]
    """`grace_s(slack, waited_s)`: seconds it may then wait for more, by the slack of a gathered message's worker and the seconds
    since that message arrived (ξ_quorum); it waits for the least over the messages."""
    merge: Callable[[Sequence[Tensor], Sequence[PushInfo]], Tensor]
    """Merges the gathered messages, in ascending order of their workers, into one."""


class Regions(NamedTuple):
    """How the servers of regions, each with its own workers, exchange with one global server above them."""

    rule: "ServerRule"
    """The global server's, which absorbs reports without their tokens and steps; `greet` of its state is what it sends back."""
    every: int
    """Updates of a region's server between a merge and its next report."""
    tell: Callable[[Any], tuple[Any, Tensor]]
    """`tell(S) -> (S, D)`: the report D of a region's server, in descent sign, and its state from then on."""
    merge: Callable[[Any, Tensor], Any]
    """`merge(S, Θ) -> S`: takes in the global model when it arrives."""


class ServerRule(NamedTuple):
    """How a server sets the starting points of workers and absorbs their messages.

    `init(x) -> S` makes the server's state, a named tuple of tensors that owns its memory and whose field `x` is the server's
    model; `greet(S)` is the point a worker starts its local phase from; the worker sends its pseudo-gradient
    Δ = start - end (descent sign), and `absorb(S, Δ, arrival) -> S` is the server's update. All are pure.

    Shapes: x, starting points and messages are flat `[P]` vectors.
    """

    init: Callable[[Tensor], Any]
    greet: Callable[[Any], Tensor]
    absorb: Callable[[Any, Tensor, PushInfo], Any]
    name: str = ""
    """The name of its factory; the factory decorator fills in name and options."""
    options: Mapping[str, Any] = MappingProxyType({})
    window: Window | None = None
    """How messages are gathered; None absorbs each on its own."""
    regions: Regions | None = None
    """How each region's server exchanges with a global one; None for a single server."""
    elementwise: bool = True
    """Whether parts of the vector may be updated separately."""
    state_copies: int = 1
    """Tensors of the size of `x` that the server holds, its model included; those of one region's where there are regions."""

    def __repr__(self) -> str:
        return in_short(self)


class PairRule(NamedTuple):
    """The updates of one worker as time passes, after a local phase, and when it meets another.

    `init(x) -> s` makes the state that is kept in addition to the parameters x; `advance(x, s, dt)` lets dt seconds pass and is
    called before every other update, so that both ends of a meeting are at the same time; `learn(x, s, drift)` applies a local
    phase (drift = end - start); `tell(x, s)` makes the message to the other end of a meeting; `meet(x, s, own_decoded,
    peer_decoded)` is the meeting itself, with this worker's own message as the other end decodes it. All but init and tell
    return `(x, s)`, and all are pure.

    The messages of a meeting are in flight for some time, and a local phase may change x meanwhile: rules that keep a mean
    write the meeting in the difference `peer_decoded - own_decoded`, which has opposite signs at the two ends.
    """

    init: Callable[[Tensor], Tree]
    advance: Callable[[Tensor, Tree, float], tuple[Tensor, Tree]]
    learn: Callable[[Tensor, Tree, Tensor], tuple[Tensor, Tree]]
    tell: Callable[[Tensor, Tree], Tensor]
    meet: Callable[[Tensor, Tree, Tensor, Tensor], tuple[Tensor, Tree]]
    name: str = ""
    """The name of its factory; the factory decorator fills in name and options."""
    options: Mapping[str, Any] = MappingProxyType({})
    state_copies: int = 0
    """Tensors of the size of `x` that a worker holds in addition to it."""
    settle: "Callable[[float, float], PairRule] | None" = None
    """Returns the rule with the options it computes from χ₁ and χ₂ of the meetings; None where it computes none."""
    any_phase: bool = True
    """Whether a local phase may be any training; False where it must be exactly one gradient step."""

    def __repr__(self) -> str:
        return in_short(self)
