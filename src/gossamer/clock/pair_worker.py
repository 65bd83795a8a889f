"""One worker that meets others, without clock or connection: for virtual time, real processes and replays."""

from collections.abc import Sequence

from torch import Tensor

from gossamer.asynchronous import PairRule
from gossamer.clock.phases import Learner
from gossamer.tree import Tree, leaves, must_fit, refill


class PairWorker:
    """The parameters x and the state s of one worker as time passes, after a local phase, and when it meets another.

    A local phase works on the learner's `x`, a copy of x as it was at the start of the phase; its drift is added to x when it
    ends. So training and meetings never wait for each other.

    Args: `learner` starts from its own parameters.
    """

    def __init__(self, rule: PairRule, learner: Learner) -> None:
        self.rule, self.learner = rule, learner
        self.x: Tensor = learner.x.clone()
        self.s: Tree = rule.init(self.x)
        self.start = self.x
        """The parameters at the start of the current local phase."""

    def restore(self, x: Tensor, s: Sequence[Tensor]) -> None:
        """Begins a local phase from these parameters and the leaves of a state. Raises ValueError when they do not fit."""
        must_fit([x, *s], [self.x, *leaves(self.s)])
        self.x, self.s = x.to(self.x, copy=True), refill(self.s, [one.to(self.x.device, copy=True) for one in s])
        self.begin()

    def advance(self, dt: float) -> None:
        """Advances to the current time; called before every other update."""
        self.x, self.s = self.rule.advance(self.x, self.s, dt)

    def begin(self) -> None:
        """Begins a local phase from the current x."""
        self.start = self.x
        self.learner.x.copy_(self.start)

    def learn(self) -> None:
        """Adds the drift of the local phase that has ended."""
        self.x, self.s = self.rule.learn(self.x, self.s, self.learner.x - self.start)

    def tell(self) -> Tensor:
        """The message to the other end of a meeting."""
        return self.rule.tell(self.x, self.s)

    def meet(self, own_decoded: Tensor, peer_decoded: Tensor) -> None:
        """The meeting itself, with this worker's own message and that of the other end, both decoded."""
        self.x, self.s = self.rule.meet(self.x, self.s, own_decoded, peer_decoded)
