"""Replicas in stages: the same model cut at slow links, and what its boundaries change."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer
from gossamer.boundaries import intk
from gossamer.errors import ConfigError, GossamerError
from gossamer.models import ModelConfig, build_model
from gossamer.models.bottleneck import ResidualBottleneck
from gossamer.models.llama import loss
from gossamer.models.sizes import BottleneckConfig, parameter_shapes
from gossamer.models.stages import minimax, stages_of
from gossamer.record import checkpoint
from gossamer.run.bookkeeping.evaluate import publish
from gossamer.run.config.document import with_settings
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.pipeline import cuts_of
from gossamer.run.config.resolve import run_faults, settings_of
from gossamer.run.config.run_file import digest, dump, parse
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.stages.timing import shares_of
from gossamer.run.worker.task import task_of
from gossamer.settings.schema import parse_toml
from tiny import preset as tiny
from tiny import preset_document as document

CUT = {"pipeline__stages": 2, "data__accumulate": 4}
AQSGD = {**CUT, "pipeline__forward": "aqsgd", "pipeline__backward": {"name": "intk", "bits": 8}, "data__windows": 8}


def lost(*more: int, worker: int = 0, stage: int = 1, source: str = "neighbours") -> dict[str, Any]:
    """A run of four stages of which one is lost after a round, and others with it."""
    found = [{"worker": worker, "stage": k, "after": 1, "source": source} for k in (stage, *more)]
    return {"pipeline__stages": 4, "model__layers": 4, "data__accumulate": 4, "pipeline__lost": found}


def replica(**overrides) -> Replica:
    config = tiny(**overrides)
    return Replica(0, settings_of(config), task_of(settings_of(config)), torch.device("cpu"))


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
        h = stage(h, tokens)
    assert torch.equal(h, model(tokens))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 4), (3, 4)])
def test_with_exact_boundaries_and_a_power_of_two_of_micro_batches_a_pipeline_is_the_model_to_the_last_bit(
    stages, micro_batches
):
    split, whole = (
        trained(inner__clip=None, data__accumulate=micro_batches, **more) for more in ({"pipeline__stages": stages}, {})
    )
    assert torch.equal(split.x, whole.x)


@pytest.mark.parametrize("stages", [2, 3])
def test_with_three_micro_batches_its_gradient_is_that_of_the_model_to_a_millionth_of_the_norm(stages):
    def gradient(**more):
        one = replica(inner__clip=None, data__accumulate=3, **more)
        one.train(0, 0, 1)
        return torch.cat([p.grad.flatten() for p in one.model.parameters() if p.grad is not None]).double()

    split, whole = gradient(pipeline__stages=stages), gradient()
    assert split.shape == whole.shape and (split - whole).norm() <= 1e-6 * whole.norm() and whole.norm() > 0


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
    h = first(batch[:, :-1], batch[:, :-1])
    there, back = one.staged.boundaries[0]
    arrived = there.cross(h.detach(), [0, 1]).requires_grad_()
    logits = second(arrived, batch[:, :-1])
    value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    value.backward()
    assert arrived.grad is not None
    h.backward(back.cross(arrived.grad, [0, 1]))
    by_hand = [p.grad.clone() for p in one.model.parameters() if p.grad is not None]
    one.model.zero_grad()
    lossy = one.staged.loss(batch, [0, 1])
    lossy.backward()
    assert torch.equal(lossy, value) and lossy != loss(one.model, batch)
    assert all(torch.equal(p.grad, g) for p, g in zip(one.model.parameters(), by_hand, strict=True))


def test_a_simulation_counts_what_crossed_each_boundary(tmp_path):
    config = tiny(
        **CUT,
        pipeline__forward="tahquant",
        pipeline__backward="intk",
        run__steps=4,
        run__checkpoint_every=0,
        workers=2,
        pipeline__cuts=[1],
    )
    gossamer.simulate(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained_lines = [line for line in lines if line["kind"] == "train"]
    assert len(trained_lines) == 4
    for line in trained_lines:
        ((there, back),) = line["boundary_bytes"]
        assert back == 2 * 4 * intk().most_bytes((2, 16, 64))
        assert 2 * 4 * (2 * 16 * 64 * 4.3 / 8) < there < 2 * 4 * (2 * 16 * 64 * 4.5 / 8 + 8)


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides", [AQSGD, {**CUT, "pipeline__forward": "tahquant", "rule__name": "diloco"}], ids=str
)
def test_a_pipeline_that_is_resumed_has_the_bits_of_one_that_never_stopped(overrides, tmp_path):
    config = tiny(**{"topology__name": "complete", **overrides, "data__accumulate": 2}, run__steps=6, workers=2)
    whole = gossamer.simulate(config, tmp_path / "whole")
    gossamer.simulate(config, tmp_path / "parts", until=2)
    resumed = gossamer.simulate(config, tmp_path / "parts", resume=True)
    assert resumed.loss == whole.loss
    for i in range(2):
        one, other = (
            checkpoint.load(tmp_path / name / "checkpoints", 3, i, digest(config)) for name in ("whole", "parts")
        )
        assert torch.equal(one["x"], other["x"])
        assert all(map(torch.equal, one["boundaries"][2][0]["messages"], other["boundaries"][2][0]["messages"]))


def test_with_exact_boundaries_a_run_that_is_resumed_with_other_cuts_is_that_of_whole_workers(tmp_path):
    plain = {"inner__clip": None, "workers": 2, "model__layers": 4, "data__accumulate": 2, "run__steps": 6}
    cut, whole = {**plain, "pipeline__stages": 2, "pipeline__cuts": [1]}, tiny(**plain)
    gossamer.simulate(tiny(**cut), tmp_path / "cut", until=2)
    other = tiny(**{**cut, "pipeline__cuts": [3]})
    gossamer.simulate(other, tmp_path / "cut", resume=True)
    gossamer.simulate(whole, tmp_path / "whole")
    for worker in range(2):
        ours, theirs = (
            checkpoint.load(tmp_path / name / "checkpoints", 3, worker, checkpoint.Lineage(digest(config)))
            for name, config in (("cut", other), ("whole", whole))
        )
        assert torch.equal(ours["x"], theirs["x"]) and [*ours["boundaries"]] == [3]


def test_fixed_windows_come_again_in_every_epoch_in_another_order():
    data = task_of(settings_of(tiny(data__windows=6))).data
    batches = [data.batch(1, k) for k in range(6)]
    ids = [data.samples(1, k) for k in range(6)]
    assert sorted(itertools.chain(*ids[:3])) == sorted(itertools.chain(*ids[3:])) == [*range(6)]
    assert ids[:3] != ids[3:]
    by_id: dict[int, torch.Tensor] = {}
    for rows, batch in zip(ids, batches, strict=True):
        for number, row in zip(rows, batch, strict=True):
            assert torch.equal(by_id.setdefault(number, row), row)
    assert len({tuple(row.tolist()) for row in by_id.values()}) == 6


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_residual_bottleneck_without_its_maps_keeps_the_first_coordinates_and_their_gradients_alone(kind):
    cut = ResidualBottleneck(64, BottleneckConfig(name="resbm", width=8, cuts=(1,), kind=kind))
    for weight in cut.parameters():
        torch.nn.init.zeros_(weight)
    h = torch.randn(2, 5, 64, requires_grad=True)
    x = cut(h)
    assert torch.equal(x, torch.cat((h[..., :8], torch.zeros(2, 5, 56)), -1))
    (mask,) = torch.autograd.grad(x.sum(), h)
    assert torch.equal(mask, torch.cat((torch.ones(2, 5, 8), torch.zeros(2, 5, 56)), -1))
    if kind == "linear":  # the identity path lets both maps learn from zero
        cut(h).square().sum().backward()
        loss_of_the_rest = (cut(h) - torch.randn(2, 5, 64)).square().sum()
        gradients = torch.autograd.grad(loss_of_the_rest, [*cut.parameters()])
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_a_linear_residual_bottleneck_has_at_most_the_rank_of_its_width_and_at_full_width_may_be_the_identity():
    cut = ResidualBottleneck(16, BottleneckConfig(name="resbm", width=4, cuts=(1,))).double()
    matrix = cut(torch.eye(16, dtype=torch.float64)[None])[0]
    assert torch.linalg.matrix_rank(matrix) == 4
    whole = ResidualBottleneck(16, BottleneckConfig(name="resbm", width=16, cuts=(1,)))
    for weight in whole.parameters():
        torch.nn.init.zeros_(weight)
    h = torch.randn(1, 3, 16)
    assert torch.equal(whole(h), h)


NARROW = {
    "resbm": {"name": "resbm", "width": 8, "cuts": [1, 2]},
    "resbm with two layers": {"name": "resbm", "width": 8, "cuts": [2], "kind": "mlp"},
    "subspace": {"name": "subspace", "width": 8},
}


@pytest.mark.parametrize("name", NARROW)
def test_a_model_with_a_bottleneck_has_the_stated_parameters_and_its_cuts_change_nothing(name):
    config = tiny(model__bottleneck=NARROW[name], inner__clip=None, data__accumulate=4)
    model = build_model(config.model, 256, 16, 0)
    assert tuple((n, tuple(p.shape)) for n, p in model.named_parameters()) == parameter_shapes(config.model, 256)
    whole = Replica(0, settings_of(config), task_of(settings_of(config)), torch.device("cpu"))
    cut = replica(model__bottleneck=NARROW[name], inner__clip=None, data__accumulate=4, pipeline__stages=2)
    assert cut.staged is not None and {ends[0].shape for ends in cut.staged.boundaries} == {(2, 16, 8)}
    assert [n for s in cut.staged.stages for n, _ in s.named_parameters()] != []
    assert {n for s in cut.staged.stages for n, _ in s.named_parameters()} == {n for n, _ in model.named_parameters()}
    whole.train(0, 0, 2)
    cut.train(0, 0, 2)
    if name == "subspace":  # projecting rounds
        torch.testing.assert_close(cut.x, whole.x, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(cut.x, whole.x)


@pytest.mark.parametrize("name", NARROW)
def test_a_model_with_a_bottleneck_is_exported_with_code_that_opens_it_and_a_line_says_that_it_is_no_plain_llama(
    name, tmp_path, capsys
):
    from transformers import AutoModelForCausalLM

    one = replica(model__bottleneck=NARROW[name])
    publish(one.run, one.task, one.x, tmp_path, finished=1, loss=math.nan)
    sentence = (
        f"{tmp_path / 'model'} is no plain Llama but has residual bottlenecks: open it with trust_remote_code=True\n"
    )
    assert capsys.readouterr().err == ("" if name == "subspace" else sentence)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert (type(opened).__name__ == "LlamaForCausalLM") == (name == "subspace")
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(opened(tokens).logits, one.model(tokens), rtol=1e-4, atol=1e-5)


def test_compressing_both_directions_leaves_the_gradients_of_a_subspace_as_they_are():
    config = ModelConfig(size="0.2m", bottleneck=BottleneckConfig(name="subspace", width=6))
    model = build_model(config, 50, 10, 0).double()
    assert model.subspace is not None
    model.subspace.basis = torch.linalg.qr(model.subspace.basis)[0]  # orthonormal in fp64, too
    batch = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(2))
    parameters = [*model.parameters()]

    def gradients(cuts):
        tokens, x = batch[:, :-1], batch[:, :-1]
        for stage in stages_of(model, cuts):
            x = stage(x, tokens)
        value = torch.nn.functional.cross_entropy(x.flatten(0, 1), batch[:, 1:].flatten())
        return torch.autograd.grad(value, parameters)

    for whole, cut in zip(gradients([]), gradients([1, 2]), strict=True):
        assert (whole - cut).abs().max() <= 1e-12


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


def test_stages_have_layers_by_their_speeds():
    config = tiny(pipeline__stages=2, data__accumulate=4, pipeline__speeds=[1.0, 2.0])
    assert cuts_of(config.pipeline, config.model, config.data) == (1,)
    pieces = {"pipeline__schedule": "interleaved", "pipeline__chunks": 2, "model__layers": 8}
    config = tiny(pipeline__stages=2, data__accumulate=4, pipeline__speeds=[3.0, 1.0], **pieces)
    assert cuts_of(config.pipeline, config.model, config.data) == (3, 4, 7)


def words_of(vocab_size, folder):
    """A tokenizer file with so many tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    path = folder / f"{vocab_size}.json"
    Tokenizer(WordLevel({f"w{k}": k for k in range(vocab_size)}, unk_token="w0")).save(str(path))
    return str(path)


@pytest.mark.parametrize("vocab_size", [256, 3000, 20_000])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.5, 2.0)])
def test_default_cuts_are_those_of_the_fastest_slowest_stage_the_output_head_included(vocab_size, speeds, tmp_path):
    layers, layout = 8, layout_for(ModelConfig(size="0.2m", layers=8), vocab_size)
    config = tiny(
        model__layers=layers,
        data__accumulate=4,
        data__tokenizer=words_of(vocab_size, tmp_path),
        pipeline__stages=len(speeds),
        pipeline__speeds=speeds,
    )

    def slowest(cuts):
        return max(share / speed for share, speed in zip(shares_of(layout, cuts), speeds, strict=True))

    every = itertools.combinations(range(1, layers), len(speeds) - 1)
    found = cuts_of(config.pipeline, config.model, config.data)
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_a_tokenizer_that_is_not_here_counts_as_bytes_and_a_subspace_is_not_left_for_the_head(tmp_path):
    config = tiny(pipeline__stages=2, data__accumulate=4, data__tokenizer=str(tmp_path / "none.json"))
    assert cuts_of(config.pipeline, config.model, config.data) == (2,)
    narrow = {"name": "subspace", "width": 8, "free_layers": 3}
    config = tiny(
        pipeline__stages=2,
        data__accumulate=4,
        model__layers=6,
        model__bottleneck=narrow,
        data__tokenizer=words_of(20_000, tmp_path),
    )
    assert cuts_of(config.pipeline, config.model, config.data) == (3,)


def test_minimax_keeps_to_the_layers_that_fit_a_stage():
    assert minimax([1.0] * 6, [10.0, 1.0]) == (5,)
    assert minimax([1.0] * 6, [10.0, 1.0], [4, 4]) == (4,)
    with pytest.raises(ConfigError, match=r"2 stages have room for \[2, 3\] layers, and the model has 6"):
        minimax([1.0] * 6, [1.0, 1.0], [2, 3])


BAD = {
    "more stages than layers": (
        {"pipeline__stages": 4, "data__accumulate": 4},
        "pipeline.stages is 4 and the model has 3",
    ),
    "fewer micro-batches": ({"pipeline__stages": 2}, "data.accumulate is 1: with fewer micro-batches than stages"),
    "tile": (
        {**CUT, "pipeline__forward": {"name": "tahquant", "tile": 128}},
        "128 channels at a time, which does not divide",
    ),
    "group": (
        {**CUT, "pipeline__backward": {"name": "intk", "group": 48}},
        "48 channels at a time, which does not divide",
    ),
    "aqsgd on text that is seen once": ({**CUT, "pipeline__forward": "aqsgd"}, "data.windows is not set"),
    "aqsgd backward": ({**CUT, "data__windows": 8, "pipeline__backward": "aqsgd"}, "gradients do not settle"),
    "a boundary without stages": ({"pipeline__forward": "cast"}, "pipeline.stages is 1, which has no boundary"),
    "cuts": (
        {**CUT, "pipeline__cuts": [1, 2]},
        "pipeline.cuts is [1, 2] for 2 stages; give 1 cuts, or pipeline.cuts=[]",
    ),
    "speeds": ({**CUT, "pipeline__speeds": [1.0]}, "pipeline.speeds is [1.0] for 2 stages and no"),
    "speeds and cuts": (
        {**CUT, "pipeline__speeds": [1.0, 2.0], "pipeline__cuts": [1]},
        "and pipeline.cuts = [1]; give the speed of each stage",
    ),
    "a stage without a fragment": (
        {**CUT, "schedule__fragments": 2},
        "stage 1 of 2 has layers [2], of 1 of them; take fewer fragments, other pipeline.cuts or fewer stages",
    ),
    "neighbours as fragments": (
        {**CUT, "schedule__fragments": 2, "schedule__pattern": "sequential", "model__layers": 4, "pipeline__cuts": [2]},
        "stage 0 of 2 has layers [0, 1], of 1 of them; take the pattern strided, fewer fragments, other pipeline.cuts or fewer "
        "stages",
    ),
    "cuts that change": (
        {**CUT, "pipeline__resplit_every": 4},
        "pipeline.resplit_every is 4, and this version has no such key: a run keeps its cuts",
    ),
    "a lost stage of two": ({**lost(), "pipeline__stages": 2}, "cut the model into 3 stages or more"),
    "a lost first stage": (
        lost(stage=0),
        "the first alone has the embeddings and the last the output head; of 4 stages these",
    ),
    "a lost stage of nobody": (lost(worker=3), "no such worker is in stages"),
    "a peer that is lost too": (
        {**lost(source="peer"), "workers": 1},
        "no other worker has that stage then; take source = 'neighbours'",
    ),
    "a neighbour that is lost too": (lost(2), "a neighbour is lost with it, and there is no peer"),
    "a stage that is lost twice": (lost(1, source="peer"), "it is named twice"),
    "a lost memory": (
        {**lost(), "pipeline__forward": "aqsgd", "data__windows": 8},
        "pipeline.forward remembers, but what such a stage has",
    ),
    "a cut beyond": ({**CUT, "pipeline__cuts": [3]}, "pipeline.cuts is [3], but the model has 3 layers"),
    "tied": ({**CUT, "model__tie_embeddings": True}, "model.tie_embeddings is true"),
    "dropout": ({**CUT, "model__dropout": 0.1}, "model.dropout is 0.1"),
    "own model": ({**CUT, "model__size": "mine:model"}, "model.size is 'mine:model', but only the built-in model"),
    "unknown": ({**CUT, "pipeline__forward": "tahqant"}, "did you mean 'tahquant'"),
    "option": ({**CUT, "pipeline__forward": {"name": "tahquant", "tiles": 64}}, "did you mean 'tile'"),
    "own codec": ({**CUT, "pipeline__forward": "mine:codec"}, "only Gossamer's own boundary codecs"),
    "resbm without cuts": ({"model__bottleneck": {"name": "resbm", "width": 8}}, "give cuts, such as [2], to 'resbm'"),
    "a wide bottleneck": (
        {"model__bottleneck": {"name": "subspace", "width": 65}},
        "width is 65 and the hidden size 64",
    ),
    "a bottleneck beyond": (
        {"model__bottleneck": {"name": "resbm", "width": 8, "cuts": [3]}},
        "cuts is [3], but the model has 3 layers",
    ),
    "free layers": (
        {"model__bottleneck": {"name": "subspace", "width": 8, "free_layers": 3}},
        "free_layers is 3 of 3 layers",
    ),
    "a cut among free layers": (
        {**CUT, "model__bottleneck": {"name": "subspace", "width": 8, "free_layers": 2}, "pipeline__cuts": [2]},
        "only the first 1 write into the subspace",
    ),
    "a tile of a bottleneck": (
        {**CUT, "model__bottleneck": {"name": "resbm", "width": 8, "cuts": [2]}, "pipeline__forward": "tahquant"},
        "does not divide the 8 that cross; take a divisor of them, or another model.bottleneck.width",
    ),
    "a seed beyond": (
        {**CUT, "pipeline__forward": {"name": "projection", "seed": 2**63}},
        f"got seed = {2**63}, which must be a whole number from 0 to below {2**63}",
    ),
    "an unknown schedule": ({**CUT, "pipeline__schedule": "2f2b"}, "unknown pipeline.schedule '2f2b'"),
    **{
        name: ({**CUT, "pipeline__schedule": name}, f"pipeline.schedule is '{name}', which splits backward passes")
        for name in ("zb", "zbv", "ZB1P", "zero_bubble", "interleaved_zero_bubble", "ZBVZeroBubble", "DualPipeV")
    },
    "chunks of gpipe": ({**CUT, "pipeline__chunks": 2}, "pipeline.chunks is 2 and pipeline.schedule is 'gpipe'"),
    "interleaved without chunks": ({**CUT, "pipeline__schedule": "interleaved"}, "pipeline.chunks is 1"),
    "more pieces than layers": (
        {**CUT, "pipeline__schedule": "interleaved", "pipeline__chunks": 2},
        "4 pieces, and the model has 3 layers",
    ),
    "groups of micro-batches": (
        {**CUT, "pipeline__schedule": "interleaved", "pipeline__chunks": 2, "model__layers": 4, "data__accumulate": 5},
        "data.accumulate is 5; set it to a multiple of 2",
    ),
    "a schedule of nothing": ({"pipeline__schedule": "1f1b"}, "pipeline.stages is 1, which has nothing to schedule"),
    "windows of a stream": ({"data__windows": 8, "data__source": "hf:some"}, "only text in files has fixed windows"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_a_pipeline_is_refused_in_a_sentence(name):
    overrides, sentence = BAD[name]
    with pytest.raises(GossamerError) as caught:
        tiny(**overrides)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_memory_of_samples_that_a_whole_run_has_only_once_is_refused_however_it_is_stopped_and_resumed():
    once = tiny(**AQSGD, run__steps=4, workers=1).data  # 32 samples
    assert once.accumulate * once.batch_size == 8
    for windows, expected in ((32, "draws 32 samples in run.steps = 4 and data.windows is 32"), (31, "")):
        found = run_faults(tiny(**{**AQSGD, "data__windows": windows}, run__steps=4, workers=1))
        assert [expected in sentence for sentence in found] == [True] * bool(expected)
    assert (
        run_faults(tiny(**{**AQSGD, "data__windows": 32, "pipeline__forward": "intk"}, run__steps=4, workers=1)) == []
    )


def test_an_empty_list_of_cuts_is_none_so_that_a_run_that_has_some_can_be_given_other_stages():
    made = document(**CUT, pipeline__cuts=[2])
    with pytest.raises(ConfigError, match=r"pipeline\.cuts is \[2\] for 3 stages; give 2 cuts, or pipeline\.cuts=\[\]"):
        parse(with_settings(made, {"pipeline.stages": 3}))
    again = parse(with_settings(made, {"pipeline.stages": 3, "pipeline.cuts": []}))
    assert again == tiny(**CUT | {"pipeline__stages": 3}) and cuts_of(again.pipeline, again.model, again.data) == (1, 2)


@pytest.mark.parametrize(
    ("table", "key", "value"), [("run", "ghost_rounds", 2), ("run", "eval_js", True), ("record", "alignment", True)]
)
def test_a_removed_key_is_read_at_its_default_and_refused_by_name_at_any_other_value(table, key, value):
    plain = parse({})
    assert parse({table: {key: type(value)()}}) == plain and digest(plain) == digest(
        parse({table: {key: type(value)()}})
    )
    with pytest.raises(
        ConfigError, match=rf"{table}\.{key} is {value}, and this version has no such key: .*; remove the key"
    ):
        parse({table: {key: value}})


def test_a_run_folder_that_still_has_a_key_that_is_gone_keeps_its_checkpoints():
    made = {"pipeline": {"stages": 2, "resplit_every": 0}, "data": {"accumulate": 2}, "inner": {"warmup_steps": 20}}
    assert digest(parse(made)) == "fb0eeec4282bdd43" and "resplit_every" not in dump(parse(made))


def test_a_run_file_says_its_pipeline_and_one_without_stages_has_the_digest_it_had():
    config = tiny(**CUT, pipeline__forward={"name": "tahquant", "tile": 32})
    assert parse(document(**CUT, pipeline__forward={"name": "tahquant", "tile": 32})) == config
    assert 'name = "tahquant"' in dump(config) and "tile = 32" in dump(config)
    assert "pipeline" not in dump(tiny())
    assert digest(tiny()) != digest(config) != digest(tiny(**CUT))
    again = tiny(**CUT, pipeline__forward="tahquant")
    assert run_faults(again) == run_faults(again, real=True) == []


def test_the_run_files_of_the_page_about_pipelines_can_start():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "pipelines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert [run_faults(parse(parse_toml(block, "the page"))) for block in blocks] == [[]] * 5
