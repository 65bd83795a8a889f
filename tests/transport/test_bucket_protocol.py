"""Workers that share a store alone, over virtual time: the store is slow, fails, answers too late and shows late what is there;
workers die, stand still, leave and come again."""

import base64
import errno
import hashlib
import heapq
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gossamer.errors import CheckpointError, GossamerError, PeerError, TransportError
from gossamer.network.links import Network
from gossamer.network.pricing import price
from gossamer.network.store_time import StoreLink
from gossamer.record.logs.trace import from_targets
from gossamer.transport.bucket.bucket import Folder, Seal, SecretSeal
from gossamer.transport.bucket.objects import Basis, Commit, commit_in
from gossamer.transport.bucket.protocol import StoreTerms
from gossamer.transport.bucket.requests import Asking, Create, Do, Get, Names, Remove, Sleep, Steps
from gossamer.transport.bucket.rounds import Attendance
from gossamer.transport.bucket.signed import KeySeal, key_seal
from gossamer.transport.keys import Keys, Peer, certificate_of, new_key

SCHEDULES, FULL, PARTS = (*range(18), 95, 271), range(1_000), 4
"""In the last two a process was stopped while it looked for a state to begin with."""
TIMEOUT_S, TRAINING_S = 60.0, 20.0


class Store:
    """A store whose create is decided at one moment, and which shows later, to each in its own order, what is there."""

    def __init__(self, draws: random.Random, clock: Callable[[], float], faults: float) -> None:
        self.objects: dict[str, bytes] = {}
        self.ever: dict[str, bytes] = {}
        self._shown_s: dict[str, float] = {}
        self._draws, self._clock, self._faults = draws, clock, faults
        self.requests = self.asked_of_rounds = 0

    def take(self, effect: Asking) -> object:
        """Does what is asked, or fails before or after it has done so."""
        self.requests += 1
        self.asked_of_rounds += isinstance(effect, Get | Create) and effect.name.startswith("r0")
        if self._draws.random() < self._faults:
            raise OSError("503 slow down")
        answer = self._done(effect)
        if self._draws.random() < self._faults:
            raise TimeoutError("no answer")
        return answer

    def _done(self, effect: Asking) -> object:
        now, late = self._clock(), self._draws.random() < 4 * self._faults
        match effect:
            case Create(name, content):
                if name in self.objects:
                    return False
                self.objects[name] = content
                self.ever.setdefault(name, content)
                self._shown_s[name] = now + (self._draws.uniform(0, 20) if late else 0)
                return True
            case Get(name):
                return self.objects.get(name) if self._shown_s.get(name, 0) <= now else None
            case Names(after):
                there = sorted(name for name in self.objects if name > after and self._shown_s[name] <= now)
                return [name for name in there if not (late and self._draws.random() < 0.2)]
            case Remove(name):
                self.objects.pop(name, None)
        return None


def mean_of(messages: Mapping[int, bytes]) -> bytes:
    return json.dumps({slot: bytes(one).decode() for slot, one in sorted(messages.items())}).encode()


def after(x: str, mean: bytes) -> str:
    return hashlib.sha256(x.encode() + mean).hexdigest()


class Chain:
    """StoreWorker whose state is a hash of all means so far. `disk` is what outlives it: states by the rounds behind them."""

    def __init__(self, disk: dict[int, Any], every: int) -> None:
        self._disk, self._disks, self._every = disk, disk, every
        self._x, self._steps, self._kept = "", 0, (0, "")
        self.leaves = False
        self.sentences: list[str] = []
        self.history: list[tuple[int, str]] = []
        self.begun: list[tuple[int, Basis, str]] = []

    def agree(self, identity: str) -> None: ...

    def begin(self, slot: int, life: int) -> int:
        self._slot = slot
        return max(self._disk, default=0)

    def restore(self, after: int) -> str | None:
        if after == self._kept[0] and after:
            self._x = self._kept[1]
        elif after in self._disk or not after:
            self._x = self._disk.get(after, "")
        else:
            return None
        return hashlib.sha256(self._x.encode()).hexdigest() if after else ""

    def load(self, after: int, donor: int, body: memoryview) -> str:
        rounds, self._x = json.loads(bytes(body))
        assert rounds == after
        return hashlib.sha256(body).hexdigest()

    def add(self, commit: Commit, mean: memoryview) -> None:
        self._x = after(self._x, bytes(mean))

    def start(self, round: int, begun: Basis) -> None:
        self._steps = begun.steps
        self.history.append((round, self._x))
        self.begun.append((round, begun, self._x))

    def common(self) -> str:
        return hashlib.sha256(self._x.encode()).hexdigest()

    def train(self, round: int) -> bytes:
        self._steps += 5
        return f"{round} {self._steps} {self._x}".encode()

    def steps(self) -> int:
        return self._steps

    def is_sound(self, round: int, body: memoryview) -> bool:
        return bytes(body).isascii()

    def is_mean(self, round: int, own: bytes, there: memoryview) -> bool:
        return own == bytes(there)

    def mean(self, round: int, messages: Mapping[int, bytes | memoryview]) -> bytes:
        assert all(bytes(one).split()[0] == str(round).encode() for one in messages.values())
        return mean_of({slot: bytes(one) for slot, one in messages.items()})

    def finish(self, commit: Commit, mean: memoryview) -> None:
        self._end(commit.round + 1, after(self._x, bytes(mean)))

    def peers(self, round: int, parts: Collection[int]) -> Collection[int]:
        raise NotImplementedError

    def mix(self, commit: Commit, messages: Mapping[int, memoryview]) -> None:
        raise NotImplementedError

    def _end(self, finished: int, x: str) -> None:
        self._x, self._kept = x, (finished, x)
        self.history.append((finished, self._x))
        if finished % self._every == 0:
            self._disk[finished] = self._x
            for old in sorted(self._disk)[:-2]:
                del self._disk[old]

    def state(self, finished: int) -> bytes | None:
        return json.dumps([finished, self._x]).encode() if finished % self._every == 0 else None

    def asked(self) -> bool:
        return self.leaves

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


class Stranger(Chain):
    """StoreWorker that begins with numbers that no other has, as the loop of a user may, and without a disk."""

    numbers = itertools.count()

    def begin(self, slot: int, life: int) -> int:
        self._x, self._kept = f"start {next(self.numbers)}", (0, "")
        return 0

    def restore(self, after: int) -> str | None:
        if not after or after != self._kept[0]:
            return None
        self._x = self._kept[1]
        return hashlib.sha256(self._x.encode()).hexdigest()


class Mixer(Chain):
    """StoreWorker in gossip: its state is a hash of its last one and the messages of its two neighbours."""

    def begin(self, slot: int, life: int) -> int:
        self._disk, self._kept = self._disks.setdefault(slot, {}), (0, "")  # not those of another slot
        return super().begin(slot, life)

    def peers(self, round: int, parts: Collection[int]) -> Collection[int]:
        return neighbours(self._slot, parts)

    def mix(self, commit: Commit, messages: Mapping[int, memoryview]) -> None:
        assert sorted(messages) == sorted(neighbours(self._slot, commit.parts))
        self._end(commit.round + 1, after(self._x, mean_of({slot: bytes(one) for slot, one in messages.items()})))


def neighbours(slot: int, parts: Collection[int]) -> set[int]:
    """Those beside a slot in a ring of these."""
    ring = sorted(parts)
    place = ring.index(slot)
    return {ring[place - 1], ring[(place + 1) % len(ring)]} - {slot}


class StrangeMixer(Mixer):
    """A `Mixer` that begins with numbers that no other has."""

    def begin(self, slot: int, life: int) -> int:
        resumed = super().begin(slot, life)
        self._x = self._x if resumed else f"start {next(Stranger.numbers)}"
        return resumed

    def restore(self, after: int) -> str | None:
        return super().restore(after) if after else None


class Process(NamedTuple):
    """One process: what it is, and its two threads."""

    one: Attendance
    work: Chain
    disk: dict[int, Any]


class World:
    """Processes and a store in virtual time."""

    def __init__(self, seed: int, workers: int, rounds: int, faults: float) -> None:
        self.draws, self.now = random.Random(seed), 0.0
        self.terms = StoreTerms({"workers": workers}, workers, rounds, TIMEOUT_S, TIMEOUT_S, look_s=0.5)
        self.store = Store(self.draws, lambda: self.now, faults)
        self.alive: dict[int, Process] = {}
        self.histories: list[list[tuple[int, str]]] = []
        self.kind: type[Chain] = Chain
        self.attends: Callable[..., Any] = Attendance
        self.works: list[Chain] = []
        self.ended_s = 0.0
        """When the last process had ended that did so by itself."""
        self.failed: list[Exception] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._numbers = itertools.count(), itertools.count()
        self._still_until_s: dict[int, float] = {}
        self.training_s: dict[int, float] = {}
        """Of processes that take another time than all others."""
        self._faults = faults

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def start(self, disk: dict[int, Any], seal: Seal | None = None, kind: type[Chain] | None = None) -> None:
        number = next(self._numbers)
        work = (kind or self.kind)(disk, every=self.draws.choice((2, 3)))
        terms = self.terms if seal is None else self.terms._replace(seal=seal)
        one = self.attends(terms, work, f"nonce {number}", lambda: self.now)
        self.alive[number] = Process(one, work, disk)
        self.histories.append(work.history)
        self.works.append(work)
        self._go_on(number, one.live(), None, main=True)
        self._go_on(number, one.beats(), None, main=False)

    def _go_on(self, number: int, steps: Steps[None], answer: object, *, main: bool) -> None:
        """A thread takes its next step; what it wants takes time."""
        if number not in self.alive:
            steps.close()  # it was killed
            return
        if (still_s := self._still_until_s.get(number, 0.0)) > self.now:
            self.at(still_s - self.now, lambda: self._go_on(number, steps, answer, main=main))
            return
        try:
            effect = steps.throw(answer) if isinstance(answer, OSError) else steps.send(answer)
        except StopIteration:
            if main:
                del self.alive[number]
                self.ended_s = self.now
            return
        except CheckpointError as error:
            self.failed.append(error)
            del self.alive[number]
            return
        except Exception as error:  # as where all slots are taken: it is started again
            if not str(error).startswith("all "):
                raise
            disk = self.alive.pop(number).disk
            self.at(10.0, lambda: self.start(disk))
            return
        there_s, back_s = self.draws.uniform(0, 0.5), self.draws.uniform(0, 0.5)
        if self.draws.random() < self._faults:
            there_s += self.draws.uniform(0, 60)
        if isinstance(effect, Do):
            training = getattr(getattr(effect.work, "func", None), "__name__", "") == "train"
            there_s, back_s = (
                (self.draws.uniform(0.5, 1.5) * self.training_s.get(number, TRAINING_S) if training else 0.0),
                0.0,
            )
        elif isinstance(effect, Sleep):
            there_s, back_s = effect.seconds, 0.0

        def act() -> None:
            if number not in self.alive:  # what it has sent may arrive all the same
                if not isinstance(effect, Do | Sleep) and self.draws.random() < 0.5:
                    self._answer(effect)
                steps.close()
                return
            found = (
                effect.work() if isinstance(effect, Do) else None if isinstance(effect, Sleep) else self._answer(effect)
            )
            self.at(back_s, lambda: self._go_on(number, steps, found, main=main))

        self.at(there_s, act)

    def _answer(self, effect: Asking) -> object:
        try:
            return self.store.take(effect)
        except OSError as error:
            return error

    def kill(self, number: int, again_s: float | None, *, keeps_disk: bool) -> None:
        process = self.alive.pop(number, None)
        if process is not None and again_s is not None:
            disk = process.disk if keeps_disk else {}
            self.at(again_s, lambda: self.start(disk))

    def stand_still(self, number: int, seconds: float) -> None:
        self._still_until_s[number] = self.now + seconds

    def run(self, until_s: float = 1e6) -> None:
        while self._events and self.now < until_s and (self.alive or any(act for _, _, act in self._events)):
            self.now, _, act = heapq.heappop(self._events)
            act()


def commits_of(world: World) -> Iterator[Commit]:
    for round in range(world.terms.rounds):
        name = f"r{round:08d}-commit"
        assert name in world.store.objects, f"round {round} is lost"
        found = commit_in(round, SecretSeal().opened(name, world.store.objects[name]).head, world.terms.workers)
        assert found is not None
        yield found


def live_through(seed: int, prepare: Callable[[World], None] = lambda world: None) -> World:
    """A run whose workers die, stand still and leave now and then, and once all at one time."""
    draws = random.Random(f"disasters {seed}")
    workers, rounds = draws.randint(2, 5), draws.randint(6, 14)
    world = World(seed, workers, rounds, faults=draws.choice((0.0, 0.02, 0.1)))
    prepare(world)
    disks: list[dict[int, Any]] = [{} for _ in range(workers)]
    for disk in disks:
        world.at(draws.uniform(0, 30), lambda disk=disk: world.start(disk))

    def disaster() -> None:
        number = draws.choice([*world.alive] or [0])
        kind = draws.choice(("kill", "lose the disk", "stand still", "leave", "nothing"))
        if kind in ("kill", "lose the disk"):
            world.kill(number, draws.choice((1.0, 30.0, 300.0)), keeps_disk=kind == "kill")
        elif kind == "stand still" and number in world.alive:
            world.stand_still(number, draws.choice((10.0, 90.0, 900.0)))
        elif kind == "leave" and number in world.alive:
            process = world.alive[number]
            process.work.leaves = True
            world.at(draws.uniform(100, 400), lambda: world.start(process.disk))

    def all_die() -> None:
        for number in [*world.alive]:
            world.kill(number, draws.uniform(1, 100), keeps_disk=draws.random() < 0.7)

    for _ in range(6):
        world.at(draws.uniform(20, 25 * rounds), disaster)
    world.at(draws.uniform(20, 25 * rounds), all_die)
    world.run()
    return world


def start_of(world: World) -> str:
    """What all begin with: the state of the start in the store, where it is there."""
    raw = world.store.ever.get("s00000000")
    return "" if raw is None else json.loads(bytes(SecretSeal().opened("s00000000", raw).body))[1]


def must_hold(world: World) -> None:
    """No round is lost, no state is another than that which follows from the commits, and no step counts twice."""
    assert not world.failed
    x = start_of(world)
    states, steps = {0: x}, [0] * world.terms.workers
    for commit in commits_of(world):
        name = f"r{commit.round:08d}-mean-{commit.mean}"
        mean = bytes(SecretSeal().opened(name, world.store.ever[name]).body)
        sent = {str(slot): f"{commit.round} {part.steps} {x}" for slot, part in commit.parts.items()}
        assert json.loads(mean) == sent
        x = states[commit.round + 1] = after(x, mean)
        for slot, part in commit.parts.items():
            assert part.steps == steps[slot] + 5, "its batches are those after the last that counted"
            assert part.begun is None or part.begun.steps == steps[slot]
            steps[slot] = part.steps
        assert commit.steps == tuple(steps)
    for history in world.histories:
        for finished, found in history:
            assert found == states[finished], f"a wrong state after round {finished}"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_round_is_lost_and_no_state_is_wrong_for_any_deaths_and_faults_of_the_store(
    part: int, request: pytest.FixtureRequest
) -> None:
    for seed in (FULL if request.config.getoption("--full") else SCHEDULES)[part::PARTS]:
        try:
            must_hold(live_through(seed))
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise


def as_gossip(world: World) -> None:
    world.kind, world.terms = Mixer, world.terms._replace(gossip=True, rejoin_rounds=3)


def must_hold_in_gossip(world: World) -> None:
    """No round is lost, no step counts twice, and each state follows from those that the commits name and their messages."""
    assert not world.failed
    n, start = world.terms.workers, start_of(world)
    states: dict[tuple[int, int], set[str]] = {(slot, 0): {start} for slot in range(n)}
    x, steps = [start] * n, [0] * n
    for commit in commits_of(world):
        sent: dict[int, bytes] = {}
        for slot, part in commit.parts.items():
            name = f"r{commit.round:08d}-from-{slot:05d}-{part.life:04d}"
            sent[slot] = bytes(SecretSeal().opened(name, world.store.ever[name]).body)
            if part.begun is not None:
                hashes = {
                    hashlib.sha256(one.encode()).hexdigest(): one for one in states[part.begun.donor, part.begun.after]
                }
                packed = {packed_sha(part.begun.after, one): one for one in hashes.values()}
                x[slot] = {**hashes, **packed}[part.begun.sha256] if part.begun.after else start
                assert part.begun.steps == steps[slot]
            assert sent[slot] == f"{commit.round} {part.steps} {x[slot]}".encode()
            assert part.steps == steps[slot] + 5, "its batches are those after the last that counted"
            steps[slot] = part.steps
        assert commit.steps == tuple(steps)
        for slot in commit.parts:
            x[slot] = after(x[slot], mean_of({j: sent[j] for j in neighbours(slot, commit.parts)}))
            states.setdefault((slot, commit.round + 1), set()).add(x[slot])
    every = {(finished, one) for (_, finished), some in states.items() for one in some}
    for work in world.works:
        for round, begun, state in work.begun:
            assert state in states[begun.donor, begun.after] and begun.after <= round
        first = {(round, state) for round, _, state in work.begun}
        assert {*work.history} - first <= every


def packed_sha(after: int, x: str) -> str:
    return hashlib.sha256(json.dumps([after, x]).encode()).hexdigest()


@pytest.mark.parametrize("part", range(2))
def test_in_gossip_no_round_is_lost_and_both_ends_of_an_exchange_count_it_for_any_deaths(
    part: int, request: pytest.FixtureRequest
) -> None:
    for seed in (FULL if request.config.getoption("--full") else range(8))[part::2]:
        try:
            must_hold_in_gossip(live_through(seed, as_gossip))
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise


@pytest.mark.parametrize("kind", [Stranger, StrangeMixer])
def test_workers_that_begin_with_different_numbers_take_those_of_the_first_even_if_it_dies(
    kind: type[Chain], request: pytest.FixtureRequest
) -> None:
    gossip = kind is StrangeMixer

    def prepare(world: World) -> None:
        world.kind = kind
        world.terms = world.terms._replace(gossip=gossip, rejoin_rounds=3, start_in_store=True)

    for seed in FULL if request.config.getoption("--full") else range(5):
        try:
            world = live_through(seed, prepare)
            assert start_of(world).startswith("start ")
            (must_hold_in_gossip if gossip else must_hold)(world)
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise


def test_two_workers_that_wait_long_for_a_third_ask_the_store_at_most_twenty_times_a_minute() -> None:
    world = World(0, workers=3, rounds=2, faults=0.0)
    world.terms = world.terms._replace(timeout_s=300.0, deadline_s=1e6, rest_s=StoreTerms._field_defaults["rest_s"])
    world.training_s[2] = 3_000.0
    for _ in range(3):
        world.start({})
    world.run(until_s=300.0)
    assert len(world.alive) == 3 and not any("commit" in name for name in world.store.objects)
    before = world.store.requests
    world.run(until_s=900.0)
    assert not any("commit" in name for name in world.store.objects)
    assert 10 < world.store.requests - before <= 10 * 20, "of all three, in ten minutes"


@pytest.mark.parametrize("kind", [Chain, Mixer])
def test_a_round_costs_a_few_requests_for_each_worker_and_one_more_for_each_peer(kind: type[Chain]) -> None:
    """Besides listings: each puts its message, one reads them all, and each reads the outcome and the mean, or its peers."""
    for workers in (4, 16):
        world = World(0, workers, rounds=20, faults=0.0)
        world.kind, world.terms = kind, world.terms._replace(gossip=kind is Mixer)
        for _ in range(workers):
            world.start({})
        world.run()
        (must_hold_in_gossip if kind is Mixer else must_hold)(world)
        assert world.store.asked_of_rounds <= (7 if kind is Mixer else 5) * workers * 20


@pytest.mark.parametrize("kind", [Chain, Mixer])
@pytest.mark.parametrize(("workers", "slow_s"), [(4, 2.0), (3, 120.0), (8, 2.0)])
def test_a_round_takes_the_seconds_of_its_price(kind: type[Chain], workers: int, slow_s: float) -> None:
    """In virtual time a request takes half a second in the mean, and its bytes none."""
    rounds, everyone = 40, range(workers)
    world = World(0, workers, rounds, faults=0.0)
    world.kind = kind
    world.terms = world.terms._replace(gossip=kind is Mixer, timeout_s=1e4, deadline_s=1e4, rest_s=15.0)
    world.training_s = dict.fromkeys(everyone, 2.0) | {0: slow_s}
    for _ in everyone:
        world.start({})
        world.works[-1]._every = rounds
    world.run()
    (must_hold_in_gossip if kind is Mixer else must_hold)(world)
    targets = [[sorted(neighbours(i, everyone) if kind is Mixer else {*everyone} - {i}) for i in everyone]] * rounds
    trace = from_targets(np.array(targets), 0, steps=1, kind="exchange" if kind is Mixer else "mean")
    draws = random.Random(1)
    seconds = [[draws.uniform(0.5, 1.5) * (2.0 if i else slow_s) for i in everyone] for _ in range(rounds)]
    store = Network(uplink_bps=math.inf, downlink_bps=math.inf, store=StoreLink(latency_s=0.5))
    predicted_s = price(trace._replace(compute_s=np.array(seconds)), store).total_s
    assert predicted_s == pytest.approx(world.ended_s, rel=0.1)


class Liar(Chain):
    """One whose means are not those of the messages."""

    def mean(self, round: int, messages: Mapping[int, bytes | memoryview]) -> bytes:
        return b"a lie about " + super().mean(round, messages)


@pytest.fixture
def seals(tmp_path: Path) -> list[KeySeal]:
    return new_seals(tmp_path)


def new_seals(tmp_path: Path) -> list[KeySeal]:
    """Of three machines with a worker each, in the order of their numbers."""
    pytest.importorskip("cryptography")
    files = [new_key(name, tmp_path / f"{name}.pem") for name in ("berlin", "paris", "rome")]
    peers = {file.stem: Peer(certificate=base64.b64encode(certificate_of(file)).decode()) for file in files}
    folder = Folder(str(tmp_path))
    return [key_seal(folder, Keys(file, peers, 3)) for file in files]


def states_of(world: World, seal: KeySeal) -> dict[int, str]:
    """The states that follow from the messages which the commits name, whatever mean they name."""
    x, states = "", {0: ""}
    for round in range(world.terms.rounds):
        name = f"r{round:08d}-commit"
        commit = commit_in(round, seal.opened(name, world.store.ever[name]).head, world.terms.workers)
        assert commit is not None
        names = {slot: f"r{round:08d}-from-{slot:05d}-{part.life:04d}" for slot, part in commit.parts.items()}
        sent = {slot: bytes(seal.opened(name, world.store.ever[name]).body) for slot, name in names.items()}
        x = states[round + 1] = after(x, mean_of(sent))
    return states


@pytest.mark.parametrize("seed", range(2))
def test_a_worker_that_closes_rounds_with_another_mean_is_named_by_each_other_worker_and_changes_nothing_for_them(
    seals: list[KeySeal], seed: int
) -> None:
    world = World(seed, workers=3, rounds=9, faults=0.02)
    for seal, kind in zip(seals, (Chain, Liar, Chain), strict=True):
        world.start({}, seal, kind)
    honest = [world.alive[0].work, world.alive[2].work]
    world.at(250.0, lambda: world.kill(2, None, keeps_disk=False))
    world.at(260.0, lambda: world.start({}, seals[2]))
    world.run()
    assert not world.failed
    states = states_of(world, seals[0])
    histories = [world.histories[0], world.histories[2], world.histories[3]]
    assert len(histories[0]) >= 9 and histories[2], "one was there all the time, and one came later"
    assert all(state == states[finished] for history in histories for finished, state in history)
    for work in honest:
        assert any("worker 1 has closed it with what does not follow" in one for one in work.sentences), work.sentences
        assert not any("worker 0 has closed" in one or "worker 2 has closed" in one for one in work.sentences)


class FalseDonor(Chain):
    """One that writes states which are not its own."""

    def state(self, finished: int) -> bytes | None:
        return None if super().state(finished) is None else json.dumps([finished, "a lie"]).encode()


@pytest.mark.parametrize("every", [1, 3])
def test_a_newcomer_passes_over_a_state_that_most_others_do_not_have_and_names_its_writer(
    seals: list[KeySeal], every: int
) -> None:
    """With a state after every third round worker 1 never closes the round before it, and nothing is passed over."""
    passed = 0
    for seed in range(3):
        world = World(seed, workers=3, rounds=14, faults=0.0)
        for seal, kind in zip(seals, (Chain, FalseDonor, Chain), strict=True):
            world.start({}, seal, kind)
        for process in world.alive.values():
            process.work._every = every
        world.at(150.0, lambda world=world: world.kill(2, None, keeps_disk=False))
        world.at(230.0 + 15.0 * seed, lambda world=world: world.start({}, seals[2]))
        world.run()
        assert not world.failed
        states, late = states_of(world, seals[0]), world.works[3]
        assert late.begun and all(begun.after and begun.donor != 1 for _, begun, _ in late.begun), late.begun
        assert all(state == states[finished] for work in (world.works[0], late) for finished, state in work.history)
        warnings = [one for one in late.sentences if "is passed over for another" in one]
        assert all(
            "worker 1 has written it, and 2 of 2 workers had another one after round" in one for one in warnings
        ), warnings
        passed += bool(warnings)
    assert bool(passed) == (every == 1)


@pytest.mark.parametrize("what", ["a message that is not there", "a message that is not sound"])
def test_a_round_closed_over_invalid_messages_ends_the_run_with_the_name_of_its_closer(
    seals: list[KeySeal], what: str
) -> None:
    world = World(0, workers=3, rounds=2, faults=0.0)
    for seal in (seals[0], seals[2]):
        world.start({}, seal)
    head = {"steps": 5, "begun": None}
    parts = {str(slot): {"life": 0, **head} for slot in range(2)}
    commit = {"parts": parts, "steps": [5, 5, 0], "mean": "0" * 64, "closer": [1, 0], "time_s": 0.0}
    objects = {"r00000000-commit": (commit, b""), "t00001-0000": ({"nonce": ""}, b"")}
    if what == "a message that is not sound":
        objects["r00000000-from-00001-0000"] = (head, b"\xff")

    def write() -> None:
        for name, (head, body) in objects.items():
            world.store.take(Create(name, seals[1].sealed(name, head, body)))

    world.at(10.0, write)
    sentence = (
        "over messages, or with a mean, that are not in the store" if "there" in what else "worker 1 sent, which is not"
    )
    with pytest.raises(PeerError, match=f"worker 1 has closed round 1 .*{sentence}"):
        world.run()


def test_a_worker_that_was_stopped_while_it_waited_for_a_listing_declares_no_other_dead() -> None:
    world = World(0, workers=2, rounds=2, faults=0.0)
    world.terms = world.terms._replace(deadline_s=1e6, rest_s=2.0)
    world.training_s[1] = 3_000.0
    stops = [300.0]

    class Stopping(Store):
        def take(self, effect: Asking) -> object:
            if isinstance(effect, Names) and stops and world.now > stops[0]:  # of the one that does not train
                world.stand_still(0, 900.0)
                stops.clear()
            return super().take(effect)

    world.store = Stopping(world.draws, lambda: world.now, 0.0)
    for _ in range(2):
        world.start({})
    world.run()
    must_hold(world)
    assert not stops and [sorted(commit.parts) for commit in commits_of(world)] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("kind", [Chain, Mixer])
def test_old_messages_are_removed_and_what_others_have_put_into_the_folder_stays(kind: type[Chain]) -> None:
    world = World(0, workers=3, rounds=12, faults=0.0)
    world.kind, world.terms = kind, world.terms._replace(gossip=kind is Mixer)
    foreign = {
        "r00000001-from-mars",
        "r00000002-mean-",
        "r00000003-from-00001-0000.txt",
        "r00000001-from-00000-x",
        "zzz",
    }
    for name in foreign:
        world.store.take(Create(name, b"x"))
    for _ in range(3):
        world.start({})
    world.run()
    (must_hold_in_gossip if kind is Mixer else must_hold)(world)
    there = world.store.objects.keys()
    assert foreign <= there
    assert not any(name < "r00000005" and name[0] == "r" and "commit" not in name for name in there - foreign - {"run"})


@pytest.mark.parametrize("kind", [Chain, Mixer])
def test_states_of_rounds_that_nobody_has_reached_do_not_lead_to_the_removal_of_true_ones(kind: type[Chain]) -> None:
    """Two such names, which need no key, left none."""
    world = World(0, workers=2, rounds=20, faults=0.0)
    world.kind, world.terms = kind, world.terms._replace(gossip=kind is Mixer)
    false = {f"s9999999{k}{slot}" for k in "89" for slot in (("-00000", "-00001") if kind is Mixer else ("",))}
    for name in false:
        world.store.take(Create(name, b"x"))
    for _ in range(2):
        world.start({})
    world.run()
    (must_hold_in_gossip if kind is Mixer else must_hold)(world)
    assert len({name[:9] for name in world.store.objects.keys() - false if name[0] == "s"}) >= 2


def test_in_gossip_what_a_slot_has_left_whose_worker_never_returns_is_removed() -> None:
    world = World(0, workers=4, rounds=40, faults=0.0)
    as_gossip(world)
    for _ in range(4):
        world.start({})
    world.at(200.0, lambda: world.kill(3, None, keeps_disk=False))
    world.run(until_s=200.0)
    (gone,) = {*range(4)} - {process.one.slot for process in world.alive.values()}

    def left(slot: int) -> list[str]:
        return [name for name in world.store.objects if re.fullmatch(rf"r.*-from-{slot:05d}-.*|s.*-{slot:05d}", name)]

    assert left(gone), "it has sent messages and a state"
    world.run()
    must_hold_in_gossip(world)
    assert not left(gone) and all(left(slot) for slot in {*range(4)} - {gone})


def patience(work: Chain, answer: Callable[[Asking], object], **terms: Any) -> tuple[float, str]:
    """How long a worker waits in a store that answers so, and the sentence with which it gives up."""
    waited_s = 0.0
    steps = Attendance(StoreTerms({}, 2, 4, TIMEOUT_S, TIMEOUT_S, **terms), work, "nonce", lambda: waited_s).live()
    effect = next(steps)
    while waited_s < 1e5:
        waited_s += effect.seconds if isinstance(effect, Sleep) else 0
        given = None if isinstance(effect, Sleep) else effect.work() if isinstance(effect, Do) else answer(effect)
        try:
            effect = steps.throw(given) if isinstance(given, OSError) else steps.send(given)
        except GossamerError as ended:
            return waited_s, str(ended)
    raise AssertionError("it waits without end")


def test_a_store_that_refuses_is_asked_for_a_timeout_and_one_that_fails_for_ten() -> None:
    for error, refuses in (
        (PermissionError("403 Forbidden"), True),
        (IsADirectoryError("it is no file"), True),
        (OSError("503 slow down"), False),
        (OSError(errno.ENOSPC, "no space left"), False),
    ):
        work = Chain({}, 1)
        waited_s, sentence = patience(work, lambda _, error=error: error)
        assert str(error) in sentence and any(str(error) in one for one in work.sentences)
        if refuses:
            assert (
                waited_s < 1.5 * TIMEOUT_S and "the store has refused for" in sentence and "to create 'run'" in sentence
            )
            assert "the right to list, read, create and remove" in sentence
        else:
            assert waited_s > 10 * TIMEOUT_S and "the store has not done what it was asked for" in sentence


def test_with_keys_a_store_that_refuses_to_give_a_claim_ends_the_worker_too(seals: list[KeySeal]) -> None:
    run = seals[0].sealed("run", {"id": "nonce"})
    answers = {"t": PermissionError("403"), "r": None}

    def answer(effect: Asking) -> object:
        if isinstance(effect, Names):
            return ["t00000-0000"]
        if isinstance(effect, Get):
            return run if effect.name == "run" else answers[effect.name[0]]
        return False

    waited_s, sentence = patience(Chain({}, 1), answer, seal=seals[0])
    assert waited_s < 1.5 * TIMEOUT_S and "to read 't00000-0000' (403)" in sentence


@pytest.mark.parametrize("amid", [False, True])
@pytest.mark.parametrize("signs", [0, 2])
def test_a_worker_that_leaves_removes_its_last_sign_of_life_also_one_that_is_under_way(signs: int, amid: bool) -> None:
    one = Attendance(StoreTerms({}, 2, 4, TIMEOUT_S, TIMEOUT_S), Chain({}, 1), "nonce", lambda: 0.0)
    one.slot = one.life = 0
    beats, left = one.beats(), set[str]()

    def done(effect: Asking) -> bool:
        """Does what is asked of the store; returns whether a sign of life is complete."""
        if isinstance(effect, Create) and effect.name[0] == "u":
            left.add(effect.name)
        elif isinstance(effect, Remove):
            left.discard(effect.name)
        return isinstance(effect, Sleep)

    for _ in range(signs):
        while not done(next(beats)):
            pass
    last = [next(beats)] if amid else []  # asked for, and done after the slot is free
    for effect in (*one.release(), *last):
        done(effect)
    while not done(next(beats)):
        pass
    assert not left


def test_what_is_in_a_store_and_can_not_be_read_is_named_after_two_timeouts() -> None:
    waited_s, sentence = patience(Chain({}, 1), lambda effect: False if isinstance(effect, Create) else None)
    assert waited_s < 3 * TIMEOUT_S and "the object 'run' is in the store and cannot be read" in sentence
    objects: dict[str, bytes] = {}

    def answer(effect: Asking) -> object:
        if isinstance(effect, Create):
            return objects.setdefault(effect.name, effect.content) is effect.content
        if isinstance(effect, Get):
            return objects.get(effect.name)
        return sorted([*objects, "r00000000-commit"]) if objects.keys() & {"r00000000-from-00000-0000"} else [*objects]

    waited_s, sentence = patience(Chain({}, 1), answer)
    assert "the outcome of round 1, or a later one up to 'r00000000-commit', is in the store and cannot" in sentence
    assert waited_s < 4 * TIMEOUT_S


class Choosy(Chain):
    """One that notices whether a state is damaged, or of another model."""

    def load(self, after: int, donor: int, body: memoryview) -> str:
        if bytes(body) in (b"no state", b"another model"):
            raise CheckpointError(f"it is {bytes(body).decode()}", "damaged" if body[:2] == b"no" else "foreign")
        return super().load(after, donor, body)


class ChoosyMixer(Mixer, Choosy):
    """The same in gossip."""


@pytest.mark.parametrize("kind", [Choosy, ChoosyMixer])
@pytest.mark.parametrize("what", ["damaged", "no state", "another model"])
def test_a_newcomer_passes_over_a_damaged_state_for_an_older_one(kind: type[Chain], what: str) -> None:
    world = World(3, workers=2, rounds=20, faults=0.0)
    world.kind, gossip = kind, kind is ChoosyMixer
    world.terms = world.terms._replace(gossip=gossip, rejoin_rounds=3)
    broken: list[str] = []

    def all_die() -> None:
        for number in [*world.alive]:
            world.kill(number, None, keeps_disk=False)
        objects = world.store.objects
        newest = max(name[:9] for name in objects if name[0] == "s")
        broken.extend(name for name in objects if name.startswith(newest))
        assert any("s" <= name < newest for name in objects), "there is an older one"
        for name in broken:
            head = SecretSeal().opened(name, objects[name]).head
            objects[name] = (
                objects[name][:-1] + b"?" if what == "damaged" else SecretSeal().sealed(name, head, what.encode())
            )

    world.at(320.0, all_die)
    for delay in (0.0, 1.0, 330.0, 331.0):
        world.at(delay, lambda: world.start({}))
    if what == "another model":
        with pytest.raises(CheckpointError, match="it is another model"):
            world.run()
        return
    world.run()
    (must_hold_in_gossip if gossip else must_hold)(world)
    late = [work for work in world.works[2:] if work.begun]
    assert len(late) == 2 and all(work.begun[0][1].after > 0 for work in late), [work.begun for work in late]
    warnings = [one for work in late for one in work.sentences if "is passed over for another" in one]
    assert warnings and len(warnings) <= len(late) * len(broken), "each names it once"


def test_with_no_sound_state_left_the_damaged_one_ends_a_newcomer() -> None:
    world = World(3, workers=2, rounds=20, faults=0.0)
    world.terms = world.terms._replace(gossip=True, rejoin_rounds=3)
    world.kind = Mixer

    def all_die() -> None:
        for number in [*world.alive]:
            world.kill(number, None, keeps_disk=False)
        for name in [name for name in world.store.objects if name[0] == "s"]:
            world.store.objects[name] += b"?"

    world.at(320.0, all_die)
    for delay in (0.0, 1.0, 330.0):
        world.at(delay, lambda: world.start({}))
    with pytest.raises(
        TransportError, match=r"the object 's\d{8}-\d{5}' of the store is not what a worker of this run wrote"
    ):
        world.run()


BASIS = {"after": 0, "donor": 0, "sha256": "", "steps": 0}


@pytest.mark.parametrize(
    "head",
    [
        {"steps": 5, "begun": None, "life": -1},
        {"steps": True, "begun": None},
        {"steps": 1 << 62, "begun": None},
        {"steps": 5, "begun": {**BASIS, "after": 9}},
        {"steps": 5, "begun": {**BASIS, "donor": 3}},
        {"steps": 5, "begun": {**BASIS, "donor": False}},
    ],
    ids=repr,
)
def test_no_message_makes_an_honest_worker_write_an_unreadable_outcome(head: dict[str, Any]) -> None:
    world = World(0, workers=3, rounds=4, faults=0.0)
    objects = {"t00002-0000": {"nonce": ""}, "r00000000-from-00002-0000": head, "v00002-0000": {}}
    for name, head_there in objects.items():
        world.store.take(Create(name, SecretSeal().sealed(name, head_there, b"0 5 ")))
    for _ in range(2):
        world.start({})
    world.run()
    assert not world.failed and [len(history) for history in world.histories] == [5, 5]
    parts = [sorted(commit.parts) for commit in commits_of(world)]
    assert parts[0] == ([0, 1, 2] if "life" in head else [0, 1]) and parts[1:] == [[0, 1]] * 3


def test_what_strangers_write_and_what_members_write_for_others_is_named_and_passed_by(
    seals: list[KeySeal], tmp_path: Path
) -> None:
    world = World(1, workers=3, rounds=6, faults=0.0)
    stranger = new_key("stranger", tmp_path / "stranger.pem")
    only = {"stranger": Peer(certificate=base64.b64encode(certificate_of(stranger)).decode(), workers=3)}
    (tmp_path / "elsewhere").mkdir()
    foreign = key_seal(Folder(str(tmp_path / "elsewhere")), Keys(stranger, only, 3))
    works = [world.start({}, seal) or [*world.alive.values()][-1].work for seal in seals]

    def write() -> None:
        for name in ("t00000-0007", "v00001-0000", "r00000001-from-00002-0009", "r00000050-commit", "s00000002"):
            world.store.take(Create(name, foreign.sealed(name, {"slot": 0, "nonce": "mine"})))
        world.store.take(Create("t00002-0004", seals[0].sealed("t00002-0004", {"nonce": "of another's slot"})))
        world.store.take(
            Create("v00002-0000", world.store.ever["v00000-0000"] if world.store.ever.get("v00000-0000") else b"")
        )

    world.at(30.0, write)
    world.run()
    assert not world.failed and all(len(history) == 7 for history in world.histories), "nobody has begun again"
    for round in range(6):
        commit = commit_in(round, seals[0].opened(name := f"r{round:08d}-commit", world.store.ever[name]).head, 3)
        assert commit is not None and sorted(commit.parts) == [0, 1, 2]
    warnings = " ".join(works[1].sentences)
    assert "'t00000-0007' of the store does not count: nobody in the run's [peers] has signed it" in warnings
    assert "'t00002-0004' of the store does not count: peer 'berlin' has signed it, and may not be worker 2" in warnings
    assert "'v00002-0000'" in warnings and "'r00000050-commit'" in warnings and "'v00001-0000'" in warnings
