"""A row of one of the tables of methods (rule, topology, codec, server, pair), with the options for its factory."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PydanticUserError, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from gossamer.errors import choose
from gossamer.rules import WRAPPERS
from gossamer.run.document import TABLES
from gossamer.schema import Faults

__all__ = ["Choice", "Row"]


@dataclass(frozen=True)
class Choice:
    """A row of one of the tables, and the options for its factory."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Row:
    """In the annotation of a Choice: the table that it must be a row of, such as "rule"."""

    def __init__(self, table: str) -> None:
        self.table = table

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: _choice(value, self.table))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        rows = [_row_schema(self.table, name, factory) for name, factory in sorted(TABLES[self.table].items())]
        return {"anyOf": [{"enum": sorted(TABLES[self.table])}, *rows]}


def _choice(value: Any, table: str) -> Choice:
    """The row that a name, or a table with a name and options, stands for. Raises Faults when there is none."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if found := [*_faults(value, table)]:
        raise Faults(found)
    options = {key: option for key, option in value.items() if key != "name"}
    if table == "codec" and options.get("back") == "none":
        del options["back"]  # as a run without says it, to which a method's own gives way
    return Choice(value["name"], options)


def _faults(value: Any, table: str) -> Iterator[str]:
    """What keeps a table of a run file from being a row: its name, and options that the factory does not take or misses."""
    rows = TABLES[table]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        yield f"[{table}] is {value!r:.60}; it needs a name: one of {', '.join(sorted(rows))}"
        return
    name = value["name"]
    if name not in rows:
        yield choose(table, name, rows) + "; correct the name"
        return
    options = {key: option for key, option in value.items() if key != "name"}
    factory, wrappers = _parameters(rows[name]), WRAPPERS if table == "rule" else {}
    yield from _unknown(f"{table} '{name}'", options, [*factory, *wrappers, *(["back"] if table == "codec" else [])])
    if table == "codec" and options.get("back", "none") != "none":
        yield from _faults({"name": back} if isinstance(back := options["back"], str) else back, "codec")
    for key in options.keys() & wrappers.keys():
        if isinstance(options[key], Mapping):
            yield from _unknown(f"{table}.{key}", options[key], [*_parameters(wrappers[key])][1:])
        else:
            yield f"{table}.{key} is {options[key]!r:.60}; write its options as a table, which may be empty"
    if needed := [key for key, one in factory.items() if one.default is one.empty and key not in options]:
        yield f"{table} '{name}' needs {', '.join(needed)} and got {options}; add what is missing"


def _unknown(owner: str, options: Mapping[str, Any], allowed: list[str]) -> Iterator[str]:
    for key in options:
        if key not in allowed:
            known = choose("option", key, allowed) if allowed else f"unknown option '{key}'; it has none"
            yield f"{owner} got an {known}; correct or remove it"


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options of a factory; the number of workers and the seed are the run's."""
    return {name: one for name, one in inspect.signature(factory).parameters.items() if name not in ("n", "seed")}


def _row_schema(table: str, name: str, factory: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a row with its options."""
    options = {key: _option_schema(one) for key, one in _parameters(factory).items()}
    if table == "rule":
        for key, wrapper in WRAPPERS.items():
            inner = {option: _option_schema(one) for option, one in [*_parameters(wrapper).items()][1:]}
            options[key] = {"type": "object", "properties": inner, "additionalProperties": False}
    if table == "codec":
        options["back"] = {"anyOf": [{"enum": ["none", *sorted(TABLES["codec"])]}, {"type": "object"}]}
    about = (inspect.getdoc(factory) or "").partition("\n")[0]
    properties = {"name": {"const": name}, **options}
    return {
        "type": "object", "description": about, "properties": properties, "required": ["name"],
        "additionalProperties": False,
    }  # fmt: skip


def _option_schema(parameter: inspect.Parameter) -> dict[str, Any]:
    try:
        kind = TypeAdapter(parameter.annotation).json_schema()
    except PydanticUserError:  # an option that is no value of JSON
        kind = {}
    plain = isinstance(parameter.default, bool | int | float | str)
    return kind | ({"default": parameter.default} if plain else {})
