"""How a run with a server lies in a store, without a process that is the server.

    r00000012-commit          the 13th event of the server: the first one created counts
    r00000005-from-00003-0001 what the worker of slot 3, the second there, pushes after its local phase 5
    s00000012                 the state of the server after 12 events

with the objects `run`, `key` and those of slots as in `gossamer.transport.bucket.protocol`. An event is one input of a server: a
worker joins, has pushed, or is gone, or time has passed. What a server does follows from its inputs in their order, so each
worker takes all events and has the state of the server; none decides for the others, and no death costs more than what had no
event yet. A push counts from the moment at which its event is created, after its message. Two that add an event at once get two
numbers; an event that contradicts the earlier ones, as when both report the same death, counts for nothing, for everybody.

The time of an event is that of the one that adds it, and never before the last one's: each runs a clock from 0, and sets it
forward to the newest event that it has read. Clocks of machines are compared nowhere else.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from gossamer.errors import CheckpointError, PeerError, TransportError
from gossamer.transport.bucket.bucket import Item
from gossamer.transport.bucket.protocol import (
    Do,
    SlotHolder,
    SlotLostError,
    Steps,
    StoreProcess,
    StoreTerms,
    commit_name,
    lease_name,
    message_name,
    state_name,
)

_MOST_S = 1e9
_MOST = 1 << 62


class ServerEvent(NamedTuple):
    """An input of the server."""

    event: str
    """join, push, leave or tick"""
    time_s: float
    """Seconds since the run began."""
    writer: int
    """The slot of the worker that has added it."""
    worker: int = 0
    life: int = 0
    """Which process of its slot the worker is."""
    phase: int = 0
    """The local phase of a push."""
    owned: tuple[int, ...] = ()
    """The rounds of which a worker that joins has checkpoints."""
    rounds: int = 0
    """Completed rounds before it; this and what follows is for people only."""
    steps: tuple[int, ...] = ()
    """Inner steps of each slot that the server had received before it."""
    wall_s: float = 0.0
    """When, in Unix time."""


class ServerWork(StoreProcess, Protocol):
    """The state of the server in one process. It changes by `take` and `load` only."""

    def take(self, number: int, event: ServerEvent, message: memoryview) -> None:
        """Takes an event that counts, with the message of a push."""
        ...

    def is_present(self, worker: int) -> bool:
        """Whether a worker has joined and not left."""
        ...

    def awaited(self, worker: int) -> int | None:
        """The local phase whose push a worker may add; None where none is expected."""
        ...

    def is_due(self, now_s: float) -> bool:
        """Whether the server would act at this time without another input."""
        ...

    def is_answered(self) -> bool:
        """Whether this worker has a starting point that it has not used."""
        ...

    def is_finished(self) -> bool:
        """Whether the run is over."""
        ...

    def progress(self) -> tuple[int, tuple[int, ...]]:
        """Completed rounds, and the inner steps of each slot that the server has received."""
        ...

    def is_state_due(self) -> bool:
        """Whether a state is due after the event that was taken last."""
        ...

    def state(self) -> bytes:
        """The state of the server."""
        ...

    def load(self, body: memoryview) -> None:
        """Continues from a state in the store. Raises: CheckpointError."""
        ...


class ServerAttendance(SlotHolder):
    """One process in a run with a server that lies in a store; see `SlotHolder`. `round` is the number of the next event."""

    def __init__(
        self,
        terms: StoreTerms,
        work: ServerWork,
        nonce: str,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(terms, work, nonce, clock, wall)
        self._work = work
        self.lives: dict[int, int] = {}
        """The life of each slot that joined last."""
        self._last_s, self._early_s, self._last_rounds = 0.0, -clock(), 0
        self._messages: list[tuple[int, str]] = []
        """The names of messages that nobody has removed yet, as far as is known, each with the number of its event."""
        self._states: list[int] = []
        self._loaded = 0

    @property
    def has_joined(self) -> bool:
        """Whether what the server sends to this slot is for this process, and not for an earlier one."""
        return self.slot >= 0 and self.lives.get(self.slot) == self.life

    # --- what a worker does -------------------------------------------------------------------------------------------

    def enter(self) -> Steps[bool]:
        """Catches up with the log, and takes a slot; returns False where the run is over, or it was asked to leave.

        Raises: PeerError where all slots are taken, or it is another run.
        """
        yield from self._agree()
        yield from self._look(None)
        if max(self.seen.states, default=0) > self.round:
            yield from self._load_newest()
        yield from self._follow()
        if not self._work.is_finished():
            yield from self._claim()
        return self.slot >= 0

    def join(self, owned: tuple[int, ...]) -> Steps[None]:
        """Joins in its slot, with checkpoints of these rounds. Raises: SlotLostError."""
        while not self.has_joined:
            if (before := self.lives.get(self.slot)) is not None and self._work.is_present(self.slot):
                yield from self._add("leave", worker=self.slot, life=before)
            else:
                yield from self._add("join", worker=self.slot, life=self.life, owned=owned)
            if self.lives.get(self.slot, -1) > self.life:
                raise SlotLostError(f"slot {self.slot} belongs to another process")
        if not self._work.is_answered():
            raise SlotLostError(f"the others went on from a newer state while this process joined in slot {self.slot}")

    def push(self, phase: int, message: bytes) -> Steps[bool]:
        """Adds a push, and waits for the answer; returns False if it was asked to leave before that. Raises: SlotLostError."""
        yield from self._create(message_name(phase, self.slot, self.life), {}, message)
        loaded = self._loaded
        yield from self._follow()
        while self._is_here() and self._work.awaited(self.slot) == phase:
            loaded = self._loaded
            if not (yield from self._tend()):
                yield from self._add("push", worker=self.slot, life=self.life, phase=phase)
        yield from self._wait(lambda: self._work.is_answered() or self._work.asked() or self._loaded > loaded)
        if (
            self._loaded > loaded and not self._work.is_answered()
        ):  # it was among the events that the state has replaced
            raise SlotLostError(f"slot {self.slot} was silent for so long that the others are far ahead")
        return self._work.is_answered()

    def leave(self, *, finished: bool) -> Steps[None]:
        """Leaves; one with no phase left first waits until the others have pushed all."""
        if self._is_here():
            yield from self._add("leave", worker=self.slot, life=self.life)
        if finished:
            yield from self._wait(lambda: self._work.is_finished() or self._work.asked(), here=False)
            if self._work.progress()[0] > self._last_rounds:  # as a death has ended the run, nobody has noted the end
                yield from self._add("tick")
        yield from self.release()
        self.over = True

    def release(self) -> Steps[None]:
        """Gives its slot back, in the store alone."""
        slot, life, self.slot = self.slot, self.life, -1
        yield from self._create(lease_name("v", slot, life), {})
        yield from self._remove(f"{lease_name('u', slot, life)}-{self._beat:08d}")

    # --- the log ------------------------------------------------------------------------------------------------------

    def _is_here(self) -> bool:
        return self.has_joined and self._work.is_present(self.slot)

    def _wait(self, holds: Callable[[], bool], *, here: bool = True) -> Steps[None]:
        """Takes events until something holds, and adds what no other process can: that one is gone, that time has passed."""
        start_s = self._clock()
        while True:
            yield from self._follow()
            if here and not self._is_here():
                raise SlotLostError(
                    f"slot {self.slot} was given up by the others, as this process was silent for too long"
                )
            if holds():
                return
            if not (yield from self._tend()):
                yield from self._pause(self._clock() - start_s)

    def _tend(self) -> Steps[bool]:
        """Adds an event that is due whoever adds it; returns whether there was one."""
        now = self._clock()
        for slot, life in self.lives.items():
            gone = self.seen.lives.get(slot, -1) > life or (
                slot in self.seen.lives and not self.seen.holds(slot, now, self.terms.timeout_s)
            )
            if gone and slot != self.slot and self._work.is_present(slot):
                yield from self._add("leave", worker=slot, life=life)
                return True
        if self._work.is_due(self._now_s()):
            yield from self._add("tick")
            return True
        return False

    def _now_s(self) -> float:
        return max(self._last_s, self._clock() + self._early_s)

    def _follow(self) -> Steps[None]:
        """Takes all events that show. Raises: SlotLostError."""
        yield from self._look(self.round)
        while self.seen.newest >= self.round and (yield from self._next()):
            pass

    def _next(self) -> Steps[bool]:
        """Takes the next event; returns whether it could be read."""
        item = yield from self._read(commit_name(self.round))
        if item is not None:
            yield from self._take(event_in(item, self.terms.workers))
        return item is not None

    def _add(self, event: str, **fields: Any) -> Steps[None]:
        """Makes this the next event, or takes the one that another process has made the next. Raises: PeerError."""
        (rounds, steps), now_s = self._work.progress(), self._now_s()
        one = ServerEvent(event, now_s, self.slot, **fields, rounds=rounds, steps=steps, wall_s=round(self._wall(), 3))
        if (yield from self._create(commit_name(self.round), one._asdict())):
            yield from self._take(one)
            return
        waited_s = 0.0  # its own pauses: a process that was stopped looks again before it gives up
        while not (yield from self._next()):
            if waited_s > 2 * self.terms.timeout_s:
                raise PeerError(
                    f"event {self.round} of the server is in the store and cannot be read for {waited_s:.0f} s; look at the "
                    "rights of this machine, and at the store"
                )
            waited_s += yield from self._pause(waited_s)

    def _take(self, event: ServerEvent | None) -> Steps[None]:
        """Takes the next event, unless it counts for nothing."""
        number = self.round
        if event is None or not self._counts(event):
            self.round += 1
            return
        message = memoryview(b"")
        if event.event == "push":
            name = message_name(event.phase, event.worker, event.life)
            item = yield from self._message(name)
            if item is None:
                yield from self._load_newest()
                return
            message = item.body
            self._messages.append((number, name))
        self.round, self._last_s, self._last_rounds = number + 1, event.time_s, event.rounds
        self._early_s = max(self._early_s, event.time_s - self._clock())
        if event.event == "join":
            self.lives[event.worker] = event.life
        yield Do(partial(self._work.take, number, event, message))
        if self._work.is_state_due():
            yield from self._keep_state(writes=event.writer == self.slot)

    def _counts(self, event: ServerEvent) -> bool:
        """Whether an event follows from those before it."""
        if event.time_s < self._last_s:
            return False
        life, present = self.lives.get(event.worker, -1), self._work.is_present(event.worker)
        match event.event:
            case "join":
                return not present and event.life > life
            case "push":
                return event.life == life and self._work.awaited(event.worker) == event.phase
            case "leave":
                return present and event.life == life
            case _:
                return True

    def _message(self, name: str) -> Steps[Item | None]:
        """The message of a push; None where a newer state is there, as it may be removed by then. Raises: PeerError."""
        waited_s = 0.0
        while (item := (yield from self._read(name))) is None:
            yield from self._look(None)
            if max(self.seen.states, default=0) > self.round:
                return None
            if waited_s > 2 * self.terms.timeout_s:
                raise PeerError(
                    f"event {self.round} of the server names the message '{name}', which is not in the store, so no worker can "
                    "continue; look at the machine of that worker, and start again with an empty store"
                )
            waited_s += yield from self._pause(waited_s)
        return item

    # --- states -------------------------------------------------------------------------------------------------------

    def _keep_state(self, *, writes: bool) -> Steps[None]:
        """Notes that a state is due after the last event; the writer of that event creates it, and removes what is old."""
        self._states = [*self._states, self.round][-3:]
        if writes:
            body = yield Do(self._work.state)
            head = {
                "lives": {str(slot): life for slot, life in self.lives.items()},
                "messages": self._messages,
                "states": self._states,
                "time_s": self._last_s,
            }
            yield from self._create(state_name(self.round), head, body)
            if len(self._states) > 1:
                for number, name in self._messages:
                    if number < self._states[-2]:
                        yield from self._remove(name)
                yield from self._look(None)
                for state in sorted(self.seen.states):
                    if state < self._states[-2]:
                        yield from self._remove(state_name(state))
                        self.seen.states.discard(state)
        # Each message is removed by the writers of two states, as one may die before it has.
        self._messages = [one for one in self._messages if one[0] >= self._states[0]]

    def _load_newest(self) -> Steps[None]:
        """Continues from the newest state. Raises: CheckpointError, PeerError."""
        waited_s = 0.0
        while True:
            yield from self._look(None)
            for after in sorted(self.seen.states, reverse=True):
                try:
                    item = yield from self._read(state_name(after)) if after > self.round else _none()
                except TransportError as error:
                    if not self.terms.seal.proves_writers:
                        raise
                    self._believed[state_name(after)] = False  # of a stranger
                    self.seen.states.discard(after)
                    self._process.say(str(error))
                    continue
                if item is not None:
                    head = _state_head(item.head, self.terms.workers)
                    if head is None:
                        raise CheckpointError(
                            f"the state after event {after} in the store is none; start again with an empty store"
                        )
                    yield Do(partial(self._work.load, item.body))
                    self.lives, self._messages, self._states, self._last_s = head
                    self._early_s = max(self._early_s, self._last_s - self._clock())
                    self.round, self._loaded = after, self._loaded + 1
                    return
            if waited_s > 2 * self.terms.timeout_s:
                raise PeerError("no state of the server in the store can be read; look at the rights of this machine")
            waited_s += yield from self._pause(waited_s)


def _none() -> Steps[None]:
    return None
    yield


def event_in(item: Item, workers: int) -> ServerEvent | None:
    """The event in an object; None for what no worker of this run writes, and for one of a worker that its writer may not be."""
    match item.head:
        case {
            "event": "join" | "push" | "leave" | "tick" as event,
            "time_s": int() | float() as time_s,
            "writer": int(writer),
            "worker": int(worker),
            "life": int(life),
            "phase": int(phase),
            "owned": list(owned),
            "rounds": int(rounds),
            "steps": list(steps),
            "wall_s": int() | float() as wall_s,
        } if 0 <= time_s < _MOST_S and math.isfinite(wall_s) and len(steps) == workers and len(owned) < 16:
            numbers = (writer, worker, life, phase, rounds, *owned, *steps)
            if all(type(one) is int and 0 <= one < _MOST for one in numbers) and max(writer, worker) < workers:
                own = event not in ("join", "push") or item.is_of(worker)
                fields = (writer, worker, life, phase, tuple(owned), rounds, tuple(steps), float(wall_s))
                return ServerEvent(event, float(time_s), *fields) if own and item.is_of(writer) else None
    return None


def _state_head(head: Any, workers: int) -> tuple[dict[int, int], list[tuple[int, str]], list[int], float] | None:
    """Lives, messages, states and time in the head of a state; None for anything else."""
    try:
        lives = {int(slot): int(life) for slot, life in head["lives"].items()}
        messages = [(int(number), str(name)) for number, name in head["messages"]]
        states, time_s = [int(one) for one in head["states"]], float(head["time_s"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    sound = all(0 <= slot < workers for slot in lives) and 0 <= time_s < _MOST_S and 0 < len(states) < 4
    own = all(name.startswith("r") and "-from-" in name for _, name in messages)  # removed by whoever loads it
    return (lives, messages, states, time_s) if sound and own else None
