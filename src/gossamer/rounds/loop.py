"""The outer loop of one worker: it announces, sends and receives at given inner steps, and tracks the exchanges in
flight.

The simulator, real workers and the library run it. At each stop of a round (see `gossamer.rounds.schedule`) a worker sends some
fragments and receives others; between two stops it trains, and may call `advance` after any inner step.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs import exact, fitted
from gossamer.codecs.message import owners_share
from gossamer.layout import Layout
from gossamer.record.logs.trace import Operation
from gossamer.rounds.choosing import FragmentChoice
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.exchange import (
    Each,
    Exchange,
    begin,
    finish_all,
    initial_state,
    is_sound,
    mean_form,
    mean_of,
    payload_form,
    payload_of,
    sent_again,
    update_from_zeros,
    update_with_mean,
)
from gossamer.rounds.schedule import Stop
from gossamer.rounds.setup import Part, Setup
from gossamer.rounds.sharing import Sharing
from gossamer.rounds.together import Together
from gossamer.rounds.updates import MixedUpdate, rule_of_updates, topology_of_updates
from gossamer.rules import Context, Rule, gossip, local_sgd
from gossamer.rules.master import HALVES, with_master
from gossamer.settings.over_time import Timetable
from gossamer.topologies.mixing import Mixing
from gossamer.transport.contract import Closes, IncompleteError, Reduce, Transport
from gossamer.tree import Tree, leaves


class InFlight(TypedDict):
    """The state of an exchange in flight, for a checkpoint."""

    round: int
    fragment: int
    local_steps: int
    rank: int
    chosen: int
    sent: list[Tensor]


class Membership(NamedTuple):
    """The participants of one worker's rounds, and the order of its rounds; by default all workers in all rounds."""

    participants: Callable[[int, int], frozenset[int] | None] = lambda round, fragment: None
    """The participants of an exchange in a round, in this worker's view; None means all. Constant over the calls for
    one exchange.
    """
    next_round: Callable[[int], int | None] = lambda round: round + 1
    """The next round that this worker takes part in; None where it sends nothing ahead, because it ends or first takes
    over another's state.
    """
    closes: Closes | None = None
    """Decides the participants of a round's mean, in an elastic run of a rule that needs everyone."""


EVERYONE = Membership()
"""The membership of a run whose workers all stay to its end."""


class OuterLoop:
    """The exchanges of one worker.

    Args:
        parts: the flat vector of each fragment and its layout: of the parameters, or the gradients for a rule of that site,
            and beyond the schedule's fragments the moments of the inner optimizer, which are averaged exactly. Updated in
            place. Parameters in half precision have an outer state in fp32 (`gossamer.rules.master`).
        local_steps: inner steps per round of this worker, which may be changed between two rounds.
        timetable: the most local steps of any worker, for each round.
        reduce: the backend's own sum over all workers, see `Setup`.
        together: takes means once for all workers, where all are in this process, see `Setup`.
        membership: the participants of each round. The outer state is that of a start with everyone.
        sharing: how the workers of an elastic run share all slots; None where each trains its own.
        sides: gives the setup of a fragment its sides, where peers are in stages, see `gossamer.rounds.setup.in_sides`.
        first: the round that the method begins with.
        shard: the shard of the worker that the vectors belong to; codecs draw separately for each.
    """

    def __init__(
        self,
        m: Method,
        transport: Transport,
        parts: Sequence[tuple[Tensor, Layout]],
        *,
        local_steps: int,
        timetable: Timetable,
        seed: int,
        reduce: Reduce | None = None,
        together: Together | None = None,
        membership: Membership = EVERYONE,
        sharing: Sharing | None = None,
        sides: Callable[[Setup], Setup] | None = None,
        first: int = 0,
        shard: int = 0,
        over_shards: Callable[[float], float] = float,
    ):
        self.method, self.worker, self._over_shards = m, transport.worker, over_shards
        self.local_steps, self.timetable = local_steps, timetable
        self.full_steps = timetable.at(0).full_steps
        """The most local steps of any worker in the current round."""
        self._updates, self._topology_of = topology_of_updates(m.rule, m.topology.n, seed), m.topology_of(seed)
        draws = rng.key(seed, shard, "shard") if shard else seed
        averaging = local_sgd() if m.topology.everyone else gossip()
        self._halves = m.rule.site == "parameters" and parts[0][0].dtype in HALVES
        rule = self._rule_in(0)
        self._adapted = rule.adapted
        self.membership, self.sharing, self._first = membership, sharing, first
        self.declined = Counter[int]()
        """The number of messages of each worker that were declined, not finite or not decodable; cleared by the reader."""
        self.fragments: list[Setup] = []
        for p, (x, layout) in enumerate(parts):
            part = Part(x, (), layout, p)
            own = (rule, fitted(m.codec, layout)) if p < m.parts else (averaging, exact())
            setup = Setup(*own, transport, part, draws, m.kernel, reduce, together)
            if p < m.parts:
                setup = setup._replace(merge=m.schedule.merge, merge_strength=m.schedule.merge_strength)
            mixing = m.topology.mixing(0, m.holders[p] if m.holders else None)
            s = initial_state(setup.rule, mixing, x, self._context(0, part, mixing))
            setup = setup._replace(part=part._replace(s=s), declined=self._count_declined)
            self.fragments.append(setup if sides is None else sides(setup))
        sends = m.schedule.sends
        self._choice = FragmentChoice(m.schedule.fragments, sends) if sends else None
        self.in_flight: dict[tuple[int, int], Exchange] = {}
        """Exchanges announced and not finished, by round and fragment or position (see `Stop.sends`), oldest first."""
        self._begun: int | None = None
        self._distrusted = self._distrust_counts()

    def newly_distrusted(self) -> tuple[Counter[int], Counter[int]]:
        """Messages of each worker that the rule has shortened and declined, since the last call or `reset_distrust_counts`."""
        before, self._distrusted = self._distrusted, self._distrust_counts()
        shortened, declined = self._distrusted[0] - before[0], self._distrusted[1] - before[1]
        return shortened, declined

    def update_norms(self) -> tuple[float, float] | None:
        """The norms of the last update of all fragments before and after clipping; None for a rule that does not clip."""
        norms = [setup.rule.norms(setup.part.s) for setup in self.fragments if setup.rule.norms is not None]
        if not norms:
            return None
        before, after = torch.stack(norms).square().sum(0).sqrt().tolist()
        return before, after

    def reset_distrust_counts(self) -> None:
        """Resets the baseline of these counts, after an outer state was taken over from another worker."""
        self._distrusted = self._distrust_counts()

    def _distrust_counts(self) -> tuple[Counter[int], Counter[int]]:
        counts = [setup.rule.distrusts(setup.part.s) for setup in self.fragments if setup.rule.distrusts is not None]
        shortened, declined = torch.stack(counts).sum(0).tolist() if counts else ((), ())
        by_sender = [Counter({j: int(k) for j, k in enumerate(some)}) for some in (shortened, declined)]
        return by_sender[0], by_sender[1]

    def compare_messages(self, compare: Callable[[Tree, Sequence[Tree]], None]) -> None:
        """Calls `compare` for each exchange announced from now on, as in `Setup`."""
        self.fragments = [setup._replace(compare=compare) for setup in self.fragments]

    def _count_declined(self, sender: int) -> None:
        self.declined[sender] += 1

    def begin_round(self, round: int) -> None:
        """Begins a round. After skipped rounds, exchanges in flight are received as if none had been skipped."""
        skipped = 0 if self._begun is None else round - self._begun - 1
        if skipped > 0:
            self.in_flight = {(sent + skipped, p): exchange for (sent, p), exchange in self.in_flight.items()}
        self._begun, self.full_steps = round, self.timetable.at(round).full_steps
        if self.sharing is not None:
            self.sharing = self.sharing.begun()
        if self.method.rule.at is not None:
            rule, parts = self._rule_in(round), self.method.parts
            self.fragments[:parts] = [setup._replace(rule=rule) for setup in self.fragments[:parts]]

    def _rule_in(self, round: int) -> Rule:
        """The rule with the option values of a round."""
        rule = self.method.rule
        if rule.at is not None:
            rule = rule.at(self.timetable.begin(round), self.timetable.steps)
        return with_master(rule) if self._halves else rule

    def stops(self, round: int) -> tuple[Stop, ...]:
        """The stops of this round."""
        rule, schedule = self.method.rule, self.method.schedule
        late, ahead, updates = rule.delay_rounds, rule.sends_ahead, self._updates is not None
        stops = schedule.stops(round, self.timetable.at(round).full_steps, late, ahead=ahead, updates=updates)
        return tuple(map(self._in_parts, stops)) if self.method.holders else stops

    def _in_parts(self, stop: Stop) -> Stop:
        """The stop of a round of one fragment, whose parts are exchanged together."""
        parts = range(self.method.parts)
        receives = tuple((p, lag) for _, lag in stop.receives for p in parts)
        return stop._replace(sends=tuple(p for _ in stop.sends for p in parts), receives=receives)

    def _has_part(self, p: int) -> bool:
        """Whether this worker has a part at all."""
        holders = self.method.holders
        return not holders or self.worker in holders[p]

    def adapted(self, local_steps: int) -> int:
        """The local steps of the next round, where the rule adapts them; the most over its fragments."""
        adapted, setups = self._adapted, self.fragments[: self.method.parts]
        if adapted is None:
            return local_steps
        return max(adapted(setup.part.s).local_steps(local_steps) for setup in setups)

    def announce(self, round: int, stop: Stop) -> None:
        """Announces the messages to receive for the sends of the next stop; best called before training up to it."""
        if self.membership.closes is not None:
            return  # the peers are known only after the local phase
        for p in filter(self._has_part, stop.sends):
            if self._choice is not None:
                self._choice.pick(round, p, [self.fragment_of(flying) for _, flying in self.in_flight])
            if not self._ahead(p) or self.membership.next_round(round) is not None:
                self.in_flight[round, p] = self._begin(round, p)

    def send_ahead(self, round: int) -> None:
        """Sends the messages for this worker's first round that a rule that sends ahead would have sent after the
        previous round.
        """
        sends = self._ahead(0) and self.membership.next_round(round - 1) is not None
        for p in range(self.method.schedule.fragments) if sends else ():
            self.in_flight[round - 1, p] = self._begin(round - 1, p)
            self.in_flight[round - 1, p].post()

    def post(self, round: int, stop: Stop) -> list[Operation]:
        """Sends the fragments due at this stop."""
        if self.membership.closes is not None and stop.sends:
            return self._close(self.membership.closes, round, stop)
        operations = [self.in_flight[round, p].post() for p in stop.sends if (round, p) in self.in_flight]
        if self._choice is not None:
            for p in stop.sends:
                self._choice.sent(round, p)
        return operations

    def fragment_of(self, exchange: int) -> int:
        """The fragment of an exchange of this round, or of one in flight; its number unless fragments are chosen."""
        return exchange if self._choice is None else self._choice.of[exchange]

    def _close(self, closes: Closes, round: int, stop: Stop) -> list[Operation]:
        """Exchanges with the participants a leader names, and retries with fewer when one fails, until all have everything."""
        while True:
            attempt, _ = closes.proposed(round)  # from now on, these are the `participants` of the round
            exchanges = {(round, p): self._begin(round, p, attempt) for p in stop.sends}
            operations = [exchange.post() for exchange in exchanges.values()]
            whole, unsound = True, frozenset[int]()
            try:
                for exchange in exchanges.values():
                    exchange.receive()
            except IncompleteError as error:
                whole, unsound = False, error.unsound
            if closes.committed(attempt, whole=whole, unsound=unsound):
                self.in_flight.update(exchanges)
                return operations

    def means(self, round: int, stop: Stop, payloads: Mapping[int, Sequence[Tree]]) -> list[Tree]:
        """The means of what these workers post at a stop."""
        present = frozenset(payloads)
        places = [(self._setup_in(round, p), *self._place_over(round, p, present)) for p in stop.sends]
        return [mean_of(*place, {j: payloads[j][k] for j in sorted(present)}) for k, place in enumerate(places)]

    def mean_forms(self, round: int, stop: Stop) -> list[Tree]:
        """Shapes and dtypes of `means`."""
        return [mean_form(self._setup_in(round, p), *self._place_over(round, p, None)) for p in stop.sends]

    def take_means(self, round: int, stop: Stop, present: frozenset[int], means: Sequence[Tree]) -> None:
        """The outer updates of a round without this worker, after which all workers are equal."""
        for p, mean in zip(stop.sends, means, strict=True):
            update_with_mean(self._setup_in(round, p), *self._place_over(round, p, present), mean)

    def payloads(self, round: int, stop: Stop) -> list[Tree]:
        """What this worker posts to its peers at a stop, for a rule whose messages do not depend on who they are."""
        return [payload_of(self._setup_in(round, p), *self._place_over(round, p, None)) for p in stop.sends]

    def payload_forms(self, round: int, stop: Stop) -> list[Tree]:
        """Shapes and dtypes of `payloads`."""
        return [payload_form(self._setup_in(round, p), *self._place_over(round, p, None)) for p in stop.sends]

    def are_sound(self, round: int, stop: Stop, payloads: Sequence[Tree]) -> bool:
        """Whether another worker's `payloads` may count."""
        return all(
            is_sound(self._setup_in(round, p), *self._place_over(round, p, None), payload)
            for p, payload in zip(stop.sends, payloads, strict=True)
        )

    @property
    def shared(self) -> list[Tensor]:
        """The vectors and outer states that are equal on all workers after each round of a rule that makes them equal."""
        return [*(setup.part.x for setup in self.fragments), *leaves(self.state)]

    def advance(self) -> None:
        """Continues every exchange in flight as far as possible without waiting; cheap, and never an update."""
        for exchange in self.in_flight.values():
            if exchange.sent is not None:
                exchange.advance()

    def pop_due(self, round: int, stop: Stop) -> list[Exchange]:
        """The exchanges to finish at this stop; the caller finishes them."""
        return [self.in_flight.pop(key) for key in self.due(round, stop) if key in self.in_flight]

    def receive(self, round: int, stop: Stop) -> None:
        """Waits for the exchanges due at this stop, and makes their outer updates."""
        for exchange in self.pop_due(round, stop):
            exchange.finish()
        self._update_from_zeros(round, stop)
        if self.sharing is not None and stop.sends:
            taken = stop.after(self.local_steps, self.full_steps)
            self.sharing = self.sharing.closed(self._participants(round, stop.sends[0]), taken)

    def _update_from_zeros(self, round: int, stop: Stop) -> None:
        """The updates of a rule with delayed messages in the first rounds, before any message arrives."""
        for sent_round, p in self.due(round, stop) if self._choice is None else ():  # else none is late
            setup = self._setup(p)
            if sent_round < self._first and setup.rule.delay_rounds:
                mixing = self.method.topology.mixing(round, self._participants(round, p))
                update_from_zeros(setup, mixing, self._context(round, setup.part, mixing))

    def pop_rest(self) -> list[Exchange]:
        """Exchanges in flight after the last round that must be finished; the caller finishes them."""
        return [self.in_flight.pop(key) for key in self.rest()]

    def rest(self) -> list[tuple[int, int]]:
        """Round and fragment of the exchanges in flight after the last round that must be finished, oldest first.

        Without the delayed messages of a rule with `delay_rounds`: receiving them would be another outer step. Also
        without exchanges announced and not sent within a round: they are sent only when training resumes.
        """
        if self.method.rule.delay_rounds:
            return []
        return [key for key, exchange in self.in_flight.items() if exchange.sent is not None]

    def end(self) -> None:
        """Finishes the remaining exchanges, and waits for all others, so that every peer receives its messages.

        Delayed messages stay in flight: a run resumed from the final checkpoint receives them.
        """
        for exchange in self.pop_rest():
            exchange.finish()
        for exchange in self.in_flight.values():
            if exchange.sent is not None:
                exchange.receive()

    def owners_share(self, fragment: int) -> float:
        """The share of a worker's bytes for a mean of this fragment that goes to chunk owners."""
        setup = self._setup(fragment)
        return owners_share(setup.codec, setup.part.x.numel())

    def part(self, p: int) -> Part:
        """This worker's part of exchange number `p`."""
        return self._setup(p).part

    @property
    def exchanges(self) -> int:
        """The number of exchanges of a round."""
        if self._choice is not None:
            return self._choice.sends
        return len(self.fragments) + (0 if self._updates is None else self.method.schedule.fragments)

    @property
    def state(self) -> Tree:
        """The outer state of all fragments in order, and that of the fragment choice."""
        chosen = () if self._choice is None else (self._choice.state,)
        return (*(setup.part.s for setup in self.fragments), *chosen)

    def state_in_flight(self) -> list[InFlight]:
        """The state of the exchanges in flight, for a checkpoint."""
        return [
            {
                "round": round,
                "fragment": p,
                "local_steps": exchange.ctx.local_steps,
                "rank": exchange.ctx.rank,
                "chosen": self.fragment_of(p),
                "sent": leaves(exchange.sent),
            }
            for (round, p), exchange in self.in_flight.items()
            if exchange.sent is not None
        ]

    def restore_in_flight(self, saved: Sequence[Mapping[str, Any]], sharing: Sharing | None = None) -> None:
        """Resends the exchanges in flight; all workers must resume from the same round.

        Args: `sharing` is the assignment of all slots from now on.
        Raises: KeyError, TypeError, ValueError for an invalid state.
        """
        self.in_flight.clear()
        self._begun = None
        for one in saved:
            round, p, tensors = int(one["round"]), int(one["fragment"]), list(one["sent"])
            exchanges = len(self.fragments) if self._choice is None else self._choice.sends
            if not 0 <= p < exchanges or round < 0 or (round, p) in self.in_flight:
                raise ValueError(f"an exchange of fragment {p} in round {round} is in flight")
            local_steps, rank = int(one.get("local_steps", self.local_steps)), int(one.get("rank", 0))
            most = self.timetable.at(round).full_steps
            if not 1 <= local_steps <= most or rank < 0:
                raise ValueError(f"an exchange after {local_steps} of {most} local steps, of rank {rank}, is in flight")
            if self._choice is not None:
                if (chosen := int(one["chosen"])) not in range(len(self.fragments)):
                    raise ValueError(f"an exchange of fragment {chosen} of {len(self.fragments)} is in flight")
                self._choice.of[p] = chosen
            mixing, ctx = self._place(round, p)
            ctx = ctx._replace(local_steps=local_steps, rank=rank)
            setup = self._setup_in(round, p)
            self.in_flight[round, p] = begin(setup, mixing, ctx, sent_again(setup, mixing, ctx, tensors))
        for exchange in self.in_flight.values():
            exchange.post()
        self.sharing = sharing

    def forget_unsent(self) -> None:
        """Clears codec errors that came with another worker's state, as that worker will send them."""
        for setup in self.fragments:
            if setup.rule.unsent is not None:
                setup.rule.unsent(setup.part.s).zero_()

    def due(self, round: int, stop: Stop) -> list[tuple[int, int]]:
        """Round and fragment of the exchanges received at a stop."""
        return [(round - lag, p) for p, lag in stop.receives]

    def _context(self, round: int, part: Part, mixing: Mixing, sent: int | None = None) -> Context:
        """The rule's context in a round; `sent` is the round in which its message is sent, if different."""
        i, adapted = self.worker, self._adapted
        full_steps = self.timetable.at(round if sent is None else sent).full_steps
        ctx = Context(i, mixing.n, round, self.local_steps, mixing.weight(i), part.layout, full_steps)
        ctx = ctx._replace(over_shards=self._over_shards)
        return ctx if adapted is None or part.s == () else ctx._replace(rank=adapted(part.s).rank)

    def _place(self, round: int, p: int) -> tuple[Mixing, Context]:
        """The mixing and the context of the messages sent in this round, which for rules that send ahead are the next round's."""
        of = self.membership.next_round(round) if self._ahead(p) else round
        assert of is not None
        present = self._participants(of, p)
        mixing = self._topology_of(p).mixing(of, present)
        if self.sharing is not None:
            mixing = self.sharing.weighed(mixing, present)
        return mixing, self._context(of, self._setup(p).part, mixing, sent=round)

    def _place_over(self, round: int, p: int, present: frozenset[int] | None) -> tuple[Mixing, Context]:
        mixing = self._topology_of(p).mixing(round, present)
        return mixing, self._context(round, self._setup(p).part, mixing)

    def _participants(self, round: int, p: int) -> frozenset[int] | None:
        """The participants of an exchange, in this worker's view; for an expert, its holders."""
        holders = self.method.holders
        return holders[p] if holders else self.membership.participants(round, p)

    def receives_from(self, round: int, p: int, present: frozenset[int]) -> tuple[int, ...]:
        """The senders to this worker in an exchange of a round with these participants."""
        return self._topology_of(p).mixing(round, present).receives_from(self.worker)

    def peers_in(self, round: int, present: frozenset[int]) -> tuple[int, ...]:
        """The senders to this worker in any exchange of the round, ascending."""
        return tuple(sorted({j for p in range(self.exchanges) for j in self.receives_from(round, p, present)}))

    def _ahead(self, p: int) -> bool:
        """Whether this fragment's messages are sent a round ahead."""
        return self.method.rule.sends_ahead and p < self.method.schedule.fragments

    def _setup(self, p: int) -> Setup:
        """The setup of an exchange; that of mixed updates shares x and part of the state with its fragment."""
        if self._choice is not None:
            setup = self.fragments[self._choice.of[p]]
            assert setup.rule.start is not None
            around = partial(self._choice.measured, setup.part.fragment, setup.rule.start(setup.part.s))
            return setup._replace(part=setup.part._replace(fragment=p), around=around)
        if p < len(self.fragments):
            return self.fragments[p]
        assert self._updates is not None
        setup = self.fragments[p - len(self.fragments)]
        assert setup.rule.start is not None and setup.rule.mixed is not None
        s = MixedUpdate(setup.rule.start(setup.part.s), setup.rule.mixed(setup.part.s))
        return setup._replace(rule=rule_of_updates(self._updates), part=setup.part._replace(s=s, fragment=p))

    def _begin(self, round: int, p: int, attempt: int | None = None) -> Exchange:
        mixing, ctx = self._place(round, p)
        return begin(self._setup_in(round, p)._replace(attempt=attempt), mixing, ctx)

    def _setup_in(self, round: int, p: int) -> Setup:
        """The setup of an exchange sent in this round, whose option values its update uses, however late."""
        setup, late = self._setup(p), self.method.rule.delay_rounds
        if p >= self.method.parts and self._choice is None:
            return setup
        if self.method.rule.at is not None:
            setup = setup._replace(rule=self._rule_in(round))
        under_way = self.timetable.begin(round + 1 + late) - self.timetable.begin(round + 1)
        return setup._replace(overlap_steps=under_way + self.method.schedule.overlap_steps)


def finish_together(loops: Sequence[OuterLoop], keys: Iterable[tuple[int, int]], each: Each) -> None:
    """Finishes the exchanges of these rounds and fragments, leg by leg, of all workers of a process that have them in flight."""
    for key in keys:
        finish_all([loop.in_flight.pop(key) for loop in loops if key in loop.in_flight], each)
