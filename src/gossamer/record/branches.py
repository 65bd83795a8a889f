"""Branches of a run: what changed when it was resumed with other settings, in `branches.json` of its folder."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.record.whole_files import atomic_write
from gossamer.settings.schema import RECORD, Records

__all__ = ["Branch", "branch_of", "described", "read_branches", "write_branches"]

_FILE = "branches.json"


@with_config({**RECORD, "allow_inf_nan": True})
class Branch(TypedDict):
    """A change of settings."""

    round: Annotated[int, Field(ge=0, lt=2**31)]
    """Rounds that were over."""
    digest: str
    """Of the settings before."""
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]
    """Dotted keys with the values before and after; null where there was none."""


_BRANCHES = Records[list[Branch]](list[Branch])


def read_branches(run_folder: Path) -> list[Branch]:
    """The changes of settings of a run, in their order. Raises DataError for a spoilt record."""
    path = run_folder / _FILE
    # A link that leads nowhere is a record that cannot be read, and not none.
    return _BRANCHES.parse(path.read_bytes(), str(path)) if os.path.lexists(path) else []


def write_branches(run_folder: Path, branches: Sequence[Branch]) -> None:
    """Puts the changes of settings of a run into its folder, all at once."""
    atomic_write(run_folder / _FILE, json.dumps(branches, indent=1).encode())


def branch_of(branches: Sequence[Branch], rounds: int) -> int:
    """The branch that the last of so many rounds belongs to: how many changes of settings there were before it.

    >>> branch_of([{"round": 4, "digest": "", "changes": {}}], 4), branch_of([{"round": 4, "digest": "", "changes": {}}], 5)
    (0, 1)
    """
    return sum(branch["round"] < rounds for branch in branches)


def described(branch: Branch) -> str:
    """A branch in words.

    >>> described({"round": 4, "digest": "", "changes": {"inner.lr": [0.1, 0.01], "inner.clip": [None, 1.0]}})
    'after round 4: inner.lr from 0.1 to 0.01, inner.clip from none to 1.0'
    """
    words = (f"{key} from {_word(old)} to {_word(new)}" for key, (old, new) in branch["changes"].items())
    return f"after round {branch['round']}: {', '.join(words)}"


def _word(value: object) -> str:
    return "none" if value is None else f"{value}"
