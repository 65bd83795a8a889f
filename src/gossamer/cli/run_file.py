"""What the verbs that train have in common: the run file with its overrides, the run folder, and the hint how to resume."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.run.config import RunConfig

__all__ = ["File", "Overrides", "resume_hint", "run_and_folder", "whole_numbers"]

File = Annotated[Path | None, Parameter(help="run file (TOML)")]
Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", metavar="KEY=VALUE", help="override one key, such as rule.lr=0.5; may be repeated"),
]


def run_and_folder(
    file: Path | None, overrides: tuple[str, ...], out: Path | None, resume: Path | None
) -> "tuple[RunConfig, Path]":
    """The run and its folder, from a run file with overrides or from the folder to resume.

    Raises: ConfigError when neither or both are given, or the run cannot work.
    """
    from gossamer.run.config import parse
    from gossamer.run.document import load, load_run, settings

    if resume is not None:
        if file is not None or overrides:
            raise ConfigError(
                f"--resume got '{resume}' and a run file or --set, but a resumed run keeps its settings; give --resume alone"
            )
        return parse(load_run(resume)), resume
    if file is None:
        raise ConfigError("no run file was given (got none, need one); name a TOML file, or --resume with a run folder")
    config = parse(load(file, settings([*overrides])))
    return config, out or Path("runs") / config.name


@contextlib.contextmanager
def resume_hint(folder: Path, *, resumable: bool = True) -> Iterator[None]:
    """Makes Ctrl-C print how to resume the run in this folder, if it is resumable and has a checkpoint."""
    try:
        yield
    except KeyboardInterrupt:
        if resumable and any(folder.glob("checkpoints/round-*/*.json")):
            raise KeyboardInterrupt(f"stopped; resume with --resume {folder}") from None
        raise


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as `--seeds 0,1,2`. Raises ConfigError for anything else."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} got '{text}'; write whole numbers with commas, such as 15,30") from None
