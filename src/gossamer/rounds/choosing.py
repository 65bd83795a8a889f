"""The choice of the next fragment to send, fastest-changing first: the same on all workers, without communication."""

import contextlib
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from gossamer.rounds.merging import length


class FragmentChoice:
    """The choices of one worker, the same on all: they depend on outer updates only, not on local steps.

    Fragment p changes at the rate R_p = |A_p,new - A_p,old| / I_p, where A_p is where a round begins after an outer update and
    before it, and I_p the number of sends, of any fragment, between its last two. The next to be sent is

        the one whose last send is more than a round ago, if there is one; else that with the largest R_p, and of several with
        the same the one that waits longest

    among those not in flight. A fragment that has not been updated yet changes at an infinite rate, so that all are sent in turn
    at first. Each is sent at least once in any round and one send more.

    Args:
        fragments: P, how many there are.
        sends: N, how many are sent in a round.
    Source: CoCoDC, arXiv 2504.17672, where sends are counted in inner steps.
    """

    def __init__(self, fragments: int, sends: int) -> None:
        self.sends = sends
        waiting = torch.arange(-fragments, 0, dtype=torch.float64)
        self.state: Tensor = torch.stack([-torch.ones_like(waiting), waiting, torch.ones_like(waiting)])
        """For each fragment its rate (-1 before its first update), the number of its last send over all rounds, and the
        sends since the previous one, `[3, P]`; kept in checkpoints.
        """
        self.of: dict[int, int] = {}
        """The fragment of each send of the round, by position; that of the previous round where none is chosen yet."""

    def pick(self, round: int, place: int, flying: Collection[int]) -> int:
        """The fragment for a send; recorded by `sent`."""
        now = round * self.sends + place
        rates, last, _ = self.state.tolist()
        rates = [math.inf if rate < 0 else rate for rate in rates]
        free = [p for p in range(len(last)) if p not in flying]
        late = [p for p in free if now - last[p] > self.sends]
        chosen = min(late or free, key=lambda p: (last[p],) if late else (-rates[p], last[p]))
        self.of[place] = chosen
        return chosen

    def sent(self, round: int, place: int) -> None:
        """Records that the fragment picked for this send is in flight."""
        now, p = round * self.sends + place, self.of[place]
        self.state[2, p] = now - self.state[1, p]
        self.state[1, p] = now

    @contextlib.contextmanager
    def measured(self, fragment: int, start: Tensor) -> Iterator[None]:
        """Measures how far an outer update moves a fragment's starting point."""
        before = start.clone()
        yield
        self.state[0, fragment] = length(start - before).double().cpu() / self.state[2, fragment]
