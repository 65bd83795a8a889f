"""Mixtures of experts: a Mixtral of our own, workers that hold some experts each, and what they exchange."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.cli import main
from gossamer.errors import ConfigError
from gossamer.models import ModelConfig, build_model
from gossamer.models.experts import keep_experts
from gossamer.models.holders import holders_of
from gossamer.models.llama import logits_of, loss
from gossamer.models.sizes import ExpertsConfig, parameter_shapes
from gossamer.optimizers.inner import InnerConfig, build_optimizer
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.trace import read_trace
from gossamer.run.bookkeeping.evaluate import evaluate, model_with
from gossamer.run.config.layouts import Holding
from gossamer.run.config.resolve import resolve, run_faults, settings_of
from gossamer.run.config.run_file import RunConfig, digest, dump, parse
from gossamer.run.planning.check import examine_run
from gossamer.run.planning.traffic import traffic
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.settings.schema import parse_toml
from tiny import tiny

EXPERTS = {"count": 4, "holders": 2}
MOE = {
    "workers": 4,
    "rule": "diloco",
    "topology": "complete",
    "model__hidden_size": 32,
    "model__intermediate_size": 48,
    "model__layers": 1,
    "model__experts": EXPERTS,
    "run__steps": 8,
    "inner__warmup_steps": 20,
}
MIXTURE = ModelConfig(
    hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, experts=ExpertsConfig(count=4)
)


def moe(**overrides) -> RunConfig:
    return tiny(**{**MOE, **overrides})


def held_by(config: RunConfig) -> Holding:
    holding = task_of(settings_of(config)).holding
    assert holding is not None
    return holding


def mixture(config: ModelConfig = MIXTURE):
    return build_model(config, 256, 16, seed=1)


def some_tokens(rows: int = 3) -> Tensor:
    return torch.randint(256, (rows, 17), generator=torch.Generator().manual_seed(2))


def states(folder: Path, config: RunConfig) -> list[Tensor]:
    return [
        checkpoint.load(folder / "checkpoints", config.length.rounds, i, digest(config))["x"]
        for i in range(config.workers)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A simulation with everything written down."""
    folder, config = tmp_path_factory.mktemp("moe"), moe(record__export=True)
    return folder, config, simulate(config, folder)


def test_a_mixture_has_the_parameters_that_are_counted_without_building_it():
    built = [(name, tuple(p.shape)) for name, p in mixture().named_parameters()]
    assert built == [*parameter_shapes(MIXTURE, 256)]


def test_tokens_skip_an_expert_that_is_not_here_as_if_its_weights_were_zero():
    whole, part, batch = mixture(), mixture(), some_tokens()
    with torch.no_grad():
        for name, p in whole.named_parameters():
            if ".experts.1." in name or ".experts.2." in name:
                p.zero_()
    keep_experts(part, {0, 3})
    assert sum(p.numel() for p in part.parameters()) < sum(p.numel() for p in whole.parameters())
    values = [loss(model, batch) for model in (whole, part)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[1], loss(mixture(), batch))
    for value in values:
        value.backward()
    others = dict(whole.named_parameters())
    assert all(torch.equal(p.grad, others[name].grad) for name, p in part.named_parameters())


@pytest.mark.parametrize("optimizer", ["muon", "spectral_muon"])
def test_muon_trains_the_router_of_experts_and_the_option_says_so(optimizer):
    model = mixture()
    inner = build_optimizer(InnerConfig(optimizer=optimizer), model)
    routers = {id(p) for name, p in model.named_parameters() if name.endswith("router.weight")}
    muon = {id(p) for group in inner.parts["muon"].param_groups for p in group["params"]}
    assert len(routers) == 2 and routers <= muon
    assert "the router of experts among them" in inspect.getsource(InnerConfig)


@pytest.mark.parametrize("resident", [{0, 1, 2, 3}, {0, 3}], ids=["all", "some"])
def test_shapes_that_do_not_depend_on_the_choice_change_no_loss_and_no_gradient(resident, monkeypatch):
    chosen, fixed, batch = mixture().double(), mixture().double(), some_tokens()
    for model in (chosen, fixed):
        keep_experts(model, resident)
    ours = loss(chosen, batch)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    theirs = loss(fixed, batch)
    torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=0)
    ours.backward()
    theirs.backward()
    for p, q in zip(fixed.parameters(), chosen.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.full
@pytest.mark.timeout(900)  # a busy machine compiles for minutes
def test_a_compiled_mixture_is_equal_to_another_but_for_rounding(tmp_path):
    config, plain = (moe(run__steps=4, run__eval_every=0, inner__compile=compiled) for compiled in (True, False))
    simulate(config, tmp_path / "compiled")
    simulate(plain, tmp_path / "plain")
    for ours, theirs in zip(states(tmp_path / "compiled", config), states(tmp_path / "plain", plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_the_balance_loss_is_one_share_of_its_weight_where_all_experts_get_as_much():
    model, batch = mixture(), some_tokens(8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.weight.zero_()
    added = (loss(model.train(), batch) - loss(model.eval(), batch)).item()
    assert added == pytest.approx(0.01, rel=1e-3)  # Σ_e f_e / E, whatever the choices are
    assert loss(model.eval(), batch) == torch.nn.functional.cross_entropy(
        logits_of(model, batch).flatten(0, 1), batch[:, 1:].flatten()
    )


@pytest.mark.parametrize(("count", "holders", "workers"), [(4, 2, 4), (4, 3, 4), (6, 2, 4), (3, 4, 6), (4, 1, 4)])
def test_experts_are_dealt_out_evenly_and_each_to_as_many_workers_as_asked_for(count, holders, workers):
    found = holders_of(ExpertsConfig(count=count, holders=holders), workers)
    assert found is not None
    assert [len(found.parts[p]) for p in found.part_of] == [holders] * count
    assert {len(found.resident(i)) for i in range(workers)} == {count * holders // workers}
    assert all(i in found.parts[found.part_of[e]] for i in range(workers) for e in found.resident(i))
    assert found.part("model.layers.1.mlp.experts.2.up_proj.weight") == found.part_of[2]
    assert found.part("model.layers.1.mlp.router.weight") == 0


def named(folder: Path, config: RunConfig) -> list[dict[str, Tensor]]:
    """The parameters of each worker by name."""
    layouts = [
        Replica(i, settings_of(config), task_of(settings_of(config)), torch.device("cpu")).layout
        for i in range(config.workers)
    ]
    return [
        {leaf.name: x[leaf.start : leaf.stop] for leaf in layout.leaves}
        for layout, x in zip(layouts, states(folder, config), strict=True)
    ]


def test_with_every_expert_everywhere_it_is_diloco_bit_for_bit(tmp_path):
    plain, parts = (
        moe(model__experts={"count": 4, **holders}, run__steps=4, run__eval_every=0) for holders in ({}, {"holders": 4})
    )
    for name, config in (("plain", plain), ("parts", parts)):
        simulate(config, tmp_path / name)
    one, other = named(tmp_path / "plain", plain), named(tmp_path / "parts", parts)
    assert [*one[0]] != [*other[0]], "experts are a part of their own"
    assert all(
        torch.equal(x, theirs[name]) for mine, theirs in zip(one, other, strict=True) for name, x in mine.items()
    )
    sent = [read_trace(tmp_path / name).sent_bytes.tolist() for name in ("plain", "parts")]
    assert sent[0] == sent[1] and held_by(parts).smaller == 1.0


def test_holders_agree_after_a_round_and_the_assembled_model_is_theirs(run):
    folder, config, _ = run
    held, xs = held_by(config), states(folder, config)
    sizes = {x.numel() for x in xs}
    assert sizes == {held.of(0)[0].numel} and sizes.pop() < held.layout.numel
    whole = held.union([held.alone(i, x) for i, x in enumerate(xs)])
    assert all(torch.equal(held.own(i, whole), x) for i, x in enumerate(xs))


def test_a_round_of_averaging_makes_every_tensor_the_mean_over_the_workers_that_have_it(tmp_path):
    config = moe(rule="local_sgd", run__steps=2, run__local_steps=2)
    simulate(config, tmp_path)
    found, trained = named(tmp_path, config), list[dict[str, Tensor]]()
    for worker in range(config.workers):
        replica = Replica(worker, settings_of(config), task_of(settings_of(config)), torch.device("cpu"))
        replica.train(0, 0, 2)
        trained.append({leaf.name: replica.x[leaf.start : leaf.stop].clone() for leaf in replica.layout.leaves})
    for name in {name for own in trained for name in own}:
        having = [worker for worker, own in enumerate(trained) if name in own]
        assert len(having) == (2 if ".experts." in name else 4)
        mean = torch.stack([trained[worker][name] for worker in having]).double().mean(0)
        for worker in having:
            torch.testing.assert_close(found[worker][name].double(), mean, rtol=0, atol=1e-6)


def test_each_worker_sends_the_bytes_of_a_ring_over_the_holders_of_each_part(run, capsys):
    folder, config, _ = run
    held, trace = held_by(config), read_trace(folder)
    (_, shared), *parts = held.spans
    m, copies = config.workers, 2
    for worker in range(m):
        resident = sum(b - a for p, (a, b) in enumerate(parts, 1) if worker in held.holders.parts[p])
        values = 2 * (1 - 1 / m) * shared + 2 * (1 - 1 / copies) * resident
        assert held.ring_numbers(worker) == values
        assert trace.sent_bytes[worker] == 4 * values * config.length.rounds
    examined = examine_run(config)
    assert examined.sent_bytes == examined.most_bytes == 4 * held.ring_numbers(0)
    f = 1 - shared / held.layout.numel
    assert examined.experts is not None
    assert examined.experts.payload_ratio == pytest.approx(1 / (1 - f + f * copies / m))
    assert examined.experts.payload_ratio == pytest.approx(held.layout.numel / states(folder, config)[0].numel())
    (folder / "run.toml").write_text(dump(config))
    assert main(["check", str(folder / "run.toml")]) == 0
    assert f"{examined.experts.payload_ratio:.2f} times smaller" in capsys.readouterr().out


def test_with_chunks_of_unequal_size_the_bytes_of_all_workers_together_are_those_of_the_rings():
    odd = {"model__hidden_size": 18, "model__intermediate_size": 5, "model__heads": 1, "model__kv_heads": 1}
    config = moe(workers=5, model__experts={"count": 5, "holders": 3}, **odd)
    held = held_by(config)
    assert any((b - a) % len(held.holders.parts[p]) for p, (a, b) in enumerate(held.spans))
    sent = traffic(resolve(config), held.layout)
    assert sent.sent_bytes * 5 == pytest.approx(4 * sum(map(held.ring_numbers, range(5))))


def test_the_union_is_validated_beside_each_worker_which_lacks_some_experts(run):
    folder, config, result = run
    (last,) = [line for line in read_metrics(folder) if line["kind"] == "eval"][-1:]
    assert last["loss"] == result.loss and len(set(last["worker_losses"])) == 2  # two pairs of workers hold the same
    assert result.loss not in last["worker_losses"] and last["disagreement"] == 0.0
    own = Replica(0, settings_of(config), task_of(settings_of(config)), torch.device("cpu"))
    own.x.copy_(states(folder, config)[0])
    with torch.no_grad():
        batches = task_of(settings_of(config)).data.validation(config.run.eval_batches)
        values = [loss(own.model.eval(), batch).item() for batch in batches]
    assert last["worker_losses"][0] == pytest.approx(sum(values) / len(values), abs=1e-12)
    again = evaluate(folder).result
    assert (again.loss, again.worker_losses) == (last["loss"], tuple(last["worker_losses"]))


@pytest.mark.full
def test_transformers_opens_the_assembled_model_with_equal_logits(run):
    from transformers import AutoModelForCausalLM

    folder, config, _ = run
    theirs = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    assert type(theirs).__name__ == "MixtralForCausalLM"
    task, xs = task_of(settings_of(config)), states(folder, config)
    held = held_by(config)
    mine = model_with(settings_of(config), task, held.union([held.alone(i, x) for i, x in enumerate(xs)]))
    tokens = some_tokens()[:, :-1]
    with torch.no_grad():
        assert (theirs(tokens).logits - mine(tokens)).abs().max() < 1e-5


def test_a_simulation_that_stops_and_resumes_has_the_same_bits(run, tmp_path):
    folder, config, _ = run
    half = parse({**parse_toml(dump(config), "it"), "run": {**parse_toml(dump(config), "it")["run"], "steps": 4}})
    simulate(half, tmp_path)
    simulate(config, tmp_path, resume=True)
    assert all(map(torch.equal, states(tmp_path, config), states(folder, config)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"workers": 3}, "4 experts with 2 holders each, and 3 workers do not divide these 8 copies"),
        ({"model__experts": {"count": 4, "holders": 5}}, "holders is 5 and the run has 4 workers"),
        ({"model__experts": {"count": 2, "active": 3}}, "active is 3 of 2 experts"),
        (
            {"model__experts": {"count": 4, "active": 1}},
            "model.experts.active is 1 but must be a whole number of at least 2",
        ),
        ({"model__experts": {"count": 4, "activ": 2}}, r"unknown key in \[model.experts\] 'activ'"),
        ({"pipeline__stages": 2, "data__accumulate": 2}, "a mixture of experts is not cut into stages"),
        ({"model__bottleneck": {"name": "subspace", "width": 4}}, "model.bottleneck is 'subspace'"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_with_a_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        moe(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rule": "choco", "topology": "ring"}, "rule 'choco' looks at whole tensors, at fixed peers"),
        ({"rule": "dilocox"}, "rule 'dilocox'"),
        ({"schedule__fragments": 2}, "[schedule]"),
        ({"inner__averaging": "gpa"}, "inner.averaging is 'gpa'"),
        ({"run__reduction": "all_reduce"}, "run.reduction is 'all_reduce'"),
        ({"run__elastic": True}, "run.elastic is true"),
        ({"rule": "gasloc", "topology": "random", "run__wait": False}, "runs asynchronously"),
    ],
)
def test_what_needs_whole_vectors_or_all_workers_is_refused_by_name(settings, sentence):
    assert any(sentence in found and "2 of 4 workers" in found for found in run_faults(moe(**settings)))


@pytest.mark.parametrize("rule", ["local_sgd", "data_parallel", "slowmo", "sparseloco"])
def test_other_rules_exchange_experts_among_their_holders_too(rule, tmp_path):
    codec = {"codec": "topk2bit"} if rule == "sparseloco" else {}
    config = moe(rule=rule, run__local_steps=1 if rule == "data_parallel" else 2, run__steps=2, **codec)
    assert not run_faults(config)
    result = simulate(config, tmp_path)
    assert 0 < result.loss < 5.7
