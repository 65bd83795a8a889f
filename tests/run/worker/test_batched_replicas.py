"""Several replicas as one computation: equal to each on its own but for rounding."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gossamer.errors import ConfigError, PairingError, TrainingError
from gossamer.models.llama import build_model, loss
from gossamer.models.sizes import ModelConfig
from gossamer.models.stacked import stacked_losses
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import RunConfig, digest
from gossamer.run.simulated.rounds import Rounds
from gossamer.run.worker.batched import Stack
from gossamer.run.worker.compiled import made_ready
from gossamer.run.worker.numerics import deterministic, using_threads
from tiny import single, tiny

PARALLEL = {"rule__name": "data_parallel", "topology__name": "complete", "run__local_steps": 1}


def trained(config: RunConfig, folder, until: int | None = None, **given) -> Rounds:
    engine = Rounds(resolve(config), folder, **given)
    with engine.opened():
        while engine.finished < (until or config.length.rounds):
            engine.advance()
    return engine


def x_of(engine: Rounds) -> torch.Tensor:
    return torch.stack(engine.models())


@pytest.mark.parametrize("own", [{}, {"tie_embeddings": True}, {"kv_heads": 1}])
def test_stacked_replicas_have_the_losses_and_gradients_of_each_alone(own):
    config, batch = (
        ModelConfig(size="0.2m", layers=2, **own),
        torch.randint(0, 256, (3, 2, 17), generator=torch.Generator().manual_seed(0)),
    )
    models = [build_model(config, 256, 16, seed).double() for seed in range(3)]
    weights = {
        name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]).requires_grad_()
        for name, _ in models[0].named_parameters()
    }
    found = stacked_losses(weights, config.shape, batch)
    found.sum().backward()
    for r, model in enumerate(models):
        alone = loss(model, batch[r])
        alone.backward()
        assert found[r].item() == pytest.approx(alone.item(), rel=1e-6)  # whose logits are rounded to fp32
        for name, p in model.named_parameters():
            gradient = weights[name].grad
            assert gradient is not None and p.grad is not None
            torch.testing.assert_close(gradient[r], p.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["adamw", "accum_adamw", "sgd", "spectral_muon"])
@pytest.mark.parametrize("batched", [2, 8])
def test_a_batched_run_is_equal_to_one_replica_after_the_other_but_for_rounding(tmp_path, batched, optimizer):
    settings = {"run__local_steps": [2, 1, 2], "inner__clip": 0.5, "data__accumulate": 2, "inner__optimizer": optimizer}
    alone = trained(tiny(**settings), tmp_path / "alone")
    together = trained(tiny(**settings, run__batched=batched), tmp_path / "together")
    assert not torch.equal(x_of(together), x_of(together)[:1].expand_as(x_of(together)))
    rounding = 1e-4 if optimizer == "spectral_muon" else 2e-5  # which rounds to bf16
    torch.testing.assert_close(x_of(together), x_of(alone), rtol=0, atol=rounding)
    for mine, theirs in zip(together.workers, alone.workers, strict=True):
        assert mine.replica.steps_taken == theirs.replica.steps_taken
    assert together.result().loss == pytest.approx(alone.result().loss, abs=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["adamw", "accum_adamw", "sgd", "spectral_muon"])
def test_a_batched_run_resumes_to_the_same_bits(tmp_path, optimizer):
    config = tiny(run__batched=2, inner__optimizer=optimizer)
    whole = trained(config, tmp_path / "whole")
    trained(config, tmp_path / "cut", until=2)
    resumed = trained(config, tmp_path / "cut", resume=True)
    assert torch.equal(x_of(whole), x_of(resumed))


def test_batched_replicas_have_a_digest_of_their_own():
    assert digest(tiny(run__batched=2)) != digest(tiny())


def test_a_stack_ends_at_the_first_loss_that_is_not_a_number(tmp_path):
    engine = Rounds(resolve(tiny(run__batched=3)), tmp_path)
    replicas = [worker.replica for worker in engine.workers]
    replicas[1].x.fill_(float("nan"))
    with pytest.raises(TrainingError, match="worker 1 became nan at its inner step 0"):
        Stack(replicas).train(0, 0, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.dropout", 0.1),
        ("inner.optimizer", "muon"),
        ("inner.averaging", "gpa"),
        ("run.adapt", True),
        ("run.pace_s", 0.1),
        ("data.source", "package.module:name"),
    ],
)
def test_what_cannot_train_as_one_computation_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=rf"run\.batched is 2 and {key} is"):
        tiny(run__batched=2, **{key.replace(".", "__"): value})


@pytest.mark.full
@pytest.mark.parametrize(
    "own",
    [
        PARALLEL,
        {**PARALLEL, "inner__optimizer": "spectral_muon"},
        {"rule__name": "local_sgd", "topology__name": "complete", "schedule__inner_every": [1, 1]},
    ],
    ids=["gradients", "gradients-muon", "moments"],
)
def test_stacked_replicas_exchange_gradients_and_moments_as_each_alone_does(tmp_path, own):
    settings = {"workers": 3, "inner__clip": 0.5, "data__accumulate": 2, **own}
    alone = trained(tiny(**settings), tmp_path / "alone")
    together = trained(tiny(**settings, run__batched=2), tmp_path / "together")
    torch.testing.assert_close(x_of(together), x_of(alone), rtol=0, atol=2e-5)
    for mine, theirs in zip(together.workers, alone.workers, strict=True):
        ours, others = (tree_leaves(one.replica.optimizer.state_dict()) for one in (mine, theirs))
        for one, other in zip(ours, others, strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        for shared, wanted in zip(mine.replica.moments or (), theirs.replica.moments or (), strict=True):
            torch.testing.assert_close(shared, wanted, rtol=1e-3, atol=1e-5)
    trained(tiny(**settings, run__batched=2), tmp_path / "cut", until=2)
    resumed = trained(tiny(**settings, run__batched=2), tmp_path / "cut", resume=True)
    assert torch.equal(x_of(together), x_of(resumed))


def test_rules_that_decide_on_local_steps_are_refused_with_batched_replicas(tmp_path):
    rule = {"name": "dilocox", "adapt_every": 2}
    config = tiny(run__batched=2, rule=rule, topology__name="complete")
    with pytest.raises(PairingError, match=r"run\.batched is 2"):
        resolve(config)


@pytest.mark.full
def test_a_stack_computes_in_the_precision_of_the_run(tmp_path):
    settings = {"run__local_steps": 2, "inner__autocast": "bf16"}
    alone = trained(tiny(**settings), tmp_path / "alone")
    together = trained(tiny(**settings, run__batched=8), tmp_path / "together")
    exact = trained(tiny(run__local_steps=2, run__batched=8), tmp_path / "exact")
    assert (x_of(together) - x_of(alone)).abs().max() < (x_of(together) - x_of(exact)).abs().max() / 2


@pytest.mark.full
@pytest.mark.timeout(900)  # a busy machine compiles for minutes
def test_a_compiled_stack_is_equal_to_another_but_for_rounding_and_resumes_to_the_same_bits(tmp_path):
    config, plain = (single(workers=2, run__batched=2, inner__compile=compiled) for compiled in (True, False))
    whole = trained(config, tmp_path / "whole")
    torch.testing.assert_close(x_of(whole), x_of(trained(plain, tmp_path / "plain")), rtol=0, atol=2e-5)
    trained(config, tmp_path / "cut", until=2)
    assert torch.equal(x_of(whole), x_of(trained(config, tmp_path / "cut", resume=True)))


class Embedded(torch.nn.Module):
    """An embedding of few symbols, whose gradient sums over many tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(40, 32), torch.nn.Linear(32, 40)


def embedded_loss(model, x):
    return torch.nn.functional.cross_entropy(model.head(model.table(x[:-1])), x[1:])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_gradient_of_a_compiled_embedding_has_one_value_over_many_runs_with_two_threads():
    model, x = Embedded(), torch.randint(40, (4097,), generator=torch.Generator().manual_seed(1))
    gradients = set[bytes]()
    with using_threads(2), deterministic():
        step = made_ready(embedded_loss, single(inner__compile=True))
        for _ in range(100):
            model.zero_grad()
            step(model, x).backward()
            assert model.table.weight.grad is not None
            gradients.add(model.table.weight.grad.numpy().tobytes())
    assert len(gradients) == 1
    assert torch.get_deterministic_debug_mode() == 0 and not torch.are_deterministic_algorithms_enabled()
