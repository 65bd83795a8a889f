"""Python code that a run file names, as "package.module:name", where it may also name one of Gossamer's own parts.

Only verbs that train or evaluate import it. All others read the name only.
"""

import ast
import hashlib
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gossamer.errors import ConfigError, GossamerError, UserCodeError

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
    """`hash_of_code` of its module; workers compare it."""


def is_code(name: str) -> bool:
    """Whether a name is that of Python code.

    >>> [is_code(name) for name in ("my_rules:slow", "gasloc", "hf:openwebtext", "data/a.txt")]
    [True, False, False, False]
    """
    return re.match(PATTERN, name) is not None


def name_of(given: object) -> str:
    """The run-file name of an object; for an instance, that of its class.

    >>> name_of(is_code)
    'gossamer.settings.user_code:is_code'
    """
    named = given if hasattr(given, "__qualname__") else type(given)
    return f"{named.__module__}:{named.__qualname__}"  # pyright: ignore[reportAttributeAccessIssue]


def imported(key: str, name: str) -> Code:
    """The object that a run file names, from an installed package or from a module in the current folder.

    Not from the standard library, through which a foreign run file could run any command.

    Args: `key` is the key that names it, for the sentences.
    Raises: ConfigError for a missing module or name, one of the standard library, or an object that cannot be called;
        UserCodeError for a module that fails.
    """
    module, _, attribute = name.partition(":")
    fact = f"{key} is '{name}'"
    if _is_standard(module):
        raise _standard_library_error(fact)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # As with `python -m`; a console script has the folder of the script instead.
        sys.path.insert(0, str(Path.cwd()))
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(f"{fact}, whose module failed", error) from error
        raise ConfigError(
            f"{fact}, but there is no module '{error.name}' in {Path.cwd()} or among the installed packages; install it, or "
            "start gossamer where its file is"
        ) from None
    except Exception as error:
        raise _failed(f"{fact}, whose module failed", error) from error
    file = Path(getattr(value, "__file__", None) or "")
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(
                f"{fact}, but module '{module}' has no '{attribute}'; it has {', '.join(_public(value)) or 'nothing'}: name "
                "one of these"
            )
        value = getattr(value, part)
        # Reached through a module that has imported it, such as torch:os.system. For other objects, `__module__` is
        # that of their class.
        if isinstance(value, types.ModuleType):
            home = value.__name__
        else:
            home = getattr(value, "__module__", None) if inspect.isroutine(value) or inspect.isclass(value) else None
        if isinstance(home, str) and _is_standard(home):
            raise _standard_library_error(fact)
    if not callable(value):
        raise ConfigError(f"{fact}, a {type(value).__name__}, which cannot be called; name a function or a class")
    return Code(name, value, str(file) if file.is_file() else "", hash_of_code(module))


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _standard_library_error(fact: str) -> ConfigError:
    return ConfigError(
        f"{fact}, which is of Python's standard library, where no part of a run is; name a function or a class of yours, or of "
        "an installed package"
    )


def located(module: str) -> Path | None:
    """The file of a module, located without importing it or its packages; None if there is none."""
    if (loaded := sys.modules.get(module)) is not None:
        return _file(getattr(loaded, "__file__", None))
    inside: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for k in range(len(parts)):
        name, here = ".".join(parts[: k + 1]), [str(Path.cwd()), *sys.path] if inside is None else inside
        spec = PathFinder.find_spec(name, here)
        for finder in sys.meta_path if spec is None else ():  # such as that of an editable install
            if spec is None and finder is not PathFinder:
                spec = finder.find_spec(name, inside)
        if spec is None:
            return None
        inside = [*(spec.submodule_search_locations or ())]
    return _file(spec.origin if spec is not None and spec.has_location else None)


def _file(name: str | None) -> Path | None:
    return Path(name) if name is not None and Path(name).is_file() else None


def hash_of_code(module: str) -> str:
    """The sha256 of the file of a module, and of those of the same folder that it imports, directly or not.

    For an installed package it is of the module's file only: such packages have versions. Files are located by parsing
    imports, so code loaded in other ways is not covered.
    """
    file = located(module)
    if file is None:
        return hashlib.sha256(b"").hexdigest()
    # The folder in which an import of the top package looks.
    root = [*file.parents][: module.count(".") + (file.stem == "__init__") + 1][-1]
    is_installed = module.partition(".")[0] == "gossamer" or {"site-packages", "dist-packages"} & {*file.parts}
    files = [file] if is_installed else sorted(_with_imports(file, root))
    hashes = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    if [*hashes] == [file]:
        return hashes[file]
    lines = (f"{path.relative_to(root).as_posix()} {one}\n" for path, one in hashes.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _with_imports(file: Path, root: Path) -> set[Path]:
    """A file of Python, and those below a folder that it imports."""
    files, left = {file}, [file]
    while left:
        new = {*_imports(left.pop(), root)} - files
        files |= new
        left += new
    return files


def _imports(file: Path, root: Path) -> Iterator[Path]:
    """The files below a folder that the statements of a file import."""
    try:
        statements = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # A compiled library, or a file that cannot be imported.
        return
    for one in statements:
        if isinstance(one, ast.Import):
            for alias in one.names:
                yield from _files_of(root, alias.name.split("."))
        elif isinstance(one, ast.ImportFrom):
            base = root if not one.level else [*file.parents][: one.level][-1]
            path = one.module.split(".") if one.module else []
            if base.is_relative_to(root):
                for alias in one.names:
                    yield from _files_of(base, [*path, alias.name])


def _files_of(base: Path, path: list[str]) -> Iterator[Path]:
    """The files that run where this path of packages and a module, or a name in one, is imported."""
    for k in range(1, len(path) + 1):
        place = base.joinpath(*path[:k])
        yield from (one for one in (place / "__init__.py", place.with_suffix(".py")) if one.is_file())


def calling(subject: str, function: Callable[..., T]) -> Callable[..., T]:
    """The user's function, with exceptions turned into a UserCodeError that names their origin; Gossamer's own pass through."""
    return guarding(f"{subject} '{name_of(function)}'", function)


def guarding(subject: str, function: Callable[..., T]) -> Callable[..., T]:
    """The same, for a function that `subject` names."""

    def call(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except GossamerError:
            raise
        except Exception as error:
            raise _failed(f"{subject} failed", error) from error

    return call


def _failed(subject: str, error: Exception) -> UserCodeError:
    text = " ".join(str(error).split())[:200]
    return UserCodeError(f"{subject} with {type(error).__name__}{f': {text}' if text else ''}; its traceback is above")


def _public(module: object) -> list[str]:
    """Some of the public names that a module defines."""
    names = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]  # pyright: ignore[reportAttributeAccessIssue]
    return sorted(name for name in names if not name.startswith("_"))[:12]
