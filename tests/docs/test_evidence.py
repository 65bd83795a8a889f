"""The registered experiments: settings that were tuned, what their pages make of outcomes, and the verdicts on claims."""

import itertools
import json
import math
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plan_races
import pytest
import scipy

from generators import (
    annealed,
    casts,
    claims,
    effective_step,
    equal_terms,
    experiments,
    fresh,
    gains,
    leaderboard,
    local_steps,
    slow_uplink,
    sources,
    surface,
    verdicts,
    warmups,
)
from generators.verdicts import Arm
from gossamer.data.corpus import open_corpus, text_fingerprint
from gossamer.errors import DataError
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.links import read_network
from gossamer.record.jsonl import json_lines
from gossamer.report.paired import Effect, effect, holm, trend
from gossamer.report.results import PointResult, read_results
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import Point, points
from gossamer.run.config.resolve import resolve
from gossamer.run.experiments.tune import contenders, searched
from gossamer.run.planning.candidates import USUAL, choose_among, price_recipes
from gossamer.run.planning.choice import best_of_each
from gossamer.run.planning.expected_loss import LossScale, expected_difference, penalty
from gossamer.run.planning.measured_losses import measured_schedule, nearest_measured
from gossamer.run.planning.plan import PlanSettings, bits_per_parameter, plan
from tiny import document

ROOT = Path(__file__).parents[1].parent
CONFIGS = ROOT / "experiments" / "evidence"
FIRST_STAGE = ROOT / "docs" / "results" / "evidence"
AT_STAGE_1 = ("tuned", "momentum", "rounds", "straggler", "size")
SEARCHED_AS = {
    "DiLoCo": "diloco",
    "local SGD": "local_sgd",
    "GASLoC 1-Peer": "gasloc",
    "gossip 1-Peer": "gossip",
    "GASLoC 2-Peer": "gasloc_2peer",
    "gossip 2-Peer": "gossip_2peer",
    "NoLoCo": "noloco",
}
"""The methods of the second search by their labels in other files."""


def arm(*differences: float) -> Arm:
    return Arm("a", [(difference, 2.0) for difference in differences])


LEADS, TRAILS, ALIKE, OPEN = (
    arm(-0.05, -0.051, -0.052),
    arm(0.05, 0.051, 0.052),
    arm(0.001, -0.001, 0.0),
    arm(-0.1, 0.1),
)


@pytest.mark.parametrize(
    ("rule", "arms", "verdict"),
    [
        (verdicts.leads, [LEADS, LEADS], "holds"),
        (verdicts.leads, [LEADS, TRAILS], "holds in part"),
        (verdicts.leads, [LEADS, OPEN], "holds in part"),
        (verdicts.leads, [TRAILS, ALIKE], "fails"),
        (verdicts.leads, [ALIKE, OPEN], "open"),
        (verdicts.leads, [arm(-0.05)], "open"),
        (verdicts.leads, [arm(-0.05, -0.054, -0.046, -0.058)], "holds"),
        (verdicts.leads, [arm(-0.05, -0.04, -0.017), *[OPEN] * 9], "open"),
        (verdicts.equal, [ALIKE, ALIKE], "holds"),
        (verdicts.equal, [ALIKE, LEADS], "holds in part"),
        (verdicts.equal, [LEADS], "fails"),
        (verdicts.equal, [OPEN], "open"),
        (verdicts.matches, [ALIKE, LEADS], "holds"),
        (verdicts.matches, [ALIKE, OPEN], "holds in part"),
        (verdicts.matches, [TRAILS], "fails"),
        (lambda arms: verdicts.costs_little(arms, 0.2), [ALIKE], "holds"),
        (lambda arms: verdicts.costs_little(arms, 0.2), [TRAILS], "fails"),
        (lambda arms: verdicts.costs_little(arms, 0.2), [arm(0.001, 0.006)], "open"),
    ],
)
def test_a_verdict_follows_from_the_differences_by_a_rule_that_was_fixed(
    rule: Any, arms: Sequence[Arm], verdict: str
) -> None:
    judged = rule(arms)
    assert judged.verdict == verdict and judged.effect


def test_a_trend_holds_where_it_is_sure_and_fails_where_its_opposite_is() -> None:
    up = [[1.0, 1.1, 1.2, 1.3]] * 3
    down = [[*reversed(row)] for row in up]
    assert verdicts.rises({"a": up}).verdict == "holds"
    assert verdicts.rises({"a": up, "b": down}).verdict == "holds in part"
    assert verdicts.rises({"a": down}).verdict == "fails"
    assert verdicts.rises({"a": up[:1]}).verdict == "open"


def test_growth_is_bounded_only_if_that_is_sure() -> None:
    assert verdicts.stays({"a": [1.0, 1.01, 0.99]}, 1.5).verdict == "holds"
    assert verdicts.stays({"a": [1.0, 1.01, 0.99], "b": [4.0, math.inf, 4.0]}, 1.5).verdict == "holds in part"
    assert verdicts.stays({"a": [4.0, 4.1, 3.9]}, 1.5).verdict == "fails"
    assert verdicts.stays({"a": [1.0]}, 1.5).verdict == verdicts.stays({"a": [1.0, 2.0]}, 1.5).verdict == "open"


def verdict_on(
    number: int, lines: Sequence[tuple[str, Mapping[str, Any], Mapping[str, float | None]]]
) -> verdicts.Found | None:
    """What a claim's test says of these variants, places and rows, over three seeds that scatter a little."""
    stem = claims.CHECKS[number].command.split("/")[2].split(".")[0]
    runs = points(load_document(CONFIGS / f"{stem}.toml"), seeds=range(3))
    ended = [
        PointResult(
            name, at, seed, {key: None if value is None else value * (1 + seed / 1e4) for key, value in row.items()}
        )
        for name, at, row in lines
        for seed in range(3)
    ]
    return claims.CHECKS[number].found(lambda asked: (runs, ended) if asked == stem else ([], []))


@pytest.mark.parametrize(("slope", "verdict"), [(1, "holds"), (-1, "fails")])
def test_the_best_outer_learning_rate_is_that_of_the_lowest_loss_with_each_number_of_workers(
    slope: int, verdict: str
) -> None:
    rates, numbers = [0.5, 0.7, 1.0, 1.4], [4, 8, 16, 32]
    best = dict(zip(numbers, rates[::slope], strict=True))
    lines = [
        ("DiLoCo", {"workers": n, "rule.lr": rate, "inner.lr": lr}, {"loss": 2.0 + abs(rate - best[n]) + lr})
        for n in numbers
        for rate in rates
        for lr in (2e-3, 4e-3)
    ]
    judged = verdict_on(9, lines)
    assert judged is not None and judged.verdict == verdict and f"{best[4]:.2f} with 4" in judged.effect
    assert verdict_on(9, lines[:-1]) is None  # the best of some is not the best of all


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "holds"), (3.0, "fails"), (None, "fails")])
def test_disagreement_is_bounded_where_a_longer_run_ends_with_as_much(factor: float | None, verdict: str) -> None:
    ends: dict[int, Mapping[str, float | None]] = {1350: {"loss": 2.0, "disagreement": 0.1}}
    ends[2700] = {"loss": factor and 2.0, "disagreement": 0.1 * (factor or 1.0)}
    lines = [
        ("Factored Gossip", {"rule.lr": 0.07, "rule.momentum": 0.95, "run.steps": steps}, row)
        for steps, row in ends.items()
    ]
    judged = verdict_on(13, lines)
    assert judged is not None and judged.verdict == verdict


def test_stale_adam_counts_at_the_best_of_its_outer_learning_rates() -> None:
    losses = {"CGAD": (2.2, 2.0), "Adam-Decay": (2.1, 2.05), "Adam": (2.3, 2.1)}
    lines = [
        (name, {"server.lr": rate}, {"loss": loss})
        for name, some in losses.items()
        for rate, loss in zip((3e-4, 1e-3), some, strict=True)
    ]
    verdict = verdict_on(15, lines)
    assert verdict is not None and verdict.verdict == "holds" and "CGAD above Adam -0.1" in verdict.effect


def test_restarts_are_judged_by_the_share_of_settings_near_the_best_run() -> None:
    def lines(lost: str) -> list[tuple[str, Mapping[str, Any], Mapping[str, float | None]]]:
        return [
            (name, {"rule.lr": k}, {"loss": 2.5 if (name, k) == (lost, 1) else None if name == lost else 2.0})
            for name in ("restarts every three rounds", "no restarts")
            for k in range(4)
        ]

    for lost, verdict in (("no restarts", "holds"), ("restarts every three rounds", "fails")):
        judged = verdict_on(17, lines(lost))
        assert judged is not None and judged.verdict == verdict


def test_rankings_are_alike_only_if_that_is_sure() -> None:
    some = [*range(20)]
    assert verdicts.ranked_alike(some, [x**3 for x in some]).verdict == "holds"
    assert verdicts.ranked_alike(some, [-x for x in some]).verdict == "fails"
    assert verdicts.ranked_alike(some[:4], some[:4]).verdict == "open"
    assert verdicts.ranked_alike(some[:6], [1, 0, 2, 4, 3, 5]).verdict == "open"


@pytest.mark.full
def test_every_registered_claim_has_a_row_and_each_test_belongs_to_a_claim() -> None:
    rows = claims.claims_page().splitlines()[2:]
    listed = claims.registered()
    assert [*listed] == [*range(1, len(listed) + 1)] and len(listed) >= 29 and claims.CHECKS.keys() <= listed.keys()
    assert [row.split("|")[1].strip() for row in rows] == [str(number) for number in listed]
    words = {"holds", "holds in part", "fails", "open", "not testable here", "not run yet"}
    assert {row.split("|")[-4].strip() for row in rows} <= words
    read = {number: row.split("|")[-3].strip() for number, row in zip(listed, rows, strict=True)}
    assert {*read.values()} <= words | {"not tested"}
    assert claims.READ_AGAIN.items() <= read.items()
    for check in claims.CHECKS.values():
        assert check.found(lambda stem: ([], [])) is None or check is claims.CHECKS[5]


@pytest.mark.parametrize(
    ("number", "stem", "praised", "other", "at"),
    [
        (4, "workers_tuned-n16", ["Nesterov", "heavy ball"], "SGD", {}),
        (26, "narrow_muon_tuned-h64", ["ResBM 8"], "uncompressed", {}),
        (27, "narrow_adamw_tuned", ["subspace 2"], "uncompressed", {}),
        (28, "tahquant_tuned-h64", ["TAH-Quant 4 bits", "TAH-Quant 3 bits"], "uncompressed", {}),
        (29, "experts_tuned", ["FoMoE"], "DiLoCo, equal bytes per token", {}),
    ],
)
def test_a_claim_finds_its_pairs_in_the_outcomes_of_its_file(
    number: int, stem: str, praised: Sequence[str], other: str, at: dict[str, int]
) -> None:
    def outcomes(gain: float) -> claims.Outcomes:
        losses = [*((name, at, 2.0 - gain * (len(praised) - k)) for k, name in enumerate(praised))]
        losses.append((other, dict.fromkeys(at, 1), 2.0))
        lines = [
            PointResult(name, where, seed, {"loss": loss + 0.001 * seed * seed})
            for name, where, loss in losses
            for seed in range(3)
        ]
        return lambda asked: ([], lines if asked == stem else [])

    for gain, verdict in ((0.05, "holds"), (-0.05, "fails")):
        judged = claims.CHECKS[number].found(outcomes(gain))
        assert judged is not None and judged.verdict == verdict, judged


def test_local_steps_are_compared_over_the_files_of_their_own_settings() -> None:
    def outcomes(**losses: float) -> claims.Outcomes:
        def of(stem: str) -> tuple[Sequence[Point], Sequence[PointResult]]:
            name, _, scale = stem.partition("-")
            if name != "local_steps_tuned" or (scale or "h30") not in losses:
                return [], []
            loss = losses[scale or "h30"]
            judged = [
                PointResult(m, {}, seed, {"loss": loss + 1e-3 * seed})
                for m in ("DiLoCo", "GASLoC")
                for seed in range(5)
            ]
            return [], [*judged, PointResult("GASLoC", {}, 5, {"loss": None})]

        return of

    def verdict(number: int, of: claims.Outcomes) -> str:
        judged = claims.CHECKS[number].found(of)
        assert judged is not None
        return judged.verdict

    rising = outcomes(h1=1.5, h5=1.6, h30=1.7, h120=1.9)
    assert verdict(2, rising) == "holds", "a seed that was lost at one of them is left out"
    assert verdict(8, rising) == "fails", "one step is not the worst"
    assert verdict(8, outcomes(h1=1.7, h5=1.6)) == "holds"
    assert claims.CHECKS[2].found(outcomes(h30=1.7)) is None, "one number of local steps is no trend"


def ended(run: Point, loss: float, **row: Any) -> PointResult:
    return PointResult(run.method, run.at, run.seed, {"loss": loss, "alignment": None, **row})


def runs_of(seeds: Sequence[int] = (0, 1), **given: Any) -> list[Point]:
    return points(document(**given), seeds=seeds)


def test_momentum_is_compared_with_none_in_each_cell_and_its_gain_with_the_alignment_there() -> None:
    rows = [
        {"label": "gossip", "rule.name": "gossip"},
        {"label": "GASLoC", "rule": {"name": "gasloc", "momentum": 0.5}, "inner.lr": 1e-4},
        {"label": "DiLoCo", "rule.name": "diloco", "topology.name": "complete"},
    ]
    sweep = [{"run.local_steps": h, "workers": n} for n in (2, 3) for h in (1, 2, 3)]
    runs = runs_of(variant=rows, sweep=sweep)
    gain = {(2, 1): 0.01, (2, 2): 0.02, (2, 3): 0.03, (3, 1): 0.04, (3, 2): 0.05, (3, 3): 0.06}

    def outcome(run: Point) -> PointResult:
        cell = run.config.workers, run.config.length.full_steps
        lower = gain[cell] * (1 + 0.01 * run.seed) if run.method == "GASLoC" else 0.0
        return ended(run, 2.0 + run.seed - lower, alignment=10 * gain[cell])

    whole = [outcome(run) for run in runs]
    results = gains.gains(runs, whole)
    assert [one.where["H"] for one in results] == [1, 2, 3] * 2 and {one.method for one in results} == {"GASLoC"}
    assert gains.rank_correlation(results) == pytest.approx(1.0)
    page = gains.gains_page(results)
    assert "| with momentum | loss above that of | workers | H | rounds | alignment |" in page
    assert "-0.0100, -0.0101" in page and "over 6 cells: 1.00" in page
    assert gains.drawn_gains(results).endswith(b"</svg>\n")
    early = [one for one in whole if one.method == "gossip"] + whole[len(sweep) * 2 : len(sweep) * 2 + 1]
    (alone,) = gains.gains(runs, early)
    assert len(alone.pairs) == 1 and gains.rank_correlation([alone]) is None and "gossip" in gains.gains_page([alone])
    diverged = [one._replace(row={**one.row, "loss": math.nan}) for one in whole if one.method == "GASLoC"]
    assert gains.gains(runs, [*early, *diverged]) == []


def test_averaging_with_an_outer_learning_rate_of_its_own_is_without_momentum_too() -> None:
    rows = [
        {"label": "averaging", "rule": {"name": "gasloc", "lr": 1.4, "momentum": 0.0}},
        {"label": "GASLoC", "rule": {"name": "gasloc", "momentum": 0.5}},
    ]
    runs = runs_of(variant=rows)
    (results,) = gains.gains(runs, [ended(run, 2.0 - 0.1 * (run.method == "GASLoC")) for run in runs])
    assert (results.method, results.plain) == ("GASLoC", "averaging")


def test_annealed_branches_stand_at_their_share_of_the_time_in_which_the_target_ends() -> None:
    rows = [
        {"label": "DiLoCo", "rule.name": "diloco", "topology.name": "complete", "sweep": {"run.steps": [8, 12]}},
        {"label": "pairs", "sweep": {"run.steps": [12, 14, 16]}},
    ]
    runs = runs_of(variant=rows, inner__schedule="wsd")

    def outcome(run: Point) -> PointResult:
        rounds, pairs = run.config.length.rounds, run.method == "pairs"
        return ended(
            run,
            3.0 - 0.1 * rounds + 0.1 * pairs + 0.05 * pairs * run.seed,
            wall_s={"straggler": rounds * (5.0 if pairs else 10.0)},
        )

    results = annealed.branches(runs, [outcome(run) for run in runs], "DiLoCo")
    assert len(results) == 10 and {one.share for one in results if one.method == "DiLoCo"} == {4 / 6, 1.0}
    assert annealed.time_shares(results, "pairs", "straggler") == {0: 35 / 60, 1: 40 / 60}
    assert annealed.shares_between(results, "pairs", "straggler") == pytest.approx({0: 35 / 60, 1: 37.5 / 60})
    page = annealed.annealed_page(results, "DiLoCo")
    assert (
        "| pairs | 0.583, 0.667 | 0.625 | 0.583, 0.625 |" in page
        and "| pairs | 8 | 0.667 | -0.1000, -0.0500 | -0.0750 |" in page
    )
    assert annealed.drawn_branches(results, "DiLoCo").endswith(b"</svg>\n")
    assert page.startswith("Beside DiLoCo after 6 rounds")
    beside = annealed.branches(runs, [outcome(run) for run in runs], "DiLoCo", 8)
    assert {one.share for one in beside if one.method == "DiLoCo"} == {1.0, 1.5}, "the target's runs of 8 steps"
    assert annealed.annealed_page(beside, "DiLoCo").startswith("Beside DiLoCo after 4 rounds")
    shorter = annealed.branches(
        runs, [outcome(run) for run in runs if run.config.length.rounds != 6 or run.seed], "DiLoCo"
    )
    assert {one.seed for one in shorter} == {1}, "the longest that has ended is that of one seed"
    never = [one for one in results if one.rounds < 8]
    assert annealed.time_shares(never, "pairs", "straggler") == {0: 35 / 60, 1: None}
    assert "1 of 2 seeds" in annealed.annealed_page(never, "DiLoCo")
    assert annealed.branches(runs, [outcome(run) for run in runs if run.method == "pairs"], "DiLoCo") == []
    judged = claims._sooner(lambda stem: (runs, [outcome(run) for run in runs]) if "-" not in stem else ([], []))
    assert judged is not None and judged.verdict == "holds" and "pairs at 10 % -0.3958" in judged.effect


def test_beside_a_slow_uplink_a_method_is_sooner_than_diloco_with_the_same_codec_after_holm_s_correction() -> None:
    needs = {"DiLoCo, H = 30": 1.0, "DiLoCo, H = 60": 0.8, "DiLoCo, H = 120": 0.7, "pairs": 0.6}
    results = [
        annealed.Branch(f"{name}, {codec}", network, seed, rounds, share * price, above)
        for name, target in needs.items()
        for codec, price, cost in (("fp32", 1.0, 0.0), ("bf16", 0.5, 0.001))
        for seed in range(5)
        for network in ("tenth", "thirtieth")
        for rounds, share in ((10, 0.5), (20, 1.5))
        for above in (0.1 * (target - share) + 0.0001 * seed * (name == "pairs") + cost,)
    ]
    page = equal_terms.equal_terms_page(results)
    assert "means of 5 seeds" in page
    assert "| DiLoCo, H = 60, fp32 | 0.80 [0.80, 0.80] | 0.80 [0.80, 0.80] |" in page
    pairs = "| pairs, fp32 | 0.60 [0.60, 0.60] | 0.60 [0.60, 0.60] |"
    assert pairs in page
    assert "| pairs | DiLoCo, H = 120 | -0.098 ± 0.002 sooner | -0.098 ± 0.002 sooner |" in page
    assert "| DiLoCo, H = 60, bf16 | +0.0010 ± 0.0000 |" in page, "of DiLoCo the codec is all that differs"
    assert "| pairs, bf16 | +0.0" not in page
    assert equal_terms.drawn_shares(results).endswith(b"</svg>\n")

    half = [one for one in results if one.seed < 4 or one.method != "pairs, bf16" or one.rounds == 10]
    assert equal_terms.equal_terms_page(half) == equal_terms.equal_terms_page([one for one in results if one.seed < 4])
    never = [one._replace(above=one.above + 1.0 * (one.method == "pairs, fp32" and one.seed == 3)) for one in results]
    page = equal_terms.equal_terms_page(never)
    assert "| pairs, fp32 | 4 of 5 seeds | 4 of 5 seeds |" in page and "| pairs | DiLoCo, H = 120 | – | – |" in page
    tied = [one._replace(above=one.above + 0.01 * (one.seed % 2) * (one.method == "pairs, fp32")) for one in results]
    assert "| pairs | DiLoCo, H = 120 | -0.058 ± 0.068 | -0.058 ± 0.068 |" in equal_terms.equal_terms_page(tied)


def test_the_leaderboard_ranks_methods_at_equal_tokens_and_says_what_their_runs_take() -> None:
    def run(method: str, seed: int, losses: Sequence[float], sent: float, seconds: float | None) -> PointResult:
        curve = [*zip(range(1, len(losses) + 1), losses, strict=True)]
        row = {
            "loss": losses[-1],
            "sent_bytes": sent * len(losses),
            "wall_s": {} if seconds is None else {"slow-uplink": len(losses) * seconds},
            "loss_at_s": {} if seconds is None else {"slow-uplink": [(k * seconds, loss) for k, loss in curve]},
        }
        return PointResult(method, {}, seed, row)

    every = [
        *(run("gasloc", seed, [3.0, 2.5, 2.0 + 0.1 * seed], 1e6, 60.0) for seed in (0, 1)),
        *(run("diloco", seed, [2.9, 2.3, 1.9], 2e6, 120.0) for seed in (0, 1, 2)),
        *(run("a2cid2", seed, [2.4], 9e6, None) for seed in (0, 1)),
    ]
    best, *_ = results = leaderboard.standings(every)
    assert [one.method for one in results] == ["diloco", "gasloc", "a2cid2"] and best.minutes == {"slow-uplink": 6.0}
    table = leaderboard.leaderboard_table(results, ["gasloc", "sgp"])
    assert "| gasloc | 2.0500 ± 0.0707 | 3.0 | 3.0 |" in table and "| a2cid2 | 2.4000 ± 0.0000 | 9.0 | – |" in table
    assert "| sgp | not run yet | – | – |" in table
    picture = leaderboard.drawn_standings(results).decode()
    assert all(picture.count(name) >= 1 for name in ("a2cid2", "gasloc", "slow-uplink", "nats per byte"))
    assert leaderboard.standings(every[1:3]) == [], "no seed that both have"
    assert "| gasloc | not run yet |" in leaderboard.leaderboard_table([], ["gasloc"])


def test_later_stages_use_the_settings_that_tuning_chose() -> None:
    """Of contiguous shards as soon as that search has ended for the method."""
    chosen: dict[tuple[str, str, str], dict[str, Any]] = {}
    for shards, name in (("iid", "tuning"), ("contiguous", "tuning_contiguous")):
        outcomes = FIRST_STAGE / f"{name}.jsonl"
        for one in searched(contenders(load_document(CONFIGS / f"{name}.toml")), outcomes) if outcomes.exists() else ():
            if one.result is not None and one.result.best is not None:
                topology = one.contender.config.topology
                graph = f"{topology.name}{topology.options.get('peers', '')}"
                chosen[shards, one.contender.config.rule.name, graph] = one.contender.chosen(one.result.best)
    assert len(chosen) >= 7
    for name in AT_STAGE_1:
        for run in points(load_document(CONFIGS / f"{name}.toml")):
            rule, topology = run.config.rule, run.config.topology
            graph = f"{topology.name}{topology.options.get('peers', '')}"
            shards = str(run.config.data.shards)
            wanted = chosen.get((shards, rule.name, graph)) or chosen.get(("iid", rule.name, graph))
            wanted = wanted or chosen["iid", rule.name, "random2" if topology.name == "ring" else "random1"]
            assert wanted.items() <= given(run).items(), (name, run.label, wanted)


def given(run: Point) -> dict[str, Any]:
    """What tuning chooses, as a run has it."""
    return {
        "inner.lr": run.config.inner.lr,
        **{f"rule.{key}": value for key, value in run.config.rule.options.items()},
    }


def chosen_by(search: str) -> dict[str, dict[str, Any]]:
    """The settings of each variant of a search that has ended for it."""
    return {
        one.contender.row.label: one.contender.chosen(one.result.best)
        for one in searched(contenders(load_document(CONFIGS / f"{search}.toml")), FIRST_STAGE / f"{search}.jsonl")
        if one.result is not None and one.result.best is not None
    }


def test_what_runs_again_and_the_demo_use_the_settings_that_whole_runs_chose() -> None:
    chosen = chosen_by("leaderboard")
    for file in (CONFIGS / "tuned_again.toml", CONFIGS / "straggler_again.toml", ROOT / "configs" / "demo.toml"):
        for run in points(load_document(file)):
            wanted = chosen[SEARCHED_AS[run.method]]
            assert wanted.items() <= given(run).items(), (file.name, run.label, wanted)


def losses_of(stem: str, method: str, **at: Any) -> dict[int, float]:
    """Of each seed, at the points with these swept values; a dot of their keys is an underscore."""
    return {
        one.seed: one.row["loss"]
        for one in read_results(FIRST_STAGE / f"{stem}.jsonl")
        if one.method == method
        and at.items() <= {key.replace(".", "_"): value for key, value in one.at.items()}.items()
    }


def difference(ours: Mapping[int, float], theirs: Mapping[int, float], *, spread: bool = True, digits: int = 3) -> str:
    """As the page writes it: without its sign, over the seeds of both."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs)]
    text = f"{abs(statistics.fmean(differences)):.{digits}f}"
    return f"{text} ± {statistics.stdev(differences):.{digits}f}" if spread else text


PAGES = [ROOT / "docs" / "evidence.md", *sorted((ROOT / "docs" / "evidence").glob("*.md"))]


def page_of_evidence() -> str:
    """All of its pages, without their line ends."""
    return " ".join("\n".join(page.read_text(encoding="utf-8") for page in PAGES).split())


def test_bf16_moves_the_gain_of_momentum_by_less_than_a_tenth_of_it() -> None:
    """The numbers that docs/evidence/momentum.md says of it: the largest difference of a run, and that of the gains."""
    of = {
        name: {
            (one.method, one.seed): one.row["loss"]
            for one in read_results(FIRST_STAGE / f"{name}.jsonl")
            if one.at["workers"] == 8 and one.at["run.local_steps"] == 40
        }
        for name in ("momentum", "momentum_fp32")
    }
    ours, exact = of["momentum"], of["momentum_fp32"]
    assert ours.keys() == exact.keys() and len(ours) == 60
    furthest = max(abs(ours[run] - exact[run]) for run in ours)
    plain = {"GASLoC": "gossip", "DiLoCo": "local SGD"}
    moved = [
        ours[method, seed] - ours[other, seed] - exact[method, seed] + exact[other, seed]
        for method, seed in ours
        for name, without in plain.items()
        if method.startswith(name) and (other := method.replace(name, without))
    ]
    expected = f"{statistics.fmean(moved):.4f} ± {statistics.stdev(moved):.4f}"
    text = page_of_evidence()
    assert len(moved) == 30 and expected in text and f"{furthest:.4f}" in text


def test_what_the_page_says_beyond_one_file_follows_from_the_outcomes() -> None:
    page = page_of_evidence()
    slower = losses_of("noise", "DiLoCo")
    spread = statistics.stdev(losses_of("noise", "GASLoC 1-Peer")[seed] - slower[seed] for seed in slower)
    assert 0.006 < spread < 0.017, "what stage 0 expected"
    shown = float(scipy.stats.t.ppf(0.975, 2)) * spread / math.sqrt(3)
    assert f"only where the mean difference exceeds about {shown:.2f}" in page
    gated = losses_of("attempts", "the same, with the step to 1"), losses_of("attempts", "GASLoC 1-Peer")
    assert f"{difference(*gated, digits=4)} |" in page
    one, everyone = (
        {stem: losses_of(stem, method) for stem in ("size", "size-440k", "size-870k")}
        for method in ("GASLoC 1-Peer", "DiLoCo")
    )
    for seed in range(3):
        gaps = [one[stem][seed] - everyone[stem][seed] for stem in one]
        assert gaps == sorted(gaps, reverse=True), "the gap falls from size to size in each seed"
    constant = losses_of("disagreement", "GASLoC 1-Peer", run_steps=1350, rule_momentum=0.5)
    cosine = losses_of("rounds", "GASLoC 1-Peer", run_steps=1350)
    assert f"{difference(constant, cosine, spread=False)} and in each seed" in page
    assert all(constant[seed] < cosine[seed] for seed in constant)
    faster, full = losses_of("tuned", "DiLoCo"), losses_of("tuned_again", "DiLoCo")
    assert f"it ends {difference(faster, full, spread=False)} lower at (1, 0.5)" in page
    cells = gains.gains(*claims.committed("momentum"))
    pairs = [difference for cell in cells for difference, _ in cell.pairs]
    assert f"momentum ends lower in {sum(one < 0 for one in pairs)} of ninety pairs" in page and len(pairs) == 90
    rho = re.search(r"over (\d+) cells: (-?[\d.]+)", experiments.page(FIRST_STAGE / "momentum.jsonl"))
    assert rho is not None and f"Over the {rho[1]} cells ρ is {rho[2].rstrip('.')}" in page


def test_the_decision_on_the_default_of_gasloc_has_what_it_costs_in_the_mean() -> None:
    text = (ROOT / "docs" / "adr" / "0031-gasloc-has-a-momentum-of-one-half.md").read_text(encoding="utf-8")
    for peers, words in ((2, "above the first"), (1, "above the second")):
        default, chosen = (losses_of(stem, f"GASLoC {peers}-Peer") for stem in ("tuned", "tuned_again"))
        assert f"{difference(default, chosen, spread=False)}" in text and words in text


def test_momentum_leads_averaging_with_its_own_rate_with_32_workers_and_is_open_in_the_four_cells_of_8() -> None:
    page = (ROOT / "docs" / "evidence" / "momentum.md").read_text(encoding="utf-8")
    table = page[page.index("| with momentum | loss above") :].split("\n\n")[0].splitlines()[2:]
    verdicts = [line.split(" | ")[-1].removesuffix(" |") for line in table]
    assert verdicts == ["open"] * 4 + ["lower"] * 2 and all(" 32 |" in line for line in table[4:])
    for method, plain in (("DiLoCo", "averaging, everyone"), ("GASLoC 2-Peer", "averaging, two peers")):
        ours, theirs = (losses_of("cells_tuned-h120", one) for one in (method, plain))
        assert all(ours[seed] < theirs[seed] for seed in range(5)), "lower in each pair of runs at H = 120"


def test_narrow_arms_stand_in_the_order_that_the_page_says() -> None:
    widths, lower = (32, 16, 8, 4, 2), {}
    for stem in ("narrow_adamw_tuned-h64", "narrow_muon_tuned-h64"):
        losses = {(kind, w): losses_of(stem, f"{kind} {w}") for kind in ("ResBM", "subspace") for w in widths}
        for kind, seed in itertools.product(("ResBM", "subspace"), range(3)):
            rising = [losses[kind, w][seed] for w in widths]
            assert rising == sorted(rising)
        lower[stem] = [sum(losses["ResBM", w][s] < losses["subspace", w][s] for s in range(3)) for w in widths]
    assert lower == {"narrow_adamw_tuned-h64": [2, 3, 3, 0, 0], "narrow_muon_tuned-h64": [3] * 5}
    plain, wide, narrow, subspace = (
        losses_of("narrow_adamw_tuned", arm) for arm in ("uncompressed", "ResBM 32", "ResBM 2", "subspace 2")
    )
    assert all(plain[s] < wide[s] < subspace[s] < narrow[s] for s in range(3)), "at hidden 128 as at 64"


def test_our_form_of_gasloc_ends_lower_than_the_published_one_with_two_peers_by_what_the_pages_say() -> None:
    theirs, ours = (losses_of("published_tuned", method) for method in ("published, two peers", "GASLoC 2-Peer"))
    assert all(ours[seed] < theirs[seed] for seed in range(5))
    decision = (ROOT / "docs" / "adr" / "0009-gasloc-mixes-before-its-momentum.md").read_text(encoding="utf-8")
    assert f"{difference(theirs, ours, spread=False)} nats lower" in decision
    share, page = 1 - statistics.fmean(ours.values()) / statistics.fmean(theirs.values()), page_of_evidence()
    assert f"{100 * share:.1f} % of the loss" in page
    pairs = losses_of("published_tuned", "published, one peer")
    words = []
    for stem, methods in (
        ("tuned_again", ("gossip 2-Peer", "gossip 1-Peer")),
        ("averaging_tuned", ("averaging, two peers", "averaging, one peer")),
    ):
        plain = [losses_of(stem, method) for method in methods]
        arms = [
            [(form[seed] - other[seed], other[seed]) for seed in range(5)]
            for form, other in zip((theirs, pairs), plain, strict=True)
        ]
        assert all((effect(arm).apart or 0) > 0.05 for arm in arms), "open, each on its own"
        words += [f"{abs(statistics.fmean(above for above, _ in arm)):.3f}" for arm in arms]
    gossip_two, gossip_one, averaging_two, averaging_one = words
    assert f"the published form ends {gossip_two} lower with two peers and {gossip_one} higher with one" in page
    assert (
        f"As published it ends {gossip_two} lower than gossip with two peers and {gossip_one} higher with one" in page
    )
    assert f"it ends {averaging_two} and {averaging_one} higher" in page


@pytest.mark.parametrize("stem", ["straggler_steps", "straggler_steps-uplink_20"])
def test_diloco_without_the_slow_worker_is_first_and_then_two_peers_in_each_seed_between_lengths_too(stem: str) -> None:
    file, scale = sources.config_of(FIRST_STAGE / f"{stem}.jsonl")
    runs, ended = points(load_document(file), seeds=(0, 1, 2), scale=scale), read_results(FIRST_STAGE / f"{stem}.jsonl")
    results = annealed.branches(runs, ended, "DiLoCo, H = 30")

    without, peers = "DiLoCo without the slow worker, H = 30", "GASLoC 2-Peer, H = 30"
    for sooner, other in ((without, peers), (peers, "DiLoCo, H = 60"), (peers, "DiLoCo, H = 120")):
        first, theirs = (annealed.time_shares(results, method, "straggler") for method in (sooner, other))
        for seed in range(3):
            reached, later = first[seed], theirs[seed]
            assert reached is not None and later is not None and reached < later
            joined, others = (annealed.shares_between(results, one, "straggler")[seed] for one in (sooner, other))
            assert joined is not None and others is not None and joined < others


def test_at_equal_bytes_diloco_ends_lower_in_each_seed_where_the_page_says_so() -> None:
    results = local_steps.lengths()
    for method, fewest in (("GASLoC 2-Peer", 5), ("GASLoC 1-Peer", 10)):
        for steps in (steps for steps in local_steps.LENGTHS if steps >= fewest):
            other = results[method].get(steps)
            if other is not None and (method, steps) != ("GASLoC 1-Peer", 120):  # nothing of DiLoCo's is as small
                ours = next(one for one in results["DiLoCo"].values() if one.sent_bytes <= other.sent_bytes)
                assert all(ours.losses[seed] < other.losses[seed] for seed in range(5)), (method, steps)
    page = local_steps.equal_bytes_table(results)
    assert page.count("lower |") == 8 and page.count("open |") == 3


def test_what_the_page_says_of_the_outer_learning_rate_follows_from_the_outcomes() -> None:
    etas = (0.5, 0.7, 1.0, 1.4)
    losses = {
        (workers, eta, lr): losses_of("outer_lr", "DiLoCo", workers=workers, rule_lr=eta, inner_lr=lr)
        for workers in (4, 8, 16, 32)
        for eta in etas
        for lr in (2e-3, 4e-3)
    }
    lower = 0
    for workers in (4, 8, 16, 32):
        for seed in range(3):
            best = {eta: min(losses[workers, eta, lr][seed] for lr in (2e-3, 4e-3)) for eta in etas}
            assert best[1.0] < min(best[0.5], best[1.4])
            lower += best[1.0] < best[0.7]
    assert lower == 11
    plain = losses_of("rounds", "local SGD", run_steps=1350)
    full, usual = losses[8, 1.0, 2e-3], losses[8, 0.7, 2e-3]
    pair, two = (
        [losses_of("full_step", f"GASLoC {peers}-Peer", rule_lr=eta) for eta in (1.0, 0.7)] for peers in (1, 2)
    )
    page = page_of_evidence()
    for above, below, words in (
        (usual, full, "lower at η = 1 than at 0.7"),
        (plain, full, "below local SGD, twice"),
        (*pair, "higher with one peer"),
        (two[1], two[0], "lower with two"),
    ):
        assert len(above.keys() & below) == 3 and statistics.fmean(above.values()) > statistics.fmean(below.values())
        assert f"{difference(above, below)} {words}" in page


def test_what_the_page_says_of_momentum_at_one_learning_rate_follows_from_the_outcomes() -> None:
    pairs = (("DiLoCo", "local SGD"), ("GASLoC 2-Peer", "gossip 2-Peer"), ("GASLoC 1-Peer", "gossip 1-Peer"))
    runs = [("noise", "DiLoCo", "tuned", "local SGD")]
    runs += [("tuned", ours, "tuned", theirs) for ours, theirs in pairs[1:]]
    runs += [("second", ours, "second", theirs) for ours, theirs in pairs]
    arms = list[list[tuple[float, float]]]()
    for here, ours, there, theirs in runs:
        mine, others = losses_of(here, ours), losses_of(there, theirs)
        arms.append([(mine[seed] - others[seed], others[seed]) for seed in sorted(mine.keys() & others)])
    assert all(above < 0 for arm in arms for above, _ in arm), "lower in each seed"
    apart = [p is not None and p < 0.05 for p in holm([effect(arm).apart for arm in arms])]
    assert (apart, [len(arm) for arm in arms]) == ([True, True, False, True, True, True], [5] * 6)


def test_what_the_page_says_of_restarts_follows_from_the_outcomes() -> None:
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for one in read_results(FIRST_STAGE / "restarts.jsonl"):
        at = losses.setdefault(f"{one.at['run.local_steps']}, {one.at['rule.momentum']}, {one.at['rule.lr']}", {})
        at.setdefault(one.method, {})[one.seed] = one.row["loss"]
    gains = {
        at: statistics.fmean(own["no restarts"][seed] - own["restarts every three rounds"][seed] for seed in range(3))
        for at, own in losses.items()
    }
    assert {at: round(gain, 2) for at, gain in gains.items() if gain > 0} == {
        "90, 0.9, 0.9": 0.02,
        "90, 0.9, 1.3": 0.06,
    }
    assert len(gains) == 12
    for seed in range(3):
        best = min(loss[seed] for own in losses.values() for loss in own.values())
        near, far = (
            sum(own[name][seed] < best + 0.1 for own in losses.values())
            for name in ("restarts every three rounds", "no restarts")
        )
        assert near < far


def test_what_was_predicted_of_the_held_out_size_is_compared_with_what_came() -> None:
    losses: dict[str, dict[int, float]] = {}
    for one in read_results(FIRST_STAGE / "size-870k.jsonl"):
        losses.setdefault(one.method, {})[one.seed] = one.row["loss"]
    registered = (ROOT / "docs" / "evidence" / "registered.md").read_text(encoding="utf-8")
    registered = registered.partition("## The first published size")[0]  # which has other predictions
    page = (ROOT / "docs" / "evidence" / "size-and-rounds.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| -?[\d.]+ \| (-?[\d.]+) to (-?[\d.]+) \|$", registered, re.MULTILINE)
    assert len(rows) == 4
    for what, low, high in rows:
        ours, _, theirs = what.removeprefix("loss of ").partition(" minus ")
        seeds = losses[ours].keys() & losses[theirs].keys() if theirs else losses[ours].keys()
        mean = statistics.fmean(losses[ours][seed] - (losses[theirs][seed] if theirs else 0.0) for seed in seeds)
        word = "held" if float(low) <= mean <= float(high) else "failed"
        assert re.search(rf"^\| {what} \|.*\| {low} to {high} \| {word} \|$", page, re.MULTILINE), (what, mean)


def test_the_registered_sizes_have_the_parameters_that_their_names_say() -> None:
    size = load_document(CONFIGS / "size.toml")
    counts = [parameter_count(points(size, scale=scale)[0].config.model, 256) for scale in ("", "440k", "870k")]
    assert counts == [139_584, 436_896, 869_504]
    for scale in ("", "440k", "870k"):
        for run in points(size, scale=scale):
            resolve(run.config)


def test_the_second_corpus_is_a_choice_of_the_user_and_its_absence_is_reported(tmp_path: Path) -> None:
    for name in ("tuning", "momentum", "rounds"):
        file = load_document(CONFIGS / f"{name}.toml", {"tune": {}, "scale.prose.data.source": str(tmp_path / "*.txt")})
        file.pop("tune")
        prose = points(file, scale="prose")[0].config.data
        assert prose.sources == (str(tmp_path / "*.txt"),)
        with pytest.raises(DataError, match=r"names no readable file .* a folder or a glob"):
            open_corpus(prose, 8, 0)
    for place in range(40):
        (tmp_path / f"{place}.txt").write_text(f"A page of a manual, number {place}.\n" * 30, encoding="utf-8")
    assert len(text_fingerprint(open_corpus(prose, 8, 0))) == 32


def test_the_page_of_evidence_is_ten_answers_that_a_busy_reader_can_read() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    answers = re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)
    assert [*map(int, answers)] == [*range(1, 11)]
    parts = re.split(r"^\d+\. \*\*", text, flags=re.MULTILINE)[1:]
    assert all(re.search(r"\d seeds", part) and "](evidence/" in part for part in parts), (
        "each with its seeds and details"
    )
    without_intervals = re.sub(r"\[[−\d.,\s]+\]", "", text)
    assert len(re.findall(r"(?<![\d.])\d+\.\d+", without_intervals)) <= 40
    assert text.count("![") == 1


def test_the_figure_of_the_page_of_evidence_is_that_of_its_outcomes() -> None:
    drawn, committed = slow_uplink.drawn_at_equal_time().decode(), slow_uplink.FIGURE.read_text(encoding="utf-8")
    paths = [re.findall(r'<path d="([^"]+)"', text) for text in (drawn, committed)]
    assert paths[0] == paths[1], "run make results"


@pytest.mark.full
def test_the_prices_of_casts_are_what_the_code_computes() -> None:
    assert (sources.RESULTS / "casts.md").read_text(encoding="utf-8") == casts.casts_page(), "run make results"


def test_what_momentum_gains_without_the_seed_that_searched_is_what_the_page_says() -> None:
    page = page_of_evidence()
    for stem, ours, theirs, words in (
        ("tuned_again", "DiLoCo", "local SGD", "Without it DiLoCo gains {} over local SGD"),
        ("averaging_tuned", "DiLoCo", "averaging, everyone", "and {} over averaging with its own η"),
        ("averaging_tuned", "GASLoC 2-Peer", "averaging, two peers", "two peers gain {} over that"),
    ):
        mine, others = (
            {seed: loss for seed, loss in losses_of(stem, method).items() if seed} for method in (ours, theirs)
        )
        assert words.format(difference(mine, others, spread=False, digits=4)) in page


def test_what_the_page_says_of_data_parallelism_at_the_larger_size_follows_from_the_outcomes() -> None:
    one, eight = losses_of("narrow_adamw_tuned", "uncompressed"), losses_of("size-870k", "DiLoCo")
    share = 100 * (statistics.fmean(eight.values()) / statistics.fmean(one.values()) - 1)
    assert f"it is some {share:.1f} %" in page_of_evidence()


def test_four_bits_at_a_boundary_are_decided_by_one_seed() -> None:
    plain, four = (losses_of("tahquant_tuned-h64", method) for method in ("uncompressed", "TAH-Quant 4 bits"))
    pairs = [(four[seed] - plain[seed], plain[seed]) for seed in sorted(plain)]
    left = [effect([*pairs[:k], *pairs[k + 1 :]]).apart for k in range(len(pairs))]
    assert sum(p is not None and p > 0.05 for p in left) == 4


def test_the_warm_up_that_was_taken_is_the_lowest_in_the_mean_and_the_page_says_by_how_much() -> None:
    arms = ("DiLoCo", "averaging, everyone", "GASLoC 2-Peer")
    means = {
        steps: statistics.fmean(
            losses_of("warmup", arm, inner_warmup_steps=steps)[seed]
            if steps > 90
            else losses_of("averaging_tuned", arm)[seed]
            for arm in arms
            for seed in (0, 1)
        )
        for steps in (90, 270, 540)
    }
    taken = load_document(CONFIGS / "fresh.toml")["inner"]["warmup_steps"]
    assert (
        means[taken] == min(means.values())
        and load_document(CONFIGS / "effective_step.toml")["inner"]["warmup_steps"] == taken
    )
    assert f"these six runs end {means[90] - means[taken]:.3f} lower in the mean" in page_of_evidence()


def test_fresh_seeds_are_compared_as_registered_over_those_that_all_arms_have() -> None:
    arms = dict.fromkeys(arm for pair in fresh.COMPARED.values() for arm in pair)
    assert [*arms] and {run.method for run in points(load_document(CONFIGS / "fresh.toml"))} == {*arms}
    shift = {"DiLoCo": 0.05, "GASLoC 2-Peer": 0.02}
    ended = [
        PointResult(arm, {}, seed, {"loss": 2.0 + 0.1 * seed - shift.get(arm, 0.0) * (1 + 0.01 * seed)})
        for arm in arms
        for seed in (5, 6, 7)
    ]
    rows = fresh.fresh_table([*ended, PointResult("DiLoCo", {}, 8, {"loss": 1.0})]).splitlines()[2:]
    assert len(rows) == 9 and rows[0].startswith("| momentum, everyone | DiLoCo | averaging, everyone | 3 | -0.0530 ± ")
    assert rows[0].endswith("| lower |") and rows[6].split("|")[5].strip().startswith("+0.0318")
    assert fresh.fresh_table(ended[3:]) == "", "an arm is missing"


def test_long_runs_are_compared_as_registered_with_each_other_and_with_data_parallelism() -> None:
    arms = {arm for pair in fresh.COMPARED_LONG.values() for arm in pair}
    assert {run.method for run in points(load_document(CONFIGS / "long.toml"))} == arms and len(arms) == 9
    shift = {"data parallel": 0.06, "DiLoCo": 0.03}
    ended = [
        PointResult(arm, {}, seed, {"loss": 2.0 - shift.get(arm, 0.0) * (1 + 0.01 * seed)})
        for arm in sorted(arms)
        for seed in (5, 6, 7)
    ]
    rows = fresh.long_table(ended).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows[:6]] == [
        name for name, pair in fresh.COMPARED.items() if {*pair} <= arms
    ]
    beside = {row.split("|")[2].strip(): row.split("|")[5].strip() for row in rows[6:]}
    assert (
        len(beside) == 8
        and beside["DiLoCo"].startswith("+0.0318 ± ")
        and beside["data parallel, Muon"].startswith("+0.0636 ± ")
    )
    assert fresh.long_table(ended[3:]) == "", "an arm is missing"


def test_long_runs_have_the_settings_that_their_search_chose_and_seeds_that_chose_none() -> None:
    chosen = chosen_by("long")
    runs = points(load_document(CONFIGS / "long_tuned.toml"))
    assert (
        [run.method for run in runs]
        == [*chosen]
        == [run.method for run in points(load_document(CONFIGS / "long.toml", {"tune": {}}))]
    )
    assert all(chosen[run.method].items() <= given(run).items() for run in runs)
    assert min(one.seed for one in read_results(FIRST_STAGE / "long_tuned.jsonl")) >= 5


def test_gossip_costs_less_than_half_of_it_in_long_runs_as_the_page_says() -> None:
    assert "Gossip costs less than half of what it does in short runs" in page_of_evidence()
    for method in ("GASLoC 2-Peer", "GASLoC 1-Peer"):
        long, short = (
            float(difference(losses_of(stem, method), losses_of(stem, "DiLoCo"), spread=False))
            for stem in ("long_tuned", "fresh")
        )
        assert 0 < long < short / 2, method


def test_what_a_plan_takes_for_30_local_steps_in_long_runs_holds_what_the_search_at_that_length_finds() -> None:
    assert "lies inside the 95 % intervals of the plan's three seeds" in page_of_evidence()
    least, floor = losses_of("four_times_as_long", "data_parallel"), losses_of("long_tuned", "data parallel")
    for method in ("DiLoCo", "GASLoC 2-Peer", "GASLoC 1-Peer"):
        taken, found = losses_of("four_times_as_long", f"{method}, H = 30"), losses_of("long_tuned", method)
        plan = effect([(taken[seed] - least[seed], least[seed]) for seed in taken])
        above = statistics.fmean(found[seed] - floor[seed] for seed in found)
        assert plan.half is not None and abs(above - plan.mean) < plan.half, method


def test_penalties_are_listed_by_local_steps_and_codec_over_the_seeds_that_a_row_has_at_all_of_its_local_steps() -> (
    None
):
    runs = points(load_document(CONFIGS / "penalty.toml"), seeds=[5, 6, 7])

    def loss(label: str, seed: int) -> float:
        name, _, steps = label.partition(", H = ")
        per_step = 0.001 * int(steps or 0)
        return 1.3 + 0.01 * seed + per_step * (1 + 0.01 * seed) + (0.02 + 0.001 * seed) * ("int4" in name)

    ended = [PointResult(run.method, {}, run.seed, {"loss": loss(run.method, run.seed)}) for run in runs]
    page = slow_uplink.penalty_page([*ended, PointResult("data parallel", {}, 8, {"loss": 1.0})])
    assert "| DiLoCo, exact | 0.0053 ± " in page and "| 0.1272 ± 0.0012 |" in page
    assert "| streaming, exact | – | 0.0159 ± " in page and "DiLoCo, exact: p < 0.001" in page
    assert "| DiLoCo, int4 | +0.0260 ± 0.0025 | " in page and "| DiLoCo, bf16 | +0.0000 ± 0.0000 | " in page
    assert surface.codec_costs(surface.surface_of(ended)).keys() == {
        *(f"DiLoCo, {codec}" for codec in ("bf16", "int8", "int4", "topk2bit")),
        "streaming, int4",
        *(f"GASLoC {k}-Peer, {codec}" for k in (1, 2) for codec in ("bf16", "int8")),
    }
    assert "| tenth | MuLoCo, H = 60 | 0.75 |" in page, "the time of a round is that of check"
    assert "| half | data parallel | 5.72 |" in page and "| thirtieth | streaming, int4, H = 15 |" not in page
    cut = [one for one in ended if one.seed != 7 or one.method not in ("MuLoCo, H = 120", "DiLoCo, int4, H = 5")]
    kept = surface.surface_of(cut)
    assert {name for name, row in kept.items() if len(surface.by_seed(row)) == 2} == {"MuLoCo", "DiLoCo, int4"}
    assert [*surface.codec_costs(kept)["DiLoCo, int4"][5]] == [5, 6]
    assert "slow uplink" not in slow_uplink.penalty_page(cut), "arms of other seeds are not compared"
    without = [one for one in ended if one.method != "data parallel"]
    assert surface.surface_page(without) == "", "there is nothing to compare with"


def test_a_share_of_warm_up_is_as_good_within_a_hundredth_of_the_lowest_mean_of_its_method_and_length() -> None:
    runs = points(load_document(CONFIGS / "warmup_shares.toml"), seeds=[5, 6, 7])
    before = {
        1350: losses_of("equal_warmup", "DiLoCo, H = 30"),
        5400: losses_of("four_times_as_long", "DiLoCo, H = 30"),
    }

    def ended(above: float) -> list[PointResult]:
        rows = [{"loss": before[run.config.run.steps][run.seed] + above} for run in runs]
        return [PointResult(run.method, run.at, run.seed, row) for run, row in zip(runs, rows, strict=True)]

    good = {(one.method, one.steps): one.as_good for one in warmups.warmups(ended(0.009)) if one.method == "DiLoCo"}
    assert good[("DiLoCo", 1350)] == [5, 10, 20, 40] and set(good[("DiLoCo", 5400)]) >= {5, 20, 40}
    good = {(one.method, one.steps): one.as_good for one in warmups.warmups(ended(0.011)) if one.method == "DiLoCo"}
    assert good[("DiLoCo", 1350)] == [20] and not {5, 40} & {*good[("DiLoCo", 5400)]}
    assert "| DiLoCo | 1,350 |" in warmups.warmups_page(ended(0.0)) and "in so many of 8 rows" in warmups.warmups_page(
        ended(0)
    )
    short = [one for one in ended(0.0) if one.at["inner.warmup_steps"] != 2160]
    assert {one.steps for one in warmups.warmups(short)} == {1350}, "a length without one of its warm-ups is left out"


def test_leaving_the_slow_worker_out_is_as_good_on_equal_terms_and_nowhere_surely_better() -> None:
    eight = losses_of("penalty", "DiLoCo, int4, H = 120")

    def above(label: str, steps: int) -> Effect:
        own = losses_of("left_out", label, run_steps=steps)
        return effect([(own[seed] - eight[seed], 1.0) for seed in sorted(eight)])

    found = above("without it, int4, H = 120", 5400)
    assert found.half is not None
    ends = f"{found.mean:.3f} [{found.mean - found.half:.3f}, {found.mean + found.half:.3f}]".replace("-", "−")
    assert f"and ends {ends} higher" in page_of_evidence()
    tokens = above("without it, int4, H = 120", 6120)
    assert f"(they end {-tokens.mean:.4f} below)" in page_of_evidence()
    page = (FIRST_STAGE / "left_out.md").read_text()
    assert "surely lower" not in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    for name in ("half", "fifth", "tenth", "thirtieth"):
        own = [row for row in rows if row[0] == name]
        (longest,) = (float(row[2]) for row in own if row[1] == "DiLoCo, int4, H = 120")
        assert any(row[1].startswith("without") and float(row[2]) <= longest and float(row[5]) <= 0.01 for row in own)
    drawn = slow_uplink.FIGURE.read_text()
    assert "DiLoCo without the slow worker, 4 bits" in drawn and "SparseLoCo" in drawn


def test_run_files_of_small_plans_warm_up_over_the_share_that_is_as_good_at_most_methods_and_lengths() -> None:
    rows = warmups.warmups(read_results(FIRST_STAGE / "warmup_shares.jsonl"))
    good = Counter(share for one in rows for share in one.as_good)
    ((best, many), *_) = good.most_common()
    assert (best, many, len(rows)) == (40, 8, 8) and measured_schedule(1000)["warmup_steps"] == 10 * best
    at = {(one.method, one.steps): one for one in rows}
    assert 20 not in at["DiLoCo", 1350].as_good and all(20 in one.as_good for one in rows if one.steps == 5400)
    fallen = {name: at[name, 1350].losses[5] - at[name, 1350].losses[40] for name, steps in at if steps == 1350}
    assert (round(fallen["DiLoCo"], 3), round(fallen["GASLoC 2-Peer"], 3)) == (0.068, 0.096)
    assert 0.05 < fallen["DiLoCo"] < 0.12 and fallen["data parallel"] < fallen["DiLoCo"] / 2, "as registered"
    diloco = at["DiLoCo", 1350].losses
    assert f"ends {diloco[20] - diloco[40]:.3f} below one fifth in 45 rounds" in page_of_evidence()
    above = at["DiLoCo", 1350].losses[20] - at["data parallel", 1350].losses[20]
    assert round(above, 3) == 0.192 and "and 0.192 with 20" in page_of_evidence()


def test_leaving_the_slow_worker_out_is_priced_on_the_fast_links_and_compared_with_all_eight_in_at_most_its_time() -> (
    None
):
    runs = points(load_document(CONFIGS / "left_out.toml"), seeds=[5, 6, 7])
    eight = losses_of("penalty", "DiLoCo, int4, H = 120")

    def page(gain: float) -> str:
        rows = [{"loss": eight[run.seed] - gain - 1e-5 * run.seed * run.config.run.steps / 5400} for run in runs]
        return slow_uplink.left_out_page(
            [PointResult(run.method, run.at, run.seed, row) for run, row in zip(runs, rows, strict=True)]
        )

    lower = [line for line in page(0.01).splitlines() if "surely lower" in line]
    assert len(lower) == 10, "the arms of seven that take at most as long as eight with four bits and 120 local steps"
    assert any(line.startswith("| tenth | without it, int4, H = 120, 5,400 steps | 0.51 |") for line in lower)
    assert not any(line.startswith("| tenth | without it, int4, H = 120, 6,120 steps") for line in lower)
    assert "surely" not in page(-0.01) and "| tenth | DiLoCo, int4, H = 120 | 0.55 |" in page(-0.01)
    short = [PointResult(run.method, run.at, run.seed, {"loss": 1.0}) for run in runs[:-1]]
    assert slow_uplink.left_out_page(short) == "", "an arm lacks a seed"


def test_momentum_is_compared_with_none_at_an_equal_effective_step_where_none_is_lowest() -> None:
    runs = points(load_document(CONFIGS / "effective_step.toml"), seeds=[5, 6, 7])

    def ended(gain: float) -> list[PointResult]:
        results = list[PointResult]()
        for run in runs:
            eta, gamma = (run.config.rule.options[key] for key in ("lr", "momentum"))
            chance = 0.0001 * run.seed * (-1) ** run.seed
            loss = 2 + abs(eta / (1 - gamma) - 1.4) - (gain + chance) * gamma
            results.append(PointResult(run.method, {}, run.seed, {"loss": loss}))
        return results

    for gain, verdict in ((0.1, "more than a larger step"), (0.0, "a larger step only"), (-0.1, "open")):
        assert effective_step.verdict(effective_step.by_arm(ended(gain)), "two peers") == (1.4, verdict)
        page = effective_step.effective_step_page(ended(gain))
        assert f"With everyone, γ = 0 is lowest at a step of 1.4; over 3 seeds momentum is there: {verdict}." in page
    assert "| 1.4 | 0.5 | +0.0501 ± " in page
    diverged = PointResult("everyone, step 2.8, γ = 0.0", {}, 5, {"loss": None})
    page = effective_step.effective_step_page([*ended(0.1), diverged])
    assert "| 2.8 | – | " in page and "| 2.8 | 0.3 | -0.0300 ± " in page, "of the two other seeds"
    assert effective_step.effective_step_page(ended(0.1)[1:3]) == "", "an arm is missing"


def test_what_the_page_says_of_a_larger_step_follows_from_the_outcomes() -> None:
    arms, page = effective_step.committed_arms(), page_of_evidence()
    for graph in effective_step.GRAPHS:
        assert effective_step.verdict(arms, graph) == (1.4, "more than a larger step")
        lead = statistics.fmean(arms[graph, 1.4, 0.0]) - statistics.fmean(arms[graph, 1.4, 0.3])
        assert 0 < lead < gains.MARGIN, "next to nothing"
        mine = {arm[1:]: statistics.fmean(losses) for arm, losses in arms.items() if arm[0] == graph}
        assert min(mine, key=mine.__getitem__) == (2.8, 0.7)
        assert min((gamma for step, gamma in mine if step == 2.0), key=lambda gamma: mine[2.0, gamma]) == 0.5
    assert "momentum is *more than a larger step* with both graphs" in page


def test_the_fresh_seeds_chose_no_setting_and_their_settings_are_those_that_were_chosen() -> None:
    assert min(one.seed for one in read_results(FIRST_STAGE / "fresh.jsonl")) >= 5
    ours = {run.method: given(run) for run in points(load_document(CONFIGS / "fresh.toml"))}
    for stem in ("tuned_again", "averaging_tuned"):
        for run in points(load_document(CONFIGS / f"{stem}.toml")):
            assert ours[run.method] == given(run), run.method


RACED = [
    (
        "even_10m",
        "134m",
        "DiLoCo 480 fp4",
        "GASLoC 1-Peer 480 int8",
        "ended {m} [{low}, {high}] below DiLoCo with the rounds of 85M",
    ),
    ("slow_in_turn", "1m", "DiLoCo 5 fp4", "GASLoC 1-Peer 5 int8", "it ended {m} [{low}, {high}] below DiLoCo, both"),
    ("slow_in_turn", "134m", "DiLoCo 480 fp4", "GASLoC 1-Peer 480 int8", "and {m} [{low}, {high}] with those of 85M"),
    ("even_10m", "134m", "GASLoC 2-Peer 480 bf16", "GASLoC 1-Peer 480 bf16", "to {m} above one"),
    ("slow_in_turn", "134m", "GASLoC 2-Peer 480 bf16", "GASLoC 1-Peer 480 bf16", "two ended {m} to"),
    ("two_sites", "134m", "GASLoC 2-Peer 480 bf16", "GASLoC 1-Peer 480 bf16", "two ended {m} to"),
]
"""Two candidates of a race, the worse one first, and what the answers say of their difference."""


@pytest.mark.parametrize(("network", "size", "above", "below", "sentence"), RACED)
def test_answers_in_equal_time_are_those_of_the_races(network, size, above, below, sentence) -> None:
    lines = (ROOT / "docs" / "results" / "races" / "outcomes.jsonl").read_text(encoding="utf-8").splitlines()
    cell = [ended for line in lines if (ended := json.loads(line))["network"] == network and ended["size"] == size]
    losses = {label: {one["seed"]: one["loss"] for one in cell if one["label"] == label} for label in (above, below)}
    seeds = sorted(losses[above].keys() & losses[below].keys())
    results = effect([(losses[above][seed] - losses[below][seed], losses[below][seed]) for seed in seeds])
    assert len(results.differences) == 5 and results.half is not None
    low, high = results.mean - results.half, results.mean + results.half
    numbers = {"m": f"{results.mean:.3f}", "low": f"{low:.3f}", "high": f"{high:.3f}"}
    assert sentence.format(**numbers) in page_of_evidence()


class Planned(NamedTuple):
    """What an answer says that a plan takes on a network."""

    answer: int
    network: str
    size: str
    method: str
    codec: str | None = None
    keep_all: bool = False
    instead: tuple[str, float] | None = None
    """Where the plan takes another method: its name, and nats by which the answer's method is expected to end above it."""


PLANS = [
    Planned(1, "even_1g", "1m", "data parallel"),
    Planned(2, "even_10m", "1m", "DiLoCo", "fp4"),
    Planned(2, "even_10m", "134m", "GASLoC 1-Peer", "int8"),
    Planned(3, "slow_uplink", "1m", "DiLoCo less 7"),
    Planned(3, "slow_uplink", "134m", "DiLoCo less 7"),
    # Two peers with 8 bits have faster rounds, and the two are not significantly different.
    Planned(4, "slow_uplink", "1m", "DiLoCo uneven", "fp4", keep_all=True, instead=("GASLoC 2-Peer", 0.010)),
    Planned(5, "slow_in_turn", "134m", "GASLoC 1-Peer"),
    # DDP hides its messages behind the step, which the races did not count: 1.43 s a step, in place of 2.26 s.
    Planned(5, "slow_in_turn", "1m", "GASLoC 1-Peer", instead=("data parallel", 0.036)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("planned", PLANS, ids=lambda planned: f"{planned.answer}-{planned.network}-{planned.size}")
def test_a_plan_takes_what_the_answers_say(planned: Planned) -> None:
    model, vocabulary = ModelConfig(size=planned.size), plan_races.MODELS[planned.size]
    bits = bits_per_parameter(plan_races.CODECS, parameter_count(model, vocabulary))
    network = read_network(ROOT / "configs" / "networks" / f"{planned.network}.toml")
    made = plan(network, model, PlanSettings(vocab_size=vocabulary, codecs=bits, keep_all=planned.keep_all))
    choice = choose_among(made, price_recipes(made, USUAL))
    if planned.instead is None:
        assert (choice.best.name, planned.codec or choice.best.codec) == (planned.method, choice.best.codec)
        return
    own = next(one for one in best_of_each(choice, made.candidates) if one.name == planned.method)
    above = choice.above_best(own)
    assert (choice.best.name, own.codec) == (planned.instead[0], planned.codec or own.codec)
    assert above is not None and above.open and above.nats == pytest.approx(planned.instead[1], abs=0.001)


def test_a_plan_expects_and_sets_what_the_answers_say() -> None:
    at_h30 = {
        name: nearest_measured(name, 30)[1]
        for name in ("DiLoCo", "GASLoC 2-Peer", "GASLoC 1-Peer", "muloco", "local_sgd")
    }
    assert [(at_h30[name].lr, at_h30[name].momentum) for name in [*at_h30][:3]] == [(1.0, 0.5), (0.7, 0.7), (1.0, 0.3)]
    mean = {name: statistics.fmean(one.losses) for name, one in at_h30.items()}
    assert mean["GASLoC 2-Peer"] < mean["GASLoC 1-Peer"], "answer 6, in equal steps"
    assert mean["DiLoCo"] < mean["local_sgd"], "answer 8"
    assert mean["DiLoCo"] - mean["muloco"] > 0.2, "answer 9"

    def above_diloco(scale: LossScale) -> float:
        one, other = (penalty(scale, name, 30, "exact") for name in ("GASLoC 1-Peer", "DiLoCo"))
        assert one is not None and other is not None
        return expected_difference(scale, one, other, 1.0).nats

    small, large = (LossScale(parameters, 8, 20.0 * parameters, 256) for parameters in (139_584, 869_504))
    assert 0 < above_diloco(large) < above_diloco(small), "answer 10"


def test_what_a_plan_expects_of_the_larger_model_is_on_the_page() -> None:
    scale = LossScale(869_504, 8, 4260 * 4096, 256, steps=4260)
    page = page_of_evidence()
    for name, below in (("DiLoCo", "data parallel"), ("GASLoC 2-Peer", "DiLoCo"), ("GASLoC 1-Peer", "DiLoCo")):
        one, other = (penalty(scale, each, 1 if each == "data parallel" else 30, "exact") for each in (name, below))
        assert one is not None and other is not None
        expected = expected_difference(scale, one, other)
        mine, others = losses_of("larger_tuned", name), losses_of("larger_tuned", below)
        measured = statistics.fmean(mine[seed] - others[seed] for seed in (6, 7))
        label = f"| {name} above {below.replace('data parallel', 'data parallelism')} | "
        assert f"{label}{measured:.3f} | {expected.nats:.3f} ± {expected.half:.3f} |" in page
        assert abs(measured - expected.nats) < expected.half, "the page says that all three lie inside"


def test_muloco_in_longer_runs_ends_above_data_parallelism_with_muon() -> None:
    ended = [one for stem in ("penalty", "long_tuned") for one in read_results(FIRST_STAGE / f"{stem}.jsonl")]
    losses = {(one.method, one.seed): one.row["loss"] for one in ended}
    above = [losses["MuLoCo, H = 30", seed] - losses["data parallel, Muon", seed] for seed in (5, 6, 7)]
    assert min(above) > 0 and f"MuLoCo ends {statistics.fmean(above):.3f} above" in page_of_evidence()


WITHOUT_THEIR_COMMIT = {"leaderboard.jsonl": 8, "lost_stage.jsonl": 30}
"""Outcomes of evidence whose commit the history does not have."""


def commits_of(folder: str) -> list[tuple[str, str]]:
    """The file of each outcome of a folder and its commit, "" where there is none."""
    files = sorted((ROOT / "docs" / "results" / folder).glob("*.jsonl"))
    return [(file.name, (line.get("origin") or {}).get("commit", "")) for file in files for _, line in json_lines(file)]


def test_the_page_on_method_counts_the_outcomes_whose_code_is_not_that_of_a_commit() -> None:
    commits = [commit for _, commit in commits_of("evidence")]
    text = " ".join((ROOT / "docs" / "evidence" / "method.md").read_text(encoding="utf-8").split())
    assert f"{sum(one.endswith('+') for one in commits)} ran with code that was modified" in text
    assert f"{commits.count('')} name none, and {sum(WITHOUT_THEIR_COMMIT.values())}, which are 8 of" in text


def test_outcomes_name_commits_of_this_history() -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the whole history is not here")
    history = {*git("rev-list", "HEAD").splitlines()}
    named = [(name, commit.rstrip("+")) for folder in ("evidence", "races") for name, commit in commits_of(folder)]
    unknown = Counter(name for name, commit in named if commit and commit not in history)
    assert unknown == WITHOUT_THEIR_COMMIT, "train them again from a commit that was merged"


def test_what_diloco_loses_rises_with_workers_that_each_keep_their_batch() -> None:
    gaps = dict[int, dict[int, float]]()
    ends = dict[int, float]()
    for n in (2, 3, 4, 8, 16):
        stem, least, name = (f"workers_own_batch-n{n}", "data parallel", "DiLoCo")
        if n == 8:
            stem, least, name = "equal_warmup", "data_parallel", "DiLoCo, H = 30"
        without, found = losses_of(stem, least), losses_of(stem, name)
        gaps[n] = {seed: found[seed] - without[seed] for seed in (5, 6, 7)}
        ends[n] = statistics.fmean(found[seed] for seed in (5, 6, 7))
    rising = trend([[own[seed] for own in gaps.values()] for seed in (5, 6, 7)], "rising")
    assert rising is not None and rising < 0.001
    expected = {n: LossScale(139_584, n, 1350 * 256 * n, 256, steps=1350).gap for n in gaps}
    means = {n: statistics.fmean(own.values()) for n, own in gaps.items()}
    page = " ".join((ROOT / "docs/evidence/size-and-rounds.md").read_text(encoding="utf-8").split())
    assert f"it ends {ends[2] - ends[16]:.3f} below its loss with two" in page
    assert (
        f"{expected[2]:.3f} of DiLoCo with two, {expected[4]:.3f} with four and {expected[16]:.3f} with sixteen" in page
    )
    assert f"gap rises by {expected[8] - expected[2]:.3f}, the measured one by {means[8] - means[2]:.3f}" in page
