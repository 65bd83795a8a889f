"""The lines of a run folder as far as a page shows them: what is needed is checked, and what it does not know is let pass.

A run that is watched may be of a newer version, so unlike the readers of `gossamer.record` these allow further keys.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import ConfigError, DataError
from gossamer.network.links import Network, from_options
from gossamer.record.jsonl import short
from gossamer.report.reading.tail import open_record
from gossamer.settings.options import Count
from gossamer.settings.schema import RECORD, Records, parse_toml
from gossamer.version import __version__

__all__ = ["KINDS_OF_FILES", "RunFile", "line_of_kind", "run_file_of"]

_LARGEST_FILE = 1 << 24
_Round = Annotated[int, Field(ge=-1, lt=2**31)]
_Entry = Annotated[int, Field(ge=0, lt=2**31)]
_Index = Annotated[int, Field(ge=0, lt=2**20)]
_End = Annotated[int, Field(ge=-1, lt=2**20)]
_Size = Annotated[int, Field(ge=0, lt=2**50)]
_Seconds = Annotated[float, Field(ge=0, lt=1e12)]
_Figure = Annotated[float, Field(gt=-1e300, lt=1e300)]
_LOOSE: ConfigDict = {**RECORD, "extra": "ignore"}


@with_config({**RECORD, "extra": "allow"})
class _Metric(TypedDict):
    kind: str
    round: _Round
    worker: NotRequired[_Index]
    loss: NotRequired[_Figure | None]
    step: NotRequired[_Figure]
    tokens: NotRequired[_Figure]


@with_config(_LOOSE)
class _Operation(TypedDict):
    kind: str
    sends: list[tuple[_Index, _Size]]


@with_config(_LOOSE)
class _Trace(TypedDict):
    round: _Entry
    worker: _Index
    ops: list[_Operation]


@with_config(_LOOSE)
class _Spent(TypedDict):
    round: _Entry
    worker: _Index
    network: str | None
    compute_s: _Seconds
    transfer_s: _Seconds
    waiting_for: dict[Annotated[str, Field(pattern=r"^(-1|[0-9]{1,7})$")], _Seconds]
    other_s: _Seconds
    end_s: _Seconds


@with_config(_LOOSE)
class _Begin(TypedDict):
    event: Literal["begin"]
    round: _Entry
    after: _Entry
    donor: _Index


@with_config(_LOOSE)
class _Exchanged(TypedDict):
    event: Literal["exchange", "round"]
    round: _Entry
    alive: list[_Index] | None
    missed: list[_Index]
    unsure: list[_Index]


@with_config(_LOOSE)
class _End_(TypedDict):
    event: Literal["end"]
    round: _Entry
    why: str


@with_config(_LOOSE)
class _Event(TypedDict):
    event: str
    round: _Round
    worker: NotRequired[_Index]
    source: NotRequired[_End]
    target: NotRequired[_End]
    bytes: NotRequired[_Size]
    start_s: NotRequired[float]
    end_s: NotRequired[float]


_RECORDS: dict[str, Records[Any]] = {
    "metrics": Records(_Metric),
    "trace": Records(_Trace),
    "seconds": Records(_Spent),
    "outcomes": Records(Annotated[_Begin | _Exchanged | _End_, Field(discriminator="event")]),
    "events": Records(_Event),
}
KINDS_OF_FILES = tuple(_RECORDS)
"""What the names of the files begin with that are followed."""


def line_of_kind(kind: str, line: bytes, where: str) -> dict[str, Any]:
    """A line of a file of this kind. Raises DataError, which names `where`, for a line that is none."""
    return _RECORDS[kind].parse(line, where)


@with_config({**RECORD, "extra": "allow"})
class _Loop(TypedDict):
    steps: Count
    local_steps: Count | Annotated[list[Count], Field(min_length=1)]


@with_config({**RECORD, "extra": "allow"})
class _Run(TypedDict):
    name: str
    workers: Annotated[int, Field(ge=1, le=1 << 20)]
    run: _Loop


_RUN = Records[_Run](_Run)


class RunFile(NamedTuple):
    """What pages, the terminal and status show of a run file."""

    name: str
    workers: int
    steps: int
    """Inner steps of a worker."""
    rounds: int
    method: str
    """The rule, server or pair rule."""
    topology: str | None
    kind: str
    """elastic, server, pair, no waiting or rounds."""
    networks: Mapping[str, Network]
    text: str


def run_file_of(path: Path) -> RunFile:
    """A run file as far as it is shown; unknown keys pass.

    Raises: DataError for a file without what is needed, with the version that looked for it; OSError and ValueError where it
        cannot be read.
    """
    descriptor = open_record(path)
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(_LARGEST_FILE).decode(errors="replace")
    try:
        document = parse_toml(text, f"'{path}'")
        run = _RUN.of(document, f"'{path}'")
        networks = {name: from_options(table) for name, table in _table(document, "network").items()}
    except (ConfigError, DataError) as error:
        raise DataError(
            f"{error}; gossamer {__version__} cannot show this run, perhaps another version wrote it"
        ) from None
    steps, loop = run["run"]["local_steps"], _table(document, "run")
    kind = next((kind for kind in ("server", "pair") if kind in document), "rounds")
    if kind == "rounds" and not loop.get("wait", True):
        kind = "no waiting"
    return RunFile(
        f"{run['name']:.80}",
        run["workers"],
        run["run"]["steps"],
        max(1, run["run"]["steps"] // (max(steps) if isinstance(steps, list) else steps)),
        _name(document, "rule" if kind in ("rounds", "no waiting") else kind) or kind,
        None if kind == "server" else _name(document, "topology"),
        "elastic" if loop.get("elastic") else kind,
        networks,
        text,
    )


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, Mapping):
        raise DataError(f"'{key}' is {short(value)} but must be a table")
    return value


def _name(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    found = value.get("name") if isinstance(value, Mapping) else value
    return f"{found:.80}" if isinstance(found, str) else None
