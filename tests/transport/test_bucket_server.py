"""A server without a process of its own: workers that share a store have its state from its log, over virtual time."""

import hashlib
import random
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bucket_protocol import Store, World, live_through, new_seals

from gossamer.asynchronous import ServerRule
from gossamer.asynchronous.decoupled_diloco import decoupled_diloco
from gossamer.asynchronous.heloco import heloco
from gossamer.clock.phases import Budget
from gossamer.clock.saved import as_dicts, rebuilt
from gossamer.clock.server_core import CoreState, Send, ServerAction, ServerCore
from gossamer.errors import PeerError
from gossamer.layout import Layout, Leaf
from gossamer.record.packed import packed, unpacked
from gossamer.transport.bucket.bucket import SecretSeal
from gossamer.transport.bucket.requests import Asking, Create, Do, Get, Steps
from gossamer.transport.bucket.server_log import ServerAttendance, ServerEvent, event_in
from gossamer.transport.bucket.slots import SlotLostError

SCHEDULES, FULL, PARTS = (*range(19), 21), range(1_000), 4
"""In the last a worker would wait without end that takes an answer to the former process of its slot for its own."""
P, STEPS = 4, 5
LAYOUT = Layout((Leaf("w", (P,), 0, P),), P)


def core_of(rule: ServerRule, workers: int, phases: int) -> ServerCore:
    """The server of a run in which each worker takes so many local phases, if all are equally fast."""
    budget = Budget(workers * phases * STEPS)
    return ServerCore(rule, torch.ones(P), LAYOUT, [(0, P)], [STEPS] * workers, budget=budget, expected_until_s=60.0)


def pushed(worker: int, phase: int, x: torch.Tensor) -> bytes:
    """What a worker pushes after a local phase from these parameters."""
    seed = hashlib.sha256(f"{worker} {phase}".encode() + x.numpy().tobytes()).digest()
    return struct.pack(f"{P}f", *(0.1 + byte / 300 for byte in seed[:P]))


def applied(core: ServerCore, event: ServerEvent, message: bytes) -> list[ServerAction]:
    """The actions of the server after an event."""
    match event.event:
        case "join":
            return core.join(event.worker)
        case "push":
            push = core.counted(event.worker, 0, torch.tensor(struct.unpack(f"{P}f", message)), 1)
            return core.push(event.worker, push, event.time_s)
        case "leave":
            return core.leave(event.worker, event.time_s)
        case _:
            actions, all_actions = core.tick(event.time_s), list[ServerAction]()
            while actions:
                all_actions += actions
                actions = core.tick(event.time_s)
            return all_actions


def digest_of(core: ServerCore) -> str:
    state, found = core.whole_state(), hashlib.sha256()
    for fragment in state.fragments:
        waiting = [(one.worker, one.reply, one.arrived_s, one.push.updates) for one in fragment.waiting]
        found.update(repr((fragment.updates, waiting, fragment.closes_s)).encode())
        for tensor in [*fragment.outer, *(one.push.message for one in fragment.waiting)]:
            found.update(tensor.numpy().tobytes())
    found.update(repr(state[1:]).encode())
    return found.hexdigest()


class Replica:
    """ServerWork with a server of four numbers, and a worker."""

    def __init__(self, rule: ServerRule, workers: int, phases: int) -> None:
        self._args, self._workers = (rule, workers, phases), workers
        self.core = core_of(*self._args)
        self._due, self._phases = False, 0
        self.one: ServerAttendance
        self.leaves = False
        self.answers: list[Send] = []
        self.sentences: list[str] = []
        self.history: list[tuple[int, str]] = []
        self.acknowledged: list[tuple[int, int, int]] = []

    def agree(self, identity: str) -> None: ...

    def asked(self) -> bool:
        return self.leaves

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def take(self, number: int, event: ServerEvent, message: memoryview) -> None:
        actions = applied(self.core, event, bytes(message))
        if self.one.has_joined:
            self.answers += [one for one in actions if isinstance(one, Send) and one.worker == self.one.slot]
        self._phases += event.event == "push"
        self._due = event.event == "push" and self._phases % (2 * self._workers) == 0
        self.history.append((number, digest_of(self.core)))

    def is_answered(self) -> bool:
        return bool(self.answers)

    def progress(self) -> tuple[int, list[int]]:
        return 0, [STEPS * self.core.phases(i) for i in range(self._workers)]

    def is_state_due(self) -> bool:
        return self._due

    def state(self) -> bytes:
        return packed({"core": as_dicts(self.core.whole_state()), "phases": self._phases})

    def load(self, body: memoryview) -> None:
        state = unpacked(bytes(body))
        self.core = core_of(*self._args)
        self.core.restore_whole(rebuilt(CoreState, state["core"]))
        self._phases, self.answers = state["phases"], []

    def train(self, answer: Send) -> bytes:
        return pushed(self.one.slot, answer.phases, answer.starts[0].x)


class Worker(ServerAttendance):
    """One process, as `gossamer.run.served.in_store` runs it."""

    def __init__(self, terms: Any, work: Replica, *more: Any) -> None:
        super().__init__(terms, work, *more)
        self.replica, work.one = work, self

    def live(self) -> Steps[None]:
        work = self.replica
        while (yield from self.take_slot()):
            work.answers.clear()
            try:
                yield from self.join(())
                while (answer := work.answers.pop(0)).go and not work.asked():
                    message = yield Do(partial(work.train, answer))
                    yield from self.push(answer.phases, message)
                    work.acknowledged.append((self.slot, self.life, answer.phases))
                yield from self.leave(finished=not answer.go)
            except SlotLostError:
                yield from self.release()
                continue
            break


def served(world: World, rule: ServerRule) -> None:
    """Makes the processes of a world workers of a server."""
    world.attends = Worker
    world.kind = lambda disk, every: Replica(rule, world.terms.workers, world.terms.rounds)  # type: ignore[assignment, misc]


def rule_of(seed: int) -> ServerRule:
    return random.Random(seed).choice((heloco(), decoupled_diloco(quorum=2, grace_s=15.0), decoupled_diloco(quorum=9)))


def events_of(world: World) -> Iterator[tuple[int, ServerEvent, bytes]]:
    """The events that count, with the messages of pushes."""
    lives: dict[int, int] = {}
    present, last_s = set[int](), 0.0
    for number in range(len([name for name in world.store.ever if name.endswith("commit")])):
        name = f"r{number:08d}-commit"
        event = event_in(number, SecretSeal().opened(name, world.store.ever[name]), world.terms.workers)
        assert event is not None and event.time_s >= last_s
        last_s, who, message = event.time_s, (event.worker, event.life), b""
        here = event.worker in present and lives[event.worker] == event.life
        if event.event == "join":
            if event.worker in present or event.life <= lives.get(event.worker, -1):
                continue
            lives[event.worker] = event.life
            present.add(event.worker)
        elif event.event == "leave":
            if not here:
                continue
            present.discard(event.worker)
        elif event.event == "push":
            if not here:
                continue
            name = f"r{event.message:08d}-from-{who[0]:05d}-{who[1]:04d}"
            message = bytes(SecretSeal().opened(name, world.store.ever[name]).body)
        yield number, event, message


def must_hold(world: World, rule: ServerRule) -> None:
    """The run has ended; each push that was acknowledged counts, once; all processes had the state that follows from the log."""
    assert not world.failed
    workers, phases = world.terms.workers, world.terms.rounds
    core = core_of(rule, workers, phases)
    states, counted, starts = dict[int, str](), set[tuple[int, int, int]](), dict[int, Send]()
    for number, event, message in events_of(world):
        if event.event == "push":
            expected = core.expected_push(event.worker)
            if expected is None or expected[0] != event.phase:
                continue  # the same event a second time
            start = starts[event.worker]
            assert message == pushed(event.worker, event.phase, start.starts[0].x), "it began with its starting point"
            assert (event.worker, event.phase) not in {(slot, phase) for slot, _, phase in counted}
            counted.add((event.worker, event.life, event.phase))
        starts |= {one.worker: one for one in applied(core, event, message) if isinstance(one, Send)}
        states[number] = digest_of(core)
    assert core.is_finished
    assert core.absorbed_steps == STEPS * len(counted)
    replicas: list[Replica] = world.works  # type: ignore[assignment]
    assert {one for work in replicas for one in work.acknowledged} <= counted
    for work in replicas:
        for number, state in work.history:
            assert state == states[number], f"a wrong state after event {number}"
    assert any(work.core.is_finished for work in replicas)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_acknowledged_push_is_lost_and_all_have_one_server_for_any_deaths_and_faults_of_the_store(
    part: int, request: pytest.FixtureRequest
) -> None:
    for seed in (FULL if request.config.getoption("--full") else SCHEDULES)[part::PARTS]:
        try:
            rule = rule_of(seed)
            must_hold(live_through(seed, partial(served, rule=rule)), rule)
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise


def test_an_event_that_a_member_adds_for_another_or_a_stranger_repeats_counts_for_nothing(tmp_path: Path) -> None:
    seals, rule = new_seals(tmp_path), rule_of(2)
    world = World(2, workers=3, rounds=6, faults=0.0)
    served(world, rule)
    for seal in seals:
        world.start({}, seal)
    written: list[str] = []

    def write() -> None:
        number = len([name for name in world.store.ever if name.endswith("-commit")])
        head = {"event": "push", "at_s": 1e6, "phase": 0, "message": 0, "owned": [], "rounds": 0}
        commit = {"parts": {"2": {"life": 0, "steps": 0, "begun": None}}, "steps": [0] * 3, "mean": "", "time_s": 0.0}
        name = f"r{number:08d}-commit"
        written.append(name)
        world.store.take(Create(name, seals[0].sealed(name, {**head, **commit, "closer": [0, 0]})))
        later = f"r{number + 50:08d}-commit"  # signed for another name
        world.store.take(Create(later, world.store.ever[name]))

    world.at(30.0, write)
    world.run()
    assert not world.failed and written
    for work in world.works:
        assert work.core.is_finished and all(number != int(written[0][1:9]) for number, _ in work.history)  # type: ignore[attr-defined]
        assert len({*work.history} ^ {*world.works[0].history}) <= 3, "leaves after the end"


@pytest.mark.parametrize("what", ["damaged", "no state", "without lives"])
def test_a_newcomer_passes_over_a_damaged_state_of_the_server_for_an_older_one(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, world = heloco(), World(4, workers=2, rounds=20, faults=0.0)
    served(world, rule)
    loaded: list[int] = []
    load = Replica.load

    def noted(work: Replica, body: memoryview) -> None:
        load(work, body)
        loaded.append(len(body))

    monkeypatch.setattr(Replica, "load", noted)

    def all_die() -> None:
        for number in [*world.alive]:
            world.kill(number, None, keeps_disk=False)
        objects = world.store.objects
        newest = max(name for name in objects if name[0] == "s")
        if what == "damaged":
            objects[newest] += b"?"
        else:
            item = SecretSeal().opened(newest, objects[newest])
            head, body = ({}, item.body) if what == "without lives" else (item.head, b"no state")
            objects[newest] = SecretSeal().sealed(newest, head, body)

    world.at(320.0, all_die)
    for delay in (0.0, 1.0, 330.0, 331.0):
        world.at(delay, lambda: world.start({}))
    world.run()
    must_hold(world, rule)
    assert len(loaded) == 2, "each of the newcomers begins with a state"
    warnings = [one for work in world.works[2:] for one in work.sentences if "is passed over for another" in one]
    assert len(warnings) == 2, warnings


def test_an_event_that_is_listed_and_cannot_be_read_ends_the_worker_that_waits_for_it() -> None:
    rule, world = decoupled_diloco(quorum=2, grace_s=1e6), World(4, workers=2, rounds=20, faults=0.0)
    served(world, rule)

    class Hiding(Store):
        def take(self, effect: Asking) -> object:
            if isinstance(effect, Get) and effect.name == hidden:
                return None
            return super().take(effect)

    world.store, hidden = Hiding(world.draws, lambda: world.now, 0.0), ""
    world.training_s[1] = 1_000.0
    for _ in range(2):
        world.start({})

    def hide() -> None:
        nonlocal hidden
        hidden = f"r{len([name for name in world.store.ever if name.endswith('-commit')]):08d}-commit"

    world.at(300.0, hide)  # the push for which the other one waits
    with pytest.raises(PeerError, match=r"event \d+ of the server is in the store and cannot be read for 1\d\d s"):
        world.run(until_s=1e5)
