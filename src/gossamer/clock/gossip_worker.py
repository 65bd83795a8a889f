"""One worker of gossip that waits for nobody, without clock or connection: for virtual time, real processes and replays."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from gossamer.clock.phases import Learner
from gossamer.rounds.exchange import initial_state
from gossamer.rounds.kernel import Decoded, outer_update
from gossamer.rounds.together import own_message
from gossamer.rules import Context, Rule
from gossamer.topologies.mixing import Mixing, without
from gossamer.tree import Tree, leaves, must_fit


class GossipWorker:
    """One worker that publishes a message after each local phase, and mixes it with what its peers published last.

    Args:
        mixing: that of the first round of the topology.
        learner: starts from its own parameters; its `x` is where a local phase works, and what a mix changes.
    """

    def __init__(self, worker: int, rule: Rule, learner: Learner, mixing: Mixing) -> None:
        self.worker, self.rule, self.learner = worker, rule, learner
        self.s = initial_state(rule, mixing, learner.x, self._context(0, mixing))
        """The rule's state."""

    @property
    def x(self) -> Tensor:
        """The parameters `[P]`."""
        return self.learner.x

    def restore(self, x: Tensor, s: Sequence[Tensor]) -> None:
        """Goes on from these parameters and the leaves of a state. Raises ValueError when they do not fit."""
        mine, theirs = [self.x, *leaves(self.s)], [x, *s]
        must_fit(theirs, mine)
        for own, saved in zip(mine, theirs, strict=True):
            own.copy_(saved)

    def message(self, number: int, mixing: Mixing) -> Tree:
        """What it publishes after its phase of this number."""
        return own_message(self.rule, self.learner.x, self.s, self._context(number, mixing))

    def mix(self, number: int, own: Tree, received: Mapping[int, Tree], mixing: Mixing) -> None:
        """The outer update after the phase of this number.

        Args:
            own: its own message, as the others decode it.
            received: those of the peers that it receives from; the weight of a peer whose message is missing stays at home.
        """
        full, i = mixing.rows[self.worker], self.worker
        row = without(full, i, [j for j, _ in full if j != i and j not in received])
        messages = Decoded(own, tuple(received[j] for j, _ in row if j != i), i, row)
        context = self._context(number, mixing)
        outer_update(self.rule, self.rule.combine, self.learner.x, self.s, messages, context)

    def _context(self, number: int, mixing: Mixing) -> Context:
        learner, i = self.learner, self.worker
        return Context(i, mixing.n, number, learner.local_steps, mixing.weight(i), learner.layout)
