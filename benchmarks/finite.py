"""What the checks for numbers that are not finite cost: a round with them against one without, 1M parameters and H = 15.

    python benchmarks/finite.py [--rounds 20] [--threads 1]

Two workers train in one process and exchange with each other. Rounds come in pairs, one with `gossamer.finite.all_finite` and
one with a function in its place that looks at nothing, in an order that alternates. The cost is the median over the pairs of
their ratio, less one; beside it the time of the checks alone, on vectors of the same sizes, over that of a round without.
Times are the processor's, for which other processes on the machine count little.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gossamer import finite
from gossamer.rounds.loop import finish_together
from gossamer.run.config.resolve import resolve, settings_of
from gossamer.run.config.run_file import RunConfig, parse
from gossamer.run.worker.replica import Replica
from gossamer.run.worker.task import task_of
from gossamer.run.worker.worker import Worker
from gossamer.transport.memory import MemoryNetwork

LOCAL_STEPS = 15
METHODS = {
    "gasloc": {"rule": "gasloc", "topology": "random"},
    "diloco": {"rule": "diloco", "topology": "complete"},
    "diloco, int8": {"rule": "diloco", "topology": "complete", "codec": "int8"},
}
AIM = 0.01


def run_of(method: dict[str, str]) -> RunConfig:
    """Two workers with a model of 1M parameters."""
    return parse(
        {
            "workers": 2,
            **method,
            "model": {"size": "1m"},
            "data": {"seq_len": 64, "batch_size": 4, "max_bytes": 1_000_000},
            "run": {"steps": 2 * LOCAL_STEPS, "local_steps": LOCAL_STEPS, "device": "cpu"},
            "record": {"export": False},
        }
    )


def workers_of(config: RunConfig) -> list[Worker]:
    """The workers of a run, at its start."""
    task, network, m = task_of(settings_of(config)), MemoryNetwork(2), resolve(config).in_rounds
    return [
        Worker(Replica(i, settings_of(config), task, torch.device("cpu")), m, network.transport(i)) for i in range(2)
    ]


def round_s(workers: list[Worker], number: int) -> float:
    """The seconds of one round."""
    began = time.process_time()
    for worker in workers:
        worker.replica.steps_taken = number * LOCAL_STEPS
    for segments in zip(*(worker.segments(number) for worker in workers), strict=True):
        turns = list(zip(workers, segments, strict=True))
        for worker, segment in turns:
            worker.train(segment)
        for worker, segment in turns:
            worker.send(segment)
        due = workers[0].loop.due(number, segments[0].stop)
        finish_together([worker.loop for worker in workers], due, lambda call, items: [call(item) for item in items])
    return time.process_time() - began


@contextmanager
def replaced(check: Callable[[object], bool]) -> Iterator[None]:
    """Another function in the place of the check."""
    own, finite.all_finite = finite.all_finite, check
    try:
        yield
    finally:
        finite.all_finite = own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of rounds")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"a round of 2 workers with {LOCAL_STEPS} local steps; aim: at most {AIM:.0%}\n")
    print("| method | parameters | round | with checks | range of the middle half | checks alone |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for name, method in METHODS.items():
        workers, ratios, plain_s = workers_of(run_of(method)), list[float](), list[float]()
        numel, seen = workers[0].replica.x.numel(), list[int]()

        def counted(tree: object, own: Callable[[object], bool] = finite.all_finite) -> bool:
            seen.append(sum(leaf.numel() for leaf in finite.leaves(tree) if leaf.is_floating_point()))  # noqa: B023
            return own(tree)

        with replaced(counted):
            round_s(workers, 0)
        for k in range(args.rounds):
            seconds = dict[bool, float]()
            for checks in (k % 2 == 0, k % 2 == 1):
                with replaced(finite.all_finite if checks else lambda tree: True):
                    seconds[checks] = round_s(workers, 1 + 2 * k + len(seconds))
            ratios.append(seconds[True] / seconds[False] - 1)
            plain_s.append(seconds[False])
        low, middle, high = statistics.quantiles(ratios, n=4)
        vectors, alone_s = [torch.randn(size) for size in seen], list[float]()
        for _ in range(args.rounds):
            began = time.process_time()
            for vector in vectors:
                finite.all_finite(vector)
            alone_s.append(time.process_time() - began)
        alone = statistics.median(alone_s)
        round_plain_s = statistics.median(plain_s)
        print(
            f"| {name} | {numel:,} | {1e3 * round_plain_s:.0f} ms | {middle:+.2%} | {low:+.2%} to {high:+.2%} | "
            f"{alone / round_plain_s:.2%} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
