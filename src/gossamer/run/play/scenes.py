"""One round of a film: `next_scene(studio, scene, actions) -> (scene, frame)`, a function of the states of all workers.

The workers are those of a simulation: replicas, outer loops, mailboxes, prices. Deaths and partitions reach a loop
through its membership, as in an elastic run, so that topologies and means cover the reachable workers.
"""

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.corpus import text_fingerprint
from gossamer.network.links import Network, jitter_factors
from gossamer.network.pricing import price
from gossamer.record.logs.seconds import RoundSeconds
from gossamer.record.logs.trace import Entry, Operation, from_entries
from gossamer.rounds.exchange import Each
from gossamer.rounds.loop import EVERYONE, Membership
from gossamer.rounds.mean_model import mean_of
from gossamer.run.bookkeeping.evaluate import Assessment, Probe, Probes, assess
from gossamer.run.bookkeeping.spent_seconds import priced
from gossamer.run.config.resolve import resolve_document
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.config.user_parts import BUILT_IN
from gossamer.run.play.actions import SLOWER, WORKERS, Action, Conditions, conditions_after, describe
from gossamer.run.play.film import MOST_ROUNDS, Frame, Head
from gossamer.run.simulated.rounds import make_workers, train_together
from gossamer.run.worker.task import Task, task_of
from gossamer.run.worker.worker import RoundReport, Worker
from gossamer.transport.memory import MemoryNetwork
from gossamer.version import __version__

UPLINK_BPS, STEP_S = 4e6, 0.1
_NETWORK = Network(uplink_bps=UPLINK_BPS, downlink_bps=UPLINK_BPS, latency_s=0.02, step_s=STEP_S, jitter=0.1)
_RUN: dict[str, Any] = {
    "name": "play",
    "workers": WORKERS,
    "model": {"size": "0.2m", "layers": 1, "hidden_size": 48, "intermediate_size": 144},
    "data": {"source": "stdlib", "seq_len": 32, "batch_size": 4},
    "inner": {"lr": 2e-3, "clip": 1.0, "schedule": "constant", "warmup_steps": 20},
    "run": {"eval_batches": 8},
}
_RULES: Mapping[str, dict[str, Any]] = {
    "diloco": {"rule": {"name": "diloco", "lr": 1.0}, "topology": {"name": "complete"}},
    "gossip": {"rule": {"name": "gossip"}, "topology": {"name": "random", "peers": 1}},
    "gasloc": {"rule": {"name": "gasloc", "lr": 1.0}, "topology": {"name": "random", "peers": 1}},
}


class Studio(NamedTuple):
    """The objects shared by all scenes of a film."""

    seed: int
    task: Task
    probes: Probes
    like: Tensor
    """A vector of parameters of the model."""
    each: Each


class Scene(NamedTuple):
    """The complete state for the next round. Its tensors are never modified."""

    round: int
    conditions: Conditions
    states: tuple[dict[str, Any], ...]
    """The checkpoint state of each worker, including dead ones."""
    clock_s: tuple[float, ...]
    """The clock of each worker."""
    newest: tuple[int, ...]
    """The last round of each worker; -1 for none."""
    places: tuple[tuple[float, float], ...]


def studio_of(seed: int, each: Each) -> Studio:
    """Opens the text and makes the models that are evaluated. Raises: DataError."""
    run = run_of(seed, Conditions())
    task = task_of(run)
    probe = Probe(run, task, torch.device("cpu"))
    return Studio(seed, task, Probes([probe]), probe.x, each)


def head_of(studio: Studio) -> Head:
    """The description of a film of this studio."""
    return {
        "film": 1,
        "seed": studio.seed,
        "gossamer": __version__,
        "torch": torch.__version__,
        "text": text_fingerprint(studio.task.data),
        "parameters": studio.like.numel(),
        "payload_bytes": studio.like.nbytes,
        "uplink_bps": UPLINK_BPS,
        "step_s": STEP_S,
    }


def first_scene(studio: Studio) -> Scene:
    """All workers at the start of a run."""
    workers = _make_crew(studio, run_of(studio.seed, Conditions()))
    states = tuple(worker.state() for worker in workers)
    return Scene(0, Conditions(), states, (0.0,) * WORKERS, (-1,) * WORKERS, ((0.0, 0.0),) * WORKERS)


def run_of(seed: int, conditions: Conditions) -> ResolvedRun:
    """The run of these workers: without actions, `gossamer.simulate` of its document computes the same."""
    return _resolved(seed, conditions.method, conditions.local_steps, conditions.momentum)


def next_scene(studio: Studio, scene: Scene, actions: Sequence[Action]) -> tuple[Scene, Frame]:
    """Applies the visitor's actions, and trains the round. Pure: equal arguments give equal scenes and frames.

    Raises: TrainingError when a number is not finite.
    Cost: about half a second of one core with 10 local steps.
    """
    conditions, done, sentences = scene.conditions, list[Action](), list[str]()
    for action in actions:
        after = conditions_after(conditions, action)
        if after != conditions:
            done.append(action)
            sentences.append(describe(action, conditions))
        conditions = after
    begun = _begun(scene, conditions, branch=any(action.do == "method" for action in done))
    there = sorted(conditions.taking_part())
    workers = _cast(studio, begun, conditions, there)
    reports = train_together(workers, scene.round, studio.each) if workers else []
    states, newest = list(begun.states), list(scene.newest)
    for worker in workers:
        states[worker.index], newest[worker.index] = worker.state(), scene.round
    bill = _bill(begun.clock_s, conditions, scene.round, dict(zip(there, reports, strict=True)))
    # A worker without a majority waits as long as the others train; if none trains, for a local phase.
    until_s = max((bill.end_s[i] for i in there), default=max(begun.clock_s) + conditions.local_steps * STEP_S)
    ends_s = [
        bill.end_s[i] if i in there else max(until_s, begun.clock_s[i]) if i in conditions.alive else begun.clock_s[i]
        for i in range(WORKERS)
    ]
    assessment = (
        assess([worker.replica.scored for worker in workers], studio.probes, [[]] * len(there)) if workers else None
    )
    places = _places([state["x"] for state in states], there or sorted(conditions.alive), scene.places)
    frame = _frame(scene.round, conditions, there, bill, ends_s, assessment, places)
    frame["actions"], frame["told"] = tuple(tuple(one.plain()) for one in done), tuple(sentences)
    after = Scene(scene.round + 1, conditions, tuple(states), tuple(ends_s), tuple(newest), places)
    return after, frame


# --- who trains, and from what -----------------------------------------------------------------------------------------


class _Begun(NamedTuple):
    """The workers at the start of a round."""

    states: tuple[dict[str, Any], ...]
    """States, with outer state None if it must be initialised from the parameters, as at the start of a run."""
    clock_s: tuple[float, ...]


def _begun(scene: Scene, conditions: Conditions, *, branch: bool) -> _Begun:
    """Initialises a changed method, and lets returned or lagging workers take over another's state."""
    states, clock_s, newest = list(scene.states), list(scene.clock_s), list(scene.newest)
    if branch:
        states = [{**state, "outer": None} for state in states]

    def take_over(worker: int, donors: Collection[int]) -> None:
        donor = max(sorted(donors), key=lambda one: newest[one])  # the lowest-numbered with the newest state
        states[worker], newest[worker] = states[donor], newest[donor]
        clock_s[worker] = max(clock_s[worker], clock_s[donor])

    back = conditions.alive - scene.conditions.alive
    for worker in sorted(back):
        if donors := conditions.side_of(worker) - back:
            take_over(worker, donors)
        else:
            clock_s[worker] = max(scene.clock_s)  # it continues from its own
    if conditions.method == "diloco":
        _equalised(sorted(conditions.taking_part()), states, newest, take_over)
    return _Begun(tuple(states), tuple(clock_s))


def _equalised(
    there: Sequence[int],
    states: list[dict[str, Any]],
    newest: Sequence[int],
    take_over: Callable[[int, Collection[int]], None],
) -> None:
    """Equalises workers of a global mean: with the state of the most advanced ones, or their mean."""
    started = [worker for worker in there if states[worker]["outer"] is not None]
    if not started:
        mean = mean_of([states[worker]["x"] for worker in there]) if there else None
        for worker in there:
            states[worker] = {**states[worker], "x": mean}
        return
    last = max(newest[worker] for worker in started)
    ahead = [worker for worker in started if newest[worker] == last]
    for worker in there:
        if worker not in ahead:
            take_over(worker, ahead)


def _cast(studio: Studio, begun: _Begun, conditions: Conditions, there: Sequence[int]) -> list[Worker]:
    """The workers that train, each with its state."""
    if not there:
        return []
    run = run_of(studio.seed, conditions)

    def membership(i: int) -> Membership:
        return Membership(lambda round, fragment: conditions.side_of(i))

    everyone, cast = _make_crew(studio, run, membership), list[Worker]()
    for i in there:
        # A copy, as an optimizer would modify the given tensors.
        worker, state = everyone[i], copy.deepcopy(begun.states[i])
        if state["outer"] is None:
            worker.replica.x.copy_(state["x"])
            worker.replica.restore(state)
            worker.replica.steps_taken = state["steps_taken"]
            # A loop initialises its outer state from the parameters.
            transport = worker.loop.fragments[0].transport
            worker = Worker(worker.replica, run.in_rounds, transport, membership=membership(i))
        else:
            worker.restore(state)
        cast.append(worker)
    return cast


def _make_crew(
    studio: Studio, run: ResolvedRun, membership: Callable[[int], Membership] = lambda worker: EVERYONE
) -> list[Worker]:
    transport = MemoryNetwork(WORKERS).transport
    return make_workers(run, studio.task, run.in_rounds, studio.like, transport, membership=membership)


@functools.lru_cache(maxsize=256)
def _resolved(seed: int, method: str, local_steps: int, momentum: float | None) -> ResolvedRun:
    document = {**_RUN, **_RULES[method], "seed": seed}
    document["rule"] = {**document["rule"], **({} if momentum is None else {"momentum": momentum})}
    document["run"] = {**_RUN["run"], "steps": 2 * MOST_ROUNDS * local_steps, "local_steps": local_steps}
    return resolve_document(document, BUILT_IN, real=False)


# --- what the round cost ------------------------------------------------------------------------------------------------


class _Bill(NamedTuple):
    """The seconds of a round, by worker."""

    start_s: Sequence[float]
    spent: Sequence[RoundSeconds]
    end_s: Sequence[float]
    held_up_by: Sequence[int]
    """The worker that caused most of each one's wait: it was late, or its link was the slower end."""
    operations: Mapping[int, Sequence[Operation]]


def _bill(start_s: Sequence[float], conditions: Conditions, round: int, reports: Mapping[int, RoundReport]) -> _Bill:
    """Prices the round from each worker's clock."""
    uplinks_bps = tuple(UPLINK_BPS / (SLOWER if i in conditions.slow else 1) for i in range(WORKERS))
    factors = jitter_factors(_NETWORK, round, WORKERS)
    operations = {i: [one for some in report.operations for one in some] for i, report in reports.items()}
    # Earlier time is represented by a preceding round of that length, since a price begins at zero.
    entries = [Entry(0, i, 1, start_s[i], ()) for i in range(WORKERS)]
    for i in range(WORKERS):
        steps = len(reports[i].whole.losses) if i in reports else 0
        entries.append(Entry(1, i, steps, steps * STEP_S * float(factors[i]), tuple(operations.get(i, ()))))
    trace = from_entries(entries)
    network = Network(uplink_bps=uplinks_bps, downlink_bps=UPLINK_BPS, latency_s=0.02)
    timeline = price(trace, network)
    spent = [one for one in priced(trace, network, "play") if one.round == 1]
    return _Bill(start_s, spent, timeline.end_s[1].tolist(), timeline.waits_on[1].tolist(), operations)


def _round_sentences(conditions: Conditions, there: Sequence[int], bill: _Bill) -> str:
    """A description of a round, in a sentence or two."""
    waiting = sorted(conditions.alive - {*there})
    if not conditions.alive:
        return "Nobody is alive. Revive a worker: it continues from its own parameters."
    if not there:
        return f"Nobody trains: a mean needs more than half of all {WORKERS} workers, and no side has as many."
    parts = (
        sum(bill.spent[i].compute_s for i in there),
        sum(sum(bill.spent[i].waiting_for.values()) for i in there),
        sum(bill.spent[i].transfer_s for i in there),
    )
    computing, wait, transfer = (f"{100 * part / sum(parts):.0f} %" for part in parts)
    sentences = [f"Of their time the workers compute {computing}, wait {wait} and transfer {transfer}."]
    blamed = Counter(bill.held_up_by[i] for i in there if bill.held_up_by[i] != i)
    worker, held = max(sorted(blamed.items()), key=lambda one: one[1], default=(0, 0))
    if worker in conditions.slow and held:
        others = "another" if held == 1 else f"{held} others"
        sentences.append(f"The slow uplink of worker {worker} holds up {others}.")
    if waiting:
        names = ", ".join(map(str, waiting[:-1])) + (" and " if waiting[:-1] else "") + str(waiting[-1])
        one = len(waiting) == 1
        sentences.append(
            f"Worker{'' if one else 's'} {names} wait{'s' if one else ''}: a mean needs more than half of all {WORKERS}."
        )
    return " ".join(sentences)


# --- what is drawn ------------------------------------------------------------------------------------------------------


def _frame(
    round: int,
    conditions: Conditions,
    there: Sequence[int],
    bill: _Bill,
    ends_s: Sequence[float],
    assessment: Assessment | None,
    places: Sequence[tuple[float, float]],
) -> Frame:
    pairs, mean = set[tuple[int, int]](), set[int]()
    for i, operations in bill.operations.items():
        for operation in operations:
            pairs |= {(min(i, j), max(i, j)) for j, _ in operation.sends}
            if operation.share is not None:
                mean.add(i)
    sent = sum(one.sent_bytes for some in bill.operations.values() for one in some)
    losses = dict(zip(there, assessment.worker_losses, strict=True)) if assessment else {}
    return {
        "round": round,
        "actions": (),
        "told": (),
        "method": conditions.method,
        "local_steps": conditions.local_steps,
        "momentum": conditions.momentum,
        "alive": tuple(sorted(conditions.alive)),
        "slow": tuple(sorted(conditions.slow)),
        "cut": conditions.cut,
        "there": tuple(there),
        "mean": tuple(sorted(mean)),
        "pairs": tuple(sorted(pairs)),
        "sent_bytes": sent // max(1, len(there)),
        "seconds": tuple(_seconds(i, conditions, there, bill, ends_s) for i in range(WORKERS)),
        "clock_s": _digits(max(ends_s), 6),
        "loss": None if assessment is None else _digits(assessment.loss, 5),
        "losses": tuple(_digits(losses[i], 5) if i in losses else None for i in range(WORKERS)),
        "disagreement": None if assessment is None else _digits(assessment.disagreement, 4),
        "places": tuple((_digits(x, 3), _digits(y, 3)) for x, y in places),
        "says": _round_sentences(conditions, there, bill),
    }


def _seconds(
    i: int, conditions: Conditions, there: Sequence[int], bill: _Bill, ends_s: Sequence[float]
) -> tuple[float, float, float, int | None, float] | None:
    start_s = _digits(bill.start_s[i], 6)
    if i not in conditions.alive:
        return None
    if i not in there:
        return start_s, 0.0, _digits(ends_s[i] - bill.start_s[i], 4), None, 0.0
    spent = bill.spent[i]
    peer = max(spent.waiting_for, key=lambda one: spent.waiting_for[one], default=None)
    waiting_s = sum(spent.waiting_for.values())
    return start_s, _digits(spent.compute_s, 4), _digits(waiting_s, 4), peer, _digits(spent.transfer_s, 4)


def _places(
    models: Sequence[Tensor], present: Sequence[int], before: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """The models in the plane in which they differ most, rotated to move as little as possible since the previous
    round.

    With deviations D from the mean of those present, `[n, P]`, the plane is that of the two largest eigenvectors of `D Dᵀ / P`,
    and the turn is that of Procrustes.
    """
    if not present:
        return tuple(before)
    middle = mean_of([models[i] for i in present])
    away = torch.stack([(x - middle).double() for x in models])
    gram: NDArray[np.float64] = (away @ away.T / away.shape[1]).numpy()
    values, vectors = np.linalg.eigh(gram)
    points = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0.0))
    left, _, right = np.linalg.svd(points.T @ np.array(before))
    turned = points @ left @ right
    return tuple((float(x), float(y)) for x, y in turned)


def _digits(value: float, digits: int) -> float:
    """A value rounded to `digits` digits."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value
