"""The life cycle of a worker whose peers may come and go: one process in one slot; see `Participant.live`.

The common part is here. Training, exchange and state differ: rounds with everyone or with neighbours
(`gossamer.run.elastic.elastic_rounds`), asynchronous gossip (`gossamer.run.asynchronous.gossip_process`), and meetings in
pairs (`gossamer.run.asynchronous.pair_process`).

Changes of membership are logged, one sentence for each event.
"""

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from gossamer.errors import DataError, GossamerError
from gossamer.record import checkpoint
from gossamer.record.folder import RunFolder
from gossamer.record.locks import locked
from gossamer.record.logs.seconds import recorded_s
from gossamer.record.packed import Snapshot, packable_snapshot, unpacked
from gossamer.record.progress import say
from gossamer.rounds.stopwatch import Stopwatch
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.inputs import must_have_inputs, note_inputs
from gossamer.run.bookkeeping.journal import Journal, saved_when_unreadable
from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import prepare, use_recorded_threads
from gossamer.run.participant.rendezvous import RendezvousResult, StartFacts, addresses_in, join_run, started
from gossamer.run.participant.state_transfer import fetch_state
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import Task
from gossamer.stop_signals import Asked, leaving
from gossamer.transport.elastic.common import CommonHashes
from gossamer.transport.elastic.members import MemberStatus, SlotEntry, SlotTakenError
from gossamer.transport.elastic.newcomer import Handover, Offer, most_bytes_of_state
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.processes.launch import device_of
from gossamer.transport.sockets.channel import Channel

log = logging.getLogger("gossamer")


def changes(
    before: Mapping[int, SlotEntry],
    after: Mapping[int, SlotEntry],
    me: int,
    rounds: int,
    why: Callable[[int], str],
    done: Collection[int] = (),
) -> Iterator[str]:
    """The sentences about the changes in one worker's view.

    Args:
        before: its previous view; `after` is its current view.
        me: the worker's own slot, which is skipped.
        rounds: of the whole run.
        why: the reason for which a worker is suspected.
        done: the workers that have announced their last step.

    >>> a = SlotEntry(2, 0, 7, MemberStatus.ALIVE, 0, "127.0.0.1:4000")
    >>> [*changes({2: a}, {2: a._replace(status=MemberStatus.SUSPECT)}, 0, 9, lambda slot: "it is silent")]
    ['worker 2 is suspected: it is silent']
    """
    for slot, now in sorted(after.items()):
        was = before.get(slot)
        if slot == me or (was is not None and was.rank == now.rank):
            continue
        other = was is None or was.nonce != now.nonce
        if other and was is not None and was.address:
            yield f"worker {slot} is replaced: another process has taken its slot"
        if now.status == MemberStatus.JOINING:
            yield f"worker {slot} joins, and fetches its state"
        elif now.status == MemberStatus.SUSPECT:
            yield f"worker {slot} is suspected: {why(slot)}"
        elif now.status == MemberStatus.LEFT:
            yield f"worker {slot} has {'finished' if slot in done or now.round + 1 >= rounds else 'left'}"
        elif other or (was is not None and was.status < MemberStatus.ALIVE):
            yield f"worker {slot} has joined, and takes part from round {now.since + 1} on"
        else:
            yield f"worker {slot} is back, and takes part from round {now.since + 1} on"


KEPT = 4
"""Checkpoints that a worker keeps: gossip lets workers run ahead, and the checkpoints of lost workers are unknown."""
_SAVES_S = 60.0
"""How long an immediate end waits for the kept state to be saved."""

Connections = TypeVar("Connections", bound=ElasticTransport)
T = TypeVar("T")


class Participant(ABC, Generic[Connections]):
    """One process in its slot, with this life cycle (`live`):

    1. It starts with its **rendezvous** (`gossamer.run.participant.rendezvous`): a slot, the addresses of the others, and the
       checkpoint to resume from. It builds its replica.
    2. It **connects**. From now on peers reach it, and threads of connections call it.
    3. It **begins**: takes its state from its own checkpoint or from a worker that has one, keeps a copy for newcomers,
       and announces the first round that it takes part in.
    4. It opens its **record**, once the first void round is known.
    5. It trains and exchanges, **phase** by phase. After each one it keeps a copy of its state for newcomers, records
       the phase, validates and saves if due. A separate thread sends the copy to newcomers, so that training never
       stops.
    6. It **leaves** at the end of the run, or after the phase in which a stop signal arrived: it saves, announces it,
       and closes its connections. On the signal, the kept state is saved at once, as the process may be killed before
       the phase is over.

    Args:
        rendezvous: its slot. Its listening socket is closed in the end.
        asked: set to request a stop.
    Cost: besides the model, its gradients and states, a copy of all of these except the gradients.
    """

    transport: Connections
    record: RunFolder
    journal: Journal
    stopwatch: Stopwatch

    def __init__(self, run: ResolvedRun, folder: Path, task: Task, rendezvous: RendezvousResult, asked: Asked) -> None:
        self.run, self.folder, self.slot = run, folder, rendezvous.members.me
        self.rendezvous, self.asked = rendezvous, asked
        self.device = device_of(run.loop.device)
        self.replica = Replica(self.slot, run, task, self.device)
        self.round = 0
        """Its current round of the run."""
        self._phases = self._alone = 0
        """Local phases begun by this process, and those begun alone."""
        self._probe = Probe(run, task, self.device)
        self._known = dict(rendezvous.members.entries)
        self.kept, self._ready = Handover(0, bytes), threading.Event()
        self.hashes = CommonHashes()
        """Hashes of its states, where all workers have the same; else empty."""
        self.saving = threading.Lock()
        """The lock for saving: by this thread, or the one that saves the kept state."""
        self.saved_after = -1
        """Completed rounds in the newest checkpoint of this process."""
        asked.sentence = f"worker {self.slot} is asked to leave after its round"
        asked.left_s = lambda: self.replica.phase_left_s

    # --- the life, in order -------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Trains until the end of the run, or until a stop is requested."""
        failed, unreadable = True, None
        self.transport = self.connect()
        self.transport.stop = self.asked.is_set
        self.transport.redial.addresses = lambda: addresses_in(self.folder, self.run, self.rendezvous.endpoint.run)
        try:
            self.begin()
            with contextlib.ExitStack() as open_:
                self.open_record(open_)
                if self.transport.closing is None:  # with closing, each round waits for a majority anyway
                    self.transport.await_company()
                self.asked.saves = self._save_kept
                while self.has_more and not self.asked.is_set():
                    try:
                        self.replica.read_ahead(self.round)
                    except DataError as error:  # it leaves regularly, as the phase has not begun
                        unreadable = error
                        self.asked.set()
                    else:
                        self.phase()
                self.leave()
                self._tell_if_alone()
            failed = False
            if unreadable is not None:
                raise DataError(saved_when_unreadable(unreadable, self.folder))
        except KeyboardInterrupt:
            # After a requested stop the others need not wait for it, and it may come back.
            failed = not self.asked.is_set()
            raise KeyboardInterrupt(self._ended_amid()) from None
        finally:
            self.asked.saves = None  # the slot may belong to another process now
            self.part(failed=failed)

    @abstractmethod
    def connect(self) -> Connections:
        """Opens its connections. Requests for its state wait for `keep`."""

    @abstractmethod
    def begin(self) -> None:
        """Loads the initial state, keeps a copy, and announces the first round that it takes part in."""

    @abstractmethod
    def open_record(self, open_: contextlib.ExitStack) -> None:
        """Opens the files of this worker, which `open_` closes, and drops void lines."""

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """Whether this worker has another phase to train."""

    @abstractmethod
    def phase(self) -> None:
        """Trains a local phase, exchanges, keeps its state and records the phase."""

    @abstractmethod
    def leave(self) -> None:
        """Completes pending operations, saves, and records the reason for its end."""

    @abstractmethod
    def part(self, *, failed: bool) -> None:
        """Ends its connections. Without a goodbye, the others treat it as a killed process."""

    # --- what they are made of ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def x(self) -> Tensor:
        """Its current parameters `[P]`, for validation."""

    @abstractmethod
    def save(self, finished: int) -> None:
        """Writes its checkpoint after `finished` rounds of the run."""

    def kept_for_checkpoint(self, kept: Handover) -> dict[str, Any]:
        """The kept state in the form of a checkpoint."""
        return unpacked(kept.whole.raw)

    def _save_kept(self) -> None:
        """Saves the state of the last exchange, unless it is saved; runs in a thread, on a stop request."""
        with self.saving:
            kept = self.kept
            if kept.after <= max(0, self.saved_after):
                return
            try:
                state, folder = self.kept_for_checkpoint(kept), self.folder / "checkpoints"
                checkpoint.save(folder, kept.after, self.slot, state, digest=self.rendezvous.lineage, keep=KEPT)
            except (GossamerError, OSError) as error:
                log.warning("worker %d could not save the state of its last exchange: %s", self.slot, error)
            else:
                self.saved_after = kept.after

    def _ended_amid(self) -> str:
        """The message about a worker that ends in the middle of a phase."""
        if (saving := self.asked.saving) is not None:
            saving.join(_SAVES_S)
        if self.saved_after < 0:
            return f"worker {self.slot} has ended amid round {self.round + 1}, before it had a new state to save"
        return (
            f"worker {self.slot} has ended amid round {self.round + 1}; its state after round {self.saved_after} is saved, and "
            "what it has trained since is lost"
        )

    @property
    def joins(self) -> bool:
        """Whether it is joining a running run, and the others do not wait for it yet."""
        return self.rendezvous.members.own.status == MemberStatus.JOINING

    def fetch(
        self,
        accept: Callable[[Offer, Any], T],
        *,
        first: int,
        behind: int,
        before: int | None = None,
    ) -> tuple[Offer, T]:
        """The result of `accept` on another worker's state, see `fetch_state`. Raises: PeerError."""
        return fetch_state(
            self.transport.members,
            self.rendezvous.endpoint,
            first=first,
            behind=behind,
            accept=accept,
            before=before,
            stop=self.asked.is_set,
            most_bytes=most_bytes_of_state(self.replica.layout.numel, self.run.workers),
        )

    def keep(self, after: int, state: Mapping[str, Any]) -> Snapshot:
        """Keeps a state after `after` rounds for newcomers. Cost: a copy; it is packed on request."""
        # One assignment: a thread that is sending the previous copy continues with it.
        self.kept = Handover(after, copy := packable_snapshot(state))
        self._ready.set()
        return copy

    def host(self, channel: Channel) -> None:
        """Gives a newcomer a slot and the kept state. Called by the serving thread, from `connect` on."""
        # Before `begin` there is no state to give: newcomers may ask another worker.
        if self._ready.wait(self.rendezvous.endpoint.timeout_s):
            self.transport.serve(channel, lambda _: self.kept, self.hashes.hash_after)

    def open_folder(
        self,
        open_: contextlib.ExitStack,
        cut: int | None,
        *,
        traced_per_round: int = 1,
        void: Callable[[Mapping[str, Any]], bool] = lambda line: False,
    ) -> None:
        """Opens the records of every worker: metrics, trace, seconds, and the journal that validates and saves.

        Before all other files, as it refuses a folder that holds another run before overwriting any of it.

        Args:
            cut: the first round whose existing lines are void; None where no lines may exist.
            void: a predicate for further void lines.
        """
        before_s = recorded_s(self.folder, self.slot, cut)  # before truncation
        self.record = open_.enter_context(
            RunFolder(
                self.folder,
                self.run.document,
                self.run.record,
                worker=self.slot,
                resume_round=cut,
                void=void,
                traced_per_round=traced_per_round,
            )
        )
        note_inputs(self.run, self.replica.task, self.folder, self.slot)
        self.journal = Journal(
            self.run,
            lambda: self.record,
            lambda: {"loss": self._probe.loss(self.x, self.replica.buffers)},
            self.save,
            kind="validation",
        )
        self.stopwatch = Stopwatch(self.slot, before_s)

    def start_clock(self, *, initial: bool) -> None:
        """Validates initial values if it has them, and starts the stopwatch."""
        if initial:  # not for a newcomer, as others may wait for it
            self.journal.begin(worker=self.slot)
        self.stopwatch.start()

    def count_phase(self, alive: frozenset[int]) -> None:
        """Counts a phase that begins, with the participants in its view."""
        self._phases += 1
        self._alone += alive == {self.slot}

    def _tell_if_alone(self) -> None:
        if self.run.workers > 1 and 2 * self._alone > self._phases:
            log.warning(
                "worker %d trained %d of its %d local phases alone: no other worker was there to exchange with, so its model is "
                "hardly that of a run of %d workers",
                self.slot,
                self._alone,
                self._phases,
                self.run.workers,
            )

    def say_changes(self, *, rounds: int = 1 << 31, done: Collection[int] = ()) -> None:
        """Logs a line for each membership change since the last call. Args: as of `changes`."""
        now = {entry.slot: entry for entry in self.transport.view().entries}
        for sentence in changes(self._known, now, self.slot, rounds, self.transport.why, done):
            say(f"round {self.round + 1}: {sentence}")
        self._known = now

    def whose(self, donor: int) -> str:
        """The source of its initial state, in words."""
        return "its own checkpoint" if donor == self.slot else f"the state of worker {donor}"


def take_part(
    run: ResolvedRun,
    folder: Path,
    kind: type[Participant[Any]],
    start_facts: StartFacts[Any],
    *,
    join: str | None,
    resume: Resume,
) -> None:
    """Runs this process's part in a run: takes a slot and trains, until the end or a stop signal.

    Args:
        kind: the class that trains and exchanges, with its `start_facts`.
        join: the address of any worker of a running run, "auto" for the addresses in `folder`; None to start with all
            others.
        resume: whether a run that starts continues from its checkpoints; "auto" starts it where there are none.
    Raises: ConfigError, DataError, CheckpointError, TrainingError; PeerError when others are missing or no worker can
        be joined; SlotTakenError when another process has taken the slot, except for a joining process, which requests
        another slot.
    """
    with contextlib.ExitStack() as open_:
        task, key = prepare(run)
        if join is None:
            rendezvous = started(run, folder, task, key, start_facts, open_, resume=resume)
            if resume:
                use_recorded_threads(run, folder, rendezvous.members.me)
            # In asynchronous runs, processes without a final checkpoint take one from the others, and end too.
            if run.loop.elastic and rendezvous.after == run.rounds:
                return
        else:
            must_have_inputs(run, task, folder, "resume")  # if it took part in the run before
            rendezvous = join_run(run, folder, key, join)
        with leaving() as asked:
            while True:
                if join is not None:
                    open_.enter_context(rendezvous.endpoint.listener)
                    # A hanging process may hold the lock: the others have reassigned its slot, and it requests another.
                    open_.enter_context(locked(folder, rendezvous.members.me, strict=False))
                try:
                    return kind(run, folder, task, rendezvous, asked).live()
                except SlotTakenError:
                    if join is None or asked.is_set():
                        raise
                open_.close()  # releases the lock for the slot's new owner
                lost, others = rendezvous.members.me, rendezvous.members.with_status(MemberStatus.ALIVE)
                say(f"worker {lost} lost its slot to another process, and asks for a free one")
                rendezvous = join_run(run, folder, key, join, [entry.address for entry in others])
