"""Topologies: their tags hold for every set of living workers, and all workers plan the same rounds without messages."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.rounds.stability import stability
from gossamer.rules import Consensus
from gossamer.topologies import TOPOLOGIES, Topology, make_topology
from gossamer.topologies.draw import draw_round
from gossamer.topologies.mixing import Mixing, matrix

OPTIONS: dict[str, list[dict]] = {
    "base": [{}, {"peers": 2}, {"peers": 3}],
    "grid": [{}, {"dimension": 1}, {"dimension": 3}, {"side": 4, "dimension": 3}],
    "groups": [{}, {"size": 2}, {"size": 3}],
    "pga": [{}, {"every": 1}, {"every": 3, "graph": "star"}, {"every": 4, "graph": {"name": "base", "peers": 2}}],
    "random": [{}, {"peers": 2}, {"peers": 3}],
    "random_push": [{}, {"peers": 3}],
    "ring": [{}, {"edge_weight": 1.0}, {"edge_weight": 0.4}],
    "torus": [{}, {"rows": 2}],
    "tree": [{}, {"branching": 1}, {"branching": 3}],
}
ROWS = [(name, options) for name in TOPOLOGIES for options in OPTIONS.get(name, [{}])]
each_topology = pytest.mark.parametrize(("name", "options"), ROWS, ids=[f"{name}-{options}" for name, options in ROWS])


ALL = range(1, 65)
MANY = (*range(1, 11), 12, 15, 16, 21, 32, 33, 63)  # small ones, with many factors and few, and beside powers


def sizes(name: str, options: dict, among: Iterable[int] = MANY) -> list[Topology]:
    """The topology for every number of workers it allows among these."""
    found = []
    for n in among:
        try:
            found.append(make_topology(name, n, seed=n, **options))
        except ConfigError:
            continue
    return found


def subsets(n: int) -> list[frozenset[int] | None]:
    rng = np.random.default_rng(n)
    lost_some = frozenset(np.flatnonzero(rng.random(n) < 0.7).tolist())
    lost_many = frozenset(np.flatnonzero(rng.random(n) < 0.3).tolist())
    return [None, lost_some, lost_many, frozenset({n - 1}), frozenset()]


def links(mixing: Mixing) -> set[tuple[int, int]]:
    return {(i, j) for i in range(mixing.n) for j in mixing.receives_from(i)}


def reachable(n: int, edges: set[tuple[int, int]]) -> np.ndarray:
    reach = np.eye(n, dtype=bool)
    for i, j in edges:
        reach[i, j] = True
    for _ in range(max(1, n.bit_length())):
        reach = reach @ reach
    return reach


def test_most_topologies_allow_every_number_of_workers_and_the_others_say_which() -> None:
    allowed = {name: [t.n for t in sizes(name, {}, ALL)] for name in TOPOLOGIES}
    assert allowed.pop("hypercube") == [1, 2, 4, 8, 16, 32, 64]
    assert allowed.pop("torus") == [n for n in range(1, 65) if n == 1 or any(n % d == 0 for d in range(2, n))]
    assert all(found == list(range(1, 65)) for found in allowed.values())


@each_topology
def test_the_tags_hold_for_every_size_and_every_set_of_workers_that_are_alive(name: str, options: dict) -> None:
    for topology in sizes(name, options):
        for alive in subsets(topology.n):
            for round in (0, 1, 5):
                check_tags(topology, topology.mixing(round, alive), alive)
                if topology.static:
                    assert topology.mixing(round, alive) == topology.mixing(0, alive)


def check_tags(topology: Topology, mixing: Mixing, alive: frozenset[int] | None) -> None:
    workers = range(topology.n) if alive is None else sorted(alive)
    w = matrix(mixing)
    if topology.doubly_stochastic or not topology.column_stochastic:
        assert abs(w.sum(1) - 1).max() < 1e-12
    if topology.doubly_stochastic or topology.column_stochastic:
        assert topology.column_stochastic
        assert w.min() >= 0
        assert abs(w.sum(0) - 1).max() < 1e-12
    if topology.symmetric:
        assert (w == w.T).all()
    if topology.psd:
        assert np.linalg.eigvalsh(w).min() > -1e-12
    if topology.everyone:
        assert len({mixing.rows[i] for i in workers}) <= 1
        assert all(mixing.receives_from(i) == tuple(j for j in workers if j != i) for i in workers)
    if topology.tree and len(workers):
        assert topology.static
        assert len(links(mixing)) == 2 * (len(workers) - 1)
        assert reachable(topology.n, links(mixing))[np.ix_(workers, workers)].all()


def test_the_tags_tell_the_topologies_apart() -> None:
    eight = [make_topology(name, 8) for name in TOPOLOGIES]
    everything = set(TOPOLOGIES)
    assert {t.name for t in eight if t.column_stochastic} == everything
    assert {t.name for t in eight if t.doubly_stochastic} == everything - {"random_push"}
    assert everything - {t.name for t in eight if t.symmetric} == {
        "exponential",
        "one_peer_exponential",
        "pga",
        "random_push",
    }
    assert {t.name for t in eight if t.static} == {"chain", "complete", "exponential", "ring", "star", "torus", "tree"}
    assert {t.name for t in eight if t.psd} == {"complete", "grid", "groups", "hypercube", "random", "star"}
    assert [t.name for t in eight if t.everyone] == ["complete"]
    assert [t.name for t in eight if t.tree] == ["chain", "star", "tree"]
    assert {t.name for t in eight if t.exchangeable} == {"groups", "random", "random_push"}
    assert {t.name for t in eight if t.period is None} == {"groups", "random", "random_push"}


@each_topology
def test_rows_and_columns_say_the_same_and_the_lost_are_alone(name: str, options: dict) -> None:
    for topology in sizes(name, options):
        for alive in subsets(topology.n):
            mixing = topology.mixing(3, alive)
            assert len(mixing.rows) == len(mixing.columns) == topology.n
            for i, row in enumerate(mixing.rows):
                peers = [j for j, _ in row]
                assert peers == sorted(set(peers)) and i in peers
                assert all(w != 0 for j, w in row if j != i)
            received = {(i, j) for j in range(topology.n) for i in mixing.sends_to(j)}
            assert received == links(mixing)
            assert all(list(column) == sorted(column) for column in mixing.columns)
            for i in set() if alive is None else set(range(topology.n)) - alive:
                assert mixing.rows[i] == ((i, 1.0),) and mixing.columns[i] == (i,)


@pytest.mark.sampled(8)
@each_topology
def test_those_alive_are_connected_over_time(name: str, options: dict) -> None:
    for topology in sizes(name, options):
        for alive in subsets(topology.n):
            workers = range(topology.n) if alive is None else sorted(alive)
            edges, connected = set[tuple[int, int]](), False
            for rounds in [range(1)] if topology.static else [range(4), range(4, 8), range(8, 24)]:  # most need few
                if not connected:
                    edges.update(*(links(topology.mixing(t, alive)) for t in rounds))
                    connected = reachable(topology.n, edges)[np.ix_(workers, workers)].all()
            assert connected


@each_topology
def test_a_deterministic_sequence_repeats_after_its_period(name: str, options: dict) -> None:
    for topology in sizes(name, options):
        if topology.period is None:
            continue
        assert topology.static == (topology.period == 1)
        for round in range(topology.period):
            assert topology.mixing(round) == topology.mixing(round + topology.period)
        distinct = {topology.mixing(t) for t in range(topology.period)}
        assert len(distinct) > 1 or topology.static


@each_topology
def test_finite_time_averaging_is_exact_in_the_rounds_it_claims_and_not_sooner(name: str, options: dict) -> None:
    for topology in sizes(name, options):
        if topology.exact_rounds is None:
            continue
        n, product, errors = topology.n, np.eye(topology.n), []
        for t in range(topology.exact_rounds):
            errors.append(abs(product - 1 / n).max())
            product = matrix(topology.mixing(t)) @ product
        assert abs(product - 1 / n).max() < 1e-14
        assert all(error > 1e-9 for error in errors)


def test_the_finite_time_topologies_are_those_expected() -> None:
    claims = {name: {t.n for t in sizes(name, {}, ALL) if t.exact_rounds is not None} for name in TOPOLOGIES}
    powers = {1, 2, 4, 8, 16, 32, 64}
    assert claims.pop("base") == claims.pop("complete") == claims.pop("pga") == set(range(1, 65))
    assert claims.pop("hypercube") == claims.pop("one_peer_exponential") == powers
    assert claims.pop("grid") == {
        n for n in range(1, 65) if n <= 2 or n % max(2, math.ceil(math.sqrt(n))) == 0
    }  # full rows
    assert claims.pop("groups") == {1, 2, 3, 4}
    assert all(claim == {1} for claim in claims.values())


@each_topology
def test_a_round_is_a_pure_function_whatever_was_asked_before(name: str, options: dict) -> None:
    one, other = (make_topology(name, 16, seed=5, **options) for _ in range(2))
    asked = [(t, alive) for t in range(9) for alive in (None, frozenset(range(16)), frozenset({1, 3, 4, 8, 15}))]
    forwards = [one.mixing(t, alive) for t, alive in asked]
    backwards = [other.mixing(t, alive) for t, alive in reversed(asked)]
    assert forwards == backwards[::-1] == [one.mixing(t, alive) for t, alive in asked]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_one_worker_is_everything_at_once(name: str) -> None:
    topology = make_topology(name, 1)
    assert topology.mixing(7).rows == (((0, 1.0),),)
    assert topology.everyone and topology.static and topology.tree and topology.psd and topology.exact_rounds == 0


def test_the_mixing_of_a_round_is_planned_once() -> None:
    topology = make_topology("random", 10_000)
    assert topology.mixing(3) is topology.mixing(3)
    assert {len(row) for row in topology.mixing(3).rows} == {2}


@given(n=st.integers(2, 40), round=st.integers(0, 10**6), data=st.data())
@settings(max_examples=50, deadline=None)
def test_random_peers_are_matchings_without_a_common_pair(n: int, round: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n - 1))
    mixing = make_topology("random", n, seed=n, peers=k).mixing(round)
    degrees = sorted(len(mixing.receives_from(i)) for i in range(n))
    assert degrees == [k] * n if n % 2 == 0 else degrees == [k - 1] * k + [k] * (n - k)
    assert {w for i, row in enumerate(mixing.rows) for j, w in row if j != i} == {1 / (k + 1)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "k"), [(5, 1), (6, 1), (6, 2), (5, 2), (7, 3)])
def test_random_peers_favour_no_pair_and_no_worker(n: int, k: int) -> None:
    topology = make_topology("random", n, seed=1, peers=k)
    draws = 1500
    count = sum((matrix(topology.mixing(t)) * (1 - np.eye(n)) > 0 for t in range(draws)), np.zeros((n, n)))
    expected = (k * (n - n % 2)) / (n * (n - 1))  # the chance of a pair
    error = 5 * math.sqrt(draws * expected * (1 - expected))
    off_diagonal = count[~np.eye(n, dtype=bool)]
    assert abs(off_diagonal - draws * expected).max() < error


def test_all_perfect_matchings_are_equally_likely() -> None:
    topology = make_topology("random", 4, seed=2)
    partner_of_zero = [topology.mixing(t).receives_from(0)[0] for t in range(3000)]
    assert all(abs(partner_of_zero.count(j) - 1000) < 130 for j in (1, 2, 3))


@pytest.mark.parametrize(("n", "k"), [(8, 1), (9, 1), (8, 3), (9, 3), (64, 2)])
def test_every_draw_of_random_peers_has_the_same_weights(n: int, k: int) -> None:
    topology = make_topology("random", n, peers=k)
    idle = k if n % 2 else 0
    for t in range(20):
        w = matrix(topology.mixing(t))
        assert w.trace() == pytest.approx((n + idle) / (k + 1), abs=1e-12)
        assert (w * w).sum() == pytest.approx((n * (k + 1) + 2 * idle) / (k + 1) ** 2, abs=1e-12)


def test_a_seed_and_a_round_name_one_draw_on_every_machine() -> None:
    def pairs(seed: int, round: int) -> list[int]:
        mixing = make_topology("random", 8, seed=seed).mixing(round)
        return [mixing.receives_from(i)[0] for i in range(8)]

    assert pairs(0, 0) == [4, 7, 3, 2, 0, 6, 5, 1]
    assert len({tuple(pairs(seed, round)) for seed in range(5) for round in range(5)}) > 15


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_is_symmetric_with_at_most_k_peers_and_exact_after_the_rounds_of_its_authors(k: int) -> None:
    for n in range(2, 65):
        topology = make_topology("base", n, peers=min(k, n - 1))
        rounds = topology.exact_rounds or 0
        assert rounds == topology.period == authors_rounds(n, min(k, n - 1))
        assert rounds <= 2 * math.log(n) / math.log(k + 1) + 1.12
        product = np.eye(n)
        for t in range(rounds):
            w = matrix(topology.mixing(t))
            assert (w == w.T).all() and w.min() >= 0 and abs(w.sum(0) - 1).max() < 1e-12
            assert max(len(topology.mixing(t).receives_from(i)) for i in range(n)) <= k
            product = w @ product
        assert abs(product - 1 / n).max() < 1e-14
        assert topology.mixing(rounds) == topology.mixing(0)


def authors_rounds(n: int, k: int) -> int:
    """Rounds in the authors' code, counted from the lengths of what it puts together."""

    def smooth(m: int) -> int:
        return max(d for d in range(1, m + 1) if m % d == 0 and all(d % p for p in range(k + 2, d + 1) if prime(p)))

    def hyper_hypercube(m: int) -> int:
        largest = max((d for d in range(2, k + 2) if m % d == 0), default=m)
        return 0 if m == 1 else 1 + hyper_hypercube(m // largest)

    def simple(m: int) -> int:
        if smooth(m) == m:
            return hyper_hypercube(m)
        digits = next(p for p in range(m) if (k + 1) ** (p + 1) > m)
        return digits + (m >= 2 * (k + 1) ** digits) + 1 + digits  # average the first block, meet, average its parts

    return min(simple(n), simple(n // smooth(n)) + hyper_hypercube(smooth(n)))


def prime(p: int) -> bool:
    return p > 1 and all(p % d for d in range(2, p))


@pytest.mark.parametrize(
    ("n", "k", "rounds"), [(12, 2, 3), (24, 2, 4), (9, 3, 2), (24, 1, 6), (6, 1, 4), (5, 1, 5), (7, 1, 5), (25, 1, 9)]
)
def test_base_is_as_short_as_its_authors_graph(n: int, k: int, rounds: int) -> None:
    assert make_topology("base", n, peers=k).exact_rounds == authors_rounds(n, k) == rounds


def test_base_stays_exact_for_those_alive() -> None:
    topology = make_topology("base", 16)
    alive = frozenset(range(16)) - {3, 7, 8, 12, 15}  # 11 workers
    product = np.eye(16)
    for t in range(make_topology("base", 11).exact_rounds or 0):
        product = matrix(topology.mixing(t, alive)) @ product
    workers = sorted(alive)
    assert abs(product[np.ix_(workers, workers)] - 1 / 11).max() < 1e-14


@pytest.mark.parametrize("graph", ["random", "ring", {"name": "random", "peers": 2}, "exponential"])
def test_periodic_averaging_is_its_graph_but_for_every_kth_round(graph: str | dict) -> None:
    topology, alive = make_topology("pga", 9, 3, every=4, graph=graph), frozenset({0, 2, 3, 5, 8})
    spec = {"name": graph} if isinstance(graph, str) else graph
    between, whole = make_topology(**{**spec, "n": 9, "seed": 3}), make_topology("complete", 9)
    for t in range(12):
        expected = whole if t % 4 == 3 else between
        assert topology.mixing(t) == expected.mixing(t) and topology.mixing(t, alive) == expected.mixing(t, alive)
        assert topology.mixing(t).everyone == (t % 4 == 3)


def test_whom_a_worker_pushes_to_is_uniform_and_whom_it_receives_from_is_not() -> None:
    topology, draws = make_topology("random_push", 6, seed=1, peers=2), 3000
    count = sum((matrix(topology.mixing(t)) * (1 - np.eye(6)) > 0 for t in range(draws)), np.zeros((6, 6)))
    assert abs(count[~np.eye(6, dtype=bool)] - draws * 2 / 5).max() < 5 * math.sqrt(draws * 0.4 * 0.6)
    mixings = [topology.mixing(t) for t in range(50)]
    assert {len(mixing.sends_to(j)) for mixing in mixings for j in range(6)} == {2}
    assert {len(mixing.receives_from(i)) for mixing in mixings for i in range(6)} >= {0, 1, 2, 3, 4}


@given(n=st.integers(1, 40), round=st.integers(0, 10**6), name=st.sampled_from(["grid", "groups"]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_groups_average_exactly_with_every_set_of_workers_that_are_alive(
    n: int, round: int, name: str, data: st.DataObject
) -> None:
    options = {"groups": {"size": data.draw(st.integers(2, 9))}, "grid": {"dimension": data.draw(st.integers(1, 4))}}[
        name
    ]
    alive = data.draw(st.frozensets(st.integers(0, n - 1)))
    w = matrix(make_topology(name, n, **options).mixing(round, alive))
    assert (w == w.T).all() and abs(w.sum(0) - 1).max() < 1e-14 and abs(w @ w - w).max() < 1e-14
    assert all(w[i, i] == 1 for i in set(range(n)) - alive)
    assert all(len(set(row[row > 0])) == 1 for row in w)  # the mean of a group, bitwise with the same weights


@pytest.mark.parametrize(("side", "dimension"), [(2, 3), (3, 3), (4, 2), (7, 1)])
def test_a_full_grid_is_the_exact_mean_after_one_round_along_each_axis(side: int, dimension: int) -> None:
    n, product = side**dimension, np.eye(side**dimension)
    topology = make_topology("grid", n, side=side, dimension=dimension)
    assert topology.exact_rounds == topology.period == dimension
    for t in range(dimension):
        assert {len(row) for row in topology.mixing(t).rows} == {side}
        product = matrix(topology.mixing(t)) @ product
    assert abs(product - 1 / n).max() < 1e-14


@pytest.mark.parametrize("alive", [None, frozenset(range(16)), frozenset({0, 3, 4, 7, 9, 10, 15}), frozenset({5})])
def test_a_grid_of_side_two_is_the_hypercube_and_of_one_dimension_the_complete_graph(
    alive: frozenset[int] | None,
) -> None:
    for t in range(6):
        assert make_topology("grid", 16, side=2, dimension=4).mixing(t, alive) == make_topology("hypercube", 16).mixing(
            t, alive
        )
        assert make_topology("grid", 16, dimension=1).mixing(t, alive) == make_topology("complete", 16).mixing(t, alive)


def test_groups_of_two_are_random_pairs_and_one_group_is_the_complete_graph() -> None:
    topology = make_topology("groups", 7, size=2)
    for t in range(20):
        assert sorted(len(topology.mixing(t).receives_from(i)) for i in range(7)) == [0, 1, 1, 1, 1, 1, 1]
        assert make_topology("groups", 7, size=9).mixing(t) == make_topology("complete", 7).mixing(t)


@pytest.mark.parametrize(("n", "size"), [(64, 8), (12, 4), (10, 4), (7, 2)])
def test_random_groups_shrink_the_disagreement_by_the_number_of_groups(n: int, size: int) -> None:
    """The last two have groups of unequal size; the measured mean is over draws, of one vector."""
    topology, groups = make_topology("groups", n, seed=1, size=size), -(-n // size)
    x = np.random.default_rng(0).standard_normal(n)
    x -= x.mean()
    shrunk = [float(((matrix(topology.mixing(t)) @ x) ** 2).sum() / (x**2).sum()) for t in range(2000)]
    error = 4 * np.std(shrunk) / math.sqrt(len(shrunk))
    assert abs(np.mean(shrunk) - (groups - 1) / (n - 1)) < error < 0.03
    predicted = stability(Consensus(1.0, 0.0, "pre"), topology)
    assert predicted.method == "closed form" and predicted.radius**2 == pytest.approx((groups - 1) / (n - 1))


def test_a_grid_closes_up_when_workers_are_lost() -> None:
    alive = frozenset(range(16)) - {1, 6, 7, 12, 13, 14, 15}  # 9 of 16, which stand 3 by 3
    topology, product = make_topology("grid", 16), np.eye(16)
    assert [topology.mixing(t, alive).receives_from(5) for t in range(2)] == [(4, 8), (2, 10)]
    for t in range(2):
        product = matrix(topology.mixing(t, alive)) @ product
    workers = sorted(alive)
    assert abs(product[np.ix_(workers, workers)] - 1 / 9).max() < 1e-14


def test_the_ring_of_those_alive_closes_around_the_lost() -> None:
    mixing = make_topology("ring", 6).mixing(0, frozenset({0, 2, 3, 5}))
    assert [mixing.receives_from(i) for i in range(6)] == [(2, 5), (), (0, 3), (2, 5), (), (0, 3)]


def test_the_edge_weight_of_a_ring_is_that_of_its_laplacian() -> None:
    laplacian = np.eye(8) - matrix(make_topology("ring", 8, edge_weight=1.0).mixing(0))
    expected = [1 - math.cos(2 * math.pi * k / 8) for k in range(8)]
    assert np.linalg.eigvalsh(laplacian) == pytest.approx(sorted(expected), abs=1e-12)
    assert matrix(make_topology("ring", 2, edge_weight=0.5).mixing(0)).tolist() == [[0.75, 0.25], [0.25, 0.75]]


def test_the_hub_of_a_star_is_the_first_worker_alive() -> None:
    mixing = make_topology("star", 5).mixing(0, frozenset({2, 3, 4}))
    assert mixing.receives_from(2) == (3, 4) and mixing.receives_from(3) == mixing.receives_from(4) == (2,)


def test_a_tree_of_one_branch_is_a_chain_and_one_of_many_a_star() -> None:
    for n in range(1, 12):
        assert make_topology("tree", n, branching=1).mixing(0) == make_topology("chain", n).mixing(0)
        assert make_topology("tree", n, branching=max(1, n - 1)).mixing(0) == make_topology("star", n).mixing(0)


def test_those_alive_close_up_in_a_chain_and_in_a_tree() -> None:
    alive = frozenset({0, 2, 3, 5, 6})
    assert [make_topology("chain", 7).mixing(0, alive).receives_from(i) for i in (0, 3, 6)] == [(2,), (2, 5), (5,)]
    assert [make_topology("tree", 7).mixing(0, alive).receives_from(i) for i in (0, 2, 6)] == [(2, 3), (0, 5, 6), (2,)]


def test_a_torus_is_as_square_as_possible_unless_its_shape_is_given() -> None:
    assert make_topology("torus", 12).mixing(0).receives_from(0) == (1, 3, 4, 8)  # 3 rows of 4
    assert make_topology("torus", 12, rows=2).mixing(0).receives_from(0) == (1, 5, 6)
    assert make_topology("torus", 12, rows=6).mixing(0).receives_from(0) == (1, 2, 10)


def test_a_corner_of_the_hypercube_without_a_partner_waits() -> None:
    mixing = make_topology("hypercube", 8).mixing(2, frozenset({0, 1, 2, 5, 6}))  # positions 0 to 4; the third hop is 4
    assert [mixing.receives_from(i) for i in range(8)] == [(6,), (), (), (), (), (), (0,), ()]


@pytest.mark.parametrize(
    ("name", "n", "options", "sentence"),
    [
        ("rign", 4, {}, "unknown topology 'rign'; did you mean 'ring'"),
        ("random", 4, {"peer": 2}, "topology 'random' got an unknown option 'peer'; did you mean 'peers'"),
        ("ring", 4, {"n_peers": 2}, "Allowed: edge_weight"),
        ("star", 4, {"peers": 2}, "topology 'star' got an unknown option 'peers'; it has none"),
        ("complete", 0, {}, "topology 'complete' got n = 0, which must be a whole number from 1 to 1000000"),
        ("random", 4.0, {}, "got n = 4.0"),
        ("ring", True, {}, "got n = True"),
        ("random", 4, {"peers": 4}, "got peers = 4, which must be a whole number from 1 to 3"),
        ("random_push", 4, {"peers": 4}, "got peers = 4, which must be a whole number from 1 to 3"),
        ("pga", 4, {"every": 0}, "got every = 0, which must be a whole number of at least 1"),
        ("pga", 4, {"graph": "rign"}, "did you mean 'ring'"),
        ("pga", 4, {"graph": 2}, "got graph = 2, which must be a topology's name"),
        ("pga", 4, {"graph": {"peers": 2}}, "allowed are a topology's name"),
        ("pga", 4, {"graph": {"name": "ring", "peers": 2}}, "Allowed: edge_weight"),
        ("base", 4, {"peers": 0}, "got peers = 0, which must be a whole number of at least 1"),
        ("base", 4, {"peers": 4}, "got peers = 4, which must be a whole number from 1 to 3"),
        ("hypercube", 12, {}, "got n = 12; allowed are powers of two: use 8 or 16 workers, or topology 'base'"),
        (
            "grid",
            30,
            {"side": 5},
            "got side = 5 and dimension = 2 for n = 30; allowed are at most 25 workers: raise side to 6",
        ),
        ("grid", 4, {"dimension": 0}, "got dimension = 0, which must be a whole number of at least 1"),
        ("groups", 4, {"size": 1}, "got size = 1, which must be a whole number of at least 2"),
        ("torus", 7, {}, "got n = 7, a prime; .* use 8 workers, or topology 'ring'"),
        ("torus", 12, {"rows": 5}, "got rows = 5 for n = 12; allowed are 2, 3, 4, 6"),
        ("torus", 12, {"rows": 12}, "got rows = 12 for n = 12; allowed are 2, 3, 4, 6"),
        ("tree", 4, {"branching": 0}, "got branching = 0, which must be a whole number of at least 1"),
        ("ring", 4, {"edge_weight": 0.0}, "got edge_weight = 0.0, which must be a number above 0 and at most 1"),
        ("ring", 4, {"edge_weight": "half"}, "got edge_weight = 'half'"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(name: str, n: int, options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_topology(name, n, **options)


def test_options_given_back_make_the_same_topology() -> None:
    topology = make_topology("random", 9, seed=4, peers=2)
    again = make_topology(topology.name, topology.n, 4, **topology.options)
    assert [again.mixing(t) for t in range(4)] == [topology.mixing(t) for t in range(4)]


@each_topology
def test_a_picture_names_every_worker_and_whom_it_receives_from(name: str, options: dict) -> None:
    for topology in sizes(name, options, range(1, 21)):
        lines = draw_round(topology, 1).split("\n")
        assert lines[0].startswith(f"{name}, {topology.n} worker")
        assert max(map(len, lines)) < 120
        mixing = topology.mixing(1)
        for i in range(topology.n):
            line = lines[len(lines) - topology.n + i]
            assert line.startswith(f"{i} receives from ")
            assert ("nobody" in line) == (not mixing.receives_from(i))
        picture = "\n".join(lines[2 : len(lines) - topology.n])
        assert all(str(i) in picture for i in range(topology.n)) == (topology.n <= 16)


def test_a_picture_of_many_workers_is_cut_short() -> None:
    lines = draw_round(make_topology("random", 1000), 0).split("\n")
    assert lines[-1] == "... and 936 more workers" and len(lines) == 2 + 64 + 1


def test_a_picture_puts_no_two_workers_in_one_place() -> None:
    for n in range(2, 17):
        picture = draw_round(make_topology("ring", n), 0).split("\n\n")[1]
        assert sorted(map(int, picture.replace(".", " ").split())) == list(range(n))
