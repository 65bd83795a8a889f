"""The public surface is small, sorted, and all there."""

import ast
import importlib
import random
import re
import tomllib
from pathlib import Path

import pytest

import gossamer
from gossamer import asynchronous, codecs, rules, topologies
from gossamer.asynchronous import PAIRS, SERVERS
from gossamer.codecs import CODECS
from gossamer.rules import RULES, WRAPPERS
from gossamer.topologies import TOPOLOGIES

ROOT = Path(__file__).parents[1]


TABLES = [
    (rules, RULES),
    (rules, WRAPPERS),
    (topologies, TOPOLOGIES),
    (codecs, CODECS),
    (asynchronous, SERVERS),
    (asynchronous, PAIRS),
]


def test_every_public_name_is_there_and_sorted():
    names = gossamer.__all__
    assert names[1:] == sorted(names[1:])
    for name in names:
        assert getattr(gossamer, name) is not None


def test_what_is_imported_at_first_use_leaves_the_random_numbers_of_the_program(monkeypatch):
    module, seed = importlib.import_module, random.getstate()

    def drawing(name):  # as rich does when it is imported
        random.random()
        return module(name)

    monkeypatch.setattr(importlib, "import_module", drawing)
    assert gossamer.simulate is not None and gossamer.rules is not None
    assert random.getstate() == seed


def test_the_names_at_the_top_are_few():
    assert len(gossamer.__all__) <= 25, "a new method belongs into its table, which is public already"


def test_editors_and_programs_see_the_same_names():
    assert dir(gossamer) == sorted(gossamer.__all__)
    (typed,) = [node for node in ast.parse(Path(gossamer.__file__).read_text()).body[:7] if isinstance(node, ast.If)]
    imports = {alias.asname: node.module for node in typed.body for alias in node.names}  # type: ignore[attr-defined]
    homes = {name: getattr(gossamer, name).__name__ for name in imports if imports[name] == "gossamer"}
    assert homes == {name: f"gossamer.{name}" for name in homes}
    assert imports == {name: home or "gossamer" for name, home in gossamer._HOMES.items()}


@pytest.mark.parametrize(("package", "table"), TABLES)
def test_every_row_of_a_table_is_a_public_name_of_its_package(package, table):
    lines = Path(package.__file__).read_text(encoding="utf-8").splitlines()
    for name, factory in table.items():
        assert factory.__name__ == name and getattr(package, name) is factory
        exported = f"from {factory.__module__} import {name} as {name}"  # the form that type checkers take for public
        assert exported in lines, f"write '{exported}'"


def test_the_version_is_the_same_in_code_package_and_changelog():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog is not None
    assert gossamer.__version__ == package == changelog[1]
