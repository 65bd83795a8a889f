"""Connections of a run in rounds with keys: each worker a thread here, over loopback, with one notice board."""

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_transport import frames_of, same
from torch.distributed import HashStore

from commands import until
from gossamer.errors import LostConnectionError, PeerError, RefusedError
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.ask import look
from gossamer.transport.processes import waiting
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.sockets import SocketTransport
from gossamer.transport.sockets import connection
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.header import LetterKind, Limits
from gossamer.transport.sockets.letter import Letter, send_letter
from gossamer.transport.sockets.listener import Arrival, Listener, Refusals

RUN, SECRET, N = 7, b"known to all workers of this run", 3
TIMEOUT_S = 4.0


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SocketTransport]]:
    """The connections of three workers, each of which somebody hangs up on once: a listener that too many dial at once does."""
    left = {(1, 0), (2, 0), (2, 1)}

    def hung_up_on(address: str, secret: bytes, *, me: int, whom: int, **how: Any) -> Channel:
        if (me, whom) in left:
            left.remove((me, whom))
            raise LostConnectionError("it was lost during the handshake")
        return dial(address, secret, me=me, whom=whom, **how)

    monkeypatch.setattr(connection, "dial", hung_up_on)
    store, listeners = HashStore(), [socket.create_server(("127.0.0.1", 0)) for _ in range(N)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    made = [
        SocketTransport(
            Member.at(i, N, torch.device("cpu"), store, secret=SECRET),
            Endpoint(listener, RUN, SECRET, TIMEOUT_S),
            addresses,
        )
        for i, listener in enumerate(listeners)
    ]
    try:
        yield made
        until(lambda: not left)  # a test may need some of the connections alone
    finally:
        for one in made:
            one.close(at_once=True)


def test_a_worker_that_connects_when_it_is_given_up_is_hung_up_on_in_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        member = Member.at(0, 2, torch.device("cpu"), HashStore(), secret=SECRET)
        transport = SocketTransport(member, Endpoint(listener, RUN, SECRET, 0.2), [address, "127.0.0.1:9"])
        until(lambda: transport._lost.keys() == {1})
        with dial(address, SECRET, run=RUN, me=1, timeout_s=10.0) as late:
            transport.close()
            with pytest.raises(ConnectionError):
                late.read(1)


def test_a_worker_that_connects_while_this_one_closes_is_hung_up_on() -> None:
    class AsItCloses(queue.SimpleQueue[Channel]):
        def put(self, item: Channel, block: bool = True, timeout: float | None = None) -> None:
            closes.start()
            closes.join(0.2)  # it must not be over before it can find this arrival
            super().put(item)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        member = Member.at(0, 2, torch.device("cpu"), HashStore(), secret=SECRET)
        transport = SocketTransport(member, Endpoint(listener, RUN, SECRET, TIMEOUT_S), [address, "127.0.0.1:9"])
        transport._peers[1] = transport._peers[1]._replace(arrivals=AsItCloses())
        closes = threading.Thread(target=transport.close, kwargs={"at_once": True})
        with dial(address, SECRET, run=RUN, me=1, timeout_s=10.0) as late, pytest.raises(ConnectionError):
            late.read(1)
        closes.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_that_fails_with_a_new_connection_hangs_up_on_the_other_end() -> None:
    attending = list[threading.Thread]()

    def arrived(_: Arrival) -> None:
        attending.append(threading.current_thread())
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as sock:
        listener = Listener(sock, SECRET, RUN, arrived, Refusals())
        with dial(listener.address, SECRET, run=RUN, me=1, timeout_s=10.0) as other, pytest.raises(ConnectionError):
            other.read(1)
        listener.close()
    (thread,) = attending
    thread.join(10.0)  # pytest counts its error against the test in which the thread ends


def exchange(workers: list[SocketTransport], ticket: Ticket) -> list[dict[int, list[torch.Tensor]]]:
    """What each has of the frames that all send to all; frames of worker i have the seed i."""

    def take_part(me: SocketTransport) -> dict[int, list[torch.Tensor]]:
        others = [i for i in range(N) if i != me.worker]
        for i in others:
            me.expect(ticket, i, frames_of(i))
        for i in others:
            me.post(ticket, i, frames_of(me.worker))
        me.wait(ticket)
        return me.collect(ticket)

    with ThreadPoolExecutor(N) as threads:
        return list(threads.map(take_part, workers))


def test_frames_of_every_form_arrive_from_all_and_are_timed(workers: list[SocketTransport]) -> None:
    for round in range(3):
        for me, got in enumerate(exchange(workers, Ticket(round))):
            assert got.keys() == {*range(N)} - {me} and all(same(got[i], frames_of(i)) for i in got)
    deliveries = workers[0].deliveries()
    assert sorted((one.ticket.round, one.peer) for one in deliveries) == [(r, i) for r in range(3) for i in (1, 2)]
    assert all(one.seconds >= 0 and one.payload_bytes for one in deliveries) and len(workers[0].waits()) == 3


def test_messages_of_a_worker_that_is_ahead_wait_until_they_are_announced(workers: list[SocketTransport]) -> None:
    ahead, behind, frame = workers[0], workers[1], [torch.arange(1000.0)]
    for round in range(20):
        ahead.post(Ticket(round), 1, frame)
    time.sleep(0.1)
    for round in range(20):
        behind.expect(Ticket(round), 0, frame)
        behind.wait(Ticket(round))
        assert same(behind.collect(Ticket(round))[0], frame)
    ahead.wait(Ticket(19))  # what was posted has left, and its memory may change


def test_a_message_that_came_counts_though_its_sender_has_ended_and_another_names_it(
    workers: list[SocketTransport],
) -> None:
    frame = [torch.ones(5)]
    workers[1].expect(Ticket(3), 0, frame)
    workers[0].post(Ticket(3), 1, frame)
    workers[0].wait(Ticket(3))
    workers[0].close()
    workers[1].wait(Ticket(3))
    assert same(workers[1].collect(Ticket(3))[0], frame)
    workers[1].expect(Ticket(4), 0, frame)
    with pytest.raises(PeerError, match="worker 0 closed its connection in round 4; it was ended or ended early"):
        workers[1].wait(Ticket(4))
    # It waits for a worker that lives, and learns from the notice board who failed first.
    workers[2].expect(Ticket(4), 1, frame)
    with pytest.raises(PeerError, match="worker 0 closed its connection in round 4, as worker 1 reported"):
        workers[2].wait(Ticket(4))


def test_a_message_that_has_left_counts_though_its_peer_ends_while_this_process_stands_still(
    workers: list[SocketTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, ticket, goes_on, pauses = [torch.ones(5)], Ticket(3), threading.Event(), Counter[int]()

    def send_and_stand_still(channel: Channel, letter: Letter, run: int) -> None:
        send_letter(channel, letter, run)
        if letter.kind is LetterKind.PAYLOAD:
            assert goes_on.wait(60)

    def pause(seconds: float) -> None:
        pauses[threading.get_ident()] += 1
        if pauses[threading.get_ident()] == 2:  # the first has ended while no other thread ran
            goes_on.set()
            until(lambda: not workers[0]._exchanges[ticket].pending)

    exchange(workers, Ticket(0))  # all are connected
    monkeypatch.setattr(connection, "send_letter", send_and_stand_still)
    monkeypatch.setattr(
        waiting, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=time.perf_counter, sleep=pause)
    )
    workers[1].expect(ticket, 0, frame)
    workers[0].post(ticket, 1, frame)
    workers[1].wait(ticket)
    workers[1].close()
    workers[0].wait(ticket)
    assert pauses and workers[0].collect(ticket) == {}


def test_a_message_of_another_size_ends_the_connection_and_names_its_sender(workers: list[SocketTransport]) -> None:
    workers[1].expect(Ticket(0), 0, [torch.ones(5)])
    workers[0].post(Ticket(0), 1, [torch.ones(6)])
    with pytest.raises(PeerError, match="worker 0 sent bytes that do not match the agreed message in round 0"):
        workers[1].wait(Ticket(0))


def test_a_worker_that_sends_nothing_is_named_after_the_timeout(workers: list[SocketTransport]) -> None:
    workers[1].expect(Ticket(0), 0, [torch.ones(5)])
    with pytest.raises(PeerError, match=f"worker 0 did not answer for {TIMEOUT_S:g} s in round 0"):
        workers[1].wait(Ticket(0))


def test_a_second_connection_in_a_workers_name_takes_no_part_and_a_watcher_learns_of_all(
    workers: list[SocketTransport],
) -> None:
    exchange(workers, Ticket(5))
    address = workers[0]._addresses[0]
    with dial(address, SECRET, run=RUN, me=2, timeout_s=TIMEOUT_S) as channel, pytest.raises(ConnectionError):
        channel.read(1)
    with pytest.raises(RefusedError, match="runs another configuration"):
        dial(address, SECRET, run=RUN + 1, me=2, timeout_s=TIMEOUT_S)
    until(lambda: sum(workers[0]._refusals.counts.values()) == 2)  # counted after the other end has read it
    view = look(address, SECRET, run=RUN, limits=Limits(N, 9, 9), timeout_s=TIMEOUT_S)
    assert [(one.status.name, one.round) for one in view.entries] == [("ALIVE", 5)] * N
    assert view.silent_s.keys() == {1, 2} and sum(view.refused.values()) == 2
    exchange(workers, Ticket(6))


def test_a_letter_that_is_no_payload_ends_the_connection(workers: list[SocketTransport]) -> None:
    workers[0]._peers[1].connection.send(Letter(LetterKind.PING, 0))
    workers[1].expect(Ticket(0), 0, [torch.ones(5)])
    with pytest.raises(PeerError, match="worker 0 sent bytes that do not match"):
        workers[1].wait(Ticket(0))
