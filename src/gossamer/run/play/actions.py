"""The actions of a visitor between two rounds, and the resulting conditions (`conditions_after`), without torch.

["kill", 3]   ["revive", 3]   ["slow", 7]   ["mend", 7]   ["cut"]   ["heal"]
["method", "gasloc"]   ["local_steps", 20]   ["momentum", 0.5]
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gossamer.errors import ConfigError, choose
from gossamer.record.jsonl import short

WORKERS = 8
SIDES: tuple[frozenset[int], ...] = (frozenset(range(5)), frozenset(range(5, WORKERS)))
"""The two sides of a partition; the first has more than half of the workers."""
METHODS: Mapping[str, tuple[str, float | None]] = {
    "diloco": ("DiLoCo", 0.5),
    "gossip": ("gossip", None),
    "gasloc": ("GASLoC", 0.3),
}
"""Methods by rule name: title, and initial outer momentum; None for one without momentum."""
LOCAL_STEPS = (1, 2, 5, 10, 20, 40)
MOMENTA = tuple(round(0.05 * k, 2) for k in range(20))
SLOWER = 10
"""The slowdown factor of a slow worker's uplink."""
_OF_A_WORKER = ("kill", "revive", "slow", "mend")
_WITHOUT_VALUE = ("cut", "heal")
_CHOICES: Mapping[str, Sequence[Any]] = {"method": [*METHODS], "local_steps": LOCAL_STEPS, "momentum": MOMENTA}


class Action(NamedTuple):
    """One action of a visitor."""

    do: str
    value: int | float | str | None = None

    def plain(self) -> list[Any]:
        """The action as JSON for a film, the inverse of `action_of`."""
        return [self.do] if self.value is None else [self.do, self.value]


class Conditions(NamedTuple):
    """Conditions in force during a round."""

    method: str = "diloco"
    local_steps: int = 10
    momenta: tuple[tuple[str, float], ...] = tuple((name, own) for name, (_, own) in METHODS.items() if own is not None)
    """By method, as each keeps its own."""
    alive: frozenset[int] = frozenset(range(WORKERS))
    slow: frozenset[int] = frozenset()
    """Workers with a slowed uplink."""
    cut: bool = False

    @property
    def momentum(self) -> float | None:
        """That of the method; None for one without."""
        return dict(self.momenta).get(self.method)

    @property
    def sides(self) -> tuple[frozenset[int], ...]:
        """The live workers, by side of the partition."""
        return tuple(part & self.alive for part in SIDES) if self.cut else (self.alive,)

    def side_of(self, worker: int) -> frozenset[int]:
        """The workers reachable from a worker, itself included."""
        return next((side for side in self.sides if worker in side), frozenset({worker}))

    def taking_part(self) -> frozenset[int]:
        """The workers that train in a round.

        A mean over everyone is closed by more than half of all slots, as in an elastic run of real processes: at most
        one side of a partition continues, and the other waits. Gossip continues on both.
        """
        if self.method != "diloco":
            return self.alive
        return next((side for side in self.sides if 2 * len(side) > WORKERS), frozenset())


def action_of(raw: object) -> Action:
    """The action encoded by a JSON list. Raises: ConfigError for an invalid one."""
    match raw:
        case [str(do), int(worker)] if do in _OF_A_WORKER and type(worker) is int:
            if worker not in range(WORKERS):
                raise ConfigError(f"'{do}' names worker {worker}; name one of 0 to {WORKERS - 1}")
            return Action(do, worker)
        case [str(do)] if do in _WITHOUT_VALUE:
            return Action(do)
        case [str(do), str() | int() | float() as value] if do in _CHOICES and type(value) is not bool:
            choices = _CHOICES[do]
            if value not in choices:
                raise ConfigError(f"'{do}' got {value!r:.40}; give one of {', '.join(map(str, choices))}")
            return Action(do, choices[choices.index(value)])
        case [str(do), *_] if do not in (*_OF_A_WORKER, *_WITHOUT_VALUE, *_CHOICES):
            raise ConfigError(choose("action", do, [*_OF_A_WORKER, *_WITHOUT_VALUE, *_CHOICES]))
    raise ConfigError(f'{short(raw)} is no action; write one such as ["kill", 3], ["cut"] or ["local_steps", 20]')


def conditions_after(conditions: Conditions, action: Action) -> Conditions:
    """The conditions after an action; unchanged if it has no effect, such as killing a dead worker.

    >>> conditions_after(Conditions(), Action("kill", 3)).alive == frozenset(range(8)) - {3}
    True
    """
    alive, slow, value = conditions.alive, conditions.slow, action.value
    match action:
        case Action("kill", int(worker)):
            return conditions._replace(alive=alive - {worker})
        case Action("revive", int(worker)):
            return conditions._replace(alive=alive | {worker})
        case Action("slow", int(worker)):
            return conditions._replace(slow=slow | {worker})
        case Action("mend", int(worker)):
            return conditions._replace(slow=slow - {worker})
        case Action("cut" | "heal" as do):
            return conditions._replace(cut=do == "cut")
        case Action("method", str(method)):
            return conditions._replace(method=method)
        case Action("local_steps", int(steps)):
            return conditions._replace(local_steps=steps)
    assert action.do == "momentum", action
    momenta = tuple((name, value if name == conditions.method else current) for name, current in conditions.momenta)
    return conditions._replace(momenta=momenta)


def describe(action: Action, before: Conditions) -> str:
    """The description of an action's effect, for the visitor."""
    value = action.value
    match action:
        case Action("kill"):
            return f"Worker {value} is dead: what it had not sent is lost, and the others go on without it."
        case Action("revive"):
            return f"Worker {value} is back, with the parameters, the outer and the inner state of one that it reaches."
        case Action("slow"):
            return f"The uplink of worker {value} has 1/{SLOWER} of its bandwidth."
        case Action("mend"):
            return f"The uplink of worker {value} is as fast as the others' again."
        case Action("cut"):
            return f"The network is cut: workers {_name_workers(SIDES[0])} and {_name_workers(SIDES[1])} cannot reach each other."
        case Action("heal"):
            return "The network is whole again."
        case Action("method", str(method)):
            begins = (
                "All its workers begin at their mean, as they must begin alike"
                if method == "diloco"
                else "It begins from the parameters that each worker has"
            )
            return f"A branch with {METHODS[method][0]} begins. {begins}, with fresh outer state; the inner optimizers go on."
        case Action("local_steps"):
            return f"A local phase has {value} inner steps (H), after {before.local_steps}; all states are kept."
    return f"The outer momentum is {value}, after {before.momentum:g}; all states are kept."


def _name_workers(workers: Collection[int]) -> str:
    low, high = min(workers), max(workers)
    return f"{low} to {high}" if high > low else f"{low}"
