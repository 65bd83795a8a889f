"""The door for research: `gossamer.simulate` and `gossamer.sweep` with models, data, losses and optimizers of the user's."""

import gc
import json
import math
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gossamer
from gossamer.codecs import Codec
from gossamer.errors import ConfigError, MissingPackageError, TrainingError, UserCodeError
from gossamer.network.links import Network
from gossamer.rules import Rule
from gossamer.run.bookkeeping.evaluate import UNUSED, evaluate
from gossamer.run.config.document import load_run
from gossamer.run.config.user_parts import own_parts
from gossamer.run.simulated import threads as lanes
from gossamer.topologies import Topology, graph, ring
from gossamer.topologies.contract import over_alive, planned_topology
from gossamer.topologies.graphs import edges_of
from gossamer.topologies.mixing import Consensus, pull
from gossamer.transport.processes.local import run_local

N, H, ROUNDS, SEED = 3, 3, 4, 5


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * worker + step))
    return x, x.sum(1, keepdim=True)


def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return (model(given[0]) - given[1]).square().mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def drawn(**functions: Any) -> Rule:
    """Gossip half of the way, with these of its functions replaced by wrong ones."""
    half = Rule(
        lambda x, ctx: (),
        lambda x, s, ctx: x,
        pull,
        lambda x, s, own, c, ctx: (x + 0.5 * c, s),
        needs="connected",
        single_worker_limit="inner",
        consensus=Consensus(0.5, 0.0, "post"),
    )
    return half._replace(name="drawn", **functions)


def coded(**functions: Any) -> Codec:
    """A codec that sends everything, with these of its functions replaced by wrong ones."""
    return Codec(**{"encode": lambda x, key: x.clone(), "decode": lambda payload, like: payload, **functions})


def linked(*edges: Any) -> Topology:
    """A topology that claims to be symmetric and to keep the mean, whatever its edges."""
    return planned_topology(N, over_alive(lambda round, m: edges, N), period=1, symmetric=True, doubly_stochastic=True)


class Unmoved(torch.optim.SGD):
    """An optimizer whose step fails."""

    def step(self, closure: Any = None) -> Any:
        raise LookupError("no step")


class Reader(nn.Module):
    """A model of tokens whose forward pass returns what it is given to."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.embedding, self.act = nn.Embedding(256, 256), forward

    def forward(self, tokens: Tensor) -> Any:
        return self.act(self.embedding(tokens))


def reading(forward: Any) -> dict[str, Any]:
    """A run of such a model on text, with the loss that stands for one of the user's."""
    text = {"data": lambda worker, step: torch.full((2, 5), worker + step), "loss": None}
    return {**text, "model": lambda: Reader(forward)}


TASK: Any = {"model": net, "data": batch, "loss": loss, "optimizer": optimizer}
RULES: Any = {
    "gasloc": {"rule": gossamer.gasloc(), "topology": "ring"},
    "slowmo": {"rule": "slowmo", "codec": gossamer.codecs.int8()},
    "streaming": {"rule": gossamer.diloco(), "schedule": gossamer.Schedule(fragments=2, overlap_steps=1)},
}


def simulated(**given: Any) -> gossamer.Simulation:
    return gossamer.simulate(**{**TASK, "workers": N, "local_steps": H, "rounds": ROUNDS, "seed": SEED, **given})


def train_in_own_loops(argv: list[str]) -> int:
    """The loop of a user, as one of several processes; leaves its numbers in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    worker, numbers = dist.get_rank(), {}
    for name, given in RULES.items():
        torch.manual_seed(SEED)
        model = net()
        losses, steps = [], optimizer(model.parameters())
        with gossamer.Outer(model, local_steps=H, seed=SEED, **given) as outer:
            for step in range(H * ROUNDS):
                steps.zero_grad()
                with outer.drawing():
                    value = loss(model, batch(worker, step))
                value.backward()
                steps.step()
                outer.step()
                losses.append(value.item())
            outer.finish()
        numbers[name] = {
            "losses": [math.fsum(losses[k : k + H]) / H for k in range(0, len(losses), H)],
            "x": flat(model).tolist(),
            "running": model[1].running_var.tolist(),
        }
    Path(argv[0], f"{worker}.json").write_text(json.dumps(numbers))
    dist.destroy_process_group()
    return 0


@pytest.mark.usefixtures("forks")
def test_losses_and_parameters_are_bitwise_those_of_processes_with_outer(tmp_path: Path):
    assert run_local(N, train_in_own_loops, [str(tmp_path)]) == 0
    real = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(N)]
    for name, given in RULES.items():
        run = simulated(**given)
        for i in range(N):
            ours = [value for value, w in zip(run.training["loss"], run.training["worker"], strict=True) if w == i]
            assert ours == real[i][name]["losses"], name
            model = run.model(i)
            assert isinstance(model, nn.Sequential) and isinstance(model[1], nn.BatchNorm1d)
            assert flat(model).tolist() == real[i][name]["x"], name
            assert model[1].running_var.tolist() == real[i][name]["running"], name


@pytest.mark.full
def test_a_simulation_stops_to_be_looked_at_and_continues_to_the_same_end(tmp_path: Path):
    whole, run = simulated(), simulated(until=1, out=tmp_path / "run")
    assert (run.rounds, run.over, len(run.validation["loss"])) == (1, False, 2)
    early = flat(run.mean_model())
    assert "round 1 of 4" in repr(run) and run.go_on(until=3).rounds == 3 and run.go_on().over
    assert torch.equal(flat(run.model(2)), flat(whole.model(2))) and not torch.equal(flat(run.mean_model()), early)
    assert dict(run.validation) == dict(whole.validation) and dict(run.training) == dict(whole.training)
    assert run.go_on().loss == whole.loss


def test_a_simulation_inside_inference_mode_has_the_bits_of_one_outside():
    whole = simulated()
    with torch.inference_mode():
        run = simulated(until=2).go_on()
        models = run.mean_model(), run.model(0)
    assert run.loss == whole.loss and torch.equal(flat(models[0]), flat(whole.mean_model()))
    assert not any(p.is_inference() for model in models for p in model.parameters())


@pytest.mark.full
def test_an_asynchronous_simulation_stops_and_continues_too():
    network = Network(step_s=1.0, uplink_bps=1e4, downlink_bps=1e4)
    for rule in ("delayed_nesterov", "ad_psgd", "gasloc"):
        given = {"rule": rule, "network": network, "settings": {"run.wait": False} if rule == "gasloc" else {}}
        whole, run = simulated(**given), simulated(until=2, **given)
        assert run.rounds == 2 and not run.over
        assert run.go_on().loss == whole.loss and dict(run.validation) == dict(whole.validation), rule
        assert run.time_s == whole.time_s and torch.equal(flat(run.mean_model()), flat(whole.mean_model()))
        with pytest.raises(ConfigError, match="asynchronous"):
            _ = run.trace


def test_a_resumed_simulation_has_the_bits_and_the_buffers_of_the_whole_one(tmp_path: Path):
    whole, given = simulated(), {"out": tmp_path / "run", "settings": {"run.checkpoint_every": H}}
    simulated(until=2, **given)
    again = simulated(resume=True, **given)
    assert again.loss == whole.loss
    for one, other in zip(again.model(0).state_dict().values(), whole.model(0).state_dict().values(), strict=True):
        assert torch.equal(one, other)


class _Recomputed(nn.Module):
    """Computes its forward pass again during the backward pass, with the same dropout, and slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(part for part in net() if not isinstance(part, nn.BatchNorm1d))
        )  # buffers ask for one thread

    def forward(self, x: Tensor) -> Tensor:
        again = checkpoint(self._slow, x.requires_grad_(), use_reentrant=False)
        assert isinstance(again, Tensor)
        return nn.functional.dropout(again, 0.1, self.training)

    def _slow(self, x: Tensor) -> Tensor:
        time.sleep(0.001)
        return self.inner(x)


class _Descent(torch.optim.Optimizer):
    """An optimizer of the user's that is not safe in several threads."""

    inside = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        type(self).inside += 1
        time.sleep(0.001)
        assert type(self).inside == 1
        for p in self.param_groups[0]["params"]:
            p.data -= 0.01 * p.grad
        type(self).inside -= 1


@pytest.mark.full
@pytest.mark.parametrize("rule", ["gasloc", "delayed_nesterov", "ad_psgd"])
def test_functions_of_the_user_are_called_one_at_a_time_in_all_threads_and_no_bit_changes(
    rule: str, monkeypatch: pytest.MonkeyPatch
):
    inside, threads = 0, set[int]()

    def alone(function: Any) -> Any:
        def call(*given: Any) -> Any:
            nonlocal inside
            inside += 1
            threads.add(threading.get_ident())
            time.sleep(0.001)
            assert inside == 1
            result = function(*given)
            inside -= 1
            return result

        return call

    def with_global_generator(worker: int, step: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1000 * worker + step)
        x = torch.randn(6, 4)
        time.sleep(0.001)
        return x, x.sum(1, keepdim=True) + torch.randn(6, 1)

    given: Any = {
        "model": _Recomputed,
        "data": alone(with_global_generator),
        "loss": alone(loss),
        "optimizer": _Descent,
        "rule": rule,
        "network": Network(step_s=1.0, uplink_bps=1e9, downlink_bps=1e9),
    }
    results = []
    for cores in (1, 3):
        monkeypatch.setattr(lanes, "available_cores", lambda cores=cores: cores)
        threads.clear()
        run = simulated(**given)
        assert len(threads - {threading.get_ident()}) == (cores if cores > 1 or rule == "gasloc" else 0)
        results.append((dict(run.training), dict(run.validation), [flat(run.model(0)).tolist()]))
    assert results[0] == results[1]


def steady() -> nn.Module:
    """Draws nothing, and has buffers that each forward pass changes."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def placed(worker: int, step: int) -> tuple[Tensor, Tensor, int, int]:
    return *batch(worker, step), worker, step


@pytest.mark.parametrize("network", [None, Network(step_s=1.0, uplink_bps=1e9, downlink_bps=1e9)])
def test_forward_passes_that_draw_nothing_run_at_once_with_the_bits_of_those_that_take_turns(
    network: Network | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "available_cores", lambda: N)
    together, inside = threading.Barrier(N), 0
    together_from = H if network is None else math.inf  # in pairs, workers need not be in their phases at once

    def at_once(model: nn.Module, given: tuple[Tensor, Tensor, int, int]) -> Tensor:
        if model.training and given[3] >= together_from:
            together.wait(timeout=60)
        return loss(model, given[:2])

    def alone(model: nn.Module, given: tuple[Tensor, Tensor, int, int]) -> Tensor:
        nonlocal inside
        inside += 1
        time.sleep(0.001)
        assert inside == 1
        inside -= 1
        return loss(model, given[:2])

    given: Any = {
        "model": steady,
        "data": placed,
        **({} if network is None else {"rule": "ad_psgd", "network": network}),
    }
    results = []
    for function, turns in ((at_once, False), (alone, True)):
        run = simulated(**given, loss=function, settings={"run.take_turns": turns})
        states = [[value.tolist() for value in run.model(i).state_dict().values()] for i in range(N)]
        results.append((dict(run.training), dict(run.validation), states))
    assert results[0] == results[1]


def test_a_forward_pass_that_begins_to_draw_later_is_made_again_and_all_take_turns_from_there_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "available_cores", lambda: N)
    drawn = list[int]()

    def late(model: nn.Module, given: tuple[Tensor, Tensor, int, int]) -> Tensor:
        x, y, worker, step = given
        if model.training and worker == 1 and step > H:
            drawn.append(step)
            x = nn.functional.dropout(x, 0.5)
        return loss(model, (x, y))

    results = []
    for turns in (False, True):
        run = simulated(model=steady, data=placed, loss=late, settings={"run.take_turns": turns})
        states = [[value.tolist() for value in run.model(i).state_dict().values()] for i in range(N)]
        results.append((dict(run.training), dict(run.validation), states))
        assert caplog.text.count("which the first one did not") == 1
    assert results[0] == results[1]
    later = [*range(H + 1, H * ROUNDS)]
    assert drawn == [later[0], *later, *later], "once too often, when it was noticed"


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, random.sample], ids=["torch", "numpy", "python"])
def test_forward_passes_that_draw_from_any_global_generator_take_turns(
    draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "available_cores", lambda: N)
    inside = 0

    def alone(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal inside
        inside += 1
        draw(*((range(4), 2) if draw is random.sample else (2,)))
        time.sleep(0.001)
        assert inside == 1
        inside -= 1
        return loss(model, given)

    assert math.isfinite(simulated(model=steady, loss=alone).loss)


def test_the_mean_model_has_the_mean_of_parameters_and_buffers_and_is_what_was_validated():
    run = simulated(validation=lambda k: batch(99, k))
    model = run.mean_model()
    assert isinstance(model, nn.Sequential) and isinstance(model[1], nn.BatchNorm1d)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, sum(run.model(i).state_dict()[name] for i in range(N)) / N)
    with torch.no_grad():
        losses = [loss(model, batch(99, k)).item() for k in range(run.config.run.eval_batches)]
    assert run.loss == math.fsum(losses) / len(losses)


def test_histories_are_columns_and_the_trace_has_a_price(tmp_path: Path):
    import pandas

    run = simulated(rule="diloco", network=Network(step_s=0.1, uplink_bps=1e6, downlink_bps=1e6))
    assert isinstance(run.training.to_pandas(), pandas.DataFrame)
    assert [*run.validation.to_pandas().columns] == ["round", "step", "tokens", "loss", "worker_losses", "disagreement"]
    assert run.tokens == N * H * ROUNDS * 6 and run.tokens_per_s > 0
    assert gossamer.price(run.trace, run.config.network["network"]).total_s == pytest.approx(run.time_s["network"])
    page = run.report(tmp_path / "page.html")
    assert "diloco" in page.read_text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"settings": {"server.name": "heloco"}},
        {"settings": {"pair.name": "ad_psgd"}, "topology": "ring"},
        {"rule": "data_parallel", "local_steps": 1},
    ],
    ids=["rounds", "server", "pairs", "gradients"],
)
def test_a_batch_that_ignores_its_worker_is_warned_of_once(given: Any, caplog: pytest.LogCaptureFixture):
    links = gossamer.Network(uplink_bps=1e6, downlink_bps=1e6, step_s=0.1)
    settings = {"network": links, **given}
    simulated(data=lambda worker, step: batch(0, step), **settings)
    assert caplog.text.count("all 3 workers begin with the same batch") == 1
    caplog.clear()
    simulated(**settings)
    simulated(data=lambda worker, step: batch(0, step), workers=1, topology="complete")
    assert "the same batch" not in caplog.text


def test_a_temporary_record_goes_with_its_simulation():
    run = simulated(rounds=1)
    folder = run.folder
    assert (folder / "metrics.jsonl").exists()
    del run
    gc.collect()
    assert not folder.exists()


def test_a_temporary_record_goes_with_a_simulation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TrainingError, match="nan"):
        simulated(loss=lambda model, given: model(given[0]).sum() * math.nan)
    with pytest.raises(ConfigError, match="until got -1"):
        simulated(until=-1)
    assert not [*tmp_path.glob("gossamer-*")]


def test_an_unknown_column_or_worker_of_a_simulation_is_refused_with_the_known_ones():
    run = simulated(rounds=1)
    with pytest.raises(KeyError, match="unknown column 'los'; did you mean 'loss'"):
        run.validation["los"]
    assert run.validation.get("los") is None
    for worker in (-1, 3):
        with pytest.raises(ConfigError, match=f"worker {worker}, but the run keeps the models of 0 to 2"):
            run.model(worker)


def test_everything_has_a_default():
    run = gossamer.simulate(
        workers=2, local_steps=1, rounds=1, settings={"model.size": "0.2m", "data.seq_len": 8, "data.max_bytes": 10**5}
    )
    assert run.config.rule.name == "gasloc" and run.loss > 0


@pytest.mark.full
def test_a_run_file_a_dictionary_and_keywords_describe_one_run(tmp_path: Path):
    small = {"model": {"size": "0.2m"}, "data": {"seq_len": 8, "batch_size": 2, "max_bytes": 10**5}}
    settings = {**small, "workers": 2, "run": {"steps": 2, "local_steps": 1}, "rule": "diloco", "topology": "complete"}
    file = tmp_path / "run.toml"
    first = gossamer.simulate(settings, tmp_path / "first")
    file.write_text((tmp_path / "first" / "run.toml").read_text())
    losses = {first.loss, gossamer.simulate(file).loss, gossamer.simulate(file, rule=gossamer.diloco()).loss}
    assert len(losses) == 1
    assert gossamer.simulate(file, seed=1).loss not in losses


@pytest.mark.full
def test_a_folder_of_transformers_is_a_model(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    text = {"data.seq_len": 8, "data.batch_size": 2, "data.max_bytes": 10**5}
    run = gossamer.simulate(
        None,
        tmp_path / "run",
        model=tmp_path / "small",
        workers=2,
        local_steps=1,
        rounds=2,
        settings={**text, "record.export": True},
    )
    assert type(run.mean_model()).__name__ == "LlamaForCausalLM"
    opened = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "model")
    assert torch.equal(flat(opened), flat(run.mean_model()))
    with pytest.raises(ConfigError, match="save_pretrained"):
        gossamer.simulate(model=tmp_path, workers=2, local_steps=1, rounds=1)


def test_a_graph_is_a_topology():
    import networkx

    edges = [(0, 1), (1, 2), (2, 3), (3, 0)]
    of_edges, of_graph = (simulated(topology=one, workers=4) for one in (edges, networkx.cycle_graph(4)))
    assert of_edges.config.workers == 4
    assert of_edges.loss == of_graph.loss == simulated(topology=ring(4), workers=4).loss
    assert edges_of(networkx.Graph([(0, 2), (2, 1)])) == edges_of([(0, 2), (2, 1)]) == (3, [[0, 2], [2, 1]])
    weighted = networkx.Graph([("a", "b", {"weight": 0.5}), ("b", "c", {"weight": 0.25})])
    assert simulated(topology=weighted).config.topology.options["edges"] == [[0, 1, 0.5], [1, 2, 0.25]]
    assert graph(3, edges=[(0, 1, 0.5), (1, 2, 0.25)]).mixing(0).rows[1] == ((0, 0.5), (1, 0.25), (2, 0.25))
    alive = graph(4, edges=edges).mixing(0, frozenset({0, 1, 3}))
    assert [alive.receives_from(i) for i in range(4)] == [(1, 3), (0,), (), (0,)]


@pytest.mark.parametrize(
    ("edges", "match"),
    [
        ([(0, 1)], "do not connect worker 2"),
        ([(0, 1), (1, 3)], "from 0 to 2"),
        ([(0, 0), (0, 1), (1, 2)], "two different workers"),
        ([(0, 1, 0.7), (1, 2, 0.7)], "worker 1 sum to 1.4"),
        ([(0, 1, 0.5), (1, 2)], "1 of 2 edges without a weight"),
        ([(0, 1, -0.5), (1, 2, 0.5)], "above 0"),
    ],
)
def test_an_impossible_graph_is_refused(edges: Any, match: str):
    with pytest.raises(ConfigError, match=match):
        graph(3, edges=edges)


CALLS = iter(range(10**6))


class Pair(nn.Module):
    """Logits, and the loss that was not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, tokens):
        return self.table(tokens), None


ONE = nn.Linear(4, 1)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "impure data": (
        {"data": lambda i, t: (torch.rand(6, 4), torch.ones(6, 1))},
        ConfigError,
        "different batches for worker 0",
    ),
    "a model with other numbers": (
        {"model": lambda: filled(next(CALLS))},
        ConfigError,
        "other parameters when called again",
    ),
    "no model": ({"model": lambda: "a model"}, ConfigError, "returned a str where a Module is needed"),
    "a module": ({"model": nn.Linear(4, 1)}, ConfigError, "each worker needs its own"),
    "no scalar": ({"loss": lambda model, given: model(given[0])}, ConfigError, r"shape \(6, 1\); return a scalar"),
    "no tensor": ({"loss": lambda model, given: 1.0}, ConfigError, "returned a float"),
    "one model for all": (
        {"model": lambda: ONE},
        ConfigError,
        "^model is '<lambda>', which returned the same .* twice; make a new model in each call",
    ),
    "an optimizer of another model": (
        {"optimizer": lambda parameters: torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)},
        ConfigError,
        "^optimizer is '<lambda>', which returned a SGD with none of the 6 parameters that it was called with",
    ),
    "no optimizer": ({"optimizer": lambda parameters: list(parameters)}, ConfigError, "returned a list"),
    "an argument too few": ({"data": lambda worker: worker}, UserCodeError, "^data 'test_simulation:<lambda>' failed"),
    "no scalar, by keyword": (
        {"loss": lambda model, given: None},
        ConfigError,
        "^loss is '<lambda>', which returned a Non",
    ),
    "a rate for another's optimizer": (
        {"settings": {"inner.lr": 1e-3, "inner.clip": 1.0}},
        ConfigError,
        r"settings has inner\.lr and optimizer is yours, .* where you make the optimizer",
    ),
    "an option beside a rule that is made": (
        {"rule": gossamer.diloco(), "settings": {"rule.lr": 0.5}},
        ConfigError,
        r"settings has rule\.lr and rule is yours, which is taken as it is",
    ),
    "a width beside a model of the user's": (
        {"settings": {"model.layers": 3}},
        ConfigError,
        r"has model\.layers and model",
    ),
    "a size of batches that a function makes": (
        {"settings": {"data.batch_size": 3}},
        ConfigError,
        r"has data\.batch_size",
    ),
    "a tokenizer that nothing needs": ({"settings": {"data.tokenizer": "a.json"}}, ConfigError, r"has data\.tokenizer"),
    "a length given twice": (
        {"settings": {"run.steps": 4}},
        ConfigError,
        "rounds was given, and settings has run.steps too",
    ),
    "a pair, and no loss": (
        {"model": Pair, "data": lambda worker, step: torch.ones(2, 3, dtype=torch.int64), "loss": None},
        ConfigError,
        r"^loss was not given, .* returned a tuple; give loss\(model, batch\)",
    ),
    "an exception": ({"loss": lambda model, given: model(given[2])}, UserCodeError, "IndexError"),
    "an exception in a rule": (
        {"rule": drawn(recv=lambda *_: 1 / 0)},
        UserCodeError,
        "^recv of rule 'drawn' failed with ZeroDivisionError: division by zero; its traceback is above",
    ),
    "an exception in a combination": (
        {"rule": drawn(combine=lambda *_: 1 / 0)},
        UserCodeError,
        "^combine of rule 'drawn'",
    ),
    "too short an update": (
        {"rule": drawn(recv=lambda x, s, own, c, ctx: (x[1:], s))},
        ConfigError,
        r"^recv of rule 'drawn' returned tensors of the shapes \[\(64,\)\], and \[\(65,\)\] are needed",
    ),
    "a state that grows": (
        {"rule": drawn(recv=lambda x, s, own, c, ctx: (x, (x,)))},
        ConfigError,
        "^recv of rule 'drawn' returned tensors of the shapes",
    ),
    "an update to be learned": (
        {"rule": drawn(recv=lambda x, s, own, c, ctx: (nn.Parameter(x + c), s))},
        ConfigError,
        "^recv of rule 'drawn' returned a tensor that requires a gradient",
    ),
    "a number as state": (
        {"rule": drawn(init=lambda x, ctx: (x.clone(), 0))},
        ConfigError,
        "^init .* a tree with a int",
    ),
    "a part as message": (
        {"rule": drawn(send=lambda x, s, ctx: x[:3])},
        ConfigError,
        r"^send of rule 'drawn' returned a tensor of shape \(3,\) for an x of \(65,\)",
    ),
    "an exception in a codec": (
        {"codec": coded(encode=lambda x, key: 1 / 0)},
        UserCodeError,
        "^encode of the codec failed",
    ),
    "a payload that depends on numbers": (
        {"codec": coded(encode=lambda x, key: x[x > 0])},
        ConfigError,
        "^decode of the codec returned tensors of the shapes",
    ),
    "a payload of another size": (
        {"codec": coded(payload_bytes=lambda numel: numel)},
        ConfigError,
        "^encode of the codec returned .* bytes for .* elements, and payload_bytes says",
    ),
    "an exception in a topology": (
        {"topology": Topology(N, lambda round, alive=None: [][round], doubly_stochastic=True)},
        UserCodeError,
        "^mixing of the topology failed with IndexError",
    ),
    "an edge to itself": ({"topology": linked((1, 1, 0.5))}, ConfigError, r"has the edge \(1, 1, 0.5\); give"),
    "an edge one way": (
        {"topology": linked((0, 1, 0.5))},
        ConfigError,
        "0.5 is taken of worker 0, and the topology claims",
    ),
    "weights above one": (
        {"topology": linked((0, 1, 5.0), (1, 0, 5.0))},
        ConfigError,
        "worker 0 takes -4 of worker 0, and the topology claims doubly_stochastic",
    ),
    "an exception in an optimizer": (
        {"optimizer": lambda parameters: Unmoved(parameters, lr=0.1)},
        UserCodeError,
        "^optimizer 'test_simulation:Unmoved.step' failed with LookupError: no step",
    ),
    "an exception in a model": (
        reading(lambda x: x[7, 7]),
        UserCodeError,
        "^model '<lambda>' failed with IndexError",
    ),
    "logits of some tokens": (
        reading(lambda x: x[:, :2]),
        ConfigError,
        r"needs logits for \(2, 4\) tokens, but the model returned a tensor of shape \(2, 2, 256\)",
    ),
    "logits without a gradient": (
        reading(lambda x: x.detach()),
        ConfigError,
        "^model '<lambda>' gives training a loss",
    ),
    "a loss without a gradient": ({"loss": lambda model, given: torch.ones(())}, ConfigError, "^loss '<lambda>' gives"),
    "a rule not called": ({"rule": gossamer.gasloc}, ConfigError, "'gasloc', which was not called"),
    "an unknown keyword": ({"worker": 3}, ConfigError, "did you mean 'workers'"),
    "an unknown key": ({"settings": {"inner.lrr": 1.0}}, ConfigError, "did you mean 'lr'"),
    "a wrong type": ({"workers": "3"}, ConfigError, "workers is a str"),
    "a worker left out": ({"topology": [(0, 1), (1, 7)]}, ConfigError, "between 0, 1, 7; number the workers from 0"),
    "no graph": ({"topology": 5}, ConfigError, "which is no graph"),
    "a loss that is not finite": (
        {"loss": lambda model, given: model(given[0]).sum() * math.nan},
        TrainingError,
        "nan",
    ),
}


def filled(value: float) -> nn.Module:
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, value)
    return model


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_in_a_sentence(name: str):
    given, kind, match = WRONG[name]
    with pytest.raises(kind, match=match) as caught:
        simulated(**given)
    if kind is UserCodeError:
        assert caught.value.__cause__ is not None


def test_a_directed_graph_is_refused_in_a_sentence():
    import networkx

    with pytest.raises(ConfigError, match="undirected"):
        simulated(topology=networkx.DiGraph([(0, 1)]))


@pytest.mark.full
def test_a_sweep_has_all_combinations_and_seeds_in_one_table(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    grid = {"rule": [gossamer.gasloc(), gossamer.diloco()], "inner.lr": [1e-3, 1e-2]}
    given: Any = {key: value for key, value in TASK.items() if key != "optimizer"}
    sweep = gossamer.sweep(grid, seeds=[0, 1], workers=2, local_steps=2, rounds=2, **given)
    assert len(sweep.runs) == 8 and sweep.table["seed"] == [0, 1] * 4
    assert sweep.table["rule"] == ["gasloc"] * 4 + ["diloco"] * 4
    alone = gossamer.simulate(
        workers=2, local_steps=2, rounds=2, rule=gossamer.diloco(), settings={"inner.lr": 1e-2}, **given
    )
    assert sweep.table["loss"][6] == alone.loss
    assert sweep.best().at["inner.lr"] in (1e-3, 1e-2)
    page = sweep.report(tmp_path / "page.html").read_text()
    assert "diloco lr=0.01 seed=1" in page and "nesterov)" not in page.partition("Configurations")[0]
    assert "All seeds have the same batches in the same order" in page and "momentum 0.9 of rule 'diloco'" in page
    assert "At these settings, for which this comparison did not search." in page
    assert [line for line in caplog.messages if "some 30 rounds and this run has 2" in line]
    with pytest.raises(ConfigError, match="lists of values"):
        gossamer.sweep("run.toml", **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lists of values"):
        gossamer.sweep({"seed": 3}, **given)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"seeds is 3; give a list of whole numbers, such as \[0, 1, 2\]"):
        gossamer.sweep(grid, seeds=3, **given)
    with pytest.raises(ConfigError, match=r"seeds is \[0, 0\], which has a number twice"):
        gossamer.sweep(grid, seeds=[0, 0], **given)
    with pytest.raises(
        ConfigError, match=r"a sweep runs each combination with all of its seeds; give seeds=\[0, 1, 2\]"
    ):
        gossamer.sweep({"seed": [0, 1]}, **given)
    with pytest.raises(ConfigError, match="rule is in the grid and was given for all runs too"):
        gossamer.sweep(grid, rule="diloco", **given)
    with pytest.raises(ConfigError, match=r"settings has rule\.lr and rule is yours"):  # it compared a run with itself
        gossamer.sweep({"rule.lr": [0.5, 1.0]}, rule=gossamer.diloco(), rounds=1, **given)


def test_rules_of_ones_own_without_a_name_are_numbered_on_the_page_of_a_sweep(tmp_path: Path):
    made = [gossamer.diloco(lr=eta)._replace(name="", options={}) for eta in (0.5, 1.0)]
    sweep = gossamer.sweep({"rule": made}, seeds=[0, 1], workers=2, local_steps=2, rounds=1, **TASK)
    assert sweep.table["rule"] == ["rule 1", "rule 1", "rule 2", "rule 2"]
    page = sweep.report(tmp_path / "page.html").read_text()
    assert "<th>rule 1 seed=1</th>" in page and "<th>rule 2 seed=1</th>" in page, "one replaced the other"


def test_a_run_of_a_sweep_that_diverges_is_a_result(tmp_path: Path):
    def exploding(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return model(given[0]).exp().square().mean()

    task = {**TASK, "model": lambda: nn.Linear(4, 1), "loss": exploding}
    del task["optimizer"]
    grid = {"inner.lr": [1e-4, 1e3]}
    sweep = gossamer.sweep(grid, workers=2, local_steps=4, rounds=3, settings={"inner.warmup_steps": 0}, **task)
    assert [math.isfinite(one.loss) for one in sweep.runs] == [True, False] and sweep.runs[1].error
    assert sweep.best().at == {"inner.lr": 1e-4}
    page = sweep.report(tmp_path / "page.html").read_text()
    assert "lr=1000.0 seed=0" in page and "1 more ended without a finite loss" in page


def test_what_was_given_as_objects_is_named_in_the_record_and_the_folder_is_not_run_without_them(tmp_path: Path):
    simulated(out=tmp_path / "run", rule=gossamer.gasloc(lr=0.5))
    there = load_run(tmp_path / "run")
    assert there["model"]["size"] == f"{__name__}:net" and there["rule"]["name"] == "python:gasloc"
    with pytest.raises(ConfigError, match="run that program again"):
        gossamer.simulate(tmp_path / "run", tmp_path / "again")


def own_rate(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


def test_an_optimizer_of_the_users_keeps_its_own_learning_rate():
    assert simulated(optimizer=own_rate).loss == simulated().loss


def test_a_folder_whose_model_and_data_are_in_a_module_is_evaluated_by_its_name_alone(tmp_path: Path):
    run = simulated(out=tmp_path, rule=gossamer.gasloc(lr=0.5))
    finished, assessment, _ = evaluate(tmp_path, parts=own_parts(run.config, UNUSED))
    assert (finished, assessment.loss, assessment.disagreement) == (
        ROUNDS,
        run.loss,
        run.validation["disagreement"][-1],
    )
    with pytest.raises(ConfigError, match="neither may be a function"):
        evaluate(tmp_path, parts=own_parts(run.config, UNUSED), source="stdlib")


def test_keywords_fit_into_settings_that_lack_their_table():
    small = {"model": {"size": "0.2m"}, "data": {"seq_len": 8, "batch_size": 2, "source": str(Path(__file__))}}
    run = gossamer.simulate({**small, "workers": 2, "run": {"local_steps": 2}}, rounds=1, rule="diloco")
    assert (run.config.run.steps, run.config.topology.name) == (2, "complete")


@pytest.mark.full
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    notebook = json.loads((Path(__file__).parents[3] / "examples" / "simulate.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 5 and not any(cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for source in code:
        exec(compile(source, "simulate.ipynb", "exec"), scope)


def test_pandas_is_asked_for_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    run = simulated(rounds=1)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        run.training.to_pandas()
    assert os.path.isdir(run.folder)
