"""Asynchronous training over virtual time: every local phase and message is an event; workers differ in speed and link.

Three loops share one event queue and `gossamer.clock.phases.Phases`, and differ in whom a worker waits for:

* `ServerRun`: workers push to a server, or to that of their region, and fetch from it, with any of
  `gossamer.asynchronous.SERVERS`.
* `PairRun`: pairs of workers meet at random times, with any of `gossamer.asynchronous.PAIRS`.
* `GossipRun`: workers gossip by a rule of `gossamer.rules` with the latest messages of their peers, without waiting.

The code of one worker is separate: real processes and replays run the same `ServerWorker`, `PairWorker` and
`GossipWorker`.

A run is a pure function of the options and the seed: events at the same time are ordered by kind, then by worker. Messages on
a link do not share its bandwidth. Virtual time affects the result, because it decides which messages are late, so a run
belongs to one network and cannot be priced on another.
"""

from gossamer.clock.events import Absence, Away, EventsConfig, Phase, Record, Relay, Transfer, Update
from gossamer.clock.gossip_loop import GossipRun
from gossamer.clock.pair_loop import PairRun
from gossamer.clock.phases import Learner, LoopOptions, Report
from gossamer.clock.server_loop import ServerRun
from gossamer.record.logs.seconds import SERVER

__all__ = [
    "SERVER",
    "Absence",
    "Away",
    "EventsConfig",
    "GossipRun",
    "Learner",
    "LoopOptions",
    "PairRun",
    "Phase",
    "Record",
    "Relay",
    "Report",
    "ServerRun",
    "Transfer",
    "Update",
]
