"""On what a run was computed: `machines[-003].jsonl`, written by a run whose `record.hash` is true.

* `{"round":r,"torch":"2.13.0","processor":"...","threads":k}`: a process that computed from round r on, with this version of
  torch, on this processor, with so many intra-op threads.

Other processors and other versions of torch round differently, so `gossamer audit` compares only on the same.
"""

import platform
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.record.jsonl import json_line, records
from gossamer.settings.options import Count, Number
from gossamer.settings.schema import RECORD, Records

__all__ = ["Machine", "machine_line", "read_machines", "this_machine"]

_Word = Annotated[str, Field(max_length=300)]


@with_config(RECORD)
class _Line(TypedDict):
    round: Number
    torch: _Word
    processor: _Word
    threads: Count


_LINES = Records[_Line](_Line)


class Machine(NamedTuple):
    """What decides how numbers are rounded."""

    torch: str
    processor: str
    threads: int


def this_machine() -> Machine:
    """That of this process."""
    import torch  # a record is read without it

    processor = f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})"
    if torch.cuda.is_available():
        processor += f", {torch.cuda.get_device_name()}"
    return Machine(torch.__version__, processor[:300], torch.get_num_threads())


def machine_line(round: int, machine: Machine) -> str:
    """A line of the file."""
    return json_line({"round": round, **machine._asdict()})


def read_machines(run_folder: Path) -> set[Machine]:
    """All machines that have computed a run; empty where none is recorded. Raises: DataError for a line that is none."""
    lines = [line for path in sorted(Path(run_folder).glob("machines*.jsonl")) for _, line in records(path, _LINES)]
    return {Machine(line["torch"], line["processor"], line["threads"]) for line in lines}


def _processor() -> str:
    """Its name, as Linux tells it; elsewhere that of its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
