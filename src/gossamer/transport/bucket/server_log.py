"""How a run with a server lies in a store, without a process that is the server.

    r00000012-commit          the 13th event of the server: the first one created counts
    r00000010-from-00003-0001 what the worker of slot 3, the second there, pushes; it was written when 10 events were there
    s00000012                 the state of the server after 12 events

with the objects `run`, `key` and those of slots as in `gossamer.transport.bucket.protocol`. An event is one input of a server: a
worker joins, has pushed, or is gone, or time has passed. What a server does follows from its inputs in their order, so each
worker takes all events and has the state of the server; none decides for the others, and no death costs more than what had no
event yet. A push counts from the moment at which its event is created, after its message. Two that add an event at once get two
numbers; an event that contradicts the earlier ones, as when both report the same death, counts for nothing, for everybody.

The time of an event is that of the one that adds it, and never before the last one's: each runs a clock from 0, and sets it
forward to the newest event that it has read. Clocks of machines are compared nowhere else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from gossamer.errors import CheckpointError, PeerError
from gossamer.transport.bucket.bucket import Item
from gossamer.transport.bucket.objects import TakenPart, commit_head, commit_in, commit_name, message_name, state_name
from gossamer.transport.bucket.protocol import StoreProcess, StoreTerms
from gossamer.transport.bucket.requests import Do, Steps
from gossamer.transport.bucket.slots import SlotHolder, SlotLostError
from gossamer.transport.bucket.states import loaded

_MOST_S = 1e9


class ServerEvent(NamedTuple):
    """An input of the server. Its object is that of a commit, with the worker as the only part."""

    event: str
    """join, push, leave or tick"""
    time_s: float
    """Seconds since the run began."""
    worker: int
    life: int
    """Which process of its slot the worker is."""
    phase: int
    """The local phase of a push."""
    message: int
    """The number in the name of its message."""
    owned: tuple[int, ...]
    """The rounds of which a worker that joins has checkpoints."""
    rounds: int
    """Completed rounds before it, for people only, as the steps in the commit."""
    writer: int
    """The slot of the worker that has added it."""


class Decisions(Protocol):
    """What a server decides: that of `gossamer.clock.server_core.ServerCore` which events depend on."""

    def is_present(self, worker: int, /) -> bool:
        """Whether a worker has joined and not left."""
        ...

    def expected_push(self, worker: int, /) -> tuple[int, int] | None:
        """Phase and fragment of the push that the server expects from a worker."""
        ...

    def is_due(self, now_s: float, /) -> bool:
        """Whether it would act at this time without another input."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the run is over."""
        ...


class ServerWork(StoreProcess, Protocol):
    """The state of the server in one process, which changes by `take` and `load` only."""

    @property
    def core(self) -> Decisions:
        """The server."""
        ...

    def take(self, number: int, event: ServerEvent, message: memoryview) -> None:
        """Takes an event that counts, with the message of a push."""
        ...

    def is_answered(self) -> bool:
        """Whether this worker has a starting point that it has not used."""
        ...

    def progress(self) -> tuple[int, Sequence[int]]:
        """Completed rounds, and the inner steps of each slot that the server has received."""
        ...

    def is_state_due(self) -> bool:
        """Whether a state is due after the event that was taken last."""
        ...

    def state(self) -> bytes:
        """The state of the server."""
        ...

    def load(self, body: memoryview) -> None:
        """Continues from a state in the store. Raises: CheckpointError, of the kind "damaged" for what is no state."""
        ...


class ServerAttendance(SlotHolder[ServerWork]):
    """One process in a run with a server that lies in a store; see `SlotHolder`. `round` is the number of the next event."""

    def __init__(self, terms: StoreTerms, work: ServerWork, nonce: str, clock: Callable[[], float]) -> None:
        super().__init__(terms, work, nonce, clock)
        self.lives: dict[int, int] = {}
        """The life of each slot that joined last."""
        self._last_s, self._early_s, self._last_rounds = 0.0, -clock(), 0
        self._loaded = self._newest_state = 0
        """How many states it has loaded, and the number of events behind the last one that was due."""

    @property
    def has_joined(self) -> bool:
        """Whether what the server sends to this slot is for this process, and not for an earlier one."""
        return self.slot >= 0 and self.lives.get(self.slot) == self.life

    # --- what a worker does -------------------------------------------------------------------------------------------

    def take_slot(self) -> Steps[bool]:
        """Catches up with the log, and takes a slot; returns False where the run is over, or it was asked to leave.

        Raises: PeerError where all slots are taken, or it is another run.
        """
        yield from self.agree()
        yield from self._load_newest()
        yield from self._follow()
        if not self.work.core.is_finished:
            yield from self.claim()
        return self.slot >= 0

    def join(self, owned: tuple[int, ...]) -> Steps[None]:
        """Joins in its slot, with checkpoints of these rounds. Raises: SlotLostError."""
        while not self.has_joined:
            if (before := self.lives.get(self.slot)) is not None and self.work.core.is_present(self.slot):
                yield from self._add("leave", self.slot, before)
            else:
                yield from self._add("join", self.slot, self.life, owned=owned)
            if self.lives.get(self.slot, -1) > self.life:
                raise SlotLostError(f"slot {self.slot} belongs to another process")
        if not self.work.is_answered():
            raise SlotLostError(f"the others went on from a newer state while this process joined in slot {self.slot}")

    def push(self, phase: int, content: bytes) -> Steps[None]:
        """Adds a push, and waits for the answer. Raises: SlotLostError."""
        message, loaded = -1, self._loaded
        yield from self._follow()
        while self._is_here() and self._awaits(self.slot, phase):
            loaded = self._loaded
            if message < self._newest_state:  # an older message may be removed before those read it that come later
                message = self.round
                yield from self.store.create(message_name(message, self.slot, self.life), {}, content)
            elif not (yield from self._add_due_event()):
                yield from self._add("push", self.slot, self.life, phase=phase, message=message, size=len(content))
        yield from self._wait(lambda: self.work.is_answered() or self._loaded > loaded)
        if not self.work.is_answered():  # it was among the events that the state has replaced
            raise SlotLostError(f"slot {self.slot} was silent for so long that the others are far ahead")

    def leave(self, *, finished: bool) -> Steps[None]:
        """Leaves; one with no phase left first waits until the others have pushed all."""
        if self._is_here():
            yield from self._add("leave", self.slot, self.life)
        if finished:
            yield from self._wait(lambda: self.work.core.is_finished or self.work.asked(), here=False)
            if self.work.progress()[0] > self._last_rounds:  # as a death has ended the run, nobody has noted the end
                yield from self._add("tick", self.slot, self.life)
        yield from self.release()
        self.over = True

    # --- the log ------------------------------------------------------------------------------------------------------

    def _awaits(self, worker: int, phase: int) -> bool:
        return (self.work.core.expected_push(worker) or (-1, 0))[0] == phase

    def _is_here(self) -> bool:
        return self.has_joined and self.work.core.is_present(self.slot)

    def _wait(self, holds: Callable[[], bool], *, here: bool = True) -> Steps[None]:
        """Takes events until something holds, and adds what no other process can: that one is gone, that time has passed."""
        start_s, unread_s = self.clock(), 0.0
        while True:
            yield from self._follow()
            if here and not self._is_here():
                raise SlotLostError(
                    f"slot {self.slot} was given up by the others, as this process was silent for too long"
                )
            if holds():
                return
            if commit_name(self.round) in self.listed:
                unread_s += yield from self.store.pause_for(f"event {self.round} of the server", unread_s)
                continue
            unread_s = 0.0
            if not (yield from self._add_due_event()):
                yield from self.store.pause(self.clock() - start_s)

    def _add_due_event(self) -> Steps[bool]:
        """Adds an event that is due, whichever process adds it; returns whether there was one."""
        now = self.looked_s
        for slot, life in self.lives.items():
            silent = slot in self.seen.lives and not self.seen.is_held(slot, now, self.terms.timeout_s)
            gone = silent or self.seen.lives.get(slot, -1) > life
            if gone and slot != self.slot and self.work.core.is_present(slot):
                yield from self._add("leave", slot, life)
                return True
        if self.work.core.is_due(self._now_s()):
            yield from self._add("tick", self.slot, self.life)
            return True
        return False

    def _now_s(self) -> float:
        return max(self._last_s, self.clock() + self._early_s)

    def _follow(self) -> Steps[None]:
        """Takes all events that show. Raises: SlotLostError."""
        yield from self.look(self.round)
        while self.seen.newest >= self.round and (yield from self._next()):
            pass

    def _next(self) -> Steps[bool]:
        """Takes the next event; returns whether it could be read."""
        item = yield from self.store.read(commit_name(self.round))
        if item is not None:
            yield from self._take(event_in(self.round, item, self.terms.workers))
        return item is not None

    def _add(
        self,
        event: str,
        worker: int,
        life: int,
        *,
        phase: int = 0,
        message: int = 0,
        size: int = 0,
        owned: tuple[int, ...] = (),
    ) -> Steps[None]:
        """Makes this the next event, or takes the one that another process has made the next. Raises: PeerError."""
        (rounds, steps), now_s = self.work.progress(), self._now_s()
        fields = {"event": event, "at_s": now_s, "phase": phase, "message": message, "owned": owned, "rounds": rounds}
        part = TakenPart(life, steps[worker], None)
        commit = commit_head({worker: part}, steps, "", (self.slot, self.life), {str(worker): size})
        if (yield from self.store.create(commit_name(self.round), {**fields, **commit})):
            yield from self._take(ServerEvent(event, now_s, worker, life, phase, message, owned, rounds, self.slot))
            return
        waited_s = 0.0
        while not (yield from self._next()):
            waited_s += yield from self.store.pause_for(f"event {self.round} of the server", waited_s)

    def _take(self, event: ServerEvent | None) -> Steps[None]:
        """Takes the next event, unless it counts for nothing."""
        number = self.round
        if event is None or not self._counts(event):
            self.round += 1
            return
        message = memoryview(b"")
        if event.event == "push":
            item = yield from self._message(message_name(event.message, event.worker, event.life))
            if item is None:
                return
            message = item.body
        self.round, self._last_s, self._last_rounds = number + 1, event.time_s, event.rounds
        self._early_s = max(self._early_s, event.time_s - self.clock())
        if event.event == "join":
            self.lives[event.worker] = event.life
        yield Do(partial(self.work.take, number, event, message))
        if self.work.is_state_due():
            self._newest_state = self.round
            if event.writer == self.slot:
                lives = {str(slot): life for slot, life in self.lives.items()}
                body = yield Do(self.work.state)
                yield from self.put_state({"lives": lives, "time_s": self._last_s}, body)

    def _counts(self, event: ServerEvent) -> bool:
        """Whether an event follows from those before it."""
        if event.time_s < self._last_s:
            return False
        life, present = self.lives.get(event.worker, -1), self.work.core.is_present(event.worker)
        match event.event:
            case "join":
                return not present and event.life > life
            case "push":
                return event.life == life and self._awaits(event.worker, event.phase)
            case "leave":
                return present and event.life == life
            case _:
                return True

    def _message(self, name: str) -> Steps[Item | None]:
        """The message of a push; None where a newer state was loaded, as it may be removed by then. Raises: PeerError."""
        waited_s = 0.0
        while (item := (yield from self.store.read(name))) is None:
            if (yield from self._load_newest()):
                return None
            if waited_s > 2 * self.terms.timeout_s:
                if self.states.unsound:  # from which it would not need the message
                    raise [*self.states.unsound.values()][-1]
                raise PeerError(
                    f"event {self.round} of the server names the message '{name}', which is not in the store, so no worker can "
                    "continue; look at the machine of that worker, and start again with an empty store"
                )
            waited_s += yield from self.store.pause(waited_s)
        return item

    def _load_newest(self) -> Steps[bool]:
        """Continues from the newest state, if one after this event can be read; returns whether. Raises: CheckpointError."""
        yield from self.look(None)
        for after in sorted((one for one in self.seen.states if one > self.round), reverse=True):
            if (name := state_name(after)) in self.states.unsound:
                continue
            item = yield from self.states.read(name)
            self.seen.states.discard(after)  # until a listing shows it again
            if item is None:
                continue
            clock = loaded(_clock_in, after, item)
            if isinstance(clock, CheckpointError):
                self.states.pass_over(name, clock)
                continue
            if (failed := (yield Do(partial(loaded, self.work.load, item.body)))) is not None:
                self.states.pass_over(name, failed)
                continue
            self.lives, self._last_s = clock
            self._early_s = max(self._early_s, self._last_s - self.clock())
            self.round, self._newest_state, self._loaded = after, after, self._loaded + 1
            return True
        return False


def _clock_in(after: int, item: Item) -> tuple[dict[int, int], float]:
    """The life of each slot, and the time, in a state of the server. Raises: CheckpointError."""
    try:
        lives = {int(slot): int(life) for slot, life in item.head["lives"].items()}
        return lives, min(max(0.0, float(item.head["time_s"])), _MOST_S)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"the state after event {after} in the store is none; start again with an empty store"
        ) from None


def event_in(number: int, item: Item, workers: int) -> ServerEvent | None:
    """The event in an object; None for what no worker of this run writes, and for one of a worker that its writer may not be."""
    commit = commit_in(number, item.head, workers)
    match item.head:
        case {
            "event": "join" | "push" | "leave" | "tick" as event,
            "at_s": int() | float() as at_s,
            "phase": int(phase),
            "message": int(message),
            "owned": list(owned),
            "rounds": int(rounds),
        } if commit is not None and len(commit.parts) == 1 and 0 <= at_s < _MOST_S and len(owned) < 16:
            ((worker, part),), writer = commit.parts.items(), commit.closer[0]
            sound = all(type(one) is int and 0 <= one < 1 << 31 for one in (*owned, phase, message, rounds))
            if sound and item.is_of(writer) and (event in ("leave", "tick") or item.is_of(worker)):
                return ServerEvent(event, float(at_s), worker, part.life, phase, message, tuple(owned), rounds, writer)
    return None
