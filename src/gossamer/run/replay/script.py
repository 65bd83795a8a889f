"""The script of an elastic run from its log of outcomes: for each round the workers, their states, and the counted
messages.

A worker killed after a send leaves no line for the round, although others may have counted its message: it takes part
in the round as lost.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from gossamer.errors import ConfigError, DataError
from gossamer.record.folder import store_file
from gossamer.record.logs.outcomes import OUTCOMES, Begun, ExchangeOutcome, Life, RoundOutcome, read_outcomes
from gossamer.rounds.compatibility.combine import Method
from gossamer.run.replay.driver import contradiction
from gossamer.settings.over_time import Timetable

Process = tuple[int, int]
"""A slot, and the index of a life in it."""


def outcomes_of(folder: Path) -> dict[int, list[Life]]:
    """The lives of each slot by the logs of outcomes in a folder; none in that of a run that writes no such log.

    Raises: ConfigError for a worker in a store that has ended before its run, after which the outcomes of all are written.
    """
    lives = read_outcomes(folder)
    if not lives and store_file(folder).exists():
        raise ConfigError(
            f"'{folder}' has no log of outcomes (outcomes-*.jsonl), as its worker ended before the run in the store; when that "
            f"has ended, start gossamer train RUN.toml --store URL --out {quote(str(folder))} once more, which writes them"
        )
    return lives


class Message(NamedTuple):
    """A message between two slots."""

    of: int
    """The round whose topology it followed."""
    fragment: int
    receiver: int
    sender: int


class ProcessExit(NamedTuple):
    """A process that ends regularly."""

    left: bool
    """Whether it left on request, before the end of the run."""
    behind: int
    """Completed rounds of its state."""
    trained: bool
    """Whether it has completed a round itself; else its state is still the one taken over."""


class RoundScript(NamedTuple):
    """One round of all workers."""

    outcomes: dict[int, RoundOutcome]
    """Outcomes by slot, of the workers present at its end."""
    lost: set[Process]
    """Workers lost in it after a send."""
    ends: dict[int, ProcessExit]
    """By slot: processes that end regularly after this round or before their first."""
    overruled: set[int]
    """Slots that had closed the round over another set than the final one. Their outer step is discarded, as they took
    over another's state next.
    """


class Script(NamedTuple):
    """A run, round by round."""

    turns: dict[int, RoundScript]
    lives: dict[int, list[Life]]
    received: set[tuple[Message, int]]
    """The counted messages, each with the receiver's life."""
    sent: set[tuple[Message, int]]
    """The same, each with the sender's life."""
    alive: dict[tuple[Process, int, int], frozenset[int] | None]
    """By process, topology round and fragment: the participants of the exchange in its view; None for all."""
    next: dict[tuple[Process, int], int]
    """By process and round: its next round, as far as observed."""

    def is_first(self, slot: int, begun: Begun) -> bool:
        """Whether a process begins with the initial state of the run, without a donor."""
        return begun is self.lives[slot][0].begun and (begun.after, begun.donor) == (0, slot)

    def taken_over(self, first: int = 0) -> set[tuple[int, int]]:
        """The states, by slot and completed rounds, taken over by processes that begin in round `first` or later."""
        begun = [
            life.begun
            for slot, lives in self.lives.items()
            for life in lives
            if life.begun.round >= first and not self.is_first(slot, life.begun)
        ]
        return {(one.donor, one.after) for one in begun}

    def life_at(self, slot: int, round: int) -> int:
        """The newest life of a slot begun before a round."""
        return max((k for k, life in enumerate(self.lives[slot]) if life.begun.round < round), default=0)

    def running(self, round: int) -> set[int]:
        """The slots whose worker trains in this or a later round with its earlier state."""
        slots: set[int] = set()
        for slot, lives in self.lives.items():
            for k, life in enumerate(lives):
                lost = [r for r, turn in self.turns.items() if (slot, k) in turn.lost]
                if life.begun.round < round <= max([_last(life), *lost]):
                    slots.add(slot)
        return slots


def calm(timetable: Timetable, workers: int, rounds: int) -> Script:
    """The script of a run without losses."""
    nobody = frozenset[int]()
    begun = [Begun(0, 0, i, 0, 0) for i in range(workers)]
    turns = {
        r: RoundScript(
            {i: RoundOutcome(r, None, nobody, nobody, timetable.steps_before(i, r + 1)) for i in range(workers)},
            set(),
            {},
            set(),
        )
        for r in range(rounds)
    }
    lives = {i: [Life(begun[i], tuple(turns[r].outcomes[i] for r in range(rounds)), None)] for i in range(workers)}
    return Script(turns, lives, set(), set(), {}, {})


def script_of(lives: Mapping[int, Sequence[Life]], method: Method, rounds: int, seed: int, recorded: Path) -> Script:
    """The script of a run of at most `rounds` rounds from its log of outcomes in this folder.

    Raises: DataError for a log that contradicts itself.
    """
    return _Reader(lives, method, rounds, seed, recorded).script


class _Reader:
    """Makes a script."""

    def __init__(
        self, lives: Mapping[int, Sequence[Life]], method: Method, rounds: int, seed: int, recorded: Path
    ) -> None:
        self._n, self._rounds, self._method, self._recorded = method.topology.n, rounds, method, recorded
        self._topology_of, self._closes = method.topology_of(seed), method.rule.needs == "everyone"
        self.script = Script({}, {slot: [*some] for slot, some in lives.items()}, set(), set(), {}, {})
        self._exchanges: dict[Process, dict[tuple[int, int], ExchangeOutcome]] = {}
        for slot, some in self.script.lives.items():
            if slot >= self._n:
                raise self._contradiction(slot, 0, f"the run has {self._n} slots")
            for k, life in enumerate(some):
                self._read_life((slot, k), life)
        if self._closes:
            self._overrule()
        for process, some in self._exchanges.items():
            for outcome in some.values():
                self._count(process, outcome)

    def _contradiction(self, slot: int, round: int, why: str) -> DataError:
        return contradiction(OUTCOMES.path(self._recorded, slot), f"worker {slot}", f"round {round}", why)

    def _turn(self, round: int) -> RoundScript:
        return self.script.turns.setdefault(round, RoundScript({}, set(), {}, set()))

    def _read_life(self, process: Process, life: Life) -> None:
        (slot, _), script = process, self.script
        begun, trained, ended, exchanges = life
        if self._method.exchanges_once:
            exchanges = [ExchangeOutcome(one.round, one.round, 0, *one[1:4]) for one in trained]
        self._check_life(slot, begun, [*trained, *exchanges])
        self._turn(begun.round)
        outcomes = self._exchanges.setdefault(process, {})
        for one in exchanges:
            outcomes[one.of, one.fragment] = one._replace(alive=self._or_all(one.alive))
        script.next[process, begun.round - 1] = before = begun.round
        for outcome in trained:
            self._turn(outcome.round).outcomes[slot] = outcome._replace(alive=self._or_all(outcome.alive))
            if outcome.round > before:
                script.next[process, before] = outcome.round
            before = outcome.round
        if ended is not None:
            last = trained[-1].round if trained else begun.round
            behind = trained[-1].round + 1 if trained else begun.after
            self._turn(last).ends[slot] = ProcessExit(ended.why == "left", behind, bool(trained))

    def _check_life(self, slot: int, begun: Begun, outcomes: Iterable[RoundOutcome | ExchangeOutcome]) -> None:
        """Raises DataError for rounds and workers that the run does not have."""
        n, rounds = self._n, self._rounds
        # A worker left out of the last round begins after it with the state of one that completed it, and trains no
        # more.
        if begun.after > begun.round or begun.donor >= n or begun.round > rounds:
            raise self._contradiction(
                slot, begun.round, f"a process begins there, of {rounds} rounds, with a state after {begun.after}"
            )
        for one in outcomes:
            of = one.of if isinstance(one, ExchangeOutcome) else one.round
            if of >= rounds or not {slot} <= (one.alive or {slot}) <= set(range(n)):
                raise self._contradiction(
                    slot, of, f"the run has {rounds} rounds and {n} slots, and a worker is alive itself"
                )

    def _or_all(self, alive: frozenset[int] | None) -> frozenset[int] | None:
        return None if alive is not None and len(alive) == self._n else alive

    def _overrule(self) -> None:
        """Removes the messages between workers that closed an exchange over different sets."""
        everyone = frozenset(range(self._n))
        named: dict[tuple[int, int], dict[int, tuple[int, frozenset[int]]]] = {}
        for (slot, k), outcomes in self._exchanges.items():
            for key, outcome in outcomes.items():
                named.setdefault(key, {})[slot] = k, outcome.alive or everyone
        for (of, fragment), sets in named.items():
            for i, (k, some) in sets.items():
                if all(sets[j][1] == some for j in some if j in sets):
                    continue
                if self.script.lives[i][k].begun.round <= of < _last(self.script.lives[i][k]):
                    raise self._contradiction(i, of, "it went on after a round that others had closed otherwise")
                self._turn(of).overruled.add(i)
                outcomes = self._exchanges[i, k]
                outcomes[of, fragment] = outcomes[of, fragment]._replace(alive=frozenset({i}))

    def _count(self, process: Process, outcome: ExchangeOutcome) -> None:
        """Adds the counted messages of an exchange."""
        i, (_, of, fragment, alive, *_) = process[0], outcome
        self.script.alive[process, of, fragment] = alive
        peers = {*self._receives_from(i, of, fragment, alive)}
        if not outcome.lost <= peers:
            raise self._contradiction(
                i, of, f"it did not exchange with {sorted(outcome.lost - peers)}, who were no peers"
            )
        for j in sorted(peers - outcome.lost):
            self._add_counted_message(process, j, outcome)

    def _add_counted_message(self, process: Process, j: int, outcome: ExchangeOutcome) -> None:
        """Adds that a process counted the message of worker j in an exchange."""
        i, k = process
        message = Message(outcome.of, outcome.fragment, i, j)
        self.script.received.add((message, k))
        sender = self._sender(i, j, outcome)
        self.script.sent.add((message, sender[1]))
        self._send(sender, message)

    def _receives_from(self, i: int, of: int, fragment: int, alive: frozenset[int] | None) -> tuple[int, ...]:
        return self._topology_of(fragment).mixing(of, alive).receives_from(i)

    def _sender(self, i: int, j: int, outcome: ExchangeOutcome) -> Process:
        """The process of slot j that sent the message counted by worker i in an exchange."""
        key = outcome.of, outcome.fragment
        for k in range(len(self.script.lives.get(j, ()))):
            counted = self._exchanges[j, k].get(key)
            if counted is not None and i not in counted.missed and counted.alive == outcome.alive:
                return j, k
        for k, life in enumerate(self.script.lives.get(j, ())):
            # Killed, or left out, before this exchange had ended at its side.
            before = max([_last(life), *(one.round for one in life.exchanges)])
            if any((j, k) in turn.lost for r, turn in self.script.turns.items() if r != outcome.of):
                continue
            later = [other.begun.round for other in self.script.lives[j] if other.begun.round > life.begun.round]
            goes_on = before <= outcome.of <= min(later, default=outcome.of)
            if life.begun.round <= outcome.of and goes_on and life.ended is None and key not in self._exchanges[j, k]:
                self._lose((j, k), i, outcome)
                return j, k
        raise self._contradiction(i, outcome.of, f"it counted a message of worker {j}, who did not send it")

    def _lose(self, process: Process, i: int, outcome: ExchangeOutcome) -> None:
        """Adds the membership view of a process that sent and died before the outcome."""
        (j, k), (_, of, fragment, alive, *_) = process, outcome
        if self.script.alive.setdefault((process, of, fragment), alive) != alive:
            raise self._contradiction(i, of, f"worker {j} was received by workers in whose view others took part")
        if self._closes:
            for other in self._receives_from(j, of, fragment, alive):
                if (Message(of, fragment, j, other), k) not in self.script.received:
                    self._add_counted_message(process, other, outcome)

    def _send(self, sender: Process, message: Message) -> None:
        """Adds the round in which a process sent a counted message, if it has no line of that round."""
        j, k = sender
        life, ahead = self.script.lives[j][k], self._method.rule.sends_ahead
        if ahead and message.fragment < self._method.schedule.fragments:
            if message.of > _last(life):
                self.script.next.setdefault((sender, max(_last(life), life.begun.round - 1)), message.of)
        elif message.of > _last(life):
            self._turn(message.of).lost.add(sender)


def _last(life: Life) -> int:
    """The last completed round of a process."""
    return life.rounds[-1].round if life.rounds else life.begun.round - 1
