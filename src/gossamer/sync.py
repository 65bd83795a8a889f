"""THE round: send, encode, carry, decode, hear, recv. The only caller of rules and codecs.

An exchange is a generator, so that one description serves everybody: a real worker drives its own, the simulator drives n of
them in turn, and one that is to be overlapped with training is simply resumed later.

    exchange = begin(...)       # announces the receives: a slow sender's bytes may flow while we still train
    ticket = next(exchange)     # after the local phase: sends are posted; resume when transport.ready(ticket)
    ...                         # until StopIteration, whose value is what went over the wire; x and s are updated in place

Why it cannot deadlock: nothing here blocks, every send and receive is posted before anything is waited for, and a message
is named by its round. Worker i waits in round t only for messages that their senders post once they have finished round
t - 1, which by induction over t they do.
"""

import functools
import math
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs import Codec
from gossamer.errors import ConfigError, PairingError
from gossamer.fragment import Layout
from gossamer.mixing import Hear, Mixing, Row, mean, pull
from gossamer.rules import Context, Rule
from gossamer.topology import Topology
from gossamer.trace import Operation
from gossamer.transport import Ticket, Transport
from gossamer.tree import Tree, leaves, map_leaves, nbytes, shares_storage

__all__ = [
    "PLAIN",
    "Each",
    "Exchange",
    "Kernel",
    "Part",
    "begin",
    "carry",
    "check",
    "compiled",
    "drive",
    "hear_and_recv",
    "initial_state",
]

CHUNK = 1 << 15  # small enough that the temporaries of an elementwise update stay in the cache

Exchange = Generator[Ticket, None, Operation]
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Any]  # a map over workers, in parallel or not


class Kernel(NamedTuple):
    """How `hear` and `recv` are carried out, and on how many elements at a time."""

    run: Callable[..., None]
    chunk: int


class Part(NamedTuple):
    """What one worker owns of one fragment: the live parameters (or gradients), and the outer state; both updated in place."""

    x: Tensor
    s: Tree
    layout: Layout
    fragment: int = 0


def check(rule: Rule, topology: Topology, codec: Codec, local_steps: int | tuple[int, ...] = 1) -> None:
    """Raises PairingError when these cannot work together, with what is allowed instead."""
    got = f"rule '{rule.name}' on topology '{topology.name}' with {topology.n} workers"
    if rule.needs == "everyone" and not topology.everyone:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' needs everyone to hear everyone, which only topology 'complete' gives; "
            "use that, or a gossip rule such as 'gasloc'"
        )
    if rule.needs == "static" and not topology.static:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' keeps sums over its neighbours and needs the same graph in every round; "
            "use a static topology such as 'ring'"
        )
    if rule.needs == "tree" and not topology.tree:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' relays sums along a tree; use topology 'tree', 'chain' or 'star'"
        )
    if rule.needs == "push" and not topology.column_stochastic:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' counts the mass that each worker gives away, and here it does not sum to one; "
            "use a push topology such as 'random_push', or one whose weights are doubly stochastic, such as 'random'"
        )
    if rule.needs != "push" and not topology.doubly_stochastic:
        raise PairingError(
            f"{got} cannot work: '{rule.name}' would drift, as the weights that workers give and get do not all sum to one; "
            "use a topology whose weights are doubly stochastic, such as 'random', or the rule 'sgp', which corrects for it"
        )
    if rule.site == "gradients" and local_steps != 1:
        raise PairingError(
            f"rule '{rule.name}' exchanges gradients in every inner step and got local_steps = {local_steps}; "
            "set run.local_steps = 1, or take a rule with a local phase such as 'diloco'"
        )
    if rule.consensus is not None and math.isnan(rule.consensus.alpha):
        raise PairingError(
            f"{got} still has alpha = 'auto'; settle it first with gossamer.stability.settle(rule, topology)"
        )


def initial_state(rule: Rule, mixing: Mixing, x: Tensor, ctx: Context) -> Tree:
    """The outer state of a worker at `x` before the first round, of which `mixing` and `ctx` are."""
    return rule.init(x, _informed(ctx, mixing))


def begin(
    rule: Rule, codec: Codec, mixing: Mixing, transport: Transport, part: Part, ctx: Context, *, seed: int,
    kernel: Kernel | None = None, reduce: Callable[[Sequence[Tensor], Ticket], None] | None = None,
) -> Exchange:  # fmt: skip
    """Announces what will be received and returns the exchange, which waits to be resumed after the local phase.

    Args:
        part: updated in place when the exchange ends.
        seed: for codecs that round at random; everyone decodes what the sender encoded, so all hear the same.
        kernel: how `hear` and `recv` are carried out on a span of elements; `PLAIN` unless given.
        reduce: sums tensors over all workers in place; used for a `mean` over everyone with an exact codec if given.
    Raises: TransportError and PeerError from the transport, wherever it is resumed.
    Cost: one payload to each hearer. Only a `mean` over everyone with an exact codec goes through chunk owners, 2(n-1)/n
        messages per worker.
    """
    kernel = kernel or PLAIN
    ctx = _informed(ctx, mixing)
    if rule.hear is not mean or rule.needs != "everyone" or not codec.exact or ctx.n == 1:
        exchange = _directly(rule, codec, mixing, transport, part, ctx, seed, kernel)
    elif reduce is None:
        exchange = _through_owners(rule, mixing, transport, part, ctx, kernel)
    else:
        exchange = _reduced(rule, reduce, part, ctx, kernel)
    next(exchange)  # runs to the point where the receives are announced
    return exchange


def _informed(ctx: Context, mixing: Mixing) -> Context:
    """The context with what the mixing of its round says."""
    return ctx._replace(everyone=mixing.everyone, peers=mixing.hears_from(ctx.worker))


def hear_and_recv(
    rule: Rule, hear: Hear, x: Tensor, s: Tree, told: Tree, others: tuple[Tree, ...], i: int, row: Row, ctx: Context
) -> None:
    """Hears the others, numbered by their place in the row, and writes the outer update into `x` and `s`."""
    old = [x, *leaves(s), *leaves(told)]
    # A rule may keep an input as new state, the old anchor as "previous" say: save it before it is written over.
    new = [
        t.clone() if any(t is kept for kept in old) else t
        for t in _updated(rule, hear, x, s, told, others, i, row, ctx)
    ]
    for target, value in zip([x, *leaves(s)], new, strict=True):
        target.copy_(value)


def _updated(
    rule: Rule, hear: Hear, x: Tensor, s: Tree, told: Tree, others: tuple[Tree, ...], i: int, row: Row, ctx: Context
) -> list[Tensor]:
    messages = dict(zip((j for j, _ in row if j != i), others, strict=True))
    return leaves(rule.recv(x, s, told, hear(told, messages, i, row), ctx))


PLAIN = Kernel(hear_and_recv, CHUNK)


@functools.cache
def compiled() -> Kernel:
    """The kernel that does a whole elementwise update in one pass over the memory, bitwise equal to the plain one.

    Raises: ConfigError when there is no C++ compiler. Cost: some seconds of compilation at its first use.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"run.compile = true needs a C++ compiler and '{compiler}' is not there; install it or set false"
        )
    one = torch.ones(())

    def fused(rule: Rule, hear: Hear, x: Tensor, s: Tree, *rest: Any) -> None:
        # The compiler takes an input kept as state for that input's memory, even through a clone, and hands out what was
        # written there since; times a one it cannot see through is free inside the pass and changes no bit.
        new = [t * one for t in _updated(rule, hear, x, s, *rest)]
        for target, value in zip([x, *leaves(s)], new, strict=True):
            target.copy_(value)

    in_one_pass = torch.compile(fused, dynamic=True)

    def run(rule: Rule, *rest: Any) -> None:
        if rule.elementwise:
            *others, ctx = rest
            in_one_pass(rule, *others, ctx._replace(layout=Layout((), 0)))  # names in a layout would be compiled in
        else:
            hear_and_recv(rule, *rest)

    return Kernel(run, sys.maxsize)


def _carried(told: Tree, messages: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The hearing of a mean that the chunk owners have summed already."""
    return messages[1]


def _directly(
    rule: Rule, codec: Codec, mixing: Mixing, transport: Transport, part: Part, ctx: Context, seed: int, kernel: Kernel
) -> Exchange:
    """Every hearer gets the whole payload."""
    i, ticket = ctx.worker, Ticket(ctx.round, part.fragment)
    sources, targets = mixing.hears_from(i), mixing.sends_to(i)
    template = _encode(codec, _message_template(rule, part, ctx), 0)
    for j in sources:
        transport.expect(ticket, j, leaves(template))
    yield ticket

    message = _message(rule, part, ctx, transport)
    payload = _encode(codec, message, rng.key(seed, i, ctx.round, part.fragment, "codec"))
    for j in targets:
        transport.post(ticket, j, leaves(payload))
    yield ticket

    arrived = {j: _refill(payload, frames) for j, frames in transport.collect(ticket).items()}
    told = _decode(codec, payload, message)
    others = tuple(_decode(codec, arrived[j], message) for j in sources)
    # Renumbered by place, and with the worker itself first where its place does not matter, so that a compiled kernel meets
    # one row per number of peers.
    order = [i, *sources] if rule.hear is pull else [j for j, _ in mixing.rows[i]]
    weights = dict(mixing.rows[i])
    row, me = tuple((place, weights[j]) for place, j in enumerate(order)), order.index(i)
    for a, b in _spans(rule, kernel.chunk, 0, part.x.numel()):
        heard = tuple(_cut(rule, m, a, b) for m in others)
        kernel.run(rule, rule.hear, part.x[a:b], _cut(rule, part.s, a, b), _cut(rule, told, a, b), heard, me, row, ctx)
    size = nbytes(payload)
    return Operation("exchange", part.fragment, tuple((j, size) for j in targets), tuple((j, size) for j in sources))


def _through_owners(
    rule: Rule, mixing: Mixing, transport: Transport, part: Part, ctx: Context, kernel: Kernel
) -> Exchange:
    """A mean as reduce-scatter and gather: worker k owns chunk k, sums it in worker order and sends the sum to everyone."""
    i, n = ctx.worker, ctx.n
    there, back = Ticket(ctx.round, part.fragment, 0), Ticket(ctx.round, part.fragment, 1)
    template = leaves(_message_template(rule, part, ctx))
    others = mixing.hears_from(i)

    for j in others:
        transport.expect(there, j, _chunk(template, i, n))
        transport.expect(back, j, _chunk(template, j, n))
    yield there

    message = _message(rule, part, ctx, transport)
    frames = leaves(message)
    for j in others:
        transport.post(there, j, _chunk(frames, j, n))
    yield there

    shares = {j: tuple(frames) for j, frames in transport.collect(there).items()}
    total = rule.hear(tuple(_chunk(frames, i, n)), shares, i, mixing.rows[i])
    del shares
    for j in others:
        transport.post(back, j, total)
    yield back

    totals = {**transport.collect(back), i: list(total)}
    _take_mean(rule, part, message, [totals[j] for j in range(n)], ctx, kernel)
    return _mean_operation(part, frames, ctx)


def _reduced(
    rule: Rule, reduce: Callable[[Sequence[Tensor], Ticket], None], part: Part, ctx: Context, kernel: Kernel
) -> Exchange:
    """A mean as the backend's own all-reduce, which blocks and is a barrier for all."""
    ticket = Ticket(ctx.round, part.fragment)
    yield ticket
    message = rule.send(part.x, part.s, ctx)
    heard = [ctx.weight * leaf for leaf in leaves(message)]
    reduce(heard, ticket)
    _take_mean(rule, part, message, [heard], ctx, kernel)
    return _mean_operation(part, leaves(message), ctx)


def _take_mean(
    rule: Rule, part: Part, message: Tree, pieces: Sequence[list[Tensor]], ctx: Context, kernel: Kernel
) -> None:
    """The outer update with a mean that came in consecutive pieces."""
    if not rule.elementwise:
        pieces = [[torch.cat(parts) for parts in zip(*pieces, strict=True)]]
    start = 0
    for piece in pieces:
        heard, stop = _refill(message, piece), start + piece[0].numel()
        for a, b in _spans(rule, kernel.chunk, start, stop):
            own = part.x[a:b], _cut(rule, part.s, a, b), _cut(rule, message, a, b)
            kernel.run(rule, _carried, *own, (_cut(rule, heard, a - start, b - start),), 0, ((0, 0.0), (1, 1.0)), ctx)
        start = stop


def _chunk(frames: Sequence[Tensor], owner: int, n: int) -> list[Tensor]:
    """The part of each flat tensor that one of n owners sums."""
    return [t[t.numel() * owner // n : t.numel() * (owner + 1) // n] for t in frames]


def _mean_operation(part: Part, frames: Sequence[Tensor], ctx: Context) -> Operation:
    """What a mean moves: each owner gets my share of its chunk and sends me its sum, and the reverse for the chunk I own."""
    own = nbytes(tuple(_chunk(frames, ctx.worker, ctx.n)))
    others = [j for j in range(ctx.n) if j != ctx.worker]
    moved = tuple((j, nbytes(tuple(_chunk(frames, j, ctx.n))) + own) for j in others)
    return Operation("mean", part.fragment, moved, moved)


def carry(exchange: Exchange, transport: Transport) -> Operation:
    """Runs the exchange of one worker to its end, waiting each time for what it waits for."""
    try:
        while True:
            transport.wait(next(exchange))
    except StopIteration as stop:
        return stop.value


def drive(exchanges: Sequence[Exchange], transports: Sequence[Transport], each: Each) -> list[Operation]:
    """Runs the exchanges of all workers to their end, every leg of all of them before the next."""
    done: dict[int, Operation] = {}
    tickets: dict[int, Ticket] = {}

    def advance(i: int) -> None:
        try:
            tickets[i] = next(exchanges[i])
        except StopIteration as stop:
            done[i] = stop.value

    each(advance, range(len(exchanges)))
    while len(done) < len(exchanges):
        waiting = [i for i in range(len(exchanges)) if i not in done]
        ready = [i for i in waiting if transports[i].ready(tickets[i])]
        if not ready:
            transports[waiting[0]].wait(tickets[waiting[0]])  # nobody can move: says what is missing
        each(advance, ready)
    return [done[i] for i in range(len(exchanges))]


def _message(rule: Rule, part: Part, ctx: Context, transport: Transport) -> Tree:
    """What the rule sends, in memory that the coming update does not write to while others may still read it."""
    message = rule.send(part.x, part.s, ctx)
    if transport.keeps_frames and any(shares_storage(message, own) for own in (part.x, *leaves(part.s))):
        return map_leaves(Tensor.clone, message)
    return message


def _message_template(rule: Rule, part: Part, ctx: Context) -> Tree:
    """Shapes and dtypes of a message, found by running `send` without data: the others' look like mine."""
    x, s = map_leaves(lambda t: torch.empty_like(t, device="meta"), (part.x, part.s))
    return rule.send(x, s, ctx)


def _encode(codec: Codec, message: Tree, key: int) -> Tree:
    """The payload of each tensor of a message, in a tuple parallel to its leaves."""
    return tuple(codec.encode(leaf, key + place) for place, leaf in enumerate(leaves(message)))


def _decode(codec: Codec, payload: Tree, like: Tree) -> Tree:
    """The message whose tensors were encoded into this payload."""
    decoded = [codec.decode(part, leaf) for part, leaf in zip(payload, leaves(like), strict=True)]
    return _refill(like, decoded)


def _refill(like: Tree, tensors: Sequence[Tensor]) -> Tree:
    """The tree of this form with these tensors as its leaves."""
    supply = iter(tensors)
    return map_leaves(lambda _: next(supply), like)


def _cut(rule: Rule, tree: Tree, a: int, b: int) -> Tree:
    """Elements a to b of every tensor of a tree; the whole tree for a rule that is not elementwise."""
    return map_leaves(lambda t: t[a:b], tree) if rule.elementwise else tree


def _spans(rule: Rule, chunk: int, start: int, stop: int) -> list[tuple[int, int]]:
    """The pieces an update may be done in: chunks that stay in the cache if the rule is elementwise, else the whole."""
    if not rule.elementwise:
        return [(start, stop)]
    return [(a, min(a + chunk, stop)) for a in range(start, stop, chunk)]
