"""The plan of a model that does not fit a worker's process: shards within its site, or stages.

Where the machines of a site hold a replica together, each site is a worker in shards. Else a plan says how many stages, what
crosses them and in how many micro-batches; an inner step then takes as long as its pipeline does
(`gossamer.run.worker.stages.timing`), and the methods are planned for that step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.models.sizes import ModelConfig
from gossamer.models.stages import minimax, piece_of
from gossamer.network.inner_steps import InnerSteps
from gossamer.network.links import Network
from gossamer.network.pipeline_time import StageLinks
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import parse
from gossamer.run.planning.candidates import PLANNED, drafted
from gossamer.run.planning.check import counted
from gossamer.run.planning.plan import PlanSettings, RunPlan, plan, stepped, workers_of
from gossamer.run.planning.teams import places_of
from gossamer.run.worker.stages.timing import in_stages, work_in
from gossamer.settings.options import Positive, check_values

BOUNDARY_PAIRS: Mapping[str, str] = {"dense": "dense", "cast": "cast", "intk": "intk", "tahquant": "intk"}
"""Boundary codecs of activations that a plan can try, from the mildest on, each with the codec of gradients."""

SPEED_LEFT = 0.9
"""The share of the speed that the mildest boundary codec has to leave: what such codecs cost in loss is not known here."""

_ENOUGH = 1.05
"""Of all numbers of micro-batches the fewest is taken whose step is at most so much longer than the shortest: a price does not
know that small micro-batches compute more slowly."""


class StagedReplica(NamedTuple):
    """A way to cut a replica, and what an inner step then takes."""

    stages: int
    cuts: tuple[int, ...]
    """The layers before which it is cut."""
    forward: str
    backward: str
    micro_batches: int
    stage_bytes: int
    """Memory of the process that needs most, without activations."""
    step_s: float
    """Seconds of an inner step, of the slowest worker."""
    unhindered: float
    """The share of it that it would take over links that need no time."""
    computing: float
    """The share of it in which its stages compute; in the rest they wait for each other and for messages between them."""

    def tables(self, batch_size: int) -> dict[str, dict[str, Any]]:
        """Its tables of a run file."""
        pipeline = {
            "stages": self.stages,
            "cuts": [*self.cuts],
            "forward": self.forward,
            "backward": self.backward,
            "schedule": "1f1b",
        }
        return {
            "pipeline": pipeline,
            "data": {"batch_size": batch_size // self.micro_batches, "accumulate": self.micro_batches},
        }


class StagePlan(NamedTuple):
    """A plan with replicas in stages."""

    made: RunPlan
    replica_bytes: int
    """Memory of a whole replica, without activations."""
    chosen: StagedReplica
    tried: tuple[StagedReplica, ...]
    """The best of each boundary codec, from the mildest on."""
    refused: Mapping[str, str]
    """The boundary codecs that do not fit this model, and why."""


class ShardPlan(NamedTuple):
    """A plan whose workers are sites, each with a replica in shards under FSDP2."""

    made: RunPlan
    replica_bytes: int
    """Memory of a whole replica, without activations."""
    shards: int
    """The machines of a site."""


def plan_in_parts(
    network: Network, model: ModelConfig, options: PlanSettings, memory_bytes: float, boundaries: Sequence[str] = ()
) -> ShardPlan | StagePlan | None:
    """Divides a replica that no machine holds, and plans the methods; None if it fits whole.

    Where the machines of a site hold it together, and all sites are of one size, sites are the workers, each with a replica in
    shards; not where the network has links of stages, or boundary codecs are asked for. Else it is cut into the fewest stages
    that fit. Of the boundary codecs, the mildest is taken that leaves nine tenths of the speed, else the fastest. Where the
    network gives the speeds of stages, there are as many, and faster ones have more layers.

    The memory counted is that of the planned method which keeps most, and each shard has an equal share of it; what FSDP2
    gathers of a layer at a time comes on top, as activations do.

    Args:
        memory_bytes: of a machine, without activations.
        boundaries: of `BOUNDARY_PAIRS`, those to try; all unless given.
    Raises: ConfigError where no number of stages fits, a batch cannot be split among them, or no boundary codec fits; as `plan`.
    """
    n, layout = workers_of(network, options), layout_for(model, options.vocab_size)
    check_values(Positive, memory_bytes=memory_bytes)
    whole = _Sketch(stepped(network, layout.numel, options), model, options, n, layout)
    per_number = whole.bytes_per_number()
    if round(per_number * layout.numel) <= memory_bytes:
        return None
    shards = None if boundaries or network.stages else _in_shards(whole, memory_bytes)
    return _in_stages(whole, per_number, memory_bytes, boundaries) if shards is None else shards


def _in_shards(whole: "_Sketch", memory_bytes: float) -> ShardPlan | None:
    """The plan of sites as workers; None where a site does not hold a replica, or sites are none or of unlike size."""
    places = places_of(whole.network)
    sizes = {len(workers) for workers in places.values()}
    if len(sizes) != 1 or not 1 < min(sizes) < whole.workers:
        return None
    (shards,) = sizes
    replica_bytes = round(whole._replace(workers=len(places)).bytes_per_number() * whole.layout.numel)
    if replica_bytes > shards * memory_bytes:
        return None
    made = plan(whole.network, whole.model, replace(whole.options, sites="only"))
    return ShardPlan(made, replica_bytes, shards)


def _in_stages(whole: "_Sketch", per_number: float, memory_bytes: float, boundaries: Sequence[str]) -> StagePlan:
    """The plan of workers in stages, by the memory of each parameter."""
    network, options, layout = whole.network, whole.options, whole.layout
    cuts, stage_bytes = _fewest(whole, per_number, memory_bytes)
    counts = [m for m in range(len(cuts) + 1, options.batch_size + 1) if options.batch_size % m == 0]
    if not counts:
        raise ConfigError(
            f"batch_size is {options.batch_size} and the model takes {len(cuts) + 1} stages, which need as many micro-batches; "
            f"raise --batch-size to {len(cuts) + 1} or more"
        )
    tried: list[StagedReplica] = []
    refused: dict[str, str] = {}
    for name in boundaries or BOUNDARY_PAIRS:
        try:
            timed = [whole.cut(cuts, name, m, stage_bytes) for m in counts]
        except ConfigError as error:
            refused[name] = str(error)
            continue
        shortest = min(cut.step_s for cut in timed)
        tried.append(next(cut for cut in timed if cut.step_s <= _ENOUGH * shortest))
    if not tried:
        raise ConfigError(f"no boundary codec fits: {'; '.join(refused.values())}")
    chosen = next((cut for cut in tried if cut.unhindered >= SPEED_LEFT), min(tried, key=lambda cut: cut.step_s))
    tables = chosen.tables(options.batch_size)
    steps = in_stages(network, settings_of(parse(whole.document("diloco", tables))), layout)
    made = plan(steps.network, whole.model, replace(options, keep_all=True, sites="never"), steps.computing)
    made = made._replace(network=network, replica=tables)
    return StagePlan(made, round(per_number * layout.numel), chosen, tuple(tried), refused)


class _Sketch(NamedTuple):
    """What is to be cut, and for which workers."""

    network: Network
    model: ModelConfig
    options: PlanSettings
    workers: int
    layout: Layout

    def document(self, method: str, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """A run file of a round."""
        run = {"run": {"steps": 1, "local_steps": 1}}
        return drafted(method, self.workers, self.model, self.options, {**run, **tables})

    def work(self) -> list[float]:
        """The work of each layer, as its price has it; the last has the output head."""
        return [*map(float, work_in(self.layout, range(1, self.model.shape.layers)))]

    def bytes_per_number(self) -> float:
        """Memory of each parameter with the planned method that keeps most."""
        needed = 0
        for method in PLANNED:
            config = parse(self.document(method, {}))
            try:
                counts = counted(resolve(config), self.layout, 1)
            except ConfigError:  # two peers of two workers
                continue
            needed = max(needed, sum(kept.bytes for kept in counts.kept))
        return needed / self.layout.numel

    def cut(self, cuts: tuple[int, ...], forward: str, micro_batches: int, stage_bytes: int) -> StagedReplica:
        """The step of one way to cut. Raises ConfigError where the boundary codecs do not fit."""
        backward, seconds = BOUNDARY_PAIRS[forward], (0.0, 0.0, 0.0)
        made = StagedReplica(len(cuts) + 1, cuts, forward, backward, micro_batches, stage_bytes, *seconds)
        run = resolve(parse(self.document("diloco", made.tables(self.options.batch_size))))
        links = self.network.stages or StageLinks()
        free = replace(self.network, stages=StageLinks(speeds=links.speeds))
        step_s, computing = _slowest(in_stages(self.network, run, self.layout))
        free_s, _ = _slowest(in_stages(free, run, self.layout))
        return made._replace(step_s=step_s, unhindered=free_s / step_s, computing=computing)


def _slowest(steps: InnerSteps) -> tuple[float, float]:
    """The longest inner step, and the share of it in which its stages compute."""
    assert steps.network.step_s is not None
    times = np.broadcast_to(np.asarray(steps.network.step_s, float), len(steps.by_stage))
    slowest = int(times.argmax())
    return float(times[slowest]), steps.computing[slowest]


def _fewest(sketch: _Sketch, per_number: float, memory_bytes: float) -> tuple[tuple[int, ...], int]:
    """The cuts into the fewest stages that fit, and the memory of the largest. Raises ConfigError when none does."""
    layers, links = sketch.model.shape.layers, sketch.network.stages or StageLinks()
    each, outside = _sizes(sketch.layout, layers)
    numbers = range(2, layers + 1) if links.speeds is None else [len(links.speeds)]
    for stages in numbers:
        rooms = [memory_bytes / per_number - outside[0], *[memory_bytes / per_number] * (stages - 2)]
        most = [math.floor(room / each) for room in (*rooms, memory_bytes / per_number - outside[1])]
        if min(most) >= 1 and sum(most) >= layers:
            cuts = minimax(sketch.work(), links.speeds or [1.0] * stages, most)
            held = [each * (stop - start) for start, stop in pairwise((0, *cuts, layers))]
            return cuts, round(per_number * max(held[0] + outside[0], held[-1] + outside[1], *held))
    parts = ", ".join(
        f"{part} {size * per_number:.4g}"
        for part, size in (("a layer takes", each), ("the embeddings", outside[0]), ("the head", outside[1]))
    )
    raise ConfigError(
        f"a process has {memory_bytes:.4g} bytes, and the model does not fit {max(numbers, default=1)} of them: {parts}, without "
        "activations; give processes of more memory, or a smaller model"
    )


def _sizes(layout: Layout, layers: int) -> tuple[int, tuple[int, int]]:
    """Parameters of the largest layer, and those before the first and after the last."""
    sizes, everywhere = [0] * (layers + 2), range(layers + 1)
    for leaf in layout.leaves:
        sizes[piece_of(leaf.name, everywhere)] += leaf.stop - leaf.start
    return max(sizes[1:-1]), (sizes[0], sizes[-1])
