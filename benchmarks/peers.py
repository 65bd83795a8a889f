"""Gossamer beside what would be used instead, on one task in one session: tokens per second, seconds of a sync, memory.

    python benchmarks/peers.py [SIDE ...] [--repeats 3] [--fresh] [--page]

Four workers of a GPT of 0.84M parameters, ten local steps of 8 sequences of 128 tokens a round (`benchmarks/peers_sides.py`).
The sides take turns; each run is kept in benchmarks/peers.jsonl as soon as it has ended, so that a second call makes only the
runs that are missing, and `--fresh` makes those that are named anew. Then it writes docs/results/peers.md and its figure;
`--page` runs nothing. JAX and torchft need environments of their own, whose Python GOSSAMER_JAX and GOSSAMER_TORCHFT name:

    python -m venv .jax && .jax/bin/pip install jax==0.10.2 optax==0.2.8
    python -m venv .torchft && .torchft/bin/pip install --constraint constraints.txt torch==2.13.0 torchft==0.2.0
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers_sides import LENGTH, LIMIT_S, LOCAL_STEPS, SEQUENCES, WORKERS

from gossamer.report.figures import on_any_ground

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "peers.jsonl"
PAGE = ROOT / "docs" / "results" / "peers.md"
ROUNDS, FIRST = 8, 2
"""Rounds of a run, and the first that counts as steady."""
SIDES = {
    "bare": "a loop on one thread, which never exchanges",
    "simulate": "`gossamer.simulate`, one process",
    "exo_design": "the design of EXO Gym, a process for each node",
    "jax": "JAX, `jit(vmap(scan))`, one process",
    "outer": "`gossamer.Outer`, four processes",
    "torchft": "DiLoCo of torchft, four processes",
    "post_local_sgd": "PostLocalSGD of torch, four processes",
    "ddp": "DDP of torch, four processes",
}
ALONE = ("bare", "simulate", "exo_design", "jax")
"""Sides that are started as one process."""
PYTHONS = {"jax": "GOSSAMER_JAX", "torchft": "GOSSAMER_TORCHFT"}
RATIOS = (("simulate", "exo_design"), ("simulate", "jax"), ("outer", "torchft"), ("outer", "ddp"))
ROUND_TOKENS = WORKERS * LOCAL_STEPS * SEQUENCES * LENGTH
Run = Mapping[str, Any]


def python_of(side: str) -> str | None:
    """The interpreter of a side; None where its environment is not named."""
    if side not in PYTHONS:
        return sys.executable
    found = os.environ.get(PYTHONS[side]) or ROOT / f".{side}" / "bin" / "python"
    return str(Path(found).absolute()) if Path(found).exists() else None


def measured(side: str, python: str) -> dict[str, Any]:
    """One run of a side. Raises: RuntimeError when a process fails or takes too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    load, began, peak = os.getloadavg()[0], time.perf_counter(), 0
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryFile("w+") as complaints:
        started = [
            subprocess.Popen(
                [python, str(ROOT / "benchmarks" / "peers_sides.py"), side, str(rank), str(port), str(ROUNDS)],
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env=environment,
                start_new_session=True,
            )
            for rank in range(1 if side in ALONE else WORKERS)
        ]
        try:
            while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
                if time.perf_counter() > began + LIMIT_S:
                    break
                peak = max(peak, pss_bytes({one.pid for one in started}))
                time.sleep(0.5)
            codes = [one.poll() for one in started]
        finally:
            for one in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)  # its children too
            outputs = [one.communicate()[0] for one in started]
        if any(code != 0 for code in codes):
            complaints.seek(0)
            raise RuntimeError(
                f"the processes of {side} ended with {codes} after {time.perf_counter() - began:.0f} s of at most "
                f"{LIMIT_S:.0f} s, None for one that was still running:\n{complaints.read()[-4000:]}"
            )
    said = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    first, last = (said[0]["marks"][r] for r in (FIRST, ROUNDS - 1))
    tokens = (ROUNDS - 1 - FIRST) * ROUND_TOKENS
    cpu_s = sum(one["marks"][ROUNDS - 1][1] - one["marks"][FIRST][1] for one in said)
    syncs = [one["sync_s"] for one in said if one["sync_s"] is not None]
    return {
        "side": side,
        "date": datetime.date.today().isoformat(),
        "load": round(load, 1),
        "cores": len(os.sched_getaffinity(0)),
        "tokens_per_s": tokens / (last[0] - first[0]),
        "tokens_per_s_with_start": ROUNDS * ROUND_TOKENS / (max(one["ended"] for one in said) - began),
        "tokens_per_cpu_s": tokens / cpu_s,
        "sync_s": statistics.median(syncs) if syncs else None,
        "memory_bytes": peak,
        "versions": said[0]["versions"],
    }


def pss_bytes(sessions: set[int]) -> int:
    """The proportional set size of all processes of some sessions; a page that several share counts once."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) in sessions:
                    total += 1024 * int((entry / "smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
            except (OSError, IndexError):
                continue  # it has ended
    return total


def kept() -> list[dict[str, Any]]:
    """The runs that were made."""
    return [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()] if KEPT.exists() else []


def keep(runs: Sequence[Run]) -> None:
    """Keeps these runs and no others."""
    aside = KEPT.with_suffix(".new")
    aside.write_text("".join(json.dumps(one) + "\n" for one in runs), encoding="utf-8")
    aside.replace(KEPT)


def medians(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By side, the medians of its runs."""
    found: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        own = [one for one in runs if one["side"] == side]
        if own:
            numbers = ("tokens_per_s", "tokens_per_s_with_start", "tokens_per_cpu_s", "sync_s", "memory_bytes")
            values = {name: [one[name] for one in own if one[name] is not None] for name in numbers}
            found[side] = {name: statistics.median(some) if some else None for name, some in values.items()}
            found[side] |= {"runs": len(own), "versions": own[-1]["versions"]}
    return found


def ratio(runs: Sequence[Run], ours: str, theirs: str, number: str) -> float | None:
    """The median ratio of runs that took turns."""
    pairs = zip(*([one[number] for one in runs if one["side"] == side] for side in (ours, theirs)), strict=False)
    found = [a / b for a, b in pairs]
    return statistics.median(found) if found else None


def lines(runs: Sequence[Run]) -> list[str]:
    """What is printed, with the aims."""
    said = [
        f"{side}: {one['tokens_per_s']:,.0f} tokens/s, {one['tokens_per_s_with_start']:,.0f} with start-up, "
        f"{one['tokens_per_cpu_s']:,.0f} per processor second, "
        + (f"sync {1e3 * one['sync_s']:.0f} ms, " if one["sync_s"] is not None else "")
        + f"{one['memory_bytes'] / 1e9:.2f} GB"
        for side, one in medians(runs).items()
    ]
    for ours, theirs in RATIOS:
        for number, words in (("tokens_per_s", "tokens/s"), ("tokens_per_cpu_s", "tokens per processor second")):
            if (found := ratio(runs, ours, theirs, number)) is not None:
                said.append(f"{ours} over {theirs}, {words} = {found:.2f}   (aim 1.0)")
    return said


def page(runs: Sequence[Run]) -> str:
    """The page."""
    rows = [
        f"| {SIDES[side]} | {one['tokens_per_s']:,.0f} | {one['tokens_per_s_with_start']:,.0f} | "
        f"{one['tokens_per_cpu_s']:,.0f} | {'' if one['sync_s'] is None else format(1e3 * one['sync_s'], '.0f')} | "
        f"{one['memory_bytes'] / 1e9:.2f} | {one['runs']} | "
        + ", ".join(f"{name} {number}" for name, number in one["versions"].items())
        + " |"
        for side, one in medians(runs).items()
    ]
    ratios = [
        f"| {ours} over {theirs} | "
        + " | ".join(
            "" if (found := ratio(runs, ours, theirs, number)) is None else f"{found:.2f}"
            for number in ("tokens_per_s", "tokens_per_s_with_start", "tokens_per_cpu_s")
        )
        + " |"
        for ours, theirs in RATIOS
    ]
    missing = [SIDES[side] for side in SIDES if side not in {one["side"] for one in runs}]
    loads, dates, cores = sorted(one["load"] for one in runs), sorted({one["date"] for one in runs}), runs[0]["cores"]
    dated = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    when = f"{dated}; load {loads[0]} to {loads[-1]} before a run began, that of the side before included"
    unmeasured = f"- Not measured here: {'; '.join(missing)}.\n" if missing else ""
    busy = (
        " **Other programs kept the cores busy: only tokens per processor second mean something, and what needs several cores at "
        "once is understated.**"
        if loads[0] > 1  # the least: four processes of the side before count for a minute
        else ""
    )
    return f"""# Beside what would be used instead

    python benchmarks/peers.py

Four workers of a GPT of 0.84M parameters train with {LOCAL_STEPS} local steps of {SEQUENCES} sequences of {LENGTH} tokens a
round, in AdamW, on {cores} cores; {ROUNDS} rounds a run, medians, and the sides took turns ({when}).{busy}

| | tokens/s | with start-up | per processor second | a sync, ms | memory, GB | runs | versions |
|---|---:|---:|---:|---:|---:|---:|---|
{chr(10).join(rows)}

![tokens per second of each](peers.svg)

Medians of the ratios of runs that took turns:

| | tokens/s | with start-up | per processor second |
|---|---:|---:|---:|
{chr(10).join(ratios)}

- **The task** is the same for all: the batches' numbers are random, and the loss is not compared. All but DDP and PostLocalSGD do
  DiLoCo: outer SGD with Nesterov momentum on the mean of what the workers' local steps have changed. PostLocalSGD averages
  parameters, and DDP gradients in each step.
- **tokens/s** are those of rounds {FIRST + 1} to {ROUNDS - 1}. **With start-up** counts from the start of the interpreter to
  the end of the last round, {ROUNDS * LOCAL_STEPS} inner steps of each worker, compiling included.
- **A sync** is what a step that exchanges takes longer than one that does not, when all processes are that far; of DDP, what a
  step takes longer than one without exchange. Four processes share the cores, so a sync waits for processes that wait for a
  core. One process without messages has none: a simulation's outer step is within its tokens.
- **Memory** is the peak of the proportional set sizes of all processes, read twice a second.
- **EXO Gym**'s package on PyPI (`exogym` 0.0.0a0, 1.4 kB) is an empty placeholder, and there is no `exo-gym`. A runner of ours
  has its design: torch's multiprocessing starts a process for each node, each parameter is averaged by itself, rank 0 does the
  outer step, and broadcasts each parameter.
- **torchft** runs with its own manager and lighthouse, each process being a replica. It can lose replicas and go on, which
  `Outer` does only with `elastic=True`.
- `gossamer.simulate` is given model, data, loss and optimizer as functions.
{unmeasured}"""


def draw(runs: Sequence[Run], file: Path) -> None:
    """The figure: of each side, tokens per second, steady and with start-up, and per second of all cores' processor time."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = medians(runs)
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    series = (
        ("tokens_per_s", 1, "tokens/s"),
        ("tokens_per_s_with_start", 1, "tokens/s with start-up"),
        ("tokens_per_cpu_s", runs[0]["cores"], f"tokens per processor second × {runs[0]['cores']}"),
    )
    for place, (number, times, label) in enumerate(series):
        axes.barh(
            [row + 0.27 * (place - 1) for row in range(len(found))],
            [times * one[number] / 1e3 for one in found.values()],
            0.25,
            label=label,
            color=("#1f6f9f", "#e8a15c", "#b5dcc0")[place],  # from dark to light
        )
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("thousand tokens per second, all workers together")
    axes.grid(axis="x", linewidth=0.4)
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, frameon=False)
    with rc_context({"svg.hashsalt": "gossamer", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})
    file.write_bytes(on_any_ground(file.read_bytes()))


def main() -> None:
    """Makes the runs that are missing, prints what is known, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="*", choices=[*SIDES, []], metavar="SIDE", help=", ".join(SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="make the runs of these sides anew")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    args = parser.parse_args()
    sides = args.sides or list(SIDES)
    runs = kept()
    if args.fresh:
        runs = [one for one in runs if one["side"] not in sides or python_of(one["side"]) is None]
    for repeat in range(0 if args.page else args.repeats):
        for side in sides:
            python = python_of(side)
            if sum(one["side"] == side for one in runs) > repeat:
                continue
            if python is None:
                print(f"{side} is left out: {PYTHONS[side]} names no Python with it", file=sys.stderr, flush=True)
                continue
            print(f"run {repeat + 1} of {side}", file=sys.stderr, flush=True)
            runs.append(measured(side, python))
            keep(runs)
    if runs:
        print("\n".join(lines(runs)))
        PAGE.write_text(page(runs), encoding="utf-8")
        draw(runs, PAGE.with_suffix(".svg"))


if __name__ == "__main__":
    main()
