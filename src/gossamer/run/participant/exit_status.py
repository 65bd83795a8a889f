"""The exit status of a launched run whose workers may come and go: its code, and the fate of each worker."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossamer.record.logs.order import OrderLife, phases_in
from gossamer.record.logs.outcomes import Life


class ExitStatus(NamedTuple):
    """A launcher's final sentences, and its exit code."""

    code: int
    """0 if a worker has trained to the end of the run, with a finite model, or it would have failed. Else not 0."""
    sentences: list[str]


class HowFar(NamedTuple):
    """The progress of a run's slots, from its logs."""

    behind: Mapping[int, int]
    """The completed rounds, or local phases, of each slot."""
    whys: Mapping[int, str | None]
    """The reason for the end of each slot's newest process; None for one that runs, or was killed."""
    rounds: int | None
    """Rounds of the whole run; None if local phases are counted."""

    def words(self, behind: int) -> str:
        """A number of `behind` in words."""
        return f"{behind} local phases" if self.rounds is None else f"round {behind}"


def far_in_rounds(lives: Mapping[int, Sequence[Life]], rounds: int) -> HowFar:
    """Progress from the log of outcomes of an elastic run of `rounds` rounds."""
    behind = {
        i: max((r for life in of_slot for r in (life.begun.after, *(one.round + 1 for one in life.rounds))), default=0)
        for i, of_slot in lives.items()
    }
    return HowFar(behind, _whys(lives), rounds)


def far_in_phases(order: Mapping[int, Sequence[OrderLife]]) -> HowFar:
    """Progress from the order of events of an asynchronous run."""
    return HowFar({i: phases_in(of_slot) for i, of_slot in order.items()}, _whys(order), None)


def _whys(lives: Mapping[int, Sequence[Life | OrderLife]]) -> dict[int, str | None]:
    ends = {i: of_slot[-1].ended for i, of_slot in lives.items() if of_slot}
    return {i: None if end is None else end.why for i, end in ends.items()}


def exit_status(codes: Mapping[int, int], lost: Mapping[int, int], far: HowFar) -> ExitStatus:
    """The exit status of a run.

    Args:
        codes: of the workers, in the order in which they ended.
        lost: the progress of each failed worker; another process may have filled its slot since.
        far: the current progress of the slots.

    >>> exit_status({1: 137, 0: 0}, {1: 7}, HowFar({0: 20, 1: 7}, {0: "finished", 1: None}, 20))
    ExitStatus(code=0, sentences=['worker 1 ended with code 137 after round 7 of 20'])
    >>> exit_status({2: 0}, {}, HowFar({2: 11}, {2: "left"}, None)).sentences
    ['worker 2 has left after 11 local phases', 'no worker has reached the end of the run']
    """
    of_all = "" if far.rounds is None else f" of {far.rounds}"
    report = [
        f"worker {i} ended with code {code} after {far.words(lost.get(i, 0))}{of_all}"
        for i, code in codes.items()
        if code
    ]
    whys = {i: far.whys.get(i) for i, code in codes.items() if not code}
    report += [
        f"worker {i} has left after {far.words(far.behind.get(i, 0))}{of_all}"
        for i, why in whys.items()
        if why == "left"
    ]
    if "finished" in whys.values():
        return ExitStatus(0, report)
    failed = [code for code in codes.values() if code]
    end = "the end of the run" if far.rounds is None else f"round {far.rounds}"
    return ExitStatus(failed[-1] if failed else 2, [*report, f"no worker has reached {end}"])
