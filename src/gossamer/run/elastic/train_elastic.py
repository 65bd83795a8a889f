"""Elastic runs on real processes: rounds that go on when workers die, hang, leave or come back."""

from pathlib import Path

from gossamer.run.bookkeeping.resume import Resume
from gossamer.run.config.resolved import ResolvedRun
from gossamer.run.elastic.elastic_rounds import ElasticRounds
from gossamer.run.elastic.held_rounds import HeldRounds
from gossamer.run.participant.life import take_part

__all__ = ["train_elastic"]


def train_elastic(config: ResolvedRun, folder: Path, *, join: str | None = None, resume: Resume = False) -> None:
    """Trains one worker of an elastic run, see `take_part`.

    A run that starts goes on from the round of `gossamer.run.bookkeeping.which_round.to_resume`. Workers without a checkpoint of
    it take the state of one that has it.
    """
    take_part(config, folder, ElasticRounds, HeldRounds(config, folder), join=join, resume=resume)
