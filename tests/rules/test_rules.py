"""The specification of rules: what every row of the table must satisfy, and the identities between rows."""

import contextlib
import functools
import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drifted_rounds import play
from gossamer.codecs import CODECS, exact
from gossamer.errors import ConfigError, PairingError
from gossamer.rounds.compatibility import incompatibilities
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.stability import stability
from gossamer.rules import (
    RULES,
    Context,
    anchored,
    capped,
    choco,
    cocktail,
    data_parallel,
    diloco,
    dilocox,
    eager,
    error_feedback,
    fedopt,
    fgd,
    gasloc,
    gossip,
    local_sgd,
    noloco,
    omr,
    penalized,
    restarted,
    robust,
    sgp,
    slowmo,
    sparseloco,
    sparta,
    trusted,
    weighted,
)
from gossamer.settings.options import options_of
from gossamer.testing.drifted_workers import flat_layout as layout
from gossamer.testing.drifted_workers import random_drift, random_vectors
from gossamer.testing.numbers import (
    allowed_codecs_change_equal_workers_as_little_as_said,
    half_precision_follows_full_precision,
)
from gossamer.testing.specification import PROMISES, fitting, keep
from gossamer.testing.tags import keeps_the_mean, no_codec_moves_the_mean_of_a_rule_that_keeps_it, spread, torch_outer
from gossamer.topologies import TOPOLOGIES, make_topology
from gossamer.topologies.mixing import matrix, pull

ROWS = {
    **{name: factory() for name, factory in RULES.items()},
    "gasloc-published": gasloc(form="published", momentum=0.5),
    "gasloc-drift": gasloc(form="drift"),
    "gasloc-eta1": gasloc(lr=1.0),
    "gasloc-heavy_ball": gasloc(optimizer="heavy_ball", momentum=0.5),
    "gasloc-sgd": gasloc(optimizer="sgd"),
    "fgd-pairs": fgd(mix_updates="random"),
    "fgd-global": fgd(mix_parameters="global", mix_updates="complete"),
    "eager-delayed": eager(fresh=False),
    "diloco-heavy_ball": diloco(optimizer="heavy_ball"),
    "diloco-sgd": diloco(optimizer="sgd"),
    "fedopt-adagrad": fedopt(optimizer="adagrad"),
    "fedopt-yogi": fedopt(optimizer="yogi"),
    "diloco-error_feedback": error_feedback(diloco()),
    "cocktail-exact": cocktail(back="exact"),
    "noloco-anchored": anchored(noloco()),
    "gasloc-restarted": restarted(gasloc()),
    "dilocox-eager": dilocox(form="eager"),
    "dilocox-blocking": dilocox(form="blocking"),
    "dilocox-adaptive": dilocox(adapt_every=1),
    "diloco-trimmed": robust(diloco()),
    "diloco-krum": robust(error_feedback(diloco()), by="krum"),
    "diloco-geometric_median": robust(diloco(), by="geometric_median"),
    "diloco-trusted": trusted(diloco()),
    "data_parallel-error_feedback": error_feedback(data_parallel()),
    "diloco-penalized": penalized(error_feedback(diloco())),
    "diloco-capped": capped(diloco(), norm=2.0),
    "sparta-halves": sparta(one_in=2),
    "sparta-disjoint": sparta(one_in=2, disjoint=True),
    "gasloc-weighted": weighted(gasloc()),
    "sgp-weighted": weighted(sgp()),
}
GOSSIPED = [name for name in TOPOLOGIES if make_topology(name, 8).doubly_stochastic]
every_rule = pytest.mark.parametrize("rule", ROWS.values(), ids=ROWS.keys())
GOSSIP = [name for name, rule in ROWS.items() if rule.consensus is not None and rule.combine is pull]
P = 7


def context(n=4, worker=0, round=0):
    return Context(worker, n, round, 1, 0.5, layout(P), peers=(1,))


@functools.cache
def graphs(name):
    return fitting(ROWS[name])


@pytest.mark.parametrize("name", ROWS)
def test_every_rule_keeps_every_promise(name, request):
    """`test_master` and `test_coding` run the two promises that are not here; of the mean under codecs a part is below.

    On the topology that each rule has by default and on three others, which come in turn; `--full` takes all with each.
    """
    elsewhere = {half_precision_follows_full_precision, allowed_codecs_change_equal_workers_as_little_as_said}
    first, *others = graphs(name)
    if not request.config.getoption("--full"):
        elsewhere.add(no_codec_moves_the_mean_of_a_rule_that_keeps_it)
        place = 3 * [*ROWS].index(name)
        others = [others[k % len(others)] for k in range(place, place + min(3, len(others)))]
    for promise in PROMISES:
        if promise not in elsewhere:
            keep(promise, ROWS[name], [first, *others])


def allowed(rule, topology):
    """What the tags say about a pairing."""
    holds = {
        "everyone": topology.everyone,
        "connected": True,
        "static": topology.static,
        "tree": topology.tree,
        "push": topology.column_stochastic,
    }
    return holds[rule.needs] and (topology.doubly_stochastic or rule.needs == "push")


TORCH = {
    "nesterov": {"momentum": 0.7, "nesterov": True},
    "heavy_ball": {"momentum": 0.7},
    "sgd": {},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rule", "name"),
    [  # each place of the momentum, and the kinds of topologies: fixed, in turn, now and then, drawn
        ("gasloc", "hypercube"),
        ("gasloc", "random"),
        ("gasloc-published", "torus"),
        ("gasloc-drift", "pga"),
        ("fgd", "exponential"),
        ("gossip", "chain"),
    ],
)
def test_workers_that_stand_still_agree_or_part_at_the_predicted_rate_and_keep_their_mean(rule, name):
    """Acceleration is not free: on the deterministic hypercube sequence momentum 0.7 resonates and drives workers apart.

    Of every rule on every topology, a promise compares each round with its recursion, and `test_stability` compares the rates of
    recursions on every topology with the prediction.
    """
    rule = ROWS[rule]
    topology, rounds = make_topology(name, 8), 90
    start = random_vectors(8, P)
    xs, _ = play(rule, topology, start, rounds)
    rate = (spread(xs) / spread(start)) ** (1 / rounds)
    predicted = stability(rule.consensus, topology).radius
    floor = 1e-16 ** (1 / rounds)  # rounding ends the contraction here
    if topology.period is None:  # a single random run contracts faster than its mean square
        assert rate < max(predicted, floor) + 0.02
    else:
        assert rate == pytest.approx(max(predicted, floor), abs=0.04)
    torch.testing.assert_close(sum(xs), sum(start), rtol=0, atol=1e-12 * max(1.0, spread(xs)))


KEEPS_MEAN = [name for name, rule in ROWS.items() if rule.mean_preserving and rule.site == "parameters"]


def topologies_of(n):
    """Those that can be made for so many workers."""
    for name in TOPOLOGIES:
        with contextlib.suppress(ConfigError):
            yield make_topology(name, n)


@pytest.mark.parametrize("name", KEEPS_MEAN)
def test_no_codec_moves_the_mean_of_a_rule_that_keeps_it(name):
    """Each rule through two codecs and on two topologies, which come in turn; `--full` takes all with each, as a promise."""
    place, codecs = KEEPS_MEAN.index(name), [*CODECS]
    fitting = [topology for topology in graphs(name) if topology.doubly_stochastic] or graphs(name)[:1]
    for k in (2 * place, 2 * place + 1):
        keeps_the_mean(ROWS[name], fitting[k % len(fitting)], CODECS[codecs[k % len(codecs)]](), 2)
    start = random_vectors(4, P)
    xs, _ = play(ROWS[name], fitting[place % len(fitting)], start, 3)
    torch.testing.assert_close(sum(xs), sum(start), rtol=0, atol=1e-12 * max(1.0, spread(xs)))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_the_mean_survives_any_codec_odd_numbers_missing_peers_and_uneven_local_steps(data):
    """fp64, within 1e-12."""
    n = data.draw(st.integers(2, 7), "n")
    rule = ROWS[data.draw(st.sampled_from(KEEPS_MEAN), "rule")]
    fitting = [one for one in topologies_of(n) if allowed(rule, one) and one.doubly_stochastic]
    topology = data.draw(st.sampled_from(fitting), "topology")
    if rule.needs != "everyone":
        sets = st.frozensets(st.integers(0, n - 1))
        present = data.draw(st.lists(sets, min_size=1, max_size=1 if topology.static else 3), "present")
        plan = topology.mixing
        topology = topology._replace(mixing=lambda round, alive=None: plan(round, present[round % len(present)]))
    codec = CODECS[data.draw(st.sampled_from([*CODECS]), "codec")]()
    steps = data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n), "local steps")
    keeps_the_mean(rule, topology, codec, 3, steps=steps)


@pytest.mark.parametrize("kind", TORCH)
def test_diloco_is_torch_sgd_on_the_averaged_pseudo_gradient(kind):
    n, drift = 4, random_drift(P)
    start = random_vectors(1, P)[0]
    xs, _ = play(diloco(lr=0.8, momentum=0.7, optimizer=kind), make_topology("complete", n), [start] * n, 10, drift)
    averaged = [-sum(drift(i, t, start) for i in range(n)) / n for t in range(10)]
    torch.testing.assert_close(xs[0], torch_outer(start, averaged, lr=0.8, **TORCH[kind]))


@pytest.mark.parametrize(
    ("form", "kind"), [*((form, k) for form in ("post", "published") for k in TORCH), ("drift", "nesterov")]
)
def test_the_mean_of_gasloc_follows_the_torch_outer_optimizer_on_any_doubly_stochastic_mixing(form, kind):
    n, drift = 8, random_drift(P)
    start = [random_vectors(1, P)[0]] * n
    rule = gasloc(lr=0.6, momentum=0.7, form=form, optimizer=kind)
    averaged = [-sum(drift(i, t, start[0]) for i in range(n)) / n for t in range(10)]
    expected = torch_outer(start[0], averaged, lr=0.6, **TORCH[kind])
    for name in GOSSIPED if (form, kind) == ("post", "nesterov") else ("ring", "random"):
        xs, _ = play(rule, make_topology(name, n), start, 10, drift)
        torch.testing.assert_close(sum(xs) / n, expected, msg=lambda text, name=name: f"on {name}: {text}")


@pytest.mark.parametrize("form", ["post", "published", "drift"])
def test_an_empty_graph_makes_gasloc_n_independent_outer_loops(form):
    n, drift, start = 3, random_drift(P), random_vectors(3, P)
    topology = make_topology("ring", n)
    nobody = topology._replace(mixing=lambda round, alive=None: topology.mixing(round, frozenset()))
    xs, _ = play(gasloc(momentum=0.7, form=form), nobody, start, 8, drift)
    for i in range(n):
        expected = torch_outer(
            start[i], [-drift(i, t, start[i]) for t in range(8)], lr=0.7, momentum=0.7, nesterov=True
        )
        torch.testing.assert_close(xs[i], expected)


PGA1 = {"name": "pga", "every": 1}


def graph(spec):
    """The arguments of `make_topology` for a name, or for a name with options."""
    return {"name": spec} if isinstance(spec, str) else spec


def pairs_of_rules_that_are_equal():
    complete = "complete"
    yield "post GASLoC on the complete graph is DiLoCo", gasloc(0.8, 0.7), diloco(0.8, 0.7), complete, complete, 6
    drift = gasloc(0.8, 0.7, form="drift")
    yield (
        "GASLoC with momentum on the drift is DiLoCo on the complete graph",
        drift,
        diloco(0.8, 0.7),
        complete,
        complete,
        6,
    )
    alike = gasloc(1.0, 0.0, form="drift")
    yield "GASLoC with no momentum on the drift is gossip", alike, gossip(), "ring", "ring", 6
    yield (
        "GASLoC without momentum on the complete graph is DiLoCo with outer SGD",
        gasloc(0.8, 0.0),
        diloco(0.8, optimizer="sgd"),
        complete,
        complete,
        6,
    )
    yield (
        "NoLoCo in one group of all is DiLoCo with heavy ball",
        noloco(0.7, 0.5),
        diloco(0.7, 0.5, "heavy_ball"),
        complete,
        complete,
        6,
    )
    yield "DiLoCo with outer SGD at 1 is local SGD", diloco(1.0, optimizer="sgd"), local_sgd(), complete, complete, 6
    yield "gossip on the complete graph is local SGD", gossip(), local_sgd(), complete, complete, 6
    yield "GASLoC at eta 1 without momentum is gossip", gasloc(1.0, 0.0), gossip(), "ring", "ring", 6
    yield "GASLoC without momentum is NoLoCo without", gasloc(1.0, 0.0), noloco(1.0, 0.0), "random", "random", 6
    yield "SlowMo without momentum is local SGD", slowmo(1.0, 0.0), local_sgd(), complete, complete, 6
    yield "gossip with a global average in every round is local SGD", gossip(), local_sgd(), PGA1, complete, 6
    yield "OMR that never restarts is DiLoCo", omr(0.9, 0.7, every=99), diloco(0.9 * 0.3, 0.7), complete, complete, 4
    yield (
        "OMR that always restarts is outer SGD",
        omr(0.9, 0.7, every=1),
        diloco(0.9 * (1 - 0.49), optimizer="sgd"),
        complete,
        complete,
        4,
    )
    yield (
        "OMR without momentum is outer SGD",
        omr(0.9, 0.0),
        diloco(0.9, optimizer="sgd"),
        complete,
        complete,
        4,
    )
    yield (
        "restarts commute with gossip on the complete graph",
        restarted(gasloc(0.8, 0.7), 3),
        restarted(diloco(0.8, 0.7), 3),
        complete,
        complete,
        4,
    )
    yield (
        "SparseLoCo through an exact codec is DiLoCo with outer SGD",
        sparseloco(0.8, decay=0.5),
        diloco(0.8, optimizer="sgd"),
        complete,
        complete,
        4,
    )
    yield "error feedback through an exact codec is nothing", error_feedback(diloco()), diloco(), complete, complete, 4
    yield "SPARTA of everything is gossip", sparta(one_in=1), gossip(), "random", "random", 6
    yield "disjoint slices of everything are Local SGD", sparta(1, disjoint=True), local_sgd(), complete, complete, 6
    yield "push on a doubly stochastic graph is gossip", sgp(), gossip(), "exponential", "exponential", 6
    yield "CHOCO with exact messages is gossip", choco(alpha=1.0), gossip(), "ring", "ring", 6
    yield (
        "CHOCO with exact messages is gossip with a shorter step",
        choco(alpha=0.4),
        gasloc(1.0, 0.0, alpha=0.4),
        "star",
        "star",
        6,
    )
    for name in ("ring", "pga", "random"):
        yield f"anchored GASLoC with exact messages is GASLoC on {name}", anchored(gasloc()), gasloc(), name, name, 8
    yield "anchored NoLoCo with exact messages is NoLoCo", anchored(noloco()), noloco(), "random", "random", 6
    yield "two workers in pairs are a complete graph", gasloc(), gasloc(), "random", complete, 2


EQUAL = list(pairs_of_rules_that_are_equal())


@pytest.mark.parametrize(("left", "right", "a", "b", "n"), [row[1:] for row in EQUAL], ids=[row[0] for row in EQUAL])
def test_two_rules_are_one(left, right, a, b, n):
    start, drift = [random_vectors(1, P)[0]] * n, random_drift(P)
    xs, _ = play(left, make_topology(**graph(a), n=n), start, 6, drift)
    ys, _ = play(right, make_topology(**graph(b), n=n), start, 6, drift)
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y)


def test_published_gasloc_on_the_complete_graph_leaves_the_workers_apart_but_their_mean_on_diloco():
    start, drift = [random_vectors(1, P)[0]] * 4, random_drift(P)
    xs, _ = play(gasloc(0.7, 0.5, form="published"), make_topology("complete", 4), start, 4, drift)
    ys, _ = play(diloco(0.7, 0.5), make_topology("complete", 4), start, 4, drift)
    assert spread(xs) > 0.1
    torch.testing.assert_close(sum(xs) / 4, ys[0])


def one_round_operator(rule, topology):
    """The matrix of one round without drift on the stacked (θ, previous) of all workers, read off the running code."""
    n = topology.n
    columns = []
    for which, worker in itertools.product(range(2), range(n)):
        xs = [torch.zeros(1, dtype=torch.float64) for _ in range(n)]
        states = [rule.init(x, context()) for x in xs]
        (xs if which == 0 else [s.prev for s in states])[worker].fill_(1.0)
        if which == 0 and rule.options["lr"] != 1.0:
            states[worker].anchor.fill_(1.0)
        ys, states = play(rule, topology, xs, 1, states=states)
        columns.append(torch.cat([*ys, *(s.prev for s in states)]).numpy())
    return np.stack(columns, axis=1)


RING8 = ("ring", {"edge_weight": 1.0})


@pytest.mark.parametrize(
    ("graph", "rule"),
    [
        (RING8, gasloc(1.0, 0.0, alpha=0.872)),
        (RING8, gasloc(1.0, 0.199, alpha=1.046, form="published")),
        (RING8, gasloc(0.7, 0.446, alpha=0.5)),
        (("ring", {}), gasloc(0.7, 0.312, form="published")),
        (("ring", {}), gasloc(0.7, 0.363)),
        (("torus", {}), gasloc(0.7, 0.6)),
        (("exponential", {}), gasloc(0.7, 0.4, form="published")),
    ],
)
def test_disagreement_without_drift_contracts_at_the_spectral_radius_of_the_companion(graph, rule):
    topology = make_topology(graph[0], 8, **graph[1])
    operator = one_round_operator(rule, topology)
    centre = np.kron(np.eye(2), np.eye(8) - np.ones((8, 8)) / 8)
    radius = np.abs(np.linalg.eigvals(centre @ operator @ centre)).max()
    assert stability(rule.consensus, topology).radius == pytest.approx(radius, abs=2e-4)


def test_acceleration_on_the_ring_of_8_is_that_of_the_theory():
    topology = make_topology("ring", 8, edge_weight=1.0)
    low, high = 1 - math.cos(math.pi / 4), 2.0  # of the weighted Laplacian
    plain = gasloc(1.0, 0.0, alpha=2 / (low + high)).consensus
    assert stability(plain, topology).radius == pytest.approx(0.745, abs=1e-3)
    root = math.sqrt(high / low)
    alpha, gamma = 4 / (math.sqrt(high) + math.sqrt(low)) ** 2, ((root - 1) / (root + 1)) ** 2
    accelerated = gasloc(1.0, gamma, alpha=alpha, form="published").consensus
    assert stability(accelerated, topology).radius == pytest.approx(0.446, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(0, 10**6), st.sampled_from(sorted(GOSSIP)))
def test_what_is_pulled_sums_to_zero_over_the_workers(n, seed, name):
    mixing = make_topology("random", n, seed=seed).mixing(seed)
    messages = random_vectors(n, P, seed)
    combined = [pull(messages[i], dict(enumerate(messages)), i, mixing.rows[i]) for i in range(n)]
    torch.testing.assert_close(sum(combined), torch.zeros(P, dtype=torch.float64), rtol=0, atol=1e-13)
    expected = torch.from_numpy(matrix(mixing)) @ torch.stack(messages)
    torch.testing.assert_close(torch.stack(combined) + torch.stack(messages), expected)


@every_rule
def test_every_pairing_is_either_allowed_by_the_tags_or_refused_in_a_sentence(rule):
    for name in TOPOLOGIES:
        topology, codec = make_topology(name, 8), exact()
        if allowed(rule, topology):
            incompatibilities.check(Combination(rule=rule, topology=topology, codec=codec))
        else:
            with pytest.raises(PairingError, match=f"{rule.name}.*{name}.*use"):
                incompatibilities.check(Combination(rule=rule, topology=topology, codec=codec))


def test_a_rule_with_unsettled_alpha_is_refused():
    with pytest.raises(PairingError, match="auto"):
        incompatibilities.check(Combination(rule=gasloc(alpha="auto"), topology=make_topology("random", 8)))


@pytest.mark.parametrize(
    ("factory", "options", "word"),
    [
        (gasloc, {"form": "after"}, "published"),
        (gasloc, {"momentum": 1.0}, "a number from 0 to below 1"),
        (gasloc, {"alpha": 0.0}, "alpha"),
        (diloco, {"optimizer": "adam"}, "heavy_ball"),
        (diloco, {"lr": 0.0}, "lr"),
        (noloco, {"momentum": -0.1}, "momentum"),
        (noloco, {"lr": "fast"}, "'fast'"),
        (RULES["fedopt"], {"optimizer": "adamw"}, "yogi"),
        (RULES["fedopt"], {"tau": 0.0}, "tau"),
        (RULES["easgd"], {"elasticity": 1.5}, "a number above 0 and at most 1"),
        (RULES["choco"], {"alpha": 0.0}, "a number above 0 and at most 1"),
        (RULES["sparseloco"], {"decay": 1.1}, "decay"),
        (RULES["sparta"], {"one_in": 0.5}, "a whole number"),
        (RULES["omr"], {"every": 0}, "a whole number of at least 1"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_what_is_allowed(factory, options, word):
    with pytest.raises(ConfigError, match=word):
        factory(**options)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_documented_by_equation_cost_source_differences_and_failures(name):
    text = inspect.getdoc(RULES[name]) or ""
    for part in ("Cost:", "Source:", "Differs:", "Fails when:", ">>>", "arXiv"):
        assert part in text, part
    assert RULES[name]().name == name
    assert [*RULES[name]().options] == [option.name for option in options_of(RULES[name])]


@pytest.mark.parametrize(("old", "new"), [("hear", "combine"), ("n1_limit", "single_worker_limit")])
def test_a_rule_with_a_keyword_of_earlier_versions_is_refused_with_its_name_of_today(old: str, new: str) -> None:
    rule = ROWS["gossip"]
    fields = rule._asdict()
    for make in (lambda: type(rule)(**{old: fields.pop(new)}, **fields), lambda: rule._replace(**{old: None})):
        with pytest.raises(ConfigError, match=f"a Rule got {old} = ..., which is called {new} now; rename the keyword"):
            make()
