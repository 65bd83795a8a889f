"""What the models of utilisation, wall-clock and stragglers are given: options by name, and conditions between several numbers.

The bounds of one number are those of `gossamer.settings.options`.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from gossamer.errors import ConfigError, choose

__all__ = ["build_settings", "ensure"]

Settings = TypeVar("Settings")


def ensure(what: str, value: object, holds: bool, allowed: str) -> None:
    """Raises ConfigError unless the condition holds; `allowed` says in words which values are accepted."""
    if not holds:
        raise ConfigError(f"{what} is {value!r} but must be {allowed}")


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
