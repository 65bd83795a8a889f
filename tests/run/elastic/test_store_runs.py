"""Runs whose whole state lies in a folder: workers die, others come, all die, and the run continues."""

import base64
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_stored import look

from commands import Command, run, until
from drifted_rounds import play
from gossamer.errors import ConfigError, DataError
from gossamer.layout import Layout, Leaf
from gossamer.record import checkpoint
from gossamer.record.logs.outcomes import read_outcomes
from gossamer.record.packed import packed, unpacked
from gossamer.report.page.live import LiveRuns
from gossamer.report.reading.stored import FollowedStore
from gossamer.rounds.compatibility.modes import is_equal_after_rounds, mixes_by_pull
from gossamer.rules import RULES, Rule
from gossamer.rules.contract import Context
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import digest, dump
from gossamer.run.elastic.store_rounds import StoreWork, train_in_store
from gossamer.run.served.in_store import train_served_in_store
from gossamer.run.worker.task import task_of
from gossamer.stop_signals import Asked
from gossamer.topologies import complete
from gossamer.transport.bucket.bucket import SecretSeal
from gossamer.transport.bucket.objects import Basis
from gossamer.transport.keys import certificate_of, new_key
from gossamer.tree import leaves
from s3 import S3
from tiny import single

MEANS = {"rule__name": "diloco", "topology__name": "complete", "run__elastic": True}


@pytest.mark.timeout(280)
def test_a_run_outlives_all_its_workers_and_its_replay_has_their_bits(tmp_path: Path) -> None:
    config = single(
        workers=2,
        codec__name="int8",
        run__timeout_s=3,
        run__steps=120,
        run__pace_s=0.1,
        run__eval_every=0,
        **MEANS,
    )
    (tmp_path / "run.toml").write_text(dump(config))
    plain = tmp_path / "plain.toml"  # which a store makes elastic
    plain.write_text(dump(config).replace("elastic = true\n", ""))
    store, out = tmp_path / "store", tmp_path / "out"
    words = ("train", tmp_path / "run.toml", "--store", store, "--out", out)

    def closed() -> int:
        return len([*store.glob("r*-commit")])

    def lives() -> int:
        return len([*store.glob("t*")])

    first, second = Command(*words), Command("train", plain, *words[2:])
    until(lambda: closed() > 3, first, second)
    second.kill()
    third = Command(*words)
    until(lambda: lives() == 3, first, third)
    there = closed()
    until(lambda: closed() > there + 3, first, third)
    code, output = run("status", out, "--json")
    assert code == 0 and [one["standing"] for one in json.loads(output)["workers"]] == ["alive", "alive"], output
    assert json.loads(output)["note"].endswith("gossamer status URL shows all of them")
    for one in (first, third):
        one.kill()
    code, output = run("status", store, "--json")
    assert code == 0 and json.loads(output)["round"] == closed() and json.loads(output)["states"], output
    assert [slot["standing"] for slot in json.loads(output)["workers"]] == ["held", "held"], "nobody has said goodbye"
    page = LiveRuns([], stores=[look(FollowedStore(str(store)))])
    shown = json.loads(page.data(""))["runs"][0]
    assert (shown["done"], shown["rounds"], shown["method"]) == (closed(), config.length.rounds, "diloco")
    assert shown["standings"] == ["held", "held"] and max(map(int, shown["evals"]["x"]["round"])) == closed()
    assert sorted(text.partition(" since")[0] for text in shown["holders"]) == ["process 1", "process 2"]
    assert shown["sent_bytes"] > closed() * config.workers and len(shown["evals"]["x"]["time:"]) == closed()
    assert any("comes with the state of worker" in sentence for _, sentence in shown["happenings"])
    ended = [one.finish()[0] for one in (first, second, third)]
    assert ended == [-signal.SIGKILL] * 3
    fast = (*words, "--set", "run.pace_s=0")
    fourth, fifth = Command(*fast), Command(*(tmp_path / "new" if word is out else word for word in fast))
    (code, output), (of_fifth, of_fifth_said) = fourth.finish(), fifth.finish()
    assert (code, of_fifth) == (0, 0), output
    assert "a worker that has died frees its own within 3 s" in output
    assert output.count("is not encrypted") == of_fifth_said.count("is not encrypted") == 1
    logged = read_outcomes(out)
    assert logged == read_outcomes(tmp_path / "new"), "each has that of all"
    assert sorted(logged) == [0, 1]
    assert sum(len(some) for some in logged.values()) >= 4, "two at the start, two after all had died"
    assert {one.round for some in logged.values() for life in some for one in life.rounds} == {
        *range(config.length.rounds)
    }
    code, output = run("simulate", "--replay", out, "--out", tmp_path / "again")
    assert code == 0, output
    for worker in range(2):
        (place,) = tmp_path.glob(f"[on]*/checkpoints/round-{config.length.rounds:06}/worker-{worker:03}.json")
        real, again = (
            checkpoint.load(where, config.length.rounds, worker, digest(config))
            for where in (place.parent.parent, tmp_path / "again" / "checkpoints")
        )
        assert torch.equal(real["x"], again["x"]) and all(map(torch.equal, real["outer"], again["outer"]))
    shown = json.loads(LiveRuns([], stores=[look(FollowedStore(str(store)))]).data(""))["runs"][0]
    assert (shown["state"], shown["done"]) == ("finished", config.length.rounds)
    code, output = run(*words[:-1], tmp_path / "late")
    assert code == 0 and f"the run in the store has ended after {config.length.rounds} rounds" in output, output
    assert read_outcomes(tmp_path / "late") == logged and (tmp_path / "late" / "run.toml").exists(), (
        "it can be replayed"
    )
    code, output = run("train", tmp_path / "run.toml", "--set", "rule.lr=0.5", *words[2:-1], tmp_path / "other")
    assert code == 2 and "the store holds another run: rule.lr is" in output, output


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "method",
    [{"rule__name": "gasloc", "topology__name": "random"}, {"rule__name": "diloco", "topology__name": "complete"}],
    ids=["gossip", "mean"],
)
def test_a_run_in_a_store_continues_without_the_dead_and_its_replay_has_the_bits_of_all_slots(
    method: dict[str, object], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = 20 if request.config.getoption("--full") else 1
    config = single(
        workers=3,
        **method,
        codec__name="int8",
        run__elastic=True,
        run__timeout_s=3,
        run__steps=60 + 60 * kills,
        run__pace_s=0.05,
        run__eval_every=0,
        run__checkpoint_every=5,
    )
    (tmp_path / "run.toml").write_text(dump(config))
    store = tmp_path / "store"

    def start(name: str) -> Command:
        return Command("train", tmp_path / "run.toml", "--store", store, "--out", tmp_path / name)

    def closed() -> int:
        return len([*store.glob("r*-commit")])

    alive = {name: start(name) for name in ("out0", "out1", "out2")}
    until(lambda: closed() > 8, *alive.values())
    for kill in range(kills):
        name = sorted(alive)[kill % 3]
        alive[name].kill()
        alive.pop(name).finish()
        there = closed()
        until(lambda there=there: closed() > there + 2, *alive.values())
        again = name if kill % 2 else f"out{kill + 3}"
        alive[again] = start(again)
        until(lambda there=there: closed() > there + 8, *alive.values())
    ends = {name: command.finish() for name, command in alive.items()}
    assert all(code == 0 for code, _ in ends.values()), ends
    if kills == 1:
        assert "with the state of slot" in ends["out3"][1], "of an empty folder, it continues from the store"
    logged = read_outcomes(tmp_path / sorted(alive)[0])
    assert logged == read_outcomes(tmp_path / sorted(alive)[-1]) and sorted(logged) == [0, 1, 2]
    assert any(one.alive is not None for lives in logged.values() for life in lives for one in life.rounds)
    code, output = run("simulate", "--replay", tmp_path / sorted(alive)[0], "--out", tmp_path / "again")
    assert code == 0 and "this is not what was computed" not in output, output
    for worker in range(3):
        (place,) = tmp_path.glob(f"out*/checkpoints/round-{config.length.rounds:06}/worker-{worker:03}.json")
        real, again = (
            checkpoint.load(where, config.length.rounds, worker, digest(config))
            for where in (place.parent.parent, tmp_path / "again" / "checkpoints")
        )
        assert torch.equal(real["x"], again["x"]) and all(map(torch.equal, real["outer"], again["outer"])), worker


@pytest.mark.timeout(120)
def test_with_keys_a_store_shows_nothing_and_only_listed_machines_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: S3
) -> None:
    """In an object store that fails now and then."""
    pytest.importorskip("cryptography")
    keys = {name: new_key(name, tmp_path / f"{name}.pem") for name in ("berlin", "paris", "stranger")}
    certificates = {name: base64.b64encode(certificate_of(path)).decode() for name, path in keys.items()}
    peers = {name: {"certificate": certificates[name]} for name in ("berlin", "paris")}
    config = single(
        workers=2, run__timeout_s=20, run__steps=12, run__eval_every=0, record__hash=True, peers=peers, **MEANS
    )
    file, store, bucket.fails_every = tmp_path / "run.toml", "s3://bucket/run", 40
    file.write_text(dump(config))

    def words(name: str, run_file: Path = file) -> tuple[object, ...]:
        return ("train", run_file, "--store", store, "--out", tmp_path / name, "--key", keys[name])

    first, second = Command(*words("berlin")), Command(*words("paris"))
    (code, output), (of_second, by_second) = first.finish(), second.finish()
    assert (code, of_second) == (0, 0), output + by_second
    assert "is not encrypted" not in output and "worker 0 takes part" in output and "worker 1 takes part" in by_second
    logged = read_outcomes(tmp_path / "berlin")
    assert all(one.alive is None for lives in logged.values() for life in lives for one in life.rounds), "of both"
    code, output = run("simulate", "--replay", tmp_path / "berlin", "--out", tmp_path / "again")
    assert code == 0, output
    for place in (tmp_path / "berlin", tmp_path / "paris"):
        worker = int(place.name == "paris")
        real, again = (
            checkpoint.load(where / "checkpoints", config.length.rounds, worker, digest(config))
            for where in (place, tmp_path / "again")
        )
        assert torch.equal(real["x"], again["x"]), worker
    code, output = run("audit", tmp_path / "berlin")
    assert code == 2 and "copy metrics-001.jsonl and machines-001.jsonl from its --out" in output, output
    for name in ("metrics-001.jsonl", "machines-001.jsonl"):
        shutil.copy(tmp_path / "paris" / name, tmp_path / "berlin")
    code, output = run("audit", tmp_path / "berlin")
    assert code == 0 and f"{2 * config.length.rounds} hashes of all workers agree" in output, output
    for path in tmp_path.glob("paris/outcomes-*"):  # as in the folder of a worker that was killed
        path.unlink()
    for verb in (("audit", tmp_path / "paris"), ("simulate", "--replay", tmp_path / "paris", "--out", tmp_path / "no")):
        code, output = run(*verb)
        assert code == 2 and "as its worker ended before the run in the store; when that has ended" in output, output
    bucket.fails_every, objects = 0, [*bucket.objects.values()]
    assert not any("-mean-" in name or "-from-" in name for name in bucket.objects if "r00000000-" in name), "collected"
    assert not any(word in one for one in objects for word in (b"diloco", b"sha256", b"steps", b"leaves"))
    assert bytes(real["x"].numpy().tobytes()[:64]) not in b"".join(objects)
    code, output = run("status", store)
    assert code == 2 and "give its run file with --peers RUN.toml" in output, output
    monkeypatch.setenv("GOSSAMER_KEY", str(keys["paris"]))
    code, output = run("status", store, "--peers", file, "--json")
    assert code == 0 and json.loads(output)["round"] == config.length.rounds, output
    (shown,) = json.loads(LiveRuns([], stores=[look(FollowedStore(store, file))]).data(""))["runs"]
    assert shown["done"] == config.length.rounds and "process 1 of paris " in shown["holders"][1]
    own = tmp_path / "own.toml"
    own.write_text(
        dump(single(workers=2, peers={"stranger": {"certificate": certificates["stranger"], "workers": 2}}, **MEANS))
    )
    code, output = run(*words("stranger", own))
    assert code == 2 and "nobody in the run's [peers] has signed it" in output, output
    last = f"r{config.length.rounds - 1:08d}-commit"
    bucket.objects[f"bucket/run/{last}"] = bucket.objects[f"bucket/run/{last}"][:-1] + b"x"
    code, output = run(*words("berlin"))
    assert code == 2 and "whose signature does not fit: it was altered" in output and last in output, output


@pytest.mark.parametrize(
    ("settings", "words", "sentence"),
    [
        ({"run__elastic": False}, (), "--store was given with run.elastic = false"),
        ({"run__adapt": True}, (), "--store is given and run.adapt is True"),
        ({"data__constant_batch": True}, (), "it does not carry: data.constant_batch is true"),
        (
            {"run__wait": False, "rule__name": "gossip", "topology__name": "ring", "run__elastic": False},
            (),
            "of the kind 'no waiting'",
        ),
        (
            {"rule__name": "easgd", "topology__name": "complete"},
            (),
            "--store is given, and after a round of rule 'easgd' its workers are not equal in all, and it is no plain gossip",
        ),
        ({"schedule__fragments": 2}, (), "a round has several exchanges"),
        ({}, ("--local", 2), "--store was given with --local"),
        (
            {},
            ("--listen", "127.0.0.1:1", "--join", "auto"),
            "--store was given with --join auto and --listen 127.0.0.1:1",
        ),
    ],
)
def test_what_a_store_does_not_carry_is_refused_in_a_sentence(
    tmp_path: Path, settings: dict[str, object], words: tuple[object, ...], sentence: str
) -> None:
    (tmp_path / "run.toml").write_text(dump(single(**{**MEANS, **settings})))
    code, output = run("train", tmp_path / "run.toml", "--store", tmp_path / "store", "--out", tmp_path / "out", *words)
    assert code == 2 and sentence in output, output
    assert not (tmp_path / "store").exists() and not (tmp_path / "out").exists()


CARRIED = [rule for rule in (factory() for factory in RULES.values()) if is_equal_after_rounds(rule)]


@pytest.mark.parametrize("rule", CARRIED, ids=lambda rule: rule.name)
def test_rules_that_a_store_carries_leave_all_workers_equal_in_vectors_and_outer_states(rule: Rule) -> None:
    drifts = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(0))
    start = [torch.arange(8.0) for _ in range(3)]
    xs, states = play(rule, complete(3), start, 3, lambda worker, step, x: drifts[worker, step % 3])
    for x, state in zip(xs[1:], states[1:], strict=True):
        assert all(map(torch.equal, leaves((xs[0], states[0])), leaves((x, state))))


def test_the_mean_of_another_machine_counts_where_it_differs_by_rounding_alone(tmp_path: Path) -> None:
    config = resolve(single(workers=2, **MEANS), real=True)
    with contextlib.ExitStack() as open_:
        work = StoreWork(config, tmp_path, task_of(config), Asked(), open_)
        work.begin(0, 0)
        sent = work.train(0)
        own = work.mean(0, {0: sent, 1: sent})
        (mean,) = unpacked(own)["leaves"]
        for other, counts in (
            (mean * (1 + 1e-6), True),
            (mean * 1.01, False),
            (mean + torch.eye(1, len(mean))[0], False),
            (mean.index_fill(0, torch.tensor([3]), torch.nan), False),
            (mean[1:], False),
        ):
            assert work.is_mean(0, own, memoryview(packed({"leaves": [other]}))) == counts
        assert not work.is_mean(0, own, memoryview(b"no tensors"))


def test_a_worker_that_leaves_before_its_first_round_has_ended_saves_no_state_of_another_round(tmp_path: Path) -> None:
    config = resolve(single(workers=2, run__eval_every=0, **MEANS), real=True)
    with contextlib.ExitStack() as open_:
        work = StoreWork(config, tmp_path, task_of(config), Asked(), open_)
        work.begin(1, 0)
        assert work.restore(0) == ""
        donor = work._packed()
        work.load(3, 0, memoryview(donor))
        work.start(3, Basis(3, 0, "", 6))
        work.train(3)
        assert work.restore(0) == "", "its own newest state, before it leaves"
        work.leave(3)
        assert not [*tmp_path.glob("checkpoints/*")]


def test_a_worker_that_has_lost_its_slot_closes_its_record_and_saves_in_the_next_slot_again(tmp_path: Path) -> None:
    """Another process has the slot then, and would find its port for Prometheus taken."""
    config = resolve(single(workers=2, run__eval_every=0, **MEANS), real=True)
    with contextlib.ExitStack() as open_:
        work = StoreWork(config, tmp_path, task_of(config), Asked(), open_)
        for slot in (0, 1):
            work.begin(slot, 0)
            work.restore(0)
            work.start(0, Basis(0, slot, ""))
            work._finished = 1
            work.leave(1)
            if not slot:
                (lost,) = work._record
        with pytest.raises(ValueError, match="closed"):
            lost.log("train", round=0)
        assert [checkpoint.rounds(tmp_path / "checkpoints", slot) for slot in (0, 1)] == [[1], [1]]


def test_a_worker_in_a_store_whose_stream_cannot_be_read_saves_and_says_how_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, asked = resolve(single(workers=2, run__eval_every=0, **MEANS), real=True), list[int]()
    with contextlib.ExitStack() as open_:
        work = StoreWork(config, tmp_path, task_of(config), Asked(), open_)
        work.agree("the identity of the run")
        work.begin(1, 0)
        work.start(2, Basis(2, 0, ""))

        def broken(round: int = 0, rounds: int = 1) -> None:
            asked.append(round)
            raise DataError("the stream broke off")

        monkeypatch.setattr(work._replica, "read_ahead", broken)
        with pytest.raises(
            DataError, match=r"broke off; this worker has saved and left; start it again with the same command$"
        ):
            work.train(2)
        assert asked == [2] and checkpoint.rounds(tmp_path / "checkpoints", 1) == [2]


@pytest.mark.timeout(120)
def test_a_process_that_leaves_while_it_waits_for_a_slot_names_no_lost_outcome(tmp_path: Path) -> None:
    config = single(workers=2, run__timeout_s=2, run__steps=200, run__pace_s=0.2, run__eval_every=0, **MEANS)
    (tmp_path / "run.toml").write_text(dump(config))
    words = ("train", tmp_path / "run.toml", "--store", tmp_path / "store", "--out")
    alone = Command(*words, tmp_path / "out")
    until(lambda: len([*tmp_path.glob("store/r*-commit")]) > 2, alone)
    os.kill(alone.pid, signal.SIGTERM)
    assert alone.finish()[0] == 0
    for slot in range(2):  # both slots look held
        life = len([*tmp_path.glob(f"store/t{slot:05d}-*")])
        name = f"t{slot:05d}-{life:04d}"
        (tmp_path / "store" / name).write_bytes(SecretSeal().sealed(name, {"nonce": ""}))
    late = Command(*words, tmp_path / "late")
    until(lambda: (tmp_path / "late" / "store.txt").exists(), late)
    os.kill(late.pid, signal.SIGTERM)
    code, output = late.finish()
    assert code == 130 and "no outcome" not in output, output
    code, output = run("train", "--resume", tmp_path / "out", "--local", 2)
    assert code == 2 and "its run lies in a store; continue it with gossamer train RUN.toml --store URL" in output, (
        output
    )


of_rounds_and_of_a_server = pytest.mark.parametrize(
    ("settings", "train"),
    [(MEANS, train_in_store), ({"server__name": "heloco"}, train_served_in_store)],
    ids=["rounds", "server"],
)


@of_rounds_and_of_a_server
@pytest.mark.parametrize("file", ["store.txt", "run.toml"])
def test_a_folder_of_another_run_is_refused_before_one_is_created_in_the_store(
    tmp_path: Path, settings: dict[str, object], train: Callable[..., None], file: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).write_text("")
    with pytest.raises(
        ConfigError, match=r"out' holds a run, and none lies in the store '.*store'; give another --out"
    ):
        train(resolve(single(workers=2, **settings), real=True), tmp_path / "out", f"{tmp_path / 'store'}")
    assert not (tmp_path / "store").exists()


@of_rounds_and_of_a_server
@pytest.mark.parametrize("lacks", ["text", "secret"])
def test_no_folder_is_made_for_a_store_before_the_run_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], train: Callable[..., None], lacks: str
) -> None:
    (tmp_path / "text.txt").write_text("too short" if lacks == "text" else "long enough " * 10_000)
    monkeypatch.setenv("GOSSAMER_SECRET", "short" if lacks == "secret" else "")
    config = single(workers=2, data__source=str(tmp_path / "text.txt"), **settings)
    with pytest.raises(DataError if lacks == "text" else ConfigError):
        train(resolve(config, real=True), tmp_path / "out", f"{tmp_path / 'store'}")
    assert {one.name for one in tmp_path.iterdir()} == {"text.txt"}


def test_a_worker_that_ends_with_an_error_frees_its_slot(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump(single(workers=1, inner__lr=1e38, run__eval_every=0, **MEANS)))
    code, output = run("train", tmp_path / "run.toml", "--store", tmp_path / "store", "--out", tmp_path / "out")
    assert code == 2 and "the loss of worker 0 became nan" in output, output
    assert (tmp_path / "store" / "v00000-0000").exists() and not [*tmp_path.glob("store/u*")]


PULLED = [rule for rule in (factory() for factory in RULES.values()) if mixes_by_pull(rule)]


@pytest.mark.parametrize("rule", PULLED, ids=lambda rule: rule.name)
def test_rules_of_gossip_in_a_store_send_the_same_message_to_every_receiver(rule: Rule) -> None:
    x = torch.arange(8.0)
    layout = Layout((Leaf("w", (8,), 0, 8),), 8)
    contexts = [
        Context(0, 4, 1, 2, weight, layout, 2, False, peers) for weight, peers in ((0.5, (1,)), (0.25, (1, 2, 3)))
    ]
    sent = [leaves(rule.send(x, rule.init(x, ctx), ctx)) for ctx in contexts]
    assert all(map(torch.equal, *sent))
