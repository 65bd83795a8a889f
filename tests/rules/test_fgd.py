"""Factored Gossip DiLoCo: what it is with other mixings, where its messages travel, and how far its workers are apart."""

import pytest
import torch

import gossamer
from drifted_rounds import play
from gossamer.codecs import exact
from gossamer.errors import ConfigError
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.kernel import PLAIN
from gossamer.rounds.schedule import Schedule, Stop
from gossamer.rounds.stability import stability, stability_of
from gossamer.rules import anchored, diloco, fgd, weighted
from gossamer.run.config.resolve import resolve
from gossamer.run.planning.check import examine_run
from gossamer.testing import check_parity
from gossamer.testing.drifted_workers import DriftedWorkers, random_drift, random_vectors, simulated_workers
from gossamer.testing.numbers import half_precision_follows_full_precision
from gossamer.testing.tags import torch_outer
from gossamer.topologies import complete, make_topology, random, ring
from gossamer.topologies.mixing import matrix
from gossamer.transport.memory import MemoryNetwork, MemoryTransport
from tiny import tiny

P = 7
close = torch.testing.assert_close
GLOBAL = fgd(0.8, 0.7, mix_parameters="global", mix_updates="complete")
TABLE = [  # μ, then the steady variance of 8 workers that mix what MIXED says
    (0.0, (1.75, 0.75, 1.31, 1.0, 0.43)),
    (0.5, (4.9, 2.1, 3.4, 2.3, 1.0)),
    (0.7, (8.4, 3.6, 5.3, 3.4, 1.4)),
    (0.9, (23.7, 10.2, 13.0, 7.1, 3.0)),
]
MIXED = [
    (random(8), {}),
    (random(8), {"mix_updates": "random"}),
    (random(8, peers=2), {}),
    (complete(8), {"mix_parameters": "global"}),
    (complete(8), {"mix_parameters": "global", "mix_updates": "random"}),
]


def alike(n):
    return [random_vectors(1, P)[0]] * n


def nobody(n):
    """A topology on which everybody keeps what it has."""
    return ring(n)._replace(mixing=lambda round, alive=None: ring(n).mixing(round, frozenset()))


class Deaf(MemoryTransport):
    """A transport on which the messages of one round between two workers are lost, at both ends."""

    def _lost(self, ticket, peer):
        return (ticket.round, {self.worker, peer}) == (2, {0, 1})

    def expect(self, ticket, peer, like, sound=None):
        if not self._lost(ticket, peer):
            super().expect(ticket, peer, like)

    def post(self, ticket, peer, frames):
        if not self._lost(ticket, peer):
            super().post(ticket, peer, frames)


def test_a_message_that_is_dropped_on_both_ends_is_a_self_loop_and_the_mean_is_kept():
    m, drift, rounds = Method(fgd(0.8, 0.7), ring(4), exact(), Schedule(), PLAIN), random_drift(P), 5
    found = {}
    for kind in (MemoryTransport, Deaf):
        network = MemoryNetwork(4)
        workers = DriftedWorkers(m, [kind(network, i) for i in range(4)], random_vectors(4, P))
        workers.train(range(rounds), drift)
        found[kind] = torch.stack(workers.xs)
    assert not torch.equal(found[Deaf], found[MemoryTransport])
    close(found[Deaf].mean(0), found[MemoryTransport].mean(0))


def test_with_both_mixings_global_it_is_diloco():
    drift = random_drift(P)
    xs, _ = play(GLOBAL, complete(4), alike(4), 6, drift)
    expected, _ = play(diloco(0.8, 0.7), complete(4), alike(4), 6, drift)
    for x, y in zip(xs, expected, strict=True):
        close(x, y)


def test_without_any_mixing_it_is_an_outer_optimizer_for_each_worker_alone():
    drift, start = random_drift(P), alike(3)
    xs, _ = play(fgd(0.7, 0.9), nobody(3), start, 8, drift)
    for i, x in enumerate(xs):
        close(x, torch_outer(start[0], [-drift(i, t, x) for t in range(8)], lr=0.7, momentum=0.9, nesterov=True))


def test_one_step_of_sgd_without_momentum_is_dpsgd_that_combines_and_then_adapts():
    centres, rate, expected = random_vectors(6, P, seed=5), 0.2, alike(6)
    xs, _ = play(fgd(1.0, 0.0), random(6), alike(6), 7, lambda i, t, x: -rate * (x - centres[i]))
    for t in range(7):
        w = torch.tensor(matrix(random(6).mixing(t)))
        expected = [
            sum(w[i, j] * x for j, x in enumerate(expected)) - rate * (expected[i] - centres[i]) for i in range(6)
        ]
    for x, y in zip(xs, expected, strict=True):
        close(x, y)


@pytest.mark.parametrize("name", ["random", "ring", "exponential", "one_peer_exponential"])
@pytest.mark.parametrize("updates", ["none", "random", "ring", "complete"])
def test_the_mean_of_the_workers_follows_dilocos_outer_optimizer(name, updates):
    n, drift, start = 8, random_drift(P), alike(8)
    xs, _ = play(fgd(0.6, 0.7, mix_updates=updates), make_topology(name, n), start, 6, drift)
    averaged = [-sum(drift(i, t, start[0]) for i in range(n)) / n for t in range(6)]
    close(sum(xs) / n, torch_outer(start[0], averaged, lr=0.6, momentum=0.7, nesterov=True))


def test_a_global_mean_leaves_no_disagreement_but_that_of_the_last_outer_steps():
    drift = random_drift(P)
    xs, states = play(fgd(0.7, 0.9, mix_parameters="global"), complete(5), alike(5), 9, drift)
    for a in range(1, 5):
        moved = [-drift(i, 8, xs[i]) for i in (0, a)]
        wanted = -0.7 * ((moved[0] + 0.9 * states[0].b) - (moved[1] + 0.9 * states[a].b))
        close(xs[0] - xs[a], wanted)


@pytest.mark.parametrize(("momentum", "variances"), TABLE)
def test_the_steady_variance_is_that_of_the_table(momentum, variances):
    for (topology, options), variance in zip(MIXED, variances, strict=True):
        found = stability_of(fgd(momentum=momentum, **options), topology)
        assert found is not None and found.variance == pytest.approx(variance, abs=0.051)


@pytest.mark.parametrize("topology", [random(8), random(7, peers=2), ring(8), complete(5)], ids=str)
def test_it_contracts_like_the_slower_of_gossip_and_momentum(topology):
    rules = {mu: fgd(momentum=mu, mix_updates="random") for mu in (0.0, 0.4, 0.7, 0.99)}
    assert rules[0.0].consensus is not None
    alone = stability(rules[0.0].consensus, topology).radius
    for mu, rule in rules.items():
        found = stability_of(rule, topology)
        assert found is not None and found.stable and found.radius == pytest.approx(max(alone, mu), abs=1e-6)


@pytest.mark.full
def test_workers_that_drift_are_as_far_apart_as_predicted():
    rule, topology, numel, apart = fgd(1.0, 0.5, mix_updates="random"), random(8), 500, []
    workers = simulated_workers(Method(rule, topology, exact(), Schedule(), PLAIN), [torch.zeros(numel)] * 8)
    for t in range(160):
        workers.train(range(t, t + 1), random_drift(numel, dtype=torch.float32))
        apart.append(float(torch.stack(workers.xs).var(0).mean()))
    found = stability_of(rule, topology)
    assert found is not None and sum(apart[40:]) / 120 == pytest.approx(found.variance, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize("rule", [fgd(mix_updates="random"), GLOBAL], ids=repr)  # `test_master` has the default
def test_in_half_precision_it_follows_full_precision(rule):
    half_precision_follows_full_precision(rule, [complete(4) if rule is GLOBAL else random(4)])


def test_a_round_ends_with_what_was_sent_at_its_start_and_begins_by_sending():
    stops = Schedule().stops(2, full_steps=5, delay_rounds=1, ahead=True, updates=True)
    assert stops == (Stop(5, (1,), ((1, 0), (0, 1))), Stop(5, (0,), ()))
    stops = Schedule(fragments=2).stops(0, full_steps=4, delay_rounds=1, ahead=True)
    assert stops == (Stop(2, (), ((0, 1),)), Stop(2, (0,), ()), Stop(4, (), ((1, 1),)), Stop(4, (1,), ()))


@pytest.mark.parametrize("options", [{}, {"mix_updates": "complete"}], ids=str)
def test_in_fragments_it_is_itself_on_each_of_them(options):
    drift, spans = random_drift(P), ((0, 3), (3, P))
    xs, _ = play(fgd(**options), random(4), alike(4), 5, drift, schedule=Schedule(fragments=2), steps=2, spans=spans)
    whole, _ = play(fgd(**options), random(4), alike(4), 5, drift, steps=2)
    for x, y in zip(xs, whole, strict=True):
        close(x[3:], y[3:])  # the last fragment ends its rounds with the run
        assert not torch.equal(x[:3], y[:3])


def test_processes_mix_twice_a_round_as_the_simulator_does():
    check_parity(fgd(mix_updates="random"), "random", workers=4, schedule=Schedule(fragments=2))


def test_outer_saves_messages_sent_ahead_and_continues_with_the_same_bits():
    def run(outer, model, steps):
        for step in steps:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9).add_(0.01 * step)
            outer.step()

    torch.manual_seed(0)
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with gossamer.Outer(model, fgd(mix_updates="random"), local_steps=2) as outer:
        run(outer, model, range(5))
        saved, weights = outer.state_dict(), {name: t.clone() for name, t in model.state_dict().items()}
        assert [(one["round"], one["fragment"]) for one in saved["under_way"]] == [(1, 0)]
        run(outer, model, range(5, 9))
    with gossamer.Outer(other, fgd(mix_updates="random"), local_steps=2) as again:
        other.load_state_dict(weights)
        again.load_state_dict(saved)
        run(again, other, range(5, 9))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def seconds(uplink_bps, **rule):
    """Seconds of a round of 5 steps of a second each, and the bytes sent in it."""
    link = {"uplink_bps": uplink_bps, "downlink_bps": uplink_bps, "step_s": 1.0}
    given = {"rule": {"name": "fgd", **rule}, "network": {"link": link}}
    found = examine_run(tiny(workers=4, run__local_steps=5, run__steps=40, **given))
    return found.networks[0].round_s, found.sent_bytes


def test_parameters_travel_behind_the_local_phase_and_updates_while_all_wait():
    _, once = seconds(1e12)
    link = once * 8 / 2.0  # two seconds for one copy of the parameters
    alone, sent = seconds(link)
    both, twice = seconds(link, mix_updates="random")
    assert sent == once and twice == pytest.approx(2 * once)
    assert alone < 5 + 2.0 / 4 < 5 + 2.0 - 0.01 < both < 5 + 2.0 + 2.0 / 4 + 0.01


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fgd(mix_updates="rnadom"), "did you mean 'random'"),
        (lambda: resolve(tiny(rule={"name": "fgd", "mix_updates": "random_push"})), "doubly stochastic"),
        (lambda: weighted(fgd(mix_updates="random")), "without run.weigh_steps"),
        (lambda: anchored(fgd()), "does not gossip whole parameters at once"),
    ],
    ids=["name", "weights", "steps", "anchor"],
)
def test_what_cannot_mix_updates_is_refused_in_a_sentence(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()
