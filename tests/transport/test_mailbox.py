"""A mailbox: connections of processes that reach one folder or object store, and not each other."""

import base64
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, TransportError
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.core import Outcome
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.keys import Keys, Peer, certificate_of, new_key
from gossamer.transport.sockets import mailbox
from gossamer.transport.sockets.addresses import split
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.listener import Arrival, Listener, Refusals
from gossamer.transport.sockets.mailbox import MAILBOX, Mailbox, connect, listen_in, opened
from tiny import limits

RUN, SECRET, LIMIT_S = 77, b"of this run", 30.0
CONTENT = bytes(range(256)) * 1000


@pytest.fixture(params=["a folder", "an object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mailbox:
    url = str(tmp_path / "store") if request.param == "a folder" else f"memory://{secrets.token_hex(8)}"
    monkeypatch.setenv(MAILBOX, url)
    return opened(url)


@pytest.fixture
def keys(tmp_path: Path) -> list[Keys]:
    pytest.importorskip("cryptography")
    files = [new_key(name, tmp_path / f"{name}.pem") for name in ("berlin", "paris")]
    peers = {file.stem: Peer(certificate=base64.b64encode(certificate_of(file)).decode()) for file in files}
    return [Keys(file, peers, 2) for file in files]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def connected(store: Mailbox) -> Iterator[tuple[Channel, Channel, str]]:
    """Both ends of a connection, the one that has dialled first, and its name in the store."""
    listener, address = listen_in(store)
    box = split(address)[0].removesuffix(".mailbox")
    with listener, Channel(connect(split(address)[0], LIMIT_S), LIMIT_S) as ours:
        listener.settimeout(LIMIT_S)
        (stream,) = {one.stream for one in mailbox._carries if one.stream.startswith(box)}
        with Channel(listener.accept()[0], LIMIT_S) as theirs:
            yield ours, theirs, stream


def everything(store: Mailbox) -> dict[str, bytes]:
    """All that lies in the store, by name."""
    found = dict[str, bytes]()
    for name in store.names(""):
        for stream in store.names(name):
            for piece in store.names(f"{name}/{stream}"):
                found[f"{name}/{stream}/{piece}"] = store.get(f"{name}/{stream}/{piece}", 1 << 30) or b""
    return found


def test_bytes_go_both_ways_and_nothing_stays_in_the_store(store: Mailbox) -> None:
    with connected(store) as (ours, theirs, _), ThreadPoolExecutor(2) as pool:
        for one, other in ((ours, theirs), (theirs, ours)):
            written = pool.submit(one.write, CONTENT)
            assert other.read(len(CONTENT)) == CONTENT
            written.result(LIMIT_S)
    until(lambda: not store.names(""))


def test_whoever_closes_is_missed_at_the_other_end(store: Mailbox) -> None:
    with connected(store) as (ours, theirs, _):
        ours.write(b"the last words")
        ours.close()
        assert theirs.read(14) == b"the last words"
        with pytest.raises(ConnectionError, match="closed"):
            theirs.read(1)


def test_a_piece_of_which_half_has_come_is_read_once_it_is_whole(store: Mailbox) -> None:
    piece = mailbox._packed(CONTENT)
    with connected(store) as (_, theirs, stream):
        store.put(f"{stream}/in-1", piece[:1000])
        theirs.wait_at_most(0.3)
        with pytest.raises(TimeoutError):
            theirs.read(1)
        store.put(f"{stream}/in-1", piece)
        theirs.wait_at_most(LIMIT_S)
        assert theirs.read(len(CONTENT)) == CONTENT


def test_a_piece_that_stays_damaged_ends_its_connection_and_is_told(
    store: Mailbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mailbox, "LOST_S", 0.5)
    with connected(store) as (_, theirs, stream):
        store.put(f"{stream}/in-1", mailbox._packed(b"hello")[:-1] + b"?")
        with pytest.raises(ConnectionError, match="closed"):
            theirs.read(5, time.monotonic() + LIMIT_S)
        assert f"{stream}/in-1 is damaged, and has not changed for 0.5 s" in caplog.text


def test_pieces_count_in_their_order_and_what_lies_there_under_other_names_is_not_read(store: Mailbox) -> None:
    with connected(store) as (_, theirs, stream):
        for name, content in (("in-2", b"second"), ("in-0", b"again"), ("in-x", b"strange"), ("in-1", b"first ")):
            store.put(f"{stream}/{name}", mailbox._packed(content))
        assert theirs.read(12) == b"first second"


def test_a_piece_larger_than_any_ends_its_connection_unread(store: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_MOST_BYTES", 1000)
    with connected(store) as (_, theirs, stream):
        store.put(f"{stream}/in-1", mailbox._packed(bytes(2000)))
        with pytest.raises(ConnectionError, match="closed"):
            theirs.read(1)
    store.put("large", bytes(2016))
    with pytest.raises(TransportError, match="2016 bytes, and 10 are the most"):
        store.get("large", 10)


def test_nobody_puts_more_than_eight_pieces_that_nobody_reads(store: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "LOST_S", 0.5)
    monkeypatch.setattr(mailbox, "PARTING_S", 0.2)
    store.put("dead", b"")  # the box of a process that was killed
    with Channel(connect("dead.mailbox", LIMIT_S), LIMIT_S) as ours:
        most = list[int]()

        def lost() -> bool:
            most.append(len(everything(store)))
            try:
                ours.write(bytes(100))
            except OSError:
                return True
            time.sleep(0.03)
            return False

        until(lost)
        assert 6 <= max(most) <= 9
    until(lambda: not store.names("dead.d"))


def test_a_connection_with_a_process_that_was_killed_ends_however_little_is_said_on_it(
    store: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "GONE_S", 0.3)
    monkeypatch.setattr(mailbox, "PARTING_S", 0.2)
    with connected(store) as (ours, theirs, _):
        theirs.write(b"hello")
        assert ours.read(5) == b"hello"
        time.sleep(1.0)  # who reads is there, and may be silent
        ours.write(b"hello")
        assert theirs.read(5) == b"hello"
    store.put("dead", b"")
    with Channel(connect("dead.mailbox", LIMIT_S), LIMIT_S) as ours, pytest.raises(ConnectionError, match="closed"):
        ours.read(1)


def test_streams_that_somebody_puts_there_take_a_bounded_number_of_threads(
    store: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "_MOST_STREAMS", 4)
    monkeypatch.setattr(mailbox, "PARTING_S", 0.2)
    listener, address = listen_in(store)
    box = split(address)[0].removesuffix(".mailbox")
    with listener:
        for i in range(20):
            store.put(f"{box}.d/{i:032x}/in-0", mailbox._packed(b"\0"))
        counts = set[int]()
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            counts.add(sum(one.was_accepted for one in mailbox._carries.copy() if one.stream.startswith(box)))
            time.sleep(0.01)
        assert 0 < max(counts) <= 4
    until(lambda: not any(one.stream.startswith(box) for one in mailbox._carries.copy()))


def test_streams_that_are_dead_keep_nobody_out(store: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_MOST_STREAMS", 2)
    monkeypatch.setattr(mailbox, "PARTING_S", 0.2)
    listener, address = listen_in(store)
    box = split(address)[0].removesuffix(".mailbox")
    for i in range(8):  # that has ended, and a piece of it came too late
        store.put(f"{box}.d/{i:032x}/in-5", mailbox._packed(b"late"))
    with listener, Channel(connect(split(address)[0], LIMIT_S), LIMIT_S) as ours:
        listener.settimeout(LIMIT_S)
        with Channel(listener.accept()[0], LIMIT_S) as theirs:
            ours.write(CONTENT)
            assert theirs.read(len(CONTENT)) == CONTENT


def test_a_box_that_is_not_there_refuses_at_once_and_a_mailbox_that_is_not_named_is_asked_for(
    store: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConnectionRefusedError, match="no box 'nobody'"):
        dial("nobody.mailbox:1", SECRET, run=RUN, me=0, timeout_s=LIMIT_S)
    monkeypatch.delenv(MAILBOX)
    with pytest.raises(ConfigError, match=r"give --mailbox URL, or set GOSSAMER_MAILBOX"):
        dial("nobody.mailbox:1", SECRET, run=RUN, me=0, timeout_s=LIMIT_S)
    with pytest.raises(ConfigError, match=r"'nosuch://x' cannot be opened .* such as s3://bucket/run"):
        opened("nosuch://x")


@contextmanager
def crew(store: Mailbox, keys: list[Keys] | None = None) -> Iterator[list[ElasticTransport]]:
    """Two workers of an elastic run that know each other."""
    boxes = [listen_in(store) for _ in range(2)]
    entries = [
        SlotEntry(i, 0, secrets.randbits(40), MemberStatus.ALIVE, 0, address) for i, (_, address) in enumerate(boxes)
    ]
    made = [
        ElasticTransport(
            Members(limits(2), i, entries),
            Endpoint(sock, RUN, SECRET, 4.0, keys=None if keys is None else keys[i]),
        )
        for i, (sock, _) in enumerate(boxes)
    ]
    try:
        yield made
    finally:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ElasticTransport.close, made))


def exchange(workers: list[ElasticTransport], round: int) -> set[Outcome]:
    """What becomes of an exchange; what arrives is what was sent."""
    ticket = Ticket(round)
    for worker in workers:
        worker.begin_round(round, lambda alive, peer=1 - worker.worker: [peer], 15)
        worker.expect(ticket, 1 - worker.worker, [torch.empty(1000)])
        worker.post(ticket, 1 - worker.worker, [torch.full((1000,), 1.0 + worker.worker)])
    outcomes = set[Outcome]()
    for worker in workers:
        worker.wait(ticket)
        for peer, (frame,) in worker.collect(ticket).items():
            assert frame.tolist() == [1.0 + peer] * 1000
        outcomes |= set(worker.outcomes()[ticket].values())
    return outcomes


def test_workers_of_an_elastic_run_exchange_and_leave_nothing_behind(store: Mailbox) -> None:
    with crew(store) as workers:
        assert [exchange(workers, round) for round in range(3)] == [{Outcome.MADE}] * 3
    until(lambda: not store.names(""))


def test_with_keys_nobody_who_reads_the_store_reads_a_payload_and_a_changed_piece_changes_no_result(
    store: Mailbox, keys: list[Keys], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, changed, put = bytearray(), threading.Event(), Mailbox.put
    payload = torch.full((1000,), 1.0).numpy().tobytes()

    def on_the_path(self: Mailbox, name: str, content: bytes) -> None:
        seen.extend(content)
        if len(content) > 4000 and not changed.is_set():  # one that carries a payload
            changed.set()
            middle = len(content) // 2
            content = mailbox._packed(content[16:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        put(self, name, content)

    monkeypatch.setattr(Mailbox, "put", on_the_path)
    with crew(store, keys) as workers:
        outcomes = [exchange(workers, round) for round in range(3)]
        until(lambda: any(worker.refusals.counts for worker in workers))
    assert changed.is_set()
    # Either the payload was sent again over another connection, or its exchange counts nowhere.
    assert outcomes[0] <= {Outcome.MADE, Outcome.MISSED, Outcome.UNSURE} and outcomes[-1] == {Outcome.MADE}
    assert payload not in seen and b"berlin" not in seen


def test_with_keys_a_stranger_who_can_write_into_the_store_is_refused(store: Mailbox, keys: list[Keys]) -> None:
    refusals, came = Refusals(), list[Arrival]()
    sock, address = listen_in(store)
    listener = Listener(sock, SECRET, RUN, came.append, refusals, keys=keys[0])
    try:
        box = split(address)[0].removesuffix(".mailbox")
        for name in (f"{box}.d/{'0' * 32}/in-0", f"{box}.d/{'0' * 32}/in-1", f"{box}.d/strange/in-0", f"{box}.d/x"):
            store.put(name, mailbox._packed(b"GET / HTTP/1.1\r\n\r\n"))
        until(lambda: bool(refusals.counts))
        assert not came
    finally:
        listener.close()


def test_an_old_connection_of_a_dead_process_is_told_from_a_new_one_by_its_name(store: Mailbox) -> None:
    with connected(store) as (ours, theirs, stream):
        ours.write(b"of the first")
        assert theirs.read(12) == b"of the first"
        old = stream
    with connected(store) as (ours, theirs, stream):
        assert stream != old
        store.put(f"{old}/in-1", mailbox._packed(b"too late"))
        ours.write(b"of the second")
        assert theirs.read(13) == b"of the second"


def test_boxes_are_found_the_newest_first_until_their_owners_close_them(store: Mailbox) -> None:
    store.put("dead", b"1000.0")
    store.put("broken", b"no time")
    listener, address = listen_in(store)
    assert store.addresses() == [address, "dead.mailbox:1", "broken.mailbox:1"]
    assert isinstance(listener, socket.socket)
    listener.close()
    until(lambda: store.names("") == ["broken", "dead"])


def test_whoever_opens_a_box_removes_those_that_nobody_has_owned_for_a_day_and_nothing_else(store: Mailbox) -> None:
    old, alive, other = "0" * 16, "1" * 16, "2" * 16
    for name, content in (
        (old, time.time() - 2 * 86_400),
        (alive, time.time() - 60),
        ("diary", 1000),
        (other, "no time"),
    ):
        store.put(name, str(content).encode())
        store.put(f"{name}.d/{'0' * 32}/in-0", b"")
    listener, address = listen_in(store)
    with listener:
        own = address.partition(".")[0]
        assert {*store.names("")} == {own, *(f"{name}{end}" for name in (alive, "diary", other) for end in ("", ".d"))}


def test_a_machine_whose_clock_is_days_ahead_removes_nobody_who_lives(
    store: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, now_s = "1" * 16, time.time()
    store.put(alive, str(now_s).encode())
    with monkeypatch.context() as patch:
        patch.setattr(mailbox.time, "time", lambda: now_s + 3 * 86_400)
        listener, address = listen_in(store)
        with listener:
            assert {*store.names("")} == {alive, address.partition(".")[0]}


def test_a_pipe_in_the_place_of_an_object_makes_nobody_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ("0" * 16))
    store = Mailbox(str(tmp_path))
    assert store.addresses() == ["0" * 16 + ".mailbox:1"]
    with pytest.raises(TransportError, match="is a link, a pipe or a folder; remove it"):
        store.get("0" * 16, 32)


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_link_in_a_folder_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write into the folder puts links into it that lead to files of its reader."""
    monkeypatch.setattr(mailbox, "PARTING_S", 0.3)
    theirs, folder = tmp_path / "theirs", tmp_path / "store"
    (theirs / "deeper").mkdir(parents=True)
    first = mailbox._packed(b"\0")
    for name in ("in-0", "in-1", "out-0", "deeper/in-0", "deeper/notes"):
        (theirs / name).write_bytes(first)
    before = files_under(theirs)
    monkeypatch.setenv(MAILBOX, str(folder))
    store = opened(str(folder))
    listener, address = listen_in(store)
    box = split(address)[0].removesuffix(".mailbox")
    with listener:
        (folder / f"{box}.d").mkdir()
        stream, object_ = (f"{box}.d/{secrets.token_hex(16)}" for _ in range(2))
        (folder / stream).symlink_to(theirs)
        (folder / object_).mkdir()
        (folder / object_ / "in-0").symlink_to(theirs / "in-0")
        listener.settimeout(LIMIT_S)
        listener.accept()[0].close()  # of the object that is a link: it ends its connection, and is removed itself
        until(lambda: not (folder / object_).exists())
        with (  # an honest connection is not disturbed by them
            Channel(connect(split(address)[0], LIMIT_S), LIMIT_S) as ours,
            Channel(listener.accept()[0], LIMIT_S) as far,
        ):
            ours.write(CONTENT)
            assert far.read(len(CONTENT)) == CONTENT
        assert not store.there(f"{stream}/in-0") and store.names(stream) == []
        with pytest.raises(NotADirectoryError):
            store.get(f"{stream}/in-0", 100)
        with pytest.raises(NotADirectoryError):
            store.put(f"{stream}/out-0", b"x")
        store.remove(f"{stream}/in-0")
        assert files_under(theirs) == before
        store.remove(stream)
        assert not (folder / stream).is_symlink(), "a link itself is removed as any object is"
        # A whole box that is a link, and what lies under it.
        (folder / "other.d").symlink_to(theirs)
        assert store.names("other.d") == [] and not store.there("other.d/deeper/in-0")
        for name in ("other.d/deeper/notes", "other.d/deeper", "other.d/in-0"):
            store.remove(name)
        store.remove("other.d")
        assert not (folder / "other.d").is_symlink()
        (folder / "target").symlink_to(theirs / "in-0")
        store.put("target", b"new")
        assert store.get("target", 3) == b"new" and not (folder / "target").is_symlink()
    until(lambda: not any(folder.glob(f"{box}*")))
    assert files_under(theirs) == before


def test_more_strangers_than_one_address_may_have_come_over_loopback() -> None:
    sock, arrived = socket.create_server(("127.0.0.1", 0)), list[Arrival]()
    listener = Listener(sock, SECRET, RUN, arrived.append, Refusals())
    host, port = split(listener.address)
    strangers = [socket.create_connection((host, port)) for _ in range(20)]
    try:
        time.sleep(0.2)
        for stranger in strangers:
            stranger.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                while said := stranger.recv(1 << 16):
                    assert said
                pytest.fail("somebody has hung up")
    finally:
        for stranger in strangers:
            stranger.close()
        listener.close()
        listener.hang_up()
