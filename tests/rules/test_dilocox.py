"""DiLoCoX: without compression and delay it is DiLoCo, its factors have the rank asked for, and no error is lost."""

import math

import pytest
import torch

from drifted_rounds import play, serially
from gossamer.codecs import exact, int4
from gossamer.codecs.message import decode, encode, payload_like
from gossamer.layout import Layout, Leaf
from gossamer.record.folder import read_metrics
from gossamer.record.logs.trace import read_trace
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.kernel import PLAIN
from gossamer.rounds.loop import OuterLoop, finish_together
from gossamer.rounds.schedule import Schedule
from gossamer.rules import Context, diloco, dilocox, eager
from gossamer.rules.low_rank import effective_rank
from gossamer.run.simulated.simulate import simulate
from gossamer.settings.over_time import timetable_of
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.topologies import make_topology
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import leaves, map_leaves, nbytes
from tiny import tiny

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
    x = random_vectors(1, LAYOUT.numel, dtype=dtype)[0]
    s, trail = rule.init(x, context()), []
    before = None
    for t, drift in enumerate(drifts):
        ctx, end = context()._replace(rank=rule.adapted(s).rank if rule.adapted else 0), x + drift
        sent = rule.send(end, s, ctx)
        decoded = sent if codec is None else decode(codec, encode(codec, sent, t), sent)
        now = decoded, ctx
        arrived, of_round = now if not rule.delay_rounds else before or (map_leaves(torch.zeros_like, decoded), ctx)
        x, new = rule.recv(end, s, arrived, arrived, of_round)
        trail.append((end, s, sent, arrived, x, new))
        s, before = new, now
    return trail


def vector(message):
    """What a message of LAYOUT with two factored matrices stands for, in other words than the rule's."""
    rank = message.left.numel() // sum(rows for _, _, rows in MATRICES)
    x, rest = torch.empty(LAYOUT.numel, dtype=message.left.dtype), [*message.rest]
    left, right = message.left, message.right
    covered = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    for start, stop, rows in MATRICES:
        columns = (stop - start) // rows
        p, left = left[: rank * rows].view(rows, rank), left[rank * rows :]
        q, right = right[: rank * columns].view(columns, rank), right[rank * columns :]
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
    arrived_sum = sum(vector(arrived) for *_, arrived, _, _ in trail[lag:])
    moved = sum(old.anchor - end for end, old, *_ in trail[: len(trail) - lag])
    left = trail[-1][-1].unsent + (trail[-1][1].unsent if lag else 0.0)  # delayed, there are two errors in turn
    torch.testing.assert_close(arrived_sum + left, moved, rtol=1e-4, atol=1e-4)
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
        decoded = dict(enumerate(decode(codec, encode(codec, one, 0), one) for one in sent))
        row = tuple((j, 1 / n) for j in range(n))
        received = [rule.combine(decoded[i], {j: m for j, m in decoded.items() if j != i}, i, row) for i in range(n)]
        old = states[0]
        moves = zip(ends, states, received, strict=True)
        after = [rule.recv(end, s, decoded[i], received[i], context(i, n)) for i, (end, s, _) in enumerate(moves)]
        xs, states = [y for y, _ in after], [s for _, s in after]
        assert all(torch.equal(xs[0], y) for y in xs)
        d = sum(vector(one) for one in decoded.values()) / n
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


def adaptive_rounds(drifts, *, n=1, rank=3, every=1):
    """n workers with drifts [round][worker] through the real exchange; ranks, local steps and bytes of each round."""
    numel = LAYOUT.numel
    m = Method(
        dilocox(rank=rank, form="blocking", adapt_every=every), make_topology("complete", n), exact(), Schedule(), PLAIN
    )
    network, xs = MemoryNetwork(n), [torch.zeros(numel, dtype=torch.float64) for _ in range(n)]
    loops = [
        OuterLoop(
            m, network.transport(i), [(xs[i], LAYOUT)], local_steps=12, timetable=timetable_of(((0, 12),)), seed=0
        )
        for i in range(n)
    ]
    found = []
    for t, some in enumerate(drifts):
        (stop,) = loops[0].stops(t)
        for loop in loops:
            loop.announce(t, stop)
        ranks = {loop.in_flight[t, 0].ctx.rank for loop in loops}
        for x, drift in zip(xs, some, strict=True):
            x.sub_(drift)
        sent = [loop.post(t, stop) for loop in loops]
        finish_together(loops, loops[0].due(t, stop), serially)
        for loop in loops:
            loop.receive(t, stop)
        (rank_now,) = ranks  # all workers alike
        found.append((rank_now, loops[0].adapted(12), sum(size for _, size in sent[0][0].sends)))
    return found


def directions(*counts, seed=0):
    """A drift whose factored matrices have so many directions of equal length, in another basis for each seed."""
    x = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for (start, stop, rows), count in zip(MATRICES, counts if len(counts) > 1 else 2 * counts, strict=True):
        columns = (stop - start) // rows
        left, right = (
            torch.linalg.qr(torch.stack(random_vectors(count, side, seed=seed + side)).T).Q for side in (rows, columns)
        )
        x[start:stop] = (left @ right.T).flatten()
    return x


def test_the_rank_is_that_of_the_mean_and_the_local_steps_shrink_with_it():
    found = adaptive_rounds([[directions(k)] * 2 for k in (3, 1, 1)], n=2, rank=3)
    assert [(rank, steps) for rank, steps, _ in found] == [(3, 12), (3, 4), (1, 4)]
    assert found[2][2] == found[0][2] - 2 * (12 + 8 + 6 + 8) * 8


def test_a_smaller_rank_grows_again_where_workers_move_in_different_directions():
    one = directions(1)
    apart = [directions(1, seed=100 * k) for k in range(3)]
    found = adaptive_rounds([[one] * 3, apart, apart], n=3, rank=3)
    assert [rank for rank, *_ in found][:2] == [3, 1] and found[2][0] > 1


def test_decisions_come_every_so_many_rounds_from_the_mean_of_the_effective_ranks():
    found = adaptive_rounds([[directions(k)] for k in (3, 1, 1, 1, 1)], rank=3, every=2)
    assert [rank for rank, *_ in found] == [3, 3, 2, 2, 1]
    of_two = adaptive_rounds([[directions(3, 1)]] * 2, rank=3)
    of_rounded = [adaptive_rounds([[directions(3, seed=seed)]] * 2, rank=4) for seed in range(6)]  # of 3 ± 1e-15
    assert [[rank for rank, *_ in some] for some in (of_two, *of_rounded)] == [[3, 2]] + 6 * [[4, 3]]


def test_the_effective_rank_is_the_exponential_of_the_entropy_of_the_shares_of_squares():
    left, right = (torch.linalg.qr(torch.stack(random_vectors(3, size)).T).Q for size in (5, 8))
    assert effective_rank(left @ torch.diag(torch.tensor([2.0, 1.0, 1.0]).double()) @ right.T) == pytest.approx(
        math.exp(-(4 * math.log(4 / 6) + 2 * math.log(1 / 6)) / 6)
    )
    assert effective_rank(torch.zeros(5, 8)) == 0.0


@pytest.mark.parametrize("form", ["blocking", "restart", "eager"])
def test_while_the_rank_stays_the_bits_are_those_of_the_rule_that_never_adapts(form):
    drifts = random_vectors(5, LAYOUT.numel, dtype=torch.float32)
    plain, counts = (rounds_of(dilocox(rank=2, form=form, adapt_every=every), drifts) for every in (0, 9))
    assert all(torch.equal(one[4], other[4]) for one, other in zip(plain, counts, strict=True))
    assert plain[-1][-1].tally == () and counts[-1][-1].tally[2] >= 4


@pytest.mark.parametrize("form", ["blocking", "restart", "eager"])
def test_no_error_is_lost_where_the_rank_changes(form):
    drifts = [-directions(k, seed=seed).float() for seed, k in enumerate((1, 2, 3, 1, 1, 2, 1))]
    trail = rounds_of(dilocox(rank=3, form=form, adapt_every=1), drifts)
    lag = 0 if form == "blocking" else 1
    assert len({sent.left.numel() for _, _, sent, *_ in trail}) > 1
    for t, (_, _, _, arrived, _, new) in enumerate(trail[lag:], start=lag):
        old_end, old, *_ = trail[t - lag]
        assert torch.equal(new.unsent, old.unsent + (old.anchor - old_end) - vector(arrived))


@pytest.mark.full
def test_a_run_whose_rank_changes_resumes_from_a_checkpoint_with_the_same_bits(tmp_path):
    run = tiny(
        rule={"name": "dilocox", "rank": 6, "adapt_every": 1},
        topology__name="complete",
        codec__name="int4",
        model={"hidden_size": 16, "intermediate_size": 24, "layers": 1, "heads": 2, "kv_heads": 1},
        run__local_steps=4,
        run__steps=24,
        run__checkpoint_every=8,
    )
    whole = simulate(run, tmp_path / "whole")
    simulate(run, tmp_path / "parts", until=4)
    assert simulate(run, tmp_path / "parts", resume=True).loss == whole.loss
    lines = [line for line in read_metrics(tmp_path / "whole") if line["kind"] == "train"]
    trace = read_trace(tmp_path / "whole")
    assert (
        len(lines) == 3 * 6
        and len(set(trace.messages.bytes.tolist())) > 1
        and len(set(trace.steps.ravel().tolist())) > 1
    )
