"""Draws names of src at random for a reader who did not write them: python benchmarks/names.py --seed 7

House rule: a name that stops a reader who knows the field is renamed. The draw is by name, not by use, so that the count of those
that stop a reader can be compared between releases.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "gossamer"
PUBLIC, PRIVATE = 45, 35


def names(path: Path) -> Iterator[str]:
    """The classes, functions and methods of a file as `file:name`, without dunder methods."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            yield f"{path.relative_to(SRC)}:{node.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    drawn = random.Random(parser.parse_args().seed)
    everything = sorted({name for path in SRC.rglob("*.py") for name in names(path)})
    for count, private in ((PUBLIC, False), (PRIVATE, True)):
        some = [name for name in everything if name.rpartition(":")[2].startswith("_") is private]
        print(*sorted(drawn.sample(some, count)), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
