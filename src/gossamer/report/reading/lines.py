"""The lines and the run file of a run folder for pages, the terminal and status.

Lines are parsed as by the strict readers of `gossamer.record`, with two differences: a watched run may be of a newer
version, so unknown keys are ignored; and damage is reported by the caller (`gossamer.report.reading.follow`) without
ending the reading.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import ConfigError, DataError
from gossamer.network.links import Network, from_options
from gossamer.record.folder import METRICS
from gossamer.record.jsonl import must_be_own, short
from gossamer.record.logs.events import EVENTS, writer_of
from gossamer.record.logs.outcomes import OUTCOMES
from gossamer.record.logs.seconds import SECONDS_LINES
from gossamer.record.logs.trace import TRACE_LINES
from gossamer.report.reading.tail import open_record
from gossamer.settings import over_time
from gossamer.settings.options import Count, NotNegative, Number, Positive
from gossamer.settings.over_time import Timetable
from gossamer.settings.schema import RECORD, Records, build, parse_toml
from gossamer.transport.keys import Peer
from gossamer.version import __version__

_LARGEST_FILE = 1 << 24

_KNOWN: dict[str, Callable[[bytes, str], Any]] = {
    "metrics": METRICS.known,
    "trace": TRACE_LINES.known,
    "seconds": SECONDS_LINES.known,
    "outcomes": OUTCOMES.known,
    "events": EVENTS.known,
}
KINDS_OF_FILES = tuple(_KNOWN)
"""The name prefixes of followed files."""


def kind_of(name: str) -> str:
    """The kind of a file, by its name.

    >>> kind_of("trace-003.jsonl"), kind_of("metrics.jsonl")
    ('trace', 'metrics')
    """
    return name.partition("-")[0].removesuffix(".jsonl")


def line_of_kind(kind: str, line: bytes, where: str, name: str, workers: int) -> dict[str, Any]:
    """A line of a file of this kind and name, of a run of `workers` workers, as parsed by the strict readers of
    `gossamer.record`.

    Raises: DataError, which names `where`, for an invalid line, or one of another file's worker.
    """
    parsed = _KNOWN[kind](line, where)
    must_be_own(where, name, writer_of(parsed, workers) if kind == "events" else parsed.get("worker"))
    return parsed


_Steps = Count | Annotated[list[Count], Field(min_length=1)]


@with_config(RECORD)
class _Shape(TypedDict):
    shape: Literal["qsr"]
    base: Count
    alpha: Positive


@with_config({**RECORD, "extra": "ignore"})
class _Inner(TypedDict):
    lr: Positive
    schedule: str
    warmup_steps: Number
    min_lr_ratio: NotNegative
    decay_fraction: Positive


_INNER = Records[_Inner](_Inner)


@with_config({**RECORD, "extra": "allow"})
class _Loop(TypedDict):
    steps: Count
    synchronous_steps: NotRequired[Number]
    local_steps: (
        _Steps | _Shape | Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,18}$")], _Steps], Field(min_length=1)]
    )


@with_config({**RECORD, "extra": "allow"})
class _Run(TypedDict):
    name: str
    workers: Annotated[int, Field(ge=1, le=1 << 20)]
    run: _Loop


_RUN = Records[_Run](_Run)


class RunFile(NamedTuple):
    """The parts of a run file shown by pages, the terminal and status."""

    name: str
    workers: int
    steps: int
    """Inner steps of a worker."""
    timetable: Timetable
    """The local steps of each round."""
    method: str
    """The rule, server or pair rule."""
    topology: str | None
    kind: str
    """elastic, server, pair, no waiting or rounds."""
    networks: Mapping[str, Network]
    text: str
    peers: Mapping[str, Peer]
    """The machines whose keys take part."""
    adapts: bool = False
    """Whether local steps follow measured seconds, so that `timetable` has only those of the start."""

    def step_s(self, seconds: Mapping[str, Any]) -> float | None:
        """Seconds of an inner step in a line of seconds; None where they were not measured, or the steps are not known."""
        if seconds["network"] is not None or self.adapts or not seconds["compute_s"]:
            return None
        return seconds["compute_s"] / self.timetable.at(seconds["round"]).of(seconds["worker"])

    @property
    def rounds(self) -> int:
        """Rounds of the run, at least one."""
        return max(1, self.timetable.rounds)

    def steps_before(self, round: int) -> int:
        """Inner steps of all workers before a round, at most."""
        return self.timetable.total_steps_before(self.workers, round)


def run_file_of(path: Path) -> RunFile:
    """The shown parts of a run file; unknown keys are ignored.

    Raises: DataError for a file without the needed keys, with this version; OSError and ValueError where it
        cannot be read.
    """
    descriptor = open_record(path)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_LARGEST_FILE)
    try:
        document = parse_toml(content, f"'{path}'")
        run = _RUN.of(document, f"'{path}'")
        networks = networks_in(document)
        peers = {name: build(Peer, _table(_table(document, "peers"), name)) for name in _table(document, "peers")}
    except (ConfigError, DataError) as error:
        raise DataError(
            f"{error}; gossamer {__version__} cannot show this run, perhaps another version wrote it"
        ) from None
    loop = _table(document, "run")
    given: Any = run["run"]["local_steps"]
    start, length = run["run"].get("synchronous_steps", 0), run["run"]["steps"]
    if isinstance(given, dict) and "shape" in given:
        rate = over_time.LearningRate(**_INNER.of(_table(document, "inner"), f"[inner] of '{path}'"))
        timetable = over_time.quadratic(given["base"], given["alpha"], rate, length, start)
    else:
        steps = over_time.local_steps_entries(tuple(given) if isinstance(given, list) else given)
        timetable = over_time.timetable_of(over_time.begun_alike(((0, steps[0][1]), *steps[1:]), start), length)
    kind = next((kind for kind in ("server", "pair") if kind in document), "rounds")
    if kind == "rounds" and not loop.get("wait", True):
        kind = "no waiting"
    return RunFile(
        f"{run['name']:.80}",
        run["workers"],
        run["run"]["steps"],
        timetable,
        _name(document, "rule" if kind in ("rounds", "no waiting") else kind) or kind,
        None if kind == "server" else _name(document, "topology"),
        "elastic" if loop.get("elastic") else kind,
        networks,
        content.decode("utf-8-sig"),
        peers,
        bool(loop.get("adapt")),
    )


def networks_in(document: Mapping[str, Any]) -> dict[str, Network]:
    """The networks that a run file declares, by name. Raises ConfigError and DataError for invalid ones."""
    return {name: from_options(table, f"network.{name}") for name, table in _table(document, "network").items()}


def _table(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, Mapping):
        raise DataError(f"'{key}' is {short(value)} but must be a table")
    return value


def _name(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    name = value.get("name") if isinstance(value, Mapping) else value
    return f"{name:.80}" if isinstance(name, str) else None
