"""Checks of the numbers that the models of utilisation, wall-clock and stragglers are given."""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from gossamer.errors import ConfigError, choose

__all__ = ["build_settings", "counts", "ensure", "is_number", "is_whole", "positives"]

Settings = TypeVar("Settings")


def ensure(what: str, value: object, holds: bool, allowed: str) -> None:
    """Raises ConfigError unless the condition holds; `allowed` says in words which values are accepted."""
    if not holds:
        raise ConfigError(f"{what} is {value!r} but must be {allowed}")


def is_number(value: object) -> bool:
    """Whether a value is an int or a float; a bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether a value is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def counts(**values: Any) -> None:
    """Raises ConfigError for the first of these that is not a whole number from 1; the keys are the names in the message."""
    for name, value in values.items():
        ensure(name, value, is_whole(value) and value >= 1, "a whole number, 1 or more")


def positives(**values: Any) -> None:
    """Raises ConfigError for the first of these that is not a finite number above 0; the keys are the names in the message."""
    for name, value in values.items():
        ensure(name, value, is_number(value) and 0 < value < math.inf, "a finite number above 0")


def build_settings(
    kind: type[Settings], options: Mapping[str, Any], what: str = "option", *, without: Collection[str] = ()
) -> Settings:
    """A settings dataclass from options that a user named.

    Args: `what` is what the message calls an option; `without` names fields that a user cannot write.
    Raises: ConfigError for a name that the dataclass does not have, or for a value that it refuses.
    """
    names = [field.name for field in fields(kind) if field.name not in without]  # pyright: ignore[reportArgumentType]
    for name in options:
        if name not in names:
            raise ConfigError(choose(what, name, names))
    return kind(**options)
