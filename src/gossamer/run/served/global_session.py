"""The global server above those of regions, without its connections: the core, its records and its checkpoints.

To the global server a region is what a worker is to its server. One that joins begins from the global model. What it had not
reported when it was lost is trained again, by itself once it is back or by the others, so every inner step counts once.
"""

import contextlib
import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.clock import Relay
from gossamer.clock.global_core import GlobalCore, GlobalState
from gossamer.clock.shares import Shares
from gossamer.errors import CheckpointError
from gossamer.layout import arrange, layout_of
from gossamer.run.bookkeeping.evaluate import Probe
from gossamer.run.config.run_file import RunConfig, digest
from gossamer.run.config.settle import WithServer
from gossamer.run.served.records import ServerRecords, Snapshots, open_files, restored
from gossamer.run.served.region_protocol import Answer, Region, RegionLetter, Welcome, regions_of
from gossamer.tree import nbytes

__all__ = ["GlobalReply", "GlobalSession", "LetterHeard", "open_global"]

log = logging.getLogger("gossamer")


class GlobalReply(NamedTuple):
    """What a region is told."""

    peer: int
    """Its number."""
    content: Welcome | Answer
    done: bool = False
    """Whether the region is told nothing more."""


class LetterHeard(NamedTuple):
    """A letter that has arrived."""

    letter: RegionLetter
    start_s: float


class GlobalSession:
    """The core of a global server with its records. Inputs come from one thread, with the seconds since the run began.

    Args: `stays` counts how often each region has joined, and `phases` are those of each worker that its region has reported.
    """

    def __init__(
        self, config: RunConfig, core: GlobalCore, shares: Shares, regions: Sequence[Region], stays: list[int],
        phases: list[int],
    ) -> None:  # fmt: skip
        self.config, self.core, self.shares, self.regions = config, core, shares, regions
        self._stays, self._phases = stays, phases
        self.records: ServerRecords

    def join(self, region: int, hello: Sequence[int], now_s: float, key: int | None = None) -> list[GlobalReply]:
        """A region joins, whose hello says nothing. Args: `key` is the one that its stay had, in a replay."""
        key = secrets.randbits(59) if key is None else key
        self.records.write("region", now_s, region=region, key=key)
        x, again = self.core.greet(region), self._stays[region] > 0
        self._stays[region] += 1
        phases = tuple(self._phases[i] for i in self.regions[region].members)
        return [GlobalReply(region, Welcome(key, again, self.shares.join(region), phases, int(now_s * 1e6), x))]

    def hear(self, region: int, content: LetterHeard, now_s: float) -> list[GlobalReply]:
        """A letter of a region has arrived, which is answered at once."""
        letter, start_s = content
        self.records.write(
            "done" if letter.done else "ask" if letter.message is None else "report", now_s, region=region
        )
        x = None
        if letter.message is not None:
            x = self.core.report(region, letter.fragment, letter.message)
        if letter.done or x is not None:
            self.shares.report(region, letter.absorbed)
            for worker, phases in zip(self.regions[region].members, letter.phases, strict=True):
                self._phases[worker] = phases
        reply = GlobalReply(region, Answer(self.shares.grant(region, letter.begun), x), letter.done)
        if letter.done:
            self.shares.leave(region)
        journal = self.records.journal
        journal.steps, journal.tokens = self.shares.reported, self.shares.reported * self.config.step_tokens
        if letter.message is not None:
            size = nbytes(letter.message)
            self.records.enter(Relay("report", start_s, now_s, region, letter.fragment, size))
        return [reply]

    def leave(self, region: int, reason: str | None, now_s: float) -> list[GlobalReply]:
        """A region is gone, because of a reason; None for one that is done."""
        if reason is not None:
            self.records.write("gone", now_s, region=region)
            log.warning("region %d is gone (%s); the others go on", region, reason)
            self.shares.leave(region)
        return []

    def tick(self, now_s: float) -> list[GlobalReply]:
        """Raises what validating or saving has raised."""
        self.records.check()
        return []

    @property
    def over(self) -> bool:
        """Whether all steps have been taken and reported."""
        return self.shares.over

    @property
    def next_closing_s(self) -> float:
        """When the next window closes."""
        return math.inf

    @property
    def progress(self) -> str:
        """How far the run is, in words."""
        return f"{self.shares.reported} of {self.shares.steps} inner steps are reported"

    def close(self, now_s: float) -> None:
        """The last round is over: validates and saves."""
        self.records.close(now_s)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; regions begin anew from it, so what they have not reported is lost."""
        states, updates, sent = self.core.state()
        return {
            "x": self.core.model(), "outer": states, "updates": [*updates], "sent": sent, "stays": [*self._stays],
            "phases": [*self._phases], "steps": self.shares.reported,
        }  # fmt: skip


@contextlib.contextmanager
def open_global(
    config: RunConfig, settled: WithServer, folder: Path, probe: Probe, start: int | None, *, replays: bool = False
) -> Iterator[GlobalSession]:  # fmt: skip
    """The session of a global server with its files. Raises CheckpointError and ConfigError.

    Args: `start` as in `gossamer.run.served.session.open_session`.
    """
    n, above, regions = config.workers, settled.rule.regions, regions_of(settled.regions)
    assert above is not None
    with open_files(config, folder, start, owner=n, replays=replays, regions=True) as files:
        saved = restored(config, folder, start)
        layout, spans = arrange(layout_of(probe.model), *config.fragments)
        core = GlobalCore(above.rule, probe.x.clone(), spans, [layout.slice(a, b) for a, b in spans])
        stays, phases, steps, begin_s = [0] * len(regions), [0] * n, 0, 0.0
        if saved:
            try:
                core.restore(GlobalState(saved["outer"], [*saved["updates"]], [*map(tuple, saved["sent"])]))
                stays, phases = [int(k) for k in saved["stays"]], [int(k) for k in saved["phases"]]
                steps, begin_s = int(saved["steps"]), float(saved["time_s"])
                if (len(stays), len(phases)) != (len(regions), n) or min(steps, begin_s, *stays, *phases) < 0:
                    raise ValueError(f"stays = {stays}, phases = {phases}, steps = {steps}")
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint of the global server does not fit this run: {error!r}; resume with the run file that wrote "
                    "it"
                ) from None
        local_steps = [settled.config.local_steps_of(i) for i in range(n)]
        # A region asks while it has a phase for each worker; until its next report it begins about `every` more.
        ahead = [
            sum(local_steps[i] for i in region.members) + above.every * max(local_steps[i] for i in region.members)
            for region in regions
        ]
        shares = Shares(n * config.run.steps, ahead, max(local_steps), earlier=steps)
        session = GlobalSession(config, core, shares, regions, stays, phases)
        snapshots = Snapshots(folder, probe, session.state)
        session.records = ServerRecords(config, files, snapshots, begin_s=begin_s, round=start or 0, steps=steps)
        session.records.write("serve", begin_s, workers=n, round=start or 0, digest=digest(config))
        if not start:
            session.records.begin()
        yield session
