"""How a process of a run that waits for nobody finds its slot, the others, and the state with which it goes on.

Workers resume from their own newest sound checkpoints, which may be of different rounds. Each checkpoint says how many inner
steps of the other slots its parameters contain: a worker does not take those again that it has lost and another one holds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gossamer.clock.gossip_worker import GossipWorker
from gossamer.clock.pair_worker import PairWorker
from gossamer.errors import CheckpointError, PeerError
from gossamer.record import checkpoint
from gossamer.record.addresses import Address
from gossamer.record.checkpoint import Lineage
from gossamer.run.bookkeeping.resume import Resume, history
from gossamer.run.bookkeeping.which_round import (
    ChosenRound,
    KeptRounds,
    heard,
    newest_of_any,
    newest_of_own,
    said,
    to_go_on,
)
from gossamer.run.config.resolved import RunSettings
from gossamer.run.participant.agreement import limits_of
from gossamer.run.participant.seat import announce, arrived, is_address, joined, warn_of_loopback
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.transport.alike import short_settings
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.processes.launch import agree, part
from gossamer.transport.sockets.connection import Endpoint
from gossamer.tree import leaves

__all__ = [
    "AsyncSeat",
    "AsyncState",
    "Core",
    "Fact",
    "Source",
    "adopt",
    "async_seat",
    "content_of",
    "fact_of",
    "newest_state",
    "phases_behind",
    "state_of",
]

_MOST = 1 << 31
Core = TypeVar("Core", GossipWorker, PairWorker)
Source = tuple[int, int, int]
"""A place in the order of events: a worker, the life of its process, and the events of that life so far."""


class AsyncState(NamedTuple):
    """The state of a worker at a place in the order of its events."""

    after: int
    """Rounds of the run that were over."""
    phases: int
    """Local phases of its slot behind it."""
    source: Source
    """Where its worker was in the order of events."""
    held: dict[int, int]
    """Inner steps of other slots that its parameters contain."""
    content: dict[str, Any]
    """Parameters, outer and inner state, and the place in the data."""


class AsyncSeat(NamedTuple):
    """The slot of a process, and what it begins with."""

    members: Members
    endpoint: Endpoint
    line: Lineage
    """Whose checkpoints belong to the run."""
    state: AsyncState | None
    """Its own; None without a checkpoint."""
    donor: int | None
    """Who is asked first for a state; None where nobody has any, as the run starts."""
    goes_on: bool
    """Whether files of this slot may be there already."""


def phases_behind(phases: int, held: int, local_steps: int) -> int:
    """Local phases with which a slot goes on: those of a state, or those that others hold, if that is more.

    >>> phases_behind(4, 11, 2), phases_behind(8, 11, 2)
    (6, 8)
    """
    return max(phases, -(-held // local_steps))


def state_of(content: Any, after: int) -> AsyncState:
    """What a checkpoint holds, or another worker has sent. Raises CheckpointError for anything else."""
    match content:
        case {
            "x": _, "outer": [*_], "inner": _, "phases": int(phases), "place": [int(worker), int(life), int(events)],
            "held": dict(held),
        }:  # fmt: skip
            numbers = [after, phases, worker, life, events, *held, *held.values()]
            if all(type(one) is int and one >= 0 for one in numbers) and max(phases, life, events) < _MOST:
                return AsyncState(after, phases, (worker, life, events), dict(held), content)
    found = sorted(map(str, content)) if isinstance(content, dict) else content
    raise CheckpointError(
        f"a state after round {after} holds {found!r:.80}, and a worker that waits for nobody needs its local phases, their "
        "place in the order of events and what it holds of others; start again with another --out"
    )


def content_of(
    core: GossipWorker | PairWorker, replica: Replica, *, phases: int, source: Source, held: Mapping[int, int]
) -> dict[str, Any]:
    """What a checkpoint of a worker holds, from which `state_of` makes its state; the tensors are the worker's own."""
    return {
        "x": core.x, "outer": leaves(core.s), **replica.state(), "steps_taken": replica.steps_taken, "phases": phases,
        "place": [*source], "held": dict(held),
    }  # fmt: skip


def adopt(state: AsyncState, core: GossipWorker | PairWorker, replica: Replica) -> None:
    """Goes on from a state, and with the replica's own place in the data. Raises CheckpointError when it does not fit."""
    content, data = state.content, replica.task.data.state()
    try:
        core.restore(content["x"], content["outer"])
    except ValueError as error:
        raise CheckpointError(
            f"the state of worker {state.source[0]} does not fit this model and rule ({error}); use the run file that wrote it"
        ) from None
    replica.restore({**content, "data": data})


def newest_state(
    config: RunSettings, folder: Path, slot: int, line: Lineage, before: RunSettings | None = None
) -> tuple[AsyncState | None, ChosenRound]:  # fmt: skip
    """That of the newest sound checkpoint of a slot, with what was found of others; None without one."""
    store = folder / "checkpoints"

    def read(round: int) -> str | None:
        try:
            state_of(checkpoint.load(store, round, slot, line), round)
        except CheckpointError as error:
            return str(error).partition(";")[0]
        return None

    choice = newest_of_own(Store(config, folder), slot, line, before, read)
    if not choice.round and read(0) is not None:  # else it has left before the first round was over
        return None, choice
    return state_of(checkpoint.load(store, choice.round, slot, line), choice.round), choice


def async_seat(
    config: RunSettings, folder: Path, run: int, nonce: int, *, join: str | None, resume: Resume
) -> AsyncSeat:  # fmt: skip
    """The slot of this process in a run that starts, goes on, or is under way.

    Args: `local_steps` are those of all workers; `join` and `resume` as of `train_asynchronous`.
    Raises: ConfigError, CheckpointError; PeerError when workers do not come, or nobody can be joined.
    """
    if join is not None:
        seat = joined(config, folder, run, nonce, join)
        own, _ = newest_state(config, folder, seat.members.me, seat.line)
        return AsyncSeat(seat.members, seat.endpoint, seat.line, own, seat.members.me, True)
    member, listener, address = arrived(config)
    me, past = member.worker, history(config, folder) if resume else None
    own, choice = (None, None) if past is None else newest_state(config, folder, me, past.lineage, past.before)
    if own is not None and own.after == 0:
        own = None
    brought = None if own is None else [own.after, own.phases, [[slot, steps] for slot, steps in own.held.items()]]
    settings, wait_s = short_settings(config.decisive), config.run.timeout_s
    has = said(KeptRounds({}) if choice is None else choice.kept[me])
    stated = agree(member, f"{run:016x} calls", [address, nonce, brought, has], settings=settings, timeout_s=wait_s)
    part(member, wait_s)
    facts = [fact_of(slot, value, config.workers) for slot, value in enumerate(stated)]
    warn_of_loopback(address, [fact.address for fact in facts])
    line, after = Lineage(config.digest), max(fact.after for fact in facts)
    if past is not None and choice is not None:
        kept = {slot: fact.kept for slot, fact in enumerate(facts)}
        # Each has read its own, and has told what is wrong with them.
        to_go_on(
            past, Store(config, folder), kept, lambda _: {}, auto=resume == "auto", pick=newest_of_any, speaks=False
        )
        checkpoint.rewind(folder / "checkpoints", -1 if own is None else own.after, me, aside=choice.damaged)
        line = past.go_on(folder, after)
    held = {slot: max((fact.held.get(slot, 0) for fact in facts), default=0) for slot in range(config.workers)}
    entries = [_entry(slot, facts, held[slot], config.local_steps_of(slot)) for slot in range(config.workers)]
    donor = next((slot for slot, fact in enumerate(facts) if fact.after == after > 0), None)
    endpoint = Endpoint(listener, run, member.secret, wait_s, config.run.round_deadline_s)
    announce(folder, Address(me, address, run))
    return AsyncSeat(Members(limits_of(config), me, entries), endpoint, line, own, donor, past is not None)


class Fact(NamedTuple):
    """What a worker says of itself at the start."""

    address: str
    nonce: int
    after: int
    phases: int
    held: Mapping[int, int]
    kept: KeptRounds


def fact_of(slot: int, value: object, slots: int) -> Fact:
    """What another worker has published. Raises PeerError for anything else."""
    match value:
        case [str(address), int(nonce), None, kept] if is_address(address, nonce):
            return Fact(address, nonce, 0, 0, {}, heard(slot, kept))
        case [str(address), int(nonce), [int(after), int(phases), [*pairs]], kept] if is_address(address, nonce):
            held = dict(map(_pair, pairs))
            if 0 < after < _MOST and 0 <= phases < _MOST and all(0 <= one < slots for one in held):
                return Fact(address, nonce, after, phases, held, heard(slot, kept))
    raise PeerError(f"worker {slot} published no address ({value!r:.60}); install the same gossamer version everywhere")


def _pair(value: object) -> tuple[int, int]:
    """A slot with its inner steps; (-1, 0) for anything else."""
    match value:
        case [int(slot), int(steps)] if 0 <= steps < 1 << 60:
            return slot, steps
    return -1, 0


def _entry(slot: int, facts: Sequence[Fact], held: int, local_steps: int) -> SlotEntry:
    """What is known of a slot at the start."""
    if slot >= len(facts):  # nobody fills it
        return SlotEntry(slot, 0, 0, MemberStatus.LEFT, 0, round=phases_behind(0, held, local_steps), steps=held)
    fact = facts[slot]
    phases = phases_behind(fact.phases, held, local_steps)
    return SlotEntry(slot, 0, fact.nonce, MemberStatus.ALIVE, 0, fact.address, phases, held)
