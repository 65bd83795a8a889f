"""The state of an asynchronous worker, and the resumption of a run from the states of all workers.

Workers resume from their own newest sound checkpoints, which may be of different rounds; one more than
`run.rejoin_rounds` behind the newest takes the newest state, like a newcomer. Each checkpoint has the number of inner
steps of other slots included in its parameters: a worker does not repeat lost steps that another one holds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gossamer.clock.gossip_worker import GossipWorker
from gossamer.clock.pair_worker import PairWorker
from gossamer.errors import CheckpointError, first_line
from gossamer.finite import all_finite
from gossamer.record import checkpoint
from gossamer.record.fault import Fault
from gossamer.record.lineage import Lineage
from gossamer.run.bookkeeping.resume import History
from gossamer.run.bookkeeping.which_round import ChosenRound, Held, newest_of_any, newest_of_own
from gossamer.run.config.resolved import RunSettings
from gossamer.run.participant.agreement import limits_of
from gossamer.run.participant.rendezvous import Own, Progress, StartFacts
from gossamer.run.worker.replica import MISFITS, Replica
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.transport.sockets.header import Limits
from gossamer.tree import leaves, must_fit

_MOST = 1 << 31
Core = TypeVar("Core", GossipWorker, PairWorker)
Source = tuple[int, int, int]
"""A position in the order of events: a worker, the life of its process, and the number of events of that life."""


class AsyncState(NamedTuple):
    """The state of a worker at a position in the order of its events."""

    after: int
    """Completed rounds of the run."""
    phases: int
    """Completed local phases of its slot."""
    source: Source
    """Its worker's position in the order of events."""
    held: dict[int, int]
    """Inner steps of other slots included in its parameters."""
    content: dict[str, Any]
    """Parameters, outer and inner state, and the position in the data."""


def phases_behind(phases: int, held: int, local_steps: int) -> int:
    """The local phases from which a slot continues: the maximum of its state's and those held by others.

    >>> phases_behind(4, 11, 2), phases_behind(8, 11, 2)
    (6, 8)
    """
    return max(phases, -(-held // local_steps))


def state_of(content: Any, after: int, limits: Limits) -> AsyncState:
    """The validated state in a checkpoint or from another worker.

    Raises: CheckpointError for anything else.
    """
    match content:
        case {
            "x": _,
            "outer": [*_],
            "inner": _,
            "phases": int(phases),
            "place": [int(worker), int(life), int(events)],
            "held": dict(held),
        }:
            numbers = [after, phases, worker, life, events, *held, *held.values()]
            whole = all(type(one) is int and one >= 0 for one in numbers) and max(life, events) < _MOST
            # These numbers are sent to others, which refuse any above the limits of the run.
            if (
                whole
                and phases <= limits.rounds
                and all(slot < limits.workers and steps <= limits.steps for slot, steps in [(worker, 0), *held.items()])
            ):
                return AsyncState(after, phases, (worker, life, events), dict(held), content)
    if isinstance(content, dict) and content and content.keys() <= {"run", "x"}:
        raise CheckpointError(
            f"a state after round {after} is of a simulation over virtual time, which gossamer simulate --resume continues with"
        )
    shown = sorted(map(str, content)) if isinstance(content, dict) else content
    raise CheckpointError(
        f"a state after round {after} holds {shown!r:.80}, and a worker that waits for nobody needs its local phases, their "
        "place in the order of events and what it holds of others; start again with another --out"
    )


def content_of(
    core: GossipWorker | PairWorker, replica: Replica, *, phases: int, source: Source, held: Mapping[int, int]
) -> dict[str, Any]:
    """The content of a worker's checkpoint, the inverse of `state_of`; tensors are not copied."""
    return {
        "x": core.x,
        "outer": leaves(core.s),
        **replica.state(),
        "steps_taken": replica.steps_taken,
        "phases": phases,
        "place": [*source],
        "held": dict(held),
    }


def adopt(state: AsyncState, core: GossipWorker | PairWorker, replica: Replica) -> None:
    """Loads a state, keeping the replica's position in the data. Raises CheckpointError when it does not fit."""
    content, data = state.content, replica.task.data.state()
    try:
        core.restore(content["x"], content["outer"])
    except ValueError as error:
        raise CheckpointError(
            f"the state of worker {state.source[0]} does not fit this model and rule ({error}); use the run file that wrote it"
        ) from None
    replica.restore({**content, "data": data})


def take_over(state: AsyncState, core: GossipWorker | PairWorker, replica: Replica) -> None:
    """Loads the state of another worker. Raises CheckpointError, without changes, unless all of it fits."""
    taken = {**state.content, "data": replica.task.data.state()}
    try:
        tensors = [taken["x"], *taken["outer"]]
        must_fit(tensors, [core.x, *leaves(core.s)])
        if not all_finite(tuple(tensors)):
            raise ValueError("it has numbers that are not finite")
        replica.must_be_of_another(taken)
        core.restore(taken["x"], taken["outer"])
        replica.load(taken)
    except MISFITS as error:
        raise CheckpointError(
            f"the state of worker {state.source[0]} does not fit this model and rule ({first_line(error)}); look at that "
            "machine, and start all with the same run file and gossamer"
        ) from None


def newest_state(
    run: RunSettings, folder: Path, slot: int, lineage: Lineage, before: RunSettings | None = None
) -> tuple[AsyncState | None, ChosenRound]:
    """The state of the newest sound checkpoint of a slot, with the faults of newer ones; None without one.

    Args: `before` are the settings with which they were written, if different.
    """
    store, limits = folder / "checkpoints", limits_of(run)

    def read(round: int) -> Fault | None:
        try:
            state_of(checkpoint.load(store, round, slot, lineage), round, limits)
        except CheckpointError as error:
            return Fault.of(error)
        return None

    choice = newest_of_own(Store(run, folder), slot, lineage, before, read)
    if not choice.round and read(0) is not None:  # else it left before the end of the first round
        return None, choice
    return state_of(checkpoint.load(store, choice.round, slot, lineage), choice.round, limits), choice


class _StateFacts(NamedTuple):
    """A worker's facts about the state it resumes from."""

    phases: int
    held: Mapping[int, int]


class OwnState(StartFacts[_StateFacts]):
    """See `gossamer.run.participant.rendezvous.StartFacts`: each resumes from its own newest sound checkpoint, of any round."""

    word, one_round = "calls", False

    def __init__(self, run: RunSettings, folder: Path) -> None:
        self._run, self._folder, self._limits = run, folder, limits_of(run)

    def own(self, slot: int, past: History) -> Own:
        """See `StartFacts`; `more` has its local phases, and the inner steps of other slots included in its parameters."""
        state, choice = newest_state(self._run, self._folder, slot, past.lineage, past.before)
        if state is None:
            return Own(choice.kept[slot])
        held = [[other, steps] for other, steps in state.held.items()]
        return Own(choice.kept[slot], [state.phases, held], state)

    def read(self, more: object) -> _StateFacts | None:
        """See `StartFacts`."""
        match more:
            case None:
                return _StateFacts(0, {})
            case [int(phases), [*pairs]] if 0 <= phases <= self._limits.rounds:
                held = [self._held(pair) for pair in pairs]
                known = {one[0]: one[1] for one in held if one is not None}
                return _StateFacts(phases, known) if len(known) == len(pairs) else None
        return None

    def pick(self, held: Mapping[int, Held]) -> int:
        """See `StartFacts`."""
        return newest_of_any(held)

    def progress(self, slot: int, facts: Sequence[_StateFacts], held: Mapping[int, Held], after: int) -> Progress:
        """A slot's progress is the maximum of its checkpoint's and that held by others."""
        if not after:  # the run restarts: no worker has completed its first round
            return Progress(0, 0, 0)
        steps = max((fact.held.get(slot, 0) for fact in facts), default=0)
        far_behind = max(held.get(slot, {}), default=0) < after - self._run.loop.rejoin_rounds
        phases = 0 if far_behind or slot >= len(facts) else facts[slot].phases
        return Progress(0, phases_behind(phases, steps, self._run.local_steps_of(slot)), steps)

    def _held(self, value: object) -> tuple[int, int] | None:
        """A slot with its inner steps; None for anything else."""
        match value:
            case [int(slot), int(steps)] if 0 <= slot < self._limits.workers and 0 <= steps <= self._limits.steps:
                return slot, steps
        return None
