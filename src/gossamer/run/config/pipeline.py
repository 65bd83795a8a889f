"""The [pipeline] settings of a run file: a replica whose layers are cut into stages, with slow links between them."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gossamer.boundaries import BOUNDARIES, Boundary
from gossamer.codecs import Codec
from gossamer.codecs.by_part import by_part
from gossamer.data.settings import DataConfig
from gossamer.data.tokenizer import vocabulary
from gossamer.errors import ConfigError, DataError, MissingPackageError
from gossamer.layout import Pattern, fragment_of
from gossamer.models.sizes import ModelConfig, crossing, in_subspace, parameter_shapes
from gossamer.models.stages import cutting_faults, minimax, must_be_enough, piece_of, work_of_pieces
from gossamer.rounds.schedule import Schedule
from gossamer.run.config.choice import Choice, NamedIn
from gossamer.run.config.document import DIRECTIONS
from gossamer.settings.fields import Changeable, OneOf
from gossamer.settings.options import Count, Number, Positive
from gossamer.settings.schema import settings
from gossamer.settings.user_code import is_code

_vocabulary = cache(vocabulary)


def _with_whole_backward_passes(name: object) -> object:
    """Raises ConfigError for the name of a schedule without bubbles."""
    letters = re.sub("[^a-z]", "", name.lower()) if isinstance(name, str) else ""
    if "zerobubble" in letters or letters.startswith(("zb", "dualpipe")):
        raise ConfigError(
            f"pipeline.schedule is '{name}', which splits backward passes to fill idle time, and whether that is exact with "
            "boundary codecs is not known; use 'interleaved', which idles least, '1f1b' or 'gpipe'"
        )
    return name


@settings("pipeline.lost")
class LostStage:
    """A stage that loses all that it has between two rounds, as where its machine is gone, and resumes from what others have."""

    worker: Number
    """The worker that it is of."""
    stage: Number
    """Its number, from 0 on; not the first or the last, which alone have the embeddings and the output head."""
    after: Count
    """The rounds that are over then."""
    source: Literal["peer", "neighbours"] | None = None
    """What it continues from: the same stage of the next worker, or the mean of the stages before and behind it. None takes a
    peer where there is one."""


@settings("pipeline")
class PipelineConfig:
    """The stages of a replica, and what crosses between two of them. Micro-batches are the passes of `data.accumulate`."""

    stages: Annotated[Count, Changeable()] = 1
    """Parts of consecutive layers; 1 is a whole replica."""
    cuts: Annotated[tuple[Count, ...] | None, Changeable()] = None
    """The layers before which it is cut, one fewer than stages; None, or an empty list, gives every stage about as much work, or
    by speeds."""
    speeds: Annotated[Annotated[tuple[Positive, ...], Field(min_length=1)] | None, Changeable()] = None
    """How fast each stage computes, in any unit: without cuts, the slowest stage is as fast as possible. None for equal ones."""
    forward: Annotated[Choice, NamedIn("boundary"), Changeable()] = Choice("dense")
    """How activations are compressed."""
    backward: Annotated[Choice, NamedIn("boundary"), Changeable()] = Choice("dense")
    """How their gradients are compressed."""
    schedule: Annotated[
        str, OneOf(("1f1b", "gpipe", "interleaved")), BeforeValidator(_with_whole_backward_passes), Changeable()
    ] = "gpipe"
    """The order in which processes pass micro-batches forward and backward; the bits are the same in any."""
    chunks: Annotated[Count, Changeable()] = 1
    """Pieces of each stage with the schedule interleaved: the layers are cut into stages times chunks, of which each process
    has every stages-th. 1 with the other schedules."""
    workers: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None
    """The workers whose replicas are cut, by their numbers; None cuts all. The others train whole replicas."""
    lost: Annotated[tuple[LostStage, ...], Changeable()] = ()
    """The stages that are lost on the way: in a simulation to see what that costs, in a real run because it happened."""

    @property
    def pieces(self) -> int:
        """Into how many parts of consecutive layers the model is cut."""
        return self.stages * self.chunks

    def __post_init__(self) -> Iterator[str]:
        if self.stages == 1 and self.schedule != "gpipe":
            yield (
                f"pipeline.schedule is '{self.schedule}' and pipeline.stages is 1, which has nothing to schedule; set "
                "pipeline.stages to 2 or more"
            )
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            yield (
                f"pipeline.chunks is {self.chunks} and pipeline.schedule is '{self.schedule}', but with 'interleaved' each "
                "process has several pieces, and with others one; set pipeline.chunks to 2 or more for 'interleaved' alone"
            )
        if self.lost and self.stages < 3:
            yield (
                f"pipeline.lost has {len(self.lost)} stages and pipeline.stages is {self.stages}, but only a stage between two "
                "others can be recovered; remove pipeline.lost, or cut the model into 3 stages or more"
            )
        if not self.cuts:  # which --set can say, where a run has cuts
            object.__setattr__(self, "cuts", None)
        if self.cuts is not None and len(self.cuts) != self.pieces - 1:
            chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
            yield (
                f"pipeline.cuts is {[*self.cuts]} for {self.stages} stages{chunks}; give {self.pieces - 1} cuts, or "
                "pipeline.cuts=[] for about as much work in each"
            )
        if self.speeds is not None and (len(self.speeds) != self.stages or self.cuts is not None):
            cuts = "no pipeline.cuts" if self.cuts is None else f"pipeline.cuts = {[*self.cuts]}"
            yield (
                f"pipeline.speeds is {[*self.speeds]} for {self.stages} stages and {cuts}; give the speed of each stage or the "
                "cuts, not both"
            )
        named = {direction: getattr(self, direction).name for direction in DIRECTIONS}
        for direction, name in named.items():
            if is_code(name):
                yield (
                    f"pipeline.{direction} is '{name}', but only Gossamer's own boundary codecs work; allowed are "
                    f"{', '.join(BOUNDARIES)}: name one"
                )
            elif self.stages == 1 and name not in ("dense", ""):
                yield (
                    f"pipeline.{direction} is '{name}' and pipeline.stages is 1, which has no boundary; set pipeline.stages to 2 "
                    "or more"
                )
        if named["backward"] in BOUNDARIES and boundary_of(self.backward).remembers:
            yield (
                f"pipeline.backward is '{self.backward.name}', which sends changes from visit to visit, and gradients do not "
                "settle; name another, such as 'intk', for this direction"
            )

    def cuts_replica(self, worker: int) -> bool:
        """Whether the replica of this worker is in stages."""
        return self.stages > 1 and (self.workers is None or worker in self.workers)

    def processes(self, workers: int) -> tuple[int, ...]:
        """The processes of each of so many workers: one for each stage, and one for a whole replica."""
        return tuple(self.stages if self.cuts_replica(worker) else 1 for worker in range(workers))


def donor_of(lost: LostStage, pipeline: PipelineConfig, workers: int) -> int | None:
    """The worker whose same stage replaces a lost one; None where the neighbours of that do.

    >>> lost = LostStage(worker=1, stage=1, after=6)
    >>> donor_of(lost, PipelineConfig(stages=3, lost=(lost,)), 4), donor_of(lost, PipelineConfig(stages=3, lost=(lost,)), 1)
    (2, None)
    """
    gone = {each.worker for each in pipeline.lost if (each.stage, each.after) == (lost.stage, lost.after)}
    others = ((lost.worker + k) % workers for k in range(1, workers))
    donor = next((w for w in others if pipeline.cuts_replica(w) and w not in gone), None)
    return None if lost.source == "neighbours" else donor


def boundary_of(choice: Choice) -> Boundary:
    """The boundary codec that a setting names. Raises ConfigError for an option that cannot work."""
    return BOUNDARIES[choice.name](**choice.options)


def cuts_of(pipeline: PipelineConfig, model: ModelConfig, data: DataConfig) -> tuple[int, ...]:
    """The layers before which a model is cut: the given ones, those of its bottlenecks if they are as many, or by speeds.

    Raises: ConfigError when there are more stages than layers.
    """
    if pipeline.cuts is not None:
        return pipeline.cuts
    if (
        pipeline.speeds is None
        and model.bottleneck is not None
        and len(model.bottleneck.cuts or ()) == pipeline.pieces - 1
    ):
        return model.bottleneck.cuts or ()
    if pipeline.chunks > 1 and pipeline.pieces > model.shape.layers:
        raise ConfigError(
            f"pipeline.stages is {pipeline.stages} and pipeline.chunks is {pipeline.chunks}, which makes {pipeline.pieces} "
            f"pieces, and the model has {model.shape.layers} layers, but each needs one; take fewer stages or chunks"
        )
    must_be_enough(model.shape.layers, pipeline.pieces)  # before anything is made for each stage
    work, narrow = work_of_layers(model, data), in_subspace(model)
    # Behind the last layers of a model with a subspace all its numbers would have to cross, so they stay together if they can.
    if narrow and pipeline.pieces - 1 <= narrow < len(work):
        work[narrow:] = [sum(work[narrow:])]
    return minimax(work, [*(pipeline.speeds or (1.0,) * pipeline.stages)] * pipeline.chunks)


def work_of_layers(model: ModelConfig, data: DataConfig) -> list[float]:
    """The work of each layer in an inner step, in numbers of its matrices; the last has the output head too.

    A tokenizer that this machine does not have counts as bytes, as it does in a price.
    """
    try:
        words = _vocabulary(data.tokenizer)
    except (DataError, MissingPackageError):  # reported when training starts
        words = None
    return [*map(float, work_of_pieces(parameter_shapes(model, words or 256), range(1, model.shape.layers)))]


def by_stage(codec: Codec, pipeline: PipelineConfig, model: ModelConfig, data: DataConfig) -> Codec:
    """The codec applied stage by stage, as processes with one stage each apply it."""
    if pipeline.stages == 1 or codec.exact or codec.blockwise == 1:
        return codec
    return by_part(codec, stage_in(pipeline, model, data))


def stage_in(pipeline: PipelineConfig, model: ModelConfig, data: DataConfig) -> Callable[[str], int]:
    """Maps the name of a parameter to its stage."""
    cuts = cuts_of(pipeline, model, data)
    return lambda name: piece_of(name, cuts) % pipeline.stages


def users_own(model: ModelConfig, data: DataConfig) -> list[str]:
    """The keys of a model and its data that name the user's code, each with its value."""
    model_keys = [("model.size", model.size, model.own), ("model.loss", model.loss, model.loss is not None)]
    every = [*model_keys, ("data.source", data.source, data.own)]
    return [f"{key} is {value!r:.60}" for key, value, is_own in every if is_own]


def misfits(
    pipeline: PipelineConfig, model: ModelConfig, data: DataConfig, workers: int, schedule: Schedule
) -> Iterator[str]:
    """Why a model cannot be cut into these stages, its batches into micro-batches for them, or its fragments among them.

    Raises: ConfigError for one that makes further checks meaningless.
    """
    named = pipeline.workers or ()
    if named and (pipeline.stages == 1 or max(named) >= workers or [*named] != sorted({*named})):
        yield (
            f"pipeline.workers is {[*named]} with pipeline.stages = {pipeline.stages} and workers = {workers}; name each worker "
            f"in stages once, in order, from 0 to {workers - 1}, and set pipeline.stages to 2 or more"
        )
    if pipeline.stages == 1:
        return
    stages, fact = pipeline.stages, f"pipeline.stages is {pipeline.stages}"
    if own := users_own(model, data):
        yield (f"{fact} and {own[0]}, but only the built-in model on text can be cut; remove [pipeline]")
        return
    if model.experts is not None:
        yield (
            f"{fact} and model.experts has {model.experts.count} experts, but a mixture of experts is not cut into stages; "
            "remove one of the two"
        )
    if model.dropout:
        yield (
            f"{fact} and model.dropout is {model.dropout}, whose random numbers would depend on the cuts; set it to 0"
        )
    cuts = cuts_of(pipeline, model, data)
    if wrong := [*cutting_faults(cuts, model.shape.layers, tied=model.tie_embeddings)]:
        yield from (f"{fact} and {key} is {value}, but {why}" for key, value, why in wrong)
        return
    if data.accumulate < stages:
        yield (
            f"{fact} and data.accumulate is {data.accumulate}: with fewer micro-batches than stages some stage is always idle; "
            f"set data.accumulate to {stages} or more"
        )
    if pipeline.schedule == "interleaved" and data.accumulate % stages:
        yield (
            f"{fact} with pipeline.schedule 'interleaved', whose micro-batches go through the stages in groups of so many, and "
            f"data.accumulate is {data.accumulate}; set it to a multiple of {stages}"
        )
    yield from _not_recovered(pipeline, model, workers)
    yield from _not_carried(pipeline, model, data, cuts)
    yield from _without_share(pipeline, schedule, model.shape.layers, cuts)


def _not_recovered(pipeline: PipelineConfig, model: ModelConfig, workers: int) -> Iterator[str]:
    """Why lost stages cannot be recovered from what other processes have."""
    for one in pipeline.lost:
        fact = f"pipeline.lost has stage {one.stage} of worker {one.worker} after round {one.after}, but "
        if not 0 < one.stage < pipeline.stages - 1:
            yield (
                f"{fact}only a stage between two others can be recovered, as the first alone has the embeddings and the last "
                f"the output head; of {pipeline.stages} stages these are 1 to {pipeline.stages - 2}"
            )
        if one.worker >= workers or not pipeline.cuts_replica(one.worker):
            yield f"{fact}no such worker is in stages; name one of those whose replicas are cut"
        donor = donor_of(one, pipeline, workers)
        if one.source == "peer" and donor is None:
            yield f"{fact}no other worker has that stage then; take source = 'neighbours'"
        near = (each for each in pipeline.lost if (each.worker, each.after) == (one.worker, one.after))
        if donor is None and any(abs(each.stage - one.stage) == 1 for each in near):
            yield f"{fact}a neighbour is lost with it, and there is no peer to take them from; resume from an older round"
        if [*pipeline.lost].count(one) > 1:
            yield f"{fact}it is named twice; name it once"
    remembers = [f"pipeline.{name} remembers" for name in DIRECTIONS if boundary_of(getattr(pipeline, name)).remembers]
    chunks = ["pipeline.chunks is not 1"] if pipeline.chunks > 1 else []
    narrow = ["model.bottleneck is set"] if model.bottleneck is not None else []
    for key in (*chunks, *narrow, *remembers) if pipeline.lost else ():
        yield (
            f"pipeline.lost names stages and {key}, but what such a stage has cannot be taken from others; remove one of the two"
        )


def _without_share(pipeline: PipelineConfig, schedule: Schedule, layers: int, cuts: Sequence[int]) -> Iterator[str]:
    """The stages without a layer of some fragment, which would have nothing to send."""
    spans, fragments = [*pairwise([0, *cuts, layers])], schedule.fragments
    owns = [[k for a, b in spans[part :: pipeline.stages] for k in range(a, b)] for part in range(pipeline.stages)]

    def held(stage_layers: Sequence[int], pattern: Pattern) -> int:
        return len({fragment_of(k, layers, fragments, pattern) for k in stage_layers})

    strided = schedule.pattern != "strided" and all(held(layers_here, "strided") == fragments for layers_here in owns)
    for part, layers_here in enumerate(owns if 1 < fragments <= layers else []):
        if (some := held(layers_here, schedule.pattern)) < fragments:
            yield (
                f"schedule.fragments is {fragments} with pattern '{schedule.pattern}', and stage {part} of {pipeline.stages} has "
                f"layers {layers_here}, of {some} of them; take "
                f"{'the pattern strided, ' if strided else ''}fewer fragments, other pipeline.cuts or fewer stages"
            )


def _not_carried(pipeline: PipelineConfig, model: ModelConfig, data: DataConfig, cuts: Sequence[int]) -> Iterator[str]:
    """Why the codecs cannot carry what crosses these cuts. Raises ConfigError for a subspace that does not fit."""
    for direction in DIRECTIONS:
        boundary = boundary_of(getattr(pipeline, direction))
        if boundary.linear:
            _must_project(boundary, direction, cuts, model)
        if widths := [width for cut in cuts if (width := crossing(model, cut)) % boundary.unit]:
            key = "model.hidden_size" if widths[0] == model.shape.hidden_size else "model.bottleneck.width"
            yield (
                f"pipeline.{direction} = '{boundary.name}' cuts {boundary.unit} channels at a time, which does not divide the "
                f"{widths[0]} that cross; take a divisor of them, or another {key}"
            )
        if boundary.remembers and data.windows is None:
            yield (
                f"pipeline.{direction} = '{boundary.name}' needs samples that come again, and data.windows is not set, so that "
                "each is seen once; set data.windows to the number of windows that a worker trains on"
            )


def require_repeatable_samples(pipeline: PipelineConfig, data: DataConfig, steps: int) -> None:
    """Raises ConfigError where a boundary codec remembers samples, and a run of so many inner steps has each of them once.

    The run counts as a whole, wherever it is stopped and resumed. Such a run can be priced, and its folder can be read.
    """
    boundary, drawn = boundary_of(pipeline.forward), steps * data.accumulate * data.batch_size
    if boundary.remembers and data.windows is not None and drawn <= data.windows:
        raise ConfigError(
            f"pipeline.forward = '{boundary.name}' sends how a sample has changed since it was last seen, but a worker draws "
            f"{drawn} samples in run.steps = {steps} and data.windows is {data.windows}, so that each is seen once; set "
            f"data.windows below {drawn}, or raise run.steps"
        )


def _must_project(boundary: Boundary, direction: str, cuts: Sequence[int], model: ModelConfig) -> None:
    """Raises ConfigError unless whole hidden states cross each cut, and fit the subspace."""
    if model.bottleneck is not None:
        raise ConfigError(
            f"pipeline.{direction} is '{boundary.name}' and model.bottleneck is '{model.bottleneck.name}', which makes the model "
            "narrow already; remove one of the two"
        )
    size = crossing(model, cuts[0])
    if boundary.options["width"] > size:
        raise ConfigError(
            f"pipeline.{direction} = '{boundary.name}' has width {boundary.options['width']}, but hidden states have {size} "
            f"channels; give at most {size}"
        )
