"""How much of the transfer is hidden behind training: overlapping rounds against waiting ones, over rate-limited links.

    sudo python benchmarks/overlap.py              # Linux, as root; about three minutes

Each worker is a process in a network namespace of its own behind `tc tbf` limiters, as in `slow_links.py`; all links are alike,
and a model takes four inner steps to cross one. Inner steps are paced (`run.pace_s`). The time of a round beyond its inner
steps is exposed; the hidden share is 1 - exposed / (exposed time of the same exchange when everybody waits for it).
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from slow_links import EXCHANGE_STEPS, PAYLOAD_BYTES, SIZE, Setting, namespaces, network_of, train

from gossamer.network.pricing import price
from gossamer.record.logs.trace import Trace, read_trace

WORKERS, LOCAL_STEPS, ROUNDS = 4, 12, 7
TRANSFER_STEPS = 4
"""Duration, in inner steps, of sending one model over a link."""
DILOCO = {"rule": {"name": "diloco", "lr": 0.4}, "topology": {"name": "complete"}}
EAGER = {"rule": {"name": "eager", "lr": 0.4}, "topology": {"name": "complete"}}
GASLOC = {"rule": {"name": "gasloc"}, "topology": {"name": "random"}}


class Case(NamedTuple):
    """A method, and the one with the same exchange that waits for it."""

    method: dict[str, Any]
    schedule: dict[str, Any]
    waiting: str | None


CASES = {
    "DiLoCo": Case(DILOCO, {}, None),
    "DiLoCo, τ = 8": Case(DILOCO, {"overlap_steps": 8, "merge": 0.5}, "DiLoCo"),
    "Streaming DiLoCo, 3 fragments, τ = 4": Case(DILOCO, {"fragments": 3, "overlap_steps": 4, "merge": 0.5}, "DiLoCo"),
    "Eager": Case(EAGER, {}, "DiLoCo"),
    "GASLoC 1-Peer": Case(GASLOC, {}, None),
    "GASLoC 1-Peer, τ = 6": Case(GASLOC, {"overlap_steps": 6}, "GASLoC 1-Peer"),
    "Streaming GASLoC 1-Peer, 3 fragments, τ = 3": Case(GASLOC, {"fragments": 3, "overlap_steps": 3}, "GASLoC 1-Peer"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pace-s", type=float, default=0.12, help="seconds of an inner step")
    pace_s = parser.parse_args().pace_s
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("skipped: slow links need Linux, root, and the commands ip and tc")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    links = Setting(workers=WORKERS, pace_s=pace_s * TRANSFER_STEPS / EXCHANGE_STEPS)
    network = network_of(links, 1.0, "uplink")
    print(
        f"{WORKERS} workers, {PAYLOAD_BYTES / 1e3:.0f} kB a model, {LOCAL_STEPS} local steps of {pace_s:g} s, one model crosses "
        f"a link in {TRANSFER_STEPS} steps; seconds of a round beyond its inner steps, measured and priced\n"
    )
    print("| method | exposed | priced | hidden | priced |\n|---|---:|---:|---:|---:|", flush=True)
    exposed: dict[str, tuple[float, float]] = {}
    with namespaces(links, 1.0, "uplink") as places:
        for name, case in CASES.items():
            trace, round_s = run(case, places, pace_s)
            fragments = case.schedule.get("fragments", 1)
            compute_s = float(trace.compute_s[fragments:-fragments].sum(axis=0).mean()) / (ROUNDS - 2)
            ends_s = price(trace, replace(network, step_s=None)).end_s.max(axis=1)[fragments - 1 :: fragments]
            priced_s = float(ends_s[-2] - ends_s[0]) / (ROUNDS - 2)
            exposed[name] = round_s - compute_s, priced_s - compute_s
            line = f"| {name} | {exposed[name][0]:.3f} s | {exposed[name][1]:.3f} s |"
            if case.waiting is not None:
                hidden = (1 - mine / all_s for mine, all_s in zip(exposed[name], exposed[case.waiting], strict=True))
                line += "".join(f" {share:.0%} |" for share in hidden)
            else:
                line += " | |"
            print(line, flush=True)
    return 0


def run(case: Case, places: list[str], pace_s: float) -> tuple[Trace, float]:
    """The trace of a real run, and the mean seconds of its rounds, without the first and the last."""
    document = {
        "workers": WORKERS,
        **case.method,
        "schedule": case.schedule,
        "model": {"size": SIZE},
        "data": {"seq_len": 64, "batch_size": 2, "max_bytes": 2_000_000},
        "run": {
            "steps": ROUNDS * LOCAL_STEPS,
            "local_steps": LOCAL_STEPS,
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 0,
            "device": "cpu",
            "backend": "gloo",
            "threads": 1,
            "pace_s": pace_s,
        },
        "record": {"tensorboard": False, "export": False},
    }
    fragments = case.schedule.get("fragments", 1)
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(tomli_w.dumps(document))
        seen = train(places, file, out)
        trace = read_trace(out)
    ends_s = np.array(seen).max(axis=0)[fragments - 1 :: fragments]
    return trace, float(ends_s[-2] - ends_s[0]) / (ROUNDS - 2)


if __name__ == "__main__":
    sys.exit(main())
