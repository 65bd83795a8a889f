"""Misspelt run files are refused before torch is imported, in the words of the whole validation."""

import json
import tomllib
from pathlib import Path

import pytest

from gossamer.errors import ConfigError
from gossamer.run.config import spelling
from gossamer.run.config.document import load_document, with_settings
from gossamer.run.config.experiment_file import points
from gossamer.run.config.run_file import dump, parse
from gossamer.run.config.spelling import from_code, must_be_spelt


def test_the_names_are_those_of_the_code() -> None:
    stored = json.loads((Path(spelling.__file__).parent / "names.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(from_code()._asdict())), "run make methods"


MISSPELT = [
    ({"wrkers": 3}, {}),
    ({}, {"run.stps": 3}),
    ({"method": "diloco"}, {"run.stps": 3}),
    ({"run": {"STEPS_": 3}}, {}),
    ({}, {"optimizer": "adamw"}),
    ({}, {"layers": 3}),
    ({"pipeline": {"forwards": "dense"}}, {}),
    ({"method": "dilco"}, {}),
    ({}, {"method": "dilco"}),
    ({"rule": "gaslocc"}, {}),
    ({}, {"topology.name": "rinng"}),
    ({"codec": "exact"}, {"codec.blok": 3}),
    ({"codec": {"name": "int8", "blok": 3}}, {}),
    ({"rule": "gasloc"}, {"rule.lrr": 1}),
    ({"rule": {"name": "gasloc", "learning_rate": 1}}, {}),
    ({"rule": {"name": "gasloc", "lrr": 1}}, {"server.name": "cgadd"}),
]


@pytest.mark.parametrize(("document", "changes"), MISSPELT)
def test_the_sentence_is_that_of_the_whole_validation(document, changes) -> None:
    with pytest.raises(ConfigError) as whole:
        parse(with_settings(document, changes))
    with pytest.raises(ConfigError) as early:
        must_be_spelt(document, changes)
    assert str(early.value) == str(whole.value)


LEFT = [
    ({"model": {"bottleneck": {"nam": "subspace"}}}, {}),  # lacks a name
    ({"uplink_bps": 1e8, "stp_s": 1}, {}),  # a network file
    ({"pipeline": {"resplit_every": 0}}, {}),  # of a run folder of an earlier version
    ({"rule": {"name": "gasloc", "anchored": {"alpha": 1.0}}, "codec": {"name": "int8", "back": "bf16"}}, {}),
    ({"rule": {"name": "gasloc", "lrr": 1}}, {"server.name": "cgad"}),  # which drops the rule
    ({"method": "diloco", "rule": {"lr": 0.5}}, {}),
    ({"rule": "my.parts:rule"}, {"rule.anything": 3}),
    ({"network": {"wan": {"uplink_bps": 1e8}}}, {}),
    ({"variant": [{"wrkers": 3}], "sweep": {"run.stps": [1]}}, {}),  # names its variant where it is refused
    ({"rule": "ring"}, {}),  # names the table that has it
    ({"method": "dadao"}, {}),
]


@pytest.mark.parametrize(("document", "changes"), LEFT)
def test_everything_else_is_left_to_the_whole_validation(document, changes) -> None:
    must_be_spelt(document, changes)


def test_no_file_of_ours_is_refused() -> None:
    root = Path(__file__).parents[3]
    files = [path for folder in ("src/gossamer/configs", "experiments") for path in (root / folder).rglob("*.toml")]
    assert len(files) > 40
    for path in files:
        must_be_spelt(load_document(path), {})
    config = points(load_document(root / "src/gossamer/configs/demo.toml"))[0].config
    must_be_spelt(tomllib.loads(dump(config)), {})  # as a run folder has it
