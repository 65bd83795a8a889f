"""Large numbers of workers: what is sparse has the bits of what was dense, and what cannot be planned is refused at once."""

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.rounds.stability import Stability, mean_gap, outlook, stability_of, stability_warning, too_large
from gossamer.rules import gasloc
from gossamer.topologies import TOPOLOGIES, Topology, make_topology
from gossamer.topologies.contract import chosen
from gossamer.topologies.mixing import MOST_MESSAGES, laplacian_condition, matrix, spectral_gap


def made(name: str, n: int) -> Topology:
    options = {"edges": [*pairwise(range(n))]} if name == "graph" else {}
    try:
        return make_topology(name, n, seed=n, **options)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [*TOPOLOGIES])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24])
def test_sparse_mixing_is_the_dense_matrix_bit_for_bit(name: str, n: int) -> None:
    topology = made(name, n)
    for round in range(min(topology.period or 5, 5)):
        for alive in (None, frozenset(range(0, n, 2))):
            mixing = topology.mixing(round, alive)
            dense = matrix(mixing)
            for i in range(n):
                others = [j for j in range(n) if j != i]
                assert dense[i, i] == mixing.weight(i)
                assert mixing.receives_from(i) == tuple(j for j in others if dense[i, j])
                assert mixing.sends_to(i) == tuple(j for j in others if dense[j, i])
                assert mixing.rows[i] == tuple((j, dense[i, j]) for j in range(n) if j == i or dense[i, j])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*TOPOLOGIES])
@pytest.mark.parametrize("n", [2, 3, 5, 8, 12, 16])
def test_the_spectral_gap_without_a_matrix_is_that_of_the_matrix(name: str, n: int) -> None:
    topology = made(name, n)
    if not topology.doubly_stochastic or (topology.period is None and not topology.exchangeable):
        assert mean_gap(topology) is None
        return
    rounds = range(topology.period or 1)
    dense = np.mean([matrix(topology.mixing(t)) for t in rounds], axis=0)
    if topology.period is None:
        a = (np.trace(dense) - 1) / (n - 1)
        dense = a * np.eye(n) + (1 - a) / n
    assert mean_gap(topology) == pytest.approx(spectral_gap(dense), abs=1e-12)
    found = outlook(topology, alpha=1.0, gamma=0.0)
    expected = laplacian_condition(dense) if topology.symmetric else None
    assert found.laplacian_condition == (expected if expected is None else pytest.approx(expected, rel=1e-9))


@given(bits=st.lists(st.integers(0, 2**64 - 1), max_size=12), more=st.integers(0, 12))
def test_numbers_are_chosen_as_from_a_list(bits: list[int], more: int) -> None:
    m = len(bits) + more
    left = list(range(m))
    assert chosen(bits, m) == [left.pop(draw % len(left)) for draw in bits]


def test_a_complete_graph_of_many_workers_takes_no_matrix() -> None:
    n = 3_000
    tracemalloc.start()
    mixing = make_topology("complete", n).mixing(0)
    assert tracemalloc.get_traced_memory()[1] < n * n
    tracemalloc.stop()
    assert mixing.everyone and len(mixing.receives_from(7)) == len(mixing.sends_to(7)) == n - 1


@pytest.mark.parametrize(
    ("name", "options"),
    [("random", {"peers": 300}), ("base", {"peers": 300}), ("random_push", {"peers": 300}), ("exponential", {})],
)
def test_a_round_with_too_many_messages_is_refused(name: str, options: dict) -> None:
    n = 10_000 if options else 200_000
    with pytest.raises(ConfigError, match=f"{MOST_MESSAGES:,} messages"):
        make_topology(name, n, **options).mixing(0)


@pytest.mark.parametrize("name", ["chain", "torus", "star", "hypercube", "pga", "tree"])
def test_a_gap_that_is_too_large_to_predict_is_reported_as_unknown(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = make_topology(name, 2**14)
    assert too_large(topology) and mean_gap(topology) is None
    assert stability_of(gasloc(), topology) is None and stability_warning(gasloc(), topology) is None
    assert main(["topology", name, "--workers", str(2**14)]) == 0
    assert "too many workers to" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["random", "groups", "complete"])
def test_what_is_known_for_any_number_of_workers_is_predicted(name: str) -> None:
    found = stability_of(gasloc(), make_topology(name, 20_000))
    assert isinstance(found, Stability) and found.radius < 1 and math.isfinite(found.variance)


def test_a_warning_whose_remedy_takes_too_long_to_find_names_none() -> None:
    sentence = stability_warning(gasloc(), make_topology("base", 100))
    assert sentence is not None and sentence.endswith("; use a smaller rule.momentum or rule.alpha")


@pytest.mark.parametrize("workers", ["99999999999999999999999", "1000001"])
def test_a_number_of_workers_beyond_a_million_is_refused(
    workers: str, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    (path := tmp_path / "run.toml").write_text("")
    assert main(["check", str(path), "--set", f"workers={workers}"]) == 2
    assert main(["topology", "random", "--workers", workers]) == 2
    shown = capsys.readouterr().err
    assert shown.count(f"{workers}") >= 2 and "1000000" in shown.replace(",", "") and "Traceback" not in shown


@pytest.mark.parametrize("name", ["complete", "base"])
def test_a_topology_in_which_everybody_meets_everybody_is_refused_where_no_plan_ends(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    assert make_topology(name, 2_000).n == 2_000
    (path := tmp_path / "run.toml").write_text("")
    assert main(["check", str(path), "--set", "workers=1000000", "--set", f"topology={name}"]) == 2
    assert main(["topology", name, "--workers", "100001"]) == 2
    shown = capsys.readouterr().err
    assert f"topology '{name}' got 1,000,000 workers and can be planned for 100,000 at most" in shown
    assert f"topology '{name}' got 100,001 workers" in shown


def test_a_grid_of_more_axes_than_workers_is_that_of_as_many_as_there_can_be() -> None:
    many, enough = make_topology("grid", 100, dimension=10**12), make_topology("grid", 100, dimension=7)
    assert many.period == enough.period == 7
    assert [many.mixing(t) for t in range(7)] == [enough.mixing(t) for t in range(7)]


def test_a_period_of_many_rounds_is_not_predicted() -> None:
    assert too_large(make_topology("pga", 3, every=10**6)) and not too_large(make_topology("pga", 3, every=1_000))
