"""The worker that a process belongs to: a worker is one process, or the processes of a mesh that hold one model together."""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import ConfigError, PeerError, first_line
from gossamer.library.dtensors import processes_of
from gossamer.transport.keys import Keys
from gossamer.transport.processes.interfaces import GLOO, address_towards
from gossamer.transport.processes.keyed_store import KeyedStore, meeting_store
from gossamer.transport.processes.launch import agree, launched
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import Entries, store_answers
from gossamer.transport.secret import environment_secret, warn_of_plain
from gossamer.transport.sockets.addresses import is_loopback, own_address, split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KEYS = "peers='peers.toml' (gossamer keys)"
"""What encrypts the connections of sites."""


class Lane(NamedTuple):
    """The processes of all workers that hold the same shard, and the processes of this worker.

    Process s of worker i exchanges messages with process s of worker j only, so that each pair of workers has as many lanes as a
    worker has processes, and no process ever sees a whole model.
    """

    across: tuple[int, ...] = (0,)
    """The processes that hold this shard, as ranks of the default group, in the order of their workers."""
    within: tuple[int, ...] = (0,)
    """The processes of this worker, in the order of its mesh."""
    worker: int = 0
    shard: int = 0
    start: str = ""
    """Identifies this start on all its processes."""
    sites: int = 0
    """Number of worlds that train together, each of which is one worker."""
    joint: Store | None = None
    """The store of the workers, where they have no process group in common."""
    address: str = ""
    """The address at which the others reach this process, where they have no common process group; empty lets gloo choose."""
    keys: Keys | None = None
    """Keys of the sites, where their connections are encrypted."""
    behind: KeyedStore | None = None
    """The store of these worlds, where keys authenticate the connections to it."""

    @property
    def n(self) -> int:
        """Number of workers."""
        return self.sites or len(self.across)

    @property
    def store(self) -> Store:
        """The common store of this lane's processes."""
        return outer_store(self.across) if self.joint is None else PrefixStore(f"lane/{self.shard}", self.joint)

    @property
    def shards(self) -> int:
        """Number of processes of a worker."""
        return len(self.within)


def outer_store(ranks: Sequence[int]) -> "PrefixStore":
    """The part of the default store for these processes. Equal groups share one; other groups never read what they write."""
    place = hashlib.sha256(repr([*ranks]).encode()).hexdigest()[:16]
    return PrefixStore(f"outer/{place}", dist.distributed_c10d._get_default_store())  # it has no public name


def lane_in(ranks: Sequence[int], mesh: "DeviceMesh | None", timeout_s: float) -> Lane:
    """The lane of this process among those of a group, in which each process gives the mesh of its worker.

    Args: `ranks` are those of the group, ascending; `mesh` is None for a worker that is this process alone.
    Raises: PeerError when the meshes are not as many equal parts of the group, or processes do not come; ConfigError for a mesh
        that is not inside the group.
    """
    if not dist.is_initialized():
        return lane_of_launcher(timeout_s)
    rank = dist.get_rank()
    worker_processes = [rank] if mesh is None else processes_of(mesh)
    if not {*ranks}.issuperset(worker_processes):
        raise ConfigError(
            f"the worker of this process is on the processes {worker_processes}, and the process group has {[*ranks]} only; "
            "give Outer a process_group of all processes of all workers"
        )
    place = ranks.index(rank), len(ranks)
    member = Member.at(*place, torch.device("cpu"), outer_store(ranks), secret=environment_secret())
    here = [worker_processes, mesh and [*mesh.shape], secrets.token_hex(8)]
    statements = agree(member, "gossamer.Outer, places", here, timeout_s=timeout_s)
    workers, shard = _workers_of(statements, ranks), worker_processes.index(rank)
    across = tuple(processes[shard] for processes in workers)
    return Lane(across, tuple(worker_processes), workers.index(worker_processes), shard, statements[0][2])


def _workers_of(statements: Sequence[Any], ranks: Sequence[int]) -> list[list[int]]:
    """The processes of each worker, by what each process says of its worker. Raises: PeerError unless they are equal parts."""
    workers = list[list[int]]()
    for one in statements:
        match one:
            case [[*processes], _, str()] if all(type(p) is int for p in processes):
                if processes not in workers:
                    workers.append(processes)
            case _:
                raise PeerError(
                    f"a process says {one!r:.60} of where it is; install the same gossamer version everywhere"
                )
    shapes = [shape for _, shape, _ in statements]
    if odd := next((k for k, shape in enumerate(shapes) if shape != shapes[0]), None):
        raise PeerError(
            f"workers are meshes of different shapes: process {ranks[0]} has {_shape(shapes[0])} and process {ranks[odd]} "
            f"{_shape(shapes[odd])}; give all workers the same number of processes, sharded alike"
        )
    if sorted(p for processes in workers for p in processes) != [*ranks]:
        raise PeerError(
            f"the processes {[*ranks]} are not parts of as many whole workers: these have {workers}; shard each model over the "
            "processes of its own worker, or give Outer(mesh=...)"
        )
    return sorted(workers, key=min)


def lane_of_launcher(timeout_s: float) -> Lane:
    """The lane of a process without a process group: one of those that a launcher has started, each a worker, or alone.

    No process group is made for it: the script may make one of any backend later, as if there were no Outer.

    Raises: ConfigError and TransportError as `launched` does.
    """
    member = launched(timeout_s)
    if member is None:
        return Lane()
    address = ""  # gloo takes the interface that the user names
    if GLOO not in os.environ:
        with contextlib.suppress(OSError):  # no route: gloo may know better, or reports the fault
            address = address_towards(os.environ["MASTER_ADDR"])
    everyone, store = tuple(range(member.ranks)), PrefixStore("outer", member.store)
    return Lane(everyone, (member.rank,), member.rank, joint=store, address=address)


def warn_between_machines() -> None:
    """Warns once of plain traffic where these workers are on several machines; the first process of each machine does so."""
    here = os.environ.get
    if here("LOCAL_RANK", "0") != "0" or here("LOCAL_WORLD_SIZE", "") == here("WORLD_SIZE", "1"):
        return
    host = _host_of(dist.distributed_c10d._get_default_store()) if dist.is_initialized() else here("MASTER_ADDR", "")
    if host and host != "localhost" and not is_loopback(host):
        warn_of_plain("of gossamer.Outer", f"make each machine a site, with site=(I, N), join='HOST:PORT' and {KEYS}")


def _host_of(store: Store) -> str:
    """The address of the store where processes meet; empty for another store than one that listens, such as a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", "")


def lane_of_site(site: tuple[int, int], mesh: "DeviceMesh | None", timeout_s: float, keys: Keys | None) -> Lane:
    """The lane of this process in its own world, which is one site of several; it is still to join the others.

    Raises: ConfigError for a mesh that leaves processes of the world out; PeerError when its processes disagree.
    """
    (worker, n), start = site, secrets.token_hex(8)
    if not dist.is_initialized():
        return Lane(worker=worker, sites=n, start=start, keys=keys)
    rank, world = dist.get_rank(), [*range(dist.get_world_size())]
    processes = world if mesh is None or mesh.size() < len(world) else processes_of(mesh)
    if sorted(processes) != world:
        raise ConfigError(
            f"the model of site {worker} is on the processes {processes}, and its world has {world}; with site=... a world is "
            "one worker: give Outer(mesh=...) the mesh of all its processes"
        )
    member = Member.at(rank, len(world), torch.device("cpu"), outer_store(world), secret=environment_secret())
    statements = agree(member, "gossamer.Outer, site", [processes, worker, n, start], timeout_s=timeout_s)
    if any(one[:3] != [processes, worker, n] for one in statements):
        sites = sorted({f"{one[1]} of {one[2]}" for one in statements})
        raise PeerError(
            f"the processes of one world are of site {' and '.join(sites)}; give all of a world the same site and mesh"
        )
    return Lane((rank,), tuple(processes), worker, processes.index(rank), statements[0][3], n, keys=keys)


def board(store: Store) -> Store:
    """The part of a store that holds the announcements of the sites."""
    return PrefixStore("gossamer/sites", store)


def opened(lane: Lane, join: str, timeout_s: float) -> tuple[Store, KeyedStore | None]:
    """The store where sites join, hosted by the first process of site 0; with keys also what carries it, to be closed too.

    Raises: OSError or RuntimeError when it cannot be reached, or made; PeerError and ConfigError for keys that do not fit.
    """
    (host, port), first = split(join), lane.worker == lane.shard == 0
    return meeting_store(host, port, hosts=first, me=lane.worker, keys=lane.keys, timeout_s=timeout_s)


def at_board(lane: Lane, join: str, timeout_s: float) -> Lane:
    """The lane of a process that has reached the board of all sites, a store that the first process of site 0 hosts.

    Raises: ConfigError for a secret that is missing, or a key of another site; PeerError when the board cannot be reached, or
        made.
    """
    (host, _), secret = split(join), environment_secret()
    if lane.keys is None and host != "localhost" and not is_loopback(host):
        if not secret:
            raise ConfigError(
                f"sites join at '{join}', which others may reach too, and GOSSAMER_SECRET is not set; set it to the same text of "
                "32 characters or more on all sites (`openssl rand -hex 32` makes one), or give all of them peers=... (gossamer "
                "keys)"
            )
        warn_of_plain("between sites", f"give all sites {KEYS}")
    first = lane.worker == lane.shard == 0
    try:
        address = own_address(host)
        store, behind = opened(lane, join, timeout_s)
        return lane._replace(joint=board(store), address=address, behind=behind)
    except (OSError, RuntimeError) as error:
        if first and isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PeerError(
                f"site 0 cannot listen at '{join}', where another process does, such as another run or a site 0 that has not "
                "ended; end that one, or give all sites another port"
            ) from error
        raise PeerError(
            f"site {lane.worker} could not {'listen' if first else 'reach site 0'} at '{join}' "
            f"({first_line(error)}); start site 0 there, or give all sites the address of its first process"
        ) from error


def claim_site(lane: Lane, join: str, timeout_s: float, *, elastic: bool) -> bool:
    """Claims the number of this site at the board; returns whether no other process has it.

    Raises: PeerError where the board is that of another run.
    """
    assert lane.joint is not None
    entries = Entries(lane.joint, environment_secret(), timeout_s)
    description = f"{lane.sites} sites that {'come and go' if elastic else 'all stay'}"
    with store_answers():
        published = entries.first("run", description)
    if published is None:
        raise PeerError(
            f"what is said at '{join}' does not carry the code of this run's secret; give all sites the same GOSSAMER_SECRET, "
            "and each run its own address"
        )
    if published != description.encode():
        raise PeerError(
            f"site {lane.worker} of {lane.sites} is at '{join}', where another run is, of "
            f"{published.decode(errors='replace'):.60}, and not one of {description}; give each run an address of its "
            "own, and all its sites the same number of sites and the same elastic=..."
        )
    with store_answers():
        return entries.first(f"site/{lane.worker}", lane.start) == lane.start.encode()


def taken(lane: Lane, join: str, why: str = "") -> PeerError:
    """The error of a site whose number is already taken."""
    return PeerError(
        f"site {lane.worker} of {lane.sites} is at '{join}' already, or has been before it failed{why and f' ({why})'}; give "
        "each site its own number, and start all of them again after one has failed"
    )


def join_sites(lane: Lane, join: str, timeout_s: float) -> Lane:
    """The lane of a site in a run with a fixed number of sites.

    Raises: as `at_board`; PeerError when the others do not come, when a site is there already, or has another number of
        processes.
    """
    lane = at_board(lane, join, timeout_s)
    try:
        if lane.shard == 0:
            if not claim_site(lane, join, timeout_s, elastic=False):
                raise taken(lane, join)
            must_have_equal_shards(lane, timeout_s)
    except BaseException:
        if lane.behind is not None:
            lane.behind.close()
        raise
    return lane


def must_have_equal_shards(lane: Lane, timeout_s: float) -> None:
    """Raises PeerError when sites differ in their number of processes, or do not come; for the first process of each."""
    assert lane.joint is not None
    store = PrefixStore("sites", lane.joint)
    member = Member.at(lane.worker, lane.sites, torch.device("cpu"), store, secret=environment_secret())
    statements = agree(member, f"{lane.sites} sites", lane.shards, timeout_s=timeout_s)
    if odd := next((k for k, shards in enumerate(statements) if shards != statements[0]), 0):
        raise PeerError(unequal_shards(0, statements[0], odd, statements[odd]))


def unequal_shards(site: int, shards: object, other: int, others: object) -> str:
    """The sentence for two sites with different numbers of processes."""
    return (
        f"site {site} has {shards} processes and site {other} {others}; give all sites the same number of processes, sharded "
        "alike"
    )


def _shape(shape: object) -> str:
    return "one process" if shape is None else f"a mesh of {shape}"
