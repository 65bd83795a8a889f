"""`gossamer train`: each worker its own process."""

import contextlib
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter

from gossamer.cli.help_columns import OPTIONS
from gossamer.cli.machines import ONE_MACHINE, Machines
from gossamer.cli.output import print_json
from gossamer.cli.run_file_options import (
    AUTO,
    NO_CHANGES,
    Changes,
    Continues,
    File,
    is_resumable,
    parts_to_train,
    read_spelt,
    resume_hint,
    run_and_folder,
)
from gossamer.cli.watch import WATCHABLE, Watchable
from gossamer.errors import ConfigError
from gossamer.record.progress import echo, say
from gossamer.stop_signals import start_forkserver

if TYPE_CHECKING:
    from gossamer.run.bookkeeping.resume import Resume
    from gossamer.run.config.resolved import ResolvedRun
    from gossamer.run.config.run_file import RunConfig
    from gossamer.run.synchronous.regroup import Meeting
    from gossamer.transport.processes.local import Among

log = logging.getLogger("gossamer")

_ALLOW_CODE = "--allow-code"
_SIGNAL = 128
"""Above it, the exit code of a process that a signal has ended."""


@Parameter(name="*", group=OPTIONS["Several machines"])
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The part of this process in a run with a server."""

    server: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None
    """address at which to serve a run with a [server], or with --worker to join it"""
    worker: int | None = None
    """number of this worker, which joins the server"""
    key: Path | None = None
    """file of this machine's key, for a run with [peers] (default: GOSSAMER_KEY, else the one that the run file lists)"""
    listen: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None
    """where this machine listens for the others, which --join it; with --local N each worker takes the next port"""
    store: Annotated[str | None, Parameter(metavar="URL")] = None
    """folder or object store (such as s3://bucket/run) in which the whole state of the run lies: starts it, joins it, or
    continues it, alone or among others; run.elastic = true is implied"""
    secret: Path | None = None
    """file with the secret of the run (default: GOSSAMER_SECRET, else the file 'secret' of the run folder)"""

    @property
    def given(self) -> str:
        """The options of a server that were given, in words."""
        named = {"server": self.server, "worker": self.worker}
        return " ".join(f"--{name} {value}" for name, value in named.items() if value is not None)


_NO_SERVER = ServerOptions()


def command(
    file: File = None,
    /,
    *,
    changes: Changes = NO_CHANGES,
    out: Path | None = None,
    local: int | None = None,
    resume: Continues[Path | None] = None,
    restarts: Continues[int] = 0,
    allow_code: Continues[bool] = False,
    machines: Machines = ONE_MACHINE,
    join: Annotated[str | None, Parameter(metavar="HOST:PORT", group=OPTIONS["Several machines"])] = None,
    served: ServerOptions = _NO_SERVER,
    output: Watchable = WATCHABLE,
) -> int:
    """Trains as one worker of a run, as the server of one, or starts all workers on this machine.

    Args:
        out: run folder (default: runs/NAME)
        resume: continue this run folder from the newest round of which all workers have sound checkpoints, with --set for what
            changes; auto: continue the run in its folder (--out), or start it there
        local: start this many workers on this machine, each as many processes as it has stages; elastic and asynchronous
            runs may start with fewer than configured; with --rank they are some of those of all machines
        restarts: with --local, how often all processes of a run in rounds start again when a signal ends one of them; they go on
            from the newest round, and a middle stage whose checkpoints are gone from what others have of it
        join: join a running elastic, pairwise or asynchronous run through any worker, or with [peers] a run in rounds that
            starts, at its first machine; auto: read the address from the run folder
        allow_code: import the Python code that the resumed folder names though the folder is from elsewhere, or the code has
            changed since
    """
    if local is not None:
        if file is not None:
            read_spelt(file, changes.overrides)  # a mistake is refused before torch is imported
        import_early()
    way = _WayIn(local, join, machines.entered(), served, restarts)
    way.must_start_all_to_restart()
    meeting = None
    if changes.stages == AUTO:
        meeting = _meet(file, changes, out, resume, way, allowed=allow_code)
        if meeting is None:
            return 0
        changes, resume = replace(changes, stages=None, overrides=(*changes.overrides, *meeting.words)), Path(AUTO)
    config, folder, resumed = run_and_folder(file, changes.words, out, resume, store=served.store is not None)
    from gossamer.record.locks import must_be_idle

    # One process reports imports: our launcher, or worker 0 under another launcher.
    tells = multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    run = _resolved(config, folder, resumed, way, allowed=allow_code, speaks=tells)
    way = _opened(way, run, resumes=bool(resumed))
    if way.local is not None and way.among is None:
        must_be_idle(folder)  # before a table shows how far it is
    code = 0
    with resume_hint(folder, joins=way.join is not None), _shown(output, run, folder, way.local, page=tells):
        if way.local is not None:
            words = _words_of_workers(file, folder, changes, resumed, silent=output.silent, allow_code=allow_code)
            code = _start_workers(run, folder, way.local, way, words, resume=resumed)
        else:
            _train_one(run, folder, way, resume=resumed, meeting=meeting)
    if code == 0 and output.json:
        print_json(_result(run, folder, way))
    elif way.local is not None or (run.kind == "rounds" and not _survives_a_worker(run) and _shows_progress()):
        _say_how_it_ended(run, folder, code)
    return code


class _WayIn(NamedTuple):
    """How this process takes part in a run."""

    local: int | None
    """Number of workers to start here; None for a process that is a worker or the server itself."""
    join: str | None
    among: "Among | None"
    served: ServerOptions
    restarts: int

    def must_start_all_to_restart(self) -> None:
        """Raises ConfigError for restarts by one that starts some of the processes at most."""
        starts_some = self.local is None or self.among is not None or self.served.listen is not None
        if self.restarts < 0 or (self.restarts and starts_some):
            raise ConfigError(
                f"--restarts is {self.restarts}, and only who has started all processes can start them again; give it with "
                "--local N and without --rank and --listen"
            )

    def given(self, *, resumes: bool) -> dict[str, object]:
        """The options of this way, with their values."""
        served = self.served
        options: dict[str, object] = {
            "--store": served.store,
            "--rank": None if self.among is None else self.among.first,
            "--join": self.join,
            "--listen": served.listen,
            "--server": served.server,
            "--worker": served.worker,
            "--local": self.local,
            "--resume": "" if resumes else None,
        }
        return {option: value for option, value in options.items() if value is not None}


_APART = {
    "--store": (
        {"--rank", "--join", "--listen", "--server", "--worker", "--local", "--resume"},
        "one command, RUN.toml --store URL and an --out on each machine, starts a run, joins it or continues it: give that alone",
    ),
    "--rank": (
        {"--join", "--server", "--worker"},
        "processes are not numbered among all there; start the server with --server HOST:PORT, its workers with --worker I too, "
        "and who joins a run with --join alone",
    ),
}
"""For each way into a run the options that contradict it, each with the remedy."""


def _resolved(
    config: "RunConfig", folder: Path, resumed: "Resume", way: _WayIn, *, allowed: bool, speaks: bool
) -> "ResolvedRun":
    """The run, before processes are started, so that a mistake in its file is reported once, and so are its warnings."""
    from gossamer.run.config.resolve import resolve

    joins = way.join is not None or way.served.store is not None
    parts = parts_to_train(config, folder, resumed, allowed=allowed, speaks=speaks, joins=joins)
    run = resolve(config, parts, real=True, store=way.served.store is not None)
    for sentence in run.warnings if speaks else ():
        log.warning(sentence)
    return run


@contextlib.contextmanager
def _shown(output: Watchable, run: "ResolvedRun", folder: Path, local: int | None, *, page: bool) -> Iterator[None]:
    """A context in which this process shows the run as far as that was asked for, on a page and in the terminal.

    Args: `local` workers are started here; None where this process is a part of one.
    """
    with output.silenced(), output.watching(folder) if page else contextlib.nullcontext():
        if not _shows_progress():
            yield
            return
        with output.showing() as terminal:
            terminal.follow(run.name, folder, run.record.print_every, (local or 1) / run.workers)
            yield


def _opened(way: _WayIn, run: "ResolvedRun", *, resumes: bool) -> _WayIn:
    """The way into this run, once its other requirements are there: secret, key, address. Raises: ConfigError."""
    from gossamer.transport.keys import KEY, keys_for
    from gossamer.transport.secret import SECRET, read_secret

    _must_not_contradict(way.given(resumes=resumes))
    _must_have_a_server(run, way)
    served = way.served
    if served.secret is not None:
        os.environ[SECRET] = read_secret(served.secret)
    if served.key is not None:
        os.environ[KEY] = str(served.key.resolve())
    if served.listen is not None:
        # The first of a run that others join.
        local = 1 if way.local is None and way.join is None else way.local
        way = way._replace(among=_listen_at(served.listen, run, way), local=local)
    _must_be_dialled("--join", way.join)
    _must_be_dialled("--server", served.server if served.worker is not None else None)
    keys = keys_for(run.peers, run.workers)  # before processes are started, so that a missing key is reported once
    if keys is None and served.store is None:
        _warn_of_plain(run, way)
    starts = way.among is None or way.among.first == 0
    if keys is not None and way.local is not None and run.kind != "server" and starts:
        keys.must_start(way.local)
    if way.among is None:
        return way
    among = way.among._replace(keys=keys)
    _check_place(run, among, way.local)
    return way._replace(among=among)


def _must_not_contradict(given: Mapping[str, object]) -> None:
    """Raises ConfigError for options that contradict each other, of those given with their values."""
    for option, (others, instead) in _APART.items():
        wrong = [f"{other} {value}".strip() for other, value in given.items() if other in others]
        if option in given and wrong:
            raise ConfigError(f"{option} was given with {' and '.join(wrong)}; {instead}")


def _must_have_a_server(run: "ResolvedRun", way: _WayIn) -> None:
    """Raises ConfigError for the options of a server where nobody takes them: in another run, and next to --local."""
    given = way.served.given
    if given and run.kind == "server" and way.local is not None:
        raise ConfigError(
            f"{given} was given with --local {way.local}, which starts the server and all workers here; remove one of the two"
        )
    if given and run.kind in ("pair", "no waiting"):
        raise ConfigError(
            f"{given} was given, and this run ({run.kind}) has no server; start it with --local {run.workers} "
            "or on machines with --rank, or --join it"
        )
    if given and run.kind == "rounds":
        raise ConfigError(
            f"{given} was given but the run file has no [server]; start it with --local {run.workers}, or on machines "
            "with --rank I --of N --address HOST"
        )


def _words_of_workers(
    file: Path | None, folder: Path, changes: Changes, resumed: "Resume", *, silent: bool, allow_code: bool
) -> list[str]:
    """The command of each worker that is started here."""
    sets = [word for one in changes.words for word in ("--set", one)]
    words = ["train", "--resume", str(folder)] if resumed is True else ["train", str(file), "--out", str(folder)]
    words += ["--resume", resumed] if resumed == AUTO else []
    return [*words, *(["--quiet"] if silent else []), *([_ALLOW_CODE] if allow_code else []), *sets]


def _say_how_it_ended(run: "ResolvedRun", folder: Path, code: int) -> None:
    """Reports how the workers that were started here have ended."""
    if code:
        # With code 2 a worker has reported a fault that it would meet again.
        first = "mend what is said above, then " if code == 2 else ""
        again = f"; {first}resume it with --resume {quote(str(folder))}" if is_resumable(folder) else ""
        log.warning("the run ended before its last round, with code %d%s", code, again)
        return
    from gossamer.run.bookkeeping.which_round import how_to_score

    echo(f"run: {folder}, {run.rounds} rounds of {run.workers} workers; {how_to_score(run, folder)}")


def _must_be_dialled(option: str, address: str | None) -> None:
    """Raises ConfigError for an address that is for listening only."""
    from gossamer.transport.sockets.addresses import is_wildcard

    if address is not None and is_wildcard(address.rpartition(":")[0].strip("[]")):
        raise ConfigError(
            f"{option} got '{address}', which is no address that another machine can dial; give that of the machine that "
            "listens there"
        )


def _warn_of_plain(run: "ResolvedRun", way: _WayIn) -> None:
    """Warns once where others may read what this run sends, with the remedy; for a worker its launcher does so."""
    from gossamer.stop_signals import is_launched
    from gossamer.transport.secret import warn_of_plain
    from gossamer.transport.sockets.addresses import is_loopback, split

    hosts = list[str]()
    for given in (way.served.listen, way.served.server, way.join):
        with contextlib.suppress(ValueError):  # none, or what is refused later
            hosts.append(split(given or "")[0])
    if way.among is not None:
        hosts.append(way.among.host)
    elif os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE") and os.environ.get("LOCAL_RANK") == "0":
        hosts.append(os.environ.get("MASTER_ADDR", "localhost"))  # torchrun on several machines
    if is_launched() or all(host == "localhost" or is_loopback(host) for host in hosts):
        return
    warn_of_plain("of this run", "encrypt it: list the keys of all machines as [peers] in the run file (gossamer keys)")


def _listen_at(address: str, run: "ResolvedRun", way: _WayIn) -> "Among | None":
    """Has the workers here listen at an address, before any are started; returns their place among those of all machines.

    The first machine of a run in rounds gets its place here: the store of the run is at this address, and the workers listen at
    the next ports. Raises: ConfigError where no worker can join.
    """
    from gossamer.run.participant.rendezvous import LISTEN
    from gossamer.transport.processes.interfaces import announced_address
    from gossamer.transport.sockets.addresses import shown, split

    try:
        host, port = split(address)
    except ValueError:
        raise ConfigError(f"--listen got '{address}'; give HOST:PORT, such as 10.0.0.1:29400") from None
    may_be_joined = run.kind == "server" or _survives_a_worker(run)
    if not (may_be_joined or run.peers):
        raise _joined_by_nobody("--listen", address)
    os.environ[LISTEN] = address
    if may_be_joined or way.join is not None or way.among is not None:
        return way.among
    os.environ[LISTEN] = shown(host, port + 1)
    where = shown(announced_address(host), port)
    say(f"the run starts once all {run.workers} workers are there: the others take part with --join {where}")
    return Machines(rank=0, of=run.workers, address=where).entered()


def _joined_by_nobody(option: str, address: str) -> ConfigError:
    return ConfigError(
        f"{option} got '{address}', and the run has neither [peers] nor run.elastic = true, so nobody can join it; add one "
        "of the two, or start the run on all machines with --rank I --of N --address HOST"
    )


def _join_at(address: str, run: "ResolvedRun") -> None:
    """Makes this process join a starting run in rounds, as a worker of its key. Raises: ConfigError."""
    from gossamer.transport.sockets.addresses import split

    try:
        host, port = split(address)
    except ValueError:
        raise ConfigError(
            f"--join got '{address}'; give HOST:PORT, as the first machine prints it, such as 10.0.0.1:29400"
        ) from None
    for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE"):  # of a launcher: the number follows from the key
        os.environ.pop(name, None)
    rendezvous = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(run.workers)}
    os.environ.update({**rendezvous, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


def _survives_a_worker(run: "ResolvedRun") -> bool:
    """Whether the others continue without a worker that dies, and another may join."""
    return run.loop.elastic or run.kind in ("pair", "no waiting")


def _check_place(run: "ResolvedRun", among: "Among", local: int | None) -> None:
    """Refuses a place among processes that the run does not have, before any are started, and warns where it has no secret."""
    from gossamer.transport.processes.member import place_of
    from gossamer.transport.secret import SECRET, environment_secret
    from gossamer.transport.sockets.addresses import is_loopback

    if run.kind == "server":
        raise ConfigError(f"--rank was given for a run with a [server]; {_APART['--rank'][1]}")
    if local is not None:
        sizes = run.processes
        worker, part = place_of(among.first, sizes)
        here = sum(sizes[worker : worker + local])
        if part or among.first + here > among.of or len(sizes[worker : worker + local]) < local:
            raise ConfigError(
                f"--rank {among.first} --of {among.of} with --local {local}, but the run's workers have {[*sizes]} processes; "
                "give the number of the first process of the first worker here, and no more workers than begin there"
            )
    if among.first == 0 and not run.peers and not environment_secret() and not is_loopback(among.host):
        log.warning(
            "this run has no secret, so any process that reaches its ports may take part, and nobody can --join it later; write "
            "one into a file with `openssl rand -hex 32`, copy it to all machines and give --secret FILE, or set %s",
            SECRET,
        )


def _shows_progress() -> bool:
    """Whether this process shows progress: our launcher, or the first process on this machine under another launcher."""
    return multiprocessing.parent_process() is None and os.environ.get("LOCAL_RANK", "0") == "0"


def _meet(
    file: Path | None, changes: Changes, out: Path | None, resume: Path | None, way: _WayIn, *, allowed: bool
) -> "Meeting | None":
    """The meeting of all processes of a run whose stages follow from their number; None for a spare one, once the run is over.

    Raises: ConfigError for another launch than torchrun's, and a run that cannot have fewer stages.
    """
    from gossamer.run.config.resolve import resolve
    from gossamer.run.synchronous.regroup import FEWEST, LAUNCH, meet, must_be_elastic

    wrong = {**way.given(resumes=False), **({} if resume is None or str(resume) == AUTO else {"--resume": resume})}
    if wrong:
        given = " and ".join(f"{option} {value}".strip() for option, value in wrong.items())
        raise ConfigError(f"--stages auto was given with {given}, which it replaces; start each machine with {LAUNCH}")
    must_be_elastic()
    config, folder, _ = run_and_folder(file, changes.overrides, out, Path(AUTO))
    pipeline = config.pipeline
    named = [f"pipeline.{key}" for key in ("cuts", "speeds", "workers", "lost") if getattr(pipeline, key)]
    if named or pipeline.stages < FEWEST:
        lack = f"{' and '.join(named)} are set" if named else f"pipeline.stages is {pipeline.stages}"
        raise ConfigError(
            f"--stages auto lays the layers of all workers over the processes that are there, and {lack}; leave these out, and "
            f"set pipeline.stages to the most stages that a worker may have, {FEWEST} or more"
        )
    parts = parts_to_train(config, folder, AUTO, allowed=allowed, speaks=False)
    runs = {}
    for stages in range(FEWEST, pipeline.stages + 1):  # each of them may come
        words = (*changes.overrides, f"pipeline.stages={stages}")
        runs[stages] = resolve(run_and_folder(file, words, out, Path(AUTO))[0], parts, real=True)
    return meet(runs, folder)


def _train_one(run: "ResolvedRun", folder: Path, way: _WayIn, *, resume: "Resume", meeting: "Meeting | None") -> None:
    """Trains as one of the workers of the run, or as its server."""
    served, join = way.served, way.join
    if served.store is not None:
        from gossamer.run.planning.check import must_fit_its_store

        must_fit_its_store(run, served.store)
    if served.store is not None and run.kind == "server":
        from gossamer.run.served.in_store import train_served_in_store

        train_served_in_store(run, folder, served.store)
    elif served.store is not None:
        from gossamer.run.elastic.store_rounds import train_in_store

        train_in_store(run, folder, served.store)
    elif run.kind in ("pair", "no waiting"):
        from gossamer.run.asynchronous.train_asynchronous import train_asynchronous

        train_asynchronous(run, folder, join=join, resume=resume)
    elif run.loop.elastic:
        from gossamer.run.elastic.train_elastic import train_elastic

        train_elastic(run, folder, join=join, resume=resume)
    elif join is not None and (run.kind == "server" or not run.peers):
        if run.kind == "server":
            raise ConfigError(
                f"--join got '{join}', and the run has a [server]; give --server {join} --worker I in its place"
            )
        raise _joined_by_nobody("--join", join)
    elif run.kind == "server":
        _train_served(run, folder, served, resume=resume)
    else:
        from gossamer.run.synchronous.train import train

        if join is not None:
            _join_at(join, run)
        train(run, folder, resume=resume, meeting=meeting)


def _result(run: "ResolvedRun", folder: Path, way: _WayIn) -> dict[str, Any]:
    """The last validations that this process knows of: those of all workers where it has started them, else its own."""
    from gossamer.record.folder import newest_evaluation, read_metrics
    from gossamer.record.lineage import read_branches

    lines = read_metrics(folder)
    validated = {line["worker"]: line for line in lines if line["kind"] == "validation" and "worker" in line}
    if way.local is None:
        me = way.served.worker if run.kind == "server" else _worker_here(run)
        validated = {worker: line for worker, line in validated.items() if me in (worker, -1)}
    scored = newest_evaluation(lines, read_branches(folder))
    # An evaluation may be of an earlier round than what the workers have validated since.
    newest = max([-1, *(line["round"] for line in (scored, *validated.values()) if line is not None)])
    losses = [line.get("loss") for line in validated.values() if line["round"] == newest]
    finished_losses = [] if None in losses else [float(loss) for loss in losses if loss is not None]
    return {
        "folder": folder,
        "name": run.name,
        "workers": run.workers,
        "rounds": run.rounds,
        "round": newest + 1,
        "loss": scored.get("loss") if scored is not None and scored["round"] == newest else None,
        "loss_of_workers": math.fsum(finished_losses) / len(finished_losses) if finished_losses else None,
        "validation": {worker: line.get("loss") for worker, line in validated.items()},
    }


def _worker_here(run: "ResolvedRun") -> int:
    """The worker that this process is, by its place among all processes; -1 where it has none."""
    from gossamer.transport.processes.member import place_of

    rank = int(os.environ.get("RANK", "-1"))
    return rank if rank < 0 else place_of(rank, run.processes)[0]


def import_early(*more: str) -> None:
    """Starts the process from which the workers will be forked (`gossamer.transport.processes.local`), which imports while we do.

    Args: `more` are other modules that it imports.
    """
    if sys.platform == "linux":
        work = [
            "gossamer.cli.train",
            "gossamer.run.synchronous.train",
            "gossamer.run.elastic.train_elastic",
            "gossamer.run.asynchronous.train_asynchronous",
            "gossamer.run.served.server",
            "gossamer.run.served.served_worker",
        ]
        start_forkserver(["gossamer.transport.processes.local", *work, *more])


def _start_workers(run: "ResolvedRun", folder: Path, n: int, way: _WayIn, words: list[str], *, resume: "Resume") -> int:
    """Starts all workers of a run, and its server if it has one, on this machine; or some of them, among those of others."""
    from gossamer.cli import main
    from gossamer.run.bookkeeping.which_round import ended, has_ended
    from gossamer.transport.processes.local import run_served
    from gossamer.transport.secret import folder_secret

    _must_start_here(run, folder, n, way, resume=resume)
    if resume and has_ended(run, folder):
        say(ended(folder, run.rounds))
        return 0
    if run.kind == "server":
        again = ["train", str(folder / "run.toml"), "--out", str(folder), "--resume", AUTO]
        again += [_ALLOW_CODE] if _ALLOW_CODE in words else []
        return run_served(n, main, words, folder_secret(folder, make=True), resume=again)
    if _survives_a_worker(run):
        return _start_participants(run, folder, n, words, way.among)
    return _start_in_rounds(run, folder, n, way, words, resume=resume)


def _must_start_here(run: "ResolvedRun", folder: Path, n: int, way: _WayIn, *, resume: "Resume") -> None:
    """Refuses, once and before any process is started, what each worker would refuse. Raises: ConfigError, DataError."""
    from gossamer.record.folder import must_be_new
    from gossamer.run.bookkeeping.which_round import must_end_later

    goes_on = _survives_a_worker(run)
    if way.restarts and (goes_on or run.kind == "server"):
        raise ConfigError(
            f"--restarts is {way.restarts}, and the others of this run go on without a worker that dies; start that one alone "
            "again"
        )
    if n != run.workers and not ((goes_on or way.among) and n < run.workers):
        instead = f"give --local {run.workers}" + ("" if resume or n < 1 else f", or add --set workers={n}")
        raise ConfigError(f"--local {n} but the run file has workers = {run.workers}; {instead}")
    if way.among is None and resume:
        must_end_later(run, folder)
    elif way.among is None:
        must_be_new(folder, None)


def _start_in_rounds(
    run: "ResolvedRun", folder: Path, n: int, way: _WayIn, words: list[str], *, resume: "Resume"
) -> int:
    """Starts workers of a run in rounds, and all of them again when a signal has ended one, as often as was asked for.

    torch admits no new process to a group after a death, so that all restart; a restart would only repeat a user's mistake.
    """
    from gossamer.cli import main
    from gossamer.run.bookkeeping.which_round import lost_stages, set_lost
    from gossamer.transport.processes.local import STOPPED, run_local

    again = [*words, *([] if resume else ["--resume", AUTO])]
    code = run_local(n, main, words, parts=run.processes, among=way.among)
    for _ in range(way.restarts):
        if code <= _SIGNAL or code == STOPPED:
            break
        lost = lost_stages(folder)
        log.warning(
            "a process was ended by signal %d; all %d start again, and go on from the newest round that they have",
            code - _SIGNAL,
            sum(run.processes),
        )
        sets = ["--set", set_lost(lost)] if lost else []
        code = run_local(n, main, [*again, *sets], parts=run.processes)
    return code


def _start_participants(run: "ResolvedRun", folder: Path, n: int, words: list[str], among: "Among | None") -> int:
    """Starts workers on this machine that continue without dead ones, and reports at the end which were lost."""
    from gossamer.cli import main
    from gossamer.record.logs.order import read_order
    from gossamer.record.logs.outcomes import read_outcomes
    from gossamer.run.participant.exit_status import HowFar, exit_status, far_in_phases, far_in_rounds
    from gossamer.transport.processes.local import run_elastic
    from gossamer.transport.secret import folder_secret

    lost: dict[int, int] = {}

    def recorded() -> HowFar:
        if run.loop.elastic:
            return far_in_rounds(read_outcomes(folder), run.rounds)
        return far_in_phases(read_order(folder))

    def fell(worker: int, code: int, left: str) -> None:
        far = recorded()
        lost[worker] = far.behind.get(worker, 0)
        where = far.words(lost[worker])
        log.warning("worker %d ended with code %d after %s, and %s", worker, code, where, left)

    codes = run_elastic(n, main, words, b"" if among else folder_secret(folder, make=True), fell, among)
    end = exit_status(codes, lost, recorded())
    for sentence in end.sentences:
        log.warning("%s", sentence)
    return end.code


def _train_served(run: "ResolvedRun", folder: Path, served: ServerOptions, *, resume: "Resume") -> None:
    """The server of a run, or one of its workers."""
    from gossamer.run.served.protocol import parse_address
    from gossamer.run.served.served_worker import work
    from gossamer.run.served.server import serve

    if served.server is None:
        raise ConfigError(
            f"this run needs server '{run.with_server.rule.name}': add --local {run.workers} to start all "
            "of it here, or --server HOST:PORT on the server's machine, and the same with --worker I for each worker"
        )
    host, port = parse_address(served.server)
    if served.worker is not None:
        work(run, folder, host, port, served.worker, resume=resume)
    else:
        serve(run, folder, host, port, resume=resume)
