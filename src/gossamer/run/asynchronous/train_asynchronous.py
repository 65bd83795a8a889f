"""Real processes that wait for nobody: `gossamer train` for gossip without waiting and for workers that meet in pairs.

They find each other as the workers of an elastic run do, and go on as these do when one dies, hangs, leaves or comes back. What
was heard and who met is on record (`gossamer.record.logs.order`), from which `gossamer.run.replay.asynchronous` computes the
run again.
"""

from pathlib import Path

from gossamer.run.asynchronous.async_state import OwnState
from gossamer.run.asynchronous.gossip_process import GossipParticipant
from gossamer.run.asynchronous.pair_process import PairParticipant
from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.config.resolved import InPairs, ResolvedRun
from gossamer.run.participant.life import take_part


def train_asynchronous(config: ResolvedRun, folder: Path, *, join: str | None = None, resume: Resume = False) -> None:
    """Trains one worker of a run that waits for nobody, see `take_part`.

    Each worker of a run that starts goes on from its own newest sound checkpoint, or else from the state of another.
    Cost: two models with their outer and inner state, one of them for newcomers, the gradients and one message.
    """
    kind = PairParticipant if isinstance(config.method, InPairs) else GossipParticipant
    take_part(config, folder, kind, OwnState(config, folder), join=join, resume=resume)
