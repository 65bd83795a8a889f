"""The provenance of a result: fields of a line about a finished run besides its result and seed."""

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from gossamer.settings.schema import RECORD
from gossamer.version import __version__


@with_config(RECORD)
class Origin(TypedDict):
    """The code, settings and duration of a run."""

    digest: str
    """Digest of the settings that affect results."""
    commit: str
    """Commit of the checkout that the package ran from, with a "+" if its code was modified; empty for an installed package."""
    versions: dict[str, str]
    """Versions of Python, gossamer and torch."""
    seconds: float | None
    """Seconds from start to end; None if not measured."""
    text: NotRequired[str]
    """The fingerprint of the files it was trained on: the same source may be different text on another machine."""


def origin(digest: str, seconds: float | None, text: str = "") -> Origin:
    """The origin of a run that this process or a child of it has trained.

    Args: `text` is the fingerprint of its text; empty where there is none.
    """
    known: Origin = {"digest": digest, "commit": _commit(), "versions": dict(_versions()), "seconds": seconds}
    return {**known, "text": text} if text else known


@functools.cache
def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "gossamer": __version__, "torch": metadata.version("torch")}


@functools.cache
def _commit() -> str:
    """Queried once, as early as possible, to describe the code that is running."""
    package = Path(__file__).parents[1]
    root = package.parents[1]
    if not (root / ".git").exists():  # an installed package may be inside an unrelated repository
        return ""
    commit = _git(root, "rev-parse", "HEAD")
    return commit + ("+" if commit and _git(root, "status", "--porcelain", "--", str(package)) else "")


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
