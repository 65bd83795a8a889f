"""The one check for numbers that would poison a run: a NaN or an infinity among parameters, messages or outer states.

It stands at the boundaries, once a round each: what a worker sends (`rounds.exchange`, `clock.phases`, `run.serve_worker`), what
it receives (the same), the new state of a server (`clock.server_core`, `clock.global_core`), and checkpoints, written and read
(`record.checkpoint`).
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gossamer.errors import TrainingError
from gossamer.tree import Tree, leaves

if TYPE_CHECKING:  # so that records, which stand above, work without torch
    from torch import Tensor

GO_ON = (
    "lower the learning rate or clip the gradients, and go on from the last checkpoint (for a run folder: --resume RUN --set "
    "inner.lr=VALUE, or inner.clip), or start again if there is none (with another --out)"
)
"""What to do about a run whose numbers have blown up."""


def all_finite(tree: Tree) -> bool:
    """Whether no tensor of a tree holds a NaN or an infinity; whole numbers are finite, and so is a tensor without data.

    Cost: one read of each tensor where it is, and one wait for the device.

    >>> import torch
    >>> all_finite((torch.tensor([1.0, -3e38]), ())), all_finite(torch.tensor([1.0, -torch.inf]))
    (True, False)
    """
    import torch

    # A minimum is NaN where any element is; it takes one pass without temporaries, a 25th of the time of isfinite.
    ends = [
        end
        for leaf in leaves(tree)
        if leaf.is_floating_point() and leaf.numel() and not leaf.is_meta
        for end in _extremes(leaf)
    ]
    if all(end.is_cpu for end in ends):  # reading a number is immediate, and costs a tenth of an operation
        return all(math.isfinite(end.item()) for end in ends)
    return bool(torch.stack([end.double() for end in ends]).isfinite().all())


def must_be_finite(parts: Mapping[str, Tree]) -> None:
    """Raises TrainingError, naming the first part at fault, unless all of these trees are finite; one check for all."""
    if all_finite(tuple(parts.values())):
        return
    name = next(name for name, tree in parts.items() if not all_finite(tree))
    raise TrainingError(f"{name} has numbers that are not finite; {GO_ON}")


def _extremes(leaf: "Tensor") -> "tuple[Tensor, Tensor]":
    low, high = (leaf if leaf.element_size() > 1 else leaf.float()).aminmax()
    return low, high
