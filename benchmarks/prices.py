"""Gossip among 100,000 workers on a network whose links are not shared: who talks to whom is drawn, made a trace, and priced.

    python benchmarks/prices.py [--workers 100000] [--rounds 1000] [--peers 1 2]
    python benchmarks/prices.py --plan 64
    python benchmarks/prices.py --mean 1024

Processor seconds of one process, and its peak memory. Every worker has an uplink of its own speed, so no two rounds are alike.
With `--plan` it is a whole `gossamer plan` for so many workers, whose downlinks, latencies and steps differ as well. With
`--mean` so many workers take a mean in every round, as DiLoCo does: the trace of a run is read from its folder, and priced.
"""

import argparse
import contextlib
import io
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from gossamer.network.links import Network
from gossamer.network.pricing import price
from gossamer.record.logs.trace import Entry, Operation, from_targets, line_of, read_trace, share_in_mean
from gossamer.topologies.sequences import random_matchings


def drawn(n: int, rounds: int, peers: int) -> np.ndarray:
    """The targets of each worker in the topology "random", `[rounds, n, peers]`."""
    targets = np.empty((rounds, n, peers), np.int32)
    targets[:] = np.arange(n, dtype=np.int32)[:, None]
    for r in range(rounds):
        pairs = random_matchings(n, peers, 0, r).reshape(peers, -1, 2)
        for k, (a, b) in enumerate(pairs.transpose(0, 2, 1)):
            targets[r, a, k], targets[r, b, k] = b, a
    return targets


def planned_s(n: int) -> float:
    """Processor seconds of a plan for so many unlike workers and 134 million parameters."""
    rng, file = np.random.default_rng(0), Path(tempfile.mkdtemp()) / "unlike.toml"
    columns = {
        "uplink_bps": rng.lognormal(np.log(2.5e7), 0.5, n).round(),
        "downlink_bps": rng.lognormal(np.log(6.5e7), 0.5, n).round(),
        "latency_s": rng.uniform(0.01, 0.05, n).round(4),
        "step_s": rng.lognormal(np.log(0.5), 0.3, n).round(3),
    }
    file.write_text("\n".join(f"{name} = {values.tolist()}" for name, values in columns.items()))
    began = time.process_time()
    from gossamer.cli import main as gossamer  # whose imports count

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        gossamer(["plan", str(file), "--model", "134m", "--hours", "100"])
    return time.process_time() - began


def print_price_of_means(n: int, rounds: int) -> None:
    """Prints processor seconds and memory for the price of a recorded run of DiLoCo with 139,584 parameters."""
    sizes = [4 * (139_584 * (i + 1) // n - 139_584 * i // n) for i in range(n)]
    lines = [
        line_of(Entry(0, i, 30, 1.0, (Operation("mean", 0, (), (), 0, share_in_mean(range(n), i, sizes, sizes)),)))
        for i in range(n)
    ]
    one_round = "".join(lines)
    network = Network(uplink_bps=1e8, downlink_bps=1e9, latency_s=0.05, step_s=0.5)
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "trace.jsonl").open("w") as file:
            for number in range(rounds):
                file.write(one_round.replace('{"round":0,', f'{{"round":{number},'))
        began = time.process_time()
        trace = read_trace(Path(folder))
        read = time.process_time()
        total_s = price(trace, network).total_s
        done = time.process_time()
    gigabytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    print(f"read in {read - began:.1f} s, priced in {done - read:.1f} s; priced seconds of the run: {total_s:.4g}")
    what = f"a mean of {n:,} workers, {rounds:,} rounds"
    print(f"{what}, s = {done - began:.1f}   (aim at most 30)")
    print(f"{what}, GB = {gigabytes:.2f}   (aim at most 1)")


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--plan", type=int, metavar="N", help="workers of a plan, which is timed alone")
    parser.add_argument("--mean", type=int, metavar="N", help="workers of a mean, which is timed alone")
    args = parser.parse_args()
    if args.mean:
        print_price_of_means(args.mean, args.rounds)
        return
    if args.plan:
        print(f"a plan for {args.plan} unlike workers, s = {planned_s(args.plan):.1f}   (aim at most 10)")
        return
    n, rounds = args.workers, args.rounds
    uplinks = np.exp(np.random.default_rng(0).normal(np.log(1e8), 0.5, n)).round()
    network = Network(uplink_bps=tuple(uplinks.tolist()), downlink_bps=1e9, latency_s=0.05, step_s=0.5)
    for peers in args.peers:
        times = [time.process_time()]
        targets = drawn(n, rounds, peers)
        times.append(time.process_time())
        trace = from_targets(targets, 4_000_000, steps=30)
        del targets
        times.append(time.process_time())
        timeline = price(trace, network)
        times.append(time.process_time())
        seconds = ", ".join(
            f"{what} {after - before:.1f} s"
            for what, before, after in zip(("drawn in", "a trace in", "priced in"), times, times[1:], strict=False)
        )
        gigabytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
        print(
            f"{peers} of {n:,} workers a round, {len(trace.messages.round):,} messages: {seconds}; {gigabytes:.1f} GB"
        )
        print(f"priced seconds of the run: {timeline.total_s:.4g}, {timeline.mean_utilisation:.1%} of them computing")
        of = f"{n:,} workers, {rounds:,} rounds, {peers} peer{'s' * (peers > 1)}"
        print(f"{of}, s = {times[-1] - times[0]:.1f}   (aim at most 60)")
        del trace, timeline


if __name__ == "__main__":
    main()
