"""One worker of asynchronous gossip, without clock or connection: for virtual time, real processes and replays."""

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
    """A worker that publishes a message after each local phase, and mixes it with the latest messages of its peers.

    Args:
        mixing: that of the first round of the topology.
        learner: starts from its own parameters; local phases and mixes update its `x` in place.
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
        """Resumes from these parameters and the leaves of a state. Raises ValueError when they do not fit."""
        tensors, saved_tensors = [self.x, *leaves(self.s)], [x, *s]
        must_fit(saved_tensors, tensors)
        for tensor, saved in zip(tensors, saved_tensors, strict=True):
            tensor.copy_(saved)

    def message(self, number: int, mixing: Mixing) -> Tree:
        """The message to publish after phase `number`."""
        return own_message(self.rule, self.learner.x, self.s, self._context(number, mixing))

    def mix(self, number: int, own: Tree, received: Mapping[int, Tree], mixing: Mixing) -> None:
        """The outer update after phase `number`.

        Args:
            own: its own message, as the others decode it.
            received: those of the peers that it receives from; the weight of a missing message goes to the worker's
                own.
        """
        full, i = mixing.rows[self.worker], self.worker
        row = without(full, i, [j for j, _ in full if j != i and j not in received])
        messages = Decoded(own, tuple(received[j] for j, _ in row if j != i), i, row)
        context = self._context(number, mixing)
        outer_update(self.rule, self.rule.combine, self.learner.x, self.s, messages, context)

    def _context(self, number: int, mixing: Mixing) -> Context:
        learner, i = self.learner, self.worker
        return Context(i, mixing.n, number, learner.local_steps, mixing.weight(i), learner.layout)
