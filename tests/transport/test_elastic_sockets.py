"""The transport of elastic runs over real sockets, in one process: peers that vanish, hang, lie, or are strangers."""

import contextlib
import itertools
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from commands import until
from gossamer.errors import PeerError, TransportError
from gossamer.record.packed import packable_snapshot, unpacked
from gossamer.run.participant.state_transfer import fetch_state
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic import newcomer
from gossamer.transport.elastic.closing import LeftOutError
from gossamer.transport.elastic.core import Outcome
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry, membership_update
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.sockets import connection
from gossamer.transport.sockets import letter as letters
from gossamer.transport.sockets.addresses import listen, shown
from gossamer.transport.sockets.addresses import split as host_and_port
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import MOST_WAITING, Endpoint, Owner, PeerConnection
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.header import NEWCOMER, WATCHER, LetterKind
from gossamer.transport.sockets.letter import Letter, body_of, letters_up_to, receive_letter
from gossamer.transport.sockets.listener import Arrival, Listener, Refusals
from tiny import limits

RUN, SECRET = 77, b"the secret of this run"
LIKE = [torch.empty(4)]
LIMIT_S = 60.0


@contextlib.contextmanager
def crew(
    n: int, *, timeout_s: float = LIMIT_S, mute: int | None = None, gone: bool = False, limit_bytes: int | None = None
) -> Iterator[tuple[list[ElasticTransport], list[SlotEntry]]]:
    """Workers that know each other; the address of `mute` is taken by nobody: it accepts, unless it is `gone`."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    entries = [
        SlotEntry(i, 0, secrets.randbits(40), MemberStatus.ALIVE, 0, f"127.0.0.1:{listeners[i].getsockname()[1]}")
        for i in range(n)
    ]
    made = [
        ElasticTransport(
            Members(limits(n), i, entries), Endpoint(listeners[i], RUN, SECRET, timeout_s), limit_bytes=limit_bytes
        )
        for i in range(n)
        if i != mute
    ]
    if gone and mute is not None:
        listeners[mute].close()
    try:
        yield made, entries
    finally:
        with ThreadPoolExecutor(n) as pool:
            list(pool.map(ElasticTransport.close, made))
        for listener in listeners:
            listener.close()


def enter(transport: ElasticTransport, round: int, peers: Sequence[int]) -> Ticket:
    """Begins a round in which it exchanges with these peers."""
    ticket = Ticket(round)
    transport.begin_round(round, lambda alive: [peer for peer in peers if peer in alive], 15)
    for peer in peers:
        transport.expect(ticket, peer, LIKE)
    return ticket


def exchange(transport: ElasticTransport, round: int, peers: Sequence[int]) -> dict[int, Outcome]:
    """One round; returns what became of its exchanges."""
    ticket = enter(transport, round, peers)
    for peer in peers:
        transport.post(ticket, peer, [torch.full((4,), float(transport.worker))])
    transport.wait(ticket)
    received = transport.collect(ticket)
    assert all(frames[0].tolist() == [float(peer)] * 4 for peer, frames in received.items())
    return transport.outcomes()[ticket]


def together(transports: Sequence[ElasticTransport], round: int) -> list[set[Outcome]]:
    """A round in which each exchanges with all others."""
    workers = [transport.worker for transport in transports]
    with ThreadPoolExecutor(len(workers)) as pool:
        found = pool.map(lambda t: exchange(t, round, [i for i in workers if i != t.worker]), transports)
        return [set(outcomes.values()) for outcomes in found]


def hand_made(address: str, me: SlotEntry, entries: list[SlotEntry]) -> Channel:
    """A connection of a peer that keeps to the protocol as long as its test wants."""
    channel = dial(address, SECRET, run=RUN, me=me.slot, timeout_s=LIMIT_S)
    known = membership_update({entry.slot: entry for entry in entries})
    say(channel, Letter(LetterKind.MEMBERSHIP, me.slot, body=body_of(known)))
    return channel


def until_known(transport: ElasticTransport, entry: SlotEntry) -> None:
    """Until a worker has accepted the connection of this process and read who it is: else it dials itself, and nobody listens."""
    until(lambda: [link.nonce for link in transport._links.get(entry.slot, [])] == [entry.nonce])


def say(channel: Channel, letter: Letter, spoilt: bool = False) -> None:
    body = bytearray(letter.content)
    head = letters.encode(letter, RUN)
    if spoilt:
        body[3] ^= 1
    channel.write(head + bytes(body))


def test_two_exchange_and_are_not_disturbed_by_strangers() -> None:
    with crew(2) as (transports, entries):
        host, _, port = entries[0].address.rpartition(":")
        assert together(transports, 0) == [{Outcome.MADE}] * 2
        strangers = []
        for number in range(1000):
            with contextlib.suppress(OSError):
                stranger = socket.create_connection((host, int(port)), timeout=LIMIT_S)
                strangers.append(stranger)
                if number % 3:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20 if number % 2 else secrets.token_bytes(400))
        with pytest.raises(Exception, match=r"secret|hung up|closed|lost"):
            dial(entries[0].address, b"another secret", run=RUN, me=1, timeout_s=LIMIT_S)
        assert together(transports, 1) == [{Outcome.MADE}] * 2
        assert transports[0].members.entries.keys() == {0, 1}
        for stranger in strangers:
            stranger.close()


def test_a_peer_that_vanishes_amid_its_payload_is_missed_at_once_and_by_all() -> None:
    with crew(3, timeout_s=60.0, mute=2, gone=True) as (transports, entries):
        socks = [hand_made(entries[i].address, entries[2], entries) for i in range(2)]
        for transport in transports:
            until_known(transport, entries[2])
        tickets = [enter(transport, 0, [2]) for transport in transports]
        for transport, ticket, sock in zip(transports, tickets, socks, strict=True):
            transport.post(ticket, 2, [torch.zeros(4)])
            payload = Letter(LetterKind.PAYLOAD, 2, ticket, body=torch.zeros(16, dtype=torch.uint8))
            sock.write(letters.encode(payload, RUN) + bytes(7))
        assert not any(transport.ready(ticket) for transport, ticket in zip(transports, tickets, strict=True))
        for sock in socks:
            sock.close()
        for transport, ticket in zip(transports, tickets, strict=True):
            until(lambda t=transport, ticket=ticket: t.ready(ticket))  # long before its deadline of a minute
            assert transport.collect(ticket) == {} and transport.outcomes()[ticket] == {2: Outcome.MISSED}
            assert transport.members.entries[2].status == MemberStatus.SUSPECT


def test_a_peer_that_accepts_and_never_answers_costs_only_the_workers_that_wait_for_it_its_deadline() -> None:
    with crew(3, timeout_s=4.0, mute=2) as (transports, _), ThreadPoolExecutor(2) as pool:
        waits = pool.submit(exchange, transports[0], 0, [1, 2])
        other = pool.submit(exchange, transports[1], 0, [0])
        assert other.result(LIMIT_S) == {0: Outcome.MADE}
        assert waits.result(LIMIT_S) == {1: Outcome.MADE, 2: Outcome.MISSED}


def test_bytes_that_change_in_transit_are_a_miss() -> None:
    with crew(2, timeout_s=60.0, mute=1, gone=True) as (transports, entries):
        sock = hand_made(entries[0].address, entries[1], entries)
        until_known(transports[0], entries[1])
        ticket = enter(transports[0], 0, [1])
        transports[0].post(ticket, 1, [torch.zeros(4)])
        payload = Letter(LetterKind.PAYLOAD, 1, ticket, body=torch.arange(16, dtype=torch.uint8))
        say(sock, payload, spoilt=True)
        until(lambda: transports[0].ready(ticket))
        assert transports[0].collect(ticket) == {} and transports[0].outcomes()[ticket] == {1: Outcome.MISSED}
        sock.close()


def test_when_links_were_cut_the_workers_find_each_other_again() -> None:
    with crew(2, timeout_s=4.0) as (transports, _):
        assert together(transports, 0) == [{Outcome.MADE}] * 2
        for transport in transports:
            for link in [link for links in transport._links.values() for link in links]:
                link.close()
        until(lambda: any(t.members.own.incarnation >= 1 for t in transports))
        until(lambda: all(t.members.alive(99) == {0, 1} for t in transports))
        for round in itertools.count(max(t.members.own.since for t in transports) + 1):
            if together(transports, round) == [{Outcome.MADE}] * 2:
                break
            assert round < 60, "they exchange no more"
            time.sleep(0.1)  # the other end may notice only now that the connection was cut


def test_what_a_worker_says_goes_over_the_newest_connection_of_its_peer() -> None:
    with crew(2, timeout_s=60.0, mute=1, gone=True) as (transports, entries):
        old = hand_made(entries[0].address, entries[1], entries)
        until_known(transports[0], entries[1])
        new = hand_made(entries[0].address, entries[1], entries)  # it holds the old one for gone
        until(lambda: [link.nonce for link in transports[0]._links.get(1, [])] == [entries[1].nonce] * 2)
        ticket = enter(transports[0], 0, [1])
        transports[0].post(ticket, 1, [torch.zeros(4)])
        kinds = []
        while LetterKind.PAYLOAD not in kinds:
            kinds.append(receive_letter(new, RUN, limits(2), lambda letter, size: True).kind)
        old.close(), new.close()


def test_a_worker_whose_slot_another_process_has_taken_does_not_wait_for_its_round_to_be_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        known = [SlotEntry(i, 0, 10 + i, MemberStatus.ALIVE if i == 1 else MemberStatus.SUSPECT, 0) for i in range(3)]
        transport = ElasticTransport(
            Members(limits(3), 1, known), Endpoint(listener, RUN, SECRET, 8.0), limit_bytes=100
        )
        transport.begin_round(0, lambda alive: [], 15)
        transport.members.merge([known[1]._replace(incarnation=1, nonce=99)])
        with pytest.raises(PeerError, match="another process fills slot 1"):
            transport.proposed(0)
        transport.close()


def test_two_parts_of_a_network_that_have_replaced_each_other_meet_again() -> None:
    with crew(2, timeout_s=1.0) as ((one, other), entries):
        with one.changed, other.changed:
            for transport, gone in ((one, entries[1]), (other, entries[0])):
                newer = {gone.slot: gone._replace(incarnation=3, nonce=99, status=MemberStatus.LEFT, address="")}
                letter = Letter(LetterKind.MEMBERSHIP, gone.slot, body=body_of(membership_update(newer)))
                transport.core.receive(letter, time.monotonic(), gone.nonce)
                transport.core.outbox.clear()
        until(lambda: one.members.replaced and other.members.replaced)


def test_a_worker_that_needs_a_state_asks_again_until_its_donor_has_started_or_ended() -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    address = f"127.0.0.1:{listeners[1].getsockname()[1]}"
    entries = [SlotEntry(0, 0, 5, MemberStatus.ALIVE, 0), SlotEntry(1, 0, 6, MemberStatus.ALIVE, 0, address)]
    listeners[1].settimeout(LIMIT_S)
    endpoint, members = Endpoint(listeners[0], RUN, SECRET, LIMIT_S), Members(limits(2), 0, entries)
    kept = newcomer.Handover(6, lambda: packable_snapshot({"x": torch.ones(2)})())
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(fetch_state, members, endpoint, first=1, behind=0, accept=lambda _, state: state)
        for _ in range(2):
            listeners[1].accept()[0].close()  # as of one that is too busy to answer within the time of a handshake
        listeners[1].settimeout(None)
        donor = ElasticTransport(Members(limits(2), 1, entries), Endpoint(listeners[1], RUN, SECRET, LIMIT_S))
        donor._host = lambda channel: donor.serve(channel, lambda _: kept)
        offer, state = asking.result(LIMIT_S)
    assert (offer.donor, offer.after, state["x"].tolist()) == (1, 6, [1.0, 1.0])
    donor.close()
    with pytest.raises(PeerError, match="no worker gives it a state"):
        fetch_state(members, endpoint._replace(timeout_s=1e6), first=1, behind=0, accept=lambda _, state: state)
    listeners[0].close()


def test_a_worker_accepts_connections_again_after_it_had_no_file_descriptor_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gossamer.transport.sockets.listener.prove_to_dialler", lambda *args, **options: (0, True))
    came: list[Arrival] = []  # and stay open, so that the second needs a descriptor of its own
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as first, socket.socket() as second:
        listener = Listener(server, SECRET, RUN, came.append, Refusals())
        os.close(lowest := os.dup(0))
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, files[1]))
        try:
            for client in (first, second):  # the system takes a descriptor for the first one before it comes
                client.connect(server.getsockname())
            time.sleep(0.3)
            assert len(came) < 2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        until(lambda: len(came) == 2)
        listener.close()
        for arrival in came:
            arrival.channel.close()


def test_a_worker_accepts_connections_again_after_it_had_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = threading.Thread.start, list[str]()

    def once(self: threading.Thread) -> None:
        if self.name == "gossamer arrival" and not failed:
            failed.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    with crew(2) as (transports, entries):
        monkeypatch.setattr(threading.Thread, "start", once)
        with socket.create_connection(host_and_port(entries[0].address), LIMIT_S) as first:
            assert first.recv(32) == b""
        with socket.create_connection(host_and_port(entries[0].address), LIMIT_S) as second:
            assert len(second.recv(32)) == 32
        until(lambda: not transports[0]._listener.busy)
        assert together(transports, 0) == [{Outcome.MADE}] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_an_internal_fault_ends_the_thread_that_writes_a_worker_loses_the_connection_and_opens_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = list[threading.Thread]()

    def once(address: str, secret: bytes, *, me: int, **more: Any) -> Channel:
        if not failed:
            failed.append(threading.current_thread())
            raise ZeroDivisionError("a fault")
        return dial(address, secret, me=me, **more)

    monkeypatch.setattr(connection, "dial", once)
    with crew(2, timeout_s=8.0) as (transports, _):
        together(transports, 0)
        assert failed
        for thread in failed:
            thread.join(LIMIT_S)  # pytest counts its error against the test in which the thread ends
        links = [transport._links for transport in transports]
        until(lambda: all(link.channel for one in links for several in one.values() for link in [*several]))
        until(lambda: all(transport.members.alive(9) == {0, 1} for transport in transports))
        assert together(transports, 9) == [{Outcome.MADE}] * 2


def test_a_message_that_is_no_longer_awaited_is_not_sent() -> None:
    """Over a link that is slower than its rounds: what counts there would come behind all payloads that do not."""
    with crew(2, timeout_s=60.0, mute=1) as (transports, entries):
        (transport,) = transports
        transport.core.limit_s = 0.1
        with hand_made(entries[0].address, entries[1], entries) as channel:
            until_known(transport, entries[1])
            for round in range(6):
                ticket, like = Ticket(round), [torch.empty(1 << 22)]
                transport.begin_round(round, lambda alive: [1], 15)
                transport.expect(ticket, 1, like)
                transport.post(ticket, 1, like)
                transport.wait(ticket)
                assert transport.collect(ticket) == {}
                assert transport.outcomes()[ticket] == {1: Outcome.MISSED}
            came = list[tuple[LetterKind, int]]()
            while (LetterKind.DECLINE, 5) not in came:
                letter = receive_letter(channel, RUN, transport.members.limits, lambda letter, size: True)
                came.append((letter.kind, letter.ticket.round))
        assert [kind for kind, _ in came].count(LetterKind.PAYLOAD) <= 1
        assert {round for kind, round in came if kind == LetterKind.DECLINE} == {0, 1, 2, 3, 4, 5}


def test_all_workers_may_fetch_their_states_from_one_address_at_once() -> None:
    served, go_on = list[Channel](), threading.Event()

    def host(channel: Channel) -> None:
        served.append(channel)
        assert go_on.wait(LIMIT_S)
        channel.write(b"state")

    listener = socket.create_server(("127.0.0.1", 0))
    me = SlotEntry(0, 0, 7, MemberStatus.ALIVE, 0, f"127.0.0.1:{listener.getsockname()[1]}")
    transport = ElasticTransport(Members(limits(13), 0, [me]), Endpoint(listener, RUN, SECRET, LIMIT_S), host=host)
    with contextlib.closing(transport), contextlib.ExitStack() as open_:
        newcomers = [
            open_.enter_context(dial(me.address, SECRET, run=RUN, me=NEWCOMER, timeout_s=LIMIT_S)) for _ in range(12)
        ]
        until(lambda: len(served) == 12)
        go_on.set()
        assert [one.read(5) for one in newcomers] == [b"state"] * 12


def test_two_that_reach_the_others_and_not_each_other_hold_up_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two behind routers at home, which dial and cannot be dialled: one of them is left out under every leader."""

    def cut(address: str, secret: bytes, *, me: int, whom: int, **more: Any) -> Channel:
        if {me, whom} == {1, 2}:
            raise OSError("there is no way")
        return dial(address, secret, me=me, whom=whom, **more)

    def closed(transport: ElasticTransport) -> int | None:
        """The attempts of a round in which it takes part; None where it is left out."""
        transport.begin_round(0, lambda alive: sorted(alive - {transport.worker}), 0)
        try:
            for attempts in itertools.count(1):
                attempt, alive = transport.proposed(0)
                ticket, peers = Ticket(0, 0, 2 * attempt), alive - {transport.worker}
                for peer in peers:
                    transport.expect(ticket, peer, LIKE)
                for peer in peers:
                    transport.post(ticket, peer, [torch.full((4,), float(transport.worker))])
                transport.wait(ticket)
                if transport.committed(attempt, whole=peers == transport.collect(ticket).keys()):
                    return attempts
        except LeftOutError:
            return None

    monkeypatch.setattr(connection, "dial", cut)
    with crew(3, timeout_s=3.0, limit_bytes=1 << 12) as (transports, _), ThreadPoolExecutor(3) as pool:
        first, *two = pool.map(closed, transports)
    assert first is not None and sorted(two, key=lambda one: one is None)[1:] == [None] and any(two)


def test_an_attempt_that_failed_elsewhere_is_given_up_as_soon_as_a_later_one_is_proposed() -> None:
    fails = threading.Barrier(3)

    def closed(transport: ElasticTransport) -> int:
        """The attempts of a round, of which worker 2 cannot complete the first."""
        transport.begin_round(0, lambda alive: sorted(alive - {transport.worker}), 0)
        for attempts in itertools.count(1):
            attempt, alive = transport.proposed(0)
            ticket, peers = Ticket(0, 0, 2 * attempt), alive - {transport.worker}
            whole = (transport.worker, attempts) != (2, 1)
            if whole:
                for peer in peers:
                    transport.expect(ticket, peer, LIKE)
                for peer in peers:
                    transport.post(ticket, peer, [torch.full((4,), float(transport.worker))])
            if attempts == 1:
                fails.wait(LIMIT_S)
            if whole:
                transport.wait(ticket)
                whole = peers == transport.collect(ticket).keys()
            if transport.committed(attempt, whole=whole):
                return attempts
        raise AssertionError

    start_s = time.monotonic()
    with crew(3, timeout_s=LIMIT_S, limit_bytes=1 << 12) as (transports, _), ThreadPoolExecutor(3) as pool:
        assert [*pool.map(closed, transports)] == [2, 2, 2]
        assert time.monotonic() - start_s < LIMIT_S / 2, "they have waited for messages that nobody sends"


@contextlib.contextmanager
def black_hole(address: str, most_bytes: int) -> Iterator[str]:
    """An address that leads to another over a path which loses every packet above this size, and so whatever follows it.

    What is sent there again is lost again: towards that end nothing arrives any more, and no connection ends.
    """
    ends: list[socket.socket] = []

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if len(data) > most_bytes:
                    while source.recv(1 << 16):  # its sender sees an open window all the same
                        pass
                    break
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = way.accept()[0], socket.create_connection(host_and_port(address))
                ends.extend((near, far))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=(one, other), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as way:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{way.getsockname()[1]}"
        finally:
            way.shutdown(socket.SHUT_RDWR)
            for end in ends:
                end.close()


def test_where_small_messages_pass_and_large_ones_never_do_an_exchange_is_missed_after_one_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As over a tunnel whose path is narrower than its ends believe, where nobody tells them."""
    large = [torch.empty(50_000)]

    def missed(transport: ElasticTransport) -> set[Outcome]:
        ticket, peer = Ticket(0), 1 - transport.worker
        transport.begin_round(0, lambda alive: [peer], 15)
        transport.expect(ticket, peer, large)
        transport.post(ticket, peer, [torch.zeros(50_000)])
        transport.wait(ticket)
        assert transport.collect(ticket) == {}
        return set(transport.outcomes()[ticket].values())

    with (
        crew(2, timeout_s=3.0, limit_bytes=1 << 20) as (transports, entries),
        black_hole(entries[0].address, 4_000) as to_0,
        black_hole(entries[1].address, 4_000) as to_1,
        ThreadPoolExecutor(2) as pool,
    ):
        ways = {entries[0].address: to_0, entries[1].address: to_1}
        monkeypatch.setattr(
            connection, "dial", lambda address, secret, **more: dial(ways.get(address, address), secret, **more)
        )  # a transport of another test may still dial
        waits = [pool.submit(missed, transport) for transport in transports]
        assert all(each.result(LIMIT_S) in ({Outcome.MISSED}, {Outcome.UNSURE}) for each in waits)


def test_two_workers_that_do_not_know_each_other_meet_by_the_addresses_of_their_run() -> None:
    with crew(2, timeout_s=4.0) as (transports, entries):
        for transport, other in zip(transports, (1, 0), strict=True):
            with transport.changed:  # as where all have died through whom they could know each other
                gone = SlotEntry(other, 0, 0, MemberStatus.LEFT, 0)
                transport.members.entries[other] = gone
        transports[0].redial.addresses = lambda: [(1, entries[1].address), (0, entries[0].address)]
        until(lambda: all(transport.members.alive(99) == {0, 1} for transport in transports))


def test_the_state_of_a_round_is_packed_only_when_the_first_newcomer_asks_and_is_that_of_its_end() -> None:
    packed: list[bytes] = []
    x = torch.zeros(5)
    pack = packable_snapshot({"x": x, "inner": {"step": 4}})
    kept = newcomer.Handover(3, lambda: packed.append(pack()) or packed[-1])
    x.fill_(1.0)  # the worker trains on
    assert not packed
    entry = SlotEntry(1, 1, 5, MemberStatus.JOINING, 0, "127.0.0.1:4002")
    own = newcomer.Applicant(5, "127.0.0.1:4002", 1)
    members = Members(limits(3), 0, [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0, "127.0.0.1:4000"), entry])
    for _ in range(2):
        near, far = (Channel(sock, LIMIT_S) for sock in socket.socketpair())
        listener = socket.create_server(("127.0.0.1", 0))
        with near, far, listener, ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
            patch.setattr(newcomer, "dial", lambda *args, end=far, **options: end)
            hosting = pool.submit(
                newcomer.host,
                near,
                members,
                Endpoint(listener, RUN, SECRET, LIMIT_S),
                give_slot=lambda place: entry,
                boundary=lambda _: kept,
            )
            offer = newcomer.ask("", SECRET, own, run=RUN, limits=limits(3), timeout_s=LIMIT_S)
            hosting.result(LIMIT_S)
        assert offer.after == 3 and offer.raw is not None
        state = unpacked(offer.raw)
        assert torch.equal(state["x"], torch.zeros(5)) and state["inner"] == {"step": 4}
    assert len(packed) == 1


@pytest.mark.parametrize(
    "entry",
    [{"incarnation": 1 << 61}, {"incarnation": 1 << 29}, {"round": 1 << 61}, {"since": 1 << 61}, {"steps": 1 << 61}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_membership_update_out_of_bounds_ends_its_connection_changes_nothing_and_is_counted(
    entry: dict[str, int],
) -> None:
    with crew(3, timeout_s=60.0, mute=2, gone=True) as (transports, entries):
        sock = hand_made(entries[0].address, entries[2], entries)
        until_known(transports[0], entries[2])
        own = transports[0].members.own
        wrong = {1: entries[1]._replace(**entry, status=MemberStatus.LEFT)}
        say(sock, Letter(LetterKind.MEMBERSHIP, 2, body=body_of(membership_update(wrong))))
        until(lambda: transports[0].view().refused == {"worker 2: bounds": 1})
        accepts = letters_up_to(*LetterKind, most_bytes=1 << 20)
        while (letter := receive_letter(sock, RUN, limits(3), accepts)).kind != LetterKind.REFUSAL:
            pass
        assert b"a membership update that cannot be in a run of 3 workers" in letter.content
        sock.close()
        assert transports[0].members.entries[1].status == MemberStatus.ALIVE and transports[0].members.own == own
        until(lambda: all(transport.members.alive(0) == {0, 1} for transport in transports))
        assert together(transports, 0) == [{Outcome.MADE}] * 2


def test_one_letter_of_an_impossible_round_neither_freezes_a_run_nor_moves_it() -> None:
    with crew(3, timeout_s=60.0, mute=2, gone=True) as (transports, entries):
        sock = hand_made(entries[0].address, entries[2], entries)
        say(sock, Letter(LetterKind.PONG, 2, round=1 << 61))
        until(lambda: transports[0].view().refused == {"worker 2: bounds": 1})
        sock.close()
        assert transports[0].newest_round == 0
        until(lambda: all(transport.members.alive(0) == {0, 1} for transport in transports))
        assert together(transports, 0) == [{Outcome.MADE}] * 2


def test_idle_connections_of_one_worker_are_few_and_others_exchange_meanwhile() -> None:
    with crew(3, timeout_s=60.0, mute=2, gone=True) as (transports, entries):
        before = threading.active_count()
        idle = [dial(entries[0].address, SECRET, run=RUN, me=2, timeout_s=LIMIT_S) for _ in range(40)]
        idle += [dial(entries[0].address, SECRET, run=RUN, me=WATCHER + 1, timeout_s=LIMIT_S) for _ in range(20)]
        until(lambda: len(transports[0]._links.get(2, [])) <= 4)
        until(lambda: threading.active_count() <= before + 2 * 4 + 8 + 4)
        for channel in idle:
            channel.close()
        until(lambda: all(transport.members.alive(0) == {0, 1} for transport in transports))
        assert together(transports, 0) == [{Outcome.MADE}] * 2


def test_a_peer_that_asks_and_does_not_read_loses_its_connection() -> None:
    lost, refusals, opens = list[str](), Refusals(), threading.Event()

    def opened() -> Channel:
        opens.wait(LIMIT_S)
        raise ConnectionError("it never opened")

    with socket.socket() as unused:
        endpoint = Endpoint(unused, RUN, SECRET, LIMIT_S)
    owner = Owner(
        0,
        endpoint,
        limits(2),
        lambda link, letter, size: True,
        lambda link, letter: None,
        lambda link, why: lost.append(why),
        refusals,
    )
    link = PeerConnection(1, owner, opened)
    for _ in range(2 * MOST_WAITING):
        link.send(Letter(LetterKind.PONG, 0))
    until(lambda: len(lost) == 1)
    assert lost == [f"it reads more slowly than letters to it come, and {MOST_WAITING} of them wait"]
    assert not refusals.counts, "others may be the cause"
    assert link._letters.qsize() <= MOST_WAITING + 1
    opens.set()


def test_of_views_that_wait_only_the_newest_is_sent_and_it_overtakes_no_other_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = list[Any]()
    with crew(2) as (transports, entries):
        assert together(transports, 0) == [{Outcome.MADE}] * 2
        with transports[0].changed, monkeypatch.context() as patched:
            link = transports[0]._link_to(entries[1])
            assert link is not None
            patched.setattr(link, "send", queued.append)
            for _ in range(3):
                transports[0].members.declare(MemberStatus.ALIVE)
                transports[0].core.spread()
                transports[0]._flush()
            transports[0].core.announce()
            transports[0].core.resend_view(1)
            transports[0]._flush()
        kinds = [(one if isinstance(one, Letter) else one()).kind for one in queued]
    assert kinds == [LetterKind.MEMBERSHIP, LetterKind.PONG, LetterKind.MEMBERSHIP]


def test_two_workers_exchange_over_ipv6() -> None:
    try:
        listeners = [listen("::1", 0) for _ in range(2)]
    except TransportError:
        pytest.skip("this machine has no ::1")
    where = [shown(*listener.getsockname()[:2]) for listener in listeners]
    entries = [SlotEntry(i, 0, 10 + i, MemberStatus.ALIVE, 0, where[i]) for i in range(2)]
    assert where[0].startswith("[::1]:")
    made = [
        ElasticTransport(Members(limits(2), i, entries), Endpoint(listeners[i], RUN, SECRET, 8.0)) for i in range(2)
    ]
    assert together(made, 0) == [{Outcome.MADE}] * 2
    for transport in made:
        transport.close()
