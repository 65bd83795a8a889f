"""How the process of an elastic run finds its slot and the others: all start together, or one joins a run that is under way."""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from gossamer.errors import ConfigError, GossamerError, PeerError, first_line
from gossamer.record import checkpoint
from gossamer.record.addresses import Address, read_addresses, write_address
from gossamer.record.checkpoint import Lineage
from gossamer.record.logs.outcomes import Begun
from gossamer.record.progress import say
from gossamer.run.bookkeeping.resume import Resume, history, lineage
from gossamer.run.bookkeeping.which_round import (
    Held,
    KeptRounds,
    heard,
    kept_by,
    newest_of_own,
    said,
    to_go_on,
    to_resume,
)
from gossamer.run.config.resolved import RunSettings
from gossamer.run.participant.agreement import limits_of
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.transport.alike import short_settings
from gossamer.transport.elastic.members import (
    Members,
    MemberStatus,
    SlotEntry,
    membership_update,
    read_membership_update,
)
from gossamer.transport.elastic.newcomer import Applicant, ask
from gossamer.transport.processes.interfaces import address_towards
from gossamer.transport.processes.launch import agree, join, part
from gossamer.transport.processes.member import Member
from gossamer.transport.secret import folder_secret
from gossamer.transport.sockets.addresses import is_loopback, listen, shown, split
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import Limits

__all__ = ["Seat", "addresses_in", "announce", "arrived", "is_address", "joined", "started", "warn_of_loopback"]

log = logging.getLogger("gossamer")


class Seat(NamedTuple):
    """The slot of this process, and what it begins with."""

    members: Members
    endpoint: Endpoint
    line: Lineage
    """Whose checkpoints belong to the run."""
    begun: Begun
    resumes: bool = False
    """Whether files of this slot may be there already."""


def started(config: RunSettings, folder: Path, run: int, nonce: int, *, resume: Resume) -> Seat:
    """Waits for all processes of a run that starts, as torchrun's environment variables or our launcher name them.

    They may be fewer than the run has slots; the others are empty until somebody joins.

    Raises: ConfigError, CheckpointError; PeerError when workers do not come or run another configuration.
    """
    wait_s = config.run.timeout_s
    member, listener, address = arrived(config)
    me, past = member.worker, history(config, folder) if resume else None
    store = Store(config, folder)
    own = KeptRounds({}) if past is None else kept_by(store, [me], past.lineage, past.before)[me]
    settings, common = short_settings(config.decisive), f"{run:016x} elastic"
    stated = agree(member, common, [address, nonce, said(own)], settings=settings, timeout_s=wait_s)
    facts = [_fact(slot, fact) for slot, fact in enumerate(stated)]
    kept, line, after = {slot: fact.kept for slot, fact in enumerate(facts)}, Lineage(config.digest), 0

    def read(round: int) -> dict[int, str | None]:
        why = store.fault(round, me, line if past is None else past.lineage) if round in own.whole else None
        whys = agree(member, common, why, timeout_s=wait_s)
        return {slot: None if why is None else f"{why}" for slot, why in enumerate(whys)}

    try:
        if past is not None:
            choice = to_go_on(
                past, store, kept, read, auto=resume == "auto", speaks=me == 0,
                pick=lambda held: to_resume(held, config.run.rejoin_rounds),
            )  # fmt: skip
            after, kept = choice.round, choice.kept
            checkpoint.rewind(store.path, after, me, aside=choice.damaged)
            line = past.go_on(folder, after)
    finally:  # also where all are refused: each shall say why, and not that the store is gone
        part(member, wait_s)
    held = {slot: one.whole for slot, one in kept.items()}
    donor = me if after in (0, *held[me]) else next(slot for slot in held if after in held[slot])
    endpoint = Endpoint(listener, run, member.secret, wait_s, config.run.round_deadline_s)
    warn_of_loopback(address, [fact.address for fact in facts])
    members = Members(
        limits_of(config), me, [_entry(slot, facts, held, after, config) for slot in range(config.workers)]
    )
    announce(folder, Address(me, address, run))
    return Seat(members, endpoint, line, Begun(after, after, donor, 0, 0), past is not None)


def announce(folder: Path, own: Address) -> None:
    """Writes the address of this process into the run folder, and says it: those who join from elsewhere have no such folder."""
    write_address(folder, own)
    say(f"worker {own.slot} listens on {own.address}: another takes a free slot with --join {own.address}")


def arrived(config: RunSettings) -> tuple[Member, socket.socket, str]:
    """This process among those that start together, the socket at which it listens from now on, and its address."""
    run = config.run
    member = join(
        config.workers, backend="gloo", device=run.device, threads=run.threads, timeout_s=run.timeout_s, group=False
    )  # fmt: skip
    return member, *_listening(os.environ["MASTER_ADDR"])


def _entry(
    slot: int, facts: Sequence["_Fact"], held: Mapping[int, Held], after: int, config: RunSettings
) -> SlotEntry:  # fmt: skip
    """What is known of a slot at the start.

    One whose checkpoint is lost goes on behind all inner steps that it can have taken, so that none is trained twice.
    """
    lost = slot >= len(facts) or after not in held[slot]
    steps = after * config.local_steps_of(slot) if lost else 0
    if slot >= len(facts):  # nobody fills it
        return SlotEntry(slot, 0, 0, MemberStatus.LEFT, 0, steps=steps)
    address, nonce, _ = facts[slot]
    return SlotEntry(slot, 0, nonce, MemberStatus.ALIVE, after, address, after, steps)


def addresses_in(folder: Path, config: RunSettings, run: int) -> list[tuple[int, str]]:
    """The slots of a run and the addresses of their newest processes, as its folder on this machine says."""
    return [(one.slot, one.address) for one in read_addresses(folder) if one.run == run and one.slot < config.workers]


def joined(
    config: RunSettings, folder: Path, run: int, nonce: int, where: str, others: Sequence[str] = ()
) -> Seat:  # fmt: skip
    """Gets a slot of a run that is under way. The state comes later, when this process is ready to train.

    Args:
        where: the address of any worker, or "auto" for those in the run folder.
        others: addresses to try after it.
    Raises: PeerError when nobody answers or all slots are filled.
    """
    secret, wait_s, line = folder_secret(folder), config.run.timeout_s, lineage(config, folder)
    found = [one.address for one in read_addresses(folder)] if where == "auto" else [where]
    found += [address for address in others if address not in found]
    if not found:
        raise ConfigError(
            f"'{folder}' holds no address of a worker; give --join HOST:PORT, as a worker of the run prints it"
        )
    why = ""
    for address in found:
        try:
            listener, own = _listening(split(address)[0])
        except (OSError, ValueError) as error:
            why = f"{address}: {error}"
            continue
        try:
            place = Applicant(nonce, own)
            offer = ask(address, secret, place, run=run, limits=limits_of(config), timeout_s=wait_s, state=False)
        except (OSError, GossamerError) as error:
            listener.close()
            why = f"{address}: {first_line(error)}"
            continue
        members, slot = Members(limits_of(config), offer.slot, offer.entries), offer.slot
        own_round = 0 if config.event_driven else newest_of_own(Store(config, folder), slot, line).round
        begun = Begun(0, own_round, slot, 0, members.own.incarnation)
        announce(folder, Address(slot, own, run))
        return Seat(members, Endpoint(listener, run, secret, wait_s, config.run.round_deadline_s), line, begun, True)
    raise PeerError(
        f"no worker of the run could be joined ({why}); look whether it runs, with gossamer status {quote(str(folder))}"
    )


class _Fact(NamedTuple):
    """What a worker says of itself at the start."""

    address: str
    nonce: int
    kept: KeptRounds


def _fact(slot: int, value: object) -> _Fact:
    match value:
        case [str(address), int(nonce), kept] if is_address(address, nonce):
            return _Fact(address, nonce, heard(slot, kept))
    raise PeerError(f"worker {slot} published no address ({value!r:.60}); install the same gossamer version everywhere")


def is_address(address: str, nonce: int) -> bool:
    """Whether another process may have said so of itself."""
    entry = SlotEntry(0, 0, nonce, MemberStatus.ALIVE, 0, address)
    return read_membership_update(membership_update({0: entry}), Limits(1, 0, 0)) is not None


def warn_of_loopback(own: str, addresses: Sequence[str]) -> None:
    """Warns where this process listens for itself alone, and others for all."""
    if is_loopback(split(own)[0]) and not all(is_loopback(split(one)[0]) for one in addresses):
        log.warning(
            "this worker listens on %s, where processes of other machines cannot reach it, as MASTER_ADDR = '%s' leads to a "
            "loopback address here; give the address of that machine instead of its name",
            own, os.environ.get("MASTER_ADDR", ""),
        )  # fmt: skip


def _listening(towards: str) -> tuple[socket.socket, str]:
    """A listening socket on the address of this machine from which `towards` is reached, and its `host:port`."""
    listener = listen(address_towards(towards), 0)
    return listener, shown(*listener.getsockname()[:2])
