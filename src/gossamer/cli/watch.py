"""`gossamer watch`: a live page of runs."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli.help_columns import OPTIONS
from gossamer.cli.output import Output
from gossamer.errors import ConfigError
from gossamer.record.progress import echo

if TYPE_CHECKING:
    import subprocess

    from gossamer.report.page.web import Page

PORT = 8250
_PAGES: list["subprocess.Popen[bytes]"] = []
"""References to page processes, which are never awaited."""
_BESIDE = (
    "import sys; from pathlib import Path; from gossamer.report.page.web import serve_beside; "
    "serve_beside(Path(sys.argv[1]), show=sys.argv[2] == 'show')"
)


def command(
    runs: Annotated[tuple[str, ...], Parameter(name="RUN")] = (),
    /,
    *,
    plan: bool = False,
    peers: Path | None = None,
    port: int = PORT,
    host: str = "127.0.0.1",
) -> None:
    """Serves a live page of runs, while they train and afterwards, until Ctrl-C: who sends to whom, who waits, loss and bytes.

    It only reads their folders. A folder that holds run folders is watched for those that appear in it. Of a run in a store
    it shows rounds, slots and bytes, also when no worker is alive.

    Args:
        runs: run folders, or stores of runs (--store, or Outer(store=...)); with --plan a network file, or nothing
        plan: serve calculators instead: move bandwidth, workers, model, local steps and codec, and see what each method costs
        peers: run file, or file of peers, of a run with [peers] that lies in a store, which this machine's key opens
        port: port of the page (default: 8250); 0 takes one that is free
        host: address to serve it on (default: 127.0.0.1, this machine only); on any other the page has a secret token
    """
    import shlex

    from gossamer.report.page.web import page_server
    from gossamer.report.reading.stored import FollowedStore, is_store

    if not plan and not runs:
        raise ConfigError("no run was given to watch (got none, need one or more); name run folders, or give --plan")
    stores = [run for run in runs if is_store(run)]
    if plan and stores:
        raise ConfigError(f"--plan was given with '{stores[0]}', which is a store; give a network file, or nothing")
    if peers is not None and not stores:
        raise ConfigError(f"--peers was given as '{peers}', and no run in a store to read with it; leave it out")
    folders = tuple(Path(run) for run in runs if run not in stores)
    words = ["gossamer", "watch", *runs, *([] if peers is None else ["--peers", str(peers)])]

    def shown() -> "Page":
        followed = [FollowedStore(store, peers) for store in stores]
        return page_server(folders, host, port, shlex.join(words), followed)

    with calculators(folders, host, port) if plan else shown() as page:
        echo(f"watch: {page.address}", flush=True)
        if not page.token:
            echo(
                f"from another machine: ssh -L {page.port}:127.0.0.1:{page.port} THIS-MACHINE, then the same address there"
            )
        with contextlib.suppress(KeyboardInterrupt):
            page.serve_forever()


def calculators(files: tuple[Path, ...], host: str, port: int) -> "Page":
    """A server of calculators, not yet serving."""
    from gossamer.network.links import read_network
    from gossamer.report.page.web import Page
    from gossamer.run.planning.calculator import Calculator
    from gossamer.run.planning.plan import Candidate, RunPlan

    if len(files) > 1:
        raise ConfigError(f"--plan got {len(files)} files; give one network file, or none")

    def others(made: RunPlan) -> tuple[Sequence[Candidate], Mapping[str, str]]:
        from gossamer.run.planning.candidates import price_recipes

        return price_recipes(made)

    calculator = Calculator(read_network(files[0]) if files else None, others)
    return Page(calculator.answers, host, port, main="calculator")


@Parameter(name="*", group=OPTIONS["Output"])
@dataclass(frozen=True, kw_only=True)
class Watchable(Output):
    """The output of a verb that trains."""

    watch: Annotated[
        bool, Parameter(help="serve a live page of the run while it trains, on a free port of this machine")
    ] = False
    opens: Annotated[bool, Parameter(parse=False)] = False
    """Whether that page opens by itself where a browser is."""

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """A context in which a separate process serves a page of this folder, if that was asked for.

        The process only reads. It ends after this one, once the page has no viewers.
        """
        if not self.watch:
            yield
            return
        import subprocess
        import sys

        words = [sys.executable, "-c", _BESIDE, str(folder), "show" if self.opens else ""]
        # A separate session, so that a Ctrl-C that stops this process leaves the page to its viewers.
        page = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        _PAGES.append(page)
        try:
            yield
        finally:
            assert page.stdin is not None
            page.stdin.close()


WATCHABLE = Watchable()
"""Text, with progress, and no page."""
