"""A run file as it is written: loaded, and changed key by key, before it is validated."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigError
from gossamer.record.folder import run_file
from gossamer.settings import over_time
from gossamer.settings.kinds import INSTEAD
from gossamer.settings.schema import parse_toml, read_toml

_WRITTEN = ("name", "seed", "workers", "model", "data", "run", "record")
"""Keys of every run.toml in a run folder; the last one ends a complete file."""

KINDS = ("rule", "topology", "codec", "server", "pair", "boundary")
"""The tables of a run file that name a part of the method; `gossamer.run.config.recipes.TABLES` has what each can name."""
DIRECTIONS = ("forward", "backward")
"""The keys of [pipeline] that name a boundary codec."""
_CHOICES = {*KINDS, *DIRECTIONS}
"""The keys that name a row of a table, with its options."""
EXPERIMENT = ("variant", "sweep", "scale", "figure", "tune")
"""The keys of an experiment file that are not part of its base run."""


def load_document(path: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document in a TOML run file with dotted overrides applied; not yet validated. Raises: ConfigError as `as_written`."""
    return with_settings(as_written(path), overrides or {})


def as_written(path: Path) -> dict[str, Any]:
    """The document in a TOML run file, without the settings of its method.

    Raises: ConfigError when the file is missing, too large to be a run file, or not TOML.
    """
    if path.is_dir():
        inside = path / "run.toml"
        instead = f"its run file is '{inside}'" if inside.is_file() else "give the path of a TOML file in it"
        raise ConfigError(f"'{path}' is a folder, and a run file is needed; {instead}")
    if not path.is_file():
        raise ConfigError(
            f"there is no run file '{path}'; give the path of a TOML file, such as the configs/gasloc.toml of gossamer init"
        )
    if path.stat().st_size > 1 << 20:
        raise ConfigError(f"'{path}' has {path.stat().st_size} bytes; a run file has at most 1 MiB: give another file")
    return read_toml(path, f"'{path}'")


def load_run(folder: Path) -> dict[str, Any]:
    """The document of the run that a folder holds.

    Raises: ConfigError, naming the runs inside it, when it holds none, or one that is cut short: what is left of it may be a run
        file, of another run.
    """
    path = run_file(folder)
    document = load_document(path)
    if lacking := [key for key in _WRITTEN if key not in document]:
        raise ConfigError(
            f"'{path}' is cut short: it lacks {', '.join(lacking)}, which gossamer writes into every run folder; restore it"
        )
    return document


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Dotted overrides from `key=value` words; a value is TOML, and anything that is not is taken as text.

    >>> parse_overrides(["rule.lr=0.5", "topology.name=ring"])
    {'rule.lr': 0.5, 'topology.name': 'ring'}
    """
    overrides: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set got '{word}'; write it as key=value, such as rule.lr=0.5")
        if key.count(".") > 8:
            raise ConfigError(
                f"--set got a key of {key.count('.') + 1} parts; write it as key=value, such as rule.lr=0.5"
            )
        try:
            overrides[key] = parse_toml(f"v = {value}", f"--set {key}")["v"]
        except ConfigError as error:
            if " is not TOML" not in str(error):
                raise
            overrides[key] = value
    return overrides


def with_settings(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The document with each dotted key set; naming another rule, topology or codec drops the options of the old one.

    Naming a server drops the rule and the topology of the document, and so on: a run has one kind of method. `method` stands for
    the settings of a recipe; settings given next to it override them.
    """
    result = copy.deepcopy(dict(document))
    if not overrides and "method" not in result:
        return result
    if "method" in result:
        base = with_settings({}, _of_method(result.pop("method")))
        given = flat({key: result.pop(key) for key in [*result] if key in base})
        result |= with_settings(base, given)
    if "method" in overrides:
        explicit = {key: value for key, value in overrides.items() if key != "method"}
        overrides = {**_of_method(overrides["method"]), **explicit}
    given = {key.partition(".")[0] for key in overrides}
    for kind, others in INSTEAD.items():
        if kind in overrides or f"{kind}.name" in overrides:
            for other in {*others} - given:
                result.pop(other, None)
    for key, value in sorted(overrides.items(), key=lambda item: not item[0].endswith(".name")):
        _set(result, key, value)
    return result


def _of_method(name: object) -> Mapping[str, Any]:
    """The dotted settings of a recipe."""
    from gossamer.run.config.recipes import (
        recipe,  # late: a misspelt file without one is refused before torch is imported
    )

    return recipe(name).settings


def _set(document: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key; another name in a table of a choice drops the options of the old one. Raises: ConfigError."""
    *path, last = key.split(".")
    node: Any = document
    for part in path:
        if part in _CHOICES and isinstance(node.get(part), str):
            node[part] = {"name": node[part]}  # the name alone stands for a table with it
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"cannot set '{key}': '{part}' is a value, not a table; correct the key")
    if last == "name" and path and path[-1] in _CHOICES and node.get("name") != value:
        node.clear()
    node[last] = copy.deepcopy(value)  # the next override must not write into the recipe's own table


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys; an empty table inside another stays a value, as it may mean something, and so does a number
    that changes over a run.

    >>> flat({"rule": {"name": "gasloc", "anchored": {}, "lr": {"0": 0.4, "2000": 0.7}}, "seed": 1})
    {'rule.name': 'gasloc', 'rule.anchored': {}, 'rule.lr': {'0': 0.4, '2000': 0.7}, 'seed': 1}
    """
    dotted: dict[str, Any] = {}
    for key, value in table.items():
        below = isinstance(value, dict) and (value or not prefix) and not over_time.changes(value)
        dotted.update(flat(value, f"{prefix}{key}.") if below else {prefix + key: value})
    return dotted
