"""The origin of a saved outer state: whether an `Outer` may continue from it, and whether all workers continue from the same."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor

from gossamer.errors import CheckpointError, PeerError
from gossamer.library.lane import Lane
from gossamer.library.peers import Common
from gossamer.record import lineage
from gossamer.record.fault import FaultKind
from gossamer.rounds.loop import InFlight
from gossamer.rules import Rule

log = logging.getLogger("gossamer")
FORMAT = 2
"""The format of states that are saved; those of 0.1.0 have no number, and do not record what they belong to."""
_LONGEST = 120  # characters of a name of a start


class OuterState(TypedDict):
    """The value of `Outer.state_dict`."""

    format: int
    of: dict[str, str]
    """What it belongs to: model, rule with its options, topology, workers, codec, schedule, worker and local steps."""
    start: str
    """Identifies the start of the loop that saved it; the same on all its workers, and new after each resume."""
    outer: list[Tensor]
    """The state of the rule."""
    under_way: list[InFlight]
    """The exchanges in flight."""
    rounds: int
    steps: int
    """Inner steps since the last round ended."""


def what_it_is_of(common: Common, rule: Rule, lane: Lane, *, local_steps: str) -> dict[str, str]:
    """What must be equal where a state is saved and where it is loaded, as text."""
    return {
        **({"shard": f"{lane.shard} of {lane.shards}"} if lane.shards > 1 else {}),
        "model": common.model,
        **lineage.state_is_of(
            rule.name,
            rule.options,
            topology=common.topology,
            workers=lane.n,
            codec=common.codec,
            schedule=common.schedule,
            local_steps=local_steps,
        ),
        "worker": str(lane.worker),
    }


def require_matching_state(
    state: Mapping[str, Any], current: Mapping[str, str], same_models: Collection[str] = ()
) -> None:
    """Raises CheckpointError, with both sides, for a state that belongs to something else; warns of one that does not record it.

    Args: `same_models` are further descriptions of the model of `current`, as earlier versions have saved them.
    """
    number, saved = state.get("format"), state.get("of")
    if number is None and saved is None:
        log.warning(
            "the outer state was saved by gossamer 0.1.0 and does not say what it is of, so that only its shapes were compared; "
            "see for yourself that rule, codec, schedule, local steps and worker are those it was saved with"
        )
        return
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(saved, Mapping):
        raise CheckpointError(
            f"the outer state has the format {number!r:.40} and says that it is of {type(saved).__name__}; a state of "
            f"Outer.state_dict has the format {FORMAT} and words: load one that was saved whole"
        )
    if number != FORMAT:
        raise CheckpointError(
            f"the outer state has the format {number:.40g}, and this gossamer reads {FORMAT} and that of 0.1.0; install the "
            "version that saved it, or a newer one"
        )
    if not isinstance(start := state.get("start"), str) or len(start) > _LONGEST:
        raise CheckpointError(
            f"the outer state names the start it is of by {start!r:.40}, and Outer.state_dict by a short text; load one that was "
            "saved whole"
        )
    if saved.get("model") in same_models:
        saved = {**saved, "model": current["model"]}
    # Its shard and its schedule first: they change the layout of a model, which is hashed.
    if odd := lineage.odd_field(saved, {"shard": "none", "schedule": current["schedule"], **current}):
        raise CheckpointError(
            f"the saved outer state has {odd.field} {odd.saved} and this Outer {odd.current}; load it into an Outer that was "
            "made as the one that saved it, with the state of each worker on that worker",
            FaultKind.MISPLACED if odd.field == "worker" else FaultKind.FOREIGN,
        )


def must_continue_alike(statements: Sequence[object]) -> None:
    """Raises PeerError when workers continue from different rounds, steps or starts, with what each has.

    Args: `statements` have of each worker its round, step, local steps, and the start that its state is of, None where it has
        loaded nothing, or a state without it.
    """
    for worker, one in enumerate(statements):
        match one:
            case [int(), int(), int(), str() | None]:
                pass
            case _:
                raise PeerError(
                    f"worker {worker} does not say where it continues; install the same gossamer version everywhere"
                )
    places: list[list[Any]] = [[*one] for one in statements]  # pyright: ignore[reportGeneralTypeIssues]
    alike = len({one[2] for one in places}) == 1  # otherwise a step within a round differs between workers
    first = places[0]
    for worker, (round, step, _, start) in enumerate(places):
        if round != first[0] or (alike and step != first[1]) or start != first[3]:
            other = " of another run" if (round, step) == (first[0], first[1]) and None not in (start, first[3]) else ""
            raise PeerError(
                f"workers continue from different states: {_place(0, first)}, {_place(worker, places[worker])}{other}; load the "
                "states that were saved together after one step on all workers, or start from the beginning on all"
            )


def _place(worker: int, place: Sequence[Any]) -> str:
    round, step, _, start = place
    if start is None and not round and not step:
        return f"worker {worker} from the beginning, without a state"
    return f"worker {worker} from round {round}, step {step}"
