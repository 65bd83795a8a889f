"""The interface of rules: four small functions for ONE worker, and tags that state their properties."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.settings.options import in_short
from gossamer.topologies.mixing import Combine, Consensus, mean
from gossamer.tree import Tree, leaves

_RENAMED = {"hear": "combine", "n1_limit": "single_worker_limit"}
T = TypeVar("T")
Needs = Literal["everyone", "connected", "static", "tree", "push"]
ActsOn = Literal["parameters", "gradients"]


class OuterSGD(NamedTuple):
    """The step of `torch.optim.SGD` on the pseudo-gradient d: `b ← μ b + d`; the step is η (d + μ b) if Nesterov, else η b."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False


Limit = Literal["inner", "outer optimizer"] | OuterSGD


class Adapted(NamedTuple):
    """The rank of the next message of a rule that adapts it, and the initial rank."""

    rank: int
    full_rank: int

    def local_steps(self, full_steps: int) -> int:
        """The inner steps of a round, scaled by rank / initial rank; at least one.

        >>> Adapted(8, 64).local_steps(30), Adapted(1, 64).local_steps(30)
        (3, 1)
        """
        return max(1, full_steps * self.rank // self.full_rank)


class Context(NamedTuple):
    """What a worker may know about its round."""

    worker: int
    n: int
    round: int
    local_steps: int
    """Inner steps this worker took in this round (H_i)."""
    weight: float
    """The worker's self-weight w_ii in this round's mixing."""
    layout: Layout
    """Names, shapes and offsets of the tensors in `x`, for rules that are not elementwise."""
    full_steps: int = 0
    """The largest number of inner steps that any worker takes in this round (H)."""
    everyone: bool = False
    """Whether all workers receive from all in this round, with the same weights; the exchange derives it from the mixing."""
    peers: tuple[int, ...] = ()
    """The workers it receives from in this round, ascending, also derived from the mixing; constant on a static topology."""
    rank: int = 0
    """The rank of this round's messages, for a rule that adapts it (`Rule.adapted`); 0 is the initial one."""
    over_shards: Callable[[float], float] = float
    """The sum of a number over the processes of this worker, in a fixed order and the same on all, which must call it equally
    often; the number itself where the worker is one process."""


def _naming_wrong_fields(rule: type[T]) -> type[T]:
    """Turns a field's former name, and a value that it cannot have, into an error that names what is allowed."""

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(one: Any, /, *args: Any, **fields: Any) -> Any:
            for old in _RENAMED.keys() & fields.keys():
                raise ConfigError(f"a Rule got {old} = ..., which is called {_RENAMED[old]} now; rename the keyword")
            made = function(one, *args, **fields)
            for name, kind in (("needs", Needs), ("site", ActsOn)):
                if (given := getattr(made, name)) not in get_args(kind):
                    raise ConfigError(
                        f"a Rule got {name} = {given!r:.40}; Allowed: {', '.join(get_args(kind))}; correct it"
                    )
            return made

        return call

    # NamedTuple forbids both names in the body of the class.
    for name in ("__new__", "_replace"):
        setattr(rule, name, checked(getattr(rule, name)))
    return rule


@_naming_wrong_fields
class Rule(NamedTuple):
    """A communication rule: the message one worker sends after its local phase, and its update from the messages it receives.

    `init(x, ctx) -> s` makes the outer state before the first round, a (named) tuple of tensors that owns its memory;
    `send(x, s, ctx) -> message` makes the tensors for the wire; `combine` makes one tree of the decoded messages (`pull`, `mean`
    or `each` of `gossamer.topologies.mixing`); `recv(x, s, own_decoded, combined, ctx) -> (x, s)` is the outer update, where
    `own_decoded` is this worker's own message as the others decoded it: a lossy codec keeps the mean of the workers only if
    both ends subtract the same. All are pure: they never write into their arguments, and `send` may return views of them. All
    workers begin with the same `x`.

    Shapes: `x` is the flat `[P]` vector of one worker (of one fragment); messages and states are trees of tensors.
    """

    init: Callable[[Tensor, Context], Tree]
    send: Callable[[Tensor, Tree, Context], Tree]
    combine: Combine
    recv: Callable[[Tensor, Tree, Tree, Tree, Context], tuple[Tensor, Tree]]

    needs: Needs
    """"everyone": all workers receive from all, with the same weights; "connected": any doubly stochastic mixing that connects
    the workers over time; "static": the same mixing in every round; "tree": a static tree; "push": the weights of the messages
    a worker sends sum to one, those of the messages it receives need not."""
    single_worker_limit: Limit
    """What the rule reduces to with one worker: the plain inner optimizer, torch's SGD around it, or another outer optimizer."""
    name: str = ""
    """The name of its factory; the factory decorator fills in name and options."""
    options: Mapping[str, Any] = MappingProxyType({})
    site: ActsOn = "parameters"
    """Whether it acts on the parameters after the local phase, or on the gradients before an inner step."""
    clips_own: bool = False
    """Whether `inner.clip` shortens each worker's own gradient before it is exchanged: what a rule on gradients makes of them
    has a length that says nothing of theirs, as a sign has. Otherwise the mean gradient is shortened."""
    elementwise: bool = True
    """Whether parts of `x` may be updated separately, so that shards and cache-sized chunks are safe."""
    sums_over_shards: bool = False
    """Whether all that it needs of whole tensors are sums over their elements, as norms are, which it takes by
    `Context.over_shards`: then a worker may be several processes that each have a shard."""
    compiles: bool = True
    """Whether an elementwise update may be compiled; its scalars must be the same in every round."""
    mean_preserving: bool = False
    """Whether workers without drift keep their mean under any doubly stochastic mixing and any codec."""
    consensus: Consensus | None = None
    """How its disagreement evolves without drift and with exact messages; None where replicas are always equal or no
    such recursion applies.
    """
    amplifies: float = 1.0
    """The factor by which one exchange changes `x` compared with a mean, where `consensus` does not give it; see
    `amplification`.
    """
    identical: bool = False
    """Whether workers that receive from everyone are bitwise equal after every round."""
    unsent: Callable[[Tree], Tensor] | None = None
    """`unsent(s)` is the tensor of the state with the codec's error that this worker has not sent yet; zero at the
    start. A worker that takes over the state does not take over this error. None for rules without one.
    """
    state_copies: int = 0
    """Tensors of the size of `x` that the outer state holds, whatever the number of peers."""
    copies_per_peer: int = 0
    """Further tensors of the size of `x` that the outer state holds for each of `ctx.peers`."""
    delay_rounds: int = 0
    """How many rounds late messages are received: `recv` gets the current `x` with the messages of the earlier round, and zeros
    in the first rounds, when no message has arrived yet."""
    sends_ahead: bool = False
    """Whether a worker sends the message for its next outer update right after the current one, so that the message is
    in flight during the whole local phase and is not stale: only for rules with `delay_rounds` = 1, which otherwise
    send before they update.
    """
    mixes_updates: str = ""
    """The topology over which the workers mix the pseudo-gradients of a round before the update, while all wait; empty where
    nothing is mixed. Only for rules that have a `start` and a place for the result (`mixed`)."""
    mixed: Callable[[Tree], Tensor] | None = None
    """`mixed(s)` is the tensor of the state that holds the mixed pseudo-gradient when `recv` is called."""
    reset: Callable[[Tensor, Tree], Tree] | None = None
    """`reset(x, s) -> s` forgets the outer momentum after a round that ended at `x`; None for rules without one."""
    start: Callable[[Tree], Tensor] | None = None
    """`start(s)` is where the round began, a tensor of the state; None for rules that do not keep it."""
    adapted: Callable[[Tree], Adapted] | None = None
    """`adapted(s)` is the rank of the next message, from which the local steps of the next round follow; None for rules whose
    messages all have one size. It must depend only on data that all workers share, as they must decide alike."""

    by_layer: bool = False
    """Whether it treats each of `layers_of(Context.layout)` separately, which all shards must cut alike."""
    at: Callable[[int, int], "Rule"] | None = None
    """`at(step, steps)` is the rule with the values of scheduled options at inner step `step` of a run of `steps` (0:
    unknown); None where no option is scheduled. It keeps the same state. The factory decorator fills it in.
    """
    distrusts: Callable[[Tree], Tensor] | None = None
    """`distrusts(s)` is the number of messages of each of the n workers shortened and declined so far `[2, n]`; None
    for rules that do neither.
    """
    norms: Callable[[Tree], Tensor] | None = None
    """`norms(s)` are the norms of the last combination of messages before and after clipping `[2]`; None for rules that
    do not clip it.
    """

    def __repr__(self) -> str:
        return in_short(self)

    @property
    def feeds_back(self) -> bool:
        """Whether the codec's error is sent with the next message, as `error_feedback` does."""
        return self.unsent is not None

    @property
    def averages(self) -> bool:
        """Whether every worker receives the mean of all messages, which chunk owners may then compute for the others."""
        return self.combine is mean and self.needs == "everyone"


def around(rule: Rule, **own: Any) -> Rule:
    """The rule with the fields of a wrapper, whose state has that of the rule as `inner`.

    What the wrapper does not give is the rule's; what sends, reads or resets the state reaches it through `inner`.
    """
    read = ("unsent", "mixed", "start", "adapted", "distrusts", "norms")
    through: dict[str, Any] = {name: _inside(access) for name in read if (access := getattr(rule, name)) is not None}
    reset = rule.reset
    if reset is not None:
        through["reset"] = lambda x, s: s._replace(inner=reset(x, s.inner))
    return rule._replace(**{"send": lambda x, s, ctx: rule.send(x, s.inner, ctx), **through, **own})


def _inside(access: Callable[[Any], T]) -> Callable[[Any], T]:
    return lambda s: access(s.inner)


def amplification(rule: Rule) -> float:
    """The factor by which one exchange may amplify an error of the messages: α (1 + γ) for gossip whose momentum
    includes parameters.

    Momentum of drifts alone does not contribute.
    """
    if rule.consensus is None:
        return rule.amplifies
    alpha, gamma, site = rule.consensus
    return max(1.0, alpha * (1 + gamma if site in ("pre", "post") else 1.0))


def sends_parameters(rule: Rule) -> bool:
    """Whether workers send parameters rather than differences, which are zero for a worker that has not moved."""
    if rule.site != "parameters":
        return False
    x = torch.arange(1.0, 9.0)
    ctx = Context(0, 1, 0, 1, 1.0, Layout.of([("w", (8,))]), 1)
    return any(bool(leaf.any()) for leaf in leaves(rule.send(x, rule.init(x, ctx), ctx)))
