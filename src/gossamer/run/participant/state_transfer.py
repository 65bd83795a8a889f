"""Fetching the state of another worker in a running run."""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gossamer.errors import CheckpointError, GossamerError, PeerError, first_line
from gossamer.record.packed import unpacked
from gossamer.record.progress import say
from gossamer.transport.elastic.members import Members, MemberStatus
from gossamer.transport.elastic.newcomer import LIMIT_BYTES, Offer, ask_for_state
from gossamer.transport.sockets.connection import Endpoint

PAUSE_S = 0.5
"""Pause between two rounds of requests."""

log = logging.getLogger("gossamer")
T = TypeVar("T")


def fetch_state(
    members: Members,
    endpoint: Endpoint,
    *,
    first: int,
    behind: int,
    accept: Callable[[Offer, Any], T],
    before: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    most_bytes: int = LIMIT_BYTES,
) -> tuple[Offer, T]:
    """The result of `accept` on the first acceptable state, and its donor.

    Unanswered requests are repeated for `timeout_s`: in a common start, a worker may not be ready yet.

    Args:
        first: the worker asked first. Workers whose claims proved false are asked last.
        accept: raises a CheckpointError for a state that does not fit, and another worker is asked.
        before: the last donor, without a round since: asked only after all others.
        behind: completed rounds of this worker.
        stop: whether to stop asking.
        most_bytes: of a state.
    Raises: PeerError when no worker gives one.
    """
    why, ended, deadline = "nobody else is alive", set[int](), time.monotonic() + endpoint.timeout_s
    while True:
        alive = [entry for entry in members.with_status(MemberStatus.ALIVE) if entry.nonce not in ended]
        for entry in sorted(alive, key=lambda e: (e.nonce in members.disproved, e.slot == before, e.slot != first)):
            try:
                offer = ask_for_state(entry, members, endpoint, most_bytes=most_bytes)
                state = accept(offer, unpacked(offer.raw or b""))
            except (OSError, GossamerError) as error:
                why = f"worker {entry.slot}: {first_line(error)}"
                if isinstance(error, CheckpointError):
                    log.warning(
                        "worker %d does not take the state that worker %d gave: %s", members.me, entry.slot, error
                    )
                if isinstance(error, ConnectionRefusedError):
                    ended.add(entry.nonce)
                continue
            say(f"worker {members.me} takes the state of worker {entry.slot} after round {offer.after}")
            return offer, state
        others = members.with_status(MemberStatus.JOINING, MemberStatus.ALIVE, MemberStatus.SUSPECT)
        if all(entry.nonce in ended for entry in others) or stop() or time.monotonic() >= deadline:
            break
        time.sleep(PAUSE_S)
    if members.alone:
        why, advice = "all others have finished the run", "the trained models are in their checkpoints"
    else:
        advice = "join again"
    raise PeerError(f"worker {members.me} is {behind} rounds along, and no worker gives it a state: {why}; {advice}")
