"""A mean over all workers of one process: taken once, as all of them receive the same."""

import threading
from collections.abc import Callable, Mapping

from gossamer.rounds.forms import Sizes
from gossamer.transport.contract import IncompleteError, Ticket
from gossamer.tree import Tree

__all__ = ["Together"]


class _Mean:
    """One mean: what the workers sent, and once the first of them has asked, the mean."""

    def __init__(self, sizes: Sizes) -> None:
        self.messages: dict[int, Tree] = {}
        self.sizes, self.asked = sizes, 0
        self.value: Tree | None = None


class Together:
    """The means of n workers of one process; threads may use it.

    Through mailboxes every worker would send a part to every other and receive n sums: O(n²) messages a mean.
    Cost: one pass over the n messages for each mean, in one thread.
    """

    def __init__(self, n: int) -> None:
        self._n, self._means, self._lock = n, dict[Ticket, _Mean](), threading.Lock()

    def put(self, ticket: Ticket, worker: int, message: Tree, sizes: Callable[[], Sizes]) -> Sizes:
        """Adds what a worker sends; `sizes` is called for the first one."""
        with self._lock:
            if ticket not in self._means:
                self._means[ticket] = _Mean(sizes())
            self._means[ticket].messages[worker] = message
            return self._means[ticket].sizes

    def take(self, ticket: Ticket, mean: Callable[[Mapping[int, Tree]], Tree]) -> Tree:
        """The mean of all messages, which `mean` takes once; the last worker that asks for it makes it forgotten.

        Raises: IncompleteError when a worker has not sent; as `mean` does.
        """
        with self._lock:
            one = self._means[ticket]
            if missing := sorted({*range(self._n)} - one.messages.keys() if one.value is None else ()):
                raise IncompleteError(
                    f"the mean of {ticket} lacks the messages of workers {missing}; let all of them send first"
                )
            if one.value is None:
                # Under the lock: threads that ask meanwhile would add up the same messages once more.
                one.value = mean(one.messages)
            one.asked += 1
            if one.asked == self._n:
                del self._means[ticket]
            return one.value
