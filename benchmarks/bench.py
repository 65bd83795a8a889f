"""Runs the benchmarks, keeps what they print, and writes docs/results/benchmarks.md from what is kept.

    make bench      # python benchmarks/bench.py [NAME ...] [--page]

A line that ends in "(aim …)" is a row of the table at the top of the page. Without names all run; `--page` runs none.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "outcomes.jsonl"
PAGE = ROOT / "docs" / "results" / "benchmarks.md"
_TINY = ("--size", "0.2m", "--layers", "2", "--sequences", "4", "--seq-len", "64")
"""A model of 139,584 parameters, in steps of 256 tokens."""
COMMANDS = {
    "simulator": ("simulator.py", "--steps", "24", "--repeats", "5"),
    "own": ("simulator.py", "--steps", "24", "--repeats", "5", "--own"),
    "own_tiny": (
        "simulator.py",
        "--own",
        "--at-once",
        *_TINY,
        "--steps",
        "240",
        "--repeats",
        "5",
    ),
    "lanes": ("lanes.py",),
    "batched": (
        "simulator.py",
        *_TINY,
        "--batched",
        "8",
        "--steps",
        "240",
        "--repeats",
        "5",
    ),
    "many_workers": ("many_workers.py",),
    "prices": ("prices.py",),
    "plan": ("prices.py", "--plan", "64"),
    "means": ("prices.py", "--mean", "1024"),
    "delay": ("delay.py",),
    "start": ("start.py", "--repeats", "9"),
    "update": ("update.py", "--repeats", "5"),
    "exchange": ("exchange.py",),
    "shards": ("shards.py",),
    "encryption": ("encryption.py",),
    "flood": ("flood.py",),
    "memory": ("memory.py",),
    "codecs": ("codecs.py",),
    "checks": ("checks.py",),
    "finite": ("finite.py",),
    "peers": ("peers.py",),
}
BETWEEN = {
    "simulator / (cores": "not profiled; single runs reached 0.87 to 0.94",
    "compiled in bf16 / simulator": "not profiled: the optimizer's step and the outer update are not in bf16",
    "one exchange of 64 MB": "two passes of the checksum over the payload: without them it is as fast as a bare one",
    "sign, ": "within the scatter of runs; not profiled",
    "one exchange of 1 kB": "Python around the messages, and three threads that hand over",
    "one exchange of 1 MB": "two passes of the checksum, and three threads hand over",
    "gasloc: outer step of FSDP2": "four processes on two cores: the shards of a worker wait for the slower of their lanes",
    "seconds of work under a flood": "each stranger costs a thread and the beginning of TLS, in the process that works",
    "to the first step of torch's optimizer beyond": "imports of 456 modules, 0.7 ms each: of ours, pydantic and rich",
    "outer update of": "without a compiler, an update writes and reads the temporaries of a chunk",
}
"""What stands between a missed aim and what was reached, by how its line begins."""
_AIM = re.compile(r"(?P<what>.+?)\s+=\s+(?P<reached>[\d.,]+)\s+\(aim (?P<at>at most )?(?P<aim>[\d.]+)\)")


def run(name: str) -> None:
    """Runs a benchmark and keeps its output in place of what was kept of it."""
    busy = os.getloadavg()[0]
    words = [sys.executable, str(ROOT / "benchmarks" / COMMANDS[name][0]), *COMMANDS[name][1:]]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    import torch

    line = {
        "name": name,
        "command": " ".join(("benchmarks/" + COMMANDS[name][0], *COMMANDS[name][1:])),
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(busy, 1),
        "torch": torch.__version__,
        "output": [line.removeprefix("[0] ") for line in done.stdout.splitlines()],
    }
    kept = {one["name"]: one for one in outcomes()} | {name: line}
    KEPT.write_text(
        "".join(json.dumps(kept[one], ensure_ascii=False) + "\n" for one in COMMANDS if one in kept), encoding="utf-8"
    )


def outcomes() -> list[dict[str, Any]]:
    """What is kept of each benchmark."""
    return [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()] if KEPT.exists() else []


def page() -> str:
    """The page about what is kept."""
    rows, parts = [], []
    for one in outcomes():
        for found in filter(None, map(_AIM.fullmatch, one["output"])):
            what, reached, aim = found["what"].strip(), float(found["reached"].replace(",", "")), float(found["aim"])
            missed = reached > aim if found["at"] else reached < aim
            why = next((text for start, text in BETWEEN.items() if what.startswith(start)), "") if missed else ""
            rows.append(
                f"| {what} | {found['reached']} | {found['at'] or ''}{found['aim']} | {'no' if missed else 'yes'} | {why} |"
            )
        load = "no load noted" if one["load"] is None else f"load {one['load']} before it began"
        said = f"{one['date']}, {one['cores']} cores, {load}, torch {one['torch']}"
        output = [line for line in one["output"] if not _AIM.fullmatch(line)]
        block = ["```text", *output, "```", ""] if output else []
        parts.append("\n".join([f"## {one['name']}", "", f"    {one['command']}", "", f"{said}.", "", *block]))
    head = (
        "# Benchmarks\n\n    python benchmarks/bench.py      # make bench\n\n"
        "Ratios are of two sides that took turns in one run. A load above the number of cores says that other processes ran too: "
        "then only\nratios and processor seconds mean something, and what needs several cores at once is understated.\n\n"
        "| what | reached | aim | met | what stands between |\n|---|---:|---:|---|---|\n"
    )
    return (
        head
        + "\n".join(rows)
        + "\n\nWhat the live page costs has [its own page](watch.md), and so have [peers](peers.md) and [the first minutes "
        "after a\nclone](first_minute.md). SimGrid is no oracle of the network model here, as it has no wheel for Python 3.11 "
        "and did not build:\ntests compare prices with a fluid model that is written once more, message by message.\n\n"
        + "\n".join(parts)
    )


def main() -> None:
    """Runs what is asked for, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--page", action="store_true", help="write the page alone")
    args = parser.parse_args()
    for name in () if args.page else args.names or COMMANDS:
        print(f"== {name}", flush=True)
        run(name)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
