"""Members of a run that lie, each as `gossamer` with a few lines changed; they hold a listed key, or know the secret.

A liar that starts a run is `started_by` its launcher. The others join, and are commands themselves. Any of them, and an honest
member, can be `held` before a round, so that what a test is about happens in the same rounds on busy cores too.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import gossamer.cli
from gossamer.cli import main
from gossamer.record.packed import Snapshot
from gossamer.run.elastic.elastic_rounds import ElasticRounds
from gossamer.run.participant.life import Participant
from gossamer.transport.contract import Ticket
from gossamer.transport.elastic import ask
from gossamer.transport.elastic.closing import Closing
from gossamer.transport.processes.group import GroupTransport

FROM_ROUND = 5
"""A liar behaves until it is in this round."""
LIAR = 2
"""The worker that sends what cannot be decoded."""


def ahead(lied: Path, argv: Sequence[str]) -> int:
    """Says that it is two rounds further than it is, and answers requests with a view that has half of a surrogate pair in it.

    Args: `lied` is a file that it writes when it lies for at least the second time, a local phase after the first.
    """
    own = Closing._own_report.fget
    assert own is not None

    def lying(self: Closing) -> Any:
        report = own(self)
        if report.round < FROM_ROUND:
            return report
        if report.round > FROM_ROUND and report.ready:
            lied.touch()
        return report._replace(round=report.round + 2, last=None)

    Closing._own_report = property(lying)  # type: ignore[assignment]
    ask.membership_update = lambda entries: SimpleNamespace(decode=lambda: "\ud800")
    return main(argv)


def no_line(argv: Sequence[str]) -> int:
    """Gives away states without the hash of the rounds that were closed."""
    return _handing_over(argv, lambda state: {key: value for key, value in state.items() if key != "line"})


def bad_inner(argv: Sequence[str]) -> int:
    """Gives away states whose inner optimizer has moments of other shapes, which would be noticed at the next step."""

    def spoilt(state: Mapping[str, Any]) -> dict[str, Any]:
        moments = {k: {**one, "exp_avg": torch.zeros(3)} for k, one in state["inner"]["state"].items()}
        return {**state, "inner": {**state["inner"], "state": moments}}

    return _handing_over(argv, spoilt)


def _handing_over(argv: Sequence[str], spoilt: Callable[[Mapping[str, Any]], dict[str, Any]]) -> int:
    keep = Participant.keep

    def kept(self: Participant[Any], after: int, state: Mapping[str, Any]) -> Snapshot:
        return keep(self, after, spoilt(state) if after >= FROM_ROUND else state)

    Participant.keep = kept
    return main(argv)


def bytes_of_ones(argv: Sequence[str]) -> int:
    """Worker 2 of a run in rounds: all bytes of what it sends to owners of chunks are 255 from a round on."""
    post = GroupTransport.post

    def posted(self: GroupTransport, ticket: Ticket, peer: int, frames: list[Tensor]) -> None:
        if ticket.round >= FROM_ROUND and ticket.leg == 0:
            frames = [torch.full_like(t, 255) if t.dtype == torch.uint8 else t for t in frames]
        post(self, ticket, peer, frames)

    if int(os.environ.get("RANK", "-1")) == LIAR:
        GroupTransport.post = posted  # type: ignore[method-assign, assignment]
    return main(argv)


def wrong_clock(argv: Sequence[str]) -> int:
    """Worker 1, or any process that no launcher has started: its clock jumps by an hour at each look, there and back."""
    clock, hours = time.time, itertools.cycle((3600.0, -3600.0))
    if os.environ.get("RANK", "1") == "1":
        time.time = lambda: clock() + next(hours)
    return main(argv)


def held(until: Mapping[int, Path], work: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """A member that does not begin the local phase of a round before there is a file, and is `work` otherwise."""
    phase = ElasticRounds.phase

    def held_phase(self: ElasticRounds) -> None:
        while self.round in until and not until[self.round].exists() and not self.asked.is_set():
            time.sleep(0.02)
        phase(self)

    ElasticRounds.phase = held_phase
    return work(argv)


def started_by(liar: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """A launcher whose workers are such liars."""
    gossamer.cli.main = liar
    return main(argv)
