"""Audits a recorded run: trains its workers again, and compares hashes.

With `record.hash` a worker hashes its parameters, outer state and position in the data before each send. So the first
differing hash belongs to the faulty worker. Errors after a worker's last message show in its last checkpoint, if it is
kept.

A missing hash is not a match: a record without it is refused, unless its worker may have been stopped there.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError, DataError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics, store_file
from gossamer.record.lineage import Lineage, read_branches
from gossamer.record.machines import read_machines, this_machine
from gossamer.record.whole_files import worker_suffix
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.inputs import changed_code, must_have_inputs
from gossamer.run.bookkeeping.resume import lineage_of
from gossamer.run.config.resolve import recorded_run, settings_in
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.config.user_parts import UserParts
from gossamer.run.replay.repeat import Repeat
from gossamer.run.replay.script import Script, calm, outcomes_of, script_of
from gossamer.run.replay.stretches import Stretch, stretches
from gossamer.run.simulated.threads import WorkerThreads
from gossamer.run.worker.numerics import threads_of
from gossamer.run.worker.task import task_of
from gossamer.run.worker.worker import Worker
from gossamer.transport.processes.launch import one_device

log = logging.getLogger("gossamer")

Hashes = dict[int, dict[int, list[str]]]
"""By round and worker."""


class Difference(NamedTuple):
    """The first difference of a run from its repetition."""

    round: int
    worker: int
    what: str
    """The differing item: a sent message, or a checkpoint after the round."""


class Audit(NamedTuple):
    """The result of an audit."""

    first: int
    """The first compared round."""
    last: int
    snapshot: int
    """The round of the checkpoints from which the workers were trained again; 0 for the start."""
    compared: int
    """Hashes."""
    difference: Difference | None


def audit(
    folder: Path,
    *,
    worker: int | None = None,
    rounds: tuple[int | None, int | None] = (None, None),
    parts: UserParts | None = None,
) -> Audit:
    """Trains the workers of the run in a folder again, from their newest common checkpoints, and compares hashes.

    Args:
        worker: compare only this worker; all are trained.
        rounds: the first and the last round to compare, from 0; by default all recorded ones.
        parts: the user's parts, if the run names none that can be imported.
    Raises: ConfigError for a run that cannot be repeated here or has no hashes; DataError for a record that contradicts
        itself.
    Cost: as a simulation of the rounds from the checkpoints on.
    """
    changed_code(settings_in(folder), folder, "repeat", speaks=False)
    real = any(folder.glob("metrics-[0-9]*.jsonl"))
    run = _repeatable(recorded_run(folder, parts, real=real), folder, real=real)
    recorded = _hashes(folder, in_parts=real and max(run.processes) > 1)
    first, last = _asked_for(recorded, rounds, worker, run.workers)
    some = _stretches(run, folder, real=real)
    ends = max(one.run.rounds for one in some)
    _must_be_of_this_run(recorded, folder, run.workers, ends, real=real)
    lives, lineage, device = outcomes_of(folder), lineage_of(run, folder), one_device(run.loop.device)
    if lives:
        script = script_of(lives, run.in_rounds, ends, run.seed, folder)
    else:
        script = calm(run.timetable, run.workers, max(recorded) + 1)
    sound = _sound_checkpoints(folder, sorted(script.lives), lineage)
    _must_be_whole(recorded, folder, script, sound, range(first, last + 1), worker, logged=bool(lives))
    snapshot = next(q for q in _candidates(sound, first) if _usable(script, q, sound))
    task, threads = task_of(run), threads_of(run, folder)
    must_have_inputs(run, task, folder, "repeat")
    worker_threads, like = WorkerThreads(device, run, threads), Probe(run, task, device).x
    repeat = Repeat(some, task, script, folder, like, logged=bool(lives), threads=threads)
    repeat.restore(folder, snapshot, lineage)
    compared, difference = 0, None
    with worker_threads.opened():
        for round, reports in repeat.rounds(worker_threads.each, snapshot, last):
            # Taken in every round, as a worker keeps its hashes until they are.
            taken = [(one, one.hashes()) for one, _ in reports]
            repeated = {one.index: (one, hashes) for one, hashes in taken if worker in (None, one.index)}
            if round < first:
                continue
            hashes = {i: some for i, some in recorded.get(round, {}).items() if i in repeated}
            compared += sum(map(len, hashes.values()))
            overruled = script.turns[round].overruled
            saved = [one for one, _ in repeated.values() if one.index not in overruled]
            difference = _difference(round, hashes, {i: some for i, (_, some) in repeated.items()}) or _spoilt(
                round, saved, folder, lineage, sound
            )
            if difference is not None:
                break
    return Audit(first, last, snapshot, compared, difference)


def _asked_for(
    recorded: Hashes, rounds: tuple[int | None, int | None], worker: int | None, workers: int
) -> tuple[int, int]:
    """The first and the last round to compare. Raises: ConfigError for rounds and a worker that are not recorded."""
    first, last = (its if one is None else one for one, its in zip(rounds, (min(recorded), max(recorded)), strict=True))
    if not 0 <= first <= last <= max(recorded) or not (worker is None or 0 <= worker < workers):
        raise ConfigError(
            f"rounds {first}..{last} of {'all workers' if worker is None else f'worker {worker}'} were asked for, and recorded "
            f"are rounds {min(recorded)}..{max(recorded)} of workers 0..{workers - 1}; name some of these"
        )
    return first, last


def _repeatable(run: ResolvedRun, folder: Path, *, real: bool) -> ResolvedRun:
    """The run, with hashes. Raises ConfigError, with the reason, for one that cannot be repeated here."""
    here = this_machine()

    def refuse(why: str, instead: str) -> ConfigError:
        return ConfigError(f"the run in '{folder}' cannot be audited: {why}; {instead}")

    if run.kind == "server":
        raise refuse(
            "a run with a server has no rounds of hashes",
            f"gossamer simulate RUN.toml --replay {quote(str(folder))} computes a real one again from its record",
        )
    if run.event_driven:
        raise refuse(
            f"it is asynchronous ({run.kind}) and records no hashes",
            f"simulate it again and compare, a real one with --replay {quote(str(folder))}",
        )
    if run.loop.adapt:
        raise refuse("run.adapt chose its local steps by seconds, which are not repeated", "set run.adapt = false")
    if real and run.loop.reduction == "all_reduce":
        raise refuse(
            "run.reduction is 'all_reduce', whose order of summation is the backend's", "use run.reduction = 'ordered'"
        )
    if run.loop.batched > 1:
        raise refuse(
            f"run.batched is {run.loop.batched}, so that several workers were computed at once, and an audit trains each alone, "
            "which may round otherwise",
            "set run.batched = 1",
        )
    machines = {one.machine for one in read_machines(folder)}
    for kind in ("torch", "processor"):
        if len(values := sorted({str(getattr(one, kind)) for one in machines})) > 1:
            raise refuse(f"its workers had different {kind} ({', '.join(values)})", "audit runs of equal machines")
    for one in machines:
        if (one.torch, one.processor) != (here.torch, here.processor):
            raise refuse(
                f"it was computed by torch {one.torch} on {one.processor} and here are torch {here.torch} and {here.processor}",
                "audit it where it was computed",
            )
    return replace(run, record=replace(run.record, hash=True))


def _stretches(run: ResolvedRun, folder: Path, *, real: bool) -> list[Stretch]:
    """The stretches of a run, with hashes enabled in each."""
    return [Stretch(first, replace(one, record=run.record)) for first, one in stretches(run, folder, real=real)]


def _hashes(folder: Path, *, in_parts: bool) -> Hashes:
    """The recorded hashes of each worker. Invalid ones match none.

    Args: `in_parts` is whether no process had a whole worker.
    Raises: ConfigError where there are none; DataError for a round with two.
    """
    by_round: Hashes = {}
    for line in read_metrics(folder):
        match line:
            case {"kind": "train", "worker": int(worker), "round": int(round), "hashes": some} if some is not None:
                recorded_hashes = [str(one) for one in some] if isinstance(some, list) else [f"no list: {some!r:.60}"]
                if by_round.setdefault(round, {}).setdefault(worker, recorded_hashes) != recorded_hashes:
                    raise DataError(
                        f"'{folder}' has two lines of worker {worker} in round {round} with other hashes, and a run writes "
                        "one; restore its metrics as the run wrote them"
                    )
            case _:
                pass
    if not by_round and in_parts:  # which refuses to record them
        again = f"--replay {quote(str(folder))}" if read_branches(folder) else quote(str(folder / "run.toml"))
        raise ConfigError(
            f"'{folder}' has no hashes to compare, as each process has a part of a worker and a hash is of a whole one; compute "
            f"the run again with gossamer simulate {again} --out AGAIN, and compare the losses of gossamer evaluate"
        )
    if not by_round:
        raise ConfigError(
            f"'{folder}' has no hashes to compare; train it again with --set record.hash=true, which records them"
        )
    return by_round


def _must_be_of_this_run(recorded: Hashes, folder: Path, workers: int, rounds: int, *, real: bool) -> None:
    """Raises DataError for hashes of rounds or workers that the run does not have, and without a record of the machines."""
    owners = sorted({worker for some in recorded.values() for worker in some})
    if max(recorded) >= rounds or owners[-1] >= workers:
        raise DataError(
            f"'{folder}' has hashes up to round {max(recorded)} and worker {owners[-1]}, and its run has rounds 0..{rounds - 1} "
            f"of workers 0..{workers - 1}; restore its run.toml and metrics as the run wrote them"
        )
    simulated = folder / "machines.jsonl"
    files = [folder / f"machines{worker_suffix(one)}.jsonl" for one in owners]
    # Without it an audit on another machine would report false differences.
    missing = [one for one in files if not any(path.is_file() and path.stat().st_size for path in (one, simulated))]
    if missing:
        raise DataError(
            f"'{missing[0] if real else simulated}' is missing or empty, and says by which processor and "
            "version of torch the hashes were computed; bring it back, as others round differently"
        )


def _must_be_whole(
    recorded: Hashes,
    folder: Path,
    script: Script,
    sound: "_Sound",
    rounds: Iterable[int],
    worker: int | None,
    *,
    logged: bool,
) -> None:
    """Reports hashes missing because a worker was stopped. Raises: DataError for one that is missing elsewhere."""
    stopped, some = dict[int, int](), False
    for round in rounds:
        there = script.turns[round].outcomes if round in script.turns else ()
        for slot in sorted(slot for slot in there if worker in (None, slot)):
            if slot in recorded.get(round, {}):
                some = True
            elif not _may_be_stopped(slot, round, recorded, script, sound, logged=logged):
                # A worker in a store has the outcomes of all, and the hashes of its slot alone.
                away = store_file(folder).exists() and not any(slot in some for some in recorded.values())
                file, machines = (f"{name}{worker_suffix(slot)}.jsonl" for name in ("metrics", "machines"))
                bring = f"copy {file} and {machines} from its --out" if away else f"restore {file} as the run wrote it"
                raise DataError(
                    f"'{folder}' has no hash of worker {slot} in round {round}, though this worker ended that round; {bring}, or "
                    "compare others with --worker and --rounds"
                )
            else:
                stopped.setdefault(slot, round)
    if not some:
        raise ConfigError(
            f"'{folder}' has no hashes of the rounds and the worker that were asked for, which may have been stopped before; "
            "name others with --worker and --rounds"
        )
    for slot, round in stopped.items():
        log.warning(
            "worker %d has recorded no hash of round %d, where it may have been stopped: nothing is compared there",
            slot,
            round,
        )


def _may_be_stopped(slot: int, round: int, recorded: Hashes, script: Script, sound: "_Sound", *, logged: bool) -> bool:
    """Whether a worker that was killed leaves no hash of this round.

    An outcome is written before the hash, and a checkpoint after it.
    """
    if logged:
        return any(
            life.ended is None and life.rounds[-1:] and life.rounds[-1].round == round for life in script.lives[slot]
        )
    later = any(r > round and slot in some for r, some in recorded.items())
    return not later and not any(one == slot and r > round for one, r in sound)


_Sound = Set[tuple[int, int]]
"""Sound local checkpoints, by slot and round."""


def _sound_checkpoints(folder: Path, slots: Sequence[int], lineage: Lineage) -> _Sound:
    """The sound checkpoints of a run; reports damaged ones. Cost: reads them."""
    store, sound = folder / "checkpoints", set[tuple[int, int]]()
    for slot in slots:
        for round, known in checkpoint.generation_faults(store, slot, lineage).items():
            if (fault := known or checkpoint.fault(store, round, slot, lineage)) is None:
                sound.add((slot, round))
            else:
                log.warning("the checkpoint of worker %d after round %d is left out: %s", slot, round, fault.why)
    return sound


def _candidates(sound: _Sound, first: int) -> Iterator[int]:
    """Rounds of which some worker has a sound checkpoint, newest first; at last the start."""
    yield from sorted({round for _, round in sound if 0 < round <= first}, reverse=True)
    yield 0


def _usable(script: Script, round: int, sound: _Sound) -> bool:
    """Whether the checkpoints needed to follow the script from a round are here and sound."""
    needed = {(slot, round) for slot in script.running(round)}
    needed |= {(slot, after) for slot, after in script.taken_over(round) if 0 < after <= round}
    return needed <= sound or round == 0


def _difference(
    round: int, recorded_hashes: dict[int, list[str]], repeated_hashes: dict[int, list[str]]
) -> Difference | None:
    """The first differing hash, in sending order."""
    for k in range(max(map(len, repeated_hashes.values()), default=0)):
        for worker in sorted(recorded_hashes):
            if recorded_hashes[worker][k : k + 1] != repeated_hashes[worker][k : k + 1]:
                return Difference(round, worker, "what it sent")
    return None


def _spoilt(round: int, workers: Sequence[Worker], folder: Path, lineage: Lineage, sound: _Sound) -> Difference | None:
    """The first worker whose own checkpoint after this round holds another state, where it is here and sound."""
    for worker in workers:
        if (worker.index, round + 1) in sound:
            saved = checkpoint.load(folder / "checkpoints", round + 1, worker.index, lineage)
            if not isinstance(saved, dict) or not _are_equal(saved, worker.state()):
                return Difference(round, worker.index, "its checkpoint")
    return None


def _are_equal(saved: Mapping[Any, Any], repeated: Mapping[str, Any]) -> bool:
    """Whether two states have the same parameters, outer state and inner optimizer, bit for bit.

    Ignores the position in the data, which is shared here, and messages in flight, which elastic workers do not take
    over.
    """
    trees, tensors = list[Any](), list[dict[str, Tensor]]()
    for state in (saved, repeated):
        tensors.append({})
        trees.append(checkpoint.encoded([state.get(key) for key in ("x", "outer", "inner")], "state", tensors[-1]))
    saved_tensors, repeated_tensors = tensors
    return trees[0] == trees[1] and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(_bits(a), _bits(b))
        for a, b in zip(saved_tensors.values(), repeated_tensors.values(), strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, so that NaN equals itself."""
    return tensor.reshape(-1).view(torch.uint8)
