"""The experiments in experiments/paper, rivals and evidence: each starts, runs in small, and draws what its file asks for.

Methods that differ in numbers alone run once for all of them, and figures of one kind are drawn once; with `--full`, each for
itself.
"""

import dataclasses
import tomllib
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.models.sizes import parameter_count
from gossamer.report.figures import Figure, draw_figure, figure_table
from gossamer.report.reach import ROUNDS, reach
from gossamer.report.results import PointResult
from gossamer.report.table import summary_rows
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import Point, figure, open_experiment, points
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import RunConfig, dump
from gossamer.run.experiments.search import needed_tokens
from gossamer.run.experiments.tune import contenders
from gossamer.run.simulated.simulate import simulate
from tiny import TEXT, document

CONFIGS = Path(__file__).parents[2] / "experiments"
FILES = sorted((CONFIGS / "paper").glob("*.toml"))
RIVALS = sorted((CONFIGS / "rivals").glob("*.toml"))
REGISTERED = [file for file in sorted((CONFIGS / "evidence").glob("*.toml")) if figure(load_document(file))]
VOCABULARY = {"bytes": 256, "hf-internal-testing/llama-tokenizer": 32_000}


def small(config: RunConfig) -> RunConfig:
    """The same methods in the same proportions, on next to nothing: two rounds of at most two local steps."""
    h = config.run.local_steps
    local_steps = tuple(min(2, own) for own in h) if isinstance(h, tuple) else min(2, h)
    steps = 2 * (max(local_steps) if isinstance(local_steps, tuple) else local_steps)
    narrow = (
        config.pipeline.stages > 1 or config.model.bottleneck is not None
    )  # keeps its layers, and room for tiles and widths
    size = {"hidden_size": 64} if narrow else {"hidden_size": 8, "layers": config.schedule.fragments}
    model = dataclasses.replace(config.model, heads=2, kv_heads=2, intermediate_size=8, **size)
    return dataclasses.replace(
        config,
        workers=min(config.workers, 8),
        model=model,
        inner=dataclasses.replace(config.inner, compile=False),  # which takes longer than all of them
        data=dataclasses.replace(config.data, source=str(TEXT), seq_len=8, batch_size=1, global_batch=None),
        run=dataclasses.replace(config.run, steps=steps, local_steps=local_steps, eval_every=1, eval_batches=1),
        schedule=dataclasses.replace(config.schedule, overlap_steps=min(1, config.schedule.overlap_steps)),
    )


def form(value: Any) -> Any:
    """Settings with the kinds of their numbers in place of the numbers."""
    if isinstance(value, dict):
        return {key: form(own) for key, own in value.items()}
    return [*map(form, value)] if isinstance(value, list) else value if isinstance(value, str | bool) else type(value)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Callable[[RunConfig], Path]:
    """The folder of a method that has run in small, or of one of the same form: that its numbers may be, `test_check` sees."""
    folders: dict[str, Path] = {}

    def of(config: RunConfig) -> Path:
        network = config.network if config.event_driven else {}  # which else decides nothing but prices
        config = small(config)
        inner = dataclasses.replace(config.inner, lr=1e-3, warmup_steps=1)
        config = dataclasses.replace(config, name="small", inner=inner, network=network)
        text = dump(config)
        if (key := text if pytestconfig.getoption("--full") else str(form(tomllib.loads(text)))) not in folders:
            folders[key] = tmp_path_factory.mktemp("small")
            simulate(config, folders[key])
        return folders[key]

    return of


@pytest.fixture(scope="module")
def drawn(pytestconfig: pytest.Config) -> Callable[[list[PointResult], Figure], bytes]:
    """A figure, or one of the same kind that has been drawn."""
    pictures: dict[str, bytes] = {}

    def of(outcomes: list[PointResult], asked: Figure) -> bytes:
        kind = [*map(type, asked.keys)], bool(asked.y), bool(asked.target), asked.paired, asked.log_x
        if (key := str(asked if pytestconfig.getoption("--full") else kind)) not in pictures:
            pictures[key] = draw_figure(outcomes, asked)
        return pictures[key]

    return of


@pytest.mark.sampled(4)
@pytest.mark.parametrize("file", FILES + RIVALS + REGISTERED, ids=lambda file: file.stem)
def test_every_experiment_runs_in_small_and_draws_its_figure(
    file: Path, ran: Callable[[RunConfig], Path], drawn: Callable[[list[PointResult], Figure], bytes]
) -> None:
    document = load_document(file)
    asked = figure(document)
    first: dict[str, Point] = {}
    for point in points(document):
        first.setdefault(point.method, point)
    folders = {point.label: ran(point.config) for point in first.values()}
    rows = summary_rows(folders, next(iter(first.values())).config.network)
    outcomes = [PointResult(p.method, p.at, p.seed, row) for p, row in zip(first.values(), rows, strict=True)]
    assert asked is not None
    assert all(method in figure_table(outcomes, asked) for method in first)
    assert xml.etree.ElementTree.fromstring(drawn(outcomes, asked)).tag.endswith("svg")


def test_every_registered_tuning_can_start_at_each_of_its_sizes_and_its_budget_suffices() -> None:
    tunings = [
        document for file in (CONFIGS / "evidence").glob("*.toml") if "tune" in (document := load_document(file))
    ]
    assert tunings
    for document in tunings:
        for scale in ("", *document.get("scale", {})):
            for contender in contenders(document, scale=scale):
                resolve(contender.config)
                assert needed_tokens(contender.space) <= contender.asked.budget_tokens


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_experiment_has_the_size_of_the_paper_or_only_tunes(file: Path) -> None:
    document = load_document(file)
    if "scale" not in document:
        assert file.stem.endswith("_lr")
        return
    for here, there in zip(points(document), points(document, scale="paper"), strict=True):
        assert (here.method, here.at) == (there.method, there.at)
        assert there.config.rule == here.config.rule and there.config.run.local_steps == here.config.run.local_steps
        assert parameter_count(there.config.model, VOCABULARY[there.config.data.tokenizer]) == 134_105_856


def test_what_the_command_line_sets_holds_at_every_size_of_a_file(tmp_path: Path) -> None:
    import tomli_w

    long = {"run": {"steps": 60}, "inner.warmup_steps": 3}
    rows = [{"label": "a", "scale": {"long": {"run.steps": 90}}}, {"label": "b", "rule.lr": 0.9}]
    (tmp_path / "sizes.toml").write_text(tomli_w.dumps(document(rule__lr=0.7, scale={"long": long}, variant=rows)))

    def at(scale: str, **overrides: Any) -> list[tuple[int, int, float]]:
        found = points(open_experiment(tmp_path / "sizes.toml", overrides), scale=scale)
        return [(one.run.steps, one.inner.warmup_steps, one.rule.options["lr"]) for _, _, _, _, one in found]

    (steps, warmup, lr), _ = at("")
    assert at("long") == [(90, 3, lr), (60, 3, 0.9)]
    assert (steps, lr) == (12, 0.7) and at("")[1] == (12, warmup, 0.9)
    assert at("long", **{"run.steps": 30}) == [(30, 3, lr), (30, 3, 0.9)]
    assert at("long", **{"rule.lr": 0.5}) == [(90, 3, 0.5), (60, 3, 0.9)], "a variant is what differs"


@pytest.mark.parametrize("scale", ["", "paper"])
@pytest.mark.parametrize(
    "file",
    [file for file in FILES if file.stem.startswith("straggler") and "network" in load_document(file)],
    ids=lambda file: file.stem,
)
def test_a_model_leaves_a_full_link_in_five_thirds_of_an_inner_step(file: Path, scale: str) -> None:
    for point in points(load_document(file), scale=scale):
        config = point.config
        model_bits = 32 * parameter_count(config.model, VOCABULARY[config.data.tokenizer])
        for name, network in config.network.items():
            assert isinstance(network.uplink_bps, tuple) and isinstance(network.step_s, float)
            assert model_bits / network.uplink_bps[0] == pytest.approx(5 / 3 * network.step_s)
            assert network.uplink_bps[-1] / network.uplink_bps[0] == pytest.approx(int(name[-2:]) / 100)


def test_gasloc_that_equals_its_target_reaches_it_at_the_targets_end() -> None:
    curve = [(1.0, 3.0), (2.0, 2.0)]
    runs = [PointResult(name, {}, 0, {"loss_at_s": {"lan": curve}}) for name in ("target", "twin")]
    assert [(one.ratio, one.behind) for one in reach(runs, "target")] == [(1.0, 0.0)] * 2


def test_runs_that_send_nothing_are_compared_by_rounds_and_not_by_bytes() -> None:
    row = {"loss_at_bytes": [(0.0, 3.0), (0.0, 2.0)], "loss_at_round": [(1, 3.0), (2, 2.0)], "loss_at_s": {}}
    runs = [PointResult(name, {}, 0, row) for name in ("target", "twin")]
    assert {one.network for one in reach(runs, "target", paired=True)} == {ROUNDS}
