"""Asynchronous runs on real processes: `gossamer train` for asynchronous gossip and pairwise meetings.

Rendezvous and fault tolerance are those of elastic runs. Received messages and meetings are recorded
(`gossamer.record.logs.order`), from which `gossamer.run.replay.asynchronous` replays the run.
"""

from pathlib import Path

from gossamer.run.asynchronous.async_state import OwnState
from gossamer.run.asynchronous.gossip_process import GossipParticipant
from gossamer.run.asynchronous.pair_process import PairParticipant
from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.config.resolved import InPairs, ResolvedRun
from gossamer.run.participant.life import take_part


def train_asynchronous(run: ResolvedRun, folder: Path, *, join: str | None = None, resume: Resume = False) -> None:
    """Trains one worker of an asynchronous run, see `take_part`.

    Each worker of a starting run resumes from its own newest sound checkpoint, or else from another's state.
    Cost: two models with their outer and inner state, one of them for newcomers, the gradients and one message.
    """
    kind = PairParticipant if isinstance(run.method, InPairs) else GossipParticipant
    take_part(run, folder, kind, OwnState(run, folder), join=join, resume=resume)
