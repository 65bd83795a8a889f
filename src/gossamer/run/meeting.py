"""How the process of an elastic run finds its slot and the others: all start together, or one joins a run that is under way."""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gossamer.errors import ConfigError, GossamerError, PeerError, first_line
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.files import atomic_write, make_folder, worker_suffix
from gossamer.record.outcomes import Begun
from gossamer.run.config import RunConfig, decisive, digest
from gossamer.transport.alike import short_settings
from gossamer.transport.elastic import Station
from gossamer.transport.launch import agree, join
from gossamer.transport.members import Entry, Members, Standing, news, read_news
from gossamer.transport.newcomer import Place, ask
from gossamer.transport.secret import folder_secret

__all__ = ["Seat", "addresses", "joined", "started"]


class Seat(NamedTuple):
    """The slot of this process, and what it begins with."""

    members: Members
    station: Station
    begun: Begun
    resumes: bool = False
    """Whether files of this slot may be there already."""


def started(config: RunConfig, folder: Path, run: int, nonce: int, *, resume: bool) -> Seat:
    """Waits for all workers of a run that starts, as torchrun's environment variables or our launcher name them.

    Raises: ConfigError, CheckpointError; PeerError when workers do not come or run another configuration.
    """
    wait_s = config.run.timeout_s
    member = join(
        config.workers, backend="gloo", device=config.run.device, threads=config.run.threads, timeout_s=wait_s, group=False
    )  # fmt: skip
    listener, address = _listening(os.environ["MASTER_ADDR"])
    owned = checkpoint.rounds(folder / "checkpoints", member.worker, _line(config)) if resume else []
    settings = short_settings(decisive(config))
    said = agree(member, f"{run:016x} elastic", [address, nonce, owned], settings=settings, timeout_s=wait_s)
    facts = [_fact(slot, fact) for slot, fact in enumerate(said)]
    entries = [Entry(slot, 0, theirs, Standing.ALIVE, 0, where) for slot, (where, theirs, _) in enumerate(facts)]
    after = _most_common([rounds for _, _, rounds in facts])
    if resume and not after and any(rounds for _, _, rounds in facts):
        raise ConfigError(f"'{folder}' has checkpoints and none can be resumed from; start again with another --out")
    me = member.worker
    donor = me if after in (0, *owned) else next(i for i, (_, _, rounds) in enumerate(facts) if after in rounds)
    begun = Begun(after, after, donor, 0, 0)
    station = Station(listener, run, member.secret, wait_s, config.run.round_deadline_s)
    members = Members(config.workers, me, [entry._replace(round=after, since=after) for entry in entries])
    _write_address(folder, me, address)
    return Seat(members, station, begun, resume and after > 0)


def joined(config: RunConfig, folder: Path, run: int, nonce: int, where: str) -> Seat:
    """Gets a slot of a run that is under way. The state comes later, when this process is ready to train.

    Args: `where` is the address of any worker, or "auto" for those in the run folder.
    Raises: PeerError when nobody answers or all slots are filled.
    """
    secret, wait_s = folder_secret(folder), config.run.timeout_s
    found = addresses(folder) if where == "auto" else [where]
    if not found:
        raise ConfigError(
            f"'{folder}' holds no address of a worker; give --join HOST:PORT, as a worker of the run prints it"
        )
    why = ""
    for address in found:
        try:
            listener, own = _listening(address.rpartition(":")[0].strip("[]"))
        except OSError as error:
            why = f"{address}: {error}"
            continue
        try:
            place = Place(nonce, own)
            offer = ask(address, secret, place, run=run, slots=config.workers, timeout_s=wait_s, wants=_nothing)
        except (OSError, GossamerError) as error:
            listener.close()
            why = f"{address}: {first_line(error)}"
            continue
        members, slot = Members(config.workers, offer.slot, offer.entries), offer.slot
        kept = checkpoint.rounds(folder / "checkpoints", slot, _line(config))
        begun = Begun(0, kept[-1] if kept else 0, slot, 0, members.own.incarnation)
        _write_address(folder, slot, own)
        return Seat(members, Station(listener, run, secret, wait_s, config.run.round_deadline_s), begun, True)
    raise PeerError(
        f"no worker of the run could be joined ({why}); look whether it runs, with gossamer status {folder}"
    )


class _Fact(NamedTuple):
    """What a worker says of itself at the start."""

    address: str
    nonce: int
    rounds: list[int]


def _fact(slot: int, value: object) -> _Fact:
    match value:
        case [str(address), int(nonce), [*rounds]] if all(isinstance(r, int) and 0 < r < 1 << 31 for r in rounds):
            if _is_sound(address, nonce):
                return _Fact(address, nonce, [r for r in rounds if isinstance(r, int)])
    raise PeerError(f"worker {slot} published no address ({value!r:.60}); install the same gossamer version everywhere")


def _is_sound(address: str, nonce: int = 0) -> bool:
    """Whether others would read this in the news."""
    return read_news(news({0: Entry(0, 0, nonce, Standing.ALIVE, 0, address)}), slots=1) is not None


def addresses(folder: Path) -> list[str]:
    """The addresses that workers have written into a run folder, those of the newest files first."""
    paths = sorted(folder.glob("address-*.json"), key=lambda path: -path.stat().st_mtime)
    return [text for path in paths if (text := _read_address(path)) is not None]


def _write_address(folder: Path, slot: int, address: str) -> None:
    make_folder(folder)
    content = {"address": address, "pid": os.getpid()}
    atomic_write(folder / f"address{worker_suffix(slot)}.json", json.dumps(content).encode())


def _read_address(path: Path) -> str | None:
    try:
        match json.loads(path.read_bytes()[:1000]):
            case {"address": str(address)} if address and _is_sound(address):
                return address
    except (OSError, ValueError, RecursionError):
        pass
    return None


def _listening(towards: str) -> tuple[socket.socket, str]:
    """A listening socket on the address of this machine from which `towards` is reached, and its `host:port`."""
    family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        here = str(probe.getsockname()[0])
    listener = socket.create_server((here, 0), family=family, backlog=128)
    shown = f"[{here}]" if ":" in here else here
    return listener, f"{shown}:{listener.getsockname()[1]}"


def _nothing(slot: int, after: int) -> bool:
    """Takes a slot without a state."""
    return False


def _line(config: RunConfig) -> Lineage:
    return Lineage(digest(config))


def _most_common(owned: Sequence[Sequence[int]]) -> int:
    """The round that most workers own, the newest of several; 0 where nobody owns any.

    >>> _most_common([[10, 20], [20, 30], [30]]), _most_common([[], []])
    (30, 0)
    """
    counts = {r: sum(r in rounds for rounds in owned) for rounds in owned for r in rounds}
    return max(counts, key=lambda r: (counts[r], r), default=0)
