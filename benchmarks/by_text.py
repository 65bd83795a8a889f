"""How well the runs of an experiment model each of the texts they were given: prints docs/results/by_text.md.

    gossamer compare experiments/evidence/own_text.toml --seeds 0,1,2
    python benchmarks/by_text.py runs/own_text

It needs the checkpoints of their last rounds, which `gossamer compare` leaves in its folder.
"""

import argparse
import statistics
from pathlib import Path

from gossamer.report.results import read_results
from gossamer.report.table import markdown_numbers
from gossamer.run.bookkeeping.evaluate import evaluate
from gossamer.run.config.document import load_run
from gossamer.run.config.experiment_file import folder_name
from gossamer.run.config.run_file import parse


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where gossamer compare left the runs")
    folder = parser.parse_args().folder
    print(
        f"# {folder.name}, text by text\n\n    python benchmarks/by_text.py runs/{folder.name}\n\n{by_text(folder)}",
        end="",
    )


def by_text(folder: Path) -> str:
    """For each method, the mean over its seeds of the loss of the mean model on the validation text of each source, in nats."""
    runs: dict[str, list[Path]] = {}
    for one in read_results(folder / "outcomes.jsonl"):
        runs.setdefault(one.method, []).append(folder / folder_name(one.row["method"]))
    sources = [*dict.fromkeys(s for some in runs.values() for run in some for s in parse(load_run(run)).data.sources)]

    def loss(method: str, source: str) -> str:
        return f"{statistics.fmean(evaluate(run, source=source).result.loss for run in runs[method]):.4f}"

    rows = [[method, *(loss(method, source) for source in sources)] for method in runs]
    return markdown_numbers(["method", *sources], rows)


if __name__ == "__main__":
    main()
