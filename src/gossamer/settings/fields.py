"""Metadata in the annotation of a field: bounds, allowed names, and whether it decides results."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from gossamer.settings.user_code import is_code


class Words(NamedTuple):
    """The allowed values of a field in words, for annotations whose bounds do not describe them well."""

    text: str


class _Mark(NamedTuple):
    name: str


NEUTRAL = _Mark("neutral")
"""Marks a field that does not affect the results of a run and is left out of its digest."""


class Changeable(NamedTuple):
    """Marks a field that affects results but may be changed by a resumed run.

    For a row of a table of methods it names the options that may change: `Annotated[Choice, Changeable("lr")]`.
    """

    option: str = ""


class OneOf:
    """In the annotation of a name that must be in a table: `Annotated[str, OneOf(SIZES)]`.

    Args: with `code`, the name of Python code, "package.module:name", is allowed too.
    """

    def __init__(self, names: Iterable[str], *, code: bool = False) -> None:
        self.names, self.code = list(names), code

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        one = core_schema.literal_schema(self.names)
        if not self.code:
            return one
        return core_schema.union_schema(
            [one, core_schema.no_info_after_validator_function(_code, core_schema.str_schema())]
        )


def _code(name: str) -> str:
    if not is_code(name):
        raise ValueError("no name of Python code")
    return name


def _folder(name: str) -> str:
    if not name or not name.isprintable() or {"", ".", ".."} & {*re.split(r"[/\\]", name)}:
        raise ValueError("no name of a folder")
    return name


FolderName = Annotated[
    str,
    AfterValidator(_folder),
    Words("a name for the folder of the run: text that is not empty, not an absolute path, and without '..'"),
]
CodeName = Annotated[str, AfterValidator(_code), Words('Python code, as "package.module:name"')]
