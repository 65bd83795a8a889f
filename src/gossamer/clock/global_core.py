"""The decisions of a global server above those of regions, without input or output."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous import PushInfo, ServerRule
from gossamer.finite import must_be_finite
from gossamer.layout import Layout
from gossamer.tree import leaves, must_fit, refill


class GlobalState(NamedTuple):
    """The part of a checkpoint for a global server; `sent` has a region, a fragment, and the number of updates at its
    last answer.
    """

    states: list[list[Tensor]]
    updates: list[int]
    sent: list[tuple[int, int, int]]


class GlobalCore:
    """The state of a global server, for each fragment; it answers each report at once.

    Args:
        rule: that of the global server, `Regions.rule`.
        x: the initial parameters `[P]`.
        spans: the fragments, as slices of x, with their layouts.
    Cost: the rule's state.
    """

    def __init__(
        self, rule: ServerRule, x: Tensor, spans: Sequence[tuple[int, int]], layouts: Sequence[Layout]
    ) -> None:
        self.spans, self._rule, self._layouts = spans, rule, layouts
        self._states = [rule.init(x[a:b]) for a, b in spans]
        self._updates = [0] * len(spans)
        self._sent: dict[tuple[int, int], int] = {}  # region and fragment: number of updates at its last answer

    def greet(self, region: int) -> Tensor:
        """A region joins: the global parameters `[P]`, which it begins from."""
        self._sent.update({(region, p): updates for p, updates in enumerate(self._updates)})
        return torch.cat([self._rule.greet(state) for state in self._states])

    def report(self, region: int, fragment: int, message: Tensor) -> Tensor:
        """A region's report of a fragment has arrived; returns the answer to it.

        Raises: TrainingError, and keeps the old state, when the new one is not finite.
        """
        age = self._updates[fragment] - self._sent.get((region, fragment), 0)
        arrival = PushInfo(region, age, 0, 0, self._layouts[fragment])
        state = self._rule.absorb(self._states[fragment], message, arrival)
        must_be_finite({f"the state of the global server after the report of region {region}": state})
        self._states[fragment] = state
        self._updates[fragment] += 1
        self._sent[region, fragment] = self._updates[fragment]
        return self._rule.greet(state)

    def state(self) -> GlobalState:
        """The state of the global server."""
        sent = [(region, p, updates) for (region, p), updates in self._sent.items()]
        return GlobalState([leaves(state) for state in self._states], self._updates, sent)

    def restore(self, state: GlobalState) -> None:
        """Continues from a state. Raises ValueError when it does not fit."""
        pairs = [*zip(self._states, state.states, strict=True)]
        for current, saved in pairs:
            must_fit(saved, leaves(current))
        if len(state.updates) != len(pairs):
            raise ValueError(f"updates of {len(state.updates)} fragments for {len(pairs)}")
        self._states, self._updates = [refill(current, saved) for current, saved in pairs], state.updates
        self._sent = {(region, p): updates for region, p, updates in state.sent}

    def model(self) -> Tensor:
        """The global parameters `[P]`."""
        return torch.cat([state.x for state in self._states])

    def states(self) -> list[Any]:
        """The state of the rule for each fragment."""
        return self._states
