"""`gossamer list`: everything that a run file can name."""

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields

from gossamer.cli.output import Json, print_json
from gossamer.cli.tables import print_table
from gossamer.errors import ConfigError, choose
from gossamer.record.progress import echo


def command(kind: str | None = None, /, *, json: Json = False) -> None:
    """Lists rules, topologies, codecs, servers, pairs, boundaries and methods.

    Args:
        kind: list these only: rules, topologies, codecs, servers, pairs, boundaries or methods (default: all)
    """
    from gossamer.asynchronous import PAIRS, SERVERS
    from gossamer.boundaries import BOUNDARIES
    from gossamer.codecs import CODECS
    from gossamer.rules import RULES
    from gossamer.run.config.recipes import factory_rows, recipe_rows
    from gossamer.topologies import TOPOLOGIES

    tables = {
        "rules": RULES,
        "topologies": TOPOLOGIES,
        "codecs": CODECS,
        "servers": SERVERS,
        "pairs": PAIRS,
        "boundaries": BOUNDARIES,
    }
    keys = ("name", "what", "options")
    also = {"boundaries": _bottlenecks()}
    listed: dict[str, tuple[tuple[str, ...], tuple[str, ...], Sequence[tuple[str, ...]]]] = {
        title: (keys, ("name", "what it does", "options"), factory_rows(table) + also.get(title, []))
        for title, table in tables.items()
    }
    listed["methods"] = (("name", "made_of", "source"), ("name", "made of", "source"), recipe_rows())
    if kind is not None and kind not in listed:
        raise ConfigError(choose("list", kind, listed) + "; correct the name, or leave it out")
    asked = listed if kind is None else {kind: listed[kind]}
    if json:
        print_json(
            {title: [dict(zip(keys, row, strict=True)) for row in rows] for title, (keys, _, rows) in asked.items()}
        )
        return
    for title, (_, headings, rows) in asked.items():
        print_table(headings, rows, title=title, text=3)
        if title == "codecs":
            echo("every codec takes back=NAME, for rules that take a mean over everyone: what the sums travel back in")


def _bottlenecks() -> list[tuple[str, str, str]]:
    """The architectures that are narrow at the cuts of a pipeline: name, what each does, the keys of `model.bottleneck`."""
    from gossamer.models.bottleneck import BOTTLENECKS
    from gossamer.models.sizes import BottleneckConfig

    defaults = {one.name: one.default for one in fields(BottleneckConfig)}
    return [
        (
            name,
            "part of the model, set as model.bottleneck: " + (inspect.getdoc(kind) or "").partition("\n")[0],
            ", ".join(key if defaults[key] in (MISSING, None) else f"{key}={defaults[key]}" for key in keys),
        )
        for name, (kind, keys) in BOTTLENECKS.items()
    ]
