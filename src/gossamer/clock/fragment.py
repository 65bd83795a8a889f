"""One fragment at a server: the state of its rule, and the pushes that wait for a window."""

import math
from typing import NamedTuple

from torch import Tensor

from gossamer.asynchronous import PushInfo, ServerRule, Slack
from gossamer.finite import must_be_finite
from gossamer.layout import Layout


class StartingPoint(NamedTuple):
    """The parameters of one fragment that a worker trains from, and the number of the server's updates to it so far."""

    x: Tensor
    updates: int


class Push(NamedTuple):
    """A pseudo-gradient of one fragment."""

    fragment: int
    message: Tensor
    updates: int
    """The updates the server had made when it sent the starting point."""
    tokens: int
    """Tokens the worker trained on since it received the starting point."""
    steps: int
    """Inner steps it took for them."""


class RegionReport(NamedTuple):
    """An action: send the progress of a region's server to the global one, and call `merge` with its answer."""

    fragment: int
    message: Tensor


class Waiting(NamedTuple):
    """A push that waits for its window to close."""

    worker: int
    push: Push
    reply: bool  # whether its worker waits for the reply
    slack: Slack
    arrived_s: float


class FragmentState:
    """The server's state of one fragment: the rule's state, the number of updates, and the pushes that wait."""

    def __init__(self, rule: ServerRule, x: Tensor, layout: Layout) -> None:
        self.rule, self.layout = rule, layout
        self.state = rule.init(x)
        self.updates = 0
        self.waiting: list[Waiting] = []
        self.closes_s = math.inf
        self.merged_updates = 0
        """Updates up to the last merge."""
        self.reported = False
        """Whether a report is in flight."""

    def start(self) -> StartingPoint:
        """The starting point for a worker now."""
        return StartingPoint(self.rule.greet(self.state), self.updates)

    def absorb(self) -> tuple[list[Waiting], tuple[int, ...]]:
        """Makes one update from all pushes that wait, in ascending order of their workers; returns them and their ages.

        Raises: TrainingError, and keeps the old state, when the new one is not finite.
        """
        absorbed, self.waiting, self.closes_s = sorted(self.waiting, key=lambda one: one.worker), [], math.inf
        infos = [
            PushInfo(worker, self.updates - push.updates, push.tokens, push.steps, self.layout)
            for worker, push, *_ in absorbed
        ]
        message, oldest = absorbed[0].push.message, max(infos, key=lambda info: info.age)
        if self.rule.window is not None:
            message = self.rule.window.merge([one.push.message for one in absorbed], infos)
        state = self.rule.absorb(self.state, message, oldest)
        workers = ", ".join(str(one.worker) for one in absorbed)
        must_be_finite({f"the state of the server after what worker {workers} pushed": state})
        self.state = state
        self.updates += 1
        return absorbed, tuple(info.age for info in infos)

    def report(self, p: int, every: int) -> list[RegionReport]:
        """The report of this fragment, number `p`, if none is in flight and at least `every` updates were made since
        the last merge.

        Args: `every` = 0 reports any updates not yet reported.
        """
        if self.rule.regions is None or self.reported or self.updates - self.merged_updates < every:
            return []
        state, message = self.rule.regions.tell(self.state)
        if every == 0 and not message.any():
            return []
        self.state, self.reported = state, True
        return [RegionReport(p, message)]
