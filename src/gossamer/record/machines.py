"""The machines that computed a run: `machines[-003].jsonl`.

* `{"round":r,"torch":"2.13.0","processor":"...","threads":k}`: a process that computed from round r on, with this version of
  torch, on this processor, with so many intra-op threads. `"worker":i` is there where one process computed for all workers and
  they had different numbers of threads.

The number of threads decides the order of sums, so a run is computed again with the threads that it had, on any number of cores.
Other processors and versions of torch round differently, so `gossamer audit` compares only on matching ones.
"""

import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.record.jsonl import folder_lines, json_line
from gossamer.record.whole_files import worker_of_file
from gossamer.settings.options import Count, Number
from gossamer.settings.schema import RECORD, Records

MOST_THREADS = 1024
"""The most threads of one worker; a record with more is damaged, and would start that many."""
_Word = Annotated[str, Field(max_length=300)]


@with_config(RECORD)
class _Line(TypedDict):
    round: Number
    torch: _Word
    processor: _Word
    threads: Annotated[Count, Field(le=MOST_THREADS)]
    worker: NotRequired[Annotated[int, Field(ge=0, lt=2**20)]]


_LINES = Records[_Line](_Line)


class Machine(NamedTuple):
    """The properties that decide rounding."""

    torch: str
    processor: str
    threads: int


def this_machine() -> Machine:
    """The machine of this process."""
    import torch  # records are read without torch

    capability = torch.backends.cpu.get_cpu_capability()
    bf16, usual = computes_bf16(), capability.startswith("AVX512")
    # oneDNN decides that, and not by the capability alone: ONEDNN_MAX_CPU_ISA changes it, and machines of one name may differ.
    unusual = "" if bf16 == usual else f", {'with' if bf16 else 'without'} products in bf16"
    processor = f"{_processor()} ({capability}{unusual})"
    if torch.cuda.is_available():
        processor += f", {torch.cuda.get_device_name()}"
    return Machine(torch.__version__, processor[:300], torch.get_num_threads())


@functools.cache
def computes_bf16() -> bool:
    """Whether torch has products in bf16 for this processor, as with AVX-512; on others they take fifty times those in fp32.

    It decides the last bits of Muon's orthogonal factors, so the criterion must not change: runs are recomputed from their
    records.
    """
    import torch

    # Torch has no public name for it.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Computed(NamedTuple):
    """A machine, and the rounds and worker that it computed."""

    round: int
    """The first of its rounds."""
    worker: int | None
    """None for one process with all workers."""
    machine: Machine


class Threads(NamedTuple):
    """Intra-op threads of each worker.

    >>> threads = Threads(2, {1: ((0, 2), (5, 4))})
    >>> [threads.at(worker=1, round=r) for r in (4, 5)], threads.at(worker=0, round=5), threads.widest
    ([2, 4], 2, 4)
    """

    default: int
    """Threads of workers that are not listed."""
    each: Mapping[int, tuple[tuple[int, int], ...]] = {}
    """By worker: pairs of a first round and the threads from it on, in order."""

    def at(self, worker: int, round: int) -> int:
        """The threads of a worker in a round."""
        changes = self.each.get(worker, ())
        earlier = [threads for first, threads in changes if first <= round]
        return earlier[-1] if earlier else changes[0][1] if changes else self.default

    @property
    def widest(self) -> int:
        """The most threads of any worker in any round."""
        return max([self.default, *(threads for changes in self.each.values() for _, threads in changes)])

    def lines(self, round: int, machine: Machine, workers: int) -> str:
        """The lines of a process that computes for `workers` workers from a round on."""
        here = [self.at(worker, round) for worker in range(workers)]
        later = {i: [one for one in changes if one[0] > round] for i, changes in self.each.items()}
        if len({*here}) == 1 and not any(later.values()):
            return machine_line(round, machine._replace(threads=here[0]))
        changes = sorted((at, i, k) for i, k in enumerate(here) for at, k in [(round, k), *later.get(i, ())])
        return "".join(machine_line(at, machine._replace(threads=k), worker=i) for at, i, k in changes)


def machine_line(round: int, machine: Machine, worker: int | None = None) -> str:
    """A line of the file."""
    return json_line({"round": round, **({} if worker is None else {"worker": worker}), **machine._asdict()})


def read_machines(run_folder: Path) -> list[Computed]:
    """The machines of a run, by rounds; empty if none is recorded. Raises: DataError for an invalid line."""
    computed = [
        Computed(
            line["round"],
            line.get("worker", worker_of_file(path.name)),
            Machine(line["torch"], line["processor"], line["threads"]),
        )
        for path, _, line in folder_lines(run_folder, "machines", _LINES, owner=lambda line: line.get("worker"))
    ]
    return sorted(computed, key=lambda one: one.round)


def _processor() -> str:
    """The processor's name on Linux; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
