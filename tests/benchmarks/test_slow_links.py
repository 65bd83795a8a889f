"""The benchmark of slow links on its smallest run: two real workers, of which one has a slow link, cost about their price."""

import pytest
import slow_links

TINY = slow_links.Setting(2, 4, 2, 0.1, ("DiLoCo", "GASLoC 1-Peer"), (0.2,), ("both",))


@pytest.mark.netns
def test_two_workers_on_a_really_slow_link_take_about_as_long_as_priced() -> None:
    cell = slow_links.Cell("DiLoCo", 0.2, "both", 0)
    with slow_links.namespaces(TINY, cell.share, cell.way) as places:
        result = slow_links.measure(TINY, cell, places, {})
    # 4 steps of 0.1 s, and 0.83 s for half a model there and half of the mean back at a fifth of the bandwidth
    assert result.priced_s == pytest.approx(result.rounds * (0.4 + 5 * 0.1 * 5 / 3), rel=0.01)
    assert 0.5 < result.measured_over_priced < 2


def test_the_paper_s_stragglers_take_15_steps_in_pairs_and_1_with_two_peers() -> None:
    cells = [cell for cell in slow_links.Setting().cells if cell.share == 0.1 and "GASLoC" in cell.method]
    assert {(cell.method, slow_links.steps_of(slow_links.Setting(), cell)[-1]) for cell in cells} == {
        ("GASLoC 1-Peer", 15),
        ("GASLoC 2-Peer", 1),
    }


def test_a_whole_run_is_estimated_at_half_an_hour() -> None:
    assert 20 < slow_links.estimate_s(slow_links.Setting()) / 60 <= 35


def result(method: str, rounds: float | None, priced_s: float, measured_s: float, ran: int = 9) -> tuple[object, ...]:
    cell = slow_links.Cell(method, 0.1, "both", 0)
    return slow_links.Result(cell, 15, 2.5, rounds, priced_s, measured_s, ran, 1.01)


def test_the_table_compares_with_diloco_on_the_same_links_and_says_what_was_not_reached() -> None:
    results = [
        result("DiLoCo", 8.0, 100.0, 110.0),
        result("GASLoC 1-Peer", 9.5, 60.0, 55.0, ran=10),
        result("GASLoC 2-Peer", None, 160.0, 150.0),
        result("data parallel", 120.0, 800.0, 820.0, ran=6),
    ]
    first, second, third = slow_links.table(results).splitlines()[3:]
    assert first == "| 10% both | 0 | GASLoC 1-Peer | 15 | 9.5 | 60.0 s | 55.0 s | 0.60 | 0.50 | 1.01 |"
    assert second == "| 10% both | 0 | GASLoC 2-Peer | 15 | not reached | > 160.0 s | > 150.0 s |  |  | 1.01 |"
    assert third == "| 10% both | 0 | data parallel | 15 | 120.0 | 800.0 s | 820.0 s from 6 | 8.00 | 7.45 | 1.01 |"


def test_rounds_to_a_loss_are_counted_between_evaluations() -> None:
    run = slow_links.Simulated([1, 2, 4], [3.0, 2.0, 1.0], None, {})
    assert [run.rounds_to(loss) for loss in (3.5, 2.5, 1.25, 0.5)] == [1, 1.5, 3.5, None]
