"""`gossamer price`: what a recorded run costs on a network."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json, working
from gossamer.errors import ConfigError
from gossamer.record.progress import echo

if TYPE_CHECKING:
    from gossamer.network.links import Network, PerWorker
    from gossamer.run.config.resolved import RunSettings


def command(folder: Annotated[Path, Parameter(name="RUN")], network: Path, /, *, json: Json = False) -> None:
    """Prices a recorded run on a network: wall-clock and utilisation, without training again.

    Args:
        folder: run folder
        network: network file (TOML)
    """
    from gossamer.network.links import doubts_of, read_network
    from gossamer.record.folder import run_file

    run_file(folder)  # a missing file is reported before torch is imported
    links = read_network(network)
    from gossamer.network.pricing import price
    from gossamer.network.timeline import format_utilisation
    from gossamer.record.lineage import changed_stages, read_branches, stages_sentence
    from gossamer.record.logs.trace import read_trace
    from gossamer.report.table import wall_clock_text

    links, run = _of_its_workers(links, folder, network)
    with working("reading the trace"):
        trace = read_trace(folder)
    if not trace.rounds:
        raise ConfigError(f"'{folder}' has finished no round, so that there is nothing to price; resume the run first")
    links, computing = _with_stages(links, run)
    doubts = doubts_of(links, f"'{network}'")
    if changed := changed_stages(read_branches(folder)):
        doubts = [stages_sentence(f"'{folder}'", changed), *doubts]
    for sentence in doubts:
        echo(f"gossamer: {sentence}", file=sys.stderr)
    with working(f"pricing {trace.rounds} rounds of {trace.workers} workers"):
        timeline = price(trace, links, computing)
    if json:
        counted = {"rounds": trace.rounds, "workers": trace.workers, "total_s": timeline.total_s}
        shares = {"utilisation": timeline.mean_utilisation, "between_stages": timeline.mean_between_stages}
        print_json({"folder": folder, "network": network, **counted, **shares, "changed_stages": changed or None})
        return
    echo(
        f"{wall_clock_text(timeline.total_s)} for {trace.rounds} rounds of {trace.workers} workers, "
        f"{format_utilisation(timeline.mean_utilisation, timeline.mean_between_stages)}"
    )


def _of_its_workers(links: "Network", folder: Path, file: Path) -> "tuple[Network, RunSettings]":
    """The network of the workers of a run, without those that its plan left out, and the settings of the run.

    Raises: ConfigError for a run without rounds, and the network of other workers.
    """
    from gossamer.network.links import links_of
    from gossamer.record.logs.events import has_events
    from gossamer.run.config.resolve import settings_in
    from gossamer.run.planning.teams import left_out_of, network_without

    run = settings_in(folder)
    if has_events(folder):
        raise ConfigError(
            f"cannot re-price '{folder}': in an asynchronous run the network affects the result; simulate it again with "
            f"'{file}' as its [network.NAME]"
        )
    planned, n = run.networks.get("planned"), links.workers or 0
    left_out = left_out_of(links, n, planned, run.workers) if planned is not None and n > run.workers else None
    if left_out is not None:
        links = network_without(links, n, left_out)
        numbers = f"worker{'s' * (len(left_out) > 1)} {', '.join(map(str, left_out))}"
        gone = f"{len(left_out)} workers" if len(left_out) > 8 else numbers
        echo(f"gossamer: '{file}' is priced without {gone}, whom the plan of this run left out", file=sys.stderr)
    try:
        links_of(links, run.workers)
    except ConfigError as error:
        raise ConfigError(f"'{file}' does not fit '{folder}': {error}") from None
    return links, run


def _with_stages(links: "Network", run: "RunSettings") -> "tuple[Network, PerWorker]":
    """The network with the seconds of inner steps in stages, and the share of them in which stages compute."""
    from gossamer.data.tokenizer import vocabulary
    from gossamer.run.config.layouts import layout_for
    from gossamer.run.worker.stages.timing import in_stages

    if run.pipeline.stages == 1:
        return links, 1.0
    steps = in_stages(links, run, layout_for(run.model, vocabulary(run.data.tokenizer) or 256))
    return steps.network, steps.computing
