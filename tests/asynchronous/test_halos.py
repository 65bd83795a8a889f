"""HALoS: a server in each region below a global one, and the methods that it is with some of its options."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_events import LAYOUT, P, Walker, at_random, network, of, plain, spans, walkers
from test_server_rules import absorbed, close
from test_virtual import lines, timed

from gossamer.asynchronous import delayed_nesterov, halos
from gossamer.clock import Absence, LoopOptions, Phase, Relay, ServerRun, Transfer, Update
from gossamer.clock.durations import Durations
from gossamer.clock.fragment import RegionReport
from gossamer.clock.server_core import Send, ServerCore
from gossamer.errors import ConfigError, PairingError
from gossamer.network.links import Network, from_options, read_network, tcp_bps
from gossamer.record.logs.events import read_events
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import points
from gossamer.run.config.resolve import resolve
from gossamer.run.planning.check import examine_run
from gossamer.run.simulated.simulate import simulate
from gossamer.testing.drifted_workers import random_vectors

CONFIGS = Path(__file__).parents[2] / "src" / "gossamer" / "configs"
PLAIN = {"momentum": 0.0, "delay": 1, "local_momentum": 0.0, "local_delay": 1}


def regions(*sizes, step_s=1.0, latency_s=0.0, bps=math.inf):
    """A network of regions with so many workers each, with equal routes between them."""
    ends = list(itertools.accumulate(sizes, initial=0))
    sites = {f"r{k}": {"workers": list(range(a, b))} for k, (a, b) in enumerate(itertools.pairwise(ends))}
    routes = [
        {"between": list(pair), "latency_s": latency_s, "bandwidth_bps": bps}
        for pair in itertools.combinations(sites, 2)
    ]
    return from_options({"uplink_bps": 1e9, "downlink_bps": 1e9, "step_s": step_s, "sites": sites, "routes": routes})


def halves(worker):
    """Drifts that are multiples of 1/4, so that sums of them are exact."""
    return lambda phase, x: torch.round(4 * at_random(worker)(phase, x)) / 4


def locals_of(run, count):
    """The states of the servers of the regions; those of the global one follow them."""
    return run.states()[:count]


# What the equations say


def authors_steps(lr, momentum, period, start, gradients, c=0.0):
    """Delayed Nesterov as the authors' optimizer steps, in numpy."""
    x, acc, m, models = start.copy(), np.zeros_like(start), np.zeros_like(start), []
    for k, d in enumerate(gradients):
        acc = acc + d
        if (k + 1) % period == 0:
            m = momentum * m + acc / period
            x = x - lr * ((1 - c * period + c) * momentum * m + d / period)
            acc = np.zeros_like(start)
        else:
            x = x - lr * (c * momentum * m + d / period)
        models.append(x)
    return models


@pytest.mark.parametrize("period", [1, 3])
def test_the_server_of_a_region_and_the_global_one_step_as_their_authors_write_it(period):
    start, *messages = random_vectors(11, P)
    rule = halos(lr=0.3, momentum=0.5, delay=period, local_lr=0.2, local_momentum=0.8, local_delay=period)
    for own, lr, momentum in ((rule, 0.2, 0.8), (rule.regions.rule, 0.3, 0.5)):
        theirs = authors_steps(lr * period, momentum, period, start.numpy(), [m.numpy() for m in messages])
        assert close(absorbed(own, start, messages), map(torch.from_numpy, theirs))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), alpha=st.floats(0, 1), carry=st.booleans())
def test_a_report_and_a_merge_are_what_the_method_says(seed, alpha, carry):
    start, theta, *messages = random_vectors(8, P, seed=seed)
    rule = halos(alpha=alpha, carry=carry, local_delay=2)
    state = rule.init(start)
    for message in messages[:3]:
        state = rule.absorb(state, message, None)
    sent_from, (state, report) = state.x, rule.regions.tell(state)
    assert torch.equal(report, start - sent_from)
    for message in messages[3:]:
        state = rule.absorb(state, message, None)
    late, merged = sent_from - state.x, rule.regions.merge(state, theta)
    assert torch.equal(merged.x, (1 - alpha) * state.x + alpha * theta)  # the weight is the global model's
    _, rest = rule.regions.tell(merged)
    assert torch.allclose(rest, (1 - alpha) * late if carry else torch.zeros(P, dtype=rest.dtype), atol=1e-12)
    assert torch.equal(merged.nesterov.m, state.nesterov.m) and torch.equal(merged.nesterov.acc, state.nesterov.acc)


# What it is with some of its options


def test_one_region_that_reports_every_push_to_a_global_server_that_adds_is_async_delayed_nesterov_to_the_last_bit():
    start = torch.arange(P, dtype=torch.float64)
    link = network((1.0, 1.3, 2.9, 0.4), latency_s=0.05)
    rule = halos(lr=1.0, momentum=0.0, delay=1, local_lr=0.25, local_momentum=0.5, local_delay=4, every=1, alpha=1.0)
    run = ServerRun(rule, walkers(4, start, halves), link)
    alone = ServerRun(delayed_nesterov(lr=1.0, momentum=0.5, delay=4), walkers(4, start, halves), link)
    records, expected = list(run.run(8.0)), list(alone.run(8.0))
    assert plain(record for record in records if not isinstance(record, Relay)) == plain(expected)
    assert len(of(Relay, records)) == 2 * len(of(Update, expected)) > 30
    assert torch.equal(run.model(), alone.model())
    assert all(torch.equal(a.x, b.x) for a, b in zip(run.learners, alone.learners, strict=True))


@pytest.mark.parametrize("every", [1, 3])
def test_without_delay_at_either_level_one_worker_is_nesterov_of_torch_around_nesterov_of_torch(every):
    start = random_vectors(1, P)[0]
    rule = halos(lr=0.3, momentum=0.6, delay=1, local_lr=0.4, local_momentum=0.8, local_delay=1, every=every, alpha=1.0)
    run = ServerRun(rule, walkers(1, start), network())
    for _ in run.run(6.0):
        pass
    theta, x = (torch.nn.Parameter(start.clone()) for _ in range(2))
    outer = torch.optim.SGD([theta], lr=0.3, momentum=0.6, nesterov=True)
    inner = torch.optim.SGD([x], lr=0.4, momentum=0.8, nesterov=True)
    for phase in range(6):
        x.grad = -at_random(0)(phase, x)
        inner.step()
        if (phase + 1) % every == 0:
            theta.grad = theta.detach() - x.detach()
            outer.step()
            x.data = theta.detach().clone()
    assert torch.allclose(run.model(), theta.detach(), rtol=1e-12)


def test_regions_that_take_nothing_from_the_global_model_are_independent():
    link = regions(2, 1, 1, step_s=(1.0, 1.3, 2.9, 0.4), latency_s=0.7)
    start = random_vectors(1, P)[0]
    run = ServerRun(halos(alpha=0.0, every=2, local_delay=2), walkers(4, start), link)
    records = list(run.run(30.0))
    assert {relay.region for relay in of(Relay, records)} == {0, 1, 2}
    for region, workers in enumerate(([0, 1], [2], [3])):
        learners = [Walker(start.clone(), at_random(i)) for i in workers]
        steps = tuple(link.step_s[i] for i in workers)
        alone = ServerRun(
            delayed_nesterov(lr=0.4, momentum=0.9, delay=2),
            learners,
            Network(uplink_bps=1e9, downlink_bps=1e9, step_s=steps),
        )
        for _ in alone.run(30.0):
            pass
        assert torch.equal(locals_of(run, 3)[region].x, alone.model())
    assert not torch.equal(run.model(), start)  # it listens


def test_a_global_server_that_adds_what_its_only_region_learned_has_its_model_after_each_merge():
    rule = halos(lr=1.0, alpha=1.0, every=3, local_lr=0.2, **PLAIN)
    run = ServerRun(rule, walkers(4, random_vectors(1, P)[0]), network((1.0, 1.3, 2.9, 0.4)))
    merges = 0
    for record in run.run(30.0):
        if isinstance(record, Relay):
            (local,) = locals_of(run, 1)
            assert torch.allclose(run.model(), local.x, rtol=1e-12)  # already when the report is absorbed
            merges += record.kind == "merge"
    assert merges > 10 and float((run.model() - run.learners[0].x).norm()) < 30


def test_with_equal_clocks_and_drifts_that_do_not_depend_on_the_model_it_is_hierarchical_fedavg():
    # Nobody waits, so workers of one round start from different models; what they learn here is the same from any of them.
    start = random_vectors(1, P)[0]
    rule = halos(lr=1 / 2, local_lr=1 / 3, alpha=1.0, every=3, **PLAIN)
    run = ServerRun(rule, walkers(6, start), regions(3, 3))
    expected = start
    for round in range(5):
        for _ in run.run(round + 1.5):
            pass
        drifts = torch.stack([at_random(i)(round, start) for i in range(6)])
        expected = expected + drifts.reshape(2, 3, P).mean(1).mean(0)
        assert torch.allclose(run.model(), expected, rtol=1e-12)


def test_with_carry_all_that_a_region_learns_reaches_a_global_server_that_only_listens():
    start = random_vectors(1, P)[0]

    def left_out(carry):
        rule = halos(lr=1.0, alpha=0.0, every=2, carry=carry, local_lr=1.0, **PLAIN)
        run = ServerRun(
            rule, walkers(2, random_vectors(1, P)[0]), regions(1, 1, latency_s=5.3), options=LoopOptions(budget=80)
        )
        for _ in run.run():
            pass
        learned = sum(region.x - start for region in locals_of(run, 2))
        return float((run.model() - start - learned).norm())

    assert left_out(carry=True) < 1e-9 and left_out(carry=False) > 1.0


# Over virtual time


def test_a_region_has_one_report_in_flight_and_its_workers_never_wait_for_it():
    link = regions(2, 2, step_s=(1.0, 1.3, 0.9, 0.4), latency_s=3.3)
    records = list(ServerRun(halos(every=2), walkers(4), link).run(60.0))
    far = [relay for relay in of(Relay, records) if relay.region == 1]
    assert [relay.kind for relay in far[:6]] == ["report", "merge"] * 3 and len(far) > 12
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(far))
    pushes = [update.time_s for update in of(Update, records) if update.workers[0] >= 2]
    answered_s = 0.0
    for report, merge in zip(far[::2], far[1::2], strict=False):  # K pushes after each merge, whatever came before it
        assert len([t for t in pushes if answered_s < t <= report.start_s]) == 2
        answered_s = merge.end_s
    phases = [phase for phase in of(Phase, records) if phase.worker == 3]
    assert all(b.start_s - a.end_s < 1e-3 for a, b in itertools.pairwise(phases))


def test_a_report_and_its_answer_take_the_seconds_of_the_route_and_pushes_stay_in_their_region():
    link = regions(1, 1, 2, latency_s=0.25, bps=1e3)
    records = list(ServerRun(halos(every=1), walkers(4), link).run(12.0))
    for relay in of(Relay, records):
        expected = 0.25 + 8 * relay.bytes / 1e3 if relay.region else 0.0
        assert relay.end_s - relay.start_s == pytest.approx(expected) and relay.bytes == 8 * P
    assert all(sent.end_s - sent.start_s < 1e-6 for sent in of(Transfer, records))


def test_a_server_without_regions_is_in_the_site_of_worker_0_and_the_others_send_over_the_route():
    times = Durations(regions(2, 2, latency_s=0.25, bps=1e6), 4)
    assert times.regions == (0, 0, 1, 1)
    assert times.transfer_s(1, -1, 1000) == times.transfer_s(0, 1, 1000) == pytest.approx(8e-6)
    assert times.transfer_s(-1, 3, 1000) == times.transfer_s(1, 2, 1000) == pytest.approx(0.25 + 8e-3)
    assert times.transfer_s(3, -1, 1000, near=True) == pytest.approx(8e-6)


def test_lost_packets_bound_what_passes_between_regions_and_between_their_servers():
    options = {
        "uplink_bps": 1e9,
        "downlink_bps": 1e9,
        "step_s": 1.0,
        "latency_s": 0.01,
        "loss": [0.0, 0.001, 0.0],
        "sites": {"a": {"workers": [0, 1]}, "b": {"workers": [2]}},
        "routes": [{"between": ["a", "b"], "latency_s": 0.09, "loss": 0.01}],
    }
    times, size = Durations(from_options(options), 3), 10**6

    def bps(latency_s, *losses):
        return float(tcp_bps(np.array(2 * latency_s), np.array(1 - np.prod([1 - loss for loss in losses]))))

    assert times.transfer_s(0, -1, size) == pytest.approx(0.01 + 8e6 / 1e9)
    assert times.transfer_s(0, 1, size) == pytest.approx(0.01 + 8e6 / bps(0.01, 0.001))
    assert times.transfer_s(1, 2, size) == pytest.approx(0.1 + 8e6 / bps(0.1, 0.001, 0.01))
    assert times.transfer_s(2, -1, size, near=True) == pytest.approx(0.01 + 8e6 / 1e9)
    assert times.relay_s(1, size) == pytest.approx(0.09 + 8e6 / bps(0.09, 0.01))


def test_regions_are_numbered_by_their_smallest_worker_in_whatever_order_the_sites_are_written():
    def named(*names):
        sites = {"b": {"workers": [1, 2]}, "a": {"workers": [0]}, "c": {"workers": [3]}}
        options = {
            "uplink_bps": 1e9,
            "downlink_bps": 1e9,
            "step_s": 1.0,
            "sites": {name: sites[name] for name in names},
        }
        routes = [
            {"between": [x, y], "latency_s": float("abc".index(x) + "abc".index(y))} for x, y in ("ab", "ac", "bc")
        ]
        return Durations(from_options(options | {"routes": routes}), 4)

    for times in (named("a", "b", "c"), named("c", "b", "a")):
        assert times.regions == (0, 1, 1, 2)
        assert [times.relay_s(region, 0) for region in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("fragments", [1, 3])
def test_when_the_steps_are_spent_each_region_reports_the_rest(fragments):
    start = random_vectors(1, P)[0]
    rule = halos(lr=1.0, alpha=0.5, every=100, local_lr=1.0, **PLAIN)
    ones = lambda worker: lambda phase, x: torch.ones_like(x)  # noqa: E731
    run = ServerRun(
        rule,
        walkers(3, start, ones),
        regions(2, 1, latency_s=2.0),
        spans=spans(fragments),
        options=LoopOptions(budget=9 * fragments),
    )
    relays = of(Relay, run.run())
    assert Counter((relay.kind, relay.region, relay.fragment) for relay in relays) == Counter(
        itertools.product(("report", "merge"), (0, 1), range(fragments))
    )
    for p, (a, b) in enumerate(
        run.spans
    ):  # before its first push a fragment learns p + 1 phases, and then as many as there are
        assert torch.allclose(run.model()[a:b], start[a:b] + 3 * (p + 1 + 2 * fragments))


def test_a_worker_that_returns_starts_from_the_server_of_its_region():
    absences = [Absence(0.5, 3, "leave"), Absence(10.2, 3, "return")]
    run = ServerRun(halos(every=2), walkers(4), regions(2, 2, latency_s=0.3), options=LoopOptions(absences=absences))
    for _ in run.run(10.3):
        pass
    assert torch.equal(run.learners[3].x, locals_of(run, 2)[1].x)
    assert not torch.equal(run.learners[3].x, locals_of(run, 2)[0].x)


# The core


def test_the_core_reports_after_so_many_updates_since_the_merge_and_not_while_a_report_is_under_way():
    core = ServerCore(halos(every=2), torch.zeros(P), LAYOUT, ((0, P),), [1])
    core.join(0)

    def push():
        return [type(action) for action in core.push(0, core.counted(0, 0, torch.ones(P), 1), 1.0)]

    answered, reported = [Update, Send], [Update, Send, RegionReport]
    assert [push() for _ in range(5)] == [answered, reported, answered, answered, answered]
    core.merge(0, torch.zeros(P))
    assert [push() for _ in range(3)] == [answered, reported, answered]
    core.merge(0, torch.zeros(P))
    assert core.flush(2.0) == [] and push() == answered
    (rest,) = core.flush(3.0)
    assert isinstance(rest, RegionReport) and core.flush(3.0) == []


# Run files

WAN = {
    "step_s": [0.1, 0.25, 0.3],
    "uplink_bps": 1e9,
    "downlink_bps": 1e9,
    "sites": {"near": {"workers": [0, 1]}, "far": {"workers": [2]}},
    "routes": [{"between": ["near", "far"], "latency_s": 0.05, "bandwidth_bps": 1e7}],
}
SERVED = {"name": "halos", "every": 2, "local_delay": 2}


def test_a_run_file_with_sites_trains_regions_and_records_what_passed_between_them(tmp_path):
    config = timed(WAN, server=SERVED, run__steps=16)
    outcome = simulate(config, tmp_path)
    assert outcome.loss < 5.5
    log = lines(tmp_path)
    relays = [line for line in log if line["event"] in ("report", "merge")]
    assert {line["region"] for line in relays} == {0, 1}
    assert all(line["bytes"] == next(e["bytes"] for e in log if e["event"] == "push") for line in relays)
    assert read_events(tmp_path).end_s[-1] == outcome.time_s["clock"] == relays[-1]["end_s"]
    far = [line for line in relays if line["region"] == 1]
    assert all(line["end_s"] - line["start_s"] == pytest.approx(0.05 + 8 * line["bytes"] / 1e7) for line in far)


def test_the_links_of_the_example_are_those_of_the_network_file_scaled_to_its_model():
    theirs = read_network(CONFIGS / "networks" / "halos.toml")
    assert theirs.step_s[5] == pytest.approx(0.238391 / 0.531, rel=1e-5)
    for run in points(load_document(CONFIGS / "halos.toml")):
        ours = run.config.network["regions"]
        assert (ours.sites, ours.step_s) == (theirs.sites, theirs.step_s)
        for one, other in zip(ours.routes, theirs.routes, strict=True):
            assert one.between == other.between
            assert one.bandwidth_bps / other.bandwidth_bps == pytest.approx(192_960 / 70e6, rel=1e-3)


def test_check_counts_the_servers_of_both_levels_and_says_that_real_processes_have_one_level():
    config = timed(WAN, server=SERVED)
    found = examine_run(config)
    copies = {kept.what: kept.copies for kept in found.kept}
    assert (copies["server of a region: state"], copies["server of all: state"]) == (4.0, 3.0)
    (refused,) = found.refused["train"]
    assert refused.startswith("gossamer train got server 'halos'")
    with pytest.raises(PairingError, match=r"in simulations only; use gossamer simulate, or one server"):
        resolve(config, real=True)


@pytest.mark.parametrize(
    "change",
    [
        {"changes": [{"at_s": 1.0, "factor": 0.5, "worker": 1}]},
        {"sites": {"a": {"workers": [0, 1, 2], "uplink_bps": 1e6}}, "routes": []},
    ],
)
def test_links_that_are_shared_or_change_are_refused_where_messages_do_not_share_them(change):
    with pytest.raises(ConfigError, match=r"sites with a shared link and \d changes.*\[\[routes\]\]"):
        resolve(timed(WAN | change, server=SERVED))
