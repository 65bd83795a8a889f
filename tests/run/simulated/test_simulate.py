"""The simulator as a user sees it: what it leaves behind, and that stopping it anywhere costs nothing."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from commands import Command
from gossamer.cli import main
from gossamer.errors import CheckpointError, ConfigError, TrainingError
from gossamer.optimizers import AccumAdamW, Joined, SpectralMuon, inner
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.trace import read_trace
from gossamer.record.machines import Threads
from gossamer.report.table import DASH, summary_rows, table_cells
from gossamer.rounds.kernel import compiled
from gossamer.rules import RULES
from gossamer.run.bookkeeping.evaluate import mean_of
from gossamer.run.bookkeeping.finished import is_finished
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import digest, dump
from gossamer.run.simulated import threads as lanes
from gossamer.run.simulated.rounds import Rounds
from gossamer.run.simulated.simulate import simulate
from gossamer.run.worker.replica import Replica
from gossamer.transport.processes.launch import available_cores
from gossamer.tree import leaves
from tiny import DEVICE, single, tiny


def vectors(folder, config, finished=None):
    """The parameters of all workers after the last round, or an earlier one that was kept."""
    finished = config.length.rounds if finished is None else finished
    return [checkpoint.load(folder / "checkpoints", finished, w, digest(config))["x"] for w in range(config.workers)]


def same_run(a, b, config):
    """Whether two run folders hold the same parameters, metrics and messages."""
    parameters = all(map(torch.equal, vectors(a, config), vectors(b, config)))
    traces = [read_trace(folder) for folder in (a, b)]
    messages = all((x == y).all() for x, y in zip(traces[0].messages, traces[1].messages, strict=True))
    return parameters and messages and read_metrics(a) == read_metrics(b)


@pytest.mark.parametrize(("rule", "stop"), [("data_parallel", 2), ("gasloc", 2)])
def test_a_run_that_is_stopped_and_resumed_equals_the_uninterrupted_run(rule, stop, tmp_path):
    """That the state of every rule is all that it keeps is a promise, which `test_rules` checks."""
    everyone = RULES[rule]().needs == "everyone"
    config = single(
        rule__name=rule,
        topology__name="complete" if everyone else "random",
        run__local_steps=1 if rule == "data_parallel" else 2,
        run__steps=4 if rule == "data_parallel" else 8,
        inner__optimizer="muon",
    )
    simulate(config, tmp_path / "whole")
    simulate(config, tmp_path / "parts", until=stop + 1)  # after the checkpoint of round `stop` or later
    simulate(config, tmp_path / "parts", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "parts", config)


CLOCK = {"clock": {"step_s": 0.1, "uplink_bps": 1e8, "downlink_bps": 1e8}}


@pytest.mark.parametrize("way", [{"run__eval_every": 2}, {"run__wait": False, "network": CLOCK}])
def test_a_validation_of_the_mean_model_alone_finds_the_same_without_losses_of_workers(way, tmp_path, capsys):
    every, alone = single(run__steps=4, **way), single(run__steps=4, run__eval_workers=False, **way)
    for name, config in (("every", every), ("alone", alone)):
        simulate(config, tmp_path / name)
    lines = {name: [x for x in read_metrics(tmp_path / name) if x["kind"] == "eval"] for name in ("every", "alone")}
    assert all(len(line["worker_losses"]) == 3 for line in lines["every"])
    assert lines["alone"] == [{**line, "worker_losses": []} for line in lines["every"]]
    assert is_finished(settings_of(alone), tmp_path / "every")
    with pytest.raises(ConfigError, match="other settings"):
        is_finished(settings_of(every), tmp_path / "alone")
    if every.kind == "rounds":
        headings, (_, cells) = table_cells(summary_rows({x: tmp_path / x for x in lines}, {}))
        assert cells[headings.index("worst worker")] == DASH
        assert main(["evaluate", str(tmp_path / "alone")]) == 0
        assert f"mean model {lines['alone'][-1]['loss']:.4f} nats, disagreement" in capsys.readouterr().out


def test_the_number_of_threads_that_share_the_workers_changes_no_bit_and_dropout_draws_the_same_after_a_resume(
    tmp_path, monkeypatch
):
    config = single(model__dropout=0.2, run__steps=6)
    before = torch.get_rng_state()
    monkeypatch.setattr(lanes, "available_cores", lambda: 3)
    simulate(config, tmp_path / "threads")
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator is left as it was"
    monkeypatch.setattr(lanes, "available_cores", lambda: 1)
    torch.manual_seed(7)
    simulate(config, tmp_path / "one", until=2)
    torch.manual_seed(8)
    simulate(config, tmp_path / "one", resume=True)
    assert same_run(tmp_path / "threads", tmp_path / "one", config)
    simulate(single(run__steps=2), tmp_path / "without")
    plain, dropped = (
        next(line["loss"] for line in read_metrics(tmp_path / name) if line["kind"] == "train")
        for name in ("without", "one")
    )
    assert plain != dropped


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "topology", "options"),
    [
        ("diloco", "complete", {"fragments": 2, "overlap_steps": 3, "merge": 0.5}),
        ("diloco", "complete", {"fragments": 2, "overlap_steps": 3, "merge": "taylor"}),
        ("gasloc", "random", {"fragments": 2, "overlap_steps": 2}),
        ("eager", "complete", {}),
        ("local_sgd", "complete", {"inner_every": (2, 3)}),
        ("fgd", "random", {"fragments": 2, "rule__mix_updates": "complete"}),
    ],
)
def test_messages_in_flight_at_a_checkpoint_are_sent_again_and_received_as_without_it(
    rule, topology, options, tmp_path
):
    schedule = {name if "__" in name else f"schedule__{name}": value for name, value in options.items()}
    config = tiny(
        rule__name=rule,
        topology__name=topology,
        run__local_steps=[4, 2, 3],
        run__steps=12,
        run__checkpoint_every=4,
        model__layers=options.get("fragments", 1),
        **schedule,
    )
    simulate(config, tmp_path / "whole")
    simulate(config, tmp_path / "parts", until=2)
    simulate(config, tmp_path / "parts", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "parts", config)


@pytest.mark.full
def test_a_run_that_is_killed_at_any_moment_and_resumed_equals_the_uninterrupted_run(tmp_path):
    config = single(run__steps=80, run__eval_every=0)  # forty rounds: the kill comes long before it ends
    simulate(config, tmp_path / "whole")
    (tmp_path / "run.toml").write_text(dump(config))
    for reached in (1, 20):
        killed = tmp_path / f"{reached}"
        command = Command("simulate", tmp_path / "run.toml", "--out", killed)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            saved = [int(path.parent.name[6:]) for path in (killed / "checkpoints").glob("round-*/worker-002.json")]
            if max(saved, default=0) >= reached:
                break
            time.sleep(0.005)
        command.kill()
        assert command.finish()[0] == -signal.SIGKILL
        simulate(config, killed, resume=True)
        assert same_run(tmp_path / "whole", killed, config)


def test_uneven_local_steps_and_non_iid_shards_train_and_compute_each_worker_its_own_share(tmp_path):
    config = single(run__local_steps=[2, 1, 2], data__shards="contiguous")
    simulate(config, tmp_path / "run")
    assert read_trace(tmp_path / "run").steps.sum(axis=0).tolist() == [12, 6, 12]
    final = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "eval"][-1]
    assert final["disagreement"] > 0 and len(set(final["worker_losses"])) == 3


def test_the_last_round_may_have_fewer_steps_stopped_batched_or_at_once(tmp_path):
    steps = {"run__steps": 11, "run__local_steps": {"0": [4, 4, 2], "8": [1, 3, 2]}}
    config = single(**steps)
    batched = single(**steps, run__batched=2, inner__optimizer="sgd")
    simulate(config, tmp_path / "whole")
    simulate(batched, tmp_path / "batched")
    for folder in ("whole", "batched"):
        assert read_trace(tmp_path / folder).steps.tolist() == [[4, 4, 2], [4, 4, 2], [1, 3, 2]]
    last = read_metrics(tmp_path / "whole")[-1]
    assert last["tokens"] == sum(resolve(config).worker_tokens) == 26 * config.length.step_tokens
    simulate(config, tmp_path / "parts", until=2)
    simulate(config, tmp_path / "parts", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "parts", config)
    with pytest.raises(ConfigError, match=r"run\.local_steps\[8\] has 2 entries for 3 workers"):
        single(run__steps=11, run__local_steps={"0": [4, 4, 2], "8": [1, 3]})
    with pytest.raises(ConfigError, match=r"schedule\.fragments is 2 and a round has 1 inner"):
        resolve(tiny(run__local_steps={"0": 4, "4": 1}, run__steps=5, schedule__fragments=2))


def test_a_table_of_one_number_of_local_steps_has_the_bits_of_the_number(tmp_path):
    config, table = single(run__local_steps=1), single(run__local_steps={"0": 1, "6": 1})
    simulate(config, tmp_path / "number")
    simulate(table, tmp_path / "table")
    pairs = zip(vectors(tmp_path / "number", config), vectors(tmp_path / "table", table), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert read_metrics(tmp_path / "number") == read_metrics(tmp_path / "table")


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"rule__name": "eager", "topology__name": "complete", "run__weigh_steps": True}])
def test_a_run_whose_local_steps_grow_resumes_within_a_stretch_to_the_same_bits(more, tmp_path):
    """The entry at the begin of a round counts for all of it, so that the one at step 5 comes into force at step 6."""
    config = single(run__steps=26, run__local_steps={"0": 2, "5": [4, 2, 4], "12": 6}, run__checkpoint_every=1, **more)
    simulate(config, tmp_path / "whole")
    assert read_trace(tmp_path / "whole").steps.tolist() == [[2] * 3] * 3 + [[4, 2, 4]] * 2 + [[6] * 3] * 2
    lines = [line for line in read_metrics(tmp_path / "whole") if line["kind"] == "eval"]
    assert [line["step"] for line in lines] == [0, 6, 14, 20, 26] and lines[-1]["tokens"] == sum(
        resolve(config).worker_tokens
    )
    for stop in (2, 4):
        simulate(config, tmp_path / f"{stop}", until=stop)
        simulate(config, tmp_path / f"{stop}", resume=True)
        assert same_run(tmp_path / "whole", tmp_path / f"{stop}", config)


@pytest.mark.parametrize(("rule", "moves"), [("data_parallel", 0.01), ("demo", None)])
def test_clipping_shortens_the_mean_gradient_but_no_step_along_a_sign(rule, moves, tmp_path):
    """Of a sign it would leave a step a hundredth as long, whatever the gradients are."""
    asked = {"run__steps": 2, "run__local_steps": 1, "run__checkpoint_every": 1, "inner__clip": 0.01, "inner__lr": 1.0}
    sgd = {"inner__optimizer": "sgd", "inner__momentum": 0.0, "inner__schedule": "constant", "inner__weight_decay": 0.0}
    config = single(rule__name=rule, topology__name="complete", inner__warmup_steps=0, **asked, **sgd)
    simulate(config, tmp_path / "run")
    first, second = (vectors(tmp_path / "run", config, finished) for finished in (1, 2))
    moved = second[0] - first[0]
    if moves is None:
        assert set(moved.abs().round(decimals=3).tolist()) <= {0.0, 1.0} and moved.count_nonzero() > 0.5 * len(moved)
    else:
        assert moved.norm().item() == pytest.approx(moves, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(("rule", "topology", "batched"), [("gasloc", "random", 1), ("diloco", "complete", 3)])
def test_a_synchronous_start_is_data_parallelism_and_ends_with_equal_workers_and_a_fresh_outer_state(
    rule, topology, batched, tmp_path
):
    steps = {"run__steps": 14, "run__checkpoint_every": 1, "run__eval_every": 4, "run__batched": batched}
    sgd = {"inner__optimizer": "sgd", "inner__momentum": 0.9, "inner__schedule": "cosine"}
    start = {"run__synchronous_steps": 4, "run__local_steps": {"0": 3, "9": 2}}
    config = single(rule__name=rule, topology__name=topology, **start, **steps, **sgd)
    parallel = single(rule__name="data_parallel", topology__name="complete", run__local_steps=1, **steps, **sgd)
    simulate(config, tmp_path / "whole")
    simulate(parallel, tmp_path / "parallel", until=4)
    assert read_trace(tmp_path / "whole").steps[:, 0].tolist() == [1, 1, 1, 1, 3, 3, 2, 2]
    for stop in (2, 4, 5):
        simulate(config, tmp_path / f"{stop}", until=stop)
        if stop == 4:
            alike = vectors(tmp_path / "parallel", parallel, 4)
            assert all(torch.equal(x, alike[0]) for x in [*alike, *vectors(tmp_path / "4", config, 4)])
        simulate(config, tmp_path / f"{stop}", resume=True)
        assert same_run(tmp_path / "whole", tmp_path / f"{stop}", config), stop
    engine = Rounds(resolve(config), tmp_path / "fresh")
    with engine.opened():
        for _ in range(4):
            engine.advance()
        for worker in engine.workers:
            worker.begin_round(4)
            kept, x = leaves(worker.loop.state), worker.replica.x
            assert kept and all(torch.equal(leaf, x) or not leaf.any() for leaf in kept)


def test_rounds_grow_as_the_learning_rate_comes_down_and_a_resume_keeps_the_length_that_they_follow(tmp_path):
    qsr = {"shape": "qsr", "base": 2, "alpha": 0.003}
    config = single(run__steps=40, run__local_steps=qsr, run__checkpoint_every=1)
    simulate(config, tmp_path / "run", until=2)
    with pytest.raises(ConfigError, match=r"rounds would begin at other inner steps.*leave .*run\.steps as they were"):
        simulate(single(run__steps=60, run__local_steps=qsr), tmp_path / "run", resume=True)
    simulate(config, tmp_path / "run", resume=True)
    assert read_trace(tmp_path / "run").steps[:, 0].tolist() == [9, 9, 18, 4]


def test_training_lowers_the_loss_on_text_that_was_held_out(tmp_path):
    config = single(
        run__steps=30, run__local_steps=5, run__eval_every=5, inner__lr=8e-3, data__batch_size=8, data__seq_len=32
    )
    simulate(config, tmp_path / "run")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if line["kind"] == "eval"]
    assert losses[0] > 4.2 and losses[-1] < 0.8 * losses[0]  # how far down depends on what the decisions say


def test_data_parallel_workers_equal_one_worker_with_their_batches_together(tmp_path):
    """Gradients averaged over three workers are those of one worker that accumulates three micro-batches."""
    options = {
        "rule__name": "data_parallel",
        "topology__name": "complete",
        "run__local_steps": 1,
        "run__steps": 4,
        "inner__optimizer": "sgd",
    }
    three = single(**options)
    simulate(three, tmp_path / "three")
    assert all(torch.equal(vectors(tmp_path / "three", three)[0], x) for x in vectors(tmp_path / "three", three))
    local = single(
        **{**options, "rule__name": "local_sgd"}
    )  # with SGD, averaging after one step is averaging the gradients
    simulate(local, tmp_path / "local")
    torch.testing.assert_close(
        vectors(tmp_path / "three", three)[0], vectors(tmp_path / "local", local)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "spectral_muon", "adamw"])
def test_workers_whose_steps_are_one_step_leave_what_each_alone_would(tmp_path, monkeypatch, optimizer):
    config = single(
        rule__name="data_parallel",
        topology__name="complete",
        run__local_steps=1,
        run__steps=4,
        inner__optimizer=optimizer,
        inner__clip=0.1,
    )
    stepped = []
    step = Replica.step_on_gradient
    monkeypatch.setattr(Replica, "step_on_gradient", lambda own, round: (stepped.append(own.index), step(own, round)))
    simulate(config, tmp_path / "once")
    assert len(stepped) == (12 if optimizer == "adamw" else 6)  # at first each has no moments yet
    monkeypatch.setattr(Replica, "steps_like", lambda own, other: False)
    simulate(config, tmp_path / "each")
    assert same_run(tmp_path / "once", tmp_path / "each", config)  # with their learning rates
    for worker in range(3):
        states = [
            checkpoint.load(tmp_path / name / "checkpoints", 4, worker, digest(config)) for name in ("once", "each")
        ]
        mine, theirs = (tree_leaves(state["inner"]) for state in states)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class Counting(torch.optim.SGD):
    """Keeps a count where no parameter's state is."""

    def step(self, closure=None):
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        return super().step(closure)


def joined(parameters):
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return Joined(muon=SpectralMuon(matrices[:-1]), adamw=AccumAdamW(matrices[-1:]), counting=Counting(rest, lr=0.1))


def test_each_worker_makes_the_steps_of_an_optimizer_of_the_users(tmp_path):
    config = single(rule__name="data_parallel", topology__name="complete", run__local_steps=1, run__steps=4)
    ended = simulate(config, tmp_path / "run", optimizer=joined)
    folder, name = tmp_path / "run" / "checkpoints", digest(ended.config)
    states = [checkpoint.load(folder, 4, worker, name)["inner"] for worker in range(3)]
    assert [state["counting"]["param_groups"][0]["taken"] for state in states] == [4, 4, 4]
    assert [{one["step"] for one in state["adamw"]["state"].values()} for state in states] == [{4}] * 3


def test_a_run_that_asks_for_it_has_its_outer_updates_compiled(tmp_path, request):
    """That these have the same bits is what `test_exchange` and `test_master` see; with `--full`, a whole run is compared."""
    plain, fused = single(run__steps=4), single(run__steps=4, run__compile=True)
    assert resolve(fused).in_rounds.kernel is compiled() is not resolve(plain).in_rounds.kernel
    if request.config.getoption("--full"):
        simulate(plain, tmp_path / "plain")
        simulate(fused, tmp_path / "compiled")
        assert same_run(tmp_path / "plain", tmp_path / "compiled", plain)


def test_more_threads_than_cores_are_warned_of(tmp_path, caplog):
    threads = available_cores() + 1
    simulate(single(run__steps=2, run__threads=threads), tmp_path / "run")
    assert f"{threads} threads oversubscribe" in caplog.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("computes", "fast"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("key", "value"), [("autocast", "bf16"), ("optimizer", "muon"), ("optimizer", "adamw")])
def test_products_in_bf16_on_a_processor_that_is_slow_in_them_are_warned_of_once(
    key, value, computes, fast, tmp_path, caplog, monkeypatch
):
    inner._warn.cache_clear()
    monkeypatch.setattr(inner, "computes_bf16", lambda: computes)
    monkeypatch.setattr(inner, "is_fast_in_bf16", lambda: fast)
    has = fast if key == "autocast" else computes
    for name in "ab":
        simulate(single(run__steps=2, run__device="cpu", **{f"inner__{key}": value}), tmp_path / name)
    assert caplog.text.count(f"inner.{key} is '{value}'") == (not has and value != "adamw")
    assert caplog.text.count("two to three times") == (key == "autocast" and computes and not fast)


def test_the_momentum_that_the_readme_calls_unstable_is_warned_of_before_training_and_not_refused(tmp_path, caplog):
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    (momentum,) = re.findall(
        r"momentum is warned of before the first step\*\*: with random pairs, (\S+) diverges", readme
    )
    simulate(single(run__steps=2, workers=8, rule__momentum=float(momentum)), tmp_path / "run")
    assert "predicted to lose consensus" in caplog.messages[0] and "stable momentum is 0.859" in caplog.messages[0]


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    config = single(run__steps=40, inner__lr=1e18, inner__optimizer="sgd", inner__warmup_steps=0)
    with pytest.raises(TrainingError, match=r"worker \d became nan at its inner step \d+ \(round \d+\)"):
        simulate(config, tmp_path / "run")
    owned = [checkpoint.rounds(tmp_path / "run" / "checkpoints", worker, digest(config)) for worker in range(3)]
    newest = max(set.intersection(*map(set, owned)), default=None)
    if newest is not None:
        assert all(torch.isfinite(x).all() for x in vectors(tmp_path / "run", config, newest))
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]) if newest else True


def test_the_exported_model_is_the_mean_of_the_workers_and_opens_with_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    config = single(record__export=True)
    simulate(config, tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    mean = mean_of(vectors(tmp_path / "run", config))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    last_bit = 0 if DEVICE == "cpu" else 1e-7  # a GPU rounds a mean otherwise than the CPU that computes it here
    torch.testing.assert_close(flat.sort().values, mean.sort().values, rtol=last_bit, atol=last_bit)
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")


def test_resuming_without_a_checkpoint_or_over_another_run_is_refused(tmp_path):
    config = single(run__steps=4, run__checkpoint_every=0)
    simulate(config, tmp_path / "run", until=1)
    with pytest.raises(CheckpointError, match=r"has no checkpoints to resume from.*--out"):
        simulate(config, tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="already holds"):
        simulate(config, tmp_path / "run")


def test_alpha_auto_settles_on_a_stable_step(tmp_path, caplog):
    simulate(single(run__steps=2, workers=8, rule__alpha="auto", rule__momentum=0.9), tmp_path / "run")
    assert "momentum" not in caplog.text


def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path) -> None:
    program = """
import sys, gossamer
from gossamer.run.planning.check import examine_document
rounds = {"steps": 2, "local_steps": 1, "eval_batches": 1}
runs = {
    (rule, optimizer): {
        "workers": 2, "run": rounds, "inner": {"optimizer": optimizer}, "data": {"seq_len": 16, "batch_size": 2},
        "model": {"size": "0.2m", "layers": 1},
    }
    for optimizer in ("adamw", "muon", "torch.optim:Adamax")
    for rule in ("gasloc", "diloco")
}
for (rule, optimizer), run in runs.items():
    simulation = gossamer.simulate(run, sys.argv[1] + rule + optimizer, method=rule)
    assert sum(p.numel() for p in simulation.model(0).parameters()) > 1 << 14
    slow = [name for name in ("torch._dynamo", "torch._inductor", "sympy", "transformers", "datasets") if name in sys.modules]
    assert not slow, (optimizer, slow)
for (rule, optimizer), run in runs.items():
    (checked,), wrong = examine_document(run | {"method": rule})
    assert checked.sent_bytes and not wrong and not {"torch._dynamo", "sympy"} & sys.modules.keys(), (rule, optimizer)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr


def test_a_second_simulation_of_a_process_does_not_warn_again_of_busy_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "_busy_cores", lambda: 64.0)
    lanes._warn_of_others.cache_clear()
    for _ in range(2):
        lanes.WorkerThreads(torch.device("cpu"), settings_of(tiny()), Threads(1))
    lanes._warn_of_others.cache_clear()
    assert caplog.text.count("cores busy; this run will be slower") == 1
