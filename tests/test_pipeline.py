"""Replicas in stages: the same model cut at slow links, and what its boundaries change."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer
from gossamer.boundaries import intk
from gossamer.errors import ConfigError, GossamerError
from gossamer.models import ModelConfig, build_model
from gossamer.models.llama import loss
from gossamer.models.stages import minimax, stages_of
from gossamer.record import checkpoint
from gossamer.run.config import digest, dump, parse
from gossamer.run.replica import Replica
from gossamer.run.settle import faults
from gossamer.run.task import task_of
from tiny import document, tiny

CUT = {"pipeline__stages": 2, "data__accumulate": 4}
AQSGD = {**CUT, "pipeline__forward": "aqsgd", "pipeline__backward": {"name": "intk", "bits": 8}, "data__windows": 8}


def replica(**overrides) -> Replica:
    config = tiny(**overrides)
    return Replica(0, config, task_of(config), torch.device("cpu"))


def trained(**overrides) -> Replica:
    one = replica(**overrides)
    one.train(0, 0, 2)
    return one


@pytest.mark.parametrize("cuts", [[1], [2], [1, 2]])
def test_stages_have_the_parameters_of_the_model_by_name_and_compute_its_logits(cuts):
    model = build_model(ModelConfig(size="0.2m"), 256, 16, seed=0)
    stages = stages_of(model, cuts)
    own = dict(model.named_parameters())
    found = [name for stage in stages for name, p in stage.named_parameters() if p is own[name]]
    assert sorted(found) == sorted(own)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    h = tokens
    for stage in stages:
        h = stage(h)
    assert torch.equal(h, model(tokens))


@pytest.mark.parametrize("stages", [2, 3])
def test_with_exact_boundaries_a_pipeline_is_the_model_to_the_last_bit(stages):
    split, whole = (
        trained(inner__clip=None, data__accumulate=4, **more) for more in ({"pipeline__stages": stages}, {})
    )  # fmt: skip
    assert torch.equal(split.x, whole.x)


def test_stages_clip_to_the_norm_of_all_their_gradients():
    one = replica(**CUT)
    assert one.staged is not None
    batch = one.task.data.batch(0, 0)
    one.staged.loss(batch, [0, 1]).backward()
    gradients = [p.grad.clone() for p in one.model.parameters() if p.grad is not None]
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    one.staged.clip(float(norm) / 3)
    for p, before in zip(one.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, before / 3, rtol=1e-4, atol=1e-9)


def test_what_crosses_a_boundary_is_what_the_next_stage_trains_on():
    one, other = replica(**CUT, pipeline__forward="tahquant", pipeline__backward="intk"), replica(**CUT)
    assert one.staged is not None and other.staged is not None
    batch = one.task.data.batch(0, 0)
    first, second = one.staged.stages
    h = first(batch[:, :-1])
    there, back = one.staged.boundaries[0]
    arrived = there.cross(h.detach(), [0, 1]).requires_grad_()
    logits = second(arrived)
    value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    value.backward()
    assert arrived.grad is not None
    h.backward(back.cross(arrived.grad, [0, 1]))
    by_hand = [p.grad.clone() for p in one.model.parameters() if p.grad is not None]
    one.model.zero_grad()
    lossy = one.staged.loss(batch, [0, 1])
    lossy.backward()
    assert torch.equal(lossy, value) and lossy != loss(one.model, batch)
    assert all(torch.equal(p.grad, g) for p, g in zip(one.model.parameters(), by_hand, strict=True))  # pyright: ignore[reportArgumentType]


def test_a_simulation_counts_what_crossed_each_boundary(tmp_path):
    config = tiny(
        **CUT, pipeline__forward="tahquant", pipeline__backward="intk", run__steps=4, run__checkpoint_every=0, workers=2,
        pipeline__cuts=[1],
    )  # fmt: skip
    gossamer.simulate(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained_lines = [line for line in lines if line["kind"] == "train"]
    assert len(trained_lines) == 4
    for line in trained_lines:
        ((there, back),) = line["boundary_bytes"]
        assert back == 2 * 4 * intk().most_bytes((2, 16, 64))
        assert 2 * 4 * (2 * 16 * 64 * 4.3 / 8) < there < 2 * 4 * (2 * 16 * 64 * 4.5 / 8 + 8)


@pytest.mark.parametrize(
    "overrides", [AQSGD, {**CUT, "pipeline__forward": "tahquant", "rule__name": "diloco"}], ids=str
)
def test_a_pipeline_that_is_resumed_has_the_bits_of_one_that_never_stopped(overrides, tmp_path):
    config = tiny(**{"topology__name": "complete", **overrides}, run__steps=8, workers=2)
    whole = gossamer.simulate(config, tmp_path / "whole")
    gossamer.simulate(config, tmp_path / "parts", until=2)
    resumed = gossamer.simulate(config, tmp_path / "parts", resume=True)
    assert resumed.loss == whole.loss
    for i in range(2):
        one, other = (
            checkpoint.load(tmp_path / name / "checkpoints", 4, i, digest(config)) for name in ("whole", "parts")
        )
        assert torch.equal(one["x"], other["x"])
        assert all(map(torch.equal, one["boundaries"][0][0]["messages"], other["boundaries"][0][0]["messages"]))


def test_fixed_windows_come_again_in_every_epoch_in_another_order():
    data = task_of(tiny(data__windows=6)).data
    batches = [data.batch(1, k) for k in range(6)]
    ids = [data.samples(1, k) for k in range(6)]  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(itertools.chain(*ids[:3])) == sorted(itertools.chain(*ids[3:])) == [*range(6)]
    assert ids[:3] != ids[3:]
    by_id: dict[int, torch.Tensor] = {}
    for rows, batch in zip(ids, batches, strict=True):
        for number, row in zip(rows, batch, strict=True):
            assert torch.equal(by_id.setdefault(number, row), row)
    assert len({tuple(row.tolist()) for row in by_id.values()}) == 6


@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=8),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=3),
)
def test_the_slowest_stage_of_minimax_is_as_fast_as_that_of_any_other_split(costs, speeds):
    def slowest(cuts):
        stages = itertools.pairwise([0, *cuts, len(costs)])
        return max(sum(costs[a:b]) / speed for (a, b), speed in zip(stages, speeds, strict=True))

    every = itertools.combinations(range(1, len(costs)), len(speeds) - 1)
    assert slowest(minimax(costs, speeds)) == pytest.approx(min(map(slowest, every)))


def test_minimax_keeps_to_the_layers_that_fit_a_stage():
    assert minimax([1.0] * 6, [10.0, 1.0]) == (5,)
    assert minimax([1.0] * 6, [10.0, 1.0], [4, 4]) == (4,)
    with pytest.raises(ConfigError, match=r"2 stages have room for \[2, 3\] layers, and the model has 6"):
        minimax([1.0] * 6, [1.0, 1.0], [2, 3])


BAD = {
    "more stages than layers": ({"pipeline__stages": 4, "data__accumulate": 4}, "pipeline.stages is 4 and the model has 3"),
    "fewer micro-batches": ({"pipeline__stages": 2}, "data.accumulate is 1: with fewer micro-batches than stages"),
    "tile": ({**CUT, "pipeline__forward": {"name": "tahquant", "tile": 128}}, "128 channels at a time, which does not divide"),
    "group": ({**CUT, "pipeline__backward": {"name": "intk", "group": 48}}, "48 channels at a time, which does not divide"),
    "aqsgd on text that is seen once": ({**CUT, "pipeline__forward": "aqsgd"}, "data.windows is not set"),
    "aqsgd backward": ({**CUT, "data__windows": 8, "pipeline__backward": "aqsgd"}, "gradients do not settle"),
    "a boundary without stages": ({"pipeline__forward": "cast"}, "pipeline.stages is 1, which has no boundary"),
    "cuts": ({**CUT, "pipeline__cuts": [1, 2]}, "pipeline.cuts is [1, 2] for 2 stages; give 1 cuts"),
    "a cut beyond": ({**CUT, "pipeline__cuts": [3]}, "pipeline.cuts is [3], but the model has 3 layers"),
    "tied": ({**CUT, "model__tie_embeddings": True}, "model.tie_embeddings is true"),
    "dropout": ({**CUT, "model__dropout": 0.1}, "model.dropout is 0.1"),
    "own model": ({**CUT, "model__size": "mine:model"}, "model.size is 'mine:model', but only the built-in model"),
    "unknown": ({**CUT, "pipeline__forward": "tahqant"}, "did you mean 'tahquant'"),
    "option": ({**CUT, "pipeline__forward": {"name": "tahquant", "tiles": 64}}, "did you mean 'tile'"),
    "own codec": ({**CUT, "pipeline__forward": "mine:codec"}, "only Gossamer's own boundary codecs"),
    "windows of a stream": ({"data__windows": 8, "data__source": "hf:some"}, "only text in files has fixed windows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_a_pipeline_is_refused_in_a_sentence(name):
    overrides, said = BAD[name]
    with pytest.raises(GossamerError) as caught:
        tiny(**overrides)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_file_says_its_pipeline_and_one_without_stages_has_the_digest_it_had():
    config = tiny(**CUT, pipeline__forward={"name": "tahquant", "tile": 32})
    assert parse(document(**CUT, pipeline__forward={"name": "tahquant", "tile": 32})) == config
    assert 'name = "tahquant"' in dump(config) and "tile = 32" in dump(config)
    assert "pipeline" not in dump(tiny())
    assert digest(tiny()) != digest(config) != digest(tiny(**CUT))
    again = tiny(**CUT, pipeline__forward="tahquant")
    assert faults(again) == [] and "runs whole replicas" in faults(again, real=True)[0]
