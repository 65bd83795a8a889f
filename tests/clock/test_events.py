"""Event-driven training over virtual time, on quadratics and random walks that need no model; `test_virtual` trains models."""

import copy
import functools
import itertools
import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.asynchronous import (
    PAIRS,
    SERVERS,
    a2cid2,
    acceleration,
    ad_psgd,
    cgad,
    conditions,
    dadao,
    decoupled_diloco,
    delayed_nesterov,
    heloco,
    meeting_rates,
)
from gossamer.asynchronous.dadao import meetings_per_s
from gossamer.clock import SERVER, Absence, GossipRun, LoopOptions, PairRun, Phase, Relay, ServerRun, Transfer, Update
from gossamer.errors import ConfigError, PairingError
from gossamer.layout import Layout, Leaf, arrange
from gossamer.network.links import Network, from_options
from gossamer.record import checkpoint
from gossamer.rules import RULES, diloco, gasloc, gossip
from gossamer.testing.drifted_workers import random_vectors
from gossamer.topologies import make_topology, ring

P = 6
LAYOUT = Layout((Leaf("embed", (3,), 0, 3), Leaf("a", (2,), 3, 5), Leaf("b", (1,), 5, 6)), P)
BYTES = 8 * P  # of a model in fp64
INF = math.inf
PAIR_ROWS = {"a2cid2": a2cid2(0.3, 0.9), "ad_psgd": ad_psgd(), "dadao": dadao(1.0, 20.0, 2.0)}


class Trained(NamedTuple):
    tokens: int


@dataclass
class Walker:
    """A worker whose local phase adds what `drift(phase, x)` says."""

    x: torch.Tensor
    drift: Any = None
    local_steps: int = 1
    tokens: int = 100
    layout: Layout = LAYOUT

    def local_phase(self, round):
        if self.drift is not None:
            self.x += self.drift(round, self.x)
        return Trained(self.tokens)


def at_random(worker):
    """Drifts that depend on worker and phase alone."""
    return lambda phase, x: random_vectors(1, x.numel(), seed=1000 * worker + phase, dtype=x.dtype)[0]


def walkers(n, start=None, drift=at_random, **options):
    x = random_vectors(1, P)[0] if start is None else start
    return [Walker(x.clone(), drift(i) if drift else None, **options) for i in range(n)]


def network(step_s=1.0, *, latency_s=0.0, bps=INF):
    return Network(step_s=step_s, latency_s=latency_s, uplink_bps=bps, downlink_bps=bps)


def spans(fragments):
    """The fragments of LAYOUT, whose tensors lie in the order that packing gives them."""
    packed, slices = arrange(LAYOUT, fragments, "packed")
    assert packed == LAYOUT
    return slices


def of(kind, records):
    return [record for record in records if isinstance(record, kind)]


def plain(records):
    """Records without the objects in them that only equal themselves."""
    return [tuple(record) for record in records]


UNEVEN = network((1.0, 1.3, 2.9, 0.4), latency_s=0.05, bps=(1e4, 500.0, 1e4, 1e3))
RATES = meeting_rates(ring(4).mixing(0), 2.0)
RUNS = {
    **{
        name: lambda ws, f=factory, **o: ServerRun(f(), ws, UNEVEN, options=LoopOptions(**o))
        for name, factory in SERVERS.items()
    },
    "decoupled_diloco-overlap": lambda ws, **o: ServerRun(
        decoupled_diloco(quorum=2, grace_s=0.1), ws, UNEVEN, spans=spans(3), overlap=True, options=LoopOptions(**o)
    ),
    "cgad-fragments": lambda ws, **o: ServerRun(cgad(), ws, UNEVEN, spans=spans(2), options=LoopOptions(**o)),
    **{
        name: lambda ws, r=rule, **o: PairRun(r, ws, UNEVEN, RATES, LoopOptions(seed=3, **o))
        for name, rule in PAIR_ROWS.items()
    },
    "gasloc": lambda ws, **o: GossipRun(gasloc(momentum=0.3), make_topology("random", 4), ws, UNEVEN, LoopOptions(**o)),
}
every_run = pytest.mark.parametrize("make", RUNS.values(), ids=RUNS.keys())


@functools.cache
def calm(make):
    """What happened in 30 seconds in which nobody was away, and the models then."""
    run = make(walkers(4))
    return list(run.run(30.0)), models(run)


SITES = from_options(
    {
        "step_s": [1.0, 1.3, 2.9, 0.4],
        "latency_s": 0.05,
        "uplink_bps": 1e4,
        "downlink_bps": 1e4,
        "sites": {"a": {"workers": [0, 1]}, "b": {"workers": [2, 3]}},
        "routes": [{"between": ["a", "b"], "latency_s": 0.3}],
    }
)
SAVED = RUNS | {"halos-sites": lambda ws, **o: ServerRun(SERVERS["halos"](), ws, SITES, options=LoopOptions(**o))}


def models(run):
    return [run.model()] if isinstance(run, ServerRun) else run.models()


# Every loop


def test_every_method_is_run_here():
    assert {*SERVERS, *PAIRS} <= set(RUNS)


@every_run
def test_a_run_is_deterministic(make):
    again, (records, ends) = make(walkers(4)), calm(make)
    assert plain(again.run(30.0)) == plain(records)
    assert all(torch.equal(a, b) for a, b in zip(models(again), ends, strict=True))


@every_run
def test_a_run_may_be_stopped_anywhere_and_called_again(make):
    parts, (whole, ends) = make(walkers(4)), calm(make)
    records = plain(parts.run(7.3))
    records += plain(itertools.islice(parts.run(30.0), 5))
    assert records == plain(whole)[: len(records)]
    for _ in parts.run(30.0):
        pass
    assert parts.time_s == 30.0
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(models(parts), ends, strict=True))


@functools.cache
def spent(make, away):
    """The options of a run of 40 steps, what happened in it, and its models."""
    options = {"budget": 40, "absences": [Absence(3.2, 1, "leave"), Absence(6.7, 1, "return")] if away else []}
    run = make(walkers(4), **options)
    return options, plain(run.run()), models(run)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", SAVED.values(), ids=SAVED.keys())
@settings(max_examples=5, deadline=None)
@given(cut=st.integers(0, 150), away=st.booleans())
def test_a_run_that_is_saved_after_any_event_and_loaded_equals_the_uninterrupted_one(make, cut, away):
    options, expected, ends = spent(make, away)
    (first, again), records = (make(walkers(4), **options) for _ in range(2)), []
    for _ in range(cut):
        records += first.step() or []
    with tempfile.TemporaryDirectory() as folder:
        state = {"loop": first.state(), "learners": [learner.x for learner in first.learners]}
        checkpoint.save(Path(folder), 1, 0, state, digest="d")
        saved = checkpoint.load(Path(folder), 1, 0, "d")
    again.restore(saved["loop"])
    for learner, x in zip(again.learners, saved["learners"], strict=True):
        learner.x.copy_(x)
    assert plain(records) + plain(again.run()) == expected
    assert all(torch.equal(a, b) for a, b in zip(models(again), ends, strict=True))


SPOILT = {
    "another time": lambda state: state["agenda"].update(time_s=math.nan),
    "a time before the run": lambda state: state["agenda"].update(time_s=-1.0),
    "another event": lambda state: state["agenda"]["planned"][0].update(name="Popen"),
    "an event of the past": lambda state: state["agenda"]["planned"][0].update(time_s=0.0),
    "an event of later numbers": lambda state: state["agenda"]["planned"][0].update(serial=state["agenda"]["serial"]),
    "another worker": lambda state: state["agenda"]["planned"][0]["event"].update(worker=4),
    "two of one number": lambda state: state["agenda"]["planned"].append(state["agenda"]["planned"][0]),
    "fewer workers": lambda state: state["phases"]["present"].pop(),
    "another type": lambda state: state["phases"].update(begun="many"),
    "a number without end": lambda state: state["phases"].update(begun=[math.inf] * 4),
    "one key less": lambda state: state.pop("phases"),
}


@functools.cache
def begun(make):
    """The state after 20 events, with an end of a phase first."""
    run = make(walkers(4))
    for _ in range(20):
        run.step()
    state = run.state()
    state["agenda"]["planned"].sort(key=lambda one: one["name"] != "PhaseEnd")
    return state


@every_run
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_state_that_does_not_fit_is_refused(make, spoil):
    state = copy.deepcopy(begun(make))
    spoil(state)
    with pytest.raises(ValueError, match=r"."):
        make(walkers(4)).restore(state)


@every_run
def test_records_come_in_the_order_of_time_and_cost_what_the_network_says(make):
    records, _ = calm(make)
    ends = [record.end_s if isinstance(record, Phase | Transfer | Relay) else record.time_s for record in records]
    assert ends == sorted(ends) and ends[-1] <= 30.0
    assert of(Transfer, records)
    up = UNEVEN.uplink_bps
    for sent in of(Transfer, records):
        bps = min(up[end] for end in (sent.source, sent.target) if end != SERVER)
        assert sent.end_s - sent.start_s == pytest.approx(0.05 + 8 * sent.bytes / bps)
    for phase in of(Phase, records):
        assert phase.end_s - phase.start_s == pytest.approx(UNEVEN.step_s[phase.worker])


@every_run
def test_the_phases_of_a_worker_are_numbered_and_do_not_overlap(make):
    phases = of(Phase, calm(make)[0])
    for worker in range(4):
        mine = [phase for phase in phases if phase.worker == worker]
        assert [phase.number for phase in mine] == list(range(len(mine)))
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))


@every_run
def test_faster_workers_do_more_phases(make):
    count = Counter(phase.worker for phase in of(Phase, calm(make)[0]))
    assert min(count[0], count[1], count[3]) > count[2] > 0


@every_run
def test_a_worker_that_left_is_silent_until_it_returns_but_what_it_had_pushed_arrives(make):
    sent = next(t for t in of(Transfer, calm(make)[0]) if t.source == 1 and t.start_s > 5.0)
    left_s = (sent.start_s + sent.end_s) / 2
    absences = [Absence(left_s, 1, "leave"), Absence(12.7, 1, "return")]
    records = list(make(walkers(4), absences=absences).run(30.0))
    phases = [phase for phase in of(Phase, records) if phase.worker == 1]
    assert not [phase for phase in phases if phase.end_s > left_s and phase.start_s < 12.7]
    assert [phase for phase in phases if phase.end_s <= left_s] and [phase for phase in phases if phase.start_s >= 12.7]
    assert [phase.number for phase in phases] == list(range(len(phases)))
    assert of(Absence, records) == absences
    received = [t for t in of(Transfer, records) if 1 in (t.source, t.target) and left_s < t.end_s < 12.7]
    assert {t.kind for t in received} == ({"push"} if sent.kind == "push" else set())


@every_run
def test_the_others_continue_when_one_leaves_permanently(make):
    run = make(walkers(4), absences=[Absence(3.1, 3, "leave")])
    count = Counter(phase.worker for phase in of(Phase, run.run(40.0)) if phase.start_s > 30.0)
    assert set(count) == {0, 1, 2}


@every_run
def test_a_run_without_workers_stands_still(make):
    run = make(walkers(4), absences=[Absence(4.0, i, "leave") for i in range(4)])
    for _ in run.run(10.0):
        pass
    assert list(run.run()) == []  # and ends, although it may continue forever


def test_meetings_begin_again_when_somebody_returns():
    absences = [Absence(1.0, i, "leave") for i in (0, 1)] + [Absence(5.0, i, "return") for i in (0, 1)]
    run = PairRun(ad_psgd(), walkers(2), network(), {(0, 1): 5.0}, LoopOptions(absences=absences))
    times = [t.end_s for t in of(Transfer, run.run(10.0))]
    assert not [t for t in times if 1.0 <= t < 5.0]
    assert len([t for t in times if t >= 5.0]) > 20


@every_run
@pytest.mark.parametrize(
    "absences",
    [
        [Absence(1.0, 4, "leave")],
        [Absence(-1.0, 0, "leave")],
        [Absence(1.0, 0, "return")],
        [Absence(1.0, 0, "leave"), Absence(2.0, 0, "leave")],
    ],
)
def test_absences_that_cannot_be_are_refused(make, absences):
    with pytest.raises(ConfigError, match=r"give a worker from 0 to 3|alternate leave and return"):
        make(walkers(4), absences=absences)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [name for name in RUNS if name != "dadao"]
)  # takes gradients, not local phases: see below
def test_training_on_a_shared_quadratic_gets_closer_to_its_minimum(name):
    start, target = random_vectors(2, P, seed=5)
    run = RUNS[name](walkers(4, start, lambda worker: lambda phase, x: 0.05 * (target - x)))
    for _ in run.run(300.0 if "cgad" in name else 120.0):  # whose steps have a length of their own
        pass
    assert all(float((m - target).norm()) < 0.7 * float((start - target).norm()) for m in models(run))


@pytest.mark.parametrize("step_s", [None, (1.0, 1.0), 0.0])
def test_a_network_without_the_speed_of_each_worker_is_refused(step_s):
    with pytest.raises(ConfigError, match="step_s"):
        ServerRun(cgad(), walkers(4), network(step_s))


# Servers


def sequence(x, n):
    """Drifts of one worker, as its phases return them."""
    return [at_random(0)(phase, x) for phase in range(n)]


@pytest.mark.parametrize(
    ("rule", "optimizer", "options"),
    [
        (delayed_nesterov(delay=1), torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (delayed_nesterov(lr=1.0, momentum=0.0, delay=1), torch.optim.SGD, {"lr": 1.0}),
        (decoupled_diloco(), torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (decoupled_diloco(quorum=3, grace_s=9.0), torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (cgad(), torch.optim.Adam, {"lr": 1e-3, "betas": (0.9, 0.99)}),
    ],
)
def test_one_worker_around_a_server_is_the_outer_optimizer_around_the_inner_one(rule, optimizer, options):
    start = random_vectors(1, P)[0]
    run = ServerRun(rule, walkers(1, start), network(latency_s=0.3))
    updates = of(Update, itertools.takewhile(lambda r: not isinstance(r, Phase) or r.number < 8, run.run()))
    assert [update.ages for update in updates] == [(0,)] * 8
    x = torch.nn.Parameter(start.clone())
    outer = optimizer([x], **options)
    for drift in sequence(start, 8):
        x.grad = -drift
        outer.step()
    assert torch.allclose(run.model(), x.detach(), rtol=1e-12)


def test_one_worker_around_heloco_is_mla_where_nothing_is_corrected():
    start = random_vectors(1, P)[0]
    run = ServerRun(heloco(c_ok=-1.0), walkers(1, start), network())
    for _ in run.run(5.0):
        pass
    x, m = start, torch.zeros_like(start)
    for drift in sequence(start, 5):
        m = 0.9 * m - 0.1 * drift
        x = x - 0.7 * (-drift + 0.9 * m)
    assert torch.allclose(run.model(), x, rtol=1e-12)


def test_decoupled_diloco_at_full_quorum_with_equal_clocks_is_diloco_to_the_last_bit():
    start = random_vectors(1, P, dtype=torch.float32)[0]
    rule = decoupled_diloco(lr=0.7, momentum=0.9, quorum=4, merging="average")
    run = ServerRun(rule, walkers(4, start), network(latency_s=0.25))
    assert len(of(Update, run.run(6 * 1.5))) == 6
    drift = lambda worker, round, x: at_random(worker)(round, x)  # noqa: E731
    xs, _ = play(diloco(lr=0.7, momentum=0.9), make_topology("complete", 4), [start] * 4, 6, drift)
    assert torch.equal(run.model(), xs[0])
    assert all(torch.equal(learner.x, xs[0]) for learner in run.learners)


def test_the_age_of_a_message_counts_the_updates_since_its_worker_was_greeted():
    run = ServerRun(cgad(), walkers(2), network((1.0, 3.4)))
    ages = [(*u.workers, *u.ages) for u in of(Update, run.run(8.0))]
    fast, overtaken, slow = (0, 0), (0, 1), (1, 3)
    assert ages == [fast, fast, fast, slow, overtaken, fast, fast, slow, overtaken, fast]


def test_each_fragment_has_a_separate_age():
    run = ServerRun(cgad(), walkers(2), network((1.0, 3.4)), spans=spans(3))
    updates = of(Update, run.run(12.0))
    assert [u.fragment for u in updates if u.workers == (0,)] == [k % 3 for k in range(12)]
    assert [(u.fragment, u.ages) for u in updates if u.workers == (1,)] == [(0, (1,)), (1, (2,)), (2, (3,))]


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_equal_workers_with_fragments_move_every_fragment_by_what_they_learned(fragments):
    start = random_vectors(1, P)[0]
    rule = decoupled_diloco(lr=1.0, momentum=0.0, quorum=3, merging="average")
    drift = lambda worker: lambda phase, x: torch.full_like(x, worker + 1.0)  # noqa: E731
    run = ServerRun(rule, walkers(3, start, drift), network(), spans=spans(fragments))
    for _ in run.run(2.0 * fragments):
        pass
    # In 2F phases fragment p has been taken in after 1 + p and after 1 + p + F of them; a phase moves the mean by 2.
    for p, (a, b) in enumerate(run.spans):
        assert torch.allclose(run.model()[a:b], start[a:b] + 2.0 * (1 + p + fragments))


def test_a_quorum_lets_the_fast_continue_and_merges_the_slow_into_a_later_round():
    run = ServerRun(decoupled_diloco(quorum=2), walkers(3), network((1.0, 1.0, 2.5)))
    updates = of(Update, run.run(4.0))
    assert [u.workers for u in updates] == [(0, 1), (0, 1), (0, 1, 2), (0, 1)]
    assert [u.ages for u in updates] == [(0, 0), (0, 0), (0, 0, 2), (0, 0)]


def test_a_grace_period_waits_for_one_that_is_a_little_late():
    def rounds(grace_s):
        rule = decoupled_diloco(quorum=2, grace_s=grace_s)
        return [u.workers for u in of(Update, ServerRun(rule, walkers(3), network((1.0, 1.0, 1.2))).run(1.5))]

    assert rounds(0.1) == [(0, 1)]
    assert rounds(0.2) == [(0, 1, 2)]
    assert rounds(0.3) == [(0, 1, 2)]


def test_an_adaptive_grace_includes_the_late_and_costs_no_worker_a_step():
    def played(grace_s, overlap=True):
        rule, link = decoupled_diloco(quorum=2, grace_s=grace_s), network((1.0, 1.0, 1.2), latency_s=0.2)
        records = list(ServerRun(rule, walkers(3), link, spans=spans(2), overlap=overlap).run(12.0))
        return of(Update, records), Counter(phase.worker for phase in of(Phase, records))

    (first, *_), trained = played("adaptive")
    assert first.workers == (0, 1, 2) and trained == {0: 12, 1: 12, 2: 10}
    assert first.time_s == pytest.approx(
        1.2 + 0.9 * (1.0 - 0.4)
    )  # the quorum arrived at 1.2, and 0.4 s go by on the way
    (first, *_), trained = played(0.0)
    assert first.workers == (0, 1) and trained == {0: 12, 1: 12, 2: 10}
    assert [plain(records) for records in played("adaptive", False)[:1]] == [plain(played(0.0, False)[0])]  # all wait


def test_learners_weigh_what_they_trained_on_since_they_were_greeted():
    rule = decoupled_diloco(lr=1.0, momentum=0.0, quorum=2, merging="average")
    learners = walkers(2, torch.zeros(P), lambda worker: lambda phase, x: torch.full_like(x, float(worker)))
    learners[1].tokens = 300
    run = ServerRun(rule, learners, network())
    for _ in run.run(1.0):
        pass
    assert torch.allclose(run.model(), torch.full((P,), 9 / 10))  # weights 100 · 100 and 300 · 300


def test_a_quorum_shrinks_to_the_workers_that_are_present():
    rule = decoupled_diloco(quorum=3)
    run = ServerRun(
        rule, walkers(3), network((1.0, 1.0, 5.0)), options=LoopOptions(absences=[Absence(2.0, 2, "leave")])
    )
    updates = of(Update, run.run(4.0))
    assert [(u.time_s, u.workers) for u in updates] == [(2.0, (0, 1)), (3.0, (0, 1)), (4.0, (0, 1))]


def test_a_window_that_can_no_longer_be_filled_closes():
    # After its absence worker 1 pushes another fragment than worker 0, so neither quorum of two could ever be there.
    rule = decoupled_diloco(quorum=2)
    absences = [Absence(1.5, 1, "leave"), Absence(2.7, 1, "return")]
    run = ServerRun(rule, walkers(2), network(), spans=spans(2), options=LoopOptions(absences=absences))
    updates = of(Update, run.run(30.0))
    assert updates[-1].time_s > 28.0
    assert {u.fragment for u in updates} == {0, 1}


def test_with_overlap_no_worker_waits_for_a_reply_that_arrives_within_a_phase():
    run = ServerRun(decoupled_diloco(), walkers(3), network(latency_s=0.2), spans=spans(3), overlap=True)
    phases = of(Phase, run.run(12.0))
    assert Counter(phase.worker for phase in phases) == {0: 12, 1: 12, 2: 12}


def test_with_overlap_a_reply_overwrites_its_fragment_alone_at_the_end_of_a_phase():
    rule = decoupled_diloco(lr=1.0, momentum=0.0, quorum=2, merging="average")
    drift = lambda worker: lambda phase, x: torch.full_like(x, worker + 1.0)  # noqa: E731
    run = ServerRun(rule, walkers(2, torch.zeros(P), drift), network(latency_s=0.2), spans=spans(2), overlap=True)
    for _ in run.run(2.0):
        pass
    first, second = run.spans
    for worker, learner in enumerate(run.learners):
        a, b = first
        assert torch.equal(learner.x[a:b], torch.full((b - a,), 1.5))  # the mean of the first phase; the second is lost
        a, b = second
        assert torch.equal(learner.x[a:b], torch.full((b - a,), 2.0 * (worker + 1)))


def test_with_overlap_a_worker_waits_before_it_would_push_a_fragment_again_unanswered():
    run = ServerRun(decoupled_diloco(), walkers(1), network(latency_s=3.0), spans=spans(2), overlap=True)
    records = list(run.run(12.0))
    # Fragment 0 is pushed at 1 and answered at 7; meanwhile the worker takes two more phases, and then it stands.
    assert [(p.start_s, p.end_s) for p in of(Phase, records)][:4] == [(0, 1), (1, 2), (2, 3), (7, 8)]
    pushes = [(t.start_s, t.fragment) for t in of(Transfer, records) if t.kind == "push"]
    assert pushes == [(1.0, 0), (2.0, 1), (9.0, 0)]


def test_overlap_with_a_single_fragment_is_refused():
    with pytest.raises(ConfigError, match=r"events\.overlap is True with events\.fragments = 1"):
        ServerRun(decoupled_diloco(), walkers(2), network(), overlap=True)


def test_a_worker_that_returns_starts_from_what_the_server_has_then():
    run = ServerRun(
        delayed_nesterov(),
        walkers(2),
        network((1.0, 0.7)),
        spans=spans(2),
        options=LoopOptions(absences=[Absence(0.5, 0, "leave"), Absence(10.0, 0, "return")]),
    )
    for _ in run.run(10.0):
        pass
    assert torch.equal(run.learners[0].x, run.model())
    ages = [u.ages for u in of(Update, run.run(11.0)) if u.workers == (0,)]
    assert ages == [(1,)]


# Pairs


@pytest.mark.parametrize("rule", [ad_psgd(), a2cid2(0.4)], ids=["ad_psgd", "a2cid2"])
def test_one_worker_without_anyone_to_meet_is_the_inner_optimizer(rule):
    start = random_vectors(1, P)[0]
    run = PairRun(rule, walkers(1, start), network(), {})
    assert len(of(Phase, run.run(9.0))) == 9
    assert torch.allclose(run.models()[0], start + sum(sequence(start, 9)), rtol=1e-12)


def still(starts):
    """Workers that stand still, each where it is."""
    return [Walker(x.clone()) for x in starts]


@pytest.mark.parametrize("latency_s", [0.0, 0.7])
def test_the_mean_follows_the_mean_drift_for_every_order_of_meetings(latency_s):
    starts = random_vectors(6, P)
    rates = meeting_rates(ring(6).mixing(0), 1.5)
    learners = [Walker(x.clone(), at_random(i)) for i, x in enumerate(starts)]
    for rule in (ad_psgd(), a2cid2(*acceleration(*conditions(6, rates)))):
        run = PairRun(rule, learners, network((1.0, 0.3, 2.2, 1.0, 0.9, 1.7), latency_s=latency_s), rates)
        before = torch.stack(run.models()).mean(0)
        moved = torch.zeros(P, dtype=torch.float64)
        for record in run.run(20.0):
            if isinstance(record, Phase):
                moved += at_random(record.worker)(record.number, before) / 6
        assert torch.allclose(torch.stack(run.models()).mean(0), before + moved, rtol=1e-10)


def test_a2cid2_keeps_the_mean_of_both_copies_at_one_time():
    rates = meeting_rates(ring(8).mixing(0), 1.0)
    run = PairRun(a2cid2(*acceleration(*conditions(8, rates))), still(random_vectors(8, P)), network(1e6), rates)
    before = torch.stack(run.models()).mean(0)
    assert of(Transfer, run.run(25.0))
    assert torch.allclose(torch.stack(run.models()).mean(0), before, atol=1e-12)
    assert torch.allclose(torch.stack([s.copy for s in run.states()]).mean(0), before, atol=1e-12)


def log_slope(rule, rates, n, start_s, end_s):
    """How fast the logarithm of the disagreement changes per second between two times."""
    run = PairRun(rule, still(random_vectors(n, P)), network(1e9), rates)
    logs = []
    for until_s in (start_s, end_s):
        for _ in run.run(until_s):
            pass
        x = torch.stack(run.models())
        logs.append(math.log(float((x - x.mean(0)).norm())))
    return (logs[1] - logs[0]) / (end_s - start_s)


def test_a2cid2_contracts_a_ring_of_32_at_least_three_times_faster_than_plain_meetings():
    rates = meeting_rates(ring(32).mixing(0), 1.0)
    plain_slope = log_slope(ad_psgd(), rates, 32, 100.0, 200.0)
    fast_slope = log_slope(a2cid2(*acceleration(*conditions(32, rates))), rates, 32, 100.0, 200.0)
    assert plain_slope == pytest.approx(-0.0097, abs=0.002)
    assert fast_slope < 3 * plain_slope


def test_pairs_meet_as_often_as_their_rates_say():
    rates = {(0, 1): 3.0, (1, 2): 1.0}
    run = PairRun(ad_psgd(), still(random_vectors(3, P)), network(1e6), rates)
    met = Counter((t.source, t.target) for t in of(Transfer, run.run(500.0)))
    assert set(met) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert met[0, 1] == met[1, 0] == pytest.approx(1500, rel=0.1)
    assert met[1, 2] == met[2, 1] == pytest.approx(500, rel=0.2)


def test_a_worker_is_in_one_meeting_at_a_time():
    rates = {(0, 1): 5.0, (1, 2): 5.0, (0, 2): 5.0}
    transfers = of(Transfer, PairRun(ad_psgd(), walkers(3), network(latency_s=0.3), rates).run(20.0))
    for worker in range(3):
        mine = [t for t in transfers if t.source == worker]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))


def test_a_meeting_that_one_end_leaves_changes_neither_and_frees_the_other():
    starts = random_vectors(3, P)
    rates = {(0, 1): 50.0}
    run = PairRun(
        ad_psgd(), still(starts), network(1e6, latency_s=2.0), rates, LoopOptions(absences=[Absence(1.0, 0, "leave")])
    )
    assert not of(Transfer, run.run(10.0))
    assert all(torch.equal(a, b) for a, b in zip(run.models(), starts, strict=True))
    again = PairRun(
        ad_psgd(),
        still(starts),
        network(1e6, latency_s=2.0),
        {**rates, (1, 2): 50.0},
        LoopOptions(absences=[Absence(1.0, 0, "leave")]),
    )
    assert {t.source for t in of(Transfer, again.run(10.0))} == {1, 2}


def test_a_local_phase_starts_from_the_parameters_of_its_beginning():
    seen = []
    look = lambda phase, x: seen.append(x.clone()) or torch.zeros_like(x)  # noqa: E731
    starts = random_vectors(2, P)
    run = PairRun(ad_psgd(), [Walker(x.clone(), look) for x in starts], network(), {(0, 1): 20.0})
    for _ in run.run(1.0):
        pass
    assert all(torch.equal(a, b) for a, b in zip(seen, starts, strict=True))
    assert torch.allclose(run.models()[0], run.models()[1])


@pytest.mark.parametrize("rates", [{(1, 0): 1.0}, {(0, 4): 1.0}, {(0, 1): 0.0}, {(0, 1): INF}])
def test_meetings_that_cannot_be_are_refused(rates):
    with pytest.raises(ConfigError, match="times a second"):
        PairRun(ad_psgd(), walkers(4), network(), rates)


def test_dadao_converges_linearly_to_the_optimum_of_quadratics_on_a_ring():
    n, mu, big_l = 4, 1.0, 4.0
    curvature = torch.linspace(mu, big_l, n, dtype=torch.float64)[:, None]
    targets = 3 * torch.stack(random_vectors(n, P))
    best = (curvature * targets).sum(0) / curvature.sum(0)
    once = dict.fromkeys(meeting_rates(ring(n).mixing(0), 1.0), 1 / n)
    meetings = meetings_per_s(*conditions(n, once))
    rates = dict.fromkeys(once, meetings / n)
    gradient = lambda i: lambda phase, x: -curvature[i] * (x - targets[i])  # noqa: E731
    learners = walkers(n, torch.zeros(P, dtype=torch.float64), gradient)
    run = PairRun(dadao(mu, big_l, conditions(n, rates)[0]), learners, network(), rates)
    errors = []
    for until_s in (0.0, 80.0, 160.0):
        for _ in run.run(until_s):
            pass
        errors.append(max(float((x - best).norm()) for x in run.models()))
    assert all(b < 0.1 * a for a, b in itertools.pairwise(errors))


# Gossip without waiting


@pytest.mark.parametrize("name", ["gasloc", "gossip", "noloco"])
@pytest.mark.parametrize("topology", ["random", "ring"])
def test_gossip_without_waiting_is_the_synchronous_rule_to_the_last_bit_if_clocks_are_equal(name, topology):
    starts = random_vectors(5, P, dtype=torch.float32)
    learners = [Walker(x.clone(), at_random(i)) for i, x in enumerate(starts)]
    run = GossipRun(RULES[name](), make_topology(topology, 5), learners, network())
    assert len(of(Phase, run.run(7.0))) == 35
    drift = lambda worker, round, x: at_random(worker)(round, x)  # noqa: E731
    xs, _ = play(RULES[name](), make_topology(topology, 5), starts, 7, drift)
    assert all(torch.equal(a, b) for a, b in zip(run.models(), xs, strict=True))


def test_gossip_without_waiting_alone_is_the_outer_momentum():
    start = random_vectors(1, P)[0]
    run = GossipRun(gasloc(lr=0.7, momentum=0.7), make_topology("random", 1), walkers(1, start), network())
    assert len(of(Phase, run.run(6.0))) == 6
    x = torch.nn.Parameter(start.clone())
    outer = torch.optim.SGD([x], lr=0.7, momentum=0.7, nesterov=True)
    for drift in sequence(start, 6):
        x.grad = -drift
        outer.step()
    assert torch.allclose(run.models()[0], x.detach(), rtol=1e-12)


SLOW_LINKS = network((1.0, 0.2, 2.3, 0.7), latency_s=(0.0, 0.4, 1.1, 0.0))


@pytest.mark.parametrize("rule", [gasloc(), gasloc(form="published"), gossip()])
def test_consensus_is_a_fixed_point_of_gossip_without_waiting_to_the_last_bit(rule):
    x = random_vectors(1, P, dtype=torch.float32)[0]
    run = GossipRun(rule, make_topology("random", 4), still([x] * 4), SLOW_LINKS)
    assert len(of(Phase, run.run(20.0))) > 100
    assert all(torch.equal(y, x) for y in run.models())


@given(st.lists(st.floats(0.2, 3.0), min_size=4, max_size=4), st.floats(0.0, 2.0))
@settings(max_examples=3, deadline=None)
def test_still_workers_agree_within_the_hull_of_where_they_began(step_s, latency_s):
    starts = random_vectors(4, P)
    rule, links = gasloc(momentum=0.0, lr=1.0), network(tuple(step_s), latency_s=latency_s)
    run = GossipRun(rule, make_topology("random", 4), still(starts), links)
    for _ in run.run(80.0):
        pass
    low, high = torch.stack(starts).amin(0), torch.stack(starts).amax(0)
    assert all(bool((x >= low - 1e-9).all() and (x <= high + 1e-9).all()) for x in run.models())
    assert float((torch.stack(run.models()) - run.models()[0]).abs().max()) < 1e-2


def test_gossip_without_waiting_keeps_the_mean_only_if_clocks_are_equal():
    starts = random_vectors(4, P)

    def shift(step_s):
        run = GossipRun(gossip(), make_topology("random", 4), still(starts), network(step_s))
        for _ in run.run(40.0):
            pass
        return float((torch.stack(run.models()) - torch.stack(starts)).mean(0).norm())

    assert shift(1.0) < 1e-12
    assert shift((0.2, 1.0, 1.0, 5.0)) > 0.05


def test_a_slow_worker_weighs_more_in_asynchronous_runs():
    starts = [torch.zeros(P), torch.ones(P)]
    run = GossipRun(gossip(), make_topology("complete", 2), still(starts), network((1.0, 10.5)))
    for _ in run.run(30.0):
        pass
    assert all(float(x.mean()) > 0.9 for x in run.models())


def test_messages_that_are_late_lower_the_momentum_that_is_stable():
    def growth(momentum, latency_s):
        rule, links = gasloc(lr=1.0, momentum=momentum), network(latency_s=latency_s)
        run = GossipRun(rule, make_topology("random", 8), still(random_vectors(8, P)), links)
        for _ in run.run(120.0):
            pass
        return float(torch.stack(run.models()).std(0).norm())

    assert growth(0.8, 0.0) < 1e-3
    assert growth(0.8, 0.5) > 3.0
    assert growth(0.3, 0.5) < 1e-3


def test_a_slow_link_makes_messages_old_and_delays_no_worker():
    seen = GossipRun(gossip(), make_topology("complete", 2), walkers(2), network((1.0, 1.0), latency_s=2.5))
    records = list(seen.run(10.0))
    assert Counter(phase.worker for phase in of(Phase, records)) == {0: 10, 1: 10}
    assert [t.end_s for t in of(Transfer, records) if t.target == 0] == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]


def test_an_absent_worker_sends_nothing():
    records = list(
        GossipRun(
            gossip(),
            make_topology("complete", 3),
            walkers(3),
            network(),
            LoopOptions(absences=[Absence(2.5, 1, "leave")]),
        ).run(6.0)
    )
    assert {t.source for t in of(Transfer, records) if t.end_s > 2.5} == {0, 2}


@pytest.mark.parametrize("name", ["diloco", "data_parallel"])
def test_rules_that_need_messages_of_one_round_are_refused(name):
    with pytest.raises(PairingError, match=f"'{name}' cannot run without waiting"):
        GossipRun(RULES[name](), make_topology("complete", 4), walkers(4), network())


def test_a_rule_that_is_not_settled_for_its_topology_is_refused():
    with pytest.raises(PairingError, match="auto"):
        GossipRun(gasloc(alpha="auto"), make_topology("ring", 4), walkers(4), network())


def test_a_topology_of_other_workers_is_refused():
    with pytest.raises(ConfigError, match="is for 5 workers, but the run has 4"):
        GossipRun(gossip(), make_topology("ring", 5), walkers(4), network())
