"""`gossamer tune`: its search as a function of losses, and its runs, which resume to the same choice."""

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import run
from gossamer.cli.tune import tuned_page
from gossamer.errors import ConfigError, DataError
from gossamer.report.results import read_results
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import points
from gossamer.run.experiments.search import GridPoint, SearchResult, Space, Trial, needed_tokens, search
from gossamer.run.experiments.tune import Tuned, contenders, searched, tune, tuned_file
from tiny import document

Loss = Callable[[Trial], float]
PAIRS = ((1.0, 0.0), (0.7, 0.5), (0.7, 0.75))


def answered(space: Space, loss: Loss) -> tuple[list[Trial], SearchResult]:
    """All trials of a search, and what it found."""
    asked, trials = search(space), list[Trial]()
    batch = next(asked)
    while True:
        trials += batch
        try:
            batch = asked.send({trial: loss(trial) for trial in batch})
        except StopIteration as end:
            return trials, end.value


def valley(at: float, momentum: float = 0.0, outer_lr: float | None = None) -> Loss:
    """A loss that is best at a learning rate of so many doublings, and at a pair with this momentum and outer learning rate."""

    def loss(trial: Trial) -> float:
        height = abs(trial.setting.doublings - at) - trial.rung
        if trial.setting.outer is not None:
            lr, gamma = trial.setting.outer
            height += 3 * abs(gamma - momentum) + (0.0 if outer_lr is None else 3 * abs(math.log2(lr / outer_lr)))
        return height

    return loss


spaces = st.builds(
    lambda rates, outers, tokens, final, more, cross: (space := Space(rates, outers, tokens, 0, final, cross))._replace(
        budget=needed_tokens(space) + more
    ),
    st.integers(1, 5),
    st.sampled_from([(None,), PAIRS[:1], PAIRS]),
    st.lists(st.integers(1, 50), min_size=1, max_size=3).map(lambda some: tuple(sorted(some))),
    st.sampled_from([0, 20]),
    st.integers(0, 2000),
    st.booleans(),
)


@given(spaces, st.randoms(use_true_random=False))
def test_no_search_exceeds_its_budget_tries_a_trial_twice_or_leaves_out_the_grid(space: Space, random: Any) -> None:
    table: dict[Trial, float] = {}

    def loss(trial: Trial) -> float:
        return table.setdefault(trial, random.choice([random.random(), 1.0, math.nan, math.inf]))

    trials, result = answered(space, loss)
    assert len({*trials}) == len(trials)
    assert result.spent == sum(space.cost(trial) for trial in trials) <= space.budget
    grid = {
        Trial(GridPoint(k, outer), 0)
        for k in range(space.rates)
        for outer in (space.outers[:1] if space.cross else space.outers)
    }
    assert grid <= {*trials}
    deciding = max(trial.rung for trial in trials)
    last = [trial for trial in trials if trial.rung == deciding]
    least = min((table[trial] for trial in last if math.isfinite(table[trial])), default=None)
    assert (result.best is None) == (least is None)
    if result.best is not None:
        assert table[Trial(result.best, deciding)] == least
    if deciding == len(space.tokens):
        before = sorted(loss for trial, loss in table.items() if trial.rung == deciding - 1 and math.isfinite(loss))
        assert space.final and [*map(table.get, (Trial(one, deciding - 1) for one, _ in last))] == before[: len(last)]
        assert len(last) == min(2, len(before)) or not any(math.isfinite(table[trial]) for trial in last[:2])
    assert answered(space, loss) == (trials, result), "equal losses, equal trials, the same choice"


@given(st.integers(-6, 10), st.integers(1, 4), st.sampled_from([(3,), (1, 4), (1, 2, 4)]))
def test_a_grid_grows_until_its_best_learning_rate_is_interior(at: int, rates: int, tokens: tuple[int, ...]) -> None:
    trials, result = answered(Space(rates, (None,), tokens, 1000), valley(at))
    assert result.best == GridPoint(at, None) and result.edges == ()
    assert {GridPoint(at + k, None) for k in (-1, 0, 1)} <= {s for s, rung in trials if rung == len(tokens) - 1}


@given(st.integers(-2, 4), st.sampled_from([0.0, 0.5, 0.75, 0.875, 0.9375]))
def test_a_momentum_at_the_edge_grows_or_shrinks_until_it_is_interior(at: int, momentum: float) -> None:
    _, result = answered(Space(3, PAIRS[1:], (1, 4), 2000), valley(at, momentum))
    assert result.best is not None and result.best.outer is not None and result.edges == ()
    assert (result.best.doublings, result.best.outer[1]) == (at, momentum)


@given(st.integers(0, 2), st.sampled_from([0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8]))
def test_an_outer_learning_rate_at_the_edge_grows_or_shrinks_until_it_is_interior(at: int, outer_lr: float) -> None:
    space = Space(3, ((0.7, 0.3), (0.7, 0.5), (0.7, 0.7)), (1, 4), 2000)
    _, result = answered(space, valley(at, 0.5, outer_lr))
    assert result == (GridPoint(at, (outer_lr, 0.5)), (), result.spent)
    _, kept = answered(space._replace(cross=False), valley(at, 0.5, outer_lr))
    assert kept == (GridPoint(at, (0.7, 0.5)), ("outer_lr",), kept.spent)


def test_a_cross_tries_the_rates_with_the_first_pair_and_then_every_pair_at_the_best_of_them() -> None:
    pairs = ((0.7, 0.5), (1.0, 0.5), (0.5, 0.5), (0.7, 0.7), (0.7, 0.3))
    trials, result = answered(Space(3, pairs, (1,), 100), valley(1, 0.5, 1.0))
    tried = [(trial.setting.doublings, trial.setting.outer) for trial in trials]
    assert tried[:7] == [*((k, pairs[0]) for k in range(3)), *((1, pair) for pair in pairs[1:])]
    around = {(0, (1.0, 0.5)), (2, (1.0, 0.5)), (1, (1.4, 0.5)), (1, (1.0, 0.3)), (1, (1.0, 0.7))}
    assert {*tried[7:]} == around and result == (GridPoint(1, pairs[1]), (), 12)


def test_in_a_product_a_pair_is_judged_at_its_own_best_learning_rate() -> None:
    def loss(
        trial: Trial,
    ) -> float:  # the pair that is worse on the whole first grid is better at its optimum beyond it
        assert trial.setting.outer is not None
        best, floor = (6, 0.0) if trial.setting.outer == PAIRS[0] else (1, 1.0)
        return floor + abs(trial.setting.doublings - best)

    _, result = answered(Space(3, PAIRS[:2], (1, 4), 500, cross=False), loss)
    assert result.best == GridPoint(6, PAIRS[0]) and result.edges == ("outer_lr",)


def test_a_budget_that_ends_early_is_reported_by_the_edge() -> None:
    space = Space(2, (None,), (1, 4), 0)
    _, result = answered(space._replace(budget=needed_tokens(space)), valley(9))
    assert result.best is not None and result.edges == ("lr",)


def test_a_search_whose_runs_all_diverge_goes_down_and_chooses_nothing() -> None:
    trials, result = answered(Space(2, (None,), (1,), 6), lambda trial: math.nan)
    assert [trial.setting.doublings for trial in trials] == [0, 1, -1, -2, -3, -4]
    assert result == SearchResult(None, (), 6)


def test_a_final_decides_between_the_two_best_and_the_grid_grows_around_both() -> None:
    def loss(trial: Trial) -> float:  # on one seed 0 doublings are best, over all seeds 1 is
        return abs(trial.setting.doublings - (0.4 if trial.rung < 2 else 1))

    space = Space(2, (None,), (1, 4), 100, final=8)
    trials, result = answered(space, loss)
    assert {trial.setting.doublings for trial in trials if trial.rung == 2} == {0, 1}
    assert {trial.setting.doublings for trial in trials if trial.rung == 1} >= {-1, 0, 1, 2}
    assert result.best == GridPoint(1, None) and result.edges == ()


def test_where_both_finalists_diverge_the_next_best_is_asked() -> None:
    def loss(trial: Trial) -> float:
        height = abs(trial.setting.doublings - 2.2)
        return math.nan if trial.rung == 2 and trial.setting.doublings > 1 else height

    trials, result = answered(Space(3, (None,), (1, 4), 100, final=8), loss)
    assert [trial.setting.doublings for trial in trials if trial.rung == 2] == [2, 3, 1, 4]
    assert result.best == GridPoint(1, None)


TUNE = {"budget_tokens": 1_100, "lr": [1e-3, 2e-3], "outer": [[0.7, 0.5]], "rungs": [0.5, 1.0]}
METHODS = [
    {"label": "GASLoC", "rule.name": "gasloc"},
    {"label": "gossip", "rule.name": "gossip", "tune": {"lr": [4e-3]}},
]


def tuning(**changes: Any) -> dict[str, Any]:
    base = document(workers=2, run__steps=4, run__eval_batches=1, model__layers=1)
    return {**base, "tune": {**TUNE, **changes.pop("tune", {})}, "variant": METHODS, **changes}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tune": {"lr": [1e-3, 3e-3]}}, r"tune\.lr is \[0\.001, 0\.003\], but each must be twice the one before"),
        ({"tune": {"rungs": [0.5]}}, r"tune\.rungs is \[0\.5\], but they must grow and end in 1\.0"),
        ({"tune": {"seeds": [1, 1]}}, r"tune\.seeds is \[1, 1\], which contains duplicates"),
        (
            {"tune": {"final_seeds": [1, 2]}},
            r"tune\.final_seeds is \[1, 2\], but it must hold all .*, \[0\].* \[0, 1\]",
        ),
        ({"tune": {"final_seeds": [0, 1]}}, r"the budget is 1,100 tokens, .* two in the final take 1,536; raise"),
        ({"tune": {"budget": 3}}, r"tune.*budget"),
        ({"tune": {"outer": [[0.7, 1.0]]}}, r"tune\.outer is 1\.0 but must be a list of pairs \[η, γ\] with"),
        (
            {"tune": {"budget_tokens": 100}},
            r"the budget is 100 tokens, but 2 settings on the .* take 1,024; raise tune\.budget",
        ),
        ({"sweep": {"seed": [1]}}, r"remove \[sweep\]"),
        (
            {"variant": [{"label": "a", "tune": {"budget_tokens": 1}}]},
            r"'a' has tune = .* gossamer tune takes tune = \{ lr",
        ),
        ({"variant": [{"label": "a b"}, {"label": "a/b"}]}, r"would share a folder"),
        (
            {
                "variant": [
                    {"label": "a", "rule": {"name": "diloco", "lr": {"0": 0.4, "2": 0.7}}, "topology": "complete"}
                ]
            },
            r"'a' has rule\.lr = .*, which changes over the run, .* tune = \{ outer = \[\] \}",
        ),
        (
            {"variant": [{"label": "a", "run.synchronous_steps": 2, "topology": "complete", "rule.name": "diloco"}]},
            r"'a' begins with run\.synchronous_steps = 2 and tune\.rungs = \[0\.5, 1\.0\] with runs of 2 inner steps",
        ),
    ],
)
def test_an_impossible_tuning_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    def first_batches() -> None:
        for contender in contenders(tuning(**changes)):
            next(search(contender.space))

    with pytest.raises(ConfigError, match=sentence):
        first_batches()


def test_only_methods_with_both_outer_settings_try_pairs() -> None:
    rules = [{"label": name, "rule.name": name} for name in ("gasloc", "gossip", "slowmo")]
    sgd = {"label": "sgd", "rule": {"name": "gasloc", "optimizer": "sgd"}}
    own = {"label": "own", "rule": {"name": "gasloc", "momentum": 0.3}, "tune": {"outer": []}}
    server = {"label": "server", "server.name": "heloco"}
    by_label = {one.row.label: one for one in contenders(tuning(variant=[*rules, sgd, own, server]))}
    tables = {"gasloc": "rule", "gossip": "", "slowmo": "rule", "sgd": "", "own": "", "server": "server"}
    assert {label: one.table for label, one in by_label.items()} == tables
    trial = Trial(GridPoint(1, (0.7, 0.5)), 0)
    config = by_label["gasloc"].run(trial, 3)
    assert (config.seed, config.inner.lr, dict(config.rule.options)) == (3, 2e-3, {"lr": 0.7, "momentum": 0.5})
    assert config.run.steps == 2 and by_label["gasloc"].tokens(0) == 2 * 2 * 2 * 16


def test_a_rung_is_a_share_of_the_inner_steps_where_rounds_grow() -> None:
    growing = {"label": "a", "run.local_steps": {"0": 1, "4": 4}, "run.steps": 16}
    (one,) = contenders(tuning(variant=[growing]))
    assert one.config.length.rounds == 7 and [one.steps(rung) for rung in (0, 1)] == [8, 16]


def test_a_file_that_means_the_default_rule_is_searched_as_one_that_names_it(tmp_path: Path) -> None:
    asked = tuning(tune={"outer": [[0.7, 0.5]], "lr": [1e-3]}, variant=[{"label": "a"}])
    without = {key: value for key, value in asked.items() if key != "rule"}
    meant, named = (
        tune(contenders(without | rule), tmp_path / f"{len(rule)}") for rule in ({}, {"rule": {"name": "gasloc"}})
    )
    assert [one.losses for one in meant] == [one.losses for one in named]
    (chosen,) = points(tomllib.loads(tuned_file(without, meant, "a.toml")))
    assert (chosen.config.rule.name, dict(chosen.config.rule.options)) == ("gasloc", {"lr": 0.7, "momentum": 0.5})


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [("cross", "the budget ended before both neighbours in η had run"), ("product", "at the edge of η")],
)
def test_the_page_tells_a_budget_that_ended_from_a_grid_that_does_not_grow(grid: str, sentence: str) -> None:
    (contender, *_) = contenders(tuning(tune={"grid": grid}))
    best = GridPoint(0, (0.7, 0.5))
    tuned = Tuned(contender, SearchResult(best, ("outer_lr",), 9), {Trial(best, contender.deciding): [1.0]})
    assert f", loss 1.0000, {sentence} (9 of " in tuned_page([tuned])


@pytest.mark.full
def test_the_final_repeats_no_run_and_decides_by_the_mean_of_its_seeds(tmp_path: Path) -> None:
    twin = {**METHODS[1], "label": "twin"}
    asked = tuning(tune={"final_seeds": [0, 1, 2], "budget_tokens": 2_400}, variant=[METHODS[1], twin])
    (tmp_path / "outcomes.jsonl").touch()  # of a search that was refused before its first run
    result, other = tune(contenders(asked), tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        tune(contenders(asked), tmp_path)
    assert other.result == result.result and other.losses == result.losses
    every = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert searched(contenders(asked), tmp_path / "outcomes.jsonl")[1].result == other.result, (
        "each method has its own lines"
    )
    lines = [line for line in every if line["method"] == "gossip"]
    assert len({line["run"] for line in lines}) == len(lines) == len(every) / 2, "no run of a method twice"
    full = {line["lr"]: line["loss"] for line in lines if line["rung"] == 1}
    finals = {result.contender.lr(trial.setting): losses for trial, losses in result.losses.items() if trial.rung == 2}
    assert [*finals] == sorted(full, key=full.__getitem__)[:2]
    assert [losses[0] for losses in finals.values()] == [full[lr] for lr in finals]
    assert {(line["lr"], line["seed"]) for line in lines if line["rung"] == 2} == {
        (lr, seed) for lr in finals for seed in (1, 2)
    }
    assert result.result is not None and result.result.best is not None
    assert result.contender.lr(result.result.best) == min(finals, key=lambda lr: sum(finals[lr]))
    assert result.result.spent == sum(line["tokens"] for line in lines)
    again, _ = searched(contenders(asked), tmp_path / "outcomes.jsonl")
    assert (again.result, again.losses) == (result.result, result.losses), "from the outcomes alone"
    page = tuned_page([result])
    assert f"({result.result.spent:,} of 2,400 tokens, {len(result.losses)} trials)" in page, page


@pytest.mark.usefixtures("forks")
def test_a_tuning_that_was_cut_short_resumes_to_the_same_choice_and_repeats_no_finished_run(tmp_path: Path) -> None:
    import tomli_w

    file, out = tmp_path / "methods.toml", tmp_path / "out"
    file.write_text(tomli_w.dumps(tuning()))
    code, output = run("tune", file, "--out", out, "--jobs", 1)
    assert code == 0 and "GASLoC: lr " in output and "gossip: lr " in output, output
    outcomes, tuned, page = ((out / name).read_text() for name in ("outcomes.jsonl", "tuned.toml", "tune.md"))
    for line in map(json.loads, outcomes.splitlines()):
        assert line["seed"] == 0 and {*line["origin"]} == {"digest", "commit", "versions", "seconds", "text"}
    drawn = searched(contenders(load_document(file)), out / "outcomes.jsonl")
    assert page == f"# Tuned with one budget\n\n{tuned_page(drawn)}", "from the outcomes alone"
    assert run("tune", file, "--out", out)[0] == 2, "what is there is kept unless --resume is given"
    code, output = run("tune", file, "--out", tmp_path / "other", "--set", "seed=3")
    assert code == 2 and "set tune.seeds" in output, output
    lines = outcomes.splitlines(keepends=True)
    (out / "outcomes.jsonl").write_text("".join(lines[:4]) + lines[4][:20])  # a killed process left a part of a line
    (unfinished, *_) = searched(contenders(load_document(file)), out / "outcomes.jsonl")
    assert unfinished.result is None and "GASLoC: the search has not ended" in tuned_page([unfinished])
    other, spoilt = json.loads(lines[0]) | {"rung": 9}, out / "spoilt.jsonl"
    spoilt.write_text(json.dumps(other) + "\n")
    assert searched(contenders(load_document(file)), spoilt)[0].result is None, "a rung that the file no longer has"
    for wrong in ({"lr": 0.0}, {"outer": [1.0]}, {"rung": -1}):
        spoilt.write_text(json.dumps(other | wrong) + "\n")
        with pytest.raises(DataError, match=r"spoilt\.jsonl:1"):
            searched(contenders(load_document(file)), spoilt)
    spoilt.unlink()
    code, again = run("tune", file, "--out", out, "--jobs", 2, "--resume")
    assert code == 0 and again.count("tokens, seed 0: loss") == len(lines) - 4, again
    assert (out / "outcomes.jsonl").read_text().startswith("".join(lines[:4]))
    assert ((out / "tuned.toml").read_text(), (out / "tune.md").read_text()) == (tuned, page), (
        "in processes as in this one"
    )
    chosen = {point.method: point.config for point in points(load_document(out / "tuned.toml"))}
    assert [*chosen] == ["GASLoC", "gossip"] and chosen["GASLoC"].run.steps == 4
    assert f"gossip: lr {chosen['gossip'].inner.lr:g}, loss " in page
    assert chosen["GASLoC"].rule.options["lr"] == 0.7


@pytest.mark.usefixtures("forks")
def test_a_comparison_copies_the_runs_of_the_search_that_chose_its_settings_and_trains_the_others(
    tmp_path: Path,
) -> None:
    import tomli_w

    file, out, tuned = tmp_path / "methods.toml", tmp_path / "out", tmp_path / "out" / "tuned.toml"
    base = document(
        workers=2, run__steps=4, run__eval_every=0, run__eval_workers=False, run__eval_batches=1, model__layers=1
    )
    asked = {"budget_tokens": 1_100, "lr": [1e-3, 2e-3, 4e-3], "outer": []}
    file.write_text(tomli_w.dumps({**base, "tune": asked, "variant": METHODS[:1]}))
    assert run("tune", file, "--out", out, "--jobs", 1)[0] == 0
    code, output = run("compare", tuned, "--out", tmp_path / "copied", "--seeds", "0,1", "--reuse", out)
    assert code == 0 and f"1 of 2 runs are copied from '{out}'" in output, output
    code, output = run("compare", tuned, "--out", tmp_path / "copied", "--seeds", "0,1", "--reuse", out, "--resume")
    assert code == 0 and f"0 of 0 runs are copied from '{out}'" in output, output
    assert run("compare", tuned, "--out", tmp_path / "trained", "--seeds", "0,1")[0] == 0
    first, second = (read_results(tmp_path / name / "outcomes.jsonl") for name in ("copied", "trained"))
    assert [one.seed for one in first] == [0, 1]
    for copied, trained in zip(first, second, strict=True):
        assert copied.row == trained.row
        assert copied.origin is not None and trained.origin is not None
        assert copied.origin | {"seconds": 0} == trained.origin | {"seconds": 0}
    seconds = [json.loads(line)["origin"]["seconds"] for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert first[0].origin is not None and first[0].origin["seconds"] in seconds
    for words, sentence in [
        (("--set", "run.eval_workers=true"), "none of the 2 runs is finished in"),
        (("--set", "inner.lr=3e-3"), "none of the 2 runs is finished in"),
    ]:
        code, output = run("compare", file, "--out", tmp_path / "no", "--seeds", "0,1", "--reuse", out, *words)
        assert code == 2 and sentence in output and "Traceback" not in output, output
    code, output = run("compare", tuned, "--out", tmp_path / "no", "--reuse", tmp_path)
    assert code == 2 and "has no outcomes.jsonl" in output, output
