"""The time and traffic of each stage: one line for each process and round of a run whose workers have several.

`stages-003-1.jsonl` has those of stage 1 of worker 3:

* `{"round":r,"worker":i,"stage":s,"compute_s":a,"wait_s":b,"forward_bytes":c,"backward_bytes":d,"outer_bytes":e}`

A stage computes, codecs included, or waits for another stage; bytes of activations and their gradients include length
prefixes; outer bytes are those sent to peers.

A simulation that has networks writes `stages.jsonl` when it ends: such lines for all stages, with the key `network` on
which they are priced, and without outer bytes, which its trace has for whole workers.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import Annotated, NamedTuple

from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.record.jsonl import folder_lines, json_line, keep_before
from gossamer.record.logs.event_log import Seconds, Whole, row_lines
from gossamer.record.whole_files import Appender, make_folder, worker_suffix

STAGES_FILE = "stages.jsonl"
"""The file of a simulation."""


_Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class StageSeconds(NamedTuple):
    """One process in one round."""

    round: Whole
    worker: Whole
    stage: Whole
    compute_s: Seconds
    wait_s: Seconds
    forward_bytes: _Bytes
    backward_bytes: _Bytes
    outer_bytes: _Bytes | None = None
    """None where they are not known per stage."""
    network: str | None = None
    """The declared network whose seconds these are; None for measured seconds."""


_LINES = row_lines(StageSeconds)


def stage_lines(seconds: Iterable[StageSeconds]) -> str:
    """The text of a file; None values are left out."""
    return "".join(json_line({k: v for k, v in one._asdict().items() if v is not None}) for one in seconds)


def stage_log(folder: Path, worker: int, part: int, parts: int, resume_round: int | None) -> Appender:
    """The log of one process; a resumed run drops the lines of this round and later ones.

    Raises: ConfigError when a new run would mix with an old one.
    """
    make_folder(folder)
    path = folder / f"stages{worker_suffix(worker, part, parts)}.jsonl"
    if path.exists():
        if resume_round is None:
            raise ConfigError(
                f"the run folder '{folder}' already holds {path.name}; name a new one with --out, or go on with --resume "
                f"{quote(str(folder))}"
            )
        keep_before(path, resume_round)
    return Appender(path)


def end_logs_of_others(folder: Path, worker: int, parts: int, resume_round: int) -> None:
    """Drops the lines of this round and later ones from the logs of stages that a run with fewer of them no longer has."""
    for path in sorted(folder.glob(f"stages{worker_suffix(worker)}-*.jsonl")):
        part = path.stem.rpartition("-")[2]
        if parts == 1 or (part.isdecimal() and int(part) >= parts):
            keep_before(path, resume_round)


def read_stages(folder: Path) -> Iterator[StageSeconds]:
    """The lines of all stages of a run. Raises: DataError for an invalid one."""
    # The file of a stage ends in the number of the stage, so its name does not give the owner of a line.
    for _, _, line in folder_lines(folder, "stages", _LINES, owner=lambda line: None):
        yield StageSeconds(**line)
