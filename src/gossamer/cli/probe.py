"""`gossamer probe`: the links between workers and their speed, measured."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.machines import ONE_MACHINE, Machines
from gossamer.cli.output import PLAIN, Output, must_be_new_file, print_json
from gossamer.cli.run_file_options import Overrides, quantity
from gossamer.errors import ConfigError
from gossamer.record.progress import echo
from gossamer.settings.quantities import BYTES, SECONDS

if TYPE_CHECKING:
    from gossamer.network.links import Network
    from gossamer.network.probe import StepTimer
    from gossamer.run.config.run_file import RunConfig
    from gossamer.transport.processes.local import Among


def command(
    file: Annotated[Path | None, Parameter(help="run file (TOML) whose inner step is measured")] = None,
    /,
    *,
    out: Path,
    overrides: Overrides = (),
    local: int | None = None,
    links_only: bool = False,
    max_bytes: Annotated[float, quantity(BYTES)] = 1 << 24,
    test_s: Annotated[float, quantity(SECONDS)] = 0.5,
    machines: Machines = ONE_MACHINE,
    output: Output = PLAIN,
) -> int:
    """Measures the links between workers and an inner step of each, and writes them as a network file.

    Args:
        out: network file to write (TOML)
        local: start this many worker processes on this machine
        links_only: leave the inner step out
        max_bytes: largest message (default: 16 MiB)
        test_s: seconds after which a message is long enough (default: 0.5)
    """
    must_be_new_file(out)
    _check_limits(max_bytes, test_s)
    among = machines.entered()
    if local is not None and local < 2 and among is None:
        raise ConfigError(f"--local {local} was given but a link has two ends; start at least 2 workers")
    if links_only and (file is not None or overrides):
        given = file or f"--set {' '.join(overrides)}"
        raise ConfigError(f"--links-only was given with '{given}' but measures no step; remove one of the two")
    if local is None:
        written = _measured(file, overrides, out, links_only=links_only, max_bytes=int(max_bytes), test_s=test_s)
        if written and (output.json or not output.quiet):
            _print_network(out, output)
        return 0
    if not links_only:  # so that a mistake in the run is reported once, before any process is started
        _run_of(file, overrides, among.of if among else local)
    options = ["--out", str(out), "--max-bytes", str(max_bytes), "--test-s", str(test_s), "--quiet"]
    code = _started(file, overrides, local, [*options, *(["--links-only"] if links_only else [])], among)
    if not code and (among is None or among.first == 0):
        _print_network(out, output)
    return code


def _check_limits(max_bytes: float, test_s: float) -> None:
    """Raises ConfigError for numbers that a probe refuses."""
    from gossamer.network.probe_limits import LargestMessage, LongEnough
    from gossamer.settings.options import check_values

    whole = int(max_bytes) if math.isfinite(max_bytes) else max_bytes
    check_values(LargestMessage, **{"--max-bytes": whole})
    check_values(LongEnough, **{"--test-s": test_s})


def _measured(
    file: Path | None, overrides: Sequence[str], out: Path, *, links_only: bool, max_bytes: int, test_s: float
) -> bool:
    """Measures as one of the processes that another launcher has started; whether this one has written the file."""
    from gossamer.network.links import to_toml
    from gossamer.network.probe import probe
    from gossamer.record.whole_files import atomic_write

    world = os.environ.get("WORLD_SIZE", "")
    config = None if links_only or not world.isdigit() else _run_of(file, overrides, int(world))
    network = probe(None if config is None else _timer(config), max_bytes=max_bytes, test_s=test_s)
    if network is not None:
        atomic_write(out, to_toml(network).encode())
    return network is not None


def _started(
    file: Path | None, overrides: Sequence[str], local: int, options: Sequence[str], among: "Among | None"
) -> int:
    """Starts all workers on this machine, and waits for them; returns their exit code."""
    from gossamer.cli import main
    from gossamer.cli.train import import_early
    from gossamer.transport.processes.local import run_local

    import_early()
    words = ["probe", *([] if file is None else [str(file)]), *options]
    words += [word for one in overrides for word in ("--set", one)]
    return run_local(local, main, words, parts=1 if among is None else (1,) * among.of, among=among)


def _run_of(file: Path | None, overrides: Sequence[str], workers: int) -> "RunConfig":
    """The run whose inner step is measured; a run file's, or that of the defaults. Raises ConfigError."""
    from gossamer.run.config.document import load_document, parse_overrides, with_settings
    from gossamer.run.config.run_file import parse

    changes = parse_overrides([*overrides])
    config = parse(with_settings({"workers": workers}, changes) if file is None else load_document(file, changes))
    if config.workers != workers:
        raise ConfigError(
            f"{workers} workers were started but the run file has workers = {config.workers}; make them equal, or add --set "
            f"workers={workers}"
        )
    return config


def _timer(config: "RunConfig") -> "StepTimer":
    from gossamer.run.config.resolve import settings_of
    from gossamer.run.worker.step_time import step_time
    from gossamer.transport.processes.launch import device_of

    run = settings_of(config)
    return lambda member: step_time(run, member.worker, device_of(config.run.device))


def _links(network: "Network") -> str:
    """Measured ranges of the links, from the least to the most of all workers."""
    from gossamer.report.table import digits_text

    def span(values: Sequence[float], of: float) -> str:
        least, most = digits_text(min(values) / of, 3), digits_text(max(values) / of, 3)
        return least if least == most else f"{least} to {most}"

    assert isinstance(network.uplink_bps, tuple) and isinstance(network.downlink_bps, tuple)
    own_s = network.latency_s
    latencies_s = [one.latency_s for one in network.routes] or [*(own_s if isinstance(own_s, tuple) else (own_s,))]
    narrow = [one.bandwidth_bps for one in network.routes if one.bandwidth_bps < math.inf]
    pairs = f"; {len(narrow)} of {len(latencies_s)} pairs only {span(narrow, 1e6)} Mbit/s" if narrow else ""
    return (
        f"{span(network.uplink_bps, 1e6)} Mbit/s up, {span(network.downlink_bps, 1e6)} Mbit/s down, "
        f"latency {span(latencies_s, 1e-3)} ms{pairs}"
    )


def _print_network(out: Path, output: Output) -> None:
    """Prints the content of a network file."""
    from gossamer.network.links import read_network, to_options

    network = read_network(out)
    if output.json:
        print_json({"file": out, "network": to_options(network)})
        return
    echo(f"links: {_links(network)}")
    if isinstance(network.step_s, tuple) and network.step_of is not None:
        echo(f"inner step: {min(network.step_s):g} to {max(network.step_s):g} s, of model {network.step_of}")
    echo(f"network file: {out}")
