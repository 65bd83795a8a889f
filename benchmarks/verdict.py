"""What `chaos.py` checks of a trial, from what the processes have noted and the run has recorded."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from fleet import Process

from gossamer.errors import CheckpointError
from gossamer.record import checkpoint
from gossamer.record.logs.outcomes import Life, RoundOutcome, read_outcomes
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import RunConfig, digest


class Fault(NamedTuple):
    """Something that was done to processes."""

    time_s: float
    what: str
    numbers: list[int]
    """Of the processes, as they were started."""


class Seen(NamedTuple):
    """What remains of a trial."""

    config: RunConfig
    folders: list[Path]
    """The run folder, and those of workers with a disk of their own."""
    processes: list[Process]
    faults: list[Fault]


class Join(NamedTuple):
    """How a newcomer began."""

    ready_s: float
    """From the moment that it was ready, before its first connection for a state, to its first inner step."""
    start_s: float
    """From the start of its process until it was ready."""
    own: bool
    """Whether it went on with its own checkpoint."""
    hash_is_donors: bool


def pauses(seen: Seen, fault: Fault) -> list[float]:
    """For each process that a fault did not hit: the seconds from the fault to its next inner step, and in the worst of the
    waits that began within a timeout after it."""
    found: list[float] = []
    until_s = fault.time_s + seen.config.run.timeout_s
    hit = {number for one in seen.faults for number in one.numbers if one.time_s <= until_s}
    for number, process in enumerate(seen.processes):
        marks = [mark for mark in process.marks if mark.what in ("train", "trained")]
        if number in hit or not marks or marks[0].time_s > fault.time_s:
            continue
        spans = [(a.time_s, b.time_s) for a, b in pairwise(marks) if a.what == "trained" and b.what == "train"]
        lasts = [b - max(a, fault.time_s) for a, b in spans if b > fault.time_s and a < until_s]
        if lasts:
            found.append(max(lasts))
    return found


def joins(seen: Seen) -> list[Join]:
    """How those began that joined a running run."""
    found: list[Join] = []
    lives = _lives(seen.folders)
    for process in seen.processes[seen.config.workers :]:
        ready, first = process.last_mark("ready"), next((m for m in process.marks if m.what == "train"), None)
        if ready is None or first is None or process.resumes:
            continue
        begun = [life.begun for life in lives.get(first.slot, []) if life.begun.round == first.round]
        own = not begun or not begun[-1].sha256
        kept = [(m.sha256, m.x) for one in seen.processes if one is not process for m in one.marks if m.what == "kept"]
        same = bool(begun) and (begun[-1].sha256, first.x) in kept
        found.append(Join(first.time_s - ready.time_s, ready.time_s - process.started_s, own, same))
    return found


def problems(seen: Seen) -> list[str]:
    """Everything in the records that must not be, in sentences."""
    lives, m = _lives(seen.folders), resolve(seen.config, real=True).in_rounds
    found = [*_failures(seen), *_unequal(seen, lives, m), *_twice(lives, m)]
    for slot, own in lives.items():
        if not own or own[-1].ended is None or own[-1].ended.why != "finished":
            continue
        try:
            states = [
                checkpoint.load(f / "checkpoints", seen.config.length.rounds, slot, digest(seen.config))
                for f in seen.folders
                if seen.config.length.rounds in checkpoint.rounds(f / "checkpoints", slot)
            ]
        except CheckpointError as error:
            found.append(f"the last checkpoint of slot {slot} cannot be read: {error}")
            continue
        if not states:
            found.append(f"slot {slot} finished and has no checkpoint of the last round")
        elif not bool(states[0]["x"].isfinite().all()):
            found.append(f"the model of slot {slot} is not finite")
    return found


def final_hashes(seen: Seen) -> dict[int, str]:
    """The hash of each slot's parameters after the last round, as its process noted it."""
    found: dict[int, str] = {}
    for process in seen.processes:
        mark = process.last_mark("kept")
        if mark is not None and mark.round == seen.config.length.rounds:
            found[mark.slot] = mark.x
    return found


def _lives(folders: Sequence[Path]) -> dict[int, list[Life]]:
    found: dict[int, list[Life]] = {}
    for folder in folders:
        for slot, own in read_outcomes(folder).items():
            found.setdefault(slot, []).extend(own)
    return {slot: sorted(own, key=lambda life: life.begun.round) for slot, own in found.items()}


def _failures(seen: Seen) -> list[str]:
    found: list[str] = []
    spared = {number for fault in seen.faults if fault.what in ("kill", "disk") for number in fault.numbers}
    for number, process in enumerate(seen.processes):
        text = process.log.read_text(errors="replace") if process.log.exists() else ""
        if "Traceback" in text:
            found.append(f"process {number} (slot {process.slot}) wrote a traceback: {text.strip().splitlines()[-1]}")
        if number not in spared and process.code != 0:
            last = text.strip().splitlines()[-1:] or [""]
            found.append(f"process {number} (slot {process.slot}) ended with code {process.code}: {last[0]}")
        if (
            number in spared
            and process.code == 0
            and any(f.what == "disk" and number in f.numbers for f in seen.faults)
        ):
            found.append(f"process {number} ended with code 0 although its disk was full")
    return found


def _unequal(seen: Seen, lives: dict[int, list[Life]], m: Method) -> list[str]:
    """Rounds that two workers recorded differently."""
    found: list[str] = []
    log = {slot: {one.round: one for life in own for one in life.rounds} for slot, own in lives.items()}
    everyone = frozenset(range(seen.config.workers))
    for i, rounds in log.items():
        for r, mine in rounds.items():
            alive = everyone if mine.alive is None else mine.alive
            if m.rule.needs == "everyone":
                for j in alive - {i}:
                    theirs = log.get(j, {}).get(r)
                    if theirs is not None and (everyone if theirs.alive is None else theirs.alive) != alive and i < j:
                        found.append(f"round {r} was closed over different sets by workers {i} and {j}")
                continue
            for j in set(m.topology.mixing(r, alive).receives_from(i)) - mine.lost:
                theirs = log.get(j, {}).get(r)
                if theirs is not None and not _may_be(i, j, theirs, everyone, m):
                    found.append(f"round {r}: worker {i} counted the exchange with worker {j}, which missed it")
    return found


def _may_be(i: int, j: int, theirs: RoundOutcome, everyone: frozenset[int], m: Method) -> bool:
    """Whether j's record of a round agrees with an exchange with i that i has counted."""
    peers = m.topology.mixing(theirs.round, everyone if theirs.alive is None else theirs.alive).receives_from(j)
    return i in theirs.unsure or (i in peers and i not in theirs.lost)


def _twice(lives: dict[int, list[Life]], m: Method) -> list[str]:
    """Inner steps of a slot that were taken again although a worker that lived on held their result."""
    found: list[str] = []
    everyone = frozenset(range(max(lives, default=0) + 1))
    log = {slot: {one.round: (one, life) for life in own for one in life.rounds} for slot, own in lives.items()}

    def holds(j: int, slot: int, round: int) -> bool:
        theirs, life = log.get(j, {}).get(round, (None, None))
        if theirs is None or life is None or slot in theirs.lost:
            return False
        return life.ended is not None or life.rounds[-1].round > round + 1  # else it died with what it held

    for slot, own in lives.items():
        for before, after in pairwise(own):
            held = before.begun.steps
            for one in before.rounds:
                alive = everyone if one.alive is None else one.alive
                mean = m.rule.needs == "everyone"
                peers = alive - {slot} if mean else set(m.topology.mixing(one.round, alive).receives_from(slot))
                if any(holds(j, slot, one.round) for j in peers - one.lost):
                    held = one.steps
            if (has := after.begun.steps) < held:
                found.append(
                    f"slot {slot}: the process of round {after.begun.round} began with {has} steps, and others held {held}"
                )
    return found
