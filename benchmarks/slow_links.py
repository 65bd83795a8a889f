"""Training over links that are really slow, against the price of the same run on the network that was declared.

    sudo python benchmarks/slow_links.py [--quick]        # Linux, as root; a whole run takes half an hour

Each worker is a process in a network namespace of its own, whose link to a bridge is limited by `tc tbf` in both directions;
one worker has a slow uplink, or a slow link both ways. Inner steps are paced (`run.pace_s`), so that the cores of one machine
stand for one accelerator each. Rounds are timed from outside, by the lines that workers add to their traces; the first is
left out, as connections are made in it. The ratio is measured over priced seconds (aim: 0.85 to 1.15).
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomli_w

from gossamer.network import Network, links_of
from gossamer.plan import matched_steps
from gossamer.pricing import price
from gossamer.shapes import ModelConfig, parameter_count
from gossamer.trace import read_trace, trace_files

SIZE = "0.2m"
PAYLOAD_BYTES = 4 * parameter_count(ModelConfig(size=SIZE), 256)
GOODPUT = 1448 / 1514
"""Bytes of a message per byte that the limiter counts: Ethernet, IP and TCP headers of full packets are the rest."""
METHODS: dict[str, tuple[str, int | None]] = {
    "data parallel": ("data_parallel", None),
    "DiLoCo": ("diloco", None),
    "GASLoC 2-Peer": ("gasloc", 2),
    "GASLoC 1-Peer": ("gasloc", 1),
}


class Scale(NamedTuple):
    """How large everything is."""

    workers: int
    local_steps: int
    rounds: int
    pace_s: float
    rate_bps: float
    methods: tuple[str, ...]
    shares: tuple[float, ...]
    ways: tuple[str, ...]


FULL = Scale(8, 30, 6, 0.2, 18.5e6, tuple(METHODS), (0.1, 0.2), ("uplink", "both"))
"""An exchange between healthy workers lasts 5/3 steps."""
QUICK = Scale(4, 10, 4, 0.1, 20e6, ("DiLoCo", "GASLoC 1-Peer"), (0.2,), ("uplink",))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four workers and two methods, in under two minutes")
    scale = QUICK if parser.parse_args().quick else FULL
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("skipped: slow links need Linux, root, and the commands ip and tc")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(
        f"{scale.workers} workers, {PAYLOAD_BYTES / 1e3:.0f} kB a model, links of {scale.rate_bps / 1e6:g} Mbit/s, inner steps "
        f"paced to {scale.pace_s:g} s (run.pace_s), H = {scale.local_steps}; seconds of {scale.rounds - 1} rounds"
    )
    print(f"{'method':15} {'slow link':14} {'H of slow':>9} {'measured':>9} {'priced':>9} {'ratio':>6}", flush=True)
    for share in scale.shares:
        for way in scale.ways:
            with namespaces(scale, share, way) as names:
                for method in scale.methods:
                    measure(scale, method, share, way, names)
    return 0


def rates_bps(scale: Scale, share: float, way: str) -> tuple[list[float], list[float]]:
    """What the limiters of each worker let out and in."""
    slow = [scale.rate_bps] * (scale.workers - 1) + [share * scale.rate_bps]
    return slow, slow if way == "both" else [scale.rate_bps] * scale.workers


@contextlib.contextmanager
def namespaces(scale: Scale, share: float, way: str) -> Iterator[list[str]]:
    """A namespace for each worker, linked by a bridge in one more; all end with the block, and their devices with them."""
    names = [f"gossamer-{os.getpid()}-{place}" for place in (*range(scale.workers), "hub")]
    *workers, hub = names
    made: list[str] = []
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            made.append(name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        sh("ip", "-n", hub, "link", "set", "bridge0", "up")
        for i, (name, up_bps, down_bps) in enumerate(zip(workers, *rates_bps(scale, share, way), strict=True)):
            port = f"port{i}"
            sh("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", hub, "link", "set", port, "master", "bridge0", "up")
            sh("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            for where, device, bps in ((name, "eth0", up_bps), (hub, port, down_bps)):
                burst = str(max(8_000, int(bps / 8 / 250)))
                limit = ("rate", f"{bps:.0f}bit", "burst", burst, "latency", "200ms")
                sh("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield workers
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"slow_links: '{' '.join(words)}' failed: {done.stderr.strip()}")


def measure(scale: Scale, method: str, share: float, way: str, names: list[str]) -> None:
    """Trains one method and prints its line."""
    rule, peers = METHODS[method]
    up_bps, down_bps = rates_bps(scale, share, way)
    network = Network(
        uplink_bps=tuple(GOODPUT * bps for bps in up_bps),
        downlink_bps=tuple(GOODPUT * bps for bps in down_bps),
        step_s=scale.pace_s,
    )
    steps: tuple[int, ...] = (1 if rule == "data_parallel" else scale.local_steps,) * scale.workers
    if peers is not None:
        steps = matched_steps(links_of(network, scale.workers), scale.local_steps, peers * PAYLOAD_BYTES)
    document = {
        "workers": scale.workers,
        "rule": {"name": rule},
        "topology": {"name": "complete"} if peers is None else {"name": "random", "peers": peers},
        "model": {"size": SIZE},
        "data": {"seq_len": 16, "batch_size": 1, "max_bytes": 100_000},
        "run": {
            "steps": scale.rounds * max(steps),
            "local_steps": steps[0] if len(set(steps)) == 1 else list(steps),
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 0,
            "device": "cpu",
            "backend": "gloo",
            "threads": 1,
            "pace_s": scale.pace_s,
        },
        "record": {"tensorboard": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(tomli_w.dumps(document))
        seen = train(names, file, out)
        trace = read_trace(out)
    # With the times that the steps really took: what is on trial is the price of the links.
    end_s = price(trace, Network(uplink_bps=network.uplink_bps, downlink_bps=network.downlink_bps)).end_s.max(axis=1)
    measured_s = max(ends[-1] for ends in seen) - max(ends[0] for ends in seen)
    priced_s = end_s[-1] - end_s[0]
    slow = f"{share:.0%} {way}"
    print(
        f"{method:15} {slow:14} {steps[-1]:9} {measured_s:9.2f} {priced_s:9.2f} {measured_s / priced_s:6.2f}",
        flush=True,
    )


def train(names: list[str], file: Path, out: Path) -> list[list[float]]:
    """Runs the workers to their end; returns when each was seen to have ended each round."""
    processes: list[subprocess.Popen[bytes]] = []
    log = (file.parent / "log").open("wb")
    try:
        for i, name in enumerate(names):
            environment = {
                **os.environ,
                "RANK": str(i),
                "WORLD_SIZE": str(len(names)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29577",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            words = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "gossamer",
                "train",
                str(file),
                "--out",
                str(out),
            ]
            # A session of their own: Ctrl-C reaches this process alone, which then ends them.
            processes.append(
                subprocess.Popen(
                    words, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
        seen: dict[str, list[float]] = {}
        while any(process.poll() is None for process in processes):
            for path in trace_files(out):
                ends = seen.setdefault(path.name, [])
                ends += [time.perf_counter()] * (path.read_bytes().count(b"\n") - len(ends))
            if any(process.poll() for process in processes):
                break
            time.sleep(0.005)
        if any(process.wait(30) for process in processes):
            raise SystemExit(f"slow_links: a worker failed:\n{(file.parent / 'log').read_text()[-2000:]}")
        return list(seen.values())
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        log.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
