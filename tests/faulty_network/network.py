"""Elastic runs over a network with faults, on a virtual clock: every fault comes from one seed, which repeats it.

What runs is what real processes run: an `ElasticCore` and `Members` per process, and the exchanges of `gossamer.rounds.exchange`.
What is simulated is the world: connections that break (letters in flight are lost, both ends notice it or only one), delays,
letters that come twice, partitions that heal, processes that crash, that stop and continue, that join in a free slot,
and disks that refuse a checkpoint. After some time the faults stop, and the run must become whole again by itself.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from faulty_network.averager import Averager
from faulty_network.connections import FaultyConnection
from faulty_network.gossiper import Gossiper
from faulty_network.ledger import Ledger
from faulty_network.participant import Arrangement, Participant
from gossamer.rules import Rule
from gossamer.topologies import make_topology
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from tiny import limits

FAULTY_S, SETTLE_S, CALM_S, END_S = 20.0, 30.0, 40.0, 60.0
"""Virtual seconds with faults, until all must know of each other again, in which all must exchange, and until all have ended."""
FAULT_KINDS = (
    "break",
    "kill",
    "power",
    "stop",
    "join",
    "partition",
    "disk",
    "lost letter",
    "late letter",
    "double letter",
    "overtaken letter",
)
"""What may happen; of two letters between the same processes one overtakes the other where they have two connections."""
MOST_EVENTS = 40_000
"""More than ten times what a run needs: letters that answer each other without end are a fault."""


class FaultReport(NamedTuple):
    """What happened in one run."""

    seed: int
    faults: tuple[str, ...]
    """What the network did, with its virtual second."""
    counts: Counter[str]
    """How often each kind of fault has happened, see `FAULT_KINDS`."""
    rounds: int
    """That the workers have trained, all together."""
    letters: int
    made: int
    """Ends of exchanges that counted them."""
    missed: int
    unsure: int
    one_sided: int
    """Exchanges that one end counted and the other could not be sure of, or did not live to see."""
    closed: int
    """Rounds that were closed over a majority, by a rule that needs everyone."""
    retrained: int
    """Steps of a slot that two processes trained, as the first one lived or nobody could be asked."""


def check_faults(
    rule: Rule | None = None,
    *,
    seed: int,
    workers: int | None = None,
    verbose: bool = False,
    keyed: bool = False,
    liars: Mapping[int, int] | None = None,
) -> FaultReport:
    """Runs one elastic run over a network whose faults come from a seed, and checks what must hold whatever fails.

    After each exchange: no end has counted it that the other knows to be missed; two ends that have counted it pull each other
    by opposite amounts, so that the mean is kept; no wait is longer than the timeout; everything is finite. After each
    letter: what is kept of payloads that came early is bounded. For each slot: no step whose result another worker holds is
    trained again, unless the process lives, or nobody who can be asked holds it. Of a mean over everyone: each round is closed
    over more than half of the slots, all that close it have the same parameters, bit for bit, and rounds have one history.
    With every other such seed the workers share all slots: each step of a slot is part of one mean, and none is left out.
    After the faults: all that live know each other, everybody exchanges again, and the run ends.

    Args:
        rule: a gossip rule that keeps the mean, or one that needs everyone; None computes plain gossip or, with every fourth
            seed, a plain mean on a few Python numbers, which is fast.
        seed: of every fault, delay and draw. The same seed gives the same run.
        workers: slots; 3 to 7 of them by the seed if None.
        verbose: whether to print each fault as it happens.
        keyed: whether workers believe each other about themselves alone, as with keys.
        liars: the slots whose messages in a mean over everyone are NaN, and from which round on.
    Returns: what happened, with the list of faults.
    Raises: AssertionError that begins with the seed.
    Cost: some 30 ms; with a rule ten times as much.

    >>> check_faults(seed=3) == check_faults(seed=3)
    True
    """
    return FaultyNetwork(seed, rule=rule, workers=workers, verbose=verbose, keyed=keyed, liars=liars).run()


class FaultyNetwork:
    """The virtual clock, the processes and the connections of one run; see `check_faults`."""

    def __init__(
        self,
        seed: int,
        *,
        rule: Rule | None = None,
        workers: int | None = None,
        verbose: bool = False,
        keyed: bool = False,
        liars: Mapping[int, int] | None = None,
    ) -> None:
        self.keyed, self.liars = keyed, liars or {}
        self.seed, self.random, self._verbose = seed, random.Random(f"faults {seed}"), verbose
        draw = self.random
        slots = workers or draw.randint(3, 7)
        name = draw.choice(["random", "random", "ring", "complete"])
        self.everyone = seed % 4 == 3 if rule is None else rule.needs == "everyone"
        topology = make_topology("complete" if self.everyone else name, slots, seed)
        deadline_s = draw.choice([None, None, 5.0])
        self.plan = Arrangement(
            slots,
            topology,
            rule,
            timeout_s=8.0,
            deadline_s=deadline_s,
            rejoin_rounds=draw.randint(1, 6),
            constant_batch=self.everyone and seed // 4 % 2 == 0,
        )
        self.now, self.letters, self.last_round = 0.0, 0, math.inf
        self.faults: list[str] = []
        self.counts = Counter[str]()
        self.ledger = Ledger(seed, slots)
        self.processes: list[Participant] = []
        self.connections: list[FaultyConnection] = []
        self._events: list[tuple[float, int, Participant | None, Callable[[], object]]] = []
        self._made: dict[int, int] = {}
        self._count, self._halves, self._heals_s = 0, frozenset[int](), 0.0
        self._slow = {slot: draw.choice([1.0, 1.0, 1.0, 1.5]) for slot in range(slots)}
        self._delay_s = draw.choice([0.01, 0.05, 0.4])

    def run(self) -> FaultReport:
        """Runs to the end. Raises: AssertionError when something does not hold."""
        self._start()
        try:
            self._until(FAULTY_S)
            self._fill_up()
            self._until_it_holds(self._must_agree, SETTLE_S)
            self._made = {
                process.uid: process.made for island in self._islands() if self._goes_on(island) for process in island
            }
            self._until_it_holds(self._must_exchange, CALM_S)
            self.last_round = max((process.core.round for process in self.living if process.listens), default=0) + 2
            self._until(self.now + END_S)
            waiting = [process for island in self._islands() if not self._goes_on(island) for process in island]
            late = [process for process in self.living if not (self.everyone and process in waiting)]
            assert not late, f"{[*map(str, late)]} do not end"
            self.ledger.close()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}, at {self.now:.3f} s: {error}") from error
        ledger = self.ledger
        rounds = sum(process.rounds for process in self.processes)
        return FaultReport(
            self.seed,
            tuple(self.faults),
            self.counts,
            rounds,
            self.letters,
            ledger.made,
            ledger.missed,
            ledger.unsure,
            ledger.one_sided,
            ledger.rounds_closed,
            ledger.retrained,
        )

    @property
    def living(self) -> list[Participant]:
        """The processes that take part or join, stopped ones among them."""
        return [process for process in self.processes if not process.ended]

    @property
    def faulty(self) -> bool:
        """Whether faults may still happen."""
        return self.now < FAULTY_S

    def after(self, delay_s: float, act: Callable[[], object], owner: Participant | None = None) -> None:
        """Lets something happen later; what belongs to a process waits while that is stopped."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, owner, act))

    def latency_s(self) -> float:
        """How long a letter takes."""
        long = self.faulty and self.random.random() < 0.03
        self.counts["late letter"] += long
        return self.random.uniform(0.5, 1.5) * (self._delay_s if not long else 3.0)

    def phase_s(self, slot: int) -> float:
        """How long a local phase takes."""
        return self.random.uniform(1.0, 2.5) * self._slow[slot]

    def heals_in_s(self, a: Participant, b: Participant) -> float:
        """How long nothing passes between two processes; 0 where they reach each other."""
        apart = (a.place in self._halves) != (b.place in self._halves)
        return max(0.0, self._heals_s - self.now) if apart else 0.0

    def process_at(self, address: str) -> Participant | None:
        """The process that listens there."""
        return next((process for process in self.processes if process.address == address and process.listens), None)

    def note(self, what: str, kind: str = "") -> None:
        """Keeps, and prints if asked, what the network did."""
        self.counts.update([kind] if kind else [])
        self.faults.append(f"{self.now:7.3f} {what}")
        if self._verbose:
            print(self.faults[-1])

    def _start(self) -> None:
        slots, nonces = self.plan.slots, [self.random.randrange(1 << 61) for _ in range(self.plan.slots)]
        entries = [SlotEntry(i, 0, nonces[i], MemberStatus.ALIVE, 0, f"process:{i + 1}") for i in range(slots)]
        for i in range(slots):
            process = self._process(i, nonces[i])
            x = self.random.gauss(0, 1)
            process.take_place(Members(limits(slots), i, entries), x=0.0 if self.everyone else x, after=0)
            self.after(0.0, process.begin, process)
        for when in self._fault_times():
            self.after(when, self._fault)

    def _process(self, uid: int, nonce: int) -> Participant:
        make = Averager if self.everyone else Gossiper
        self.processes.append(make(self, uid=uid, nonce=nonce, address=f"process:{uid + 1}"))
        return self.processes[-1]

    def _fault_times(self) -> Iterator[float]:
        mean_s, when = self.random.choice([1.0, 3.0, 8.0, 100.0]), 0.0
        while (when := when + self.random.expovariate(1 / mean_s)) < FAULTY_S:
            yield when

    def _until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self.now, number, owner, act = heapq.heappop(self._events)
            assert number < MOST_EVENTS, f"{self.letters} letters in {self.now:.0f} s, and no end"
            if owner is not None and owner.stopped:
                owner.waiting.append(act)
            elif owner is None or not owner.dead:
                act()
                if owner is not None:
                    owner.check()
        self.now = end_s

    def _until_it_holds(self, check: Callable[[], None], limit_s: float) -> None:
        end_s = self.now + limit_s
        while True:
            try:
                check()
            except AssertionError:
                if self.now >= end_s:
                    raise
            else:
                return
            self._until(self.now + 1.0)

    def _fill_up(self) -> None:
        """Starts newcomers until a rule that needs everyone can continue: the run has an operator who acts late but correctly."""
        sure = [process for process in self.living if not process.disk_fails]
        if self.everyone and self.now < FAULTY_S + SETTLE_S / 2:
            if not self._goes_on(sure):
                self.newcomer()
            self.after(3.0, self._fill_up)

    def _goes_on(self, island: Sequence[Participant]) -> bool:
        """Whether these can train on: for a mean over everyone they fill more than half of the slots."""
        slots = {process.slot for process in island}
        return 2 * len(slots) > self.plan.slots if self.everyone else len(island) > 1

    def _must_exchange(self) -> None:
        for process in [process for island in self._islands() if self._goes_on(island) for process in island]:
            if process.slot in self.liars:
                continue  # others close their rounds without it
            began = self._made.get(process.uid, process.made - 1)  # one whose last partner has ended since is alone
            assert process.made > began, f"{process} exchanges with nobody"

    def _must_agree(self) -> None:
        """Every living worker knows exactly the others that live, unless no news can pass between them."""
        for island in self._islands():
            slots = {process.slot for process in island}
            for process in island:
                alive = {slot for slot, entry in process.members.entries.items() if entry.status == MemberStatus.ALIVE}
                assert alive == slots, f"{process} believes {sorted(alive)} to be alive, and {sorted(slots)} are"

    def _islands(self) -> list[list[Participant]]:
        """The processes that live, by who could reach whom: one that nobody knows, and that knows nobody who lives, is alone.

        So it may be when all died through whom two processes could have known each other.
        """
        islands: list[list[Participant]] = []
        for process in [process for process in self.living if process.takes_part]:
            met = [island for island in islands if any(one.knows(process) or process.knows(one) for one in island)]
            islands = [island for island in islands if island not in met]
            islands.append([process, *(one for island in met for one in island)])
        return islands

    def _fault(self) -> None:
        draw = self.random
        kinds = [
            self._break,
            self._break,
            self._crash,
            self._crash,
            self._stop,
            self._join,
            self._join,
            self._partition,
            self._disk,
        ]
        able = [process for process in self.living if not process.stopped]
        if able:
            draw.choice(kinds)(draw.choice(able))

    def _break(self, one: Participant) -> None:
        open_ones = [end.connection for ends in one.links.values() for end in ends]
        if open_ones:
            connection = self.random.choice(open_ones)
            how = self.random.choice(["both", "both", "dialler", "listener", "nobody"])
            self.note(f"{connection} breaks, and notice: {how}", "break")
            connection.break_off(how)

    def _crash(self, one: Participant) -> None:
        if not self._may_end(one):
            return
        quiet = self.random.random() < 0.3
        self.note(f"{one} {'loses its power' if quiet else 'is killed'}", "power" if quiet else "kill")
        one.crash(quiet=quiet)
        if self.random.random() < 0.6:
            self.after(self.random.expovariate(1 / 4), self.newcomer)

    def _stop(self, one: Participant) -> None:
        time_s = self.random.choice([1.0, 5.0, 15.0])
        self.note(f"{one} stops for {time_s:g} s", "stop")
        one.stopped = True
        self.after(min(time_s, FAULTY_S - self.now), one.proceed)

    def _join(self, one: Participant) -> None:
        self.newcomer()

    def newcomer(self) -> None:
        """A process asks some worker for a slot."""
        donors = [process for process in self.living if process.takes_part]
        if donors and len(self.living) <= self.plan.slots + 1:
            uid = len(self.processes)
            process = self._process(uid, self.random.randrange(1 << 61))
            donor = self.random.choice(donors)
            self.note(f"{process} asks {donor} for a slot", "join")
            self.after(self.latency_s(), lambda: process.ask(donor), process)

    def _partition(self, one: Participant) -> None:
        if self.now < self._heals_s:
            return
        count = self.random.randint(1, self.plan.slots - 1)
        self._halves = frozenset(self.random.sample(range(self.plan.slots), count))
        time_s = min(self.random.choice([1.0, 5.0, 20.0]), FAULTY_S - self.now)
        self._heals_s = self.now + time_s
        self.note(f"the places {sorted(self._halves)} are cut off for {time_s:.1f} s", "partition")
        for connection in [c for c in self.connections if not c.broken]:
            a, b = connection.processes
            if self.heals_in_s(a, b) and self.random.random() < 0.5:
                self.after(self.random.uniform(0, time_s), lambda c=connection: c.break_off("both"))

    def _may_end(self, one: Participant) -> bool:
        """Whether others continue, two at least."""
        others = [p for p in self.living if p.takes_part and not p.disk_fails and p is not one]
        return len(others) >= 2 and self._goes_on(others)

    def _disk(self, one: Participant) -> None:
        if not self._may_end(one):
            return
        self.note(f"the disk of {one} refuses", "disk")
        one.disk_fails = True
