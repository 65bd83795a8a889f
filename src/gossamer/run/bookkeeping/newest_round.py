"""Which round of an elastic run can be resumed or scored where not every worker has its checkpoint.

A worker that had died, or was not there yet, has no checkpoint of a round and never will. One that lags has none either, and
will. What each worker knew of the others when it trained the round tells these apart (`gossamer.record.logs.outcomes`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.logs.outcomes import read_outcomes

__all__ = ["Held", "held_by", "to_resume", "to_score"]

Held = Mapping[int, frozenset[int] | None]
"""The rounds of which a worker has a checkpoint, each with those that took part in its view; None for everyone."""


def held_by(folder: Path, slots: Iterable[int], line: Lineage) -> dict[int, dict[int, frozenset[int] | None]]:
    """What each of these slots has in a run folder; where the log of outcomes is lost, everyone counts as having taken part.

    Raises: DataError for a spoilt log.
    """
    lives = read_outcomes(folder)
    held: dict[int, dict[int, frozenset[int] | None]] = {}
    for slot in slots:
        seen = {one.round + 1: one.alive for life in lives.get(slot, []) for one in life.rounds}
        held[slot] = {r: seen.get(r) for r in checkpoint.rounds(folder / "checkpoints", slot, line)}
    return held


def to_resume(held: Mapping[int, Held], tolerance: int = 0) -> int:
    """The round to go on from; 0 where nobody has any.

    The newest of which everybody has a checkpoint who took part in it, so that a calm run goes on with the same bits; else as
    `to_score`. Slots without any checkpoint, or that nobody fills, do not count.

    Args: `tolerance` is how many rounds earlier one may be that more workers have, who have left one after the other.

    >>> to_resume({0: {10: None, 20: None}, 1: {10: None}})
    10
    >>> to_resume({0: {10: None, 20: frozenset({0, 2})}, 1: {10: None}, 2: {10: None, 20: frozenset({0, 2})}, 3: {}})
    20
    >>> to_resume({0: {12: None}, 1: {12: None}, 2: {13: frozenset({2})}}, tolerance=2)
    12
    """
    owners = _owners(held)
    whole = max((r for r, having in owners.items() if _took_part(held, r) <= having), default=0)
    near = [r for r in {whole, *_held_by_most(held)} if whole - tolerance <= r <= whole and r]
    return max(near, key=lambda r: (len(owners[r]), r), default=0) or to_score(held)


def to_score(held: Mapping[int, Held]) -> int:
    """The newest round of which most have a checkpoint who took part in it, else the one that most have; 0 where nobody has any.

    >>> to_score({0: {10: None, 20: None}, 1: {10: None, 20: None}, 2: {10: None}, 3: {10: None}})
    10
    >>> to_score({0: {10: None, 20: None}, 1: {10: None, 20: None}, 2: {10: None}})
    20
    """
    owners = _owners(held)
    return max(_held_by_most(held), default=0) or max(owners, key=lambda r: (len(owners[r]), r), default=0)


def _held_by_most(held: Mapping[int, Held]) -> list[int]:
    return [r for r, having in _owners(held).items() if 2 * len(having) > len(_took_part(held, r))]


def _owners(held: Mapping[int, Held]) -> dict[int, set[int]]:
    return {r: {slot for slot in held if r in held[slot]} for rounds in held.values() for r in rounds}


def _took_part(held: Mapping[int, Held], round: int) -> set[int]:
    """The slots that took part in the round, in the view of anybody who has its checkpoint, as far as they have any at all."""
    views = [rounds[round] for rounds in held.values() if round in rounds]
    having = {slot for slot, rounds in held.items() if rounds}
    return having if None in views else having & {slot for view in views if view is not None for slot in view}
