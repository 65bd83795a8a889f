"""Elastic sites: to the others, the death of a site of several processes is like that of a worker of one process.

Process s of site i has a lane: connections of the elastic transport with process s of each other site. What must be the same on
all processes of a site is decided by its first one, by the protocol of elastic runs (`gossamer.transport.elastic`), and sent to
the others (`gossamer.library.siblings`): who takes part in a round, over whom a mean is taken, with which round the site
continues, and whose state it takes. The other lanes only carry messages. A message counts once it has come in all lanes.

Sites meet at a board, a store that the first process of site 0 hosts. After that they know each other's addresses and need it
no more. Where site 0 has died, the others look for it at the same address, to inform it of the running run when it returns.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.errors import CheckpointError, GossamerError, PeerError, first_line
from gossamer.finite import all_finite
from gossamer.library.guard import fingerprints, must_be_alike
from gossamer.library.lane import Lane, board, claim_site, must_have_equal_shards, opened, taken, unequal_shards
from gossamer.library.peers import Common, must_agree, read_losses
from gossamer.library.siblings import Siblings
from gossamer.record.jsonl import json_from_peer
from gossamer.record.packed import packable_snapshot, unpacked
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.loop import Membership, OuterLoop
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic.closing import LeftOutError
from gossamer.transport.elastic.common import CommonHashes, common_hash, must_be_common
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry, is_process
from gossamer.transport.elastic.newcomer import Applicant, Handover, Offer, ask, ask_for_state, most_bytes_of_state
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.processes.keyed_store import KeyedStore
from gossamer.transport.processes.launch import agree
from gossamer.transport.processes.member import Member
from gossamer.transport.processes.store import Entries, store_answers
from gossamer.transport.secret import environment_secret
from gossamer.transport.sockets.addresses import listen, shown
from gossamer.transport.sockets.channel import Channel
from gossamer.transport.sockets.connection import Endpoint
from gossamer.transport.sockets.header import Limits
from gossamer.tree import must_fit

log = logging.getLogger("gossamer")

REJOIN_ROUNDS = 2
"""Most rounds that a gossiping site may be behind; beyond that it takes another's state."""
_ROUNDS, _STEPS = (1 << 31) - 1, (1 << 62) - 1
"""More than any run trains: the end of a user's loop is unknown."""
_LOOK_S = 2.0
"""Interval between attempts to reach the board of a dead site 0, and to get a place in the run again."""
_AT_ONCE = 3
"""Number of requests for the newest state, before those for the state of a round that has yet to end."""
_NONCES = 1 << 61


class _SiteEntry(NamedTuple):
    """The entry of a process on the board while its site trains."""

    run: str
    address: str
    shards: int
    common: list[Any]
    rest: list[Any]


class _Start(NamedTuple):
    """How this site begins: at the start of the run, or by coming back."""

    lane: Lane
    run: str
    """Identifies the run on all sites."""
    members: Members
    donor: int | None
    """The site through which this one has come back; None where all start together."""


class LaneTransport:
    """The elastic transport of one process of a site: an exchange of gossip counts once it is complete in all lanes."""

    keeps_frames = False

    def __init__(self, inner: ElasticTransport, siblings: Siblings, lane: Lane, *, closes: bool) -> None:
        self.worker, self._inner, self._siblings = lane.worker, inner, siblings
        # Means have a separate commit, over all sites (`ElasticSite.committed`).
        self._parts, self._n, self._closes = lane.shards > 1 and not closes, lane.n, closes
        self._behind = lane.behind
        self.closed = False
        self.expect, self.post, self.wait = inner.expect, inner.post, inner.wait
        self.waits, self.deliveries = inner.waits, inner.deliveries

    def ready(self, ticket: Ticket) -> bool:
        """See `Transport`; with siblings it is known only where all of them wait."""
        return not self._parts and self._inner.ready(ticket)

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        """See `Transport`: the messages of each peer that have come in all lanes."""
        came = self._inner.collect(ticket)
        if self._parts:
            whole = self._siblings.all_have([j in came for j in range(self._n)], f"round {ticket.round}")
            came = {j: frames for j, frames in came.items() if whole[j]}
        self._inner.outcomes()  # discarded, as they have no reader
        return came

    def stay_for_late(self) -> None:
        """Stays for a round's deadline at most, so that sites that the last round was closed without can take its state.

        All processes of this site stay, as each gives away its shard; one that is alone in `close` waits for the others
        for the timeout.
        """
        if not self._closes:
            return
        self._inner.stop = lambda: False
        try:
            self._siblings.from_first(lambda: None if self._inner.stay_for_late(2.0) else [0], "the end")
        except PeerError as error:  # there is no whole state to be taken
            log.warning("site %d ends without waiting for sites that may be late: %s", self.worker, error)

    def close(self) -> None:
        """Announces its departure, and ends all connections. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self._inner.close()
            if self._behind is not None:
                self._behind.close()

    def take_board(self, behind: KeyedStore | None) -> None:
        """Takes over what carries a board, where the sites have keys, in place of what has carried the one before."""
        before, self._behind = self._behind, behind
        if before is not None:
            before.close()
        if behind is not None and self.closed:
            behind.close()


class ElasticSite:
    """One process of a site in an elastic run.

    Args:
        method: a rule of it that takes a mean over all sites has its rounds committed over those that are ready; where parameters
            and outer state of all sites are equal after a round, so must be a state that it takes.
        closings: commits per round.
        x: the parameters of this shard.
        entry: what all sites have in common, and what of it is to be compared number by number, for those that come back.
        join: the address of the board.
    """

    def __init__(
        self,
        begins: _Start,
        siblings: Siblings,
        endpoint: Endpoint,
        method: Method,
        x: Tensor,
        *,
        closings: int,
        entry: _SiteEntry,
        join: str,
    ) -> None:
        self.lane, self.start, self._siblings, self._endpoint = begins.lane, begins.run, siblings, endpoint
        self._closes, self._donor = method.rule.needs == "everyone", begins.donor
        self._hashes = CommonHashes() if method.equal_after_rounds else None
        self.is_back = begins.donor is not None
        """Whether it has come back, and has not yet taken over another site's state."""
        self._alive: frozenset[int] = frozenset()
        self._round = 0
        self._kept: Handover | None = None
        self._before: int | None = None
        """The donor of the last state that was taken or did not fit, without a round since."""
        self._changed = threading.Condition()
        """Guards the kept state, which the main thread replaces and threads of newcomers read."""
        self._peers: Callable[[int, frozenset[int]], Sequence[int]] = lambda round, alive: ()
        # A message has at most four tensors of the size of x, in fp64 at most.
        limit_bytes = 32 * x.numel() + (1 << 16) if self._closes else None
        self._most_bytes = most_bytes_of_state(x.numel(), begins.lane.n)
        self._inner = ElasticTransport(
            begins.members,
            endpoint,
            host=self._host,
            device=x.device,
            limit_bytes=limit_bytes,
            closings=closings,
            led=not siblings.first,
        )
        self.transport = LaneTransport(self._inner, siblings, self.lane, closes=self._closes)
        self._tell = f"under way/{self.lane.worker}/{self.lane.shard}", json.dumps(entry)
        self._join = join
        self._board, self._told_at = self.lane.joint, None
        """The newest board that was reached, and the one on which losses are published."""
        self._loss, self._losses = 0.0, dict[int, float]()
        self._unheard_s = dict[int, float]()
        """For each site from which some lane receives nothing: since when means with it fail."""

    # --- the outer loop asks ------------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """The sites with which this one's outer loop exchanges."""
        return Membership(lambda round, fragment: self._alive, closes=self if self._closes else None)

    def attach(self, loop: OuterLoop) -> None:
        """Takes from the outer loop, which is made after the connections, the peers to receive from."""
        self._peers = loop.peers_in

    def begin_round(self, round: int) -> None:
        """Begins a round, with the sites that the first process of this one sees alive."""
        self._round = round

        def alive() -> list[int]:
            return self._mask(self._inner.begin_round(round, lambda seen: self._peers(round, seen), 0))

        self._alive = self._set(self._siblings.from_first(alive, f"round {round}"))
        if not self._siblings.first:
            # The payloads of a mean are known only once it is proposed.
            peers = range(self.lane.n) if self._closes else self._peers(round, self._alive)
            self._inner.lead(round, self._alive, peers)

    def next_round(self) -> int:
        """The round to continue with."""
        return self._siblings.from_first(lambda: [self._inner.next_round()], "the end of a round")[0]

    def proposed(self, round: int) -> tuple[int, frozenset[int]]:
        """See `gossamer.transport.contract.Closes`. Raises: LeftOutError, on all processes of the site."""

        def wait() -> list[int]:
            attempt, alive = self._inner.proposed(round)
            history_hash = self._inner.history_hash
            return [attempt, history_hash >> 32, history_hash & 0xFFFFFFFF, *self._mask(alive)]

        left_out, *numbers = self._siblings.from_first(lambda: self._poll(wait), f"round {round}")
        self._must_not_be_left_out(left_out, numbers)
        attempt, high, low, *mask = numbers
        self._alive = self._set(mask)
        if not self._siblings.first:
            self._inner.lead(round, self._alive, range(self.lane.n), (high << 32) | low)
        return attempt, self._alive

    def committed(self, attempt: int, *, whole: bool, unsound: Collection[int] = ()) -> bool:
        """See `gossamer.transport.contract.Closes`: whole, and sound, where it is in all lanes of the site.

        Raises: as `proposed`; PeerError where a lane has been cut for so long that this site leaves.
        """
        # Independent of whose messages are missing: a mean that fails between two others is missing here too.
        silent_s, limit_s = self._inner.view().silent_s, self._endpoint.timeout_s / 2
        n = self.lane.n
        hears = [j not in self._alive or silent_s.get(j, 0.0) < limit_s for j in range(n)]
        sound = [j not in unsound for j in range(n)]
        whole, *flags = self._siblings.all_have([whole, *hears, *sound], f"round {self._round}")
        hears, unsound = flags[:n], [j for j in range(n) if not flags[n + j]]

        def result() -> list[int] | None:
            if self._is_cut_off([j for j, heard in enumerate(hears) if not (whole or heard)]):
                return [2, 0]
            return self._poll(lambda: [self._inner.committed(attempt, whole=whole, unsound=unsound)])

        left_out, *numbers = self._siblings.from_first(result, f"round {self._round}")
        if left_out == 2:
            unheard = ", ".join(str(j) for j, is_heard in enumerate(hears) if not is_heard)
            raise PeerError(
                f"site {self.lane.worker} has not heard site {unheard} for {self._endpoint.timeout_s:g} s or longer in the lane "
                f"of one of its {self.lane.shards} processes, while their first processes reach each other, and leaves so that "
                "the others can go on; look at the network of each of its processes, and start it again"
            )
        self._must_not_be_left_out(left_out, numbers)
        return bool(numbers[0])

    def _is_cut_off(self, unheard: Sequence[int]) -> bool:
        """Whether this site leaves, because means with sites from which some lane receives nothing fail repeatedly.

        The leader sees only the first processes, and proposes all of them each time. A site cut off from most leaves after
        one timeout; of two that are cut off from each other only, the one with the higher number leaves after a second one.
        """
        now, n, limit_s = time.monotonic(), self.lane.n, self._endpoint.timeout_s
        self._unheard_s = {j: self._unheard_s.get(j, now) for j in unheard}
        if n < 3:  # the other would wait for it
            return False
        since_s = self._unheard_s
        most = 2 * sum(now - since >= limit_s for since in since_s.values()) > n
        return most or any(j < self.lane.worker and now - since >= 2 * limit_s for j, since in since_s.items())

    def _must_not_be_left_out(self, left_out: int, numbers: Sequence[int]) -> None:
        if left_out:
            raise LeftOutError(self.lane.worker, self._round, numbers[0] - 1 if numbers[0] else None)

    def _poll(self, wait: Callable[[], Sequence[int]]) -> list[int] | None:
        """0 and the result of a wait for the other sites, or 1 and by whom this site is left out, plus 1, or 0.

        None where the wait continues, so that the siblings get a sign of life.
        """
        inner, until_s = self._inner, time.monotonic() + min(2.0, self._endpoint.timeout_s / 4)
        inner.stop = lambda: time.monotonic() >= until_s
        try:
            return [0, *map(int, wait())]
        except LeftOutError as error:
            assert inner.closing is not None
            with inner.changed:
                if not (inner.closing.left_out or inner.members.alone):
                    return None
            return [1, 0 if error.source is None else error.source + 1]

    def _mask(self, sites: frozenset[int]) -> list[int]:
        return [int(site in sites) for site in range(self.lane.n)]

    def _set(self, mask: Sequence[int]) -> frozenset[int]:
        return frozenset(site for site in range(self.lane.n) if mask[site])

    # --- its state, for others ----------------------------------------------------------------------------------------

    def keep(self, after: int, state: Mapping[str, Any]) -> None:
        """Keeps the state after so many rounds for sites that come back. Cost: a copy."""
        history_hash = self._inner.history_hash
        copy = packable_snapshot({**state, "line": history_hash})
        kept, self._before = Handover(after, copy), None
        if self._hashes is not None and "x" in state:
            self._hashes.add(after, lambda: common_hash(history_hash, copy.tensors("x", "outer")))
        with self._changed:
            self._kept = kept
            self._changed.notify_all()

    def _boundary(self, after: int | None) -> Handover:
        """The kept state, as soon as it has so many rounds behind it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._kept is not None and (after is None or self._kept.after >= after),
                self._endpoint.timeout_s,
            )
            if self._kept is None:
                raise PeerError(f"site {self.lane.worker} has no state yet; ask another")
            return self._kept

    def _host(self, channel: Channel) -> None:
        try:
            # Until then this object may be incomplete: the transport's threads begin with the transport.
            self._boundary(None)
        except PeerError as error:
            log.info("site %d serves nobody yet: %s", self.lane.worker, error)
        else:
            self._inner.serve(channel, self._boundary, self._hash_after)

    def _hash_after(self, after: int) -> str | None:
        """See `CommonHashes.hash_after`."""
        return None if self._hashes is None else self._hashes.hash_after(after)

    # --- the state of others ------------------------------------------------------------------------------------------

    def start_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Copies the initial state of site 0 into these tensors, where all start together. Raises: PeerError."""
        offer = self._offer_of(0, 0)
        if offer is None or offer.raw is None:
            raise PeerError(f"site 0 gave site {self.lane.worker} no parameters to start from; look at its log")
        try:
            initial = unpacked(offer.raw)["start"]
            must_fit(initial, tensors)
            if not all_finite(tuple(initial)):
                raise ValueError("they have numbers that are not finite")
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            raise PeerError(
                f"the parameters that site 0 gave site {self.lane.worker} to start from do not fit its model "
                f"({first_line(error)}); start all sites with the same model and gossamer"
            ) from None
        for target, other in zip(tensors, initial, strict=True):
            target.detach().copy_(other)

    def take(
        self, tensors: Sequence[Tensor], load: Callable[[Sequence[Tensor]], None], source: int | None = None
    ) -> int:
        """Takes the state of another site, after the same round on all processes; returns the round to continue with.

        Args:
            tensors: the tensors of this shard, which those of the other site must fit; `load` takes them over.
            source: the site that is asked first.
        Raises: PeerError when no site gives one.
        """
        what, joins, me = "taking a state over", self.is_back, self.lane.worker
        source = self._donor if source is None else source
        newest = 0
        if self._hashes is not None:
            self._hashes.abstains = True  # until it keeps that state
        if joins:  # the membership view may be stale or partial
            newest = self._siblings.from_first(lambda: [self._inner.first_round(self._endpoint.timeout_s)], what)[0]
        donor, after, state = self._state_of_all_lanes(source, tensors)
        with self._siblings.all_or_none(what, after):
            load(tensors_of(state))
        round = after
        if self._siblings.first and self._closes:
            self._inner.continue_from(after, state["line"])
        log.warning("site %d continues with the state of site %d after round %d", me, donor, after)
        before = self._before
        self.keep(after, state)
        self._before = before  # this site has completed no round since
        if joins:
            if not self._closes:
                round = max(newest, self._inner.newest_round + 1, after)
                round = self._siblings.from_first(lambda: [round], what)[0]
            # The first process comes last: by its announcement the others count on all lanes.
            if not self._siblings.first:
                self._inner.declare(MemberStatus.ALIVE, round)
            with self._siblings.all_or_none(what):
                pass
            if self._siblings.first:
                self._inner.declare(MemberStatus.ALIVE, round)
            self.is_back = False
        return round

    def _state_of_all_lanes(self, source: int | None, tensors: Sequence[Tensor]) -> tuple[int, int, dict[str, Any]]:
        """The donor, the round that its state is after, and this lane's part of it, once all lanes have theirs.

        A site whose state does not fit in one of the lanes is asked again when no other has given one.
        """
        what, deadline = "taking a state over", time.monotonic() + self._endpoint.timeout_s
        for turn in itertools.count():
            offer: Offer | None = None

            def offered(turn: int = turn) -> list[int]:
                nonlocal offer
                donor, offer = self._newest_of(source, deadline)
                return [donor, offer.after + max(0, turn - _AT_ONCE)]

            # The donor's processes may differ by a round: the others request the state that the first one was offered.
            donor, after = self._siblings.from_first(offered, what)[:2]
            if offer is None or offer.after != after:
                offer = self._offer_of(donor, after)
            state, why = self._read_state(offer, tensors)
            # A state to take from another donor differs from one that this donor has no longer, or not yet.
            whole, fits = self._siblings.all_have([state is not None, not why], what)
            if whole and state is not None:
                self._before = donor
                return donor, after, state
            if not fits:
                self._before = donor
                log.warning(
                    "site %d does not take the state that site %d gave: %s",
                    self.lane.worker,
                    donor,
                    why or "see its other processes",
                )
                if time.monotonic() >= deadline:
                    raise PeerError(
                        f"site {self.lane.worker} needs the state of another site, and that of site {donor} does not fit "
                        f"({why}); look at that site, and start this one again"
                    )
                time.sleep(min(0.5, self._endpoint.timeout_s / 8))
        raise AssertionError

    def _read_state(self, offer: Offer | None, tensors: Sequence[Tensor]) -> tuple[dict[str, Any] | None, str]:
        """The state of a site in this lane, or why it cannot be taken; None without a reason where it has none of that round."""
        if offer is None or offer.raw is None:
            return None, ""
        try:
            state = unpacked(offer.raw)
            if not isinstance(state, dict):
                raise ValueError(f"it is a {type(state).__name__}")
            if "start" in state:  # the initial state, which the first round replaces
                return None, ""
            history_hash = state["line"]
            if type(history_hash) is not int or not 0 <= history_hash < 1 << 64:
                raise ValueError(f"the hash of its closed rounds is {history_hash!r:.40}")
            received = tensors_of(state)
            must_fit(received, tensors)
            if not all_finite(tuple(received)):
                raise ValueError("it has numbers that are not finite")
            if self._hashes is not None:
                mine = common_hash(history_hash, [state["x"], *state["outer"]])
                must_be_common(mine, offer, self._inner.members, self._endpoint)
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            return None, f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        return state, ""

    def _newest_of(self, source: int | None, deadline: float) -> tuple[int, Offer]:
        """The donor and its offer, for the first process."""
        why = "nobody else is alive"
        while True:
            alive = [entry.slot for entry in self._inner.members.with_status(MemberStatus.ALIVE)]
            for donor in sorted(alive, key=lambda slot: (slot == self._before, slot != source)):
                try:
                    if (offer := self._offer_of(donor, None)) is not None:
                        return donor, offer
                except GossamerError as error:
                    why = first_line(error)
            if time.monotonic() >= deadline or self._inner.members.alone:
                raise PeerError(
                    f"site {self.lane.worker} needs the state of another site and found none ({why}); look whether the others "
                    "run, and start it again"
                )
            time.sleep(min(0.5, self._endpoint.timeout_s / 8))

    def _offer_of(self, donor: int, after: int | None) -> Offer | None:
        """The offer of a site in this lane; None where it cannot be reached."""
        entry = self._inner.members.entries.get(donor)
        if entry is None:
            return None
        try:
            return ask_for_state(entry, self._inner.members, self._endpoint, after=after, most_bytes=self._most_bytes)
        except (OSError, PeerError) as error:
            log.info("site %d got no state of site %d: %s", self.lane.worker, donor, error)
            return None

    # --- its place at the board ---------------------------------------------------------------------------------------

    def come_to_board(self) -> None:
        """Announces at the board that this site trains, also to a site 0 that comes back. Raises: TransportError."""
        if self.lane.joint is not None:
            with store_answers():
                Entries(self.lane.joint, self._endpoint.secret, self._endpoint.timeout_s).set(*self._tell)
        # In a separate thread, as a connection to an address that does not answer takes seconds.
        threading.Thread(target=self._look_for_board, daemon=True, name="gossamer board").start()

    def losses(self, loss_here: float) -> dict[int, float]:
        """The latest losses of the live sites, and this one's; a thread publishes and reads them."""
        self._loss, store = loss_here, self._board
        if store is not None and store is not self._told_at:
            # One thread for each board: after the machine of site 0 has vanished, that of the old board may block for long.
            self._told_at = store
            threading.Thread(target=self._publish_losses, args=(store,), daemon=True, name="gossamer losses").start()
        others = {site: loss for site, loss in self._losses.items() if site in self._alive}
        return {**others, self.lane.worker: loss_here}

    def _publish_losses(self, store: Store) -> None:
        entries = Entries(store, self._endpoint.secret, self._endpoint.timeout_s).under(f"loss/{self.lane.shard}")
        with contextlib.suppress(RuntimeError):
            while not self.transport.closed and self._board is store:
                if math.isfinite(loss := self._loss):
                    entries.set(str(self.lane.worker), json.dumps(loss))
                self._losses = read_losses(entries, self.lane.n)
                time.sleep(_LOOK_S)

    def _look_for_board(self) -> None:
        """Announces the running run to a site 0 that comes back, and to processes that wait there."""
        known = self._inner.members.entries.get(0)
        informed = None if known is None else known.nonce  # its own board has it from the start
        if self.lane.worker == 0:
            return
        while not self.transport.closed:
            time.sleep(_LOOK_S)
            with self._inner.changed:
                first = self._inner.members.entries.get(0)
            is_there = first is not None and first.status == MemberStatus.ALIVE
            if self.transport.closed or (is_there and first is not None and first.nonce == informed):
                continue
            try:
                self._announce()
            except (OSError, RuntimeError, PeerError):
                continue
            if is_there and first is not None:
                informed = first.nonce

    def _announce(self) -> None:
        """Announces the running run, over another connection only where the last one does not lead to its announcement."""
        (name, text), secret, timeout_s = self._tell, self._endpoint.secret, self._endpoint.timeout_s
        with contextlib.suppress(RuntimeError):  # the process that hosted it has ended
            if self._board is not None and Entries(self._board, secret, 1.0).get(name) == text.encode():
                return
        reached, behind = opened(self.lane, self._join, 1.0)
        store = board(reached)
        try:
            Entries(store, secret, timeout_s).set(name, text)
        except BaseException:
            if behind is not None:
                behind.close()
            raise
        self._board = store
        self.transport.take_board(behind)


def elastic_site(
    lane: Lane,
    siblings: Siblings,
    common: Common,
    join: str,
    x: Tensor,
    others: Mapping[str, Tensor],
    method: Method,
    *,
    closings: int,
    timeout_s: float,
) -> ElasticSite:
    """Joins or rejoins the other sites, and starts this process's lane.

    Args:
        lane: of this process, which has reached the board.
        x: the parameters of this shard; where all start together they become those of site 0.
        others: frozen parameters and buffers, compared or taken over as `common.rest` says.
        closings: commits per round.
    Raises: PeerError when sites differ or do not come, or this one's number is taken; the board stays open then.
    """
    rest = fingerprints(others, numbers=common.rest == "compare") if common.rest != "own" else []
    listener, site = listen(lane.address, 0), None
    try:
        entry = _SiteEntry("", shown(*listener.getsockname()[:2]), lane.shards, [*common], rest)
        limits = Limits(lane.n, _ROUNDS, _STEPS, 2 * method.sends_per_round)
        meets = _Rendezvous(lane, entry, common, [*others], limits, join, timeout_s)
        donor = siblings.from_first(meets.start_or_donor, "the start of Outer")[0] - 1
        begins = meets.all_start() if donor < 0 else meets.come_back(donor)
        endpoint = Endpoint(listener, meets.run_key(begins.run), environment_secret(), timeout_s, keys=lane.keys)
        entry = entry._replace(run=begins.run)
        site = ElasticSite(begins, siblings, endpoint, method, x, closings=closings, entry=entry, join=join)
        site.come_to_board()
        broadcasts = {**(others if common.rest == "broadcast" else {}), "": x}
        if donor < 0 == lane.worker:
            site.keep(0, {"start": [*broadcasts.values()]})
        elif donor < 0:
            site.start_from_first([*broadcasts.values()])
    except BaseException:
        listener.close()
        if site is not None:
            site.transport.close()
        raise
    return site


class _Rendezvous:
    """Determines how a process's site begins, at the board of the run."""

    def __init__(
        self,
        lane: Lane,
        entry: _SiteEntry,
        common: Common,
        names: Sequence[str],
        limits: Limits,
        join: str,
        timeout_s: float,
    ) -> None:
        assert lane.joint is not None
        self._lane, self._entry, self._common, self._names, self._limits = lane, entry, common, names, limits
        self._join, self._timeout_s, self._nonce = join, timeout_s, secrets.randbelow(_NONCES)
        self._entries = Entries(lane.joint, environment_secret(), timeout_s)
        self._deadline = time.monotonic() + timeout_s
        self._claimed: bool | None = None
        self._why = ""
        self._offer: Offer | None = None

    def run_key(self, run: str) -> int:
        """The key by which processes of this lane recognise each other."""
        return int(hashlib.sha256(repr((run, self._lane.shard, self._common)).encode()).hexdigest()[:16], 16)

    def start_or_donor(self) -> list[int] | None:
        """For the first process: 0 where all sites start together, else the site through which this one comes back, plus 1."""
        try:
            return self._start_or_donor()
        except dist.DistError as error:
            raise PeerError(
                f"site {self._lane.worker} reads no more at '{self._join}' ({first_line(error)}), where site 0 may have ended; "
                "look at its log, and start this one again"
            ) from error

    def _start_or_donor(self) -> list[int] | None:
        lane = self._lane
        if self._claimed is None:
            self._claimed = claim_site(lane, self._join, self._timeout_s, elastic=True)
        if sites := self._announced_sites():
            for site in sites:
                try:
                    self._offer = self._slot_from(site, self._read(site))
                    return [1 + site]
                except (OSError, PeerError) as error:  # it is gone too, or has not noticed yet that the last process is
                    if isinstance(error, _DifferError):
                        raise
                    self._why = first_line(error)
        elif self._claimed and not self._entries.absent([f"site/{site}" for site in range(lane.n)], 0.0):
            must_have_equal_shards(lane, self._timeout_s)
            return [0]
        if time.monotonic() < self._deadline:
            time.sleep(0.2 if self._claimed and not sites else _LOOK_S / 4)
            return None
        if self._claimed and not sites:
            missing = self._entries.absent([f"site/{site}" for site in range(lane.n)], 0.0)
            raise PeerError(
                f"site {lane.worker} waited {self._timeout_s:g} s at '{self._join}' for the sites {missing} of {lane.n}, and "
                "they did not come; start all of them within timeout_s of each other"
            )
        raise taken(lane, self._join, self._why)

    def all_start(self) -> _Start:
        """How this process begins where all sites start together."""
        lane = self._lane
        member = Member.at(lane.worker, lane.n, torch.device("cpu"), lane.store, secret=self._entries.secret)
        facts = [self._common, self._entry.rest, lane.start, self._entry.address, self._nonce]
        statements = agree(member, "gossamer.Outer", facts, timeout_s=self._timeout_s)
        must_agree(
            [one[0] if isinstance(one, list) and len(one) == len(facts) else None for one in statements], self._common
        )
        must_be_alike([one[1] for one in statements], self._names)
        if not all(is_process(address, nonce) for _, _, _, address, nonce in statements):
            raise PeerError(
                f"one of {lane.n} sites says {statements!r:.80} of where it is; install the same gossamer version everywhere"
            )
        entries = [
            SlotEntry(site, 0, nonce, MemberStatus.ALIVE, 0, address)
            for site, (_, _, _, address, nonce) in enumerate(statements)
        ]
        return _Start(lane, str(statements[0][2]), Members(self._limits, lane.worker, entries), None)

    def come_back(self, donor: int) -> _Start:
        """How this process begins where its site comes back."""
        way = self._read(donor)
        try:
            offer = self._offer or self._slot_from(donor, way)
        except OSError as error:  # the first process has reached that site, and this one has not
            raise PeerError(
                f"process {self._lane.shard} of site {self._lane.worker} cannot reach site {donor} at '{way.address}' "
                f"({first_line(error)}); look whether that site runs and a firewall lets this through, and start this site again"
            ) from error
        return _Start(self._lane, way.run, Members(self._limits, self._lane.worker, offer.entries), donor)

    def _slot_from(self, site: int, way: _SiteEntry) -> Offer:
        if way.shards != self._lane.shards:
            raise _DifferError(unequal_shards(site, way.shards, self._lane.worker, self._lane.shards))
        statements = [way.common if other != self._lane.worker else [*self._common] for other in range(self._lane.n)]
        rests = [way.rest if other != self._lane.worker else self._entry.rest for other in range(self._lane.n)]
        try:
            must_agree(statements, self._common)
            must_be_alike(rests, self._names)
        except PeerError as error:
            raise _DifferError(f"{error}; the run at '{self._join}' is in progress") from None
        place = Applicant(self._nonce, self._entry.address, wants=self._lane.worker)
        return ask(
            way.address,
            self._entries.secret,
            place,
            run=self.run_key(way.run),
            limits=self._limits,
            timeout_s=self._timeout_s,
            state=False,
            keys=self._lane.keys,
            whom=site,
        )

    def _announced_sites(self) -> list[int]:
        """The other sites that have announced that they train."""
        names = {f"under way/{site}/0": site for site in range(self._lane.n) if site != self._lane.worker}
        return [names[name] for name in self._entries.several([*names])]

    def _read(self, site: int) -> _SiteEntry:
        name = f"under way/{site}/{self._lane.shard}"
        self._entries.absent([name], self._timeout_s)
        with store_answers():
            text = self._entries.get(name) or b""
        match json_from_peer(text):
            case [str(run), str(address), int(shards), [*common], [*rest]]:
                return _SiteEntry(run, address, shards, common, rest)
        raise PeerError(
            f"site {site} does not say at '{self._join}' how it trains; install the same gossamer version everywhere"
        )


def tensors_of(state: Mapping[str, Any]) -> list[Any]:
    """The tensors of a state that is handed over, in the order in which another worker takes them."""
    return [state["x"], *state["outer"], *state["rest"]]


class _DifferError(PeerError):
    """Two sites cannot train together, and waiting would not help."""
