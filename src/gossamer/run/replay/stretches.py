"""The settings of each round of a recorded run, including those it was resumed with.

A run that was resumed with other settings (`gossamer.record.lineage`) falls into stretches of rounds, and its `run.toml` has the
settings of the last one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.record.lineage import Branch, described, read_branches
from gossamer.run.config.document import flat, with_settings
from gossamer.run.config.resolve import may_change, resolve_document
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.settings.schema import parse_toml


class Stretch(NamedTuple):
    """A stretch of rounds with the same settings."""

    first: int
    """Its first round; it ends before the next stretch."""
    run: ResolvedRun


def stretches(run: ResolvedRun, folder: Path, *, real: bool) -> list[Stretch]:
    """The stretches of the run in a folder with these settings; differences between them and its record are kept.

    Args: `real` is as in `resolve`. Raises: DataError when the settings before a branch cannot be recovered.
    """
    runs, branches = [run], read_branches(folder)
    for branch in reversed(branches):
        runs.insert(0, _before(branch, runs[0], folder, real=real))
    # A run rewound past a branch has it at the round of resumption: of two at one round the later counts.
    return [Stretch(first, one) for first, one in zip([0, *(one["round"] for one in branches)], runs, strict=True)]


def stretch_of(round: int, some: Sequence[Stretch]) -> Stretch:
    """The stretch that contains a round."""
    return [one for one in some if one.first <= round][-1]


def must_not_have_changed(run: RunSettings, folder: Path, why: str) -> None:
    """Raises ConfigError where settings that affect results changed during a run of a kind that cannot be replayed then."""
    branches = read_branches(folder)
    digests = [*(one["digest"] for one in branches), run.digest]
    if changed := [one for one, now in zip(branches, digests[1:], strict=True) if one["digest"] != now]:
        raise ConfigError(
            f"'{folder}' went on with other settings {described(changed[-1])}; {why}, so only a run whose settings stayed the "
            "same can be computed again"
        )


def _before(branch: Branch, run: ResolvedRun, folder: Path, *, real: bool) -> ResolvedRun:
    """The settings before a branch."""
    document = parse_toml(run.document, "a run")
    now, earlier = flat(document), dict[str, Any]()
    for key, (old, new) in branch["changes"].items():
        if not may_change(key):  # else the record could pass any option to the user's code
            raise _unrecoverable(branch, folder, f"{key} is among the changes, which a resumed run keeps")
        if now.get(key) == new:  # else overridden for the replay, such as the device
            _remove(document, key)
            earlier |= {} if old is None else {key: old}
    try:
        before = resolve_document(with_settings(document, earlier), run.parts, real=real)
    except GossamerError as error:
        raise _unrecoverable(branch, folder, str(error)) from None
    if before.digest != branch["digest"]:
        raise _unrecoverable(
            branch, folder, f"they had digest {branch['digest']}, and without the change it is {before.digest}"
        )
    return before


def _remove(table: dict[str, Any], key: str) -> None:
    """Removes a dotted key if present, and tables left empty."""
    first, dot, rest = key.partition(".")
    if dot and isinstance(table.get(first), dict):
        _remove(table[first], rest)
    if not dot or not table.get(first, True):
        table.pop(first, None)


def _unrecoverable(branch: Branch, folder: Path, why: str) -> DataError:
    return DataError(
        f"the settings of '{folder}' before they changed {described(branch)}, cannot be recovered: {why}; restore its run.toml "
        "and branches.json as the run wrote them"
    )
