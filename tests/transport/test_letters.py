"""The one framing of all sockets: every field of a header is under its checksum and below a bound; and addresses."""

import contextlib
import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import RefusedError, TransportError
from gossamer.transport.contract import WIRE_VERSION, Ticket
from gossamer.transport.sockets import addresses
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.header import (
    GUESTS,
    HEADER_BYTES,
    LIFE_LIMIT,
    MOST_ATTEMPTS,
    LetterHead,
    LetterKind,
    Limits,
    decode,
    encode,
)
from gossamer.transport.sockets.letter import Letter, letters_up_to, receive_letter, send_letter

RUN = 5
LIMITS = Limits(workers=4, rounds=9, steps=90, fragments=2)
HEADER = LetterHead(LetterKind.PAYLOAD, 3, Ticket(7, 1, 2), view=9, round=7, steps=30, size=64, check=123)
headers = st.builds(
    LetterHead,
    st.sampled_from(LetterKind),
    st.integers(0, 4) | st.sampled_from(GUESTS),
    st.just(Ticket(0)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 9),
    st.integers(0, 90),
    st.integers(0, 2**40),
    st.integers(0, 2**64 - 1),
)


@given(headers)
def test_a_header_within_bounds_survives_the_wire(header: LetterHead) -> None:
    raw = encode(header, RUN)
    assert len(raw) == HEADER_BYTES and decode(raw, RUN, LIMITS) == header


@given(headers, st.integers(0, 8 * HEADER_BYTES - 1))
def test_every_bit_of_a_header_is_under_its_checksum(header: LetterHead, bit: int) -> None:
    raw = bytearray(encode(header, RUN))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransportError, match=r"changed in transit|another program uses|speaks version"):
        decode(bytes(raw), RUN, LIMITS)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (HEADER._replace(round=1 << 61), "the round is 2305843009213693952"),
        (HEADER._replace(round=10), "the round is 10"),
        (HEADER._replace(steps=91), "the inner steps is 91"),
        (HEADER._replace(sender=5), "the sender is 5"),
        (HEADER._replace(ticket=Ticket(10, 1, 2)), "the round of its ticket is 10"),
        (HEADER._replace(ticket=Ticket(7, 2, 2)), "the fragment of its ticket is 2"),
        (HEADER._replace(ticket=Ticket(7, 1, 2 * MOST_ATTEMPTS + 1)), "the leg of its ticket is"),
        (HEADER._replace(kind=LetterKind.PING), "the round of its ticket is 7"),
        (HEADER._replace(kind=LetterKind.INVITE, ticket=Ticket(LIFE_LIMIT)), "the round of its ticket is"),
        (HEADER._replace(kind=LetterKind.PUSH, ticket=Ticket(91)), "the round of its ticket is 91"),
    ],
)
def test_a_number_that_the_run_does_not_allow_is_refused_by_name(wrong: LetterHead, what: str) -> None:
    with pytest.raises(RefusedError, match=f"it says that {what}") as caught:
        decode(encode(wrong, RUN), RUN, LIMITS)
    assert caught.value.kind == "bounds"


def test_a_letter_of_another_version_run_or_kind_is_refused_in_a_sentence() -> None:
    raw = encode(HEADER, RUN)
    with pytest.raises(
        RefusedError, match=f"speaks version {WIRE_VERSION + 1} .* this process version {WIRE_VERSION};"
    ):
        decode(raw[:4] + struct.pack("<H", WIRE_VERSION + 1) + raw[6:], RUN, LIMITS)
    with pytest.raises(RefusedError, match="runs configuration 0000000000000006"):
        decode(encode(HEADER, 6), RUN, LIMITS)
    for kind in (len(LetterKind), 400):
        with pytest.raises(RefusedError, match=f"a letter of kind {kind}, and the last kind is {max(LetterKind)}"):
            decode(encode(HEADER._replace(kind=kind), RUN), RUN, LIMITS)  # type: ignore[arg-type]


def test_the_size_of_a_body_is_asked_for_before_memory_is_taken_and_its_bytes_are_under_a_checksum() -> None:
    ours, theirs = (Channel(sock, 5.0) for sock in socket.socketpair())
    letter = Letter(LetterKind.PUSH, 1, Ticket(3), body=torch.arange(24, dtype=torch.uint8))
    accepts = letters_up_to(LetterKind.PUSH, most_bytes=24)
    with ours, theirs:
        send_letter(ours, letter, RUN)
        assert torch.equal(receive_letter(theirs, RUN, LIMITS, accepts).body, letter.body)
        raw = encode(LetterHead(LetterKind.PUSH, 1, Ticket(3), size=1 << 60), RUN)
        ours.write(raw)
        with pytest.raises(RefusedError, match=f"it sent {1 << 60} bytes as push"):
            receive_letter(theirs, RUN, LIMITS, accepts)
        send_letter(ours, letter._replace(kind=LetterKind.START), RUN)
        with pytest.raises(RefusedError, match="sent 24 bytes as start"):
            receive_letter(theirs, RUN, LIMITS, accepts)
        theirs.read(24)
        ours.write(encode(LetterHead(LetterKind.PUSH, 1, Ticket(3), size=3, check=1), RUN) + b"abc")
        with pytest.raises(RefusedError, match=r"the 3 bytes of its push .* changed in transit"):
            receive_letter(theirs, RUN, LIMITS, accepts)


def test_a_deadline_holds_for_all_of_what_is_read_however_slowly_it_comes() -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        with ours, contextlib.suppress(OSError):
            while not stop.wait(0.05):
                ours.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with Channel(theirs, 60.0) as channel, pytest.raises(TimeoutError, match="too long"):
        channel.read(1000, deadline=channel.moved_s + 0.5)
    stop.set()
    dripping.join()


def test_an_end_that_takes_bytes_slowly_is_not_one_that_takes_none() -> None:
    ours, theirs = socket.socketpair()
    content, taken = bytes(1 << 19), 0
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
    theirs.settimeout(60.0)
    with Channel(ours, 0.3) as channel, theirs, ThreadPoolExecutor(1) as pool:
        written = pool.submit(channel.write, content)
        while taken < len(content):
            time.sleep(0.03)
            taken += len(theirs.recv(1 << 14))
        written.result(60.0)  # which took a second at least
        with pytest.raises(TimeoutError, match=r"it took no bytes for 0\.3 s"):
            channel.write(content)
        with pytest.raises(TimeoutError, match="too long"):
            channel.write(content, deadline=channel.moved_s)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_processes_listen_and_dial_at_addresses_of_both_families(host: str) -> None:
    try:
        listener = addresses.listen(host, 0)
    except TransportError:
        pytest.skip(f"this machine has no {host}")
    address = addresses.shown(*listener.getsockname()[:2])
    assert addresses.split(address)[0] == host == addresses.own_address(host)
    with listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept)
        with socket.create_connection(addresses.split(address)) as near, accepted.result()[0] as far:
            near.sendall(b"here")
            assert far.recv(4) == b"here"


@pytest.mark.parametrize(
    "text", ["", "here", ":1", "a:", "a:0", "a:65536", "a:-1", "a:1x", "a:²", "a..b:1", f"{'a' * 64}.b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no HOST:PORT"):
        addresses.split(text)


def test_a_name_that_leads_to_this_machine_alone_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(addresses, "own_address", lambda: "10.0.0.7")
    assert "the name 's1' leads to 127.0.1.1" in str(addresses.loopback_warning("s1", "127.0.1.1"))
    assert "give 10.0.0.7 instead" in str(addresses.loopback_warning("s1", "127.0.1.1"))
    for named, numeric in [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("s1", "10.0.0.7"), ("::1", "::1")]:
        assert addresses.loopback_warning(named, numeric) is None

    from gossamer.run.participant.rendezvous import warn_of_loopback

    monkeypatch.setenv("MASTER_ADDR", "s1")
    with caplog.at_level(logging.WARNING, "gossamer"):
        warn_of_loopback("127.0.0.1:4000", ["127.0.0.1:4000", "127.0.0.1:4001"])
        warn_of_loopback("10.0.0.7:4000", ["10.0.0.7:4000", "127.0.0.1:4001"])
        assert not caplog.text
        warn_of_loopback("127.0.1.1:4000", ["127.0.1.1:4000", "10.0.0.8:4001"])
    assert "this worker listens on 127.0.1.1:4000, where processes of other machines cannot reach it" in caplog.text
