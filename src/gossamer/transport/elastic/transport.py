"""The transport of a worker of an elastic run: sockets around `gossamer.transport.elastic.core`.

Each worker listens on its own port, and two workers that exchange keep one connection. So the loss of a worker is
noticed by all connected peers at once, and a hanging worker only delays the peers that wait for it, up to their
deadline. A connection carries payloads, membership updates and pings.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Container, Sequence

import torch
from torch import Tensor

from gossamer.errors import GossamerError, PeerError, RefusedError, TrainingError
from gossamer.finite import GO_ON
from gossamer.transport import wire
from gossamer.transport.contract import Delivery, Sound, Ticket, Times, Wait
from gossamer.transport.elastic.ask import View, look, show
from gossamer.transport.elastic.closing import Closing, LeftOutError
from gossamer.transport.elastic.core import ElasticCore, Outcome
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry, SlotTakenError, membership_update
from gossamer.transport.elastic.newcomer import Applicant, Handover, host
from gossamer.transport.elastic.redial import Redial
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint, Owner, PeerConnection, finish_together
from gossamer.transport.sockets.header import NEWCOMER, WATCHER, LetterKind
from gossamer.transport.sockets.letter import Letter, body_of
from gossamer.transport.sockets.listener import Arrival, ConnectionLimit, Refusals

log = logging.getLogger("gossamer")

_FEW_S = 5.0
"""How long a round lacks a majority before this is reported."""


class _Waiting:
    """A letter queued behind others of its connection, which may be replaced until it is sent."""

    def __init__(self, letter: Letter) -> None:
        self._letter: Letter | None = letter
        self._lock = threading.Lock()

    def __call__(self) -> Letter:
        """The letter to send now."""
        with self._lock:
            letter, self._letter = self._letter, None
        assert letter is not None
        return letter

    def change(self, letter: Letter) -> bool:
        """Replaces it by another letter; returns False if it was already sent."""
        with self._lock:
            if self._letter is None:
                return False
            self._letter = letter
            return True


class ElasticTransport(Times):
    """One worker's connections; see `gossamer.transport.contract.Transport`. It never raises PeerError for a peer:
    `collect` omits failed exchanges; `outcomes` reports them.

    Args:
        members: this worker's view at the start; every worker in it listens already, or is not alive.
        host: called in a separate thread with each connection of a process that asks to join.
        device: the device of collected frames.
        limit_bytes: the most bytes of a payload, for a rule that needs everyone, whose rounds are closed over the ready
            workers (`gossamer.transport.elastic.closing`); None for gossip.
        closings: the number of closings of such a round, one for each send.
        led: whether the peers of this process and the participants of closed rounds are decided elsewhere, and passed
            to `lead`: by the first of several processes of one worker.

    Cost: one copy of each payload that is sent, as the sender may continue while a slow peer still reads; two threads
        per peer.
    """

    keeps_frames = False

    def __init__(
        self,
        members: Members,
        endpoint: Endpoint,
        *,
        host: Callable[[Channel], None] | None = None,
        device: torch.device | None = None,
        limit_bytes: int | None = None,
        closings: int = 1,
        led: bool = False,
    ) -> None:
        super().__init__()
        self.worker, self._endpoint, self._host = members.me, endpoint, host
        if endpoint.keys is not None:
            members.restrict_trust(endpoint.keys.are_one)
        self._device = device or torch.device("cpu")
        self._beat_s = min(1.0, endpoint.timeout_s / 8)
        self.core = ElasticCore(
            members, timeout_s=endpoint.timeout_s, deadline_s=endpoint.deadline_s, beat_s=self._beat_s
        )
        self.core.limit_bytes = limit_bytes
        self.closing = None
        if limit_bytes is not None and not led:
            self.closing = Closing(members, limit_s=self.core.limit_s, beat_s=self._beat_s, per_round=closings)
        self.taken: Callable[[], int] | None = None
        """The inner steps of this worker's slot so far, for sends within a round."""
        self.stop: Callable[[], bool] = lambda: False
        """Set to end a wait for a majority, or for those that are late at the end."""
        self._stays_until_s: float | None = None
        """Until when it stays for workers without which the last round was closed, once it does."""
        self.redial = Redial(2 * self._beat_s, endpoint.timeout_s)
        self.refusals = Refusals()
        self._owner = Owner(
            self.worker, endpoint, members.limits, self._accepts, self._heard, self._lost, self.refusals
        )
        self._links: dict[int, list[PeerConnection]] = {}
        self._like: dict[tuple[Ticket, int], list[Tensor]] = {}
        self._posted: dict[tuple[Ticket, int], _Waiting] = {}
        """Payloads of exchanges whose outcome is not collected yet."""
        self._newest: dict[tuple[PeerConnection, LetterKind], _Waiting] = {}
        """The last message on each connection, and the view at the end of its queue; possibly sent."""
        self._outcomes: dict[Ticket, dict[int, Outcome]] = {}
        self._reasons: dict[int, str] = {}
        """Why the last connection with each disconnected worker was lost."""
        # All workers may share one address or one key: on one machine, or behind one router.
        self._guests = ConnectionLimit(per_peer=members.slots + 8, total=2 * members.slots + 64)
        """Newcomers and watchers, by key or address."""
        self._accepted = ConnectionLimit(per_peer=4, total=4 * members.slots + 64)
        """The connections opened by workers, by slot and key or address."""
        self.changed = threading.Condition(threading.RLock())
        """The lock of the core, which the threads of all connections use; notified on each received letter.

        Reentrant: an operation of the core on a connection may fail at once, and call back into the core.
        """
        self._closed, self._tried = threading.Event(), -1
        self._few_since_s: float | None = None
        """Since when too few workers are available for a mean; infinite once reported."""
        self._looked_s: dict[int, float] = {}
        """The time of the last search for a process reported to fill each slot."""
        self._listener = endpoint.listen(self._arrived, self.refusals)
        # Beats are sent during local phases: a silent worker counts as dead.
        threading.Thread(target=self._run_timeouts, daemon=True, name="gossamer house").start()

    @property
    def members(self) -> Members:
        """This worker's view."""
        return self.core.members

    def begin_round(self, round: int, peers: Callable[[frozenset[int]], Sequence[int]], steps: int) -> frozenset[int]:
        """Begins a round: returns its participants in this worker's view, fixed for the round.

        Args:
            peers: this worker's peers, given the participants.
            steps: completed inner steps of the slot at the end of the round.
        Raises: SlotTakenError.
        """
        with self.changed:
            self._must_fill_its_slot()
            alive = self.members.alive(round) | {self.worker}
            self.core.steps = steps
            if self.closing is None:
                # A worker that has left after completing the round is still included: else two workers, only one of
                # which knows of the departure, would draw different pairs and miss each other.
                alive |= self.members.left_after(round)
                self.core.begin_round(round, alive, peers(alive))
            else:
                self.core.begin_round(round, alive, range(self.members.slots))
                self.closing.begin_round(round * self.closing.per_round)
                self._tried = -1
            self._flush()
        return alive

    def lead(self, round: int, workers: frozenset[int], peers: Sequence[int], history_hash: int = 0) -> None:
        """Begins a round, or another attempt at its mean, over the participants chosen by the first process of this
        worker.

        Args: `history_hash` is the hash of the closed rounds before it, for a rule that needs everyone.
        Raises: SlotTakenError.
        """
        with self.changed:
            self._must_fill_its_slot()
            if round != self.core.round:
                self.core.begin_round(round, workers, peers)
            self.core.plan(workers, history_hash)
            self._flush()

    def _must_fill_its_slot(self) -> None:
        if self.members.replaced:
            raise SlotTakenError(self.worker, self._endpoint.timeout_s)

    def proposed(self, round: int) -> tuple[int, frozenset[int]]:
        """See `gossamer.transport.contract.Closes`. Raises: LeftOutError."""
        with self.changed:
            closing, before = self._closes(), self._tried
            closing.ready(time.monotonic())
            self._until(lambda: closing.proposed is not None and closing.proposed.attempt != before)
            assert closing.proposed is not None
            self._tried = closing.proposed.attempt
            # The set is part of the view on which both ends of a payload must agree, so that attempts are not mixed.
            self.core.plan(closing.proposed.workers, closing.history_hash)
            return closing.proposed

    def committed(self, attempt: int, *, whole: bool, unsound: Collection[int] = ()) -> bool:
        """See `gossamer.transport.contract.Closes`. Raises: LeftOutError."""
        with self.changed:
            closing = self._closes()
            before = closing.round
            if whole:
                closing.hold(attempt, time.monotonic())
            else:
                closing.fail(attempt, time.monotonic(), unsound)
            self._until(lambda: closing.closed or closing.proposed is None or closing.proposed.attempt != attempt)
            if closing.closed:
                # Steps count as held by this worker only now: those of a failed attempt are not held by any.
                closing.advance()
                self._name_unvouched(closing)  # now, as there is no later check after the last round
                self._tried = -1
                self.core.count_steps()
            return closing.round > before

    def _closes(self) -> Closing:
        assert self.closing is not None
        return self.closing

    def _until(self, done: Callable[[], bool]) -> None:
        closing, start_s = self._closes(), time.perf_counter()
        while not done():
            self._must_fill_its_slot()
            # If all others have finished for good there will never be a majority.
            if closing.left_out or self.stop() or self.members.alone:
                raise LeftOutError(self.worker, self.core.round, closing.source)
            if needed := closing.needed(time.monotonic()):
                who = " and ".join(map(str, sorted(needed)))
                raise TrainingError(
                    f"the message of worker {who} in round {self.core.round + 1} has numbers that are not finite, or cannot be "
                    f"decoded, and the others are too few to close the round; {GO_ON}"
                )
            self._flush()
            self.changed.wait(min(self._beat_s, max(0.0, self.core.deadline() - time.monotonic())))
            self._look_at(time.monotonic())
            self._tell_if_few(time.monotonic())
        self._flush()
        self._waits.append(Wait(Ticket(self.core.round), start_s, time.perf_counter()))

    def await_company(self) -> None:
        """Waits until another process takes part in the run, or for `stop`: else the first machine would train all of
        it alone.

        Raises: SlotTakenError.
        """
        start_s, was_reported = time.monotonic(), False
        with self.changed:
            while self.members.expects_company and not self.stop():
                self._must_fill_its_slot()
                self.changed.wait(self._beat_s)
                if not was_reported and time.monotonic() > start_s + _FEW_S:
                    was_reported = True
                    log.warning(
                        "worker %d waits for another to join: of %d workers it is the only one here, and alone it has nobody to "
                        "exchange with; a run of one has workers = 1",
                        self.worker,
                        self.members.slots,
                    )

    def _tell_if_few(self, now: float) -> None:
        """Reports once, after some seconds without a majority, what a round waits for: the first machine may be alone
        for hours.
        """
        slots, alive = self.members.slots, len(self.members.with_status(MemberStatus.ALIVE)) + 1
        if 2 * alive > slots:
            self._few_since_s = None
        elif self._few_since_s is None:
            self._few_since_s = now
        elif now > self._few_since_s + _FEW_S:
            self._few_since_s = math.inf
            log.warning(
                "round %d waits for others to join: a mean is taken over more than half of the %d workers, and here %s",
                self.core.round + 1,
                slots,
                "is one" if alive == 1 else f"are {alive}",
            )

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        """Announces the exchange with a peer."""
        forms = list(like)

        def whole(payload: Tensor) -> bool:
            return sound is None or sound(wire.unpack_frames(payload.to(self._device), forms))

        with self.changed:
            self._like[ticket, peer] = forms
            # In a mean over everyone the exchange itself declines what is not sound: all must agree on who is left out.
            self.core.expect(ticket, peer, wire.frames_bytes(like), whole if self.closing is None else None)
            self._flush()
            self.changed.notify_all()

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        """Queues this worker's payload."""
        packed = wire.pack_frames(frames)
        payload = wire.on_host(packed)
        if len(frames) == 1 and payload is packed:  # copied: the caller may write into it while a slow peer still reads
            payload = payload.clone()
        with self.changed:
            if self.taken is not None:
                self.core.steps = self.taken()
            self.core.post(ticket, peer, payload, time.monotonic())
            self._flush()

    def ready(self, ticket: Ticket) -> bool:
        """Whether all exchanges of the ticket were committed or have failed."""
        with self.changed:
            return self.core.settled(ticket)

    def wait(self, ticket: Ticket) -> None:
        """Returns once `ready(ticket)`, after `timeout_s` at most."""
        start_s = time.perf_counter()
        with self.changed:
            while not self.core.settled(ticket):
                if self.closing is not None and self.closing.is_overtaken(self._tried):
                    self.core.give_up(range(self.members.slots))
                else:
                    # Until the next deadline at most: a hanging peer sends nothing that would wake this up.
                    self.changed.wait(min(self._beat_s, max(0.0, self.core.deadline() - time.monotonic())))
                    self.core.tick(time.monotonic())
                self._flush()
        self._waits.append(Wait(ticket, start_s, time.perf_counter()))

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """The frames of the committed exchanges, by peer; forgets the ticket."""
        with self.changed:
            payloads, outcomes = self.core.collect(ticket)
            for peer in outcomes:
                if (waiting := self._posted.pop((ticket, peer), None)) is not None:
                    # Over a link slower than the rounds, obsolete payloads would queue up in memory and delay current
                    # ones.
                    waiting.change(Letter(LetterKind.DECLINE, self.worker, ticket, round=max(self.core.round, 0)))
        self._outcomes[ticket] = outcomes
        likes = {peer: self._like.pop((ticket, peer)) for peer in outcomes}
        return {peer: wire.unpack_frames(payload.to(self._device), likes[peer]) for peer, payload in payloads.items()}

    def outcomes(self) -> dict[Ticket, dict[int, Outcome]]:
        """The outcomes of the exchanges collected since the last call."""
        taken, self._outcomes = self._outcomes, {}
        return taken

    def first_round(self, timeout_s: float) -> int:
        """The round after the newest one reported by the others: asks all that are alive.

        Waits until one has answered, and some seconds for the others: a worker that was cut off does not know how many
        steps of this slot the others hold.
        Raises: PeerError without an answer in time.
        """
        with self.changed:
            self.core.spread(ask=True)
            self._flush()
            answered = self.changed.wait_for(lambda: self.core.was_contacted, timeout_s)
            self.changed.wait_for(lambda: self.core.contacted_by_all, 4 * self._beat_s)
            if not answered:
                raise PeerError(f"nobody of the run answered worker {self.worker} for {timeout_s:g} s; join again")
            return self.members.newest_round + 1

    @property
    def newest_round(self) -> int:
        """The newest known round of any worker."""
        with self.changed:
            return self.members.newest_round

    def next_round(self) -> int:
        """The next round."""
        with self.changed:
            if self.closing is None:
                return self.core.next_round()
            return self.closing.round // self.closing.per_round

    def await_later(self, round: int) -> None:
        """Waits until another worker is in a later round, if possible, for `timeout_s` at most."""
        with self.changed:
            closing = self._closes()
            over = lambda: self.members.newest_round > round or closing.nobody_ahead or self.stop()  # noqa: E731
            self.changed.wait_for(over, self._endpoint.timeout_s)

    def continue_from(self, round: int, history_hash: int) -> None:
        """Takes part again with another worker's state, for a rule that needs everyone."""
        with self.changed:
            self._closes().begin_round(round * self._closes().per_round, history_hash)

    @property
    def history_hash(self) -> int:
        """The hash of the closed rounds, which accompanies a state; 0 for gossip."""
        with self.changed:
            return 0 if self.closing is None else self.closing.history_hash

    def view(self) -> View:
        """This worker's membership view, for status queries."""
        with self.changed:
            entries = [entry for _, entry in sorted(self.members.entries.items())]
            return View(self.worker, entries, self.core.silent_s(time.monotonic()), self.refusals.counts)

    def why(self, slot: int) -> str:
        """Why a worker is suspected."""
        with self.changed:
            if slot in self._reasons:
                return f"the connection with it was lost ({self._reasons[slot]})"
            return "it has not answered" if self._links.get(slot) else "another worker has lost it"

    def declare(self, status: MemberStatus, since: int | None = None) -> None:
        """Updates this worker's own entry and announces it to all.

        Raises: SlotTakenError when it stays and another process has taken its slot.
        """
        with self.changed:
            if status != MemberStatus.LEFT:
                self._must_fill_its_slot()
            self.members.declare(status, since)
            self.core.spread()
            self._flush()

    def give_slot(self, nonce: int, address: str, allowed: Container[int] | None = None) -> SlotEntry | None:
        """See `ElasticCore.give_slot`."""
        with self.changed:
            entry = self.core.give_slot(nonce, address, self.redial.ended, allowed)
            self._flush()
        return entry

    def serve(
        self,
        channel: Channel,
        boundary: Callable[[int | None], Handover],
        hash_after: Callable[[int], str | None] = lambda after: None,
    ) -> None:
        """Gives a newcomer a slot that its key may have, and the result of `boundary`; logs a newcomer that is lost.

        Args:
            boundary: returns the state of the round that the newcomer requests, None for the newest.
            hash_after: see `gossamer.transport.elastic.newcomer.host`.
        """
        keys = self._endpoint.keys
        owned = None if keys is None else keys.numbers(channel.certificate)

        def given(place: Applicant) -> SlotEntry | None:
            wanted = None if place.wants is None else {place.wants}
            allowed = owned if wanted is None else wanted if owned is None else wanted & owned
            return self.give_slot(place.nonce, place.address, allowed)

        try:
            host(channel, self.members, self._endpoint, give_slot=given, boundary=boundary, hash_after=hash_after)
        except (OSError, GossamerError) as error:
            log.info("worker %d stopped serving a newcomer: %s", self.worker, error)

    def stay_for_late(self, turn_s: float = math.inf) -> bool:
        """Waits until the workers without which the last round was closed have a state after it, a round's deadline at most.

        They learn of that round once it is closed. If it is the last one, the only states are those of the others.

        Args: `turn_s` is how long this call waits at most; the deadline counts from the first call.
        Returns: whether to call it again.
        """
        end_s = time.monotonic() + turn_s
        with self.changed:
            while self.closing is not None and (late := self.closing.late) and not self.stop():
                now = time.monotonic()
                if self._stays_until_s is None:
                    self._stays_until_s = now + self.core.limit_s
                    log.warning(
                        "worker %d stays for %.0f s at most, so that worker %s can take its state: the last round was closed "
                        "without it",
                        self.worker,
                        self.core.limit_s,
                        " and ".join(map(str, sorted(late))),
                    )
                if now >= min(self._stays_until_s, end_s):
                    return now < self._stays_until_s
                self.changed.wait(min(self._beat_s, min(self._stays_until_s, end_s) - now))
        return False

    def close(self, *, leaves: bool = True, for_good: bool = True) -> None:
        """Announces the departure, unless this worker has failed and so never `leaves`, sends queued letters and ends
        all connections.

        Args: `for_good` is whether a rule that needs everyone should stop waiting for it: it has finished all rounds,
            or failed.
        """
        # In this order: the goodbye is queued while connections exist, then no new one is opened, then none is
        # accepted, and each connection ends once its queue is written.
        if leaves:
            with self.changed:  # so that no peer learns of one without the other
                if for_good and self.closing is not None:
                    self.members.progress(self.worker, self.members.limits.rounds)
                self.declare(MemberStatus.LEFT)
        with self.changed:
            self._closed.set()
            self.changed.notify_all()
            links = [link for several in self._links.values() for link in several]
        self._listener.close()
        self._listener.hang_up()
        self._guests.close()
        finish_together(links, min(5.0, self._endpoint.timeout_s))

    def _flush(self) -> None:
        """Passes the core's outgoing letters to the links, and opens missing ones."""
        outbox, self.core.outbox = [*self.core.outbox], []
        if self.closing is not None:
            outbox += self.closing.outbox
            self.closing.outbox.clear()
        for peer, letter in outbox:
            entry = self.members.entries.get(peer)
            if self._closed.is_set() or entry is None:
                continue
            if (link := self._link_to(entry)) is not None:
                self._send(link, letter)

    def _send(self, link: PeerConnection, letter: Letter) -> None:
        """Queues a letter; a large one so that it may still be replaced."""
        kind = letter.kind
        if kind != LetterKind.MEMBERSHIP:
            # A newer view overtakes no other letter: a goodbye would end what precedes it.
            self._newest.pop((link, LetterKind.MEMBERSHIP), None)
        if kind in (LetterKind.MEMBERSHIP, LetterKind.MESSAGE):
            # A newer view, or answer to a repeated request, replaces an unsent one.
            last = self._newest.get((link, kind))
            if last is None or not last.change(letter):
                last = self._newest[link, kind] = _Waiting(letter)
                link.send(last)
        elif kind == LetterKind.PAYLOAD:
            waiting = self._posted[letter.ticket, link.peer] = _Waiting(letter)
            link.send(waiting)
        else:
            link.send(letter)

    def _link_to(self, entry: SlotEntry) -> PeerConnection | None:
        """The connection with a slot's process; opens one if necessary.

        Of several the newest: a process redials only if the others are gone, which this end may not have noticed.
        """
        links = self._links_to(entry.slot)
        if not links and entry.address:
            return self._open(entry)
        known = [link for link in links if link.nonce is not None]
        return (known or links or [None])[-1]

    def _links_to(self, slot: int) -> list[PeerConnection]:
        """The connections with a slot's process, oldest first."""
        return [link for link in self._links.get(slot, []) if self.core.is_filled_by(slot, link.nonce)]

    def _look_for_claimed(self) -> None:
        """Dials processes reported to fill a slot at their reported address; only their own report counts.

        Each slot once a beat, however many letters say so.
        """
        claims, self.core.claims = self.core.claims, []
        if self._closed.is_set():
            return
        now = time.monotonic()
        for entry in claims:
            connected = any(link.nonce == entry.nonce for link in self._links.get(entry.slot, []))
            if connected or not entry.address or now < self._looked_s.get(entry.slot, -1e9) + self._beat_s:
                continue
            self._looked_s[entry.slot] = now
            if entry.slot == self.worker:
                # In a separate thread: a search takes up to ten seconds, and this thread holds `changed`, which blocks
                # all receivers.
                threading.Thread(
                    target=self._look_for_namesake, args=(entry,), daemon=True, name="gossamer look"
                ).start()
            else:
                self._open(entry, known=False).nonce = entry.nonce

    def _look_for_namesake(self, entry: SlotEntry) -> None:
        """Whether another process with this worker's key fills its slot; runs in a separate thread."""
        endpoint = self._endpoint
        try:
            seen = look(
                entry.address,
                endpoint.secret,
                run=endpoint.run,
                limits=self.members.limits,
                timeout_s=min(10.0, endpoint.timeout_s),
                keys=endpoint.keys,
                whom=self.worker,
            )
            theirs = next((one for one in seen.entries if one.slot == seen.worker), None)
            there = theirs is not None and theirs.slot == self.worker and theirs.nonce != self.members.own.nonce
        except (GossamerError, OSError):  # also an address that is unreachable from here
            there = False
        with self.changed:
            if there:
                self.members.replaced = True
            else:
                self.members.outbid(entry)
                self.core.spread()
            self._flush()
            self.changed.notify_all()

    def _open(self, entry: SlotEntry, *, known: bool = True) -> PeerConnection:
        self.redial.dialled(entry.slot, time.monotonic())

        def opened() -> Channel:  # called by the thread of the connection, without the lock: to dial may take seconds
            try:
                return self._endpoint.dial(entry.address, self.worker, entry.slot, 10.0)
            except ConnectionRefusedError:  # refused by its machine, unlike a timeout: no process listens there
                if known:
                    self.redial.ended.add(entry.nonce)
                raise

        return self._add_link(entry.slot, opened)

    def _add_link(self, peer: int, opened: Callable[[], Channel]) -> PeerConnection:
        link = PeerConnection(peer, self._owner, opened, self._greeting())
        self._links.setdefault(peer, []).append(link)
        return link

    def _greeting(self) -> Letter:
        """The first letter on each connection."""
        body = body_of(membership_update(self.members.entries))
        return Letter(LetterKind.MEMBERSHIP, self.worker, round=max(self.core.round, 0), body=body)

    def _arrived(self, arrival: Arrival) -> None:
        """Handles an authenticated connection: of a peer, a newcomer or a watcher."""
        channel, host, peer, same, whose = arrival
        channel.wait_at_most(self._endpoint.timeout_s)
        if same and peer < self.members.slots and peer != self.worker:
            # One worker may briefly hold several, as both ends dial, but not any number: each costs two threads.
            self._accepted.admit(channel, f"worker {peer} at {whose}")
            with self.changed:
                if not self._closed.is_set():
                    self._add_link(peer, lambda: channel)
                    return
            self._accepted.release(channel)  # its handshake was running while this process closed its connections
            channel.close()
            return
        self._guests.admit(channel, whose)
        try:
            with channel, contextlib.suppress(OSError):
                if same and peer == NEWCOMER and self._host is not None:
                    self._host(channel)
                elif same and peer == WATCHER:
                    show(channel, self.view(), self._endpoint.run)
                else:
                    kind, why = (
                        ("bounds", f"it calls itself worker {peer}") if same else ("other run", "it is of another run")
                    )
                    self.refusals.add(host, RefusedError(kind, why))
        finally:
            self._guests.release(channel)

    def _accepts(self, link: PeerConnection, letter: Letter, size: int) -> bool:
        with self.changed:
            if letter.kind == LetterKind.PAYLOAD:  # the size is known once this worker has begun its first round
                self.changed.wait_for(
                    lambda: self._closed.is_set() or self.core.knows(letter.ticket), self._endpoint.timeout_s
                )
            return self.core.accepts(letter, size)

    def _heard(self, link: PeerConnection, letter: Letter) -> None:
        with self.changed:
            if letter.kind == LetterKind.PAYLOAD:
                size, came_s = letter.body.numel(), time.perf_counter()
                self._deliveries.append(Delivery(letter.ticket, letter.sender, size, 0.0, came_s))
            link.nonce = self.core.receive(letter, time.monotonic(), link.nonce)
            self._look_for_claimed()
            if not self.core.is_filled_by(link.peer, link.nonce):
                # The greeting informs it that another process fills its slot. Nothing else that it sends counts.
                link.send(self._greeting())
            elif (
                letter.kind in (LetterKind.REPORT, LetterKind.PROPOSAL, LetterKind.CLOSED) and self.closing is not None
            ):
                self.closing.receive(letter, time.monotonic())
            if letter.kind == LetterKind.MEMBERSHIP:
                self._reasons.pop(link.peer, None)
            self._flush()
            self.changed.notify_all()

    def _lost(self, link: PeerConnection, why: str) -> None:
        if link.channel is not None:
            self._accepted.release(link.channel)
        with self.changed:
            for kind in (LetterKind.MEMBERSHIP, LetterKind.MESSAGE):
                self._newest.pop((link, kind), None)
            with contextlib.suppress(ValueError):
                self._links.get(link.peer, []).remove(link)
            entry = self.members.entries.get(link.peer)
            current = entry is not None and self.core.is_filled_by(link.peer, link.nonce)
            # Both ends may have dialled at once. Losing one of two connections with a process is not a loss of the
            # process, but its queued letters are gone.
            if not self._closed.is_set() and current and not self._links_to(link.peer):
                if entry is not None and entry.status == MemberStatus.ALIVE:
                    log.info("worker %d lost the connection with worker %d (%s)", self.worker, link.peer, why)
                self._reasons[link.peer] = why
                self.core.lost(link.peer)
            else:
                self.core.resend_view(link.peer)
            self._flush()
            self.changed.notify_all()

    def _look_at(self, now: float) -> None:
        if self.closing is not None:
            self.core.wait_for(self.closing.awaited)
        self.core.tick(now)
        if self.closing is not None:
            self.closing.tick(now)
            self._name_unvouched(self.closing)
            self._name_accused(self.closing)

    def _name_unvouched(self, closing: Closing) -> None:
        """Reports the workers that are alone in claiming another round; one line for each power of two of them."""
        unvouched, closing.unvouched = closing.unvouched, []
        for one in unvouched:
            count = self.refusals.count(f"worker {one.worker}: ahead of the others")
            if count.bit_count() != 1:
                continue
            here, there = one.here // closing.per_round + 1, one.round // closing.per_round + 1
            alone = f"round {here}: worker {one.worker} says that it is in round {there} or has other rounds behind it, alone"
            if one.waits:
                log.warning(
                    "%s, and the others are too few to close a round without it; worker %d keeps its own state and waits: let "
                    "another worker --join, or end the one whose state is wrong and start it again with --join",
                    alone,
                    self.worker,
                )
            else:
                log.warning("%s; worker %d keeps its own state, and does not wait for it", alone, self.worker)

    def _name_accused(self, closing: Closing) -> None:
        """Reports whose message was declined by whom; one line for each power of two of them."""
        accused, closing.accused = closing.accused, []
        for accuser, sender in accused:
            count = self.refusals.count(f"worker {sender}: declined by worker {accuser}")
            if count.bit_count() == 1:
                log.warning(
                    "round %d: worker %d says that what worker %d sent is not finite or cannot be decoded; the round is closed "
                    "without worker %d, or without worker %d if nobody else says so",
                    closing.round // closing.per_round + 1,
                    accuser,
                    sender,
                    sender,
                    accuser,
                )

    def _run_timeouts(self) -> None:
        """Runs timeouts, and redials suspected workers, which may have come back."""
        while not self._closed.wait(self._beat_s):
            self.redial.look(time.monotonic())  # reads files, hence outside the lock
            with self.changed:
                if self._closed.is_set():
                    return  # else it would redial peers whose connections have just ended
                now, core = time.monotonic(), self.core
                self._look_at(now)
                linked = {slot for slot in self._links if self._links_to(slot)}
                for entry in self.members.with_status(MemberStatus.SUSPECT):
                    if entry.slot in linked:
                        core.tell(entry.slot)
                for entry in self.redial.due(now, self.members, linked, core.replaced.values()):
                    self._open(entry).nonce = entry.nonce  # its greeting contains its view
                self._flush()
                self.changed.notify_all()
