"""DiLoCoX: without compression and delay it is DiLoCo, its factors have the rank asked for, and no error is lost."""

import pytest
import torch

from gossamer.codecs import int4
from gossamer.codecs.message import decode, encode, payload_like
from gossamer.layout import Layout, Leaf
from gossamer.rules import Context, diloco, dilocox, eager
from gossamer.topologies import make_topology
from gossamer.tree import leaves, nbytes
from rounds import play, random_drift, random_vectors

SHAPES = {"embed": (12, 8), "bias": (5,), "conv": (6, 2, 4), "small": (3, 3)}
LAYOUT = Layout(
    tuple(
        Leaf(name, shape, start, start + torch.Size(shape).numel())
        for (name, shape), start in zip(SHAPES.items(), (0, 96, 101, 149), strict=True)
    ),
    158,
)
MATRICES = ((0, 96, 12), (101, 149, 6))  # 2 (12 + 8) < 96 and 2 (6 + 8) < 48, but 2 (3 + 3) > 9


def context(worker=0, n=1, round=0, layout=LAYOUT):
    return Context(worker, n, round, 1, 1 / n, layout, 1, True, tuple(j for j in range(n) if j != worker))


def rounds_of(rule, drifts, codec=None, dtype=torch.float32):
    """One worker after each round with these drifts, its message and what is decoded of it, and its states."""
    ctx = context()
    x = random_vectors(1, LAYOUT.numel, dtype=dtype)[0]
    s, trail = rule.init(x, ctx), []
    before = None
    for t, drift in enumerate(drifts):
        end = x + drift
        sent = rule.send(end, s, ctx)
        told = sent if codec is None else decode(codec, encode(codec, sent, t), sent)
        arrived = told if not rule.delay_rounds else before
        if arrived is None:
            arrived = type(told)(*map(torch.zeros_like, told))
        x, new = rule.recv(end, s, arrived, arrived, ctx)
        trail.append((end, s, sent, arrived, x, new))
        s, before = new, told
    return trail


def vector(message):
    """What a message of LAYOUT at rank 2 stands for, in other words than the rule's."""
    x, rest = torch.empty(LAYOUT.numel, dtype=message.left.dtype), [*message.rest]
    left, right = message.left, message.right
    covered = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    for start, stop, rows in MATRICES:
        columns = (stop - start) // rows
        p, left = left[: 2 * rows].view(rows, 2), left[2 * rows :]
        q, right = right[: 2 * columns].view(columns, 2), right[2 * columns :]
        x[start:stop] = (p @ q.T).flatten()
        covered[start:stop] = True
    x[~covered] = torch.stack(rest)
    return x


@pytest.mark.parametrize(
    ("form", "plain"),
    [("blocking", diloco(0.4, 0.9)), ("restart", eager(0.4, 0.9, fresh=False)), ("eager", eager(0.4, 0.9))],
)
def test_at_full_rank_and_exact_messages_it_is_diloco_and_its_delayed_and_eager_forms(form, plain):
    n, numel = 4, 7
    start, drift = [random_vectors(1, numel)[0]] * n, random_drift(numel)
    xs, _ = play(dilocox(0.4, 0.9, form=form), make_topology("complete", n), start, 9, drift)
    ys, _ = play(plain, make_topology("complete", n), start, 9, drift)
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("rank", [8, 12, 64])
def test_a_rank_of_a_whole_side_sends_matrices_as_they_are(rank):
    rule, x = dilocox(rank=rank), random_vectors(1, LAYOUT.numel)[0]
    s = rule.init(x, context())
    sent = rule.send(x - 1.5, s, context())
    assert not sent.left.numel() and torch.equal(sent.rest, x - (x - 1.5))


@pytest.mark.parametrize("form", ["blocking", "restart", "eager"])
@pytest.mark.parametrize("codec", [None, int4()], ids=["exact", "int4"])
def test_matrices_arrive_with_the_rank_and_every_error_is_sent_once(form, codec):
    """What was sent is the drift and an earlier error; what did not arrive of it is the next error, to the last bit."""
    drifts = random_vectors(7, LAYOUT.numel, dtype=torch.float32)
    trail = rounds_of(dilocox(rank=2, form=form), drifts, codec)
    lag = 0 if form == "blocking" else 1
    for t, (_, _, sent, arrived, _, new) in enumerate(trail):
        wanted = vector(sent)
        for start, stop, rows in MATRICES:
            assert torch.linalg.matrix_rank(wanted[start:stop].view(rows, -1)) == 2
        if t >= lag:
            old_end, old, *_ = trail[t - lag]
            assert torch.equal(new.unsent, old.unsent + (old.anchor - old_end) - vector(arrived))
    told = sum(vector(arrived) for *_, arrived, _, _ in trail[lag:])
    moved = sum(old.anchor - end for end, old, *_ in trail[: len(trail) - lag])
    left = trail[-1][-1].unsent + (trail[-1][1].unsent if lag else 0.0)  # delayed, there are two errors in turn
    torch.testing.assert_close(told + left, moved, rtol=1e-4, atol=1e-4)
    assert left.norm() > 1.0


def test_warm_factors_of_a_constant_drift_find_its_largest_directions():
    rule = dilocox(rank=2, form="blocking")
    ctx, x = context(), torch.zeros(LAYOUT.numel, dtype=torch.float64)
    d = random_vectors(1, LAYOUT.numel)[0]
    s, off = rule.init(x, ctx), []
    for _ in range(60):
        s = s._replace(anchor=x, unsent=torch.zeros_like(x))
        sent = rule.send(x - d, s, ctx)
        _, s = rule.recv(x - d, s, sent, sent, ctx)
        off.append(float((vector(sent) - d)[:96].norm()))
    least = float(torch.linalg.svdvals(d[:96].view(12, 8))[2:].norm())
    assert off[0] > 1.02 * least and off[-1] == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("form", ["blocking", "restart"])
def test_workers_are_bitwise_equal_after_every_round_and_what_they_hear_is_the_mean(form):
    rule, n, codec = dilocox(rank=2, form=form), 3, int4()
    x = random_vectors(1, LAYOUT.numel, dtype=torch.float32)[0]
    xs, states = [x] * n, [rule.init(x, context(i, n)) for i in range(n)]
    for t in range(4):
        ends = [x + drift for x, drift in zip(xs, random_vectors(n, x.numel(), t, torch.float32), strict=True)]
        sent = [rule.send(end, s, context(i, n)) for i, (end, s) in enumerate(zip(ends, states, strict=True))]
        told = dict(enumerate(decode(codec, encode(codec, one, 0), one) for one in sent))
        row = tuple((j, 1 / n) for j in range(n))
        heard = [rule.hear(told[i], {j: m for j, m in told.items() if j != i}, i, row) for i in range(n)]
        old = states[0]
        moves = zip(ends, states, heard, strict=True)
        after = [rule.recv(end, s, told[i], heard[i], context(i, n)) for i, (end, s, _) in enumerate(moves)]
        xs, states = [y for y, _ in after], [s for _, s in after]
        assert all(torch.equal(xs[0], y) for y in xs)
        d = sum(vector(one) for one in told.values()) / n
        torch.testing.assert_close(xs[0], old.anchor - 0.4 * (d + 0.9 * (0.9 * old.b + d)))


def test_the_bytes_of_a_matrix_are_those_of_its_factors_in_four_bits():
    side, rank, rule = 8192, 2048, dilocox(rank=2048)
    layout = Layout((Leaf("w", (side, side), 0, side * side),), side * side)
    x, basis = torch.empty(side * side, device="meta"), torch.empty(side * rank, device="meta")
    few = Layout((Leaf("w", (2, 2), 0, 4),), 4)
    s = rule.init(torch.zeros(4), context(layout=few))._replace(anchor=x, unsent=x, basis=basis)
    size = nbytes(payload_like(int4(), rule.send(x, s, context(layout=layout))))
    assert 16.7e6 < size < 17.9e6  # 16.8 MB, and the scales, in place of 268 MB
    assert len(leaves(s)) == 5
