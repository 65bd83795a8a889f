"""The public surface is small, sorted, and all there."""

import re
import tomllib
from pathlib import Path

import gossamer

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there_sorted_and_few():
    names = gossamer.__all__
    assert names[1:] == sorted(names[1:]) and len(names) <= 40
    for name in names:
        assert getattr(gossamer, name) is not None


def test_the_version_is_the_same_in_code_package_and_changelog():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changelog is not None
    assert gossamer.__version__ == package == changelog[1]
