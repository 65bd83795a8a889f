"""The names of the objects of a run in a store, and what heads of messages and commits hold: `protocol` lists the objects."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gossamer.transport.bucket.bucket import Item

_MOST_TIME_S = 1e11
"""A bound on Unix time in objects."""
_NAMES = re.compile(
    r"r(?P<round>\d{8})-(?:(?P<commit>commit)|from-(?P<sender>\d{5})-(?P<of>\d{4,8})|mean-[0-9a-f]{64})"
    r"|s(?P<state>\d{8})(?:-(?P<holder>\d{5}))?|(?P<kind>[tuv])(?P<slot>\d{5})-(?P<life>\d{4,8})(?:-(?P<beat>\d{8}))?",
    re.ASCII,
)
_SHA256 = "([0-9a-f]{64})?"


class Basis(NamedTuple):
    """The state from which a worker continues that was absent, or not counted, in the round before."""

    after: int
    """Rounds behind the state of a worker; the means of the rounds since then were added."""
    donor: int
    sha256: str
    steps: int = 0
    """Inner steps behind the slot."""


class TakenPart(NamedTuple):
    """The part of a worker in a round."""

    life: int
    steps: int
    begun: Basis | None


class Commit(NamedTuple):
    """The outcome of a round."""

    round: int
    parts: Mapping[int, TakenPart]
    """The participants of the mean, by slot."""
    steps: tuple[int, ...]
    """Inner steps behind each slot."""
    mean: str
    """The SHA-256 of the mean; empty in gossip."""
    closer: tuple[int, int]
    """The slot and the life of the closer."""
    time_s: float
    """When, by its own clock in Unix time; for people only."""


# --- names ------------------------------------------------------------------------------------------------------------


def message_name(round: int, slot: int, life: int) -> str:
    """The name of the message of a worker."""
    return f"r{round:08d}-from-{slot:05d}-{life:04d}"


def mean_name(round: int, sha256: str) -> str:
    """The name of a mean."""
    return f"r{round:08d}-mean-{sha256}"


def commit_name(round: int) -> str:
    """The name of the outcome of a round."""
    return f"r{round:08d}-commit"


def state_name(after: int, slot: int = -1) -> str:
    """The name of a state; a slot where they differ."""
    return f"s{after:08d}" + (f"-{slot:05d}" if slot >= 0 else "")


def lease_name(kind: str, slot: int, life: int) -> str:
    """The name of a claim (t), a sign of life (u, without its number) or an end (v) of a slot."""
    return f"{kind}{slot:05d}-{life:04d}"


def parsed(names: Iterable[str]) -> Iterator[re.Match[str]]:
    """The names among these that a run gives to its objects, in parts; others may lie there too."""
    return filter(None, map(_NAMES.fullmatch, names))


# --- heads ------------------------------------------------------------------------------------------------------------


def message_head(steps: int, begun: Basis | None, common: str | None) -> dict[str, Any]:
    """The head of the message of a worker; `common` is the hash of what it had in common before, where that is compared."""
    head = {"steps": steps, "begun": begun and begun._asdict()}
    return head if common is None else {**head, "state": common}


def commit_head(
    parts: Mapping[int, TakenPart],
    steps: Sequence[int],
    mean: str,
    closer: tuple[int, int],
    payload_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """The head of a commit. Args: `payload_bytes` has the size of the message of each slot, and of the mean."""
    named = {
        str(slot): {**part._asdict(), "begun": part.begun and part.begun._asdict()} for slot, part in parts.items()
    }
    return {
        "parts": named,
        "steps": steps,
        "mean": mean,
        "closer": closer,
        "time_s": round(time.time(), 3),
        "payload_bytes": payload_bytes,
    }


def part_in(life: Any, head: object, round: int, workers: int) -> TakenPart | None:
    """The part of a worker in a round, by its message; None for anything that a commit may not name."""
    match head:
        case {"steps": steps, "begun": None} if _are_counts(life, steps):
            return TakenPart(life, steps, None)
        case {
            "steps": steps,
            "begun": {"after": after, "donor": donor, "sha256": str(sha256), "steps": before},
        } if _are_counts(life, steps, after, donor, before) and before < steps and after <= round and donor < workers:
            begun = Basis(after, donor, sha256, before)
            return TakenPart(life, steps, begun) if re.fullmatch(_SHA256, sha256) else None
    return None


def commit_in(round: int, head: object, workers: int) -> Commit | None:
    """The commit of a round; None for anything that no worker of this run writes."""
    match head:
        case {
            "parts": dict(parts),
            "steps": list(steps),
            "mean": str(mean),
            "closer": [int(slot), int(life)],
            "time_s": int() | float() as time_s,
        }:
            numbers = {str(one) for one in range(workers)}
            named = {int(key): part for key, part in parts.items() if key in numbers and isinstance(part, dict)}
            read = {one: part_in(part.get("life"), part, round, workers) for one, part in sorted(named.items())}
            kept = {one: part for one, part in read.items() if part is not None}
            counts = _are_counts(*steps) and len(steps) == workers
            sane = 0 <= slot < workers and 0 <= life < 1 << 31 and 0 <= time_s < _MOST_TIME_S
            if 0 < len(kept) == len(parts) and counts and sane and re.fullmatch(_SHA256, mean):
                return Commit(round, kept, tuple(steps), mean, (slot, life), float(time_s))
    return None


def following(commit: Commit, messages: Mapping[int, Item]) -> Commit:
    """A commit with the parts in it as the messages themselves record them."""
    parts, steps = dict(commit.parts), [*commit.steps]
    for slot, item in messages.items():
        part = part_in(parts[slot].life, item.head, commit.round, len(steps))
        assert part is not None
        parts[slot], steps[slot] = part, part.steps
    return commit._replace(parts=parts, steps=tuple(steps))


def _are_counts(*numbers: object) -> bool:
    """Whether these are integers that a run may count to; the truth values of JSON are none."""
    return all(type(one) is int and 0 <= one < 1 << 62 for one in numbers)
