"""A row of one of the tables of methods (rule, topology, codec, server, pair), with the options for its factory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PydanticUserError, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from gossamer.errors import ConfigError
from gossamer.rules import WRAPPERS
from gossamer.run.config.recipes import TABLES
from gossamer.settings.options import Option, may_change, options_of, row_faults, summary, unknown_options
from gossamer.settings.schema import refuse
from gossamer.settings.user_code import PATTERN, is_code


@dataclass(frozen=True)
class Choice:
    """A row of one of the tables, and the options for its factory."""

    name: str
    """Empty where a file names an unknown row, so that its other faults can still be reported."""
    options: Mapping[str, Any] = field(default_factory=dict)


class NamedIn:
    """In the annotation of a Choice: the table that it must be a row of, such as "rule"."""

    def __init__(self, table: str) -> None:
        self.table = table

    def keys(self) -> set[str]:
        """The options of all rows."""
        return {option.name for factory in TABLES[self.table].values() for option in options_of(factory)}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: _choice(value, self.table))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        rows = [_row_schema(self.table, name, factory) for name, factory in sorted(TABLES[self.table].items())]
        users_object = {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": PATTERN}},
            "required": ["name"],
        }
        return {
            "anyOf": [{"enum": sorted(TABLES[self.table])}, *rows, {"type": "string", "pattern": PATTERN}, users_object]
        }


def _choice(value: Any, table: str) -> Choice:
    """The row that a name, or a table with a name and options, stands for. Raises Faults when there is none."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, str):
        value = {"name": value}
    refuse([*map(ConfigError, _faults(value, table))])
    if not isinstance(value, Mapping) or not (value.get("name") in TABLES[table] or is_code(str(value.get("name")))):
        return Choice("")
    options = {key: option for key, option in value.items() if key != "name"}
    if table == "codec" and options.get("back") == "none":
        del options["back"]  # the same as no key, so that a method's own setting applies
    return Choice(value["name"], options)


def _faults(value: Any, table: str) -> Iterator[str]:
    """Why a table of a run file is no such row: its name, options that the factory does not take, and missing ones."""
    rows = TABLES[table]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        yield f"[{table}] is {value!r:.60}; it needs a name: one of {', '.join(sorted(rows))}"
        return
    options = {key: option for key, option in value.items() if key != "name"}
    wrappers = WRAPPERS if table == "rule" else {}
    if not is_code(value["name"]):  # whose options are known once it is imported
        also = [*wrappers, *(["back"] if table == "codec" else [])]
        yield from row_faults(table, rows, value["name"], options, also=also)
    if table == "codec" and options.get("back", "none") != "none":
        yield from _faults({"name": back} if isinstance(back := options["back"], str) else back, "codec")
    for key in options.keys() & wrappers.keys():
        if isinstance(options[key], Mapping):
            allowed = [option.name for option in options_of(wrappers[key])]
            yield from unknown_options(f"{table}.{key}", options[key], allowed)
        else:
            yield f"{table}.{key} is {options[key]!r:.60}; write its options as a table, which may be empty"


def _row_schema(table: str, name: str, factory: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a row with its options."""
    options = {option.name: _option_schema(option) for option in options_of(factory)}
    if table == "rule":
        for key, wrapper in WRAPPERS.items():
            inner = {option.name: _option_schema(option) for option in options_of(wrapper)}
            options[key] = {"type": "object", "properties": inner, "additionalProperties": False}
    if table == "codec":
        options["back"] = {"anyOf": [{"enum": ["none", *sorted(TABLES["codec"])]}, {"type": "object"}]}
    properties = {"name": {"const": name}, **options}
    return {
        "type": "object",
        "description": summary(factory),
        "properties": properties,
        "required": ["name"],
        "additionalProperties": False,
    }


def _option_schema(option: Option) -> dict[str, Any]:
    try:
        kind = TypeAdapter(option.kind).json_schema()
        if may_change(option.kind):
            kind = {"anyOf": [kind, {"type": "object"}]}
    except PydanticUserError:  # an option without a JSON value
        kind = {}
    plain = isinstance(option.default, bool | int | float | str)
    return kind | {"description": option.doc} | ({"default": option.default} if plain else {})
