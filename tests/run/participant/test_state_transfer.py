"""Whose state a worker takes: one that most of the others have too, from the next donor where one gives none."""

import contextlib
import json
import logging
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from gossamer.errors import PeerError
from gossamer.record.packed import packable_snapshot
from gossamer.run.participant.state_transfer import fetch_state
from gossamer.transport.elastic import common
from gossamer.transport.elastic.common import CommonHashes, common_hash, must_be_common
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry, membership_update
from gossamer.transport.elastic.newcomer import CHUNK_BYTES, Handover, Offer, ask_for_state
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import LetterHead, LetterKind, encode
from gossamer.transport.sockets.letter import Letter, body_of, receive_letter, send_letter
from tiny import limits

RUN, SECRET, LINE = 77, b"the secret of this run", 5
LIMIT_S = 60.0


class Member(NamedTuple):
    """A worker of a run: what it gives, and of which states it has the hash."""

    after: int
    x: float
    others: dict[int, float] = {}  # noqa: RUF012
    """Its states after other rounds."""
    abstains: bool = False
    at_s: float = 0.0
    """When it has closed its last round."""


@contextlib.contextmanager
def run_of(some: Sequence[Member], **hosts: Callable[[Channel], None]) -> Iterator[tuple[Members, Endpoint]]:
    """Members that serve newcomers, and the view of a newcomer; `hosts` are what `worker_I` does in place of that."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(len(some) + 1)]
    entries = [
        SlotEntry(i, 0, 5 + i, MemberStatus.ALIVE, 0, f"127.0.0.1:{one.getsockname()[1]}")
        for i, one in enumerate(listeners)
    ]
    n, began_s = len(entries), time.monotonic()
    made = []
    for i, member in enumerate(some):
        transport = ElasticTransport(Members(limits(n), i, entries), Endpoint(listeners[i], RUN, SECRET, 2.0))
        hashes = CommonHashes()
        for after, x in {**member.others, member.after: member.x}.items():
            hashes.add(after, lambda x=x: common_hash(LINE, [torch.full((3,), x)]))
            hashes.hash_after(after)
        hashes.abstains = member.abstains
        kept = Handover(member.after, packable_snapshot({"x": torch.full((3,), member.x), "line": LINE}))

        def serve(
            channel: Channel,
            transport: ElasticTransport = transport,
            kept: Handover = kept,
            hashes: CommonHashes = hashes,
            at_s: float = began_s + member.at_s,
        ) -> None:
            def known(round: int) -> str | None:
                return hashes.hash_after(round) if time.monotonic() > at_s else None

            transport.serve(channel, lambda _: kept, known)

        transport._host = hosts.get(f"worker_{i}", serve)
        made.append(transport)
    try:
        yield Members(limits(n), n - 1, entries), Endpoint(listeners[-1], RUN, SECRET, LIMIT_S)
    finally:
        with ThreadPoolExecutor(n) as pool:
            list(pool.map(ElasticTransport.close, made))
        for listener in listeners:
            listener.close()


def taken(members: Members, endpoint: Endpoint) -> tuple[int, float]:
    """Whose state a newcomer takes, and which."""

    def accept(offer: Offer, state: Any) -> float:
        must_be_common(common_hash(state["line"], [state["x"]]), offer, members, endpoint)
        return state["x"][0].item()

    offer, x = fetch_state(members, endpoint, first=members.me, behind=0, accept=accept)
    return offer.donor, x


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_COMPARES_S", 0.5)


@pytest.mark.parametrize(
    "liar",
    [Member(7, 9.0), Member(11, 9.0), Member(11, 9.0, {7: 1.0}), Member(3, 9.0, {7: 1.0})],
    ids=["another state", "a round that no other has closed", "and votes with the others", "an earlier round"],
)
def test_of_three_that_it_sees_a_newcomer_takes_the_state_of_two_and_names_the_other(
    liar: Member, caplog: pytest.LogCaptureFixture
) -> None:
    with run_of([liar, Member(7, 1.0, {6: 0.5}), Member(8, 2.0, {7: 1.0})]) as (members, endpoint):
        assert taken(members, endpoint) == (1, 1.0)
    assert "worker 3 does not take the state that worker 0 gave: 1 of 3 workers have this state" in caplog.text


def test_of_two_that_differ_none_can_be_outvoted_so_the_donor_is_named_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run_of([Member(7, 9.0), Member(7, 1.0)]) as (members, endpoint), caplog.at_level(logging.WARNING):
        assert taken(members, endpoint) == (0, 9.0)
    assert "worker 2 takes the state of worker 0 after round 7 on its word alone" in caplog.text
    caplog.clear()
    with run_of([Member(7, 9.0)]) as (members, endpoint):  # the command line of this worker names the other one
        assert taken(members, endpoint) == (0, 9.0)
    assert "word alone" not in caplog.text


def test_a_state_that_too_few_have_is_taken_once_another_has_closed_its_round_or_does_not_count() -> None:
    with (
        run_of([Member(7, 1.0), Member(7, 1.0, at_s=0.3)]) as (members, endpoint),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(common, "_COMPARES_S", LIMIT_S)
        assert taken(members, endpoint) == (0, 1.0)
    with run_of([Member(7, 1.0), Member(6, 0.5, abstains=True), Member(6, 0.5, abstains=True)]) as (members, endpoint):
        assert taken(members, endpoint) == (0, 1.0)  # who needs a state itself speaks against none
    with (
        run_of([Member(7, 1.0), Member(6, 0.5)]) as (members, endpoint),
        pytest.raises(PeerError, match="1 of 2 workers have this state after round 6"),
    ):
        taken(members, endpoint._replace(timeout_s=1.0))


def test_a_worker_that_has_claimed_false_rounds_is_asked_last_and_neither_trusted_nor_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run_of([Member(7, 9.0), Member(7, 1.0)]) as (members, endpoint):
        members.disproved.add(members.entries[0].nonce)
        assert taken(members, endpoint) == (1, 1.0) and not caplog.records
        members.disproved.add(members.entries[1].nonce)
        with pytest.raises(PeerError, match="claimed rounds that were not closed, and no other has"):
            taken(members, endpoint._replace(timeout_s=0.5))


def torn(channel: Channel) -> None:
    """Gives the first part of a state."""
    gives(channel, (0, CHUNK_BYTES))
    channel.close()


def stalls(channel: Channel) -> None:
    """Gives the first part of a state, and then nothing."""
    gives(channel, (0, CHUNK_BYTES))
    time.sleep(1.6)


def drips(channel: Channel) -> None:
    """Gives the first part of a state, and then the rest by the byte."""
    gives(channel, (0, CHUNK_BYTES))
    head = LetterHead(LetterKind.CHUNK, 0, steps=CHUNK_BYTES, size=60, check=zlib.crc32(b"x" * 60))
    with contextlib.suppress(OSError):
        for byte in encode(head, RUN) + b"x" * 60:
            channel.write(bytes([byte]))
            time.sleep(0.05)


def repeats(channel: Channel) -> None:
    """Gives the beginning of the first part in place of the second part."""
    gives(channel, (0, CHUNK_BYTES), (0, 60))


def changes(channel: Channel) -> None:
    """Gives a state with another hash than it says."""
    gives(channel, (0, CHUNK_BYTES), (CHUNK_BYTES, 60))


def pretends(channel: Channel) -> None:
    """Gives a state under another number."""
    gives(channel, (0, CHUNK_BYTES), (CHUNK_BYTES, 60), donor=1)


def gives(channel: Channel, *parts: tuple[int, int], donor: int = 0) -> None:
    """Offers a state of two parts, and gives these: where each begins, and its bytes."""
    receive_letter(channel, RUN, limits(3), lambda letter, size: True)
    offered = {
        "slot": 1,
        "donor": donor,
        "after": 7,
        "bytes": CHUNK_BYTES + 60,
        "sha256": "0" * 64,
        "entries": membership_update({}).decode(),
    }
    send_letter(channel, Letter(LetterKind.OFFER, 0, body=body_of(json.dumps(offered).encode())), RUN)
    receive_letter(channel, RUN, limits(3), lambda letter, size: True)
    for start, size in parts:
        send_letter(channel, Letter(LetterKind.CHUNK, 0, steps=start, body=body_of(b"x" * size)), RUN)


LIARS = {
    torn: "closed",
    stalls: "took too long",
    drips: "took too long",
    repeats: "worker 0 sent a part of its state that does not follow the last one",
    changes: "the state of worker 0 arrived with another hash than 000000000000",
    pretends: "worker 0 at .* calls itself worker 1; ask another",
}


@pytest.mark.parametrize("liar", LIARS, ids=lambda one: one.__name__)
def test_a_donor_that_gives_no_whole_state_in_time_is_left_for_the_next(liar: Callable[[Channel], None]) -> None:
    with run_of([Member(7, 1.0), Member(7, 1.0)], worker_0=liar) as (members, endpoint):
        endpoint = endpoint._replace(timeout_s=1.0 if LIARS[liar] == "took too long" else LIMIT_S)
        with pytest.raises((PeerError, OSError), match=LIARS[liar]):
            ask_for_state(members.entries[0], members, endpoint, most_bytes=1 << 21)
        began_s = time.monotonic()
        assert taken(members, endpoint) == (1, 1.0)
        assert time.monotonic() < began_s + LIMIT_S / 2


def test_two_newcomers_of_one_donor_that_dies_amid_both_states_take_that_of_the_next() -> None:
    with run_of([Member(7, 1.0), Member(7, 1.0)], worker_0=torn) as (members, endpoint), ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: taken(members, endpoint), range(2))] == [(1, 1.0)] * 2


def test_a_state_is_hashed_once_and_the_tensors_of_older_ones_are_freed() -> None:
    hashes, calls = CommonHashes(), list[int]()
    for after in range(3):
        hashes.add(after, lambda after=after: calls.append(after) or str(after))
        assert hashes.hash_after(after) == str(after)
    assert [hashes.hash_after(after) for after in range(4)] == ["0", "1", "2", None] and sorted(calls) == [0, 1, 2]
    assert [one.hashed is None for one in hashes._states] == [True, True, False]
    hashes.add(1, lambda: "another")  # it has taken the state of another worker
    assert hashes.hash_after(1) == "another"
