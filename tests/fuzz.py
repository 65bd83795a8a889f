"""Spoilt bytes for everything that decodes bytes: `make fuzz` tries all of them, and writes docs/results/fuzz.md.

An input is drawn from a seed: bytes that the product itself has written, of which some are changed, cut, repeated or taken from
another example; numbers become extreme, and strings huge, or such as no terminal and no encoding likes. Where a checksum guards
them, half of the inputs have one that fits. A decoder may succeed, or raise an error of `gossamer.errors` in one line, and must
stay within a bound of time and of memory.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import random
import re
import resource
import secrets
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from codecs_in_use import VARIANTS
from commands import run
from gossamer.data.bins import open_binary
from gossamer.data.documents import read_documents, utf8
from gossamer.data.settings import DataConfig
from gossamer.data.token_files import _load_tokens
from gossamer.data.tokenizer import load_tokenizer
from gossamer.errors import GossamerError
from gossamer.layout import layout_of
from gossamer.library.peers import read_losses
from gossamer.network.links import Network, read_network, to_toml
from gossamer.network.pacing import PaceNote, note_of
from gossamer.record import checkpoint
from gossamer.record.addresses import Address, read_addresses, write_address
from gossamer.record.folder import read_metrics
from gossamer.record.lineage import read_branches, write_branches
from gossamer.record.logs.arrivals import ArrivalWriter, ServerInput, read_arrivals
from gossamer.record.logs.events import read_events
from gossamer.record.logs.order import Entered, Finished, Mixed, OrderWriter, Published, read_order
from gossamer.record.logs.outcomes import Begun, Ended, ExchangeOutcome, OutcomeWriter, RoundOutcome, read_outcomes
from gossamer.record.logs.pipeline_work import read_pipeline, write_pipeline
from gossamer.record.logs.seconds import read_seconds
from gossamer.record.logs.stage_seconds import StageSeconds, read_stages, stage_lines
from gossamer.record.logs.trace import read_trace
from gossamer.record.machines import read_machines
from gossamer.record.origin import origin
from gossamer.record.packed import packed, unpacked
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.results import PointResult, read_results, result_lines
from gossamer.run.asynchronous.async_state import OwnState, state_of
from gossamer.run.asynchronous.message_form import MessageForm
from gossamer.run.config.document import load_document
from gossamer.run.config.experiment_file import open_experiment, points
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import dump, parse
from gossamer.run.participant.agreement import limits_of
from gossamer.run.participant.rendezvous import fact_of
from gossamer.run.planning.expected_loss import read_law
from gossamer.run.play.film import read_film
from gossamer.run.served.protocol import Terms, decode_terms
from gossamer.run.simulated.simulate import simulate
from gossamer.transport import wire
from gossamer.transport.bucket.bucket import head_and_body, item_in
from gossamer.transport.bucket.objects import commit_in
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic import newcomer
from gossamer.transport.elastic.ask import _parse_view
from gossamer.transport.elastic.closing import Closing
from gossamer.transport.elastic.members import (
    Members,
    MemberStatus,
    SlotEntry,
    membership_update,
    read_membership_update,
)
from gossamer.transport.keys import Keys, new_key, read_peers
from gossamer.transport.processes.launch import _statement
from gossamer.transport.secret import read_secret
from gossamer.transport.sockets import handshake, header
from gossamer.transport.sockets import letter as letters
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.header import HEADER_BYTES, LetterKind
from gossamer.transport.sockets.letter import Letter, body_of, receive_letter
from gossamer.transport.sockets.server_client import read_settings_in
from tiny import limits, single, tiny

ROOT = Path(__file__).parents[1]
BYTES, FILES = 20_000, 2_000
"""Inputs of a decoder of bytes; of one for which a connection, a costly file or several verbs are needed."""
SECONDS, MEMORY_BYTES = 30, 2 << 30
"""An input may take so long, on a machine that is busy with other work, and so much address space above what is used before."""
LONGEST = 4_000
"""Characters of a sentence."""
JUNK = [
    None,
    True,
    -1,
    0,
    1,
    3,
    1 << 31,
    1 << 62,
    1 << 64,
    1.5,
    "",
    "x",
    "host:1",
    "é:1",
    "\ud800",
    [],
    [1],
    {},
    {"slot": 1},
    "a" * 300,
]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NUMBERS = (
    b"0",
    b"-1",
    b"1",
    b"2147483648",
    b"9223372036854775808",
    b"18446744073709551616",
    b"9" * 400,
    b"1e999",
    b"-1e999",
    b"1e-320",
    b"1.5",
    b"-0.0",
    b"NaN",
    b"Infinity",
    b"nan",
    b"inf",
    b"true",
    b"null",
    b'"1"',
    b"[]",
    b"{}",
)
_STRING = re.compile(rb'"[^"\n]{0,200}"')
_STRINGS = (
    b'""',
    rb'"\ud800"',
    rb'"\u001b[2J\u0007"',
    rb'"\u0000"',
    rb'"\u202e\r"',
    b'"' + b"a" * 20_000 + b'"',
    b'"\xff"',
    b'"\x1b[31m"',
    '"é\u2028"'.encode(),
    b'"../../x"',
    b"[" * 2_000,
    b'"9"',
)
_FIELDS = (0, 1, 24, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1)
_FORMATS = ("<Q", ">Q", "<I", "<H", "<d", "<f")


class Decoder(NamedTuple):
    """What decodes bytes, with bytes that it takes."""

    examples: Sequence[bytes]
    decode: Callable[[bytes], object]
    inputs: int = BYTES
    also: tuple[type[Exception], ...] = ()
    """What it may raise beside the errors of `gossamer.errors`, as its docstring says."""


class Tried(NamedTuple):
    """What came of the inputs of a decoder: a line of the outcome, which later calls skip."""

    decoder: str
    seed: int
    share: float
    commit: str
    inputs: int
    taken: int
    seconds: float
    grown_mib: int
    """By how much the most memory of this process has grown."""
    wrong: list[str]


class _TooLongError(BaseException):
    """An input took more than `SECONDS`; no decoder catches it."""


def changed(raw: bytes, draw: random.Random) -> bytes:
    """Bytes with some of them replaced, removed or repeated."""
    out = bytearray(raw)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(out) + 1)
        way = draw.randrange(4)
        if way == 0 and at < len(out):
            out[at] = draw.randrange(256)
        elif way == 1:
            del out[at : at + draw.choice([1, 1, 8, len(out)])]
        elif way == 2:
            out[at:at] = out[: draw.randint(1, 9)]
        else:
            out[at:at] = draw.choice([b"9" * 30, b"[" * 40, b"NaN", b"-", b'"', b"\xff", b"1e999", b"null"])
    return bytes(out)


def swapped(value: object, draw: random.Random) -> object:
    """A JSON value with one part replaced by junk, added or removed."""
    if draw.random() < 0.3 or not isinstance(value, (list, dict)) or not value:
        return draw.choice(JUNK)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], *([swapped(value[at], draw)] if draw.random() < 0.9 else []), *value[at + 1 :]]
    name = draw.choice([*value])
    rest = {key: one for key, one in value.items() if key != name}
    return rest | ({name: swapped(value[name], draw)} if draw.random() < 0.9 else {})


def spoilt(examples: Sequence[bytes], draw: random.Random) -> bytes:
    """One of the examples, spoilt one to three times."""
    raw = draw.choice(examples)
    for _ in range(draw.randint(1, 3)):
        raw = draw.choice(_WAYS)(raw, examples, draw)
    return raw


def _changed(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    return changed(raw, draw)


def _flipped(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    if not raw:
        return b"\0"
    at = draw.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]


def _spliced(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    other = draw.choice(examples)
    start, stop = sorted(draw.randrange(len(other) + 1) for _ in range(2))
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + other[start:stop] + raw[draw.choice([at, min(len(raw), at + stop - start)]) :]


def _with_number(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    return _put(raw, [*_NUMBER.finditer(raw[:20_000])], _NUMBERS, draw)


def _with_string(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    return _put(raw, [*_STRING.finditer(raw[:20_000])], _STRINGS, draw)


def _put(raw: bytes, places: Sequence[re.Match[bytes]], words: Sequence[bytes], draw: random.Random) -> bytes:
    if not places:
        return changed(raw, draw)
    place = draw.choice(places)
    return raw[: place.start()] + draw.choice(words) + raw[place.end() :]


def _with_field(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    form = draw.choice(_FORMATS)
    field = (
        struct.pack(form, draw.choice([float("nan"), float("inf"), -1.0, 3e38]))
        if form in ("<d", "<f")
        else struct.pack(form, draw.choice(_FIELDS) & (1 << 8 * struct.calcsize(form)) - 1)
    )
    at = draw.randrange(max(1, min(len(raw), 200) // 2)) * 2
    return raw[:at] + field + raw[at + len(field) :]


def _with_value(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    """One line of JSON with another value, or all of it."""
    lines = raw.splitlines(keepends=True)
    place = draw.randrange(len(lines)) if lines else 0
    try:
        value = json.loads(lines[place] if len(lines) > 1 else raw)
    except (ValueError, IndexError, RecursionError):
        return _spliced(raw, examples, draw)
    line = json.dumps(swapped(value, draw)).encode()
    return b"".join([*lines[:place], line + b"\n", *lines[place + 1 :]]) if len(lines) > 1 else line


def _with_lines_moved(raw: bytes, examples: Sequence[bytes], draw: random.Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    if len(lines) < 2:
        return changed(raw, draw)
    line = lines.pop(draw.randrange(len(lines)))
    for _ in range(draw.randrange(3)):
        lines.insert(draw.randrange(len(lines) + 1), line)
    return b"".join(lines)


_WAYS = (
    _changed,
    _flipped,
    _spliced,
    _with_number,
    _with_number,
    _with_string,
    _with_string,
    _with_field,
    _with_value,
    _with_value,
    _with_lines_moved,
)


def _must_be_one_line(sentence: str) -> None:
    assert "\n" not in sentence.strip("\n") and len(sentence) <= LONGEST, f"no sentence: {sentence[:300]!r}"


@contextlib.contextmanager
def check_values() -> Iterator[None]:
    """Memory beyond `MEMORY_BYTES` more than what is used now cannot be had within, and an alarm ends what takes too long."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooLongError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def tried(name: str, decoder: Decoder, seed: int, share: float = 1.0) -> Tried:
    """Lets a decoder take its inputs, or a share of them. Inputs follow from the seed and the name."""
    count = max(1, round(share * decoder.inputs))
    wrong, taken, began = dict[str, str](), 0, time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for example in decoder.examples:
        decoder.decode(example)  # what is not spoilt is taken, or nothing below means anything
    with check_values():
        for number in range(count):
            raw = spoilt(decoder.examples, random.Random(f"{seed} {name} {number}"))
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                decoder.decode(raw)
                taken += 1
            except (GossamerError, *decoder.also) as error:
                with contextlib.suppress(AssertionError):
                    _must_be_one_line(str(error))
                    continue
                wrong.setdefault(f"{type(error).__name__} of several lines", f"input {number}: {str(error)[:300]!r}")
            except (Exception, _TooLongError, SystemExit) as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                trace, place = error.__traceback__, ""
                while trace is not None:
                    file = Path(trace.tb_frame.f_code.co_filename)
                    if "gossamer" in file.parts:
                        place = f"{file.name}:{trace.tb_lineno}"
                    trace = trace.tb_next
                sentence = f"input {number}: {type(error).__name__} at {place}: {str(error)[:300]!r}, of {raw[:200]!r}"
                wrong.setdefault(f"{type(error).__name__} {place}", sentence)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    commit = origin("", None)["commit"]
    return Tried(name, seed, share, commit, count, taken, round(time.monotonic() - began, 1), grown, [*wrong.values()])


# What decodes, with what it takes. Each row makes its examples in a folder for itself.


def _fit(raw: bytes, size: int) -> bytes:
    """Bytes of the size that a receiver reads from a connection."""
    return raw[:size].ljust(size, b"\0")


def _tensor(raw: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(_fit(raw, size)), dtype=torch.uint8)


def _of_codec(name: str, folder: Path) -> Decoder:
    """A payload of another worker, as asynchronous workers and rounds decode it."""
    model = torch.nn.Linear(31, 32)
    x, layout = torch.randn(1024, generator=torch.Generator().manual_seed(1)), layout_of(model)
    form = MessageForm(VARIANTS[name], layout, x, seed=1, worker=0, device=torch.device("cpu"))
    examples = [form.pack(message, number)[1].numpy().tobytes() for number, message in enumerate((x, 1e4 * x, 0 * x))]

    def decode(raw: bytes) -> None:
        message = form.unpack(_tensor(raw, form.wire_bytes), 1)
        assert isinstance(message, torch.Tensor) and message.shape == x.shape and message.isfinite().all()

    return Decoder(examples, decode, inputs=BYTES)


def _of_wire(folder: Path) -> Decoder:
    head = wire.Header(7, Ticket(3, 1), 2, 64, 5)
    size = len(wire.encode_header(head))
    examples = [wire.encode_header(one) for one in (head, head._replace(checksum=None))]
    return Decoder(
        examples,
        lambda raw: wire.check_header(wire.decode_header(_fit(raw, size), 2), head) if raw != examples[1] else None,
    )


_ENTRIES = {i: SlotEntry(i, 0, i, MemberStatus.ALIVE, 0, f"127.0.0.1:{4000 + i}", 7, 105) for i in range(3)}
_NEWS = membership_update(_ENTRIES)


def _of_letters(folder: Path) -> Decoder:
    body = torch.arange(24, dtype=torch.uint8)
    written = [
        Letter(kind, 1, header.NO_TICKET, 5, 7, 105, body) for kind in LetterKind if kind not in header._EXCHANGES
    ]
    written += [Letter(kind, 1, Ticket(3), 5, 7, 105, body) for kind in header._EXCHANGES]

    def decode(raw: bytes) -> None:
        if len(raw) % 2 and len(raw) > HEADER_BYTES:  # half have a sum that fits
            cut = header._LAYOUT.size
            raw = raw[:cut] + header._SUM.pack(zlib.crc32(raw[:cut])) + raw[cut + header._SUM.size :]
        near, far = socket.socketpair()
        with near, Channel(far, 5.0) as channel:
            near.sendall(raw)
            near.shutdown(socket.SHUT_WR)
            letter = receive_letter(channel, 3, limits(3), lambda letter, size: size <= 64)
        assert letter.kind in LetterKind and letter.body.numel() <= 64

    return Decoder([letters.encode(one, 3) + one.content for one in written], decode, also=(OSError,))


class _Noted(Channel):
    """Keeps what it sends."""

    def write(self, data: bytes | memoryview, deadline: float | None = None) -> None:
        self.sent = getattr(self, "sent", b"") + bytes(data)
        super().write(data, deadline)


def _handshakes() -> tuple[bytes, bytes]:
    """What the ends of a connection send each other, where no number is random."""
    one, two = socket.socketpair()
    with _Noted(one, 5.0) as listener, _Noted(two, 5.0) as dialler:
        other = threading.Thread(
            target=handshake.prove_to_listener, args=(dialler, b"secret"), kwargs={"run": 3, "me": 1}
        )
        other.start()
        handshake.prove_to_dialler(listener, b"secret", run=3)
        other.join()
        return listener.sent, dialler.sent  # pyright: ignore[reportAttributeAccessIssue]


def _of_handshake(dialled: bool, folder: Path) -> Decoder:
    with mock.patch.object(secrets, "token_bytes", bytes):
        listener, dialler = _handshakes()

    def decode(raw: bytes) -> None:
        near, far = socket.socketpair()
        with near, Channel(far, 5.0) as channel, mock.patch.object(secrets, "token_bytes", bytes):
            near.sendall(raw)
            near.shutdown(socket.SHUT_WR)
            if dialled:
                handshake.prove_to_dialler(channel, b"secret", run=3, timeout_s=5.0)
            else:
                handshake.prove_to_listener(channel, b"secret", run=3, me=1, timeout_s=5.0)

    return Decoder([dialler if dialled else listener], decode, inputs=FILES, also=(OSError,))


def _of_offers(folder: Path) -> Decoder:
    offer = {"slot": 2, "donor": 0, "after": 3, "bytes": 24, "sha256": "a" * 64, "entries": _NEWS.decode()}
    examples = [json.dumps(offer | {"slot": slot}).encode() for slot in (0, 2)]
    return Decoder(
        examples,
        lambda raw: newcomer._offer(
            Letter(LetterKind.OFFER, 0, body=body_of(raw)), limits(3), "127.0.0.1:4000", frozenset({2})
        ),
    )


def _of_requests(folder: Path) -> Decoder:
    place = newcomer.Applicant(5, "127.0.0.1:4002")
    examples = [json.dumps(one._asdict()).encode() for one in (place, place._replace(slot=2, wants=1, after=3))]
    return Decoder(examples, lambda raw: newcomer._place(Letter(LetterKind.ASK, 0, body=body_of(raw)), limits(3)))


def _of_news(folder: Path) -> Decoder:
    def decode(raw: bytes) -> None:
        members = Members(limits(3), 0, [SlotEntry(0, 0, 0, MemberStatus.ALIVE, 0)])
        members.merge(read_membership_update(raw, limits(3)) or [])
        assert members.entries.keys() <= {0, 1, 2}
        members.alive(5)

    return Decoder([_NEWS, membership_update({1: _ENTRIES[1]})], decode)


def _of_views(folder: Path) -> Decoder:
    value = {"worker": 1, "entries": _NEWS.decode(), "silent_s": {"0": 0.5}, "refused": {"worker 2: bounds": 3}}

    def decode(raw: bytes) -> None:
        if (view := _parse_view(raw, limits(3))) is not None:
            json.dumps([view.worker, [*view.entries], dict(view.refused)], ensure_ascii=False).encode()

    return Decoder([json.dumps(value).encode()], decode)


def _of_closings(kind: LetterKind, value: object, folder: Path) -> Decoder:
    def decode(raw: bytes) -> None:
        closing = Closing(Members(limits(3), 0, [*_ENTRIES.values()]), limit_s=5.0, beat_s=0.5)
        closing.begin_round(3)
        closing.ready(0.0)
        closing.receive(Letter(kind, 1, round=3, body=body_of(raw)), 1.0)
        closing.tick(2.0)
        assert len(closing.outbox) < 20

    return Decoder([json.dumps(value).encode()], decode)


def _of_terms(folder: Path) -> Decoder:
    example = torch.tensor(Terms(3, 2, 1, 3, 0, 4, 0, 1_000_000), dtype=torch.int64).numpy().tobytes()
    size = len(example)
    return Decoder([example], lambda raw: decode_terms(_tensor(raw, size).view(torch.int64), limits(3)))


def _of_commits(folder: Path) -> Decoder:
    def decode(raw: bytes) -> None:
        item = item_in(memoryview(raw))
        commit = None if item is None else commit_in(3, item.head, 3)
        assert commit is None or all(slot < 3 for slot in commit.parts)

    part = {"life": 0, "steps": 5, "begun": {"after": 2, "donor": 1, "sha256": "0" * 64, "steps": 4}}
    head = {"parts": {"1": part}, "steps": [4, 5, 4], "mean": "", "closer": [1, 0], "time_s": 1.5}
    return Decoder([head_and_body(head, b"")], decode)


_STATE = {
    "x": torch.arange(3.0),
    "outer": [torch.zeros(2)],
    "inner": {},
    "phases": 3,
    "place": [1, 7, 6],
    "held": {0: 4},
}


def _of_states(folder: Path) -> Decoder:
    most = limits_of(resolve(tiny(run__wait=False), real=True))
    return Decoder([packed(_STATE)], lambda raw: state_of(unpacked(raw), 2, most))


def _of_facts(folder: Path) -> Decoder:
    config = resolve(tiny(run__wait=False), real=True)
    start_facts = OwnState(config, folder)
    fact = ["127.0.0.1:4000", 5, [2, [[2, None, None]]], [3, [[0, 4], [1, 6]]]]
    return Decoder(
        [json.dumps(["1f calls", fact, {"rule.lr": "0.7"}]).encode(), json.dumps(["1f calls", fact]).encode()],
        lambda raw: fact_of(0, _statement(0, raw)[1], start_facts),
    )


class _OneEntry(NamedTuple):
    raw: bytes

    def several(self, names: Sequence[str]) -> Mapping[str, bytes]:
        return {"0": self.raw}


def _file(
    read: Callable[[Path], object], name: str, *examples: bytes, inputs: int = BYTES
) -> Callable[[Path], Decoder]:
    """Decodes a file of this name, given the path of its folder (or, where it begins with a slash, its own)."""

    def prepared(folder: Path) -> Decoder:
        path = folder / name.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)

        def decode(raw: bytes) -> None:
            path.write_bytes(raw)
            read(path if name.startswith("/") else path.parent)

        return Decoder(examples, decode, inputs=inputs)

    return prepared


def _of_run(
    name: str, read: Callable[[Path], object], folder: Path, *, kind: str = "simulated", inputs: int = BYTES
) -> Decoder:
    """Decodes a file of a run folder that a simulation has written."""
    run_folder = _run_folder(kind)
    return _file(read, name, (run_folder / name).read_bytes(), inputs=inputs)(folder)


@functools.cache
def _run_folder(kind: str) -> Path:
    """A run that has been simulated once for all that read its files."""
    there = Path(_SCRATCH.name) / kind / "run"
    given: dict[str, Any] = {
        "workers": 2,
        "topology__name": "complete",
        "model__hidden_size": 16,
        "model__intermediate_size": 32,
        "run__steps": 4,
        "run__eval_every": 2,
        "run__checkpoint_every": 2,
        "data__max_bytes": 30_000,
    }
    if kind == "server":
        del given["topology__name"]
        given |= {
            "server__name": "heloco",
            "network": {"clock": {"step_s": 0.1, "uplink_bps": 1e8, "downlink_bps": 1e8}},
        }
    simulate(single(**given, **({"record__hash": True} if kind == "simulated" else {})), there)
    return there


_SCRATCH = tempfile.TemporaryDirectory()


def _written(write: Callable[[Path], object], name: str, read: Callable[[Path], object]) -> Callable[[Path], Decoder]:
    """Decodes a file that `write` writes into a folder."""

    def prepared(folder: Path) -> Decoder:
        write(folder)
        return _file(read, name, (folder / name).read_bytes())(folder)

    return prepared


def _outcomes(folder: Path) -> None:
    with OutcomeWriter(folder, 0) as log:
        log.write(Begun(0, 0, 0, 0, 0))
        log.write(ExchangeOutcome(0, 0, 1, None, frozenset({2}), frozenset()))
        log.write(RoundOutcome(0, None, frozenset({1}), frozenset(), 15))
        log.write(Ended(1, "left"))


def _order(folder: Path) -> None:
    with OrderWriter(folder, 0, life=5) as log:
        log.write(Entered(2, 1, (1, 9, 4), 0.5))
        log.write(Published(2, 1, 0.5, 1.0))
        log.write(Mixed(2, frozenset({0, 1}), ((1, 3, 9),), 1.0))
        log.write(Finished("left", 1, 0.0, 2.0))


def _arrivals(folder: Path) -> None:
    with ArrivalWriter(folder, resume=False) as log:
        log.append(ServerInput("serve", 0.0, workers=2, digest="d"))
        log.append(ServerInput("join", 1.5, worker=0))
        log.append(ServerInput("push", 2.5, worker=0, phase=1))
        log.append(ServerInput("tick", 2.5))
        log.append(ServerInput("leave", 3.5, worker=0))


def _stages(folder: Path) -> None:
    (folder / "stages.jsonl").write_text(
        stage_lines([StageSeconds(0, 0, 0, 0.5, 0.1, 8, 8, 8), StageSeconds(0, 0, 1, 0.5, 0.1, 8, 8, None, "slow")])
    )


def _results(folder: Path) -> None:
    row = {"loss_at_round": [[1, 2.0], [2, None]], "loss_at_s": {"slow": [[1.0, 2.0]]}}
    (folder / "results.jsonl").write_text(result_lines([PointResult("diloco", {"seed": 1}, 1, row, None)]))


def _pipeline(folder: Path) -> None:
    write_pipeline(
        folder,
        {
            "stages": 2,
            "chunks": 1,
            "schedule": "1f1b",
            "micro_batches": 2,
            "shares": [0.5, 0.5],
            "forward_bytes": [8],
            "backward_bytes": [8],
            "again_bytes": [8],
            "first": 0.5,
            "cut": None,
        },
    )


def _film(folder: Path) -> None:
    head = {
        "film": 1,
        "seed": 3,
        "gossamer": "0.2",
        "torch": "2.9",
        "text": "f",
        "parameters": 9,
        "payload_bytes": 36,
        "uplink_bps": 1e8,
        "step_s": 0.1,
    }
    frame = {
        "round": 0,
        "actions": [["kill", 3], ["local_steps", 20]],
        "told": ["a"],
        "method": "diloco",
        "local_steps": 10,
        "momentum": 0.5,
        "alive": [0, 1],
        "slow": [],
        "cut": False,
        "there": [0, 1],
        "mean": [0, 1],
        "pairs": [[0, 1]],
        "sent_bytes": 3,
        "seconds": [[0, 1, 2, 1, 3], *[None] * 7],
        "clock_s": 1.0,
        "loss": 2.0,
        "losses": [2.0, *[None] * 7],
        "disagreement": 0.1,
        "places": [[0.0, 1.0]] * 8,
        "says": "b",
    }
    (folder / "film.jsonl").write_text(json.dumps(head) + "\n" + json.dumps(frame) + "\n")


def _of_checkpoints(what: str, folder: Path) -> Decoder:
    """One of the two files of a checkpoint, whose seals fit in half of the inputs: what an attacker writes, not a bad disk."""
    store = folder / "checkpoints"
    checkpoint.save(store, 2, 0, _STATE, digest="d")
    manifest, tensors = checkpoint.files_of(store, 2, 0)
    description, content = manifest.read_bytes(), tensors.read_bytes()
    body = json.loads(description)
    del body["manifest_sha256"]

    def decode(raw: bytes) -> None:
        fits = len(raw) % 2 == 0
        if what == "manifest":
            rest = raw.partition(b"\n")[2]
            manifest.write_bytes(checkpoint._seal(rest) + rest if fits else raw)
        else:
            seal = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} if fits else {}
            manifest.write_bytes(checkpoint._sealed({**body, **seal}))
            tensors.write_bytes(raw)
        checkpoint.load(store, 2, 0, "d")

    return Decoder([description if what == "manifest" else content], decode)


def _of_keys(folder: Path) -> Decoder:
    path = new_key("paris", folder / "paris.pem")
    example, peers = path.read_bytes(), {"paris": _peer_of(path)}

    def decode(raw: bytes) -> None:
        path.write_bytes(raw)
        Keys(path, peers, 1)

    return Decoder([example], decode, inputs=FILES)


def _of_secrets(folder: Path) -> Decoder:
    (folder / "secret").touch(mode=0o600)
    return _file(read_secret, "/secret", b"0123456789abcdef" * 4 + b"\n", inputs=FILES)(folder)


def _peer_of(path: Path) -> Any:
    code, output = run("keys", "show", "paris", "--out", path)
    assert code == 0, output
    (path.parent / "peers.toml").write_text(output)
    return next(iter(read_peers(path.parent / "peers.toml").values()))


def _of_peers(folder: Path) -> Decoder:
    new_key("paris", folder / "paris.pem")
    _peer_of(folder / "paris.pem")
    return _file(read_peers, "/peers.toml", (folder / "peers.toml").read_bytes(), inputs=FILES)(folder)


_EXPERIMENT = b"""
[[variant]]
label = "one"
method = "gossip"
[[variant]]
label = "two"
"rule.name" = "diloco"
sweep = {"inner.lr" = [0.1, 0.2]}
[scale.small]
workers = 2
"""


def _as_experiment(path: Path) -> None:
    points(open_experiment(path, {}), seeds=[1])


def _of_tokenizer(folder: Path) -> Decoder:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    words = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"], show_progress=False)
    made.train_from_iterator(["the cat sat on the mat with a hat"], words)

    def read(path: Path) -> None:
        found = load_tokenizer(str(path))
        for ids in found.encode(["the cat", "\0 é"]):
            assert all(0 <= one < found.vocab_size for one in ids)

    return _file(read, "/tokenizer.json", made.to_str().encode(), inputs=FILES)(folder)


def _of_binary(kind: str, folder: Path) -> Decoder:
    tokens = np.arange(200, dtype="<u2").tobytes()
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 200
    path = folder / "train.bin"
    if kind == "of Megatron":
        path.write_bytes(tokens)
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + np.array([100, 100], "<i4").tobytes()
        index += np.array([0, 200], "<i8").tobytes() + np.array([0, 1, 2], "<i8").tobytes()
        return _file(lambda index: open_binary(index.with_suffix(".bin"), 256), "/train.idx", index)(folder)
    example = head.tobytes() + tokens if kind == "of llm.c" else tokens
    return _file(lambda path: open_binary(path, 256), "/train.bin", example)(folder)


def _read_all(path: Path) -> None:
    for document in read_documents(path, "text"):
        utf8(document)


def _of_parquet(folder: Path) -> Decoder:
    path = folder / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["the cat", "sat"]}), path)
    return _file(_read_all, "/a.parquet", path.read_bytes(), inputs=FILES)(folder)


def _of_cache(folder: Path) -> Decoder:
    (folder / "a.txt").write_text("the cat sat on the mat\n" * 50)
    config, tokenizer = DataConfig(source=str(folder / "a.txt"), cache=str(folder / "cache")), load_tokenizer("bytes")
    _load_tokens(config, tokenizer)
    manifest = next((folder / "cache").glob("tokens-*/manifest.json"))
    return _file(
        lambda path: _load_tokens(config, tokenizer),
        str(manifest.relative_to(folder)),
        manifest.read_bytes(),
        inputs=FILES,
    )(folder)


def _of_verbs(name: str, folder: Path) -> Decoder:
    """What reads a whole run folder does with one of its files."""
    import shutil

    there = folder / "run"
    shutil.copytree(_run_folder("simulated"), there)
    words = [
        ["status", there],
        ["report", there, "--json", "--out", folder / "page.html"],
        ["audit", there],
        ["status", there, "--json"],
    ]

    def decode(raw: bytes) -> None:
        (there / name).write_bytes(raw)
        for verb in words:
            code, output = run(*verb)
            assert code in (0, 1, 2) and "Traceback" not in output, output

    return Decoder([(there / name).read_bytes()], decode, inputs=FILES // 10)


def _followed(folder: Path) -> None:
    FollowedRun("a", folder).look()


_RULES_OF_CLOSING = {
    LetterKind.REPORT: [3, 0, True, -1, 0, -1, False, False, [2, 0, 0], [1]],
    LetterKind.PROPOSAL: [3, 0, 0, [0, 1, 2], [[0, 1, 0, -1]]],
    LetterKind.CLOSED: [3, 0, 0],
}

DECODERS: dict[str, Callable[[Path], Decoder]] = {
    **{f"payloads of codec {name}": functools.partial(_of_codec, name) for name in VARIANTS},
    "headers of rounds": _of_wire,
    "letters": _of_letters,
    "handshake, who was dialled": functools.partial(_of_handshake, True),
    "handshake, who dials": functools.partial(_of_handshake, False),
    "news of members": _of_news,
    "views of a worker": _of_views,
    "requests of newcomers": _of_requests,
    "offers to newcomers": _of_offers,
    **{
        f"letters of a closing round, {kind.name.lower()}": functools.partial(_of_closings, kind, value)
        for kind, value in _RULES_OF_CLOSING.items()
    },
    "states that a worker hands over": _of_states,
    "statements of workers at the start": _of_facts,
    "terms of a server": _of_terms,
    "settings of a worker": lambda folder: Decoder(
        [json.dumps({"rule.lr": "0.7", "seed": "1"}).encode()],
        lambda raw: read_settings_in(Letter(LetterKind.SETTINGS, 0, body=body_of(raw))),
    ),
    "notes of pace": lambda folder: Decoder([PaceNote(0.5, 1e6, {2: 4e5}).text.encode()], lambda raw: note_of(raw, 3)),
    "losses in a store": lambda folder: Decoder([b"2.5", b"7"], lambda raw: read_losses(_OneEntry(raw), 3)),  # pyright: ignore
    "outcomes in a store": _of_commits,
    "manifests of checkpoints": functools.partial(_of_checkpoints, "manifest"),
    "tensors of checkpoints": functools.partial(_of_checkpoints, "tensors"),
    "addresses": _written(
        lambda folder: write_address(folder, Address(0, "127.0.0.1:4000", 7)), "address-000.json", read_addresses
    ),
    "metrics": functools.partial(_of_run, "metrics.jsonl", read_metrics),
    "metrics, as they are followed": functools.partial(_of_run, "metrics.jsonl", _followed),
    "trace": functools.partial(_of_run, "trace.jsonl", read_trace),
    "seconds": functools.partial(_of_run, "seconds.jsonl", read_seconds),
    "machines": functools.partial(_of_run, "machines.jsonl", read_machines),
    "events": functools.partial(_of_run, "events.jsonl", read_events, kind="server"),
    "outcomes": _written(_outcomes, "outcomes-000.jsonl", read_outcomes),
    "order": _written(_order, "order-000.jsonl", read_order),
    "arrivals": _written(_arrivals, "arrivals.jsonl", read_arrivals),
    "seconds of stages": _written(_stages, "stages.jsonl", lambda folder: [*read_stages(folder)]),
    "work of a pipeline": _written(_pipeline, "pipeline.json", read_pipeline),
    "branches": _written(
        lambda folder: write_branches(folder, [{"round": 4, "digest": "d", "changes": {"inner.lr": [0.1, None]}}]),
        "branches.json",
        read_branches,
    ),
    "results of experiments": _written(
        _results, "results.jsonl", lambda folder: read_results(folder / "results.jsonl")
    ),
    "films": _written(_film, "film.jsonl", lambda folder: read_film(folder / "film.jsonl")),
    "tokens, plain": functools.partial(_of_binary, "plain"),
    "tokens of llm.c": functools.partial(_of_binary, "of llm.c"),
    "tokens of Megatron": functools.partial(_of_binary, "of Megatron"),
    "documents in JSON": _file(_read_all, "/a.jsonl", b'{"text": "the cat"}\n{"text": "sat", "id": 3}\n'),
    "documents, plain": _file(_read_all, "/a.txt", "the cat sät\n\non the mat".encode()),
    "documents in Parquet": _of_parquet,
    "cache of tokens": _of_cache,
    "tokenizer": _of_tokenizer,
    "run files": _file(lambda path: parse(load_document(path)), "/run.toml", dump(single()).encode(), inputs=FILES),
    "experiment files": _file(_as_experiment, "/e.toml", _EXPERIMENT, inputs=FILES),
    "network files": _file(
        read_network,
        "/n.toml",
        to_toml(Network(uplink_bps=1e9, downlink_bps=float("inf"), latency_s=0.1)).encode(),
        inputs=FILES,
    ),
    "laws of loss": _file(
        read_law, "/law.toml", b"floor = 1.7\nscale = 400.0\npower = 0.3\ntokens = [1e6, 1e9]\n", inputs=FILES
    ),
    "secrets": _of_secrets,
    "keys": _of_keys,
    "tables of peers": _of_peers,
    **{
        f"status, report and audit of a run, {name}": functools.partial(_of_verbs, name)
        for name in ("run.toml", "metrics.jsonl", "trace.jsonl", "seconds.jsonl", "machines.jsonl", "text.json")
    },
}
"""Everything that decodes bytes of a peer, of a checkpoint, of a record or of a file of the user's."""


def before(path: Path, seed: int, share: float, commit: str) -> list[Tried]:
    """What earlier calls have tried with this seed, share and code."""
    lines = path.read_text().splitlines() if path.exists() else []
    tries = [Tried(**json.loads(line)) for line in lines]
    return [one for one in tries if (one.seed, one.share, one.commit) == (seed, share, commit)]


def main() -> int:
    """Tries all decoders that no earlier call has tried, and writes the page."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--share", type=float, default=1.0, help="of the inputs")
    words.add_argument("--parts", nargs="*", help="only decoders whose names have one of these words in them")
    words.add_argument(
        "--minutes", type=float, default=600.0, help="begin no decoder after these; the next call continues"
    )
    words.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "fuzz.md")
    words.add_argument("--outcome", type=Path, default=ROOT / "docs" / "results" / "house" / "fuzz.jsonl")
    given = words.parse_args()
    torch.set_num_threads(1)
    commit, began = origin("", None)["commit"], time.monotonic()
    found = before(given.outcome, given.seed, given.share, commit)
    given.outcome.write_text("".join(json.dumps(one._asdict()) + "\n" for one in found))
    done = {one.decoder for one in found}
    for name, prepared in DECODERS.items():
        wanted = not given.parts or any(part in name for part in given.parts)
        if name in done or not wanted or time.monotonic() - began > 60 * given.minutes:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            one = tried(name, prepared(Path(scratch)), given.seed, given.share)
        print(f"{name}: {one.inputs} inputs, {one.taken} taken, {len(one.wrong)} wrong, {one.seconds} s", flush=True)
        for sentence in one.wrong:
            print(f"    {sentence}", file=sys.stderr, flush=True)
        found.append(one)
        with given.outcome.open("a") as file:
            file.write(json.dumps(one._asdict()) + "\n")
        given.page.write_text(page(found) + "\n")  # as it may be stopped
    given.page.write_text(page(found) + "\n")
    return any(one.wrong for one in found)


def page(found: Sequence[Tried]) -> str:
    """The outcome as Markdown."""
    place = {name: number for number, name in enumerate(DECODERS)}
    found = sorted(found, key=lambda one: place.get(one.decoder, len(place)))
    wrong = [(one.decoder, sentence) for one in found for sentence in one.wrong]
    seeds, commits = {one.seed for one in found}, {one.commit or "an installed package" for one in found}
    head = (
        f"`make fuzz` has given {sum(one.inputs for one in found):,} spoilt inputs to {len(found)} of {len(DECODERS)} decoders, "
        f"with seed {', '.join(map(str, seeds))}, at commit {', '.join(sorted(commits))}. An input is what the product has "
        "written itself, changed, cut, repeated or spliced, with extreme numbers and strings. A decoder may take it, or refuse "
        f"it in one line by an error of `gossamer.errors`, within {SECONDS} s and {MEMORY_BYTES >> 30} GiB more of address space "
        f"than before; {len(wrong)} ways to fail otherwise were seen."
    )
    lines = [
        "# Spoilt inputs",
        "",
        head,
        "",
        "| what is decoded | inputs | taken | refused | wrong | more memory, MiB |",
    ]
    lines.append("| --- |" + " ---: |" * 5)
    lines += [
        f"| {one.decoder} | {one.inputs:,} | {one.taken:,} | {one.inputs - one.taken:,} | {len(one.wrong)} | {one.grown_mib} |"
        for one in found
    ]
    return "\n".join(
        [*lines, *(["", "What went wrong:", "", *(f"- {name}: {why}" for name, why in wrong)] if wrong else [])]
    )


if __name__ == "__main__":
    sys.exit(main())
