"""Mixing: the two ordered sums and what is exact about them; weights and spectra."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.topologies import TOPOLOGIES, make_topology
from gossamer.topologies.mixing import (
    Mixing,
    each,
    from_edges,
    laplacian_condition,
    matrix,
    mean,
    metropolis,
    pull,
    spectral_gap,
)

DOUBLY_STOCHASTIC = [name for name in TOPOLOGIES if make_topology(name, 8).doubly_stochastic]


def messages(n: int, size: int = 13, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(n)]


def pulled(mixing: Mixing, sent: list) -> list:
    return [pull(sent[i], {j: sent[j] for j in mixing.receives_from(i)}, i, row) for i, row in enumerate(mixing.rows)]


def averaged(mixing: Mixing, sent: list) -> list:
    return [mean(sent[i], {j: sent[j] for j in mixing.receives_from(i)}, i, row) for i, row in enumerate(mixing.rows)]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pull_is_exactly_zero_at_consensus(name: str, dtype: torch.dtype) -> None:
    sent = messages(1, dtype=dtype) * 8
    assert all((p == 0).all() for p in pulled(make_topology(name, 8).mixing(1), sent))


@pytest.mark.parametrize("name", DOUBLY_STOCHASTIC)
def test_the_pull_sums_to_zero_over_the_workers(name: str) -> None:
    sent = [message.double() for message in messages(8)]
    total = torch.stack(pulled(make_topology(name, 8).mixing(2, frozenset({0, 1, 2, 4, 6, 7})), sent)).sum(0)
    assert total.abs().max() < 1e-14


@pytest.mark.parametrize("name", DOUBLY_STOCHASTIC)
def test_pull_and_mean_agree_with_the_matrix(name: str) -> None:
    mixing, sent = make_topology(name, 8).mixing(1), [message.double() for message in messages(8)]
    expected = torch.from_numpy(matrix(mixing)) @ torch.stack(sent)
    assert torch.allclose(torch.stack(averaged(mixing, sent)), expected, atol=1e-14)
    assert torch.allclose(torch.stack(pulled(mixing, sent)) + torch.stack(sent), expected, atol=1e-14)


def test_the_mean_over_everyone_is_bitwise_the_same_on_every_worker() -> None:
    first, *others = averaged(make_topology("complete", 7).mixing(0), messages(7))
    assert all(torch.equal(first, other) for other in others)


def test_the_sums_run_over_ascending_peers_one_product_and_one_sum_at_a_time() -> None:
    mixing, sent = make_topology("complete", 7).mixing(0), messages(7, size=1001)

    def by_hand(peers: list[int]) -> Tensor:
        acc = torch.zeros(1001)
        for j in peers:
            acc = acc + 1 / 7 * (sent[j] - sent[2])
        return acc

    assert torch.equal(pulled(mixing, sent)[2], by_hand([0, 1, 3, 4, 5, 6]))
    assert not torch.equal(pulled(mixing, sent)[2], by_hand([6, 5, 4, 3, 1, 0]))


def test_half_precision_messages_are_summed_in_single() -> None:
    sent = messages(8, dtype=torch.bfloat16)
    mixing = make_topology("complete", 8).mixing(0)
    assert pulled(mixing, sent)[0].dtype == averaged(mixing, sent)[0].dtype == torch.float32
    exact = torch.stack([message.double() for message in sent]).mean(0)
    assert (averaged(mixing, sent)[3] - exact).abs().max() < 1e-6


def test_messages_may_be_nested_tuples() -> None:
    sent = [(a, (a * 2, ())) for a in messages(4)]
    mixing = make_topology("ring", 4).mixing(0)
    plain = pulled(mixing, messages(4))
    for (a, (b, nothing)), p in zip(pulled(mixing, sent), plain, strict=True):
        assert torch.equal(a, p) and torch.equal(b, 2 * p) and nothing == ()


def test_each_worker_lists_the_messages_of_the_others_in_order() -> None:
    sent, row = messages(4), make_topology("ring", 4).mixing(0).rows[1]
    first, second = each(sent[1], {2: sent[2], 0: sent[0]}, 1, row)
    assert first is sent[0] and second is sent[2]


def test_inputs_are_never_written_to() -> None:
    sent = messages(5)
    before = [t._version for t in sent]
    mixing = make_topology("ring", 5).mixing(0)
    pulled(mixing, sent), averaged(mixing, sent)
    assert [t._version for t in sent] == before


def test_edges_complete_each_row_with_the_own_weight() -> None:
    mixing = from_edges(3, [(2, 0, 0.25), (0, 1, 1.0)])
    assert mixing.rows == (((0, 0.0), (1, 1.0)), ((1, 1.0),), ((0, 0.25), (2, 0.75)))
    assert mixing.columns == ((0, 2), (0, 1), (2,))
    assert (mixing.n, mixing.receives_from(2), mixing.sends_to(0), mixing.weight(2)) == (3, (0,), (2,), 0.75)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([(0, 0, 0.5)], r"has the edge \(0, 0, 0.5\)"),
        ([(1, 0, 0.5), (0, 3, 0.5)], r"has the edge \(0, 3, 0.5\).* from 0 to 2"),
        ([(-1, 0, 0.5)], r"has the edge \(-1, 0, 0.5\)"),
        ([(0, 1, math.nan)], r"has the edge \(0, 1, nan\)"),
        ([(0, 1, 0.0)], "a weight other than 0"),
        ([(0, 1, 0.2), (0, 1, 0.2)], "the edge from worker 1 to worker 0 twice"),
        ([(0, 1)], r"are \[\(0, 1\)\]; give triples"),
    ],
)
def test_edges_that_are_none_are_refused_in_a_sentence(edges: list[tuple[int, int, float]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_edges(3, edges)


graphs = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=30))
)


@given(graph=graphs)
@settings(max_examples=50, deadline=None)
def test_metropolis_weights_keep_the_mean_on_any_graph(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, links = graph
    w = matrix(from_edges(n, metropolis(n, links)))
    assert (w == w.T).all()
    assert w.min() >= 0 and w.diagonal().min() > 0
    assert abs(w.sum(0) - 1).max() < 1e-12
    linked = {(i, j) for i, j in links if i != j} | {(j, i) for i, j in links if i != j}
    assert {(i, j) for i in range(n) for j in range(n) if i != j and w[i, j] > 0} == linked


@pytest.mark.parametrize("n", range(3, 40))
def test_the_spectral_gap_of_a_ring_is_its_closed_form(n: int) -> None:
    values = [(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(1, n)]
    assert spectral_gap(matrix(make_topology("ring", n).mixing(0))) == pytest.approx(
        1 - max(map(abs, values)), abs=1e-12
    )


@pytest.mark.parametrize("n", range(2, 65))
def test_the_spectral_gaps_of_complete_star_chain_and_exponential_are_their_closed_forms(n: int) -> None:
    def gap(name: str) -> float:
        return spectral_gap(matrix(make_topology(name, n).mixing(0)))

    bound = 2 / (math.ceil(math.log2(n)) + 1)
    assert gap("complete") == pytest.approx(1.0, abs=1e-12)
    assert gap("star") == pytest.approx(1 / n if n > 2 else 1.0, abs=1e-12)
    assert gap("chain") == pytest.approx(2 / 3 * (1 - math.cos(math.pi / n)) if n > 2 else 1.0, abs=1e-12)
    assert gap("exponential") == pytest.approx(bound, abs=1e-12) if n % 2 == 0 else gap("exponential") > bound


def test_the_spectral_gap_is_what_one_round_contracts_at_least() -> None:
    rng = np.random.default_rng(0)
    for name in DOUBLY_STOCHASTIC:
        w = matrix(make_topology(name, 8).mixing(1))
        x = rng.normal(size=(8, 200))
        x -= x.mean(0)
        contraction = np.linalg.norm(w @ x, axis=0) / np.linalg.norm(x, axis=0)
        assert contraction.max() <= 1 - spectral_gap(w) + 1e-12


def test_the_laplacian_condition_of_a_ring_is_its_closed_form() -> None:
    chi = laplacian_condition(matrix(make_topology("ring", 8, edge_weight=1.0).mixing(0)))
    assert chi == pytest.approx(2 / (1 - math.cos(math.pi / 4)))
    assert round(chi, 2) == 6.83


def test_the_laplacian_condition_is_one_for_everyone_and_infinite_for_islands() -> None:
    assert laplacian_condition(matrix(make_topology("complete", 6).mixing(0))) == pytest.approx(1.0)
    assert laplacian_condition(np.ones((1, 1))) == 1.0
    assert laplacian_condition(matrix(make_topology("random", 4).mixing(0))) == math.inf


def test_the_laplacian_condition_of_a_directed_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"differ from their transpose by up to 0\.25; use spectral_gap"):
        laplacian_condition(matrix(make_topology("exponential", 8).mixing(0)))
