"""The options that verbs that train share: the run file with its overrides, the run folder, and the hint how to resume."""

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter, Token

from gossamer.cli.help_columns import OPTIONS
from gossamer.collector import uncollected
from gossamer.errors import ConfigError
from gossamer.settings.quantities import Unit

if TYPE_CHECKING:
    from gossamer.run.bookkeeping.inputs import Purpose
    from gossamer.run.bookkeeping.resume import Resume
    from gossamer.run.config.resolved import ResolvedRun
    from gossamer.run.config.run_file import RunConfig
    from gossamer.run.config.user_parts import UserParts

log = logging.getLogger("gossamer")
AUTO = "auto"
"""In place of a run folder: the run in its own folder, from its newest checkpoint, or from the start where it has none."""
ALL_SAVE = "all runs are asked to stop after their round, and to save then"
"""The message of a verb of many runs when it is interrupted."""
File = Annotated[Path | None, Parameter(help="run file (TOML)")]
ExperimentFile = Annotated[Path | None, Parameter(name="FILE", help="experiment file (TOML)")]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", metavar="KEY=VALUE", help="override one key, such as rule.lr=0.5; may be repeated"),
]

_T = TypeVar("_T")
Continues = Annotated[_T, Parameter(group=OPTIONS["Continue"])]
"""An option about a run that is continued."""


def quantity(unit: Unit) -> Parameter:
    """The parameter of an option that is a number, which may be given with its unit, as '25 Mbit/s'."""

    def number(kind: object, tokens: Sequence[Token]) -> float:
        try:
            return unit.number(tokens[0].value)
        except ValueError as error:
            raise ValueError(f"{error}; write it as '{unit.example}'") from None

    return Parameter(converter=number, n_tokens=1, metavar=unit.example.replace(" ", ""))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Changes:
    """What the words of a command change in a run file."""

    overrides: Overrides = ()
    stages: int | Literal["auto"] | None = None
    """cut each worker into so many stages: short for --set pipeline.stages=N; auto: as many as the processes make that torchrun
    has started, at most those of the run file"""
    shards: int | None = None
    """hold the model of each worker in so many processes (FSDP2): short for --set run.shards=N"""

    @property
    def words(self) -> tuple[str, ...]:
        """All of them, as --set takes them. Raises ConfigError where the stages follow from processes."""
        if self.stages == AUTO:
            raise ConfigError(
                f"--stages {self.stages} follows the processes that torchrun starts for gossamer train; give a number here"
            )
        short = {"pipeline.stages": self.stages, "run.shards": self.shards}
        return (*self.overrides, *(f"{key}={value}" for key, value in short.items() if value is not None))


NO_CHANGES = Changes()


def run_and_folder(
    file: Path | None, overrides: tuple[str, ...], out: Path | None, resume: Path | None, *, store: bool = False
) -> "tuple[RunConfig, Path, Resume]":
    """The run, its folder and whether it is resumed, from a run file or from the folder to resume, with overrides.

    Args: `store` is whether the run lies in a store, where one in rounds is elastic.
    Raises: ConfigError when neither or both are given, the run cannot work, or a run to resume may not change so.
    """
    from gossamer.run.config.document import load_run, parse_overrides, with_settings
    from gossamer.run.config.spelling import must_be_spelt

    changes = parse_overrides([*overrides])
    if resume is not None and str(resume) != AUTO:
        if file is not None or out is not None:
            raise ConfigError(
                f"--resume got '{resume}' and a run file or --out, but a run to resume has both in its folder; give --resume "
                f"alone, or with --set for what changes, or --resume {AUTO} with the run file"
            )
        must_be_spelt(recorded := load_run(resume), changes)
        document, folder = with_settings(recorded, changes), resume
    elif file is None:
        raise ConfigError("no run file was given (got none, need one); name a TOML file, or --resume with a run folder")
    else:
        document, folder = with_settings(read_spelt(file, overrides), changes), out
    with uncollected():  # not before: a wrong path or word is reported before torch is imported
        from gossamer.record.folder import store_file
        from gossamer.run.bookkeeping.resume import history
        from gossamer.run.config.resolve import settings_of
        from gossamer.run.config.run_file import parse, survey

    try:
        config = parse(document)
    except ConfigError as first:
        if file is None or (mistakes := len(survey(document).faults)) < 2:
            raise
        raise _with_the_others(first, mistakes, file, overrides) from None
    if store and config.kind == "rounds" and not config.run.elastic:
        if "elastic" in document.get("run", {}):
            raise ConfigError(
                f"--store was given with run.elastic = false for {config.workers} workers, and a run in a store continues "
                "without those that die; remove run.elastic"
            )
        config = parse({**document, "run": {**document.get("run", {}), "elastic": True}})
    folder = folder or Path("runs") / config.name
    if resume is None:
        return config, folder, False
    if store_file(folder).exists():  # its state is that of the store, which may be ahead
        raise ConfigError(
            f"'{folder}' was given to resume, and its run lies in a store; continue it with gossamer train RUN.toml --store URL "
            f"--out {quote(str(folder))}, or, if the store is lost, remove '{store_file(folder)}' to continue without it"
        )
    history(settings_of(config), folder)  # refuses what may not change
    return config, folder, AUTO if str(resume) == AUTO else True


def read_spelt(file: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The document as a file has it, where that and the overrides name nothing unknown. Raises: ConfigError; imports no torch."""
    from gossamer.run.config.document import as_written, parse_overrides
    from gossamer.run.config.spelling import must_be_spelt

    document = as_written(file)
    must_be_spelt(document, parse_overrides([*overrides]))
    return document


@contextlib.contextmanager
def experiment_and_folder(
    file: Path | None, overrides: tuple[str, ...], out: Path | None, scale: str, example: str
) -> Iterator[tuple[dict[str, Any], Path]]:
    """The document of an experiment file and the folder of all its runs; a Ctrl-C in it prints how to keep the finished ones.

    Raises: ConfigError when no file is given, or it is no experiment file.
    """
    from gossamer.run.config.document import parse_overrides

    if file is None:
        raise ConfigError(f"no experiment file was given (got none, need one); name a TOML file {example}")
    changes = parse_overrides([*overrides])
    read_spelt(file, overrides)  # a missing, malformed or misspelt file is refused before torch is imported
    from gossamer.run.config.experiment_file import open_experiment

    folder = out or Path("runs") / "-".join([file.stem, *([scale] if scale else [])])
    document = open_experiment(file, changes)
    try:
        yield document, folder
    except ConfigError as first:
        if (mistakes := len(_mistakes(document, scale))) < 2:
            raise
        raise _with_the_others(first, mistakes, file, overrides) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "stopped; the same command with --resume keeps the finished runs and continues the others"
        ) from None


def _mistakes(document: dict[str, Any], scale: str) -> set[str]:
    """The mistakes in the tables and runs of an experiment file; none where it has no runs, as its only error says then."""
    from gossamer.run.config.experiment_file import drafts, table_faults
    from gossamer.run.config.resolve import document_faults

    try:
        runs = drafts(document, scale=scale)
    except ConfigError:
        return set()
    return {*table_faults(document), *(fault for run in runs for fault in document_faults(run.document))}


def _with_the_others(first: ConfigError, mistakes: int, file: Path, overrides: tuple[str, ...]) -> ConfigError:
    check = f"gossamer check {quote(str(file))}{', with the same --set,' if overrides else ''}"
    return type(first)(f"{first}; {check} names all {mistakes} mistakes")


def check_experiment(configs: "Iterable[RunConfig]") -> list[str]:
    """Imports what the runs name and resolves each, before the first of them is trained; every import is printed once.

    Returns: what to know before they are compared, which is also logged.
    """
    from gossamer.run.config.resolve import resolve
    from gossamer.run.experiments.compare import doubts_about

    printed, resolved = set[str](), list["ResolvedRun"]()
    for config in configs:
        parts = imported_parts(config, printed)
        printed |= {code.name for code in parts.codes}
        resolved.append(resolve(config, parts))
    doubts = doubts_about(resolved)
    for sentence in doubts:
        log.warning("%s", sentence)
    return doubts


def runs_at_a_time(jobs: int | None) -> int:
    """The number that --jobs gives, or one for each core. Raises ConfigError for a number below 1."""
    if jobs is None:
        from gossamer.transport.processes.launch import available_cores

        return available_cores()
    if jobs < 1:
        raise ConfigError(f"--jobs got {jobs}; give the number of runs at a time, at least 1")
    return jobs


def imported_parts(config: "RunConfig", printed: Collection[str] = (), without: Collection[str] = ()) -> "UserParts":
    """The user's own parts of a run, without some kinds; prints a line for each that was imported, but for those in `printed`."""
    from gossamer.record.progress import say
    from gossamer.run.config.user_parts import named, own_parts

    names = [name for kind, name in named(config).items() if kind not in without and name not in printed]
    if names := [*dict.fromkeys(names)]:  # before any of it runs
        say(f"the run file names Python code, which runs with your rights: {', '.join(names)}")
    parts = own_parts(config, without)
    for code in (code for code in parts.codes if code.name not in printed):
        say(f"imported {code.name} from {code.path or 'no file'} (sha256 {code.sha256[:12]})")
    return parts


def parts_of_folder(
    config: "RunConfig",
    folder: Path,
    purpose: "Purpose",
    *,
    allowed: bool,
    without: Collection[str] = (),
    speaks: bool = True,
) -> "UserParts":
    """The user's own parts of a run that a folder holds: nothing is imported for a folder from elsewhere unless that is allowed.

    Args:
        config: the run of the folder, with what was changed on the command line.
        allowed: whether --allow-code was given.
        speaks: whether this process reports what is imported, and what is not compared.
    Raises: ConfigError; DataError for a spoilt record.
    """
    from gossamer.run.bookkeeping.inputs import changed_code, must_be_trusted
    from gossamer.run.config.resolve import settings_of
    from gossamer.run.config.user_parts import own_parts

    if not allowed:
        must_be_trusted(folder, without=without)
    changed_code(settings_of(config), folder, purpose, without=without, allowed=allowed, speaks=speaks)
    return imported_parts(config, without=without) if speaks else own_parts(config, without)


def parts_to_train(
    config: "RunConfig",
    folder: Path,
    resumed: "Resume",
    *,
    allowed: bool,
    recorded: Path | None = None,
    of_folder: Path | None = None,
    speaks: bool = True,
    joins: bool = False,
) -> "UserParts":
    """The user's own parts of a run that is trained: those of a run file chosen by the user, or of the folder that is resumed.

    Args:
        allowed: whether --allow-code was given.
        recorded: the folder of a run that is replayed; `of_folder` is the same where its own run file is used.
        joins: whether this process joins a running run, perhaps for the second time.
    Raises: as `parts_of_folder`.
    """
    from gossamer.run.bookkeeping.inputs import changed_code
    from gossamer.run.config.resolve import settings_of
    from gossamer.run.config.user_parts import own_parts

    if of_folder is not None:
        return parts_of_folder(config, of_folder, "repeat", allowed=allowed, speaks=speaks)
    if recorded is not None:
        changed_code(settings_of(config), recorded, "repeat", speaks=speaks)
    elif resumed is True:
        return parts_of_folder(config, folder, "resume", allowed=allowed, speaks=speaks)
    elif (resumed or joins) and is_resumable(folder):
        changed_code(settings_of(config), folder, "resume", allowed=allowed, speaks=speaks)
    return imported_parts(config) if speaks else own_parts(config)


@contextlib.contextmanager
def resume_hint(folder: Path, *, joins: bool = False) -> Iterator[None]:
    """Makes Ctrl-C print how to resume the run in this folder, if it has a checkpoint.

    Args: `joins` is for a process of a run that may be in progress, which it joins.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        from gossamer.record.folder import store_file

        if not str(stop) and is_resumable(folder) and not store_file(folder).exists():
            again = "join again with the same command" if joins else f"resume with --resume {quote(str(folder))}"
            raise KeyboardInterrupt(f"stopped; {again}") from None
        raise


def is_resumable(folder: Path) -> bool:
    """Whether a run folder has a checkpoint of a finished round; a worker that leaves in the first round saves one of none."""
    return any(folder.glob("checkpoints/**/round-*[1-9]*/*.json"))


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as `--seeds 0,1,2`. Raises ConfigError for anything else, and for a number given twice."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} got '{text}'; write whole numbers with commas, such as 15,30") from None
    if twice := sorted({one for one in numbers if numbers.count(one) > 1}):
        raise ConfigError(f"{option} got '{text}' with {twice[0]} more than once; name each number once")
    return numbers
