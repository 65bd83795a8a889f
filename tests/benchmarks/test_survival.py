"""What `benchmarks/survival.py` counts as useful, and its runs in virtual time."""

from typing import Any

import pytest
from survival_model import Counted, Failure, Setting, counted, draw_failures, elastic_run, restarting_run

from gossamer.topologies import Topology, make_topology

TEN_ROUNDS = Setting(round_s=1.0, restart_s=2.25, lasts_s=10.0, noticed_s=0.0)


@pytest.fixture
def graph() -> Topology:
    return make_topology("random", 4)


def useful(setting: Any, failures: list[Any], graph: Topology) -> Any:
    lives, alive = elastic_run(setting, failures, graph)
    return counted(lives, graph, alive)


def test_without_failures_every_worker_step_is_in_the_mean_with_its_whole_weight(graph: Topology) -> None:
    assert useful(TEN_ROUNDS, [], graph) == Counted(40, pytest.approx(40.0))


def test_a_machine_that_fails_costs_the_rounds_that_its_slot_has_missed(graph: Topology) -> None:
    # It fails in the middle of round 4, trains again in round 6 after 2.25 rounds, and takes part from round 7 on.
    lives, alive = elastic_run(TEN_ROUNDS, [Failure(4.5, 2)], graph)
    assert [(life.begun.round, life.begun.after, life.begun.donor) for life in lives[2]] == [(0, 0, 2), (7, 6, 0)]
    assert [[one.round for one in life.rounds] for life in lives[2]] == [[0, 1, 2, 3], [7, 8, 9]]
    assert counted(lives, graph, alive).useful == 40 - 3


def test_a_process_that_dies_while_it_starts_starts_again(graph: Topology) -> None:
    lives, _ = elastic_run(TEN_ROUNDS, [Failure(1.5, 2), Failure(3.0, 2)], graph)
    assert [life.begun.round for life in lives[2]] == [0, 6]


def test_steps_that_died_before_anybody_had_them_do_not_count(graph: Topology) -> None:
    peer = graph.mixing(0).receives_from(1)[0]
    both = [Failure(1.5, 1), Failure(1.5, peer)]  # after their first exchange, which was with each other
    assert useful(Setting(1.0, 100.0, 10.0), both, graph).useful == 2 * 10


def test_a_run_without_any_machine_left_has_nothing(graph: Topology) -> None:
    assert useful(Setting(1.0, 2.0, 10.0), [Failure(3.5, i) for i in range(4)], graph) == Counted(0, 0.0)


@pytest.mark.parametrize(
    ("failures", "every", "checkpoint_s", "rounds"),
    [
        ([], 1, 0.0, 10),
        ([], 4, 0.5, 9),
        ([4.5], 1, 0.0, 7),  # four rounds are saved, and three fit after 6.75 s
        ([4.5], 3, 0.0, 6),
        ([4.5, 6.0], 1, 0.0, 5),  # the restart begins anew
        ([9.5], 1, 0.0, 9),
    ],
)
def test_a_restarting_run_goes_back_to_its_last_checkpoint(
    failures: list[float], every: int, checkpoint_s: float, rounds: int
) -> None:
    assert restarting_run(TEN_ROUNDS, [Failure(at_s, 0) for at_s in failures], every, checkpoint_s) == rounds


def test_machines_fail_at_the_rate_that_was_asked_for() -> None:
    drawn = draw_failures(8, 50.0, 10_000.0, "rate")
    assert len(drawn) == pytest.approx(8 * 10_000 / 50, rel=0.1)
    assert {one.machine for one in drawn} == set(range(8))
