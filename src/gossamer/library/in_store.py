"""The workers of an `Outer` that share only a store, which holds the whole state (`gossamer.transport.bucket.protocol`).

The local phases are those of the user's loop, so the steps of the protocol run inside the calls of `Outer`, each time up to the
next local phase. A thread renews the lease meanwhile.
"""

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import CheckpointError, ConfigError, PeerError
from gossamer.library.flat import Flat
from gossamer.library.guard import fingerprints
from gossamer.library.peers import Common
from gossamer.library.sites import REJOIN_ROUNDS, tensors_of
from gossamer.record.fault import FaultKind
from gossamer.record.logs.trace import Operation
from gossamer.record.packed import packable_snapshot, packed, unpacked
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.in_store import RoundsInStore
from gossamer.rounds.loop import EVERYONE, Membership, OuterLoop
from gossamer.rounds.together import Together
from gossamer.settings.over_time import Timetable
from gossamer.transport.bucket.bucket import Bucket, object_limit, too_large
from gossamer.transport.bucket.objects import Basis, Commit
from gossamer.transport.bucket.perform import free_slot, open_sealed, paced, perform, renewing
from gossamer.transport.bucket.protocol import StoreTerms
from gossamer.transport.bucket.requests import Steps, TrainPhase
from gossamer.transport.bucket.rounds import Attendance
from gossamer.transport.contract import Transport
from gossamer.transport.keys import Keys
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import leaves, must_fit, nbytes

log = logging.getLogger("gossamer")
STATE_EVERY = 5
"""Rounds between two states in the store. A newcomer adds the means since the last; messages and means before the last but one
are removed.
"""
_ENDLESS = 10**8
"""More rounds than names of objects can number: the end of a loop is known to that loop alone."""


class LoopInStore(RoundsInStore):
    """One worker in a store, whose local phases somebody else trains; see `StoreWorker`.

    Args:
        rest: frozen parameters and buffers that are part of the state, as they are now.
    Raises: as `advance` does.
    """

    worker: int
    """Its slot."""
    identity: str
    """Of the run in the store."""
    connection: Transport
    """Of `loop`."""

    def __init__(
        self,
        bucket: Bucket,
        terms: StoreTerms,
        method: Method,
        flat: Flat,
        rest: Callable[[], Mapping[str, Tensor]],
        timetable: Timetable,
        seed: int,
    ) -> None:
        super().__init__(terms.workers, flat.x.device, gossip=terms.gossip)
        self._bucket, self._method, self._flat, self._rest = bucket, method, flat, rest
        self._timetable, self._seed, self._timeout_s = timetable, seed, terms.timeout_s
        self._loop: OuterLoop | None = None
        self._kept: tuple[int, Callable[[], bytes]] = 0, lambda: b""
        """Its state after so many rounds, from which it continues where its next message comes too late; 0 for none."""
        self._steps = 0
        self._sent: list[Operation] | None = None
        self.round = 0
        """The round that it trains."""
        self._most_bytes = 128 * flat.layout.numel + nbytes(tuple(rest().values())) + (1 << 24)
        self._over = threading.Event()
        self._attendance = Attendance(terms, self, secrets.token_hex(16), time.monotonic)
        self._live, self._phase = self._attendance.live(), None
        self._lease = contextlib.ExitStack()
        self._lease.enter_context(renewing(self._attendance, bucket, self._over.wait))
        self.advance()

    # --- what `Outer` calls -------------------------------------------------------------------------------------------

    @property
    def loop(self) -> OuterLoop:
        """See `RoundsInStore`."""
        assert self._loop is not None
        return self._loop

    def exchange(self) -> list[Operation] | None:
        """Ends the round after its local phase; returns what was sent, None where the round was closed without this worker.

        Then it has the state with which `round` begins, and what it has trained since its last round is lost.
        Raises: as `advance` does.
        """
        self._sent = None
        self.advance()
        return self._sent

    def advance(self) -> None:
        """Continues up to the next local phase; leaves the store where that fails.

        Raises: PeerError for a store that does not answer, holds another run, or has no free slot, and for a slot that was lost;
            CheckpointError for a store that is damaged; TransportError.
        """
        try:
            with torch.no_grad():
                perform(self._up_to_phase(), self._bucket, wait=self._over.wait, most_bytes=lambda: self._most_bytes)
            if self._phase is None:
                raise PeerError(
                    f"worker {self.worker} has lost its slot to another process, as it gave no sign of life for "
                    f"{self._timeout_s:g} s; start it again: it takes a free slot, and continues with the state of the store"
                    if not self._over.is_set()
                    else f"worker {self.worker} has left the store after an error; start it again"
                )
        except BaseException:
            self.close()
            raise

    def _up_to_phase(self) -> Steps[None]:
        answer: object = None if self._phase is None else self._phase.work()
        failed: OSError | None = None
        self._phase: TrainPhase | None = None
        while True:
            try:
                asking = self._live.send(answer) if failed is None else self._live.throw(failed)
            except StopIteration:
                return
            if isinstance(asking, TrainPhase):
                self._phase = asking
                return
            answer, failed = None, None
            try:
                answer = yield asking
            except OSError as error:
                failed = error

    def close(self) -> None:
        """Frees the slot. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        self._lease.close()
        self._live.close()
        free_slot(self._attendance, self._bucket)

    # --- what the protocol calls --------------------------------------------------------------------------------------

    def agree(self, identity: str) -> None:
        """See `StoreWorker`."""
        self.identity = identity

    def asked(self) -> bool:
        """See `StoreWorker`: it leaves where its slot is lost, as the user's loop may train the data of that slot."""
        return self._loop is not None and self._attendance.slot < 0

    def say(self, sentence: str) -> None:
        """See `StoreWorker`."""
        log.warning("%s", sentence)

    def begin(self, slot: int, life: int) -> int:
        """See `StoreWorker`."""
        self.worker, self.connection = slot, self.transport(slot)
        parts = self._method, self._flat, self._timetable, self._seed
        self._loop = _loop_of(*parts, self.connection, self.together, self.membership)
        return 0

    def restore(self, after: int) -> str | None:
        """See `StoreWorker`."""
        if not after or self._kept[0] != after:
            return None
        return self._load(self._kept[1]())

    def load(self, after: int, donor: int, body: memoryview) -> str:
        """See `StoreWorker`."""
        return self._load(bytes(body))

    def _load(self, raw: bytes) -> str:
        state, tensors = unpacked(raw), tensors_of(self._state())
        try:
            must_fit(saved := tensors_of(state), tensors)
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"a state in the store does not fit this model and rule ({error!r:.200}); start all with the same ones, or give "
                "another store",
                FaultKind.FOREIGN,
            ) from None
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        return hashlib.sha256(raw).hexdigest()

    def start(self, round: int, begun: Basis) -> None:
        """See `StoreWorker`."""
        self._flat.write()
        self.round, self._steps = round, begun.steps
        if round:
            means = f" and the means of {round - begun.after} more" if round > begun.after and self.together else ""
            state = f"the state of slot {begun.donor} after round {begun.after}" if begun.after else "that of the start"
            self.say(f"worker {self.worker} continues in round {round + 1}, with {state}{means}")

    def train(self, round: int) -> bytes:
        """See `StoreWorker`: the user's loop has trained."""
        self._steps += self.loop.local_steps
        return self.message(round)

    def steps(self) -> int:
        """See `StoreWorker`."""
        return self._steps

    def end_round(self, commit: Commit, exchanges: int) -> None:
        """See `RoundsInStore`."""
        stop = self.stop(commit.round)
        self._sent = self.loop.post(commit.round, stop)
        self.loop.receive(commit.round, stop)
        self._flat.write()
        self.round = commit.round + 1
        self._kept = self.round, packable_snapshot(self._state())

    def state(self, finished: int) -> bytes | None:
        """See `StoreWorker`."""
        return packed(self._state()) if finished % STATE_EVERY == 0 else None

    def _state(self) -> dict[str, Any]:
        return _state_of(self.loop, self._flat, self._rest())


def _loop_of(
    method: Method,
    flat: Flat,
    timetable: Timetable,
    seed: int,
    connection: Transport,
    together: Together | None = None,
    membership: Membership = EVERYONE,
    *,
    x: Tensor | None = None,
) -> OuterLoop:
    x = flat.x if x is None else x
    return OuterLoop(
        method,
        connection,
        [(x[a:b], flat.layout.slice(a, b)) for a, b in flat.spans],
        local_steps=timetable.at(0).full_steps,
        timetable=timetable,
        seed=seed,
        together=together,
        membership=membership,
    )


def _state_bytes(method: Method, flat: Flat, rest: Mapping[str, Tensor], workers: int, timetable: Timetable) -> int:
    """The size of a state, by an outer loop without data: a second outer state may not fit in the memory."""
    method = method._replace(rule=method.rule._replace(distrusts=None))  # without data there are no counts to read
    alone = MemoryNetwork(workers).transport(0)
    loop = _loop_of(method, flat, timetable, 0, alone, x=flat.x.to("meta"))
    return nbytes((*tensors_of(_state_of(loop, flat, rest)),))


def _state_of(loop: OuterLoop, flat: Flat, rest: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"x": flat.x, "outer": [*leaves(loop.state), *flat.kept], "rest": [*rest.values()]}


def join_store(
    url: str,
    keys: Keys | None,
    workers: int,
    common: Common,
    method: Method,
    flat: Flat,
    rest: Callable[[], Mapping[str, Tensor]],
    *,
    timetable: Timetable,
    seed: int,
    timeout_s: float,
) -> LoopInStore:
    """Starts, joins or continues the loop in a store, up to its first local phase.

    Args:
        common: the settings of all workers; by its `rest` frozen parameters and buffers are compared, or part of the state.
        rest: frozen parameters and buffers as they are now.
    Raises: ConfigError for a store that cannot be used, or takes no state as large as this; as `LoopInStore.advance` does.
    """
    part = rest if common.rest == "broadcast" else dict[str, Tensor]
    limit = object_limit(url)  # before anything is asked of the store, as in gossamer train
    if limit is not None and (sentence := too_large(_state_bytes(method, flat, part(), workers, timetable), limit)):
        raise ConfigError(f"Outer got store='{url}', and {sentence}")
    bucket, seal = open_sealed(url, keys)
    compared = fingerprints(rest(), numbers=common.rest == "compare") if common.rest != "own" else []
    digest = hashlib.sha256(repr(compared).encode()).hexdigest()[:16]
    run = {
        "gossamer": 1,
        "rounds": None,
        "workers": workers,
        **common._asdict(),
        f"frozen parameters and buffers (rest='{common.rest}')": digest,
    }
    terms = StoreTerms(run, workers, _ENDLESS, timeout_s, timeout_s, seal)
    terms = terms._replace(gossip=method.rule.needs != "everyone", rejoin_rounds=REJOIN_ROUNDS, start_in_store=True)
    return LoopInStore(bucket, paced(terms, bucket), method, flat, part, timetable, seed)
