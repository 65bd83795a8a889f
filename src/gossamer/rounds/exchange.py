"""The exchange of one fragment in one round: send, encode, carry, decode, combine, update.

An exchange is implemented as a generator, so that one implementation serves all drivers: a real worker runs one, the
simulator interleaves those of n workers, and an exchange that overlaps with training is resumed later.

    exchange = begin(...)       # announces what will be received: a slow sender's bytes may flow while we still train
    exchange.post()             # after the local phase: sends, and returns what goes over the wire
    exchange.advance()          # as often as one likes: does what needs no waiting; True once everything has been received
    exchange.finish()           # waits for what is missing, and updates x and s in place

Why it cannot deadlock: only `receive` and `finish` wait, everything is sent before anything is waited for, what was sent first
is waited for first, and a message is named by its round and fragment. Worker i waits only for messages that their senders post
before they wait for anything that i sends later; by induction over what was sent, all of them come.

Who calls the functions of a rule: `init` and `send` are called here and in `rounds.together` only, `combine` and `recv` in
`gossamer.rounds.kernel` only, except that a mean over everyone is combined here: one chunk by each owner, or once for all workers
of a process. Codecs are called in `gossamer.codecs.message` only. A rule or a codec that wraps another calls the one it wraps,
and `gossamer.testing` the rule that it checks.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs import Codec
from gossamer.codecs.cast import EXACT
from gossamer.codecs.message import decode, decode_received, encode
from gossamer.errors import TrainingError, TransportError
from gossamer.finite import GO_ON, must_be_finite
from gossamer.record.logs.trace import Operation, share_in_mean
from gossamer.rounds.kernel import Decoded, cut, update_spans
from gossamer.rounds.merging import merging
from gossamer.rounds.setup import AllOf, Sent, Setup, StageSide, Waits
from gossamer.rounds.together import Together, chunks, message_template, own_message, sizes_of
from gossamer.rules import Context, Rule
from gossamer.topologies.mixing import Mixing, Row, pull, widen, without
from gossamer.transport.contract import IncompleteError, Reduce, Ticket
from gossamer.tree import Tree, leaves, map_leaves, must_fit, nbytes, refill

Each = Callable[[Callable[[Any], Any], Iterable[Any]], Any]  # a map over workers, in parallel or not


class _Posted(NamedTuple):
    """Yielded by an exchange when its sends are in flight."""

    sent: Sent
    operation: Operation


class _Complete:
    """Yielded by an exchange when everything has been received and the outer update can be made."""


class _Job(NamedTuple):
    """The arguments of `begin`."""

    setup: Setup
    mixing: Mixing
    ctx: Context
    sent: Sent | None

    @property
    def declines(self) -> bool:
        """Whether a message may be dropped: not if others rely on the mass it carries, or on copies of a state."""
        rule = self.setup.rule
        return rule.needs in ("everyone", "connected") and not rule.copies_per_peer

    def ticket(self, leg: int = 0) -> Ticket:
        """The ticket of the messages of one leg."""
        return Ticket(self.ctx.round, self.setup.part.fragment, 2 * (self.setup.attempt or 0) + leg)

    def key(self, *use: str | int) -> int:
        """The random key for this use."""
        return rng.key(self.setup.seed, self.ctx.worker, self.ctx.round, self.setup.part.fragment, *use)


_Legs = Generator[Ticket | _Posted | _Complete | None, None, None]
"""An exchange as it runs: announces and yields None, sends and yields `_Posted`, yields each ticket it waits for and then
`_Complete`, and ends with the update."""


class Exchange:
    """One worker's end of an exchange; made by `begin`, which announces what will be received."""

    def __init__(self, legs: _Legs, transport: Waits, ctx: Context):
        self._legs, self._transport = legs, transport
        self.ctx = ctx
        """The rule's context in the round of the exchange."""
        self.sent: Sent | None = None
        """Set by `post`."""
        self.waits_for: Ticket | None = None
        self._complete = False
        next(legs)

    def post(self) -> Operation:
        """Sends, and returns what goes over the wire."""
        posted = next(self._legs)
        assert isinstance(posted, _Posted)
        self.sent = posted.sent
        self._step()
        return posted.operation

    def advance(self) -> bool:
        """Does everything that needs no waiting, except the update; returns whether everything has been received.

        Raises: TransportError and PeerError from the transport, as do `receive` and `finish`.
        """
        while not self._complete and self._transport.ready(self._ticket):
            self._step()
        return self._complete

    def receive(self) -> None:
        """Waits until everything has been received, and makes no update."""
        while not self._complete:
            self._transport.wait(self._ticket)
            self._step()

    def finish(self) -> None:
        """Waits until everything has been received, and makes the outer update."""
        self.receive()
        for _ in self._legs:
            raise AssertionError("an exchange continues after its update")

    @property
    def _ticket(self) -> Ticket:
        assert self.waits_for is not None, "it was not posted"
        return self.waits_for

    def _step(self) -> None:
        state = next(self._legs)
        self._complete = isinstance(state, _Complete)
        self.waits_for = state if isinstance(state, Ticket) else None


def with_mixing(ctx: Context, mixing: Mixing) -> Context:
    """The context, completed with the mixing of its round."""
    return ctx._replace(everyone=mixing.everyone, peers=mixing.receives_from(ctx.worker))


def initial_state(rule: Rule, mixing: Mixing, x: Tensor, ctx: Context) -> Tree:
    """The outer state of a worker at `x` before the first round; `mixing` and `ctx` are those of that round."""
    return rule.init(x, with_mixing(ctx, mixing))


def begin(setup: Setup, mixing: Mixing, ctx: Context, sent: Sent | None = None) -> Exchange:
    """Announces what will be received and returns the exchange, which waits to be posted after the local phase.

    Args: `sent` is that of an exchange in flight when a checkpoint was written, to send the same again.
    Raises: TransportError and PeerError from the transport, wherever the exchange is continued; TrainingError for a
        message of this worker that is not finite, before it is sent, and, naming the sender, for a received one that
        this rule requires. Any other such message is declined: it does not count, and its sender is passed to
        `Setup.declined`; in an attempt of an elastic mean an IncompleteError names it too.
    Cost: one payload to each receiver. Only a `mean` over everyone with an exact codec, or with one that has a way back, goes
        through chunk owners, (n-1)/n payloads there and (n-1)/n back per worker. With overlap or a merge one more copy
        of x while it is in flight.
    """
    job = _Job(setup, mixing, with_mixing(ctx, mixing), sent)
    if setup.sides:
        return Exchange(_side_by_side(job), AllOf(tuple(side.transport for side in setup.sides)), ctx)
    return Exchange(_legs(job), setup.transport, ctx)


def sent_again(setup: Setup, mixing: Mixing, ctx: Context, tensors: Sequence[Tensor]) -> Sent:
    """The sent tensors of a fragment, restored from a checkpoint. Raises: ValueError when they do not fit."""
    x = setup.part.x
    message = setup.rule.send(x, setup.part.s, with_mixing(ctx, mixing))
    like = Sent(message, x if len(tensors) > len(leaves(message)) else ())
    must_fit(tensors, leaves(like))
    return refill(like, [saved.to(x.device) for saved in tensors])


def update_from_zeros(setup: Setup, mixing: Mixing, ctx: Context) -> None:
    """The outer update of a rule with delayed messages before the first ones arrive, as if all were zero."""
    part, ctx = setup.part, with_mixing(ctx, mixing)
    zeros = map_leaves(torch.zeros_like, setup.rule.send(part.x, part.s, ctx))
    _update_with_mean(setup, zeros, [leaves(zeros)], ctx)


def payload_of(setup: Setup, mixing: Mixing, ctx: Context) -> Tree:
    """What a worker posts to each of its peers, copied. Raises: TrainingError where it is not finite."""
    job = _Job(setup, mixing, with_mixing(ctx, mixing), None)
    return map_leaves(Tensor.clone, _payload(job, _sent(job)))


def payload_form(setup: Setup, mixing: Mixing, ctx: Context) -> Tree:
    """Shapes and dtypes of `payload_of`."""
    return encode(setup.codec, _form(setup, mixing, ctx), 0)


def is_sound(setup: Setup, mixing: Mixing, ctx: Context, payload: Tree) -> bool:
    """Whether a payload of this form may count."""
    return _decoded(setup.codec, payload, _with_data(_form(setup, mixing, ctx), setup.part.x.device)) is not None


def mean_of(setup: Setup, mixing: Mixing, ctx: Context, payloads: Mapping[int, Tree]) -> Tree:
    """The mean of what all that take part have posted, as each of them would take it."""
    form = _with_data(_form(setup, mixing, ctx), setup.part.x.device)
    messages = {j: decode(setup.codec, payload, form) for j, payload in payloads.items()}
    first = min(messages)
    return setup.rule.combine(messages[first], messages, first, mixing.rows[first])


def mean_form(setup: Setup, mixing: Mixing, ctx: Context) -> Tree:
    """Shapes and dtypes of `mean_of`."""
    return map_leaves(widen, _form(setup, mixing, ctx))


def _form(setup: Setup, mixing: Mixing, ctx: Context) -> Tree:
    """A message of a round, without data."""
    return message_template(setup.rule, setup.part.x, setup.part.s, with_mixing(ctx, mixing))


def update_with_mean(setup: Setup, mixing: Mixing, ctx: Context, mean: Tree) -> None:
    """The outer update of a worker that has sent nothing, for a rule that makes all workers equal."""
    _update_with_mean(setup, mean, [leaves(mean)], with_mixing(ctx, mixing))


def finish_all(exchanges: Sequence[Exchange], each: Each) -> None:
    """Finishes the posted exchanges of all workers of a process, leg by leg."""
    waiting = list(exchanges)
    while waiting:
        before = [exchange.waits_for for exchange in waiting]
        complete = each(Exchange.advance, waiting)
        if not any(complete) and before == [exchange.waits_for for exchange in waiting]:
            waiting[0].receive()  # no exchange can continue: raises an error that names what is missing
        waiting = [exchange for exchange, done in zip(waiting, complete, strict=True) if not done]
    each(Exchange.finish, exchanges)


def _legs(job: _Job) -> _Legs:
    """The legs of an exchange: through peers, chunk owners, one process or an all-reduce."""
    setup, mixing, ctx, _ = job
    codec, given = setup.codec, setup.together is not None and setup.together.given
    owned = codec.exact or codec.back is not None or given
    if not setup.rule.averages or not owned or len(mixing.rows[ctx.worker]) == 1:
        return _with_peers(job)
    if setup.together is not None and setup.together.takes(mixing) and codec.back is None and setup.compare is None:
        return _in_one_process(job, setup.together)
    if setup.reduce is None or codec.back is not None:
        return _through_owners(job)
    return _reduced(job, setup.reduce)


def _side_by_side(job: _Job) -> _Legs:
    """The exchanges of all sides in lockstep, as they have the same legs; `zip` ends the others with the first."""
    for states in zip(*[_legs(_on_side(job, side)) for side in job.setup.sides], strict=True):
        first, *others = states
        if not isinstance(first, _Posted):
            yield first
            continue
        posted = [first, *(state for state in others if isinstance(state, _Posted))]
        sent = refill(first.sent, map(torch.cat, zip(*(leaves(one.sent) for one in posted), strict=True)))
        yield _Posted(cast(Sent, sent), _summed([one.operation for one in posted]))


def _on_side(job: _Job, side: StageSide) -> _Job:
    """The exchange of one side, on views of the tensors."""
    rule, part, a, b = job.setup.rule, job.setup.part, side.start, side.stop
    side_part = part._replace(x=part.x[a:b], s=cut(rule, part.s, a, b), layout=side.layout)
    setup = job.setup._replace(codec=side.codec, transport=side.transport, part=side_part, sides=())
    sent = None if job.sent is None else Sent(*(cut(rule, tree, a, b) for tree in job.sent))
    return _Job(setup, job.mixing, job.ctx._replace(layout=side.layout), sent)


def _summed(operations: Sequence[Operation]) -> Operation:
    """The traffic of all sides, summed as one exchange."""
    return operations[0].resized(map(sum, zip(*(one.sizes for one in operations), strict=True)))


def _with_peers(job: _Job) -> _Legs:
    """Every receiver gets the whole payload."""
    _announce(job)
    yield None
    sent = _sent(job)
    payload = _payload(job, sent)
    yield _Posted(sent, _post(job, payload))
    yield job.ticket()
    received = _decoded_from_peers(job, payload, sent)
    if job.setup.compare is not None:
        job.setup.compare(received.own, [*received.others.values()])
    yield _Complete()
    _update_with_peers(job, sent, received)


def _announce(job: _Job) -> None:
    """Announces the message of each sender."""
    setup, ctx = job.setup, job.ctx
    form = message_template(setup.rule, setup.part.x, setup.part.s, ctx)
    template = encode(setup.codec, form, 0)

    def sound(frames: Sequence[Tensor]) -> bool:
        return _decoded(setup.codec, refill(template, frames), _with_data(form, frames[0].device)) is not None

    for j in job.mixing.receives_from(ctx.worker):
        setup.transport.expect(job.ticket(), j, leaves(template), sound if job.declines else None)


def _with_data(form: Tree, device: torch.device) -> Tree:
    """Tensors of a form that may have none: what a codec decodes for a form without data has no data to look at."""
    return map_leaves(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), form)


def _payload(job: _Job, sent: Sent) -> Tree:
    return encode(job.setup.codec, sent.message, job.key("codec"))


def _post(job: _Job, payload: Tree) -> Operation:
    """Sends the payload to each receiver."""
    setup, i, size = job.setup, job.ctx.worker, nbytes(payload)
    sources, targets = job.mixing.receives_from(i), job.mixing.sends_to(i)
    for j in targets:
        setup.transport.post(job.ticket(), j, leaves(payload))
    sends, receives = (tuple((j, size) for j in peers) for peers in (targets, sources))
    return Operation("exchange", setup.part.fragment, sends, receives, setup.overlap_steps)


class _Received(NamedTuple):
    """The messages of an exchange that count."""

    own: Tree
    """This worker's message as all others decode it."""
    others: Mapping[int, Tree]
    row: Row
    """The weight of each."""
    ctx: Context


def _decoded_from_peers(job: _Job, payload: Tree, sent: Sent) -> _Received:
    """Decodes the received messages. The weight of a missing or invalid one goes to the others."""
    setup, ctx, i = job.setup, job.ctx, job.ctx.worker
    rule, codec, sources = setup.rule, setup.codec, job.mixing.receives_from(i)
    arrived = {j: refill(payload, frames) for j, frames in setup.transport.collect(job.ticket()).items()}
    everyone = rule.needs == "everyone"
    if everyone:
        _must_be_whole(ctx, sources, arrived)
    own = decode(codec, payload, sent.message)
    if not codec.exact:
        _must_be_finite(ctx, "message", {i: own})
    messages = {j: _decoded(codec, arrived[j], sent.message) for j in sources if j in arrived}
    others = {j: message for j, message in messages.items() if message is not None}
    bad = [j for j in messages if j not in others]
    _decline(job, bad, may=job.declines)
    # In an elastic run some exchanges may have failed, at both ends.
    row = without(job.mixing.rows[i], i, [j for j in sources if j not in arrived])
    if bad:
        row = (_over_the_rest if everyone else without)(row, i, bad)
        ctx = ctx._replace(peers=tuple(others))
    return _Received(own, others, row, ctx)


def _update_with_peers(job: _Job, sent: Sent, received: _Received) -> None:
    """The outer update with the messages of peers."""
    rule, part, kernel = job.setup.rule, job.setup.part, job.setup.kernel
    own, others, row, ctx = received
    me = ctx.worker
    if rule.compiles:
        # Renumbered by place, and with the worker itself first where its place does not matter, so that a compiled kernel meets
        # one row per number of peers. A rule that is not compiled may depend on the sender.
        order, weights = [me, *others] if rule.combine is pull else [j for j, _ in row], dict(row)
        row, me = tuple((place, weights[j]) for place, j in enumerate(order)), order.index(me)
    with job.setup.around(), _merging(job, sent.x):
        for a, b in update_spans(kernel, rule, part.x.device, 0, part.x.numel()):
            messages = Decoded(cut(rule, own, a, b), tuple(cut(rule, m, a, b) for m in others.values()), me, row)
            kernel.run(rule, rule.combine, part.x[a:b], cut(rule, part.s, a, b), messages, ctx)


class _Owners(NamedTuple):
    """The chunks of a mean through their owners."""

    place: Mapping[int, int]
    """The chunk owned by each participating worker, in worker order."""
    others: tuple[int, ...]
    share: Tree
    """A payload of this worker's chunk, in form."""
    sums: Sequence[Tree]
    """A payload of the sum of each chunk, in form."""
    back: Codec
    """That of sums."""


def _through_owners(job: _Job) -> _Legs:
    """A mean as reduce-scatter and gather: worker k owns chunk k, sums it in worker order and sends the sum to everyone.

    Both legs have a codec, exact or not; the sender of a payload also uses its decoded form, so that all workers get
    the same.
    """
    codec = job.setup.codec
    owners = _announce_chunks(job)
    yield None
    sent = _sent(job)
    message = chunks(sent.message, len(owners.place), codec)
    payloads = [encode(codec, chunk, job.key("codec", k)) for k, chunk in enumerate(message)]
    yield _Posted(sent, _post_chunks(job, owners, payloads))
    yield job.ticket()
    own = [decode(codec, payload, chunk) for payload, chunk in zip(payloads, message, strict=True)]
    total = _sum_of_chunk(job, owners, own, message)
    for j in owners.others:
        job.setup.transport.post(job.ticket(leg=1), j, leaves(total))
    yield job.ticket(leg=1)
    pieces = _decoded_sums(job, owners, total, message)
    whole = sent.message if codec.exact else refill(sent.message, map(torch.cat, zip(*map(leaves, own), strict=True)))
    if job.setup.compare is not None:
        for chunk_here, piece in zip(own, pieces, strict=True):
            job.setup.compare(chunk_here, [tuple(piece)])
    yield _Complete()
    _finish_with_mean(job, sent, whole, pieces)


def _announce_chunks(job: _Job) -> _Owners:
    """Announces each other worker's part of this worker's chunk, and the sum of each other chunk."""
    setup, ctx = job.setup, job.ctx
    place = {j: k for k, (j, _) in enumerate(job.mixing.rows[ctx.worker])}  # all participating workers
    back, others = setup.codec.back or EXACT, job.mixing.receives_from(ctx.worker)
    form = message_template(setup.rule, setup.part.x, setup.part.s, ctx)
    template = chunks(form, len(place), setup.codec)
    share = encode(setup.codec, template[place[ctx.worker]], 0)
    sums = [encode(back, map_leaves(widen, chunk), 0) for chunk in template]
    for j in others:
        setup.transport.expect(job.ticket(), j, leaves(share))
        setup.transport.expect(job.ticket(leg=1), j, leaves(sums[place[j]]))
    return _Owners(place, others, share, sums, back)


def _post_chunks(job: _Job, owners: _Owners, payloads: Sequence[Tree]) -> Operation:
    """Sends each owner its chunk of the message."""
    setup, place = job.setup, owners.place
    for j in owners.others:
        setup.transport.post(job.ticket(), j, leaves(payloads[place[j]]))
    return _mean_of(job, [*place], list(map(nbytes, payloads)), list(map(nbytes, owners.sums)))


def _mean_of(job: _Job, members: Sequence[int], there: Sequence[int], back: Sequence[int]) -> Operation:
    """This worker's part in a mean, given the bytes of the chunks of all members and of their sums."""
    share = share_in_mean(members, job.ctx.worker, there, back)
    return Operation("mean", job.setup.part.fragment, (), (), job.setup.overlap_steps, share)


def _sum_of_chunk(job: _Job, owners: _Owners, own: Sequence[Tree], message: Sequence[Tree]) -> Tree:
    """The payload of the sum of this worker's chunk."""
    setup, ctx, i = job.setup, job.ctx, job.ctx.worker
    place, row = owners.place[i], job.mixing.rows[i]
    came = {j: refill(owners.share, frames) for j, frames in setup.transport.collect(job.ticket()).items()}
    _must_be_whole(ctx, owners.others, came)
    if not setup.codec.exact:
        _must_be_finite(ctx, "message", {i: tuple(own)})
    decoded = {j: _decoded(setup.codec, payload, message[place]) for j, payload in came.items()}
    chunks_of = {j: chunk for j, chunk in decoded.items() if chunk is not None}
    bad = [j for j in decoded if j not in chunks_of]
    _decline(job, bad)  # all get the sums of the same owners, so they stay equal
    total = setup.rule.combine(own[place], chunks_of, i, _over_the_rest(row, i, bad) if bad else row)
    return encode(owners.back, total, job.key("back"))


def _decoded_sums(job: _Job, owners: _Owners, total: Tree, message: Sequence[Tree]) -> list[list[Tensor]]:
    """The sums of all chunks. Raises: TrainingError for an invalid one."""
    place, collected = owners.place, job.setup.transport.collect(job.ticket(leg=1))
    arrived = {j: refill(owners.sums[place[j]], frames) for j, frames in collected.items()} | {job.ctx.worker: total}
    _must_be_whole(job.ctx, owners.others, arrived)
    sums_of = {j: _decoded(owners.back, arrived[j], map_leaves(widen, message[k])) for j, k in place.items()}
    bad = [j for j, one in sums_of.items() if one is None]
    _decline(job, bad, "sum", may=job.setup.attempt is not None and job.ctx.worker not in bad)
    return [leaves(one) for one in sums_of.values()]


def _in_one_process(job: _Job, together: Together) -> _Legs:
    """A mean computed once for all workers in this process; same result and same byte count as through chunk owners."""
    setup, ctx, i, n = job.setup, job.ctx, job.ctx.worker, job.mixing.n
    yield None

    sent = _sent(job)
    there, back = together.put(job.ticket(), i, sent.message, lambda: sizes_of(sent.message, n, setup.codec))
    members = range(n) if job.mixing.everyone else [j for j, _ in job.mixing.rows[i]]
    yield _Posted(sent, _mean_of(job, members, [there[j] for j in members], [back[j] for j in members]))
    yield job.ticket()

    def mean(messages: Mapping[int, Tree]) -> Tree:
        total = setup.rule.combine(messages[i], messages, i, job.mixing.rows[i])
        _must_be_finite(ctx, "sum", dict(enumerate(chunks(total, n, setup.codec))))
        return total

    total = leaves(together.take(job.ticket(), mean))
    yield _Complete()
    _finish_with_mean(job, sent, sent.message, [total])


def _reduced(job: _Job, reduce: Reduce) -> _Legs:
    """A mean as the backend's own all-reduce, which blocks and is a barrier for all."""
    setup, ctx = job.setup, job.ctx
    yield None
    sent = _sent(job)
    sizes = sizes_of(sent.message, ctx.n, setup.codec).there
    yield _Posted(sent, _mean_of(job, range(ctx.n), sizes, sizes))
    yield _Complete()
    total = [ctx.weight * leaf for leaf in leaves(sent.message)]
    reduce(total, job.ticket())
    must_be_finite({f"the all-reduced mean of round {ctx.round}": tuple(total)})
    if setup.compare is not None:
        setup.compare(sent.message, [tuple(total)])
    _finish_with_mean(job, sent, sent.message, [total])


def _must_be_whole(ctx: Context, needed: Iterable[int], arrived: Mapping[int, Tree]) -> None:
    """Raises IncompleteError unless all needed messages have arrived."""
    if missing := [j for j in needed if j not in arrived]:
        raise IncompleteError(
            f"worker {ctx.worker} lacks the messages of workers {missing} in round {ctx.round}; try it again"
        )


def _must_be_finite(ctx: Context, what: str, parts: Mapping[int, Tree]) -> None:
    """Raises TrainingError, naming the sender, unless the messages of these workers in this round are finite."""
    must_be_finite({f"the {what} of worker {j} in round {ctx.round}": part for j, part in parts.items()})


def _decoded(codec: Codec, payload: Tree, like: Tree) -> Tree | None:
    """A message of another worker; None if it cannot be decoded or is not finite, which no honest worker sends."""
    try:
        return decode_received(codec, payload, like)
    except TransportError:
        return None


def _unsound_error(job: _Job, what: str, senders: Sequence[int]) -> TrainingError:
    """The error for a worker that requires these messages."""
    who = " and ".join(map(str, senders))
    return TrainingError(
        f"the {what} of worker {who} in round {job.ctx.round} has numbers that are not finite, or cannot be decoded; {GO_ON}"
    )


def _decline(job: _Job, bad: Sequence[int], what: str = "message", *, may: bool = True) -> None:
    """Drops these messages, or sums.

    Raises: TrainingError where this worker requires them; IncompleteError in an elastic mean, whose workers must agree on
        those that are left out.
    """
    if bad and not may:
        raise _unsound_error(job, what, bad)
    for j in bad:
        job.setup.declined(j)
    if bad and job.setup.attempt is not None:
        raise IncompleteError(str(_unsound_error(job, what, bad)), bad)


def _over_the_rest(row: Row, i: int, bad: Collection[int]) -> Row:
    """A row of a mean without these workers, whose weight is spread equally: the same on every worker."""
    whole = sum(w for j, w in row if j not in bad)
    return tuple((j, w / whole) for j, w in row if j not in bad)


def _sent(job: _Job) -> Sent:
    """The rule's message, copied where it may be read after x or s has changed, and the x at the time of sending.

    A rule with delayed messages sees all training since.
    """
    if job.sent is not None:
        return job.sent
    setup, x, s = job.setup, job.setup.part.x, job.setup.part.s
    delayed, overlaps = setup.rule.delay_rounds > 0, setup.overlap_steps > 0
    keeps = setup.transport.keeps_frames or overlaps or delayed
    message = own_message(setup.rule, x, s, job.ctx) if keeps else setup.rule.send(x, s, job.ctx)
    _must_be_finite(job.ctx, "message", {job.ctx.worker: message})
    changes = (overlaps or not isinstance(setup.merge, str)) and not delayed
    return Sent(message, x.clone() if changes else ())


def _finish_with_mean(job: _Job, sent: Sent, message: Tree, pieces: Sequence[list[Tensor]]) -> None:
    """The outer update with a mean, merged with the training since it was sent."""
    with job.setup.around(), _merging(job, sent.x):
        _update_with_mean(job.setup, message, pieces, job.ctx)


def _merging(job: _Job, sent: Tree) -> AbstractContextManager[None]:
    setup = job.setup
    return merging(setup.part.x, setup.part.layout, sent, setup.merge, setup.merge_strength)


def _update_with_mean(setup: Setup, message: Tree, pieces: Sequence[list[Tensor]], ctx: Context) -> None:
    """The outer update with a mean that came in consecutive pieces."""
    rule, part, kernel = setup.rule, setup.part, setup.kernel
    if not rule.elementwise:
        pieces = [[torch.cat(parts) for parts in zip(*pieces, strict=True)]]
    start = 0
    for piece in pieces:
        mean, stop = refill(message, piece), start + piece[0].numel() if rule.elementwise else part.x.numel()
        for a, b in update_spans(kernel, rule, part.x.device, start, stop):
            own, summed = cut(rule, message, a, b), cut(rule, mean, a - start, b - start)
            messages = Decoded(own, (summed,), 0, ((0, 0.0), (1, 1.0)))
            kernel.run(rule, _received, part.x[a:b], cut(rule, part.s, a, b), messages, ctx)
        start = stop


def _received(own: Tree, received: Mapping[int, Tree], i: int, row: Row) -> Tree:
    """The `combine` of a mean that chunk owners have summed already."""
    return received[1]
