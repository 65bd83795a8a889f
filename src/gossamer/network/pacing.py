"""The choice of inner steps per worker, so that all workers finish sending together.

Worker i computes a step in t_i seconds and sends for C_i seconds in a round, so it finishes h steps after `h·t_i + C_i`.
The one that would finish first with the full H steps sets the cycle of all, and no worker waits:

    T = min_j (H·t_j + C_j);    H_i = clamp(⌊(T - C_i) / t_i⌋, 1, H)

`fitting_steps` computes this from known seconds, of a network file or a measurement. A `Pacer` follows the seconds that are
measured during a run: workers send each other small notes with their compute speed and the arrival rates of messages,
without blocking.

C_i counts sending only. A slow downlink delays the round of every worker that sends to it, whatever the receiver does, so
fewer local steps there would only lose steps (`tests/network/test_pacing.py` measures this).
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gossamer.network.links import Floats, Links, Network, links_of
from gossamer.record.logs.trace import Operation

ROUNDS = 8
"""Number of rounds that a measurement looks back."""
SLACK_STEPS, SLACK = 0.25, 0.05
"""Tolerated deviation before the steps change, in steps and as a share of the steps."""
MOST_NOTE_BYTES = 1 << 20


class Pace(NamedTuple):
    """How fast a worker is."""

    step_s: float
    """Seconds of an inner step, above 0."""
    exchange_s: float = 0.0
    """Seconds that it sends in a round, from when it is ready."""


def cycle_s(pace: Pace, steps: float, hidden: float = 0.0) -> float:
    """Seconds of a round of `steps` inner steps.

    Args: `hidden` is the share of the steps that run while messages are in flight, in [0, 1].

    >>> cycle_s(Pace(1.0, 5.0), 30), cycle_s(Pace(1.0, 5.0), 30, hidden=0.5), cycle_s(Pace(1.0, 20.0), 30, hidden=0.5)
    (35.0, 30.0, 35.0)
    """
    return max(steps * pace.step_s, (1.0 - hidden) * steps * pace.step_s + pace.exchange_s)


def fitting_steps(pace: Pace, others: Iterable[Pace], full_steps: int, hidden: float = 0.0) -> float:
    """Inner steps with which a worker finishes when the fastest finishes `full_steps`; neither rounded nor bounded.

    If even one step is too many, the number that takes as long as that one.

    >>> healthy, slow = Pace(1.0, 5 / 3), Pace(1.0, 50 / 3)
    >>> [whole_steps(fitting_steps(own, [healthy, slow], 30), 30) for own in (healthy, slow)]
    [30, 15]
    """
    together_s = min(cycle_s(one, full_steps, hidden) for one in (pace, *others))
    limit_s = max(together_s, cycle_s(pace, 1, hidden))
    if hidden == 1.0:
        return limit_s / pace.step_s
    return min(limit_s, (limit_s - pace.exchange_s) / (1.0 - hidden)) / pace.step_s


def whole_steps(steps: float, full_steps: int) -> int:
    """Whole steps, at least one and at most `full_steps`."""
    # 31.666666666666668 - 50/3 is 14.999999999999998 in floats; a number that is whole up to rounding counts as whole.
    return min(max(math.floor(steps + 1e-9 * full_steps), 1), full_steps)


def links_at(network: Network, workers: int, at_s: float) -> Links:
    """The links of a network at a time of the run."""
    links, names = links_of(network, workers), list(network.sites)
    columns = ("uplink_bps", "downlink_bps"), ("site_uplink_bps", "site_downlink_bps")
    now = {name: getattr(links, name).copy() for some in columns for name in some}
    for change in sorted(network.changes, key=lambda change: change.at_s):
        if change.at_s <= at_s:
            shared = change.worker is None
            place = names.index(str(change.site)) if change.worker is None else change.worker
            for name in columns[shared]:
                now[name][place] = change.factor * getattr(links, name)[place]
    return links._replace(**now)


def stretches_of(network: Network, workers: int) -> list[tuple[float, Network]]:
    """The seconds at which each stretch without changes begins, and the network that stays the same in it."""
    stretches = list[tuple[float, Network]]()
    for at_s in sorted({0.0, *(change.at_s for change in network.changes)}):
        links = links_at(network, workers, at_s)
        up, down, site_up, site_down = (
            np.where(np.isinf(bps), bps, np.clip(bps, 1.0, 1e18)).tolist()  # as a network file bounds them
            for bps in (links.uplink_bps, links.downlink_bps, links.site_uplink_bps, links.site_downlink_bps)
        )
        sites = {
            name: replace(site, uplink_bps=site_up[k], downlink_bps=site_down[k])
            for k, (name, site) in enumerate(network.sites.items())
        }
        now = replace(network, uplink_bps=tuple(up), downlink_bps=tuple(down), sites=sites, changes=())
        if not stretches or now != stretches[-1][1]:
            stretches.append((at_s, now))
    return stretches


def uplinks_bps(links: Links) -> Floats:
    """The uplink rate of each worker, `[workers]`; the workers of a site share its link evenly."""
    together = np.bincount(links.site, minlength=len(links.site_uplink_bps))
    return np.minimum(links.uplink_bps, (links.site_uplink_bps / np.maximum(together, 1))[links.site])


def first_leg_bytes(operations: Iterable[Operation], there: Callable[[int], float] = lambda fragment: 0.5) -> float:
    """Bytes that a worker sends as soon as it is ready, without the sums that the owners of a mean send back later.

    Args: `there` is the share of a mean's bytes that goes to the owners, by fragment; half where both legs are equal.
    """
    sent = 0.0
    for operation in operations:
        sent += operation.sent_bytes * (there(operation.fragment) if operation.kind == "mean" else 1)
    return sent


# --- what is measured -----------------------------------------------------------------------------------------------


class PaceNote(NamedTuple):
    """A worker's measurements of its last rounds, sent to the others."""

    step_s: float
    sent_bytes: float
    """As `first_leg_bytes`, in a round in which it sends."""
    uplinks_bytes_per_s: Mapping[int, float]
    """By sender, the fastest rate at which its messages arrived here, times the messages that it sent at once."""

    @property
    def text(self) -> str:
        """The note for the board."""
        return json.dumps([self.step_s, self.sent_bytes, sorted(self.uplinks_bytes_per_s.items())])


def note_of(text: bytes, n: int) -> PaceNote | None:
    """The note of one of n workers; None for anything malformed.

    >>> note_of(PaceNote(0.5, 1e6, {2: 4e5}).text.encode(), n=3)
    PaceNote(step_s=0.5, sent_bytes=1000000.0, uplinks_bytes_per_s={2: 400000.0})
    >>> note_of(b"[0.5, -1, []]", n=3)
    """
    try:
        match json.loads(text) if len(text) <= MOST_NOTE_BYTES else None:
            case [step_s, sent_bytes, [*links]] if _within(step_s, 1e-12, 1e9) and _within(sent_bytes, 0.0, 2.0**60):
                seen = {j: rate for j, rate in links if isinstance(j, int) and 0 <= j < n and _within(rate, 1e-6, 1e18)}
                return PaceNote(step_s, sent_bytes, seen) if len(seen) == len(links) else None
    except (ValueError, TypeError, RecursionError):
        pass
    return None


def paces_of(notes: Sequence[PaceNote]) -> list[Pace]:
    """The pace of each worker, from one note of each.

    An uplink is at least as fast as the fastest message that passed it; a slower one was held up by the receiver. So a slow
    downlink of one receiver does not count against the sender. A worker whose messages were not timed counts as sending
    in no time.
    """
    paces = []
    for i, note in enumerate(notes):
        fastest = max(other.uplinks_bytes_per_s.get(i, 0.0) for other in notes)
        paces.append(Pace(note.step_s, note.sent_bytes / fastest if fastest else 0.0))
    return paces


class Pacer:
    """Decides how many inner steps one worker takes, from its own seconds and the notes of the others.

    Seconds of a step and bytes of a round are medians over the last rounds; a link counts as fast as its fastest message.
    Steps change only after two rounds in which they were too many or too few by more than `SLACK_STEPS` and `SLACK`, to the
    nearer of the two fitting numbers. So the jitter of single rounds changes nothing, and at most that much of a round is lost.

    Args: `steps`, the initial ones; `hidden` as in `cycle_s`.
    """

    def __init__(self, worker: int, steps: int, full_steps: int, hidden: float = 0.0) -> None:
        self.worker, self.steps, self.full_steps, self.hidden = worker, steps, full_steps, hidden
        self.clock_s = 0.0
        """Seconds of all rounds so far that this worker computed or sent, without waiting."""
        self._rounds: deque[PaceNote] = deque(maxlen=ROUNDS)
        self._wanted: int | None = None
        """The number of steps that fitted in the last round, if it was another one."""

    def measured(self, step_s: float, sent_bytes: float, uplinks_bytes_per_s: Mapping[int, float]) -> PaceNote:
        """Adds the round that has ended; returns the note for the others."""
        self._rounds.append(PaceNote(max(step_s, 1e-9), sent_bytes, uplinks_bytes_per_s))
        seen: dict[int, float] = {}
        for note in self._rounds:
            for j, rate in note.uplinks_bytes_per_s.items():
                seen[j] = max(rate, seen.get(j, 0.0))
        own_rate = uplinks_bytes_per_s.get(self.worker, math.inf)
        self.clock_s += self.steps * step_s + sent_bytes / own_rate
        step_s = statistics.median(note.step_s for note in self._rounds)
        # Some topologies let a worker sit out a round.
        sent = [note.sent_bytes for note in self._rounds if note.sent_bytes]
        return PaceNote(step_s, statistics.median(sent) if sent else 0.0, seen)

    def decided(self, notes: Mapping[int, PaceNote], n: int) -> int:
        """Inner steps of the next round; unchanged while a note of one of the n workers is missing."""
        if len(notes) == n:
            paces = paces_of([notes[i] for i in range(n)])
            self._follow(fitting_steps(paces[self.worker], paces, self.full_steps, self.hidden))
        return self.steps

    def _follow(self, fits: float) -> None:
        now, wanted, before = self.steps, whole_steps(fits, self.full_steps), self._wanted
        slack = max(SLACK_STEPS, SLACK * now)
        # No slack just below the full number: otherwise the fastest worker could stay there, and no worker would take
        # all steps.
        if wanted == now or (now - slack <= fits < now + 1 + slack and wanted < self.full_steps):
            self._wanted = None
        elif before is None or (before > now) != (wanted > now):
            self._wanted = wanted
        else:
            self.steps, self._wanted = min(before, wanted, key=lambda steps: abs(steps - now)), None

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        rounds = [[note.step_s, note.sent_bytes, dict(note.uplinks_bytes_per_s)] for note in self._rounds]
        return {"steps": self.steps, "wanted": self._wanted, "clock_s": self.clock_s, "rounds": rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state. Raises KeyError, TypeError or ValueError for a malformed one."""
        steps, wanted = int(state["steps"]), state["wanted"]
        if not all(1 <= some <= self.full_steps for some in (steps, steps if wanted is None else wanted)):
            raise ValueError(f"{steps} local steps, then {wanted}, of {self.full_steps}")
        self.steps, self._wanted, self.clock_s = steps, wanted, float(state["clock_s"])
        self._rounds.clear()
        for step_s, sent_bytes, seen in state["rounds"]:
            links = {int(j): float(rate) for j, rate in seen.items()}
            self._rounds.append(PaceNote(float(step_s), float(sent_bytes), links))


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
