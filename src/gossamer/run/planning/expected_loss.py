"""The expected loss of a candidate above data parallelism in the same time, and whether two candidates can be told apart.

    loss(c) - loss(data parallelism after D tokens) = max(gap(N, n) · f(method, H, T), few(R, n)) + codec - s · ln(D_c / D)

D_c is what candidate c reads in the time, and s what e times as many tokens bring. `gap` is DiLoCo's, with 30 local steps.
From 35M parameters on it is published, with a law for each of 2, 4 and 8 workers; for 139,584 parameters and 8 workers it was
measured, and between them it is interpolated. Other numbers of workers stand to 8 as they do at 35M parameters, and one worker
has no gap. A small model that reads more tokens for each parameter comes nearer. `f` is what a method lost with H local steps in
T inner steps, where DiLoCo lost 1 with 30 of them: differences that were measured here are shares of the gap. It was measured at
two lengths, 1,350 and 5,400 steps, and is interpolated in their logarithm: in longer runs DiLoCo's long phases cost less of the
gap. From 5 local steps on it never falls with more of them. One local step is the worst setting of published runs, and from 35M
parameters on not taken to lose less than 120. Where a paper measured a method next to DiLoCo (`PUBLISHED`), its difference holds
from that size on. `few` is a price for few rounds R, whatever the size: as much of what n workers gain together as DiLoCo lost
in 45 rounds, in proportion to 1 / R. Methods that exchange after every step were measured so at both lengths; they pay no `few`.

What two candidates share cancels in their difference, whose interval has

- the 95 % interval of the mean over seeds, paired, and that of a codec that was measured, paired too;
- how far the price of a method moved from one text to another (`TEXT`), as a share of the gap;
- what workers with fewer local steps than the others may cost, up to their share of the gap, as all took the same when it was
  measured;
- far from what was measured, the share by which such differences changed there with parameters, workers and tokens (`DRIFT`), and
  in longer runs than the measured ones as much as `f` changed between these in so many times the steps;
- a share of `gap` between data parallelism and all others, how far published laws lie from published runs, and a share of what
  the tokens bring.

Where `f` is known too badly to tell methods apart, their intervals hold zero.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from gossamer.errors import ConfigError
from gossamer.network.estimates.wall_clock import FITTED_PARAMETERS, data_parallel_fit, diloco_gap
from gossamer.report.paired import effect
from gossamer.run.planning.measured_losses import (
    CODECS_MEASURED,
    DRIFT,
    EVERY_STEP,
    FEW_ROUNDS_NATS,
    GAP_POWER,
    LEAST_ROUNDS,
    LONGER_STEPS,
    MEASURED,
    MEASURED_PARAMETERS,
    MEASURED_STEPS,
    MEASURED_WORKERS,
    NATS_PER_E_FOLD,
    RelativeLoss,
    carried_from,
    relative_losses,
)
from gossamer.settings.options import NotNegative, Positive
from gossamer.settings.schema import build, read_toml, settings

IN_PAIRS = ("GASLoC 1-Peer", "noloco", "gossip", "gasloc_drift", "fgd_pairs")
"""Methods in which a worker receives from one peer in a round."""
TOKENS_PER_PARAMETER = 20
"""Tokens for each parameter, of the measured and published runs and of a plan that is given neither tokens nor hours."""
EXACT_CODECS = ("exact", "bf16")
"""A cast to bf16 counts as exact."""
_PUBLISHED = FITTED_PARAMETERS
_MOST_WORKERS = 8
"""Range of parameters, and most workers, of arXiv 2503.09799."""
_PUBLISHED_STEPS = 10_000
"""Inner steps of its runs: an estimate by their tokens and batches, which differ by several times between its sizes."""
_GAP_DOUBT = 0.4
"""Its fits of all replicas and of each number of them, and what it measured, differ by so much of the gap."""
_RESIDUAL = 0.003
"""The deviation of its runs from its fits, as a share of the loss: more than the gap of two workers and 1B parameters."""
_LEAST_GAP = 0.001
"""For few workers and more than 1B parameters the fits go down to no gap at all, which would make all methods equal."""
TEXT = 0.08
"""A share of the gap. The price of gossip was 0.037 nats on source code and 0.052 on prose, where the gap was 0.19."""
_TOKENS_DOUBT = 0.3
_NEAR = math.log(2)
"""Measurements are taken to hold for half to twice as many parameters, workers and tokens."""
_BYTES = 256
FAR = 10
"""The factor of tokens, outside of the range that a law was fitted with, up to which it is extrapolated."""


class PublishedDifference(NamedTuple):
    """The difference of a method to DiLoCo that a paper measured."""

    parameters: float
    """Parameters of its smallest run."""
    share: float
    """The difference to DiLoCo with as many local steps, as a share of the loss."""
    half: float
    """Half the width of its interval: where a paper gives none, that of two rounded losses."""
    source: str


PUBLISHED = {
    "streaming_diloco": PublishedDifference(1e9, 0.0, 0.004, "arXiv 2501.18512: 2.48 and 2.49 at 1B"),
    "sparseloco": PublishedDifference(
        512e6, 0.0, 0.004, "arXiv 2508.15706: not above DiLoCo at 512M, 15 to 250 local steps"
    ),
    "noloco": PublishedDifference(125e6, 0.0, 0.004, "arXiv 2506.10911: pairs on a par with all, 125M to 6.8B"),
    "muloco": PublishedDifference(150e6, -0.007, 0.004, "arXiv 2505.23725: 3.120 and 3.142 at 150M, one worker"),
}
"""Published differences by method."""

_MEASURED_LEVEL = fmean(MEASURED["data parallel"][1].losses)
_MEASURED_GAP = fmean(MEASURED["DiLoCo"][30].losses) - _MEASURED_LEVEL


class Range(NamedTuple):
    """Nats, and half the width of their interval."""

    nats: float
    half: float

    @property
    def open(self) -> bool:
        """Whether the interval holds zero."""
        return abs(self.nats) <= self.half

    def __str__(self) -> str:
        return f"{self.nats:+z.3f} ± {self.half:.3f}"


class LossScale(NamedTuple):
    """The model and the length of a run, by which losses are scaled.

    Source: data parallelism and DiLoCo's gap from 35M parameters on, arXiv 2503.09799, up to 2.4B and 8 workers; what tokens
        bring there, arXiv 2404.10102, `2085.43 · D^-0.3658`.
    """

    parameters: int
    workers: int
    tokens: float
    vocab_size: int
    own_per_e_fold: float | None = None
    """Nats that e times as many tokens bring on the user's text, where a law of it is given."""
    steps: float | None = None
    """Inner steps of a worker, in which all `workers` read the tokens; None for as many as in the runs that `gap` is from. A
    candidate of fewer workers takes more of them."""
    seconds: float | None = None
    """Seconds of the run, where they are the goal: a candidate takes more or fewer steps in them."""

    @property
    def length(self) -> float:
        """Where a run lies between both measured lengths: 0 for one of `MEASURED_STEPS` inner steps, 1 for `LONGER_STEPS`.

        Shorter runs were not measured, and are treated like the former.
        """
        return max(0.0, math.log(self._steps / MEASURED_STEPS) / math.log(LONGER_STEPS / MEASURED_STEPS))

    @property
    def _steps(self) -> float:
        return self._between(MEASURED_STEPS, _PUBLISHED_STEPS) if self.steps is None else self.steps

    @property
    def level(self) -> float:
        """Loss of data parallelism: nats a byte for a vocabulary of bytes, as was measured, else a token, as published."""
        published = data_parallel_fit(self.parameters)
        in_bytes = self.vocab_size <= _BYTES
        return published * _MEASURED_LEVEL / data_parallel_fit(MEASURED_PARAMETERS) if in_bytes else published

    @property
    def gap(self) -> float:
        """DiLoCo's loss above data parallelism's with 30 local steps; one worker has none."""
        if self.workers == 1:
            return 0.0
        of_workers = diloco_gap(_PUBLISHED[0], self.workers) / diloco_gap(_PUBLISHED[0], MEASURED_WORKERS)
        published = max(_LEAST_GAP, diloco_gap(self.parameters, self.workers))
        share = self._between(_MEASURED_GAP / _MEASURED_LEVEL * of_workers, published)
        more = max(1.0, self.tokens / (TOKENS_PER_PARAMETER * self.parameters))
        return self.level * share * more ** -(GAP_POWER * (1 - self._place))

    @property
    def per_e_fold(self) -> float:
        """Nats that e times as many tokens bring."""
        if self.own_per_e_fold is not None:
            return self.own_per_e_fold

        def published(parameters: float, tokens: float) -> float:
            return 0.3658 * 2085.43 * tokens**-0.3658 / data_parallel_fit(parameters)

        # Of a smaller model that of the smallest published one, with as many tokens for each parameter.
        larger = max(1.0, _PUBLISHED[0] / self.parameters)
        at = published(larger * self.parameters, larger * self.tokens)
        return self.level * self._between(NATS_PER_E_FOLD / _MEASURED_LEVEL, at)

    def _between(self, measured: float, published: float) -> float:
        """Interpolated in the logarithms of both."""
        return measured ** (1 - self._place) * published**self._place

    @property
    def _place(self) -> float:
        """From 0 for the parameters that were measured to 1 for those from which it is published."""
        return self.log_fraction_to(_PUBLISHED[0])

    def log_fraction_to(self, parameters: float) -> float:
        """From 0 for the parameters that were measured to 1 for so many, in their logarithm."""
        way = math.log(self.parameters / MEASURED_PARAMETERS) / math.log(parameters / MEASURED_PARAMETERS)
        return min(1.0, max(0.0, way))

    def few_rounds(self, local_steps: int) -> float:
        """The price of few rounds: nats of so many workers who read alone what they read together, in proportion to 1 / R."""
        alone = FEW_ROUNDS_NATS / (NATS_PER_E_FOLD * math.log(MEASURED_WORKERS))
        rounds = max(1.0, self._steps / local_steps)
        return self.per_e_fold * math.log(self.workers) * min(1.0, alone * LEAST_ROUNDS / rounds)

    @property
    def _away(self) -> dict[str, float]:
        """The distance from the measured parameters, workers and tokens, in powers of e."""
        each = {
            "parameters": self.parameters / MEASURED_PARAMETERS,
            "workers": self.workers / MEASURED_WORKERS,
            "tokens": self.tokens / (TOKENS_PER_PARAMETER * self.parameters),
        }
        return {name: abs(math.log(value)) for name, value in each.items()}

    @property
    def outside(self) -> list[str]:
        """The quantities that are far from those of the measured losses."""
        words = {
            "parameters": f"{self.parameters:,} parameters",
            "workers": f"{self.workers} worker{'s' * (self.workers > 1)}",
            "tokens": f"{self.tokens / self.parameters:.3g} tokens a parameter",
        }
        return [words[name] for name, away in self._away.items() if away > _NEAR * 1.01]

    @property
    def method_doubt(self) -> float:
        """The share by which differences between methods may deviate from the measured ones."""
        return sum(DRIFT[name] * away for name, away in self._away.items() if away > 1e-6)

    @property
    def gap_doubt(self) -> float:
        """The share by which the gap of all methods to data parallelism may deviate."""
        away = self._away
        inside = min(_GAP_DOUBT, DRIFT["parameters"] * away["parameters"])
        more = math.log(max(1.0, self.workers / _MOST_WORKERS)) + math.log(max(1.0, self.parameters / _PUBLISHED[1]))
        return inside + DRIFT["tokens"] * away["tokens"] + _GAP_DOUBT * more


@settings()
class Law:
    """The loss of data parallelism with the planned model on a user's text: `loss = floor + scale · tokens^-power` nats."""

    floor: NotNegative
    """The loss that no number of tokens goes below."""
    scale: Positive
    power: Positive
    tokens: tuple[Positive, Positive]
    """From the fewest to the most tokens that it was fitted with."""

    def __post_init__(self) -> None:
        if self.tokens[0] > self.tokens[1]:
            raise ConfigError(f"tokens is {[*self.tokens]}; write the fewest first, such as tokens = [1e8, 1e9]")

    def tokens_for(self, loss: float) -> float:
        """The tokens for a loss. Raises ConfigError for one that it cannot reach, or only far outside of its fit.

        >>> Law(floor=1.0, scale=100.0, power=0.25, tokens=(1e6, 1e9)).tokens_for(2.0)
        100000000.0
        """
        if loss <= self.floor:
            raise ConfigError(
                f"the loss to reach is {loss:g} and the law has floor = {self.floor:g}; give one above it"
            )
        tokens = (self.scale / (loss - self.floor)) ** (1 / self.power)
        if not self.tokens[0] / FAR <= tokens <= FAR * self.tokens[1]:
            raise ConfigError(
                f"the law says {tokens:.4g} tokens for a loss of {loss:g}, and was fitted from {self.tokens[0]:.4g} to "
                f"{self.tokens[1]:.4g}; give a loss within ten times of that"
            )
        return tokens

    def times_as_many(self, loss: float, nats: float) -> float:
        """How many times the tokens of a loss are needed to end so many nats below it; infinite from the floor on.

        >>> law = Law(floor=1.0, scale=100.0, power=0.25, tokens=(1e6, 1e9))
        >>> round(law.times_as_many(2.0, 0.1), 3), law.times_as_many(2.0, 1.0)
        (1.524, inf)
        """
        left = loss - nats - self.floor
        return math.inf if left <= 0 else ((loss - self.floor) / left) ** (1 / self.power)

    def per_e_fold(self, tokens: float) -> float:
        """Nats that e times as many tokens bring there."""
        return self.power * self.scale * tokens**-self.power


def read_law(path: Path) -> Law:
    """The law in a TOML file. Raises: ConfigError for what is no law, and a file that is not there."""
    if not path.is_file():
        raise ConfigError(f"the law '{path}' is not a file; name a TOML file with floor, scale, power and tokens")
    return build(Law, read_toml(path, f"'{path}'"), source=f"'{path}'")


class Penalty(NamedTuple):
    """Nats of a candidate above data parallelism after as many tokens."""

    method: str
    """The method, whose differences to others may change with the text."""
    by_seed: tuple[tuple[float, ...], ...]
    """Nats by seed, for runs of each measured length, weighted by how near it is: their means add up."""
    gap: float
    """The part that all methods with local steps have in common; 0 for data parallelism."""
    beyond: float
    """Correction for local steps or lengths that were not measured; its error may be as large as itself."""
    codec: tuple[float, ...]
    """Nats by seed, of a lossy codec; from other runs, so the seeds are not those of `by_seed`."""
    codec_far: float
    """The factor by which the interval of the codec grows."""
    missing: float = 0.0
    """The loss that workers with fewer local steps than the others may cost."""
    few_rounds: float = 0.0
    """The price of few rounds."""
    carried_from: int | None = None
    """The nearest local steps that its method was measured with, where they are far from its own; else None."""

    @property
    def is_guess(self) -> bool:
        """Whether its local steps are far from all that were measured, and its rounds fewer."""
        return self.carried_from is not None and self.few_rounds > 0

    @property
    def nats(self) -> float:
        """The mean."""
        return self.exact + (fmean(self.codec) if self.codec else 0.0)

    @property
    def exact(self) -> float:
        """The mean with exact messages."""
        return sum(map(fmean, self.by_seed)) + self.few_rounds


@functools.lru_cache(maxsize=1 << 12)
def penalty(scale: LossScale, method: str, local_steps: int, codec: str, missing: float = 0.0) -> Penalty | None:
    """The expected loss of a method with these local steps and this codec; None where that was never measured.

    Pairs of two workers are everyone, so gossip in pairs of two is DiLoCo there.

    Args: `missing` is the share of all workers' local steps that some of them leave out.

    >>> at = LossScale(139_584, 8, 20 * 139_584, 256)
    >>> round(penalty(at, "DiLoCo", 30, "bf16").nats, 4), penalty(at, "DiLoCo", 30, "topk")
    (0.1906, None)
    """
    measured_as = "DiLoCo" if scale.workers == 2 and method in IN_PAIRS else method
    if (known := _exact(scale, measured_as, local_steps)) is None:
        return None
    lossy: Sequence[float] = ()
    if codec not in EXACT_CODECS and method not in _WITH_A_CODEC:
        codecs = CODECS_MEASURED.get(method, {})
        if codec not in codecs:
            return None
        lossy = codecs[codec]
    (by_seed, doubt), few = known, 0.0
    if method not in _WITHOUT_LOCAL_STEPS and (price := scale.few_rounds(local_steps)) > 0:
        at_unit = _exact(scale, measured_as, 30)
        assert at_unit is not None
        lead = min(0.0, sum(map(fmean, at_unit[0])) - scale.gap)  # of Muon, which has it in few rounds too
        few = max(0.0, price + lead - sum(map(fmean, by_seed)))
    return Penalty(
        measured_as,
        tuple(by_seed),
        scale.gap if method != "data parallel" else 0.0,
        doubt + few,
        tuple(scale.gap * nats for nats in lossy),
        1 + abs(math.log(local_steps / 30)),
        scale.gap * missing,
        few,
        carried_from(measured_as, local_steps),
    )


def _exact(scale: LossScale, method: str, local_steps: int) -> tuple[list[tuple[float, ...]], float] | None:
    """Nats with exact messages by seed, of the runs of each measured length, and what of them is not measured."""
    if (both := _short_and_long_losses(scale, method, local_steps)) is None:
        return None
    later = min(1.0, scale.length)
    weighed = [*zip((1 - later, later), both, strict=True)]
    beyond = sum(share * one.beyond for share, one in weighed)
    shorter, longer = (fmean(one.by_seed) for one in both)
    beyond += abs(longer - shorter) * (scale.length - later)
    by_seed = [tuple(share * scale.gap * part for part in one.by_seed) for share, one in weighed]
    if method not in PUBLISHED:
        return by_seed, scale.gap * beyond
    nats, more = _interpolated_loss(scale, method, local_steps, by_seed, weighed)
    return nats, scale.gap * beyond + more


_Weighed = Sequence[tuple[float, RelativeLoss]]


def _short_and_long_losses(scale: LossScale, method: str, local_steps: int) -> tuple[RelativeLoss, RelativeLoss] | None:
    """The losses of a method in runs of both lengths, in units of DiLoCo's with 30 local steps."""
    both = relative_losses(method, local_steps)
    if both is None or method in _WITHOUT_LOCAL_STEPS or local_steps >= _FEWEST_STEPS:
        return both
    # One local step is the worst setting of published runs; in the small ones here it was the best.
    at_most, place = relative_losses(method, _WORST_AS), scale.log_fraction_to(_PUBLISHED[0])
    assert at_most is not None
    few = place * (1 - math.log(local_steps) / math.log(_FEWEST_STEPS))
    shorter, longer = (_raised(one, other, few) for one, other in zip(both, at_most, strict=True))
    return shorter, longer


def _raised(one: RelativeLoss, other: RelativeLoss, share: float) -> RelativeLoss:
    """A loss on its way to another that is higher."""
    more = share * max(0.0, fmean(other.by_seed) - fmean(one.by_seed))
    return RelativeLoss(tuple(nats + more for nats in one.by_seed), one.beyond + more)


def _interpolated_loss(
    scale: LossScale, method: str, local_steps: int, by_seed: Sequence[tuple[float, ...]], weighed: _Weighed
) -> tuple[list[tuple[float, ...]], float]:
    """The loss of a method between the measured size and that from which a paper has its difference to DiLoCo."""
    known = PUBLISHED[method]
    there, diloco = scale.log_fraction_to(known.parameters), _short_and_long_losses(scale, "DiLoCo", local_steps)
    assert diloco is not None
    nats = list[tuple[float, ...]]()
    for (share, _), by_run, beside in zip(weighed, by_seed, diloco, strict=True):
        published = [share * (scale.gap * part + known.share * scale.level) for part in beside.by_seed]
        nats.append(tuple((1 - there) * a + there * b for a, b in zip(by_run, published, strict=True)))
    return nats, there * known.half * scale.level


_FEWEST_STEPS, _WORST_AS = 5, 120
"""Local steps below which published runs rise again, and those than which one step is not taken to lose less."""
_WITHOUT_LOCAL_STEPS = {"data parallel", *EVERY_STEP}
_WITH_A_CODEC = ("streaming_diloco", "sparseloco", "fgd_pairs", *EVERY_STEP)
"""Methods that were measured with the codec that belongs to them."""


def expected_difference(scale: LossScale, one: Penalty, other: Penalty, more_tokens: float = 1.0) -> Range:
    """The loss of one candidate above that of another, where it reads `more_tokens` times as many.

    >>> at = LossScale(139_584, 8, 20 * 139_584, 256)
    >>> two_peers, all_120 = penalty(at, "GASLoC 2-Peer", 30, "exact"), penalty(at, "DiLoCo", 120, "exact")
    >>> none = penalty(at, "data parallel", 1, "exact")
    >>> print(expected_difference(at, two_peers, all_120)), print(expected_difference(at, two_peers, none, more_tokens=3.0))
    -0.090 ± 0.037
    +0.004 ± 0.094
    (None, None)
    """
    mean = chance = 0.0
    for some, others in zip(one.by_seed, other.by_seed, strict=True):
        paired = effect([(a - b, 0.0) for a, b in zip(some, others, strict=True)])
        mean, chance = mean + paired.mean, math.hypot(chance, paired.half or 0.0)
    if one.codec != other.codec:
        for sign, side in ((1, one), (-1, other)):
            if side.codec:
                lossy = effect([(nats, 0.0) for nats in side.codec])
                mean += sign * lossy.mean
                chance = math.hypot(chance, (lossy.half or 0.0) * side.codec_far)
    texts = [side.exact - side.gap for side in (one, other)]
    tokens = scale.per_e_fold * math.log(more_tokens)
    mean += one.few_rounds - other.few_rounds
    text = TEXT * max(one.gap, other.gap)
    text = text if one.method != other.method else min(text, abs(texts[0] - texts[1]))
    off_the_law = (one.gap > 0) != (other.gap > 0)
    residual = _RESIDUAL * scale.level * scale.log_fraction_to(_PUBLISHED[0]) if off_the_law else 0.0
    half = (
        math.hypot(chance, text, residual)
        + scale.method_doubt * abs(texts[0] - texts[1])
        + scale.gap_doubt * abs(one.gap - other.gap)
    )
    half += abs(one.beyond - other.beyond) + abs(one.missing - other.missing) + _TOKENS_DOUBT * abs(tokens)
    return Range(mean - tokens, half)
