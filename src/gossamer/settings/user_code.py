"""Python code that a run file names, as "package.module:name", where it may also name one of Gossamer's own parts.

Only the verbs that train or evaluate import it. Everything else reads the name and leaves the code alone.
"""

import hashlib
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gossamer.errors import ConfigError, GossamerError, UserCodeError

__all__ = ["PATTERN", "Code", "calling", "imported", "is_code", "name_of"]

PATTERN = r"^(?!hf:)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_<][\w.<>]*$"
T = TypeVar("T")


class Code(NamedTuple):
    """An object that a run file names."""

    name: str
    """"package.module:name"."""
    object: Callable[..., Any]
    path: str
    """The file of its module; empty for a module without one."""
    sha256: str
    """Of that file, which workers compare."""


def is_code(name: str) -> bool:
    """Whether a name is that of Python code.

    >>> [is_code(name) for name in ("my_rules:slow", "gasloc", "hf:openwebtext", "data/a.txt")]
    [True, False, False, False]
    """
    return re.match(PATTERN, name) is not None


def name_of(given: object) -> str:
    """The name by which a run file would name an object; of an instance, that of its class.

    >>> name_of(is_code)
    'gossamer.settings.user_code:is_code'
    """
    named = given if hasattr(given, "__qualname__") else type(given)
    return f"{named.__module__}:{named.__qualname__}"  # pyright: ignore[reportAttributeAccessIssue]


def imported(key: str, name: str) -> Code:
    """The object that a run file names, from an installed package or from a module in the current folder.

    Args: `key` is the key that names it, for the sentences.
    Raises: ConfigError for a missing module or name, or an object that cannot be called; UserCodeError for a module that fails.
    """
    module, _, attribute = name.partition(":")
    said = f"{key} is '{name}'"
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # As `python -m` has it; a console script has the folder of the script instead.
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(f"{said}, whose module failed", error) from error
        raise ConfigError(
            f"{said}, but there is no module '{error.name}' in {Path.cwd()} or among the installed packages; install it, or "
            "start gossamer where its file is"
        ) from None
    except Exception as error:
        raise _failed(f"{said}, whose module failed", error) from error
    file = Path(getattr(found, "__file__", None) or "")
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{said}, but module '{module}' has no '{attribute}'; it has {', '.join(_public(found)) or 'nothing'}: name "
                "one of these"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{said}, a {type(found).__name__}, which cannot be called; name a function or a class")
    code = hashlib.sha256(file.read_bytes() if file.is_file() else b"").hexdigest()
    return Code(name, found, str(file) if file.is_file() else "", code)


def calling(what: str, function: Callable[..., T]) -> Callable[..., T]:
    """The user's function, whose exceptions become a UserCodeError that says where they come from; Gossamer's own pass."""

    def call(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except GossamerError:
            raise
        except Exception as error:
            raise _failed(f"{what} '{name_of(function)}' failed", error) from error

    return call


def _failed(what: str, error: Exception) -> UserCodeError:
    text = " ".join(str(error).split())[:200]
    return UserCodeError(f"{what} with {type(error).__name__}{f': {text}' if text else ''}; its traceback is above")


def _public(module: object) -> list[str]:
    """What a module defines and may be named, some of it."""
    own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]  # pyright: ignore[reportAttributeAccessIssue]
    return sorted(name for name in own if not name.startswith("_"))[:12]
