"""What the log of outcomes of an elastic run says of each round: who trained, with whose state, and whose messages counted.

A worker that is killed after it has sent leaves no line, and others may have counted its message: it has a part in the round as
one that was lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from gossamer.errors import DataError
from gossamer.record.outcomes import Begun, Ended, Life, RoundOutcome
from gossamer.topologies import Topology

__all__ = ["RoundScript", "Script", "calm", "script_of"]

Pair = tuple[int, int]
Handed = tuple[int, int]


class RoundScript(NamedTuple):
    """What one round was for all workers."""

    begins: dict[int, list[Begun]]
    """By slot: those that take over a state before the round."""
    outcomes: dict[int, RoundOutcome]
    """By slot: those that were there at its end."""
    lost: dict[int, frozenset[int] | None]
    """By slot: those that were lost after they had sent, and who took part in their view; None for everyone."""
    heard: set[Pair]
    """(receiver, sender) of each message that counted; without those of `heard_of_lost`."""
    heard_of_lost: set[Pair]
    """Of senders that were lost, where a worker need not hear anybody in order to send."""
    ends: dict[int, tuple[Ended, int]]
    """By slot: whose process ends on purpose after this round or before its first, and how many rounds it has behind it."""
    overruled: set[int]
    """Slots that had closed the round over other workers than were named in the end. Their outer step counts for nothing, as they
    took over another's state next."""


class Script(NamedTuple):
    """A run, round by round."""

    turns: dict[int, RoundScript]
    lives: dict[int, list[Life]]

    @property
    def rounds(self) -> int:
        """How many rounds it has."""
        return max(self.turns, default=-1) + 1

    def taken_over(self, first: int = 0) -> set[Handed]:
        """The states, by slot and rounds behind it, that those take over who begin in round `first` or later."""
        return {
            (begun.donor, begun.after)
            for slot, lives in self.lives.items()
            for k, (begun, _, _) in enumerate(lives)
            if begun.round >= first and (k, begun.after, begun.donor) != (0, 0, slot)
        }

    def running(self, round: int) -> set[int]:
        """The slots whose worker trains in this round or a later one with the state that it had before."""
        found: set[int] = set()
        for slot, lives in self.lives.items():
            nexts = [*(life.begun.round for life in lives[1:]), self.rounds]
            for (begun, trained, _), until in zip(lives, nexts, strict=True):
                last = trained[-1].round if trained else begun.round - 1
                lost = [r for r, turn in self.turns.items() if last < r <= until and slot in turn.lost]
                if begun.round < round <= max([last, *lost]):
                    found.add(slot)
        return found


def calm(local_steps: Sequence[int], rounds: int) -> Script:
    """A run in which nothing was missed, of as many workers as have local steps."""
    nobody, workers = frozenset[int](), len(local_steps)
    turns = {
        r: RoundScript(
            {i: [Begun(0, 0, i, 0, 0)] for i in range(workers)} if r == 0 else {},
            {i: RoundOutcome(r, None, nobody, nobody, (r + 1) * local_steps[i]) for i in range(workers)},
            {}, set(), set(), {}, set(),
        )
        for r in range(rounds)
    }  # fmt: skip
    lives = {
        i: [Life(Begun(0, 0, i, 0, 0), tuple(turns[r].outcomes[i] for r in range(rounds)), None)]
        for i in range(workers)
    }
    return Script(turns, lives)


def script_of(lives: Mapping[int, Sequence[Life]], topology: Topology, rounds: int, *, closes: bool) -> Script:
    """The script of a run of at most so many rounds from its log of outcomes.

    Args: `closes` is for a rule that needs everyone: a round is closed over those alive, who all hear each other.
    Raises: DataError for a log that contradicts itself.
    """
    script = Script({}, {slot: [*some] for slot, some in lives.items()})
    for slot, some in script.lives.items():
        if slot >= topology.n:
            _impossible(slot, 0, f"the run has {topology.n} slots")
        for life in some:
            _enter(script.turns, slot, life, topology.n, rounds)
    for round in sorted(script.turns):
        turn = script.turns[round]
        if closes:
            _overrule(script, round, frozenset(range(topology.n)))
        for i, j, alive in [*_counted(turn, topology)]:
            theirs = turn.outcomes.get(j)
            if theirs is not None and i not in theirs.missed and theirs.alive == alive:
                turn.heard.add((i, j))
                continue
            _must_be_lost(script, i, j, round)
            if turn.lost.setdefault(j, alive) != alive:
                _impossible(i, round, f"worker {j} was heard by workers in whose view others took part")
            (turn.heard if closes else turn.heard_of_lost).add((i, j))
        if closes:
            turn.heard.update(
                (j, i) for j, alive in turn.lost.items() for i in topology.mixing(round, alive).hears_from(j)
            )
    return script


def _turn(turns: dict[int, RoundScript], round: int) -> RoundScript:
    return turns.setdefault(round, RoundScript({}, {}, {}, set(), set(), {}, set()))


def _enter(turns: dict[int, RoundScript], slot: int, life: Life, n: int, rounds: int) -> None:
    begun, trained, ended = life
    if begun.after > begun.round or begun.donor >= n or begun.round >= rounds:
        _impossible(slot, begun.round, f"a process begins there with a state after {begun.after} of {rounds} rounds")
    _turn(turns, begun.round).begins.setdefault(slot, []).append(begun)
    for outcome in trained:
        if outcome.round >= rounds or not {slot} <= (outcome.alive or {slot}) <= set(range(n)):
            _impossible(slot, outcome.round, f"the run has {rounds} rounds and {n} slots, and a worker is alive itself")
        alive = None if outcome.alive == set(range(n)) else outcome.alive
        _turn(turns, outcome.round).outcomes[slot] = outcome._replace(alive=alive)
    if ended is not None:
        last = trained[-1].round if trained else begun.round
        _turn(turns, last).ends[slot] = (ended, trained[-1].round + 1 if trained else begun.after)


def _overrule(script: Script, round: int, everyone: frozenset[int]) -> None:
    """Leaves those alone in a round who closed it over a worker that closed it otherwise."""
    turn = script.turns[round]
    named = {i: outcome.alive or everyone for i, outcome in turn.outcomes.items()}
    for i, some in named.items():
        if any(named.get(j, some) != some for j in some):
            if any(life.rounds and life.begun.round <= round < life.rounds[-1].round for life in script.lives[i]):
                _impossible(i, round, "it went on after a round that others had closed otherwise")
            turn.overruled.add(i)
            turn.outcomes[i] = turn.outcomes[i]._replace(alive=frozenset({i}))


def _counted(turn: RoundScript, topology: Topology) -> Iterator[tuple[int, int, frozenset[int] | None]]:
    """Each receiver with the senders whose messages it counted, and its view."""
    for i, outcome in turn.outcomes.items():
        peers = set(topology.mixing(outcome.round, outcome.alive).hears_from(i))
        if not outcome.lost <= peers:
            _impossible(i, outcome.round, f"it did not exchange with {sorted(outcome.lost - peers)}, who were no peers")
        for j in sorted(peers - outcome.lost):
            yield i, j, outcome.alive


def _must_be_lost(script: Script, i: int, j: int, round: int) -> None:
    """Raises DataError unless worker j may have sent in this round and have been killed before its end."""
    for life in script.lives.get(j, ()):
        last = life.rounds[-1].round if life.rounds else life.begun.round - 1
        if life.begun.round <= round and last < round and life.ended is None:
            known = [r for r, turn in script.turns.items() if last < r < round and j in turn.lost]
            later = [other.begun.round for other in script.lives[j] if other.begun.round > life.begun.round]
            if not known and round <= min(later, default=round):
                return
    _impossible(i, round, f"it counted a message of worker {j}, who did not send it")


def _impossible(slot: int, round: int, why: str) -> NoReturn:
    raise DataError(
        f"the log of outcomes contradicts itself at worker {slot} in round {round}: {why}; bring the files outcomes-*.jsonl of "
        "all workers together, as the run wrote them"
    )
