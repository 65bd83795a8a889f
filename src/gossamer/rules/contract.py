"""What a rule is: four small functions for ONE worker, and tags that say what holds of them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from gossamer.layout import Layout
from gossamer.topologies.mixing import Hear, mean
from gossamer.tree import Tree

__all__ = ["ActsOn", "Consensus", "Context", "Limit", "Needs", "OuterSGD", "Rule"]

Needs = Literal["everyone", "connected", "static", "tree", "push"]
ActsOn = Literal["parameters", "gradients"]


class OuterSGD(NamedTuple):
    """The step of `torch.optim.SGD` on the pseudo-gradient d: `b ← μ b + d`, and η (d + μ b) if Nesterov, else η b, is taken."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False


Limit = Literal["inner", "outer optimizer"] | OuterSGD


class Context(NamedTuple):
    """What a worker may know of its round."""

    worker: int
    n: int
    round: int
    local_steps: int
    """Inner steps this worker took in this round (H_i)."""
    weight: float
    """Its own weight w_ii in this round's mixing."""
    layout: Layout
    """Names, shapes and offsets of the tensors in `x`; of use to rules that are not elementwise."""
    full_steps: int = 0
    """Inner steps of the worker that takes most in this round (H)."""
    everyone: bool = False
    """Whether all workers hear all in this round, with the same weights; the exchange reads it off the mixing."""
    peers: tuple[int, ...] = ()
    """Whom it hears in this round, ascending, also read off the mixing. The same in all rounds of a static topology."""


class Consensus(NamedTuple):
    """The linear recursion a rule's disagreement obeys when every drift is zero (algorithm tag read by `stability`).

    With `z = θ + α·pull(θ)`: site "post" is `θ' = z + γ(z - z_prev)`, site "pre" is `θ' = z + γ(θ - θ_prev)`.
    """

    alpha: float
    gamma: float
    site: Literal["pre", "post"]


class Rule(NamedTuple):
    """A communication rule: what one worker sends after its local phase, and what it does with what it heard.

    `init(x, ctx) -> s` makes the outer state before the first round, a (named) tuple of tensors that owns its memory;
    `send(x, s, ctx) -> message` makes the tensors for the wire; `hear` combines the decoded messages (`pull`, `mean` or `each`
    of `gossamer.topologies.mixing`); `recv(x, s, told, heard, ctx) -> (x, s)` is the outer update, where `told` is what the
    others decoded from me. All are pure: they never write into their arguments, and `send` may return views of them. All
    workers begin with the same `x`.

    Shapes: `x` is the flat `[P]` vector of one worker (of one fragment); messages and states are trees of tensors.
    """

    init: Callable[[Tensor, Context], Tree]
    send: Callable[[Tensor, Tree, Context], Tree]
    hear: Hear
    recv: Callable[[Tensor, Tree, Tree, Tree, Context], tuple[Tensor, Tree]]

    needs: Needs
    """"everyone": all workers hear all, with the same weights; "connected": any doubly stochastic mixing that connects the
    workers over time; "static": the same mixing in every round; "tree": a static tree; "push": what each worker gives away
    sums to one, what it gets need not."""
    n1_limit: Limit
    """What the rule is with one worker: the plain inner optimizer, torch's SGD around it, or another outer optimizer."""
    name: str = ""
    """That of its factory, which fills it in, and the options too."""
    options: Mapping[str, Any] = MappingProxyType({})
    site: ActsOn = "parameters"
    """On what it acts: the parameters after the local phase, or the gradients before an inner step."""
    elementwise: bool = True
    """Whether halves may be updated one by one: safe on shards and in cache-sized chunks."""
    compiles: bool = True
    """Whether an elementwise update may be compiled: the numbers beside its tensors are the same in every round."""
    mean_preserving: bool = False
    """Whether workers that stand still keep their mean under any doubly stochastic mixing and any codec."""
    consensus: Consensus | None = None
    """How its disagreement evolves without drift and with exact messages; None where the replicas are always equal, or it is no
    such recursion."""
    identical: bool = False
    """Whether workers that hear everyone are bitwise equal after every round."""
    feeds_back: bool = False
    """Whether what a codec dropped is sent with the next message, as `error_feedback` does."""
    state_copies: int = 0
    """Tensors of the size of `x` that the outer state holds, whoever is heard."""
    copies_per_peer: int = 0
    """And how many more of them for each of `ctx.peers`."""
    delay_rounds: int = 0
    """How many rounds late it hears what was sent: `recv` then sees `x` as it is at that time, the `told` and `heard` of the
    earlier round, and zeros in the first rounds, when there is nothing to hear yet."""
    reset: Callable[[Tensor, Tree], Tree] | None = None
    """`reset(x, s) -> s` forgets the outer momentum after a round that ended at `x`; None for rules without one."""
    start: Callable[[Tree], Tensor] | None = None
    """`start(s)` is where the round began, a tensor of the state; None for rules that do not keep it."""

    @property
    def averages(self) -> bool:
        """Whether every worker hears the mean of all messages, which chunk owners may then take for the others."""
        return self.hear is mean and self.needs == "everyone"
