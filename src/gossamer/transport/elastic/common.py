"""What all workers of an elastic mean have in common after a round, compared before a state is taken."""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gossamer.errors import CheckpointError, GossamerError
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.elastic.newcomer import Offer, ask_for_hash
from gossamer.transport.sockets.connection import Endpoint

_REMEMBERED = 256
"""The number of newest rounds whose states' hashes are kept."""
_COMPARES_S = 3.0
"""How long others may take to close the round after which a state was given."""
_PAUSE_S = 0.1
"""Pause between two rounds of requests."""

log = logging.getLogger("gossamer")


def common_hash(line: int, tensors: Iterable[Tensor]) -> str:
    """The hash of what all workers have in common after a round: the closed rounds, the parameters and the outer state."""
    found = hashlib.sha256(f"{line}".encode())
    for one in tensors:
        found.update(f" {one.dtype} {[*one.shape]} ".encode())
        found.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class _Hashed:
    """The state after a round: its hash, or how to get it while it is the newest one."""

    def __init__(self, after: int, hashed: Callable[[], str]) -> None:
        self.after, self.found = after, ""
        self.hashed: Callable[[], str] | None = hashed


class CommonHashes:
    """The hashes of a worker's states after its last rounds, for others that compare a state which they were given.

    Cost: a thread that hashes each state; one that comes while an earlier one is being hashed is hashed on request.
    """

    def __init__(self) -> None:
        self.abstains = False
        """Whether this worker itself needs another's state, and says nothing about those of others."""
        self._states, self._hashing = deque[_Hashed](maxlen=_REMEMBERED), threading.Lock()

    def add(self, after: int, hashed: Callable[[], str]) -> None:
        """Adds the state after a round."""
        if self._states:
            self._states[-1].hashed = None  # else the tensors of each state would stay in memory
        self._states.append(one := _Hashed(after, hashed))
        self.abstains = False
        threading.Thread(target=self._hash, args=(one, hashed, False), daemon=True, name="gossamer hash").start()

    def hash_after(self, after: int) -> str | None:
        """The hash of the newest state after this round; None if it is not known, "" if this worker abstains."""
        one = next((one for one in [*self._states][::-1] if one.after == after), None)
        if one is not None and (hashed := one.hashed) is not None:
            self._hash(one, hashed, True)
        return "" if self.abstains else (one and one.found) or None

    def _hash(self, one: _Hashed, hashed: Callable[[], str], waits: bool) -> None:
        if self._hashing.acquire(blocking=waits):
            try:
                one.found = one.found or hashed()
            finally:
                self._hashing.release()


def must_be_common(mine: str, offer: Offer, members: Members, endpoint: Endpoint) -> None:
    """Compares the hash of a state that a worker gave with those of the others after the same round.

    More than half of the workers that answer, the donor among them, must have the same. Where all have different ones nobody
    can decide, as where two are left and one lies: then the donor is believed, and named. A worker whose claims about closed
    rounds proved false is not: its hash does not count, and its state needs that of another beside it.

    Raises: CheckpointError when too few have it.
    """
    deadline = time.monotonic() + _COMPARES_S
    disproved = members.entries[offer.donor].nonce in members.disproved
    while True:
        alive = members.with_status(MemberStatus.ALIVE)
        others = [entry for entry in alive if entry.slot != offer.donor and entry.nonce not in members.disproved]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            answers = [
                one
                for one in pool.map(lambda other: _answer(other, members, endpoint, offer.after), others)
                if one != ""
            ]
        same, asked = 1 + answers.count(mine), 1 + len(answers)
        if 2 * same > asked and (same > 1 or not disproved):
            return
        if same == 1 and not disproved and None not in answers and len({*answers}) == len(answers):
            log.warning(
                "worker %d takes the state of worker %d after round %d on its word alone: %s; if one of these machines is bad, "
                "end it, and start this worker again with --join",
                members.me,
                offer.donor,
                offer.after,
                "no two workers have the same state",
            )
            return
        # The others may be about to close the round after which the donor's state is.
        if None not in answers or time.monotonic() >= deadline:
            if disproved:
                raise CheckpointError(
                    f"worker {offer.donor} has claimed rounds that were not closed, and no other has this state after round "
                    f"{offer.after}; look at that machine"
                )
            raise CheckpointError(
                f"{same} of {asked} workers have this state after round {offer.after}, and more than half must have it; look at "
                f"the machine of worker {offer.donor}"
            )
        time.sleep(_PAUSE_S)


def _answer(other: SlotEntry, members: Members, endpoint: Endpoint, after: int) -> str | None:
    """Another worker's hash; "" where it cannot be reached, or abstains."""
    try:
        return ask_for_hash(other, members, endpoint, after)
    except (OSError, GossamerError):
        return ""
