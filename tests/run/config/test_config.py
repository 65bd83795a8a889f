"""Run files: what is written comes back, and an experiment file means the runs it looks like."""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.clock import Away
from gossamer.codecs import CODECS, make_codec
from gossamer.errors import ConfigError
from gossamer.network.links import Change, Network, Route, Site, read_network
from gossamer.optimizers.inner import InnerConfig
from gossamer.rules import RULES
from gossamer.run.config.choice import Choice
from gossamer.run.config.document import load_document, with_settings
from gossamer.run.config.document import parse_overrides as overrides
from gossamer.run.config.experiment_file import drafts, folder_name, points
from gossamer.run.config.json_schema import json_schema
from gossamer.run.config.resolve import document_faults
from gossamer.run.config.run_file import FIRST_KEYS, LEFT_OUT_AT, RunConfig, digest, dump, parse, survey
from gossamer.settings import schema
from gossamer.settings.fields import NEUTRAL
from gossamer.settings.options import Decay, options_of
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
        "run__shards": 2,
        "record__tensorboard": True,
        "data__cache": "/x",
    }.items():
        assert digest(tiny(**{key: value})) == base, key


def test_the_network_and_the_events_count_in_the_digest_only_where_their_seconds_decide_the_numbers():
    def with_links(bps, name="wan", **options):
        return tiny(**{f"network__{name}": {"uplink_bps": bps, "downlink_bps": 1e9, "step_s": 1.0}}, **options)

    assert digest(with_links(1e9)) == digest(with_links(1e8)) == digest(tiny())
    assert digest(tiny(events__dylu=True)) == digest(tiny())
    for clocked in ({"run__adapt": True}, {"server__name": "cgad"}, {"run__wait": False}):
        assert digest(with_links(1e9, **clocked)) != digest(with_links(1e8, **clocked)), clocked
    served = with_links(1e9, server__name="cgad")
    assert digest(dataclasses.replace(served, name="other")) == digest(served)
    named = {"server__name": "cgad", "events__network": "wan"}
    other = {"network__lan": {"uplink_bps": 1e6, "downlink_bps": 1e6}}
    assert digest(with_links(1e9, **other, **named)) == digest(with_links(1e9, **named))
    assert digest(with_links(1e9, events__dylu=True, **named)) != digest(with_links(1e9, **named))


def test_all_faults_of_a_run_file_are_reported_at_once_and_parse_raises_the_first():
    wrong = {
        "workers": 0,
        "rule": {"name": "gasloc", "momentun": 0.5, "alhpa": 1.0},
        "codec": {"name": "int8", "back": "fp17"},
        "run": {"steps": 1.5, "local_steps": [3, 0], "stesp": 3},
        "inner": 3,
        "network": {
            "lan": {"uplink_bsp": 1e6, "downlink_bps": 1e6},
            "wan": {"uplink_bps": True, "changes": [{"at_s": 1, "factor": 0.5}]},
        },
        "modle": {},
    }
    expected = [
        "workers is 0 but must be a whole number from 1 to 1000000",
        "rule 'gasloc' got an unknown option 'momentun'; did you mean 'momentum'?",
        "rule 'gasloc' got an unknown option 'alhpa'; did you mean 'alpha'?",
        "unknown codec 'fp17'; did you mean 'fp16'?",
        "inner is 3 but must be a table",
        "run.steps is 1.5 but must be a whole number of at least 1",
        "run.local_steps[1] is 0 but must be a whole number of at least 1",
        "unknown key in [run] 'stesp'; did you mean 'steps'?",
        "network.lan has the keys ['downlink_bps', 'uplink_bsp'] and 'uplink_bps' is needed too; write 'uplink_bsp' as 'up",
        "unknown key in [network.lan] 'uplink_bsp'",
        "network.wan.uplink_bps is True but must be a number of bits per second from 1 to 1e18, or inf",
        "network.wan has the keys ['changes', 'uplink_bps'] and 'downlink_bps' is needed too; add it: a number of bits",
        "network.wan.changes[0]: a change names worker None and site None but must name one of the two",
        "unknown key 'modle'; did you mean 'model'?",
    ]
    faults = survey(wrong).faults
    assert len(faults) == len(expected), faults
    assert all(one.startswith(start) for one, start in zip(faults, expected, strict=True)), faults
    with pytest.raises(ConfigError) as caught:
        parse(wrong)
    assert str(caught.value) == faults[0]
    assert survey(document()).faults == []


def test_faults_of_one_table_hide_none_of_another_and_consequences_of_a_fault_are_not_reported():
    fault = document_faults(
        {**document(), "run": {"steps": 7, "local_steps": 4}, "data": {"bach_size": 2}, "rule": "diloco"}
    )
    starts = (
        "unknown key in [data] 'bach_size'",
        "run.steps is 7, which is not a multiple",
        "rule 'diloco' on topology 'random'",
    )
    assert len(fault) == 3 and all(one.startswith(start) for one, start in zip(fault, starts, strict=True)), fault
    # 24 steps are 6 rounds of the 4 local steps that were meant, and no whole number of the 15 that hold without the key.
    (fault,) = document_faults({**document(), "run": {"steps": 24, "local_step": 4}})
    assert "did you mean 'local_steps'?" in fault
    # Of an unknown rule nobody knows what it needs.
    (fault,) = document_faults({**document(), "rule": "dilocco", "topology": "ring"})
    assert fault.startswith("unknown rule 'dilocco'")


def test_a_table_yields_all_of_its_own_faults():
    wrong = {"batch_size": 2, "global_batch": 8, "cache": "x", "source": "hf:a/b", "windows": 3}
    assert [one.split()[0] for one in survey({**document(workers=4), "data": wrong}).faults] == [
        "data.batch_size",
        "data.windows",
        "data.cache",
    ]


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"seq_len": 4}, "unknown key 'seq_len'; it is data.seq_len: write it there"),
        ({"model": {"batch_size": 4}}, "unknown key in [model] 'batch_size'; it is data.batch_size: write it there"),
        ({"momentum": 0.9}, "unknown key 'momentum'; it is inner.momentum or rule.momentum: write it there"),
        ({"Run": {}}, "unknown key 'Run'; did you mean 'run'?"),
        ({"rule": "GASLoC"}, "unknown rule 'GASLoC'; did you mean 'gasloc'?"),
        ({"inner": {"betas": [0.9, 2]}}, "inner.betas[1] is 2 but must be a number from 0 to below 1"),
        (
            {"schedule": {"inner_every": [1, "a"]}},
            "schedule.inner_every[1] is 'a' but must be a whole number of at least 0",
        ),
        ({"data": {"source": ["a", 3]}}, "data.source[1] is 3 but must be text"),
    ],
)
def test_a_mistaken_key_or_value_is_named_by_its_place_and_by_where_it_belongs(document, sentence):
    (fault,) = survey(document).faults
    assert fault.startswith(sentence)


def test_an_unknown_key_names_the_tables_of_experiments_among_the_allowed():
    (fault,) = survey({"variants": {}}).faults
    assert "did you mean 'variant'?" in fault
    assert {"variant", "sweep", "figure", "tune", "scale", "method"} <= {
        *fault.partition("Allowed: ")[2].split("; ")[0].split(", ")
    }


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/../b", "/tmp/x", "a//b", "..\\x", "a\nb", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_of_runs_is_refused(name):
    (fault,) = survey({"name": name}).faults
    assert fault.startswith(f"name is {name!r} but must be a name for the folder of the run")
    assert folder_name(name) not in (".", "..")


def test_a_label_longer_than_the_name_of_a_folder_may_be_is_shortened_to_a_unique_name():
    alike = [folder_name(f"{'ü' * 300} {end}") for end in "ab"]
    assert len({*alike}) == 2 and all(len(name.encode()) < 220 for name in alike)


def test_a_swept_path_makes_a_name_and_no_path():
    (draft,) = drafts({**document(), "sweep": {"data.source": ["../text/a.txt"]}})
    assert not survey(draft.document).faults and "source=../text/a.txt" in draft.label


@pytest.mark.parametrize("read", [load_document, read_network])
def test_a_file_may_begin_with_a_byte_order_mark_and_one_in_utf_16_is_called_so(read, tmp_path):
    path, text = tmp_path / "file.toml", "uplink_bps = 1e6\ndownlink_bps = 1e6\n"
    path.write_bytes(text.encode("utf-8-sig"))
    assert read(path)
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(ConfigError, match="is written as UTF-16 or UTF-32, but TOML is UTF-8; save it as UTF-8"):
            read(path)
    path.write_bytes(b"a = 1\nb = 'caf\xe9'\n")
    with pytest.raises(ConfigError, match="byte 0xe9 in line 2"):
        read(path)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"method": "no such"}, "no such"),
        ({"variant": []}, "use gossamer compare"),
        ({"uplink_bps": 1e9}, "it is a network file"),
        ({"server": "cgad", "pair": "ad_psgd"}, "a server method has no pair"),
    ],
)
def test_what_is_no_run_at_all_is_a_fault_too(document, sentence):
    (fault,) = survey(document).faults
    assert sentence in fault
    with pytest.raises(ConfigError) as caught:
        parse(document)
    assert str(caught.value) == fault


def settings_below(kind):
    """A class of settings and all those that its fields hold."""
    yield kind
    for field in dataclasses.fields(kind):
        if hasattr(field.default, "__table__"):
            yield from settings_below(type(field.default))


def test_the_json_schema_names_and_explains_every_key_of_a_run_file():
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    tables = {"RunConfig": schema, **schema["$defs"]}
    kinds = [*settings_below(RunConfig), Network, Site, Route, Change, Away]
    assert len(kinds) == 14
    for kind in kinds:
        properties = tables[kind.__name__]["properties"]
        assert {f.name for f in dataclasses.fields(kind)} <= properties.keys()
        assert tables[kind.__name__]["additionalProperties"] is False
    assert tables["LoopSettings"]["properties"]["steps"] == {
        "default": 300,
        "description": "Inner steps of a worker that takes the full number per round.",
        "minimum": 1,
        "title": "Steps",
        "type": "integer",
    }
    assert {"method", "variant", "sweep", "scale", "figure"} <= schema["properties"].keys()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "table"),
    {"rule": RULES, "topology": TOPOLOGIES, "codec": CODECS, "server": SERVERS, "pair": PAIRS}.items(),
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_json_schema_names_every_method_with_its_options(kind, table):
    choices = json_schema()["properties"][kind]["anyOf"]
    names, *rows, code, own = [choice for choice in choices if choice != {"type": "null"}]
    assert names["enum"] == sorted(table)
    assert code["pattern"] == own["properties"]["name"]["pattern"]
    assert [row["properties"]["name"]["const"] for row in rows] == sorted(table)
    for row in rows:
        for option in options_of(table[row["properties"]["name"]["const"]]):
            assert row["properties"][option.name]["description"] == option.doc


@pytest.mark.parametrize(
    ("steps", "local_steps", "words"),
    [
        (12, {"4": 4}, r"begins at inner step 4, .*; write run\.local_steps = { 0 = 4, 4 = 4 }"),
        (
            12,
            {"0": 1, "8": [2, 1, 2], "4": 4},
            r"do not ascend; write run\.local_steps = { 0 = 1, 4 = 4, 8 = \[2, 1, 2\] }",
        ),
        (12, {"0": 1, "12": 4}, r"entry at inner step 12, .*; write run\.local_steps = { 0 = 1 }, or raise run\.steps"),
        (11, {"0": 1, "4": 4}, r"where no round ends with run\.local_steps = .*; set run\.steps to 8 or 12"),
        (12, {"0": 0}, r"run\.local_steps\[0\] is 0 but must be a whole number of at least 1"),
        (12, {"0": [1, 2]}, r"run\.local_steps\[0\] has 2 entries for 3 workers"),
        (12, {}, r"write a table by inner step such as run\.local_steps = { 0 = \.\.\., 2000 = "),
        (12, {"0": 1, "x": 2}, r"write a table by inner step such as"),
        (12, {"shape": "cosine", "to": 1}, r'write run\.local_steps = { shape = "qsr", base = \.\.\., alpha = '),
        (12, {"shape": "qsr", "base": 0, "alpha": 0.1}, r"run\.local_steps\.base is 0 but must be a whole number"),
        (12, "many", r"or a table of these by inner step, such as { 0 = 1, 2000 = 30 }"),
    ],
)
def test_local_steps_that_cannot_change_so_are_refused_with_the_line_that_would_do(steps, local_steps, words):
    with pytest.raises(ConfigError, match=words):
        tiny(run__steps=steps, run__local_steps=local_steps)


def test_local_steps_that_change_are_read_back_and_count_in_the_digest():
    qsr = {"shape": "qsr", "base": 2, "alpha": 0.003}
    for steps, table, rounds in (
        (12, {"0": 1, "4": 4}, [1, 1, 1, 1, 4, 4]),
        (15, {"0": 2, "5": [3, 3, 1]}, [2, 2, 2, 3, 3, 3]),
        (40, qsr, [9, 9, 18, 4]),
    ):
        config = tiny(run__steps=steps, run__local_steps=table)
        assert [config.length.local_steps_of(0, round) for round in range(config.length.rounds)] == rounds
        assert parse(schema.parse_toml(dump(config), "a run")) == config
        assert digest(config) != digest(tiny(run__steps=steps, run__local_steps=1))
    assert digest(tiny()) == digest(tiny(run__synchronous_steps=0)) != digest(tiny(run__synchronous_steps=2))
    assert overrides(["run.local_steps={ 0 = 1, 4 = 4 }"]) == {"run.local_steps": {"0": 1, "4": 4}}
    streamed = with_settings({"method": "streaming_diloco"}, {"run.local_steps": {"0": 2, "4": 4}})
    assert streamed["run"]["local_steps"] == {"0": 2, "4": 4}
    with pytest.raises(ConfigError, match="so that nothing follows the synchronous start"):
        tiny(run__synchronous_steps=12)
    for unequal, words in (([2, 4, 4], r"\[2, 4, 4\]"), ({"0": 4, "8": 2}, "{ 0 = 4, 8 = 2 }")):
        sentence = rf"no round ends with run\.synchronous_steps = 2 and run\.local_steps = {words}; set run\.steps to"
        with pytest.raises(ConfigError, match=sentence):
            tiny(run__synchronous_steps=2, run__local_steps=unequal, run__steps=13)
    with pytest.raises(ConfigError, match="whose learning rate is not known; give a table"):
        tiny(run__local_steps=qsr, inner__optimizer="mine:Optimizer")


def test_naming_another_rule_drops_the_options_of_the_old_one():
    changed = with_settings({"rule": {"name": "gasloc", "form": "published"}}, {"rule.name": "diloco", "rule.lr": 0.5})
    assert changed["rule"] == {"name": "diloco", "lr": 0.5}


def test_back_none_removes_the_way_back_of_a_codec():
    one_way = parse(with_settings({"method": "opendiloco"}, {"codec.back": "none"}))
    assert one_way.codec == Choice("fp16") and make_codec("fp16", back="none").back is None
    assert parse(with_settings({}, {"method": "opendiloco"})).codec == Choice("fp16", {"back": "fp16"})


def test_an_experiment_is_its_variants_times_its_grid():
    experiment = document()
    experiment["variant"] = [{"label": "a"}, {"label": "b", "rule": {"name": "gossip"}}]
    experiment["sweep"] = {"seed": [0, 1], "inner.lr": [0.1]}
    runs = {run.label: run.config for run in points(experiment)}
    assert list(runs) == ["a lr=0.1 seed=0", "a lr=0.1 seed=1", "b lr=0.1 seed=0", "b lr=0.1 seed=1"], (
        "a report groups runs by what is before the seed at the end"
    )
    assert runs["b lr=0.1 seed=1"].rule.name == "gossip" and runs["b lr=0.1 seed=1"].seed == 1
    with pytest.raises(ConfigError, match=r"--seeds got \[3\], and the file sweeps seed too; leave one of them out"):
        points(experiment, seeds=[3])
    with pytest.raises(ConfigError, match="needs its own"):
        points({**document(), "variant": [{"label": "a"}, {"label": "a"}]})


def test_a_variant_may_sweep_keys_that_others_do_not():
    experiment = {**document(), "sweep": {"inner.lr": [0.1, 0.2]}}
    experiment["variant"] = [{"label": "a"}, {"label": "b", "sweep": {"run.local_steps": [1, 3]}}]
    runs = points(experiment, seeds=[4, 5])
    assert [dict(p.at) for p in runs[::2]] == [
        {"inner.lr": 0.1},
        {"inner.lr": 0.2},
        *({"run.local_steps": h} for h in (1, 3)),
    ]
    assert [p.seed for p in runs] == [4, 5] * 4 and all(p.config.seed == p.seed for p in runs)
    assert runs[-1].label == "b local_steps=3 seed=5" and runs[-1].config.inner.lr == InnerConfig().lr
    with pytest.raises(ConfigError, match="lists of values"):
        points({**document(), "variant": [{"label": "a", "sweep": {"inner.lr": 0.1}}]})


def test_settings_that_change_together_are_swept_as_one_table():
    experiment = {**document(), "sweep": {"rule": [{"lr": 1.0, "momentum": 0.0}, {"lr": 0.7, "momentum": 0.5}]}}
    experiment["variant"] = [{"label": "a", "rule": {"name": "gasloc", "form": "drift"}}]
    runs = points(experiment)
    assert [p.label for p in runs] == ["a rule=lr=1.0,momentum=0.0", "a rule=lr=0.7,momentum=0.5"]
    assert [p.config.rule.options for p in runs] == [{"form": "drift", **p.at["rule"]} for p in runs]


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
    root = Path(__file__).parents[3]
    files = [*(root / "src" / "gossamer" / "configs").glob("*.toml"), *(root / "experiments").rglob("*.toml")]
    assert files
    for path in files:
        assert all(isinstance(run.config, RunConfig) for run in points(load_document(path)))


def test_the_digest_of_every_committed_run_is_the_one_that_its_checkpoints_have():
    root, found = Path(__file__).parents[3], {}
    for path in sorted([*(root / "configs").glob("*.toml"), *(root / "experiments").rglob("*.toml")]):
        document = load_document(path)
        for scale in ("", *document.get("scale", {})):
            digests = "\n".join(digest(run.config) for run in points(document, scale=scale))
            name = " ".join([path.relative_to(root).as_posix(), *([scale] if scale else [])])
            found[name] = hashlib.sha256(digests.encode()).hexdigest()[:16]
    assert found == load_document(Path(__file__).parent / "digests.toml")


def _decisive_keys(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of settings, with those of tables in them, that a digest may hold, each with its default."""
    defaults = {one.name: schema.default_of(one) for one in dataclasses.fields(kind)}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if NEUTRAL not in getattr(hint, "__metadata__", ()):
            yield f"{prefix}{name}", defaults[name]
            yield from (key for one in _tables_in(hint) for key in _decisive_keys(one, f"{prefix}{name}."))


def _tables_in(hint: Any) -> list[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [] if hint is Choice else [hint]
    return [one for part in get_args(hint) for one in _tables_in(part)]


def test_a_release_pins_the_value_at_which_a_digest_leaves_out_each_key_that_came_since_the_last():
    """So that a default may change later. Between two releases, nothing has to be written for a new key."""
    known = {f"{table}.{key}".removeprefix(".") for table, keys in FIRST_KEYS.items() for key in keys.split()}
    keys = dict(_decisive_keys(RunConfig))
    assert known | LEFT_OUT_AT.keys() <= keys.keys(), "a key that is gone needs a row in GONE"
    unpinned = {key: default for key, default in keys.items() if key not in known | LEFT_OUT_AT.keys()}
    changes = (Path(__file__).parents[3] / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = changes.partition("## [Unreleased]")[2].partition("\n## [")[0].strip()
    assert unreleased or not unpinned, f"write these into LEFT_OUT_AT of run_file.py before the release: {unpinned}"


@schema.settings("inner")
class _LaterInner(InnerConfig):
    label_smoothing: Decay = 0.0


@schema.settings("later")
class _LaterTable:
    strength: float = 0.5


@schema.settings("")
class _LaterRun(RunConfig):
    inner: _LaterInner = _LaterInner()
    later: _LaterTable = _LaterTable()


def test_a_new_key_with_a_default_changes_no_digest_until_it_has_another_value(monkeypatch):
    before = digest(tiny())

    def later(**changes: Any) -> str:
        return digest(schema.build(_LaterRun, document(**changes)))

    assert later() == before == later(inner__label_smoothing=0.0)
    assert len({before, later(inner__label_smoothing=0.1), later(later__strength=0.1)}) == 3
    # Its default becomes another: a run without the key stays what it was, and one with the new default is another.
    monkeypatch.setitem(cast(dict[str, Any], LEFT_OUT_AT), "inner.label_smoothing", 0.1)
    assert later(inner__label_smoothing=0.1) == before != later(inner__label_smoothing=0.0)
