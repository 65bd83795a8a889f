"""The read-only query of a worker's membership view, for anyone who knows the secret of an elastic run.

    watcher -> worker   the handshake, with the number WATCHER
    worker -> watcher   VIEW   its answer as JSON; then it closes

Needs no torch, so that a status command answers at once.
"""

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossamer.errors import PeerError, RefusedError
from gossamer.record.jsonl import json_from_peer
from gossamer.transport.elastic.members import SlotEntry, membership_update, read_membership_update
from gossamer.transport.keys import Keys
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.header import (
    HEADER_BYTES,
    SMALL_BYTES,
    WATCHER,
    LetterHead,
    LetterKind,
    Limits,
    decode,
    encode,
)

_MOST_REFUSED = 1000


class View(NamedTuple):
    """One worker's membership view."""

    worker: int
    """The worker whose view it is."""
    entries: Sequence[SlotEntry]
    silent_s: Mapping[int, float]
    """Seconds since it last received anything from each other worker."""
    refused: Mapping[str, int]
    """The number of messages it has refused, by peer and kind, such as `worker 3: bounds`."""


def show(channel: Channel, view: View, run: int) -> None:
    """Answers the query. Raises: OSError."""
    answer = json.dumps(
        {
            "worker": view.worker,
            "entries": membership_update({entry.slot: entry for entry in view.entries}).decode(),
            "silent_s": {str(slot): round(seconds, 3) for slot, seconds in view.silent_s.items()},
            "refused": dict(view.refused),
        }
    ).encode()
    channel.write(
        encode(LetterHead(LetterKind.VIEW, view.worker, size=len(answer), check=zlib.crc32(answer)), run) + answer
    )


def look(
    address: str,
    secret: bytes,
    *,
    run: int,
    limits: Limits,
    timeout_s: float,
    keys: Keys | None = None,
    whom: int | None = None,
) -> View:
    """The view of the worker that listens at `address`; `run` and `limits` are those of its run.

    With keys and `whom` it must be that worker.

    Raises: OSError without an answer in time, PeerError when the other end refuses or its answer is invalid.
    """
    deadline = time.monotonic() + timeout_s
    with dial(address, secret, run=run, me=WATCHER, timeout_s=timeout_s, keys=keys, whom=whom) as channel:
        header = decode(channel.read(HEADER_BYTES, deadline), run, limits)
        if header.kind is not LetterKind.VIEW or header.size > SMALL_BYTES:
            raise RefusedError(
                "bounds",
                f"{address} answered with {header.size} bytes and at most {SMALL_BYTES} of a view are allowed; it is no worker",
            )
        raw = channel.read(header.size, deadline)
    view = _parse_view(raw, limits) if zlib.crc32(raw) == header.check else None
    if view is None or view.worker != header.sender:
        raise PeerError(
            f"{address} answered {raw!r:.60}, which is no view of a run with {limits.workers} workers; install the same gossamer "
            "version"
        )
    return view


def _parse_view(raw: bytes, limits: Limits) -> View | None:
    match json_from_peer(raw):
        case {
            "worker": int(worker),
            "entries": str(text),
            "silent_s": dict(silent),
            "refused": dict(refused),
        } if 0 <= worker < limits.workers:
            entries = read_membership_update(text.encode(), limits)
            silent_s = {int(slot): seconds for slot, seconds in silent.items() if _is_silence(slot, seconds)}
            counts = {str(who): int(count) for who, count in refused.items() if _is_count(who, count)}
            if entries is not None and len(silent_s) == len(silent) and len(counts) == len(refused) <= _MOST_REFUSED:
                return View(worker, entries, silent_s, counts)
    return None


def _is_count(who: object, count: object) -> bool:
    named = isinstance(who, str) and who.isprintable() and len(who) <= 200
    return named and type(count) is int and 0 <= count < 1 << 53


def _is_silence(slot: object, seconds: object) -> bool:
    named = isinstance(slot, str) and slot.isascii() and slot.isdigit() and len(slot) <= 9
    return named and isinstance(seconds, float | int) and not isinstance(seconds, bool) and 0 <= seconds < 1e12
