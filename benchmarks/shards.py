"""An outer step of workers that are two FSDP2 processes, against one of plain workers with as many numbers in each process.

    python benchmarks/shards.py [--numel 4_000_000] [--rounds 15]

Four processes on this machine, with one thread each, take turns: as two workers of two shards, and as two pairs of plain
workers. Each process sends the same bytes to the same process either way, so what is between them is the copies of the shards
into the flat vector and out of it, and the commit over the processes of a worker. A ratio is the median over rounds of the
seconds of one side over those of the other, of the slowest of the four processes; processor seconds are those of all of them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer.library.dtensors import local
from gossamer.transport.processes.launch import join, leave
from gossamer.transport.processes.local import run_local

RULES = ("gasloc", "diloco")
LAYERS = 8


def layers(numel: int) -> nn.Sequential:
    """A model of about so many numbers."""
    width = int((numel / LAYERS) ** 0.5) // 2 * 2
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def sharded(numel: int, mesh: "dist.device_mesh.DeviceMesh") -> nn.Module:
    """A model over two processes, each of which has so many numbers of it."""
    model = layers(2 * numel)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def seconds(outer: gossamer.Outer[nn.Module]) -> tuple[float, float]:
    """Seconds and processor seconds of an outer step of this process, after parameters have changed as training would."""
    with torch.no_grad():
        for p in outer.model.parameters():
            local(p).add_(1e-3 * (1 + dist.get_rank()))
    dist.barrier()
    began = time.perf_counter(), time.process_time()
    outer.step()
    took_s = time.perf_counter() - began[0], time.process_time() - began[1]
    dist.barrier()
    return took_s


def measure(argv: Sequence[str]) -> int:
    """One of the four processes: prints the figures of every rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    rank = join(4, backend="gloo", device="cpu", threads=1).worker
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    for rule in RULES:
        models = {"FSDP2": sharded(args.numel, mesh["shard"]), "plain": layers(args.numel)}
        outers = {
            "FSDP2": gossamer.Outer(models["FSDP2"], rule, local_steps=1),
            "plain": gossamer.Outer(models["plain"], rule, local_steps=1, process_group=mesh.get_group("worker")),
        }
        took = {kind: list[list[float]]() for kind in outers}
        for round in range(1 + args.rounds):
            for kind in sorted(outers, reverse=round % 2 == 0):
                mine = torch.tensor(seconds(outers[kind]), dtype=torch.float64)
                all_s = [torch.zeros_like(mine) for _ in range(4)]
                dist.all_gather(all_s, mine)
                found = torch.stack(all_s)
                if round:  # the first also looks for wrappers, once
                    took[kind].append([float(found[:, 0].max()), float(found[:, 1].sum())])
        if rank == 0:
            numbers = {kind: outer.x.numel() for kind, outer in outers.items()}
            for kind, steps in took.items():
                wall_s, processor_s = (statistics.median(each) for each in zip(*steps, strict=True))
                print(
                    f"{rule}, {kind}: {numbers[kind]:,} numbers in each process, {1e3 * wall_s:.1f} ms, "
                    f"{1e3 * processor_s:.1f} ms of four processors"
                )
            for place, what in enumerate(("seconds", "processor seconds")):
                ratios = [a[place] / b[place] for a, b in zip(took["FSDP2"], took["plain"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                print(f"{rule}, {what}: the middle half of the ratios is {low:.2f} to {high:.2f}")
                print(f"{rule}: outer step of FSDP2 over a plain one, {what} = {middle:.2f}   (aim at most 1.5)")
        for outer in outers.values():
            outer.close()
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(run_local(4, measure, sys.argv[1:]))
