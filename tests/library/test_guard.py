"""`Outer` misused is never silent: wrapped, moved, converted or unlike models, wrong arguments, and any process group."""

import contextlib
import ctypes
import gc
import inspect
import itertools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_library import flat, net, train
from torch import nn
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel as DDP

import gossamer
from commands import Command, in_forks
from gossamer.errors import ConfigError, PeerError
from gossamer.library import parts
from gossamer.library.guard import fingerprints, must_be_alike
from gossamer.library.peers import all_at
from gossamer.transport.processes.local import loopback
from gossamer.transport.processes.member import Member


def outer(model, **options):
    return gossamer.Outer(model, "diloco", **{"local_steps": 2, **options})


def test_names_of_rules_topologies_and_codecs_are_as_good_as_the_things_themselves():
    ends = []
    for options in (
        {"rule": "gasloc", "topology": "random", "codec": "bf16"},
        {"rule": gossamer.gasloc(), "topology": gossamer.topologies.make_topology("random", 1), "codec": None},
    ):
        model = net()
        with gossamer.Outer(model, options.pop("rule"), local_steps=2, **options) as loop:
            train(model, loop, 4)
        ends.append(flat(model))
    assert torch.equal(*ends)


def odd(tensor: torch.Tensor) -> nn.Module:
    model = net()
    model.register_parameter("odd", nn.Parameter(tensor))
    return model


def tied_by_memory(kind):
    model = nn.Module()
    model.first = nn.Parameter(torch.ones(2, 3))
    model.second = kind(model.first.data.t())
    return model


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"local_steps": 3.5}, "local_steps = 3.5, which must be a whole number of at least 1"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"rest": "copy"}, "rest = 'copy', which must be one of compare, broadcast, own"),
        ({"rule": "gaslok"}, "did you mean 'gasloc'"),
        ({"rule": "DiLoCo"}, "^unknown rule 'DiLoCo'; did you mean 'diloco'"),
        ({"rule": "streaming_diloco"}, r"if it is a method, give gossamer.method\('streaming_diloco'\)"),
        ({"rule": gossamer.gasloc}, "a 'gasloc' that was not called as rule"),
        (
            {"rule": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)},
            "of type SGD as rule; .* your optimizer stays",
        ),
        ({"codec": "int9"}, "unknown codec 'int9'; did you mean 'int8'"),
        ({"codec": 8}, "an object of type int as codec"),
        ({"topology": "rings"}, "did you mean 'ring'"),
        ({"topology": 3}, "an object of type int as topology"),
        ({"schedule": "late"}, "an object of type str as schedule"),
        (
            {"process_group": object()},
            "an object of type object as process_group and torch.distributed is not initialised",
        ),
        ({"model": [nn.Parameter(torch.ones(1))]}, "a list as model"),
        ({"model": nn.Linear(3, 1, device="meta")}, "2 tensors on the meta device, .* first is 'weight'"),
        ({"model": nn.LazyLinear(3)}, "2 tensors whose shape the first batch will give .* call the model once"),
        ({"model": nn.LazyBatchNorm1d()}, "4 tensors whose shape the first batch will give .* 'weight'"),
        ({"model": odd(torch.ones(2, 2).to_sparse())}, r"'odd' is sparse \(torch.sparse_coo\), .* dense real numbers"),
        ({"model": odd(torch.ones(2, dtype=torch.complex64))}, r"'odd' is complex \(torch.complex64\)"),
        ({"model": odd(torch.ones(2).to(torch.float8_e5m2))}, r"'odd' is in torch.float8_e5m2, .* of 16 to 64 bits"),
        ({"model": tied_by_memory(nn.Parameter)}, "'second' shares the memory of parameter 'first'"),
        ({"model": tied_by_memory(nn.Buffer)}, "'second' shares the memory of parameter 'first'"),
        ({"sync_every": 30}, r"no argument 'sync_every', .*give local_steps=\.\.\."),
        ({"num_fragments": 2}, r"no argument 'num_fragments', .*give schedule=Schedule\(fragments=\.\.\.\)"),
        ({"fragment_sync_delay": 2}, r"give schedule=Schedule\(overlap_steps=\.\.\.\)"),
        ({"fragment_update_alpha": 0.5}, r"give schedule=Schedule\(merge=\.\.\.\)"),
        ({"inner_optimizer": None}, r"give gossamer.outer_loop\(model, optimizer, rule\)"),
        ({"local_step": 3}, "unknown argument of Outer 'local_step'; did you mean 'local_steps'"),
        ({"peers": 5}, "peers = 5, which must be text or a path, or left out"),
        ({"store": 5, "workers": 2}, "store = 5, which must be text or a path, or left out"),
        ({"timeout_s": 0}, "timeout_s = 0, which must be a number above 0"),
    ],
    ids=itertools.count(),
)
def test_a_wrong_argument_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        gossamer.Outer(**{"model": net(), "rule": "gasloc", **options})


def test_the_words_of_others_lead_to_arguments_that_outer_has():
    arguments = set(inspect.signature(gossamer.Outer.__init__).parameters) - {"self", "model", "rule"}
    for ours in parts._ELSEWHERE.values():
        for name in re.findall(r"(\w+)=\.\.\.\)", ours):
            assert name in inspect.signature(gossamer.Schedule).parameters
        for name in re.findall(r"^(\w+)=", ours):
            assert name in arguments


def test_the_order_of_other_libraries_is_answered_in_a_sentence():
    model = nn.Linear(2, 1)
    with pytest.raises(
        ConfigError, match=r"3 arguments without a name; it takes two, .* your optimizer stays in your own loop"
    ):
        gossamer.Outer(model, torch.optim.SGD(model.parameters(), lr=0.1), gossamer.diloco())  # pyright: ignore[reportCallIssue]


def test_sparse_numbers_that_are_not_trained_are_compared():
    one, two = torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()
    assert fingerprints({"a": one}, numbers=True) == fingerprints({"a": one.clone()}, numbers=True)
    assert fingerprints({"a": one}, numbers=True) != fingerprints({"a": two}, numbers=True)


def test_a_closed_outer_says_so():
    model = net()
    loop = outer(model)
    train(model, loop, 2)
    state = loop.state_dict()
    loop.close()
    loop.close()
    for call in (loop.step, loop.finish, lambda: loop.load_state_dict(state)):
        with pytest.raises(ConfigError, match="closed after round 1"):
            call()


def test_one_of_several_processes_that_cannot_find_the_others_is_refused_and_does_not_train_alone(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert outer(net()).n == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigError, match="WORLD_SIZE is 4 and RANK, MASTER_ADDR, MASTER_PORT is not set, so this process"
    ):
        outer(net())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ConfigError, match="RANK is 4; with WORLD_SIZE 4 it must be between 0 and 3"):
        outer(net())
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'four'; it must be a whole number"):
        outer(net())


def converted(model):
    model.to(torch.bfloat16)


def resized(model):
    model[0] = nn.Linear(5, 4)


def replaced_by_another(model):
    model[2] = nn.Sequential(nn.Linear(4, 1))


def unfrozen(model):
    model.frozen.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (converted, r"'0.weight' is torch.bfloat16 \[4, 3\] on cpu, and was torch.float32"),
        (resized, r"'0.weight' is torch.float32 \[4, 5\] on cpu, and was torch.float32 \[4, 3\]"),
        (replaced_by_another, "'2.weight' is gone"),
        (unfrozen, "1 parameters are trainable that were not .* first is 'frozen'"),
    ],
)
def test_a_model_that_changed_since_is_refused_at_the_next_exchange(change, sentence):
    model = net()
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    loop = outer(model)
    train(model, loop, 2)
    loop.step()
    change(model)
    with pytest.raises(ConfigError, match=sentence):
        loop.step()


def loaded(model, state):
    model.load_state_dict(state)


def assigned(model, state):
    model.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)


def there_and_back(model, state):
    model.load_state_dict(state)
    model.to(torch.float64).to(torch.float32)


@pytest.mark.parametrize("load", [assigned, there_and_back])
def test_parameters_that_left_the_flat_buffer_are_taken_back(load):
    ends = []
    for way in (loaded, load):
        model, other = net(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for k, p in enumerate(other.parameters()):
                p.fill_(0.1 * k)
        loop = outer(model)
        train(model, loop, 2)
        way(model, other.state_dict())
        train(model, loop, 4, seed=1)
        assert torch.equal(flat(model), loop.x)
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_a_parameter_in_another_order_of_the_same_memory_is_taken_back():
    model = nn.Sequential(nn.Linear(3, 3), nn.Conv2d(3, 3, 3))
    loop = outer(model, local_steps=1)
    for change in (lambda p: p.data.t(), lambda p: p.data.t().clone().t()):
        weight = model[0].weight
        before = weight.detach().clone()
        weight.data = change(weight)
        seen = weight.detach().clone()
        with torch.no_grad():
            weight += 1.0
        loop.step()
        assert weight.is_contiguous() and torch.equal(flat(model), loop.x)
        assert not torch.equal(weight, before) and weight.shape == seen.shape
    model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        model[1].weight += 1.0
    loop.step()
    assert torch.equal(flat(model), loop.x)


def test_of_two_outers_of_the_same_parameters_the_earlier_is_refused_while_the_later_is_open():
    model = net()
    first = outer(model)
    train(model, first, 2)
    second = outer(nn.Sequential(model[0], nn.Linear(4, 1)))
    with pytest.raises(ConfigError, match=r"another Outer was made of parameter '0\.weight' while this one is open"):
        train(model, first, 2)
    second.close()
    first = outer(model)
    outer(model)  # as in a notebook: a later one that was dropped
    gc.collect()
    train(model, first, 4)
    assert first.rounds == 2


def test_what_is_frozen_later_is_still_exchanged():
    model = net()
    loop = outer(model)
    model[0].weight.requires_grad_(False)
    train(model, loop, 4)
    assert loop.rounds == 2


def test_tensors_that_differ_are_named_by_their_hashes_and_many_by_one():
    tensors = {"a": torch.ones(3), "b": torch.zeros((), dtype=torch.int64), "c": torch.empty(0)}
    other = {**tensors, "b": torch.ones((), dtype=torch.int64)}
    one, two = fingerprints(tensors, numbers=True), fingerprints(other, numbers=True)
    must_be_alike([one, one], list(tensors))
    with pytest.raises(PeerError, match="on workers 1, 1 of 3 tensors and first 'b'"):
        must_be_alike([one, two, one], list(tensors))
    assert fingerprints(tensors, numbers=False) == fingerprints(other, numbers=False)
    for wrong in ([], "x", one[:2]):
        with pytest.raises(PeerError, match="on workers 1;"):
            must_be_alike([one, wrong], list(tensors))
    many = {str(k): tensors["a"] for k in range(5000)}
    assert len(fingerprints(many, numbers=True)) == 1


def test_workers_that_call_different_methods_are_named_with_them():
    store = HashStore()
    members = [Member.at(worker, 2, torch.device("cpu"), store) for worker in range(2)]

    def came(member: Member, place: str) -> str:
        with pytest.raises(PeerError) as error:
            all_at(place, member, 1, 5.0)
        return str(error.value)

    with ThreadPoolExecutor() as threads:
        errors = [*threads.map(came, members, ["step() of Outer", "common_steps() of Outer"])]
    assert errors[0].startswith(
        "worker 1 came to common_steps() of Outer where worker 0 came to step() of Outer; let all"
    )
    assert errors[1].startswith(
        "worker 0 came to step() of Outer where worker 1 came to common_steps() of Outer; let all"
    )
    with pytest.raises(PeerError, match=r"not all workers came to step\(\) of Outer together: worker 1 sent no conf"):
        all_at("step() of Outer", members[0], 1, 0.2)


# --- two processes ---------------------------------------------------------------------------------------------------

Say = Callable[[str], None]


def two(argv: list[str]) -> int:
    """Two processes that go through all this."""
    import torch.distributed.fsdp  # noqa: F401 - once for both

    return in_forks(2, lambda rank: one_of_two(rank, int(argv[0])))


def one_of_two(rank: int, port: int) -> None:
    """What one of the processes goes through, and tells line by line."""
    store = TCPStore("127.0.0.1", port, is_master=False)

    def say(words: str) -> None:
        os.write(1, f"{rank} {words}\n".encode())

    def init(name: str, *backend: str) -> None:
        dist.init_process_group(*backend, store=PrefixStore(name, store), rank=rank, world_size=2)

    init("wrapped", "gloo")
    wrapped(rank, say)
    dist.destroy_process_group()
    groups(rank, say, init)
    ctypes.pythonapi.Py_Exit(0)  # as a program ends, the end of its interpreter included


def equal(model: nn.Module) -> bool:
    """Whether both have the same parameters."""
    ends = [torch.empty_like(flat(model)) for _ in range(2)]
    dist.all_gather(ends, flat(model))
    return torch.equal(*ends)


def local_sgd(model: nn.Module, **options: Any) -> gossamer.Outer:
    return gossamer.Outer(model, "local_sgd", local_steps=2, timeout_s=20, **options)


def refused(say: Say, what: str, act: Callable[[], object]) -> None:
    try:
        act()
        say(f"{what}: let in")
    except (ConfigError, PeerError) as error:
        say(f"{what}: {error}")


def groups(rank: int, say: Say, init: Callable[..., None]) -> None:
    def train_in(name: str, **options: Any) -> None:
        model = net()
        with local_sgd(model, **options) as loop:
            train(model, loop, 4, seed=rank)
        say(f"{name}: agree {equal(model)}")

    for name, *backend in [("gloo", "gloo"), ("cpu:gloo", "cpu:gloo"), ("no backend",)]:
        init(name, *backend)
        train_in(name)
        dist.destroy_process_group()
    init("own", "gloo")
    own, solo = dist.new_group([0, 1]), [dist.new_group([k]) for k in range(2)]
    train_in("own group", process_group=own)
    train_in("alone", process_group=solo[rank])
    refused(say, "no member", lambda: local_sgd(net(), process_group=solo[1 - rank]))
    total = torch.ones(1)
    dist.all_reduce(total, group=own)
    say(f"own group still sums: {total.item():g}")
    global left_open
    left_open = local_sgd(net())  # until the interpreter ends
    train(net(), left_open, 2)


def wrapped(rank: int, say: Say) -> None:
    solo = [dist.new_group([k]) for k in range(2)]
    refused(say, "wrapped", lambda: local_sgd(DDP(net())))
    model = net()
    with contextlib.closing(local_sgd(model)) as loop:
        wrapper = DDP(model)
        refused(say, "wrapped later", lambda: train(wrapper, loop, 1))
    wrapper = DDP(net())
    with contextlib.closing(local_sgd(wrapper.module)) as loop:
        refused(say, "wrapped before", lambda: train(wrapper, loop, 1))
    model = net()
    with contextlib.closing(local_sgd(model)) as loop:
        train(model, loop, 1)
        wrapper = DDP(model)
        refused(say, "wrapped within the first round", lambda: train(wrapper, loop, 1))
    for half, group in [(False, dist.group.WORLD), (False, solo[rank]), (True, solo[rank])]:
        model = net()
        engine = engine_of(model, group, half)
        with contextlib.closing(local_sgd(model)) as loop:
            refused(say, f"engine, {half}, {group is solo[rank]}", partial(train, engine, loop, 1))
    refused(say, "engine itself", lambda: local_sgd(engine_of(net(), dist.group.WORLD, False)))
    for mark in ("ds_id", "_hp_mapping"):
        model = net()
        setattr(model[0].weight, mark, 0)
        refused(say, mark, partial(local_sgd, model))
    model = net()
    wrapper = DDP(model, process_group=solo[rank])
    with local_sgd(model) as loop:
        train(wrapper, loop, 4, seed=rank)
    say(f"wrapped in a worker: agree {equal(model)}")
    sharded(say)
    for_unlike(rank, say)


def engine_of(model: nn.Module, group: Any, half: bool) -> nn.Module:
    """What DeepSpeed 0.19.8 shows of an engine; it is not installed here."""

    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.seq_data_parallel_group = model, group
        self.fp16_enabled, self.bfloat16_enabled = (lambda: half), (lambda: False)

    names = {"__init__": init, "forward": lambda self, x: self.module(x), "__module__": "deepspeed.runtime.engine"}
    return type("DeepSpeedEngine", (nn.Module,), names)()


def sharded(say: Say) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    refused(say, "sharded", lambda: say(f"sharded over all: {local_sgd(fully_shard(net(), mesh=mesh))}"))
    model = net()
    with contextlib.closing(local_sgd(model)) as loop:
        fully_shard(model, mesh=mesh)
        refused(say, "sharded later", lambda: train(model, loop, 2))


def for_unlike(rank: int, say: Say) -> None:
    def odd() -> nn.Module:
        model = nn.Sequential(net(), nn.BatchNorm1d(1))
        model[0][0].weight.requires_grad_(False)
        with torch.no_grad():
            model[0][0].weight += rank
            model[1].running_mean += rank
        return model

    refused(say, "unlike", lambda: local_sgd(odd()))
    for rest in ("broadcast", "own"):
        model = odd()
        local_sgd(model, rest=rest).close()
        say(f"{rest}: {model[0][0].weight[0, 0] - net()[0].weight[0, 0]:.0f} {model[1].running_mean.item():.0f}")
    model = net()
    with local_sgd(model) as loop:
        train(model, loop, 2, seed=rank)
        model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        train(model, loop, 2, seed=rank + 2)
    say(f"assigned: agree {equal(model)}")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What two processes print that go through all this."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code, output = Command(store.port, work=two, GLOO_SOCKET_IFNAME=loopback()).finish()
    assert code == 0, output
    return output.splitlines()


def test_any_process_group_works_and_lets_the_process_end(lines):
    for rank in "01":
        for name in ("gloo", "cpu:gloo", "no backend", "own group"):
            assert f"{rank} {name}: agree True" in lines, lines
        assert f"{rank} alone: agree False" in lines
        assert f"{rank} own group still sums: 2" in lines
        assert any(line.startswith(f"{rank} no member: Outer got") and "member of" in line for line in lines)


def test_wrapped_unlike_and_moved_models_are_refused_or_mended_by_all_workers(lines):
    for rank in "01":

        def said(what: str, rank: str = rank) -> str:
            [line] = [line for line in lines if line.startswith(f"{rank} {what}: ")]
            return line

        assert "the model is in DistributedDataParallel, which averages gradients" in said("wrapped")
        for when in ("wrapped later", "wrapped before", "wrapped within the first round"):
            assert "averages the gradients of all workers" in said(when)
            for framework in ("Accelerate", "Hugging Face Trainer", "Lightning"):
                assert framework in said(when)
        assert "the model is wrapped in DeepSpeedEngine, which averages" in said("engine, False, False")
        assert said("engine, False, True").endswith("let in")
        assert "by DeepSpeedEngine in half precision, whose optimizer trains copies" in said("engine, True, True")
        assert "give Outer its engine.module" in said("engine itself")
        for mark in ("ds_id", "_hp_mapping"):
            assert "'0.weight' is held by DeepSpeed's ZeRO, whose optimizer trains copies" in said(mark)
        assert said("wrapped in a worker").endswith("agree True")
        assert f"shard={rank} of 2, worker=0 of 1" in said("sharded over all")
        assert any("all 2 processes hold one model together, so there is one worker" in line for line in lines)
        assert "'0.weight' became a DTensor after Outer was made" in said("sharded later")
        assert "on workers 1, 2 of 4 tensors and first '0.0.weight'" in said("unlike")
        assert said("broadcast").endswith(": 0 0")
        assert said("own").endswith(f": {rank} {rank}")
        assert said("assigned").endswith("agree True")
