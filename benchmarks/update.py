"""The outer update of each rule against this machine's copy bandwidth, in one run.

    python benchmarks/update.py [--sizes 10_000_000 100_000_000] [--threads 1]

Ratio = bytes the update must touch per second / bytes `copy_` touches per second on the same buffer size, of median processor
seconds over the threads, in turn. The update
touches the parameters and each state tensor (read and written), its own message and one received message per peer (read).
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gossamer.layout import Layout
from gossamer.rounds.kernel import PLAIN, Decoded, Kernel, compiled
from gossamer.rules import Context, Rule, diloco, gasloc, gossip, local_sgd, noloco
from gossamer.topologies.mixing import pull
from gossamer.tree import leaves, map_leaves

ROWS = {
    "gossip": gossip(),
    "gasloc": gasloc(),
    "gasloc eta=1": gasloc(lr=1.0),
    "noloco": noloco(),
    "diloco": diloco(),
    "local_sgd": local_sgd(),
}


CALLED = {name: name for name in ROWS} | {
    "gasloc": "GASLoC",
    "gasloc eta=1": "GASLoC, η = 1",
    "noloco": "NoLoCo",
    "diloco": "DiLoCo",
    "local_sgd": "local SGD",
}


def update(rule: Rule, kernel: Kernel, numel: int, device: str = "cpu") -> tuple[Callable[[], None], int]:
    """One outer update of a worker with one peer, and the bytes it must touch."""
    x = torch.randn(numel, device=device)
    ctx = Context(0, 8, 0, 15, 0.5, Layout((), 0))
    s = rule.init(x, ctx)
    message = rule.send(x, s, ctx)
    other = torch.randn(numel, device=device)
    own = 0 if message is x or rule.combine is not pull else 1
    touched = x.element_size() * numel * (2 + 2 * len(leaves(s)) + own + 1)
    row, chunk = ((0, 0.5), (1, 0.5)), min(kernel.chunk_on(x.device), numel)

    def run() -> None:
        for a in range(0, numel, chunk):
            b = min(a + chunk, numel)
            state = map_leaves(lambda t: t[a:b], s)  # noqa: B023 (used at once)
            messages = Decoded(message[a:b], (other[a:b],), 0, row)
            kernel.run(rule, rule.combine, x[a:b], state, messages, ctx)

    return run, touched


def in_turn(sides: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median processor seconds of each side, after one call to warm up."""
    taken_s: list[list[float]] = [[] for _ in sides]
    for _ in range(1 + repeats):
        for found, side in zip(taken_s, sides, strict=True):
            began_s = time.process_time()
            side()
            found.append(time.process_time() - began_s)
    return [statistics.median(found[1:]) for found in taken_s]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'elements':>12} {'rule':<14} {'chunked':>8} {'compiled':>9}   (aims: 0.5, 0.9 of copy bandwidth)")
    reached: list[tuple[str, int, float, float]] = []
    for numel in args.sizes:
        source = torch.randn(numel)
        target = torch.empty_like(source)
        for name, rule in ROWS.items():
            ratios = []
            for kernel in (PLAIN, compiled()):
                run, touched = update(rule, kernel, numel)
                run_s, copy_s = in_turn((run, functools.partial(target.copy_, source)), args.repeats)
                copied = 8 * numel / copy_s * args.threads
                ratios.append(touched / run_s * args.threads / copied)
            reached.append((name, numel, *ratios))
            print(
                f"{numel:>12,} {name:<14} {ratios[0]:>8.2f} {ratios[1]:>9.2f}   copy {copied / 1e9:.1f} GB/s",
                flush=True,
            )
    for name, numel, chunked, fused in reached:
        what = f"outer update of {CALLED[name]}, {numel // 1_000_000}M numbers, of a copy's speed"
        print(f"{what}, in chunks = {chunked:.2f}   (aim 0.5)")
        print(f"{what}, compiled = {fused:.2f}   (aim 0.9)")


if __name__ == "__main__":
    main()
