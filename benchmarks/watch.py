"""What the live page costs: its first paint, an update and its memory with many workers, a long run, and the run that it shows.

    python benchmarks/watch.py          # then docs/results/watch.md; ten minutes on two idle cores
    python benchmarks/watch.py --pairs 2 --rounds 100 --long 1000 --page /tmp/watch.md    # a trial

It needs Chromium and Playwright for Python. Records are written as a run would write them; the runs of the pairs train.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from calm import interval

from gossamer.record.folder import metrics_line
from gossamer.record.logs.seconds import RoundSeconds, read_seconds, seconds_line
from gossamer.record.logs.trace import Entry, Operation, line_of

ROOT = Path(__file__).parents[1]
WIDE, LONG, UPDATES, LOCAL_STEPS, PAIRED = 256, 8, 20, 15, 25
SETTLING = 3
"""Rounds after a page was opened or closed that count for neither."""
MB, INF, EMPTY = 1e6, float("inf"), "about:blank"
SIZE = 4_000_000
"""Bytes that a worker of a written record sends in a round."""
STOPWATCH = """
window.updates = [];
const real = window.fetch;
let asked = 0;
window.fetch = async (address, ...more) => {
  const begun = performance.now(), answer = await real(address, ...more);
  if (`${address}`.startsWith("data.json")) asked = begun;
  return answer;
};
new MutationObserver((changes) => {
  if (!changes.some((one) => one.attributeName === "data-round")) return;
  const begun = asked;
  requestAnimationFrame(() => setTimeout(() => window.updates.push(performance.now() - begun)));
}).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-round"] });
"""
READ = """
import json, resource, sys, time
from pathlib import Path
from gossamer.report.reading.follow import FollowedRun
from gossamer.report.page.view import run_view
began, run = time.perf_counter(), FollowedRun("long", Path(sys.argv[1]).resolve())
run.look()
run_view(run, run.modified_s)
took_s = time.perf_counter() - began
print(json.dumps([run.done, took_s, time.process_time(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


class Measured(NamedTuple):
    """One line of the page."""

    what: str
    found: float
    limit: float
    unit: str


def round_lines(workers: int, r: int) -> dict[str, str]:
    """What a run in random pairs writes in a round, by file."""
    train, trace, seconds = [], [], []
    for i in range(workers):
        peer = (r - i) % workers
        both = ((peer, SIZE),) if peer != i else ()
        step = LOCAL_STEPS * (r + 1)
        loss = 2.4 + 3 / (r + 2) + 0.01 * (i % 7)
        train.append(metrics_line("train", round=r, worker=i, step=step, loss=loss, lr=1e-3, tokens=256 * step))
        trace.append(line_of(Entry(r, i, LOCAL_STEPS, 1.0, (Operation("exchange", 0, both, both),))))
        seconds.append(seconds_line(RoundSeconds(r, i, "home", 1.0, 0.25, {peer: 0.5}, 0.0, 1.75 * (r + 1))))
    figures = {"loss": 2.4 + 3 / (r + 2), "worker_losses": [2.4 + 3 / (r + 2)] * workers, "disagreement": 1e-3}
    step = LOCAL_STEPS * (r + 1)
    train.append(metrics_line("eval", round=r, step=step, tokens=256 * workers * step, **figures))
    return {"metrics.jsonl": "".join(train), "trace.jsonl": "".join(trace), "seconds.jsonl": "".join(seconds)}


def written(folder: Path, workers: int, rounds: int, planned: int) -> Path:
    """The record of so many of the planned rounds, as a simulation leaves it."""
    folder.mkdir(parents=True)
    network = {"home": {"uplink_bps": 1e8, "downlink_bps": 1e8, "step_s": 0.1}}
    loop = {"steps": planned * LOCAL_STEPS, "local_steps": LOCAL_STEPS}
    run = {"name": folder.name, "workers": workers, "rule": {"name": "gasloc"}, "run": loop, "network": network}
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    add(folder, workers, range(rounds))
    return folder


def add(folder: Path, workers: int, rounds: Sequence[int]) -> None:
    """Appends these rounds, as a run would: a round at a time."""
    for r in rounds:
        for name, text in round_lines(workers, r).items():
            with (folder / name).open("a") as file:
                file.write(text)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """`gossamer watch` at the priority that `--watch` gives it: the address of its page, and its process."""
    words = ["nice", "-n", "10", sys.executable, "-m", "gossamer", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def browsed() -> Iterator[Any]:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def peak_bytes(pid: int) -> float:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def page_bytes(browser: Any) -> float:
    """What the process that draws the page has for itself, and its share of what it shares."""
    session = browser.new_browser_cdp_session()
    pids = [one["id"] for one in session.send("SystemInfo.getProcessInfo")["processInfo"] if one["type"] == "renderer"]
    found = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
    return max(1024.0 * int(line.split()[1]) for lines in found for line in lines if line.startswith("Pss:"))


def wide(root: Path, workers: int, rounds: int) -> list[Measured]:
    """A run of many workers: the first paint, updates and memory of the page."""
    folder = written(root / "wide", workers, rounds, rounds + UPDATES)
    with served(folder) as (address, pid), browsed() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 900}, bypass_csp=True)  # which forbids our stopwatch
        page.add_init_script(STOPWATCH)
        page.goto(address)
        page.wait_for_function("document.querySelector('path[data-curve]')", polling=50, timeout=120_000)
        first_s = page.evaluate("performance.now()") / 1e3
        said = "[...document.querySelectorAll('summary')].some((one) => one.textContent.includes(`${n} of`))"
        page.wait_for_function(f"(n) => {said}", arg=rounds, polling=250, timeout=600_000)
        read_s = page.evaluate("performance.now()") / 1e3
        page.wait_for_timeout(3000)
        page.evaluate("window.updates.length = 0")
        for r in range(rounds, rounds + UPDATES):
            add(folder, workers, [r])
            page.wait_for_function("(n) => window.updates.length >= n", arg=r + 1 - rounds, polling=250, timeout=60_000)
        updates_s = [ms / 1e3 for ms in page.evaluate("window.updates")]
        memory = page_bytes(browser), peak_bytes(pid)
    shape = f"{workers} workers × {rounds} rounds"
    return [
        Measured(f"{shape}: first curve", first_s, 3, "s"),
        Measured(f"{shape}: all is read and drawn", read_s, INF, "s"),
        Measured(f"{shape}: an update, median of {UPDATES}", 1e3 * statistics.median(updates_s), 200, "ms"),
        Measured(f"{shape}: the slowest of these updates", 1e3 * max(updates_s), INF, "ms"),
        Measured(f"{shape}: memory of the page", memory[0] / MB, 200, "MB"),
        Measured(f"{shape}: peak memory of its server", memory[1] / MB, 200, "MB"),
    ]


def long(root: Path, rounds: int) -> list[Measured]:
    """A long run, read at once in a process of its own."""
    folder = written(root / "long", LONG, rounds, rounds)
    said = subprocess.run([sys.executable, "-c", READ, str(folder)], check=True, stdout=subprocess.PIPE, text=True)
    done, took_s, cpu_s, peak = json.loads(said.stdout)
    assert done == rounds
    shape = f"{LONG} workers × {rounds} rounds"
    return [
        Measured(f"{shape}: read and thinned", took_s, 5, "s"),
        Measured(f"{shape}: the same in seconds of CPU, with imports", cpu_s, INF, "s"),
        Measured(f"{shape}: peak memory", peak / MB, 500, "MB"),
    ]


def document(workers: int, rounds: int) -> dict[str, Any]:
    """The run file of the run that is watched."""
    return {
        "name": "watched",
        "method": "gasloc",
        "workers": workers,
        "model": {"size": "1m"},
        "data": {"source": str(ROOT / "docs" / "adr"), "seq_len": 64, "batch_size": 4},
        "run": {
            "steps": rounds * LOCAL_STEPS,
            "local_steps": LOCAL_STEPS,
            "eval_every": 0,
            "eval_batches": 1,
            "checkpoint_every": 0,
            "threads": 1,
            "device": "cpu",
        },
        "record": {"export": False, "tensorboard": False},
    }


@contextmanager
def training(folder: Path, workers: int, rounds: int) -> Iterator[Path]:
    """The run folder of real processes that train meanwhile."""
    folder.mkdir(parents=True)
    file, run = folder / "run.toml", folder / "runs" / "run"
    file.write_text(tomli_w.dumps(document(workers, rounds)))
    words = ["train", str(file), "--local", str(workers), "--out", str(run), "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "gossamer", *words], stdout=subprocess.DEVNULL)
    try:
        while not run.exists() or not read_seconds(run):
            time.sleep(0.2)
        yield run
    finally:
        process.terminate()
        process.wait()


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pairs(root: Path, count: int, workers: int, rounds: int) -> list[Measured]:
    """One run, which has a page open for some rounds and none for as many, in alternating order."""
    slower, shares, folder = list[float](), list[tuple[float, float]](), root / "pairs"
    with (
        training(folder, workers, 2 * (count + 1) * (rounds + SETTLING)) as run,
        served(folder / "runs") as (address, pid),
        browsed() as browser,
    ):
        page, session = browser.new_page(viewport={"width": 1400, "height": 900}), browser.new_browser_cdp_session()

        def spent_s() -> tuple[float, float, float]:
            browsing = session.send("SystemInfo.getProcessInfo")["processInfo"]
            return time.perf_counter(), cpu_s(pid), sum(one["cpuTime"] for one in browsing)

        def passed(first: int) -> None:
            """Waits until all workers have ended the rounds before this one."""
            while sum(one.round < first for one in read_seconds(run)) < workers * first:
                time.sleep(1)

        def round_s(address: str) -> float:
            """The median of the next rounds, without those in which the page opens or closes."""
            page.goto(address)
            first = max(one.round for one in read_seconds(run)) + SETTLING
            passed(first)
            before = spent_s()
            passed(first + rounds)
            took_s, *spent = (after - a for a, after in zip(before, spent_s(), strict=True))
            if address != EMPTY:
                shares.append((spent[0] / took_s, spent[1] / took_s))
            return statistics.median(one.total_s for one in read_seconds(run) if first <= one.round < first + rounds)

        for pair in range(count):
            found_s = {open_: round_s(address if open_ else EMPTY) for open_ in (pair % 2 == 1, pair % 2 == 0)}
            slower.append(found_s[True] / found_s[False] - 1)
            print(f"pair {pair}: {100 * slower[-1]:+.2f} %", *(f"{share:.4f}" for share in shares[-1]), flush=True)
    low, high = interval(slower)
    return [
        Measured(f"with a page open: longer rounds, median of {count} pairs", 100 * statistics.median(slower), 1, "%"),
        Measured("the same, low end of its 90 % interval", 100 * low, INF, "%"),
        Measured("the same, high end of its 90 % interval", 100 * high, INF, "%"),
        *(
            Measured(f"share of one core that the {who} takes meanwhile", 100 * statistics.median(some), INF, "%")
            for who, some in zip(("page's server", "browser"), zip(*shares, strict=True), strict=True)
        ),
    ]


def page_of(found: Sequence[Measured], words: str, load: float) -> str:
    """The page of results."""
    rows = [
        f"| {one.what} | {one.found:.3g} {one.unit} | {'' if one.limit == INF else f'{one.limit:g} {one.unit}'} | "
        f"{'' if one.limit == INF else 'yes' if one.found <= one.limit else 'no'} |"
        for one in found
    ]
    paired = (
        f"""
In the pairs, two processes of 1M parameters and one thread each train rounds of {LOCAL_STEPS} inner steps, which is all that
the two cores can do. The page of their one run is open for {PAIRED} rounds and closed for as many, in alternating order, and
each part counts with the median of its rounds, without the {SETTLING} after a change. The browser runs on the same machine.
Rounds of a virtual machine scatter by several per cent on their own, so the shares of a core are the sharper figures."""
        if any("page open" in one.what for one in found)
        else "\nNo pairs of runs with and without a page were made."
    )
    busy = "\n**Other programs kept the cores busy, so all times but those of CPU are too long.**" if load > 1 else ""
    return f"""# What the live page costs

    python benchmarks/watch.py{words}

Taken on {os.cpu_count()} cores, at a load average of {load:.1f} when it began. `gossamer watch` serves records that were written
as a run writes them, at the priority of `--watch`, to Chromium on the same machine. Times of the page are the browser's: of the
first curve from the start of navigation, of an update from the request until the pairs of the new round are drawn. Memory of the
page is the proportional set size of the process that draws it.{paired}{busy}

| what | measured | at most | kept |
|---|---:|---:|---|
{chr(10).join(rows)}
"""


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--long", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "watch.md")
    options = parser.parse_args()
    load, found = os.getloadavg()[0], list[Measured]()
    with tempfile.TemporaryDirectory() as made:
        for part in (
            lambda root: wide(root, options.workers, options.rounds),
            lambda root: long(root, options.long),
            lambda root: pairs(root, options.pairs, 2, PAIRED) if options.pairs else [],
        ):
            for one in part(Path(made)):
                found.append(one)
                print(f"{one.what}: {one.found:.3g} {one.unit}", flush=True)
    words = "".join(f" {word}" for word in sys.argv[1:] if "/" not in word and word != "--page")
    options.page.write_text(page_of(found, words, load), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
