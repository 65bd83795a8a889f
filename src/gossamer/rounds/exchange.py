"""THE round: send, encode, carry, decode, hear, recv. The only caller of rules and codecs.

An exchange is a generator inside, so that one description serves everybody: a real worker drives its own, the simulator
drives n of them in turn, and one that overlaps with training is simply taken further later.

    exchange = begin(...)       # announces the receives: a slow sender's bytes may flow while we still train
    exchange.post()             # after the local phase: sends, and says what goes over the wire
    exchange.advance()          # as often as one likes: does what can be done without waiting; True once all is heard
    exchange.finish()           # waits for what is missing, and updates x and s in place

Why it cannot deadlock: only `finish` waits, everything is sent before anything is waited for, what was sent first is waited
for first, and a message is named by its round and fragment. Worker i waits only for messages that their senders post before
they wait for anything that i sends later; by induction over what was sent, all of them come.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs import Codec, exact
from gossamer.codecs.message import decode, encode
from gossamer.layout import Layout
from gossamer.record.trace import Operation
from gossamer.rounds.kernel import PLAIN, Kernel
from gossamer.rules import Context, Rule
from gossamer.topologies.mixing import Mixing, Row, pull, widen
from gossamer.transport import Ticket, Transport
from gossamer.tree import Tree, leaves, map_leaves, nbytes, refill, shares_storage

__all__ = ["Each", "Exchange", "Part", "Sent", "begin", "drive", "hear_nothing", "informed", "initial_state", "settle"]


Each = Callable[[Callable[[Any], Any], Iterable[Any]], Any]  # a map over workers, in parallel or not


class Part(NamedTuple):
    """What one worker owns of one fragment: the live parameters (or gradients), and the outer state; both updated in place."""

    x: Tensor
    s: Tree
    layout: Layout
    fragment: int = 0


class Sent(NamedTuple):
    """What an exchange that is under way rests on; a checkpoint keeps it, and `begin` takes it back."""

    message: Tree
    """What the rule sent."""
    x: Tree
    """The parameters it was sent from where the update must see those and they have moved on; () otherwise."""


class _Posted(NamedTuple):
    """What an exchange yields when its sends are under way."""

    sent: Sent
    operation: Operation


class _Heard:
    """What an exchange yields when all has been heard, and the outer update may be made."""


class _Job(NamedTuple):
    """What `begin` was given."""

    rule: Rule
    codec: Codec
    mixing: Mixing
    transport: Transport
    part: Part
    ctx: Context
    seed: int
    kernel: Kernel
    overlap_steps: int
    merge: Literal["keep"] | float
    sent: Sent | None


_Legs = Generator[Ticket | _Posted | _Heard | None, None, None]
"""An exchange as it runs: announces and yields None, sends and yields `_Posted`, yields each ticket it waits for and then
`_Heard`, and ends with the update."""


class Exchange:
    """One worker's end of an exchange; made by `begin`, which announces what will be received."""

    def __init__(self, legs: _Legs, transport: Transport, local_steps: int = 1):
        self._legs, self._transport = legs, transport
        self.local_steps = local_steps
        """Inner steps of this worker in the round that it belongs to."""
        self.sent: Sent | None = None
        """Known once it is posted."""
        self.waits_for: Ticket | None = None
        self._heard = False
        next(legs)

    def post(self) -> Operation:
        """Sends, and returns what goes over the wire."""
        posted = next(self._legs)
        assert isinstance(posted, _Posted)
        self.sent = posted.sent
        self._step()
        return posted.operation

    def advance(self) -> bool:
        """Does all that can be done without waiting, but for the update; returns whether everything has been heard.

        Raises: TransportError and PeerError from the transport, as does `finish`.
        """
        while not self._heard and self._transport.ready(self._ticket):
            self._step()
        return self._heard

    def hear(self) -> None:
        """Waits until everything has been heard, and leaves the update out."""
        while not self._heard:
            self._transport.wait(self._ticket)
            self._step()

    def finish(self) -> None:
        """Waits for what has not been heard, and makes the outer update."""
        self.hear()
        for _ in self._legs:
            raise AssertionError("an exchange goes on after its update")

    @property
    def _ticket(self) -> Ticket:
        assert self.waits_for is not None, "it was not posted"
        return self.waits_for

    def _step(self) -> None:
        state = next(self._legs)
        self._heard = isinstance(state, _Heard)
        self.waits_for = state if isinstance(state, Ticket) else None


def initial_state(rule: Rule, mixing: Mixing, x: Tensor, ctx: Context) -> Tree:
    """The outer state of a worker at `x` before the first round, of which `mixing` and `ctx` are."""
    return rule.init(x, informed(ctx, mixing))


def begin(
    rule: Rule, codec: Codec, mixing: Mixing, transport: Transport, part: Part, ctx: Context, *, seed: int,
    kernel: Kernel | None = None, reduce: Callable[[Sequence[Tensor], Ticket], None] | None = None,
    overlap_steps: int = 0, merge: Literal["keep"] | float = "keep", sent: Sent | None = None,
) -> Exchange:  # fmt: skip
    """Announces what will be received and returns the exchange, which waits to be posted after the local phase.

    Args:
        part: updated in place when the exchange ends.
        seed: for codecs that round at random; everyone decodes what the sender encoded, so all hear the same.
        kernel: how `hear` and `recv` are carried out on a span of elements; `PLAIN` unless given.
        reduce: sums tensors over all workers in place; used for a `mean` over everyone with an exact codec if given.
        overlap_steps: inner steps that x takes between `post` and `finish`; noted in the trace.
        merge: what becomes of them, as in `Schedule.merge`.
        sent: of an exchange that was under way when a checkpoint was written, to send the same again.
    Raises: TransportError and PeerError from the transport, wherever it is taken further.
    Cost: one payload to each hearer. Only a `mean` over everyone with an exact codec, or with one that has a way back, goes
        through chunk owners, (n-1)/n payloads there and (n-1)/n back per worker. With overlap or a merge one more copy of x
        while it is under way.
    """
    job = _Job(
        rule, codec, mixing, transport, part, informed(ctx, mixing), seed, kernel or PLAIN, overlap_steps, merge, sent
    )
    owned = codec.exact or codec.back is not None
    if not rule.averages or not owned or ctx.n == 1:
        legs = _directly(job)
    elif reduce is None or codec.back is not None:
        legs = _through_owners(job)
    else:
        legs = _reduced(job, reduce)
    return Exchange(legs, transport, ctx.local_steps)


def hear_nothing(rule: Rule, part: Part, ctx: Context, kernel: Kernel | None = None) -> None:
    """The outer update of a rule that hears rounds late, before there is anything to hear: all messages were zero."""
    zeros = map_leaves(torch.zeros_like, rule.send(part.x, part.s, ctx))
    _take_mean(rule, part, zeros, [leaves(zeros)], ctx, kernel or PLAIN)


def informed(ctx: Context, mixing: Mixing) -> Context:
    """The context with what the mixing of its round says."""
    return ctx._replace(everyone=mixing.everyone, peers=mixing.hears_from(ctx.worker))


def _carried(told: Tree, messages: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The hearing of a mean that the chunk owners have summed already."""
    return messages[1]


def _directly(job: _Job) -> _Legs:
    """Every hearer gets the whole payload."""
    rule, codec, mixing, transport, part, ctx = job[:6]
    i, ticket = ctx.worker, Ticket(ctx.round, part.fragment)
    sources, targets = mixing.hears_from(i), mixing.sends_to(i)
    template = encode(codec, _message_template(rule, part, ctx), 0)
    for j in sources:
        transport.expect(ticket, j, leaves(template))
    yield None

    sent = _sent(job)
    message = sent.message
    payload = encode(codec, message, rng.key(job.seed, i, ctx.round, part.fragment, "codec"))
    for j in targets:
        transport.post(ticket, j, leaves(payload))
    size = nbytes(payload)
    sends, receives = (tuple((j, size) for j in peers) for peers in (targets, sources))
    yield _Posted(sent, Operation("exchange", part.fragment, sends, receives, job.overlap_steps))
    yield ticket

    arrived = {j: refill(payload, frames) for j, frames in transport.collect(ticket).items()}
    told = decode(codec, payload, message)
    others = tuple(decode(codec, arrived[j], message) for j in sources)
    yield _Heard()

    # Renumbered by place, and with the worker itself first where its place does not matter, so that a compiled kernel meets
    # one row per number of peers.
    order = [i, *sources] if rule.hear is pull else [j for j, _ in mixing.rows[i]]
    weights = dict(mixing.rows[i])
    row, me = tuple((place, weights[j]) for place, j in enumerate(order)), order.index(i)
    with _merging(job, sent.x):
        for a, b in _spans(rule, job.kernel.chunk, 0, part.x.numel()):
            own = part.x[a:b], _cut(rule, part.s, a, b), _cut(rule, told, a, b)
            job.kernel.run(rule, rule.hear, *own, tuple(_cut(rule, m, a, b) for m in others), me, row, ctx)


def _through_owners(job: _Job) -> _Legs:
    """A mean as reduce-scatter and gather: worker k owns chunk k, sums it in worker order and sends the sum to everyone.

    Both ways have a codec, exact or not; whoever made a payload also takes what decodes from it, so that all hear the same.
    """
    rule, codec, mixing, transport, part, ctx = job[:6]
    i, n, back = ctx.worker, ctx.n, codec.back or exact()
    there, gather = Ticket(ctx.round, part.fragment, 0), Ticket(ctx.round, part.fragment, 1)
    template = _chunks(_message_template(rule, part, ctx), n, codec)
    share = encode(codec, template[i], 0)
    sums = [encode(back, map_leaves(widen, chunk), 0) for chunk in template]
    others = mixing.hears_from(i)
    for j in others:
        transport.expect(there, j, leaves(share))
        transport.expect(gather, j, leaves(sums[j]))
    yield None

    sent = _sent(job)
    message = _chunks(sent.message, n, codec)
    keys = [rng.key(job.seed, i, ctx.round, part.fragment, "codec", k) for k in range(n)]
    payloads = [encode(codec, chunk, key) for chunk, key in zip(message, keys, strict=True)]
    for j in others:
        transport.post(there, j, leaves(payloads[j]))
    sends = tuple((j, nbytes(payloads[j]) + nbytes(sums[i])) for j in others)
    receives = tuple((j, nbytes(share) + nbytes(sums[j])) for j in others)
    yield _Posted(sent, Operation("mean", part.fragment, sends, receives, job.overlap_steps))
    yield there

    told = [decode(codec, payload, chunk) for payload, chunk in zip(payloads, message, strict=True)]
    arrived = {j: decode(codec, refill(share, frames), message[i]) for j, frames in transport.collect(there).items()}
    total = rule.hear(told[i], arrived, i, mixing.rows[i])
    del arrived
    own = encode(back, total, rng.key(job.seed, i, ctx.round, part.fragment, "back"))
    for j in others:
        transport.post(gather, j, leaves(own))
    yield gather

    arrived = {j: refill(sums[j], frames) for j, frames in transport.collect(gather).items()} | {i: own}
    pieces = [leaves(decode(back, arrived[j], map_leaves(widen, message[j]))) for j in range(n)]
    whole = sent.message if codec.exact else refill(sent.message, map(torch.cat, zip(*map(leaves, told), strict=True)))
    yield _Heard()

    with _merging(job, sent.x):
        _take_mean(rule, part, whole, pieces, ctx, job.kernel)


def _reduced(job: _Job, reduce: Callable[[Sequence[Tensor], Ticket], None]) -> _Legs:
    """A mean as the backend's own all-reduce, which blocks and is a barrier for all."""
    yield None
    sent = _sent(job)
    message = sent.message
    chunks = [nbytes(chunk) for chunk in _chunks(message, job.ctx.n, job.codec)]
    own = job.ctx.worker
    moved = tuple((j, size + chunks[own]) for j, size in enumerate(chunks) if j != own)
    yield _Posted(sent, Operation("mean", job.part.fragment, moved, moved, job.overlap_steps))
    yield _Heard()
    heard = [job.ctx.weight * leaf for leaf in leaves(message)]
    reduce(heard, Ticket(job.ctx.round, job.part.fragment))
    with _merging(job, sent.x):
        _take_mean(job.rule, job.part, message, [heard], job.ctx, job.kernel)


def _sent(job: _Job) -> Sent:
    """What the rule sends, in memory that nobody writes to while others may still read it, and what it was sent from.

    A rule that hears late by itself wants to see all that was trained since.
    """
    if job.sent is not None:
        return job.sent
    x, s = job.part.x, job.part.s
    message = job.rule.send(x, s, job.ctx)
    moves_on = job.transport.keeps_frames or job.overlap_steps > 0 or job.rule.delay_rounds > 0
    if moves_on and any(shares_storage(message, own) for own in (x, *leaves(s))):
        message = map_leaves(Tensor.clone, message)
    changes = (job.overlap_steps > 0 or job.merge != "keep") and not job.rule.delay_rounds
    return Sent(message, x.clone() if changes else ())


@contextlib.contextmanager
def _merging(job: _Job, sent: Tree) -> Iterator[None]:
    """Lets the outer update see the parameters as they were sent, and then merges in what was trained since."""
    x = job.part.x
    if not isinstance(sent, Tensor):
        yield
    elif job.merge == "keep":
        moved = x - sent
        x.copy_(sent)
        yield
        x.copy_(x + moved)
    else:
        live = x.clone()
        x.copy_(sent)
        yield
        x.copy_(job.merge * live + (1.0 - job.merge) * x)


def _take_mean(
    rule: Rule, part: Part, message: Tree, pieces: Sequence[list[Tensor]], ctx: Context, kernel: Kernel
) -> None:
    """The outer update with a mean that came in consecutive pieces."""
    if not rule.elementwise:
        pieces = [[torch.cat(parts) for parts in zip(*pieces, strict=True)]]
    start = 0
    for piece in pieces:
        heard, stop = refill(message, piece), start + piece[0].numel()
        for a, b in _spans(rule, kernel.chunk, start, stop):
            own = part.x[a:b], _cut(rule, part.s, a, b), _cut(rule, message, a, b)
            kernel.run(rule, _carried, *own, (_cut(rule, heard, a - start, b - start),), 0, ((0, 0.0), (1, 1.0)), ctx)
        start = stop


def _chunks(tree: Tree, n: int, codec: Codec) -> list[Tree]:
    """The part of each flat tensor that each of n owners sums; they begin where the codec may be cut."""
    block = codec.blockwise or 1

    def cut(t: Tensor, k: int) -> int:
        return t.numel() * k // n // block * block if k < n else t.numel()

    return [map_leaves(lambda t, k=k: t[cut(t, k) : cut(t, k + 1)], tree) for k in range(n)]


def drive(exchanges: Sequence[Exchange], each: Each) -> list[Operation]:
    """Posts and finishes the exchanges of all workers of a process; returns what each sent and received."""
    operations = each(Exchange.post, exchanges)
    settle(exchanges, each)
    return operations


def settle(exchanges: Sequence[Exchange], each: Each) -> None:
    """Finishes the posted exchanges of all workers of a process, every leg of all of them before the next."""
    waiting = list(exchanges)
    while waiting:
        before = [exchange.waits_for for exchange in waiting]
        heard = each(Exchange.advance, waiting)
        if not any(heard) and before == [exchange.waits_for for exchange in waiting]:
            waiting[0].hear()  # nobody can move: says what is missing
        waiting = [exchange for exchange, done in zip(waiting, heard, strict=True) if not done]
    each(Exchange.finish, exchanges)


def _message_template(rule: Rule, part: Part, ctx: Context) -> Tree:
    """Shapes and dtypes of a message, found by running `send` without data: the others' look like mine."""
    x, s = map_leaves(lambda t: torch.empty_like(t, device="meta"), (part.x, part.s))
    return rule.send(x, s, ctx)


def _cut(rule: Rule, tree: Tree, a: int, b: int) -> Tree:
    """Elements a to b of every tensor of a tree; the whole tree for a rule that is not elementwise."""
    return map_leaves(lambda t: t[a:b], tree) if rule.elementwise else tree


def _spans(rule: Rule, chunk: int, start: int, stop: int) -> list[tuple[int, int]]:
    """The pieces an update may be done in: chunks that stay in the cache if the rule is elementwise, else the whole."""
    if not rule.elementwise:
        return [(start, stop)]
    return [(a, min(a + chunk, stop)) for a in range(start, stop, chunk)]
