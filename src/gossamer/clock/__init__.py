"""Training over virtual time: every local phase and every message is an event, and each worker has its own speed and link.

Three loops over one agenda and one `gossamer.clock.phases.Phases`, for three ways of not waiting for everybody:

* `ServerRun`: workers push to a server and fetch from it, with any of `gossamer.asynchronous.SERVERS`.
* `PairRun`: pairs of workers meet at random times, with any of `gossamer.asynchronous.PAIRS`.
* `GossipRun`: a rule of `gossamer.rules` that gossips, with whatever its peers published last and no waiting at all.

What happens is a pure function of the options and the seed: events at one time go by kind, then by worker. A link carries
each message as if it were alone. Virtual seconds decide the numbers here, since they decide who is late, so a run is made
for one network and cannot be priced on another.
"""

from gossamer.clock.events import SERVER, Absence, Phase, Record, Transfer, Update
from gossamer.clock.gossip import GossipRun
from gossamer.clock.pairs import PairRun
from gossamer.clock.phases import Learner, LoopOptions, Report
from gossamer.clock.server import ServerRun
from gossamer.clock.settings import Away, EventsConfig

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
    "Report",
    "ServerRun",
    "Transfer",
    "Update",
]
