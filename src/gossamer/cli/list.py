"""`gossamer list`: everything that a run file can name."""

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from gossamer.cli.output import Json, print_json
from gossamer.cli.tables import print_table
from gossamer.errors import ConfigError, choose
from gossamer.record.progress import echo


def command(kind: str | None = None, /, *, json: Json = False) -> None:
    """Lists rules, topologies, codecs, servers, pairs, boundaries and methods.

    Args:
        kind: list these only: rules, topologies, codecs, servers, pairs, boundaries or methods (default: all)
    """
    every = listed()
    if kind is not None and kind not in every:
        raise ConfigError(choose("list", kind, every) + "; correct the name, or leave it out")
    asked = every if kind is None else {kind: every[kind]}
    if json:
        named = {title: [dict(zip(_COLUMNS[title], row, strict=True)) for row in rows] for title, rows in asked.items()}
        print_json(named)
        return
    for title, rows in asked.items():
        headings = [name.replace("_", " ").replace("what", "what it does") for name in _COLUMNS[title]]
        print_table(headings, rows, title=title, text=3)
        if title == "codecs":
            echo("every codec takes back=NAME, for rules that take a mean over everyone: what the sums travel back in")


def listed() -> dict[str, list[tuple[str, ...]]]:
    """The rows of each list, read without the code behind them, which imports torch.

    >>> [*listed()], listed()["topologies"][0][0]
    (['rules', 'topologies', 'codecs', 'servers', 'pairs', 'boundaries', 'methods'], 'base')
    """
    content = json_text.loads((Path(__file__).parent / "list.json").read_bytes())
    return {title: [tuple(row) for row in rows] for title, rows in content.items()}


_PARTS = ("rules", "topologies", "codecs", "servers", "pairs", "boundaries")
_COLUMNS = {**dict.fromkeys(_PARTS, ("name", "what", "options")), "methods": ("name", "made_of", "source")}


def from_code() -> Mapping[str, Sequence[tuple[str, ...]]]:
    """The content of `list.json` next to this file, read from the code, which imports torch; `make methods` writes it.

    >>> [*from_code()]
    ['rules', 'topologies', 'codecs', 'servers', 'pairs', 'boundaries', 'methods']
    """
    from gossamer.run.config.recipes import TABLES, factory_rows, recipe_rows

    parts = {title: factory_rows(table) for title, table in zip(_PARTS, TABLES.values(), strict=True)}
    parts["boundaries"] += _bottlenecks()
    return {**parts, "methods": recipe_rows()}


def _bottlenecks() -> list[tuple[str, str, str]]:
    """The architectures that are narrow at the cuts of a pipeline: name, what each does, the keys of `model.bottleneck`."""
    from gossamer.models.bottleneck import BOTTLENECKS
    from gossamer.models.sizes import BottleneckConfig
    from gossamer.settings.options import summary

    defaults = {one.name: one.default for one in fields(BottleneckConfig)}
    return [
        (
            name,
            "part of the model, set as model.bottleneck: " + summary(kind),
            ", ".join(key if defaults[key] in (MISSING, None) else f"{key}={defaults[key]}" for key in keys),
        )
        for name, (kind, keys) in BOTTLENECKS.items()
    ]
