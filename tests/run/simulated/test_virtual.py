"""Run files that look at the clock, as a user runs them: servers, pairs, and gossip that waits for nobody."""

import json
import math
import os
import tomllib

import pytest
import tomli_w
import torch

from gossamer.asynchronous import PAIRS, SERVERS, a2cid2
from gossamer.cli import main
from gossamer.errors import CheckpointError, ConfigError, DataError, PairingError
from gossamer.record import checkpoint
from gossamer.record.folder import read_metrics
from gossamer.record.logs.events import read_events
from gossamer.record.logs.seconds import read_seconds
from gossamer.report.table import summary_rows
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump, parse
from gossamer.run.simulated.simulate import simulate
from tiny import DEVICE, document, single

UNEVEN = {"step_s": [0.1, 0.25, 0.3], "uplink_bps": 1e8, "downlink_bps": 1e8, "latency_s": 0.01}
EVEN = {"step_s": 1.0, "uplink_bps": math.inf, "downlink_bps": math.inf}


def timed(network=UNEVEN, clockless=False, **overrides):
    """A tiny run that looks at the clock of one network; a server or pair named here replaces the rule."""
    base = document()
    base["network"] = {"clock": network}
    if {"server", "pair"} & {key.partition("__")[0] for key in overrides}:
        del base["rule"], base["topology"]
    base["run"] |= {"steps": 8, "checkpoint_every": 0}
    base["model"]["layers"] = 1
    base["data"]["max_bytes"] = 300_000
    for key, value in overrides.items():
        *path, last = key.split("__")
        node = base
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    if clockless:
        del base["network"]
    return parse(base)


def snapshots(folder, config):
    """The parameters that a finished run left: of the server, or of each worker."""
    owners = [config.workers] if config.server else range(config.workers)
    return [
        checkpoint.load(folder / "checkpoints", config.length.rounds, owner, digest(config))["x"] for owner in owners
    ]


def evals(folder):
    return [line for line in read_metrics(folder) if line["kind"] == "eval"]


def lines(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def same_run(a, b, config):
    return (
        all(map(torch.equal, snapshots(a, config), snapshots(b, config)))
        and read_metrics(a) == read_metrics(b)
        and lines(a) == lines(b)
    )


METHODS = {
    **{name: {"server": {"name": name}} for name in SERVERS},
    "fragments": {"server": {"name": "cgad"}, "events": {"fragments": 3}},
    "overlap": {"server": {"name": "cgad"}, "events": {"fragments": 2, "overlap": True}},
    **{name: {"pair": {"name": name}} for name in PAIRS if name != "dadao"},
    "gossip": {"run__wait": False},
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


@pytest.mark.sampled(2)
@every_method
def test_a_run_is_a_function_of_its_file_and_trains_the_tokens_of_a_run_in_rounds_also_when_resumed_with_other_threads(
    method, tmp_path, monkeypatch
):
    config = timed(**{"run__checkpoint_every": 2, "run__eval_every": 4, **method})
    assert parse(tomllib.loads(dump(config))) == config
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    outcome = simulate(config, tmp_path / "a")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    stopped = simulate(config, tmp_path / "b", until=1 + sum(map(ord, str(method))) % 3)
    assert not stopped.over
    resumed = simulate(config, tmp_path / "b", resume=True)
    assert same_run(tmp_path / "a", tmp_path / "b", config) and resumed.result[:2] == outcome.result[:2]
    assert read_seconds(tmp_path / "a") == read_seconds(tmp_path / "b")
    assert outcome.tokens == config.workers * config.run.steps * config.length.step_tokens
    scored = evals(tmp_path / "a")
    assert [line["round"] for line in scored] == [-1, 1, 3] and scored[-1]["loss"] == outcome.loss
    assert outcome.loss < scored[0]["loss"]
    log = read_events(tmp_path / "a")
    assert log is not None and {"clock": log.end_s[-1]} == outcome.time_s
    phases = [line for line in lines(tmp_path / "a") if line["event"] == "phase"]
    assert sum(line["tokens"] for line in phases) == outcome.tokens
    assert len({line["worker"]: 0 for line in phases if line["number"] > 2}) < 3  # the slow took fewer phases
    if config.server is not None and config.events.fragments == 1:
        every_push_is_absorbed(tmp_path / "a")


def every_push_is_absorbed(folder):
    """Whether the server counted each phase that was trained before the run ended."""
    log = lines(folder)
    pushed = [line["source"] for line in log if line["event"] == "push"]
    trained = [line["worker"] for line in log if line["event"] == "phase"]
    absorbed = read_events(folder).absorbed
    assert [pushed.count(i) for i in range(3)] == [trained.count(i) for i in range(3)] == absorbed.tolist()


def test_a_full_quorum_with_equal_clocks_is_diloco_in_rounds_to_the_last_bit(tmp_path):
    served = timed(EVEN, server={"name": "decoupled_diloco", "quorum": 3, "merging": "average"})
    simulate(served, tmp_path / "served")
    rounds = single(
        rule__name="diloco", topology__name="complete", rule__momentum=0.9, run__steps=8, data__max_bytes=300_000
    )
    simulate(rounds, tmp_path / "rounds")
    (theirs,) = snapshots(tmp_path / "served", served)
    assert torch.equal(theirs, checkpoint.load(tmp_path / "rounds" / "checkpoints", 4, 0, digest(rounds))["x"])
    of_server, of_rounds = evals(tmp_path / "served"), evals(tmp_path / "rounds")
    assert [(e["round"], e["step"], e["tokens"]) for e in of_server] == [
        (e["round"], e["step"], e["tokens"]) for e in of_rounds
    ]
    losses = [e["loss"] for e in of_rounds]
    # A server is scored on its host, and its workers where they train.
    assert [e["loss"] for e in of_server] == (losses if DEVICE == "cpu" else pytest.approx(losses, rel=1e-5))


def test_gossip_without_waiting_with_equal_clocks_is_gossip_in_rounds_to_the_last_bit(tmp_path):
    codec = {"name": "int8", "rounding": "stochastic"}
    config = timed(EVEN, run__wait=False, codec=codec)
    simulate(config, tmp_path / "timed")
    rounds = single(run__steps=8, codec=codec, data__max_bytes=300_000)
    simulate(rounds, tmp_path / "rounds")
    saved = [checkpoint.load(tmp_path / "rounds" / "checkpoints", 4, i, digest(rounds))["x"] for i in range(3)]
    assert all(map(torch.equal, snapshots(tmp_path / "timed", config), saved))


def test_one_worker_around_a_server_pushes_what_nothing_has_overtaken(tmp_path):
    simulate(timed({**EVEN, "step_s": 0.5}, workers=1, server__name="heloco"), tmp_path)
    log = read_events(tmp_path)
    assert log.ages == (0,) * 4 and log.end_s.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_codec_shrinks_pushes_and_not_what_the_server_sends(tmp_path):
    sizes = {}
    for codec in ("exact", "int8"):
        simulate(timed(server__name="cgad", codec__name=codec), tmp_path / codec)
        sizes[codec] = {e["event"]: e["bytes"] for e in lines(tmp_path / codec) if "bytes" in e}
    assert sizes["int8"]["push"] < 0.3 * sizes["exact"]["push"]
    assert sizes["int8"]["fetch"] == sizes["exact"]["fetch"] == sizes["exact"]["push"]


def test_dylu_lets_workers_return_together(tmp_path):
    config = timed(server__name="delayed_nesterov", events__dylu=True, run__local_steps=4, run__steps=12)
    simulate(config, tmp_path)
    steps = {line["worker"]: line["steps"] for line in lines(tmp_path) if line["event"] == "phase"}
    assert steps == {0: 4, 1: 1, 2: 1}


def test_the_learning_rate_goes_by_the_run_and_not_by_how_fast_a_worker_is(tmp_path):
    uneven = {**EVEN, "step_s": [0.1, 0.9, 0.9]}
    config = timed(uneven, server__name="cgad", run__steps=20, inner__warmup_steps=0, inner__schedule="wsd")
    simulate(config, tmp_path)
    train = [line for line in read_metrics(tmp_path) if line["kind"] == "train"]
    fast = [line["lr"] for line in train if line["worker"] == 0]
    assert len(fast) > 20 and fast[len(fast) // 2] == 1e-3  # its own 10 phases would have been all of the schedule
    assert fast[-1] < 5e-4


def test_a_worker_that_is_away_trains_nothing_and_the_others_take_the_steps(tmp_path):
    absences = [{"worker": 1, "leave_s": 0.6, "return_s": 1.9}, {"worker": 2, "leave_s": 0.7}]
    config = timed(server__name="heloco", events={"absences": absences}, run__steps=16)
    outcome = simulate(config, tmp_path)
    phases = [line for line in lines(tmp_path) if line["event"] == "phase"]
    assert outcome.tokens == 3 * 16 * 32
    assert not [p for p in phases if p["worker"] == 1 and 0.6 < p["end_s"] < 1.9 + 0.5]
    assert [p for p in phases if p["worker"] == 1 and p["end_s"] > 2.4]
    assert not [p for p in phases if p["worker"] == 2 and p["end_s"] > 0.7]


def test_a_jittering_network_makes_phases_of_unequal_length(tmp_path):
    simulate(timed({**EVEN, "jitter": 0.3}, server__name="cgad"), tmp_path)
    lengths = {round(p["end_s"] - p["start_s"], 6) for p in lines(tmp_path) if p["event"] == "phase"}
    assert len(lengths) == 12


def test_a2cid2_takes_its_numbers_from_the_meetings_unless_they_are_given():
    assert a2cid2().settle is not None and a2cid2(0.1).settle is None
    assert a2cid2().settle(4.0, 1.0).options == {"eta": 0.25, "alpha": 1.0}


@pytest.mark.parametrize("method", ["cgad", "a2cid2"])
def test_evaluate_finds_what_the_run_scored(method, tmp_path):
    config = timed(**METHODS[method])
    outcome = simulate(config, tmp_path)
    round, result, _ = evaluate(tmp_path)
    assert (round, result.loss) == (4, outcome.loss)
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.full
def test_a_run_is_scored_on_other_text_and_nothing_is_written(tmp_path, capsys):
    def text(words):
        (file := tmp_path / f"{words}.jsonl").write_text(
            "".join(json.dumps({"text": f"{k} {words} " * 9}) + "\n" for k in range(90))
        )
        return str(file)

    own, other, run = text("own"), text("other"), tmp_path / "run"
    simulate(single(run__steps=4, data__source=own), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["evaluate", str(run), "--source", other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scored = evaluate(run, source=own).result
    assert found["model"] is None and found["loss"] != scored.loss
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert evaluate(run).result != scored


@pytest.mark.sampled(1)
@pytest.mark.parametrize("characters", [3, 1_000, 5_000, 150_000])
def test_evaluate_scores_another_text_whole_however_short_it_is(characters, tmp_path, capsys):
    run, words = tmp_path / "run", "".join(f"{k} words, " for k in range(characters // 8 + 1))[:characters]
    small = {"data__max_bytes": 100_000, "data__batch_size": 64, "data__seq_len": 64, "run__eval_batches": 1}
    simulate(single(run__steps=2, **small), run)
    (source := tmp_path / "other.txt").write_text(words)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--source", str(source), "--json"]) == 0
    shown = capsys.readouterr()
    assert f"text of '{source}': 1 file, {characters:,} bytes, 1 document, {characters + 1:,} tokens" in shown.err
    losses = {json.loads(shown.out)["loss"]}
    for place in (1, characters // 2, characters - 1)[:: 1 if characters < 10_000 else 2]:
        source.write_text(words[:place] + "\x7f" + words[place + 1 :])
        losses.add(evaluate(run, source=str(source)).result.loss)
    assert len(losses) == (4 if 3 < characters < 10_000 else 3)


def test_runs_in_rounds_and_runs_that_look_at_the_clock_stand_side_by_side(tmp_path, capsys):
    experiment = document(run__steps=4, record__export=True, data__max_bytes=300_000)
    del experiment["rule"], experiment["topology"]
    experiment["network"] = {"clock": UNEVEN, "other": EVEN}
    experiment["events"] = {"network": "clock"}
    experiment["variant"] = [
        {"label": "in rounds", "rule": {"name": "gasloc"}},
        {"label": "served", "server": {"name": "heloco"}},
        {"label": "pairs", "pair": {"name": "ad_psgd"}},
        {"label": "no waiting", "run": {"wait": False}},
    ]
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(experiment))
    assert main(["compare", str(tmp_path / "experiment.toml"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "served" / "sample.txt").exists()
    config = parse(tomllib.loads((tmp_path / "out" / "served" / "run.toml").read_text()))
    runs = {path.name: path for path in sorted((tmp_path / "out").iterdir()) if path.is_dir()}
    rows = {row["method"]: row for row in summary_rows(runs, config.network)}
    assert set(rows) == {"in-rounds", "no-waiting", "pairs", "served"}
    assert set(rows["in-rounds"]["wall_s"]) == {"clock", "other"} and set(rows["served"]["wall_s"]) == {"clock"}
    assert all(row["loss"] < 6 and row["sent_bytes"] > 0 for row in rows.values())
    assert all(0 < row["utilisation"]["clock"] <= 1 for row in rows.values())
    assert "no waiting" in (tmp_path / "out" / "report.html").read_text()
    capsys.readouterr()


WRONG = {
    "a rule and a server": ({"rule__name": "diloco", "server__name": "cgad"}, ["[server] and [rule]", "remove one"]),
    "a server and a pair": ({"server__name": "cgad", "pair__name": "ad_psgd"}, ["[server] and [pair]", "no pair"]),
    "a server on a graph": ({"server__name": "cgad", "topology__name": "ring"}, ["[topology]", "no topology"]),
    "an unknown server": ({"server__name": "helico"}, ["helico", "did you mean 'heloco'"]),
    "an unknown pair": ({"pair__name": "adpsgd"}, ["did you mean 'ad_psgd'"]),
    "an unknown option": ({"server": {"name": "cgad", "rho": 1.0}}, ["option 'rho'", "decay"]),
    "an option out of range": ({"server": {"name": "heloco", "momentum": 1.5}}, ["1.5", "from 0 to below 1"]),
    "convex methods": (
        {"pair": {"name": "dadao", "strong_convexity": 1.0, "smoothness": 2.0, "chi1": 1.0}},
        ["dadao", "gradient", "a2cid2"],
    ),
    "an option that is needed": ({"pair__name": "dadao"}, ["dadao", "strong_convexity"]),
    "pairs on a changing graph": ({"pair__name": "ad_psgd", "topology__name": "random"}, ["'random'", "static"]),
    "pairs with fragments": ({"pair__name": "ad_psgd", "events__fragments": 2}, ["fragments = 2", "only a server"]),
    "gossip with fragments": ({"run__wait": False, "events__fragments": 2}, ["fragments = 2", "only a server"]),
    "more fragments than tensors": ({"server__name": "cgad", "events__fragments": 999}, ["999", "tensors"]),
    "overlap of one fragment": ({"server__name": "cgad", "events__overlap": True}, ["overlap", "at least 2"]),
    "meetings with a server": ({"server__name": "cgad", "events__meetings": 2.0}, ["meetings = 2.0", "never meet"]),
    "a rule that needs everyone": (
        {"run__wait": False, "rule__name": "diloco", "topology__name": "complete"},
        ["'diloco' cannot run without waiting"],
    ),
    "no clock": ({"server__name": "cgad", "clockless": True}, ["0 networks", "[network.NAME]"]),
    "two clocks": ({"server__name": "cgad", "network__other": EVEN}, ["clock, other", "events.network"]),
    "an unknown clock": ({"server__name": "cgad", "events__network": "clok"}, ["did you mean 'clock'"]),
    "a clock without steps": (
        {"server__name": "cgad", "network__clock": {"uplink_bps": 1e6, "downlink_bps": 1e6}},
        ["step_s is not given"],
    ),
    "a clock of others": ({"server__name": "cgad", "workers": 4}, ["step_s lists 3 workers but the run has 4"]),
    "absence of a stranger": (
        {"server__name": "cgad", "events__absences": [{"worker": 7, "leave_s": 1.0}]},
        ["worker=7", "0 to 2"],
    ),
    "a return before leaving": (
        {"server__name": "cgad", "events__absences": [{"worker": 1, "leave_s": 2.0, "return_s": 1.0}]},
        ["leave at 2.0 s and return at 1.0 s"],
    ),
    "dylu with steps by hand": (
        {"server__name": "cgad", "events__dylu": True, "run__local_steps": [2, 1, 1]},
        ["dylu", "[2, 1, 1]"],
    ),
}


@pytest.mark.parametrize(("overrides", "parts"), WRONG.values(), ids=WRONG.keys())
def test_impossible_settings_are_refused_in_one_sentence_before_anything_is_written(overrides, parts, tmp_path):
    with pytest.raises(ConfigError) as refused:
        simulate(timed(**overrides), tmp_path / "run")
    assert all(part in str(refused.value) for part in parts), str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_what_is_for_rounds_is_refused_on_a_clock():
    for given in ({"codec__back": "bf16"}, {"run__weigh_steps": True}, {"schedule__fragments": 2}):
        key = next(iter(given)).replace("schedule__fragments", r"\[schedule\]").replace("__", ".")
        with pytest.raises(
            PairingError, match=f"^{key} applies to synchronous rounds only, and this run is asynchronous"
        ):
            resolve(timed(server__name="cgad", codec__name="int8", **given))


def test_pricing_a_run_that_looks_at_the_clock_is_refused_and_so_is_one_of_other_steps(tmp_path, capsys):
    config = timed(server__name="cgad", run__steps=2)
    simulate(config, tmp_path / "run")
    (tmp_path / "network.toml").write_text("uplink_bps = 1e6\ndownlink_bps = 1e6\nstep_s = 1.0\n")
    assert main(["simulate", "--resume", str(tmp_path / "run"), "--set", "run.steps=4"]) == 2
    assert main(["price", str(tmp_path / "run"), str(tmp_path / "network.toml")]) == 2
    _, first, second = capsys.readouterr().err.splitlines()
    assert "run.steps is 2 in" in first and "simulate it again" in second


def test_a_checkpoint_that_does_not_fit_an_asynchronous_run_is_refused(tmp_path):
    config = timed(server__name="cgad", run__checkpoint_every=2)
    simulate(config, tmp_path, until=2)
    store, line = tmp_path / "checkpoints", digest(config)
    (round,) = checkpoint.rounds(store, 3, line)[-1:]
    sound = checkpoint.load(store, round, 3, line)
    for part, key in (("loop", "agenda"), ("journal", "seconds")):
        spoilt = {**sound, "run": {**sound["run"], part: {k: v for k, v in sound["run"][part].items() if k != key}}}
        checkpoint.save(store, round, 3, spoilt, digest=line)
        with pytest.raises(CheckpointError, match="does not fit this run"):
            simulate(config, tmp_path, resume=True)


def test_a_simulation_that_cannot_resume_from_files_of_real_workers_removes_none_of_them(tmp_path):
    config = timed(run__wait=False, run__checkpoint_every=2)
    simulate(config, tmp_path, until=2)
    store, line = tmp_path / "checkpoints", digest(config)
    for worker, saved in ((0, [1, 2]), (1, [1, 2]), (2, [1])):  # the last is behind
        state = checkpoint.load(store, 2, worker, line)
        for path in store.glob(f"round-*/worker-{worker:03}.*"):
            path.unlink()
        for round in saved:
            checkpoint.save(store, round, worker, {"x": state["x"]}, digest=line)
    for again in (True, "auto"):
        with pytest.raises(
            CheckpointError, match=r"checkpoints of real processes, and .* with gossamer train --resume"
        ):
            simulate(config, tmp_path, resume=again)
    assert [checkpoint.rounds(store, worker) for worker in range(3)] == [[1, 2], [1, 2], [1]]


def test_list_names_servers_and_pairs(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*SERVERS, *PAIRS])


PHASE = {"event": "phase", "worker": 0, "number": 0, "start_s": 0, "end_s": 1, "steps": 3, "tokens": 9}
PUSH = {"event": "push", "source": 0, "target": -1, "fragment": 0, "bytes": 8, "start_s": 0, "end_s": 1}
UPDATE = {"event": "update", "fragment": 0, "workers": [0], "ages": [1], "time_s": 1}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (PHASE | {"end_s": -1}, "jsonl:2: end_s is -1 but must be a number from 0"),
        (PHASE | {"worker": 5}, "name worker 5 of 3"),
        (PHASE | {"seconds": 5}, "unknown key 'seconds'"),
        (PUSH | {"bytes": 1e99}, r"jsonl:2: bytes is 1e\+99 but must be a whole number"),
        (UPDATE | {"ages": [-1]}, r"jsonl:2: ages\[0\] is -1 but must be a whole number"),
        (UPDATE | {"ages": 1}, "jsonl:2: ages is 1 but must be a list"),
        ({"event": "dance"}, r"jsonl:2: unknown event 'dance'; .*Allowed: fetch, leave"),
        ({"worker": 0}, "jsonl:2: unknown event 'None'"),
        ({"event": "leave", "worker": 0, "time_s": 0, "round": 2**62}, "jsonl:2: round is 4611686018427387904"),
        ({"event": "leave", "worker": 0, "time_s": 0, "round": 2_000_000_000}, "cells are allowed"),
    ],
)
def test_an_event_that_gossamer_does_not_write_is_refused(line, sentence, tmp_path):
    start = {"round": -1, "event": "start", "network": "a", "workers": 3}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps({'round': 0} | line)}\n")
    with pytest.raises(DataError, match=sentence):
        read_events(tmp_path)
