"""Rules, codecs, topologies, servers and pairs of a user's own, whose mistakes are named where they happen.

What their functions raise becomes a UserCodeError, and a result of another form than the contract's a ConfigError.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from gossamer.asynchronous import PairRule, ServerRule
from gossamer.codecs import Codec
from gossamer.errors import ConfigError
from gossamer.rules import Rule
from gossamer.settings.user_code import guarding
from gossamer.topologies import TOPOLOGIES, Topology
from gossamer.topologies.mixing import Mixing
from gossamer.tree import Tree, leaves, nbytes

T = TypeVar("T", Rule, Codec, Topology, ServerRule, PairRule)
_NEAR = 1e-6
"""The rounding that sums of weights may have."""


def guarded(kind: str, made: T) -> T:
    """The part with its own functions guarded; those of Gossamer's stay as they are, as drivers ask which they are."""
    fields = made._asdict()
    name = f"{kind} '{fields['name']}'" if fields["name"] else f"the {kind}"
    own = {
        field: _returning(kind, field, name, guarding(f"{field} of {name}", value))
        for field, value in fields.items()
        if callable(value) and not str(getattr(value, "__module__", "")).startswith("gossamer.")
    }
    if isinstance(made, Rule) and (at := made.at) is not None:  # which makes the rule again, with other numbers
        own["at"] = lambda step, steps: guarded("rule", at(step, steps)._replace(name=made.name))
    if isinstance(made, Rule) and made.elementwise and "send" in own:
        own["send"] = _elementwise(name, own["send"])
    if isinstance(made, Codec) and made.payload_bytes is not None and "encode" in own:
        own["encode"] = _priced(name, own["encode"], made.payload_bytes)
    if isinstance(made, Topology) and made.name not in TOPOLOGIES:  # whose tags are tested, as of a million workers
        own["mixing"] = _of_topology(made, name)
    return made._replace(**own)


_TREES = {("rule", "init"), ("rule", "send"), ("codec", "encode"), ("pair", "init"), ("server", "init")}
"""The functions that may return any tree of tensors."""
_LIKE: Mapping[tuple[str, str], Callable[..., Tree]] = {
    ("rule", "recv"): lambda x, s, *_: (x, s),
    ("codec", "decode"): lambda payload, like: like,
    ("pair", "advance"): lambda x, s, *_: (x, s),
    ("pair", "learn"): lambda x, s, *_: (x, s),
    ("pair", "meet"): lambda x, s, *_: (x, s),
    ("pair", "tell"): lambda x, s: x,
    ("server", "greet"): lambda s: s.x,
    ("server", "absorb"): lambda s, *_: s,
}
"""The functions whose result has the form of some of their arguments: these."""


def _returning(kind: str, field: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its result checked against the contract of its kind."""
    like, subject = _LIKE.get((kind, field)), f"{field} of {name}"
    if like is None and (kind, field) not in _TREES:
        return function

    def call(*given: Any) -> Any:
        result = function(*given)
        _must_be_tensors(subject, result)
        if like is not None:
            got, needed = [[tuple(leaf.shape) for leaf in leaves(tree)] for tree in (result, like(*given))]
            if got != needed:
                raise ConfigError(
                    f"{subject} returned tensors of the shapes {got}, and {needed} are needed; return as many tensors as its "
                    "contract says, of the shapes of those that it was given"
                )
        return result

    return call


def _elementwise(name: str, send: Callable[..., Tree]) -> Callable[..., Tree]:
    def call(x: Tensor, s: Tree, ctx: Any) -> Tree:
        message = send(x, s, ctx)
        for leaf in leaves(message):
            if leaf.ndim and leaf.shape != x.shape:
                raise ConfigError(
                    f"send of {name} returned a tensor of shape {tuple(leaf.shape)} for an x of {tuple(x.shape)}, and the rule "
                    "is elementwise; return tensors of the shape of x, or set elementwise=False"
                )
        return message

    return call


def _priced(name: str, encode: Callable[..., Tree], payload_bytes: Callable[[int], int]) -> Callable[..., Tree]:
    def call(x: Tensor, key: int) -> Tree:
        payload, claimed = encode(x, key), payload_bytes(x.numel())
        if x.element_size() == 4 and claimed != nbytes(payload):
            raise ConfigError(
                f"encode of {name} returned {nbytes(payload):,} bytes for {x.numel():,} elements, and payload_bytes says "
                f"{claimed:,}, by which runs are priced; correct one of the two"
            )
        return payload

    return call


def _of_topology(topology: Topology, name: str) -> Callable[..., Mixing]:
    plan = guarding(f"mixing of {name}", topology.mixing)
    last: Mixing | None = None

    def mixing(round: int, alive: frozenset[int] | None = None) -> Mixing:
        nonlocal last
        made = plan(round, alive)
        if made is not last:  # all workers ask for the same one
            _must_hold(topology, f"mixing of {name} in round {round}", made)
            last = made
        return made

    return mixing


def _must_hold(topology: Topology, subject: str, made: object) -> None:
    """Raises ConfigError for a mixing without what the tags of its topology claim."""
    if not isinstance(made, Mixing):
        raise ConfigError(f"{subject} returned a {type(made).__name__}; return a Mixing, such as that of from_edges")
    weights = {(i, j): w for i, row in enumerate(made.rows) for j, w in row}
    sums = Counter[int]()
    for (_, j), w in weights.items():
        sums[j] += w  # pyright: ignore[reportArgumentType]
    kept = topology.doubly_stochastic or topology.column_stochastic
    wrong = [f"worker {i} takes {w:g} of worker {j}" for (i, j), w in weights.items() if kept and not w >= 0]
    wrong += [f"{total:g} is taken of worker {j}" for j, total in sums.items() if kept and not _is_one(total)]
    wrong += [
        f"worker {i} takes {w:g} of worker {j}, which takes {weights.get((j, i), 0.0):g} of it"
        for (i, j), w in weights.items()
        if topology.symmetric and weights.get((j, i), 0.0) != w
    ]
    if wrong:
        tags = [tag for tag in ("doubly_stochastic", "column_stochastic", "symmetric") if getattr(topology, tag)]
        raise ConfigError(
            f"{subject}: {wrong[0]}, and the topology claims {', '.join(tags)}; no weight may be negative, all that is taken "
            "of a worker, also by itself, must sum to 1, and both of a symmetric pair take the same: correct weights or claim"
        )


def _is_one(total: float) -> bool:
    return math.isclose(total, 1.0, abs_tol=_NEAR)


def _must_be_tensors(subject: str, tree: Tree) -> None:
    for leaf in leaves(tree):
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"{subject} returned a tree with {'None' if leaf is None else f'a {type(leaf).__name__}'}; return a tensor, or a "
                "(named) tuple of tensors, whose numbers are tensors too"
            )
        if leaf.requires_grad:
            raise ConfigError(
                f"{subject} returned a tensor that requires a gradient, such as a Parameter; return it detached"
            )
