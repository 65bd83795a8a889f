"""Heterogeneous SparseLoCo: some replicas in stages with narrow boundaries, the others whole, averaged as any others."""

import json

import pytest
import torch
from test_pipeline import CUT, replica

import gossamer
from gossamer.codecs import fitted, topk2bit
from gossamer.errors import ConfigError
from gossamer.layout import layout_of
from gossamer.models import ModelConfig, build_model
from gossamer.models.stages import stages_of
from gossamer.record import checkpoint
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import digest
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from tiny import preset as tiny

NARROW = {
    **CUT,
    "pipeline__forward": {"name": "projection", "width": 16},
    "pipeline__backward": {"name": "projection", "width": 16},
}
EXACT = {"pipeline__forward": "dense", "pipeline__backward": "dense"}
SPARSE = {"rule__name": "sparseloco", "topology__name": "complete", "codec__name": "topk2bit"}


def models_of(folder, **overrides):
    """The parameters of each worker after a short simulation."""
    config = tiny(**{**SPARSE, "inner__clip": None, "data__accumulate": 4, "run__steps": 4, "workers": 2, **overrides})
    gossamer.simulate(config, folder)
    return [checkpoint.load(folder / "checkpoints", 2, i, digest(config))["x"] for i in range(2)]


@pytest.mark.full
def test_heterogeneous_replicas_with_exact_boundaries_are_sparseloco_and_of_full_width_to_rounding(tmp_path):
    plain = models_of(tmp_path / "plain")
    exact = models_of(tmp_path / "exact", **CUT, pipeline__workers=[1])
    assert all(map(torch.equal, plain, exact))
    full = {"name": "projection", "width": 64}
    config = {**CUT, "pipeline__workers": [1], "pipeline__forward": full, "pipeline__backward": full}
    for a, b in zip(models_of(tmp_path / "full", **config), plain, strict=True):
        assert torch.allclose(a, b, atol=2e-3) and float((a - b).norm() / b.norm()) < 1e-2


@pytest.mark.full
def test_only_the_replicas_that_are_named_are_cut_and_resume_to_their_bits(tmp_path):
    overrides = {**SPARSE, **NARROW, "pipeline__workers": [1]}
    config = tiny(**overrides, run__steps=8, workers=2)
    run, uncut = settings_of(config), settings_of(tiny(**SPARSE, data__accumulate=4, workers=2))
    ours, whole = (Replica(0, one, task_of(one), torch.device("cpu")) for one in (run, uncut))
    assert ours.staged is None
    for one in (ours, whole):
        one.train(0, 0, 2)
    assert torch.equal(ours.x, whole.x)
    cut = Replica(1, run, task_of(run), torch.device("cpu"))
    assert cut.staged is not None
    result = gossamer.simulate(config, tmp_path / "whole")
    gossamer.simulate(config, tmp_path / "parts", until=2)
    assert gossamer.simulate(config, tmp_path / "parts", resume=True).loss == result.loss
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    found = {line["worker"]: line.get("boundary_bytes") for line in lines if line["kind"] == "train"}
    table = 4 * next(p.numel() for name, p in cut.model.named_parameters() if "embed" in name)
    crossed = 2 * 4 * (2 * 16 * 16 * 4)
    assert found == {0: None, 1: [[crossed + table, crossed]]}


def test_what_a_projection_loses_of_the_embeddings_is_known_to_all_stages_and_the_table_stays_as_it_is():
    one = replica(**NARROW)
    assert one.staged is not None
    before = one.x.clone()
    one.staged.begin()
    assert torch.equal(one.x, before)
    rest, (there, _) = one.staged._rest, one.staged.boundaries[0]
    assert rest is not None
    table = one.model.model.embed_tokens.weight.detach()
    inside = there.cross((table - rest)[None], [])[0]
    torch.testing.assert_close(inside + rest, table, atol=1e-6, rtol=0)
    torch.testing.assert_close(there.cross(rest[None], [])[0], torch.zeros_like(rest), atol=1e-6, rtol=0)  # idempotent
    # A first stage that only embeds would lose nothing; of what the layers add the part inside of U crosses.
    tokens = torch.arange(16)[None]
    h = table[tokens]
    arrived = there.cross(h - rest[tokens], []) + rest[tokens]
    torch.testing.assert_close(arrived, h, atol=1e-6, rtol=0)


def test_stages_compress_their_own_tensors_to_the_bits_of_the_whole_where_a_codec_cuts_tensor_by_tensor():
    model = build_model(ModelConfig(size="0.2m"), 256, 16, seed=0)
    layout, codec = layout_of(model), topk2bit()
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(2))
    whole = fitted(codec, layout)
    arrived = whole.decode(whole.encode(x, 0), x)
    places = {leaf.name: slice(leaf.start, leaf.stop) for leaf in layout.leaves}
    for stage in stages_of(model, [1, 2]):
        own = layout_of(stage)
        part, theirs = (torch.cat([v[places[leaf.name]] for leaf in own.leaves]) for v in (x, arrived))
        fit = fitted(codec, own)
        assert torch.equal(fit.decode(fit.encode(part, 0), part), theirs)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"pipeline__workers": [0, 3]}, r"pipeline.workers is \[0, 3\]"),
        ({"pipeline__workers": [1, 0]}, "in order, from 0 to 2"),
        (
            {
                "pipeline__stages": 1,
                "pipeline__workers": [0],
                "pipeline__forward": "dense",
                "pipeline__backward": "dense",
            },
            "set pipeline.stages to 2",
        ),
        ({"pipeline__forward": {"name": "projection", "width": 65}}, "hidden states have 64"),
        ({"model__bottleneck": {"name": "resbm", "width": 8, "cuts": [1]}}, "narrow already"),
    ],
)
def test_replicas_that_cannot_be_named_or_projected_are_refused(change, part):
    with pytest.raises(ConfigError, match=part):
        tiny(**{**NARROW, **change})
