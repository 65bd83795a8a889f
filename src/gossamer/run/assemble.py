"""The checkpoints of workers whose stages are processes: where they are, and whole models from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import CheckpointError
from gossamer.layout import Layout, layout_of
from gossamer.models.llama import Llama
from gossamer.models.stages import OwnLayers
from gossamer.record import checkpoint
from gossamer.run.config import RunConfig
from gossamer.run.staged import spans_of
from gossamer.run.task import Task

__all__ = ["assembled", "held_spans", "must_be_whole", "must_have_stages", "stage_store", "stores_of", "whole_of"]


def stage_store(folder: Path, stage: int) -> Path:
    """The checkpoints of one stage of all workers in a run folder."""
    return folder / "checkpoints" / f"stage-{stage}"


def stores_of(config: RunConfig, folder: Path) -> list[Path]:
    """Where the checkpoints of a run are: one folder for each stage where these were processes, else one."""
    stages = [stage_store(folder, stage) for stage in range(config.pipeline.stages)]
    return stages if len(stages) > 1 and any(store.exists() for store in stages) else [folder / "checkpoints"]


def must_be_whole(config: RunConfig, folder: Path) -> None:
    """Raises CheckpointError when the checkpoints of a run to simulate are those of processes."""
    if len(stores_of(config, folder)) > 1:
        raise CheckpointError(
            f"the checkpoints in '{folder}' are of single stages, as gossamer train writes them; resume with gossamer train"
        )


def must_have_stages(config: RunConfig, folder: Path) -> None:
    """Raises CheckpointError when the checkpoints of a run of processes in stages are those of whole workers."""
    if config.pipeline.stages > 1 and any((folder / "checkpoints").glob("round-*")):
        raise CheckpointError(
            f"the checkpoints in '{folder}' are of whole workers, as gossamer simulate writes them, and the processes of this "
            "run have a stage each; resume with gossamer simulate"
        )


def held_spans(config: RunConfig, part: int) -> list[tuple[int, int]]:
    """The layers that one process of a worker has: those of a stage, or of every stages-th piece."""
    return spans_of(config)[part :: config.pipeline.stages]


def assembled(
    config: RunConfig, task: Task, stores: Sequence[Path], round: int, owner: int, key: checkpoint.Lineage
) -> Mapping[str, Any]:  # fmt: skip
    """The checkpoint of a worker, with the parameters of all its stages under `x`. Raises CheckpointError."""
    states = [checkpoint.load(store, round, owner, key) for store in stores]
    if len(states) == 1:
        return states[0]
    model = cast(Llama, task.model())
    parts = [layout_of(OwnLayers(model, held_spans(config, part))) for part in range(len(stores))]
    return {**states[0], "x": whole_of([state["x"] for state in states], parts, layout_of(model))}


def whole_of(vectors: Sequence[Tensor], parts: Sequence[Layout], layout: Layout) -> Tensor:
    """The parameters `[P]` of a model from those of its parts, each with its layout.

    Raises: CheckpointError when a part has not the parameters it should have.
    """
    whole, places = torch.empty(layout.numel), {leaf.name: leaf for leaf in layout.leaves}
    for x, part in zip(vectors, parts, strict=True):
        if x.shape != (part.numel,):
            raise CheckpointError(
                f"a stage of the checkpoint has parameters of shape {[*x.shape]} and should have [{part.numel}]; use the run "
                "file that wrote it"
            )
        for leaf in part.leaves:
            place = places[leaf.name]
            whole[place.start : place.stop] = x[leaf.start : leaf.stop]
    return whole
