"""How a worker of a running run takes over the state of another one, and gives its own away."""

import logging
import socket
from collections.abc import Callable
from typing import Any

from gossamer.errors import GossamerError, PeerError, first_line
from gossamer.record.packed import unpacked
from gossamer.record.progress import say
from gossamer.transport.elastic import ElasticTransport
from gossamer.transport.link import Station
from gossamer.transport.members import Members, Standing
from gossamer.transport.newcomer import Applicant, Handover, Offer, ask, host

__all__ = ["give_state", "take_state"]

log = logging.getLogger("gossamer")


def take_state(
    members: Members, station: Station, *, first: int, behind: int, inner: bool = True
) -> tuple[Offer, dict[str, Any]]:
    """The state of the first worker that gives it, and with whose hash.

    Args:
        first: who is asked first.
        behind: rounds that this worker has behind it itself.
        inner: whether the state of the inner optimizer is wanted too.
    Raises: PeerError when nobody gives any.
    """
    why = "nobody else is alive"
    for entry in sorted(members.of_standing(Standing.ALIVE), key=lambda entry: entry.slot != first):
        place = Applicant(members.own.nonce, members.own.address, members.me, inner)
        try:
            offer = ask(
                entry.address, station.secret, place, run=station.run, slots=members.slots, timeout_s=station.timeout_s
            )  # fmt: skip
            state = unpacked(offer.raw or b"")
        except (OSError, GossamerError) as error:
            why = first_line(error)
            continue
        say(f"worker {members.me} takes the state of worker {offer.donor} after round {offer.after}")
        return offer, state
    raise PeerError(
        f"worker {members.me} is {behind} rounds along and found nobody to take a state from: {why}; join again"
    )


def give_state(
    sock: socket.socket, transport: ElasticTransport, station: Station, kept: Callable[[], Handover]
) -> None:  # fmt: skip
    """Serves one newcomer with what this worker has `kept` when it asks; one that is lost is logged."""
    try:
        host(
            sock, station.run, transport.worker, boundary=kept,
            give_slot=lambda place: transport.give_slot(place.nonce, place.address),
            entries=lambda: dict(transport.members.entries),
        )  # fmt: skip
    except (OSError, GossamerError) as error:
        log.info("worker %d stopped serving a newcomer: %s", transport.worker, error)
