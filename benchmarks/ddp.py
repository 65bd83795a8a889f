"""A step of torch's DDP over limited links beside the seconds that a plan gives it: step + max(0, all-reduce - 2/3 step).

    sudo python benchmarks/ddp.py              # Linux, as root; about three minutes

Four processes, each in a network namespace behind `tc tbf` limiters as in `slow_links.py`, train a model of 24 layers that sleep
in place of computing: a third of a step forward, two thirds backward, so that other work on the machine changes little. Buckets
are a 21st of the gradient, as those of 25 MB are of 134 million parameters. The all-reduce is measured alone, without a step to
hide behind, and priced as the ring that gloo makes.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from slow_links import can_limit, limited

from gossamer.network.links import Network
from gossamer.network.pricing import price_everyone

WORKERS, LAYERS, STEP_S, STEPS = 4, 24, 1.2, 7
SIDE = 128
"""A layer has SIDE² parameters."""
SHARES = (0.3, 0.6, 1.0, 2.0)
"""Seconds of the priced all-reduce, over those of a step."""
BUCKETS = 21
AIM = 0.15
MODEL_BYTES = 4 * LAYERS * SIDE * SIDE


def priced_s(bps: float) -> float:
    """Seconds of an all-reduce of the gradients by a ring."""
    import numpy as np

    network = Network(uplink_bps=bps, downlink_bps=bps, step_s=0.0, mean="ring")
    size = round(2 * MODEL_BYTES / WORKERS)
    return price_everyone(np.ones((1, WORKERS), np.int64), size, network, kind="mean").total_s


def process(rank: int) -> None:
    """Prints the median seconds of an all-reduce alone, and of a step of DDP."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    class Asleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            time.sleep(STEP_S / 3 / LAYERS)
            return x + weight.view(-1)[: x.numel()]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            time.sleep(STEP_S * 2 / 3 / LAYERS)
            return grads[0], torch.ones(SIDE, SIDE)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))

        def forward(self, x: Tensor) -> Tensor:
            return Asleep.apply(x, self.weight)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORKERS)
    ddp = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(Layer() for _ in range(LAYERS))), bucket_cap_mb=MODEL_BYTES / BUCKETS / 2**20
    )

    def step() -> None:
        ddp(torch.zeros(SIDE, requires_grad=True)).sum().backward()

    def median_s(act: Callable[[], object]) -> float:
        took = []
        for _ in range(STEPS):
            dist.barrier()
            began = time.perf_counter()
            act()
            took.append(time.perf_counter() - began)
        return statistics.median(took[2:])  # DDP rebuilds its buckets after the first step

    gradient = torch.zeros(MODEL_BYTES // 4).split(MODEL_BYTES // 4 // BUCKETS)

    def all_reduce() -> None:
        for waiting in [dist.all_reduce(part, async_op=True) for part in gradient]:
            assert waiting is not None
            waiting.wait()

    alone_s = median_s(all_reduce)
    with ddp.no_sync():
        unhindered_s = median_s(step)
    print(f"{alone_s} {unhindered_s} {median_s(step)}")
    dist.barrier()
    os._exit(0)  # what is left of gloo's threads outlives the links


def measured(places: list[str]) -> tuple[float, ...]:
    """Median seconds over the workers: of an all-reduce alone, of a step without one, and of a step of DDP."""
    started = []
    for rank, place in enumerate(places):
        where = {
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29578",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable, __file__, "--rank", str(rank)]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", place, *words], stdout=subprocess.PIPE, text=True, env=os.environ | where
            )
        )
    try:
        said = [one.communicate(timeout=180)[0] for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    return tuple(statistics.median(column) for column in zip(*(map(float, some.split()) for some in said), strict=True))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        process(args.rank)
        return
    if not can_limit():
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces are removed
    print(f"{WORKERS} workers, {MODEL_BYTES / 1e6:.2f} MB of gradients, an inner step of {STEP_S:g} s\n")
    print(
        "| link | all-reduce, priced | alone | step | DDP | by the model, priced | off | by the model, measured | off |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    farthest = 0.0
    for share in SHARES:
        bps = priced_s(1e9) * 1e9 / (share * STEP_S)
        all_reduce_s = priced_s(bps)
        with limited([bps] * WORKERS, [bps] * WORKERS) as places:
            alone_s, step_s, ddp_s = measured(places)
        by_price_s, by_measure_s = (step_s + max(0.0, some - 2 / 3 * step_s) for some in (all_reduce_s, alone_s))
        off, off_measured = ddp_s / by_price_s - 1, ddp_s / by_measure_s - 1
        farthest = max(farthest, abs(off))
        print(
            f"| {bps / 1e6:.1f} Mbit/s | {all_reduce_s:.3f} s | {alone_s:.3f} s | {step_s:.3f} s | {ddp_s:.3f} s | "
            f"{by_price_s:.3f} s | {off:+.1%} | {by_measure_s:.3f} s | {off_measured:+.1%} |",
            flush=True,
        )
    print(f"\nDDP's step beside the plan's, farthest off = {farthest:.3f}   (aim at most {AIM})")


if __name__ == "__main__":
    main()
