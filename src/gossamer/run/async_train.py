"""Real processes that wait for nobody: `gossamer train` for gossip without waiting and for workers that meet in pairs.

They find each other as the workers of an elastic run do, and go on as these do when one dies or hangs. What was heard and who
met is on record (`gossamer.record.order`), from which `gossamer.run.async_replay` computes the run again.
"""

import logging
import secrets
from pathlib import Path

from gossamer.errors import ConfigError
from gossamer.run.async_gossip import GossipParticipant
from gossamer.run.async_pairs import PairParticipant
from gossamer.run.config import RunConfig
from gossamer.run.elastic import leaving
from gossamer.run.history import Resume
from gossamer.run.meeting import started
from gossamer.run.parts import own_parts
from gossamer.run.serve_protocol import run_key, use_threads
from gossamer.run.settle import InPairs, WithoutWaiting, settle
from gossamer.run.task import task_of

__all__ = ["must_not_resume", "train_asynchronous"]

log = logging.getLogger("gossamer")


def train_asynchronous(config: RunConfig, folder: Path, *, resume: Resume = False) -> None:
    """Trains one worker of a run that waits for nobody to its end, or until it is asked to leave by SIGTERM.

    Args: `resume` can only be "auto", which starts the run in its folder from the beginning.
    Raises: ConfigError, DataError, TrainingError; PeerError when the others do not come.
    Cost: one model, its gradients and inner state, what the method keeps, and one message.
    """
    must_not_resume(folder, resume=resume)
    parts = own_parts(config)
    use_threads(config)
    settled = settle(config, parts, real=True)
    assert isinstance(settled, InPairs | WithoutWaiting)
    for sentence in settled.warnings:
        log.warning(sentence)
    task = task_of(config, parts)
    seat = started(config, folder, run_key(settled.config, task, parts), secrets.randbits(61), resume=False)
    again = resume == "auto"
    with leaving() as asked:
        if isinstance(settled, InPairs):
            PairParticipant(config, settled, folder, task, seat, asked, again=again).train()
        else:
            GossipParticipant(config, settled, folder, task, seat, asked, again=again).train()


def must_not_resume(folder: Path, *, resume: Resume) -> None:
    """Raises ConfigError for a run that waits for nobody and shall go on, which it cannot."""
    if resume is True:
        raise ConfigError(
            f"cannot resume '{folder}': a run that waits for nobody keeps no record of what was in flight when it stopped; start "
            "again with another --out"
        )
