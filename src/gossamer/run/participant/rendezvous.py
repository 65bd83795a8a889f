"""How a process of an elastic or asynchronous run gets its slot and finds the others: by a common start, or by joining.

Processes that start together exchange lists of their checkpoints, and each derives the round to resume from the same
facts. The facts depend on the kind of run: `gossamer.run.elastic.train_elastic` for one in rounds,
`gossamer.run.asynchronous.async_state` for an asynchronous one.
"""

import logging
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from gossamer.errors import ConfigError, GossamerError, LostConnectionError, PeerError, first_line
from gossamer.record.addresses import Address, read_addresses, write_address
from gossamer.record.fault import Fault
from gossamer.record.lineage import Lineage
from gossamer.record.locks import locked
from gossamer.record.progress import say
from gossamer.run.bookkeeping.resume import History, Resume, lineage_of, resumed
from gossamer.run.bookkeeping.which_round import (
    Agreement,
    Held,
    KeptRounds,
    begin_or_resume,
    decode_faults,
    decode_kept,
    encode_kept,
    newest_of_own,
)
from gossamer.run.config.resolved import RunSettings
from gossamer.run.participant.agreement import compare_first_batches, limits_of, run_settings
from gossamer.run.worker.stages.checkpoints import Store
from gossamer.run.worker.task import Task
from gossamer.transport.elastic.members import (
    Members,
    MemberStatus,
    SlotEntry,
    is_process,
)
from gossamer.transport.elastic.newcomer import Applicant, ask
from gossamer.transport.keys import Keys, keys_for
from gossamer.transport.processes.interfaces import address_towards, announced_address
from gossamer.transport.processes.launch import agree, join, part
from gossamer.transport.processes.member import Member
from gossamer.transport.secret import folder_secret
from gossamer.transport.sockets.addresses import is_loopback, listen, shown, split
from gossamer.transport.sockets.connection import Endpoint

log = logging.getLogger("gossamer")

Fact = TypeVar("Fact")
LISTEN = "GOSSAMER_LISTEN"
"""The environment variable with the address at which a worker listens for others; set by `--listen`."""
_REACH_S, _AGAIN_S = 10.0, 0.5
"""The timeout for one worker's answer, and the pause before all are asked again."""
_MOST_HUNG_UP = 5
NONCE_BITS = 61
"""Bits of the random number that identifies this process."""


class RendezvousResult(NamedTuple):
    """The slot of this process, and its point of resumption."""

    members: Members
    endpoint: Endpoint
    lineage: Lineage
    """The lineage of the run's checkpoints."""
    after: int
    """Completed rounds of the checkpoint it resumes from; 0 without one, as at the start of a run."""
    donor: int
    """The owner of that checkpoint: its own slot, or the slot asked first for its state."""
    goes_on: bool
    """Whether files of this slot may exist already."""
    content: object = None
    """The content of its own checkpoint as read by `StartFacts.own`, to read it only once; None without one."""


class Own(NamedTuple):
    """This process's checkpoints of a resumed run."""

    kept: KeptRounds
    more: object = None
    """Further facts for the others, as JSON."""
    content: object = None
    """The content read."""


class Progress(NamedTuple):
    """The progress of a slot at the start of a run."""

    since: int
    """The first round in which it takes part."""
    round: int
    steps: int
    """Inner steps after which the slot continues, regardless of its own checkpoint."""


class StartFacts(ABC, Generic[Fact]):
    """The facts that each process of one kind of run contributes to its start, and the common decisions from them.

    Each process decides independently, so every answer must depend only on the shared facts, in slot order.
    """

    word: ClassVar[str]
    """The kind of run, part of the common key: processes of another kind are refused."""
    one_round: ClassVar[bool]
    """Whether all resume from the same round, and read it before they agree on it; else each resumes from its own newest."""

    @abstractmethod
    def own(self, slot: int, past: History) -> Own:
        """This process's checkpoints."""

    @abstractmethod
    def read(self, more: object) -> Fact | None:
        """Another process's `Own.more`, null at the start of the run; None for invalid JSON."""

    @abstractmethod
    def pick(self, held: Mapping[int, Held]) -> int:
        """The round to resume from, among those that each slot has; 0 for none."""

    @abstractmethod
    def progress(self, slot: int, facts: Sequence[Fact], held: Mapping[int, Held], after: int) -> Progress:
        """The progress of a slot, also of an empty one, for which there are no facts."""


def started(
    run: RunSettings,
    folder: Path,
    task: Task,
    key: int,
    start_facts: StartFacts[Fact],
    open_: ExitStack,
    *,
    resume: Resume,
) -> RendezvousResult:
    """Waits for all processes of a run that starts, as torchrun's environment variables or our launcher name them.

    They may be fewer than the run has slots; the others are empty until a process joins.

    Args: `open_` holds the lock of its slot in the run folder, and its listening socket, until it is closed.
    Raises: ConfigError, CheckpointError; PeerError when workers are missing or run another configuration.
    """
    wait_s, store, keys = run.loop.timeout_s, Store(run, folder), keys_for(run.peers, run.workers)
    member = _at_the_store(run, keys, open_)
    me, agreed = member.worker, partial(agree, member, f"{key:016x} {start_facts.word}", timeout_s=wait_s)
    open_.enter_context(locked(folder, me))  # before it reads valid lines of the folder, and truncates the rest
    past = resumed(run, folder, resume)
    # Listens before publishing its address, as readers may connect at once.
    listener, address = listening_towards(os.environ["MASTER_ADDR"])
    open_.enter_context(listener)
    own = Own(KeptRounds({})) if past is None else start_facts.own(me, past)
    mine = [address, secrets.randbits(NONCE_BITS), encode_kept(own.kept), own.more]
    stated = agreed(mine, settings=run_settings(run, task))
    known = [fact_of(slot, value, start_facts) for slot, value in enumerate(stated)]
    try:
        compare_first_batches(member, task, wait_s)
        kept, one_round = {slot: one.kept for slot, one in enumerate(known)}, start_facts.one_round
        # Else each has read its own, and reported their faults.
        read = _faults_of_all(agreed, store, past, own, me) if one_round and past is not None else lambda round: {}
        start = begin_or_resume(store, task, past, Agreement(kept, read, start_facts.pick, one_round and me == 0))
        newest = start.round if one_round else _own_round(own, start.choice.kept[me], start.round)
        lineage = start.go_on([me], back_to=newest)
    finally:  # also on refusal, so that each reports the reason rather than a lost store
        part(member, wait_s)
    warn_of_loopback(address, [one.address for one in known])
    held = {slot: one.whole for slot, one in start.choice.kept.items()}
    donor = _donor(run, start_facts, held, me, start.round, newest)
    announce(folder, Address(me, address, key))
    endpoint = Endpoint(listener, key, member.secret, wait_s, run.loop.round_deadline_s, keys)
    members = Members(limits_of(run), me, _entries(run, start_facts, known, held, start.round))
    content = own.content if donor == me and start.round else None
    return RendezvousResult(members, endpoint, lineage, start.round, donor, past is not None, content)


def _at_the_store(run: RunSettings, keys: Keys | None, open_: ExitStack) -> Member:
    """This process among all that start, once it has reached the store where they meet."""
    member = join(
        run.workers,
        backend="gloo",
        device=run.loop.device,
        threads=run.loop.threads,
        timeout_s=run.loop.timeout_s,
        group=False,
        fewer=True,
        keys=keys,
    )
    if member.behind is not None:
        open_.callback(member.behind.close)
    return member


def _faults_of_all(
    agreed: Callable[[object], list[Any]], store: Store, past: History, own: Own, me: int
) -> Callable[[int], dict[int, Fault | None]]:
    """A function that reads this process's checkpoint of a round, and returns the faults that all have in theirs."""

    def read(round: int) -> dict[int, Fault | None]:
        fault = store.fault(round, me, past.lineage) if round in own.kept.whole else None
        return dict(enumerate(decode_faults(agreed(fault and fault.encoded))))

    return read


def _donor(
    run: RunSettings, start_facts: StartFacts[Any], held: Mapping[int, Held], me: int, after: int, newest: int
) -> int:
    """Whose state this process begins with, where the run resumes after a round and its own newest one is `newest`."""
    # If each resumes from its own round, one too far behind takes the newest state, like a newcomer.
    has_own = after in held[me] if start_facts.one_round else newest >= max(0, after - run.loop.rejoin_rounds)
    return me if has_own or after == 0 else next(slot for slot in held if after in held[slot])


def _own_round(own: Own, kept: KeptRounds, after: int) -> int:
    """This process's newest round, when the run resumes after another one; 0 if it left in the first, -1 for none."""
    return max(kept.whole, default=-1 if own.content is None or not after else 0)


def _entries(
    run: RunSettings,
    start_facts: StartFacts[Fact],
    known: Sequence["Stated[Fact]"],
    held: Mapping[int, Held],
    after: int,
) -> Iterator[SlotEntry]:
    """The entry of each slot where the run starts after a round; those without a process come last."""
    facts = [one.fact for one in known]
    for slot in range(run.workers):
        since, round, steps = start_facts.progress(slot, facts, held, after)
        entry = SlotEntry(slot, 0, 0, MemberStatus.LEFT, since, "", round, steps)
        if slot < len(known):
            entry = entry._replace(nonce=known[slot].nonce, status=MemberStatus.ALIVE, address=known[slot].address)
        yield entry


def join_run(run: RunSettings, folder: Path, key: int, where: str, others: Sequence[str] = ()) -> RendezvousResult:
    """Gets a slot of a running run. The state is fetched later, when this process is ready to train.

    Args:
        where: the address of any worker, or "auto" for those in the run folder.
        others: addresses to try after it.
    Raises: PeerError without an answer within `run.timeout_s`, or at once when all that answer refuse or are full.
    """
    keys, wait_s, lineage = keys_for(run.peers, run.workers), run.loop.timeout_s, lineage_of(run, folder)
    secret = folder_secret(folder) if keys is None else b""
    # A new nonce for each request: with the old one, a process presumed dead would be mistaken for its former self.
    nonce, deadline, tries = secrets.randbits(NONCE_BITS), time.monotonic() + wait_s, _Tries(wait_s)
    while True:
        addresses = _addresses(folder, where, others)
        for address in addresses:
            if address in tries.final:
                continue
            try:
                listener, listens_at = listening_towards(split(address)[0])
            except (OSError, ValueError) as error:
                tries.failed(address, error)
                continue
            with ExitStack() as undo:
                undo.enter_context(listener)
                try:
                    left_s = max(_REACH_S, deadline - time.monotonic())
                    offer = ask(
                        address,
                        secret,
                        Applicant(nonce, listens_at),
                        run=key,
                        limits=limits_of(run),
                        timeout_s=left_s,
                        reach_s=min(left_s, _REACH_S),
                        state=False,
                        keys=keys,
                    )
                except (OSError, GossamerError) as error:
                    tries.failed(address, error)
                    continue
                # An asynchronous one reads its own when it begins.
                after = 0 if run.event_driven else newest_of_own(Store(run, folder), offer.slot, lineage).round
                endpoint = Endpoint(listener, key, secret, wait_s, run.loop.round_deadline_s, keys)
                announce(folder, Address(offer.slot, listens_at, key))
                members = Members(limits_of(run), offer.slot, offer.entries)
                undo.pop_all()
                return RendezvousResult(members, endpoint, lineage, after, offer.slot, goes_on=True)
        if (addresses and tries.final.issuperset(addresses)) or time.monotonic() + _AGAIN_S >= deadline:
            raise _nobody(folder, wait_s, tries, addresses)
        tries.wait(folder, addresses)


class _Tries:
    """The attempts at requesting a slot from the workers of a run."""

    def __init__(self, wait_s: float) -> None:
        self.why = ""
        """The result of the last attempt."""
        self.final = set[str]()
        """Addresses whose refusal is permanent."""
        self._wait_s, self._hung_up, self._told = wait_s, Counter[str](), False

    def failed(self, address: str, error: Exception) -> None:
        """Records why an address gave no slot."""
        self.why = f"{address}: {first_line(error)}"
        if isinstance(error, LostConnectionError):
            # A silent hang-up means another secret, or that the worker was starting or ending.
            self._hung_up[address] += 1
            if self._hung_up[address] == _MOST_HUNG_UP:
                self.final.add(address)
        elif isinstance(error, GossamerError | ValueError):
            self.final.add(address)

    def wait(self, folder: Path, addresses: Sequence[str]) -> None:
        """Waits a moment, and reports once that it waits."""
        if not self._told:
            self._told = True
            where = (
                ", ".join(one for one in addresses if one not in self.final) or f"an address of a worker in '{folder}'"
            )
            say(f"waiting for {where}, up to {self._wait_s:g} s{f' ({self.why})' if self.why else ''}")
        time.sleep(_AGAIN_S)


def _addresses(folder: Path, where: str, others: Sequence[str]) -> list[str]:
    """The addresses to ask, including the current ones in the folder."""
    recorded = [one.address for one in read_addresses(folder)] if where == "auto" else [where]
    return [*recorded, *(address for address in others if address not in recorded)]


def _nobody(folder: Path, wait_s: float, tries: _Tries, addresses: Sequence[str]) -> GossamerError:
    """The error to raise when no worker has given a slot."""
    if addresses:
        if tries.final.issuperset(addresses):  # with what is to be done
            return PeerError(f"no worker of the run could be joined ({tries.why})")
        # A machine that has never been in the run has no folder to ask.
        how = f"with gossamer status {quote(str(folder))}" if (folder / "run.toml").exists() else "on its first machine"
        return PeerError(
            f"no worker of the run could be joined within {wait_s:g} s ({tries.why}); look whether it runs, {how}"
        )
    return ConfigError(
        f"'{folder}' held no address of a worker for {wait_s:g} s; give --join HOST:PORT, as a worker of the run prints it"
    )


def announce(folder: Path, address: Address) -> None:
    """Writes the address of this process into the run folder, and logs it, for joining from elsewhere."""
    write_address(folder, address)
    say(f"worker {address.slot} listens on {address.address}: another takes a free slot with --join {address.address}")


def addresses_in(folder: Path, run: RunSettings, key: int) -> list[tuple[int, str]]:
    """The slots of a run and the addresses of their newest processes, from its folder on this machine."""
    return [(one.slot, one.address) for one in read_addresses(folder) if one.run == key and one.slot < run.workers]


class Stated(NamedTuple, Generic[Fact]):
    """A process's facts at the start."""

    address: str
    nonce: int
    kept: KeptRounds
    fact: Fact


def fact_of(slot: int, value: object, start_facts: StartFacts[Fact]) -> Stated[Fact]:
    """The facts that a process published at the start. Raises: PeerError for anything else."""
    match value:
        case [str(address), int(nonce), kept, more]:
            if address and is_process(address, nonce) and (fact := start_facts.read(more)) is not None:
                return Stated(address, nonce, decode_kept(slot, kept), fact)
    raise PeerError(f"worker {slot} published no address ({value!r:.60}); install the same gossamer version everywhere")


def warn_of_loopback(address: str, addresses: Sequence[str]) -> None:
    """Warns where this process listens on loopback, and others do not."""
    if is_loopback(split(address)[0]) and not all(is_loopback(split(one)[0]) for one in addresses):
        log.warning(
            "this worker listens on %s, where processes of other machines cannot reach it, as MASTER_ADDR = '%s' leads to a "
            "loopback address here; give the address of that machine instead of its name",
            address,
            os.environ.get("MASTER_ADDR", ""),
        )


def listening_towards(towards: str) -> tuple[socket.socket, str]:
    """A listening socket on the address of this machine from which `towards` is reached, and its `host:port`.

    At `--listen` if given; several processes of this machine take consecutive ports. One that
    listens on all interfaces is announced at an address of this machine.
    """
    host, port = address_towards(towards), 0
    if given := os.environ.get(LISTEN):
        host, port = split(given)
        port += int(os.environ.get("LOCAL_RANK", "0"))
    listener = listen(host, port)
    try:
        host, port = listener.getsockname()[:2]
        return listener, shown(announced_address(host, towards), port)
    except (ConfigError, OSError):
        listener.close()
        raise
