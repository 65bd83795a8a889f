"""How workers that share only a store train one run: slots, leases, rounds and states are objects that are created once.

    key                       the key of the run, where it has [peers] (`gossamer.transport.bucket.signed`)
    run                       what all have in common; the first worker writes it
    r00000012-from-00003-0001 what the worker of slot 3, the second there, sends in round 12
    r00000012-mean-HASH       the mean of some of these
    r00000012-commit          the participants and the hash of the mean of round 12: the first one created counts
    s00000012                 the state of a worker after 12 rounds; s00000012-00003 is that of slot 3, where they differ;
                              s00000000 is that of the start, where workers cannot make it by themselves
    t00003-0001               a process takes slot 3 as the second one
    u00003-0001-00000007      its eighth sign of life
    v00003-0001               it has ended

Any worker closes a round by a commit, which has the same effect for all: a dead worker holds up the others only until its lease
ends, and a state is an earlier one with the commits since then. The mean in the store saves reading all messages; where objects
prove who has written them, a mean by another key is not trusted: each worker takes the mean of the messages that the commit
names, so that the writer of a false mean is reported and changes nothing. A lease is judged by the observer's own monotonic
clock, from when it last saw the lease move. Two holders of a slot do no harm, as a commit counts one message of a slot.

In gossip the workers differ. A commit has no mean there: each worker takes the messages of its peers, as the topology has them
over those that the commit names, so both ends of an exchange count it or neither does. A worker that takes over a slot
continues from its last state, or from a newer one of another slot where that is old.

One listing from the round on shows all that a worker needs, as leases sort behind rounds. No I/O is here: the steps of a
worker are a generator that yields requests to the store (`Asking`). `gossamer.transport.bucket.perform` runs it, and
`tests/transport/test_bucket_protocol.py` with delays, errors and deaths over virtual time.
"""

import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from gossamer.errors import CheckpointError, GossamerError, PeerError, TransportError
from gossamer.record.fault import FaultKind
from gossamer.transport.bucket.bucket import Item, Seal, SecretSeal, is_lasting

T = TypeVar("T")
P = TypeVar("P", bound="StoreProcess")
BEATS = 3
"""Signs of life within the time after which a silent worker counts as dead."""
AHEAD = 8
"""Most missed rounds after which a worker continues from its own state and reads their means, to keep its inner optimizer."""
LOOK_SHARE = 0.25
"""The pause until the next look, as a share of the time waited so far: long waits make few requests."""
_STRIKES = 5
_MOST_TIME_S = 1e11
"""A bound on Unix time in objects."""
_NAMES = re.compile(
    r"r(?P<round>\d{8})-(?:(?P<commit>commit)|from-(?P<sender>\d{5})-(?P<of>\d{4,8})|mean-[0-9a-f]{64})"
    r"|s(?P<state>\d{8})(?:-(?P<holder>\d{5}))?|(?P<kind>[tuv])(?P<slot>\d{5})-(?P<life>\d{4,8})(?:-(?P<beat>\d{8}))?",
    re.ASCII,
)


class Names(NamedTuple):
    """Requests all names that sort after one."""

    after: str


class Get(NamedTuple):
    """Requests an object."""

    name: str


class Create(NamedTuple):
    """Creates an object unless there is one."""

    name: str
    content: bytes


class Remove(NamedTuple):
    """Removes an object."""

    name: str


class Sleep(NamedTuple):
    """Waits."""

    seconds: float


class Do(NamedTuple):
    """Computes something."""

    work: Callable[[], Any]


class TrainPhase(Do):
    """Trains a local phase; returns its message. Where the training loop is a user's, the steps are suspended here."""


Asking = Names | Get | Create | Remove | Sleep | Do
Steps = Generator[Asking, Any, T]


class StoreTerms(NamedTuple):
    """The settings of the protocol that all workers of a run have in common."""

    run: Mapping[str, Any]
    """The content of the object `run`, which must be the same for all."""
    workers: int
    rounds: int
    timeout_s: float
    """Seconds without a move of its lease after which a slot is free."""
    deadline_s: float
    """Seconds that a worker waits in a round for others that live."""
    seal: Seal = SecretSeal()
    look_s: float = 0.5
    """The shortest pause between two looks."""
    rest_s: float = 15.0
    """The longest pause between two looks."""
    gossip: bool = False
    """Whether this is gossip: each worker takes the messages of its peers, and has separate states."""
    rejoin_rounds: int = 0
    """In gossip: most rounds by which a state may be behind; an older one is given up for a newer one of another slot."""
    start_in_store: bool = False
    """Whether the first worker puts the state of the start into the store, as workers cannot make it by themselves."""


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


class StoreProcess(Protocol):
    """What each process of a run in a store provides."""

    def agree(self, identity: str) -> None:
        """Checks that the store holds this run; one that was started again has another identity. Raises: ConfigError."""
        ...

    def asked(self) -> bool:
        """Whether it was asked to leave."""
        ...

    def say(self, sentence: str) -> None:
        """Reports a sentence to the user."""
        ...


class StoreWorker(StoreProcess, Protocol):
    """The computations of a worker; bodies of objects are bytes here."""

    def begin(self, slot: int, life: int) -> int:
        """Gives it a slot; returns the rounds behind its own newest state, 0 for that of the start."""
        ...

    def restore(self, after: int) -> str | None:
        """Restores its own state after so many rounds; returns its hash, empty at the start, None where it has none."""
        ...

    def load(self, after: int, donor: int, body: memoryview) -> str:
        """Takes a state from the store; returns its hash. Raises: CheckpointError, of the kind "damaged" for what is no state."""
        ...

    def add(self, commit: Commit, mean: memoryview) -> None:
        """Adds the mean of a round in which this worker had no part. Raises: CheckpointError."""
        ...

    def start(self, round: int, begun: Basis) -> None:
        """Begins to train from this state."""
        ...

    def common(self) -> str:
        """The hash of what all workers have in common now, where they are equal after each round."""
        ...

    def train(self, round: int) -> bytes:
        """Trains a local phase; returns its message."""
        ...

    def steps(self) -> int:
        """Inner steps behind its slot."""
        ...

    def is_sound(self, round: int, body: memoryview) -> bool:
        """Whether a message may count."""
        ...

    def is_mean(self, round: int, own: bytes, there: memoryview) -> bool:
        """Whether another worker's mean equals this one, up to rounding on other hardware."""
        ...

    def mean(self, round: int, messages: Mapping[int, bytes | memoryview]) -> bytes:
        """The mean of the messages of these slots."""
        ...

    def finish(self, commit: Commit, mean: memoryview) -> None:
        """Ends the round with its mean. Raises: CheckpointError."""
        ...

    def peers(self, round: int, parts: Collection[int]) -> Collection[int]:
        """In gossip: the slots from which it takes messages in a round over these slots."""
        ...

    def mix(self, commit: Commit, messages: Mapping[int, memoryview]) -> None:
        """Ends the round with the messages of its peers. Raises: CheckpointError."""
        ...

    def state(self, finished: int) -> bytes | None:
        """Its state, where one is due after so many rounds."""
        ...


def message_name(round: int, slot: int, life: int) -> str:
    """The name of the message of a worker."""
    return f"r{round:08d}-from-{slot:05d}-{life:04d}"


def commit_name(round: int) -> str:
    """The name of the outcome of a round."""
    return f"r{round:08d}-commit"


def _mean(round: int, sha256: str) -> str:
    return f"r{round:08d}-mean-{sha256}"


def state_name(after: int, slot: int = -1) -> str:
    """The name of a state; a slot where they differ."""
    return f"s{after:08d}" + (f"-{slot:05d}" if slot >= 0 else "")


def lease_name(kind: str, slot: int, life: int) -> str:
    """The name of a claim (t), a sign of life (u, without its number) or an end (v) of a slot."""
    return f"{kind}{slot:05d}-{life:04d}"


class Sightings:
    """Objects that a process has seen, in listings that may be incomplete. Other names are ignored."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.newest = -1
        """The newest round that is closed."""
        self.messages: dict[int, dict[int, int]] = defaultdict(dict)
        """The life of each sender, by round and slot."""
        self.states: set[int] = set()
        """The rounds after which there is a state."""
        self.holders: dict[int, set[int]] = defaultdict(set)
        """In gossip the rounds after which there is a state, by slot."""
        self.lives: dict[int, int] = {}
        """The last life of each slot."""
        self.ended: set[tuple[int, int]] = set()
        self._beats: dict[tuple[int, int], tuple[int, int]] = {}
        self._moved_s: dict[tuple[int, int], float] = {}

    def look(self, names: Sequence[str], now: float) -> None:
        """Adds a listing."""
        for match in filter(None, map(_NAMES.fullmatch, names)):
            fields = match.groupdict()
            if int(fields["sender"] or fields["slot"] or 0) >= self._workers:
                continue
            if fields["commit"]:
                self.newest = max(self.newest, int(fields["round"]))
            elif fields["sender"]:
                round, slot, life = int(fields["round"]), int(fields["sender"]), int(fields["of"])
                self.messages[round][slot] = max(life, self.messages[round].get(slot, 0))
                self._moves(slot, life, (0, round + 1), now)
            elif fields["state"]:
                self.states.add(int(fields["state"]))
                if fields["holder"] and int(fields["holder"]) < self._workers:
                    self.holders[int(fields["holder"])].add(int(fields["state"]))
            elif fields["kind"]:
                slot, life = int(fields["slot"]), int(fields["life"])
                self.lives[slot] = max(life, self.lives.get(slot, 0))
                if fields["kind"] == "v":
                    self.ended.add((slot, life))
                self._moves(slot, life, (int(fields["beat"] or -1) + 1, 0), now)
        for old in [round for round in self.messages if round < self.newest]:
            del self.messages[old]

    def _moves(self, slot: int, life: int, sign: tuple[int, int], now: float) -> None:
        before = self._beats.get((slot, life), (-1, -1))
        after = max(before[0], sign[0]), max(before[1], sign[1])
        if after != before:
            self._beats[slot, life], self._moved_s[slot, life] = after, now

    def is_held(self, slot: int, now: float, timeout_s: float) -> bool:
        """Whether the holder of a slot may be alive."""
        life = self.lives.get(slot)
        if life is None or (slot, life) in self.ended:
            return False
        return now - self._moved_s.get((slot, life), now) < timeout_s

    def sent_until(self, slot: int, life: int) -> int:
        """The round after the last one in which a message of a process was seen."""
        return self._beats.get((slot, life), (0, 0))[1]

    def moved_s(self, slot: int) -> float | None:
        """When the lease or a message of the last holder of a slot was first seen, by the clock of the looks."""
        return self._moved_s.get((slot, self.lives.get(slot, -1)))

    def live(self, now: float, timeout_s: float) -> set[int]:
        """The slots of all holders that may be alive."""
        return {slot for slot in self.lives if self.is_held(slot, now, timeout_s)}


class SlotLostError(PeerError):
    """Another process has taken the slot, as this one was silent for too long."""


class SlotHolder(Generic[P]):
    """One process in a run whose state lies in a store: its slot, its lease, and its requests.

    Args:
        nonce: a random number by which it recognises its own claim of a slot.
        clock: seconds that never go back.
    """

    def __init__(self, terms: StoreTerms, work: P, nonce: str, clock: Callable[[], float]) -> None:
        self.terms, self._work, self._nonce, self._clock = terms, work, nonce, clock
        self.seen = Sightings(terms.workers)
        self.slot = self.life = -1
        self.round = 0
        self.over = False
        """Whether it has ended, or tries to get another slot."""
        self._asked_s = self._looked_s = clock()
        """When the last request was made, and the last look: a process that is stopped meanwhile has an old listing."""
        self._beat = -1
        self._believed: dict[str, bool] = {}
        """Claims and ends of slots that were read, and whether each was signed by a key that may have the slot."""
        self._unsound: dict[str, GossamerError] = {}
        """States that cannot be loaded, and why, in the order in which they were read."""
        self._listed: Sequence[str] = ()
        """What the last look has shown."""

    def beats(self) -> Steps[None]:
        """Renews the lease repeatedly; runs concurrently with `live`."""
        while not self.over:
            if self.slot >= 0:
                slot, life, beat = self.slot, self.life, self._beat + 1
                name = lease_name("u", slot, life)
                try:
                    yield Create(f"{name}-{beat:08d}", b"")
                    if beat:
                        yield Remove(f"{name}-{beat - 1:08d}")
                except OSError:  # `live` reports it, and waits
                    pass
                if self.slot == slot:
                    self._beat = beat
            yield Sleep(self.terms.timeout_s / BEATS)

    def _agree(self) -> Steps[None]:
        """Writes the object `run`, or compares with the one that is there. Raises: PeerError."""
        yield from self._create("run", {**self.terms.run, "id": self._nonce})
        waited_s = 0.0
        while (item := (yield from self._read("run"))) is None:  # it is not visible yet
            waited_s += yield from self._pause_for("the object 'run'", waited_s)
        here, there = _one_by_one(self.terms.run), _one_by_one(item.head)
        identity = there.pop("id", None)
        # The hash of all settings, the key, tells a person least.
        names = sorted({*here, *there}, key=lambda name: (name == "key", name))
        other = next((name for name in names if here.get(name) != there.get(name)), None)
        if other is not None or not isinstance(identity, str):
            raise PeerError(
                f"the store holds another run: {other} is {there.get(str(other))!r:.160} there and "
                f"{here.get(str(other))!r:.160} here; start all with the same settings, data and gossamer, or give another store"
            )
        self._work.agree(identity)

    def _claim(self) -> Steps[None]:
        """Takes a free slot, or one whose worker was silent for too long. Raises: PeerError."""
        waited_s, was_reported = 0.0, False
        while not self._work.asked():
            # Names after all rounds: claims, signs of life and ends.
            yield from self._look(None)
            now = self._looked_s
            for slot in filter(self.terms.seal.may_hold_slot, range(self.terms.workers)):
                if self.seen.is_held(slot, now, self.terms.timeout_s):
                    continue
                life = self.seen.lives.get(slot, -1) + 1
                name = lease_name("t", slot, life)
                created = yield from self._create(name, {"nonce": self._nonce})
                if not created:  # perhaps by this process, in a request whose answer was lost
                    item = yield from self._try_read(name)
                    if isinstance(item, TransportError):
                        if not self.terms.seal.proves_writers:
                            raise item
                        self._work.say(str(item))
                    created = isinstance(item, Item) and item.head == {"nonce": self._nonce}
                self.seen.look([name], now)  # a listing may lack the new object
                if created:
                    self.slot, self.life, self._beat = slot, life, -1
                    return
            if waited_s > 1.5 * self.terms.timeout_s:
                raise PeerError(
                    f"all {self.terms.workers} slots of the run are filled, or all that this machine's key may have; wait until "
                    "one has left, or start a run with more workers"
                )
            if not was_reported:
                was_reported = True
                self._work.say(
                    f"all slots are taken; a worker that has died frees its own within {self.terms.timeout_s:g} s"
                )
            waited_s += yield from self._pause(waited_s)

    def release(self) -> Steps[None]:
        """Frees its slot, in the store alone."""
        slot, life, self.slot = self.slot, self.life, -1
        yield from self._create(lease_name("v", slot, life), {})
        yield from self._remove(f"{lease_name('u', slot, life)}-{self._beat:08d}")

    def _look(self, round: int | None) -> Steps[None]:
        """Lists the objects from a round on; None for those that sort after all rounds.

        Raises: SlotLostError.
        """
        names = yield from self._names("s" if round is None else f"r{round:08d}")
        self._looked_s = self._asked_s
        if self.terms.seal.proves_writers:
            names = yield from self._proved(names)
        self._listed = names
        self.seen.look(names, self._looked_s)
        if self.slot >= 0 and self.seen.lives.get(self.slot, self.life) > self.life:
            raise SlotLostError(f"slot {self.slot} belongs to another process")

    def _proved(self, names: Sequence[str]) -> Steps[list[str]]:
        """The names that are proved to come from listed keys, each for slots that it may have.

        Claims and ends of slots, and outcomes of later rounds, are read once each; a name of a life needs the claim of that life.
        """
        parsed = {name: match.groupdict() for name in names if (match := _NAMES.fullmatch(name)) is not None}
        for name, one in parsed.items():
            later = one["commit"] is not None and int(one["round"]) > self.round
            if (later or one["kind"] in ("t", "v")) and name not in self._believed:
                item = yield from self._try_read(name)
                if item is None:
                    continue  # it does not show yet
                self._believed[name] = isinstance(item, Item)
                if isinstance(item, TransportError):
                    self._work.say(str(item))
        kept: list[str] = []
        for name, one in parsed.items():
            slot, life = one["sender"] or one["slot"], one["of"] or one["life"]
            claimed = slot is None or self._believed.get(f"t{slot}-{life}", False)
            if claimed and self._believed.get(name, True):
                kept.append(name)
        return kept

    def _put_state(self, head: Mapping[str, Any], body: bytes) -> Steps[None]:
        """Creates the state of this round, and removes what is older than the last state but one."""
        yield from self._create(state_name(self.round), head, body)
        yield from self._look(None)
        yield from self._remove_older(self.seen.states)

    def _remove_older(self, known: set[int], slot: int = -1) -> Steps[None]:
        """Removes what is older than the last state but one of those known: of this slot, or of all together."""
        states = sorted(known | {self.round})
        if len(states) < 2:
            return
        # Commits stay: they are small, record the run, and keep a slow worker from closing an old round once more.
        first, until = (states[0] if len(states) > 2 else 0), states[-2]
        yield from self._remove_rounds(first, until, f"{slot:05d}" if slot >= 0 else "")
        for state in states[:-2]:  # last, so that one that dies here leaves what the next begins with
            yield from self._remove(state_name(state, slot))
            known.discard(state)

    def _remove_rounds(self, first: int, until: int, sender: str) -> Steps[None]:
        """Removes the messages, of one sender unless it is empty, and the means of some rounds, but no names of others."""
        names: list[str] = yield from self._names(f"r{first:08d}")
        for match in (_NAMES.fullmatch(name) for name in names if name < f"r{until:08d}"):
            if match is not None and match["commit"] is None and sender in ("", match["sender"]):
                yield from self._remove(match[0])

    def _pause(self, waited_s: float) -> Steps[float]:
        pause_s = min(self.terms.rest_s, max(self.terms.look_s, LOOK_SHARE * waited_s))
        yield Sleep(pause_s)
        return pause_s

    def _pause_for(self, what: str, waited_s: float) -> Steps[float]:
        """Waits for an object that is in the store and does not show. Raises: PeerError.

        Args: `waited_s` has its own pauses: a process that was stopped looks again before it gives up.
        """
        if waited_s > 2 * self.terms.timeout_s:
            raise PeerError(
                f"{what} is in the store and cannot be read for {waited_s:.0f} s; look at the rights of this machine, and at "
                "the store"
            )
        return (yield from self._pause(waited_s))

    def _read(self, name: str) -> Steps[Item | None]:
        raw = yield from self._ask(Get(name))
        return None if raw is None else self.terms.seal.opened(name, raw)

    def _try_read(self, name: str) -> Steps[Item | TransportError | None]:
        """As `_read`, with the error of an object that does not count as the answer. Raises: PeerError where the store fails."""
        try:
            return (yield from self._read(name))
        except PeerError:
            raise
        except TransportError as error:
            return error

    def _read_state(self, name: str) -> Steps[Item | None]:
        """A state; None where none of this name can be read."""
        item = yield from self._try_read(name)
        if isinstance(item, TransportError):
            self._pass_over(name, item)
            return None
        return item

    def _pass_over(self, name: str, error: GossamerError) -> None:
        """Leaves out a state that cannot be loaded: an older one may lead to the same. It is named once."""
        self._unsound[name], self._believed[name] = error, False
        self._work.say(f"the state '{name}' of the store is passed over for another: {error}")

    def _names(self, after: str) -> Steps[list[str]]:
        return (yield from self._ask(Names(after)))

    def _create(self, name: str, head: Mapping[str, Any], body: bytes = b"") -> Steps[bool]:
        """Creates an object; returns whether there was none of this name."""
        content = self.terms.seal.sealed(name, head, body)
        return (yield from self._ask(Create(name, content)))

    def _ask(self, asking: Asking) -> Steps[Any]:
        """The answer of a store, with retries for ten times the patience of the run, once that where it refuses.

        Raises: PeerError.
        """
        # Its own pauses: time in which this process was stopped does not count.
        waited_s, refused_s, was_reported = 0.0, 0.0, False
        while True:
            self._asked_s = self._clock()
            try:
                return (yield asking)
            except TransportError:
                raise
            except OSError as error:
                if is_lasting(error) and refused_s > self.terms.timeout_s:
                    raise PeerError(
                        f"the store has refused for {refused_s:.0f} s to {_what(asking)} ({error}); a worker needs the right to "
                        "list, read, create and remove objects there: mend that, and start again"
                    ) from None
                if waited_s > 10 * self.terms.timeout_s:
                    raise PeerError(
                        f"the store has not done what it was asked for {waited_s:.0f} s ({error}); start again when it does"
                    ) from None
                if not was_reported and waited_s > self.terms.rest_s:
                    was_reported = True
                    answers = f"refuses to {_what(asking)}" if is_lasting(error) else "does not answer"
                    self._work.say(f"the store {answers} ({error}); it is asked again")
                pause_s = yield from self._pause(waited_s)
                waited_s, refused_s = waited_s + pause_s, refused_s + pause_s if is_lasting(error) else 0.0

    def _remove(self, name: str) -> Steps[None]:
        yield from self._ask(Remove(name))


class _OpenRound:
    """What one worker knows of a round that it may have to close.

    Args: `own` is the message that it has sent, at `since_s`.
    """

    def __init__(self, own: Item, since_s: float) -> None:
        self.own, self.since_s = own, since_s
        self.complete_s: float | None = None
        """When the round could first be closed; None before."""
        self.unsound = set[tuple[int, int]]()
        """The slots and lives whose messages do not count."""


class Attendance(SlotHolder[StoreWorker]):
    """One worker of a run in rounds whose state lies in a store; see `SlotHolder`."""

    def __init__(self, terms: StoreTerms, work: StoreWorker, nonce: str, clock: Callable[[], float]) -> None:
        super().__init__(terms, work, nonce, clock)
        self.commits: dict[int, Commit] = {}
        """The commits that it has read, by round."""
        self._cleared = set[tuple[int, int]]()
        """The slots and lives of dead processes whose objects were removed."""
        self._begun: Basis | None = None
        self._steps: tuple[int, ...] = (0,) * terms.workers

    # --- a life -------------------------------------------------------------------------------------------------------

    def live(self) -> Steps[None]:
        """Takes a slot, catches up with the run, and trains until its end or until asked to leave.

        Raises: PeerError where all slots are taken, or it is another run; CheckpointError for a store that is damaged.
        """
        yield from self._agree()
        while not self._work.asked():
            if (yield from self._is_over()):
                return
            yield from self._claim()
            try:
                if self.slot >= 0:
                    yield from self._train()
            except SlotLostError:
                self._work.say(f"slot {self.slot} was taken by another process, as this one was silent for too long")
                self.slot = -1
                continue
            break
        if self.slot >= 0:
            yield from self.release()

    def _is_over(self) -> Steps[bool]:
        """Whether all rounds are closed."""
        commit = yield from self.read_commit(self.terms.rounds - 1)
        return commit is not None

    def _train(self) -> Steps[None]:
        work, terms = self._work, self.terms
        resumed = yield Do(partial(work.begin, self.slot, self.life))
        if terms.start_in_store:
            yield from self._put_start()
        while (yield from self._catch_up(resumed)):
            if self.seen.newest < 0 and self.round == 0:
                yield from self._await_company()
            while not work.asked():
                common = (yield Do(work.common)) if self._compares else None
                body = yield TrainPhase(partial(work.train, self.round))
                done = yield from self._exchange(body, common)
                if done is None:
                    break
                yield Do(partial(work.mix if terms.gossip else work.finish, *done))
                resumed, self.round, self._begun = self.round + 1, self.round + 1, None
                if terms.gossip:
                    yield from self._keep_own_state()
                elif done[0].closer == (self.slot, self.life):
                    yield from self._keep_state()
                if self.round == terms.rounds:
                    return
            if work.asked():
                yield Do(partial(work.restore, resumed))
                return

    def _put_start(self) -> Steps[None]:
        """Creates the state of the start, unless the run has begun; the first one created counts, also for its creator.

        A listing may lack what is there. A start that is created late leads nowhere: means are removed before the state that they
        follow, and newer states are preferred.
        """
        yield from self._look(None)
        if not self.seen.states:
            yield from self._look(0)
        if not self.seen.states and self.seen.newest < 0:
            body = yield Do(partial(self._work.state, 0))
            yield from self._create(state_name(0), {"slot": self.slot}, body)

    def _await_company(self) -> Steps[None]:
        start_s, was_reported = self._clock(), False
        while self.terms.workers > 1 and not self._work.asked():
            yield from self._look(self.round)
            waited_s = self._clock() - start_s
            if len(self.seen.live(self._looked_s, self.terms.timeout_s)) > 1 or self.seen.newest >= 0:
                return
            if waited_s >= self.terms.timeout_s:
                self._work.say(f"nobody else has come within {self.terms.timeout_s:g} s, so this worker trains alone")
                return
            if not was_reported:
                was_reported = True
                self._work.say(f"waiting for another worker, for up to {self.terms.timeout_s:g} s")
            yield from self._pause(waited_s)

    # --- to come in ---------------------------------------------------------------------------------------------------

    def _catch_up(self, resumed: int) -> Steps[bool]:
        """Catches up with the newest closed round; returns whether there is another round to train.

        Raises: CheckpointError where no state leads there.
        """
        waited_s, terms = 0.0, self.terms  # its own pauses: a process that was stopped looks again before it gives up
        while True:
            yield from self._look(None)
            newest = max(self.seen.states, default=-1)
            first = newest if newest >= 0 and (newest < resumed or self._is_new(resumed)) else resumed
            yield from self._look(max(0, first - 1))
            finished = self.seen.newest + 1
            if terms.gossip:
                finished = max(finished, resumed)  # a listing may lack the outcomes that led to its own state
            unsound = len(self._unsound)
            for base, donor in self._bases(resumed, finished):
                begun = yield from self._base(base, resumed, donor)
                follow = self._continue_after(finished) if terms.gossip else self._add_means(base)
                if begun is not None and (yield from follow):
                    # All inner steps that count in a mean belong to the slot, in any of its lives.
                    self._begun = begun._replace(steps=self._steps[self.slot])
                    yield Do(partial(self._work.start, self.round, self._begun))
                    return self.round < terms.rounds
                if len(self._unsound) > unsound:
                    break
            if len(self._unsound) > unsound:
                continue  # with the best of those that are left
            if waited_s > terms.timeout_s:
                if self._unsound:
                    raise [*self._unsound.values()][-1]
                raise CheckpointError(
                    f"{finished} rounds are closed and no state from which they follow is there any more: neither this worker "
                    "nor the store has one; start again with an empty store"
                )
            waited_s += yield from self._pause(waited_s)

    def _is_new(self, resumed: int) -> bool:
        """Whether it has no state at all, not even that of the start."""
        return self.terms.start_in_store and not resumed

    def _bases(self, resumed: int, finished: int) -> list[tuple[int, int]]:
        """The states from which it may continue, best first: the rounds behind each, and its slot, -1 where all are equal."""
        states = sorted((one for one in self.seen.states if state_name(one) not in self._unsound), reverse=True)
        if not self.terms.gossip:
            bases = states if self._is_new(resumed) else [resumed, *states]
            if states and states[0] > resumed and finished - resumed > AHEAD:
                bases = [states[0], resumed, *states[1:]]
            return [(base, -1) for base in bases if base <= finished]
        there = [(after, slot) for slot, some in self.seen.holders.items() for after in some if after <= finished]
        there = [(after, slot) for after, slot in there if state_name(after, slot) not in self._unsound]
        newest = max([resumed, *(after for after, slot in there if slot == self.slot)])
        young = finished - newest <= self.terms.rejoin_rounds

        def order(donor: tuple[int, int]) -> tuple[bool, int, bool, bool]:
            return donor[1] != self.slot and young, -donor[0], donor[1] != self.slot, donor[0] != resumed

        own = {(0, -1), (resumed, self.slot)} if self.terms.start_in_store else {(0, self.slot), (resumed, self.slot)}
        bases = sorted({*own, *there}, key=order)
        # Without means the start leads nowhere near the others: it stands for no state that is damaged.
        lost = bool(self._unsound) and not self.terms.seal.proves_writers
        return [(after, slot) for after, slot in bases if after or not lost]

    def _base(self, after: int, resumed: int, donor: int) -> Steps[Basis | None]:
        """Restores its own state, or loads the one in the store, after so many rounds; None where there is none."""
        if (after == resumed or not after) and donor in (-1, self.slot):
            sha256 = yield Do(partial(self._work.restore, after))
            if sha256 is not None:
                return Basis(after, self.slot, sha256)
        item = yield from self._read_state(name := state_name(after, donor))
        slot = item.head.get("slot") if item is not None and isinstance(item.head, dict) else None
        slot = slot if isinstance(slot, int) and 0 <= slot < self.terms.workers and donor in (-1, slot) else None
        if item is None or slot is None or not item.is_of(slot):
            self.seen.states.discard(after)  # until a listing shows it again
            self.seen.holders[donor].discard(after)
            return None
        sha256 = yield Do(partial(loaded, self._work.load, after, slot, item.body))
        if isinstance(sha256, CheckpointError):
            self._pass_over(name, sha256)
            return None
        if self._compares and after and not self.terms.seal.trusts(slot):
            differs = yield from self._compared(after, slot)
            if differs is not None:
                self._pass_over(name, differs)
                return None
        return Basis(after, slot, sha256)

    @property
    def _compares(self) -> bool:
        """Whether messages say what all have in common, so that a newcomer need not believe the writer of a state."""
        return self.terms.seal.proves_writers and not self.terms.gossip

    def _compared(self, after: int, slot: int) -> Steps[CheckpointError | None]:
        """Compares the state that was loaded with what the others say of theirs in their messages of the next round.

        That round must be over: waits for it while others live, for a timeout at most. Returns the error where two or more,
        and more than half of those that ended the round before, have another state.
        """
        waited_s, terms = 0.0, self.terms
        while waited_s <= terms.timeout_s and not self._work.asked() and (yield from self.read_commit(after)) is None:
            yield from self._look(after)
            if self.seen.live(self._looked_s, terms.timeout_s) <= {self.slot}:
                break
            waited_s += yield from self._pause(waited_s)
        mine, others = (yield Do(self._work.common)), dict[int, str]()
        names = yield from self._names(f"r{after:08d}-f")
        for match in filter(None, map(_NAMES.fullmatch, names)):
            if match["sender"] and int(match["round"]) == after and int(match["sender"]) < terms.workers:
                item = yield from self._try_read(match[0])
                match item:
                    case Item(head={"state": str(common), "begun": None}):
                        others[int(match["sender"])] = common
        most, count = Counter(others.values()).most_common(1)[0] if others else (mine, 0)
        if most == mine:
            return None
        if count > 1 and 2 * count > len(others):
            return CheckpointError(
                f"worker {slot} has written it, and {count} of {len(others)} workers had another one after round {after}; look "
                f"at the machine of worker {slot}"
            )
        self._work.say(
            f"the state of worker {slot} after round {after} is taken on its word alone: no two workers have the same; if one of "
            "these machines is bad, take its key out of [peers] before the next run"
        )
        return None

    def _continue_after(self, finished: int) -> Steps[bool]:
        """In gossip: continues after so many rounds; returns whether the outcome of the last can be read."""
        before = (yield from self.read_commit(finished - 1)) if finished else None
        if before is not None:
            self._steps = before.steps
        self.round = finished
        return before is not None or not finished

    def _add_means(self, after: int) -> Steps[bool]:
        """Adds the means of all closed rounds; returns whether all of them could be read."""
        round, strikes = after, 0
        if after and (before := (yield from self.read_commit(after - 1))) is not None:
            self._steps = before.steps
        while True:
            commit = yield from self.read_commit(round)
            if commit is None and self.seen.newest < round:
                self.round = round
                return True
            ended = None if commit is None else (yield from self._mean_of(commit, None))
            if ended is None:
                strikes += 1  # it may not show yet, or be removed
                if strikes == _STRIKES or self._work.asked():
                    return False
                yield from self._pause(0.0)
                continue
            yield Do(partial(self._work.add, *ended))
            self._steps, round, strikes = ended[0].steps, round + 1, 0

    # --- a round ------------------------------------------------------------------------------------------------------

    def _exchange(self, body: bytes, common: str | None) -> Steps[tuple[Commit, Any] | None]:
        """The commit of this round, with its mean or the messages of this worker's peers, if its message counts; else None.

        Args: `common` is what it had in common with the others before its local phase.
        """
        terms, round = self.terms, self.round
        head = {"steps": self._work.steps(), "begun": None if self._begun is None else self._begun._asdict()}
        if common is not None:
            head["state"] = common
        yield from self._create(message_name(round, self.slot, self.life), head, body)
        own = Item(head, memoryview(body))
        open_round = _OpenRound(own, self._clock())
        unread_s = 0.0  # its own pauses since the round was closed
        while True:
            yield from self._look(round)
            if self.seen.newest >= round:
                commit = yield from self.read_commit(round)
            else:
                commit = yield from self._close_in_turn(open_round)
            if commit is not None:
                if not self._counts(commit):
                    yield from self._remove(message_name(round, self.slot, self.life))  # nobody looks for it any more
                    return None
                ended = yield from (self._of_peers if terms.gossip else self._mean_of)(commit, own)
                if ended is not None:
                    self._steps = ended[0].steps
                    return ended
                if max(self.seen.states, default=-1) > round + 1:
                    return None  # it is removed by now: the others are far ahead
                if unread_s > 2 * terms.timeout_s:
                    raise PeerError(
                        f"worker {commit.closer[0]} has closed round {round + 1} over messages, or with a mean, that are not in "
                        "the store, so no worker can continue; look at that machine, and start again with an empty store"
                    )
            if self._work.asked():
                return None
            if commit is None and self.seen.newest >= round:
                shown = f"the outcome of round {round + 1}, or a later one up to '{commit_name(self.seen.newest)}',"
                unread_s += yield from self._pause_for(shown, unread_s)
                continue
            pause_s = yield from self._pause(self._clock() - open_round.since_s)
            unread_s += pause_s if commit is not None else 0.0

    def _counts(self, commit: Commit) -> bool:
        """Whether a round was closed over the message of this process, rather than without it or over one of another life."""
        part = commit.parts.get(self.slot)
        return part is not None and part.life == self.life

    def _close_in_turn(self, open_round: _OpenRound) -> Steps[Commit | None]:
        """Closes this round once all live workers have sent, or the deadline is over, and it is this worker's turn."""
        terms, now = self.terms, self._looked_s
        present = self.seen.messages[self.round] | {self.slot: self.life}
        sent = {slot: life for slot, life in present.items() if (slot, life) not in open_round.unsound}
        late = now - open_round.since_s >= terms.deadline_s
        if not late and not self.seen.live(now, terms.timeout_s) <= sent.keys():
            return None
        if open_round.complete_s is None:
            open_round.complete_s = now
        # One worker closes it, the others only if that takes long: otherwise n workers would read n messages each.
        order = sorted(sent, key=lambda slot: (slot - self.round) % terms.workers)
        if now - open_round.complete_s < order.index(self.slot) * terms.timeout_s / 4:
            return None
        taken = yield from self._taken(sent, open_round, late=late)
        return None if taken is None else (yield from self._close(taken))

    def _taken(
        self, sent: Mapping[int, int], open_round: _OpenRound, *, late: bool
    ) -> Steps[dict[int, tuple[Item, TakenPart]] | None]:
        """The sound messages among those sent, by slot; None where the round should stay open for others."""
        taken: dict[int, tuple[Item, TakenPart]] = {}
        for slot, life in sorted(sent.items()):
            if slot == self.slot:
                item = open_round.own
            else:
                item = yield from self._try_read(message_name(self.round, slot, life))
            if isinstance(item, TransportError):
                self._work.say(str(item))
                item = Item(None, memoryview(b""))
            if item is None:
                if not late:
                    return None  # a listing may show what cannot be read yet
                continue
            part = _part(life, item.head, self.round, self.terms.workers)
            if slot != self.slot and not (yield Do(partial(self._work.is_sound, self.round, item.body))):
                part = None
            if part is None:
                open_round.unsound.add((slot, life))
                self._work.say(f"round {self.round + 1}: what worker {slot} sent is not sound, and does not count")
            else:
                taken[slot] = item, part
        if {slot for slot, _ in open_round.unsound} & sent.keys() and not late:
            return None  # the workers to wait for may change now
        return taken

    def _close(self, taken: Mapping[int, tuple[Item, TakenPart]]) -> Steps[Commit | None]:
        """Closes this round over these messages; returns the outcome, which another worker may have decided."""
        mean, sha256 = b"", ""
        if not self.terms.gossip:
            bodies = {slot: item.body for slot, (item, _) in taken.items()}
            mean = yield Do(partial(self._work.mean, self.round, bodies))
            sha256 = hashlib.sha256(mean).hexdigest()
        steps = [*self._steps]
        for slot, (_, part) in taken.items():
            steps[slot] = part.steps
        payload_bytes = {str(slot): len(item.body) for slot, (item, _) in taken.items()}
        begun = {slot: None if part.begun is None else part.begun._asdict() for slot, (_, part) in taken.items()}
        parts = {str(slot): {**part._asdict(), "begun": begun[slot]} for slot, (_, part) in taken.items()}
        head = {
            "parts": parts,
            "steps": steps,
            "mean": sha256,
            "closer": [self.slot, self.life],
            "time_s": round(time.time(), 3),
            "payload_bytes": payload_bytes | ({"mean": len(mean)} if sha256 else {}),
        }
        if sha256:
            yield from self._create(_mean(self.round, sha256), {}, mean)
        yield from self._create(commit_name(self.round), head)
        return (yield from self.read_commit(self.round))

    def _mean_of(self, commit: Commit, sent_item: Item | None) -> Steps[tuple[Commit, memoryview] | None]:
        """A closed round and its mean; None where part of it is not visible yet, or is gone.

        Where the closer is not trusted, both are computed from the messages that the commit names, whose signatures prove their
        writers. Which messages it has left out is the closer's choice. Raises: PeerError where these may not count.
        """
        round = commit.round
        if self.terms.seal.trusts(commit.closer[0]):
            there = yield from self._read(_mean(round, commit.mean))
            return None if there is None else (commit, there.body)
        items = yield from self._messages(commit, commit.parts, sent_item)
        if items is None:
            return None
        mean: bytes | memoryview = yield Do(partial(self._work.mean, round, {j: one.body for j, one in items.items()}))
        outcome, sha256 = _outcome(commit, items), hashlib.sha256(mean).hexdigest()
        if sha256 != commit.mean:
            there = yield from self._read(_mean(round, commit.mean))
            if there is None:
                return None
            if (yield Do(partial(self._work.is_mean, round, bytes(mean), there.body))):
                mean = there.body
            else:
                outcome = outcome._replace(mean=sha256)
        self._correct(commit, outcome)
        return outcome, memoryview(mean)

    def _of_peers(self, commit: Commit, sent_item: Item) -> Steps[tuple[Commit, dict[int, memoryview]] | None]:
        """A closed round and the messages of this worker's peers; None where some are not visible yet, or are gone."""
        peers = yield Do(partial(self._work.peers, commit.round, commit.parts))
        items = yield from self._messages(commit, peers, None)
        if items is None:
            return None
        outcome = _outcome(commit, {**items, self.slot: sent_item})
        self._correct(commit, outcome)
        return outcome, {slot: item.body for slot, item in items.items()}

    def _messages(self, commit: Commit, slots: Iterable[int], sent_item: Item | None) -> Steps[dict[int, Item] | None]:
        """The messages of these slots, on which a commit builds; None where one is not there. Raises: PeerError."""
        items, round = dict[int, Item](), commit.round
        for slot in slots:
            item = sent_item if sent_item is not None and slot == self.slot else None
            if item is None:
                item = yield from self._read(message_name(round, slot, commit.parts[slot].life))
            if item is None:
                return None
            sound = yield Do(partial(self._work.is_sound, round, item.body))
            if _part(commit.parts[slot].life, item.head, round, self.terms.workers) is None or not sound:
                raise PeerError(
                    f"worker {commit.closer[0]} has closed round {round + 1} over what worker {slot} sent, which is not sound; "
                    "take its key out of [peers] and start again with an empty store"
                )
            items[slot] = item
        return items

    def _correct(self, commit: Commit, outcome: Commit) -> None:
        """Replaces the content of a commit by what follows from its messages, and names its closer."""
        if outcome != commit:
            self._work.say(
                f"round {commit.round + 1}: worker {commit.closer[0]} has closed it with what does not follow from its messages, "
                "which is not believed; look at that machine, and take its key out of [peers] before the next run"
            )
            self.commits[commit.round] = outcome

    def _keep_state(self) -> Steps[None]:
        """Writes the state of this round where one is due, and removes objects that are no longer needed."""
        body = yield Do(partial(self._work.state, self.round))
        if body is not None:
            yield from self._put_state({"slot": self.slot}, body)

    def _keep_own_state(self) -> Steps[None]:
        """In gossip: writes its state where one is due, and removes the older ones of this slot but the last two."""
        body = yield Do(partial(self._work.state, self.round))
        if body is None:
            return
        yield from self._create(state_name(self.round, self.slot), {"slot": self.slot}, body)
        self.seen.holders[self.slot].add(self.round)
        yield from self._remove_older(self.seen.holders[self.slot], self.slot)
        yield from self._remove_of_the_gone()

    def _remove_of_the_gone(self) -> Steps[None]:
        """In gossip: removes what slots without a live holder have left, once it is older than this slot's last state but one.

        Nobody continues from it then, as newer states are there. The last process of a slot is cleared up after once.
        """
        states = sorted(self.seen.holders[self.slot])
        until = min(states[0], self.round - self.terms.rejoin_rounds) if len(states) > 1 else 0
        live = self.seen.live(self._looked_s, self.terms.timeout_s)
        for slot, life in [*self.seen.lives.items()]:
            there = [one for one in self.seen.holders[slot] if state_name(one, slot) in self._listed]
            if slot in live or (slot, life) in self._cleared or max(there, default=0) >= until:
                continue
            if self.seen.sent_until(slot, life) <= until:
                self._cleared.add((slot, life))
                yield from self._remove_rounds(0, until, f"{slot:05d}")
                for state in there:
                    yield from self._remove(state_name(state, slot))

    # --- the store ----------------------------------------------------------------------------------------------------

    def read_commit(self, round: int) -> Steps[Commit | None]:
        """The outcome of a round; None while it is open. Raises: CheckpointError."""
        if round not in self.commits:
            item = yield from self._read(commit_name(round))
            if item is None:
                return None
            commit = commit_in(round, item.head, self.terms.workers)
            if commit is None or not item.is_of(commit.closer[0]):
                raise CheckpointError(
                    f"the commit of round {round + 1} in the store is none that a worker of this run writes; start all with the "
                    "same gossamer, or start again with an empty store"
                )
            self.commits[round] = commit
            self.seen.newest = max(self.seen.newest, round)  # no listing has shown the one that it has just created
        return self.commits[round]


def loaded(load: Callable[..., T], *args: Any) -> T | CheckpointError:
    """What a state is loaded with; the error of one that is damaged. Raises: CheckpointError for a sound one of another model."""
    try:
        return load(*args)
    except CheckpointError as error:
        if error.kind != FaultKind.DAMAGED:
            raise
        return error


def _what(asking: Asking) -> str:
    """What is asked of the store, for people."""
    match asking:
        case Get(name):
            return f"read '{name}'"
        case Create(name, _):
            return f"create '{name}'"
        case Remove(name):
            return f"remove '{name}'"
        case _:
            return "list its objects"


def _one_by_one(run: object) -> dict[str, Any]:
    """What the object `run` holds, with each setting by its own name."""
    named = dict(run) if isinstance(run, Mapping) else {}
    settings = named.pop("settings", {})
    return {**settings, **named} if isinstance(settings, Mapping) else {**named, "settings": settings}


def _part(life: Any, head: object, round: int, workers: int) -> TakenPart | None:
    """The part of a worker in a round, by its message; None for anything that a commit may not name."""
    match head:
        case {"steps": steps, "begun": None} if _are_counts(life, steps):
            return TakenPart(life, steps, None)
        case {
            "steps": steps,
            "begun": {"after": after, "donor": donor, "sha256": str(sha256), "steps": before},
        } if _are_counts(life, steps, after, donor, before) and before < steps and after <= round and donor < workers:
            begun = Basis(after, donor, sha256, before)
            return TakenPart(life, steps, begun) if re.fullmatch("([0-9a-f]{64})?", sha256) else None
    return None


def _are_counts(*numbers: object) -> bool:
    """Whether these are integers that a run may count to; the truth values of JSON are none."""
    return all(type(one) is int and 0 <= one < 1 << 62 for one in numbers)


def _outcome(commit: Commit, messages: Mapping[int, Item]) -> Commit:
    """A commit with the parts in it as the messages themselves record them."""
    parts, steps = dict(commit.parts), [*commit.steps]
    for slot, item in messages.items():
        part = _part(parts[slot].life, item.head, commit.round, len(steps))
        assert part is not None
        parts[slot], steps[slot] = part, part.steps
    return commit._replace(parts=parts, steps=tuple(steps))


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
            read = {one: _part(part.get("life"), part, round, workers) for one, part in sorted(named.items())}
            kept = {one: part for one, part in read.items() if part is not None}
            counts = _are_counts(*steps) and len(steps) == workers
            sane = 0 <= slot < workers and 0 <= life < 1 << 31 and 0 <= time_s < _MOST_TIME_S
            if 0 < len(kept) == len(parts) and counts and sane and re.fullmatch("([0-9a-f]{64})?", mean):
                return Commit(round, kept, tuple(steps), mean, (slot, life), float(time_s))
    return None
