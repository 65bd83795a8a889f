"""The start of a run of real processes: rendezvous, and agreement on a configuration."""

import atexit
import contextlib
import json
import logging
import math
import os
import resource
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import ConfigError, PeerError, TransportError, first_line
from gossamer.record.jsonl import json_from_peer
from gossamer.transport.alike import difference, read_settings
from gossamer.transport.keys import Keys
from gossamer.transport.processes.backend import connected, hang_up, threads_end
from gossamer.transport.processes.interfaces import GLOO, advised, use_interface_towards
from gossamer.transport.processes.keyed_store import KeyedStore, meeting_store
from gossamer.transport.processes.launchers import numbered_by
from gossamer.transport.processes.member import Member, sizes_of_workers
from gossamer.transport.processes.store import (
    ENTRY_BYTES,
    Entries,
    shared_part,
    store_answers,
)
from gossamer.transport.secret import environment_secret
from gossamer.transport.sockets.addresses import is_loopback

LAST_S = 10.0
"""How long a process whose script has ended hosts the store of others that have not."""
log = logging.getLogger("gossamer")


def join(
    workers: int,
    *,
    parts: int | Sequence[int] = 1,
    backend: str = "auto",
    device: str = "auto",
    threads: int = 0,
    timeout_s: float = 300.0,
    group: bool = True,
    fewer: bool = False,
    keys: Keys | None = None,
    part_is: str = "stage",
) -> Member:
    """Makes this process the worker, or the part of one, that the environment of torchrun (or `run_local`) names.

    With keys, and without a number in the environment, it is the first worker of its key without a process.

    Args:
        workers: the number of workers the run file asks for.
        parts: processes of a worker, or those of each.
        backend: "gloo", "nccl", or "auto": NCCL on GPUs, gloo otherwise. With gloo and a GPU, messages pass through the host.
        device: "cpu", "cuda" (the GPU of this process's LOCAL_RANK), or "auto": a GPU if there is one.
        threads: as `intra_op_threads` takes them.
        timeout_s: how long to wait for the others.
        part_is: the word for a process of a multi-process worker.
        group: whether to make a process group; without one the workers only rendezvous at the store.
        fewer: whether some workers may be absent.
        keys: those of the run, which protect the store between machines.
    Raises: ConfigError when the environment does not fit, PeerError when workers are missing, TransportError when the
        store cannot be reached.
    """
    if fewer:
        workers = min(workers, _number("WORLD_SIZE"))
    sizes = sizes_of_workers(workers, parts)
    rank, ranks = None if keys is not None and not os.environ.get("RANK") else _rank(sizes), sum(sizes)
    where = device_of(device)
    backend = _backend(backend, where, ranks)
    torch.set_num_threads(intra_op_threads(threads, _number("LOCAL_WORLD_SIZE", default=ranks)))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    known = _STORES.get((os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), rank))
    store, behind = _store(rank, timeout_s, keys) if known is None else (known, None)
    with contextlib.ExitStack() as undo:
        if behind is not None:
            undo.callback(behind.close)
        if keys is not None and behind is not None:
            mine = [rank] if rank is not None else [r for r in sorted(keys.numbers(keys.certificate)) if r < ranks]
            rank = _claimed(Entries(store, environment_secret(), timeout_s), mine, undo)
            os.environ["RANK"] = str(rank)
        assert rank is not None
        member = Member.at(rank, workers, where, store, sizes, environment_secret())
        member = member._replace(part_is=part_is, timeout_s=timeout_s, behind=behind)
        _assemble(member, backend if group else "elastic" if fewer else "sockets", timeout_s)
        undo.pop_all()
    if not group:
        return member
    use_interface_towards(os.environ["MASTER_ADDR"])
    raise_descriptor_limit()
    # Otherwise torch ends the process on an NCCL error or timeout, before we can report which worker failed.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    try:
        connected(member.store, timeout_s, lambda: _make_group(member, backend, timeout_s))
    except RuntimeError as error:
        raise TransportError(
            f"worker {member.worker} could not connect to the other {ranks - 1} over {backend} ({first_line(error)}); "
            f"check that the machines reach each other, here over {os.environ.get(GLOO, 'any interface')}, or choose another "
            "interface by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        ) from error
    atexit.register(leave)
    return member


def launched(timeout_s: float, *, outlives: bool = True) -> Member | None:
    """This process among those started by a launcher such as torchrun; None for a single process.

    It only reaches the store of the processes. No process group is made and no torch setting is changed, so that the
    script may still do either. The store stays open as long as the process. Where rank 0 hosts it, its process ends
    when all others have, or some seconds after its script: others may still use the store, as a process group that is
    made later does.

    Args:
        timeout_s: how long to wait for the store.
        outlives: whether rank 0 hosts the store beyond its script.
    Raises: ConfigError when the environment counts several processes without saying how to reach them, as that of mpirun
        and srun does; TransportError when the store cannot be reached.
    """
    if not os.environ.get("WORLD_SIZE") and (counted := numbered_by(os.environ)) is not None:
        names, size = counted
        raise ConfigError(
            f"{names.world_size} is {os.environ[names.world_size]} and WORLD_SIZE is not set, so each of the {size} processes of "
            "mpirun, srun or another launcher would train alone; set MASTER_ADDR and MASTER_PORT and call "
            "gossamer.integrations.as_worker() first, start the script with torchrun, or set WORLD_SIZE=1 to train alone"
        )
    world = os.environ.get("WORLD_SIZE") or "1"
    if world.isascii() and world.isdigit() and int(world) < 2:
        return None
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(
            f"WORLD_SIZE is {world} and {', '.join(missing)} is not set, so this process cannot find the other workers; start "
            "the script with torchrun --nproc-per-node N, make a process group before, or unset WORLD_SIZE to train alone"
        )
    rank, n = _number("RANK"), _number("WORLD_SIZE")
    if rank >= n:
        raise ConfigError(f"RANK is {rank}; with WORLD_SIZE {n} it must be between 0 and {n - 1}, as torchrun sets it")
    where = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank
    store = _STORES.get(where) or _store(rank, timeout_s)[0]
    member = Member.at(rank, n, torch.device("cpu"), store, secret=environment_secret())
    if outlives and where not in _STORES and _hosts_store(0):
        atexit.register(_parted, member, min(timeout_s, LAST_S))
    _STORES[where] = store
    return member


_STORES = dict[tuple[str, str, int | None], Store]()
"""The stores that `launched` has reached, by address, port and rank."""


def _make_group(member: Member, backend: str, timeout_s: float) -> None:
    dist.init_process_group(
        backend,
        store=PrefixStore("group", member.store),
        rank=member.rank,
        world_size=member.ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=member.device if backend == "nccl" else None,
    )


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as its hard limit allows.

    gloo keeps every silent foreign connection, and ends the run when it can open no more: with the usual soft
    limit of 1,024, after a thousand of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a system may allow less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _rank(sizes: Sequence[int]) -> int:
    """The rank of this process, from the environment. Raises ConfigError if workers of so many processes do not fit it."""
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if world != sum(sizes):
        each = (
            f" of {max(sizes)} processes each"
            if min(sizes) > 1
            else f" of {[*sizes]} processes"
            if max(sizes) > 1
            else ""
        )
        fits = world % max(sizes) == 0 and len({*sizes}) == 1
        instead = f"add --set workers={world // max(sizes)} on all of them" if fits else "change it"
        raise ConfigError(
            f"WORLD_SIZE (--of) is {world} but the run file has workers = {len(sizes)}{each}; start {sum(sizes)} processes, or "
            f"{instead}"
        )
    if rank >= world:
        raise ConfigError(f"RANK (--rank) is {rank}; with {world} processes it must be between 0 and {world - 1}")
    return rank


def _assemble(member: Member, backend: str, timeout_s: float) -> None:
    """Waits for all processes of the run, and checks that all use the same backend."""
    lack = f"did not come within {timeout_s:g} s, and the run needs {member.workers}; look at their logs, or raise run.timeout_s"
    theirs = _exchanged(member, [f"here/{rank}" for rank in range(member.ranks)], backend, timeout_s, lack)
    if others := [rank for rank, name in enumerate(theirs) if name != backend.encode()]:
        raise ConfigError(
            f"worker {member.worker} uses {backend} and {_workers(others, member)} another backend; set run.backend for all"
        )


def _exchanged(member: Member, names: Sequence[str], text: str, timeout_s: float, lack: str) -> list[bytes]:
    """The entries of all processes, by rank, under these names, once all have written theirs; this one writes `text`.

    Args: `lack` completes the sentence about those that have written none within `timeout_s`.
    Raises: PeerError, TransportError.
    """
    entries = member.entries.within(timeout_s)
    with store_answers():
        entries.set(names[member.rank], text)
    if missing := entries.absent(names, timeout_s):
        raise PeerError(f"{_workers(missing, member)} {lack}")
    with store_answers():
        return [entries.read(name, member.owner(rank)) for rank, name in enumerate(names)]


def agree(
    member: Member, digest: str, facts: Any = None, *, settings: Mapping[str, str] | None = None, timeout_s: float
) -> list[Any]:
    """Checks that all workers run one configuration, and exchanges facts between them.

    Args:
        digest: of everything that all workers must share.
        facts: any JSON value, such as the rounds of which this worker has a checkpoint.
        settings: the inputs of the digest, by `gossamer.transport.alike.short_settings`, to name differences.
    Returns: the facts of all processes in the order of their ranks, which is that of their workers.
    Raises: PeerError naming the workers that differ, or that did not answer within `timeout_s`.
    """
    text = json.dumps([digest, facts, *([] if settings is None else [settings])])
    if len(text) > ENTRY_BYTES:
        raise TransportError(
            f"worker {member.worker} would publish {len(text)} bytes of facts; at most {ENTRY_BYTES} are allowed"
        )
    with store_answers():
        turn = member.entries.within(timeout_s).count(f"agree/{member.rank}/turns")  # earlier facts are not read again
    lack = (
        f"sent no configuration within {timeout_s:g} s, and all {member.workers} must agree on one; look at their logs"
    )
    entries = _exchanged(member, [f"agree/{rank}/{turn}" for rank in range(member.ranks)], text, timeout_s, lack)
    statements = [_statement(member.owner(rank), raw) for rank, raw in enumerate(entries)]
    camps: dict[str, list[int]] = {}
    for rank, (theirs, _, _) in enumerate(statements):
        camps.setdefault(theirs, []).append(rank)
    if len(camps) > 1:
        part(member, min(timeout_s, 10.0))  # so that all can report the difference rather than a lost store
        raise PeerError(_disagreement(camps, [settings for _, _, settings in statements], member))
    return [facts for _, facts, _ in statements]


def part(member: Member, timeout_s: float) -> None:
    """Ends this process's use of the store: at the end of a run, or after the start if no process needs it later.

    Where worker 0 hosts the store, it ends with worker 0's last reference to it. So worker 0 waits here until all
    others have finished reading: the slowest reads a moment after the fastest has continued. One that dies meanwhile
    costs `timeout_s`.
    """
    if late := late_to_part(member, timeout_s):
        log.warning(
            "%s may still need the store of the run, which ends with this process, after %g s; look at their logs",
            _workers(late, member),
            timeout_s,
        )
    if member.behind is not None:
        member.behind.close()


def late_to_part(member: Member, timeout_s: float) -> list[int]:
    """Posts that this process no longer needs the store; one that hosts it waits for the others, and returns the late ones."""
    names, entries = [f"parted/{rank}" for rank in range(1, member.ranks)], member.entries.within(timeout_s)
    if not member.rank:
        return [1 + rank for rank in entries.absent(names, timeout_s)] if _hosts_store(member.rank) else []
    with store_answers():
        entries.set(names[member.rank - 1], "")
    return []


def _parted(member: Member, timeout_s: float) -> None:
    """As `part`, when Python exits: nobody is there to be warned, or to handle a lost store."""
    with contextlib.suppress(TransportError):
        late_to_part(member, timeout_s)


def _disagreement(
    camps: Mapping[str, Sequence[int]], settings: Sequence[Mapping[str, str] | None], member: Member
) -> str:
    """The workers that differ from the majority, and the differing keys as far as known."""
    *odd, last = sorted(camps.items(), key=lambda camp: (len(camp[1]), -camp[1][0]))
    most = last[1]
    theirs, words = settings[most[0]], []
    for _, ranks in odd:
        own = settings[ranks[0]]
        if own is not None and theirs is not None:
            words.append(difference(_workers(ranks, member), own, _workers(most[:1], member), theirs))
    if not any(words):
        words = [f"{_workers(ranks, member)} run configuration {digest!r:.60}" for digest, ranks in [*odd, last]]
    return "; ".join(filter(None, words)) + ": start all workers with the same run file, data and gossamer"


def leave(timeout_s: float = 5.0) -> bool:
    """Ends the process group, even with transfers in flight; also runs when Python exits.

    Returns: whether it ended in time, with every thread that was inside torch. If not (a transfer was cut mid-way, a
        GPU waits for a lost peer), end the process by `os._exit`: a thread that returned now would abort it.
    """
    if not dist.is_initialized():
        return threads_end()  # threads of store calls
    silent = hang_up()
    # It waits for transfers in flight, forever if a peer is gone; in a thread it can be abandoned.
    end = threading.Thread(target=dist.destroy_process_group, daemon=True)
    try:
        end.start()
    except RuntimeError:  # some versions of Python start none while they exit
        if silent:  # all connections are closed, so that it does not wait
            dist.destroy_process_group()
        return silent
    end.join(timeout_s)
    return silent and not end.is_alive()


def _claimed(entries: Entries, ranks: Sequence[int], undo: contextlib.ExitStack) -> int:
    """The first of these ranks not taken by another process; released when `undo` is closed. Raises: PeerError."""
    token = secrets.token_hex(8)
    with store_answers():
        for rank in ranks:
            if entries.first(f"place/{rank}", token) == token.encode():
                undo.callback(_forgotten, entries, f"place/{rank}")
                return rank
    raise PeerError(
        f"worker {', '.join(map(str, ranks))}, which this machine's key may be, is in the run already, or has been before it was "
        "killed; end that one, or start the run on all machines again"
    )


def _forgotten(entries: Entries, name: str) -> None:
    with contextlib.suppress(RuntimeError):  # the store and the entry are gone
        entries.remove(name)


def _store(rank: int | None, timeout_s: float, keys: Keys | None = None) -> tuple[Store, KeyedStore | None]:
    """The store that all workers share, hosted by torchrun, the launcher or worker 0; and its carrier.

    Args: `rank` is None for a process that joins with keys.
    """
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT")
    if not host:
        raise ConfigError(_unset("MASTER_ADDR"))
    if port > 65535:  # torch would open another: its last 16 bits
        raise ConfigError(f"MASTER_PORT is '{port}'; it must be a port, at most 65535, and the same on all processes")
    is_theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if keys is not None and is_theirs and host != "localhost" and not is_loopback(host):
        raise ConfigError(
            f"the run has [peers], and the launcher (torchrun) has a store at MASTER_ADDR = '{host}' that cannot encrypt; start "
            "the first machine with --listen HOST:PORT and each other one with --join HOST:PORT, without it"
        )
    hosts, mine = rank is not None and _hosts_store(rank), rank
    if keys is not None and rank is None:
        mine = min(keys.numbers(keys.certificate), default=0)
    needed = None if is_theirs else keys  # our launcher's is on loopback
    try:
        store, behind = meeting_store(host, port, hosts=hosts, me=mine or 0, keys=needed, timeout_s=timeout_s)
    except (RuntimeError, OSError) as error:
        advice, me = advised(host), "this process" if rank is None else f"worker {rank}"
        raise TransportError(
            f"{me} could not {'open' if hosts else 'reach'} the store at {host}:{port} within {timeout_s:g} s "
            f"({first_line(error)}); check that address and that its machine is up{advice and f'; {advice}'}"
        ) from error
    return shared_part(store), behind


def _hosts_store(rank: int) -> bool:
    """Whether the process of this rank hosts the store of the run, in the absence of a launcher."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _statement(worker: int, raw: bytes) -> tuple[str, Any, dict[str, str] | None]:
    """Digest, facts and settings that a worker published in `agree`. Raises PeerError for anything else."""
    match json_from_peer(raw):
        case [str(digest), facts]:
            return digest, facts, None
        case [str(digest), facts, settings]:
            return digest, facts, read_settings(settings)
    raise PeerError(
        f"worker {worker} published {len(raw)} bytes that are no configuration; install the same gossamer version everywhere"
    )


def device_of(device: str, turn: int | None = None) -> torch.device:
    """The device of a process: GPU number `turn`, or by default LOCAL_RANK (0 if unset), or the CPU.

    Raises: ConfigError for an unusable one.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"run.device is '{device}'; allowed: auto, cpu, cuda")
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise ConfigError("run.device = 'cuda' but torch sees 0 GPUs; install a CUDA build and a driver, or use 'cpu'")
    return torch.device("cuda", (_number("LOCAL_RANK", default=0) if turn is None else turn) % gpus)


def one_device(device: str) -> torch.device:
    """The device of a single process that computes for all workers. Raises ConfigError for an unusable one."""
    return device_of(device, 0)


def _backend(backend: str, device: torch.device, ranks: int) -> str:
    if backend not in ("auto", "gloo", "nccl"):
        raise ConfigError(f"run.backend is '{backend}'; allowed: auto, gloo, nccl")
    one_each = device.type == "cuda" and _number("LOCAL_WORLD_SIZE", default=ranks) <= torch.cuda.device_count()
    if backend == "nccl" and not (one_each and dist.is_nccl_available()):
        raise ConfigError(
            f"run.backend is 'nccl', which needs a GPU for each worker and got device '{device}'; use 'gloo'"
        )
    if backend == "auto":
        return "nccl" if one_each and dist.is_nccl_available() else "gloo"
    return backend


def _number(name: str, default: int | None = None) -> int:
    """A whole number from the environment."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if not text:
        raise ConfigError(_unset(name))
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name} is '{text}'; it must be a whole number, as torchrun sets it")
    return int(text)


def _unset(name: str) -> str:
    return (
        f"{name} is not set, so this process does not know which worker it is; give --rank I --of N --address HOST to each of N "
        "processes, or --local N to have all of them on this machine"
    )


def intra_op_threads(threads: int, processes: int) -> int:
    """The intra-op threads of each of the processes on this machine: the same for those of a real run and their simulation.

    Args: `threads` is `run.threads`; 0 takes OMP_NUM_THREADS, or where that is not set an equal share of the cores.
    Raises: ConfigError where OMP_NUM_THREADS is not a valid number.
    """
    if threads:
        return threads
    text = os.environ.get("OMP_NUM_THREADS", "")
    if not text.strip():
        return max(1, available_cores() // processes)
    outer = text.partition(",")[0].strip()  # OpenMP accepts a list: further values are for nested loops
    if not outer.isascii() or not outer.isdigit() or len(outer) > 4 or not 1 <= int(outer) <= 1024:
        raise ConfigError(
            f"OMP_NUM_THREADS is '{text:.40}'; it must be a whole number of threads from 1 to 1024, or unset it to share the "
            "cores equally"
        )
    return int(outer)


def available_cores() -> int:
    """Number of cores that this process may keep busy: those that it may run on, or the quota of its container if that is less.

    Fractions are rounded down: with more threads than quota all of them are throttled for the rest of each period.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(
        1,
        min([cores, *(math.floor(quota) for quota in _cpu_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))]),
    )


def _cpu_quotas(groups: Path, mounted: Path) -> Iterator[float]:
    """The CPU quotas, in cores, of this process's control groups, in versions 1 and 2 of Linux.

    Args: `groups` lists the groups, whose files are below `mounted`.
    """
    for line in _text(groups).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and "cpu" not in names.split(","):
            continue
        # Enclosing groups have quotas too. Inside a container the root folder is the container's group, while the path
        # may be the host's.
        innermost = Path(path.lstrip("/"))
        for group in [innermost, *innermost.parents]:
            if not names:
                words = _text(mounted / group / "cpu.max").split()
            else:
                files = [mounted / names / group / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
                words = " ".join(map(_text, files)).split()
            with contextlib.suppress(ValueError):  # "max" where there is no limit
                quota, period = map(int, words)
                if quota > 0 and period > 0:  # -1 where there is none
                    yield quota / period


def _text(path: Path) -> str:
    """The content of a system file; empty if missing."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _workers(ranks: Sequence[int], member: Member) -> str:
    """The workers of these processes, in words."""
    names = sorted({member.owner(rank) for rank in ranks})
    return f"worker{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"
