"""Promises of the four functions of every rule: they are pure, and their trees keep their structure."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gossamer.rng import generators_state
from gossamer.rounds.exchange import with_mixing
from gossamer.rules import Context, Rule
from gossamer.testing.drifted_workers import flat_layout, random_vectors
from gossamer.topologies import Topology
from gossamer.tree import Tree, leaves, map_leaves

P = 7
"""Elements of most vectors here: an odd number, and more than there are workers."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


class SomeRound(NamedTuple):
    """The arguments of the functions of a rule in some round of one worker."""

    rule: Rule
    start: Tensor
    """The x of `init`."""
    x: Tensor
    s: Tree
    own_decoded: Tree
    combined: Tree
    ctx: Context

    def send(self) -> Tree:
        """What the worker sends."""
        return self.rule.send(self.x, self.s, self.ctx)

    def recv(self) -> tuple[Tensor, Tree]:
        """Its outer update."""
        return self.rule.recv(self.x, self.s, self.own_decoded, self.combined, self.ctx)


def some_round(
    rule: Rule,
    topology: Topology,
    dtype: torch.dtype = torch.float32,
    *,
    worker: int = 0,
    seed: int = 0,
    round: int = 0,
) -> SomeRound:
    """A round of a worker that has trained since the start, as have its peers."""
    n, mixing = topology.n, topology.mixing(round)

    def context(i: int) -> Context:
        return with_mixing(Context(i, n, round, 1, mixing.weight(i), flat_layout(P), 1), mixing)

    start, *xs = random_vectors(1 + n, P, seed, dtype)
    states = [rule.init(start, context(i)) for i in range(n)]
    messages = [map_leaves(torch.clone, rule.send(x, states[i], context(i))) for i, x in enumerate(xs)]
    peers = {j: messages[j] for j in mixing.receives_from(worker)}
    combined = map_leaves(lambda t: t.to(dtype), rule.combine(messages[worker], peers, worker, mixing.rows[worker]))
    return SomeRound(rule, start, xs[worker], states[worker], messages[worker], combined, context(worker))


def trees_keep_their_form_and_dtype(rule: Rule, graphs: Sequence[Topology]) -> None:
    """State and message are (named) tuples of finite tensors, whose places, shapes and dtypes never change."""
    for dtype in DTYPES:
        r = some_round(rule, graphs[0], dtype)
        given, message, (y, new) = _form(r.s), _form(r.send()), r.recv()
        trees = {"init()": r.s, "send()": r.send(), "recv()": new}
        if rule.unsent is not None:
            unsent = rule.unsent(r.s)
            assert unsent.shape == r.x.shape and any(unsent is leaf for leaf in leaves(r.s)) and not unsent.any(), (
                "unsent() returned what init() did not make as zeros like x; return the tensor of the state that holds the error"
            )
        trees |= {} if rule.reset is None else {"reset()": rule.reset(y, new)}
        for name, tree in trees.items():
            for leaf in leaves(tree):
                assert isinstance(leaf, Tensor), (
                    f"{name} returned a {type(leaf).__name__} in its tree; return tensors and (named) tuples of tensors only, "
                    "and () for nothing, and make a number a tensor of one element"
                )
                assert leaf.numel() != P or leaf.dtype == dtype, (
                    f"{name} returned {leaf.dtype} for parameters in {dtype}; compute in the dtype of x, with Python numbers as "
                    "factors"
                )
            assert name == "send()" or _form(tree) == given, (
                f"{name} returned a state of the form {_form(tree)} where init() made {given}; return the same tree of tensors, "
                "of the same shapes and dtypes, in every round"
            )
        assert (y.shape, y.dtype) == (r.x.shape, dtype), (
            f"recv() returned parameters of {tuple(y.shape)} {y.dtype} for {tuple(r.x.shape)} {dtype}; return a tensor like x"
        )
        for name, tree in {**trees, "recv()": (y, new)}.items():
            assert not any(leaf.requires_grad for leaf in leaves(tree)), (
                f"{name} returned a tensor that requires a gradient, such as a Parameter; return it detached"
            )
            assert all(bool(leaf.isfinite().all()) for leaf in leaves(tree)), (
                f"{name} returned numbers that are not finite for finite ones; look for a division by zero or a root of a "
                "negative number"
            )
        zeros, empty = (map_leaves(make, (r.x, r.s)) for make in (torch.zeros_like, _without_data))
        for x, s in (zeros, empty):
            other = _form(rule.send(x, s, r.ctx))
            assert other == message, (
                f"send() returned a message of the form {other} for zeros, or for tensors without data, and {message} for other "
                "numbers; the receivers must know it beforehand: let shapes depend on the shape of x and on ctx only"
            )


def arguments_are_never_written_into(rule: Rule, graphs: Sequence[Topology]) -> None:
    """`init`, `send`, `recv` and `reset` leave their arguments as they were, to the bit and to the version counter."""
    for dtype in DTYPES:
        r = some_round(rule, graphs[0], dtype)
        calls: dict[str, tuple[Callable[[], object], Tree]] = {
            "init()": (lambda r=r: rule.init(r.start, r.ctx), (r.start,)),
            "send()": (r.send, (r.x, r.s)),
            "recv()": (r.recv, (r.x, r.s, r.own_decoded, r.combined)),
        }
        if rule.reset is not None:
            reset = rule.reset
            calls["reset()"] = (lambda r=r, reset=reset: reset(r.x, r.s), (r.x, r.s))
        for name, (call, arguments) in calls.items():
            given = leaves(arguments)
            before, versions = [t.clone() for t in given], [t._version for t in given]
            call()
            written = sum(
                not torch.equal(a, b) or a._version != v for a, b, v in zip(given, before, versions, strict=True)
            )
            assert not written, (
                f"{name} wrote into {written} of the {len(given)} tensors that it was given; compute new tensors, without "
                "operations in place such as add_() or x[...] = y"
            )


def the_same_call_gives_the_same_bits(rule: Rule, graphs: Sequence[Topology]) -> None:
    """Results depend only on the arguments: not on other calls, nor on random generators."""
    last, r = graphs[0].n - 1, some_round(rule, graphs[0])
    others = (  # another worker, and the same worker in its next round
        some_round(rule, graphs[0], worker=last, seed=1),
        some_round(rule, graphs[0], seed=2, round=1),
    )
    before = generators_state()
    sent, updated = leaves(r.send()), leaves(r.recv())
    assert before == generators_state(), (
        "a call drew from a random generator of the process, so that workers in one process and in several draw differently; "
        "draw from gossamer.rng.torch_rng(seed, ctx.worker, ctx.round)"
    )
    for other in others:
        other.send()
        for name, before, after in (("recv()", updated, leaves(r.recv())), ("send()", sent, leaves(r.send()))):
            changed = sum(not _same_bits(a, b) for a, b in zip(before, after, strict=True))
            assert len(before) == len(after) and not changed, (
                f"{name} returned {changed} of {len(after)} tensors with other numbers when it was called again with the same "
                f"arguments, after a call for worker {other.ctx.worker} in round {other.ctx.round}; keep everything in the state "
                "that init() and recv() return, and nothing in Python variables"
            )
            other.recv()


def the_state_owns_its_memory(rule: Rule, graphs: Sequence[Topology]) -> None:
    """The tensors of a new state share their memory neither with x nor with each other."""
    r = some_round(rule, graphs[0])
    seen = {r.start.untyped_storage().data_ptr(): "x"}
    for k, leaf in enumerate(leaf for leaf in leaves(r.s) if leaf.numel()):
        place = leaf.untyped_storage().data_ptr()
        assert place not in seen and leaf.untyped_storage().nbytes() >= leaf.numel() * leaf.element_size(), (
            f"tensor {k} of the state that init() returned shares its memory with {seen.get(place, 'itself')}, and states are "
            "updated in place; return x.clone()"
        )
        seen[place] = f"tensor {k}"


def as_many_copies_are_kept_as_the_tags_say(rule: Rule, graphs: Sequence[Topology]) -> None:
    """`state_copies` and `copies_per_peer` count the tensors of the size of x in the state."""
    r = some_round(rule, graphs[0])
    kept, peers = sum(leaf.numel() == P for leaf in leaves(r.s)), len(r.ctx.peers)
    sent = rule.state_copies + peers * rule.copies_per_peer
    assert kept == sent, (
        f"the state holds {kept} tensors of the size of x with {peers} peers, and the tags say {sent} (state_copies = "
        f"{rule.state_copies}, copies_per_peer = {rule.copies_per_peer}); correct the tags, from which memory is computed"
    )


def halves_updated_one_by_one_equal_the_whole_to_the_last_bit(rule: Rule, graphs: Sequence[Topology]) -> None:
    """A rule with `elementwise = True` may be updated in chunks."""
    if not rule.elementwise:
        return
    r = some_round(rule, graphs[0])
    whole, trees = leaves(r.recv()), (r.x, r.s, r.own_decoded, r.combined)
    for cut in (slice(0, 3), slice(3, P)):
        x, s, own_decoded, combined = (map_leaves(lambda t, c=cut: t[c], tree) for tree in trees)
        part = leaves(rule.recv(x, s, own_decoded, combined, r.ctx))
        off = sum(not _same_bits(a[cut], b) for a, b in zip(whole, part, strict=True))
        assert not off, (
            f"recv() on elements {cut.start} to {cut.stop} of {P} gives other bits than on all of them in {off} of {len(part)} "
            "tensors, and the rule says elementwise = True; set elementwise = False"
        )


def compiled_code_has_the_same_bits(rule: Rule, graphs: Sequence[Topology]) -> None:
    """An update that may be compiled uses no operation that is fused by a compiler and not without it, or the reverse."""
    if not (rule.elementwise and rule.compiles):
        return
    r = some_round(rule, graphs[0])
    with _Fused() as fused:
        r.recv()
    assert not fused.used, (
        f"recv() used {', '.join(sorted(fused.used))}, which rounds otherwise when it is compiled; write products as a + w * b, "
        "or set "
        "compiles = False"
    )


class _Fused(TorchFunctionMode):
    """Records fused operations, which round once instead of twice, and sums of unspecified order."""

    NAMES = frozenset(
        ["lerp", "addcmul", "addcdiv", "addr", "addmv", "addmm", "matmul", "mm", "mv", "dot", "inner", "einsum"]
    )

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        self.used |= {name} if name in self.NAMES else set()
        self.used |= {f"{name}(alpha=...)"} if (kwargs or {}).get("alpha", 1) != 1 else set()
        return func(*args, **(kwargs or {}))


def _form(tree: Tree) -> Any:
    """Nesting, shapes and dtypes of a tree."""
    if isinstance(tree, tuple):
        return tuple(_form(part) for part in tree)
    return f"{tuple(tree.shape)} {tree.dtype}" if isinstance(tree, Tensor) else type(tree).__name__


def _without_data(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="meta")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
