"""What an outer step takes on a GPU: updates and codecs against a copy on the device, an exchange and training against bare ones.

    python benchmarks/gpu.py [--numel 134_105_856]

Needs a GPU, idle but for this. Times are medians after a warm-up, until the device is done; ratios are to what is beside them.
Updates and codecs count the bytes that must be read and written at least. An exchange is between two processes on this GPU, over
gloo on loopback; the bare one copies the same numbers to memory of the host, sends them, and copies back what came. Training is
that of the built-in model of 134M parameters, products in bf16, beside a loop of plain PyTorch over the same batches.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import median_s
from torch import nn
from update import ROWS, update

import gossamer
from gossamer.codecs import CODECS
from gossamer.models.llama import build_model, loss
from gossamer.models.sizes import ModelConfig
from gossamer.rounds.kernel import PLAIN, compiled
from gossamer.run.config.run_file import parse
from gossamer.run.simulated.simulate import simulate
from gossamer.transport.processes.launch import join, leave
from gossamer.transport.processes.local import run_local
from gossamer.tree import nbytes

REPEATS, LOCAL_STEPS = 7, 5
EXCHANGES: dict[str, dict[str, Any]] = {
    "DiLoCo": {"rule": "diloco"},
    "DiLoCo bf16": {"rule": "diloco", "codec": "bf16"},
    "DiLoCo int8": {"rule": "diloco", "codec": "int8"},
    "GASLoC": {"rule": "gasloc"},
}


def until_done(act: Callable[[], object]) -> None:
    """Acts, and waits for the device."""
    act()
    torch.cuda.synchronize()


def seconds_of(act: Callable[[], object]) -> float:
    """Median seconds of an act on the device."""
    return median_s(functools.partial(until_done, act), REPEATS)


def copies(numel: int) -> tuple[float, float]:
    """GB/s of a copy on the device, which is returned in bytes touched per second, and of copies to the host and back."""
    source = torch.randn(numel, device="cuda")
    target = torch.empty_like(source)
    on_device = 8 * numel / seconds_of(lambda: target.copy_(source))
    host, pinned = torch.empty(numel), torch.empty(numel, pin_memory=True)
    print(f"copy on the device {on_device / 1e9:,.0f} GB/s read and written")
    for name, memory in (("pageable", host), ("pinned", pinned)):
        out, back = seconds_of(lambda: memory.copy_(source)), seconds_of(lambda: target.copy_(memory))  # noqa: B023
        print(
            f"copy to {name} memory of the host {4 * numel / out / 1e9:.1f} GB/s, back {4 * numel / back / 1e9:.1f} GB/s"
        )
    return on_device, 4 * numel / seconds_of(source.cpu)


def updates(numel: int, copied: float) -> None:
    """Each rule's outer update."""
    for name, rule in ROWS.items():
        for how, kernel in (("whole", PLAIN), ("compiled", compiled())):
            run, touched = update(rule, kernel, numel, "cuda")
            ratio = touched / seconds_of(run) / copied
            print(f"outer update of {name}, {how}, of a copy's speed = {ratio:.2f}", flush=True)


def codecs(numel: int, copied: float) -> None:
    """Each codec, encoded and decoded."""
    x = torch.randn(numel, device="cuda")
    for name, factory in CODECS.items():
        codec = factory()
        payload = codec.encode(x, 1)
        encode_s = seconds_of(functools.partial(codec.encode, x, 1))
        decode_s = seconds_of(functools.partial(codec.decode, payload, x))
        ratio = 8 * numel / (encode_s + decode_s) / copied
        print(
            f"{name}: encode {encode_s * 1e3:.2f} ms, decode {decode_s * 1e3:.2f} ms, {8 * nbytes(payload) / numel:.2f} bits a "
            f"number, together {ratio:.3f} of a copy's speed",
            flush=True,
        )


def exchange(argv: Sequence[str]) -> int:
    """One of two processes: rounds of each kind, and bare ones."""
    numel = int(argv[0])
    member = join(2, backend="gloo", device="cuda", threads=4)
    peer, x = 1 - member.worker, torch.randn(numel, device=member.device)
    theirs = torch.empty(numel)

    def bare() -> None:
        ours = x.cpu()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, theirs, peer), dist.P2POp(dist.isend, ours, peer)]):
            work.wait()
        x.copy_(theirs)

    def timed(act: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        until_done(act)
        return time.perf_counter() - start

    bare_s = statistics.median([timed(bare) for _ in range(4)][1:])
    lines = [f"exchange of {4 * numel / 1e6:.0f} MB, bare {bare_s:.3f} s"]
    for name, options in EXCHANGES.items():
        model = nn.Linear(numel // 1024, 1024, bias=False, device=member.device)
        within, at_end = list[float](), list[float]()
        with gossamer.Outer(model, local_steps=LOCAL_STEPS, timeout_s=120, **options) as outer:
            for step in range(4 * LOCAL_STEPS):
                with torch.no_grad():
                    model.weight.add_(1e-3 * torch.randn_like(model.weight))
                (at_end if (step + 1) % LOCAL_STEPS == 0 else within).append(timed(outer.step))
        full_s = statistics.median(at_end[1:])
        lines.append(
            f"exchange of {name}: {full_s:.3f} s, ratio to bare {bare_s / full_s:.2f}; a step within a round "
            f"{statistics.median(within) * 1e6:.0f} µs"
        )
        del model, outer
        torch.cuda.empty_cache()
    if member.worker == 0:
        print("\n".join(lines), flush=True)
    leave()
    return 0


def training(steps: int, compile: bool = False) -> None:
    """Tokens per second of a simulation of two workers beside a plain loop."""
    sequences, seq_len = 16, 1024
    config = parse(
        {
            "workers": 2,
            "rule": {"name": "gasloc"},
            "topology": {"name": "random"},
            "model": {"size": "134m"},
            "data": {"batch_size": sequences, "seq_len": seq_len},
            "inner": {"clip": 1.0, "autocast": "bf16", "compile": compile},
            "run": {
                "steps": steps,
                "local_steps": steps // 2,
                "eval_every": 0,
                "eval_batches": 1,
                "checkpoint_every": 0,
                "device": "cuda",
            },
            "record": {"tensorboard": False, "export": False},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds = simulate(config, Path(folder) / "run").trace.compute_s[-1].sum()  # of a round in which nothing is new
    simulated = config.workers * config.length.full_steps * sequences * seq_len / seconds
    model = build_model(ModelConfig(size="134m"), 256, seq_len, 0).cuda()
    forward = torch.compile(model) if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    batch = torch.randint(256, (sequences, seq_len + 1), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(forward, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    plain = sequences * seq_len / median_s(functools.partial(until_done, step), steps)
    start = time.perf_counter()
    until_done(lambda: [step() for _ in range(steps)])
    ahead = steps * sequences * seq_len / (time.perf_counter() - start)
    how = ", compiled" if compile else ""
    print(
        f"training{how}: plain loop {ahead:,.0f} tokens/s, {plain:,.0f} where each step is waited for, simulation "
        f"{simulated:,.0f}, ratio = {simulated / ahead:.2f}",
        flush=True,
    )


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=134_105_856)
    args = parser.parse_args()
    parts = {
        "exchange": lambda: run_local(2, exchange, [json.dumps(args.numel)]),
        "training": lambda: training(20),
    }
    for part in parts.values():
        part()
    print(torch.cuda.get_device_name())
    on_device, _ = copies(args.numel)
    updates(args.numel, on_device)
    codecs(args.numel, on_device)


if __name__ == "__main__":
    main()
