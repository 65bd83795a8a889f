"""A film: a visitor's actions and the recorded rounds, as lines of JSON; read and shown without torch.

The first line describes the film, and each further line is a round. The film can be reproduced from the actions in its
lines and the seed.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, with_config
from typing_extensions import TypedDict

from gossamer.errors import DataError
from gossamer.record.jsonl import json_line
from gossamer.record.whole_files import atomic_write
from gossamer.run.play.actions import LOCAL_STEPS, METHODS, MOMENTA, SIDES, SLOWER, WORKERS, Action, action_of
from gossamer.settings.schema import RECORD, Records

MOST_ROUNDS = 5_000
_MOST_BYTES = 1 << 25
_Worker = Annotated[int, Field(ge=0, lt=WORKERS)]
_Workers = Annotated[tuple[_Worker, ...], Field(max_length=WORKERS)]
_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Text = Annotated[str, Field(max_length=400)]
_Eight = Field(min_length=WORKERS, max_length=WORKERS)


@with_config(RECORD)
class Head(TypedDict):
    """The description of a film."""

    film: Literal[1]
    """The version of this format."""
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    gossamer: _Text
    torch: _Text
    text: _Text
    """The fingerprint of the text that is trained on."""
    parameters: Annotated[int, Field(ge=1, lt=2**40)]
    payload_bytes: Annotated[int, Field(ge=1, lt=2**50)]
    """Of the parameters, as a worker sends them."""
    uplink_bps: Annotated[float, Field(ge=1, le=1e18)]
    """Of a worker that is not slow."""
    step_s: _Seconds
    """Of an inner step."""


@with_config(RECORD)
class Frame(TypedDict):
    """A round: the actions before it, its conditions, and its results."""

    round: Annotated[int, Field(ge=0, lt=MOST_ROUNDS)]
    actions: Annotated[tuple[tuple[Any, ...], ...], Field(max_length=64)]
    told: Annotated[tuple[_Text, ...], Field(max_length=64)]
    """The effects of the actions, in sentences."""
    method: Annotated[str, Field(pattern=f"^({'|'.join(METHODS)})$")]
    local_steps: Annotated[int, Field(ge=1, le=1000)]
    momentum: Annotated[float, Field(ge=0, lt=1)] | None
    alive: _Workers
    slow: _Workers
    cut: bool
    there: _Workers
    """The workers that trained in this round; the others are dead or wait."""
    mean: _Workers
    """The participants of a mean."""
    pairs: Annotated[tuple[tuple[_Worker, _Worker], ...], Field(max_length=64)]
    """The pairs that exchanged, the lower number first."""
    sent_bytes: Annotated[int, Field(ge=0, lt=2**50)]
    """Bytes sent per worker, averaged over those that trained."""
    seconds: Annotated[tuple[tuple[_Seconds, _Seconds, _Seconds, _Worker | None, _Seconds] | None, ...], _Eight]
    """For each worker its start, and seconds computing, waiting, mostly for which peer, and in transfer; null for the dead."""
    clock_s: _Seconds
    """The latest clock of any worker."""
    loss: float | None
    """Validation loss of the mean of those that trained, in nats per token; null if none did."""
    losses: Annotated[tuple[float | None, ...], _Eight]
    """Of each that trained."""
    disagreement: _Seconds | None
    """Root mean square distance from their mean, per parameter."""
    places: Annotated[tuple[tuple[float, float], ...], _Eight]
    """The parameters of each worker, seen in the plane in which they differ most; the mean is at zero, units as of
    `disagreement`."""
    says: _Text
    """A sentence about the round."""


_HEAD, _FRAME = Records[Head](Head), Records[Frame](Frame)


class Tempo(NamedTuple):
    """The display time of a round: a share of its priced seconds, within limits, so that waiting is visible."""

    share: float = 0.35
    least_s: float = 0.35
    most_s: float = 3.0

    def shown_s(self, priced_s: float) -> float:
        """Seconds on the screen.

        >>> [Tempo().shown_s(priced_s) for priced_s in (0.1, 2.0, 60.0)]
        [0.35, 0.7, 3.0]
        """
        return min(self.most_s, max(self.least_s, self.share * priced_s))


TEMPO = Tempo()


class Film(NamedTuple):
    """What was seen."""

    head: Head
    frames: Sequence[Frame]

    @property
    def actions(self) -> list[list[Action]]:
        """The actions before each round."""
        return [[action_of([*one]) for one in frame["actions"]] for frame in self.frames]


def write_film(file: Path, film: Film) -> None:
    """Writes a film atomically. Raises: DiskError."""
    atomic_write(file, film_lines(film))


def film_lines(film: Film) -> bytes:
    """A film in its file format."""
    return "".join(map(json_line, [film.head, *film.frames])).encode()


def read_film(file: Path) -> Film:
    """The film of a file. Raises: DataError for a file that is missing, too large, or invalid."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise DataError(
                f"'{file}' has {file.stat().st_size:,} bytes and a film at most {_MOST_BYTES:,}; give one of gossamer play"
            )
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            f"the film '{file}' cannot be read ({error.strerror}); give a file that gossamer play --record wrote"
        ) from None
    if len(lines) < 2:
        raise DataError(
            f"'{file}' has {len(lines)} lines, and a film has at least 2; give a file of gossamer play --record"
        )
    head = _HEAD.parse(lines[0], f"{file}:1")
    frames = [_FRAME.parse(line, f"{file}:{number}") for number, line in enumerate(lines[1:], 2)]
    if [frame["round"] for frame in frames] != [*range(len(frames))]:
        raise DataError(
            f"'{file}' does not have the rounds 0 to {len(frames) - 1} one after the other; record it again"
        )
    film = Film(head, frames)
    try:
        _ = film.actions
    except ValueError as error:
        raise DataError(f"'{file}' has an action that is none ({error}); record it again") from None
    return film


def film_contents(head: Head, frames: Iterable[Frame], *, live: bool) -> dict[str, Any]:
    """The contents of a film's page: the film and labels."""
    return {
        "live": live,
        "head": head,
        "frames": [*frames],
        "workers": WORKERS,
        "sides": [sorted(side) for side in SIDES],
        "slower": SLOWER,
        "methods": [{"key": key, "name": name} for key, (name, _) in METHODS.items()],
        "local_steps": LOCAL_STEPS,
        "momenta": MOMENTA,
        "tempo": TEMPO._asdict(),
    }
