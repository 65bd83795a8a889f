"""The reference of run files: every key with its values, default and meaning, from the JSON schema."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from generators.prose import escaped, table
from gossamer.run.config.choice import Choice
from gossamer.run.config.document import EXPERIMENT
from gossamer.run.config.json_schema import json_schema
from gossamer.run.config.run_file import RunConfig

_MOST = 12
"""Names that a cell of a table may list."""
Part = Mapping[str, Any]
_HEAD = """# Run file

A run is one TOML file. Every key has a default, so an empty file is a run. `gossamer check FILE` says what a file will do, or
lists all its mistakes. `--set KEY=VALUE` overrides one key on the command line.

```toml
name = "first"
workers = 4
rule = { name = "gasloc", momentum = 0.6 }

[run]
steps = 600
local_steps = 30
```

[Rules, servers and pairs](../methods.md), [topologies](../topologies.md), [codecs](../codecs.md) and
[boundaries](../boundaries.md) have their options on their own pages; write them next to the name. `method = "NAME"` sets the
keys of a recipe. Networks may also stand in a file of their own, without `[network.NAME]` above the keys.
"""
_EXPERIMENT = """## In an experiment file

`gossamer compare FILE` trains several runs from one file. Besides the keys of its base run, such a file has these:
"""


def page() -> str:
    """The page, from the JSON schema."""
    schema = json_schema()
    definitions: dict[str, Part] = schema["$defs"]
    chosen = {one.name: one.default.name for one in dataclasses.fields(RunConfig) if isinstance(one.default, Choice)}
    top = {
        key: part | ({"default": chosen[key]} if key in chosen else {})
        for key, part in schema["properties"].items()
        if not _table_of(part, definitions) and key not in EXPERIMENT
    }
    parts = [_HEAD, "## Top of the file\n", _rows(top, schema, definitions), _EXPERIMENT]
    parts.append(_rows({key: schema["properties"][key] for key in EXPERIMENT}, schema, definitions))
    for key, part in schema["properties"].items():
        if name := _table_of(part, definitions):
            place = "network.NAME" if key == "network" else key
            parts += _section(place, definitions[name], definitions)
    return "\n".join(parts)


def _section(place: str, part: Part, definitions: Mapping[str, Part]) -> list[str]:
    """A table of the file, and those inside it."""
    anchor = place.replace(".NAME", "")
    parts = [f"## \\[{place}\\] {{#{anchor.replace('.', '-')}}}\n"]
    parts += [escaped(_joined(part.get("description", ""))) + "\n", _rows(part["properties"], part, definitions)]
    for key, inner in part["properties"].items():
        if name := _table_of(inner, definitions):
            double = inner.get("type") == "array"
            below = _section(f"{place}.{key}" + ("" if double else ".NAME"), definitions[name], definitions)
            if double:
                below[0] = below[0].replace("\\[", "\\[\\[", 1).replace("\\]", "\\]\\]", 1)
            parts += ["#" + below[0], *below[1:]]
    return parts


def _rows(properties: Mapping[str, Part], owner: Part, definitions: Mapping[str, Part]) -> str:
    rows = []
    for key, part in properties.items():
        unset = "" if _table_of(part, definitions) else "not set"
        default = "required" if key in owner.get("required", ()) else _shown(part.get("default")) or unset
        meaning = _joined(part.get("description", "")) or (f"see [{key}]" if _table_of(part, definitions) else "")
        rows.append((f"`{key}`", _values(part, definitions), default, escaped(meaning)))
    return table(("key", "values", "default", "meaning"), rows)


def _table_of(part: Part, definitions: Mapping[str, Part]) -> str:
    """The name of the definition that a key holds one or several of; empty if it holds values."""
    for inner in (part, part.get("items", {}), part.get("additionalProperties", {})):
        if isinstance(inner, Mapping) and (name := str(inner.get("$ref", "")).rpartition("/")[2]) in definitions:
            return name
    return ""


def _values(part: Part, definitions: Mapping[str, Part]) -> str:
    """What a key allows, in words."""
    if name := _table_of(part, definitions):
        return "tables" if part.get("type") in ("array", "object") and name else "a table"
    if names := part.get("enum") or ([part["const"]] if "const" in part else None):
        return ", ".join(f"`{json.dumps(one)}`" for one in names) if len(names) <= _MOST else "a name"
    if choices := part.get("anyOf"):
        if "enum" in choices[0] and len(choices) > 4:  # a row of a table of methods
            return "a name, or a table with name and options"
        words = [_values(one, definitions) for one in choices if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(word for word in words if word))
    if part.get("type") == "array":
        items = part.get("items")
        of = (
            f" of {_values(items, definitions).replace('a whole number', 'whole numbers').replace('a number', 'numbers')}"
            if items
            else ""
        )
        many = f" of {part['minItems']}" if part.get("minItems") == part.get("maxItems") and "minItems" in part else ""
        return f"a list{many}{'' if many else of}"
    kinds = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "`true` or `false`",
        "object": "a table",
    }
    return escaped(kinds.get(str(part.get("type")), "any value") + _span(part))


def _span(part: Part) -> str:
    """The bounds of a number, in words."""
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    found = [f"{word} {part[key]:g}" for key, word in words.items() if key in part and abs(part[key]) < 2**31]
    return " " + " and ".join(found) if found else ""


def _shown(default: Any) -> str:
    if default is None or isinstance(default, Mapping):
        return ""
    return f"`{json.dumps(default)}`"


def _joined(text: str) -> str:
    return " ".join(text.split())
