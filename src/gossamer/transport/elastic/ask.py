"""How anybody who knows the secret of an elastic run asks one of its workers who takes part: a question that changes nothing.

    watcher -> worker   the handshake, with the number WATCHER
    worker -> watcher   the length of its answer, 8 bytes, and the answer as JSON; then it closes

Needs no torch, as whoever looks at a run wants an answer at once.
"""

import json
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from gossamer.errors import PeerError
from gossamer.transport.elastic.members import SlotEntry, news, read_news
from gossamer.transport.sockets.handshake import dial, received

__all__ = ["WATCHER", "View", "look", "show"]

WATCHER = (1 << 32) - 2
"""The number with which a process opens a connection that only wants to look."""
_LONGEST_BYTES = 1 << 20


class View(NamedTuple):
    """What one worker knows of all."""

    worker: int
    """Whose view it is."""
    entries: list[SlotEntry]
    silent_s: Mapping[int, float]
    """Seconds since it has last heard of each other worker."""


def show(sock: socket.socket, view: View) -> None:
    """Answers the question. Raises: OSError."""
    silent_s = {str(slot): round(seconds, 3) for slot, seconds in view.silent_s.items()}
    entries = news({entry.slot: entry for entry in view.entries}).decode()
    answer = json.dumps({"worker": view.worker, "entries": entries, "silent_s": silent_s}).encode()
    sock.sendall(len(answer).to_bytes(8, "little") + answer)


def look(address: str, secret: bytes, *, run: int, slots: int, timeout_s: float) -> View:
    """The view of the worker that listens at `address`; `run` and `slots` are those of its run.

    Raises: OSError when nobody answers in time, PeerError when the other end refuses or its answer is none.
    """
    deadline = time.monotonic() + timeout_s
    with dial(address, secret, run=run, me=WATCHER, timeout_s=timeout_s) as sock:
        size = int.from_bytes(received(sock, 8, deadline), "little")
        if size > _LONGEST_BYTES:
            raise PeerError(
                f"{address} answered with {size} bytes and at most {_LONGEST_BYTES} are allowed; it is no worker"
            )
        raw = received(sock, size, deadline)
    view = _view(raw, slots)
    if view is None:
        raise PeerError(
            f"{address} answered {raw!r:.60}, which is no view of a run with {slots} workers; install the same gossamer version"
        )
    return view


def _view(raw: bytes, slots: int) -> View | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"worker": int(worker), "entries": str(text), "silent_s": dict(silent)} if 0 <= worker < slots:
            entries = read_news(text.encode(), slots)
            silent_s = {int(slot): seconds for slot, seconds in silent.items() if _is_silence(slot, seconds)}
            if entries is not None and len(silent_s) == len(silent):
                return View(worker, entries, silent_s)
    return None


def _is_silence(slot: object, seconds: object) -> bool:
    named = isinstance(slot, str) and slot.isascii() and slot.isdigit() and len(slot) <= 9
    return named and isinstance(seconds, float | int) and not isinstance(seconds, bool) and 0 <= seconds < 1e12
