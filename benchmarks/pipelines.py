"""Tokens per second of one replica in two stages, whose boundary is a really slow link, measured and priced.

    sudo python benchmarks/pipelines.py                                  # Linux, as root; writes docs/results/pipelines.md
    sudo python benchmarks/pipelines.py --rates 80 --steps 4 --arms dense,TAH-Quant --out runs/pipelines.md

Each stage is a process in a network namespace of its own behind `tc tbf` limiters, as in `slow_links.py`; no delay is added. A
round is one inner step. Rounds are timed from outside after a first one, in which connections are made. The price is that of
`gossamer price` from the trace of the run: it gets the seconds that the stages say they have computed, codecs included, and the
rate of the link, and adds the idle time of the schedule and the transfers. So measured over priced compares the links and the
schedule alone.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from slow_links import GOODPUT, can_limit, elapsed_s, limited, names, numbers, train

from gossamer.network.links import Network
from gossamer.network.pipeline_time import StageLinks
from gossamer.network.pricing import price
from gossamer.record.folder import read_metrics
from gossamer.record.logs.stage_seconds import read_stages
from gossamer.record.logs.trace import read_trace
from gossamer.record.whole_files import atomic_write
from gossamer.run.config.layouts import layout_for
from gossamer.run.config.pipeline import cuts_of
from gossamer.run.config.resolve import settings_of
from gossamer.run.config.run_file import parse
from gossamer.run.worker.stages.timing import in_stages, shares_of

STAGES = 2
HIDDEN, LAYERS, WIDTH = 128, 2, 8
MICRO_BATCHES, BATCH, LENGTH = 4, 4, 128
_NARROW = {"width": WIDTH}
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "TAH-Quant": ({"forward": "tahquant", "backward": "intk"}, {}),
    "AQ-SGD": ({"forward": "aqsgd", "backward": {"name": "intk", "bits": 8}}, {}),
    "subspace": ({}, {"bottleneck": {"name": "subspace", **_NARROW}}),
    "ResBM": ({}, {"bottleneck": {"name": "resbm", "cuts": [LAYERS // STAGES], **_NARROW}}),
}
"""Keys of [pipeline] and [model] of each arm."""


class Line(NamedTuple):
    """A line of the table."""

    arm: str
    rate_mbps: float
    forward_bytes: float
    backward_bytes: float
    """Over the boundary, of a token."""
    compute_s: float
    """Of both stages, a step."""
    measured: float
    priced: float
    """Tokens per second."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=numbers(float), metavar="20,80,500", default=(20.0, 80.0, 500.0), help="Mbit/s")
    parser.add_argument("--steps", type=int, default=12, help="inner steps that are timed")
    parser.add_argument("--arms", type=names, metavar="A,B", default=tuple(ARMS), help=f"some of: {', '.join(ARMS)}")
    parser.add_argument("--out", type=Path, default=Path("docs/results/pipelines.md"))
    given = parser.parse_args()
    if unknown := sorted({*given.arms} - {*ARMS}):
        parser.error(f"there is no arm {unknown}; choose from {[*ARMS]}")
    if not can_limit():
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    load, lines = os.getloadavg()[0], list[Line]()
    for rate in given.rates:
        with limited([rate * 1e6] * STAGES, [rate * 1e6] * STAGES) as places:
            for arm in given.arms:
                lines.append(measure(arm, rate, given.steps, places))
                print(row(lines[-1]), flush=True)
    atomic_write(given.out, page(lines, given.steps, load, f"sudo python {shlex.join(sys.argv)}").encode())
    return 0


def document(arm: str, steps: int) -> dict[str, Any]:
    """The run file of an arm; the first step is not timed."""
    pipeline, model = ARMS[arm]
    return {
        "workers": 1,
        "rule": {"name": "diloco"},
        "topology": {"name": "complete"},
        "model": {"hidden_size": HIDDEN, "layers": LAYERS, **model},
        "data": {
            "batch_size": BATCH,
            "seq_len": LENGTH,
            "accumulate": MICRO_BATCHES,
            "max_bytes": 2_000_000,
            **({"windows": BATCH * MICRO_BATCHES} if arm == "AQ-SGD" else {}),
        },
        "inner": {"schedule": "constant"},
        "pipeline": {"stages": STAGES, "cuts": [LAYERS // STAGES], "schedule": "1f1b", **pipeline},
        "run": {
            "steps": steps + 1,
            "local_steps": 1,
            "checkpoint_every": 0,
            "eval_every": 0,
            "eval_batches": 1,
            "device": "cpu",
            "backend": "gloo",
            "threads": 1,
        },
        "record": {"tensorboard": False, "export": False},
    }


def measure(arm: str, rate_mbps: float, steps: int, places: list[str]) -> Line:
    """Trains an arm over a link of this rate, and prices the same steps."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(tomli_w.dumps(document(arm, steps)))
        config = parse(document(arm, steps))
        (seen,) = train(places, file, out)
        trace, stages = read_trace(out), [one for one in read_stages(out) if one.round > 0]
        crossed = [line["boundary_bytes"][0] for line in read_metrics(out) if line["kind"] == "train"][1:]
    own_s = [float(np.mean([one.compute_s for one in stages if one.stage == k])) for k in range(STAGES)]
    # `step_s` is of the whole replica; a stage takes the share of it that its matrices have, over its speed.
    layout = layout_for(config.model, 256)
    shares = shares_of(layout, cuts_of(config.pipeline, config.model, config.data))
    speeds = tuple(share * sum(own_s) / own for share, own in zip(shares, own_s, strict=True))
    links = StageLinks(bandwidth_bps=GOODPUT * rate_mbps * 1e6, speeds=speeds)
    network = Network(uplink_bps=1e9, downlink_bps=1e9, step_s=sum(own_s), stages=links)
    long = parse(document(arm, 1000 * steps))  # of which a first visit is no part worth counting, as of the timed steps
    priced_s = elapsed_s(price(trace, in_stages(network, settings_of(long), layout).network).end_s.max(axis=1), steps)
    tokens = config.length.step_tokens
    there, back = np.mean(crossed, axis=0) / tokens
    return Line(
        arm,
        rate_mbps,
        float(there),
        float(back),
        sum(own_s),
        tokens * steps / elapsed_s(np.array(seen), steps),
        tokens * steps / priced_s,
    )


def row(line: Line) -> str:
    arm, rate, there, back, compute_s, measured, priced = line
    return (
        f"| {rate:g} Mbit/s | {arm} | {there:.0f} | {back:.0f} | {compute_s:.3f} s | {measured:,.0f} | {priced:,.0f} | "
        f"{measured / priced:.2f} |"
    )


def page(lines: Sequence[Line], steps: int, load: float, command: str) -> str:
    """The results page."""
    table = "\n".join(map(row, lines))
    return f"""# Pipelines over slow links

    {command}

One replica in {STAGES} stages with {LAYERS // STAGES} of {LAYERS} layers each, hidden size {HIDDEN}, {MICRO_BATCHES}
micro-batches of {BATCH} x {LENGTH} tokens, schedule 1f1b, in fp32 on one CPU core each; {steps} inner steps after a first one.
Each stage is a process in a network namespace of its own, whose link `tc tbf` limits in both directions; no delay is added.
Subspace and ResBM let {WIDTH} numbers of a token cross; AQ-SGD has seen every sample once. "Compute" is the seconds of a step in
which the stages computed, codecs included. The price adds the idle time of the schedule and the transfers: it is that of
`gossamer price` from the trace of the run, which counts the most bytes that a payload can have.

| link | boundary | bytes forward | and backward, a token | compute | tokens/s measured | priced | measured / priced |
|---|---|---:|---:|---:|---:|---:|---:|
{table}

One run, on a machine with a load of {load:.1f} on {os.cpu_count()} cores when it began: lines differ by what else it computes.
"""


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
