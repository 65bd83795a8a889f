"""Workers that take over another's state: what is theirs of it, and what is not."""

import contextlib
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gossamer.errors import CheckpointError, PeerError
from gossamer.record import checkpoint
from gossamer.record.checkpoint import Lineage
from gossamer.record.folder import read_metrics
from gossamer.record.logs.outcomes import Begun, Ended, OutcomeWriter, RoundOutcome
from gossamer.record.packed import packed, unpacked
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.elastic import elastic_rounds as elastic
from gossamer.run.participant.rendezvous import RendezvousResult
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


SPOILT = {
    "no dict": lambda state: [1, 2],
    "no line": lambda state: {key: one for key, one in state.items() if key != "line"},
    "a line that is no number": lambda state: {**state, "line": "7"},
    "a line out of bounds": lambda state: {**state, "line": 1 << 64},
    "no parameters": lambda state: {key: one for key, one in state.items() if key != "x"},
    "parameters of another shape": lambda state: {**state, "x": state["x"][1:]},
    "parameters of another dtype": lambda state: {**state, "x": state["x"].double()},
    "parameters that are not finite": lambda state: {**state, "x": state["x"] / 0},
    "outer state of another shape": lambda state: {**state, "outer": [one[1:] for one in state["outer"]]},
    "no list of outer state": lambda state: {**state, "outer": 3},
    "no inner optimizer": lambda state: {key: one for key, one in state.items() if key != "inner"},
    "an inner optimizer that is no dict": lambda state: {**state, "inner": 3},
    "groups of another optimizer": lambda state: {**state, "inner": {**state["inner"], "param_groups": []}},
    "an option of another run": lambda state: with_option(state, "weight_decay", 5.0),
    "an option below zero": lambda state: with_option(state, "lr", -1e-3),
    "a group more": lambda state: with_inner(state, param_groups=2 * state["inner"]["param_groups"]),
    "an option that is not finite": lambda state: with_option(state, "lr", float("nan")),
    "moments of another shape": lambda state: with_moment(state, "exp_avg", torch.zeros(3)),
    "moments of another dtype": lambda state: with_moment(state, "exp_avg", torch.zeros((), dtype=torch.float64)),
    "moments that AdamW has not": lambda state: with_moment(state, "exp_avg_cube", torch.zeros(3)),
    "no second moments": lambda state: with_moment(state, "exp_avg_sq", None),
    "moments that are no numbers": lambda state: with_moment(state, "exp_avg", "x"),
    "moments that are not finite": lambda state: with_moment(state, "exp_avg", torch.tensor(torch.nan)),
    "second moments below zero": lambda state: with_moment(state, "exp_avg_sq", torch.tensor(-1.0)),
    "steps below zero": lambda state: with_moment(state, "step", torch.tensor(-1.0)),
    "moments of no parameter": lambda state: with_inner(state, state={999: {}}),
    "moments before the first parameter": lambda state: with_inner(
        state, state={-1: state["inner"]["state"][max(state["inner"]["state"])]}
    ),
}
"""What a donor may hand over in place of a state."""


def with_inner(given, **parts):
    return {**given, "inner": {**given["inner"], **parts}}


def with_option(state, name, value):
    return with_inner(state, param_groups=[{**group, name: value} for group in state["inner"]["param_groups"]])


def with_moment(state, name, value):
    """Its tensors of this name with others in their place, in their shape where that is a scalar; without them for None."""

    def put(one):
        fits = isinstance(value, torch.Tensor) and value.ndim == 0
        rest = {key: kept for key, kept in one.items() if key != name}
        return rest if value is None else {**rest, name: value.expand(one[name].shape).clone() if fits else value}

    return with_inner(state, state={k: put(one) for k, one in state["inner"]["state"].items()})


@pytest.fixture(scope="module")
def trained():
    """Two workers of an elastic mean after a round, and a third that has not trained."""
    config = resolve(run_of(rule__name="diloco"), real=True)
    task, method, network = task_of(config), config.in_rounds, MemoryNetwork(3)
    crew = [Worker(Replica(i, config, task, torch.device("cpu")), method, network.transport(i)) for i in range(3)]
    train_together(crew, 0, lambda act, some: [act(one) for one in some])
    fresh = Worker(Replica(1, config, task, torch.device("cpu")), method, MemoryNetwork(3).transport(1))
    return crew[0], crew[1], fresh


@pytest.mark.parametrize("spoilt", SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize("warm", [True, False], ids=["trained", "new"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(trained, spoilt, warm):
    donor, *others = trained
    receiver = others[0 if warm else 1]
    lives = SimpleNamespace(_fresh=receiver.replica.task.data.state(), _worker=receiver)
    accepted = partial(elastic.ElasticRounds._accepted, lives, None, steps=4)
    sound = unpacked(packed({**donor.state(), "line": 7, "under_way": []}))
    assert accepted(sound)["steps_taken"] == 4
    before = packed(receiver.state())
    with pytest.raises(CheckpointError) as error:
        accepted(spoilt(sound))
    assert "remove the checkpoint" not in str(error.value)
    assert packed(receiver.state()) == before


def run_of(**settings):
    return tiny(topology__name="complete", run__elastic=True, run__eval_every=0, **settings)


@pytest.mark.parametrize("settings", FEEDBACK, ids=IDS)
def test_the_error_that_a_worker_has_not_sent_is_not_sent_by_its_successor(settings):
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


@pytest.mark.full
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
def test_a_worker_left_out_of_the_last_round_ends_with_the_state_of_a_participant(rule, tmp_path):
    config = run_of(rule__name=rule)
    result = replay_with_a_newcomer(config, tmp_path, round=6)
    saved = [checkpoint.load(tmp_path / "again" / "checkpoints", 6, slot, digest(config))["x"] for slot in range(3)]
    assert result.loss < 6.0 and torch.equal(saved[2], saved[0])


def test_a_worker_that_needs_longer_for_a_state_than_a_round_lasts_says_why_it_takes_part_in_none(caplog):
    slow = SimpleNamespace(
        slot=2, _closes=True, _taken_in_row=0, transport=SimpleNamespace(core=SimpleNamespace(limit_s=7.0))
    )
    for _ in range(9):
        elastic.ElasticRounds._say_if_slow(slow, 40.0)
    why = "the last one took 40.0 s, and they wait 7.0 s for it in every other round; give it a faster link, or set"
    sentences = [f"worker 2 has taken a state {count} times, and each time" for count in (4, 8)]
    assert [record.message[: len(sentences[0])] for record in caplog.records] == sentences and caplog.text.count(
        why
    ) == 2


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


def test_a_request_for_a_state_while_a_worker_starts_up_gets_none_and_disturbs_nothing(monkeypatch, tmp_path):
    config, asked = resolve(run_of(run__timeout_s=0.5), real=True), Asked()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    endpoint = Endpoint(listener, 77, b"a secret", config.loop.timeout_s)
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
    rendezvous = RendezvousResult(members, endpoint, Lineage(config.digest), 0, 0, goes_on=False)
    transport = elastic.ElasticRounds(config, tmp_path, task_of(config), rendezvous, Asked()).connect()
    assert asked.wait(20) and not answers
    transport.close()
