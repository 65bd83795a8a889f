"""Checkpoints of workers in stages: their location, and their conversion to other cuts.

A process that has a stage of a worker saves it in a separate folder, whose name gives the cuts of the model. A run
resumed with other stages joins the stages of each worker, and cuts it again: parameters, outer state, messages in
flight and the state of inner optimizers follow the names of parameters, the memories of boundary codecs the layer
before which a boundary lies.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from gossamer.errors import CheckpointError
from gossamer.layout import Layout, layout_of, subset
from gossamer.models.llama import Llama
from gossamer.models.stages import OwnLayers
from gossamer.optimizers.by_name import for_optimizer, named_state
from gossamer.optimizers.inner import build_optimizer
from gossamer.record import checkpoint
from gossamer.record.fault import Fault, FaultKind
from gossamer.record.lineage import Lineage
from gossamer.record.whole_files import worker_suffix
from gossamer.run.config.layouts import Spans, arranged
from gossamer.run.config.pipeline import LostStage, cuts_of
from gossamer.run.config.resolved import RunSettings
from gossamer.run.worker.task import Task

_T = TypeVar("_T")
_NAME = re.compile(r"stage-\d{1,4}-of-(\d{1,4})-cut((?:-\d{1,4})+)")


class Partition(NamedTuple):
    """The assignment of a model's layers to the processes of a worker: cut before these, each process has every
    stages-th piece.
    """

    stages: int
    cuts: tuple[int, ...]

    def folders(self, run: Path) -> list[Path]:
        """The checkpoint folders of each stage; one folder for whole workers."""
        if self.stages == 1:
            return [run / "checkpoints"]
        words = "-".join(map(str, self.cuts))
        return [run / "checkpoints" / f"stage-{part}-of-{self.stages}-cut-{words}" for part in range(self.stages)]

    def parts(self, model: Llama) -> list[OwnLayers]:
        """Each process's part of this model, sharing its parameters."""
        spans = [*pairwise([0, *self.cuts, len(model.model.layers)])]
        return [OwnLayers(model, spans[part :: self.stages]) for part in range(self.stages)]


WHOLE = Partition(1, ())
"""The partition of workers of one process, and of a simulation."""


def partitions_of(names: Iterable[str], layers: int) -> set[Partition]:
    """The partitions of a model of so many layers among these folder names, which are untrusted.

    >>> partitions_of(["stage-1-of-2-cut-1", "stage-0-of-2-cut-7", "round-000001"], layers=3)
    {Partition(stages=2, cuts=(1,))}
    """
    found = {Partition(int(m[1]), tuple(map(int, m[2].split("-")[1:]))) for m in map(_NAME.fullmatch, names) if m}
    return {
        one
        for one in found
        if one.stages > 0
        and (len(one.cuts) + 1) % one.stages == 0
        and all(a < b for a, b in pairwise([0, *one.cuts, layers]))
    }


def partition_of(run: RunSettings, worker: int) -> Partition:
    """The assignment of a worker's layers to its processes in `gossamer train`."""
    pipeline = run.pipeline
    if not pipeline.cuts_replica(worker):
        return WHOLE
    return Partition(pipeline.stages, cuts_of(pipeline, run.model, run.data))


class Store(NamedTuple):
    """The checkpoints of a run for one process: its own stage of some workers, or whole workers."""

    run: RunSettings
    folder: Path
    own: Partition = WHOLE
    part: int = 0

    @property
    def path(self) -> Path:
        """The folder in which this process saves."""
        return self.own.folders(self.folder)[self.part]

    def sources(self, worker: int, line: Lineage) -> dict[int, Partition]:
        """The rounds that this process can resume from, with the partition of the checkpoints to read.

        Its own partition needs only this stage, others all stages.
        """
        found: dict[int, Partition] = {}
        for other in self._other_partitions():
            found |= {r: other for r, fault in self._faults(other, worker, line).items() if fault is None}
        return found | dict.fromkeys(checkpoint.rounds(self.path, worker, line), self.own)

    def faults(self, worker: int, line: Lineage) -> dict[int, Fault | None]:
        """The fault of each round with any file of a worker, as in `checkpoint.generation_faults`.

        None for one that this process can resume from, with the checkpoints of any partition.
        """
        found: dict[int, Fault | None] = {one.after: None for one in self._lost(worker)}
        for one in (*self._other_partitions(), self.own):
            for round, fault in self._faults(one, worker, line).items():
                found[round] = None if round in found and found[round] is None else fault
        return dict(sorted(found.items()))

    def begins_without(self, round: int, worker: int, line: Lineage) -> bool:
        """Whether this process's stage resumes without a checkpoint of the round, as it was lost then."""
        return any(one.after == round for one in self._lost(worker)) and round not in self.sources(worker, line)

    def fault(self, round: int, worker: int, line: Lineage) -> Fault | None:
        """The reason why this round cannot be resumed from; None if it can. Cost: reads all needed files."""
        if self.begins_without(round, worker, line):
            return None
        paths = self._paths(self.sources(worker, line).get(round, self.own))
        try:
            for path in paths:
                self._with_checked_steps(round, worker, checkpoint.load(path, round, worker, line))
        except CheckpointError as error:
            return Fault.of(error)
        return None

    def says_what_it_is_of(self, round: int, worker: int) -> bool:
        """Whether the checkpoints of a valid round have a description besides the digest; True if this process has none."""
        found = [
            each
            for each in (self.own, *self._other_partitions())
            if round in checkpoint.rounds(self._paths(each)[0], worker)
        ]
        return all(
            checkpoint.says_what_it_is_of(path, round, worker) for each in found[:1] for path in self._paths(each)[:1]
        )

    def load(self, task: Task, round: int, worker: int, line: Lineage) -> dict[str, Any]:
        """The state of this process, converted if it was saved with other stages.

        Raises: CheckpointError. Cost: with other stages, the state of a whole worker and a model.
        """
        source = self.sources(worker, line).get(round, self.own)
        states = [
            self._with_checked_steps(round, worker, checkpoint.load(path, round, worker, line))
            for path in self._paths(source)
        ]
        if source == self.own:
            return states[0]
        model = cast(Llama, task.model())
        try:
            whole = joined_state(self.run, model, source, states)
            return whole if self.own == WHOLE else state_of_part(self.run, model, self.own, self.part, whole)
        except (ArithmeticError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoints of worker {worker} from {source.stages} stages do not fit this model and inner optimizer "
                f"({error!r:.200}); use the run file that wrote them, or remove them"
            ) from None

    def take_over(self, worker: int, round: int, state: dict[str, Any], line: Lineage, new: Lineage) -> None:
        """Saves a converted state as this process's own; then `forget_others` may remove the originals."""
        if round and self.sources(worker, line).get(round) != self.own:
            checkpoint.save(self.path, round, worker, state, digest=new)

    def forget_others(self, worker: int) -> None:
        """Removes a worker's checkpoints of other partitions, once all processes have converted them."""
        for other in self._other_partitions():
            for path in other.folders(self.folder):
                checkpoint.rewind(path, -1, worker)
                with contextlib.suppress(OSError):  # not empty if other workers have theirs there
                    path.rmdir()

    def _lost(self, worker: int) -> list[LostStage]:
        """The rounds at which this process's stage was lost."""
        lost = self.run.pipeline.lost if self.own != WHOLE else ()
        return [one for one in lost if (one.worker, one.stage) == (worker, self.part)]

    def _with_checked_steps(self, round: int, worker: int, state: dict[str, Any]) -> dict[str, Any]:
        """The state. Raises CheckpointError unless it has the inner steps that its worker takes in `round` rounds."""
        run, step = self.run, state.get("steps_taken")
        if run.kind != "rounds" or run.loop.adapt or run.loop.elastic or step is None:
            return state
        if (self.folder / f"outcomes{worker_suffix(worker)}.jsonl").exists():  # an elastic worker may have joined late
            return state
        needed = run.timetable.steps_before(worker, round)
        if step != needed:
            raise CheckpointError(
                f"the checkpoint of worker {worker} after round {round} has step {step!r:.40} but needs {needed}; resume with "
                "the run file that wrote it, or from an older round",
                FaultKind.MISPLACED,
            )
        return state

    def _faults(self, one: Partition, worker: int, line: Lineage) -> dict[int, Fault | None]:
        """As `faults`, for one partition."""
        stages = {path: checkpoint.generation_faults(path, worker, line) for path in self._paths(one)}
        found: dict[int, Fault | None] = {}
        for round in {round for each in stages.values() for round in each}:
            faults = (
                each.get(round, Fault(FaultKind.ABSENT, f"'{path}' has no checkpoint of worker {worker}"))
                for path, each in stages.items()
            )
            found[round] = next((fault for fault in faults if fault is not None), None)
        return found

    def _paths(self, source: Partition) -> list[Path]:
        return [self.path] if source == self.own else source.folders(self.folder)

    def _other_partitions(self) -> list[Partition]:
        """The other partitions that may have checkpoints here."""
        if self.run.model.own:  # it has no layers to cut
            return sorted({WHOLE} - {self.own})
        names = (path.name for path in (self.folder / "checkpoints").glob("stage-*"))
        return sorted({WHOLE, *partitions_of(names, self.run.model.shape.layers)} - {self.own})


class Arranged(NamedTuple):
    """The order of parameters in a vector, and its fragments."""

    layout: Layout
    spans: Spans

    @staticmethod
    def of(run: RunSettings, model: Llama, parts: Sequence[OwnLayers]) -> "list[Arranged]":
        """The arrangement of a model, and of each of these parts of it."""
        whole = Arranged(*arranged(layout_of(model), run))
        return [whole, *(Arranged(*subset(*whole, dict(part.named_parameters()))) for part in parts)]

    def fragment(self, p: int | None) -> Layout:
        """The layout of a fragment; of everything for None."""
        return self.layout if p is None else self.layout.slice(*self.spans[p % len(self.spans)])

    def each(self, values: Iterable[_T]) -> list[tuple[int, _T]]:
        """The values of an outer state, equally many per fragment, with the fragment's number."""
        listed = [*values]
        return [(k * len(self.spans) // len(listed), value) for k, value in enumerate(listed)]

    def mapped(self, state: Mapping[str, Any], vector: Callable[[Tensor, int | None], Tensor]) -> dict[str, Any]:
        """The state of a worker with others in place of its vectors: `vector(value, p)` for one of fragment p, or of all."""
        return {
            **state,
            "x": vector(state["x"], None),
            "outer": [vector(value, p) for p, value in self.each(state["outer"])],
            "under_way": [
                {**one, "sent": [vector(value, one["fragment"]) for value in one["sent"]]} for one in state["under_way"]
            ],
        }


def joined_state(
    run: RunSettings, model: Llama, source: Partition, states: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The state of a whole worker, from those of its stages in order, which must agree on everything not specific to a
    stage.

    Args: `model` is one of this run, for the layout.
    Raises: CheckpointError, KeyError, TypeError or ValueError when they do not fit each other or the model.
    """
    if source == WHOLE:
        return {**states[0]}
    parts, names = source.parts(model), {p: name for name, p in model.named_parameters()}
    layout, *layouts = Arranged.of(run, model, parts)

    def whole(values: Sequence[Tensor], fragment: int | None = None) -> Tensor:
        return _whole_of(values, [one.fragment(fragment) for one in layouts], layout.fragment(fragment))

    inner = [
        named_state(build_optimizer(run.inner, part), state["inner"], names)
        for part, state in zip(parts, states, strict=True)
    ]
    known = inner[0]
    for one in inner[1:]:
        known = known.joined(one)
    flying = zip(*(state["under_way"] for state in states), strict=True)
    return {
        **states[0],
        "x": whole([state["x"] for state in states]),
        "outer": [
            whole(values, p) for p, values in layout.each(zip(*(state["outer"] for state in states), strict=True))
        ],
        "under_way": [
            {
                **one[0],
                "sent": [whole(v, one[0]["fragment"]) for v in zip(*(each["sent"] for each in one), strict=True)],
            }
            for one in flying
        ],
        "inner": for_optimizer(build_optimizer(run.inner, model), known, names),
        "boundaries": {layer: ends for state in states for layer, ends in state["boundaries"].items()},
        "squares": {first: square for state in states for first, square in state.get("squares", {}).items()},
    }


def state_of_part(
    run: RunSettings, model: Llama, target: Partition, part: int, whole: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of one stage, from the state of a whole worker; extra memories of boundaries are ignored.

    Args and raises: as `joined_state`.
    """
    own, names = target.parts(model)[part], {p: name for name, p in model.named_parameters()}
    layout, places = Arranged.of(run, model, [own])

    def cut(value: Tensor, fragment: int | None) -> Tensor:
        of = layout.fragment(fragment)
        return cut_out(value, _places(places.fragment(fragment), of), of.numel)

    inner = named_state(build_optimizer(run.inner, model), whole["inner"], names)
    return {**layout.mapped(whole, cut), "inner": for_optimizer(build_optimizer(run.inner, own), inner, names)}


def _whole_of(vectors: Sequence[Tensor], parts: Sequence[Layout], layout: Layout) -> Tensor:
    """As `joined`, of a model's parts. Other values must be the same in all parts. Raises: CheckpointError."""
    times = vectors[0].numel() // parts[0].numel
    if times and all(x.shape == (times * part.numel,) for x, part in zip(vectors, parts, strict=True)):
        return joined(vectors, [_places(part, layout) for part in parts], layout.numel)
    if all(torch.equal(vectors[0], x) for x in vectors[1:]):
        return vectors[0]
    raise CheckpointError(
        f"the stages of the checkpoint have tensors of shapes {[[*x.shape] for x in vectors]} and should have "
        f"{[[part.numel] for part in parts]}; use the run file that wrote it"
    )


def _places(part: Layout, layout: Layout) -> Spans:
    """Where the tensors of a part are in the whole."""
    places = {leaf.name: (leaf.start, leaf.stop) for leaf in layout.leaves}
    return tuple(places[leaf.name] for leaf in part.leaves)


def joined(vectors: Sequence[Tensor], places: Sequence[Spans], numel: int) -> Tensor:
    """A vector `[P]` of a model, or several concatenated ones `[k P]`, from those of its parts, which have these spans of it."""
    times = vectors[0].numel() // sum(b - a for a, b in places[0])
    whole = vectors[0].new_empty(times, numel)
    for x, spans in zip(vectors, places, strict=True):
        pieces = x.view(times, -1).split([b - a for a, b in spans], 1)
        for piece, (a, b) in zip(pieces, spans, strict=True):
            whole[:, a:b] = piece
    return whole.view(-1)


def cut_out(value: Tensor, spans: Spans, numel: int) -> Tensor:
    """One part of such a vector; other values are the same in all parts."""
    times = value.numel() // numel
    if not times or value.shape != (times * numel,):
        return value
    rows = value.view(times, numel)
    return torch.cat([rows[:, a:b] for a, b in spans], 1).reshape(-1)
