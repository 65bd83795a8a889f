"""Figures of an experiment: what their table says, what they refuse, and that equal outcomes give equal pictures."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import ConfigError
from gossamer.report import page
from gossamer.report.colours import COLOURS, places_of
from gossamer.report.figures import Figure, draw_figure, figure_table, line_styles
from gossamer.report.reach import reach
from gossamer.report.results import PointResult, result_lines


def outcome(method: str, loss: float | None, seed: int = 0, **at: object) -> PointResult:
    return PointResult(method, at, seed, {"loss": loss})


def timed(method: str, *curve: tuple[float, float], seed: int = 0) -> PointResult:
    return PointResult(method, {}, seed, {"loss": curve[-1][1] if curve else None, "loss_at_s": {"wan": list(curve)}})


def test_each_cell_is_the_mean_over_seeds_of_its_own_point():
    runs = [outcome(m, loss + s, s, h=h) for m, loss in (("a", 1.0), ("b", 5.0)) for h in (1, 2) for s in (0, 1)]
    assert figure_table(runs, Figure(x="h")).splitlines()[2:] == [
        "| a | 1.5000 ± 0.7071 | 1.5000 ± 0.7071 |",
        "| b | 5.5000 ± 0.7071 | 5.5000 ± 0.7071 |",
    ]


def test_a_run_that_diverged_leaves_its_cell_empty_and_the_figure_whole():
    runs = [outcome("a", 1.0, h=1), outcome("a", None, h=2), outcome("a", math.nan, h=3)]
    assert figure_table(runs, Figure(x="h")).splitlines()[2] == "| a | 1.0000 | – | – |"
    assert b"<svg" in draw_figure(runs, Figure(x="h"))
    grid = [outcome("a", loss, x=x, y=y) for x, y, loss in [(1, 1, 2.0), (2, 1, math.nan), (1, 2, 90.0), (2, 2, 2.5)]]
    assert b"<svg" in draw_figure(grid, Figure(x="x", y="y")) and "| 1 | 2.0000 | – |" in figure_table(
        grid, Figure(x="x", y="y")
    )


def test_a_seed_that_diverged_is_counted_and_its_method_does_not_look_as_if_it_had_not_run():
    runs = [outcome("a", loss, s, h=1) for s, loss in enumerate([1.0, 3.0, math.nan])]
    assert figure_table(runs, Figure(x="h")).splitlines()[2] == "| a | 2.0000 ± 1.4142 (2 of 3 seeds) |"
    assert figure_table([one._replace(at={"h": 1, "k": 1}) for one in runs], Figure(x="h", y="k")).count("2 of 3 seeds")
    against = [*runs, *(outcome("b", 2.0 + 0.1 * s, s, h=1) for s in range(3))]
    wanted = Figure(x="h", against="b", margin=0.1)
    assert "(2 of 3 seeds) |" in figure_table(against, wanted).splitlines()[-1]
    assert b"<svg" in draw_figure(against, wanted)


@pytest.mark.parametrize("last", [True, False])
def test_a_target_is_compared_with_runs_that_diverged_and_where_it_diverged_itself(last: bool) -> None:
    def run(method: str, seed: int, *curve: tuple[float, float]) -> PointResult:
        curves = {"loss_at_bytes": curve, "loss_at_round": curve, "loss_at_s": {"wan": curve}}
        return PointResult(method, {}, seed, {"loss": curve[-1][1], **curves})

    early = () if last else ((1.0, 3.0),)
    ends = {"a": [2.0, 2.1, math.nan, 2.2], "b": [1.9, math.nan, 1.9, 2.0]}
    runs = [run(name, s, *early, (2.0, loss)) for name, some in ends.items() for s, loss in enumerate(some)]
    paired = figure_table(runs, Figure(target="a", paired=True, margin=0.5))
    assert "| b | -0.1000, –, -0.2000 | -0.1500 ± 0.6353 |" in paired and "(2 of 3 seeds)" in paired
    reached = figure_table(runs, Figure(target="a"))
    assert "| b | 2 of 3 runs | 1.000, –, 1.000 | -0.1500 ± 0.0707 (2 of 3 seeds) |" in reached
    for figure in (Figure(target="a"), Figure(target="a", paired=True)):
        assert b"<svg" in draw_figure(runs, figure)
        none = [run("a", 0, (2.0, math.nan)), run("b", 0, (2.0, 1.9))]
        assert figure_table(none, figure).startswith("Nothing is compared") and b"<svg" in draw_figure(none, figure)


def test_points_of_a_list_that_differ_in_a_key_that_one_lacks_do_not_count_as_seeds():
    runs = [outcome("a", 1.0, x=1, lr=2), outcome("a", 2.0, x=1)]
    with pytest.raises(ConfigError, match="'a' sweeps lr too"):
        figure_table(runs, Figure(x="x"))


def test_variants_that_sweep_different_keys_share_an_axis():
    runs = [outcome("a", 1.0, **{"topology.name": "ring"}), outcome("b", 2.0, **{"topology.graph": "ring"})]
    wanted = Figure(x=("topology.name", "topology.graph"))
    assert figure_table(runs, wanted).splitlines()[2:] == ["| a | 1.0000 |", "| b | 2.0000 |"]
    with pytest.raises(ConfigError, match=r"'b' sweeps topology\.graph"):
        figure_table(runs, Figure(x="topology.name"))


def test_runs_that_differ_in_another_key_do_not_count_as_seeds():
    runs = [outcome("a", 1.0, s, lr=lr, workers=n) for lr in (1, 2) for n in (4, 8) for s in (0, 1)]
    with pytest.raises(ConfigError, match=r"'a' sweeps workers too, and its runs at 4 and 8 .* name it as figure\.y"):
        figure_table(runs, Figure(x="lr"))
    with pytest.raises(ConfigError, match=r"figure\.target is 'a', but 'a' sweeps workers too.*leave \[figure\] out"):
        draw_figure(runs, Figure(target="a"))
    assert "± 0.0000" in figure_table(runs, Figure(x="lr", y="workers"))
    together = [outcome("a", 1.0, s, steps=n, warmup=n // 10) for n in (10, 20) for s in (0, 1)]
    assert figure_table(together, Figure(x="steps")).splitlines()[2] == "| a | 1.0000 ± 0.0000 | 1.0000 ± 0.0000 |"


def test_the_first_evaluation_that_is_as_good_counts_and_none_is_interpolated():
    runs = [
        timed("slow", (10, 3.0), (20, 2.0)),
        timed("fast", (5, 2.5), (9, 1.9), (12, 2.1)),
        timed("never", (40, 2.5)),
    ]
    assert [one.ratio for one in reach(runs, "slow")] == [1.0, 0.45, None]
    behind = [one.behind for one in reach(runs, "slow")]
    assert behind == [0.0, pytest.approx(0.1), None], "of the last evaluation in the target's time"
    assert "| never | 0 of 1 runs | – | – |" in figure_table(runs, Figure(target="slow"))


@pytest.mark.full
def test_runs_are_paired_at_the_targets_bytes_after_its_rounds_and_in_its_time():
    def run(method: str, seed: int, *losses: float, size: float, takes_s: float) -> PointResult:
        by_bytes, by_s, by_round = ([(k * x, loss) for k, loss in enumerate(losses)] for x in (size, takes_s, 1.0))
        row = {"loss": losses[-1], "loss_at_bytes": by_bytes, "loss_at_s": {"wan": by_s}, "loss_at_round": by_round}
        return PointResult(method, {}, seed, row)

    runs = [run("mean", seed, 3.0, 2.5, 2.0, size=7.0, takes_s=8.0) for seed in (0, 1)]
    runs += [run("pairs", seed, 3.0, 2.2 + 0.2 * seed, 2.1, 1.5, size=4.0, takes_s=9.0) for seed in (0, 1)]
    tables = figure_table(runs, Figure(target="mean", paired=True)).split("\n\n")
    for where, differences in [
        ("at its sent bytes", "-0.5000, -0.5000 | -0.5000 ± 0.0000"),
        ("after its rounds", "+0.1000, +0.1000 | +0.1000 ± 0.0000"),
        ("in its time on wan", "+0.2000, +0.4000 | +0.3000 ± 1.2706"),
    ]:
        assert sum(where in one and f"| pairs | {differences} |" in one for one in tables) == 1
    assert draw_figure(runs, Figure(target="mean", paired=True)).count(b'id="axes_') == 3


def test_runs_that_are_validated_once_are_compared_at_their_ends_whatever_they_sent():
    def run(method: str, seed: int, loss: float | None, sent: float) -> PointResult:
        last = [] if loss is None else [(sent, loss)]
        row = {"loss": loss, "loss_at_s": {"wan": last}, "loss_at_bytes": last, "loss_at_round": last}
        return PointResult(method, {}, seed, row)

    runs = [run("mean", seed, 2.0, 8.0) for seed in (0, 1)] + [run("more", seed, 1.5, 9.0) for seed in (0, 1)]
    found = figure_table(
        [*runs, run("lost", 0, 2.5, 8.0), run("lost", 1, None, 8.0)], Figure(target="mean", paired=True)
    )
    assert found.startswith("| loss above mean's, at the end |") and "sent bytes" not in found
    assert "| more | -0.5000, -0.5000 | -0.5000 ± 0.0000 |" in found
    assert "| lost | +0.5000, – | +0.5000 |" in found


def test_pairs_of_runs_that_are_validated_once_are_drawn_as_differences():
    def drawn(ends: int) -> str:
        def run(method: str, seed: int, loss: float | None) -> PointResult:
            curve = [] if loss is None else [(5 + k, loss) for k in range(ends)]
            row = {"loss": loss, "loss_at_s": {}, "loss_at_bytes": curve, "loss_at_round": curve}
            return PointResult(method, {}, seed, row)

        methods = {"mean": 2.0, "pairs": 2.1, "ring": 2.3}
        runs = [run(method, seed, loss + seed) for method, loss in methods.items() for seed in (0, 1, 2)]
        return draw_figure([*runs, run("lost", 0, None)], Figure(target="mean", paired=True, margin=0.01)).decode()

    assert "each seed and mean" in drawn(1) and "each seed and mean" not in drawn(2)


def test_each_seed_is_held_against_its_own_target():
    runs = [timed(m, (s, 3.0 - seed), seed=seed) for m, s in (("slow", 8), ("fast", 4)) for seed in (0, 1)]
    assert [one.ratio for one in reach(runs, "slow")] == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(ConfigError, match="did you mean 'slow'"):
        reach(runs, "slo")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "wanted", [Figure(x="h", log_x=True), Figure(x="name"), Figure(x="h", y="name"), Figure(target="a")]
)
def test_equal_outcomes_give_equal_bytes(wanted: Figure):
    swept = {"h": (1, 10), "name": ("ring", "star")}
    keys = [key for key in swept if key in (*wanted.keys, wanted.y)]
    runs = [
        PointResult(m, dict(zip(keys, at, strict=True)), s, {"loss": s, "loss_at_s": {"wan": [(1.0, 2.0), (2.0, s)]}})
        for m in ("a", "b")
        for at in itertools.product(*map(swept.__getitem__, keys))
        for s in (0, 1)
    ]
    drawn = draw_figure(runs, wanted)
    assert drawn == draw_figure(runs, wanted) and drawn.startswith(b"<?xml")


def test_the_lines_hold_all_that_the_figure_is_made_of():
    runs = [timed("a", (1.0, 2.0), (2.0, math.nan)), timed("b", (1.0, 1.5))]
    read = [json.loads(line) for line in result_lines(runs).splitlines()]
    assert [one["row"]["loss_at_s"] for one in read] == [{"wan": [[1.0, 2.0], [2.0, None]]}, {"wan": [[1.0, 1.5]]}]


@pytest.mark.parametrize(
    "options", [{}, {"x": "h", "target": "a"}, {"y": "h", "target": "a"}, {"x": "h", "paired": True}]
)
def test_a_figure_without_one_subject_is_refused(options: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"needs one of the two|without an x|figure.target is ''"):
        Figure(**options)


def test_pages_and_figures_have_the_same_colours_and_no_two_methods_share_one_line() -> None:
    files = Path(page.__file__).parent / "files"
    first = re.findall(r"--c\d: (#\w{6});", (files / "page.css").read_text(encoding="utf-8"))[: len(COLOURS)]
    assert tuple(first) == COLOURS
    script = (files / "marks.js").read_text(encoding="utf-8")
    assert f"G.COLOURS = {len(COLOURS)};" in script
    many = ["DiLoCo", "diloco", *(f"DiLoCo, H = {h}" for h in range(9)), *(f"x{k}" for k in range(9))]
    assert len({*places_of(many).values()}) == len(many)
    alone, among = line_styles(["GASLoC 2-Peer"]), line_styles(["NoLoCo", "lr=3", "GASLoC 1-Peer", "GASLoC 2-Peer"])
    assert alone["GASLoC 2-Peer"] == among["GASLoC 2-Peer"]
