"""Elastic runs on real processes: rounds that continue when workers die, hang, leave or come back.

At the start each worker contributes the rounds of which it has a checkpoint, with their participants.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gossamer.run.bookkeeping.resume import History, Resume
from gossamer.run.bookkeeping.which_round import Held, kept_by, round_to_resume
from gossamer.run.config.resolved import ResolvedRun, RunSettings
from gossamer.run.elastic.elastic_rounds import ElasticRounds
from gossamer.run.participant.life import take_part
from gossamer.run.participant.rendezvous import Own, Progress, StartFacts
from gossamer.run.worker.stages.checkpoints import Store


class HeldRounds(StartFacts[bool]):
    """See `gossamer.run.participant.rendezvous.StartFacts`. All workers resume from one round, that of `round_to_resume`."""

    word, one_round = "elastic", True

    def __init__(self, run: RunSettings, folder: Path) -> None:
        self._run, self._folder = run, folder

    def own(self, slot: int, past: History) -> Own:
        """See `StartFacts`."""
        return Own(kept_by(Store(self._run, self._folder), [slot], past.lineage, past.before)[slot])

    def read(self, more: object) -> bool | None:
        """See `StartFacts`: there are no facts besides its rounds."""
        return True if more is None else None

    def pick(self, held: Mapping[int, Held]) -> int:
        """See `StartFacts`."""
        return round_to_resume(held, self._run.loop.rejoin_rounds)

    def progress(self, slot: int, facts: Sequence[bool], held: Mapping[int, Held], after: int) -> Progress:
        """A slot whose checkpoint is lost resumes after every inner step it may have taken, so that no step is repeated."""
        lost = after not in held.get(slot, {})
        steps = self._run.timetable.steps_before(slot, after) if lost else 0
        return Progress(after, after, steps) if slot < len(facts) else Progress(0, 0, steps)


def train_elastic(run: ResolvedRun, folder: Path, *, join: str | None = None, resume: Resume = False) -> None:
    """Trains one worker of an elastic run, see `take_part`.

    A starting run resumes from the round of `gossamer.run.bookkeeping.which_round.round_to_resume`. Workers without a
    checkpoint of it take the state of one that has it.
    """
    take_part(run, folder, ElasticRounds, HeldRounds(run, folder), join=join, resume=resume)
