"""A stage that is lost: it continues from its neighbours or from a peer, in a simulation; `test_stages` has real processes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gossamer.record.folder import read_metrics
from gossamer.report.reading.runs import read_runs
from gossamer.run.replay.audit import audit
from gossamer.run.simulated.rounds import Rounds
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.stages.recovery import mean_of_neighbours, recover_all, recover_own, stand_in
from gossamer.run.worker.worker import Worker
from gossamer.transport.memory import MemoryNetwork
from gossamer.transport.processes.pipe import Pipe
from gossamer.tree import leaves
from tiny import tiny

THREE: dict[str, Any] = {
    "workers": 1,
    "model__layers": 5,
    "pipeline__stages": 3,
    "pipeline__cuts": [1, 3],
    "data__accumulate": 3,
    "run__steps": 3,
    "run__local_steps": 1,
    "run__checkpoint_every": 1,
    "run__eval_every": 0,
    "rule__name": "diloco",
    "topology__name": "complete",
}
"""Of five layers the first stage has one, the others two each."""
GOSSIP: dict[str, Any] = {"workers": 2, "rule__name": "gasloc", "topology__name": "random"}


def lost(worker: int = 0, **more: Any) -> dict[str, Any]:
    return {"pipeline__lost": [{"worker": worker, "stage": 1, "after": 2, **more}]}


def workers_of(run: Any) -> list[Worker]:
    return cast(Rounds, run._engine).workers


def named(worker: Worker, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """A vector of a worker in one fragment, by parameter."""
    return {leaf.name: vector[leaf.start : leaf.stop].clone() for leaf in worker.replica.layout.leaves}


def middle(name: str) -> bool:
    return name.startswith(("model.layers.1.", "model.layers.2."))


def test_a_lost_stage_is_the_mean_of_its_neighbours_weighted_by_the_squared_norms_of_their_gradients():
    before, behind = torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])
    assert torch.equal(mean_of_neighbours(before, behind, (1.0, 3.0)), torch.tensor([4.0, -1.0]))
    assert torch.equal(mean_of_neighbours(before, behind, (0.0, 3.0)), torch.tensor([3.0, 0.0])), "one is not known"
    assert torch.equal(mean_of_neighbours(torch.tensor([7]), torch.tensor([7]), (1.0, 3.0)), torch.tensor([7]))


def test_one_worker_continues_from_its_neighbours_layer_by_layer_and_a_new_inner_optimizer(tmp_path):
    run = simulate(tiny(**THREE, **lost()), tmp_path, until=2)
    (worker,) = workers_of(run)
    state, squares = worker.loop.fragments[0].part.s, cast(Any, worker.replica.staged).squares()
    vectors = (worker.replica.x, state.anchor, state.b)
    was = [named(worker, vector) for vector in vectors]
    p = dict(worker.replica.model.named_parameters())
    assert squares[0] == pytest.approx(
        sum(float(q.grad.square().sum()) for n, q in p.items() if n.startswith(("model.layers.0.", "model.embed")))
    )
    recover_all([worker], 2)
    share = squares[0] / (squares[0] + squares[3])
    for old, vector in zip(was, vectors, strict=True):
        for name, value in named(worker, vector).items():
            first, last = (stand_in(name, (1, 3), one) if middle(name) else name for one in ((0, 1), (3, 5)))
            torch.testing.assert_close(value, share * old[first] + (1 - share) * old[last])
            assert middle(name) or torch.equal(value, old[name])
    assert {name for name, q in p.items() if q not in worker.replica.optimizer.state} == set(filter(middle, p))


def test_a_run_that_loses_stages_says_so_and_is_resumed_to_the_bits_of_one_that_never_stopped(tmp_path):
    more = {
        "run__steps": 6,
        "run__local_steps": 2,
        "run__checkpoint_every": 2,
        "schedule__fragments": 2,
        "inner__optimizer": "muon",
        "pipeline__cuts": [2, 4],
        "model__layers": 6,
    }
    two = [{"worker": 0, "stage": 1, "after": 1}, {"worker": 1, "stage": 1, "after": 2, "source": "neighbours"}]
    config = tiny(**{**THREE, **GOSSIP, **more, "pipeline__lost": two, "record__hash": True})
    whole = simulate(config, tmp_path / "whole")
    simulate(config, tmp_path / "part", until=2)
    part = simulate(config, tmp_path / "part", resume=True)
    for one, other in zip(workers_of(whole), workers_of(part), strict=True):
        assert torch.equal(one.replica.x, other.replica.x)
    assert audit(tmp_path / "part", rounds=(2, 2)).difference is None
    lines = [line for line in read_metrics(tmp_path / "part") if "recovered" in line]
    recovered = [(line["round"], line["worker"], line["recovered"]) for line in lines]
    assert recovered == [(1, 0, {"1": "worker 1"}), (2, 1, {"1": "neighbours"})]
    (data,) = read_runs({"part": tmp_path / "part"}, {})
    assert data.branches[1] == "before round 3: stage 1 of worker 1 was lost, and went on from neighbours"


def test_with_a_peer_whose_parameters_are_the_same_nothing_but_the_inner_optimizer_is_lost(tmp_path):
    run = simulate(tiny(**{**THREE, "workers": 2}, **lost()), tmp_path, until=2)
    one, other = workers_of(run)
    x = one.replica.x.clone()
    recover_all([one, other], 2)
    assert torch.equal(one.replica.x, x) and torch.equal(other.replica.x, x)
    there = [len(cast(Any, worker.replica.optimizer).state) for worker in (one, other)]
    assert there[0] == there[1] - sum(middle(name) for name, _ in one.replica.model.named_parameters())


def test_a_process_of_a_peer_gives_what_it_has_of_the_stage_but_for_errors_that_it_has_still_to_send(tmp_path):
    config = tiny(**{**THREE, "workers": 2, "codec__name": "int8", "rule__error_feedback": {}}, **lost())
    ours = workers_of(simulate(config, tmp_path, until=2))
    for tensor in (ours[0].replica.x, *leaves(ours[0].loop.state)):
        tensor.zero_()  # as in a process that begins without a checkpoint
    network, pipe = MemoryNetwork(2), cast(Pipe, SimpleNamespace(part=1))
    for worker in (ours[1], ours[0]):  # who gives waits for nobody here
        recover_own(worker, network.transport(worker.index), pipe, 2)
    setup = ours[1].loop.fragments[0]
    vectors = [(one.replica.x, *leaves(one.loop.state)) for one in ours]
    for own, given in zip(*vectors, strict=True):
        error = given is cast(Any, setup.rule).unsent(setup.part.s)
        found, was = (named(ours[0], vector) for vector in (own, given))
        for name in filter(middle, found):
            assert torch.equal(found[name], torch.zeros_like(was[name]) if error else was[name])
