"""The choice of the round of a run to resume from, or to score, for every kind of run.

For a round an owner (a worker, or the server) has no checkpoint, a sound one, or one with a fault
(`gossamer.record.fault`), and these are kept apart: a run with unreadable checkpoints does not restart over them, and
one that resumes from an older round reports why.

A worker of an elastic run that had died, or had not joined yet, has no checkpoint of a round and never will. One that
lags has none either, but will. The membership views recorded in the round distinguish these
(`gossamer.record.logs.outcomes`).
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple

from gossamer.errors import CheckpointError, ConfigError, GossamerError, PeerError
from gossamer.record import checkpoint
from gossamer.record.fault import Fault, FaultKind, decode_fault
from gossamer.record.folder import read_metrics
from gossamer.record.jsonl import json_lines
from gossamer.record.lineage import Lineage
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.record.progress import say
from gossamer.record.whole_files import worker_suffix
from gossamer.run.bookkeeping.inputs import must_have_inputs, why_settings_differ
from gossamer.run.bookkeeping.resume import History, history, lineage_of
from gossamer.run.config.document import with_settings
from gossamer.run.config.pipeline import LostStage, misfits
from gossamer.run.config.resolve import resolve_document, settings_in
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.worker.stages.checkpoints import Store, partition_of
from gossamer.run.worker.task import Task
from gossamer.settings.schema import parse_toml, toml_value
from gossamer.settings.user_code import is_code

log = logging.getLogger("gossamer")

Held = Mapping[int, frozenset[int] | None]
"""The rounds of which a worker has a checkpoint, each with the participants in its view; None for all."""
_MOST_SAID = 64
"""The most rounds that a worker reports to the others, newest first."""


class KeptRounds(NamedTuple):
    """The checkpoints of an owner."""

    faults: Mapping[int, Fault | None]
    """By round with any file: the fault of its checkpoint; None if sound."""
    due: int = 0
    """The newest round whose checkpoint it must have written, by its record; 0 for none."""
    seen: Held = MappingProxyType({})
    """The participants of each round of an elastic run."""

    @property
    def whole(self) -> Held:
        """Its rounds with sound checkpoints."""
        return {round: self.seen.get(round) for round, fault in self.faults.items() if fault is None}


class ChosenRound(NamedTuple):
    """The chosen round."""

    round: int
    """0 if none."""
    kept: Mapping[int, KeptRounds]
    """The checkpoints by owner, with faults discovered on reading."""
    skipped: dict[int, tuple[Fault, ...]]
    """The newer rounds, newest first, each with the reason for skipping it."""

    @property
    def damaged(self) -> bool:
        """Whether a newer, unusable checkpoint exists; its round is set aside then."""
        newer = [fault for one in self.kept.values() for r, fault in one.faults.items() if r > self.round]
        return any(fault is not None and fault.kind != FaultKind.ABSENT for fault in newer)

    def tell(self, who: str = "") -> None:
        """Warns of skipped rounds, and of damaged checkpoints of this one; `who` begins each sentence."""
        for round, faults in self.skipped.items():
            instead = f"round {self.round} counts" if self.round else "no older one is sound"
            log.warning("%sround %d is skipped: %s; %s", who, round, _in_words(faults), instead)
        for owner, one in self.kept.items():
            if self.round and (fault := one.faults.get(self.round)) is not None:
                log.warning("%sworker %d has no sound checkpoint of round %d: %s", who, owner, self.round, fault.why)


def _in_words(faults: Sequence[Fault]) -> str:
    more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
    return " and ".join(fault.why for fault in faults[:4]) + more


# --- what is there ----------------------------------------------------------------------------------------------------


def kept_by(
    store: Store, owners: Iterable[int], lineage: Lineage, before: RunSettings | None = None
) -> dict[int, KeptRounds]:
    """The checkpoints of each owner in a run folder. If the log of outcomes is lost, all count as participants.

    Args: `before` are the settings with which the files were written, if different.
    Raises: DataError for a spoilt record.
    Cost: reads the metrics.
    """
    folder, lives = store.folder, read_outcomes(store.folder)
    owners = [*owners]
    due = _due(before or store.run, folder, owners)
    kept: dict[int, KeptRounds] = {}
    for owner in owners:
        owner_lives = lives.get(owner, [])
        # A worker that took over the state of a round knows only of itself, not that all took part.
        seen: dict[int, frozenset[int] | None] = {
            life.begun.after: frozenset({owner}) for life in owner_lives if life.begun.sha256
        }
        seen |= {one.round + 1: one.alive for life in owner_lives for one in life.rounds}
        # A worker that leaves before the end of the first round saves round 0, to show that its slot is free.
        kept[owner] = KeptRounds({r: fault for r, fault in store.faults(owner, lineage).items() if r}, due[owner], seen)
    return kept


def _due(run: RunSettings, folder: Path, owners: Iterable[int]) -> dict[int, int]:
    """The newest round whose checkpoint each owner must have written, from its metrics.

    A local phase of round r is recorded after the checkpoint due after r rounds was saved.
    """
    trained: dict[int, int] = {}
    for line in read_metrics(folder):
        if line["kind"] == "train" and isinstance(line.get("worker"), int):
            trained[line["worker"]] = max(line["round"], trained.get(line["worker"], 0))
    if _is_simulation(folder):  # which saves all owners together
        trained = dict.fromkeys(owners, max(trained.values(), default=0))
    elif run.kind == "server":
        events = folder / f"events{worker_suffix(run.workers)}.jsonl"
        lines = json_lines(events) if events.exists() else ()
        passed = max((r for _, line in lines if isinstance(r := line.get("round"), int)), default=0)
        # A server saves during the next rounds, and finishes before the next checkpoint is due.
        trained[run.workers] = _newest_due(run, passed) - 1
    return {owner: _newest_due(run, trained.get(owner, 0)) for owner in owners}


def _newest_due(run: RunSettings, passed: int) -> int:
    every, last = run.loop.checkpoint_every, min(passed, run.rounds)
    return next((r for r in range(last, 0, -1) if run.due(every, r)), 0)


def encode_kept(kept: KeptRounds) -> list[Any]:
    """A worker's checkpoints as JSON, to report to the others."""
    newest = sorted(kept.faults.items())[-_MOST_SAID:]
    seen = {r: sorted(slots) for r, slots in kept.seen.items() if slots is not None}
    return [kept.due, [[r, fault and fault.encoded, seen.get(r)] for r, fault in newest]]


def decode_kept(worker: int, value: object) -> KeptRounds:
    """The checkpoints reported by another worker. Raises PeerError for anything else."""
    match value:
        case [int(due), [*rounds]] if 0 <= due < 1 << 31:
            decoded = [_decode_round(one) for one in rounds]
            known = [one for one in decoded if one is not None]
            if len(known) == len(decoded):
                faults = {r: fault for r, fault, _ in known}
                return KeptRounds(faults, due, {r: seen for r, _, seen in known})
    raise PeerError(
        f"worker {worker} does not say which checkpoints it has ({value!r:.60}); install the same gossamer version everywhere"
    )


def _decode_round(value: object) -> tuple[int, Fault | None, frozenset[int] | None] | None:
    match value:
        case [int(r), fault, None | [*_] as slots] if 0 < r < 1 << 31 and all(
            isinstance(one, int) for one in slots or ()
        ):
            decoded = decode_fault(fault)
            if (decoded is None) == (fault is None):
                return r, decoded, None if slots is None else frozenset(one for one in slots if isinstance(one, int))
    return None


def decode_faults(received: Sequence[object]) -> list[Fault | None]:
    """The faults of one round's checkpoints as reported by each worker. Raises PeerError for anything else."""
    faults = [decode_fault(one) for one in received]
    for worker, (one, fault) in enumerate(zip(received, faults, strict=True)):
        if one is not None and fault is None:
            raise PeerError(
                f"worker {worker} does not say what is wrong with its checkpoint ({one!r:.60}); install the same gossamer "
                "version everywhere"
            )
    return faults


def together(processes: Mapping[str, KeptRounds]) -> KeptRounds:
    """The checkpoints of a worker in several processes, by their names: a round is complete if all of them have it.

    >>> has = {"stage 0 of worker 3": KeptRounds({10: None, 20: None}), "stage 1 of worker 3": KeptRounds({10: None})}
    >>> together(has).faults[20].why
    'stage 1 of worker 3 has no checkpoint of it'
    """
    absent = {name: Fault(FaultKind.ABSENT, f"{name} has no checkpoint of it") for name in processes}
    rounds = sorted({r for one in processes.values() for r in one.faults})
    by_round = {r: [one.faults.get(r, absent[name]) for name, one in processes.items()] for r in rounds}
    return KeptRounds(
        {r: next(filter(None, each), None) for r, each in by_round.items()}, max(one.due for one in processes.values())
    )


def lost_stages(folder: Path) -> tuple[LostStage, ...]:
    """The stages that a run has lost, and those without any file here, lost after the newest round of the others.

    Without the latter if they cannot be recovered, as the first and the last. Raises: ConfigError, DataError.
    """
    if not os.path.lexists(folder / "run.toml"):
        return ()
    run, has = settings_in(folder), dict[tuple[int, int], set[int]]()
    lineage, known = lineage_of(run, folder), run.pipeline.lost
    # A stage may be lost twice: its files alone count.
    as_if_none = replace(run, pipeline=replace(run.pipeline, lost=()))
    for worker, parts in enumerate(run.processes if run.pipeline.stages > 2 else ()):
        for part in range(parts):
            faults = Store(as_if_none, folder, partition_of(run, worker), part).faults(worker, lineage)
            has[worker, part] = {round for round, fault in faults.items() if fault is None}
    left = [rounds for rounds in has.values() if rounds]
    after = max(set.intersection(*left), default=0) if left else 0
    gone = [LostStage(worker=w, stage=k, after=after) for (w, k), rounds in has.items() if after and not rounds]
    newly_lost = [one for one in gone if one not in known]
    if not newly_lost:
        return known
    pipeline = replace(run.pipeline, lost=(*known, *newly_lost))
    unfit = any(misfits(pipeline, run.model, run.data, run.workers, run.schedule))
    return known if unfit else pipeline.lost


def set_lost(lost: Sequence[LostStage]) -> str:
    """The value of --set that names lost stages.

    >>> set_lost([LostStage(worker=1, stage=1, after=60)])
    'pipeline.lost=[{worker = 1, stage = 1, after = 60}]'
    """
    tables = ("{" + ", ".join(f"{k} = {v!r}" for k, v in toml_value(one).items()) + "}" for one in lost)
    return f"pipeline.lost=[{', '.join(tables)}]"


# --- which round counts -----------------------------------------------------------------------------------------------


def choose_round(
    kept: Mapping[int, KeptRounds],
    pick: Callable[[Mapping[int, Held]], int],
    read: Callable[[int], Mapping[int, Fault | None]],
) -> ChosenRound:
    """The round to use, after reading all of its complete checkpoints and finding them sound.

    Args:
        pick: chooses among the rounds that each owner has; 0 for none.
        read: the faults in the content of a round's checkpoints, by owner.

    >>> kept = {0: KeptRounds({10: None, 20: None}), 1: KeptRounds({10: None, 20: None})}
    >>> changed = Fault(FaultKind.DAMAGED, "file 'x' has changed")
    >>> choice = choose_round(kept, newest_of_all, lambda round: {1: changed if round == 20 else None})
    >>> choice.round, choice.skipped[20][0].why
    (10, "file 'x' has changed")
    """
    kept = dict(kept)
    while round := pick({owner: one.whole for owner, one in kept.items()}):
        spoilt = {owner: fault for owner, fault in read(round).items() if fault and round in kept[owner].whole}
        if not spoilt:
            break
        for owner, fault in spoilt.items():
            kept[owner] = kept[owner]._replace(faults={**kept[owner].faults, round: fault})
    return ChosenRound(round, kept, _skipped(kept, round, absent=pick is newest_of_all))


def _skipped(kept: Mapping[int, KeptRounds], round: int, *, absent: bool) -> dict[int, tuple[Fault, ...]]:
    """The newer rounds, each with its damaged checkpoints; with `absent` also missing ones."""
    lacking = {one.due: owner for owner, one in kept.items() if one.due > max(one.faults, default=0)} if absent else {}
    newer = {r for one in kept.values() for r in one.faults if r > round} | {r for r in lacking if r > round}
    skipped: dict[int, tuple[Fault, ...]] = {}
    for r in sorted(newer, reverse=True):
        faults = tuple(fault for one in kept.values() if (fault := one.faults.get(r)) is not None)
        without = [owner for owner, one in kept.items() if r not in one.faults] if absent else []
        if without and not faults:
            faults = (Fault(FaultKind.ABSENT, f"worker {', '.join(map(str, without))} has no checkpoint of it"),)
        if faults:
            skipped[r] = faults
    return skipped


def newest_of_all(held: Mapping[int, Held]) -> int:
    """The newest round that all owners have; 0 for none.

    >>> newest_of_all({0: {10: None, 20: None}, 1: {10: None}})
    10
    """
    rounds = [set(one) for one in held.values()]
    return max(set.intersection(*rounds), default=0) if rounds else 0


def newest_of_any(held: Mapping[int, Held]) -> int:
    """The newest round that any owner has; 0 for none.

    >>> newest_of_any({0: {10: None, 20: None}, 1: {10: None}})
    20
    """
    return max((round for one in held.values() for round in one), default=0)


def round_to_resume(held: Mapping[int, Held], tolerance: int = 0) -> int:
    """The round from which an elastic run resumes; 0 if there is no checkpoint.

    The newest of which all participants have a checkpoint, so that an undisturbed run resumes bit for bit; else as
    `round_to_score`. Slots without any checkpoint, and empty slots, do not count.

    Args: `tolerance` is by how many rounds an earlier one may be preferred that more workers have, after they left one
        by one.

    >>> round_to_resume({0: {10: None, 20: None}, 1: {10: None}})
    10
    >>> round_to_resume({0: {10: None, 20: frozenset({0, 2})}, 1: {10: None}, 2: {10: None, 20: frozenset({0, 2})}, 3: {}})
    20
    >>> round_to_resume({0: {12: None}, 1: {12: None}, 2: {13: frozenset({2})}}, tolerance=2)
    12
    """
    owners = _owners(held)
    whole = max((r for r, having in owners.items() if _participants_of(held, r) <= having), default=0)
    near = [r for r in {whole, *_held_by_most(held)} if whole - tolerance <= r <= whole and r]
    return max(near, key=lambda r: (len(owners[r]), r), default=0) or round_to_score(held)


def round_to_score(held: Mapping[int, Held]) -> int:
    """The newest round of which most participants have a checkpoint, else the one that most have; 0 if there is none.

    >>> round_to_score({0: {10: None, 20: None}, 1: {10: None, 20: None}, 2: {10: None}, 3: {10: None}})
    10
    >>> round_to_score({0: {10: None, 20: None}, 1: {10: None, 20: None}, 2: {10: None}})
    20
    """
    owners = _owners(held)
    return max(_held_by_most(held), default=0) or max(owners, key=lambda r: (len(owners[r]), r), default=0)


def _held_by_most(held: Mapping[int, Held]) -> list[int]:
    return [r for r, having in _owners(held).items() if 2 * len(having) > len(_participants_of(held, r))]


def _owners(held: Mapping[int, Held]) -> dict[int, set[int]]:
    return {r: {slot for slot in held if r in held[slot]} for rounds in held.values() for r in rounds}


def _participants_of(held: Mapping[int, Held], round: int) -> set[int]:
    """The participants of the round, in the view of any owner of its checkpoint, restricted to slots with any checkpoint."""
    views = [rounds[round] for rounds in held.values() if round in rounds]
    having = {slot for slot, rounds in held.items() if rounds}
    return having if None in views else having & {slot for view in views if view is not None for slot in view}


# --- going on ---------------------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """The facts that decide the round from which a run resumes, the same in all of its processes."""

    kept: Mapping[int, KeptRounds]
    """The checkpoints by owner, including other machines."""
    read: Callable[[int], Mapping[int, Fault | None]]
    """As of `choose_round`."""
    pick: Callable[[Mapping[int, Held]], int] = newest_of_all
    speaks: bool = True
    """Whether this process reports skipped rounds, and the end of the run."""


def alone(store: Store, past: History | None, owners: Iterable[int]) -> Agreement:
    """The agreement of a process that has the checkpoints of all owners, without communication. Raises: as `kept_by`."""
    return Agreement({}, lambda round: {}) if past is None else _here(store, owners, past.lineage, past.before)


def _here(store: Store, owners: Iterable[int], lineage: Lineage, before: RunSettings | None = None) -> Agreement:
    """The checkpoints of these owners in a run folder. Args and Raises: as `kept_by`."""
    kept = kept_by(store, owners, lineage, before)
    having = lambda round: (owner for owner, one in kept.items() if round in one.whole)  # noqa: E731
    return Agreement(kept, lambda round: {owner: store.fault(round, owner, lineage) for owner in having(round)})


class Start(NamedTuple):
    """The start or resumption of a run."""

    store: Store
    past: History | None
    """The history; None for a run that starts."""
    choice: ChosenRound

    @property
    def round(self) -> int:
        """Completed rounds; 0 at the start."""
        return self.choice.round

    @property
    def cut(self) -> int | None:
        """The first round whose records are void; None where no records may exist."""
        return None if self.past is None else self.round

    def go_on(
        self,
        owners: Iterable[int],
        restore: Callable[[int, Lineage], None] = lambda owner, line: None,
        *,
        back_to: int | None = None,
        rewinds: bool = True,
    ) -> Lineage:
        """Resumes these owners from there, and returns the lineage of checkpoints from now on.

        Args:
            restore: restores an owner from its checkpoint of this round, given the lineage; not called at the start.
            back_to: the newest round that they keep, if not this one.
            rewinds: whether this process drops their newer checkpoints.
        Raises: OSError; as `restore`.
        """
        if self.past is None:
            return self.store.run.lineage
        # In this order, as a process may be killed at any line and the next start must see one history: the state is
        # restored, and saved under this digest, before newer checkpoints are dropped. These are dropped before the
        # branch is written, or they would count as part of it.
        owners, last = [*owners], self.round if back_to is None else back_to
        for owner in owners if self.round else ():
            restore(owner, self.past.lineage)
        for owner in owners if rewinds else ():
            checkpoint.rewind(self.store.path, last, owner, aside=self.choice._replace(round=last).damaged)
        return self.past.go_on(self.store.folder, self.round)


def begin_or_resume(store: Store, task: Task, past: History | None, agreement: Agreement) -> Start:
    """The start of a run, or its resumption from checkpoints: every driver calls it, and then `Start.go_on`.

    It does not change the folder.

    Raises: CheckpointError where there is no checkpoint to resume from, ConfigError when the run would end before it, DataError
        for a spoilt record or other text.
    Cost: reads the logs of the owners, and their checkpoints of the round.
    """
    if past is None:
        return Start(store, None, ChosenRound(0, agreement.kept, {}))
    _must_keep_rounds(past)
    _must_be_readable(store.folder, agreement.kept)
    choice = choose_round(agreement.kept, agreement.pick, agreement.read)
    if not choice.round and not (past.may_start and _may_start(past.before, choice.kept)):
        raise _none_counts(store, choice)
    _must_reach(past.run, choice.round)
    if agreement.speaks:
        choice.tell()
        warn_unverified(store, choice.round, agreement.kept)
    if choice.round:
        must_have_inputs(store.run, task, store.folder, "resume")
    if agreement.speaks and choice.round == store.run.rounds:
        say(ended(store.folder, choice.round))
    return Start(store, past, choice)


def _must_reach(run: RunSettings, round: int) -> None:
    if round > run.rounds:
        raise ConfigError(
            f"run.steps is {run.loop.steps}, which ends the run after round {run.rounds}, but it is at round {round} "
            f"already; set at least {run.timetable.begin(round)}"
        )


def _must_keep_rounds(past: History) -> None:
    """Raises ConfigError where new settings would change the rounds of a run, including completed ones."""
    if past.run.loop.shape is not None and past.before.timetable != past.run.timetable:
        raise ConfigError(
            "run.local_steps follows the learning rate of the whole run, and with the new settings rounds would begin at other "
            f"inner steps, also those that are over; leave {', '.join(past.changes)} as they were, or start with another --out"
        )


def must_end_later(run: RunSettings, folder: Path) -> None:
    """Refuses a `run.steps` below the round that a run resumes from, before processes are started that would each
    refuse.

    Raises: ConfigError, as `begin_or_resume` in each of them. Cost: none where no fewer steps are asked for than before.
    """
    past, store = history(run, folder), Store(run, folder)
    if run.rounds >= past.before.rounds:
        return
    here = _here(store, run.owners, past.lineage, past.before)
    any_counts = run.event_driven and run.kind != "server"
    pick = newest_of_any if any_counts else round_to_resume if run.loop.elastic else newest_of_all
    _must_reach(run, choose_round(here.kept, pick, here.read).round)


def warn_unverified(store: Store, round: int, owners: Iterable[int]) -> None:
    """Warns once if checkpoints of a round are of a version without a description of their state."""
    if unsaid := [owner for owner in owners if round and not store.says_what_it_is_of(round, owner)]:
        log.warning(
            "the checkpoints of worker %s after round %d in '%s' were saved by gossamer 0.1.0 or soon after, and say by their "
            "digest alone what they are of: rule, codec, schedule, topology and local steps could not be compared; the next "
            "ones say it",
            ", ".join(map(str, unsaid)),
            round,
            store.folder,
        )


def _must_be_readable(folder: Path, owners: Iterable[int]) -> None:
    """Raises DataError or OSError for a log that cannot be truncated, before any file is changed.

    Metrics and outcomes have been read by `kept_by`.
    """
    suffixes = {"", *map(worker_suffix, owners)}
    for path in sorted(folder.glob("*.jsonl")):
        kind = path.stem.partition("-")[0]
        if kind not in ("metrics", "outcomes") and path.stem.removeprefix(kind) in suffixes:
            for _ in json_lines(path):
                pass


def must_lose_nothing(store: Store, kept: Mapping[int, KeptRounds], before: RunSettings) -> None:
    """Raises CheckpointError where owners have checkpoints here, but the leader starts the run from the beginning."""
    if not _may_start(before, kept):
        newest = max((r for one in kept.values() for r in (*one.faults, one.due)), default=0)
        raise CheckpointError(
            f"the server begins the run from its start, but '{store.folder}' holds what worker {', '.join(map(str, kept))} kept "
            f"up to round {newest}; resume the server where its own checkpoints are, or give this worker another --out"
        )


def _may_start(run: RunSettings, kept: Mapping[int, KeptRounds]) -> bool:
    """Whether a restart loses no work: some have never saved, and all others have only the first checkpoint."""
    first = next(r for r in range(1, run.rounds + 1) if run.due(run.loop.checkpoint_every, r))
    return all(_has_never_saved(one) or one.faults.get(first, "") is None for one in kept.values())


def _has_never_saved(kept: KeptRounds) -> bool:
    begun = (FaultKind.UNFINISHED, FaultKind.ABSENT)
    return not kept.due and all(fault is not None and fault.kind in begun for fault in kept.faults.values())


def _none_counts(store: Store, choice: ChosenRound) -> CheckpointError:
    """The error for a folder without a usable round: reasons, sound parts and a remedy."""
    kept, where, absent = choice.kept, f"'{store.folder / 'checkpoints'}'", on_other_machines(choice.kept)
    if not choice.skipped:
        return CheckpointError(f"{where} has {_only_of_others(store, kept) or _NO_CHECKPOINTS}")
    if absent and len(absent) < len(kept) and not _is_simulation(store.folder):
        here = ", ".join(str(owner) for owner in kept if owner not in absent)
        return CheckpointError(
            f"{where} has checkpoints of worker {here} alone and needs those of all {len(kept)}; "
            f"{_how_to_collect(store.run, store.folder, absent)}"
        )
    whys = "; ".join(f"round {round}: {_in_words(faults)}" for round, faults in choice.skipped.items())
    if {fault.kind for faults in choice.skipped.values() for fault in faults} == {FaultKind.FOREIGN}:
        digests = {match[1] for match in re.finditer(r"has digest '(\w+)' but needs", whys)}
        now = settings_in(store.folder) if os.path.lexists(store.folder / "run.toml") else store.run
        newest = max(choice.skipped)
        first = f"round {newest}: {_in_words(choice.skipped[newest][:1])}"  # that of each worker would be a page
        return CheckpointError(
            f"no checkpoint in {where} is of this run ({first}); {why_settings_differ(store.folder, now, digests)}",
            FaultKind.FOREIGN,
        )
    sound = [f"that of worker {owner} after round {max(one.whole)}" for owner, one in kept.items() if one.whole]
    only = f", only {' and '.join(sound)} is" if sound else ""
    whose = "" if len(kept) == 1 else f" for all {len(kept)} workers"
    return CheckpointError(
        f"no checkpoint of {where} is sound{whose} ({whys}){only}; {_how_to_mend(store, kept)}, or start again with another "
        "--out"
    )


_NO_CHECKPOINTS = (
    "no checkpoints to resume from or to score; train past the first one, or start again with another --out"
)


def _only_of_others(store: Store, kept: Mapping[int, KeptRounds]) -> str:
    """What a folder has of workers that are not started, as on a machine whose worker had a later slot; empty if nothing."""
    others = [owner for owner in checkpoint.owners(store.folder / "checkpoints") if owner not in kept]
    if not others or others[-1] >= store.run.workers:
        return ""
    here, started = ", ".join(map(str, others)), ", ".join(map(str, kept))
    return (
        f"checkpoints of worker {here} and none of what is started, worker {started}; start "
        f"{'it' if len(others) == 1 else 'them'} too, with --local {others[-1] + 1}: a worker without a checkpoint takes the "
        "state of one that has it"
    )


def _how_to_mend(store: Store, kept: Mapping[int, KeptRounds]) -> str:
    """How a run can resume although checkpoints are damaged or lost."""
    run, folder = store.run, quote(str(store.folder))
    instead = "bring sound files back"
    if not _is_simulation(store.folder):
        instead += ", and the checkpoint folders of all machines together"
        if any(one.whole for one in kept.values()) and _may_be_elastic(run):
            instead += (
                ", resume from what is sound by adding --set run.elastic=true to the command that resumes the run"
            )
    elif _may_start(run, kept):
        file = quote(str(store.folder / "run.toml"))
        instead = f"start it again there with gossamer simulate {file} --out {folder} --resume auto"
    if run.kind == "rounds" and run.pipeline.stages > 2:
        lost = lost_stages(store.folder)
        instead += (
            f", continue from what others have of the lost stages by adding --set {quote(set_lost(lost))}"
            if len(lost) > len(run.pipeline.lost)
            else ", name a middle stage that is lost and the round in pipeline.lost, so that it resumes from what others have"
        )
    return instead


def _is_simulation(folder: Path) -> bool:
    """Whether one process on one machine writes all of a run folder."""
    return (folder / "metrics.jsonl").exists()


def on_other_machines(kept: Mapping[int, KeptRounds]) -> list[int]:
    """The owners of whom a folder has nothing at all, neither checkpoints nor a record that some were due."""
    return [owner for owner, one in kept.items() if not one.faults and not one.due]


def how_to_score(run: RunSettings, folder: Path) -> str:
    """What an evaluation of a run that has ended needs, as far as this folder shows, in words that follow a semicolon.

    Cost: reads the metrics.
    """
    scores = f"gossamer evaluate {quote(str(folder))} scores it"
    store = Store(run, folder)
    absent = on_other_machines(kept_by(store, run.owners, lineage_of(run, folder)))
    return f"{_how_to_collect(run, folder, absent)}, then {scores}" if absent else scores


def _how_to_collect(run: RunSettings, folder: Path, absent: Sequence[int]) -> str:
    """How the checkpoints of owners whose machines have folders of their own come into this one."""
    server = [owner for owner in absent if owner >= run.workers]
    whose = "the server" if server else f"worker {', '.join(map(str, absent))}"
    place = f"{quote(str(folder / 'checkpoints'))}/"
    return (
        f"the checkpoints of {whose} are on {'its machine' if len(absent) == 1 else 'their machines'}: bring them into this "
        f"folder, as with rsync -a HOST:{place} {place}"
    )


def _ends_equal(run: RunSettings) -> bool:
    """Whether all who took part in a round have the same model at its end, as after a mean over everyone."""
    if run.kind != "rounds" or run.model.own or is_code(f"{run.decisive['rule.name']}"):  # buffers of a model differ
        return False
    resolved = _resolved(run)
    return resolved is not None and resolved.in_rounds.equal_after_rounds


def _may_be_elastic(run: RunSettings) -> bool:
    """Whether the run could continue without the workers whose checkpoints are lost."""
    return run.kind == "rounds" and not run.loop.elastic and _resolved(run, {"run.elastic": True}) is not None


def _resolved(run: RunSettings, changes: Mapping[str, Any] = MappingProxyType({})) -> ResolvedRun | None:
    """The run with these changes, for real processes; None where it cannot be resolved."""
    try:
        return resolve_document(with_settings(parse_toml(run.document, "a run"), changes), run.parts, real=True)
    except GossamerError:
        return None


def newest_of_own(
    store: Store,
    owner: int,
    lineage: Lineage,
    before: RunSettings | None = None,
    read: Callable[[int], Fault | None] | None = None,
) -> ChosenRound:
    """The newest sound round of one owner, which resumes independently; reports damaged newer ones.

    Args: `before` as in `kept_by`; `read` returns the fault in the content of its checkpoint of a round.
    """
    here = _here(store, [owner], lineage, before)
    choice = choose_round(here.kept, newest_of_all, here.read if read is None else lambda r: {owner: read(r)})
    choice.tell(f"worker {owner}: ")
    warn_unverified(store, choice.round, [owner])
    return choice


def ended(folder: Path, rounds: int, *, kept: bool = True) -> str:
    """The message for a resumed run that had already ended, with its checkpoints `kept`."""
    scores = (
        f"gossamer evaluate {quote(str(folder))} scores it"
        if kept
        else f"gossamer report {quote(str(folder))} shows it"
    )
    return f"the run has ended after {rounds} rounds; {scores}"


def has_ended(run: RunSettings, folder: Path) -> bool:
    """Whether all owners have sound checkpoints of the last round here. Cost: reads them, if they exist."""
    store, lineage = Store(run, folder), lineage_of(run, folder)
    if not all(run.rounds in store.sources(owner, lineage) for owner in run.owners):
        return False
    return all(store.fault(run.rounds, owner, lineage) is None for owner in run.owners)


# --- scoring ----------------------------------------------------------------------------------------------------------


def to_evaluate(store: Store, lineage: Lineage, round: int | None) -> tuple[int, list[int]]:
    """The round of a run to score, and the owners with sound checkpoints of it here.

    Args: `round` is the requested one; None takes the newest of all owners, or of most for an elastic run.
    Raises: CheckpointError when there is none.
    Cost: reads these checkpoints.
    """
    run = store.run
    every = run.kind == "server" or not (run.loop.elastic or run.event_driven)
    here = _here(store, run.owners, lineage)
    pick = newest_of_all if every else round_to_score
    if round is not None:
        pick = lambda held: round if any(round in one for one in held.values()) else 0  # noqa: E731
    choice = choose_round(here.kept, pick, here.read)
    having = [owner for owner, one in choice.kept.items() if choice.round in one.whole]
    if round is not None and (not choice.round or (every and len(having) < len(choice.kept))):
        raise _cannot_be_scored(round, choice.kept, every=every)
    if not choice.round:
        raise _nothing_to_score(store, choice)
    choice.tell()
    warn_unverified(store, choice.round, having)
    _warn_of_missing(store, choice, having)
    return choice.round, having


def _nothing_to_score(store: Store, choice: ChosenRound) -> CheckpointError:
    """The reason why no round can be scored."""
    if store.run.record.keep_checkpoints or any(one.faults for one in choice.kept.values()):
        return _none_counts(store, choice)
    return CheckpointError(
        f"'{store.folder}' has no checkpoints, as its record.keep_checkpoints is false; gossamer report "
        f"{quote(str(store.folder))} shows its last validation, and its mean model is in the folder 'model' if record.export "
        "was true"
    )


def _warn_of_missing(store: Store, choice: ChosenRound, having: Sequence[int]) -> None:
    """Warns where the mean model is only that of owners `having` checkpoints of the chosen round."""
    those, kept = ", ".join(map(str, having)), choice.kept
    others = [owner for owner in kept if owner not in having]
    if others and _ends_equal(store.run):
        say(f"after round {choice.round} all workers are equal, so the mean model is that of worker {having[0]} alone")
        return
    views = [kept[owner].seen[choice.round] for owner in having if choice.round in kept[owner].seen]
    took_part = {i for view in views for i in (kept if view is None else view)}
    if absent := [owner for owner in on_other_machines(kept) if owner in took_part or not views]:
        log.warning(
            "the mean model is that of worker %s alone, while others %s in round %d; %s",
            those,
            "took part" if views else "may have taken part",
            choice.round,
            _how_to_collect(store.run, store.folder, absent),
        )
    if missing := [owner for owner, one in kept.items() if one.whole and owner not in having]:
        log.warning(
            "round %d has no checkpoint of worker %s; the mean model is that of worker %s",
            choice.round,
            ", ".join(map(str, missing)),
            those,
        )


def _cannot_be_scored(round: int, kept: Mapping[int, KeptRounds], *, every: bool) -> CheckpointError:
    """The reason why the requested round cannot be scored."""
    having = {r: [i for i, one in kept.items() if r in one.whole] for one in kept.values() for r in one.faults}
    complete = sorted(r for r, some in having.items() if some and (len(some) == len(kept) or not every))
    whys = [fault.why for one in kept.values() if (fault := one.faults.get(round)) is not None]
    what = "has no checkpoint of any worker" if not every else "lacks some checkpoints"
    return CheckpointError(
        f"round {round} {what if not whys else 'is damaged: ' + ' and '.join(whys)}; complete are: "
        f"{', '.join(map(str, complete)) or 'none'}; name one of these"
    )
