"""What event-driven methods are: a server that takes each message as it comes, and pairs of workers that meet.

Both see one flat vector of one fragment, never devices, bytes or clocks; who talks when is the business of `gossamer.clock`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.layout import Layout
from gossamer.tree import Tree

__all__ = ["PairRule", "PushInfo", "ServerRule", "Window"]


class PushInfo(NamedTuple):
    """What a server knows about a push."""

    worker: int
    age: int
    """How many updates the server has made since it sent this worker its starting point; 0 if nothing overtook the push."""
    tokens: int
    """Tokens the worker trained on since it had the starting point."""
    local_steps: int
    """Inner steps it took for them."""
    layout: Layout
    """Names, shapes and offsets of the tensors in the push."""


class Window(NamedTuple):
    """A server that gathers messages before it makes one update of them."""

    quorum: int
    """Messages that are enough; all present workers where fewer are present."""
    grace_s: float
    """Seconds it then waits for more."""
    merge: Callable[[Sequence[Tensor], Sequence[PushInfo]], Tensor]
    """One message of those gathered, which come in ascending order of their workers."""


class ServerRule(NamedTuple):
    """How a server greets workers and absorbs what they send.

    `init(x) -> S` makes the server's state, a named tuple of tensors that owns its memory and whose field `x` is the server's
    model; `greet(S)` is the point a worker starts its local phase from; the worker sends its pseudo-gradient
    Δ = start - end (descent sign), and `absorb(S, Δ, arrival) -> S` is the server's update. All are pure.

    Shapes: x, starting points and messages are flat `[P]` vectors.
    """

    init: Callable[[Tensor], Any]
    greet: Callable[[Any], Tensor]
    absorb: Callable[[Any, Tensor, PushInfo], Any]
    name: str = ""
    """That of its factory, which fills it in, and the options too."""
    options: Mapping[str, Any] = MappingProxyType({})
    window: Window | None = None
    """How messages are gathered; None absorbs each on its own."""
    elementwise: bool = True
    """Whether halves may be updated one by one."""
    state_copies: int = 1
    """Tensors of the size of `x` that the server holds, its model included."""


class PairRule(NamedTuple):
    """What one worker does as time passes, after a local phase, and when it meets another.

    `init(x) -> s` makes the state beside the parameters x; `advance(x, s, dt)` lets dt seconds pass and is called before
    anything else happens, so that both ends of a meeting stand at the same time; `learn(x, s, drift)` takes in how far a local
    phase went (drift = end - start); `tell(x, s)` is what the other end of a meeting gets to see; `meet(x, s, told, heard)`
    is the meeting itself, where `told` is what I told. All but init and tell return `(x, s)`, and all are pure.

    Between telling and meeting a link takes its time, and x may have learned in between: rules that keep a mean write the
    meeting in the difference `heard - told`, which has opposite signs at the two ends.
    """

    init: Callable[[Tensor], Tree]
    advance: Callable[[Tensor, Tree, float], tuple[Tensor, Tree]]
    learn: Callable[[Tensor, Tree, Tensor], tuple[Tensor, Tree]]
    tell: Callable[[Tensor, Tree], Tensor]
    meet: Callable[[Tensor, Tree, Tensor, Tensor], tuple[Tensor, Tree]]
    name: str = ""
    """That of its factory, which fills it in, and the options too."""
    options: Mapping[str, Any] = MappingProxyType({})
    state_copies: int = 0
    """Tensors of the size of `x` that a worker holds beside it."""
    settle: "Callable[[float, float], PairRule] | None" = None
    """The same rule with what it takes from χ₁ and χ₂ of the meetings; None where nothing is open."""
    any_phase: bool = True
    """Whether a local phase may be any training; False where it must be exactly one gradient step."""
