"""The outer loop of one worker: what is announced, sent and heard at which of its inner steps, and what is under way.

Both drivers and the library run it. At each stop of a round (see `gossamer.rounds.schedule`) a worker sends some fragments
and hears others; between two stops it trains, and may call `advance` after any inner step.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.codecs import Codec, exact
from gossamer.layout import Layout
from gossamer.record.trace import Operation
from gossamer.rounds import exchange as sync
from gossamer.rounds import pairing, stability
from gossamer.rounds.exchange import Exchange, Part, Sent
from gossamer.rounds.kernel import PLAIN, Kernel, compiled
from gossamer.rounds.schedule import Schedule, Stop
from gossamer.rules import Context, Rule, gossip, local_sgd
from gossamer.topologies import Topology
from gossamer.topologies.mixing import Mixing
from gossamer.transport import Ticket, Transport
from gossamer.tree import Tree, leaves, must_fit, refill

__all__ = ["Method", "OuterLoop", "method"]

log = logging.getLogger("gossamer")


class Method(NamedTuple):
    """What is trained with: the settled rule, its topology and codec, when it acts, and how the update is carried out."""

    rule: Rule
    topology: Topology
    codec: Codec
    schedule: Schedule
    kernel: Kernel


def method(
    rule: Rule,
    topology: Topology,
    codec: Codec,
    schedule: Schedule,
    *,
    local_steps: int | tuple[int, ...],
    compile: bool = False,
) -> Method:
    """Settles the rule on its topology and checks that all fit; warns when the disagreement is predicted to diverge.

    Raises: ConfigError and PairingError.
    """
    schedule.check(max(local_steps) if isinstance(local_steps, tuple) else local_steps)
    rule = stability.settle(rule, topology)
    pairing.check(rule, topology, codec, local_steps=local_steps, schedule=schedule)
    if sentence := stability.warning(rule, topology):
        log.warning(sentence)
    return Method(rule, topology, codec, schedule, compiled() if compile else PLAIN)


class _Fragment(NamedTuple):
    """One fragment of a worker, and what it is exchanged with."""

    rule: Rule
    codec: Codec
    part: Part


class OuterLoop:
    """The exchanges of one worker.

    Args:
        parts: the flat vector of each fragment and its layout: of the parameters, or the gradients for a rule of that site,
            and beyond the schedule's fragments the moments of the inner optimizer, which are averaged exactly. Updated in
            place.
        local_steps, full_steps: inner steps per round, of this worker and of the one that takes most. Those of this worker may
            be set anew between two rounds.
        reduce: see `sync.begin`.
    """

    def __init__(
        self, m: Method, transport: Transport, parts: Sequence[tuple[Tensor, Layout]], *, workers: int, local_steps: int,
        full_steps: int, seed: int, reduce: Callable[[Sequence[Tensor], Ticket], None] | None = None,
    ):  # fmt: skip
        self.method, self.transport, self.workers, self.seed, self.reduce = m, transport, workers, seed, reduce
        self.local_steps, self.full_steps = local_steps, full_steps
        averaging = local_sgd() if m.topology.everyone else gossip()
        self.fragments: list[_Fragment] = []
        for p, (x, layout) in enumerate(parts):
            rule, codec = (m.rule, m.codec) if p < m.schedule.fragments else (averaging, exact())
            part = Part(x, (), layout, p)
            part = part._replace(s=rule.init(x, self._context(0, part, m.topology.mixing(0))))
            self.fragments.append(_Fragment(rule, codec, part))
        self.under_way: dict[tuple[int, int], Exchange] = {}
        """Exchanges that were announced and not finished, by round and fragment, oldest first."""

    def stops(self, round: int) -> tuple[Stop, ...]:
        """Where this round turns to the peers."""
        return self.method.schedule.stops(round, self.full_steps, self.method.rule.delay_rounds)

    def announce(self, round: int, stop: Stop) -> None:
        """Announces what will be received in answer to what the coming stop sends; best called before training up to it."""
        mixing = self.method.topology.mixing(round)
        for p in stop.sends:
            self.under_way[round, p] = self._begin(round, p, mixing)

    def post(self, round: int, stop: Stop) -> list[Operation]:
        """Sends what is due at this stop."""
        return [self.under_way[round, p].post() for p in stop.sends]

    def advance(self) -> None:
        """Takes every exchange under way as far as it goes without waiting; cheap, and never an update."""
        for exchange in self.under_way.values():
            if exchange.sent is not None:
                exchange.advance()

    def due(self, round: int, stop: Stop) -> list[Exchange]:
        """The exchanges to finish at this stop, which are the caller's now."""
        return [self.under_way.pop(key) for key in self._heard(round, stop) if key in self.under_way]

    def hear(self, round: int, stop: Stop) -> None:
        """Waits for what is due at this stop, and makes its outer updates."""
        for exchange in self.due(round, stop):
            exchange.finish()
        self.hear_nothing(round, stop)

    def hear_nothing(self, round: int, stop: Stop) -> None:
        """The updates of a rule that hears late, in the first rounds, when nothing was sent yet."""
        for sent_round, p in self._heard(round, stop):
            rule, _, part = self.fragments[p]
            if sent_round < 0 and rule.delay_rounds:
                ctx = self._context(round, part, self.method.topology.mixing(round))
                sync.hear_nothing(rule, part, ctx, self.method.kernel)

    def rest(self) -> list[Exchange]:
        """What is under way after the last round and still to be finished, oldest first; the caller's now.

        What a rule that hears late by itself has under way then is left: hearing it would be another outer step.
        """
        if self.method.rule.delay_rounds:
            return []
        left = list(self.under_way.values())
        self.under_way.clear()
        return left

    def end(self) -> None:
        """Finishes the rest, and waits for all else, so that no peer is left without an answer."""
        for exchange in self.rest():
            exchange.finish()
        for exchange in self.under_way.values():
            exchange.hear()
        self.under_way.clear()

    def share_there(self, fragment: int) -> float:
        """Which share of what a mean sends goes to the owners of its chunks; the rest are their sums."""
        codec = self.fragments[fragment].codec
        there, back = (c.payload_bytes or exact().payload_bytes for c in (codec, codec.back or exact()))
        assert there is not None and back is not None
        numel = self.fragments[fragment].part.x.numel()
        return there(numel) / (there(numel) + back(numel))

    @property
    def state(self) -> Tree:
        """The outer state of all fragments, one after the other."""
        return tuple(fragment.part.s for fragment in self.fragments)

    def state_under_way(self) -> list[dict[str, Any]]:
        """What a checkpoint needs of the exchanges that are under way."""
        return [
            {"round": round, "fragment": p, "local_steps": exchange.local_steps, "sent": leaves(exchange.sent)}
            for (round, p), exchange in self.under_way.items()
            if exchange.sent is not None
        ]

    def restore_under_way(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Sends again what was under way; all workers must resume from the same round.

        Raises: KeyError, TypeError, ValueError for what is no such state.
        """
        self.under_way.clear()
        for one in saved:
            round, p, tensors = int(one["round"]), int(one["fragment"]), list(one["sent"])
            if not 0 <= p < len(self.fragments) or round < 0 or (round, p) in self.under_way:
                raise ValueError(f"an exchange of fragment {p} in round {round} is under way")
            mixing, local_steps = self.method.topology.mixing(round), int(one.get("local_steps", self.local_steps))
            if not 1 <= local_steps <= self.full_steps:
                raise ValueError(f"an exchange after {local_steps} of {self.full_steps} local steps is under way")
            sent = self._sent(p, round, mixing, tensors)
            self.under_way[round, p] = self._begin(round, p, mixing, sent, local_steps)
        for exchange in self.under_way.values():
            exchange.post()

    def _sent(self, p: int, round: int, mixing: Mixing, tensors: Sequence[Tensor]) -> Sent:
        """The tensors of a snapshot as what a fragment sent, if they can be that."""
        rule, _, part = self.fragments[p]
        message = rule.send(part.x, part.s, self._context(round, part, mixing))
        like = Sent(message, part.x if len(tensors) > len(leaves(message)) else ())
        must_fit(tensors, leaves(like))
        return refill(like, [saved.to(part.x.device) for saved in tensors])

    def _heard(self, round: int, stop: Stop) -> list[tuple[int, int]]:
        """Round and fragment of what is heard at a stop."""
        return [(round - lag, p) for p, lag in stop.hears]

    def _context(self, round: int, part: Part, mixing: Mixing, local_steps: int | None = None) -> Context:
        i, steps = self.transport.worker, local_steps or self.local_steps
        ctx = Context(i, self.workers, round, steps, mixing.weight(i), part.layout, self.full_steps)
        return sync.informed(ctx, mixing)

    def _begin(
        self, round: int, p: int, mixing: Mixing, sent: Sent | None = None, local_steps: int | None = None
    ) -> Exchange:
        rule, codec, part = self.fragments[p]
        schedule = self.method.schedule
        own = p < schedule.fragments
        return sync.begin(
            rule, codec, mixing, self.transport, part, self._context(round, part, mixing, local_steps), seed=self.seed,
            kernel=self.method.kernel, reduce=self.reduce, sent=sent,
            overlap_steps=rule.delay_rounds * self.full_steps + schedule.overlap_steps if own else 0,
            merge=schedule.merge if own else "keep",
        )  # fmt: skip
