"""Misspelt keys and names of a run file, refused before torch is imported: by `names.json`, which `make methods` writes."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import ConfigError, choose
from gossamer.run.config.document import EXPERIMENT, KINDS, with_settings
from gossamer.settings.options import unknown_options
from gossamer.settings.schema import unknown_key

_OTHER_FILE = {"uplink_bps", "downlink_bps"}
"""Keys at the top of a network file, which is refused as such."""


class AllNames(NamedTuple):
    """All that a run file can name."""

    tables: Mapping[str, list[str]]
    """The keys of each table, by its dotted name."""
    keys: list[str]
    """All dotted keys."""
    removed: list[str]
    """Dotted keys that run folders of earlier versions still have."""
    rows: Mapping[str, Mapping[str, list[str]]]
    """The options of each row of the tables of methods, and of the wrappers of rules."""
    methods: list[str]


def must_be_spelt(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError, with the sentence of `parse`, for a key or name that a run file cannot have.

    Other faults are left to `parse`, whose types import torch; so is an experiment or network file in place of a run file.
    """
    if _OTHER_FILE & document.keys():
        return
    method = overrides.get("method", document.get("method"))
    names = all_names()
    if isinstance(method, str):
        must_be_named("method", method)
    own, changes = ({k: v for k, v in given.items() if k != "method"} for given in (document, overrides))
    whole = with_settings({key: value for key, value in own.items() if key not in EXPERIMENT}, changes)
    for fault in _unknown_keys(whole, names):
        raise ConfigError(fault)
    if method is None:  # which may bring rows and options
        _must_be_rows(whole, names)


def must_be_named(kind: str, name: str) -> None:
    """Raises ConfigError for a method, or a row of a table, of a name that nothing has; one of another kind is left to others."""
    names = all_names()
    if ":" not in name and not any(name in rows for rows in (names.methods, *names.rows.values())):
        allowed = names.methods if kind == "method" else names.rows[kind]
        raise ConfigError(choose(kind, name, allowed) + "; correct the name")


def _unknown_keys(table: Mapping[str, Any], names: AllNames, owner: str = "") -> Iterator[str]:
    known = names.tables[owner]
    for key, value in table.items():
        dotted = f"{owner}.{key}".removeprefix(".")
        if key not in known and dotted not in names.removed:
            yield unknown_key(key, owner, known, names.keys)
        elif dotted in names.tables and isinstance(value, Mapping):
            yield from _unknown_keys(value, names, dotted)


def _must_be_rows(document: Mapping[str, Any], names: AllNames) -> None:
    for kind in KINDS:
        match document.get(kind):
            case str(name) | {"name": str(name)}:
                must_be_named(kind, name)
                given = document[kind] if isinstance(document[kind], Mapping) else {}
                options = names.rows[kind].get(name, [*given])
                for fault in unknown_options(f"{kind} '{name}'", [key for key in given if key != "name"], options):
                    raise ConfigError(fault)
            case _:
                pass


@functools.cache
def all_names() -> AllNames:
    """All that a run file can name, read without the code behind it, which imports torch."""
    return AllNames(**json.loads((Path(__file__).parent / "names.json").read_bytes()))


def from_code() -> AllNames:
    """The content of `names.json` next to this file, read from the code, which imports torch; `make methods` writes it."""
    from gossamer.rules import WRAPPERS
    from gossamer.run.config.recipes import TABLES, recipes
    from gossamer.run.config.run_file import GONE, RunConfig
    from gossamer.settings.options import options_of
    from gossamer.settings.schema import keys_of, tables_of

    also = {"rule": [*WRAPPERS], "codec": ["back"]}
    rows = {
        kind: {name: [*(one.name for one in options_of(row)), *also.get(kind, [])] for name, row in table.items()}
        for kind, table in {**TABLES, "wrapper": WRAPPERS}.items()
    }
    removed = [f"{table}.{key}" for table, key in GONE]
    return AllNames(dict(tables_of(RunConfig)), sorted(keys_of(RunConfig)), removed, rows, [*recipes()])
