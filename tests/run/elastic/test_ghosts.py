"""Ghosts: newcomers that warm their inner optimizer before anybody hears of them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gossamer.codecs import exact
from gossamer.layout import Layout, Leaf
from gossamer.rounds.exchange import Exchange, begin, initial_state
from gossamer.rounds.setup import Part, Setup
from gossamer.rules import Context, gasloc
from gossamer.run.config.resolve import resolve
from gossamer.run.participant.life import changes
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.run.worker.worker import Worker
from gossamer.topologies import make_topology
from gossamer.transport import wire
from gossamer.transport.contract import Sound, Ticket
from gossamer.transport.elastic.core import ElasticCore
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.memory import MemoryNetwork
from gossamer.tree import leaves
from tiny import limits, tiny

SLOTS, NUMEL = 5, 6
LAYOUT = Layout((Leaf("x", (NUMEL,), 0, NUMEL),), NUMEL)


class Gossiper:
    """A worker over its own `ElasticCore`; it is the transport of its exchanges."""

    keeps_frames = False

    def __init__(self, members: Members) -> None:
        self.worker = members.me
        self.core, self.members = ElasticCore(members, timeout_s=8.0), members
        self.topology, self.rule, self.now = make_topology("random", SLOTS, 3), gasloc(), 0.0
        self.x = torch.linspace(-1, 1, NUMEL, dtype=torch.float64) + self.worker
        self.s = initial_state(self.rule, self.topology.mixing(0), self.x, self.context(0))

    def context(self, round: int) -> Context:
        mixing = self.topology.mixing(round)
        return Context(self.worker, SLOTS, round, 2, mixing.weight(self.worker), LAYOUT, 2)

    def begin(self, round: int) -> Exchange:
        alive = self.members.alive(round) | {self.worker}
        mixing = self.topology.mixing(round, alive)
        self.core.begin_round(round, alive, mixing.receives_from(self.worker))
        setup = Setup(self.rule, exact(), self, Part(self.x, self.s, LAYOUT), seed=0)
        return begin(setup, mixing, self.context(round))

    def expect(self, ticket: Ticket, peer: int, like: Sequence[Tensor], sound: Sound | None = None) -> None:
        self.core.expect(ticket, peer, wire.frames_bytes(like))

    def post(self, ticket: Ticket, peer: int, frames: Sequence[Tensor]) -> None:
        self.core.post(ticket, peer, wire.pack_frames(frames).clone(), self.now)

    def ready(self, ticket: Ticket) -> bool:
        return self.core.settled(ticket)

    def wait(self, ticket: Ticket) -> None:
        raise AssertionError("everything has come")

    def collect(self, ticket: Ticket) -> dict[int, list[Tensor]]:
        return {peer: [body.view(torch.float64)] for peer, body in self.core.collect(ticket)[0].items()}

    def close(self) -> None: ...


def carry(cores: dict[int, ElasticCore], now: float) -> None:
    """Delivers letters until there are none; those to a slot that nobody fills are lost."""
    while letters := [letter for core in cores.values() for letter in core.outbox]:
        for core in cores.values():
            core.outbox.clear()
        for peer, letter in letters:
            if peer in cores:
                cores[peer].receive(letter, now)


def trained(status: MemberStatus | None, rounds: int = 8) -> list[list[float]]:
    """The parameters of workers 0 to 3 after each round, if slot 4 is given to a newcomer of this status before round 2.

    It is heard of until round 6, when it dies as a ghost.
    """
    known = [
        SlotEntry(i, 0, 10 + i, MemberStatus.ALIVE if i < 4 else MemberStatus.LEFT, 0, f"host:{i + 1}")
        for i in range(SLOTS)
    ]
    crew = [Gossiper(Members(limits(SLOTS), i, known)) for i in range(4)]
    cores, history = {one.worker: one.core for one in crew}, list[list[float]]()
    for round in range(rounds):
        now = 10.0 * round
        if round == 2 and status is not None:
            entry = crew[0].core.give_slot(99, "host:99")
            assert entry is not None and entry.slot == 4
            cores[4] = ElasticCore(Members(limits(SLOTS), 4, crew[0].members.entries.values()), timeout_s=8.0)
            cores[4].members.declare(status, 2)
            cores[4].spread()
        if round == 6:
            cores.pop(4, None)
        for core in cores.values():
            core.tick(now)
        carry(cores, now)
        exchanges = [one.begin(round) for one in crew]
        for one, exchange in zip(crew, exchanges, strict=True):
            one.now = now
            one.x += torch.sin(3.0 * one.x + round)
            exchange.post()
        carry(cores, now)
        for step in range(1, 20):  # until those are given up who do not answer
            for core in cores.values():
                core.tick(now + 0.5 * step)
            carry(cores, now + 0.5 * step)
        for exchange in exchanges:
            assert exchange.advance()
            exchange.finish()
        history.append([float(value) for one in crew for t in (one.x, *leaves(one.s)) for value in t])
    assert {one.members.entries[4].status for one in crew} == {
        MemberStatus.LEFT if status is None else MemberStatus.SUSPECT
    }
    return history


def test_a_ghost_leaves_the_bits_of_all_others_as_they_are_while_it_lives_and_when_it_dies() -> None:
    assert trained(MemberStatus.GHOST) == trained(None)
    assert trained(MemberStatus.ALIVE) != trained(None), "as one does that takes part"


def test_a_ghost_keeps_its_slot_while_it_lives_and_frees_it_when_it_is_lost() -> None:
    ghost = SlotEntry(1, 1, 7, MemberStatus.GHOST, 0, "host:7")
    core = ElasticCore(
        Members(limits(2), 0, [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0, "host:9"), ghost]), timeout_s=8.0
    )
    assert core.give_slot(9, "host:9") is None
    core.lost(1)
    entry = core.give_slot(9, "host:9")
    assert entry is not None and (entry.slot, entry.incarnation) == (1, 2)
    own = Members(limits(2), 1, [ghost])
    own.merge([ghost._replace(status=MemberStatus.SUSPECT)])
    assert own.own.status is MemberStatus.GHOST and own.own.incarnation == 2, "one that lives says so"


def test_what_the_others_say_of_a_ghost() -> None:
    joins = SlotEntry(2, 1, 7, MemberStatus.JOINING, 4, "127.0.0.1:4000")
    ghost, alive = joins._replace(status=MemberStatus.GHOST), joins._replace(status=MemberStatus.ALIVE)
    views = [[*changes({2: a}, {2: b}, 0, 9, str)] for a, b in ((joins, ghost), (ghost, alive))]
    assert views == [
        ["worker 2 warms its inner optimizer as a ghost, of whom nobody hears yet"],
        ["worker 2 has joined, and takes part from round 5 on"],
    ]


def test_a_rehearsal_leaves_the_inner_optimizer_warm_and_nothing_else() -> None:
    config = resolve(tiny(workers=2, topology__name="complete"))
    task, method = task_of(config), config.in_rounds
    network = MemoryNetwork(2)
    donor, ghost = (
        Worker(Replica(i, config, task, torch.device("cpu")), method, network.transport(i)) for i in range(2)
    )
    donor.replica.x += 0.01
    state = {**donor.state(), "steps_taken": 4}
    assert not ghost.replica.optimizer.state_dict()["state"]
    for steps in (4, 6):
        ghost.rehearse(3, {**state, "steps_taken": steps})
    warm = ghost.replica.optimizer.state_dict()["state"]
    assert {int(one["step"]) for one in warm.values()} == {4}, "two local phases of two inner steps"
    ghost.restore({**state, "inner": None})
    assert torch.equal(ghost.replica.x, donor.replica.x) and ghost.replica.steps_taken == 4
    assert ghost.replica.optimizer.state_dict()["state"].keys() == warm.keys()
    ghost.restore(state)
    assert not ghost.replica.optimizer.state_dict()["state"], (
        "without a ghost's phases, it takes over the donor's, cold here"
    )


@pytest.mark.parametrize("status", MemberStatus)
def test_only_workers_that_live_and_count_are_in_the_topology_of_a_round(status: MemberStatus) -> None:
    members = Members(limits(2), 0, [SlotEntry(0, 0, 1, MemberStatus.ALIVE, 0), SlotEntry(1, 0, 2, status, 0)])
    assert (1 in members.alive(0)) == (status is MemberStatus.ALIVE)
    assert not members.alone, "it may come back"
    members.progress(1, members.limits.rounds)
    assert members.alone == (status is MemberStatus.LEFT)
