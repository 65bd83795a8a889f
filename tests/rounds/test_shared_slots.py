"""Slots that the workers alive share, so that the global batch of a step stays the same: `data.constant_batch`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faulty_network.network import check_faults
from gossamer.layout import attach, layout_of
from gossamer.record import checkpoint
from gossamer.record.logs.outcomes import Begun, OutcomeWriter, RoundOutcome
from gossamer.rounds.sharing import Sharing, first_sharing, shares
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import digest, dump
from gossamer.run.replay.elastic import replay_elastic
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.task import task_of
from gossamer.topologies import make_topology
from tiny import tiny

SGD = {
    "inner__optimizer": "sgd",
    "inner__lr": 0.1,
    "inner__momentum": 0.0,
    "inner__weight_decay": 0.0,
    "inner__schedule": "constant",
    "inner__warmup_steps": 0,
}
NOBODY = frozenset[int]()
Some = tuple[int, frozenset[int]]
_some = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.frozensets(st.integers(0, n - 1), min_size=1)))


@given(_some)
def test_each_slot_is_trained_by_one_living_worker_its_own_first_and_no_worker_has_two_more_than_another(
    some: Some,
) -> None:
    n, present = some
    own = shares(n, present)
    assert sorted(slot for slots in own for slot in slots) == [*range(n)]
    assert {worker for worker in range(n) if own[worker]} == present and all(i in own[i] for i in present)
    assert max(map(len, own)) - min(len(own[i]) for i in present) <= 1


@given(_some, st.data())
def test_the_weights_of_a_mean_are_the_slots_that_each_has_trained(some: Some, data: st.DataObject) -> None:
    n, present = some
    workers = data.draw(st.frozensets(st.integers(0, n - 1), min_size=1).filter(present.intersection))
    sharing = first_sharing(n)._replace(present=present)
    mixing = make_topology("complete", n, 0).mixing(0, workers)
    rows = sharing.weighed(mixing, workers).rows
    trained = {i: len(sharing.slots_of(i)) for i in workers}
    for i in workers:
        assert rows[i] == rows[min(workers)] and [j for j, _ in rows[i]] == sorted(workers)
        assert dict(rows[i]) == pytest.approx({j: trained[j] / sum(trained.values()) for j in workers})
    assert sharing.weighed(mixing, workers) == mixing or len(set(trained.values())) > 1


@given(st.integers(1, 6), st.lists(st.tuples(st.data(), st.integers(1, 3)), max_size=6))
def test_a_slot_continues_after_the_steps_that_are_part_of_a_mean(
    n: int, rounds: list[tuple[st.DataObject, int]]
) -> None:
    sharing, behind = first_sharing(n), [0] * n
    for data, taken in rounds:
        sharing = sharing.begun()
        workers = data.draw(st.frozensets(st.integers(0, n - 1), min_size=1))
        places = {i: sharing.places(i) for i in range(n)}
        sharing = sharing.closed(workers, taken)
        for i in workers:
            for slot in sharing.slots_of(i):
                assert places[i][slot] == behind[slot]
                behind[slot] += taken
        assert [*sharing.steps] == behind and sharing.restored(sharing.state()).begun() == sharing.begun()


@pytest.mark.parametrize(
    "state", [None, [], [[0], [1]], [[], [0, 0]], [[2], [0, 0]], [[0], [0, -1]], [[0], [0, 1.5]], [[True], [0, 0]]]
)
def test_a_state_that_is_none_is_refused(state: object) -> None:
    with pytest.raises(ValueError, match="the slots were shared as"):
        first_sharing(2).restored(state)


def test_workers_that_forget_the_participants_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: Sharing) -> Sharing:
        return Sharing(frozenset(range(len(self.steps))), self.steps, self.steps, self.last)

    monkeypatch.setattr(Sharing, "begun", forgets)
    with pytest.raises(AssertionError, match="shares the slots as"):
        [check_faults(seed=seed) for seed in range(3, 80, 8)]


def test_workers_that_count_the_slots_of_one_that_died_in_the_round_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Sharing.closed
    monkeypatch.setattr(
        Sharing, "closed", lambda self, workers, taken: honest(self, None, taken)._replace(last=workers)
    )
    with pytest.raises(AssertionError, match="counts the steps of slots"):
        [check_faults(seed=seed) for seed in range(3, 80, 8)]


@pytest.mark.full
def test_in_calm_nothing_changes_to_the_last_bit(tmp_path: Path) -> None:
    config = tiny(rule__name="diloco", topology__name="complete", run__elastic=True, schedule__fragments=2)
    shared = replace(config, data=replace(config.data, constant_batch=True))
    plain, other = simulate(config, tmp_path / "plain"), simulate(shared, tmp_path / "shared")
    assert plain.training["loss"] == other.training["loss"]
    simulate(shared, tmp_path / "half", until=3)
    simulate(shared, tmp_path / "half", resume=True)
    for worker in range(3):
        x, y, z = (
            checkpoint.load(tmp_path / name / "checkpoints", 6, worker, digest(one))["x"]
            for name, one in (("plain", config), ("shared", shared), ("half", shared))
        )
        assert torch.equal(x, y) and torch.equal(y, z)


def test_with_one_local_step_of_sgd_the_workers_left_take_the_steps_of_all_slots(tmp_path: Path) -> None:
    config = tiny(
        workers=4,
        rule__name="local_sgd",
        topology__name="complete",
        run__elastic=True,
        run__local_steps=1,
        run__steps=5,
        run__eval_every=0,
        data__constant_batch=True,
        data__accumulate=2,
        **SGD,
    )
    lives = {slot: [(Begun(0, 0, slot, 0, 0), 0, 5)] for slot in range(3)}
    lives[3] = [(Begun(0, 0, 3, 0, 0), 0, 1), (Begun(3, 3, 0, 2, 1), 3, 5)]  # it dies, and another joins
    steps = [1, 1, 2, 3, 4]  # of slot 3, after each round: none in round 1, and worker 0's in rounds 2 and 3
    for slot, some in lives.items():
        with OutcomeWriter(tmp_path / "real", slot) as log:
            for begun, first, end in some:
                log.write(begun)
                for r in range(first, end):
                    alive = None if r in (0, 3, 4) else frozenset({0, 1, 2})
                    log.write(RoundOutcome(r, alive, NOBODY, NOBODY, r + 1 if slot < 3 else steps[r]))
    (tmp_path / "real" / "run.toml").write_text(dump(config))
    replay_elastic(resolve(config, real=True), tmp_path / "again", tmp_path / "real")

    task = task_of(settings_of(config))
    model = task.model()
    x = attach(model, layout_of(model))
    at = [[(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (1, 1), (2, 1)]]
    at += [[(0, r), (1, r), (2, r), (3, r - 1)] for r in (2, 3, 4)]
    for trained in at:
        model.zero_grad()
        for slot, step in trained:
            for number in (2 * step, 2 * step + 1):
                (task.loss(model, task.data.batch(slot, number)) / (2 * len(trained))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    for worker in range(4):
        saved = checkpoint.load(tmp_path / "again" / "checkpoints", 5, worker, digest(config))
        torch.testing.assert_close(saved["x"], x, rtol=1e-5, atol=1e-6)
        assert saved["sharing"] == [[0, 1, 2, 3], [5, 5, 5, 4]]
