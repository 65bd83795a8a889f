"""Merging of the training during a transfer with the outer update, which arrives late."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from gossamer.layout import Layout
from gossamer.topologies.mixing import widen
from gossamer.tree import Tree

Merge = Literal["keep", "taylor"] | float
_BLOCK = 1 << 14  # elements that torch sums in one thread, so that the result does not depend on the number of threads


@contextlib.contextmanager
def merging(x: Tensor, layout: Layout, sent: Tree, merge: Merge, strength: float) -> Iterator[None]:
    """Lets an outer update of `x` `[P]` see the parameters as they were sent, and then merges the training since.

    With s as sent, θ after training since, m = θ - s, and A the result of the update on s:

        "keep":    x ← A + m
        a number:  x ← a θ + (1 - a) A
        "taylor":  x ← A + m - λ |m| c/|c|,   c = m · m · (A - s), for each tensor

    Without steps in between m = 0, and both names give A. "keep" is the delta rule of AsyncMesh: it keeps the mean over workers
    of any update that keeps it. A number is the merge of Streaming DiLoCo. "taylor" is CoCoDC's delay compensation: m is minus a
    sum of gradients on the way from s, and the same steps from A would have met gradients larger by about their Hessian times
    A - s, for which their squares stand.

    Args: `layout` is that of x; `sent` is s, or () where the update is to see x as it is; `strength` is λ.
    Cost: one or two more copies of x during the update; "taylor" reads each tensor a few times more.
    Source: arXiv 2501.18512 (a number), 2601.22442 ("keep"), 2504.17672 ("taylor", after DC-ASGD, 1609.08326).
    Differs: the correction has the length λ |m| for each tensor, where the paper fixes a factor: so λ has no unit.
    Fails when: λ is large and A - s is mostly an outer momentum or a restart, which says little of the way from s to A.
    """
    if not isinstance(sent, Tensor):
        yield
    elif isinstance(merge, str):
        moved = widen(x) - widen(sent)
        x.copy_(sent)
        yield
        if merge == "taylor":
            for leaf in layout.leaves:
                piece = slice(leaf.start, leaf.stop)
                moved[piece] -= strength * _correction(moved[piece], widen(x[piece]) - widen(sent[piece]))
        x.copy_(widen(x) + moved)
    else:
        live = x.clone()
        x.copy_(sent)
        yield
        x.copy_(merge * widen(live) + (1.0 - merge) * widen(x))


def _correction(moved: Tensor, jump: Tensor) -> Tensor:
    """|m| c/|c| with c = m · m · jump; zero where c is. Only directions are multiplied, so that nothing small underflows."""
    direction = _unit(moved)
    return length(moved) * _unit(direction * direction * _unit(jump))


def _unit(v: Tensor) -> Tensor:
    return v / length(v).clamp_min(torch.finfo(v.dtype).tiny)


def length(v: Tensor) -> Tensor:
    """The norm of v, as a tensor of no dimension in its dtype; independent of the number of threads, bit for bit."""
    return torch.stack([block.double().square().sum() for block in v.split(_BLOCK)]).sum().sqrt().to(v.dtype)
