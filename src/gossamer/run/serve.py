"""A server and its workers as real processes: each push is absorbed when it arrives, and ages are what they are.

`serve` is the server process and `work` one worker, over a TCP connection each. They run the desks and seats of
`gossamer.clock`, as the simulator does over virtual time; with one worker both compute the same bits.

A worker may die, hang or come late: its connection ends, its unfinished steps are left to the others, and when it comes back
it is greeted with the server's model and goes on from its own last snapshot of the inner optimizer. That may be older than
the server's, which is written first: nobody waits for the other to have written.
"""

import hashlib
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous import Fragment, pack
from gossamer.asynchronous.fragments import put, take
from gossamer.clock import SERVER, Absence, Transfer, Update
from gossamer.clock.agenda import Budget
from gossamer.clock.desk import Desk, Greeting, Push, Seat
from gossamer.codecs import Codec, make_codec
from gossamer.data.corpus import Corpus, fingerprint, open_corpus
from gossamer.errors import CheckpointError, ConfigError, GossamerError, PairingError, PeerError, TransportError
from gossamer.layout import layout_of
from gossamer.record import checkpoint
from gossamer.record.events import EventWriter
from gossamer.record.files import worker_suffix
from gossamer.record.folder import RunFolder
from gossamer.rng import key as random_key
from gossamer.run.config import RunConfig, digest, dump
from gossamer.run.evaluate import Probe
from gossamer.run.journal import EventJournal, Journal, saver
from gossamer.run.replica import LocalPhase, Replica
from gossamer.run.settle import clock, paced, server_rule
from gossamer.transport import Turn
from gossamer.transport.launch import LISTENER, device_of, end_with_launcher
from gossamer.transport.stream import GREET, HELLO, PUSH, Stream, connect
from gossamer.tree import Tree, leaves, must_fit, nbytes, refill

__all__ = ["address", "serve", "work"]

HERE = "these machines"
"""What a real run calls the network whose seconds it records."""
HANDSHAKE_S = 10.0
"""What a new connection has to say who it is."""
STRANGERS = 16
"""Connections beside those of workers that may be open at one time."""

log = logging.getLogger("gossamer")


class _News(NamedTuple):
    """What goes with every starting point, as whole numbers."""

    updates: int
    """Those the server has made of this fragment."""
    round: int
    """Rounds that are over."""
    go: int
    """1 to train another phase, 0 when there is nothing left to begin."""
    phases: int
    """Local phases that the server has had of this worker."""
    again: int
    """1 for a worker that has been here before."""
    cut_round: int
    """What the worker has recorded of this round and of later ones is void: an interrupted run goes on from there."""
    elapsed_us: int
    """Since the run began."""


class _Reply(NamedTuple):
    greetings: dict[int, Greeting]
    news: _News
    epoch: int


_Slot = queue.SimpleQueue[_Reply | None]
"""How the thread of a connection gets its reply; None when it has been replaced."""


class _Joined(NamedTuple):
    worker: int
    stream: Stream
    slot: _Slot


class _Pushed(NamedTuple):
    worker: int
    epoch: int
    fragment: int
    message: Tensor
    bytes: int
    start_s: float
    slot: _Slot


class _Gone(NamedTuple):
    worker: int
    epoch: int
    reason: str | None  # None for one that was told that nothing is left


@dataclass
class _Guest:
    """What the server knows of a worker."""

    phases: int = 0
    came: int = 0
    here: int = 0  # how often it came to this process of the server
    epoch: int = 0  # of its connection: what an earlier one still says is void
    stream: Stream | None = None
    trains: bool = False
    greeted: dict[int, tuple[int, int]] = field(default_factory=dict)  # per fragment, updates then and phases before


@dataclass
class _Queue:
    """Pushes of one fragment that wait for their window to close, and when it does."""

    pushes: list[tuple[_Pushed, Push]] = field(default_factory=list)
    closes_s: float = math.inf


def address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    >>> address("127.0.0.1:29400")
    ('127.0.0.1', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--server got '{text}'; write HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def _common(config: RunConfig, corpus: Corpus) -> int:
    """64 bits of what a server and its workers must have in common: the run with its local steps, and the text."""
    told = f"{digest(config)} {fingerprint(corpus)}"
    return int(hashlib.sha256(told.encode()).hexdigest()[:16], 16)


def _settled(config: RunConfig) -> RunConfig:
    """The run with the local steps of its workers. Raises ConfigError for what real processes do not do."""
    if config.events.overlap or config.events.absences:
        given = "overlap = true" if config.events.overlap else f"{len(config.events.absences)} absences"
        raise PairingError(
            f"gossamer train got events with {given}, which only virtual time knows: a real worker waits for its reply, and "
            "leaves when it is stopped; remove it, or use gossamer simulate"
        )
    return paced(config, clock(config)[1]) if config.events.dylu else config


# --- the server -------------------------------------------------------------------------------------------------------


def serve(config: RunConfig, folder: Path, host: str, port: int, *, resume: bool = False) -> None:
    """Serves all workers that come until they have taken the run's inner steps together.

    Args: `resume` goes on from the newest snapshot of the server.
    Raises: ConfigError, CheckpointError; PeerError when no worker is left and none comes within `run.timeout_s`.
    Cost: the rule's state; one message and one starting point per worker under way.
    """
    end_with_launcher()
    _use_threads(config)
    run = _settled(config)
    rule = server_rule(config)
    corpus = open_corpus(config.data, config.workers, config.seed)
    probe = Probe(config, corpus, torch.device("cpu"))
    layout, x = layout_of(probe.model), probe.x.clone()
    fragments = pack(layout, config.events.fragments)
    desks = [Desk(rule, take(x, fragment), fragment.layout) for fragment in fragments]
    guests = [_Guest() for _ in range(config.workers)]
    store, key, saved, start = folder / "checkpoints", digest(config), {}, 0
    if resume:
        start = max(checkpoint.rounds(store, config.workers, key), default=0)
        if not start:
            raise checkpoint.nothing_to_resume(store, config.owners, [])
        if start == config.rounds:
            print(checkpoint.ended(folder, start))
            return
        saved = checkpoint.load(store, start, config.workers, key)
        checkpoint.rewind(store, start, config.workers)
        _restore(desks, guests, saved)
    with (
        RunFolder(
            folder, dump(config), config.record, worker=config.workers, resume_round=start if resume else None
        ) as record,
        EventWriter(
            folder, network=HERE, workers=config.workers, suffix=worker_suffix(config.workers),
            resume_round=start if resume else None,
        ) as events,
        _listener(host, port) as listener,
    ):  # fmt: skip
        server = _Server(
            run, fragments, desks, guests, saved, start if resume else config.rounds, common=_common(run, corpus)
        )
        save = saver(config, folder, lambda: [(config.workers, server.state())])
        journal = EventJournal(Journal(config, record, lambda: server.validate(probe), save), events)
        journal.round, journal.steps = start, saved.get("steps", 0)
        server.run(journal, listener)


def _restore(desks: Sequence[Desk], guests: Sequence[_Guest], saved: Any) -> None:
    """Puts a snapshot of the server back. Raises CheckpointError when it does not fit."""
    try:
        must_fit(saved["outer"], [leaf for desk in desks for leaf in leaves(desk.state)])
        supply = iter(saved["outer"])
        for desk, updates in zip(desks, saved["updates"], strict=True):
            desk.state, desk.updates = refill(desk.state, supply), int(updates)
        for guest, phases, came in zip(guests, saved["phases"], saved["came"], strict=True):
            guest.phases, guest.came = int(phases), int(came)
        assert float(saved["time_s"]) >= 0 and int(saved["steps"]) >= 0
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"the snapshot of the server does not fit this run: {error!r}; resume with the run file it was written by"
        ) from None


class _Server:
    """The server's side: one thread per connection carries frames, and this one alone decides and computes."""

    def __init__(
        self, config: RunConfig, fragments: Sequence[Fragment], desks: Sequence[Desk], guests: Sequence[_Guest], saved: Any,
        resumed_round: int, *, common: int,
    ) -> None:  # fmt: skip
        self._config, self._fragments, self._desks, self._guests = config, fragments, desks, guests
        self._rule = desks[0].rule
        self._codec = make_codec(config.codec.name, **config.codec.options)
        self._common = common
        self._queues = [_Queue() for _ in fragments]
        self._events: queue.SimpleQueue[_Joined | _Pushed | _Gone] = queue.SimpleQueue()
        self._budget = Budget(config.workers * config.run.steps)
        self._budget.begun = saved.get("steps", 0)
        self._before_s, self._began = saved.get("time_s", 0.0), time.monotonic()
        self._resumed_round, self._told_to_stop = resumed_round, False
        self._threads: list[threading.Thread] = []
        self._journal: EventJournal

    def model(self) -> Tensor:
        """The server's parameters `[P]`."""
        x = torch.empty(sum(fragment.layout.numel for fragment in self._fragments))
        for fragment, desk in zip(self._fragments, self._desks, strict=True):
            put(x, fragment, desk.state.x)
        return x

    def state(self) -> dict[str, Any]:
        """Everything a snapshot needs to go on."""
        return {
            "x": self.model(),
            "outer": [leaf for desk in self._desks for leaf in leaves(desk.state)],
            "updates": [desk.updates for desk in self._desks],
            "phases": [guest.phases for guest in self._guests],
            "came": [guest.came for guest in self._guests],
            "steps": self._journal.steps,
            "time_s": self._now(),
        }

    def validate(self, probe: Probe) -> dict[str, Any]:
        """Scores the server's model, and says so."""
        loss = probe.loss(self.model())
        updates = sum(desk.updates for desk in self._desks)
        print(
            f"round {self._journal.round} of {self._config.rounds}: validation {loss:.4f} after {updates} updates, "
            f"{sum(guest.stream is not None for guest in self._guests)} workers"
        )
        return {"loss": loss}

    def run(self, journal: EventJournal, listener: socket.socket) -> None:
        """Serves until all steps have been taken and absorbed."""
        self._journal = journal
        host, port = listener.getsockname()[:2]
        print(f"serving {self._config.workers} workers on {host}:{port}")
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        timeout_s = self._config.run.timeout_s
        lonely_s = self._now()
        try:
            while not self._over():
                closes_s = min(waiting.closes_s for waiting in self._queues)
                try:
                    event = self._events.get(timeout=max(0.0, min(closes_s - self._now(), timeout_s / 4, 1.0)))
                except queue.Empty:
                    event = None
                self._take(event)
                self._close_windows()
                if any(guest.stream for guest in self._guests):
                    lonely_s = self._now()
                elif self._now() - lonely_s > timeout_s:
                    raise PeerError(
                        f"no worker has been here for {timeout_s:g} s and {self._journal.steps} of {self._budget.steps:.0f} "
                        "inner steps are done; look at the workers' logs, then resume"
                    )
            journal.time_s = self._now()
            journal.end()
        finally:
            listener.close()
            deadline = time.monotonic() + 5.0
            for thread in self._threads:  # they still send the last starting points
                thread.join(max(0.0, deadline - time.monotonic()))
            for guest in self._guests:
                if guest.stream is not None:
                    guest.stream.close()

    def _now(self) -> float:
        return self._before_s + time.monotonic() - self._began

    def _over(self) -> bool:
        busy = any(guest.trains for guest in self._guests) or any(waiting.pushes for waiting in self._queues)
        return not busy and (self._told_to_stop or self._budget.begun >= self._budget.steps)

    # What follows happens in the thread that calls `run`.

    def _take(self, event: _Joined | _Pushed | _Gone | None) -> None:
        match event:
            case _Joined():
                self._join(event)
            case _Pushed() if event.epoch == self._guests[event.worker].epoch:
                self._push(event)
            case _Pushed():
                event.slot.put(None)
            case _Gone() if event.epoch == self._guests[event.worker].epoch:
                self._lose(event.worker, event.reason)

    def _join(self, joined: _Joined) -> None:
        guest = self._guests[joined.worker]
        if guest.stream is not None:
            guest.stream.close()
            self._lose(joined.worker, "came again over another connection")
        guest.stream, guest.epoch = joined.stream, guest.epoch + 1
        again, guest.came, guest.here = guest.came > 0, guest.came + 1, guest.here + 1
        if again:
            self._journal.enter(Absence(self._now(), joined.worker, "return"), self._now(), [])
        self._greet(joined.worker, range(len(self._fragments)), joined.slot, again=again)

    def _push(self, pushed: _Pushed) -> None:
        guest, p = self._guests[pushed.worker], pushed.fragment
        number, guest.phases, guest.trains = guest.phases, guest.phases + 1, False
        updates, before = guest.greeted[p]
        steps = (guest.phases - before) * self._config.local_steps(pushed.worker)
        push = Push(p, number, pushed.message, updates, steps * self._config.step_tokens, steps)
        transfer = Transfer("push", pushed.start_s, self._now(), pushed.worker, SERVER, p, pushed.bytes)
        self._journal.enter(transfer, self._now(), [])
        self._queues[p].pushes.append((pushed, push))
        if self._rule.window is None:
            self._absorb(p)

    def _lose(self, worker: int, reason: str | None) -> None:
        guest = self._guests[worker]
        guest.stream, guest.epoch = None, guest.epoch + 1
        if guest.trains:
            self._budget.give_back(self._config.local_steps(worker))
            guest.trains = False
        if reason is not None:
            log.warning("worker %d is gone (%s); the others go on", worker, reason)
            self._journal.enter(Absence(self._now(), worker, "leave"), self._now(), [])

    def _close_windows(self) -> None:
        """Absorbs what has its quorum and its grace period, and everything when nobody is left who could still come."""
        window = self._rule.window
        if window is None:
            return
        starting = time.monotonic() - self._began < self._config.run.timeout_s
        present = sum(guest.stream is not None or (starting and not guest.here) for guest in self._guests)
        stuck = not any(guest.trains or (starting and not guest.here) for guest in self._guests)
        for p, waiting in enumerate(self._queues):
            if len(waiting.pushes) >= max(1, min(window.quorum, present)):
                waiting.closes_s = min(waiting.closes_s, self._now() + window.grace_s)
            if waiting.pushes and (stuck or self._now() >= waiting.closes_s):
                self._absorb(p)

    def _absorb(self, p: int) -> None:
        waiting, self._queues[p] = sorted(self._queues[p].pushes, key=lambda one: one[0].worker), _Queue()
        ages = self._desks[p].absorb([(pushed.worker, push) for pushed, push in waiting])
        workers = tuple(pushed.worker for pushed, _ in waiting)
        steps = [self._config.local_steps(i) for i in range(self._config.workers)]
        self._journal.tokens = (self._journal.steps + sum(steps[i] for i in workers)) * self._config.step_tokens
        self._journal.enter(Update(self._now(), p, workers, ages), self._now(), steps)
        for pushed, _ in waiting:
            if pushed.epoch == self._guests[pushed.worker].epoch:
                self._greet(pushed.worker, (p,), pushed.slot, again=False)

    def _greet(self, worker: int, parts: Sequence[int], slot: _Slot, *, again: bool) -> None:
        guest = self._guests[worker]
        greetings = {p: self._desks[p].greet() for p in parts}
        guest.greeted.update({p: (greeting.updates, guest.phases) for p, greeting in greetings.items()})
        guest.trains = self._budget.claim(self._config.local_steps(worker))
        self._told_to_stop |= not guest.trains
        news = _News(
            0, self._journal.steps // (self._config.workers * self._config.full_steps), int(guest.trains), guest.phases,
            int(again), self._resumed_round if guest.here == 1 else self._config.rounds, int(self._now() * 1e6),
        )  # fmt: skip
        slot.put(_Reply(greetings, news, guest.epoch))

    # What follows happens in a thread for each connection.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, who = listener.accept()
            except OSError:
                return  # the run is over
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) >= self._config.workers + STRANGERS:
                sock.close()
                continue
            thread = threading.Thread(target=self._attend, args=(sock, f"{who[0]}:{who[1]}"), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _attend(self, sock: socket.socket, who: str) -> None:
        """Carries the frames of one connection, each of which is checked before it counts."""
        n, slot, joined = self._config.workers, _Slot(), False
        stream = Stream(
            sock, run=self._common, me=n, peer=None, name=f"the connection from {who}", timeout_s=HANDSHAKE_S
        )
        worker, reply, epoch = -1, None, 0
        try:
            stream.receive(Turn(0, 0, HELLO), [])
            worker = -1 if stream.peer is None else stream.peer
            if not 0 <= worker < n:
                raise TransportError(
                    f"{stream.name} calls itself worker {worker}; workers of this run are 0 to {n - 1}"
                )
            stream.name = f"worker {worker}"
            stream.wait_at_most(self._config.run.timeout_s)
            self._events.put(_Joined(worker, stream, slot))
            joined, reply = True, slot.get()
            number = 0
            while reply is not None:
                for p, (start, updates) in reply.greetings.items():
                    news = torch.tensor(reply.news._replace(updates=updates), dtype=torch.int64)
                    stream.send(Turn(number, p, GREET), [news, start])
                epoch = reply.epoch
                if not reply.news.go:
                    break
                number = reply.news.phases
                p = number % len(self._fragments)
                like = torch.empty(self._fragments[p].layout.numel)
                start_s = self._now()
                frames = stream.receive(Turn(number, p, PUSH), leaves(_payload_like(self._codec, like)))
                message = _decoded(self._codec, frames, like, worker)
                size = sum(frame.numel() * frame.element_size() for frame in frames)
                self._events.put(_Pushed(worker, epoch, p, message, size, start_s, slot))
                reply = slot.get()
        except GossamerError as error:
            if joined:
                self._events.put(_Gone(worker, epoch if reply is None else reply.epoch, str(error)))
            else:
                log.warning("refused a connection: %s", error)
            stream.refuse(str(error))
        else:
            self._events.put(_Gone(worker, epoch, None))
        finally:
            stream.close()


def _payload_like(codec: Codec, like: Tensor) -> Tree:
    """Shapes and dtypes of what a codec makes of a fragment."""
    return codec.encode(torch.empty_like(like, device="meta"), 0)


def _decoded(codec: Codec, frames: Sequence[Tensor], like: Tensor, worker: int) -> Tensor:
    """The pseudo-gradient in these frames. Raises TransportError when there is none."""
    try:
        message = codec.decode(refill(_payload_like(codec, like), frames), like)
    except (RuntimeError, ValueError, IndexError) as error:
        raise TransportError(
            f"worker {worker} pushed a payload that codec '{codec.name}' cannot decode ({str(error).splitlines()[0]:.100})"
        ) from None
    if not bool(torch.isfinite(message).all()):
        raise TransportError(
            f"worker {worker} pushed {message.numel()} numbers that are not all finite; lower inner.lr"
        )
    return message


def _listener(host: str, port: int) -> socket.socket:
    """The socket to listen on: the one a launcher has made, or a new one. Raises TransportError when it cannot be had."""
    if LISTENER in os.environ:
        return socket.socket(fileno=int(os.environ[LISTENER]))
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise TransportError(f"the server could not listen on {host}:{port} ({error}); choose another port") from None


# --- a worker ---------------------------------------------------------------------------------------------------------


def work(config: RunConfig, folder: Path, host: str, port: int, worker: int) -> None:
    """Trains one worker of the server at this address until that one says that nothing is left.

    Raises: ConfigError, DataError, TrainingError; PeerError when the server is gone or refuses it.
    Cost: one model, its gradients and inner state, and one starting point.
    """
    end_with_launcher()
    _use_threads(config)
    if not 0 <= worker < config.workers:
        raise ConfigError(
            f"--worker got {worker} but the run file says workers = {config.workers}; give 0 to {config.workers - 1}"
        )
    settled, codec = _settled(config), make_codec(config.codec.name, **config.codec.options)
    store, key = folder / "checkpoints", digest(config)
    corpus = open_corpus(config.data, config.workers, config.seed)
    learner = Replica(worker, settled, corpus, device_of(config.run.device, worker))
    fragments = pack(learner.layout, config.events.fragments)
    stream = connect(
        host, port, run=_common(settled, corpus), me=worker, server=config.workers, timeout_s=config.run.timeout_s
    )
    try:
        stream.send(Turn(0, 0, HELLO), [])
        arrived = [_greeting(stream, 0, p, fragment) for p, fragment in enumerate(fragments)]
        news = arrived[-1][1]
        cut = news.cut_round if news.again else None
        if cut is not None:
            checkpoint.rewind(store, cut, worker)
            if owned := checkpoint.rounds(store, worker, key):
                learner.restore(checkpoint.load(store, owned[-1], worker, key))
        seat = Seat(learner, fragments, [greeting for greeting, _ in arrived], phases=news.phases)
        early_s = news.elapsed_us / 1e6 - time.monotonic()
        with (
            RunFolder(folder, dump(config), config.record, worker=worker, resume_round=cut) as record,
            EventWriter(
                folder, network=HERE, workers=config.workers, suffix=worker_suffix(worker), resume_round=cut
            ) as events,
        ):
            while news.go:
                round, began_s = min(news.round, config.rounds - 1), time.monotonic() + early_s
                learner.round = news.round
                number, report, push = seat.train()
                assert push is not None  # without overlap there is one after each phase
                ended_s, p, done = time.monotonic() + early_s, push.fragment, number + 1
                assert isinstance(report, LocalPhase)
                events.write(
                    round, "phase", worker=worker, number=number, start_s=began_s, end_s=ended_s, steps=learner.local_steps,
                    tokens=report.tokens,
                )  # fmt: skip
                record.log(
                    "train", round=round, worker=worker, step=done * learner.local_steps, loss=report.loss, lr=report.lr,
                    tokens=done * report.tokens, time_s=ended_s,
                )  # fmt: skip
                payload = codec.encode(push.message, random_key(config.seed, worker, number, p, "codec"))
                stream.send(Turn(number, p, PUSH), leaves(payload))
                sent_s = time.monotonic() + early_s
                greeting, news = _greeting(stream, number, p, fragments[p])
                seat.receive({p: greeting})
                events.write(
                    round, "fetch", source=SERVER, target=worker, fragment=p, bytes=nbytes(greeting.start),
                    start_s=sent_s, end_s=time.monotonic() + early_s,
                )  # fmt: skip
                finished = range(round + 1, min(news.round, config.rounds) + 1)
                if any(config.due(config.run.checkpoint_every, r) for r in finished):
                    checkpoint.save(store, finished[-1], worker, learner.state(), digest=key)
                if any(config.due(config.run.eval_every, r) for r in finished):
                    print(f"round {finished[-1]} of {config.rounds}: loss {report.loss:.4f} after {done} phases")
    finally:
        stream.close()


def _greeting(stream: Stream, number: int, p: int, fragment: Fragment) -> tuple[Greeting, _News]:
    """The next starting point of a fragment, and what the server says beside it. Raises PeerError and TransportError."""
    like = [torch.empty(len(_News._fields), dtype=torch.int64), torch.empty(fragment.layout.numel, device="meta")]
    said, start = stream.receive(Turn(number, p, GREET), like)
    news = _News(*said.tolist())
    if not 0 <= min(news) <= max(news) < 1 << 60 or max(news.round, news.phases, news.cut_round) >= 1 << 31:
        raise TransportError(
            f"the server sent {news}, in which some numbers cannot be; install the same gossamer everywhere"
        )
    return Greeting(start, news.updates), news


def _use_threads(config: RunConfig) -> None:
    """As many intra-op threads as the run file says; those of the environment where it says nothing."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
