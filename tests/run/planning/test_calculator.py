"""The calculators of gossamer watch --plan: they say what plan and utilisation say, and take only values that they list."""

import json
from functools import partial
from pathlib import Path

import pytest
from test_watch import get, serving  # pyright: ignore[reportMissingImports]

from gossamer.cli import main
from gossamer.cli.watch import calculators
from gossamer.models.sizes import ModelConfig, parameter_count
from gossamer.network.estimates.utilisation import bandwidth_table, setting_of
from gossamer.network.links import Network
from gossamer.run.planning.calculator import Calculator
from gossamer.run.planning.candidates import price_recipes
from gossamer.run.planning.choice import plan_rows
from gossamer.run.planning.plan import PlanSettings, bits_per_parameter, plan

ASKED = {
    "latency": "0.01",
    "workers": "4",
    "share": "0.1",
    "step_s": "0.1",
    "model": "3m",
    "steps": "15",
    "codec": "int8",
}


def test_a_page_of_calculators_answers_as_plan_and_utilisation_do() -> None:
    calculator = Calculator()
    found = json.loads(calculator.answers["plan.json"](ASKED))
    model = ModelConfig(size="3m")
    bits = bits_per_parameter(["int8"], parameter_count(model, 256))["int8"]
    settings = PlanSettings(workers=4, local_steps=(15,), codecs={"int8": bits}, rounds=16)
    for place, bps in enumerate(calculator.inputs["plan"][0].values):
        network = Network(uplink_bps=(bps, bps, bps, bps * 0.1), downlink_bps=bps, latency_s=0.01, step_s=0.1)
        made = plan(network, model, settings)
        assert found["rows"][place] == [list(row) for row in plan_rows(made.choice, made.candidates)]
        assert made.candidates[found["best"][place]] == made.best
        assert found["summaries"][place].startswith(f"{made.choice.tokens:.4g} tokens")
        for one in made.candidates:
            if not one.left_out:
                most = max(other.utilisation for other in made.candidates if other.name == one.name)
                assert found["curves"][one.name][place] == pytest.approx(most, rel=1e-4)
    assert any(row[0] == "DiLoCo less 3" for row in found["rows"][0]) and len(found["curves"]) == 5
    published = json.loads(calculator.answers["published.json"]({"published": "10b", "steps": "100"}))
    needed = [
        f"{row.bandwidth_bps / 1e9:.1f}" for row in bandwidth_table(setting_of("10b", "streaming")) if row.bandwidth_bps
    ]
    for answer, kinds in (
        (found, {"DiLoCo": 0, "GASLoC 1-Peer": 1, "data parallel": 6}),
        (published, {"streaming": 7}),
    ):
        assert answer["places"].keys() == answer["curves"].keys() and kinds.items() <= answer["places"].items()
    assert ["streaming", *needed] in published["rows"] and published["marks"]["diloco"][1][0] == 0.5


@pytest.mark.parametrize(
    "query", [{"workers": "1000000"}, {"steps": "1e9"}, {"model": "/etc/passwd"}, {"latency": "nan"}, {"share": "x"}]
)
def test_a_value_that_is_not_listed_is_a_sentence(query: dict[str, str]) -> None:
    calculator = Calculator()
    assert "must be one of" in json.loads(calculator.answers["plan.json"](query))["error"]
    assert "must be one of" in json.loads(calculator.answers["published.json"]({"published": "x"}))["error"]


def test_an_answer_outlives_the_others_that_make_room_meanwhile() -> None:
    class Kept(dict[str, bytes]):
        def __contains__(self, key: object) -> bool:  # another kind of answer makes room at the worst moment
            found = super().__contains__(key)
            self.clear()
            return found

    calculator = Calculator()
    calculator._kept = Kept()
    first = calculator.answers["published.json"]({"published": "x"})
    assert calculator.answers["published.json"]({"published": "x"}) == first


def test_a_network_file_is_moved_as_a_whole_and_nothing_else_is_served(tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text("uplink_bps = [1e8, 1e7, 1e8, 1e8]\ndownlink_bps = 1e8\nstep_s = 0.1\n")
    with serving(calculators((file,), "127.0.0.1", 0)) as page:
        inputs = json.loads(get(page, "/inputs.json")[1])
        assert [one["key"] for one in inputs["inputs"]["plan"]] == ["factor", "model", "vocab", "steps", "codec"]
        found = json.loads(get(page, "/plan.json?model=0.2m&steps=15")[1])
        network = Network(uplink_bps=(1e7, 1e6, 1e7, 1e7), downlink_bps=1e7, step_s=0.1)
        tenth = plan(network, ModelConfig(size="0.2m"), PlanSettings(local_steps=(15,), rounds=16))
        assert found["rows"][2] == [list(row) for row in plan_rows(tenth.choice, tenth.candidates)]
        assert [get(page, path)[0] for path in ("/data.json", "/../secret", "/", "/calculator.js")] == [
            404,
            404,
            200,
            200,
        ]


def test_other_methods_have_the_price_that_plan_gives_them_or_a_reason() -> None:
    network = Network(uplink_bps=1e8, downlink_bps=1e8, step_s=0.1)
    for method, priced in (("slowmo", True), ("gasloc_adaptive", False)):
        calculator = Calculator(network, partial(price_recipes, only=method))
        found = json.loads(calculator.answers["others.json"]({"model": "0.2m", "steps": "15", "workers": "4"}))
        made = plan(network, ModelConfig(size="0.2m"), PlanSettings(workers=4, local_steps=(15,), rounds=16))
        candidates, unpriced = price_recipes(made, method)
        assert (
            found["rows"] == [list(row) for row in plan_rows(made.choice, candidates)] and found["unpriced"] == unpriced
        )
        assert bool(candidates) == priced != bool(unpriced)


def test_a_mark_in_a_table_has_its_sentence_there() -> None:
    network = Network(uplink_bps=1e8, downlink_bps=1e8, step_s=0.1)
    calculator = Calculator(network, partial(price_recipes, only="local_sgd"))
    found = json.loads(calculator.answers["others.json"]({"model": "0.2m", "steps": "240", "workers": "4"}))
    marks, guesses = found["notes"][-2:]
    assert all(row[-2].endswith("*") for row in found["rows"]) and marks.endswith(": local_sgd with 30.")
    assert guesses.startswith("a row with * and fewer rounds than were measured is taken only if")
    found = json.loads(calculator.answers["plan.json"]({"model": "0.2m", "steps": "500", "workers": "4"}))
    assert "GASLoC 1-Peer with 120, GASLoC 2-Peer with 120." in found["summaries"][0]


def test_what_watch_cannot_show_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        ([], "no run was given to watch"),
        (["--plan", str(tmp_path / "a"), str(tmp_path / "b")], "--plan got 2 files"),
        (["--plan", str(tmp_path / "none.toml")], "none.toml"),
    ):
        assert main(["watch", *words]) == 2
        assert sentence in capsys.readouterr().err
