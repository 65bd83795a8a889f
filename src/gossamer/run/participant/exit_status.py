"""How an elastic run has ended whose workers a launcher has started, or one that waits for nobody: exit code, and who died."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gossamer.record.logs.order import OrderLife, phases_in
from gossamer.record.logs.outcomes import Life

__all__ = ["Ending", "ending", "ending_of_order", "rounds_behind"]


class Ending(NamedTuple):
    """What a launcher says, and its exit code."""

    code: int
    """0 when a worker has trained all rounds; its model is finite then, or it would have failed. Else not 0."""
    sentences: list[str]


def rounds_behind(lives: Sequence[Life]) -> int:
    """Rounds that a slot has behind it, as its log of outcomes says."""
    return max((one.round + 1 for life in lives for one in life.rounds), default=0)


def ending(
    codes: Mapping[int, int], lost: Mapping[int, int], lives: Mapping[int, Sequence[Life]], rounds: int
) -> Ending:
    """How a run has ended.

    Args:
        codes: of the workers, in the order in which they ended.
        lost: the rounds that a worker had behind it when it failed.
        lives: the log of outcomes.
        rounds: of the whole run.

    >>> from gossamer.record.logs.outcomes import Begun, Ended
    >>> ending({1: 137, 0: 0}, {1: 7}, {0: [Life(Begun(0, 0, 0, 0, 0), (), Ended(20, "finished"))]}, 20)
    Ending(code=0, sentences=['worker 1 ended with code 137 after round 7 of 20'])
    """
    said = [
        f"worker {i} ended with code {code} after round {lost.get(i, 0)} of {rounds}"
        for i, code in codes.items()
        if code
    ]
    ends = {i: own[-1].ended for i, own in lives.items() if own and codes.get(i) == 0}
    for i, ended in ends.items():
        if ended is not None and ended.why == "left":
            said.append(f"worker {i} has left after round {rounds_behind(lives[i])} of {rounds}")
    if any(ended is not None and ended.why == "finished" for ended in ends.values()):
        return Ending(0, said)
    failed = [code for code in codes.values() if code]
    return Ending(failed[-1] if failed else 2, [*said, f"no worker has reached round {rounds}"])


def ending_of_order(
    codes: Mapping[int, int], lost: Mapping[int, int], order: Mapping[int, Sequence[OrderLife]]
) -> Ending:  # fmt: skip
    """How a run has ended that waits for nobody.

    Args:
        codes: as of `ending`.
        lost: the local phases that a worker had behind it when it failed; another process may have filled its slot since.
        order: of the events of each worker.

    >>> from gossamer.record.logs.order import Entered, Finished
    >>> life = OrderLife(7, Entered(0, 0, None, 0.0), (Finished("finished", 20, 0.0, 9.5),))
    >>> ending_of_order({1: 137, 0: 0}, {}, {0: [life], 1: []})
    Ending(code=0, sentences=['worker 1 ended with code 137 after 0 local phases'])
    """
    phases = {i: phases_in(order.get(i, [])) for i in codes}
    said = [
        f"worker {i} ended with code {code} after {lost.get(i, 0)} local phases" for i, code in codes.items() if code
    ]
    ends = {i: order[i][-1].ended for i, code in codes.items() if not code and order.get(i)}
    whys = {i: end.why for i, end in ends.items() if end is not None}
    said += [f"worker {i} has left after {phases[i]} local phases" for i, why in whys.items() if why == "left"]
    if "finished" in whys.values():
        return Ending(0, said)
    failed = [code for code in codes.values() if code]
    return Ending(failed[-1] if failed else 2, [*said, "no worker has reached the end of the run"])
