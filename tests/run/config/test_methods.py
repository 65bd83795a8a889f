"""Every method by its name: it is what its row says, the page about it is counted from the code, and it trains."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

import commands
from generators.methods_table import boundary_rows, markdown
from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.boundaries import BOUNDARIES
from gossamer.codecs import CODECS
from gossamer.errors import ConfigError
from gossamer.models.bottleneck import BOTTLENECKS
from gossamer.models.sizes import BottleneckConfig
from gossamer.network.links import from_options
from gossamer.network.pricing import price
from gossamer.record.logs.trace import KINDS, read_trace
from gossamer.rules import RULES, WRAPPERS, make_rule
from gossamer.run.config.document import load_document, with_settings
from gossamer.run.config.experiment_file import points
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.recipes import FACTORIES, METHODS, docstring_part, missing, recipe, recipes
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import parse
from gossamer.run.planning.check import examine_run
from gossamer.run.planning.traffic import traffic
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.settings.options import row_faults
from gossamer.topologies import TOPOLOGIES
from tiny import TEXT, document, tiny

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "methods.md"
every_method = pytest.mark.parametrize("name", recipes())


def test_the_page_about_the_methods_is_what_the_code_makes():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make methods`"


def test_list_shows_every_row():
    code, out = commands.run("list")
    assert code == 0
    for name in [*RULES, *TOPOLOGIES, *CODECS, *BOUNDARIES, *BOTTLENECKS, *recipes()]:
        assert name in out, name
    assert "every codec takes back=NAME" in out


def test_every_row_of_every_table_is_a_method():
    assert set(recipes()) == {name for name in FACTORIES if not missing(FACTORIES[name])} | set(METHODS)
    assert not [*RULES.keys() & SERVERS.keys(), *SERVERS.keys() & PAIRS.keys(), *RULES.keys() & PAIRS.keys()]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert all(any(line.startswith(f"| `{name}` |") for line in lines) for name in recipes())


def test_the_page_has_a_row_for_every_boundary_and_says_which_are_part_of_the_model():
    rows = {row.boundary: row for row in boundary_rows()}
    assert [*rows] == [*BOUNDARIES, *BOTTLENECKS] and BOTTLENECKS.keys() == {
        *get_args(get_type_hints(BottleneckConfig)["name"])
    }
    assert {name for name, row in rows.items() if "part of the model" in row.set_as} == {*BOTTLENECKS}
    assert {name for name, row in rows.items() if row.set_as == "`pipeline.forward`"} == {"aqsgd"}
    assert all(row.source and row.fails_when for name, row in rows.items() if name not in ("dense", "cast"))
    keys = {field.name for field in dataclasses.fields(BottleneckConfig)} - {"name"}
    assert {key for _, own in BOTTLENECKS.values() for key in own} == keys


@every_method
def test_a_method_names_its_source_and_when_it_fails(name):
    row = recipe(name)
    assert row.source and row.fails, (
        f"the docstring of {name} lacks a line 'Source: ...' or 'Fails when: ...'; write it"
    )
    assert not row.differs.endswith("."), row
    assert sum(f"{kind}.name" in row.settings for kind in ("rule", "server", "pair")) == 1


def test_the_text_under_a_label_is_the_whole_paragraph():
    def factory():
        """A sentence.

        Cost: one
            and two.
        Source: three.
        """

    assert (docstring_part(factory, "Cost"), docstring_part(factory, "Source"), docstring_part(factory, "Differs")) == (
        "one and two.",
        "three.",
        "",
    )


def test_settings_next_to_a_method_override_it_and_earlier_settings_do_not():
    file = {"method": "muloco", "rule": {"lr": 0.5}, "network": {"a.b": {"uplink_bps": 1}}}
    run = with_settings(file, {"workers": 4})
    assert run["rule"] == {"name": "diloco", "momentum": 0.6, "lr": 0.5}
    assert (run["inner"]["optimizer"], run["workers"], [*run["network"]]) == ("spectral_muon", 4, ["a.b"])
    other = with_settings(run, {"method": "gasloc_restarted", "rule.restarted.every": 5, "topology.peers": 2})
    assert other["rule"] == {"name": "gasloc", "restarted": {"every": 5}}
    assert recipes()["gasloc_restarted"].settings["rule.restarted"] == {"every": 3}
    assert other["topology"] == {"name": "random", "peers": 2}
    assert parse(file | {"network": {}}).rule.options == {"momentum": 0.6, "lr": 0.5}


def test_a_method_on_the_command_line_replaces_the_same_keys_of_the_file_and_leaves_the_rest():
    file = {"rule": {"name": "gasloc", "form": "published", "restarted": {"every": 9}}, "codec": {"name": "int8"}}
    run = with_settings(file, {"method": "gasloc_restarted"})
    assert run["rule"] == {"name": "gasloc", "form": "published", "restarted": {"every": 3}}
    assert run["codec"] == {"name": "int8"}
    assert with_settings(file, {"method": "muloco"})["rule"] == {"name": "diloco", "momentum": 0.6}
    assert with_settings({"method": "muloco"}, {"method": "diloco"})["inner"]["optimizer"] == "spectral_muon"
    assert "rule" not in with_settings(file, {"method": "heloco"})


def test_a_part_that_a_file_gives_by_its_name_alone_takes_settings_as_a_table_does():
    file = {"rule": "gasloc", "topology": "random"}
    assert with_settings(file, {"topology.peers": 2})["topology"] == {"name": "random", "peers": 2}
    assert with_settings(file, {"method": "diloco"}) == {"rule": {"name": "diloco"}, "topology": {"name": "complete"}}
    assert file["topology"] == "random"


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'muloco'"):
        parse({"method": "mulocco"})
    with pytest.raises(ConfigError, match="unknown method '3'"):
        parse({"method": 3})


def test_a_variant_is_labelled_with_its_method():
    rows = [{"method": "gossip"}, {"label": "mine", "method": "gossip"}]
    assert [run.label for run in points({**document(), "variant": rows})] == ["gossip", "mine"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_stands_in_a_run_file_under_its_name_and_its_options_are_checked(wrapper):
    inside = {"anchored": "gasloc", "restarted": "gasloc"}.get(wrapper, "diloco")
    run = tiny(rule={"name": inside, wrapper: {}}, topology__name="complete")
    assert resolve(run).in_rounds.rule.name == f"{wrapper}_{inside}" == make_rule(inside, **{wrapper: {}}).name
    for wrong, word in ((3, "as a table"), ({"evry": 1}, "evry"), ({"rule": 1}, "rule")):
        with pytest.raises(ConfigError, match=f"{wrapper}.*{word}"):
            tiny(rule={"name": inside, wrapper: wrong})
    with pytest.raises(ConfigError, match=wrapper):
        tiny(topology={"name": "ring", wrapper: {}})


def test_an_empty_table_of_a_wrapper_survives_an_experiment_file():
    rows = [{"label": "a", "rule": {"name": "gasloc", "anchored": {}}}]
    (run,) = [point.config for point in points({**document(), "variant": rows})]
    assert run.rule.options == {"anchored": {}}


COMPARISON = load_document(ROOT / "src" / "gossamer" / "configs" / "methods.toml")
TINY = {
    "workers": 4,
    "network.straggler.uplink_bps": 1e6,
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.layers": 1,
    "data.source": str(TEXT),
    "data.seq_len": 8,
    "data.batch_size": 1,
    "run.steps": 6,
    "run.local_steps": 3,
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.threads": 1,
}
LONGER = [  # their messages are under way for more steps than the others have in a round
    {"method": name, "run.steps": 10, "run.local_steps": 5, "model.layers": 3}
    for name in ("gasloc_overlapped", "gasloc_streaming")
] + [  # as many local phases as fragments
    {"method": name, "run.steps": 9} for name, recipe in recipes().items() if "events.fragments" in recipe.settings
]
DEEPER = [  # a layer for each fragment; each costs as much time as all the rest of a run
    {"method": name, "model.layers": recipe.settings["schedule.fragments"]}
    for name, recipe in recipes().items()
    if "schedule.fragments" in recipe.settings and name not in [row["method"] for row in LONGER]
]
TABLES = {
    "variant": COMPARISON["variant"] + LONGER + DEEPER,
    "network": {"straggler": {"step_s": 0.1, "downlink_bps": 1e6}},
}
PRICED = [
    "gasloc",
    "gasloc_2peer",
    "gasloc_streaming",
    "streaming_diloco",
    "des_loc",
    "eager",
    "choco",
    "sgp",
    "relaysum",
    "data_parallel",
    "muloco_compressed",
    "gpa_gossip",
    "intellect_1",
]
"""Methods of which `gossamer check` is asked too; it counts with the same code, and prices what it has counted."""
SLOW = {"uplink_bps": [1e6, 1e6, 1e5, 1e6], "downlink_bps": 1e6, "latency_s": 0.01, "step_s": 0.1}
SMALL = {run.label: run.config for run in points(with_settings(COMPARISON | TABLES, TINY))}


def test_the_comparison_trains_every_method_once():
    assert sorted(SMALL) == sorted(recipes())


def tokens_of(run):
    """On how many tokens a run trains."""
    return run.workers * run.run.steps * run.length.step_tokens


def test_the_methods_are_compared_on_the_same_tokens_and_equal_inner_learning_rates():
    runs = {run.label: run.config for run in points(COMPARISON)}
    assert len({tokens_of(run) for run in runs.values()}) == 1
    rates: dict[tuple[str, bool], set[float]] = {}
    for label, run in runs.items():
        rates.setdefault((run.inner.optimizer, label in ("demo", "distro")), set()).add(run.inner.lr)
    assert all(len(own) == 1 for own in rates.values()), rates


@every_method
def test_a_method_trains_and_sends_and_keeps_what_the_page_counts_and_a_check_says(name, tmp_path):
    run = SMALL[name]
    if run.event_driven:
        sends_after_a_phase_what_the_page_counts(run, tmp_path)
        return
    result = simulate(run, tmp_path)
    assert 0 < result.loss < 5.6
    layout, held = layout_for(run.model, 256), 1.0
    if run.model.experts is not None:  # each worker has less than all of a mixture
        held = Replica(0, settings_of(run), task_of(settings_of(run)), torch.device("cpu")).x.numel() / layout.numel
    counted = traffic(resolve(run), layout, run.length.rounds)
    trace = read_trace(tmp_path)
    if name in PRICED:
        sends_the_bytes_and_takes_the_seconds_that_a_check_says(run, trace)
    near = (
        0.5 if run.schedule.sends else 1e-6
    )  # which fragments are chosen, and so how large they are, is not known before
    assert counted.sent_bytes == pytest.approx(trace.sent_bytes.mean() / run.length.rounds, rel=near)
    assert counted.most_bytes == pytest.approx(trace.sent_bytes.max() / run.length.rounds, rel=near)
    listed = trace.listed().messages
    means = int((listed.kind == KINDS.index("mean")).sum())  # of two legs each
    assert len(listed.bytes) + means == pytest.approx(counted.messages * run.length.rounds * run.workers)
    m = resolve(run).in_rounds
    wide = 2 if run.inner.averaging is not None and m.rule.site == "parameters" else 1
    most_peers = max(len(m.topology.mixing(0).receives_from(i)) for i in range(run.workers))
    copies = m.rule.state_copies + most_peers * m.rule.copies_per_peer
    some = 1e-4 if m.rule.elementwise else 0.2  # whole tensors may have state of another size, such as factors
    assert counted.state_copies == pytest.approx(held * wide * copies, abs=some)


def sends_the_bytes_and_takes_the_seconds_that_a_check_says(run, trace):
    slow = from_options(SLOW, "slow")
    examined = examine_run(dataclasses.replace(run, network={"slow": slow}))
    assert examined.sent_bytes == pytest.approx(trace.sent_bytes.mean() / run.length.rounds, rel=1e-12)
    assert examined.most_bytes == trace.sent_bytes.max() / run.length.rounds
    (priced,) = examined.networks
    timeline = price(trace, slow)
    assert priced.round_s == pytest.approx(timeline.total_s / run.length.rounds)
    assert priced.utilisation == pytest.approx(timeline.mean_utilisation)
    assert examined.tokens == trace.steps.sum() * run.length.step_tokens and examined.rounds == run.length.rounds


def sends_after_a_phase_what_the_page_counts(run, folder):
    assert 0 < simulate(run, folder).loss < 5.6
    counted = traffic(resolve(run), layout_for(run.model, 256))
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    sizes = {line["fragment"]: line["bytes"] for line in lines if line.get("source", -1) >= 0}  # -1 is the server
    if sizes or run.server is not None or run.pair is not None:  # a message published for any reader is no transfer
        assert len(sizes) == run.events.fragments
        assert counted.sent_bytes == sum(sizes.values()) / len(sizes)


def test_a_reference_without_defaults_is_no_unknown_method_and_says_how_it_is_named():
    with pytest.raises(ConfigError, match="method 'dadao' is a reference in closed form") as caught:
        recipe("dadao")
    table = str(caught.value).partition("write ")[2].replace("...", "10.0")
    (own,) = tomllib.loads(table).values()
    assert not [*row_faults("pair", PAIRS, own.pop("name"), own)]
