"""Run files: what is written comes back, and an experiment file means the runs it looks like."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.codecs import make_codec
from gossamer.errors import ConfigError
from gossamer.optimizers.inner import InnerConfig
from gossamer.rules import RULES
from gossamer.run.config import Choice, RunConfig, digest, dump, parse
from gossamer.run.document import load, with_settings
from gossamer.run.document import settings as overrides
from gossamer.run.experiment import points
from gossamer.topologies import TOPOLOGIES
from tiny import document, tiny


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31),
            "workers": st.integers(1, 64),
            "rule": st.sampled_from(sorted(RULES)).map(lambda name: {"name": name}),
            "topology": st.sampled_from(sorted(TOPOLOGIES)).map(lambda name: {"name": name}),
            "inner": st.fixed_dictionaries(
                {"lr": st.floats(1e-6, 1.0), "optimizer": st.sampled_from(["adamw", "muon", "sgd"])}
            ),
            "run": st.fixed_dictionaries({"steps": st.integers(1, 50).map(lambda k: 3 * k), "local_steps": st.just(3)}),
        }
    )
)
def test_a_resolved_run_written_as_toml_is_read_back_as_the_same_run(document):
    config = parse(document)
    assert parse(tomllib.loads(dump(config))) == config
    assert digest(parse(tomllib.loads(dump(config)))) == digest(config)


def test_the_digest_covers_what_decides_the_numbers_and_nothing_else():
    base = digest(tiny())
    for key, value in {
        "seed": 1,
        "rule__momentum": 0.5,
        "inner__lr": 0.1,
        "data__seq_len": 17,
        "run__steps": 14,
        "topology__peers": 2,
    }.items():
        assert digest(tiny(**{key: value})) != base, key
    for key, value in {
        "name": "other",
        "run__timeout_s": 3.0,
        "run__threads": 2,
        "record__tensorboard": True,
        "data__cache": "/x",
    }.items():
        assert digest(tiny(**{key: value})) == base, key


def test_naming_another_rule_drops_the_options_of_the_old_one():
    changed = with_settings({"rule": {"name": "gasloc", "form": "published"}}, {"rule.name": "diloco", "rule.lr": 0.5})
    assert changed["rule"] == {"name": "diloco", "lr": 0.5}


def test_a_codec_without_a_way_back_is_said_with_none():
    one_way = parse(with_settings({"method": "opendiloco"}, {"codec.back": "none"}))
    assert one_way.codec == Choice("fp16") and make_codec("fp16", back="none").back is None
    assert parse(with_settings({}, {"method": "opendiloco"})).codec == Choice("fp16", {"back": "fp16"})


def test_an_experiment_is_its_variants_times_its_grid():
    experiment = document()
    experiment["variant"] = [{"label": "a"}, {"label": "b", "rule": {"name": "gossip"}}]
    experiment["sweep"] = {"seed": [0, 1], "inner.lr": [0.1]}
    runs = {run.label: run.config for run in points(experiment)}
    assert list(runs) == ["a seed=0 lr=0.1", "a seed=1 lr=0.1", "b seed=0 lr=0.1", "b seed=1 lr=0.1"]
    assert runs["b seed=1 lr=0.1"].rule.name == "gossip" and runs["b seed=1 lr=0.1"].seed == 1
    with pytest.raises(ConfigError, match="needs its own"):
        points({**document(), "variant": [{"label": "a"}, {"label": "a"}]})


def test_a_variant_may_sweep_keys_of_its_own():
    experiment = {**document(), "sweep": {"inner.lr": [0.1, 0.2]}}
    experiment["variant"] = [{"label": "a"}, {"label": "b", "sweep": {"run.local_steps": [1, 3]}}]
    found = points(experiment, seeds=[4, 5])
    assert [dict(p.at) for p in found[::2]] == [
        {"inner.lr": 0.1},
        {"inner.lr": 0.2},
        *({"run.local_steps": h} for h in (1, 3)),
    ]
    assert [p.seed for p in found] == [4, 5] * 4 and all(p.config.seed == p.seed for p in found)
    assert found[-1].label == "b local_steps=3 seed=5" and found[-1].config.inner.lr == InnerConfig().lr
    with pytest.raises(ConfigError, match="lists of values"):
        points({**document(), "variant": [{"label": "a", "sweep": {"inner.lr": 0.1}}]})


def test_a_scale_changes_the_base_and_a_variants_own_scale_what_it_says():
    experiment = {**document(run__steps=12), "scale": {"large": {"run.steps": 24, "model": {"layers": 1}}}}
    experiment["variant"] = [
        {"label": "a"},
        {"label": "b", "run": {"steps": 6}},
        {"label": "c", "run": {"steps": 6}, "scale": {"large": {"run": {"steps": 48}}}},
    ]
    assert [p.config.run.steps for p in points(experiment)] == [12, 6, 6]
    large = points(experiment, scale="large")
    assert [p.config.run.steps for p in large] == [24, 6, 48] and all(p.config.model.layers == 1 for p in large)
    with pytest.raises(ConfigError, match="did you mean 'large'"):
        points(experiment, scale="larg")


def test_dotted_settings_are_toml_or_text():
    assert overrides(["a.b=1", "c=true", "d=text", "e=[1,2]"]) == {"a.b": 1, "c": True, "d": "text", "e": [1, 2]}


def test_every_committed_config_is_a_run_that_starts():
    from pathlib import Path

    files = sorted(f for f in (Path(__file__).parents[1] / "configs").rglob("*.toml") if f.parent.name != "networks")
    assert files
    for path in files:
        assert all(isinstance(run.config, RunConfig) for run in points(load(path)))
