"""The trace of a run, independent of its network: local steps, compute seconds and every message with its bytes.

A mean through chunk owners has as many messages as the square of its members, so each records its share of it instead.

Both drivers write the same lines, so a run is trained once and priced on any number of networks (`gossamer.network.links`).
A simulated run leaves one `trace.jsonl` in its folder, a real one a `trace-003.jsonl` for each worker.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import DataError
from gossamer.record.jsonl import Seen, folder_lines, json_line, json_text
from gossamer.settings.schema import RECORD, Records

Integers = NDArray[np.signedinteger[Any]]
"""An array of integers of any width."""

Kind = Literal["exchange", "mean"]
"""The dependencies between the messages of an operation.

"exchange": each is sent as soon as its sender is ready, and only its two ends wait for it.
"mean": a sum by chunk owners; all send each owner its chunk and get the sum back, so all wait for all.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""Every kind; its index is its code in the columns of a trace, and kinds of one round happen in this order."""

_TYPES = (np.int32, np.int8, np.int32, np.int32, np.int32, np.int64, np.int32)
"""Dtypes of the columns of messages."""
_MAX_CELLS = 2**28
"""The most rounds times workers of a trace: an untrusted line with round 2^30 must not allocate all memory."""


class MeanShare(NamedTuple):
    """One worker's part in a mean through chunk owners: each other member sends it `there` bytes and gets `back` of it."""

    members: tuple[tuple[int, int], ...]
    """All workers of the mean, this one included, as ascending ranges: the first and how many."""
    there: int
    """Bytes of this worker's chunk, as each other member sends it here."""
    back: int
    """Bytes of the sum of that chunk, as it is sent to each other member."""
    sent: int
    """Bytes that this worker sends in all."""
    received: int

    @property
    def peers(self) -> int:
        """The number of other members."""
        return sum(count for _, count in self.members) - 1


class Operation(NamedTuple):
    """One communication of one worker, as its messages: `(peer, bytes)` each way; of a mean as its share of it."""

    kind: Kind
    fragment: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    overlap_steps: int = 0
    """Inner steps between sending and waiting for the result, for the worker with the most steps in this round; others
    wait after a proportional number, rounded down. 0 waits at once; sender and receiver record the same number.
    """
    share: MeanShare | None = None
    """Stands for the messages of a mean, which would be as many as the square of its members."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that the worker sends."""
        return sum(size for _, size in self.sends) if self.share is None else self.share.sent

    @property
    def received_bytes(self) -> int:
        """Bytes that the worker receives."""
        return sum(size for _, size in self.receives) if self.share is None else self.share.received

    @property
    def peers(self) -> int:
        """Workers that it sends to."""
        return len(self.sends) if self.share is None else self.share.peers

    @property
    def sizes(self) -> tuple[int, ...]:
        """All numbers of bytes in it, in the order in which `resized` takes them."""
        return tuple(size for _, size in (*self.sends, *self.receives)) if self.share is None else self.share[1:]

    def resized(self, sizes: Iterable[int]) -> "Operation":
        """The same operation with other numbers of bytes."""
        of = iter(sizes)
        if self.share is not None:
            return self._replace(share=MeanShare(self.share.members, *islice(of, 4)))
        sends, receives = (tuple((peer, next(of)) for peer, _ in some) for some in (self.sends, self.receives))
        return self._replace(sends=sends, receives=receives)


def share_in_mean(members: Sequence[int], worker: int, there: Sequence[int], back: Sequence[int]) -> MeanShare:
    """A worker's share of a mean, given the bytes of all chunks and of their sums, in the order of the members.

    >>> share_in_mean([0, 1, 2, 5], 2, there=[10, 10, 11, 11], back=[20, 20, 22, 22])
    MeanShare(members=((0, 3), (5, 1)), there=11, back=22, sent=97, received=95)
    """
    ranges = [(members.start, len(members))] if isinstance(members, range) else []
    for j in () if ranges else members:
        if ranges and j == sum(ranges[-1]):
            ranges[-1] = ranges[-1][0], ranges[-1][1] + 1
        else:
            ranges.append((j, 1))
    place, others = members.index(worker), len(members) - 1
    own_there, own_back = there[place], back[place]
    sent, received = sum(there) - own_there + others * own_back, sum(back) - own_back + others * own_there
    return MeanShare(tuple(ranges), own_there, own_back, sent, received)


class Entry(NamedTuple):
    """One worker's round: its local phase (measured) and the operations after it.

    A run that communicates within its rounds writes an entry for each part: the steps since the last part, then its
    operations.
    """

    round: int
    worker: int
    local_steps: int
    compute_s: float
    operations: tuple[Operation, ...]


_Index = Annotated[int, Field(ge=0, lt=2**31)]
_Size = Annotated[int, Field(ge=0, lt=2**50)]
_Total = Annotated[int, Field(ge=0, lt=2**62)]
_Compute = Annotated[float, Field(ge=0, le=1e9)]
_Messages = tuple[tuple[_Index, _Size], ...]


@with_config(RECORD)
class _MeanShare(TypedDict):
    """A worker's share of a mean, in a line of a trace file."""

    members: tuple[tuple[_Index, _Index], ...]
    there: _Size
    back: _Size
    sent: _Total
    received: _Total


@with_config(RECORD)
class TracePart(TypedDict):
    """An operation in a line of a trace file, by its messages or by this worker's share of a mean."""

    kind: Kind
    fragment: _Index
    sends: NotRequired[_Messages]
    receives: NotRequired[_Messages]
    share: NotRequired[_MeanShare]
    overlap_steps: NotRequired[_Index]


def sent_bytes_of(part: TracePart) -> int:
    """Bytes that a worker sends in an operation of a line."""
    return part["share"]["sent"] if "share" in part else sum(size for _, size in part.get("sends", ()))


@with_config({**RECORD, "extra": "ignore"})
class _Phase(TypedDict):
    """The local phase in a line of a trace file."""

    round: _Index
    worker: _Index
    steps: _Index
    compute_s: _Compute


@with_config(RECORD)
class _Line(_Phase):
    """A line of a trace file."""

    ops: tuple[TracePart, ...]


_PHASES = Records[_Phase](_Phase)
TRACE_LINES = Records[_Line](_Line)


class Messages(NamedTuple):
    """Every message of a run as columns `[M]`, sorted by round, kind, source, target, fragment, bytes and overlap."""

    round: Integers
    kind: Integers
    source: Integers
    target: Integers
    fragment: Integers
    bytes: Integers
    overlap_steps: Integers

    def span(self, start: int, stop: int) -> "Messages":
        """Messages start to stop, as views."""
        return Messages(*(column[start:stop] for column in self))


class Mean(NamedTuple):
    """A mean through chunk owners, as one row: member i sends member j `there[j] + back[i]` bytes."""

    round: int
    fragment: int
    overlap_steps: int
    members: Integers
    there: Integers
    back: Integers

    @property
    def sent_bytes(self) -> Integers:
        """Bytes that each member sends, `[members]`."""
        return self.there.sum() - self.there + (len(self.members) - 1) * self.back

    @property
    def received_bytes(self) -> Integers:
        """Bytes that each member receives, `[members]`."""
        return self.back.sum() - self.back + (len(self.members) - 1) * self.there

    @property
    def pairs(self) -> int:
        """The number of messages that it stands for."""
        return len(self.members) * (len(self.members) - 1)

    def listed(self) -> "Messages":
        """The messages that it stands for."""
        return self._between(*np.nonzero(~np.eye(len(self.members), dtype=bool)))

    def ring(self) -> "Messages":
        """Of those, the ones of each member for the next, where only matters who takes part."""
        everyone = np.arange(len(self.members))
        return self._between(everyone, np.roll(everyone, -1))

    def _between(self, i: Integers, j: Integers) -> "Messages":
        ends = self.members[i], self.members[j], self.fragment, self.there[j] + self.back[i], self.overlap_steps
        columns = (self.round, KINDS.index("mean"), *ends)
        return Messages(*(np.full(len(i), one, dtype) for one, dtype in zip(columns, _TYPES, strict=True)))


class Trace(NamedTuple):
    """A run as arrays; a worker absent in a round has 0 steps and 0 seconds."""

    steps: Integers
    """Inner steps, `[rounds, workers]`."""
    compute_s: NDArray[np.float64]
    """Measured seconds of the local phases, `[rounds, workers]`."""
    messages: Messages
    means: tuple[Mean, ...] = ()
    """Means whose messages are not listed, by round."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.steps.shape[0]

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.steps.shape[1]

    @property
    def bounds(self) -> Integers:
        """The first message of each round, `[rounds + 1]`; those of round r end where those of r + 1 begin."""
        return np.searchsorted(self.messages.round, np.arange(self.rounds + 1))

    @property
    def sent_bytes(self) -> Integers:
        """Bytes each worker sent in the whole run, `[workers]`."""
        sent = np.zeros(self.workers, np.int64)
        np.add.at(sent, self.messages.source, self.messages.bytes)
        for mean in self.means:
            sent[mean.members] += mean.sent_bytes
        return sent

    @property
    def overlaps(self) -> bool:
        """Whether any operation overlaps with later steps."""
        return bool(self.messages.overlap_steps.any()) or any(mean.overlap_steps for mean in self.means)

    @property
    def round_bytes(self) -> NDArray[np.float64]:
        """Bytes that all workers sent in each round, `[rounds]`."""
        sent = np.bincount(self.messages.round, self.messages.bytes, minlength=self.rounds).astype(float)
        for mean in self.means:
            sent[mean.round] += mean.sent_bytes.sum()
        return sent

    def listed(self, which: Callable[[Mean], bool] = lambda mean: True) -> "Trace":
        """The trace with the messages of these means listed, of all by default."""
        means = [mean for mean in self.means if which(mean)]
        if not means:
            return self
        every = Messages(*map(np.concatenate, zip(self.messages, *(mean.listed() for mean in means), strict=True)))
        order = np.lexsort(
            (every.overlap_steps, every.bytes, every.fragment, every.target, every.source, every.kind, every.round)
        )
        left = tuple(mean for mean in self.means if not which(mean))
        return self._replace(messages=Messages(*(column[order] for column in every)), means=left)


def line_of(entry: Entry) -> str:
    """An entry as one line of a trace file.

    >>> line_of(Entry(0, 3, 15, 1.2, (Operation("exchange", 0, ((5, 34),), ((5, 34),)),)))
    '{"round":0,"worker":3,"steps":15,"compute_s":1.2,"ops":[{"kind":"exchange","fragment":0,"sends":[[5,34]],"receives":[[5,34]]}]}\\n'
    """
    phase = {"round": entry.round, "worker": entry.worker, "steps": entry.local_steps, "compute_s": entry.compute_s}
    return f'{json_line(phase)[:-2]},"ops":[{",".join(map(_text_of, entry.operations))}]}}\n'


def entry_of(line: _Line, where: str) -> Entry:
    """The entry of a line of `TRACE_LINES`. Raises: DataError, which names `where`, for operations that contradict the line."""
    worker = line["worker"]
    operations = []
    for part in line["ops"]:
        if "share" in part:
            operations.append(_part_of_mean(part, part["share"], worker, where))
            continue
        if "sends" not in part or "receives" not in part:
            raise DataError(f"{where} has an operation without sends and receives; repair or remove the line")
        sends, receives = part["sends"], part["receives"]
        if worker in [peer for peer, _ in sends] or worker in [peer for peer, _ in receives]:
            raise DataError(
                f"{where} has worker {worker} talking to itself but peers are other workers; repair the line"
            )
        operations.append(Operation(part["kind"], part["fragment"], sends, receives, part.get("overlap_steps", 0)))
    return Entry(line["round"], worker, line["steps"], line["compute_s"], tuple(operations))


def _part_of_mean(part: TracePart, share: _MeanShare, worker: int, where: str) -> Operation:
    """A mean in a line. Raises: DataError where it lists messages too, or its members are not ascending or not of it."""
    members = share["members"]
    if (
        part["kind"] != "mean"
        or "sends" in part
        or "receives" in part
        or not _are_ascending(members)
        or not any(first <= worker < first + count for first, count in members)
    ):
        raise DataError(
            f"{where} has a share that is of no mean, or of one without worker {worker}, or whose members are not ascending "
            "ranges; repair or remove the line"
        )
    return Operation("mean", part["fragment"], (), (), part.get("overlap_steps", 0), MeanShare(**share))


@lru_cache(maxsize=64)
def _are_ascending(ranges: tuple[tuple[int, int], ...]) -> bool:
    apart = all(first + count <= after for (first, count), (after, _) in pairwise(ranges))
    return apart and all(count for _, count in ranges)


def has_trace(run_folder: Path) -> bool:
    """Whether a run left a trace."""
    return any(Path(run_folder).glob("trace*.jsonl"))


def read_trace(run_folder: Path, *, messages: bool = True, seen: Seen | None = None) -> Trace:
    """The trace of a run, from all the files its workers wrote; or its local phases only, without parsing messages: a
    mean among a thousand workers has a million per round.

    Args: `seen` as in `folder_lines`.
    Raises: DataError when there is none, a line is malformed, or the lines contradict each other.
    """
    if not has_trace(run_folder):
        raise DataError(
            f"{run_folder} holds no trace*.jsonl; give the folder of a run made by gossamer simulate or gossamer train"
        )
    here = f"the trace in '{run_folder}'"
    if not messages:
        phases = (line for _, _, line in folder_lines(run_folder, "trace", _PHASES))
        return from_entries(
            (Entry(one["round"], one["worker"], one["steps"], one["compute_s"], ()) for one in phases), here
        )
    return from_entries(
        (entry_of(line, where) for _, where, line in folder_lines(run_folder, "trace", TRACE_LINES, seen=seen)), here
    )


def from_entries(entries: Iterable[Entry], whose: str = "the trace") -> Trace:
    """The columnar form of a run, in whatever order its entries come; `whose` names it in errors.

    A message that only its sender or its receiver recorded (the other died before writing its line) counts as well.
    Raises: DataError for two entries of one worker and round, a peer without any entry, or ends that differ about a
        message.
    """
    cells, seconds = array("q"), array("d")
    as_sent, as_received, shares = _Ends(), _Ends(), _Shares()
    for entry in entries:
        cells.extend((entry.round, entry.worker, entry.local_steps))
        seconds.append(entry.compute_s)
        at, me = entry.round, entry.worker
        for kind, fragment, sends, receives, overlap, share in entry.operations:
            if share is not None:
                shares.add(at, fragment, overlap, me, share)
                continue
            of = at, KINDS.index(kind), me, fragment, overlap
            as_sent.add(of, sends)
            as_received.add(of, receives)

    at_round, at_worker, steps = _rows(cells, 3).T
    messages = _agreed(as_sent.messages(sent=True), as_received.messages(sent=False))
    rounds = 1 + int(at_round.max(initial=-1))
    workers = 1 + int(max(column.max(initial=-1) for column in (at_worker, messages.source, messages.target)))
    workers = max(workers, shares.workers)
    present = np.unique(at_worker)
    if len(present) < workers:
        silent = next((place for place, worker in enumerate(present) if place != worker), len(present))
        raise DataError(
            f"{whose} names {workers} workers and has entries of {len(present)}, none of worker {silent}; bring the trace files "
            "of all workers, each of which writes its own on its machine, into one folder"
        )
    if rounds * workers > _MAX_CELLS:
        raise DataError(
            f"the trace spans {rounds} rounds of {workers} workers but at most {_MAX_CELLS} cells are allowed; "
            "look for a line with a wrong round"
        )
    known, times = np.unique(at_round * workers + at_worker, return_counts=True)
    if len(known) < len(at_round):
        where = int(known[times > 1][0])
        raise DataError(
            f"the trace has {times.max()} entries for round {where // workers} of worker {where % workers} "
            "but 1 is allowed; two runs were written into one folder, keep them apart"
        )
    trace = Trace(np.zeros((rounds, workers), np.int64), np.zeros((rounds, workers)), messages, tuple(shares.means()))
    trace.steps[at_round, at_worker] = steps
    trace.compute_s[at_round, at_worker] = seconds
    return trace


def from_targets(
    targets: NDArray[np.integer],
    payload_bytes: int,
    steps: ArrayLike,
    compute_s: ArrayLike = 0.0,
    kind: Kind = "exchange",
) -> Trace:
    """The trace of a planned run: in round r worker i sends one payload to each of `targets[r, i]`.

    Args:
        targets: `[rounds, workers]` or `[rounds, workers, k]` worker numbers; a worker's own number is no message.
        steps, compute_s: inner steps and their seconds, anything that broadcasts to `[rounds, workers]`.
    Cost: 12 bytes a message; no loop over messages.

    >>> from_targets(np.array([[1, 0], [0, 1]]), 100, steps=30).sent_bytes
    array([100, 100])
    """
    rounds, workers = targets.shape[:2]
    assert targets.size == 0 or (targets.min() >= 0 and targets.max() < workers), "targets are worker numbers"
    ordered = (targets if targets.ndim == 3 else targets[:, :, None]).astype(np.int32)
    ordered.sort(axis=2)
    per_round, peers = workers * ordered.shape[2], ordered.shape[2]
    at_round = np.repeat(np.arange(rounds, dtype=np.int32), per_round)
    source = np.tile(np.repeat(np.arange(workers, dtype=np.int32), peers), rounds)
    target = ordered.reshape(-1)
    sent = target != source
    if not sent.all():
        at_round, source, target = at_round[sent], source[sent], target[sent]
    count = len(at_round)
    messages = Messages(
        at_round,
        np.broadcast_to(np.int8(KINDS.index(kind)), count),
        source,
        target,
        np.broadcast_to(np.int32(0), count),
        np.broadcast_to(np.int64(payload_bytes), count),
        np.broadcast_to(np.int32(0), count),
    )
    shape = (rounds, workers)
    return Trace(
        np.broadcast_to(np.asarray(steps, np.int64), shape),
        np.broadcast_to(np.asarray(compute_s, float), shape),
        messages,
    )


class _Shares:
    """Shares of means, during reading."""

    def __init__(self) -> None:
        self._members: dict[tuple[tuple[int, int], ...], int] = {}
        self._rows = array("q")

    def add(self, round: int, fragment: int, overlap: int, worker: int, share: MeanShare) -> None:
        """Adds a worker's share."""
        members = self._members.setdefault(share.members, len(self._members))
        self._rows.extend((round, overlap, fragment, members, worker, *share[1:]))

    @property
    def workers(self) -> int:
        """One more than the largest number of a member."""
        return max((sum(members[-1]) for members in self._members), default=0)

    def means(self) -> Iterator[Mean]:
        """The means, by round; to be called once each member is known to have entries, as it lists them all.

        The chunks of a member that died before it wrote its line are what the others' totals leave.
        Raises: DataError for members that contradict each other.
        """
        rows = _rows(self._rows, 9)
        rows = rows[np.lexsort(rows.T[4::-1])]
        edges = np.flatnonzero((np.diff(rows[:, :4], axis=0, prepend=-1) != 0).any(axis=1))
        members = [np.concatenate([np.arange(a, a + count) for a, count in ranges]) for ranges in self._members]
        taken: dict[tuple[int, ...], set[int]] = {}
        for some in np.split(rows, edges[1:]) if len(rows) else ():
            (round, overlap, fragment), all_of_it = some[0, :3].tolist(), members[some[0, 3]]
            worker, there, back, sent, received = some[:, 4:].T
            others, place = len(all_of_it) - 1, np.searchsorted(all_of_it, worker)
            chunks = np.zeros((2, len(all_of_it)), np.int64)
            chunks[:, place] = there, back
            totals = np.stack([sent - others * back + there, received - others * there + back])
            missing, left = len(all_of_it) - len(some), totals[:, 0] - chunks.sum(axis=1)
            others_of_round = taken.setdefault((round, overlap, fragment), set())
            if (
                (totals != totals[:, :1]).any()
                or (np.diff(worker) == 0).any()
                or (left < 0).any()
                or (not missing and left.any())
                or (len(self._members) > 1 and not others_of_round.isdisjoint(all_of_it.tolist()))
            ):
                raise DataError(
                    f"the trace of round {round} has workers that differ about the members or the bytes of a mean, but all must "
                    "record the same; gather the trace files of one run only"
                )
            if len(self._members) > 1:
                others_of_round.update(all_of_it.tolist())
            if missing:
                absent = np.delete(np.arange(len(all_of_it)), place)
                chunks[:, absent] = left[:, None] // missing + (np.arange(missing) < left[:, None] % missing)
            yield Mean(round, fragment, overlap, all_of_it, *chunks)


class _Ends:
    """Messages as recorded by one of their ends, during reading."""

    def __init__(self) -> None:
        self._of, self._counts, self._pairs = array("q"), array("q"), array("q")

    def add(self, of: tuple[int, int, int, int, int], pairs: tuple[tuple[int, int], ...]) -> None:
        """Adds messages of one round, kind, worker, fragment and overlap, as `(peer, bytes)`."""
        self._of.extend(of)
        self._counts.append(len(pairs))
        self._pairs.extend(chain.from_iterable(pairs))

    def messages(self, sent: bool) -> Messages:
        """The messages added, in order; `sent` by these workers, or received."""
        counts = _rows(self._counts, 1)[:, 0]
        round, kind, worker, fragment, overlap = (
            np.repeat(column.astype(dtype), counts)
            for column, dtype in zip(_rows(self._of, 5).T, (*_TYPES[:3], _TYPES[4], _TYPES[6]), strict=True)
        )
        peers, sizes = _rows(self._pairs, 2).T
        source, target = (worker, peers.astype(np.int32)) if sent else (peers.astype(np.int32), worker)
        return Messages(round, kind, source, target, fragment, np.ascontiguousarray(sizes), overlap)


def _rows(flat: "array[int]", width: int) -> NDArray[np.int64]:
    return np.frombuffer(flat, np.int64).reshape(-1, width) if flat else np.empty((0, width), np.int64)


def _agreed(as_sent: Messages, as_received: Messages) -> Messages:
    """The messages that either end recorded, once each and sorted."""
    if (alike := _matched_messages(as_sent, as_received)) is not None:
        return alike
    sent, got = (Counter(zip(*(column.tolist() for column in ends), strict=True)) for ends in (as_sent, as_received))
    disputed = {row[:5] for row in sent - got} & {row[:5] for row in got - sent}
    if disputed:
        round_, _, source, target, _ = min(disputed)
        raise DataError(
            f"the trace of round {round_} has two sizes or overlaps for the message from worker {source} to worker {target}, "
            "but both must record the same; gather the trace files of one run only"
        )
    rows = np.array(sorted((sent | got).elements()), np.int64).reshape(-1, 7)
    return Messages(*(column.astype(dtype) for column, dtype in zip(rows.T, _TYPES, strict=True)))


def _matched_messages(as_sent: Messages, as_received: Messages) -> Messages | None:
    """The sorted messages, if both ends recorded the same ones, and no two differ only in bytes or overlap."""
    sizes = [
        1 + int(max(column.max(initial=0) for column in both))
        for both in zip(as_sent[:5], as_received[:5], strict=True)
    ]
    if len(as_sent.round) != len(as_received.round) or math.prod(sizes) >= 2**63:
        return None
    keys, orders = [], []
    for ends in (as_sent, as_received):
        key = np.zeros(len(ends.round), np.int64)  # one number for the first five columns
        for column, size in zip(ends[:5], sizes, strict=True):
            key *= size
            key += column
        order = None if (key[1:] > key[:-1]).all() else np.argsort(key, kind="stable")
        keys.append(key if order is None else key[order])
        orders.append(order)
    if (keys[0][1:] == keys[0][:-1]).any() or not np.array_equal(*keys):
        return None
    as_sent, as_received = (
        # For received messages, only columns outside the key are compared.
        ends
        if order is None
        else Messages(*(column[order] if place in places else column for place, column in enumerate(ends)))
        for ends, order, places in zip((as_sent, as_received), orders, (range(7), (5, 6)), strict=True)
    )
    return (
        as_sent
        if np.array_equal(as_sent.bytes, as_received.bytes)
        and np.array_equal(as_sent.overlap_steps, as_received.overlap_steps)
        else None
    )


def _text_of(operation: Operation) -> str:
    """An operation in a line."""
    sends, receives = json_text(operation.sends), json_text(operation.receives)
    messages = f'"sends":{sends},"receives":{receives}'
    if (share := operation.share) is not None:
        messages = f'"share":{json_text(share._asdict())}'
    overlap = f',"overlap_steps":{operation.overlap_steps}' if operation.overlap_steps else ""
    return f'{{"kind":"{operation.kind}","fragment":{operation.fragment},{messages}{overlap}}}'
