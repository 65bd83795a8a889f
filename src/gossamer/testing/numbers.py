"""Numerical promises of every rule: resumed, in chunks, on few elements, in half precision and through codecs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.codecs import CODECS, Codec, exact, fp4, int8, randomk
from gossamer.errors import TrainingError
from gossamer.rounds.compatibility import lossy_codecs as coding
from gossamer.rounds.compatibility.combination import Combination
from gossamer.rounds.compatibility.combine import Method
from gossamer.rounds.compatibility.incompatibilities import combination_faults
from gossamer.rounds.kernel import PLAIN
from gossamer.rounds.schedule import Schedule
from gossamer.rounds.stability import stability
from gossamer.rules import Rule
from gossamer.testing.drifted_workers import Drift, DriftedWorkers, random_drift, random_vectors, simulated_workers
from gossamer.testing.functions import P
from gossamer.testing.tags import played, total
from gossamer.topologies import Topology
from gossamer.tree import leaves

SPACING = 2.0**-7  # of bf16 between 1 and 2, where the parameters begin
HALF = 64  # elements trained in half precision
CODED = 4096  # elements sent through codecs, enough for average errors


def saved_and_resumed_it_goes_on_with_the_same_bits(rule: Rule, graphs: Sequence[Topology]) -> None:
    """Parameters, state and messages in flight are the complete state of a worker."""
    topology, drift = graphs[0], random_drift(P, dtype=torch.float32)
    method = Method(rule, topology, exact(), Schedule(), PLAIN)
    start = [random_vectors(1, P, dtype=torch.float32)[0]] * topology.n
    whole, again = simulated_workers(method, start), simulated_workers(method, start)
    whole.train(range(3), drift)
    saved = [
        ([x.clone(), *map(torch.clone, leaves(loop.state))], loop.state_in_flight())
        for x, loop in zip(whole.xs, whole.loops, strict=True)
    ]
    saved = [
        (tensors, [{**one, "sent": [t.clone() for t in one["sent"]]} for one in flying]) for tensors, flying in saved
    ]
    whole.train(range(3, 6), drift)
    for x, loop, (tensors, flying) in zip(again.xs, again.loops, saved, strict=True):
        for target, kept in zip([x, *leaves(loop.state)], tensors, strict=True):
            target.copy_(kept)
        loop.restore_in_flight(flying)
    again.train(range(3, 6), drift)
    different = _different(whole, again)
    assert not different, (
        f"workers {different} of {topology.n}, saved after 3 rounds and resumed, have other numbers after 6 than those that went "
        "on; keep everything that recv() needs in the state that it returns"
    )


def chunks_and_shards_give_the_same_bits(rule: Rule, graphs: Sequence[Topology]) -> None:
    """An update in chunks of 3 elements is the update in one piece; on rules that are not elementwise there are no chunks."""
    topology, drift = graphs[0], random_drift(P, dtype=torch.float32)
    start = [random_vectors(1, P, dtype=torch.float32)[0]] * topology.n
    whole, cut = (played(rule, topology, start, 3, drift, kernel=PLAIN._replace(chunk=chunk)) for chunk in (P, 3))
    different = _different(whole, cut)
    assert not different, (
        f"workers {different} of {topology.n} have other numbers where the outer update is made on 3 elements at a time; let "
        "each element depend on its own numbers and on single-element tensors only, or set elementwise = False"
    )


def vectors_of_one_element_work(rule: Rule, graphs: Sequence[Topology]) -> None:
    """Vectors shorter than the number of workers, some of which then own no chunk, are updated to finite numbers."""
    topology = graphs[0]
    for numel in (1, 2, 3):
        start, drift = [random_vectors(1, numel)[0]] * topology.n, random_drift(numel)
        try:
            wrong = [x for x in played(rule, topology, start, 3, drift).xs if not torch.isfinite(x).all()]
        except TrainingError:  # a message was not finite
            wrong = start
        assert not wrong, (
            f"workers with {numel} parameters come to numbers that are not finite within 3 rounds; divide by nothing that is "
            "zero for few elements, such as a deviation from their mean"
        )


def quarter_spacings(worker: int, step: int, x: Tensor) -> Tensor:
    """A drift that bf16 adds without rounding, and whose mean over workers and rounds is a quarter of its spacing."""
    draw = torch.Generator().manual_seed(1000 * worker + step)
    sign = torch.where(torch.arange(HALF) % 2 == 0, 1.0, -1.0)
    return ((torch.rand(HALF, generator=draw) < 0.25) * sign * SPACING).to(x.dtype)


def half_precision_follows_full_precision(rule: Rule, graphs: Sequence[Topology]) -> float | None:
    """bf16 parameters, with their master in fp32, follow those in fp32 within the rounding of bf16.

    For 30 rounds, or as long as all parameters stay between 1 and 2, where the spacing of bf16 is one number.

    Returns: how far the parameters moved on average, in the spacing of bf16; None for a rule on gradients.
    """
    if rule.site == "gradients":
        return None
    topology, draw = graphs[0], torch.Generator().manual_seed(0)
    n, x = topology.n, 1.5 + SPACING * torch.randint(-5, 6, (HALF,), generator=draw).float()
    method = Method(rule, topology, exact(), Schedule(), PLAIN)
    wide, half = simulated_workers(method, [x] * n), simulated_workers(method, [x.bfloat16()] * n)
    wides, halves, rounds = wide.xs, half.xs, 0
    for t in range(30):
        for workers in (wide, half):
            workers.train(range(t, t + 1), quarter_spacings)
        if not all(1.0 < float(y.min()) <= float(y.max()) < 2.0 for y in wide.xs):
            break
        wides, halves, rounds = [y.clone() for y in wide.xs], [y.clone() for y in half.xs], t + 1
    wrong = {y.dtype for y in half.xs} - {torch.bfloat16}
    assert not wrong, f"parameters in bfloat16 became {wrong}; return x in its own dtype"
    middle, wanted = (total(y.float() for y in some) / n for some in (halves, wides))
    # Messages are rounded, and outer steps may be larger than the drift: scaled relative to plain averaging.
    gain = max(1.0, float((wanted - x).abs().max()) / (max(rounds, 1) * SPACING / 2))
    off = float((middle - wanted).abs().max()) / SPACING
    assert off <= 0.6 * gain, (  # rounding once is 0.5
        f"the mean of {n} workers in bf16 is up to {off:.3g} spacings of bf16 away from that in fp32 after {rounds} rounds, and "
        f"{0.6 * gain:.3g} are allowed; add to x only what was computed from x, own_decoded and combined in their own dtype"
    )
    apart = max(float((a - b).abs().max()) for a, b in zip(halves, wides, strict=True)) / SPACING
    unstable = rule.consensus is not None and stability(rule.consensus, topology).radius >= 1.0
    assert unstable or apart <= 3 * gain, (  # unstable gossip amplifies rounding differences between workers
        f"a worker in bf16 is up to {apart:.3g} spacings of bf16 away from its counterpart in fp32 after {rounds} rounds, and "
        f"{3 * gain:.3g} are allowed; send what is as small as what was trained, or mix towards the mean"
    )
    return float((wanted - x).abs().mean()) / SPACING


def every_codec() -> list[Codec]:
    """All codecs with their defaults, and those that draw once more with the others' options."""
    drawn = (int8(rounding="stochastic"), fp4(rounding="stochastic"), randomk(2, scaled=True))
    return [*(make() for make in CODECS.values()), *drawn]


def distance_moved(c: Combination, start: Tensor | list[Tensor]) -> float:
    """The largest distance of a worker from where exact messages would have left it, as a share of the norm of the start."""
    rule, starts = c.rule, start if isinstance(start, list) else [start] * c.topology.n
    still: Drift | None = (lambda i, t, x: torch.zeros_like(x)) if rule.site == "gradients" else None
    xs = played(rule, c.topology, starts, 1, still, codec=c.codec).xs
    expected = [torch.zeros_like(xs[0])] * len(xs) if still else starts
    if not still and any(x is not starts[0] for x in starts):
        expected = played(rule, c.topology, starts, 1).xs
    return max(float((x - e).norm() / starts[0].norm()) for x, e in zip(xs, expected, strict=True))


def allowed_codecs_change_equal_workers_as_little_as_said(rule: Rule, graphs: Sequence[Topology]) -> None:
    """Within fp32 rounding if there is no warning, and else within the warning's number."""
    for codec in every_codec():
        changes_as_little_as_said(Combination(rule=rule, topology=graphs[0], codec=codec))


def changes_as_little_as_said(c: Combination) -> None:
    """The same for one combination, unless it is refused."""
    if combination_faults(c):
        return
    share, start = coding.change(c), random_vectors(1, CODED, seed=3, dtype=torch.float32)[0]
    limit, moved = (2e-6, distance_moved(c, start[:HALF])) if share is None else (share, distance_moved(c, start))
    assert moved <= limit, (
        f"codec '{c.codec.name}' on topology '{c.topology.name}' moved workers that agree and stand still by {moved:.3g} "
        f"of the norm of their parameters in one exchange, and at most {limit:.3g} are said; let recv() "
        "take own_decoded for this worker's own message"
    )


def _different(a: DriftedWorkers, b: DriftedWorkers) -> list[int]:
    """The workers whose parameters or states differ."""
    first, second = ([[x, *leaves(s)] for x, s in zip(workers.xs, workers.states, strict=True)] for workers in (a, b))
    return [i for i, both in enumerate(zip(first, second, strict=True)) if not all(map(torch.equal, *both))]
