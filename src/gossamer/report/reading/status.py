"""The status of a run, from its folder and from workers that answer.

The files show the progress of each worker, and its lock whether it runs on this machine. A listening worker (of an
elastic or asynchronous run, or any with [peers]) is queried for its membership view; views are merged as by the workers
themselves. Needs no torch.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import ConfigError, PeerError
from gossamer.record.addresses import Address, read_addresses
from gossamer.record.folder import read_metrics, run_file, store_file
from gossamer.record.locks import trains_here
from gossamer.record.logs.order import read_order
from gossamer.record.logs.outcomes import Begun, Ended, Life, read_outcomes
from gossamer.record.logs.seconds import RoundSeconds, read_seconds
from gossamer.record.whole_files import worker_suffix
from gossamer.report.reading.lines import RunFile, run_file_of
from gossamer.report.reading.paces import Paces, is_silent
from gossamer.report.reading.stored import reading, stored_run
from gossamer.transport.bucket.bucket import MOST_HEAD_BYTES
from gossamer.transport.bucket.objects import commit_in, commit_name
from gossamer.transport.bucket.server_log import event_in
from gossamer.transport.bucket.sightings import Sightings
from gossamer.transport.elastic.ask import View, look
from gossamer.transport.elastic.members import MemberStatus, SlotEntry, merged
from gossamer.transport.keys import Peer, keys_for
from gossamer.transport.secret import folder_secret
from gossamer.transport.sockets.header import Limits

PATIENCE_S = 2.0
"""Timeout for a worker's answer."""


class WorkerStatus(NamedTuple):
    """The status of one worker or slot."""

    worker: int
    standing: str
    """One of the words of `standing_of`; or silent, for a running worker by `is_silent`."""
    round: int
    """Its known completed rounds."""
    steps: int | None
    """Inner steps, from its files."""
    loss: float | None
    """Training loss of its last recorded round, nats per token."""
    age_s: float | None
    """The age of the newest information about it; None without any."""
    address: str | None
    missed: int
    """Exchanges that it has recorded and that neither end counted."""
    unsure: int
    """Exchanges that it has not counted and the other end may have."""
    declined: int
    """Its messages that others have declined: invalid, or too far away for a rule that clips."""
    seconds: RoundSeconds | None
    """The seconds of its last recorded round."""
    slowed: float | None
    """Its smallest slowdown in the last three rounds, relative to its own median step time, if at least two."""


class RunStatus(NamedTuple):
    """A run and its workers."""

    folder: Path
    name: str
    kind: str
    """elastic, server, pair, no waiting, rounds or simulation."""
    rounds: int
    """Rounds of the whole run."""
    round: int
    """Completed rounds of the most advanced worker."""
    answered: list[int]
    """Workers that have answered a query."""
    note: str | None
    """The reason why no worker was queried, or none has answered, or nothing is known of some."""
    refused: dict[str, int]
    """Refused messages at the workers that answered, by peer and kind, such as `worker 3: bounds`."""
    workers: list[WorkerStatus]


class Sighting(NamedTuple):
    """The facts that decide the standing of a slot."""

    entry: SlotEntry | None = None
    """Its entry in the merged views of the workers that answered."""
    life: Life | None = None
    """Its last one in the log of outcomes."""
    answered: bool = False
    refused: bool = False
    """Whether no process of the run listens at its address."""
    here: bool | None = None
    """Whether its process runs on this machine, by its lock; None if unknown."""
    finished: bool = False
    """Whether it has completed all rounds of the run."""
    elastic: bool = True
    traces: bool = True
    """Whether any file here mentions it."""


class SlotStatus(NamedTuple):
    """A slot of a run whose state lies in a store."""

    worker: int
    standing: str
    """empty: never held. held: a process has it that has not released it, and may have died. left: released."""
    lives: int
    """Processes that have had it."""
    steps: int
    """Its inner steps included in the state of the run."""
    counted: bool
    """Whether it took part in the last closed round; with a server, whether the last event is about it."""


class StoreStatus(NamedTuple):
    """The status of a run in a store, read without contacting its workers."""

    store: str
    rounds: int | None
    """Rounds of the whole run; None for a loop of a user's own (`Outer(store=...)`), whose end the store does not know."""
    round: int
    """Closed rounds."""
    closed_by: int | None
    """The slot that closed the last round; with a server, that added the last event."""
    age_s: float | None
    """Its age, by the clock of that machine; negative where that is ahead of the clock here."""
    states: list[int]
    """The rounds with a stored state; of a server, its events."""
    workers: list[SlotStatus]
    server: bool = False
    """Whether it is a run with a server, of which each worker has the state."""


def store_status(url: str, *, peers: Path | None = None, now_s: float | None = None) -> StoreStatus:
    """The status of the run in a store.

    Args: `peers` is the run file of a run with [peers], which this machine's key opens.
    Raises: ConfigError if there is no run; TransportError for a damaged one; PeerError.
    Cost: four requests, five with keys.
    """
    run = stored_run(url, peers)
    n, seen = run.workers, Sightings(run.workers)
    with reading(url):
        seen.look(run.bucket.names("s"), 0.0)
        # From the newest state on: those before it were closed too.
        seen.look(run.bucket.names(f"r{max(0, max(seen.states, default=0) - 1):08d}"), 0.0)
        name = commit_name(seen.newest)
        raw = None if seen.newest < 0 else run.bucket.get(name, MOST_HEAD_BYTES)
        item = None if raw is None else run.seal.opened(name, raw)
        last = None if item is None else commit_in(seen.newest, item.head, n)
        event = None if item is None else event_in(seen.newest, item, n)
    workers: list[SlotStatus] = []
    for slot in range(n):
        life = seen.lives.get(slot)
        standing = "empty" if life is None else "left" if (slot, life) in seen.ended else "held"
        steps, counted = (0, False) if last is None else (last.steps[slot], slot in last.parts)
        workers.append(SlotStatus(slot, standing, 0 if life is None else life + 1, steps, counted))
    now_s = time.time() if now_s is None else now_s
    closer, age_s = (None, None) if last is None else (last.closer[0], now_s - last.time_s)
    closed = seen.newest + 1 if not run.has_server else 0 if event is None else event.rounds
    return StoreStatus(url, run.rounds, closed, closer, age_s, sorted(seen.states), workers, run.has_server)


def standing_of(seen: Sighting) -> str:
    """The standing of a slot, in one word.

    alive: it trains. joining: it has a slot and fetches its state. suspect: others have lost the connection with it, or it
    has been silent. gone: it ended without a goodbye: its process on this machine has ended, or no process listens at its
    address. left: it was stopped on request, and has saved its state. finished: it has trained all rounds. empty: the slot
    was never filled. unknown: not determined by its files.

    >>> standing_of(Sighting(SlotEntry(1, 0, 5, MemberStatus.SUSPECT, 0, "127.0.0.1:4000"), refused=True))
    'gone'
    >>> standing_of(Sighting(finished=True, elastic=False)), standing_of(Sighting(traces=False))
    ('finished', 'empty')
    """
    entry, ended = seen.entry, seen.life.ended if seen.life is not None else None
    if entry is not None and entry.status != MemberStatus.LEFT:
        if (seen.refused or seen.here is False) and not seen.answered:
            return "gone"
        return entry.status.name.lower()
    if entry is not None and not entry.address and ended is None:
        return "empty" if seen.life is None else "gone"
    if seen.finished or (ended is not None and ended.why == "finished"):
        return "finished"
    if entry is not None or ended is not None:
        return "left"
    if seen.refused or seen.here is False:
        return "gone"
    if seen.here and not seen.elastic:  # an elastic one would have answered
        return "alive"
    return "unknown" if seen.traces or not seen.elastic else "empty"


class _Records(NamedTuple):
    """The contents of a run's files."""

    folder: Path
    kind: str
    rounds: int
    elastic: bool
    """Whether its workers answer queries."""
    in_rounds: bool
    lives: dict[int, list[Life]]
    """From the logs in this folder; on several machines each has its own."""
    trained: list[dict[str, Any]]
    """Lines of metrics."""
    newest: dict[int, dict[str, Any]]
    """The last of them, by worker."""
    seconds: dict[int, RoundSeconds]
    slowed: dict[int, float]
    addresses: dict[int, Address]
    over: bool
    """Whether the server has recorded the end of the run; its workers divide the steps, so their last rounds differ."""
    named: frozenset[int]
    """Slots that took part in a round according to any log."""


class _Answers(NamedTuple):
    """The answers of the queried workers."""

    views: dict[int, View]
    refused: set[str]
    """Addresses at which no process listens."""
    note: str | None

    @property
    def entries(self) -> dict[int, SlotEntry]:
        """All views merged."""
        entries: dict[int, SlotEntry] = {}
        for entry in (entry for view in self.views.values() for entry in view.entries):
            entries[entry.slot] = merged(entries[entry.slot], entry) if entry.slot in entries else entry
        return entries

    @property
    def refusals(self) -> dict[str, int]:
        """The refusals of all views, most frequent first."""
        counts = sum((Counter(view.refused) for view in self.views.values()), Counter[str]())
        return dict(counts.most_common())


IN_STORE = (
    "the run lies in a store, and here are the files of some of its workers: gossamer status URL shows all of them"
)


def run_status(folder: Path, *, now_s: float | None = None) -> RunStatus:
    """The status of the run in a folder.

    Args: `now_s` is Unix time, from which ages are counted.
    Raises: ConfigError when the folder holds no run, DataError for a spoilt file.
    Cost: reads the metrics, seconds and outcomes of the run; waits up to PATIENCE_S for queried workers.
    """
    run, metrics = run_file_of(run_file(folder)), read_metrics(folder)
    records = _records(folder, run, metrics)
    limits = Limits(run.workers, run.workers * run.steps, run.workers * run.steps)
    answers = _asked(folder, records.addresses.values(), limits, run.peers)
    entries = answers.entries
    now_s = time.time() if now_s is None else now_s
    workers = [_of_worker(slot, entries.get(slot), records, answers, now_s) for slot in range(run.workers)]
    recorded = [line["round"] + (line["kind"] != "diverged") for line in metrics]
    newest = max([0, *(one.round for one in workers), *recorded])
    return RunStatus(
        folder,
        run.name,
        records.kind,
        run.rounds,
        newest,
        sorted(answers.views),
        answers.note
        or (IN_STORE if store_file(folder).exists() else _about_strangers(records.kind, bool(run.peers), workers)),
        answers.refusals,
        workers,
    )


def _about_strangers(kind: str, keyed: bool, workers: Sequence[WorkerStatus]) -> str | None:
    """The reason why nothing is known of the workers without files here, where those of the run are not asked; else None."""
    strangers = [one.worker for one in workers if one.standing == "unknown" and one.age_s is None]
    if not (kind == "server" or (kind == "rounds" and not keyed)) or len(strangers) in (0, len(workers)):
        return None
    of = f"{len(strangers)} workers" if len(strangers) > 4 else f"worker {', '.join(map(str, strangers))}"
    keys = ", or list keys as [peers] in the run file (gossamer keys), with which status asks all workers"
    return (
        f"no files of {of} are here, and workers of other machines are not asked in a run "
        f"{'with a server' if kind == 'server' else 'in rounds without [peers]'}; call gossamer status there too"
        f"{'' if kind == 'server' else keys}"
    )


def _records(folder: Path, run: RunFile, metrics: Sequence[dict[str, Any]]) -> _Records:
    n, rounds = run.workers, run.rounds
    simulated = (folder / "metrics.jsonl").exists() and not any(folder.glob("metrics-[0-9]*.jsonl"))
    kind = "simulation" if simulated else run.kind
    elastic, in_rounds = kind in ("elastic", "pair", "no waiting"), kind not in ("pair", "no waiting")
    listens = elastic or (kind == "rounds" and bool(run.peers))
    trained = [line for line in metrics if line["kind"] == "train" and isinstance(line.get("worker"), int)]
    lives = read_outcomes(folder) if in_rounds else _lives_in_order(folder, rounds)
    named = {one.alive for some in lives.values() for life in some for one in life.rounds}
    seconds, slowed = _paces(folder, None if simulated else run)
    return _Records(
        folder=folder,
        kind=kind,
        rounds=rounds,
        elastic=elastic and not store_file(folder).exists(),  # there no process can be asked
        in_rounds=in_rounds,
        lives=lives,
        trained=trained,
        newest={line["worker"]: line for line in trained},
        seconds=seconds,
        slowed=slowed,
        addresses={one.slot: one for one in reversed(read_addresses(folder)) if one.slot < n} if listens else {},
        over=kind == "server" and any(line["kind"] == "eval" and line["round"] + 1 >= rounds for line in metrics),
        named=frozenset(range(n)) if None in named else frozenset[int]().union(*(some for some in named if some)),
    )


def _of_worker(slot: int, entry: SlotEntry | None, records: _Records, answers: _Answers, now_s: float) -> WorkerStatus:
    lives, trained = records.lives.get(slot, []), records.newest.get(slot, {})
    listed = records.addresses.get(slot)
    address = entry.address if entry is not None else listed.address if listed is not None else ""
    done = _rounds_behind(lives, trained, entry if records.in_rounds else None)
    over = records.over or done >= records.rounds
    # Another process may use its port by now. A slot taken over from another machine has another address.
    here = trains_here(records.folder, slot) if entry is None or (listed and listed.address == entry.address) else None
    seen = Sighting(
        entry,
        lives[-1] if lives else None,
        slot in answers.views,
        address in answers.refused,
        here,
        over,
        records.elastic,
        bool(lives or trained) or slot in records.named,
    )
    age_s = _age_s(slot, records.folder, answers.views, now_s) if entry or lives or trained else None
    standing, last = standing_of(seen), records.seconds.get(slot)
    # For one that cannot be queried, the lock shows that the process exists, even if it is stopped.
    if standing == "alive" and not seen.answered and age_s is not None:
        round_s = 0.0 if last is None else last.end_s / (last.round + 1)
        standing = "silent" if is_silent(age_s, round_s) else standing
    return WorkerStatus(
        slot,
        standing,
        done,
        _steps(lives, trained),
        trained.get("loss"),
        age_s,
        address or None,
        *_failed(lives),
        _declined(slot, records.trained),
        last,
        records.slowed.get(slot),
    )


def _lives_in_order(folder: Path, rounds: int) -> dict[int, list[Life]]:
    """The lives of asynchronous workers, from the order of their events."""
    ends = {slot: lives[-1].ended for slot, lives in read_order(folder).items() if lives}
    return {
        slot: [Life(Begun(0, 0, slot, 0, 0), (), None if end is None else Ended(rounds, end.why))]
        for slot, end in ends.items()
    }


def _asked(folder: Path, addresses: Collection[Address], limits: Limits, peers: Mapping[str, Peer]) -> _Answers:
    """The views of the workers that answer."""
    if not addresses:
        return _Answers({}, set(), None)
    try:
        keys = keys_for(peers, limits.workers)
        secret = folder_secret(folder) if keys is None else b""
    except ConfigError as error:
        return _Answers({}, set(), f"no worker was asked: {error}")
    answers = _Answers({}, set(), None)

    def ask(address: Address) -> None:
        try:
            view = look(address.address, secret, run=address.run, limits=limits, timeout_s=PATIENCE_S, keys=keys)
        except ConnectionRefusedError:
            answers.refused.add(address.address)
        except (OSError, PeerError):
            return
        else:
            answers.views[view.worker] = view

    with ThreadPoolExecutor(min(32, len(addresses))) as threads:
        list(threads.map(ask, addresses))
    return answers if answers.views else answers._replace(note="no worker answers, so this is what the files tell")


def _rounds_behind(lives: Sequence[Life], trained: Mapping[str, Any], entry: SlotEntry | None) -> int:
    recorded = [life.rounds[-1].round + 1 for life in lives[-1:] if life.rounds]
    recorded += [life.ended.round for life in lives[-1:] if life.ended is not None and life.ended.why == "finished"]
    announced = [] if entry is None or entry.status == MemberStatus.JOINING else [entry.round]
    return max([0, *recorded, *announced, trained.get("round", -1) + 1])


def _steps(lives: Sequence[Life], trained: Mapping[str, Any]) -> int | None:
    counts = [life.rounds[-1].steps for life in lives if life.rounds] + [trained.get("step")]
    return max((steps for steps in counts if isinstance(steps, int)), default=None)


def _failed(lives: Sequence[Life]) -> tuple[int, int]:
    """The numbers of missed and unsure exchanges."""
    rounds = [one for life in lives for one in life.rounds]
    return sum(len(one.missed) for one in rounds), sum(len(one.unsure) for one in rounds)


def _declined(slot: int, trained: Sequence[Mapping[str, Any]]) -> int:
    """The number of a worker's messages declined by the others."""
    declined = (line.get("declined") for line in trained if line["worker"] != slot)
    counts = (counts.get(str(slot), 0) for counts in declined if isinstance(counts, Mapping))
    return sum(count for count in counts if isinstance(count, int))


def _age_s(slot: int, folder: Path, views: Mapping[int, View], now_s: float) -> float | None:
    """The age of the newest information about a worker: its answer, another worker's contact, or the last line of its files."""
    if slot in views:
        return 0.0
    ages = [view.silent_s[slot] for view in views.values() if slot in view.silent_s]
    written = [folder / f"{kind}{worker_suffix(slot)}.jsonl" for kind in ("outcomes", "order", "metrics", "seconds")]
    files = [path for path in written if path.exists()] or [folder / "metrics.jsonl"]
    ages += [max(0.0, now_s - path.stat().st_mtime) for path in files if path.exists()]
    return min(ages, default=None)


def _paces(folder: Path, run: RunFile | None) -> tuple[dict[int, RoundSeconds], dict[int, float]]:
    """The seconds of each worker's last recorded round, measured if there are any, else of the first network; and slow
    workers of a real run.
    """
    last, paces = dict[int, RoundSeconds](), Paces()
    for one in read_seconds(folder):
        if last.setdefault(one.worker, one).network == one.network:
            last[one.worker] = one  # ordered by network and round
        if run is not None and one.worker < run.workers and (step_s := run.step_s(one._asdict())) is not None:
            paces.slowed(one.worker, step_s)
    slowed = {worker: paces.now(worker) for worker in last}
    return last, {worker: times for worker, times in slowed.items() if times is not None}
