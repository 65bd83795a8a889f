"""Whose saved states belong to a run: the digests that it had, and what a state is of, in words that two can compare.

A digest decides alone, but says nothing to a person. So whatever is saved also names its rule, codec, schedule, topology, number
of workers and local steps, in a checkpoint of a run folder and in a state of `gossamer.Outer` alike.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Lineage", "OddField", "choice_in_words", "odd_field", "state_is_of"]

_CHANGEABLE = "rule option lr"  # the state has the same meaning under another outer learning rate
_LONGEST = 120  # characters of a saved word in a sentence


class Lineage(NamedTuple):
    """The configuration of a run that has changed on its way, with those that it had before."""

    digest: str
    """Of the present configuration, which checkpoints are written with."""
    earlier: tuple[tuple[str, int], ...] = ()
    """Digests of earlier configurations, each with the last round whose checkpoints of it belong to the run."""
    of: Mapping[str, str] = MappingProxyType({})
    """What its states are of, as `state_is_of` has it: no change of settings changes this."""

    def owns(self, digest: str, round: int) -> bool:
        """Whether a checkpoint of this digest and round belongs to the run."""
        return digest == self.digest or any(digest == one and round <= last for one, last in self.earlier)


def state_is_of(
    rule: str, options: Mapping[str, Any], *, topology: str, workers: int, codec: str, schedule: str, local_steps: str
) -> dict[str, str]:
    """What must be the same where a state is saved and where it is loaded, in words; `options` are those of the rule."""
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
    """Where two say that they are of something else."""

    field: str
    theirs: str
    mine: str


def odd_field(theirs: Mapping[Any, Any], mine: Mapping[str, str]) -> OddField | None:
    """The first field in which a saved state is of something else than what it is loaded into; an outer learning rate is none.

    >>> odd_field({"rule": "diloco", "workers": "4"}, {"rule": "gasloc", "workers": "4"})
    OddField(field='rule', theirs='diloco', mine='gasloc')
    """
    for key in dict.fromkeys([*mine, *theirs]):
        had, has = theirs.get(key, "none"), mine.get(key, "none")
        if had != has and key != _CHANGEABLE:
            return OddField(f"{key!s:.{_LONGEST}}", f"{had!s:.{_LONGEST}}", f"{has:.{_LONGEST}}")
    return None
