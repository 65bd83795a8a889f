"""What the server of a region and the global server tell each other, and how it is sent.

The region says hello and is welcomed with the global model. Then it writes letters, one after the other, and each has one answer:
a letter brings a report, asks for inner steps, or says that the region is done.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.clock.shares import Grant
from gossamer.errors import TransportError
from gossamer.finite import all_finite, must_be_finite
from gossamer.transport.contract import Turn
from gossamer.transport.sockets.stream import PUSH, START, Stream

__all__ = [
    "Answer",
    "Region",
    "RegionLetter",
    "Welcome",
    "read_answer",
    "read_letter",
    "read_report",
    "read_welcome",
    "regions_of",
]

_LIMIT = 1 << 60
_LIMIT_PHASES = 1 << 31


class Region(NamedTuple):
    """One region of a run."""

    number: int
    members: tuple[int, ...]
    """Its workers, in ascending order."""


def regions_of(places: Sequence[int]) -> list[Region]:
    """The regions of a run, from the region of each worker.

    >>> regions_of((0, 1, 0))[0].members
    (0, 2)
    """
    return [Region(k, tuple(i for i, place in enumerate(places) if place == k)) for k in range(max(places) + 1)]


class RegionLetter(NamedTuple):
    """From a region to the global server."""

    fragment: int
    """Of the report that comes with it; -1 without one."""
    begun: int
    """Inner steps that its workers have begun since it joined."""
    absorbed: int
    """Inner steps in what it has absorbed since."""
    done: bool
    """Whether nothing is left to train or to report."""
    phases: tuple[int, ...]
    """Local phases of each of its workers whose push it has absorbed."""
    message: Tensor | None = None
    """The report."""

    def send(self, stream: Stream, number: int) -> None:
        """Sends it as the letter of this number."""
        numbers = (self.fragment, self.begun, self.absorbed, int(self.done), *self.phases)
        stream.send(Turn(number, 0, PUSH), [torch.tensor(numbers, dtype=torch.int64)])
        if self.message is not None:
            stream.send(Turn(number, self.fragment, PUSH), [self.message])


class Answer(NamedTuple):
    """From the global server to a region."""

    grant: Grant
    x: Tensor | None = None
    """The global model of the fragment that was reported."""

    def send(self, stream: Stream, number: int, fragment: int) -> None:
        """Sends it as the answer to the letter of this number."""
        stream.send(Turn(number, 0, START), [torch.tensor(self.grant, dtype=torch.int64)])
        if self.x is not None:
            stream.send(Turn(number, fragment, START), [self.x])


class Welcome(NamedTuple):
    """From the global server to a region that joins."""

    key: int
    """Names this stay of the region in the records of both."""
    again: bool
    """Whether it was there before."""
    grant: Grant
    phases: tuple[int, ...]
    """Local phases of each of its workers that it had reported."""
    elapsed_us: int
    """Since the run began."""
    x: Tensor
    """The global model `[P]`, which its server begins from."""

    def send(self, stream: Stream) -> None:
        """Sends it."""
        numbers = (self.key, int(self.again), self.elapsed_us, *self.grant, *self.phases)
        stream.send(Turn(0, 0, START), [torch.tensor(numbers, dtype=torch.int64), self.x])


def read_letter(stream: Stream, number: int, members: int, fragments: int) -> RegionLetter:
    """The letter of this number, without the report that follows it. Raises TransportError when it is malformed."""
    (frame,) = stream.receive(Turn(number, 0, PUSH), [torch.empty(4 + members, dtype=torch.int64)])
    p, begun, absorbed, done, *phases = frame.tolist()
    sound = -1 <= p < fragments and 0 <= min(begun, absorbed) <= max(begun, absorbed) < _LIMIT
    if not sound or done not in (0, 1) or not 0 <= min(phases) <= max(phases) < _LIMIT_PHASES or (done and p >= 0):
        raise TransportError(
            f"{stream.name} sent a malformed letter, {frame.tolist()!s:.200}; run the same gossamer everywhere"
        )
    return RegionLetter(p, begun, absorbed, bool(done), tuple(phases))


def read_report(stream: Stream, number: int, letter: RegionLetter, spans: Sequence[tuple[int, int]]) -> RegionLetter:
    """The letter with its report, if it has one. Raises TransportError when it is not finite."""
    if letter.fragment < 0:
        return letter
    a, b = spans[letter.fragment]
    (message,) = stream.receive(Turn(number, letter.fragment, PUSH), [torch.empty(b - a, device="meta")])
    if not all_finite(message):
        raise TransportError(f"{stream.name} reported {b - a} numbers that are not all finite; lower inner.lr")
    return letter._replace(message=message)


def read_answer(stream: Stream, number: int, letter: RegionLetter) -> Answer:
    """The answer to this letter. Raises TransportError when it is malformed, TrainingError when not finite."""
    (frame,) = stream.receive(Turn(number, 0, START), [torch.empty(len(Grant._fields), dtype=torch.int64)])
    x = None
    if letter.message is not None:
        (x,) = stream.receive(
            Turn(number, letter.fragment, START), [torch.empty(letter.message.numel(), device="meta")]
        )
        must_be_finite({f"fragment {letter.fragment} of the global model": x})
    return Answer(_grant(frame.tolist()), x)


def read_welcome(stream: Stream, members: int, numel: int) -> Welcome:
    """The welcome. Raises TransportError when it is malformed, TrainingError when not finite."""
    like = [torch.empty(6 + members, dtype=torch.int64), torch.empty(numel, device="meta")]
    frame, x = stream.receive(Turn(0, 0, START), like)
    key, again, elapsed_us, steps, more, elsewhere, *phases = frame.tolist()
    numbers = (key, again, elapsed_us, *phases)
    if not 0 <= min(numbers) <= max(numbers) < _LIMIT or again > 1 or max(phases) >= _LIMIT_PHASES:
        raise TransportError(f"{stream.name} sent a malformed welcome; run the same gossamer everywhere")
    must_be_finite({"the global model": x})
    return Welcome(key, bool(again), _grant([steps, more, elsewhere]), tuple(phases), elapsed_us, x)


def _grant(numbers: Sequence[int]) -> Grant:
    steps, more, elsewhere = numbers
    if not 0 <= min(numbers) <= max(numbers) < _LIMIT or more > 1:
        raise TransportError(f"the global server granted {[*numbers]}; run the same gossamer everywhere")
    return Grant(steps, bool(more), elsewhere)
