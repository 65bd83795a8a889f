"""SPARTA and AsyncMesh: workers average a small share of the parameters in each round."""

import torch
from torch import Tensor

from gossamer import rng
from gossamer.rules.contract import Context, Rule
from gossamer.settings.options import Count, factory
from gossamer.topologies.mixing import pull
from gossamer.tree import Tree


@factory
def sparta(one_in: Count = 200, disjoint: bool = False) -> Rule:
    """Every worker moves to the weighted mean of its neighbourhood in a few coordinates; all workers draw the same ones.

    θ_i[S] ← Σ_j w_ij θ_j[S];   S holds one of every `one_in` coordinates, drawn from the number of the round

    Args:
        one_in: length of a run of coordinates, of which one is drawn; the paper's shares of 0.1 to 0.5 % are runs of 1000 to
            200. AsyncMesh's 5 % are runs of 20.
        disjoint: whether each run has its coordinates drawn in turn, from a place drawn once, as in AsyncMesh: then `one_in`
            rounds average each of them once.
    Cost: one model / `one_in` to each peer per round, with no indices sent; nothing kept.
    Source: Beton et al., "Improving the efficiency of distributed training using sparse parameter averaging", 2025 (on
        OpenReview, not on arXiv); disjoint slices arXiv 2601.22442.
    Differs: any topology instead of an all-reduce; one coordinate per run instead of any, so that all are drawn equally often.
        Intended for an exchange after every inner step or after a few of them (`local_steps = 1`). AsyncMesh permutes each
        tensor, which changes only which coordinates are averaged together.
    Fails when: the shards differ or steps are long: averaging all coordinates once takes `one_in` rounds, in which the workers
        drift.

    >>> sparta(one_in=100).elementwise
    False
    """
    chosen = _in_turn if disjoint else _drawn

    def init(x: Tensor, ctx: Context) -> Tree:
        return ()

    def send(x: Tensor, s: Tree, ctx: Context) -> Tree:
        if x.is_meta:  # only the size is needed
            return x.new_empty(_size_in_turn(x.numel(), one_in, ctx.round) if disjoint else -(-x.numel() // one_in))
        return x[chosen(x, one_in, ctx.round)]

    def recv(x: Tensor, s: Tree, own_decoded: Tree, combined: Tree, ctx: Context) -> tuple[Tensor, Tree]:
        places = chosen(x, one_in, ctx.round)
        return x.index_copy(0, places, (x[places] + combined).to(x.dtype)), s

    return Rule(
        init, send, pull, recv, needs="connected", single_worker_limit="inner", elementwise=False, mean_preserving=True
    )


def _drawn(x: Tensor, one_in: int, round: int) -> Tensor:
    """The coordinates of this round, ascending: one of each run; the last run holds the remainder."""
    starts = torch.arange(0, x.numel(), one_in)
    lengths = torch.clamp(x.numel() - starts, max=one_in)
    bits = torch.randint(0, 1 << 62, starts.shape, generator=rng.torch_rng(0, "sparta", round))
    return (starts + bits % lengths).to(x.device)


def _in_turn(x: Tensor, one_in: int, round: int) -> Tensor:
    """The coordinates of this round, ascending: the next one of each run, and none of a shorter last run that is used
    up.

    A vector shorter than a run is one run, so that no message is empty.
    """
    run = min(one_in, x.numel())
    starts = torch.arange(0, x.numel(), run)
    first = torch.randint(0, run, starts.shape, generator=rng.torch_rng(0, "sparta"))
    first[x.numel() // run :] = 0
    places = starts + (first + round) % run
    return places[places < x.numel()].to(x.device)


def _size_in_turn(numel: int, one_in: int, round: int) -> int:
    """How many coordinates `_in_turn` takes."""
    run = min(one_in, numel)
    return numel // run + (round % run < numel % run)
