"""The saved states that belong to a run: its digests over time, and descriptions of states that can be compared.

A digest decides, but is meaningless to people. So every saved state also names its rule, codec, schedule, topology,
number of workers and local steps, in a checkpoint of a run folder and in a state of `gossamer.Outer` alike.

`branches.json` lists the branches of a run: what changed when it was resumed with other settings.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.record.whole_files import atomic_write
from gossamer.settings.schema import RECORD, Records

_CHANGEABLE = "rule option lr"  # the state stays valid under another outer learning rate
_LONGEST = 120  # characters of a saved word in a sentence


class Lineage(NamedTuple):
    """The configuration of a run that may have changed on resume, with its earlier ones."""

    digest: str
    """Digest of the current configuration, with which checkpoints are written."""
    earlier: tuple[tuple[str, int], ...] = ()
    """Digests of earlier configurations, each with the last round whose checkpoints belong to the run."""
    of: Mapping[str, str] = MappingProxyType({})
    """The description of its states (`state_is_of`), which no change of settings affects."""

    def owns(self, digest: str, round: int) -> bool:
        """Whether a checkpoint of this digest and round belongs to the run."""
        return digest == self.digest or any(digest == one and round <= last for one, last in self.earlier)


def state_is_of(
    rule: str, options: Mapping[str, Any], *, topology: str, workers: int, codec: str, schedule: str, local_steps: str
) -> dict[str, str]:
    """The description that must match between saving and loading a state; `options` are those of the rule."""
    return {
        "rule": rule,
        **{f"rule option {key}": repr(value) for key, value in options.items()},
        "topology": topology,
        "workers": str(workers),
        "codec": codec,
        "schedule": schedule,
        "local steps": local_steps,
    }


def choice_in_words(name: str, options: Mapping[str, Any]) -> str:
    """A part of a method with its options, in words.

    >>> choice_in_words("int8", {"block": 64})
    "'int8' (block = 64)"
    """
    return f"'{name}' ({', '.join(f'{key} = {value!r}' for key, value in options.items())})"


class OddField(NamedTuple):
    """A difference between two descriptions of states."""

    field: str
    saved: str
    current: str


def odd_field(saved: Mapping[Any, Any], current: Mapping[str, str]) -> OddField | None:
    """The first field in which a saved state differs from the state it is loaded into, other than an outer learning
    rate.

    >>> odd_field({"rule": "diloco", "workers": "4"}, {"rule": "gasloc", "workers": "4"})
    OddField(field='rule', saved='diloco', current='gasloc')
    """
    for key in dict.fromkeys([*current, *saved]):
        had, has = saved.get(key, "none"), current.get(key, "none")
        if had != has and key != _CHANGEABLE:
            return OddField(f"{key!s:.{_LONGEST}}", f"{had!s:.{_LONGEST}}", f"{has:.{_LONGEST}}")
    return None


_FILE = "branches.json"


@with_config({**RECORD, "allow_inf_nan": True})
class Branch(TypedDict):
    """A change of settings."""

    round: Annotated[int, Field(ge=0, lt=2**31)]
    """Rounds completed before the change."""
    digest: str
    """Digest of the settings before."""
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]
    """Dotted keys with the values before and after; null for an absent value."""


_BRANCHES = Records[list[Branch]](list[Branch])


def read_branches(run_folder: Path) -> list[Branch]:
    """The changes of settings of a run, in their order. Raises DataError for a spoilt record."""
    path = run_folder / _FILE
    # A dangling link is an unreadable record rather than a missing one.
    return _BRANCHES.parse(path.read_bytes(), str(path)) if os.path.lexists(path) else []


def write_branches(run_folder: Path, branches: Sequence[Branch]) -> None:
    """Writes the changes of settings of a run into its folder atomically."""
    atomic_write(run_folder / _FILE, json.dumps(branches, indent=1).encode())


def branch_of(branches: Sequence[Branch], rounds: int) -> int:
    """The branch of the last of `rounds` rounds: the number of changes of settings before it.

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


def changed_stages(branches: Sequence[Branch]) -> str:
    """The changes of the stages of a run in words, as its rounds are priced with the last ones; empty if there are none.

    A stage that was lost is cut as before.

    >>> changed_stages([{"round": 4, "digest": "", "changes": {"inner.lr": [0.1, 0.01], "pipeline.stages": [3, 2]}}])
    'after round 4: pipeline.stages from 3 to 2'
    """
    words = list[str]()
    for branch in branches:
        changes = branch["changes"].items()
        own = {key: one for key, one in changes if key.startswith("pipeline.") and key != "pipeline.lost"}
        words += [described({**branch, "changes": own})] if own else []
    return "; ".join(words)


def stages_sentence(whose: str, changed: str) -> str:
    """What a price says of a run whose stages changed, in these words."""
    return f"the stages of {whose} changed ({changed}), and all rounds are priced with the last ones"


def _word(value: object) -> str:
    return "none" if value is None else f"{value}"
