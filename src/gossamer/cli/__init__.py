"""The command line: `gossamer simulate | train | compare | evaluate | topology | probe | price | plan |
utilisation | report | list`.

Heavy modules are imported by the command that needs them, so that `gossamer --help` answers at once.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from gossamer import __version__
from gossamer.errors import ConfigError, GossamerError, TrainingError

if TYPE_CHECKING:
    from gossamer.network.links import Network
    from gossamer.network.utilisation import Setting
    from gossamer.run.config import RunConfig

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 2 with one sentence on stderr for anything a user or peer can cause."""
    logging.basicConfig(level=logging.WARNING, format="gossamer: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, _terminated)
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except GossamerError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gossamer: {_stopped(args)}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _stopped(args: argparse.Namespace) -> str:
    """What is said of a command that was told to stop, with the way to go on if there is one."""
    folder: Path | None = getattr(args, "resumable", None)
    if args.run is _compare:
        return "stopped; the same command with --resume keeps the runs that have ended"
    if folder is None or not any(folder.glob("checkpoints/round-*/*.json")):
        return "stopped"
    return f"stopped; resume with --resume {folder}"


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gossamer",
        description="Pretrain language models over slow, uneven networks: gossip, local steps, outer optimizers.",
    )
    parser.add_argument("--version", action="version", version=f"gossamer {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    def run_file(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("file", nargs="?", type=Path, help="run file (TOML)")
        sub.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, such as rule.lr=0.5"
        )
        sub.add_argument("--out", type=Path, help="run folder (default: runs/NAME)")

    sub = command("simulate", _simulate, "Train all workers of a run in this process.")
    run_file(sub)
    sub.add_argument("--resume", type=Path, metavar="RUN", help="continue this run folder from its newest checkpoint")

    sub = command("train", _train, "Train one real worker per process, under torchrun or with --local N.")
    run_file(sub)
    sub.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue this run folder from the newest round that all own"
    )
    sub.add_argument("--local", type=int, metavar="N", help="start N worker processes on this machine")
    sub.add_argument(
        "--server", metavar="HOST:PORT", help="serve a run with a [server] here, or with --worker join it there"
    )
    sub.add_argument("--worker", type=int, metavar="I", help="be this worker of the server")

    sub = command("compare", _compare, "Simulate every variant of an experiment file and write one table and report.")
    run_file(sub)
    sub.add_argument("--seeds", default="", metavar="0,1,2", help="run every variant with each of these seeds")
    sub.add_argument("--scale", default="", metavar="NAME", help="take the sizes of the file's [scale.NAME]")
    sub.add_argument("--resume", action="store_true", help="keep the runs that have ended, and train the others")

    sub = command(
        "evaluate", _evaluate, "Form the mean model of a run from snapshots of one round, score and export it."
    )
    sub.add_argument("folder", type=Path, metavar="RUN")
    sub.add_argument("--round", type=int, help="number of finished rounds (default: the newest that all workers own)")

    sub = command(
        "topology", _topology, "Show a topology: graph, spectral gap, chi, and the stability of gossip on it."
    )
    sub.add_argument("name")
    sub.add_argument("--workers", type=int, default=8)
    sub.add_argument("--momentum", type=float, default=0.7, help="outer momentum gamma")
    sub.add_argument("--alpha", type=float, default=1.0, help="gossip step")
    sub.add_argument("--round", type=int, default=0, help="the round to draw")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="option of the topology, such as peers=2"
    )

    sub = command(
        "probe", _probe, "Measure the links between workers, under torchrun or with --local N, as a network file."
    )
    sub.add_argument("--out", type=Path, required=True, help="network file to write (TOML)")
    sub.add_argument("--local", type=int, metavar="N", help="start N worker processes on this machine")
    sub.add_argument("--max-bytes", type=int, default=1 << 24, help="largest message (default: 16 MiB)")
    sub.add_argument(
        "--test-s", type=float, default=0.5, help="seconds after which a message is long enough (default: 0.5)"
    )

    sub = command(
        "price", _price, "Price a recorded run on a network: wall-clock and utilisation, without training again."
    )
    sub.add_argument("folder", type=Path, metavar="RUN")
    sub.add_argument("network", type=Path, help="network file (TOML)")

    sub = command(
        "plan", _plan, "Price every method on a network before anything is trained, and write a run file for one."
    )
    sub.add_argument("network", type=Path, help="network file (TOML)")
    sub.add_argument("--model", default="134m", metavar="SIZE", help="size of the model (default: 134m)")
    sub.add_argument("--vocab", type=int, default=256, help="tokens of the vocabulary (default: 256, for bytes)")
    sub.add_argument("--workers", type=int, help="number of workers, where the network file lists none")
    sub.add_argument("--seq-len", type=int, default=128, help="tokens of a sequence (default: 128)")
    sub.add_argument("--batch-size", type=int, default=8, help="sequences of a worker's inner step (default: 8)")
    sub.add_argument("--step-s", type=float, help="seconds of an inner step, where the network file gives none")
    sub.add_argument("--peak-flops", type=float, help="FLOP/s of a worker, from which the step time follows")
    sub.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is in use (default: 0.4)")
    sub.add_argument("--local-steps", default="15,30,60,120,240", metavar="15,30", help="local steps to try")
    sub.add_argument("--codec", action="append", default=[], metavar="NAME", help="codec to try besides exact")
    sub.add_argument("--target", type=float, default=0.9, help="utilisation to reach (default: 0.9)")
    sub.add_argument("--out", type=Path, help="write a run file with the chosen settings")
    sub.add_argument("--adapt", action="store_true", help="let its local steps follow the clock (run.adapt)")
    sub.add_argument("--weigh-steps", action="store_true", help="let its workers count alike (run.weigh_steps)")

    sub = command("utilisation", _utilisation, "How much of a run is computing, at which bandwidth; published models.")
    sub.add_argument("--model", default="1b", help="1b, 10b, 70b or 100b (default: 1b)")
    sub.add_argument("--method", default="streaming", help="data_parallel, diloco, streaming, ... (default: streaming)")
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option, such as local_steps=30"
    )
    sub.add_argument(
        "--figure9", action="store_true", help="all-reduce and gossip with one straggler instead, on the 70b model"
    )
    sub.add_argument(
        "--analytic", action="store_true", help="hours of a whole run by formula instead, on nodes in several sites"
    )
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw utilisation against bandwidth (.png or .svg)")

    sub = command("report", _report, "Write one self-contained page with table and curves of several runs.")
    sub.add_argument("folders", type=Path, nargs="+", metavar="RUN")
    sub.add_argument("--out", type=Path, default=Path("report.html"))

    sub = command("list", _list, "List methods, rules, topologies, codecs, servers and pairs.")
    sub.add_argument(
        "--markdown", action="store_true", help="the methods with what they send, keep and need: docs/methods.md"
    )
    return parser


def _run(args: argparse.Namespace) -> "tuple[RunConfig, Path]":
    """The run and its folder from a run file with overrides, or from the folder to resume."""
    from gossamer.run.config import parse
    from gossamer.run.document import load, load_run, settings

    if args.resume is not None:
        if args.file is not None or args.set:
            raise ConfigError(
                f"--resume got '{args.resume}' and a run file or --set; a run resumes as it is: give --resume alone"
            )
        return parse(load_run(args.resume)), args.resume
    if args.file is None:
        raise ConfigError("no run file was given (got none, need one); name a TOML file, or --resume with a run folder")
    config = parse(load(args.file, settings(args.set)))
    return config, args.out or Path("runs") / config.name


def _simulate(args: argparse.Namespace) -> None:
    config, folder = _run(args)
    if config.event_driven and args.resume is not None:
        raise ConfigError(
            f"'{folder}' looks at the clock, and what was under way when it stopped is not kept; start it anew in another folder"
        )
    args.resumable = None if config.event_driven else folder
    _drive(config, folder, resume=args.resume is not None)
    _tell({config.name: folder}, folder / "report.html", config.network)


def _drive(config: "RunConfig", folder: Path, *, resume: bool = False) -> None:
    """Trains all workers in this process, in rounds or over virtual time."""
    from gossamer.record.progress import Progress

    with Progress(config.rounds, config.record.print_every) as progress:
        if config.event_driven:
            from gossamer.run.virtual import simulate_events

            simulate_events(config, folder, progress=progress)
        else:
            from gossamer.run.simulate import simulate

            simulate(config, folder, resume=resume, progress=progress)


def _train(args: argparse.Namespace) -> int:
    config, folder = _run(args)
    if config.event_driven and config.server is None:
        method = f"pair '{config.pair.name}'" if config.pair else "run.wait = false"
        raise ConfigError(f"gossamer train got {method}, which real processes do not run; use gossamer simulate")
    args.resumable = folder
    if args.local is not None:
        from gossamer.transport.launch import run_local, run_served

        if args.local != config.workers:
            raise ConfigError(f"--local {args.local} but the run file says workers = {config.workers}; make them equal")
        if args.resume is not None and _ended(config, folder):
            return 0
        if args.resume is not None:
            words = ["train", "--resume", str(folder)]
        else:
            words = [
                "train",
                str(args.file),
                "--out",
                str(folder),
                *(word for one in args.set for word in ("--set", one)),
            ]
        if config.server is not None:
            return run_served(args.local, words)
        return run_local(args.local, words, timeout_s=config.run.timeout_s)
    if config.server is not None:
        return _train_served(config, folder, args)
    if args.server is not None or args.worker is not None:
        raise ConfigError(
            f"--server {args.server} --worker {args.worker} was given but the run file has a rule; start it under torchrun"
        )
    from gossamer.run.train import train

    train(config, folder, resume=args.resume is not None)
    return 0


def _ended(config: "RunConfig", folder: Path) -> bool:
    """Whether the last round of the run is whole in its folder; says so."""
    from gossamer.record import checkpoint
    from gossamer.run.config import digest

    owned = checkpoint.owned(folder / "checkpoints", config.owners, digest(config))
    if over := checkpoint.newest_common(owned) == config.rounds:
        print(checkpoint.ended(folder, config.rounds))
    return over


def _train_served(config: "RunConfig", folder: Path, args: argparse.Namespace) -> int:
    """The server of a run, or one of its workers."""
    from gossamer.run.serve import address, serve, work

    if args.server is None:
        raise ConfigError(
            f"the run has server '{config.server and config.server.name}' and nobody said where; give --local "
            f"{config.workers}, or --server HOST:PORT on the server's machine, and the same with --worker I for each worker"
        )
    host, port = address(args.server)
    if args.worker is None:
        serve(config, folder, host, port, resume=args.resume is not None)
    else:
        work(config, folder, host, port, args.worker)
    return 0


def _compare(args: argparse.Namespace) -> None:
    if args.file is None:
        raise ConfigError(
            "no experiment file was given (got none, need one); name a TOML file such as configs/demo.toml"
        )
    from gossamer.record.files import atomic_write
    from gossamer.report.figures import Outcome, draw, lines, table
    from gossamer.run.document import load, settings
    from gossamer.run.experiment import figure, points

    document = load(args.file, settings(args.set))
    seeds = _whole_numbers("--seeds", args.seeds) if args.seeds else []
    out = args.out or Path("runs") / "-".join([args.file.stem, *([args.scale] if args.scale else [])])
    asked, runs = figure(document), points(document, seeds=seeds, scale=args.scale)
    folders = {run.label: out / _file_name(run.label) for run in runs}
    if alike := [run.label for run in runs if [*folders.values()].count(folders[run.label]) > 1]:
        raise ConfigError(
            f"the labels {alike} would share the folder '{folders[alike[0]]}'; set labels that differ in a letter"
        )
    for run in runs:
        if not args.resume and folders[run.label].exists():
            raise ConfigError(
                f"'{folders[run.label]}' of variant '{run.label}' is there already; "
                "name another folder with --out, remove it, or continue with --resume"
            )
    for run in runs:
        if not (args.resume and _finished(run.config, folders[run.label])):
            try:
                _drive(run.config, folders[run.label])
            except TrainingError as error:  # that a setting diverges is a result of a comparison, not its end
                print(f"gossamer: {run.label}: {error}", file=sys.stderr)
    rows = _tell(folders, out / "report.html", runs[0].config.network)
    outcomes = [Outcome(run.method, run.at, run.seed, row) for run, row in zip(runs, rows, strict=True)]
    atomic_write(out / "outcomes.jsonl", lines(outcomes).encode())
    if asked is not None:
        atomic_write(out / "figure.md", table(outcomes, asked).encode())
        atomic_write(out / "figure.svg", draw(outcomes, asked))
        print(f"figure: {out / 'figure.svg'}, its numbers: {out / 'figure.md'}")


def _finished(config: "RunConfig", folder: Path) -> bool:
    """Whether this very run has ended in its folder; what a stopped one left there is removed, to start it again."""
    import shutil

    from gossamer.record.folder import read_metrics
    from gossamer.run.config import digest, parse
    from gossamer.run.document import load

    if not (folder / "run.toml").exists():
        return False
    there = parse(load(folder / "run.toml"))
    measured = [(run.eval_every, run.eval_batches, run.pace_s) for run in (there.run, config.run)]
    if digest(there) != digest(config) or measured[0] != measured[1]:
        raise ConfigError(
            f"'{folder}' holds a run with other settings than the file's; name another folder with --out, or remove it"
        )
    if any(line["kind"] == "eval" and line["round"] == config.rounds - 1 for line in read_metrics(folder)):
        return True
    shutil.rmtree(folder)
    return False


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in label.lower())


def _tell(runs: dict[str, Path], page: Path, networks: "Mapping[str, Network]") -> list[dict[str, Any]]:
    """The table on the terminal and the report beside the runs, priced on the networks; returns the table's rows."""
    from rich.console import Console

    from gossamer.record.files import atomic_write
    from gossamer.report.page import markdown_table, over_seeds, pictures, render_table, summary_rows, write_report

    page.parent.mkdir(parents=True, exist_ok=True)
    write_report(runs, page, networks)
    rows = summary_rows(runs, networks)
    atomic_write(page.with_name("table.md"), markdown_table(rows).encode())
    for name, image in pictures(runs).items():
        atomic_write(page.with_name(name), image)
    console = Console()
    Console(width=None if console.is_terminal else 120).print(render_table(rows))
    for method, losses, mean, deviation in over_seeds(rows):
        if len(losses) > 1:
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{method}: {mean:.4f} ± {deviation:.4f} over {len(losses)} seeds ({each})")
    print(f"report: {page}")
    return rows


def _networks(folder: Path) -> "Mapping[str, Network]":
    """The networks that a run file names."""
    from gossamer.run.config import parse
    from gossamer.run.document import load_run

    return parse(load_run(folder)).network


def _evaluate(args: argparse.Namespace) -> None:
    from gossamer.run.evaluate import evaluate

    round, result = evaluate(args.folder, args.round)
    worst = max(result.worker_losses)
    print(
        f"round {round}: mean model {result.loss:.4f} nats, worst worker {worst:.4f}, disagreement {result.disagreement:.3g}"
    )
    print(f"mean model: {args.folder / 'model'}")


def _topology(args: argparse.Namespace) -> None:
    from gossamer.rounds.stability import describe
    from gossamer.run.document import settings
    from gossamer.topologies import make_topology
    from gossamer.topologies.draw import draw

    topology = make_topology(args.name, args.workers, seed=args.seed, **settings(args.set))
    print(draw(topology, args.round))
    print()
    print(describe(topology, alpha=args.alpha, gamma=args.momentum))


def _probe(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"'{args.out}' is there already; name another file with --out, or remove it")
    if args.local is not None:
        from gossamer.transport.launch import run_local

        if args.local < 2:
            raise ConfigError(f"--local {args.local} was given but a link has two ends; start at least 2 workers")
        words = ["--out", str(args.out), "--max-bytes", str(args.max_bytes), "--test-s", str(args.test_s)]
        return run_local(args.local, ["probe", *words])
    from gossamer.network.links import to_toml
    from gossamer.network.probe import probe
    from gossamer.record.files import atomic_write

    network = probe(max_bytes=args.max_bytes, test_s=args.test_s)
    if network is not None:
        atomic_write(args.out, to_toml(network).encode())
        print(f"network file: {args.out}")
    return 0


def _price(args: argparse.Namespace) -> None:
    from gossamer.network.links import read_network
    from gossamer.network.pricing import price
    from gossamer.record.events import event_files
    from gossamer.record.trace import read_trace
    from gossamer.run.document import load_run

    load_run(args.folder)
    if event_files(args.folder):
        raise ConfigError(
            f"'{args.folder}' looked at the clock, so its network decided what was computed; simulate it again with "
            f"'{args.network}' as its [network.NAME]"
        )
    trace = read_trace(args.folder)
    timeline = price(trace, read_network(args.network))
    print(
        f"{timeline.total_s:.1f} s for {trace.rounds} rounds of {trace.workers} workers, "
        f"utilisation {timeline.mean_utilisation:.1%}"
    )


def _plan(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from gossamer.models.sizes import ModelConfig, parameter_count
    from gossamer.network.links import read_network
    from gossamer.network.plan import EXACT, plan, run_toml

    model = ModelConfig(size=args.model)
    bits = dict(EXACT)
    for name in args.codec:
        bits[name] = _bits_per_parameter(name, parameter_count(model, args.vocab))
    made = plan(
        read_network(args.network), model, vocab_size=args.vocab, workers=args.workers, seq_len=args.seq_len,
        batch_size=args.batch_size, local_steps=_whole_numbers("--local-steps", args.local_steps), codecs=bits,
        target=args.target, step_s=args.step_s, peak_flops=args.peak_flops, mfu=args.mfu,
    )  # fmt: skip
    view = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("method", "codec", "steps", "MB/round", "s/round", "computing", "h/1e9 tokens"):
        view.add_column(heading, justify="left" if heading in ("method", "codec") else "right", no_wrap=True)
    for one in made.candidates:
        steps, fewest = str(one.full_steps), min(one.local_steps)
        codec = f"{one.codec}, {one.back} back" if one.back else one.codec
        view.add_row(
            one.method, codec, steps if fewest == one.full_steps else f"{fewest}-{steps}",
            f"{one.round_bytes / 1e6:.4g}", f"{one.round_s:.4g}", f"{one.utilisation:.1%}",
            f"{one.seconds_per_token * 1e9 / 3600:.4g}", style="bold" if one is made.best else None,
        )  # fmt: skip
    vocabulary = f"{args.model} with a vocabulary of {args.vocab:,} (--vocab)"
    print(f"{vocabulary}: {made.parameters:,} parameters, {len(made.best.local_steps)} workers, MB sent by one of them")
    Console().print(view)
    reached = "the fewest local steps that compute" if made.best.utilisation >= args.target else "none computes"
    best = f"{made.best.method} with {made.best.full_steps} local steps and codec {made.best.codec}"
    print(f"chosen: {best} ({reached} for {args.target:.0%} of the time)")
    if args.out is not None:
        if args.out.exists():
            raise ConfigError(f"'{args.out}' is there already; name another file with --out, or remove it")
        text = run_toml(made, name=args.out.stem, adapt=args.adapt, weigh_steps=args.weigh_steps)
        args.out.write_text(text, encoding="utf-8")
        print(f"run file: {args.out}")


def _bits_per_parameter(codec: str, parameters: int) -> float:
    from gossamer.codecs import CODECS
    from gossamer.errors import choose

    if codec not in CODECS:
        raise ConfigError(choose("codec", codec, CODECS) + "; correct the name")
    payload_bytes = CODECS[codec]().payload_bytes
    assert payload_bytes is not None, codec
    return 8 * payload_bytes(parameters) / parameters


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} got '{text}'; write whole numbers with commas, such as 15,30") from None


def _utilisation(args: argparse.Namespace) -> None:
    from gossamer.network.utilisation import bandwidth_table, plot_curves, setting_of, utilisation_curve

    options: dict[str, Any] = {}
    if args.set:
        from gossamer.run.document import settings

        options = settings(args.set)
    if args.analytic:
        if args.figure9 or args.plot is not None:
            other = "--figure9" if args.figure9 else f"--plot {args.plot}"
            raise ConfigError(f"--analytic was given with {other} but stands alone; leave one of the two out")
        _tell_hours(options)
        return
    if args.figure9:
        curves = _tell_stragglers(options)
    else:
        setting = setting_of(args.model, args.method, **options)
        print(_assumed(args.model, args.method, setting))
        for row in bandwidth_table(setting):
            needed = "more than 1 Tbit/s" if row.bandwidth_bps is None else f"{row.bandwidth_bps / 1e9:.1f} Gbit/s"
            print(f"{row.utilisation:.0%} computing: {needed}")
        curves = {f"{args.method}, {args.model}": utilisation_curve(setting)}
    if args.plot is not None:
        plot_curves(curves, args.plot)
        print(f"plot: {args.plot}")


def _assumed(model: str, method: str, setting: "Setting") -> str:
    """What the bandwidths that follow are for, in one line."""
    fragments, overlap = len(setting.fragments), setting.overlap_steps
    return (
        f"{model} ({setting.parameters / 1e9:g}e9 parameters in {setting.layers} layers), {method}: {setting.step_s:g} s a step, "
        f"{setting.local_steps} local step{'s' * (setting.local_steps != 1)}, {fragments} fragment{'s' * (fragments != 1)}, "
        f"{overlap} step{'s' * (overlap != 1)} of overlap, {setting.bits_per_parameter:g} bits a parameter, of "
        f"which a share of {setting.payload_factor:g} is sent, no latency"
    )


def _tell_hours(options: dict[str, Any]) -> None:
    """Prints where the hours of a run go, method by method, and all that was assumed."""
    import inspect

    from rich.console import Console
    from rich.table import Table

    from gossamer.errors import choose
    from gossamer.network.wall_clock import wall_clock_table

    known = list(inspect.signature(wall_clock_table).parameters)
    for name in options:
        if name not in known:
            raise ConfigError(choose("option of --analytic", name, known))
    made = wall_clock_table(**options)
    view = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("method", "hours", "computing", "reducing each step", "each round", "Gbit at once"):
        view.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in made.rows:
        total_s = row.clock.total_s
        shares = (f"{seconds / total_s:.1%}" for seconds in row.clock)
        view.add_row(row.method, f"{total_s / 3600:.4g}", *shares, f"{row.at_once_bits / 1e9:.4g}")
    Console().print(view)
    for sentence in made.assumptions:
        print(f"assumed: {sentence}")


def _tell_stragglers(options: dict[str, Any]) -> "dict[str, list[tuple[float, float]]]":
    """Prints mean utilisation with one straggler, and all that was assumed; returns the curves."""
    import inspect

    from rich.console import Console
    from rich.table import Table

    from gossamer.errors import choose
    from gossamer.network.straggler import STRAGGLER_METHODS, straggler_table, straggler_utilisation

    known = [p.name for p in inspect.signature(straggler_utilisation).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known or name == "model":
            raise ConfigError(choose("option of --figure9", name, set(known) - {"model"}))
    view = Table(
        title="share of the time spent computing, mean over workers (straggler's local steps)", title_justify="left"
    )
    for heading in ("Gbit/s", *STRAGGLER_METHODS):
        view.add_column(heading, justify="right")
    for bandwidth_bps in (1e9, 3e9, 1e10, 3e10, 1e11, 3e11, 1e12):
        rows = straggler_table(bandwidths_bps=bandwidth_bps, **options)
        view.add_row(f"{bandwidth_bps / 1e9:g}", *(f"{row.mean:.1%} ({row.straggler_local_steps})" for row in rows))
    Console().print(view)
    rows = straggler_table(**options)
    for sentence in dict.fromkeys(sentence for row in rows for sentence in row.assumptions):
        print(f"assumed: {sentence}")
    return {name: [(row.bandwidth_bps, row.mean) for row in rows if row.method == name] for name in STRAGGLER_METHODS}


def _report(args: argparse.Namespace) -> None:
    from gossamer.run.document import load_run

    for folder in args.folders:
        load_run(folder)
    _tell({folder.name: folder for folder in args.folders}, args.out, _networks(args.folders[0]))


def _list(args: argparse.Namespace) -> None:
    import inspect

    from rich.console import Console
    from rich.table import Table

    from gossamer.asynchronous import PAIRS, SERVERS
    from gossamer.codecs import CODECS
    from gossamer.rules import RULES
    from gossamer.run.methods import first_sentence, made_of, recipes
    from gossamer.topologies import TOPOLOGIES

    if args.markdown:
        from gossamer.cli.methods_page import markdown

        print(markdown(), end="")
        return
    tables: dict[str, Any] = {
        "rules": RULES, "topologies": TOPOLOGIES, "codecs": CODECS, "servers": SERVERS, "pairs": PAIRS,
    }  # fmt: skip
    for title, table in tables.items():
        view = Table(title=title, title_justify="left")
        for heading in ("name", "what it does", "options"):
            view.add_column(heading)
        for name, factory in table.items():
            parameters = inspect.signature(factory).parameters.values()
            options = ", ".join(
                p.name if p.default is p.empty else f"{p.name}={p.default}"
                for p in parameters
                if p.name not in ("n", "seed")
            )
            view.add_row(name, (inspect.getdoc(factory) or "").partition("\n")[0], options)
        Console().print(view)
        if title == "codecs":
            print("every codec takes back=NAME, for rules that take a mean over everyone: what the sums travel back in")
    view = Table(title="methods", title_justify="left")
    for heading in ("name", "made of", "source"):
        view.add_column(heading, no_wrap=heading == "name")
    for name, recipe in recipes().items():
        view.add_row(name, made_of(recipe.settings).replace("`", ""), first_sentence(recipe.source))
    Console().print(view)
