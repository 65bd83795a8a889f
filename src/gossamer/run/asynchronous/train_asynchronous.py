"""Real processes that wait for nobody: `gossamer train` for gossip without waiting and for workers that meet in pairs.

They find each other as the workers of an elastic run do, and go on as these do when one dies, hangs, leaves or comes back. What
was heard and who met is on record (`gossamer.record.logs.order`), from which `gossamer.run.replay.asynchronous` computes the
run again.
"""

import secrets
from pathlib import Path

from gossamer.run.asynchronous.async_state import async_seat
from gossamer.run.asynchronous.gossip_process import GossipParticipant
from gossamer.run.asynchronous.pair_process import PairParticipant
from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.config.resolved import InPairs, ResolvedRun
from gossamer.run.participant.agreement import run_key, use_threads
from gossamer.run.participant.sigterm import leaving
from gossamer.run.worker.task import task_of

__all__ = ["train_asynchronous"]


def train_asynchronous(
    config: ResolvedRun, folder: Path, *, join: str | None = None, resume: Resume = False
) -> None:  # fmt: skip
    """Trains one worker of a run that waits for nobody to its end, or until it is asked to leave by SIGTERM.

    Args:
        join: the address of any worker of a running run, "auto" for one that has written its address into `folder`; None to
            start with all others.
        resume: whether each worker of a run that starts goes on from its own newest sound checkpoint, or else from the state of
            another; "auto" starts the run where nobody has any.
    Raises: ConfigError, DataError, CheckpointError, TrainingError; PeerError when the others do not come, nobody can be joined,
        or another process has taken the slot.
    Cost: two models with their outer and inner state, one of them for newcomers, the gradients and one message.
    """
    use_threads(config)
    task = task_of(config)
    seat = async_seat(config, folder, run_key(config, task), secrets.randbits(61), join=join, resume=resume)
    participant = PairParticipant if isinstance(config.method, InPairs) else GossipParticipant
    with leaving() as asked:
        participant(config, folder, task, seat, asked).train()
