"""CONTRIBUTING.md is followed to the letter: its rule and its codec are added to a copy of the source, and pass their tests."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLE = TEXT[TEXT.index("## Add a rule") : TEXT.index("## What a change must prove")]
BLOCK = r"```(python|diff)\n(.*?)```\n\n"


def apply(folder: Path) -> None:
    """Creates the file that stands in a python block, and adds the lines with a + where a diff block has them."""
    for path, blocks in re.findall(rf"`(src/[\w/.]+)`:\n\n((?:{BLOCK.replace('(', '(?:')})+)", EXAMPLE, re.DOTALL):
        file = folder / path
        for language, code in re.findall(BLOCK, blocks, re.DOTALL):
            if language == "python":
                assert not file.exists()
                file.write_text(code, encoding="utf-8")
                continue
            lines, source = code.splitlines(keepends=True), file.read_text(encoding="utf-8")
            before = "".join(line[1:] for line in lines if line[0] == " ")
            assert source.count(before) == 1, f"{path} has these lines {source.count(before)} times:\n{before}"
            file.write_text(source.replace(before, "".join(line[1:] for line in lines)), encoding="utf-8")


@pytest.mark.sampled(1)
@pytest.mark.timeout(600)  # seconds; an idle machine takes 15
@pytest.mark.parametrize(
    ("part", "expected"),
    [("rules", {"cautious", "test_rules", "test_docstrings", "test_methods"}), ("codecs", {"fp24", "test_codecs"})],
    ids=["rule", "codec"],
)
def test_the_examples_make_a_rule_and_a_codec_that_pass_their_specification_and_ruff(
    part: str, expected: set[str], tmp_path: Path
) -> None:
    for name in ("src", "tests", "docs"):
        # With what is compiled, as to compile takes long, but not what another process of tests is writing.
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    apply(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    files = ["src/gossamer/rules/cautious.py", "src/gossamer/rules/__init__.py"]
    files += ["src/gossamer/codecs/fp24.py", "src/gossamer/codecs/__init__.py"]
    run("ruff", "check", "--no-cache", *files)
    run("ruff", "format", "--no-cache", "--check", *files)
    (command,) = re.findall(rf"^    \.venv/bin/pytest (src/gossamer/{part} .+)$", EXAMPLE, re.MULTILINE)
    out = run("pytest", "-v", "-p", "no:cacheprovider", *shlex.split(command))
    assert set(re.findall(r"^(?:src|tests)/\S*?(\w+)\.py::.* PASSED", out, re.MULTILINE)) == expected, out
