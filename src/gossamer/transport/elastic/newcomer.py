"""Joining a running run: any of its workers gives a process a slot and a state to train from.

    newcomer -> worker   ASK    its nonce and address; its slot, if it has one and only needs a state
    worker -> newcomer   OFFER  the slot, the worker's view, the state's round, size and hash
    newcomer -> worker   ASK    whether it wants the state now, or only the slot
    worker -> newcomer   CHUNK  the state, in parts that each have a checksum

    newcomer -> worker   ASK    the round of a state that another worker has given it
    worker -> newcomer   OFFER  the hash of the worker's state after that round, as far as all workers have it in common

The state is that of the worker at the end of its last round. A copy of it is kept, so that sending it never stops training; it
is packed and hashed only on request.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from gossamer.errors import PeerError
from gossamer.record.jsonl import json_from_peer
from gossamer.transport.elastic.members import (
    Members,
    MemberStatus,
    SlotEntry,
    is_process,
    membership_update,
    read_membership_update,
)
from gossamer.transport.keys import Keys
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.handshake import dial
from gossamer.transport.sockets.header import NEWCOMER, SMALL_BYTES, LetterKind, Limits
from gossamer.transport.sockets.letter import Letter, body_of, receive_letter, send_letter

CHUNK_BYTES = 1 << 20
LIMIT_BYTES = 1 << 38
"""Most bytes of any state."""
_REACH_S = 10.0
"""How long a worker that is asked for a hash may take."""


def most_bytes_of_state(numel: int, workers: int) -> int:
    """The most bytes of a state with this number of parameters, far above any: else a donor could fill the memory."""
    # An optimizer and a rule keep some numbers for each parameter, and a rule some for each peer.
    return min(LIMIT_BYTES, (1 << 30) + 8 * (64 + 2 * workers) * numel)


class Handover:
    """The state of a worker between two rounds.

    Args:
        after: completed rounds of the run.
        pack: encodes the state as bytes; called once, when the first newcomer asks.
    """

    def __init__(self, after: int, pack: Callable[[], bytes]) -> None:
        self.after, self._pack = after, pack

    @cached_property
    def whole(self) -> "_Packed":
        """The state as bytes."""
        raw = self._pack()
        return _Packed(raw, hashlib.sha256(raw).hexdigest())


class _Packed(NamedTuple):
    """A state as bytes, and their hash."""

    raw: bytes
    sha256: str


class Applicant(NamedTuple):
    """Who asks."""

    nonce: int
    address: str
    """Where it listens."""
    slot: int | None = None
    """The slot that it has already."""
    wants: int | None = None
    """The slot that it requests; None for any."""
    after: int | None = None
    """The round of the requested state; None for the newest."""
    compares: int | None = None
    """The round of a state that it has, whose hash it compares with the worker's; None to request a slot or a state."""


class Offer(NamedTuple):
    """A donor's offer to a newcomer."""

    slot: int
    entries: Sequence[SlotEntry]
    """The donor's view, which includes the newcomer's entry."""
    donor: int
    after: int
    """Completed rounds of the state."""
    sha256: str
    raw: bytes | None
    """The state; None if the newcomer did not request it."""


def host(
    channel: Channel,
    members: Members,
    endpoint: Endpoint,
    *,
    give_slot: Callable[[Applicant], SlotEntry | None],
    boundary: Callable[[int | None], Handover],
    hash_after: Callable[[int], str | None] = lambda after: None,
) -> None:
    """Serves one newcomer, with what `boundary` gives for its `Applicant.after`.

    Args: `hash_after` gives the hash of this worker's state after a round, as far as all have it in common; None if unknown.
    Raises: OSError, PeerError, TransportError when it is lost or violates the protocol.
    """
    me, run, limits, keys = members.me, endpoint.run, members.limits, endpoint.keys
    place = _place(receive_letter(channel, run, limits, _small), limits)
    if place is None:
        raise PeerError(
            f"a newcomer asked worker {me} for nothing that can be given; install the same gossamer version"
        )
    if keys is not None and place.slot is not None:
        keys.must_have(channel.certificate, place.slot)
    if place.compares is not None:
        answer = {"donor": me, "common": hash_after(place.compares)}
        send_letter(channel, Letter(LetterKind.OFFER, me, body=body_of(json.dumps(answer).encode())), run)
        return
    slot_entry = give_slot(place) if place.slot is None else members.entries.get(place.slot)
    kept = boundary(place.after)
    state = kept.whole
    offer = {
        "slot": None if slot_entry is None else slot_entry.slot,
        "donor": me,
        "after": kept.after,
        "bytes": len(state.raw),
        "sha256": state.sha256,
        "entries": membership_update(dict(members.entries)).decode(),  # a copy: other threads change them
    }
    send_letter(channel, Letter(LetterKind.OFFER, me, body=body_of(json.dumps(offer).encode())), run)
    wants = receive_letter(channel, run, limits, _small)
    if slot_entry is None or wants.content != b"yes":
        return
    for start in range(0, len(state.raw), CHUNK_BYTES):
        part = state.raw[start : start + CHUNK_BYTES]
        send_letter(channel, Letter(LetterKind.CHUNK, me, steps=start, body=body_of(part)), run)


def ask(
    address: str,
    secret: bytes,
    place: Applicant,
    *,
    run: int,
    limits: Limits,
    timeout_s: float,
    state: bool = True,
    keys: Keys | None = None,
    reach_s: float | None = None,
    whom: int | None = None,
    most_bytes: int = LIMIT_BYTES,
) -> Offer:
    """A slot, and a state, from the worker that listens at `address`.

    Args:
        state: whether to request the donor's state too, or only the slot. A state of another round than `place`
            requests is declined.
        reach_s: within how long it must be reached, `timeout_s` by default.
        whom: the worker that it must be; None for any of the run. With keys its certificate must have that number.
        most_bytes: of a state that is taken.
    Raises: OSError when it is unreachable or lost, PeerError when it refuses or all slots are filled.
    """
    with dial(address, secret, run=run, me=NEWCOMER, timeout_s=reach_s or timeout_s, keys=keys, whom=whom) as channel:
        if reach_s is not None:
            channel.wait_at_most(timeout_s)
        _request(channel, place, run)
        owned = frozenset[int]() if keys is None else keys.numbers(keys.certificate)
        offer, size = _offer(receive_letter(channel, run, limits, _small), limits, address, owned)
        if keys is not None:
            keys.must_have(channel.certificate, offer.donor)
        if whom is not None and offer.donor != whom:
            raise PeerError(f"worker {whom} at {address} calls itself worker {offer.donor}; ask another")
        taken = state and place.after in (None, offer.after)
        if taken and size > most_bytes:
            raise PeerError(
                f"worker {offer.donor} offers a state of {size} bytes, and one of this run has at most {most_bytes}; look at "
                "that machine"
            )
        send_letter(channel, Letter(LetterKind.ASK, NEWCOMER, body=body_of(b"yes" if taken else b"no")), run)
        if not taken:
            return offer
        raw = bytearray()
        while len(raw) < size:
            # Whole parts in time: a donor that sends a byte now and then would hold a newcomer for ever.
            part = receive_letter(channel, run, limits, _small, deadline=time.monotonic() + timeout_s)
            expected = min(CHUNK_BYTES, size - len(raw))
            if part.kind != LetterKind.CHUNK or part.steps != len(raw) or part.body.numel() != expected:
                raise PeerError(f"worker {offer.donor} sent a part of its state that does not follow the last one")
            raw += part.content
    if hashlib.sha256(raw).hexdigest() != offer.sha256:
        raise PeerError(
            f"the state of worker {offer.donor} arrived with another hash than {offer.sha256[:12]}; join through another worker"
        )
    return offer._replace(raw=bytes(raw))


def ask_for_state(
    entry: SlotEntry, members: Members, endpoint: Endpoint, *, most_bytes: int, after: int | None = None
) -> Offer:
    """The state of a slot's worker, for a process that has a slot already.

    Args: `after` as of `Applicant`, `most_bytes` as of `ask`. Raises: as `ask`.
    """
    own = members.own
    return ask(
        entry.address,
        endpoint.secret,
        Applicant(own.nonce, own.address, own.slot, None, after),
        run=endpoint.run,
        limits=members.limits,
        timeout_s=endpoint.timeout_s,
        keys=endpoint.keys,
        whom=entry.slot,
        most_bytes=most_bytes,
    )


def ask_for_hash(entry: SlotEntry, members: Members, endpoint: Endpoint, after: int) -> str | None:
    """The hash of a worker's state after a round, as far as all have it in common; None if it does not know it.

    Raises: OSError, GossamerError when it cannot be reached, or answers with something else.
    """
    own = members.own
    with endpoint.dial(entry.address, NEWCOMER, entry.slot, _REACH_S) as channel:
        _request(channel, Applicant(own.nonce, own.address, own.slot, compares=after), endpoint.run)
        match json_from_peer(receive_letter(channel, endpoint.run, members.limits, _small).content):
            case {"donor": int(donor), "common": None | str() as common} if donor == entry.slot:
                return common
    raise PeerError(f"worker {entry.slot} did not say which state it has after round {after}; ask another")


def _request(channel: Channel, place: Applicant, run: int) -> None:
    send_letter(channel, Letter(LetterKind.ASK, NEWCOMER, body=body_of(json.dumps(place._asdict()).encode())), run)


def _small(letter: Letter, size: int) -> bool:
    return size <= (CHUNK_BYTES if letter.kind == LetterKind.CHUNK else SMALL_BYTES)


def _place(letter: Letter, limits: Limits) -> Applicant | None:
    match json_from_peer(letter.content):
        case {
            "nonce": int(nonce),
            "address": str(address),
            "slot": None | int() as slot,
            "wants": None | int() as wants,
            "after": None | int() as after,
            "compares": None | int() as compares,
        } if (
            letter.kind == LetterKind.ASK
            and _is_at_most(slot, limits.workers - 1)
            and _is_at_most(wants, limits.workers - 1)
            and _is_at_most(after, limits.rounds)
            and _is_at_most(compares, limits.rounds)
            and (compares is None or slot is not None)
        ):
            return Applicant(nonce, address, slot, wants, after, compares) if is_process(address, nonce) else None
    return None


def _is_at_most(number: int | None, most: int) -> bool:
    return number is None or 0 <= number <= most


def _offer(letter: Letter, limits: Limits, address: str, owned: frozenset[int]) -> tuple[Offer, int]:
    """An offer and the bytes of its state; `owned` are the slots of this machine's key, if there are keys."""
    match json_from_peer(letter.content):
        case {
            "slot": int() | None as slot,
            "donor": int(donor),
            "after": int(after),
            "bytes": int(size),
            "sha256": str(sha256),
            "entries": str(text),
        } if letter.kind == LetterKind.OFFER:
            slots, entries = limits.workers, read_membership_update(text.encode(), limits)
            seen = f"as worker {donor} at {address} sees it"
            living = {entry.slot for entry in entries or [] if entry.status == MemberStatus.ALIVE}
            if slot is None and owned and owned <= living:
                numbers = ", ".join(map(str, sorted(owned)))
                raise PeerError(
                    f"all that this machine's key may be (worker {numbers}) is alive, {seen}; end one, or "
                    "give this key more workers in [peers] in a new run"
                )
            if slot is None and len(living) < slots:
                raise PeerError(
                    f"{len(living)} of {slots} workers are alive, {seen}, and the others may train on "
                    "where it cannot reach them; join through one of those, or stop the run and resume it"
                )
            if slot is None:
                raise PeerError(
                    f"all {slots} slots of the run are filled, as worker {donor} at {address} says; wait until one has left, "
                    "or start a run with more workers"
                )
            sound = 0 <= slot < slots and 0 <= donor < slots and 0 <= after <= limits.rounds and 0 <= size < LIMIT_BYTES
            if entries is not None and sound and len(sha256) == 64:
                return Offer(slot, entries, donor, after, sha256, None), size
    raise PeerError(
        f"the worker at {address} answered with no offer; install the same gossamer version on all machines"
    )
