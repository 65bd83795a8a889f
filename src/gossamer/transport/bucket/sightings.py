"""What the names of objects in a store show of a run: closed rounds, messages, states, and which slots are held."""

from collections import defaultdict
from collections.abc import Sequence

from gossamer.transport.bucket.objects import parsed


class Sightings:
    """Objects that a process has seen, in listings that may be incomplete. Other names are ignored."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.newest = -1
        """The newest round that is closed."""
        self.messages: dict[int, dict[int, int]] = defaultdict(dict)
        """The life of each sender, by round and slot."""
        self.states: set[int] = set()
        """The rounds after which there is a state."""
        self.holders: dict[int, set[int]] = defaultdict(set)
        """In gossip the rounds after which there is a state, by slot."""
        self.lives: dict[int, int] = {}
        """The last life of each slot."""
        self.ended: set[tuple[int, int]] = set()
        self._beats: dict[tuple[int, int], tuple[int, int]] = {}
        self._moved_s: dict[tuple[int, int], float] = {}

    def look(self, names: Sequence[str], now: float) -> None:
        """Adds a listing."""
        for match in parsed(names):
            fields = match.groupdict()
            if int(fields["sender"] or fields["slot"] or 0) >= self._workers:
                continue
            if fields["commit"]:
                self.newest = max(self.newest, int(fields["round"]))
            elif fields["sender"]:
                round, slot, life = int(fields["round"]), int(fields["sender"]), int(fields["of"])
                self.messages[round][slot] = max(life, self.messages[round].get(slot, 0))
                self._moves(slot, life, (0, round + 1), now)
            elif fields["state"]:
                self.states.add(int(fields["state"]))
                if fields["holder"] and int(fields["holder"]) < self._workers:
                    self.holders[int(fields["holder"])].add(int(fields["state"]))
            elif fields["kind"]:
                slot, life = int(fields["slot"]), int(fields["life"])
                self.lives[slot] = max(life, self.lives.get(slot, 0))
                if fields["kind"] == "v":
                    self.ended.add((slot, life))
                self._moves(slot, life, (int(fields["beat"] or -1) + 1, 0), now)
        for old in [round for round in self.messages if round < self.newest]:
            del self.messages[old]

    def _moves(self, slot: int, life: int, sign: tuple[int, int], now: float) -> None:
        before = self._beats.get((slot, life), (-1, -1))
        after = max(before[0], sign[0]), max(before[1], sign[1])
        if after != before:
            self._beats[slot, life], self._moved_s[slot, life] = after, now

    def is_held(self, slot: int, now: float, timeout_s: float) -> bool:
        """Whether the holder of a slot may be alive."""
        life = self.lives.get(slot)
        if life is None or (slot, life) in self.ended:
            return False
        return now - self._moved_s.get((slot, life), now) < timeout_s

    def live(self, now: float, timeout_s: float) -> set[int]:
        """The slots of all holders that may be alive."""
        return {slot for slot in self.lives if self.is_held(slot, now, timeout_s)}

    def sent_until(self, slot: int, life: int) -> int:
        """The round after the last one in which a message of a process was seen."""
        return self._beats.get((slot, life), (0, 0))[1]

    def moved_s(self, slot: int) -> float | None:
        """When the lease or a message of the last holder of a slot was first seen, by the clock of the looks."""
        return self._moved_s.get((slot, self.lives.get(slot, -1)))
