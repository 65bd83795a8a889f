"""Workers that take over another's state: what is theirs of it, and what is not."""

import contextlib
import socket
import threading
import time

import pytest
import torch

from gossamer.errors import PeerError
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.folder import read_metrics
from gossamer.record.logs.outcomes import Begun, Ended, OutcomeWriter, RoundOutcome
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.elastic import elastic_rounds as elastic
from gossamer.run.participant.seat import Seat
from gossamer.run.replay.elastic import replay_elastic
from gossamer.run.simulated.rounds import train_together
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.run.worker.worker import Worker
from gossamer.stop_signals import Asked
from gossamer.transport.elastic import newcomer
from gossamer.transport.elastic.members import Members, MemberStatus, SlotEntry
from gossamer.transport.elastic.transport import ElasticTransport
from gossamer.transport.memory import MemoryNetwork
from gossamer.transport.sockets.connection import Endpoint
from gossamer.tree import leaves
from tiny import limits, tiny

FEEDBACK = [
    {"rule__name": "sparseloco", "codec__name": "topk2bit"},
    {"rule__name": "sparseloco", "codec__name": "topk2bit", "run__weigh_steps": True, "run__local_steps": [2, 1, 2]},
    {"rule__name": "dilocox", "rule__form": "blocking", "rule__rank": 2, "codec__name": "int4"},
]
IDS = ["sparseloco", "weighted", "dilocox"]
NOBODY = frozenset[int]()


def run_of(**settings):
    return tiny(topology__name="complete", run__elastic=True, run__eval_every=0, **settings)


@pytest.mark.parametrize("settings", FEEDBACK, ids=IDS)
def test_the_error_that_a_worker_has_not_sent_is_not_sent_by_who_takes_over_its_state(settings):
    config = resolve(run_of(**settings))
    task, method, network = task_of(config), config.in_rounds, MemoryNetwork(3)
    crew = [Worker(Replica(i, config, task, torch.device("cpu")), method, network.transport(i)) for i in range(3)]
    train_together(crew, 0, lambda act, some: [act(one) for one in some])
    state = crew[0].state()
    (donor,), unsent = crew[0].loop.fragments, method.rule.unsent
    before = [leaf.clone() for leaf in leaves(donor.part.s)]
    assert unsent(donor.part.s).any()
    crew[1].take_over(state)
    (own,) = crew[1].loop.fragments
    assert not unsent(own.part.s).any() and torch.equal(own.part.x, donor.part.x)
    kept = [leaf is not unsent(own.part.s) for leaf in leaves(own.part.s)]
    assert kept.count(False) == 1
    pairs = zip(leaves(own.part.s), before, kept, strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs, same in pairs if same)
    crew[2].restore(state)
    assert torch.equal(unsent(crew[2].loop.fragments[0].part.s), unsent(donor.part.s)), "as after its own checkpoint"


@pytest.mark.parametrize("settings", [FEEDBACK[0], FEEDBACK[2]], ids=["sparseloco", "dilocox"])
def test_with_error_feedback_workers_stay_equal_when_one_dies_and_another_joins(settings, tmp_path):
    config = run_of(**settings)
    result = replay_with_a_newcomer(config, tmp_path)
    assert result.loss < 6.0
    store = tmp_path / "again" / "checkpoints"
    saved = [checkpoint.load(store, 6, worker, digest(config))["x"] for worker in range(3)]
    assert torch.equal(saved[0], saved[1]) and torch.equal(saved[0], saved[2])


def test_the_lines_of_a_newcomer_have_the_steps_of_its_model_and_not_those_of_its_slot(tmp_path):
    replay_with_a_newcomer(run_of(**FEEDBACK[0]), tmp_path)
    lines = [line for line in read_metrics(tmp_path / "again") if line["kind"] == "train"]
    assert {(line["round"], line["worker"]) for line in lines} >= {(1, 2), (4, 2), (5, 2), (5, 0)}
    assert all(line["step"] == 2 * (line["round"] + 1) for line in lines)
    assert all(line["tokens"] == 2 * 16 * line["step"] for line in lines)


@pytest.mark.parametrize("rule", ["gasloc", "diloco"])
def test_who_was_left_out_of_the_last_round_ends_with_the_state_of_who_was_not(rule, tmp_path):
    config = run_of(rule__name=rule)
    result = replay_with_a_newcomer(config, tmp_path, round=6)
    saved = [checkpoint.load(tmp_path / "again" / "checkpoints", 6, slot, digest(config))["x"] for slot in range(3)]
    assert result.loss < 6.0 and torch.equal(saved[2], saved[0])


def replay_with_a_newcomer(config, tmp_path, round=4):
    """A run in which worker 2 is killed after two rounds, and another takes its slot from a round on."""
    lives = {slot: [(Begun(0, 0, slot, 0, 0), 0, 6)] for slot in range(2)}
    lives[2] = [(Begun(0, 0, 2, 0, 0), 0, 2), (Begun(round, round, 0, 4, 1), round, 6)]
    for slot, some in lives.items():
        with OutcomeWriter(tmp_path / "real", slot) as log:
            for begun, first, end in some:
                log.write(begun)
                for k, r in enumerate(range(first, end)):
                    alive = frozenset({0, 1}) if r in range(2, round) else None
                    log.write(RoundOutcome(r, alive, NOBODY, NOBODY, begun.steps + 2 * (k + 1)))
            if end == 6:
                log.write(Ended(6, "finished"))
    (tmp_path / "real" / "run.toml").write_text(dump(config))
    return replay_elastic(resolve(config, real=True), tmp_path / "again", tmp_path / "real")


def test_who_asks_for_a_state_while_a_worker_starts_up_gets_none_and_disturbs_nothing(monkeypatch, tmp_path):
    config, asked = resolve(run_of(run__timeout_s=0.5), real=True), Asked()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    endpoint = Endpoint(listener, 77, b"a secret", config.run.timeout_s)
    members = Members(limits(3), 0, [SlotEntry(0, 0, 5, MemberStatus.ALIVE, 0, address)])
    answers: list[object] = []

    def ask() -> None:
        with contextlib.suppress(PeerError, OSError):
            place = newcomer.Applicant(7, "127.0.0.1:1")
            answers.append(
                newcomer.ask(address, endpoint.secret, place, run=endpoint.run, limits=limits(3), timeout_s=20)
            )
        asked.set()

    def slowly(*args, **options):
        transport = ElasticTransport(*args, **options)
        threading.Thread(target=ask).start()
        time.sleep(1)  # in which it is asked
        return transport

    monkeypatch.setattr(elastic, "ElasticTransport", slowly)
    seat = Seat(members, endpoint, Lineage(config.digest), 0, 0, goes_on=False)
    transport = elastic.ElasticRounds(config, tmp_path, task_of(config), seat, Asked()).connect()
    assert asked.wait(20) and not answers
    transport.close()
