"""Settings that affect the last bits of a worker's results: intra-op threads and deterministic kernels."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gossamer.record.folder import run_file
from gossamer.record.machines import Threads, read_machines, this_machine
from gossamer.run.config.document import flat
from gossamer.run.config.resolved import RunSettings
from gossamer.settings.schema import read_toml
from gossamer.transport.processes.launch import intra_op_threads

log = logging.getLogger("gossamer")

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_TORCH: Any = torch.utils.deterministic  # whose one attribute is a property of the module


def threads_of(run: RunSettings, recorded: Path | None = None) -> Threads:
    """The intra-op threads of each worker, for a process that computes for all: those that real workers have on this machine.

    Args: `recorded` is the folder of the run that is replayed or resumed. Its workers keep their recorded threads,
        unless `run.threads` has changed.
    Raises: ConfigError where OMP_NUM_THREADS is no number; DataError for a damaged record.
    """
    configured = run.loop.threads
    threads = Threads(intra_op_threads(configured, sum(run.processes)))
    machines = [] if recorded is None else read_machines(recorded)
    if recorded is None or not machines:
        return threads
    warn_of_other_machine(recorded)
    file = run_file(recorded)
    if configured and configured != flat(read_toml(file, f"'{file}'")).get("run.threads"):
        return threads
    numbers = range(run.owners.stop)  # the server has the last
    each = {i: tuple((one.round, one.machine.threads) for one in machines if one.worker in (None, i)) for i in numbers}
    return threads._replace(each={i: changes for i, changes in each.items() if changes})


def warn_of_other_machine(recorded: Path) -> None:
    """Warns where the run in a folder was computed by another version of torch, or on another processor."""
    here = this_machine()
    for kind in ("torch", "processor"):
        others = {str(getattr(one.machine, kind)) for one in read_machines(recorded)} - {getattr(here, kind)}
        if others:
            log.warning(
                f"the run in '{recorded}' was computed with another {kind} ({', '.join(sorted(others))}) than is here "
                f"({getattr(here, kind)}), which rounds differently: the last digits may differ"
            )


@contextlib.contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """A context in which the calling thread computes with `count` intra-op threads; None leaves them unchanged."""
    before = torch.get_num_threads()
    if count in (None, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Mode:
    """Torch's process-wide switch for deterministic kernels, shared by training threads."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, (0, False)
        self._named_workspace = False

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            self._before = torch.get_deterministic_debug_mode(), _TORCH.fill_uninitialized_memory
            if self._before[0] == 0:  # else the caller has chosen torch's strictness
                torch.set_deterministic_debug_mode("warn")
                _TORCH.fill_uninitialized_memory = False  # costs a write of each new tensor, for debugging only
                # Torch reads it at the first product on a GPU, and warns for each kind of product if it is unset.
                self._named_workspace = torch.cuda.is_initialized() and _WORKSPACE not in os.environ
                if self._named_workspace:
                    os.environ[_WORKSPACE] = ":4096:8"

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._before[0] == 0:
                mode, _TORCH.fill_uninitialized_memory = self._before
                torch.set_deterministic_debug_mode(mode)
                if self._named_workspace:
                    os.environ.pop(_WORKSPACE, None)


_MODE = _Mode()


def deterministic() -> contextlib.AbstractContextManager[None]:
    """A context in which torch uses deterministic kernels where it has them, and warns where not.

    Otherwise the gradient of an embedding is a sum by atomic additions: compiled, and on a GPU from some 3,000 tokens a
    micro-batch also without the compiler. A step is compiled and run inside it, as the compiler chooses kernels by the
    same switch. Several threads may be inside at a time; when the last one leaves, the switch is restored.
    """
    return _MODE
