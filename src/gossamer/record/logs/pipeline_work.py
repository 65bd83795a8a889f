"""The work of the inner steps of a run in stages, in `pipeline.json` of its folder; a network turns it into seconds.

With it, the run can be priced on any network without the model and codec. A run of whole replicas has no such file.
"""

import json
from pathlib import Path
from typing import Annotated, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import ConfigError, DataError
from gossamer.record.whole_files import atomic_write
from gossamer.settings.options import Count, Portion
from gossamer.settings.schema import RECORD, Records, parse_toml

PIPELINE_FILE = "pipeline.json"
_MOST_PASSES = 1_000_000
"""The most passes (micro-batches times pieces) of an inner step, which are simulated one by one."""
_Sizes = Annotated[list[Annotated[int, Field(ge=0, lt=2**53)]], Field(max_length=4095)]


@with_config(RECORD)
class PipelineWork(TypedDict):
    """The work of an inner step of a worker in stages."""

    stages: Annotated[int, Field(ge=2, le=4096)]
    chunks: Annotated[int, Field(ge=1, le=4096)]
    schedule: Literal["gpipe", "1f1b", "interleaved"]
    micro_batches: Count
    shares: Annotated[list[Portion], Field(max_length=4096)]
    """Each piece's share of the work."""
    forward_bytes: _Sizes
    """The most bytes of one micro-batch over each boundary."""
    backward_bytes: _Sizes
    again_bytes: _Sizes
    """As `forward_bytes`, for samples that the boundary remembers."""
    first: Portion
    """The number of inner steps of the run whose samples no boundary remembers."""
    cut: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=2**20)] | None
    """The workers in stages; null for all."""
    table_bytes: NotRequired[Annotated[int, Field(ge=0, lt=2**53)]]
    """What goes through all stages, one after the other, at the start of each local phase; missing for nothing."""
    phases: NotRequired[Portion]
    """The local phases of an inner step, a fraction."""


_WORK = Records[PipelineWork](PipelineWork)


def read_pipeline(run_folder: Path) -> PipelineWork | None:
    """The work of an inner step of a run in stages; None for a run without stages. Raises DataError for a spoilt record."""
    path = run_folder / PIPELINE_FILE
    if not path.exists():
        return None
    work = _WORK.parse(path.read_bytes(), str(path))
    pieces = work["stages"] * work["chunks"]
    counts = [len(work["shares"]), *(len(work[key]) + 1 for key in ("forward_bytes", "backward_bytes", "again_bytes"))]
    if counts != [pieces] * 4:
        raise DataError(
            f"{path} has {pieces} pieces, {counts[0]} shares, and bytes between {counts[1]}, {counts[2]} and {counts[3]} pieces, "
            "but as many of each are needed; repair or remove the file"
        )
    if pieces * work["micro_batches"] > _MOST_PASSES:
        raise DataError(
            f"{path} has {work['micro_batches']} micro-batches in {pieces} pieces, and at most {_MOST_PASSES} passes of an inner "
            "step are priced; repair or remove the file"
        )
    return work


def write_pipeline(run_folder: Path, work: PipelineWork | None) -> None:
    """Writes the work of an inner step into the folder of a run atomically; None, for whole replicas, removes it."""
    if work is None:
        (run_folder / PIPELINE_FILE).unlink(missing_ok=True)
    else:
        atomic_write(run_folder / PIPELINE_FILE, json.dumps(work).encode())


def has_stages(run_toml: str) -> bool:
    """Whether the text of a run file cuts workers into stages.

    >>> has_stages("[pipeline]\\nstages = 2"), has_stages("workers = 2")
    (True, False)
    """
    try:
        pipeline = parse_toml(run_toml, "the run file").get("pipeline", {})
    except ConfigError:
        return False
    return isinstance(pipeline, dict) and pipeline.get("stages", 1) != 1
