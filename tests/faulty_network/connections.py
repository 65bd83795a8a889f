"""A connection of the virtual network: letters keep their order on it, and it may break with letters in flight."""

from collections import deque
from typing import TYPE_CHECKING, Literal

from gossamer.transport.sockets.letter import Letter

if TYPE_CHECKING:
    from faulty_network.network import FaultyNetwork
    from faulty_network.participant import Participant


class End:
    """One end of a connection, as the process there knows it."""

    def __init__(self, connection: "FaultyConnection", side: int, peer: int) -> None:
        self.connection, self.side, self.peer = connection, side, peer
        self.nonce: int | None = None
        """Of the process at the other end, once it has said so."""
        self.over = False
        """Whether the process has noticed that it is gone."""
        self.tried = False
        """Whether it has sent something into nothing."""

    def send(self, letter: Letter) -> None:
        """Sends, or loses the letter where the connection is broken."""
        self.connection.send(self.side, letter)


class FaultyConnection:
    """Between the process that dialled (side 0) and the one that listened (side 1)."""

    def __init__(self, network: "FaultyNetwork", dialler: "Participant", listener: "Participant", peer: int) -> None:
        self.network, self.processes = network, (dialler, listener)
        self.ends = [End(self, 0, peer)]
        self.open = self.broken = False
        self._letters: tuple[deque[tuple[int, Letter]], deque[tuple[int, Letter]]] = (deque(), deque())
        """Each with its number among all letters."""
        self._last_s = [0.0, 0.0]
        network.connections.append(self)
        away_s = network.heals_in_s(dialler, listener)
        network.after(2 * network.latency_s() + away_s, self._accept, listener)
        network.after(dialler.plan.timeout_s, self._give_up, dialler)

    def __str__(self) -> str:
        return f"the connection from {self.processes[0]} to {self.processes[1]}"

    def send(self, side: int, letter: Letter) -> None:
        """Queues a letter; now and then it comes twice.

        Where the connection is gone and this end does not know, its own system tells it once nothing was acknowledged for long.
        """
        network, end = self.network, self.ends[side]
        if self.broken:
            network.counts["lost letter"] += 1
            if not end.tried:
                end.tried = True
                network.after(
                    self.processes[side].plan.timeout_s, lambda: self.processes[side].lost(end), self.processes[side]
                )
            return
        twice = network.faulty and network.random.random() < 0.01
        network.counts["double letter"] += twice
        for _ in range(1 + twice):
            network.letters += 1
            self._letters[side].append((network.letters, letter))
            if self.open:
                self._later(side)

    def break_off(self, notice: Literal["both", "dialler", "listener", "nobody"] | str = "both") -> None:
        """Loses what is in flight, except what has come and was not read.

        An end that does not notice it now will once it has sent something.
        """
        if self.broken:
            return
        self.broken, network = True, self.network
        for side, letters in enumerate(self._letters):
            reads = notice in ("both", ("listener", "dialler")[side]) and network.random.random() < 0.5
            for _ in range(network.random.randint(0, len(letters)) if reads and self.open else 0):
                self._deliver(side, *letters.popleft())
            network.counts["lost letter"] += len(letters)
            letters.clear()
        for end in self.ends:
            if notice in ("both", ("dialler", "listener")[end.side]):
                self._notify(end)

    def finish(self, side: int) -> None:
        """The process of this side closes it: what it has sent still comes."""
        if not self.broken:
            self.broken = True
            letters = self._letters[side]
            while letters and self.open:
                self._deliver(side, *letters.popleft())
            for end in self.ends:
                if end.side != side:
                    self._notify(end)

    def _notify(self, end: End) -> None:
        process = self.processes[end.side]
        self.network.after(self.network.latency_s(), lambda: process.lost(end), process)

    def _accept(self) -> None:
        dialler, listener = self.processes
        if self.broken:
            return
        if not listener.listens or dialler.dead:
            if listener.ended and not listener.quiet:
                dialler.refused.add(listener.nonce)
            self.break_off("dialler")
            return
        self.open = True
        end = End(self, 1, dialler.slot)
        self.ends.append(end)
        for _ in self._letters[0]:
            self._later(0)
        listener.accept(end)

    def _give_up(self) -> None:
        if not self.open:
            self.break_off("dialler")

    def _later(self, side: int) -> None:
        """A letter under way; none overtakes another on its connection."""
        network = self.network
        when = max(self._last_s[side], network.now + network.latency_s())
        self._last_s[side] = when
        network.after(when - network.now, lambda: self._arrive(side), self.processes[1 - side])

    def _arrive(self, side: int) -> None:
        letters, receiver, network = self._letters[side], self.processes[1 - side], self.network
        if not letters or self.broken:
            return
        if (away_s := network.heals_in_s(*self.processes)) > 0:
            network.after(away_s + 0.01, lambda: self._arrive(side), receiver)
        elif not receiver.may_read(letters[0][1]):
            network.after(0.1, lambda: self._arrive(side), receiver)
        else:
            self._deliver(side, *letters.popleft())

    def _deliver(self, side: int, number: int, letter: Letter) -> None:
        receiver, sender = self.processes[1 - side], self.processes[side].uid
        self.network.counts["overtaken letter"] += number < receiver.newest.get(sender, 0)
        receiver.newest[sender] = max(number, receiver.newest.get(sender, 0))
        end = self.ends[1 - side]
        if receiver.stopped:
            receiver.waiting.append(lambda: receiver.take(end, letter))
        elif not receiver.dead:
            receiver.take(end, letter)
