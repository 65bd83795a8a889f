"""What it costs to be ready for failures when there are none: the same run with and without `run.elastic`.

    python benchmarks/calm.py                   # 20 pairs of runs, then docs/results/calm.md; half an hour on two idle cores
    python benchmarks/calm.py --pairs 3

Each run adds a line to `runs/calm/runs.jsonl`, and those that have a line are not made again. The runs of a pair follow each
other, in alternating order.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from gossamer.record.logs.seconds import RoundSeconds, read_seconds

ROOT = Path(__file__).parents[1]
LOCAL_STEPS = 15
PARTS = ("compute_s", "transfer_s", "waiting_s", "other_s")

Line = Mapping[str, Any]


def document(workers: int, rounds: int, *, elastic: bool) -> dict[str, Any]:
    """The run file."""
    return {
        "name": "calm",
        "method": "gasloc",
        "workers": workers,
        "model": {"size": "1m"},
        "data": {"source": str(ROOT / "docs" / "adr"), "seq_len": 64, "batch_size": 4},
        "run": {
            "steps": rounds * LOCAL_STEPS,
            "local_steps": LOCAL_STEPS,
            "elastic": elastic,
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 0,
            "threads": 1,
            "device": "cpu",
        },
        "record": {"export": False, "tensorboard": False},
    }


def made(pair: int, workers: int, rounds: int, folder: Path, *, elastic: bool) -> Line:
    """Makes one run; returns the median of its rounds, without the first and the last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(tomli_w.dumps(document(workers, rounds, elastic=elastic)))
    words = ["train", str(folder / "run.toml"), "--local", str(workers), "--out", str(folder / "run"), "--quiet"]
    subprocess.run([sys.executable, "-m", "gossamer", *words], check=True, stdout=subprocess.DEVNULL)
    rows = [one for one in read_seconds(folder / "run") if 0 < one.round < rounds - 1]
    shutil.rmtree(folder)
    return {
        "pair": pair,
        "elastic": elastic,
        "workers": workers,
        "rounds": rounds,
        "round_s": median(row.total_s for row in rows),
        **{part: median(seconds(row, part) for row in rows) for part in PARTS},
    }


def seconds(row: RoundSeconds, part: str) -> float:
    """One part of a round."""
    return float(getattr(row, part))


def interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float]:
    """Bounds of the median by order statistics, at least at this confidence; the extremes where there are few values."""
    ordered, n = sorted(values), len(values)
    k = 0
    while k + 1 <= (n - 1) // 2 and 1 - 2 * sum(math.comb(n, i) for i in range(k + 2)) / 2**n >= confidence:
        k += 1
    return ordered[k], ordered[n - 1 - k]


def page(lines: Sequence[Line], note: str) -> str:
    """The page of results."""
    pairs = [(a, b) for a in lines if not a["elastic"] for b in lines if b["elastic"] and a["pair"] == b["pair"]]
    ratios = [b["round_s"] / a["round_s"] - 1 for a, b in pairs]
    low, high = interval(ratios)
    rows = [
        f"| {part.removesuffix('_s')} | {1e3 * median(a[part] for a, _ in pairs):.1f} | "
        f"{1e3 * median(b[part] for _, b in pairs):.1f} | {1e3 * median(b[part] - a[part] for a, b in pairs):+.1f} |"
        for part in ("round_s", *PARTS)
    ]
    first = pairs[0][0]
    return f"""# What elastic runs cost when nothing fails

    python benchmarks/calm.py --pairs {len(pairs)} --workers {first["workers"]}

{first["workers"]} workers of 1M parameters, each a process with one thread, train {first["rounds"]} rounds of {LOCAL_STEPS} inner
steps by GASLoC, with and without `run.elastic`, one run after the other in alternating order. A run counts with the median of
its rounds, without start-up, the first round and the last.
{note}
**With `run.elastic` the time of a round changes by {100 * median(ratios):+.1f} % (90 % interval {100 * low:+.1f} to
{100 * high:+.1f} %), the median of {len(pairs)} pairs.**

| milliseconds of a round | without | with | difference in pairs |
|---|---:|---:|---:|
{chr(10).join(rows)}

All numbers are medians, so the parts need not add up.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "calm")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "calm.md")
    parser.add_argument("--note", default="", help="a sentence for the page, such as on what machine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "runs.jsonl"
    lines = [json.loads(raw) for raw in log.read_text().splitlines()] if log.exists() else []
    lines = [line for line in lines if (line["workers"], line["rounds"]) == (options.workers, options.rounds)]
    done = {(line["pair"], line["elastic"]) for line in lines}
    for pair in range(options.pairs):
        for elastic in (pair % 2 == 1, pair % 2 == 0):
            if (pair, elastic) not in done:
                lines.append(made(pair, options.workers, options.rounds, options.out / "run", elastic=elastic))
                with log.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                print(json.dumps(lines[-1]), flush=True)
    options.page.write_text(page(lines, options.note and f"\n{options.note}\n"))
    print(options.page.read_text())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
