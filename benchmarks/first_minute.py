"""How long a stranger waits: from a fresh clone to a first table, two workers of their own, and curves of two methods.

    python benchmarks/first_minute.py     # then docs/results/first_minute.md; five minutes on two idle cores

It clones the committed state into a temporary folder and follows README there, in an environment that `make demo` makes. Each
wait is measured once, since a stranger does all of it once. Packages come from where pip looks.
"""

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MOST_S = 3600.0
OWN = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def loss(model, batch):
    return (model(batch) - batch.square().mean(1, keepdim=True)).square().mean()

def batches():
    for step in range(60):
        if step == 31:  # after the first exchange
            print(outer.n, "workers have exchanged", outer.rounds, "time", flush=True)
        yield torch.randn(32, 16)

data = batches()
"""
"""What a reader of README's loop has before it."""
SWEEP = """
import gossamer, torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

def data(worker, step):
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * worker + step))

def loss(model, batch):
    return (model(batch) - batch.square().mean(1, keepdim=True)).square().mean()

rules = [gossamer.gasloc(), gossamer.diloco(momentum=0.5)]
swept = gossamer.sweep({"rule": rules}, model=model, data=data, loss=loss, workers=4, local_steps=30, rounds=20)
swept.report("sweep.html")
"""


class Wait(NamedTuple):
    """One line of the page."""

    what: str
    seconds: float


def environment() -> dict[str, str]:
    """That of a stranger: without the environment of this process, and without a browser that would open."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    here = Path(sys.prefix) / "bin"
    own["PATH"] = os.pathsep.join(part for part in own["PATH"].split(os.pathsep) if Path(part) != here)
    return own | {"BROWSER": "true", "TERM": "dumb", "COLUMNS": "120"}


def demo(clone: Path) -> list[Wait]:
    """`make demo` in a terminal: installed, the page with a first loss, and the table at its end."""
    python = getattr(sys, "_base_executable", sys.executable)
    ours, theirs = pty.openpty()
    began = time.perf_counter()
    process = subprocess.Popen(
        ["make", "demo", f"PYTHON={python}"], cwd=clone, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = bytearray()
    threading.Thread(target=drained, args=(ours, shown), daemon=True).start()
    seconds: dict[str, float] = {}
    while process.poll() is None and time.perf_counter() - began < MOST_S:
        if "installed" not in seconds and (clone / ".venv" / ".demo").exists():
            seconds["installed"] = time.perf_counter() - began
        address = re.search(rb"http://127\.0\.0\.1:\d+\S*", shown)
        if "page" not in seconds and address and any(one.stat().st_size for one in records(clone)):
            with urllib.request.urlopen(address[0].decode(), timeout=60) as answer:
                assert answer.status == 200
            seconds["page"] = time.perf_counter() - began
        time.sleep(0.1)
    seconds["table"] = time.perf_counter() - began
    process.terminate()
    text = shown.decode(errors="replace")
    assert process.wait() == 0 and {"installed", "page"} <= seconds.keys() and "What it means" in text, text[-4000:]
    return [
        Wait("`make demo`: installed", seconds["installed"]),
        Wait("`make demo`: its page has a first loss", seconds["page"]),
        Wait("`make demo`: the table of four methods, at its end", seconds["table"]),
    ]


def drained(terminal: int, into: bytearray) -> None:
    """Reads all that is printed, as a terminal would, until its other end is closed."""
    try:
        while read := os.read(terminal, 65536):
            into += read
    except OSError:  # Linux has no end of file for a terminal
        return


def records(clone: Path) -> list[Path]:
    """The metrics of the runs of the demo."""
    return [*clone.glob("runs/demo/**/metrics.jsonl")]


def waited_s(words: list[str], folder: Path, until: str | None = None) -> float:
    """Seconds until a program prints this, or ends, from its start; it must end well."""
    began = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines, seen_s = list[str](), None
    for line in process.stdout:
        lines.append(line)
        if until is not None and until in line and seen_s is None:
            seen_s = time.perf_counter() - began
    code = process.wait(MOST_S)
    assert code == 0 and (until is None or seen_s is not None), "".join(lines)
    return time.perf_counter() - began if seen_s is None else seen_s


def own_loop(clone: Path) -> list[Wait]:
    """README's block in a script, with torchrun, until two workers have exchanged; then two methods and their curves."""
    readme = (clone / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (clone / "train.py").write_text(OWN + block, encoding="utf-8")
    (clone / "methods.py").write_text(SWEEP, encoding="utf-8")
    bin_ = clone / ".venv" / "bin"
    torchrun = [str(bin_ / "torchrun"), "--nproc-per-node", "2", "train.py"]
    exchanged_s = waited_s(torchrun, clone, "2 workers have exchanged 1 time")
    curves_s = waited_s([str(bin_ / "python"), "methods.py"], clone)
    assert (clone / "sweep.html").stat().st_size
    return [
        Wait("README's loop under `torchrun`: two workers have exchanged for the first time", exchanged_s),
        Wait("`gossamer.sweep` of two methods: the page with their curves", curves_s),
    ]


def page_of(waits: list[Wait], facts: Mapping[str, str]) -> str:
    """The page of results."""
    rows = "\n".join(f"| {one.what} | {one.seconds:.0f} s |" for one in waits)
    busy = (
        "\n**Other programs kept the cores busy, so all times are too long.**"
        if float(facts["load"]) > 1 or float(facts["load after"]) > int(facts["cores"]) + 1
        else ""
    )
    return f"""# The first minutes of a stranger

    python benchmarks/first_minute.py

Taken once, from a fresh clone of {facts["commit"]}, on {facts["cores"]} cores ({facts["machine"]}, Python {facts["python"]}), at
a load average of {facts["load"]} when it began and {facts["load after"]} at its end, both over five minutes, and nice
{facts["nice"]}. Packages came from {facts["index"]}.{busy}
Times of `make demo` count from its start, the others from the start of their command, which is called for the first time.

| what | after |
|---|---:|
{rows}

The loop has a model of two small layers, and so has the sweep: 4 workers, 20 rounds of 30 local steps each.
"""


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "first_minute.md")
    page: Path = parser.parse_args().page
    settings = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    facts = {
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
        "cores": f"{os.cpu_count()}",
        "machine": os.uname().machine,
        "python": sys.version.split()[0],
        "load": f"{os.getloadavg()[1]:.1f}",
        "nice": f"{os.nice(0)}",
        "index": "an index on the same machine" if "file:" in settings or "find-links" in settings else "the network",
    }
    with tempfile.TemporaryDirectory() as made:
        clone = Path(made) / "gossamer"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        waits = [*demo(clone), *own_loop(clone)]
    facts["load after"] = f"{os.getloadavg()[1]:.1f}"
    for one in waits:
        print(f"{one.what}: {one.seconds:.1f} s")
    page.write_text(page_of(waits, facts), encoding="utf-8")


if __name__ == "__main__":
    main()
