"""Whatever a peer, a newcomer or a file says, an elastic run raises its own errors and allocates by no unchecked size."""

import contextlib
import functools
import json
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fuzz import changed, swapped
from gossamer.errors import CheckpointError, GossamerError, PeerError, RefusedError
from gossamer.record.addresses import read_addresses
from gossamer.record.jsonl import json_from_peer
from gossamer.record.logs.order import Entered, Finished, Mixed, OrderWriter, Published, read_order
from gossamer.record.logs.outcomes import Begun, Ended, ExchangeOutcome, OutcomeWriter, RoundOutcome, read_outcomes
from gossamer.record.packed import packed, unpacked
from gossamer.run.asynchronous.async_state import OwnState, state_of
from gossamer.run.config.resolve import resolve
from gossamer.run.participant.agreement import limits_of
from gossamer.run.participant.rendezvous import fact_of
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic import newcomer
from gossamer.transport.elastic.ask import _parse_view
from gossamer.transport.elastic.core import ElasticCore
from gossamer.transport.elastic.fetches import Fetches
from gossamer.transport.elastic.meetings import Meetings
from gossamer.transport.elastic.members import (
    Members,
    MemberStatus,
    SlotEntry,
    membership_update,
    read_membership_update,
)
from gossamer.transport.sockets import letter as letters
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import HEADER_BYTES, LetterKind, Limits
from gossamer.transport.sockets.letter import Letter, body_of, receive_letter
from tiny import limits, tiny

NEWS = membership_update(
    {i: SlotEntry(i, 0, i, MemberStatus.ALIVE, 0, f"127.0.0.1:{4000 + i}", 7, 105) for i in range(3)}
)


SURROGATES = [b'"\\ud800"', b'{"\\udfff": 1}', b'["x", ["\\ud83d"]]', b'"\xed\xa0\x80"', '"é"'.encode("utf-16")]
"""JSON whose strings UTF-8 cannot encode, or that is not in UTF-8."""


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    """How many times something is spoilt in a test: ten thousand with `--full`."""
    return 10_000 if request.config.getoption("--full") else 2_000


def planned(call: Callable[[], object]) -> None:
    """Calls, and lets pass only what is raised on purpose."""
    with contextlib.suppress(GossamerError):
        call()


def test_thousands_of_headers_and_bodies_are_letters_or_refused(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: allocated.append(size) or empty(size, **options))
    draw, body = random.Random(1), torch.arange(24, dtype=torch.uint8)
    for number in range(count):
        kind = draw.choice([*LetterKind])
        raw = letters.encode(Letter(kind, draw.randrange(3), Ticket(draw.randrange(9)), 5, 7, 105, body), run=3)
        raw += body.numpy().tobytes()
        if number % 3 == 0:
            at = draw.randrange(HEADER_BYTES // 8) * 8
            raw = raw[:at] + struct.pack("<Q", draw.choice([0, 1, 24, 1 << 40, (1 << 64) - 1])) + raw[at + 8 :]
        else:
            raw = changed(raw, draw)
        with contextlib.suppress(GossamerError, OSError):
            near, far = socket.socketpair()
            with near, Channel(far, 5.0) as channel:
                near.sendall(raw)
                near.shutdown(socket.SHUT_WR)
                letter = receive_letter(channel, 3, limits(3), lambda letter, size: size <= 24)
            assert letter.kind in LetterKind and letter.body.numel() <= 24
    assert max(allocated) <= 24, "and headers take none"


def test_thousands_of_news_are_views_or_none(count: int) -> None:
    draw, value = random.Random(2), json.loads(NEWS)
    members = Members(limits(3), 0, [SlotEntry(0, 0, 0, MemberStatus.ALIVE, 0)])
    taken = 0
    for number in range(count):
        raw = changed(NEWS, draw) if number % 2 else json.dumps(swapped(value, draw)).encode()
        entries = read_membership_update(raw, limits(3))
        if entries is not None:
            taken += 1
            members.merge(entries)
            members.alive(5), members.newest_round, members.own
    assert 0 < taken < count and members.entries.keys() <= {0, 1, 2}
    assert read_membership_update(b"[" * 100_000, limits(3)) is None
    assert read_membership_update(b"[[0,0," + b"9" * 5000 + b',1,0,"",0,0]]', limits(3)) is None


def test_thousands_of_letters_in_any_order_never_raise_in_a_core_nor_fill_it(count: int) -> None:
    draw, sizes = random.Random(3), 8
    for _ in range(count // 100):
        known = [SlotEntry(i, 0, i, MemberStatus.ALIVE, 0, f"127.0.0.1:{4000 + i}") for i in range(3)]
        core = ElasticCore(Members(limits(3), 0, known), timeout_s=8.0)
        core.begin_round(0, frozenset(range(3)), [1])
        core.expect(Ticket(0), 1, sizes)
        for turn in range(100):
            kind, size = draw.choice([*LetterKind]), draw.choice([0, 7, sizes, sizes])
            body = (
                body_of(changed(NEWS, draw)) if kind == LetterKind.MEMBERSHIP else torch.zeros(size, dtype=torch.uint8)
            )
            ticket = Ticket(draw.choice([0, 0, 0, 1, 9, (1 << 32) - 1]), draw.choice([0, 0, 1]), draw.choice([0, 0, 1]))
            letter = Letter(
                kind, draw.randrange(1, 3), ticket, draw.randrange(3), draw.choice([0, 1, 1 << 31]), 1 << 60, body
            )
            before, version = dict(core.members.entries), core.members.version
            try:
                core.receive(letter, float(turn), draw.choice([None, 1, 2]))
            except RefusedError:
                assert (core.members.entries, core.members.version) == (before, version)
            core.tick(float(turn))
            assert core.kept <= 3 * 8 and len(core.outbox) < 40
            core.outbox.clear()
        core.post(Ticket(0), 1, torch.zeros(sizes, dtype=torch.uint8), 200.0)
        core.tick(300.0)
        core.collect(Ticket(0))


def test_thousands_of_requests_and_offers_of_newcomers_are_answered_or_refused(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(4)
    entry = SlotEntry(2, 1, 5, MemberStatus.JOINING, 0, "127.0.0.1:4002")
    place = {"nonce": 5, "address": "127.0.0.1:4002", "slot": None, "wants": None, "after": None, "compares": None}
    offer = {"slot": 2, "donor": 0, "after": 3, "bytes": 24, "sha256": "a" * 64, "entries": NEWS.decode()}
    state = newcomer.Handover(3, lambda: bytes(24))
    sent: list[Letter] = []
    monkeypatch.setattr(newcomer, "send_letter", lambda sock, letter, run: sent.append(letter))

    def says(*news: Letter) -> None:
        queue = iter(news)

        def receive(
            sock: object, run: int, limits: Limits, accepts: Callable[[Letter, int], bool], **options: Any
        ) -> Letter:
            letter = next(queue, None)
            if letter is None:
                raise ConnectionError("it was closed")
            if not accepts(letter, letter.body.numel()):
                raise ConnectionError("too large")
            return letter

        monkeypatch.setattr(newcomer, "receive_letter", receive)

    near, far = socket.socketpair()
    host = functools.partial(
        newcomer.host,
        cast(Any, near),
        Members(limits(3), 0, [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0, "127.0.0.1:4000"), entry]),
        Endpoint(near, 3, b"s", 1.0),
        give_slot=lambda place: entry,
        boundary=lambda _: state,
    )
    monkeypatch.setattr(newcomer, "dial", lambda *args, **options: socket.socket())
    own = newcomer.Applicant(5, "127.0.0.1:4002")
    for number in range(count):
        kind = draw.choice([LetterKind.ASK, LetterKind.OFFER, LetterKind.CHUNK, LetterKind.MEMBERSHIP])
        value = place if number % 2 else offer
        raw = json.dumps(value).encode()
        body = body_of(changed(raw, draw) if draw.random() < 0.5 else json.dumps(swapped(value, draw)).encode())
        parts = [(draw.choice([0, 8, 16]), bytes(draw.choice([0, 8, 24, 40]))) for _ in range(3)]
        chunks = [Letter(LetterKind.CHUNK, 0, steps=start, body=body_of(part)) for start, part in parts]
        with contextlib.suppress(GossamerError, OSError):
            if number % 2:
                says(
                    Letter(draw.choice([LetterKind.ASK, LetterKind.ASK, kind]), 1, body=body),
                    Letter(LetterKind.ASK, 1, body=body_of(b"yes")),
                )
                host()
            else:
                says(Letter(draw.choice([LetterKind.OFFER, LetterKind.OFFER, kind]), 0, body=body), *chunks)
                newcomer.ask("127.0.0.1:4000", b"s", own, run=3, limits=limits(3), timeout_s=1.0)
    near.close(), far.close()
    assert any(letter.kind == LetterKind.CHUNK for letter in sent)


def test_strings_that_utf8_cannot_encode_are_in_no_value_that_a_peer_has_sent() -> None:
    assert [json_from_peer(raw) for raw in SURROGATES] == [None] * len(SURROGATES)
    assert json_from_peer(b'"\\ud83d\\ude00 \\u00e9"') == "😀 é"


def test_thousands_of_views_are_views_or_none(count: int) -> None:
    draw = random.Random(8)
    value = {"worker": 1, "entries": NEWS.decode(), "silent_s": {"0": 0.5}, "refused": {"worker 2: bounds": 3}}
    assert _parse_view(json.dumps(value).encode(), limits(3)) is not None
    assert _parse_view(json.dumps({**value, "entries": "\ud800"}).encode(), limits(3)) is None
    for number in range(count // 2):
        raw = changed(json.dumps(value).encode(), draw) if number % 2 else json.dumps(swapped(value, draw)).encode()
        if (view := _parse_view(raw, limits(3))) is not None:
            json.dumps([view.worker, [*view.entries], dict(view.refused)], ensure_ascii=False).encode()


def test_thousands_of_outcomes_files_are_lives_or_refused(count: int, tmp_path: Path) -> None:
    draw, path = random.Random(5), tmp_path / "outcomes-000.jsonl"
    with OutcomeWriter(tmp_path, 0) as log:
        log.write(Begun(0, 0, 0, 0, 0))
        log.write(ExchangeOutcome(0, 0, 1, None, frozenset({2}), frozenset()))
        log.write(RoundOutcome(0, None, frozenset({1}), frozenset(), 15))
        log.write(Ended(1, "left"))
    whole = path.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    for number in range(count):
        damaged = swapped(lines, draw)
        some = [json.dumps(line) for line in damaged] if isinstance(damaged, list) else [json.dumps(damaged)]
        path.write_bytes(changed(whole, draw) if number % 2 else "\n".join(some).encode())
        planned(lambda: read_outcomes(tmp_path))


def test_hundreds_of_orders_of_events_are_lives_or_refused(count: int, tmp_path: Path) -> None:
    draw, path = random.Random(8), tmp_path / "order-000.jsonl"
    with OrderWriter(tmp_path, 0, life=5) as log:
        log.write(Entered(2, 1, (1, 9, 4), 0.5))
        log.write(Published(2, 1, 0.5, 1.0))
        log.write(Mixed(2, frozenset({0, 1}), ((1, 3, 9),), 1.0))
        log.write(Finished("left", 1, 0.0, 2.0))
    whole = path.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    for number in range(count // 10):
        damaged = swapped(lines, draw)
        some = [json.dumps(line) for line in damaged] if isinstance(damaged, list) else [json.dumps(damaged)]
        path.write_bytes(changed(whole, draw) if number % 2 else "\n".join(some).encode())
        planned(lambda: read_order(tmp_path))


def test_thousands_of_states_and_facts_of_asynchronous_workers_are_read_or_refused(count: int, tmp_path: Path) -> None:
    draw = random.Random(9)
    state = {"x": torch.zeros(2), "outer": [], "inner": {}, "phases": 3, "place": [1, 7, 6], "held": {0: 4}}
    fact = ["127.0.0.1:4000", 5, [2, [[2, None, None]]], [3, [[0, 4], [1, 6]]]]
    run = resolve(tiny(run__wait=False), real=True)
    most, start_facts = limits_of(run), OwnState(run, tmp_path)
    for _ in range(count):
        with contextlib.suppress(CheckpointError):
            found = state_of(swapped(state, draw), 2, most)
            numbers = [found.phases, *found.source, *found.held, *found.held.values()]
            assert all(type(one) is int and one >= 0 for one in numbers)
            assert all(slot < 3 and steps <= most.steps for slot, steps in found.held.items())
        with contextlib.suppress(PeerError):
            decoded = fact_of(0, swapped(fact, draw), start_facts).fact
            assert all(0 <= slot < 3 and 0 <= steps <= most.steps for slot, steps in decoded.held.items())


def test_claims_of_a_worker_above_the_limits_of_the_run_are_not_forwarded(tmp_path: Path) -> None:
    run = resolve(tiny(run__wait=False), real=True)
    most, start_facts = limits_of(run), OwnState(run, tmp_path)
    state = {"x": torch.zeros(2), "outer": [], "inner": {}, "phases": 3, "place": [1, 7, 6], "held": {0: most.steps}}
    assert state_of(state, 2, most).held == {0: most.steps}
    for wrong in ({"held": {0: most.steps + 1}}, {"held": {3: 1}}, {"phases": most.rounds + 1}, {"place": [3, 7, 6]}):
        with pytest.raises(CheckpointError, match="holds"):
            state_of({**state, **wrong}, 2, most)
    stated = ["127.0.0.1:4000", 5, [2, [[2, None, None]]]]
    assert fact_of(1, [*stated, [3, [[0, most.steps]]]], start_facts).fact.held == {0: most.steps}
    for wrong in ([3, [[0, most.steps + 1]]], [3, [[3, 1]]], [most.rounds + 1, []]):
        with pytest.raises(PeerError, match="worker 1 published"):
            fact_of(1, [*stated, wrong], start_facts)


def test_thousands_of_letters_in_any_order_never_raise_in_calls_nor_fill_them(count: int) -> None:
    draw = random.Random(10)
    kinds = [kind for kind in LetterKind if LetterKind.FETCH <= kind <= LetterKind.DONE]
    members = Members(limits(3), 0, read_membership_update(NEWS, limits(3)) or ())
    fetches = Fetches(members, 4, limit_s=5.0)
    meetings = Meetings(
        members, 4, limit_s=5.0, tell=lambda one: torch.zeros(4, dtype=torch.uint8), meet=lambda one, payload: None
    )
    fetches.closed = meetings.closed = False
    fetches.publish(1, torch.zeros(4, dtype=torch.uint8), 30)
    for turn in range(count):
        numbers = [draw.choice([0, 1, 2, 5, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]) for _ in range(3)]
        body = torch.zeros(draw.choice([0, 4, 4, 8]), dtype=torch.uint8)
        steps = draw.choice([0, 30, (1 << 62) - 1])
        letter = Letter(draw.choice(kinds), draw.randint(1, 2), Ticket(*numbers), round=turn, steps=steps, body=body)
        for calls in (fetches, meetings):
            if calls.accepts(letter, body.numel()):
                calls.receive(letter, float(turn))
            if draw.random() < 0.1:
                calls.tick(float(turn))
            assert len(calls.outbox) < 10
            calls.outbox.clear()
        if draw.random() < 0.2:
            fetches.ask([1, 2], float(turn))
            meetings.invite(draw.randint(1, 2), float(turn))
        taken = fetches.take().values() if draw.random() < 0.3 else ()
        assert all(0 < one.version < 1 << 31 > one.life and one.payload.numel() == 4 for one in taken)


def test_thousands_of_packed_states_are_states_or_refused(count: int) -> None:
    draw = random.Random(6)
    raw = packed({"x": torch.arange(3.0), "s": [torch.zeros(2)], "steps_taken": 15, "line": 3})
    assert unpacked(raw)["steps_taken"] == 15
    for number in range(count):
        if number % 2:
            planned(lambda: unpacked(changed(raw, draw)))
        else:
            at = draw.randrange(0, min(64, len(raw) - 8))
            size = struct.pack("<Q", draw.choice([0, 1, 1 << 20, 1 << 40, (1 << 64) - 1]))
            planned(lambda spoilt=raw[:at] + size + raw[at + 8 :]: unpacked(spoilt))


def test_thousands_of_address_files_are_addresses_or_passed_over(count: int, tmp_path: Path) -> None:
    draw, path = random.Random(7), tmp_path / "address-000.json"
    value = {"address": "127.0.0.1:4000", "run": "00000000000000ff", "pid": 7}
    raw = json.dumps(value).encode()
    for number in range(count):
        path.write_bytes(changed(raw, draw) if number % 2 else json.dumps(swapped(value, draw)).encode())
        for found in read_addresses(tmp_path):
            entry = SlotEntry(0, 0, 0, MemberStatus.ALIVE, 0, found.address)
            assert read_membership_update(membership_update({0: entry}), limits(1)) == (entry,), found
