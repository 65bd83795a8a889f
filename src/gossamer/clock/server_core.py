"""The decisions of a server, without input or output: no clock, no sockets, no threads and no training.

A driver passes each event (`join`, `push`, `leave`, and `tick` as time passes) with its time to the core, and carries out the
actions it returns. Virtual time (`gossamer.clock.server_loop`), real processes (`gossamer.run.served.server`) and the replay of
a real run (`gossamer.run.replay.served`) run the same core, so the same inputs give bitwise the same results. The
drivers differ in three things:

* Who spends the budget. A real worker may train one phase for each starting point it receives, so the core claims its steps
  when it sends one and returns them when the worker leaves. Over virtual time a worker claims them when a phase begins,
  because with overlap it begins phases without a reply from the server; the core has no budget there.
* Who counts a worker's steps. The core counts phases and steps of real workers itself (`counted`); with overlap only the
  worker knows on which starting point it trained, so over virtual time its own numbers count.
* When a window closes without its quorum, because no worker can push any more. With a budget the core knows who trains. Over
  virtual time only the agenda knows the messages in flight, so the driver calls `flush`.

Below a global server (`Regions`), over virtual time only, each region has a core. It returns a `RegionReport` when one is due,
and the driver calls `merge` when the global model arrives; one report per fragment is in flight at a time.

A push that was sent before its worker left still counts, and gets no reply. Connections deliver all messages before they
report a loss, except a connection that a newer one of the same worker replaces; the driver drops its remaining messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.asynchronous import ServerRule, Slack
from gossamer.clock.events import Update
from gossamer.clock.fragment import FragmentState, Push, RegionReport, StartingPoint, Waiting
from gossamer.clock.phases import Budget
from gossamer.errors import CheckpointError
from gossamer.layout import Layout
from gossamer.tree import leaves, must_fit, refill

WAITS = Slack()
"""The slack of a worker that waits for its reply, as real ones do."""


class Send(NamedTuple):
    """An action: send these starting points to a worker."""

    worker: int
    starts: dict[int, StartingPoint]
    """The starting points by fragment."""
    go: bool
    """Whether the worker may train another phase; False when the budget is spent."""
    phases: int
    """Local phases whose push the server has received from this worker."""
    absorbed_steps: int
    """Inner steps of all workers in the pushes that the server has absorbed."""


class CloseWindow(NamedTuple):
    """An action: call `tick` at this time, when the window of a fragment closes."""

    fragment: int
    at_s: float


ServerAction = Send | Update | CloseWindow | RegionReport
"""An action for the driver; it records an `Update`."""


class _Member(NamedTuple):
    """The server's record of one worker."""

    phases: int
    joins: int
    present: bool
    trains: bool


class _FragmentCopy(NamedTuple):
    outer: list[Tensor]
    updates: int
    waiting: list[Waiting]
    closes_s: float
    merged_updates: int
    reported: bool


class CoreState(NamedTuple):
    """The part of a checkpoint for a server over virtual time."""

    fragments: list[_FragmentCopy]
    members: list[_Member]
    seen: list[int]
    sent: list[tuple[int, int, int, int]]
    absorbed_steps: int
    refused: bool
    begun: int = 0
    """Inner steps of the budget that have begun, where it has one."""


class ServerCore:
    """The state of a server, and its actions for each input. Inputs come in the order of their times.

    Args:
        x: the initial parameters `[P]`; `layout` is theirs.
        spans: the fragments, as slices of x.
        local_steps: inner steps of each worker in a local phase.
        budget: the inner steps that the server hands out to workers; None where workers claim them themselves.
        expected_until_s: until this time a worker that has not joined yet counts as one that may still push.
    Cost: the rule's state, and the messages that wait.
    """

    def __init__(
        self,
        rule: ServerRule,
        x: Tensor,
        layout: Layout,
        spans: Sequence[tuple[int, int]],
        local_steps: Sequence[int],
        *,
        budget: Budget | None = None,
        expected_until_s: float = -math.inf,
    ) -> None:
        self.spans, self.absorbed_steps = spans, 0
        self._rule, self._budget, self._expected_until_s = rule, budget, expected_until_s
        self.layouts = [layout.slice(a, b) for a, b in spans]
        """The layout of each fragment."""
        self._fragments = [
            FragmentState(rule, x[a:b], part_layout) for (a, b), part_layout in zip(spans, self.layouts, strict=True)
        ]
        self._local_steps = [*local_steps]
        self._members = [_Member(0, 0, present=False, trains=False) for _ in local_steps]
        self._seen = set[int]()  # workers that joined since this core was made
        self._sent: dict[tuple[int, int], tuple[int, int]] = {}  # worker and fragment: updates and phases at that time
        self._refused = False

    # Inputs

    def join(self, worker: int) -> list[ServerAction]:
        """A worker joins or returns, and needs starting points of all fragments."""
        self._note(worker, present=True, joins=self.joins(worker) + 1)
        self._seen.add(worker)
        return self._send(worker, range(len(self._fragments)))

    def push(
        self, worker: int, push: Push, now_s: float, *, reply: bool = True, slack: Slack = WAITS
    ) -> list[ServerAction]:
        """A push has arrived; `reply` is False when its worker has left since."""
        fragment = self._fragments[push.fragment]
        self._note(worker, phases=self.phases(worker) + 1, trains=False)
        fragment.waiting.append(Waiting(worker, push, reply, slack, now_s))
        return self._absorb(push.fragment, now_s) if self._rule.window is None else self._plan(now_s)

    def leave(self, worker: int, now_s: float) -> list[ServerAction]:
        """A worker has left; its current phase is lost."""
        for fragment in self._fragments:
            fragment.waiting = [one._replace(reply=one.reply and one.worker != worker) for one in fragment.waiting]
        if self._members[worker].trains and self._budget is not None:
            self._budget.give_back(self._local_steps[worker])
        self._note(worker, present=False, trains=False)
        return self._plan(now_s)  # fewer present workers need a smaller quorum

    def merge(self, p: int, x: Tensor) -> None:
        """The global server has answered the report of a fragment with its model of it."""
        fragment, regions = self._fragments[p], self._rule.regions
        assert regions is not None
        fragment.state = regions.merge(fragment.state, x)
        fragment.merged_updates, fragment.reported = fragment.updates, False

    def tick(self, now_s: float) -> list[ServerAction]:
        """Closes at most one window that is due; call it until it returns nothing."""
        actions = self._plan(now_s)
        if self._budget is not None and not self._expects_pushes(now_s):
            actions += self.flush(now_s)
        for p, fragment in enumerate(self._fragments):
            if fragment.waiting and now_s >= fragment.closes_s:
                return [*actions, *self._absorb(p, now_s)]
        return actions

    def flush(self, now_s: float) -> list[ServerAction]:
        """Handles that no worker can push any more: windows with a push close at the next ticks, and the rest is reported."""
        actions: list[ServerAction] = []
        for p, fragment in enumerate(self._fragments):
            if fragment.waiting:
                fragment.closes_s = min(fragment.closes_s, now_s)
            else:
                actions += fragment.report(p, 0)
        return actions

    # Queries of drivers

    @property
    def is_finished(self) -> bool:
        """Whether the budget is spent or a phase was refused, and all pushes have been absorbed."""
        if self._budget is None or any(member.trains for member in self._members):
            return False
        spent = self._refused or self._budget.begun >= self._budget.steps
        return spent and not any(fragment.waiting for fragment in self._fragments)

    def is_due(self, now_s: float) -> bool:
        """Whether `tick` would act at this time."""
        windows = [fragment for fragment in self._fragments if fragment.waiting]
        if not windows or self._rule.window is None:
            return False
        if self._budget is not None and not self._expects_pushes(now_s):
            return True
        quorum = min(self._rule.window.quorum, self._count(lambda member: member.present, now_s))
        return any(
            now_s >= one.closes_s or (one.closes_s == math.inf and len(one.waiting) >= quorum) for one in windows
        )

    @property
    def next_closing_s(self) -> float:
        """When the next window closes."""
        return min(fragment.closes_s for fragment in self._fragments)

    def joins(self, worker: int) -> int:
        """How often a worker has joined the run."""
        return self._members[worker].joins

    def phases(self, worker: int) -> int:
        """Local phases of a worker whose push has arrived."""
        return self._members[worker].phases

    def is_present(self, worker: int) -> bool:
        """Whether a worker has joined, and has not left since."""
        return self._members[worker].present

    def seen(self, worker: int) -> bool:
        """Whether a worker has joined since this core was made or restored."""
        return worker in self._seen

    def expected_push(self, worker: int) -> tuple[int, int] | None:
        """Phase and fragment of the push that the server expects from the worker; None when it expects none."""
        member = self._members[worker]
        return (member.phases, member.phases % len(self.spans)) if member.trains else None

    def counted(self, worker: int, fragment: int, message: Tensor, step_tokens: int) -> Push:
        """A message as a push, with the steps its worker must have taken since the server sent it a starting point."""
        updates, phases = self._sent[worker, fragment]
        steps = (self.phases(worker) + 1 - phases) * self._local_steps[worker]
        return Push(fragment, message, updates, steps * step_tokens, steps)

    def model(self) -> Tensor:
        """The server's parameters `[P]`."""
        return torch.cat([fragment.state.x for fragment in self._fragments])

    def states(self) -> list[Any]:
        """The state of the rule for each fragment."""
        return [fragment.state for fragment in self._fragments]

    def state(self) -> dict[str, Any]:
        """The server's part of a checkpoint; pushes that wait and phases in progress are lost with a server."""
        return {
            "x": self.model(),
            "outer": [leaf for state in self.states() for leaf in leaves(state)],
            "updates": [fragment.updates for fragment in self._fragments],
            "phases": [member.phases for member in self._members],
            "joins": [member.joins for member in self._members],
            "steps": self.absorbed_steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint, with nobody present. Raises CheckpointError when it does not fit."""
        try:
            must_fit(state["outer"], [leaf for state_here in self.states() for leaf in leaves(state_here)])
            supply = iter(state["outer"])
            for fragment, updates in zip(self._fragments, state["updates"], strict=True):
                fragment.state, fragment.updates = refill(fragment.state, supply), int(updates)
            for worker, phases, joins in zip(range(len(self._members)), state["phases"], state["joins"], strict=True):
                self._note(worker, phases=int(phases), joins=int(joins))
            self.absorbed_steps = int(state["steps"])
            if self.absorbed_steps < 0 or float(state["time_s"]) < 0:
                raise ValueError(f"steps = {self.absorbed_steps}, time_s = {state['time_s']}")
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of the server does not fit this run: {error!r:.200}; resume with the run file that wrote it"
            ) from None
        if self._budget is not None:
            self._budget.begun = self.absorbed_steps

    def whole_state(self) -> CoreState:
        """The complete state, including waiting pushes and phases in progress."""
        fragments = [
            _FragmentCopy(leaves(f.state), f.updates, f.waiting, f.closes_s, f.merged_updates, f.reported)
            for f in self._fragments
        ]
        sent = [(*whom, *when) for whom, when in self._sent.items()]
        begun = 0 if self._budget is None else self._budget.begun
        seen, members = sorted(self._seen), [*self._members]
        return CoreState(fragments, members, seen, sent, self.absorbed_steps, self._refused, begun)

    def restore_whole(self, state: CoreState) -> None:
        """Continues from a complete state. Raises ValueError when it does not fit."""
        for fragment, saved in zip(self._fragments, state.fragments, strict=True):
            must_fit(saved.outer, leaves(fragment.state))
            for one in saved.waiting:
                must_fit([one.push.message], [fragment.start().x])
            fragment.state = refill(fragment.state, saved.outer)
            _, fragment.updates, fragment.waiting, fragment.closes_s, fragment.merged_updates, fragment.reported = saved
        if len(state.members) != len(self._members):
            raise ValueError(f"{len(state.members)} workers, of {len(self._members)}")
        self._members = [*state.members]
        self._seen, self.absorbed_steps, self._refused = set(state.seen), state.absorbed_steps, state.refused
        self._sent = {(worker, p): (updates, phases) for worker, p, updates, phases in state.sent}
        if self._budget is not None:
            self._budget.begun = state.begun

    # Decisions

    def _plan(self, now_s: float) -> list[ServerAction]:
        """Lets each window close after the grace period once its quorum is reached."""
        window, actions = self._rule.window, list[ServerAction]()
        if window is None:
            return actions
        quorum = min(window.quorum, self._count(lambda member: member.present, now_s))
        for p, fragment in enumerate(self._fragments):
            if fragment.waiting and fragment.closes_s == math.inf and len(fragment.waiting) >= quorum:
                fragment.closes_s = now_s + min(
                    window.grace_s(one.slack, now_s - one.arrived_s) for one in fragment.waiting
                )
                actions.append(CloseWindow(p, fragment.closes_s))
        return actions

    def _expects_pushes(self, now_s: float) -> bool:
        return self._count(lambda member: member.trains, now_s) > 0

    def _count(self, counts: Callable[[_Member], bool], now_s: float) -> int:
        """The number of workers for which `counts` holds, plus those expected to join."""
        starting = now_s < self._expected_until_s
        return sum(counts(member) or (starting and i not in self._seen) for i, member in enumerate(self._members))

    def _absorb(self, p: int, now_s: float) -> list[ServerAction]:
        fragment, regions = self._fragments[p], self._rule.regions
        absorbed, ages = fragment.absorb()
        self.absorbed_steps += sum(self._local_steps[one.worker] for one in absorbed)
        update = Update(now_s, p, tuple(one.worker for one in absorbed), ages)
        replies = [action for one in absorbed if one.reply for action in self._send(one.worker, range(p, p + 1))]
        return [update, *replies, *([] if regions is None else fragment.report(p, regions.every))]

    def _send(self, worker: int, parts: range) -> list[ServerAction]:
        starts, phases = {p: self._fragments[p].start() for p in parts}, self.phases(worker)
        self._sent.update({(worker, p): (start.updates, phases) for p, start in starts.items()})
        trains = self._budget is None or self._budget.claim(self._local_steps[worker])
        self._note(worker, trains=trains)
        self._refused |= not trains
        return [Send(worker, starts, trains, phases, self.absorbed_steps)]

    def _note(self, worker: int, **changes: Any) -> None:
        self._members[worker] = self._members[worker]._replace(**changes)
