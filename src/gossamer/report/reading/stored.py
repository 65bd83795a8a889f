"""A run whose state lies in a store, read without contacting its workers, and followed for pages.

A look is one listing from the newest known round on, and one request for each round that was closed since. Looks are made
while somebody reads only, and become rare while nothing changes. Objects of the store are untrusted: those that no worker
of the run writes are reported and skipped. Needs no torch.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import ConfigError, GossamerError, TransportError, first_line
from gossamer.report.reading.follow import MOST_WORKERS, FollowedRun
from gossamer.report.reading.lines import RunFile
from gossamer.report.reading.thinning import Grid
from gossamer.settings.over_time import timetable_of
from gossamer.transport.bucket.bucket import MOST_HEAD_BYTES, Bucket, Folder, Item, Seal, SecretSeal, bucket_at
from gossamer.transport.bucket.objects import Commit, commit_in, commit_name
from gossamer.transport.bucket.server_log import ServerEvent, event_in
from gossamer.transport.bucket.sightings import Sightings
from gossamer.transport.bucket.signed import KEY_OBJECT, opened_key
from gossamer.transport.keys import Peer, dealt, keys_for, read_peers
from gossamer.transport.secret import environment_secret

NO_LOSSES = "a store keeps no losses: they are in the run folders of the workers (--out, or outer.record)"
_ENDLESS = (1 << 31) - 1
_PAUSES_S, _FOLDER_PAUSES_S = (6.0, 60.0), (1.0, 10.0)
"""The shortest and the longest pause between two looks."""
_QUIET_SHARE = 0.25
"""The pause until the next look, as a share of the time without a change."""
_WAIT_S = 0.5
"""How long a page waits for a look; a store that hangs must not hold it up."""
_MOST_READ = 64
"""Rounds that one look reads."""
_SILENT_S = (10.0, 300.0)
"""The shortest time after which a slot is called silent, and that before its pace is known: `run.timeout_s` if not set."""
_MOST_KEPT, _MOST_PARTS = 4096, 1 << 18
"""Rounds that are kept to be drawn, and their participants together."""
_MOST_NAMED = 16
_MOST_PAYLOAD = 1 << 50


class StoredRun(NamedTuple):
    """A run in a store."""

    url: str
    bucket: Bucket
    seal: Seal
    head: Mapping[str, Any]
    """The object `run`."""
    workers: int
    rounds: int | None
    """None for a loop of a user's own, whose end the store does not know."""
    peers: Mapping[str, Peer]

    @property
    def has_server(self) -> bool:
        """Whether it is a run with a server, whose events are the objects that others call commits."""
        return "server" in self.head

    def chosen(self, what: str) -> str | None:
        """The name of a part, such as the rule."""
        settings = self.head.get("settings")
        name = settings.get(f"{what}.name") if isinstance(settings, Mapping) else self.head.get(what)
        return name.strip('"')[:80] if isinstance(name, str) else None


def is_store(run: str) -> bool:
    """Whether a run is given by its store, and not by its run folder."""
    return "://" in run or (not Path(run, "run.toml").exists() and Path(run, "run").is_file())


@contextmanager
def reading(url: str) -> Iterator[None]:
    """A context in which a store that cannot be read raises ConfigError."""
    try:
        yield
    except TransportError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the store '{url}' cannot be read ({first_line(error)}); look at its address and rights"
        ) from None


def stored_run(url: str, peers: Path | None = None) -> StoredRun:
    """Opens the run in a store.

    Args: `peers` is the run file of a run with [peers], which this machine's key opens.
    Raises: ConfigError if there is no run; TransportError for a damaged one; PeerError.
    Cost: two requests.
    """
    bucket, listed = bucket_at(url), {} if peers is None else read_peers(peers)
    keys = keys_for(listed, sum(peer.workers for peer in listed.values()))
    with reading(url):
        seal: Seal = SecretSeal(environment_secret())
        key, raw = bucket.get(KEY_OBJECT, MOST_HEAD_BYTES), bucket.get("run", MOST_HEAD_BYTES)
        if key is not None and keys is not None:
            seal = opened_key(keys, key)
        elif key is not None and raw is not None and not _opens(seal, raw):
            # A store whose run opens without it is plain, and its 'key' is a file of others.
            raise ConfigError(
                f"the run in the store '{url}' has [peers], and is encrypted; give its run file with --peers RUN.toml, on a "
                "machine whose key it lists"
            )
        match head := None if raw is None else seal.opened("run", raw).head:
            case {"workers": int(n), "rounds": int() | None as rounds} if (
                0 < n < 1 << 20 and 0 < (rounds or 1) < _ENDLESS
            ):
                return StoredRun(url, bucket, seal, head, n, rounds, listed)
            case _:
                raise ConfigError(
                    f"no run lies in the store '{url}'; give the one that gossamer train --store or Outer(store=...) was given"
                )


def _opens(seal: Seal, raw: bytes) -> bool:
    with suppress(TransportError):
        seal.opened("run", raw)
        return True
    return False


class _Look(NamedTuple):
    """What a look has read."""

    names: Sequence[str]
    objects: Sequence[tuple[int, Item | TransportError]]
    """Outcomes of rounds, or events of a server, by number."""
    unread: int
    """The number of those that are left for the next look."""


class FollowedStore(FollowedRun):
    """The data of a run in a store, as far as its objects show it. Raises: as `stored_run`, and for too many workers."""

    def __init__(self, url: str, peers: Path | None = None) -> None:
        self._run = stored_run(url, peers)
        self._asking: threading.Thread | None = None
        self._answer: _Look | Exception | None = None
        self._failed: tuple[float, str] | None = None
        """Since when the store does not answer, Unix time, and why."""
        self._due_s = 0.0
        super().__init__(url, Path(url))

    def _restart(self) -> None:
        super()._restart()
        run = self._run
        if run.workers > MOST_WORKERS:
            raise ConfigError(
                f"the run in '{run.url}' has {run.workers} workers and a page shows {MOST_WORKERS} at most"
            )
        rounds, kind = run.rounds or _ENDLESS, "server" if run.has_server else "rule"
        self.file = RunFile(
            run.url,
            run.workers,
            rounds,
            timetable_of(((0, 1),), rounds),
            run.chosen(kind) or kind,
            run.chosen("topology"),
            "server" if run.has_server else "rounds",
            {},
            "",
            run.peers,
        )
        self._forget()
        self.complain(NO_LOSSES)
        self._seen, self._newest, self._unread, self._done = Sightings(run.workers), -1, 0, 0
        self._bad = set[int]()
        """Objects that are none of this run."""
        self._looked_s = self._changed_s = time.monotonic()
        self._first_s, self._sign_s = math.inf, 0.0
        """The first look, and in Unix time the last sign of life."""
        self._signs: dict[tuple[int, int], float] = {}
        """When the lease of a life moved last, as far as it was observed."""
        self._gap_s = 0.0
        """The longest time between two signs of a life."""
        self._since: dict[int, tuple[int, str]] = {}
        """The life of each slot, and since when it holds the slot."""
        self._moments: dict[int, dict[str, Any]] = {}
        self._pushed: dict[int, int | None] = {}
        """The workers that have pushed since the last round of a server, with the bytes of their messages."""
        self._last = ""
        """Who added the last outcome or event, and when."""
        self._began_s, self._end_s = math.inf, 0.0

    # --- what a page shows --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """The share of the outcomes that were read."""
        return 1.0 if not self._unread else (self._newest + 1) / (self._newest + 1 + self._unread)

    @property
    def modified_s(self) -> float:
        """When a worker has shown a sign of life, Unix time; before any was observed that of the last outcome by its clock."""
        return self._sign_s

    @property
    def done(self) -> int:
        """Closed rounds."""
        return self._done

    def standings(self) -> list[str]:
        """The standing of each slot, as of the last look.

        empty: never held. held: a process has it, which has shown no sign of life since the page began. training: it has.
        silent: not for three times as long as it takes otherwise. left: released. finished: the run is over.
        """
        limit_s = max(_SILENT_S[0], 3 * self._gap_s) if self._gap_s else _SILENT_S[1]
        words: list[str] = []
        for slot in range(self._run.workers):
            life = self._seen.lives.get(slot, -1)
            sign_s = self._signs.get((slot, life), self._first_s)
            if life < 0:
                words.append("empty")
            elif self._run.rounds is not None and self.done >= self._run.rounds:
                words.append("finished")
            elif (slot, life) in self._seen.ended:
                words.append("left")
            elif self._looked_s - sign_s > limit_s:
                words.append("silent")
            else:
                words.append("training" if (slot, life) in self._signs else "held")
        return words

    def moment(self, round: int) -> dict[str, Any]:
        """Who took part in a round."""
        nothing = {"pairs": [], "left_out": 0, "everyone": False, "mean_bytes": 0, "failed": [], "seconds": {}}
        known = self._moments.get(round, {"alive": None, "words": f"Round {round} was not read, or is not kept."})
        return {"round": round, **nothing, **known}

    def more(self) -> dict[str, Any]:
        """What a store knows besides."""
        names = {slot: name for name, slots in dealt(self._run.peers).items() for slot in slots}
        holders = ["nobody yet"] * self._run.workers
        for slot, (life, since) in self._since.items():
            until = "has left" if (slot, life) in self._seen.ended else since
            holders[slot] = f"process {life + 1}{f' of {names[slot]}' if slot in names else ''} {until}"
        return {"folder": self._run.url, "rounds": self._run.rounds, "store": True, "holders": holders}

    def notes(self) -> list[str]:
        """What is to be known now: that the store cannot be read, or that nobody trains."""
        if self._failed is not None:
            return [
                f"{self.label} cannot be read since {_clock(self._failed[0])}, and is tried again: {self._failed[1]}"
            ]
        words = {*self.standings()} - {"empty"}
        if self._first_s == math.inf:
            return []
        if not words:
            return [f"{self.label}: no process has taken a slot so far"]
        if words & {"held", "training", "finished"}:
            return []
        return [f"{self.label}: no process of the run gives a sign of life; {self._last or 'no round is closed'}"]

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def here(self) -> int:
        """The number of workers that took part: a store has the bytes of all of them."""
        return max(1, sum(rounds > 0 for rounds in self.rounds_of))

    def look(self, until_s: float = math.inf) -> bool:
        """Begins a look if one is due, and takes what it has read by then; returns whether all was read."""
        now = time.monotonic()
        if self._asking is None and now >= self._due_s:
            self._asking = threading.Thread(target=self._ask, daemon=True, name="gossamer store")
            self._asking.start()
        if self._asking is not None:
            self._asking.join(max(0.0, min(until_s - now, _WAIT_S)))
            if not self._asking.is_alive():
                self._asking, before = None, (self.standings(), self.notes())
                self._take_answer()
                self.revision += before != (self.standings(), self.notes())
        return self._asking is None and not self._unread

    def _ask(self) -> None:
        """Runs in a thread; nothing but `_answer` is written here, which is read after its end."""
        try:
            self._answer = self._read_store()
        except Exception as error:
            self._answer = error

    def _read_store(self) -> _Look:
        bucket, newest = self._run.bucket, self._newest
        names = bucket.names(f"r{max(newest, 0):08d}")
        if newest >= 0 and commit_name(newest) not in names:
            raise ConfigError(
                f"'{commit_name(newest)}', which was read, is gone, as somebody has emptied the store; watch it again for what "
                "lies there now"
            )
        numbers = [int(name[1:9]) for name in names if name[1:9].isdecimal() and name == commit_name(int(name[1:9]))]
        unread = [number for number in numbers if number > newest and number not in self._bad]
        objects: list[tuple[int, Item | TransportError]] = []
        for number in unread[:_MOST_READ]:
            name = commit_name(number)
            try:
                raw = bucket.get(name, MOST_HEAD_BYTES)
                if raw is None:
                    break  # a listing may show what cannot be read yet
                objects.append((number, self._run.seal.opened(name, raw)))
            except TransportError as error:
                objects.append((number, error))
        return _Look(names, objects, len(unread) - len(objects))

    def _take_answer(self) -> None:
        answer, self._answer, now = self._answer, None, time.monotonic()
        shortest_s, longest_s = _FOLDER_PAUSES_S if isinstance(self._run.bucket, Folder) else _PAUSES_S
        if isinstance(answer, OSError | GossamerError):
            self._failed = time.time() if self._failed is None else self._failed[0], first_line(answer)
            self._due_s = now + min(longest_s, max(shortest_s, _QUIET_SHARE * (now - self._looked_s)))
            return
        if not isinstance(answer, _Look):
            raise answer or AssertionError("a look has ended without an answer")
        self._failed, self._due_s = None, now + shortest_s
        if self._take_names(answer.names, now) or answer.objects:
            self._changed_s = now
        for number, item in answer.objects:
            self._take_object(number, item)
        self._unread, self._looked_s = answer.unread, now
        more = bool(answer.unread and answer.objects)
        self._due_s = now + (0.0 if more else min(longest_s, max(shortest_s, _QUIET_SHARE * (now - self._changed_s))))

    def _take_names(self, names: Sequence[str], now: float) -> bool:
        """Takes a listing; returns whether anybody has shown a sign of life."""
        moved, time_s = False, time.time()
        was_begun, self._first_s = self._first_s < now, min(self._first_s, now)
        self._seen.look(names, now)
        for slot, life in self._seen.lives.items():
            if life > self._since.get(slot, (-1, ""))[0]:
                self._since[slot] = life, f"since {'' if was_begun else 'before '}{_clock(time_s)}"
                self.revision += 1
            sign_s, last_s = self._seen.moved_s(slot), self._signs.get((slot, life))
            if sign_s is not None and sign_s > (self._first_s if last_s is None else last_s):
                self._gap_s = self._gap_s if last_s is None else max(self._gap_s, sign_s - last_s)
                self._signs[slot, life], self._sign_s, moved = sign_s, time_s, True
        return moved

    def _take_object(self, number: int, item: Item | TransportError) -> None:
        """Takes the outcome of a round, or an event of a server."""
        n, name = self._run.workers, commit_name(number)
        self.revision += 1
        if isinstance(item, TransportError):
            self._bad.add(number)
            self.complain(f"{self.label}: {item}")
            return
        commit, event = commit_in(number, item.head, n), event_in(number, item, n) if self._run.has_server else None
        rounds = number if event is None else event.rounds - 1
        is_event = (event is not None) == self._run.has_server
        is_in_run = is_event and rounds < (self._run.rounds or _ENDLESS)
        if commit is None or not item.is_of(commit.closer[0]) or not is_in_run:
            self._bad.add(number)
            self.complain(
                f"{self.label}: the object '{name}' is none that a worker of this run writes, and is left out"
            )
            return
        if number > self._newest + 1:
            self.complain(f"{self.label}: '{commit_name(self._newest + 1)}' is not there, though later ones are")
        self._newest = number
        self._sign_s = self._sign_s if self._signs else min(commit.time_s, time.time())
        sizes = _sizes_in(item.head)
        if event is None:
            self._take_round(commit, sizes)
        else:
            self._take_event(event, commit, sizes)

    def _take_round(self, commit: Commit, sizes: Mapping[str, int]) -> None:
        alive = None if len(commit.parts) == self._run.workers else [*commit.parts]
        for slot, part in commit.parts.items():
            line = {"round": commit.round, "alive": alive, "missed": (), "unsure": ()}
            if part.begun is not None:
                self._process_outcome(slot, {**line, "event": "begin", **part.begun._asdict()})
            self._process_outcome(slot, {**line, "event": "round"})
        self._close(commit.round, commit, {slot: sizes.get(str(slot)) for slot in commit.parts}, sizes.get("mean", 0))

    def _take_event(self, event: ServerEvent, commit: Commit, sizes: Mapping[str, int]) -> None:
        self.events[event.event] = self.events.get(event.event, 0) + 1
        if event.rounds > self._done:  # it has closed with the event before this one
            self._close(event.rounds - 1, commit, self._pushed, 0)
            self._pushed = {}
        self._last = f"event {commit.round} was added by worker {commit.closer[0]} at {_clock(commit.time_s)}"
        if event.event == "push":
            self._pushed[event.worker] = sizes.get(str(event.worker))
            self._behind(event.worker, event.phase + 1)
        elif event.event != "tick":
            verb = "joins" if event.event == "join" else "leaves, or has died"
            self._happen(event.rounds, f"worker {event.worker}: process {event.life + 1} {verb}")

    def _close(self, round: int, commit: Commit, sent: Mapping[int, int | None], mean_bytes: int) -> None:
        """Records that a round was closed, over these workers with the bytes of their messages."""
        self._done, closer = round + 1, commit.closer[0]
        self.evaluations.add({"round": round, "closed_rounds": round + 1, "workers_in_the_round": len(sent)})
        self.steps.put(round, closer, max(commit.steps))
        self._began_s = min(self._began_s, commit.time_s)
        self._end_s = max(self._end_s, commit.time_s - self._began_s)
        self.clock.setdefault(None, Grid(self._run.workers)).put(round, closer, self._end_s)
        known = {slot: size for slot, size in sent.items() if size is not None}
        for slot, size in known.items():
            self.sent.put(round, slot, size)
        if mean_bytes:
            self.sent.put(round, closer, mean_bytes)
        who = ", ".join(map(str, sorted(sent))) if len(sent) <= _MOST_NAMED else f"{len(sent)} workers"
        self._last = f"round {round} was closed by worker {closer} at {_clock(commit.time_s)}, by its clock"
        mean = f", and the mean {mean_bytes:,}" if mean_bytes else ""
        total = f" Their messages have {sum(known.values()):,} bytes{mean}." if known else ""
        self._moments[round] = {
            "alive": None if len(sent) == self._run.workers else sorted(sent),
            "everyone": bool(commit.mean),
            "mean_bytes": max(known.values(), default=0),
            "pairs": [[-1, slot, size or 0] for slot, size in sent.items()] if self._run.has_server else [],
            "words": f"{self._last[0].upper()}{self._last[1:]}. Took part: {who}.{total}",
        }
        while len(self._moments) > min(_MOST_KEPT, _MOST_PARTS // self._run.workers):
            del self._moments[min(self._moments)]


def _sizes_in(head: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of messages in an outcome, by slot, and of their mean; without those of an earlier version's or a liar's."""
    sizes = head.get("payload_bytes")
    known = sizes.items() if isinstance(sizes, Mapping) else ()
    return {slot: size for slot, size in known if type(size) is int and 0 <= size < _MOST_PAYLOAD}


def _clock(time_s: float) -> str:
    """A time of day with its date.

    >>> _clock(0.0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
