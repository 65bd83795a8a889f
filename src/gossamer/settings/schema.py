"""Tables of settings and lines of records: fields with types and bounds, checked by pydantic, and one sentence for each fault.

A field declares what it allows once, in its annotation: `Annotated[int, Field(ge=1)]`. Error sentences, bounds checks
and the JSON schema are all derived from it. Numbers are finite unless `AllowInfNan` is given, a whole number may stand
for a float, a bool is no number, and a list (or a table) becomes a tuple (or an instance).
"""

import ast
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar, dataclass_transform, get_args, get_origin

from pydantic import (
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ArgsKwargs, CoreSchema, ErrorDetails
from typing_extensions import is_typeddict

from gossamer.errors import ConfigError, DataError, GossamerError, choose, nearest
from gossamer.settings.fields import NEUTRAL, Changeable, OneOf, Words
from gossamer.settings.quantities import Unit

T = TypeVar("T")

RECORD = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""The configuration of settings, and for `pydantic.with_config` on a TypedDict for a line of a record."""


_DEEPEST = 32  # levels of nested tables; a run file has four
_MOST_KEYS = 40  # keys that a sentence names at most
_MOST_DROPPED = 8  # rounds of finding faults that others hide


class Faults(ConfigError):
    """All faults of one value; its sentence is the first of them."""

    def __init__(self, faults: Sequence[GossamerError]) -> None:
        super().__init__(str(faults[0]))
        self.faults = [*faults]


_noted: ContextVar[list[GossamerError] | None] = ContextVar("noted", default=None)


def refuse(faults: Sequence[GossamerError]) -> None:
    """Raises Faults, if there are any; inside `soundest`, records them instead."""
    if faults and (noted := _noted.get()) is not None:
        noted += faults
    elif faults:
        raise Faults(faults)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(table: str | None = None, also: Sequence[str] = ()) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen keyword-only dataclass whose fields are checked on construction.

    A `__post_init__` may yield a sentence for each of several faults.

    Args:
        table: the dotted name of the only table that holds these settings, "" for a whole file. None if there are
            several; then sentences of `__post_init__` are prefixed with the name of the one at fault.
        also: further keys of a file that holds more than these settings; they are listed among known keys.
    Raises: ConfigError, from the constructor, for a value that its field does not allow.
    """

    def decorate(cls: type[T]) -> type[T]:
        cls.__get_pydantic_core_schema__ = classmethod(_from_toml)  # pyright: ignore[reportAttributeAccessIssue]
        cls.__get_pydantic_json_schema__ = classmethod(_explained)  # pyright: ignore[reportAttributeAccessIssue]
        if check := vars(cls).get("__post_init__"):

            def __post_init__(self: Any) -> None:
                refuse(_faults_of(check, self))

            cls.__post_init__ = __post_init__  # pyright: ignore[reportAttributeAccessIssue]
        made: Any = dataclass(cls, frozen=True, kw_only=True, config=RECORD)
        made.__table__, made.__also__ = table, also
        checked = made.__init__

        def __init__(self: Any, **options: Any) -> None:
            try:
                checked(self, **options)
            except ValidationError as error:
                raise _all(made, error, made.__name__.lower() if table is None else table, "")[0] from None

        made.__init__ = __init__
        return made

    return decorate


def _faults_of(check: Callable[[Any], Iterator[str] | None], settings: Any) -> list[GossamerError]:
    """The faults that a check of settings yields or raises."""
    faults: list[GossamerError] = []
    try:
        faults += map(ConfigError, check(settings) or ())
    except GossamerError as error:
        faults.append(error)
    return faults


def build(kind: type[T], table: Any, where: str = "", source: str = "") -> T:
    """The settings that a table of a TOML file describes.

    Args: `where` is the dotted name of the table, and `source` the file that has it, if the sentences should begin with it.
    Raises: ConfigError with the first of the faults.
    """
    try:
        return typing.cast(Any, kind).__pydantic_validator__.validate_python(table)
    except ValidationError as error:
        raise _all(kind, error, where, f"{source}: " if source else "")[0] from None


def settings_faults(kind: type, table: Any, where: str = "") -> list[GossamerError]:
    """All validation errors of a table; empty if it is valid.

    Args: `where` is the dotted name of the table.
    """
    try:
        typing.cast(Any, kind).__pydantic_validator__.validate_python(table)
    except ValidationError as error:
        return _all(kind, error, where, "")
    return []


class Soundest(typing.NamedTuple, Generic[T]):
    """Settings built from the valid parts of a faulty table, so that checks that depend on them can run too."""

    settings: T | None
    """With the default in place of each field at fault; None where there is no default."""
    noted: list[GossamerError]
    """Faults of several fields together."""
    unknown: frozenset[str]
    """Dotted keys at fault, and those that an unknown key may be a misspelling of: their values are not the intended ones."""


def soundest(kind: type[T], table: Mapping[str, Any]) -> Soundest[T]:
    """The settings of a table without its faulty parts."""
    table, unknown, noted = copy.deepcopy(dict(table)), set[str](), list[GossamerError]()
    for _ in range(_MOST_DROPPED):
        token = _noted.set(noted := [])
        try:
            return Soundest(
                typing.cast(Any, kind).__pydantic_validator__.validate_python(table), noted, frozenset(unknown)
            )
        except ValidationError as error:
            places = {place.path: place for item in error.errors() if (place := _place(kind, item["loc"])).path}
        except Exception:
            if not noted:
                raise
            break  # a check relies on a value that an earlier one refused
        finally:
            _noted.reset(token)
        for place in places.values():
            unknown.add(_dotted("", place.path))
            if place.hint is None:
                unknown |= _meant(kind, place)
        dropped = [_dropped(table, path) for path in places]
        if not any(dropped):
            break
    return Soundest(None, noted, frozenset(unknown))


def _dropped(table: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """Drops the value at a path of a table; if it is missing or in a list, the enclosing table or list."""
    above: list[tuple[dict[str, Any], str]] = []
    node: Any = table
    for key in path:
        if not isinstance(node, dict) or key not in node:
            break
        above.append((node, key))
        node = node[key]
    if above:
        parent, key = above[-1]
        del parent[key]
    return bool(above)


def _meant(root: Any, place: "_Place") -> set[str]:
    """The dotted keys that an unknown key may be a misspelling of."""
    key, owner = str(place.path[-1]), place.path[:-1]
    near = nearest(key, _hints(place.table))
    return {*_homes(keys_of(root), key), *([_dotted("", (*owner, near))] if near else [])}


def _homes(keys: Iterable[str], key: str) -> list[str]:
    """The dotted keys of this name in all tables; those in user-named tables only if there is no other."""
    homes = sorted({one for one in keys if one.rpartition(".")[2].casefold() == key.casefold()})
    return [one for one in homes if ".NAME." not in one] or homes


def keys_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """All dotted keys of settings; none for a tagged union such as the lines of a log; NAME stands for the name of a table."""
    for name, hint in (_hints(kind) if _is_table(kind) else {}).items():
        yield prefix + name
        bare = _given(_bare(hint))
        if get_origin(bare) is Mapping and _is_table(inner := _bare(get_args(bare)[1])):
            yield from keys_of(inner, f"{prefix}{name}.NAME.")
        elif _is_table(bare):
            yield from keys_of(bare, f"{prefix}{name}.")
        for inside in (one.keys() for one in _extras(hint) if hasattr(one, "keys")):
            yield from (f"{prefix}{name}.{key}" for key in inside)


def tables_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """The keys of each table of settings that may be empty, by its dotted name; without lists, and those that a user names.

    A table that needs a key has a better sentence for another one than that it is unknown.
    """
    if any(default_of(one) is dataclasses.MISSING for one in dataclasses.fields(kind)):
        return
    yield prefix, sorted({*_hints(kind), *_extra_keys(kind)})
    for name, hint in _hints(kind).items():
        if _is_table(bare := _given(_bare(hint))):
            yield from tables_of(bare, f"{prefix}.{name}".removeprefix("."))


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """The document in a TOML file, which may begin with a byte-order mark.

    Raises: ConfigError as `parse_toml`, and for bytes that are no UTF-8, such as those of UTF-16; OSError.
    """
    content = path.read_bytes()
    if b"\0" in content[:4]:  # UTF-16 and UTF-32 write zeros beside the first letter, which is one of ASCII
        raise ConfigError(f"{where} is written as UTF-16 or UTF-32, but TOML is UTF-8; save it as UTF-8")
    return parse_toml(content, where)


def parse_toml(content: str | bytes, where: str) -> dict[str, Any]:
    """The document in a TOML text; `where` is what the sentences begin with.

    Raises: ConfigError for anything else, such as bytes that are no UTF-8, and for tables or lists nested too deep to
        walk recursively.
    """
    try:
        document = tomllib.loads(content if isinstance(content, str) else _decoded(content, where))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML: {error}; correct that line") from None
    layer: list[Any] = [document]
    for _ in range(_DEEPEST):
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, dict) else one)]
        layer = [one for one in layer if isinstance(one, dict | list)]
    if layer:
        raise ConfigError(
            f"{where} has tables or lists nested more than {_DEEPEST} deep; a table has its keys at its top"
        )
    return document


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{where} is not UTF-8, as TOML is: byte {content[error.start]:#x} in line {line} is no character of it; save it as "
            "UTF-8"
        ) from None


def toml_value(value: Any, *, defaults: bool = True, neutral: bool = True) -> Any:
    """Settings as TOML tables, lists and values, without None.

    Args: without `defaults`, fields at their default are left out, and without `neutral` those marked NEUTRAL.
    """

    def inner(part: Any) -> Any:
        return toml_value(part, defaults=defaults, neutral=neutral)

    if dataclasses.is_dataclass(value):
        hints = _hints(type(value)) if not neutral else {}
        given = {f: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {
            f.name: inner(part)
            for f, part in given.items()
            if part is not None
            and (defaults or part != default_of(f))
            and (neutral or NEUTRAL not in get_args(hints[f.name]))
        }
    if isinstance(value, Mapping):
        return {str(key): inner(part) for key, part in value.items()}
    return [inner(part) for part in value] if isinstance(value, tuple) else value


def changeable(kind: type, prefix: str = "") -> list[str]:
    """The dotted keys of settings that a resumed run may change: those marked NEUTRAL (with all below them) or Changeable."""
    keys: list[str] = []
    for name, hint in _hints(kind).items():
        if mark := next((one for one in _extras(hint) if one is NEUTRAL or isinstance(one, Changeable)), None):
            option = mark.option if isinstance(mark, Changeable) else ""
            keys.append(f"{prefix}{name}" + (f".{option}" if option else ""))
        elif dataclasses.is_dataclass(bare := _bare(hint)):
            keys += changeable(typing.cast(type, bare), f"{prefix}{name}.")
    return keys


class Records(Generic[T]):
    """Lines of JSON of one kind, or of several that differ by a tag.

    Args: `kind` is a TypedDict with the configuration `RECORD`, or a tagged union of such.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._kind_of: TypeAdapter[T] = TypeAdapter(kind)

    def of(self, value: object, where: str) -> T:
        """A validated record from a parsed line. Raises: DataError, which names `where`, for an invalid one."""
        return self._checked_by(self._kind_of.validate_python, value, where)

    def parse(self, line: bytes | str, where: str) -> T:
        """A validated record from a line of JSON. Raises: DataError, which names `where`, for an invalid one."""
        return self._checked_by(self._kind_of.validate_json, line, where)

    def known(self, line: bytes | str, where: str) -> T:
        """As `parse`, for a line of a possibly newer version: unknown keys are ignored."""
        try:
            return self._kind_of.validate_json(line)
        except ValidationError as error:
            details = error.errors(include_url=False)
        further = [one["loc"] for one in details if one["type"] == "extra_forbidden"]
        if not further or len(further) < len(details):
            return self.parse(line, where)
        value = json.loads(line)
        for *path, last in further:
            place: Any = value
            for key in path:  # a union's location has the chosen member, which is not a key of the value
                below = place.get(key) if isinstance(place, dict) else place[key]
                place = below if isinstance(below, dict | list) else place
            del place[last]
        return self.parse(json.dumps(value), where)

    def _checked_by(self, check: Callable[[Any], T], value: Any, where: str) -> T:
        try:
            return check(value)
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False)
            if first["type"] == "json_invalid":
                fault = f"{where} is not JSON ({first['ctx']['error']}) but must hold one object"  # pyright: ignore[reportTypedDictNotRequiredAccess]
            else:
                fault = _all(self._kind, error, "", f"{where}: ")[0]
        raise DataError(f"{fault}; repair or remove the line")


def default_of(option: "dataclasses.Field[Any]") -> Any:
    """The value of a field that is not given; `dataclasses.MISSING` for one that must be."""
    return option.default if option.default_factory is dataclasses.MISSING else option.default_factory()


def _from_toml(cls: type, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """The schema of a settings class, which accepts TOML's tables and lists and is otherwise strict."""

    def loosen(part: Any) -> None:
        if isinstance(part, dict):
            if part.get("type") in ("tuple", "dataclass"):
                part["strict"] = False
            for key, inner in part.items():
                if key != "metadata":
                    loosen(inner)
        elif isinstance(part, list | tuple):
            for inner in part:
                loosen(inner)

    schema = handler(source)
    loosen(schema)
    return schema


def _explained(cls: type, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
    """The JSON schema of a settings class, with the string that follows a field as its description.

    Pydantic's `use_attribute_docstrings` would parse the sources whenever a module is imported.
    """
    json_schema = handler(schema)
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    for field, text in itertools.pairwise(typing.cast(ast.ClassDef, definition).body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                handler.resolve_ref_schema(json_schema)["properties"][name]["description"] = inspect.cleandoc(doc)
    return json_schema


# Sentences: pydantic's errors about a value, by field


class _Place(typing.NamedTuple):
    """A field, or a table, that an error is about."""

    path: tuple[Any, ...]
    hint: Any
    """Its annotation; None for an unknown key."""
    table: Any
    """The annotation of its table."""


def _all(kind: Any, error: ValidationError, where: str, source: str) -> list[GossamerError]:
    """One error for each field at fault, in their order."""
    grouped: dict[tuple[Any, ...], tuple[_Place, list[ErrorDetails]]] = {}
    for item in error.errors(include_url=False):
        place = _place(kind, item["loc"])
        grouped.setdefault(place.path, (place, []))[1].append(item)
    errors: list[GossamerError] = []
    for place, items in grouped.values():
        cause = items[0].get("ctx", {}).get("error")
        if isinstance(cause, GossamerError):
            own = _dotted(where, place.path) if getattr(_bare(place.hint), "__table__", "") is None else ""
            name = f"{own}: " if own else ""
            every = cause.faults if isinstance(cause, Faults) else [cause]
            errors += [type(one)(f"{source}{name}{one}") for one in every]
        else:
            errors.append(ConfigError(f"{source}{_sentence(items, place, where, kind)}"))
    return errors


def _place(kind: Any, location: tuple[int | str, ...]) -> _Place:
    """The field at pydantic's location, through tables and lists of tables; the rest of the location are union members
    and items.
    """
    path: list[Any] = []
    hint, table = kind, None
    for key in location:
        bare = _given(_bare(hint))
        origin, arguments = get_origin(bare), get_args(bare)
        if _is_table(bare):
            hint, table = _hints(bare).get(str(key)), bare
        elif (
            origin in (list, tuple, Mapping)
            and isinstance(key, int | str)
            and _is_table(_bare(arguments[-2:][origin is Mapping]))
        ):
            hint = arguments[-2:][origin is Mapping]
        elif member := next((one for one in arguments if _is_table(one) and _tagged(one, key)), None):
            hint = member
            continue
        else:
            break
        path.append(key)
    return _Place(tuple(path), hint, table)


def _given(bare: Any) -> Any:
    """The table type of an optional table."""
    parts = [part for part in get_args(bare) if part is not type(None)]
    return (
        parts[0] if get_origin(bare) in (typing.Union, types.UnionType) and [*map(_is_table, parts)] == [True] else bare
    )


def _sentence(items: list[ErrorDetails], place: _Place, where: str, root: Any) -> str:
    """The sentence about one field, from pydantic's errors about it."""
    first, (path, hint, table) = items[0], place
    name, owner = _dotted(where, path), _dotted(where, path[:-1])
    given: Any = first["input"].kwargs if isinstance(first["input"], ArgsKwargs) else first["input"]
    if hint is None:
        return unknown_key(str(path[-1]), owner, {*_hints(table), *_extra_keys(table)}, keys_of(root))
    if first["type"] == "missing" and first["loc"][-1:] == path[-1:]:
        key, near = path[-1], nearest(str(path[-1]), {*map(str, given)} - {*_hints(table), *_extra_keys(table)})
        add = f"write '{near:.60}' as '{key}'" if near else "add it"
        return (
            f"{owner or 'this'} has the keys {_shown(given)} and '{key}' is needed too; {add}: {words_of(hint, name)}"
        )
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        key = first["ctx"]["discriminator"].strip("'")  # pyright: ignore[reportTypedDictNotRequiredAccess]
        known = [tag for member in get_args(_bare(hint)) for tag in get_args(_bare(_hints(member)[key]))]
        return choose(key, str(given.get(key)), known)
    if isinstance(given, str) and (names := _allowed_names(hint)):
        return choose(name, given, names) + "; correct the name"
    for item in items:  # for a list, the single faulty item is shown
        if item["type"] != "missing" and (within := _within(path, item["loc"])):
            given, whole, hint = item["input"], hint, _item(hint, within)
            name += "" if hint is whole else "".join(f"[{k}]" for k in within)  # custom words describe the whole list
            break
    shown = "an empty list" if isinstance(given, list | tuple) and not given else f"{given!r:.60}"
    return f"{name or 'this'} is {shown} but must be {words_of(hint, name)}"


def unknown_key(key: str, owner: str, known: Collection[str], everywhere: Iterable[str]) -> str:
    """The sentence about a key that a table does not have.

    Args: `owner` is the dotted name of the table, and `everywhere` are the dotted keys of the whole file.
    """
    noun = f"key in [{owner}]" if owner else "key"
    if not any(key.casefold() in one.casefold() for one in known) and (homes := _homes(everywhere, key)):
        return f"unknown {noun} '{key}'; it is {' or '.join(homes)}: write it there"
    return choose(noun, key, known) + "; correct the name"


def _shown(given: Iterable[object]) -> str:
    """The keys of a table, truncated: a damaged file may have thousands of keys, or very long ones."""
    keys = sorted(str(key) for key in given)
    more = f", and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"[{', '.join(f'{key!r:.60}' for key in keys[:_MOST_KEYS])}{more}]"


def _within(path: tuple[Any, ...], location: tuple[int | str, ...]) -> list[int]:
    """The position of an error within the list at this path: the rest of its location, without union members."""
    left = [*location]
    for key in path:
        left = left[left.index(key) + 1 :]
    return [key for key in left if isinstance(key, int)]


def _item(hint: Any, within: list[int]) -> Any:
    """The annotation of an item of a list in lists; that of the whole list where it has custom words."""
    for k in within:
        if any(isinstance(one, Words) for one in _extras(hint)):
            break
        bare = _bare(hint)
        parts = get_args(bare) if get_origin(bare) in (typing.Union, types.UnionType) else (bare,)
        lists = [_bare(part) for part in parts if get_origin(_bare(part)) in (list, tuple)]
        if not lists:
            break
        items = get_args(lists[0])
        hint = items[0] if len(items) == 1 or items[1] is ... else items[k]
    return hint


def words_of(hint: Any, name: str = "") -> str:
    """The allowed values of a field or an option, in words."""
    extras = _extras(hint)
    unit = next((one for one in extras if isinstance(one, Unit)), None)
    with_unit = f", or with its unit as '{unit.example}'" if unit is not None else ""
    if words := next((one.text for one in extras if isinstance(one, Words)), ""):
        return words + with_unit
    bare = _bare(hint)
    origin, arguments = get_origin(bare), get_args(bare)
    if names := _allowed_names(hint):
        return "one of " + ", ".join(names) if len(names) > 1 else f'"{names[0]}"'
    if origin in (typing.Union, types.UnionType):
        one, *more = (words_of(part, name) for part in arguments if part is not type(None))
        if more and more[0].endswith(f"each {one}"):
            more[0] = "a list of them"
            text = f"{', '.join((one, *more[:-1]))}, or {more[-1]}"
        else:
            text = " or ".join((one, *more))
        return text + (", or left out" if type(None) in arguments else "")
    if _is_table(bare):
        return "an object" if is_typeddict(bare) else "a table"
    if origin is Mapping:
        return f"tables; write each as [{name}.NAME]" if name else "a table"
    if origin in (list, tuple) and _is_table(_bare(arguments[0])):
        return f"tables; write each as [[{name}]]"
    if hasattr(bare, "_fields"):
        return f"a list of {len(bare._fields)}"
    if origin in (list, tuple, frozenset, Sequence):
        count = f" of {len(arguments)}" if arguments[1:] and arguments[1] is not ... else ""
        return f"a list{count}, each {words_of(arguments[0], name)}"
    kinds = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    multiple = next((one.multiple_of for one in extras if hasattr(one, "multiple_of")), None)
    return (f"a multiple of {multiple}" if multiple else kinds.get(bare, str(bare))) + _bounds_text(extras) + with_unit


def _bounds_text(extras: list[Any]) -> str:
    """The bounds of a field, in words."""
    limits = {
        key: getattr(one, key) for one in extras for key in ("ge", "gt", "le", "lt", "min_length") if hasattr(one, key)
    }
    ge, gt, le, lt, longer = (
        None if (limit := limits.get(key)) is None else f"{limit:g}" if isinstance(limit, float) else str(limit)
        for key in ("ge", "gt", "le", "lt", "min_length")
    )
    if longer:
        return " that is not empty"
    if ge and (le or lt):
        return f" from {ge} to {le or f'below {lt}'}"
    low = f" of at least {ge}" if ge else f" above {gt}" if gt else ""
    high = f" at most {le}" if le else f" below {lt}" if lt else ""
    return f"{low} and{high}" if low and high else low or high


def _allowed_names(hint: Any) -> list[str]:
    """The names that a field allows, where it allows only names."""
    if table := next((one.names for one in _extras(hint) if isinstance(one, OneOf)), None):
        return table
    bare = _bare(hint)
    if get_origin(bare) is Literal:
        return [*map(str, get_args(bare))]
    parts = [part for part in get_args(bare) if part is not type(None) and get_origin(_bare(part)) is not tuple]
    return _allowed_names(parts[0]) if get_origin(bare) in (typing.Union, types.UnionType) and len(parts) == 1 else []


def _is_table(bare: Any) -> bool:
    return isinstance(bare, type) and (hasattr(bare, "__table__") or is_typeddict(bare))


def _tagged(record: Any, tag: Any) -> bool:
    """Whether a record type has this tag."""
    return any(tag in get_args(_bare(hint)) for hint in _hints(record).values() if get_origin(_bare(hint)) is Literal)


def _extra_keys(table: Any) -> tuple[str, ...]:
    """Keys of a file that are not fields of these settings, but make it another kind of file."""
    return getattr(table, "__also__", ())


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _bare(hint: Any) -> Any:
    """An annotation without its metadata."""
    return _bare(get_args(hint)[0]) if get_origin(hint) in (Annotated, NotRequired) else hint


def _extras(hint: Any) -> list[Any]:
    """The metadata of an annotation; of a pydantic Field, its bounds."""
    hint = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return [part for one in extras for part in (one.metadata if isinstance(one, FieldInfo) else [one])]


def _dotted(where: str, path: tuple[Any, ...]) -> str:
    """The name of a field: "network.wan.routes[0].latency_s"."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key:.60}" for key in path)
    return (where + "".join(parts)).removeprefix(".")
