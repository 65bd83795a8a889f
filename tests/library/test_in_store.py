"""Training loops of users in a store that outlives all their processes, which are killed, stopped and started again."""

import base64
import copy
import gc
import hashlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sites import refusal
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gossamer
from commands import Command, free_port, run
from gossamer.errors import ConfigError, PeerError
from gossamer.integrations.begin import begin_outer
from gossamer.library.in_store import STATE_EVERY, _state_bytes
from gossamer.library.sites import tensors_of
from gossamer.record.packed import packed
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import FITTING
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rules import RULES
from gossamer.run.config.recipes import missing
from gossamer.topologies import make_topology
from gossamer.transport.bucket import bucket
from gossamer.transport.bucket.bucket import ObjectLimit, SecretSeal
from gossamer.transport.keys import certificate_of, new_key
from gossamer.tree import nbytes
from s3 import S3

Loop = gossamer.Outer[nn.Module]
TIMEOUT_S = 20.0


_drawing = threading.Lock()


def model_of(seed: int) -> nn.Module:
    with _drawing:
        torch.manual_seed(seed)
        return nn.Linear(3, 2)


def loop_in(store: object, seed: int = 0, rule: str = "diloco", **options: Any) -> Loop:
    given = {"local_steps": 2, "timeout_s": TIMEOUT_S, "workers": 2, **options}
    return gossamer.Outer(model_of(seed), rule, store=str(store), **given)


def train(outer: Loop, rounds: int) -> Iterator[int]:
    """Trains up to a round of the loop by the data of its slot; yields the rounds that have ended."""
    while outer.rounds < rounds:
        drift = torch.randn(
            outer.x.shape, generator=torch.Generator().manual_seed(100 * outer.worker + outer.steps_taken)
        )
        with torch.no_grad():
            outer.x.sub_(0.1 * drift + 0.01 * outer.x)
        if outer.step():
            yield outer.rounds


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result(100) for future in [pool.submit(act) for act in acts]]


def hash_of(outer: Loop) -> str:
    tensors = [outer.x, *outer.state_dict()["outer"]]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


# --- processes --------------------------------------------------------------------------------------------------------


def a_worker(argv: list[str]) -> int:
    """Trains to a round, and writes what it has after each."""
    torch.set_num_threads(1)
    store, seed, rounds, pause_s = argv
    try:
        with loop_in(store, int(seed), timeout_s=3.0) as outer:
            os.write(1, f"begins {outer.rounds} {outer.worker}\n".encode())
            for round in train(outer, int(rounds)):
                os.write(1, f"has {round} {hash_of(outer)}\n".encode())
                time.sleep(float(pause_s))
    except PeerError as error:
        os.write(1, f"{error}\n".encode())
        return 3
    return 0


class Workers:
    """Processes of a loop, and what each has after each round."""

    def __init__(self, store: Path) -> None:
        self.store, self.all = store, list[Command]()

    def start(self, rounds: int = 10_000, pause_s: float = 0.1) -> Command:
        one = Command(self.store, len(self.all), rounds, pause_s, work=a_worker)
        self.all.append(one)
        return one

    def closed(self) -> int:
        return len([*self.store.glob("r*-commit")])

    def train_on(self, more: int) -> None:
        until, deadline = self.closed() + more, time.monotonic() + 100
        while self.closed() < until:
            assert time.monotonic() < deadline, [one.finish(0) for one in self.all]
            time.sleep(0.02)

    def hashes(self) -> dict[int, set[str]]:
        output = [line.split() for one in self.all for line in one._output if line.startswith("has ")]
        rounds = dict[int, set[str]]()
        for _, round, value in output:
            rounds.setdefault(int(round), set()).add(value)
        return rounds


def until(one: Command, start: str) -> str:
    """The first line of a process that begins so."""
    return next(line for line in one.lines() if line.startswith(start))


@pytest.mark.timeout(200)
def test_a_loop_outlives_all_its_processes_and_they_are_bitwise_equal_after_each_round(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "store")
    first, second = workers.start(), workers.start()
    workers.train_on(STATE_EVERY + 2)
    second.kill()
    third = workers.start()
    assert int(until(third, "begins").split()[1]) > STATE_EVERY
    workers.train_on(2)
    os.kill(third.pid, signal.SIGSTOP)
    fourth = workers.start()
    until(fourth, "has")
    os.kill(third.pid, signal.SIGCONT)
    code, output = third.finish()
    assert code == 3 and "has lost its slot to another process, as it gave no sign of life for 3 s" in output, output
    for one in (first, fourth):
        one.kill()
    assert [one.finish()[0] for one in (first, second, fourth)] == [-signal.SIGKILL] * 3
    last = workers.closed() + 4
    ends = [one.finish() for one in (workers.start(last, 0.0), workers.start(last, 0.0))]
    assert [code for code, _ in ends] == [0, 0], ends
    assert all("continues in round" in output and "with the state of slot" in output for _, output in ends)
    hashes = workers.hashes()
    assert all(len(some) == 1 for some in hashes.values()) and len(hashes) > last - 4, hashes
    code, output = run("status", workers.store, "--json")
    status = json.loads(output)
    assert code == 0 and status["round"] == last and status["rounds"] is None, output
    assert [slot["standing"] for slot in status["workers"]] == ["left", "left"]
    assert run("status", workers.store)[1].startswith(
        f"{workers.store}: {last} rounds are closed; the last was closed by"
    )
    late = loop_in(workers.store, seed=9)
    assert late.rounds == last and {hash_of(late)} == hashes[last], "it continues where they ended"
    late.close()


def test_the_lines_of_the_page_start_a_loop_and_continue_it(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "when-a-machine-dies.md").read_text(encoding="utf-8")
    _, _, section = page.partition("### A loop of your own in a bucket")
    code = section.split("```python\n")[1].split("```")[0].replace("s3://bucket/run", str(tmp_path))
    code = code.replace("workers=4", "workers=1").replace("local_steps=30", "local_steps=1")
    for rounds in (2, 3):
        model = model_of(rounds)
        scope: dict[str, Any] = {
            "gossamer": gossamer,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "data": lambda worker, step: torch.full((1, 3), float(step)),
            "loss": lambda model, batch: model(batch).square().mean(),
        }
        exec(code.replace("1000", str(rounds)), scope)
        assert scope["outer"].rounds == rounds
    assert sorted(path.name for path in tmp_path.glob("*-commit")) == [f"r{round:08d}-commit" for round in range(3)]


# --- threads ----------------------------------------------------------------------------------------------------------


def both(*outers: Loop, rounds: int) -> None:
    in_threads(*(lambda outer=outer: [*train(outer, rounds)] for outer in outers))


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("diloco", {}),
        ("slowmo", {"codec": "int8", "local_steps": {0: 1, 3: 2}}),
        (RULES["diloco"](lr={0: 0.7, 6: 0.2}, momentum=0.9), {}),
        ("gasloc", {"codec": "int8"}),
    ],
    ids=["diloco", "slowmo", "changing", "gasloc"],
)
def test_loops_that_all_stay_have_the_numbers_of_sites_and_those_that_start_again_continue_with_them(
    tmp_path: Path, rule: Any, options: dict[str, Any]
) -> None:
    rounds, join = STATE_EVERY + 2, f"127.0.0.1:{free_port()}"

    def site(number: int) -> Loop:
        return gossamer.Outer(model_of(0), rule, **{"local_steps": 2, **options}, site=(number, 2), join=join)

    sites = in_threads(lambda: site(0), lambda: site(1))
    both(*sites, rounds=rounds)
    loops = in_threads(*[lambda: loop_in(tmp_path, 0, rule, **options)] * 2)
    both(*loops, rounds=rounds)
    loops.sort(key=lambda outer: outer.worker)
    assert [outer.worker for outer in loops] == [0, 1]
    assert [hash_of(outer) for outer in loops] == [hash_of(outer) for outer in sites]
    for outer in (*loops, *sites):
        outer.close()
    again = in_threads(*[lambda: loop_in(tmp_path, 1, rule, **options)] * 2)
    again.sort(key=lambda outer: outer.worker)
    if rule == "gasloc":
        assert [outer.rounds for outer in again] == [rounds, rounds]
        assert not torch.equal(again[0].x, again[1].x), "each slot has a state, which may be some rounds old"
    else:
        assert [hash_of(outer) for outer in again] == [hash_of(outer) for outer in sites]
    both(*again, rounds=rounds + 1)
    for outer in again:
        outer.close()


def test_one_that_comes_late_or_whose_round_was_closed_without_it_continues_with_what_the_others_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"workers": 3, "timeout_s": 1.0}
    first, second = in_threads(*(lambda seed=seed: loop_in(tmp_path, seed, **options) for seed in (1, 2)))
    assert torch.equal(first.x, second.x), "both have the start of the one that created it"
    both(first, second, rounds=3)
    third = loop_in(tmp_path, 3, **options)
    assert third.rounds == 3 and hash_of(third) == hash_of(first)
    assert "worker 2 continues in round 4, with that of the start and the means of 3 more" in caplog.text
    both(first, second, third, rounds=5)
    assert len({hash_of(outer) for outer in (first, second, third)}) == 1
    both(first, second, rounds=7)  # in the first of these rounds they wait for the third, which lives, for a second
    third.record(tmp_path / "record", steps=100)
    assert [third.step(0.5), third.step(0.5)] == [False, False], "its local phase came too late"
    assert (third.rounds, third.steps) == (7, 0) and hash_of(third) == hash_of(first)
    assert (
        "worker 2 continues in round 8, with the state of slot 2 after round 5 and the means of 2 more" in caplog.text
    )
    both(first, second, third, rounds=8)
    status = json.loads(run("status", tmp_path, "--json")[1])
    assert [slot["steps"] for slot in status["workers"]] == [16, 16, 6], "no step counts twice, or that came too late"
    assert len({hash_of(outer) for outer in (first, second, third)}) == 1
    for outer in (first, second):
        outer.close()
    assert len([*train(third, 9)]) == 1, "it does not wait for those that have left"
    assert "all slots are taken" not in caplog.text and third.losses(0.5) == {2: 0.5} and third.common_steps(7) == 7
    assert "mean_model() was called with store=..." in refusal(lambda: third.mean_model().__enter__())
    assert "a state was given after 9 rounds with store=..." in refusal(
        lambda: third.load_state_dict(third.state_dict())
    )
    third.close()


@pytest.mark.parametrize("name", [name for name, make in RULES.items() if not missing(make)])
def test_every_rule_continues_from_a_store_or_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    rule = RULES[name]()
    topology = make_topology(FITTING[rule.needs], 2, seed=0)
    faults = combination_faults(Combination(driver="library", rule=rule, topology=topology, elastic=True, store=True))
    if faults:
        assert refusal(lambda: loop_in(tmp_path, 0, name)) and not [*tmp_path.iterdir()]
        assert any("store is given" in one for one in faults) or rule.site == "gradients" or rule.adapted is not None, (
            faults
        )
        return
    with loop_in(tmp_path, 0, name, workers=1) as outer:
        assert [*train(outer, STATE_EVERY)] == [*range(1, STATE_EVERY + 1)]
    with loop_in(tmp_path, 1, name, workers=1) as again:
        assert again.rounds == STATE_EVERY and hash_of(again) == hash_of(outer)


def test_buffers_and_parameters_of_several_dtypes_are_part_of_the_state(tmp_path: Path) -> None:
    def made(seed: int, store: Path, **options: Any) -> tuple[nn.Sequential, Loop]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.bfloat16))
        return model, gossamer.Outer(model, "diloco", store=store, workers=1, local_steps=1, **options)

    model, outer = made(0, tmp_path / "a", rest="broadcast")
    with outer:
        for _ in range(STATE_EVERY):
            model[:2](torch.randn(5, 3)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.1 * torch.randn_like(p))
            assert outer.step()
    again, second = made(1, tmp_path / "a", rest="broadcast")
    second.close()
    assert (
        all(map(torch.equal, model.state_dict().values(), again.state_dict().values())) and model[1].num_batches_tracked
    )
    model, outer = made(0, tmp_path / "b")
    outer.close()
    model.get_buffer("1.running_mean").add_(1)
    output = refusal(lambda: gossamer.Outer(model, "diloco", store=tmp_path / "b", workers=1, local_steps=1))
    assert "frozen parameters and buffers (rest='compare') is" in output, output


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps], ids=["copied", "pickled"])
def test_a_loop_with_connections_is_neither_copied_nor_pickled(tmp_path: Path, act: Callable[[Any], Any]) -> None:
    with (
        loop_in(tmp_path, workers=1) as outer,
        pytest.raises(ConfigError, match=r"connections exist once; .* outer\.state_dict\(\)"),
    ):
        act({"outer": outer})
    model = model_of(0)
    model, outer = copy.deepcopy((model, gossamer.Outer(model, "diloco", local_steps=1)))
    assert outer.step() and outer.model is model, "one process alone may be copied with its model"


@pytest.mark.parametrize(
    ("rule", "options", "sentence"),
    [
        ("diloco", {"workers": None}, "and workers=None; give both or neither"),
        ("diloco", {"store": None}, "Outer got store=None and workers=2; give both or neither"),
        ("diloco", {"workers": 0}, "workers = 0, which must be"),
        ("diloco", {"site": (0, 2), "join": "127.0.0.1:1"}, "together with site=(0, 2) and join='127.0.0.1:1'"),
        ("diloco", {"elastic": True}, "together with elastic=True"),
        ("diloco", {"reduction": "all_reduce"}, "store is given and reduction is 'all_reduce'"),
        (
            "diloco",
            {"codec": gossamer.codecs.both_ways(gossamer.codecs.int8(), gossamer.codecs.int8())},
            "store is given, and codec 'int8' encodes the sums of a mean too",
        ),
        ("diloco", {"schedule": gossamer.Schedule(fragments=2)}, "store is given, and a round has several exchanges"),
        ("sparseloco", {}, "store is given, and after a round of rule 'sparseloco' its workers are not equal"),
        ("choco", {}, "store is given, and rule 'choco' keeps something of each peer"),
        ("eager", {}, "store is given, and rule 'eager' has exchanges in flight between rounds"),
    ],
)
def test_what_a_store_does_not_carry_is_refused_before_anything_is_written(
    tmp_path: Path, rule: str, options: dict[str, Any], sentence: str
) -> None:
    given = {"store": tmp_path / "store", "workers": 2, "local_steps": 4, **options}
    method = gossamer.method(rule) if rule == "sparseloco" else rule
    assert sentence in refusal(lambda: gossamer.Outer(nn.Linear(3, 2), method, **given))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("rest", "state_bytes"), [("compare", 96), ("broadcast", 120)])
def test_a_state_that_a_provider_does_not_take_in_one_object_is_refused_before_the_store_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: Any, state_bytes: int
) -> None:
    """8 parameters, the start of the round and the momentum, with 6 frozen numbers where they are part of the state."""
    model, folder = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False)), str(tmp_path / "run")
    given: dict[str, Any] = {"workers": 1, "rest": rest}
    for kind, url in (("S3", "s3://bucket/run"), ("AZURE", "az://container/run")):
        limit = getattr(bucket, f"{kind}_LIMIT")
        monkeypatch.setattr(bucket, f"{kind}_LIMIT", limit._replace(most_bytes=state_bytes - 1))
        output = refusal(lambda url=url: gossamer.Outer(model, "diloco", store=url, **given))
        assert output.startswith(f"Outer got store='{url}', and the state of this run is an object of ")
        assert f"where {limit.store} takes at most" in output
    least = ObjectLimit("a folder", state_bytes - 1)
    monkeypatch.setattr("gossamer.library.in_store.object_limit", lambda url: least)
    refusal(lambda: gossamer.Outer(model, "diloco", store=folder, **given))
    assert not [*tmp_path.iterdir()]
    least = ObjectLimit("a folder", state_bytes)
    gossamer.Outer(model, "diloco", store=folder, **given).close()


class _NoData(TorchDispatchMode):
    """Refuses operations whose result is a vector with data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.is_meta or result.numel() < 8, func
        return result


@pytest.mark.parametrize(
    "rule", ["diloco", "anchored_gasloc", "fedopt", "sparta", gossamer.rules.clipped(gossamer.gossip())], ids=str
)
def test_a_state_is_weighed_without_a_second_outer_state(rule: Any, tmp_path: Path) -> None:
    outer = loop_in(tmp_path, rule=rule, workers=1)
    assert outer._store is not None
    there = tensors_of(outer._store._state())
    with _NoData():
        weighed = _state_bytes(outer.method, outer._flat, {}, 1, outer._timetable)
    assert weighed == nbytes((*there,))
    outer.close()


def test_processes_of_one_group_and_trainers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the callback of a trainer got store='s3://bucket/run'"):
        begin_outer(model_of(0), "diloco", {"store": "s3://bucket/run", "workers": 1}, step=0, saved=None)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    assert "in a process group of 8 processes, and a worker in a store is one process" in refusal(
        lambda: loop_in(tmp_path)
    )


def test_a_loop_that_is_forgotten_frees_its_slot(tmp_path: Path) -> None:
    outer = loop_in(tmp_path, workers=1)
    assert len([*train(outer, 1)]) == 1 and not [*tmp_path.glob("v*")]
    del outer
    gc.collect()
    assert [path.name for path in tmp_path.glob("v*")] == ["v00000-0000"]


@pytest.mark.parametrize(
    "body",
    [
        b"no state",
        packed([1]),
        packed({"x": torch.ones(3), "outer": [], "rest": []}),
        packed({"x": torch.ones(8), "outer": "two", "rest": []}),
        packed({"x": torch.ones(8), "outer": [torch.ones(8)] * 2, "rest": [torch.ones(2)]}),
    ],
    ids=["no tensors", "a list", "too short", "a word", "too many"],
)
def test_a_state_that_is_none_of_the_loop_is_refused_in_a_sentence(tmp_path: Path, body: bytes) -> None:
    with loop_in(tmp_path, workers=1) as outer:
        assert len([*train(outer, STATE_EVERY)]) == STATE_EVERY
    state = tmp_path / f"s{STATE_EVERY:08d}"
    state.unlink()
    state.write_bytes(SecretSeal().sealed(state.name, {"slot": 0}, body))
    if body == b"no state":
        with loop_in(tmp_path, 1, workers=1) as again:
            assert hash_of(again) == hash_of(outer), "that of the start and all means"
        (tmp_path / "s00000000").unlink()
    output = refusal(lambda: loop_in(tmp_path, 0, workers=1, timeout_s=2.0))
    assert "a state in the store does not fit this model and rule" in output or "are no state of a worker" in output, (
        output
    )
    assert len([*tmp_path.glob("v*")]) == len([*tmp_path.glob("t*")]), "it leaves its slot free"


def test_another_loop_and_too_many_processes_are_refused(tmp_path: Path) -> None:
    options = {"workers": 1, "timeout_s": 1.0}
    outer = loop_in(
        tmp_path, **{**options, "timeout_s": 0.1}
    )  # it gives a sign of life ten times as often as is needed
    assert "all 1 slots of the run are filled" in refusal(lambda: loop_in(tmp_path, **options))
    for change, key in (
        ({"workers": 2}, "workers is 1 there and 2 here"),
        ({"rule": gossamer.diloco(lr=0.1)}, "rule is 'diloco'"),
        ({"seed": 1}, "seed is"),
    ):
        rule: Any = change.pop("rule", "diloco")
        given = {"local_steps": 2, **options, **change}
        output = refusal(lambda: gossamer.Outer(model_of(0), rule, store=tmp_path, **given))  # noqa: B023
        assert "the store holds another run: " in output and key.split()[0] in output, output
    outer.close()


def test_with_keys_a_store_shows_nothing_of_a_loop_and_only_listed_machines_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    keys = {name: new_key(name, tmp_path / f"{name}.pem") for name in ("berlin", "stranger")}
    for name, path in keys.items():
        certificate = base64.b64encode(certificate_of(path)).decode()
        (tmp_path / f"{name}.toml").write_text(f'[peers.{name}]\ncertificate = "{certificate}"\n')

    def keyed(name: str, workers: int = 1) -> Loop:
        monkeypatch.setenv("GOSSAMER_KEY", str(keys[name]))
        return loop_in(tmp_path / "store", workers=workers, peers=tmp_path / f"{name}.toml")

    assert "has [peers] for 1 workers and there are 2" in refusal(lambda: keyed("berlin", 2))
    with keyed("berlin") as outer:
        assert len([*train(outer, STATE_EVERY)]) == STATE_EVERY
    objects = [path.read_bytes() for path in (tmp_path / "store").iterdir()]
    assert not any(word in one for one in objects for word in (b"diloco", b"sha256", b"steps", b"leaves"))
    with keyed("berlin") as again:
        assert again.rounds == STATE_EVERY and hash_of(again) == hash_of(outer)
    assert "nobody in the run's [peers] has signed it" in refusal(lambda: keyed("stranger"))
    monkeypatch.setenv("GOSSAMER_KEY", str(keys["berlin"]))
    code, output = run("status", tmp_path / "store", "--peers", tmp_path / "berlin.toml", "--json")
    assert code == 0 and json.loads(output)["round"] == STATE_EVERY, output


@pytest.mark.full
def test_loops_in_an_object_store_that_fails_now_and_then_are_bitwise_equal(bucket: S3) -> None:
    bucket.fails_every = 40
    outers = in_threads(*(lambda seed=seed: loop_in("s3://bucket/run", seed, timeout_s=20.0) for seed in (1, 2)))
    both(*outers, rounds=2 * STATE_EVERY)
    assert len({hash_of(outer) for outer in outers}) == 1
    for outer in outers:
        outer.close()
    assert any(name.endswith(f"s{STATE_EVERY:08d}") for name in bucket.objects)
