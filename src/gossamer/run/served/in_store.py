"""One worker of a run with a server that lies in a store: each has the state of the server, which follows from a log there.

`gossamer.transport.bucket.server_log` says how. The run folder has the files of a server and those of a worker, so each worker's
record can be replayed. Validations are made here too, by every worker, between two events.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from gossamer.clock.saved import as_dicts, rebuilt, within
from gossamer.clock.server_core import CoreState, ServerCore
from gossamer.errors import CheckpointError, TransportError
from gossamer.record.fault import FaultKind
from gossamer.record.locks import locked
from gossamer.record.logs.arrivals import arrivals_file
from gossamer.record.packed import packed, unpacked
from gossamer.record.progress import say
from gossamer.record.whole_files import atomic_write
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.bookkeeping.inputs import note_inputs
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.participant.agreement import use_recorded_threads
from gossamer.run.participant.in_store import bind_folder, open_store
from gossamer.run.served.letters import WorkerLetters
from gossamer.run.served.served_worker import ServedWorker, take_part
from gossamer.run.served.session import Reply, ServerSession, open_session
from gossamer.run.worker.task import Task
from gossamer.stop_signals import Asked, leaving
from gossamer.transport.bucket.bucket import Bucket
from gossamer.transport.bucket.perform import perform, renewing
from gossamer.transport.bucket.protocol import StoreTerms
from gossamer.transport.bucket.requests import Steps, T
from gossamer.transport.bucket.server_log import ServerAttendance, ServerEvent
from gossamer.transport.bucket.slots import SlotLostError
from gossamer.transport.contract import Ticket
from gossamer.transport.processes.launch import device_of
from gossamer.transport.sockets.header import LetterKind
from gossamer.transport.sockets.letter import Letter, body_of

log = logging.getLogger("gossamer")


def train_served_in_store(run: ResolvedRun, folder: Path, url: str) -> None:
    """Starts, joins or continues the run with a server in a store as one of its workers, until its end or until asked to leave.

    Raises: ConfigError, DataError, CheckpointError, PeerError, TrainingError.
    Cost: the state of the rule, in addition to that of a worker; it reads what all others push.
    """
    with locked(folder, run.workers):
        # How long a server expects workers that have not come is part of its decisions.
        bucket, terms, task = open_store(run, folder, url, {"server": True, "timeout_s": run.loop.timeout_s})
        with leaving() as asked, contextlib.ExitStack() as open_:
            asked.at_once = True  # until it trains
            one = _StoreWorker(run, folder, task, bucket, terms, asked)
            open_.callback(one.close)
            with renewing(one.attendance, bucket, one.over.wait):
                one.live()


class _StoreWorker:
    """One process: the server's state (`gossamer.transport.bucket.server_log.ServerWork`), and the worker beside it.

    To the worker it is a connection with the server (`gossamer.run.served.served_worker.ServerLink`).
    """

    def __init__(
        self, run: ResolvedRun, folder: Path, task: Task, bucket: Bucket, terms: StoreTerms, asked: Asked
    ) -> None:
        self._run, self._folder, self._task, self._bucket, self._asked = run, folder, task, bucket, asked
        self.over = threading.Event()
        """Set when all waits shall end."""
        self.attendance = ServerAttendance(terms, self, secrets.token_hex(16), time.monotonic)
        self._probe = Probe(run, task, torch.device("cpu"))
        self._form = WorkerLetters(self._probe, run)
        self._files = contextlib.ExitStack()
        self._opened: ServerSession | None = None
        self._replies, self._letters = deque[Reply](), deque[Letter]()
        self._state_due = False
        # A state has the parameters, the state of the rule, and the pushes that wait.
        self._most_bytes = (128 + 8 * run.workers) * self._probe.x.numel() + (1 << 27)

    def live(self) -> None:
        """Takes part until the end of the run, or until asked to leave."""
        while self._do(self.attendance.take_slot()):
            try:
                self._work()
            except SlotLostError as error:
                say(f"{error}; it takes a slot again, and trains its local phase again")
                self._do(self.attendance.release())
                continue
            break
        if self.core.is_finished:
            self._session.records.close(self._session.records.now_s)
            say(f"the run in the store has ended after {self._run.rounds} rounds")

    def close(self) -> None:
        """Ends all waits, and closes the files."""
        self.over.set()
        self._files.close()

    def _work(self) -> None:
        slot, life = self.attendance.slot, self.attendance.life
        # A hung process may hold the lock after it has lost its slot to this one.
        with locked(self._folder, slot, strict=False):
            use_recorded_threads(self._run, self._folder, slot)
            self._replies.clear()
            self._letters.clear()
            served = ServedWorker(slot, self._run, self._folder, self._task, device_of(self._run.loop.device, slot))
            # Its checkpoints count if no other process has had the slot since.
            last, claim = self._folder / "slot.txt", f"{slot} {self.attendance.lives.get(slot)}"
            owned = served.owned() if last.exists() and last.read_text(errors="replace").strip() == claim else []
            self._do(self.attendance.join(tuple(owned)))
            atomic_write(last, f"{slot} {life}\n".encode())
            say(f"worker {slot} takes part in the run of the store, as number {life + 1} in its slot")
            self._asked.sentence = f"worker {slot} is asked to leave after its local phase"
            self._asked.left_s, self._asked.at_once = lambda: served.learner.phase_left_s, False
            take_part(self, served, self._asked.is_set)
            self._do(self.attendance.leave(finished=served.is_done))

    def _do(self, steps: Steps[T]) -> T:
        return perform(steps, self._bucket, wait=self._asked.pause, most_bytes=lambda: self._most_bytes)

    # --- the connection with the server, for the worker ---------------------------------------------------------------

    def send(self, letter: Letter) -> None:
        """See `ServerLink`."""
        if letter.kind is LetterKind.PUSH:
            self._do(self.attendance.push(letter.ticket.round, letter.content))

    def receive(self, kind: LetterKind, ticket: Ticket, size: int) -> Letter:
        """See `ServerLink`."""
        if not self._letters:
            self._letters.extend(make() for make in self._form.letters(self._replies.popleft()))
        return self._letters.popleft()

    # --- the state of the server: see `ServerWork` --------------------------------------------------------------------

    def agree(self, identity: str) -> None:
        """See `ServerWork`."""
        bind_folder(self._folder, identity)

    def asked(self) -> bool:
        """See `ServerWork`."""
        return self._asked.is_set()

    def say(self, sentence: str) -> None:
        """See `ServerWork`."""
        say(sentence)

    @property
    def core(self) -> ServerCore:
        """See `ServerWork`."""
        return self._session.core

    def take(self, number: int, event: ServerEvent, message: memoryview) -> None:
        """See `ServerWork`."""
        session, worker, now_s = self._session, event.worker, event.time_s
        before = session.journal.round
        if event.event == "join":
            replies = session.join(worker, [r for r in event.owned if r < self._run.rounds], now_s)
        elif event.event == "push":
            replies = self._push(event, message)
        elif event.event == "leave":
            is_own_event = event.writer == worker
            replies = session.leave(worker, None if is_own_event else "it has given no sign of life", now_s)
        else:
            replies = session.tick(now_s)
        session.records.check()
        if self.attendance.has_joined:
            self._replies.extend(reply for reply in replies if reply.peer == self.attendance.slot)
        every = self._run.loop.checkpoint_every
        self._state_due = any(self._run.due(every, r) for r in range(before + 1, session.journal.round + 1))

    def _push(self, event: ServerEvent, message: memoryview) -> list[Reply]:
        """Takes a push; the worker of one that is none is gone, for all who read it."""
        session, p = self._session, event.phase % len(self._session.core.spans)
        try:
            if len(message) != self._form.push_bytes(p):
                raise TransportError(f"{len(message)} bytes where {self._form.push_bytes(p)} are due")
            letter = Letter(LetterKind.PUSH, event.worker, Ticket(event.phase, p), body=body_of(bytes(message)))
            return session.hear(event.worker, self._form.content(letter, event.time_s), event.time_s)
        except TransportError as error:
            return session.leave(event.worker, str(error), event.time_s)

    def is_answered(self) -> bool:
        """See `ServerWork`."""
        return bool(self._replies)

    def progress(self) -> tuple[int, list[int]]:
        """See `ServerWork`."""
        run, core = self._run, self.core
        steps = [core.phases(i) * run.local_steps_of(i) for i in range(run.workers)]
        return run.rounds if core.is_finished else self._session.journal.round, steps

    def is_state_due(self) -> bool:
        """See `ServerWork`."""
        return self._state_due

    def state(self) -> bytes:
        """See `ServerWork`."""
        session, inputs = self._session, body_of(arrivals_file(self._folder).read_bytes())
        core: dict[str, Any] = as_dicts(session.core.whole_state())
        return packed({"core": core, "time_s": session.records.now_s, "round": session.journal.round, "inputs": inputs})

    def load(self, body: memoryview) -> None:
        """See `ServerWork`."""
        state = unpacked(bytes(body))
        try:
            core, time_s = rebuilt(CoreState, state["core"]), float(state["time_s"])
            within(core, worker=self._run.workers, fragment=self._run.fragments[0])
            if not 0 < (round := int(state["round"])) < self._run.rounds:
                raise ValueError(f"round {round} of {self._run.rounds}")
            self._files.close()
            atomic_write(arrivals_file(self._folder), state["inputs"].numpy().tobytes())
            self._open(round).restore_whole(core, time_s)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"a state of the server in the store is none of this run ({error!r:.200}); start all with the same run file and "
                "gossamer, or start again with an empty store",
                FaultKind.FOREIGN,
            ) from None

    @property
    def _session(self) -> ServerSession:
        """The server, at the start of the run where no state was loaded."""
        return self._open(0) if self._opened is None else self._opened

    def _open(self, start: int) -> ServerSession:
        """Opens the record of the server from a round on."""
        self._replies.clear()
        self._state_due = False
        # Validations are not made aside: training in this process has settings of torch that are common to all threads.
        opened = open_session(self._run, self._folder, self._probe, start, takes_over=start > 0, aside=False)
        self._opened = self._files.enter_context(opened)
        note_inputs(self._run, self._task, self._folder, self._run.workers)
        return self._opened
