"""A mean over all workers of one process: computed once, as all of them receive the same.

Forms of messages: their parts for chunk owners, and their shapes before there is a message.
"""

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.codecs import Codec
from gossamer.rules import Context, Rule
from gossamer.topologies.mixing import Mixing, widen
from gossamer.transport.contract import IncompleteError, Ticket
from gossamer.tree import Tree, leaves, map_leaves, nbytes, shares_storage

_FEW = 1 << 14  # elements up to which computing on data is cheaper than on the meta device


class Sizes(NamedTuple):
    """Bytes of the chunk of each worker if the mean went through chunk owners."""

    there: tuple[int, ...]
    back: tuple[int, ...]


def chunks(tree: Tree, n: int, codec: Codec) -> list[Tree]:
    """The part of each flat tensor that each of n owners sums; they begin where the codec may be cut."""
    block = codec.blockwise or 1

    def cut(t: Tensor, k: int) -> int:
        return t.numel() * k // n // block * block if k < n else t.numel()

    return [map_leaves(lambda t, k=k: t[cut(t, k) : cut(t, k + 1)], tree) for k in range(n)]


def message_template(rule: Rule, x: Tensor, s: Tree, ctx: Context) -> Tree:
    """Shapes and dtypes of a message, from running `send` on dummy values: all workers' messages have the same form.

    On the meta device every operation runs in Python, about 0.1 ms each, and the first imports torch's compiler; on a
    few zeros it takes a hundredth.
    """
    if rule.elementwise and x.numel() > 2:  # then two elements stand for all; one alone could also be a scalar state
        like, state = map_leaves(lambda t: torch.zeros(2 if t.shape == x.shape else t.shape, dtype=t.dtype), (x, s))
        message = rule.send(like, state, ctx)
        return map_leaves(
            lambda t: torch.empty(x.shape if t.shape == like.shape else t.shape, dtype=t.dtype, device="meta"), message
        )
    few = x.numel() <= _FEW

    def form(t: Tensor) -> Tensor:
        return torch.zeros(t.shape, dtype=t.dtype) if few else torch.empty(t.shape, dtype=t.dtype, device="meta")

    like, state = map_leaves(form, (x, s))
    return rule.send(like, state, ctx)


def sizes_of(message: Tree, n: int, codec: Codec) -> Sizes:
    """Bytes of the parts of a message in an exact codec, and of their sums."""
    parts = chunks(message, n, codec)
    return Sizes(tuple(map(nbytes, parts)), tuple(nbytes(map_leaves(widen, part)) for part in parts))


def own_message(rule: Rule, x: Tensor, s: Tree, ctx: Context) -> Tree:
    """The rule's message, in memory that is not written to while x and s change."""
    message = rule.send(x, s, ctx)
    if any(shares_storage(message, own) for own in (x, *leaves(s))):
        message = map_leaves(Tensor.clone, message)
    return message


class _Mean:
    """One mean: the messages of the workers, and the result once it is first requested."""

    def __init__(self, sizes: Sizes) -> None:
        self.messages: dict[int, Tree] = {}
        self.sizes, self.asked = sizes, 0
        self.value: Tree | None = None


class Together:
    """The means of n workers of one process; threads may use it.

    Through mailboxes every worker would send a part to every other and receive n sums: O(n²) messages a mean.
    Cost: one pass over the n messages for each mean, in one thread.
    """

    given = False
    """Whether its means are there already, so that no message is sent for them, in whatever codec."""

    def __init__(self, n: int) -> None:
        self._n, self._means, self._lock = n, dict[Ticket, _Mean](), threading.Lock()

    def takes(self, mixing: Mixing) -> bool:
        """Whether it handles means of this mixing."""
        return mixing.everyone

    def put(self, ticket: Ticket, worker: int, message: Tree, sizes: Callable[[], Sizes]) -> Sizes:
        """Adds a worker's message; `sizes` is called for the first one."""
        with self._lock:
            if ticket not in self._means:
                self._means[ticket] = _Mean(sizes())
            self._means[ticket].messages[worker] = message
            return self._means[ticket].sizes

    def take(self, ticket: Ticket, mean: Callable[[Mapping[int, Tree]], Tree]) -> Tree:
        """The mean of all messages, computed once by `mean`, and released after the last worker has taken it.

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


class GivenMeans(Together):
    """Means that one worker has computed for all, over the messages it received."""

    given = True

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.means: Mapping[int, Tree] = {}
        """The means of the exchanges that end next, by fragment."""

    def takes(self, mixing: Mixing) -> bool:
        """See `Together`."""
        return True

    def put(self, ticket: Ticket, worker: int, message: Tree, sizes: Callable[[], Sizes]) -> Sizes:
        """See `Together`."""
        return sizes()

    def take(self, ticket: Ticket, mean: Callable[[Mapping[int, Tree]], Tree]) -> Tree:
        """See `Together`."""
        return self.means[ticket.fragment]
