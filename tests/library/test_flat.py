"""Workers of several processes: FSDP2, HSDP and tensor parallelism inside a worker, rounds between workers."""

import contextlib
import copy
import gc
import os
import time
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gossamer
from commands import Command, free_port, in_forks
from gossamer.errors import GossamerError, PeerError
from gossamer.library.dtensors import local
from gossamer.library.flat import flat_of
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rounds.exchange import Exchange
from gossamer.rules import RULES, clipped, trusted
from gossamer.run.config.recipes import missing
from gossamer.transport.processes.local import loopback

LOCAL_STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks with a tied, a frozen and an uneven tensor, and a buffer."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(width, 2 * width + 1) for _ in range(3))
        self.inward, self.outward = nn.Linear(width, width), nn.Linear(width, width)
        self.outward.weight = self.inward.weight
        self.layers[1].norm.weight.requires_grad_(False)
        self.head = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x.to(self.inward.weight.dtype))
        for layer in self.layers:
            x = layer(x.to(layer.up.weight.dtype))
        return self.head(self.outward(x.to(self.outward.weight.dtype)))


class Case(NamedTuple):
    """What is trained, and how it is exchanged."""

    rule: str | gossamer.Rule = "diloco"
    optimizer: str = "adamw"
    same: bool = False
    """Whether both processes of a worker train on the same samples."""
    options: Mapping[str, Any] = MappingProxyType({})
    rounds: int = 2
    half: tuple[str, ...] = ()
    """Modules that are converted to bf16."""
    evaluates: bool = False
    clip: float = 0.0
    compiles: bool = False
    mesh: tuple[int, ...] = (2,)


CASES = {
    "diloco, adamw": Case(),
    "gasloc, sgd": Case("gasloc", "sgd"),
    "gasloc, adamw, the same samples": Case("gasloc", same=True),
    "fragments that overlap": Case(
        "gasloc", options={"schedule": gossamer.Schedule(fragments=2, overlap_steps=1)}, rounds=3
    ),
    "merged": Case(options={"schedule": gossamer.Schedule(fragments=3, overlap_steps=2, merge=0.5)}, rounds=3),
    "compiled": Case("gossip", compiles=True),
    "bf16": Case(half=("layers", "inward", "outward", "head")),
    "some in bf16": Case("gasloc", half=("layers.0", "layers.1")),
    "codec of elements": Case(options={"codec": "bf16"}),
    "evaluated between the steps": Case(evaluates=True),
    "late": Case("eager", rounds=3),
    "replicas of shards": Case(mesh=(2, 1), same=True),
}
"""These end with the bits of two workers of one process each."""
NEAR = {
    "clipped": Case("gasloc", "sgd", clip=0.1, rounds=4),
    "messages that are clipped": Case(clipped(gossamer.gasloc(), at=1.0, decline=9.0, window=4), "sgd", rounds=6),
    "trusted directions": Case(trusted(gossamer.diloco(lr=0.3, momentum=0.0)), "sgd", rounds=5),
}
"""Norms, of gradients or of messages, are summed in another order."""
MEASURED = ("diloco, adamw", "gasloc, sgd", "replicas of shards")
"""Those whose bytes are counted, of which the first is what two sites are compared with."""
BEYOND_CI = ("gasloc, adamw, the same samples", "merged", "compiled", "bf16", "late", "trusted directions")
"""What others do most of. Four processes take seconds of CPU for each case, so they train those that will be looked at."""


def shard(model: Model, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def made(case: Case, mesh: DeviceMesh | None = None) -> Model:
    model = Model()
    for name in case.half:
        model.get_submodule(name).to(torch.bfloat16)
    if case.compiles:
        model.layers[0].compile(backend="aot_eager")
    if mesh is not None:
        shard(model, mesh)
    return model


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, 1e-2, momentum=0.9)
    return torch.optim.AdamW(trained, 1e-2, weight_decay=0.1)


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: gossamer.Outer[Any],
    turns: list[int],
    steps: range,
) -> None:
    """Steps of one process: it sees the samples of one shard, or those of both, as two halves of a batch."""
    for step in steps:
        for turn in turns:
            draw = torch.Generator().manual_seed(1000 * step + 10 * outer.worker + (0 if case.same else turn))
            x = torch.randn(8, 13, generator=draw)
            ((model(x) - x.sin().sum(1, keepdim=True)).square().mean() / len(turns)).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluates:  # FSDP2 leaves the root's parameters gathered
            with torch.no_grad():
                model(torch.ones(1, 13))
        outer.step()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named.items()}


def outer_of(case: Case, model: nn.Module, **more: Any) -> gossamer.Outer[Any]:
    return gossamer.Outer(model, case.rule, **{"local_steps": LOCAL_STEPS, "timeout_s": 60, **case.options, **more})


class Stage(NamedTuple):
    """One of four processes: shard 0 or 1 of worker 0 or 1; the first two are also two workers of one process each."""

    rank: int
    mesh: DeviceMesh
    two: dist.ProcessGroup
    alone: dist.ProcessGroup
    folder: Path

    def keep(self, what: str, worker: int, found: object) -> None:
        torch.save(found, self.folder / f"{what}-{worker}.pt")

    def say(self, words: str) -> None:
        os.write(1, f"{self.rank} {words}\n".encode())

    def refused(self, what: str, act: Callable[[], object]) -> None:
        try:
            act()
            self.say(f"{what}: let in")
        except GossamerError as error:
            self.say(f"{what}: {error}")


def same_as_two(stage: Stage, name: str, case: Case) -> None:
    """The case with sharded workers, and with two of one process each."""
    steps, site = range(LOCAL_STEPS * case.rounds), stage.mesh["shard"]
    if len(case.mesh) > 1:
        site = init_device_mesh("cpu", (2, *case.mesh), mesh_dim_names=("worker", "replica", "shard"))[
            "replica", "shard"
        ]
    model = made(case, site)
    with outer_of(case, model) as outer:
        train(case, model, optimizer_of(case, model), outer, [outer.shard], steps)
        outer.finish()
        found = whole(model)
        if outer.shard == 0:
            stage.keep(name, outer.worker, found)
        stage.say(f"{name}: sends {outer.metrics().bytes_sent} bytes")
    if stage.rank < 2:
        model = made(case)
        with outer_of(case, model, process_group=stage.two) as outer:
            train(case, model, optimizer_of(case, model), outer, [0, 1], steps)
            outer.finish()
            stage.keep(f"{name}, whole", outer.worker, whole(model))
            stage.say(f"{name}, whole: sends {outer.metrics().bytes_sent} bytes")
    dist.barrier()


def tensor_parallel(stage: Stage) -> None:
    """Weights are split, norms are copies: these cross between workers once."""
    case, steps = Case("gasloc", "sgd", same=True), range(LOCAL_STEPS * 4)

    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Block(13, 26) for _ in range(2)), nn.Linear(13, 1))

    model = small()
    for block in model[:2]:
        parallelize_module(block, stage.mesh["shard"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stage.refused("plain and lossy", lambda: outer_of(case, model, codec="int8"))
    with outer_of(case, model) as outer:
        train(case, model, optimizer_of(case, model), outer, [0], steps)
        if (found := whole(model)) and outer.shard == 0:
            stage.keep("tensor parallel", outer.worker, found)
    if stage.rank < 2:
        model = small()
        with outer_of(case, model, process_group=stage.two) as outer:
            train(case, model, optimizer_of(case, model), outer, [0], steps)
            stage.keep("tensor parallel, whole", outer.worker, whole(model))


def pipeline(stage: Stage) -> None:
    """The processes of a worker have different parameters, which are no DTensors."""
    shard = stage.mesh.get_local_rank("shard")
    model = nn.ModuleDict({f"stage{shard}": nn.Linear(3 + shard, 2)})
    with outer_of(Case("local_sgd"), model, mesh=stage.mesh["shard"], local_steps=1) as outer:
        with torch.no_grad():
            for p in model.parameters():
                p += outer.worker
        outer.step()
        stage.keep("pipeline", stage.rank, whole(model))


def resumed(stage: Stage) -> None:
    """Saved within a round, with exchanges in flight, and loaded into new objects."""
    for name, case in {
        "resumed": Case("gasloc", options={"schedule": gossamer.Schedule(fragments=2, overlap_steps=3)}),
        "resumed, some in bf16": Case(half=("layers.0",), options={"schedule": gossamer.Schedule(overlap_steps=2)}),
    }.items():
        ends = []
        model = made(case, stage.mesh["shard"])
        optimizer = optimizer_of(case, model)
        with outer_of(case, model) as outer:
            turns = [outer.shard]
            train(case, model, optimizer, outer, turns, range(6))
            saved = copy.deepcopy(
                {"outer": outer.state_dict(), "optimizer": optimizer.state_dict(), "model": model.state_dict()}
            )
            train(case, model, optimizer, outer, turns, range(6, 10))
            outer.finish()
            ends.append(whole(model))
        model = made(case, stage.mesh["shard"])
        optimizer = optimizer_of(case, model)
        with outer_of(case, model) as outer:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            outer.load_state_dict(saved["outer"])
            train(case, model, optimizer, outer, turns, range(6, 10))
            outer.finish()
            ends.append(whole(model))
        stage.keep(f"{name}, went on", stage.rank, ends[0])
        stage.keep(name, stage.rank, ends[1])
        with contextlib.closing(outer_of(case, made(case), process_group=dist.group.WORLD)) as alone:
            stage.refused(f"{name} by another number", partial(alone.load_state_dict, saved["outer"]))


def reshared(stage: Stage) -> None:
    """Saved by two processes of each worker, and continued by one."""
    case = Case("gasloc", same=True)
    model = made(case, stage.mesh["shard"])
    optimizer = optimizer_of(case, model)
    with outer_of(case, model) as outer:
        train(case, model, optimizer, outer, [0], range(6))
        at, group = stage.folder / f"shared-{outer.worker}", stage.mesh["shard"].get_group()
        dcp.save({"model": model.state_dict(), **outer.shared_state_dict()}, checkpoint_id=at, process_group=group)
        optimizer = optimizer_of(Case(optimizer="sgd"), model)
        train(case, model, optimizer, outer, [0], range(6, 12))
        if (found := whole(model)) and outer.shard == 0:
            stage.keep("shared, went on", outer.worker, found)
    dist.barrier()
    if stage.rank < 2:
        model = made(case)
        with outer_of(case, model, process_group=stage.two) as outer:
            state = {"model": model.state_dict(), **outer.shared_state_dict()}
            dcp.load(state, checkpoint_id=stage.folder / f"shared-{outer.worker}", no_dist=True)
            model.load_state_dict(state["model"])
            stage.refused("shared and torn", lambda: outer.load_shared_state_dict({**state, "outer.rounds": -1}))
            stage.refused("shared and less", lambda: outer.load_shared_state_dict({"outer.rounds": 1}))
            outer.load_shared_state_dict(state)
            train(case, model, optimizer_of(Case(optimizer="sgd"), model), outer, [0], range(6, 12))
            stage.keep("shared", outer.worker, whole(model))


def resharded(stage: Stage) -> None:
    """A worker of two processes is continued by four, and then by one: the outer state under flat names stays what it was."""
    case, folder, tensors = Case(same=True), stage.folder, list[dict[str, torch.Tensor]]()
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    for turn, (processes, mesh) in enumerate(((2, stage.mesh["shard"]), (4, four), (1, None))):
        group = dist.group.WORLD if processes == 4 else stage.two if processes == 2 else stage.alone
        if stage.rank >= processes:
            continue
        model = made(case, mesh)
        with outer_of(case, model, process_group=group) as outer:
            state = {"model": model.state_dict(), **outer.shared_state_dict()}
            if turn:
                dcp.load(state, checkpoint_id=folder / f"as-of-{turn - 1}", process_group=group, no_dist=processes == 1)
                model.load_state_dict(state["model"])
                outer.load_shared_state_dict(state)
            else:
                train(case, model, optimizer_of(case, model), outer, [0], range(6))
            state = {"model": model.state_dict(), **outer.shared_state_dict()}
            dcp.save(state, checkpoint_id=folder / f"as-of-{turn}", process_group=group, no_dist=processes == 1)
            flat = {**state.pop("model"), **state}
            whole = {name: t for name, t in flat.items() if isinstance(t, torch.Tensor)}
            whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in whole.items()}
            tensors.append({name: t.detach().clone() for name, t in whole.items()})
            if turn:
                train(case, model, optimizer_of(case, model), outer, [0], range(6, 9))
                stage.say(f"resharded {turn}: after {outer.rounds} rounds and {outer.steps} steps")
    if stage.rank == 0:
        for turn, found in enumerate(tensors):
            stage.keep("resharded", turn, found)


def lossy(stage: Stage) -> None:
    """A codec that looks at several numbers sees one shard: the oracle is an Outer of its own around the part of a process."""
    lane = stage.mesh.get_group("worker")
    for codec in LOSSY:
        case = Case("diloco", options={"codec": codec})
        model = made(case, stage.mesh["shard"])
        parts = nn.ParameterList([nn.Parameter(local(p).clone(), p.requires_grad) for p in model.parameters()])
        with outer_of(case, model) as outer, outer_of(case, parts, process_group=lane) as oracle:
            for step in range(3 * LOCAL_STEPS):
                draw = torch.Generator().manual_seed(10 * step + stage.rank)
                with torch.no_grad():
                    for p, part in zip(model.parameters(), parts, strict=True):
                        change = torch.randn(part.shape, generator=draw)
                        local(p).add_(change)
                        part.add_(change)
                outer.step()
                oracle.step()
            alike = [torch.equal(local(p), part) for p, part in zip(model.parameters(), parts, strict=True)]
            stage.say(f"{codec}: {outer.rounds} rounds, {alike.count(False)} of {len(alike)} differ from the oracle")


LOSSY = ("topk", "int8", "sign")


def lent(stage: Stage) -> None:
    """The mean model is evaluated, and everything is as it was, although FSDP2 has gathered the mean."""
    case = Case(half=("layers.1",))
    model = made(case, stage.mesh["shard"])
    with outer_of(case, model) as outer:
        train(case, model, optimizer_of(case, model), outer, [outer.shard], range(2))
        before = whole(model)
        stage.keep("before the mean", outer.worker, before)
        with outer.mean_model() as mean, torch.no_grad():
            mean(torch.ones(1, 13))
            model.reshard()
            stage.keep("mean", stage.rank, whole(model))
            mean(torch.ones(1, 13))
        after = whole(model)
        stage.say(f"as before the mean: {all(torch.equal(before[name], after[name]) for name in before)}")
        steps = outer.common_steps(10 + stage.rank)
        stage.say(f"common steps: {steps}")


def torn(stage: Stage) -> None:
    """One process loses its peer, in the exchange or between two of them, and no other takes the update."""
    receive, advance = Exchange.receive, Exchange.advance

    def lost(self: Exchange) -> bool:
        raise PeerError("the peer of one lane is gone")

    for name, change in {"torn": "receive", "torn before": "advance"}.items():
        case = Case("gasloc", options={"schedule": gossamer.Schedule(overlap_steps=2)})
        model = made(case, stage.mesh["shard"])
        with outer_of(case, model) as outer:
            optimizer, turns = optimizer_of(case, model), [outer.shard]
            train(case, model, optimizer, outer, turns, range(4))
            if stage.rank == 1:
                setattr(Exchange, change, lost)
            train(case, model, optimizer, outer, turns, range(4, 5))
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            before = [local(p).clone() for p in model.parameters()]
            stage.refused(name, outer.step)
            after = [local(p) for p in model.parameters()]
            stage.say(f"{name}, updated: {not all(map(torch.equal, before, after))}")
            dist.barrier()
        Exchange.receive, Exchange.advance = receive, advance


def unlike(stage: Stage) -> None:
    """What is refused at the start."""
    refused, case, shards = stage.refused, Case(), stage.mesh["shard"]
    refused("rule of whole tensors", lambda: gossamer.Outer(made(case, shards), "sparta"))
    refused("all-reduce", lambda: outer_of(case, made(case, shards), reduction="all_reduce"))
    refused("chosen", lambda: outer_of(case, made(case, shards), schedule=gossamer.Schedule(fragments=2, sends=2)))
    first = stage.rank < 2
    refused("sharded on one side", lambda: outer_of(case, made(case, shards if first else None), timeout_s=5))

    def by_columns() -> nn.Module:
        torch.manual_seed(0)
        place = None if first else lambda p: torch.distributed.tensor.Shard(p.ndim - 1)
        return fully_shard(nn.Linear(12, 12), mesh=shards, shard_placement_fn=place)

    refused("sharded otherwise", lambda: outer_of(case, by_columns()))
    refused("beyond its mesh", lambda: outer_of(case, made(case, shards), mesh=stage.mesh["worker"]))
    group = stage.two if first else None
    if first:
        refused("beyond its group", lambda: outer_of(case, made(case, stage.mesh["worker"]), process_group=group))
    dist.barrier()
    model = made(case, shards)
    with contextlib.closing(outer_of(case, model)) as outer:
        model.head = nn.Linear(13, 1)
        optimizer = torch.optim.SGD(model.layers.parameters(), 0.1)
        refused("replaced by a plain one", lambda: train(case, model, optimizer, outer, [0], range(4)))
    dist.barrier()
    unfrozen = made(case, shards)
    with contextlib.closing(outer_of(case, unfrozen)) as outer:
        unfrozen.layers[1].norm.weight.requires_grad_(True)
        refused("made trainable", lambda: train(case, unfrozen, optimizer_of(case, unfrozen), outer, [0], range(4)))


def dying(stage: Stage) -> None:
    """One process ends, and all others say so within the timeout; the last that happens."""
    case = Case()
    model = made(case, stage.mesh["shard"])
    outer = outer_of(case, model, timeout_s=20)
    optimizer = optimizer_of(case, model)
    train(case, model, optimizer, outer, [outer.shard], range(7))
    if stage.rank == 3:
        os._exit(0)
    stage.refused("died", outer.step if stage.rank != 2 else outer.finish)
    os._exit(0)


def written(stage: Stage) -> None:
    """A forward pass without a backward, and then other parameters, as where a site takes another's state."""
    model, plain, x = made(Case(), stage.mesh["shard"]), made(Case()), torch.ones(1, 13)
    with torch.no_grad():
        model(x)  # the parameters of the root stay gathered
        held = flat_of(model, stage.mesh["shard"], gossamer.Schedule())
        model(x)
        held.x.mul_(2)
        held.write()
        for p in [p for p in plain.parameters() if p.requires_grad]:
            p.mul_(2)
        stage.say(f"written: {torch.equal(model(x), plain(x))}")


def closed(stage: Stage) -> None:
    """The descriptors of this process after each of several outer loops, once they are collected: they lie in cycles."""
    model, counts = made(Case(), stage.mesh["shard"]), list[int]()
    for _ in range(3):
        with outer_of(Case(), model, local_steps=1) as outer:
            train(Case(), model, optimizer_of(Case(), model), outer, [outer.shard], range(1))
            outer.finish()
        del outer
        gc.collect()
        dist.barrier()
        end_s = time.monotonic() + 20.0
        while len(os.listdir("/proc/self/fd")) > min(counts, default=1 << 20) and time.monotonic() < end_s:
            time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/fd")))
    stage.say(f"open: {max(0, counts[-1] - counts[0])} more")


def one_of_four(rank: int, port: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=PrefixStore("four", store), rank=rank, world_size=4)
    two, alone = dist.new_group([0, 1]), dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    stage = Stage(rank, mesh, two, alone, folder)
    for name in names:
        same_as_two(stage, name, {**CASES, **NEAR}[name])
    for act in (
        tensor_parallel,
        pipeline,
        resumed,
        reshared,
        resharded,
        lossy,
        written,
        closed,
        lent,
        torn,
        unlike,
        dying,
    ):
        act(stage)
        dist.barrier()


def four(argv: list[str]) -> int:
    port, folder, *names = argv
    if "compiled" in names:
        import torch._inductor.compile_fx  # noqa: F401  which each of them would import

    return in_forks(4, lambda rank: one_of_four(rank, int(port), Path(folder), names))


class ResultsOfFour(NamedTuple):
    lines: list[str]
    folder: Path

    def of(self, rank: int, what: str) -> str:
        [line] = [line for line in self.lines if line.startswith(f"{rank} {what}: ")]
        return line.partition(": ")[2]

    def kept(self, what: str, worker: int) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"{what}-{worker}.pt", weights_only=True)


def in_ci_or_not(*names: str, beyond: Container[str] = BEYOND_CI) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.full] if name in beyond else []) for name in names]


pytestmark = pytest.mark.timeout(900)  # the first waits for all that the four do, on a slow machine beside other tests


@pytest.fixture(scope="module")
def results_of_four(looked_at: set[object], tmp_path_factory: pytest.TempPathFactory) -> ResultsOfFour:
    """What four processes print and keep that go through all this."""
    store, folder = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), tmp_path_factory.mktemp("four")
    names = [name for name in (*CASES, *NEAR) if name in looked_at or name in MEASURED]
    code, output = Command(store.port, folder, *names, work=four, GLOO_SOCKET_IFNAME=loopback()).finish(800)
    assert code == 0, output
    return ResultsOfFour(output.splitlines(), folder)


@pytest.mark.parametrize("name", in_ci_or_not(*CASES))
def test_workers_of_two_shards_end_with_the_bits_of_workers_of_one_process(results_of_four, name):
    for worker in range(2):
        sharded, one = results_of_four.kept(name, worker), results_of_four.kept(f"{name}, whole", worker)
        assert sharded.keys() == one.keys()
        assert [key for key in one if not torch.equal(sharded[key], one[key])] == []
    start = dict(made(CASES[name]).named_parameters())
    assert not torch.equal(one["head.weight"], start["head.weight"])


@pytest.mark.parametrize("name", in_ci_or_not(*NEAR, "tensor parallel"))
def test_workers_whose_sums_have_another_order_stay_within_rounding(results_of_four, name):
    for worker in range(2):
        sharded, one = results_of_four.kept(name, worker), results_of_four.kept(f"{name}, whole", worker)
        scale = max(float(t.abs().max()) for t in one.values())
        assert max(float((sharded[key] - one[key]).abs().max()) for key in one) < 1e-6 * scale


def test_processes_with_different_parameters_meet_those_that_have_the_same(results_of_four):
    for shard in range(2):
        one, other = results_of_four.kept("pipeline", shard), results_of_four.kept("pipeline", 2 + shard)
        assert all(name.startswith(f"stage{shard}") and torch.equal(t, other[name]) for name, t in one.items())


def test_lanes_together_send_the_bytes_of_one_worker_and_replicas_nothing(results_of_four):
    def sent(rank: int, name: str) -> int:
        return int(results_of_four.of(rank, name).split()[1])

    for name in MEASURED:
        assert sent(0, name) + sent(1, name) == sent(0, f"{name}, whole") > 0
    assert sent(1, "replicas of shards") == sent(3, "replicas of shards") == 0


@pytest.mark.parametrize("name", ["resumed", "resumed, some in bf16"])
def test_shards_resume_within_a_round_to_the_same_bits_and_only_on_their_own_place(results_of_four, name):
    for rank in range(4):
        again, first = results_of_four.kept(name, rank), results_of_four.kept(f"{name}, went on", rank)
        assert [key for key in first if not torch.equal(again[key], first[key])] == []
        sentence = results_of_four.of(rank, f"{name} by another number")
        assert f"has shard {rank % 2} of 2 and this Outer none" in sentence


def test_a_state_saved_under_flat_names_continues_on_another_number_of_processes_to_the_same_bits(results_of_four):
    for worker in range(2):
        again, first = results_of_four.kept("shared", worker), results_of_four.kept("shared, went on", worker)
        assert [key for key in first if not torch.equal(again[key], first[key])] == []
        for what in ("shared and torn", "shared and less"):
            assert "outer state under flat names does not fit" in results_of_four.of(worker, what)


def test_the_outer_state_of_two_processes_is_loaded_by_four_and_by_one_to_the_last_bit(results_of_four):
    first, *others = [results_of_four.kept("resharded", turn) for turn in range(3)]
    assert sum("outer." in name for name in first) > 10
    for other in others:
        assert (
            other.keys() == first.keys() and [name for name in first if not torch.equal(first[name], other[name])] == []
        )
    assert results_of_four.of(3, "resharded 1") == results_of_four.of(0, "resharded 2") == "after 2 rounds and 1 steps"


@pytest.mark.parametrize("codec", LOSSY)
def test_a_codec_of_several_numbers_sees_one_shard_at_a_time(results_of_four, codec):
    for rank in range(4):
        assert results_of_four.of(rank, codec).startswith("3 rounds, 0 of ")


def test_what_is_written_after_an_evaluation_is_what_the_next_forward_pass_sees(results_of_four):
    assert [results_of_four.of(rank, "written") for rank in range(4)] == ["True"] * 4


def test_an_outer_loop_of_shards_that_is_closed_and_collected_leaves_no_descriptor_open(results_of_four):
    assert [results_of_four.of(rank, "open") for rank in range(4)] == ["0 more"] * 4


def test_the_mean_model_of_shards_is_that_of_all_and_leaves_nothing_gathered(results_of_four):
    one, other, mean = (
        results_of_four.kept("before the mean", 0),
        results_of_four.kept("before the mean", 1),
        results_of_four.kept("mean", 3),
    )
    for name in one:
        torch.testing.assert_close(mean[name], (one[name] + other[name]) / 2, rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(one[name], mean[name]) for name in one)
    for rank in range(4):
        assert results_of_four.of(rank, "as before the mean") == "True"
        assert results_of_four.of(rank, "common steps") == "10"


@pytest.mark.parametrize("name", ["torn", "torn before"])
def test_a_lane_that_loses_its_peer_keeps_the_update_from_all_shards_of_its_worker(results_of_four, name):
    assert "the peer of one lane is gone" in results_of_four.of(1, name)
    assert "failed in another process of worker 0" in results_of_four.of(0, name)
    assert [results_of_four.of(rank, f"{name}, updated") for rank in range(2)] == ["False", "False"]


def test_a_process_that_ends_is_missed_by_all_others(results_of_four):
    assert "worker 1" in results_of_four.of(1, "died") and "gone" in results_of_four.of(2, "died")
    assert "let in" not in results_of_four.of(0, "died")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "rule of whole tensors",
            "rule 'sparta' looks at whole tensors or at all of them, of which each process has its shard",
        ),
        ("all-reduce", "reduction is 'all_reduce', which overwrites one shard before its siblings know"),
        ("chosen", "schedule.sends is 2, but processes would choose"),
        (
            "sharded on one side",
            "process 0 has a mesh of [2] and process 2 one process; give all workers the same number",
        ),
        ("sharded otherwise", "worker 1 differs from worker 0 in model"),
        ("beyond its mesh", "lies on the processes [0, 1], and the mesh of its worker has [0, 2]"),
        ("beyond its group", "is on the processes [0, 2], and the process group has [0, 1] only"),
        ("replaced by a plain one", "parameter 'head.weight' is torch.float32 [1, 13] on cpu, and was"),
        ("made trainable", "parameter 'layers.1.norm.weight' is trainable and was not when Outer was made"),
        ("plain and lossy", "codec 'int8' cuts or draws what each of the 2 processes"),
    ],
)
def test_what_cannot_be_sharded_is_refused_in_a_sentence(results_of_four, what, sentence):
    assert sentence in results_of_four.of(0, what)


@pytest.mark.parametrize("name", [name for name, make in RULES.items() if not missing(make)])
def test_every_rule_runs_on_shards_or_is_refused_by_its_name(name):
    rule = RULES[name]()
    results = [
        one
        for one in combination_faults(Combination(driver="library", rule=rule, shards=2))
        if "mesh of 2 processes" in one
    ]
    assert bool(results) == (not rule.elementwise and not rule.sums_over_shards)
    assert all(f"rule '{name}'" in one for one in results)


def test_parameters_of_several_dtypes_train_with_their_outer_state_in_fp32():
    case = Case("gasloc", half=("layers.0", "layers.1"), options={"codec": None})
    model = made(case)
    with outer_of(case, model) as outer:
        train(case, model, optimizer_of(case, model), outer, [0, 1], range(9))
        assert outer.x.dtype == torch.float32 and outer.rounds == 2
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}


def one_of_two_sites(rank: int, port: int, meetings: list[int], folder: Path) -> None:
    """Each site is a world of two processes, which knows nothing of the other's."""
    torch.set_num_threads(1)
    site, shard = divmod(rank, 2)
    world = PrefixStore(f"world {site}", TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=world, rank=shard, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    stage, case, join = (
        Stage(rank, mesh, dist.group.WORLD, dist.group.WORLD, folder),
        CASES["diloco, adamw"],
        f"127.0.0.1:{meetings[0]}",
    )
    model = made(case, mesh)
    with outer_of(case, model, site=(site, 2), join=join) as outer:
        train(case, model, optimizer_of(case, model), outer, [outer.shard], range(LOCAL_STEPS * case.rounds))
        stage.keep("sites", rank, whole(model))
        stage.refused("taken", lambda: outer_of(case, made(case, mesh), site=(1 + site, 3), join=join, timeout_s=5))
    model = made(case, mesh)
    outer = outer_of(case, model, site=(site, 2), join=f"127.0.0.1:{meetings[1]}", timeout_s=20)
    train(case, model, optimizer_of(case, model), outer, [outer.shard], range(3))
    if rank == 3:
        os._exit(0)
    stage.refused("a shard died", outer.step)
    os._exit(0)


def two_sites(argv: list[str]) -> int:
    return in_forks(
        4, lambda rank: one_of_two_sites(rank, int(argv[0]), [int(port) for port in argv[1:3]], Path(argv[3]))
    )


@pytest.mark.full
def test_worlds_that_start_by_themselves_are_the_workers_of_one_run(tmp_path, results_of_four):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code, output = Command(
        store.port, free_port(), free_port(), tmp_path, work=two_sites, GLOO_SOCKET_IFNAME=loopback()
    ).finish()
    assert code == 0, output
    sites = ResultsOfFour(output.splitlines(), tmp_path)
    for rank in range(4):
        found, one = sites.kept("sites", rank), results_of_four.kept("diloco, adamw, whole", rank // 2)
        assert [key for key in one if not torch.equal(found[key], one[key])] == []
    assert "site 1 of 3 is at '127.0.0.1" in sites.of(0, "taken")
    assert "worker 1" in sites.of(1, "a shard died") and "gone" in sites.of(2, "a shard died")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"site": (0, 2)}, "give both or neither"),
        ({"join": "127.0.0.1:1"}, "give both or neither"),
        ({"site": (2, 2), "join": "127.0.0.1:1"}, r"site=\(2, 2\)"),
        ({"site": "0/2", "join": "127.0.0.1:1"}, "site='0/2'"),
        ({"site": (0, 2), "join": "127.0.0.1"}, "'127.0.0.1' is no HOST:PORT"),
        ({"site": (1, 2), "join": "192.0.2.1:1"}, "GOSSAMER_SECRET is not set"),
    ],
)
def test_a_site_that_is_none_is_refused_in_a_sentence(monkeypatch, options, sentence):
    monkeypatch.delenv("GOSSAMER_SECRET", raising=False)
    with pytest.raises(GossamerError, match=sentence):
        gossamer.Outer(Model(), "diloco", **options)
