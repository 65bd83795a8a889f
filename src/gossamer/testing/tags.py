"""Promises of a rule's tags, checked through the real exchange."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.codecs import CODECS, Codec, exact
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.kernel import PLAIN, Kernel
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.updates import topology_of_updates
from gossamer.rules import Rule
from gossamer.rules.contract import OuterSGD
from gossamer.testing.drifted_workers import Drift, DriftedWorkers, random_drift, random_vectors, simulated_workers
from gossamer.testing.functions import P
from gossamer.topologies import Topology, make_topology
from gossamer.topologies.mixing import Consensus, mean
from gossamer.tree import leaves, map_leaves

ROUNDING = 1e-12  # tolerance of sums in fp64


def played(
    rule: Rule,
    topology: Topology,
    start: Sequence[Tensor],
    rounds: int,
    drift: Drift | None = None,
    *,
    codec: Codec | None = None,
    steps: int | Sequence[int] = 1,
    kernel: Kernel = PLAIN,
) -> DriftedWorkers:
    """The workers after some rounds."""
    workers = simulated_workers(Method(rule, topology, codec or exact(), Schedule(), kernel), start, steps=steps)
    workers.train(range(rounds), drift)
    workers.finish()
    return workers


def spread(xs: Sequence[Tensor]) -> float:
    """The distance of all workers from their mean."""
    middle = total(xs) / len(xs)
    return float(total((x - middle).square().sum() for x in xs).sqrt())


def total(xs: Iterable[Tensor]) -> Tensor:
    """The sum of some tensors, in order."""
    return functools.reduce(torch.add, xs)


def torch_outer(start: Tensor, pseudo_gradients: Iterable[Tensor], **options: Any) -> Tensor:
    """The last iterate of torch.optim.SGD fed with pseudo-gradients."""
    x = torch.nn.Parameter(start.clone())
    outer = torch.optim.SGD([x], **options)
    for gradient in pseudo_gradients:
        x.grad = gradient.clone()
        outer.step()
    return x.detach()


def consensus_is_a_fixed_point(rule: Rule, graphs: Sequence[Topology]) -> None:
    """Consensus is a fixed point to the last bit; within rounding for a mean whose weights are not exact in binary.

    With short and long vectors, as message shapes are inferred on real data for some, and on meta tensors for others.
    """
    topology = next((one for one in graphs if one.doubly_stochastic and _binary(one)), graphs[0])
    allowed = 1e-5 if rule.combine is mean and not (topology.doubly_stochastic and _binary(topology)) else 0.0
    for numel in (1, P, (1 << 14) + 1):
        x = random_vectors(1, numel, dtype=torch.float32)[0]
        on_gradients = rule.site == "gradients"
        still: Drift | None = (lambda i, t, x: torch.ones_like(x)) if on_gradients else None
        xs = played(rule, topology, [x] * topology.n, 3, still).xs
        wanted = torch.ones_like(x) if on_gradients else x
        moved = max(float((y - wanted).abs().max()) for y in xs)
        assert moved <= allowed, (
            f"{topology.n} workers that all began at the same {numel} parameters and did not train moved by up to {moved:.3g} "
            f"in 3 rounds on topology '{topology.name}'; let recv() return x where combined and own_decoded say that nobody moved"
        )


def _binary(topology: Topology) -> bool:
    """Whether all weights are powers of two, with which products are exact."""
    weights = {w for t in range(5) for row in topology.mixing(t).rows for _, w in row}
    return all(math.frexp(w)[0] in (0.0, 0.5) for w in weights)


def replicas_that_receive_from_everyone_stay_bitwise_equal(rule: Rule, graphs: Sequence[Topology]) -> None:
    """The tag `identical`, over 20 rounds with uneven local steps, in which they move."""
    if not rule.identical:
        return
    assert rule.needs != "tree", (
        "identical = True is about workers that receive from everyone, and needs = 'tree' rules that out; remove the tag"
    )
    start, drift = random_vectors(1, P, dtype=torch.float32)[0], random_drift(P, dtype=torch.float32)
    steps = [1, 2, 3] if rule.site == "parameters" else 1
    xs = played(rule, make_topology("complete", 3), [start] * 3, 20, drift, steps=steps).xs
    apart = max(float((x - xs[0]).abs().max()) for x in xs)
    assert all(torch.equal(xs[0], x) for x in xs), (
        f"identical = True, and after 20 rounds on the complete graph the workers differ by up to {apart:.3g}; compute x from "
        "what all workers have in common (the mean that `combine` makes, and the state), or set identical = False"
    )
    assert not torch.equal(xs[0], start), (
        "20 rounds of training left 3 workers at the parameters that they began with; let recv() apply what was trained"
    )


def keeps_the_mean(
    rule: Rule, topology: Topology, codec: Codec, rounds: int, *, steps: int | Sequence[int] = 1
) -> None:
    """Workers that start apart keep the mean of exact messages, in fp64 within 1e-12.

    Gossip is tested with drifts; rules on a mean of all without, since the mean excludes, by design, what a codec drops
    of a pseudo-gradient.
    """
    drift = None if rule.needs == "everyone" else random_drift(P)
    start = random_vectors(topology.n, P)
    xs = played(rule, topology, start, rounds, drift, codec=codec, steps=steps).xs
    exactly = start if drift is None else played(rule, topology, start, rounds, drift, steps=steps).xs
    moved = float((total(xs) - total(exactly)).abs().max()) / topology.n
    assert moved <= ROUNDING * max(1.0, spread(xs)), (
        f"mean_preserving = True, and codec '{codec.name}' moved the mean of {topology.n} workers by {moved:.3g} in "
        f"{rounds} rounds on topology '{topology.name}'; let recv() take own_decoded for this worker's own message, "
        "or set "
        "mean_preserving = False"
    )


def no_codec_moves_the_mean_of_a_rule_that_keeps_it(rule: Rule, graphs: Sequence[Topology]) -> None:
    """The tag `mean_preserving`: every codec, cycling through topologies; and the mean of workers without drift."""
    if not rule.mean_preserving or rule.site == "gradients":
        return
    graphs = [topology for topology in graphs if topology.doubly_stochastic]
    codecs = [*CODECS.values()]
    for place in range(max(len(codecs), len(graphs)) if graphs else 0):
        keeps_the_mean(rule, graphs[(place + len(rule.name)) % len(graphs)], codecs[place % len(codecs)](), 2)
    for topology in graphs:
        start = random_vectors(topology.n, P)
        xs = played(rule, topology, start, 3).xs
        moved = float((total(xs) - total(start)).abs().max()) / topology.n
        assert moved <= ROUNDING * max(1.0, spread(xs)), (
            f"mean_preserving = True, and the mean of {topology.n} workers that stood still moved by {moved:.3g} in 3 rounds on "
            f"topology '{topology.name}'; make the changes of all workers sum to zero, as `pull` does, or set mean_preserving = "
            "False"
        )


def disagreement_follows_the_declared_recursion(rule: Rule, graphs: Sequence[Topology]) -> None:
    """The tag `consensus`: without drift, the workers are where z = y + α·pull(y) and its momentum take them."""
    if rule.consensus is None:
        return
    follow = _with_momentum_of_drifts if rule.consensus.site in ("drift", "start") else _with_momentum_of_parameters
    for topology in (topology for topology in graphs if topology.doubly_stochastic):
        workers = simulated_workers(
            Method(rule, topology, exact(), Schedule(), PLAIN), [random_vectors(1, P)[0]] * topology.n
        )
        off = follow(rule.consensus, workers, topology)
        assert off <= 1e-9 * max(1.0, spread(workers.xs)), (
            f"consensus = {rule.consensus} takes {topology.n} workers that stand still on topology '{topology.name}' "
            f"elsewhere than they are, by up to {off:.3g} in a round; correct the tag, from which stability is computed, or set "
            "consensus = None"
        )


def _with_momentum_of_parameters(consensus: Consensus, workers: DriftedWorkers, topology: Topology) -> float:
    """The deviation from the recursion at "pre" and "post", for workers that start equal, drift in one round and then do not."""
    alpha, gamma, site = consensus
    xs, zs, off = workers.xs, workers.xs, 0.0
    for t in range(6):
        before, z_before = xs, zs
        xs = [x.clone() for x in workers.xs]
        zs = [x + pulled for x, pulled in zip(xs, _pulls(xs, alpha, topology, t), strict=True)]
        workers.train(range(t, t + 1), random_drift(P) if t == 0 else None)
        now, then = (zs, z_before) if site == "post" else (xs, before)
        wanted = [z + gamma * (a - b) for z, a, b in zip(zs, now, then, strict=True)]
        if t >= 2:  # two rounds without drift before it
            off = max(off, _largest_distance(workers.xs, wanted))
    return off


def _with_momentum_of_drifts(consensus: Consensus, workers: DriftedWorkers, topology: Topology) -> float:
    """The same at the other sites, whose momentum is hidden: its size follows from one drift of a single worker."""
    alpha, gamma, site = consensus
    rule, start, drift, off = workers.loops[0].method.rule, workers.xs[0].clone(), random_drift(P), 0.0
    xs, momenta = [start] * topology.n, list[Tensor]()
    for i in range(topology.n):
        alone = played(rule, make_topology("complete", 1), [start], 1, lambda _, t, x, i=i: drift(i, t, x)).xs[0]
        momenta.append((alone - start) / (1 + gamma))
    if (updates := topology_of_updates(rule, topology.n, seed=0)) is not None:
        momenta = [e + pulled for e, pulled in zip(momenta, _pulls(momenta, 1.0, updates, 0), strict=True)]
    fresh = momenta
    for t in range(6):
        steps = [e + gamma * m for e, m in zip(fresh, momenta, strict=True)]
        ys = [x + step for x, step in zip(xs, steps, strict=True)]
        pulls = _pulls(ys if site == "drift" else xs, alpha, topology, t)
        xs = [y + pulled for y, pulled in zip(ys, pulls, strict=True)]
        workers.train(range(t, t + 1), drift if t == 0 else None)
        off = max(off, _largest_distance(workers.xs, xs))
        fresh, momenta = [torch.zeros_like(start)] * topology.n, [gamma * m for m in momenta]
    return off


def _pulls(ys: Sequence[Tensor], alpha: float, topology: Topology, round: int) -> list[Tensor]:
    rows = topology.mixing(round).rows
    return [alpha * total(w * (ys[j] - y) for j, w in row) for y, row in zip(ys, rows, strict=True)]


def _largest_distance(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(xs, ys, strict=True))


def one_worker_is_the_declared_limit(rule: Rule, graphs: Sequence[Topology]) -> None:
    """The tag `single_worker_limit`: the plain inner optimizer, or torch's SGD around it."""
    if rule.single_worker_limit == "outer optimizer":
        return
    (start,), drift, rounds = random_vectors(1, P), random_drift(P), 6
    x = played(rule, make_topology("complete", 1), [start], rounds, drift).xs[0]
    moves = [drift(0, t, start) for t in range(rounds)]
    if rule.site == "gradients":
        wanted = moves[-1]
    elif rule.single_worker_limit == "inner":
        wanted = start + total(moves)
    else:
        wanted = torch_outer(start, [-move for move in moves], **rule.single_worker_limit._asdict())
    off = float((x - wanted).abs().max())
    assert off <= 1e-7 * max(1.0, float(wanted.abs().max())), (
        f"single_worker_limit = {rule.single_worker_limit!r}, and one worker alone is {off:.3g} away from that after "
        f"{rounds} rounds; correct the tag, or set single_worker_limit = 'outer optimizer'"
    )


def after_a_reset_the_outer_optimizer_begins_afresh(rule: Rule, graphs: Sequence[Topology]) -> None:
    """The tag `reset`: later rounds equal those of a new outer optimizer."""
    if rule.reset is None or rule.delay_rounds or not isinstance(rule.single_worker_limit, OuterSGD):
        return
    drift, alone = random_drift(P), make_topology("complete", 1)
    workers = played(rule, alone, random_vectors(1, P), 5, drift)
    x, part = workers.xs[0].clone(), workers.loops[0].fragments[0].part
    forgotten = leaves(map_leaves(torch.clone, rule.reset(x, part.s)))
    for old, new in zip(leaves(part.s), forgotten, strict=True):
        old.copy_(new)
    workers.train(range(5, 8), drift)
    wanted = torch_outer(x, [-drift(0, t, x) for t in range(5, 8)], **rule.single_worker_limit._asdict())
    off = float((workers.xs[0] - wanted).abs().max())
    assert off <= 1e-7 * max(1.0, float(wanted.abs().max())), (
        f"three rounds after reset() a worker is {off:.3g} away from where a new outer optimizer ({rule.single_worker_limit}) "
        "takes it; let reset(x, s) return the state that init() would make at x"
    )


def the_declared_start_is_where_the_round_began(rule: Rule, graphs: Sequence[Topology]) -> None:
    """The tag `start`: a tensor of the state with the parameters from which training continued."""
    if rule.start is None:
        return
    workers = played(rule, graphs[0], [random_vectors(1, P)[0]] * graphs[0].n, 4, random_drift(P))
    for x, (s,) in zip(workers.xs, workers.states, strict=True):
        kept = rule.start(s)
        assert any(kept is leaf for leaf in leaves(s)), "start(s) returned a new tensor; return the one in the state"
        off = float((kept - x).abs().max())
        assert off == 0.0, (
            f"start(s) is {off:.3g} away from the parameters that the outer update of this round returned; keep those in the "
            "state that recv() returns, or set start = None"
        )
