"""Carrying bytes: the wire format, mailboxes in memory, and real processes over gloo on loopback."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, TCPStore

from commands import until
from gossamer.errors import GossamerError, PeerError, TransportError
from gossamer.transport import wire
from gossamer.transport.contract import Ticket
from gossamer.transport.memory import MemoryNetwork, Parcel
from gossamer.transport.processes.backend import hang_up, poll, threads_end
from gossamer.transport.processes.board import Board, Cause, Failure, Note, blame, sentence
from gossamer.transport.processes.group import GroupTransport
from gossamer.transport.processes.launch import join, leave
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import THREADS, Entries

RUN = 0x1234_5678_9ABC_DEF0
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex128, torch.float16]


LIMIT_S = 60.0
"""How long a busy machine may take for what takes an idle one a moment."""


def frames_of(seed: int) -> list[Tensor]:
    """A message of many shapes and dtypes; equal seeds give equal frames."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (), (7,), (0,), (2, 0, 3), (1,), (130,)]
    return [
        torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=rng).to(dtype)
        for shape, dtype in zip(shapes, DTYPES, strict=True)
    ]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


# --- wire ------------------------------------------------------------------------------------------------------------

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADERS = st.builds(wire.Header, U64, st.builds(Ticket, U64, U32, U32), U32, U64, st.none() | U64)


@settings(max_examples=50, deadline=None)
@given(HEADERS)
def test_a_header_survives_the_wire(header: wire.Header):
    raw = wire.encode_header(header)
    assert len(raw) == wire.HEADER_BYTES
    assert wire.decode_header(raw, header.sender) == header
    wire.check_header(header, header)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES), st.booleans())
def test_foreign_bytes_are_refused_with_a_sentence(raw: bytes, with_magic: bool):
    raw = wire.MAGIC + raw[4:] if with_magic else raw
    try:
        read = wire.decode_header(raw, 3)
    except TransportError as error:
        read = str(error)
    assert "worker 3" in read if isinstance(read, str) else wire.decode_header(wire.encode_header(read), 3) == read


HEADER = wire.Header(RUN, Ticket(4, 1, 0), sender=2, payload_bytes=64)


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (HEADER._replace(run=7), PeerError, "worker 2 runs configuration 0000000000000007"),
        (HEADER._replace(sender=1), PeerError, "calls itself worker 1"),
        (HEADER._replace(ticket=Ticket(5, 1)), TransportError, "round=5"),
        (HEADER._replace(payload_bytes=65), TransportError, "sent 65 bytes"),
        (HEADER._replace(checksum=0), PeerError, "checksum"),
    ],
)
def test_a_header_that_differs_is_refused_by_name(other: wire.Header, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        wire.check_header(other, HEADER)


def test_another_version_is_refused():
    raw = bytearray(wire.encode_header(HEADER))
    raw[4] += 1
    with pytest.raises(PeerError, match=f"version {wire.VERSION + 1} .* version {wire.VERSION}"):
        wire.decode_header(bytes(raw), 2)


BLOCK_BYTES = 1 << 16


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3), st.integers(0, 40), st.integers(0, 9), st.data())
def test_a_checksum_shows_every_flipped_bit_wherever_the_payload_lies(
    blocks: int, more: int, offset: int, data: st.DataObject
):
    size = blocks * BLOCK_BYTES + more
    memory = torch.arange(offset + size, dtype=torch.int64).mul(0x9E37_79B9).bitwise_right_shift(7).to(torch.uint8)
    payload = memory[offset:]
    sent = wire.checksum(payload)
    assert sent == wire.checksum(payload.clone()) < 1 << 64
    if size:
        place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
        payload[place] ^= 1 << bit
        assert wire.checksum(payload) != sent


@pytest.mark.parametrize("size", [1, 8, 64, 1448, 4096, 65_536, BLOCK_BYTES])
def test_a_checksum_shows_parts_that_changed_places_or_were_lost(size: int):
    payload = torch.randint(
        0, 256, (4 * BLOCK_BYTES + 9,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    sent = wire.checksum(payload)
    moved, lost = payload.clone(), payload.clone()
    moved[:size], moved[size : 2 * size] = payload[size : 2 * size], payload[:size]
    lost[size : 2 * size] = 0
    assert len({sent, wire.checksum(moved), wire.checksum(lost)}) == 3


FRAME = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3))


@settings(max_examples=50, deadline=None)
@given(st.lists(FRAME, max_size=5), st.integers(0, 17))
def test_frames_survive_packing_as_views_wherever_the_buffer_starts(kinds: list[Any], offset: int):
    frames = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in kinds]
    packed = wire.pack_frames(frames)
    assert packed.dtype == torch.uint8 and packed.numel() == wire.frames_bytes(frames)
    assert same(wire.unpack_frames(packed, [frame.to("meta") for frame in frames]), frames)
    for frame in wire.unpack_frames(packed, frames):
        assert frame.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    elsewhere = torch.zeros(offset + packed.numel(), dtype=torch.uint8)
    elsewhere[offset:] = packed
    assert same(wire.unpack_frames(elsewhere[offset:], frames), frames)


def test_one_contiguous_frame_is_packed_without_a_copy():
    frame = torch.arange(12.0)[2:].view(2, 5)
    assert wire.pack_frames([frame]).data_ptr() == frame.data_ptr()
    assert same(wire.unpack_frames(wire.pack_frames([frame.T]), [frame.T]), [frame.T])


def test_the_gaps_between_frames_carry_nothing():
    def full(size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    packed = wire.pack_frames([torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)], full)
    assert not packed.any()


def test_a_message_beyond_the_limit_is_refused():
    with pytest.raises(TransportError, match=str(wire.LIMIT_BYTES)):
        wire.pack_frames([torch.empty(wire.LIMIT_BYTES + 1, dtype=torch.uint8, device="meta")])


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_hands_over_the_frames_themselves():
    network = MemoryNetwork(3)
    a, b = network.transport(0), network.transport(2)
    frames = frames_of(1)
    b.expect(Ticket(0), 0, [frame.to("meta") for frame in frames])
    a.post(Ticket(0), 2, frames)
    b.wait(Ticket(0))
    assert all(x is y for x, y in zip(b.collect(Ticket(0))[0], frames, strict=True))
    assert a.ready(Ticket(0)) and a.collect(Ticket(0)) == {}


def test_waiting_in_memory_for_what_cannot_come_names_ticket_and_peers():
    transport = MemoryNetwork(3).transport(1)
    for peer in (2, 0):
        transport.expect(Ticket(4, 1), peer, [])
    with pytest.raises(TransportError, match=r"worker 1 .*round=4, fragment=1.*workers 0, 2"):
        transport.wait(Ticket(4, 1))


def test_memory_refuses_frames_that_were_not_announced():
    network = MemoryNetwork(2)
    network.transport(0).post(Ticket(0), 1, [torch.zeros(3)])
    receiver = network.transport(1)
    receiver.expect(Ticket(0), 0, [torch.zeros(3, dtype=torch.float64)])
    with pytest.raises(TransportError, match="float64"):
        receiver.collect(Ticket(0))


def test_parcels_can_be_dropped_delayed_and_reordered():
    def late(parcel: Parcel) -> bool:
        return parcel.ticket.round > 2

    network = MemoryNetwork(2, late)
    a, b = network.transport(0), network.transport(1)
    for t in range(4):
        b.expect(Ticket(t), 0, [torch.empty(1)])
        a.post(Ticket(t), 1, [torch.tensor([float(t)])])
    assert [b.ready(Ticket(t)) for t in range(4)] == [False, False, False, True]
    dropped, delayed, reordered = network.held
    network.release(reordered)
    assert [b.ready(Ticket(t)) for t in range(4)] == [False, False, True, True]
    network.release(delayed)
    assert b.collect(Ticket(1))[0][0].item() == 1.0 and b.collect(Ticket(2))[0][0].item() == 2.0
    assert network.held == [dropped]
    with pytest.raises(TransportError):
        b.wait(Ticket(0))


# --- notice board ----------------------------------------------------------------------------------------------------


def test_blame_follows_those_that_are_alive_to_the_one_that_is_not():
    before = {1: Note(3, (2, 4)), 2: Note(5, (3,)), 3: Note(9, (5,)), 4: Note(2, (0,))}
    after = {1: Note(6, (2, 4)), 2: Note(8, (3,)), 3: Note(9, (5,)), 4: Note(7, (0,))}
    assert blame(0, [1], before, after) == [1, 2, 3]


def test_blame_ends_when_everybody_waits_for_somebody():
    notes = {0: Note(1, (1,)), 1: Note(2, (2,)), 2: Note(3, (1, 0))}
    assert blame(0, [1], {}, notes) == [1]


def test_only_the_first_failure_is_pinned_up():
    store = HashStore()
    first, second = Failure(2, 7, 0, "closed"), Failure(0, 7, 1, "silent")
    boards = [Board(Entries(store, b"s"), i, 3, patience_s=5.0) for i in range(2)]
    assert boards[1].failure() is None
    assert boards[0].claim(first) == first
    assert boards[1].claim(second) == first == boards[1].failure()


@pytest.mark.parametrize("cause", get_args(Cause))
def test_every_cause_of_a_failure_is_read_by_others_as_it_was_pinned_up(cause: Cause):
    store, failure = HashStore(), Failure(2, 7, 0, cause)
    reporter, other = (Board(Entries(store, b"s"), me, 3, patience_s=5.0) for me in (0, 1))
    reporter.claim(failure)
    assert other.failure() == failure and "worker 2 " in sentence(failure, 1, 5.0)


def test_nonsense_on_the_board_counts_as_nothing():
    store = HashStore()
    board = Board(Entries(store, b"s"), 0, 3, patience_s=5.0)
    for name, text in (("failure", '[9, 1, 0, "closed"]'), ("note/1", '{"beat": 1}'), ("note/2", "[1, [7]]")):
        Entries(store, b"s").under("gossamer/board").set(name, text)
    assert board.failure() is None
    assert board.look([1, 2]) == {1: Note(0, ()), 2: Note(0, ())}


def circulated(board: Board, text: str, wanted: set[int]) -> dict[int, bytes]:
    """What a board knows once it knows the notes of these."""
    deadline = time.monotonic() + LIMIT_S
    while (known := board.circulate(text)).keys() != wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    board._errand.join(LIMIT_S)  # else it might outlive the store
    return known


def test_a_note_reaches_all_and_a_missing_one_delays_no_worker():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [Board(Entries(TCPStore("127.0.0.1", server.port), b"s"), i, 3, patience_s=LIMIT_S) for i in range(3)]
    assert boards[0].circulate("zero") == {}
    assert circulated(boards[0], "zero", {0}) == {0: b"zero"}
    assert circulated(boards[1], "one", {0, 1}) == {0: b"zero", 1: b"one"}
    assert circulated(boards[2], "two", {0, 1, 2}) == {0: b"zero", 1: b"one", 2: b"two"}
    assert circulated(boards[0], "new", {0, 1, 2})[2] == b"two"
    assert not any(board.gone for board in boards)


# --- processes -------------------------------------------------------------------------------------------------------

CONTEXT = multiprocessing.get_context("forkserver")
pytestmark = pytest.mark.usefixtures("forks")


def store_main(pipe: Connection) -> None:
    """A process that hosts a store until it is killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextlib.contextmanager
def a_store_of_its_own() -> Iterator[tuple[TCPStore, int]]:
    """A client of a store in another process, and the id of that process."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=store_main, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(LIMIT_S) and process.pid is not None
        yield TCPStore("127.0.0.1", ours.recv(), timeout=timedelta(seconds=LIMIT_S)), process.pid
    finally:
        process.kill()
        process.join()


def stop_store(pid: int, *boards: Board) -> None:
    """The process of a store stands still; only from now on do these boards wait briefly, as a busy store answers late too."""
    os.kill(pid, signal.SIGSTOP)
    for board in boards:
        board._entries = board._entries.within(0.2)


def test_a_store_that_stood_still_for_a_while_is_asked_again_and_its_silence_is_reported_once(
    caplog: pytest.LogCaptureFixture,
):
    with a_store_of_its_own() as (store, pid):
        boards = [Board(Entries(TCPStore("127.0.0.1", store.port), b"s"), i, 2, patience_s=LIMIT_S) for i in range(2)]
        assert boards[1].saved(3) == 0 and boards[0].saved(4) == 3
        circulated(boards[0], "early", {0})
        stop_store(pid, *boards)
        until(lambda: boards[0].saved(5) == 3 and boards[0].gone)
        assert [boards[0].saved(round) for round in (6, 7)] == [3, 3]
        assert [boards[0].circulate("late") for _ in range(50)] == [{0: b"early"}] * 50
        assert [boards[1].circulate(str(i)) for i in range(50)] == [{}] * 50
        until(lambda: boards[1].circulate("late") == {} and boards[1].gone)
        os.kill(pid, signal.SIGCONT)
        until(lambda: boards[1].saved(9) == 5)  # what had been posted is there now
        until(lambda: boards[0].saved(8) == 8 and not boards[0].gone)
        assert circulated(boards[1], "one", {0, 1}).keys() == {0, 1}
        assert [record.getMessage().split(";")[0] for record in caplog.records] == [
            f"the store of the run does not answer worker {i}" for i in range(2)
        ]


def test_a_store_that_is_gone_is_asked_again_in_growing_pauses():
    with a_store_of_its_own() as (store, pid):
        board = Board(Entries(store, b"s"), 0, 1, patience_s=LIMIT_S)
        assert board.saved(3) == 3
        os.kill(pid, signal.SIGKILL)
        until(lambda: board.saved(4) == 3 and board.gone)
        pauses = set[float]()
        until(lambda: pauses.add(board._pause_s) or (board.saved(5) == 3 and len(pauses) >= 2))
        assert board.failure() is None and board.circulate("note") == {}


Outcome = tuple[str, Any, float]
"""Name of the error or "", value or message, and seconds it took."""


def member_main(worker: int, n: int, port: int, pipe: Connection) -> None:
    """A process that obeys commands until it is asked to end."""
    os.environ.update(
        RANK=str(worker),
        WORLD_SIZE=str(n),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    member = join(n, device="cpu", threads=1, timeout_s=LIMIT_S)
    while (job := pipe.recv()) is not None:
        scenario, args = job
        start = time.monotonic()
        try:
            result = ("", scenario(member, *args))
        except GossamerError as error:
            result = (type(error).__name__, str(error))
        pipe.send((*result, time.monotonic() - start))
    left = leave()
    pipe.send(left)
    if not left:
        os._exit(0)


class Crew:
    """A few worker processes of one run; the store is ours."""

    def __init__(self, n: int) -> None:
        self.store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for i in range(n):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=member_main, args=(i, n, self.store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, scenario: Callable[..., Any], *args: Any, victim: int | None = None) -> list[Outcome]:
        """The outcome of a scenario on each worker but the victim, of which none is to come."""
        for pipe in self.pipes:
            pipe.send((scenario, args))
        deadline = time.monotonic() + LIMIT_S
        return [self._receive(pipe, deadline) for i, pipe in enumerate(self.pipes) if i != victim]

    def values(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """The same, where nothing may fail."""
        outcomes = self.run(scenario, *args)
        assert not any(name for name, _, _ in outcomes), outcomes
        return [value for _, value, _ in outcomes]

    def end(self, dead: int | None = None) -> None:
        """Has all workers leave, and asserts that they do; `dead` is killed, which may cut a transfer."""
        for i, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            if i == dead:
                process.kill()
            else:
                pipe.send(None)
        for i, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            left = self._receive(pipe, time.monotonic() + LIMIT_S) if i != dead else None
            process.join(LIMIT_S)
            code = process.exitcode
            process.kill()
            assert i == dead or (code == 0 and (left is True or dead is not None)), (i, left, code)

    @staticmethod
    def _receive(pipe: Connection, deadline: float) -> Any:
        assert pipe.poll(max(0.0, deadline - time.monotonic())), "a worker did not answer in time"
        return pipe.recv()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(3)
    yield crew
    crew.end()


KEPT: list[Any] = []
"""Until the process ends: gloo stalls a connection when a transfer that is under way is forgotten."""


def transport_of(member: Member, name: str, timeout_s: float = LIMIT_S, **options: Any) -> GroupTransport:
    """A transport with a notice board of its own."""
    transport = GroupTransport(
        member._replace(store=PrefixStore(name, member.store)), run=RUN, timeout_s=timeout_s, **options
    )
    KEPT.append(transport)
    return transport


class AsOnNccl:
    """A transfer of gloo that behaves as one of NCCL: it says when it is complete, and refuses two calls."""

    def __init__(self, work: dist.Work) -> None:
        self._work, self._waiting = work, threading.Thread(target=work.wait, name=THREADS, daemon=True)
        self._waiting.start()

    def is_completed(self) -> bool:
        return not self._waiting.is_alive()

    def wait(self) -> bool:
        assert self.is_completed(), "this would block the stream"
        return True

    def is_success(self) -> bool:
        raise NotImplementedError

    def exception(self) -> None:
        raise DeprecationWarning


def everyone_to_everyone(member: Member, checksum: bool, batched: bool, polled: bool) -> bool:
    transport = transport_of(member, f"all{checksum}{batched}{polled}", checksum=checksum)
    transport._batched = batched  # gathers as for NCCL
    if polled:  # and finishes so too
        transport._finish = lambda work: poll(cast(dist.Work, AsOnNccl(work)))
    ticket = Ticket(0)
    peers = [j for j in range(member.workers) if j != member.worker]
    for j in peers:
        transport.expect(ticket, j, [frame.to("meta") for frame in frames_of(j)])
    for j in peers:
        transport.post(ticket, j, frames_of(member.worker))
    transport.wait(ticket)
    received = transport.collect(ticket)
    transport.close()
    return sorted(received) == peers and all(same(received[j], frames_of(j)) for j in peers)


@pytest.mark.parametrize(
    ("checksum", "batched", "polled"),
    [(False, False, False), (True, False, False), (False, True, False), (False, True, True)],
)
def test_frames_of_all_kinds_arrive(crew: Crew, checksum: bool, batched: bool, polled: bool):
    assert crew.values(everyone_to_everyone, checksum, batched, polled) == [True] * 3


def empty_messages(member: Member) -> list[Any]:
    transport, ticket = transport_of(member, "empty"), Ticket(0)
    after, before = (member.worker + 1) % member.workers, (member.worker - 1) % member.workers
    transport.expect(ticket, before, [torch.empty(0, 3)])
    transport.post(ticket, after, [torch.empty(0, 3)])
    transport.wait(ticket)
    alone = Ticket(1)
    transport.wait(alone)
    return [tuple(frame.shape) for frame in transport.collect(ticket)[before]] + [transport.collect(alone)]


def test_empty_messages_and_empty_tickets_are_fine(crew: Crew):
    assert crew.values(empty_messages) == [[(0, 3), {}]] * 3


def many_rounds(member: Member, rounds: int) -> bool:
    """Rings and matchings in turn, everything posted in an order of each worker's own, one round announced ahead."""
    transport, i, n = transport_of(member, "rounds"), member.worker, member.workers
    order = random.Random(i)

    def peers(t: int) -> list[int]:
        if t % 2:
            partner = (t // 2 - i) % n
            return [] if partner == i else [partner]
        return [j for j in range(n) if j != i]

    def announce(t: int) -> None:
        for j in order.sample(peers(t), len(peers(t))):
            for fragment in order.sample(range(2), 2):
                transport.expect(Ticket(t, fragment), j, [torch.empty(50), torch.empty(2, dtype=torch.uint8)])

    announce(0)
    good = True
    for t in range(rounds):
        if t + 1 < rounds:
            announce(t + 1)
        for j in order.sample(peers(t), len(peers(t))):
            for fragment in order.sample(range(2), 2):
                frames = [torch.full((50,), 100.0 * t + i), torch.tensor([fragment, j], dtype=torch.uint8)]
                transport.post(Ticket(t, fragment), j, frames)
        for fragment in order.sample(range(2), 2):
            transport.wait(Ticket(t, fragment))
            for j, (numbers, names) in transport.collect(Ticket(t, fragment)).items():
                good &= bool((numbers == 100.0 * t + j).all()) and names.tolist() == [fragment, i]
    return good


def test_many_rounds_in_any_order_neither_mix_nor_lock_up(crew: Crew):
    assert crew.values(many_rounds, 20) == [True] * 3


def early_expect(member: Member) -> bool:
    """Worker 1 receives while it does nothing; worker 0 knows that its message has left."""
    transport, ticket, like = transport_of(member, "early"), Ticket(0), [torch.empty(1 << 22)]
    if member.worker == 0:
        member.store.wait(["announced"])
        transport.post(ticket, 1, [torch.full((1 << 22,), 3.0)])
        transport.wait(ticket)
        member.store.set("sent", "")
    elif member.worker == 1:
        transport.expect(ticket, 0, like)
        member.store.set("announced", "")
        member.store.wait(["sent"])
        deadline = time.monotonic() + LIMIT_S
        while not transport.ready(ticket) and time.monotonic() < deadline:
            time.sleep(0.001)
        return bool((transport.collect(ticket)[0][0] == 3.0).all())
    return True


def test_what_was_announced_early_arrives_while_the_receiver_trains(crew: Crew):
    assert crew.values(early_expect) == [True] * 3


def late_message(member: Member) -> list[tuple[Ticket, int, int, bool]]:
    """Worker 0 lets worker 1 wait, and what comes then comes at once."""
    transport, ticket, like = transport_of(member, "late"), Ticket(7, 2), [torch.empty(1 << 18)]
    if member.worker == 0:
        time.sleep(4.0)
        transport.post(ticket, 1, [torch.zeros(1 << 18)])
    elif member.worker == 1:
        transport.expect(ticket, 0, like)
    transport.wait(ticket)
    came = [(a.ticket, a.peer, a.payload_bytes, 0.0 <= a.seconds < 3.5) for a in transport.deliveries()]
    assert transport.deliveries() == []
    return came


def test_an_arrival_tells_how_long_bytes_took_and_not_how_long_they_were_waited_for(crew: Crew):
    assert crew.values(late_message) == [[], [(Ticket(7, 2), 0, 4 << 18, True)], []]


def held_memory(member: Member) -> tuple[bool, bool]:
    """Whether memory is used again once its frames are dropped, and whether frames that are held stay what they were."""
    transport, peer = transport_of(member, "memory"), (member.worker + 1) % member.workers
    source = (member.worker - 1) % member.workers

    def exchange(t: int) -> Tensor:
        transport.expect(Ticket(t), source, [torch.empty(1000)])
        transport.post(Ticket(t), peer, [torch.full((1000,), float(t))])
        transport.wait(Ticket(t))
        return transport.collect(Ticket(t))[source][0]

    places = set()
    for t in range(20):
        places.add(exchange(t).data_ptr())
    kept = [exchange(t)[500:] for t in range(20, 25)]
    return len(places) < 10, [frame[0].item() for frame in kept] == [20.0, 21.0, 22.0, 23.0, 24.0]


def test_memory_is_used_again_only_when_its_frames_are_released(crew: Crew):
    assert crew.values(held_memory) == [(True, True)] * 3


def stop_meanwhile(member: Member, others: tuple[int, ...]) -> None:
    """Others that announced their process stand still until this one has ended or stopped: no message can arrive as a whole."""
    processes = [int(member.store.get(f"announced/{j}")) for j in others]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    still_runs = f"grep -qs '^[^)]*) [RSD]' /proc/{os.getpid()}/stat"
    goes_on = f"kill -CONT {' '.join(map(str, processes))}"
    subprocess.Popen(["sh", "-c", f"while {still_runs}; do sleep 0.05; done; {goes_on}"])


def wait_for_the_victim(member: Member, moment: str) -> None:
    """Worker 2 kills itself before or in the middle of its messages; the others need them, and then each other."""
    transport, ticket, size = transport_of(member, "kill"), Ticket(7), 1 << 26
    victim, others = 2, (0, 1)
    if member.worker == victim:
        for j in others:
            transport.expect(ticket, j, [torch.empty(size, dtype=torch.uint8)])
        member.store.wait(["announced/0", "announced/1"])
        if moment == "amid":
            stop_meanwhile(member, others)
            for j in others:
                transport.post(ticket, j, [torch.ones(size, dtype=torch.uint8)])
        os.kill(os.getpid(), signal.SIGKILL)
    other = 1 - member.worker
    transport.expect(ticket, victim, [torch.empty(size, dtype=torch.uint8)])
    member.store.set(f"announced/{member.worker}", str(os.getpid()))
    transport.post(ticket, victim, [torch.zeros(size, dtype=torch.uint8)])
    try:
        transport.wait(ticket)
    finally:
        transport.expect(Ticket(8), other, [torch.empty(9)])
        transport.post(Ticket(8), other, [torch.ones(9)])
        transport.wait(Ticket(8))
        assert transport.collect(Ticket(8))[other][0].sum() == 9.0


@pytest.mark.parametrize("moment", ["before", "amid"])
def test_a_killed_worker_is_named_at_once_and_the_others_still_reach_each_other(moment: str):
    crew = Crew(3)
    for name, message, seconds in crew.run(wait_for_the_victim, moment, victim=2):
        assert name == "PeerError" and "worker 2 closed its connection in round 7" in message, message
        assert seconds < LIMIT_S / 2  # less than the timeout
    crew.end(dead=2)


def chain(member: Member, stopped: str) -> None:
    """Worker 0 waits for 1, 1 waits for 2, and 2 stops; `amid` after it has sent a part of its message to 1."""
    transport, ticket, size = transport_of(member, "chain", timeout_s=2.0), Ticket(5), 1 << 26
    before, after = member.worker + 1, member.worker - 1
    like = [torch.ones(size, dtype=torch.uint8)]
    if before < member.workers:
        transport.expect(ticket, before, like)
        member.store.set(f"announced/{member.worker}", str(os.getpid()))
    if member.worker == 2:
        member.store.wait(["announced/1"])
        member.store.set("stops", str(os.getpid()))
        if stopped == "amid":
            stop_meanwhile(member, (after,))
            transport.post(ticket, after, like)
        os.kill(os.getpid(), signal.SIGSTOP)
    if member.worker == 0:  # whose timeout begins once worker 1 can say whom it waits for
        state = Path(f"/proc/{int(member.store.get('stops'))}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
    transport.wait(ticket)


@pytest.mark.parametrize("stopped", ["before", "amid"])
def test_the_worker_that_stopped_is_named_by_those_that_wait_for_others(stopped: str):
    crew = Crew(3)
    for name, message, seconds in crew.run(chain, stopped, victim=2):
        assert name == "PeerError" and "worker 2 did not answer for 2 s in round 5" in message, message
        assert seconds < LIMIT_S / 2  # the timeout, and what a busy machine needs
    crew.end(dead=2)


def send_and_leave(member: Member) -> float:
    """Worker 1 stops when it has announced what it expects, and continues when worker 0 has left."""
    transport, ticket, numbers = transport_of(member, "leave"), Ticket(0), torch.arange(20_000.0)
    if member.worker == 1:
        transport.expect(ticket, 0, [numbers])
        member.store.set("announced", "")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        member.store.wait(["announced"])
        transport.post(ticket, 1, [numbers])
    transport.wait(ticket)
    return sum(frames[0].sum().item() for frames in transport.collect(ticket).values())


def test_what_was_sent_before_its_sender_left_still_arrives():
    crew = Crew(2)
    assert crew.run(send_and_leave, victim=1)[0][:2] == ("", 0)
    crew.pipes[0].send(None)
    crew.processes[0].join(LIMIT_S)
    os.kill(crew.processes[1].pid, signal.SIGCONT)
    assert crew.pipes[1].poll(LIMIT_S)
    assert crew.pipes[1].recv()[:2] == ("", torch.arange(20_000.0).sum().item())
    crew.end(dead=0)


def meet(member: Member) -> None:
    """Each has received from each, so every pair has a lifeline."""
    transport, ticket = transport_of(member, "meet"), Ticket(0)
    for j in range(member.workers):
        if j != member.worker:
            transport.expect(ticket, j, [torch.empty(3)])
            transport.post(ticket, j, [torch.ones(3)])
    transport.wait(ticket)


def hang_up_as_another_leaves(member: Member) -> list[str]:
    """Worker 0 leaves between the receive and the wait of worker 1's hanging up; worker 2 stays. Returns the threads left."""

    def lifelines() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == THREADS]

    if member.worker == 0:
        member.store.wait(["posted"])
        os.kill(os.getpid(), signal.SIGKILL)
    if member.worker == 2:
        member.store.wait(["hung up"])
        return []
    receive, before = dist.irecv, len(lifelines())

    def receive_and_see_it_leave(*words: Any, **options: Any) -> Any:
        nothing = receive(*words, **options)
        member.store.set("posted", "")
        deadline = time.monotonic() + 30.0
        while len(lifelines()) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        return nothing

    dist.irecv = receive_and_see_it_leave
    assert hang_up()
    dist.irecv = receive
    left = lifelines()
    member.store.set("hung up", "")
    return left


def test_hanging_up_leaves_no_thread_inside_torch_though_a_peer_leaves_at_that_moment():
    crew = Crew(3)
    crew.values(meet)
    outcomes = crew.run(hang_up_as_another_leaves, victim=0)
    assert [outcome[:2] for outcome in outcomes] == [("", []), ("", [])], outcomes
    for process in crew.processes:
        process.kill()


def test_hanging_up_waits_for_a_thread_that_was_started_and_does_not_run_yet():
    runs, ran = threading.Event(), list[bool]()

    class Late(threading.Thread):
        def _bootstrap(self) -> None:  # as on a busy machine, on which a signal interrupts `start`
            runs.wait(LIMIT_S)
            super()._bootstrap()  # type: ignore[misc]

    thread = Late(target=lambda: ran.append(True), name=THREADS, daemon=True)
    starter = threading.Thread(target=thread.start)
    starter.start()
    until(lambda: thread in threading.enumerate())
    assert not threads_end(0.05)
    runs.set()
    assert threads_end(LIMIT_S) and ran
    starter.join()


def send_nonsense(member: Member, kind: str, round: int) -> str:
    """Worker 0 sends what worker 1 must refuse; returns the sentence."""
    transport, ticket, like = transport_of(member, kind, checksum=kind == "checksum"), Ticket(round), [torch.ones(8)]
    header = wire.Header(RUN, ticket, 0, 32, 1 if kind == "checksum" else None)
    if kind == "run":
        header = header._replace(run=9)
    if kind == "size":
        header = header._replace(payload_bytes=48)
    if member.worker == 0:
        raw = wire.encode_header(header) if kind != "magic" else b"x" * wire.HEADER_BYTES
        tags = wire.tags(header.run, ticket, header.payload_bytes)
        payload = torch.ones(header.payload_bytes, dtype=torch.uint8)
        message = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        KEPT.extend([dist.isend(message, 1, tag=tags[0]), dist.isend(payload, 1, tag=tags[1])])
        return ""
    transport.expect(ticket, 0, like)
    try:
        transport.wait(ticket)
    except PeerError as error:
        return f"PeerError: {error}"
    except TransportError as error:
        failure = transport._patience.board.failure()
        return f"TransportError: {error}; {failure and failure.cause}"
    return "nothing was refused"


def test_foreign_messages_are_refused_by_real_processes():
    crew = Crew(2)
    refusals = [
        ("magic", "TransportError: worker 0 sent a message that starts with b'xxxx'"),
        ("run", "PeerError: worker 0 runs configuration 0000000000000009"),
        ("size", "TransportError: worker 0 sent 48 bytes"),
        ("checksum", "TransportError: the 32 bytes of worker 0"),
    ]
    for round, (kind, words) in enumerate(refusals):
        _, sentence = crew.values(send_nonsense, kind, round)
        assert sentence.startswith(words), sentence
        assert sentence.endswith("changed") == (kind == "checksum")  # what the others read
    crew.end()


def lose_everything(member: Member) -> None:
    """The store ends, then worker 1 does."""
    transport = transport_of(member, "lost")
    transport.expect(Ticket(0), 1 - member.worker, [torch.empty(3)])
    if member.worker == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    transport.wait(Ticket(0))


def test_without_the_store_a_lost_worker_is_still_named_in_time():
    crew = Crew(2)
    crew.values(empty_ticket)
    crew.store = None
    [(name, message, seconds)] = crew.run(lose_everything, victim=1)
    assert name == "PeerError" and "worker 1 closed its connection" in message and "store does not answer" in message, (
        message
    )
    assert seconds < LIMIT_S / 2  # less than the timeout
    crew.end(dead=1)


def empty_ticket(member: Member) -> None:
    transport_of(member, "start").wait(Ticket(0))
