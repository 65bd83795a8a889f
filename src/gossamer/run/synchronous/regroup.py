"""Workers in stages that lose and gain processes: `gossamer train --stages auto` under torchrun.

torchrun starts all processes again whenever one dies or arrives, each time numbered from 0. Before they train they meet
here, and agree on the stages that so many processes make, on their layers, and on the newest round of which every stage
of some partition is on any disk; each is sent the checkpoints that it lacks. From there on this is a run that is
resumed with other stages, whose changes `branches.json` has: the log that a replay follows.

While they train, each process keeps a copy of the checkpoints of the stage before its own, so that one process of each
worker may be lost with its disk at any time.

Source: the snapshots of ElasWave, arXiv 2510.00606, in a ring.
"""

import contextlib
import json
import os
import platform
import re
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field, with_config
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import TypedDict

from gossamer.errors import ConfigError, DataError, PeerError, first_line
from gossamer.record import checkpoint
from gossamer.record.fault import FaultKind
from gossamer.record.lineage import read_branches
from gossamer.record.progress import say
from gossamer.record.whole_files import atomic_write, make_folder
from gossamer.run.bookkeeping.resume import history
from gossamer.run.config.pipeline import cuts_of, work_of_layers
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.worker.stages.checkpoints import Partition, Store, partitions_of
from gossamer.settings.schema import RECORD, Records
from gossamer.transport.alike import short_settings
from gossamer.transport.processes.backend import FOREVER, gloo_group
from gossamer.transport.processes.board import Board
from gossamer.transport.processes.interfaces import use_interface_towards
from gossamer.transport.processes.launch import agree, device_of, intra_op_threads, launched
from gossamer.transport.processes.member import Member, place_of
from gossamer.transport.processes.pipe import Flow, Pipe
from gossamer.transport.sockets.letter import body_of

LAUNCH = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes MIN:MAX --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d "
    "--rdzv-id NAME --rdzv-endpoint HOST:29400 -m gossamer train RUN.toml --stages auto --out FOLDER"
)
"""The one launch that says who is there."""
FEWEST = 2
"""Stages of a worker at least."""
_PIECE = 64 << 20
"""Bytes of a message, each of which takes at most `run.timeout_s`."""
_MOST_BYTES = 1 << 40
"""A file of a checkpoint at most."""
_FILE = "meetings.json"
"""The meetings at which a process was, and those before; the first one differs between two runs of one run file."""
_ROUNDS = 3
"""For how many rounds other cuts would be faster before the processes are asked to start again with them."""
_DISMISS_S = 10.0
_OVER = 1
"""The tag of the message to spare processes that the run has ended."""

Held = Mapping[int, Mapping[str, frozenset[int]]]
"""The rounds that a process has whole checkpoints of, by worker and folder of a stage."""


@with_config(RECORD)
class MeetingNote(TypedDict):
    """A meeting of all processes."""

    id: Annotated[str, Field(max_length=32)]
    round: Annotated[int, Field(ge=0, lt=2**31)]
    """The round from which all resumed: later ones that a process has from before were trained again without it."""


_MEETINGS = Records[list[MeetingNote]](list[MeetingNote])


class _Record(NamedTuple):
    """The record of a process, as it posts it in a meeting."""

    changes: int
    texts: Sequence[str | None]
    """The run file, and its changes."""
    meetings: list[MeetingNote]
    id: str
    name: str


class Meeting(NamedTuple):
    """What the processes of a run have agreed on."""

    words: tuple[str, ...]
    """The changes of the run file, as --set takes them."""
    spares: range
    """The numbers of processes that have no layers."""
    group: dist.ProcessGroup
    """All processes, spare ones too."""

    def dismiss(self) -> None:
        """Ends the spare processes, when the run has ended; process 0 calls it."""
        for spare in self.spares if self.group.rank() == 0 else ():
            with contextlib.suppress(RuntimeError):  # it is gone already
                self.group.send([torch.ones(1, dtype=torch.uint8)], spare, _OVER).wait(timedelta(seconds=_DISMISS_S))


def must_be_elastic() -> None:
    """Raises ConfigError unless a torchrun has started this process that starts all again when one dies or arrives."""
    has = os.environ.get("TORCHELASTIC_RUN_ID") is not None
    if not has or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        raise ConfigError(
            "--stages auto follows the processes that torchrun starts, "
            + ("and this one keeps a store from restart to restart" if has else "and no torchrun has started this one")
            + f"; start it on each machine with {LAUNCH}"
        )
    # Each start has a new store. Those that have died and come back count other restarts than the rest.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"


def meet(runs: Mapping[int, ResolvedRun], folder: Path) -> Meeting | None:
    """Agrees with all other processes on the stages of the run, and makes this process a part of it.

    Args: `runs` has the run with each number of stages that it may have.
    Returns: None for a spare process, once the run has ended.
    Raises: PeerError where others are missing, differ or are too few; DataError for a spoilt record; DiskError.
    Cost: of a worker, the checkpoints that this process lacks pass through its memory.
    """
    run = runs[max(runs)]
    workers, timeout_s = run.workers, run.loop.timeout_s
    member = launched(timeout_s, outlives=False)
    ranks = 1 if member is None else member.ranks
    stages = min(max(runs), ranks // workers)
    if member is None or stages < FEWEST:
        raise PeerError(
            f"processes are there: {ranks}, which are fewer than {FEWEST} stages for each of {workers} workers; start more, and "
            f"let torchrun wait for them with --nnodes {FEWEST * workers}:{max(runs) * workers}"
        )
    run = runs[stages]
    torch.set_num_threads(intra_op_threads(run.loop.threads, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    meetings = _take_newest_record(run, folder, member)
    rest = [
        _speed(run),
        {str(w): {k: sorted(v) for k, v in one.items()} for w, one in _held(run, folder).items()},
    ]
    facts = [_fact(rank, fact) for rank, fact in enumerate(agree(member, run.digest, rest, timeout_s=timeout_s))]
    cuts = cuts_at([speed for speed, _ in facts], run)
    own = Partition(stages, cuts)
    use_interface_towards(os.environ["MASTER_ADDR"])
    spares = range(stages * workers, ranks)
    try:
        group = gloo_group(PrefixStore("regroup", member.store), member.rank, ranks, timeout_s)
        round = _fetch(run, folder, own, [held for _, held in facts], group)
        if round or len(meetings) == 1:  # else what is lost may come back with the disk of a machine that is not here
            make_folder(folder)
            meetings[-1]["round"] = round
            atomic_write(folder / _FILE, json.dumps(meetings).encode())
        group.barrier().wait(timedelta(seconds=timeout_s))  # nobody trains while another drops newer checkpoints
        if member.rank in spares:
            _wait_as_spare(member, group)
            return None
    except RuntimeError as error:
        raise PeerError(
            f"a process was lost before the stages were laid ({first_line(error)}); torchrun starts all others again"
        ) from None
    if not member.rank:
        more = f", {len(spares)} spare" if spares else ""
        say(f"{ranks} processes: {workers} workers of {stages} stages, cut before layers {[*cuts]}{more}")
    os.environ["WORLD_SIZE"] = str(stages * workers)
    return Meeting((f"pipeline.stages={stages}", f"pipeline.cuts={[*cuts]}"), spares, group)


def cuts_at(speeds: Sequence[float], run: RunSettings) -> tuple[int, ...]:
    """The cuts with which the slowest stage is as fast as possible, the same for all workers, given each process's speed.

    Speeds count in quarters of the fastest, so that noise moves no layer.
    """
    return cuts_of(replace(run.pipeline, cuts=None, speeds=tuple(_quarters(speeds, run))), run.model, run.data)


def _quarters(speeds: Sequence[float], run: RunSettings) -> list[float]:
    """The speed of each stage, which is that of the slowest process that has it."""
    stages = run.pipeline.stages
    slowest = [min(speeds[w * stages + p] for w in range(run.workers)) for p in range(stages)]
    return [max(1, round(4 * speed / max(slowest))) / 4 for speed in slowest]


def may_be_faster(speeds: Sequence[float], run: RunSettings) -> bool:
    """Whether other cuts would make the slowest stage faster by a third, now that processes have these speeds."""
    work, quarters = work_of_layers(run.model, run.data), _quarters(speeds, run)

    def longest_s(cuts: Sequence[int]) -> float:
        spans = pairwise([0, *cuts, len(work)])
        return max(sum(work[a:b]) / speed for (a, b), speed in zip(spans, quarters, strict=True))

    now, best = (longest_s(cuts) for cuts in (run.pipeline.cuts or (), cuts_at(speeds, run)))
    return best <= 0.75 * now


class SlowStages:
    """Notices in process 0 that other cuts would suit the processes better, from speeds that all of them post each round."""

    def __init__(self, run: RunSettings, board: Board) -> None:
        self._run, self._board, self._rounds = run, board, 0

    def noticed(self) -> bool:
        """Whether that has been so for some rounds; each process calls it once a round. Never waits for another."""
        notes = self._board.circulate(f"{_speed(self._run):.3f}")
        texts = [notes[rank].decode(errors="replace") for rank in sorted(notes)]
        if self._board.worker or len(texts) < self._run.pipeline.stages * self._run.workers:
            return False
        known = all(re.fullmatch(r"\d{1,12}(\.\d{1,12})?", text) and float(text) > 0 for text in texts)
        faster = known and may_be_faster([*map(float, texts)], self._run)
        self._rounds = self._rounds + 1 if faster else 0
        return self._rounds >= _ROUNDS


def copy_on(store: Store, pipe: Pipe, worker: int, round: int) -> None:
    """Copies this stage's checkpoint of a round to the next process of the worker, and takes that of the one before.

    Where they share a folder nothing is sent. Raises: PeerError, DiskError.
    """
    before, behind = (pipe.part - 1) % pipe.parts, (pipe.part + 1) % pipe.parts
    place, kinds = store.own.folders(store.folder)[before], ("manifest", "tensors")
    has = round in checkpoint.rounds(place, worker)
    there = pipe.gather(torch.tensor([int(has)]))
    for kind, path in zip(kinds, checkpoint.files_of(store.path, round, worker), strict=True):
        if not there[behind]:
            pipe.send(Flow(f"copy of {kind}", pipe.part), behind, body_of(path.read_bytes()), length_first=True)
        if not has:
            pipe.expect(Flow(f"copy of {kind}", before), before, [None], _MOST_BYTES)
    if not has:
        manifest, tensors = (pipe.receive(Flow(f"copy of {kind}", before), before) for kind in kinds)
        checkpoint.take(place, round, worker, _bytes(manifest), _bytes(tensors))
        checkpoint.forget_before(place, min(checkpoint.rounds(store.path, worker), default=0), worker)
    pipe.flush()


def _take_newest_record(run: RunSettings, folder: Path, member: Member) -> list[MeetingNote]:
    """Takes the run file and the changes of the process that was at the last meeting, and has taken part in most changes.

    Drops the checkpoints that others have trained again since the last meeting at which this process was.

    Returns: the meetings of the run, with this one at the end, whose round is not known yet.
    Raises: PeerError for records of several runs; DataError for a spoilt record; DiskError.
    """
    paths = [folder / "run.toml", folder / "branches.json"]  # in this order: until both are here, it counts as old
    texts, path = [*map(_text, paths)], folder / _FILE
    meetings = _MEETINGS.parse(path.read_bytes(), str(path)) if path.exists() and texts[0] else []
    mine = [len(read_branches(folder)), texts, meetings, secrets.token_hex(8), platform.node()]
    stated = agree(member, run.digest, mine, settings=short_settings(run.decisive), timeout_s=run.loop.timeout_s)
    records = [_record_of(rank, one) for rank, one in enumerate(stated)]
    _must_be_one_run(records, folder)
    logs, own = [one.meetings for one in records], records[member.rank]
    known = max(logs, key=lambda log: (len(log), logs.count(log)))
    if own.meetings:
        _drop_trained_again(run, folder, known, own.meetings)
    there = [one for one in records if one.texts[0] is not None and one.meetings == known]
    newest = max(there, key=lambda one: one.changes, default=own)
    is_behind = own.texts[0] is None or own.meetings != known or newest.changes > own.changes
    if is_behind and newest.texts != own.texts:
        make_folder(folder)
        for path, text in zip(paths, newest.texts, strict=True):
            if text is not None:
                atomic_write(path, text.encode())
        history(run, folder)  # refuses the record of another run
    return [*known, {"id": records[0].id, "round": 0}]


def _drop_trained_again(
    run: RunSettings, folder: Path, known: Sequence[MeetingNote], own: Sequence[MeetingNote]
) -> None:
    """Drops the checkpoints here of rounds that others have trained again since meetings at which this process was not."""
    alike = next((k for k, (a, b) in enumerate(zip(known, own, strict=False)) if a != b), min(len(known), len(own)))
    rounds = [note["round"] for note in known[alike:]]
    for name in _names(folder) if rounds else ():
        for w in range(run.workers):
            checkpoint.rewind(folder / "checkpoints" / name, min(rounds), w)


def _record_of(rank: int, record: object) -> _Record:
    """The record of a process. Raises PeerError for anything else."""
    try:
        match record:
            case [
                int() as changes,
                [None | str(), None | str()] as texts,
                list() as meetings,
                str() as name,
                str() as host,
            ]:
                return _Record(changes, texts, _MEETINGS.of(meetings, ""), name, f"process {rank} on {host:.60}")
    except DataError:
        pass
    raise _odd(rank, "record")


def _must_be_one_run(records: Sequence[_Record], folder: Path) -> None:
    """Raises PeerError where processes have the folders of several runs of one run file.

    The settings of these are equal, and the record of one would describe the checkpoints of another.
    """
    owners: dict[str, list[str]] = {}
    for one in records:
        if one.meetings:
            owners.setdefault(one.meetings[0]["id"], []).append(one.name)
    if len(owners) > 1:
        *few, most = sorted(owners.values(), key=len)
        raise PeerError(
            f"'{folder}' of {' and '.join(', '.join(names) for names in few)} is of another run than that of "
            f"{', '.join(most)}; move the folders of the run that shall not continue away, and start again"
        )


def _text(path: Path) -> str | None:
    return path.read_text(errors="replace") if path.exists() else None


def _held(run: RunSettings, folder: Path) -> Held:
    line = history(run, folder).lineage
    names = _names(folder)
    return {
        w: {name: frozenset(checkpoint.rounds(folder / "checkpoints" / name, w, line)) for name in names}
        for w in range(run.workers)
    }


def _names(folder: Path) -> list[str]:
    """The folders of stages in a run folder."""
    return sorted(path.name for path in (folder / "checkpoints").glob("stage-*") if path.is_dir())


def _fact(rank: int, fact: object) -> tuple[float, Held]:
    """The speed of a process, and the checkpoints that it holds. Raises PeerError for anything else."""
    match fact:
        case [int() | float() as speed, dict() as held] if 0 < speed < 1e30:
            try:
                return speed, {
                    int(w): {str(name): frozenset(map(int, rounds)) for name, rounds in one.items()}
                    for w, one in held.items()
                }
            except (ArithmeticError, AttributeError, TypeError, ValueError):
                pass
    raise _odd(rank, "checkpoints")


def _odd(rank: int, what: str) -> PeerError:
    return PeerError(
        f"process {rank} does not say which {what} it has; install the same gossamer version on all machines"
    )


def _speed(run: RunSettings) -> float:
    """How many products of matrices this process takes in a second on the device of the run."""
    x, best_s = torch.ones(512, 512, device=device_of(run.loop.device)), 1e9
    for _ in range(8):  # the best of some, as a machine that is busy for a moment is not slow
        began_s = time.perf_counter()
        (x @ x).sum().item()
        best_s = min(best_s, time.perf_counter() - began_s)
    return 1 / best_s


def _newest(held: list[Held], run: RunSettings, own: Partition) -> tuple[int, dict[int, Partition]]:
    """The newest round of which each worker has all stages of a partition somewhere, and that partition; 0 for none."""
    whole: list[dict[int, Partition]] = []
    for w in range(run.workers):
        rounds: dict[str, frozenset[int]] = {}
        for name, some in (item for one in held for item in one.get(w, {}).items()):
            rounds[name] = rounds.get(name, frozenset()) | some
        found: dict[int, Partition] = {}
        # Its own last, which needs fewer files.
        for partition in sorted(partitions_of(rounds, run.model.shape.layers), key=lambda one: (one == own, one)):
            parts = [rounds.get(path.name, frozenset()) for path in partition.folders(Path())]
            found |= dict.fromkeys(frozenset.intersection(*parts), partition)
        whole.append(found)
    newest = max(frozenset.intersection(*map(frozenset, whole)), default=0)
    return newest, {w: found[newest] for w, found in enumerate(whole) if newest}


def _needed(newest: Mapping[int, Partition], own: Partition, ranks: int) -> Iterator[tuple[int, int, str]]:
    """Each process, its worker and the folder of a stage that it resumes from."""
    sizes = (own.stages,) * len(newest)
    for rank in range(min(ranks, sum(sizes))):
        worker, part = place_of(rank, sizes)
        names = [path.name for path in newest[worker].folders(Path())]
        yield from ((rank, worker, name) for name in (names if newest[worker] != own else names[part : part + 1]))


def _fetch(run: RunSettings, folder: Path, own: Partition, held: list[Held], group: dist.ProcessGroup) -> int:
    """Sends each process the checkpoints of the newest round that it lacks; newer ones are dropped.

    Returns: the round, 0 for none.
    """
    round, newest = _newest(held, run, own)
    if not round:
        return 0
    for path in (folder / "checkpoints" / name for name in _names(folder)):
        for w in range(run.workers):
            faults = checkpoint.generation_faults(path, w).items()
            damaged = any(r > round and why is not None and why.kind != FaultKind.ABSENT for r, why in faults)
            checkpoint.rewind(path, round, w, aside=damaged)
    for rank, w, name in _needed(newest, own, len(held)):
        if round in held[rank].get(w, {}).get(name, ()):
            continue
        holder = next(one for one, has in enumerate(held) if round in has.get(w, {}).get(name, ()))
        place = folder / "checkpoints" / name
        if group.rank() == holder:
            for path in checkpoint.files_of(place, round, w):
                _send(group, rank, path.read_bytes(), run.loop.timeout_s)
        elif group.rank() == rank:
            files = [_receive(group, holder, run.loop.timeout_s) for _ in range(2)]
            checkpoint.take(place, round, w, *files)
    return round


def _send(group: dist.ProcessGroup, rank: int, content: bytes, timeout_s: float) -> None:
    for piece in (torch.tensor([len(content)]).view(torch.uint8), *body_of(content).split(_PIECE)):
        group.send([piece.contiguous()], rank, 0).wait(timedelta(seconds=timeout_s))


def _receive(group: dist.ProcessGroup, rank: int, timeout_s: float) -> bytes:
    size = torch.empty(8, dtype=torch.uint8)
    group.recv([size], rank, 0).wait(timedelta(seconds=timeout_s))
    length = int(size.view(torch.int64))
    if not 0 < length <= _MOST_BYTES:
        raise PeerError(f"process {rank} would send a checkpoint of {length} bytes; at most {_MOST_BYTES} are allowed")
    content = torch.empty(length, dtype=torch.uint8)
    for piece in content.split(_PIECE):
        group.recv([piece], rank, 0).wait(timedelta(seconds=timeout_s))
    return _bytes(content)


def _bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()


def _wait_as_spare(member: Member, group: dist.ProcessGroup) -> None:
    """Returns when the run has ended. Raises PeerError when process 0 is gone before."""
    for one in (signal.SIGTERM, signal.SIGINT):  # torch waits without looking at signals, and nothing is to be saved
        signal.signal(one, signal.SIG_DFL)
    say(f"process {member.rank} is spare: it takes layers when another process is gone")
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], 0, _OVER).wait(FOREVER)
    except RuntimeError:
        raise PeerError(
            f"the run was interrupted while process {member.rank} was spare; torchrun starts it again"
        ) from None
