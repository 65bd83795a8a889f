"""The choice among the candidates of a plan: the lowest expected loss in the time, and of those that are as low the fastest."""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from gossamer.report.table import spread_text
from gossamer.run.planning.expected_loss import (
    EXACT_CODECS,
    FAR,
    IN_PAIRS,
    LossScale,
    Penalty,
    Range,
    expected_difference,
    penalty,
)
from gossamer.run.planning.measured_losses import FAR_STEPS

_AS_FAST = 1.05
"""Relative error of a price, within which the simpler candidate is taken."""
_AS_LOW = 0.005
"""Nats within which the fastest and simplest is taken: a higher expected loss is not chosen merely because little is known."""
_EXACTLY = 1 + 1e-9
"""Tolerance within which a round that ends with the time counts as inside of it."""
_MARGIN = 0.02
"""Nats above which a higher expected loss counts as decided, however wide the interval."""
_HOPELESS, _MOST_RACED = 0.1, 6
"""Nats above the choice from which a candidate is not raced, and the most candidates of a race."""
ALONE, SITE_ALONE = "one machine alone", "one site alone"
"""Data parallelism of one worker, which sends nothing, and of the workers of one site."""
_PARTS = {ALONE: -2, "data parallel": 0, SITE_ALONE: 0, "DiLoCo": 1, "GASLoC 2-Peer": 2, "GASLoC 1-Peer": 2}


class Candidate(NamedTuple):
    """A method with its settings, and what it costs."""

    method: str
    codec: str
    back: str | None
    """The codec of the sums that come back from their owners; None where there are no sums, or they come back in fp32."""
    local_steps: tuple[int, ...]
    """Inner steps of each worker in a round."""
    round_s: float
    """Seconds of a round, mean over the planned rounds."""
    round_bytes: float
    """Bytes that a worker sends in a round, mean over the workers."""
    utilisation: float
    """Share of the time spent computing, mean over the workers."""
    seconds_per_token: float
    """Seconds of wall-clock per token of all workers together."""
    between_stages: float = 0.0
    """Share of the time in which the stages of a worker wait for each other, mean over the workers."""
    left_out: tuple[int, ...] = ()
    """Workers of the network that take no part; `local_steps` has those of the others."""
    collective: str = ""
    """How data parallelism carries its all-reduce in the quickest way: "owners", "ring" or "tree"; else empty."""
    unhidden_round_s: float | None = None
    """For data parallelism, the seconds as `gossamer train` sends: as the network says, after the step, not during backward."""

    spread_s: float = 0.0
    """Half of the 95 % interval of `round_s`, where the seconds of a round depend on chance: on jitter, or on who meets whom."""
    site: int = 1
    """Workers of the network that train as one, in data parallelism or FSDP2 inside of their site: those of each entry of
    `local_steps`, which are then sites."""

    @property
    def taken(self) -> int:
        """Inner steps of all workers of the network together in a round."""
        return self.site * sum(self.local_steps)

    @property
    def full_steps(self) -> int:
        """Most inner steps that any worker takes in a round."""
        return max(self.local_steps)

    @property
    def missing(self) -> float:
        """The share of all workers' local steps that the slower workers leave out."""
        return 1 - sum(self.local_steps) / (len(self.local_steps) * self.full_steps)

    @property
    def trained_as(self) -> str:
        """The method with the same rule, whose losses it has."""
        return "data parallel" if self.method in (ALONE, SITE_ALONE) else self.method

    @property
    def parts(self) -> int:
        """The number of parts that can fail."""
        return _PARTS.get(self.method, 3) + (self.codec not in EXACT_CODECS) + bool(self.left_out) + (self.missing > 0)

    @property
    def family(self) -> tuple[str, bool]:
        """The method, whether slow workers take fewer local steps by choice, and whether any worker is left out."""
        uneven = " uneven" if self.missing and self.method == "DiLoCo" else ""
        return f"{self.method}{uneven}{' of sites' if self.site > 1 else ''}", bool(self.left_out)

    @property
    def name(self) -> str:
        """The method in words, with the workers that are left out."""
        words = [self.family[0]]
        if self.left_out and self.trained_as == self.method:
            words.append(f"less {self.left_out[0] if len(self.left_out) == 1 else f'{len(self.left_out)} workers'}")
        return " ".join(words)

    @property
    def fewer(self) -> str:
        """The workers that take fewer local steps, in words; empty where there are none."""
        n = len(self.local_steps) + len(self.left_out)
        numbers = [i for i in range(n) if i not in self.left_out]
        slower = [(i, steps) for i, steps in zip(numbers, self.local_steps, strict=True) if steps < self.full_steps]
        if not slower:
            return ""
        if len(slower) > 3:
            fewest, most = min(steps for _, steps in slower), max(steps for _, steps in slower)
            return f"{len(slower)} workers take {fewest:,}{f' to {most:,}' if most > fewest else ''}"
        return ", ".join(f"worker {i} takes {steps:,}" for i, steps in slower)

    @property
    def dropped(self) -> str:
        """The workers that are left out, in words; empty where there are none."""
        numbers = ", ".join(map(str, self.left_out))
        return f"worker{'s' * (len(self.left_out) > 1)} {numbers}" if numbers else ""

    def penalty(self, scale: LossScale) -> Penalty | None:
        """Its loss at equal tokens; None where that was never measured."""
        if self.method in IN_PAIRS and len(self.local_steps) % 2:
            # In each round one has no partner and trains alone, which costs more than anything else in a few rounds; all of the
            # eight that were measured have one.
            return None
        # The workers of a mean drift as far as their own steps take them: races confirm that, but not for gossip (ADR 44).
        steps = round(fmean(self.local_steps)) if self.method == "DiLoCo" else self.full_steps
        rounds = self._rounds(scale)
        length = scale.steps if rounds is None else rounds * steps
        scale = scale._replace(workers=len(self.local_steps), steps=length)
        return penalty(scale, self.trained_as, steps, self.codec, self.missing)

    def _rounds(self, scale: LossScale) -> float | None:
        """The rounds in which those who take part use up the seconds or the tokens; None where the scale has neither."""
        if scale.seconds is not None:
            return scale.seconds / self.round_s
        return None if scale.steps is None else scale.steps * scale.workers / self.taken


class Pick(NamedTuple):
    """The choice, and how all others compare with it."""

    best: Candidate
    undecided: tuple[Candidate, ...]
    """Other candidates that cannot be distinguished from the one with the lowest loss in the time."""
    scale: LossScale
    tokens: float
    """Tokens that the best one reads in the time."""
    hours: float
    """The time."""

    @property
    def undecided_in_words(self) -> str:
        """The candidates that the choice is not decided from; several of a method that leave out other workers count together."""
        names: dict[tuple[str, bool], set[str]] = {}
        for one in self.undecided:
            if one.name != self.best.name:
                names.setdefault(one.family, set()).add(one.name)
        words = [
            own.pop() if len(own) == 1 else f"{method} without some workers in {len(own)} ways"
            for (method, _), own in sorted(names.items())
        ]
        return ", ".join(words) or f"{self.best.name} with other settings"

    def hours_of(self, candidate: Candidate) -> float:
        """The hours that a candidate needs for the tokens."""
        return self.tokens * candidate.seconds_per_token / 3600

    def tokens_of(self, candidate: Candidate) -> float:
        """The tokens that a candidate reads in the time."""
        return 3600 * self.hours / candidate.seconds_per_token

    def hours_to_loss(self, candidate: Candidate) -> float:
        """Hours until a candidate has the loss of data parallelism after the tokens; infinite where its own loss is not known."""
        if (penalty := candidate.penalty(self.scale)) is None:
            return math.inf
        return self.hours_of(candidate) * math.exp(penalty.nats / self.scale.per_e_fold)

    def loss(self, candidate: Candidate) -> Range | None:
        """The loss in the time, above data parallelism after the tokens; None where it is not known."""
        expected = candidate.penalty(self.scale)
        if expected is None:
            return None
        none = penalty(self.scale, "data parallel", 1, "exact")
        assert none is not None
        return expected_difference(self.scale, expected, none, self.tokens_of(candidate) / self.tokens)

    def too_far(self, candidate: Candidate) -> bool:
        """Whether it reads so many tokens in the time that no loss is extrapolated to them."""
        return self.tokens_of(candidate) > FAR * self.tokens

    def foretold(self, candidate: Candidate) -> bool:
        """Whether its loss is a number to show: not `too_far`, and below that of a model that gives all tokens equal chances."""
        loss = self.loss(candidate)
        return loss is not None and not self.too_far(candidate) and loss.nats <= math.log(self.scale.vocab_size)

    def carried_from(self, candidate: Candidate) -> int | None:
        """The local steps from which its loss is carried to its own, where these are far; None where some near were measured."""
        penalty = candidate.penalty(self.scale)
        return None if penalty is None else penalty.carried_from

    def is_guess(self, candidate: Candidate) -> bool:
        """Whether its loss is carried to local steps and to fewer rounds that are both far from what was measured."""
        penalty = candidate.penalty(self.scale)
        return penalty is not None and penalty.is_guess

    def whole_round(self, candidate: Candidate) -> bool:
        """Whether a round of a candidate ends in the time, and needs no more tokens than there are."""
        return _fits(candidate, self.scale, self.hours)

    def above_best(self, candidate: Candidate) -> Range | None:
        """The loss in the time above that of the best; None where one of them is not known."""
        penalty, best = candidate.penalty(self.scale), self.best.penalty(self.scale)
        return (
            None
            if penalty is None or best is None
            else _difference(self.scale, (candidate, penalty), (self.best, best))
        )


def lower_without_some(choice: Pick, candidates: Iterable[Candidate]) -> Candidate | None:
    """The lowest of the candidates that leave workers out, where it is expected to end lower than the choice by more than 0.005
    nats; None where there is none.
    """
    known = [(above.nats, one) for one in candidates if one.left_out and (above := choice.above_best(one)) is not None]
    nats, lowest = min(known, key=lambda pair: pair[0], default=(0.0, None))
    return lowest if nats < -_AS_LOW else None


def doublings_that_help(choice: Pick, candidates: Iterable[Candidate], most: int) -> int | None:
    """How many times the most local steps that were tried are doubled until a candidate that takes them is expected to end lower
    than the choice, by more than 0.005 nats; None where eight times as many do not suffice.
    """
    at_most = [one for one in candidates if one.full_steps >= max(2, most)]
    for doublings in (1, 2, 3):
        for one in at_most:
            above = choice.above_best(more := _with_more_steps(one, 2**doublings))
            if above is None or above.nats >= -_AS_LOW or not choice.whole_round(more):
                continue
            if not (above.open and choice.is_guess(more)):  # which would not be taken
                return doublings
    return None


def _with_more_steps(candidate: Candidate, times: int) -> Candidate:
    """A candidate with so many times its local steps, whose rounds send as much, and compute so many times as long."""
    busy = candidate.utilisation + candidate.between_stages
    share = busy + (1 - busy) / times
    return candidate._replace(
        local_steps=tuple(times * steps for steps in candidate.local_steps),
        round_s=times * share * candidate.round_s,
        seconds_per_token=share * candidate.seconds_per_token,
    )


_Known = tuple[Candidate, Penalty]


def pick(candidates: Iterable[Candidate], scale: LossScale, hours: float | None = None) -> Pick:
    """The candidate with the lowest expected loss in the time, or of those that are as low, within 0.005 nats, the fastest.

    Within 5 % of the least time, the one with the fewest parts is taken, then the one with the fewest local steps. So also where
    no loss is known. Candidates without a whole round are taken only if all are. One machine alone is
    taken wherever it is as low, within 0.005 nats, as nothing is simpler. Undecided are those that are expected to end 0.02 nats
    above the lowest at most, and the interval of whose difference holds zero.

    A loss that is a guess (`Penalty.is_guess`) counts only where it is significantly lower than the lowest of all others.

    Args: `hours` is the time; unless given, what the choice needs for the tokens of the scale.
    """
    candidates = list(candidates)
    candidates = [one for one in candidates if _fits(one, scale, hours)] or candidates
    known = [(one, penalty) for one in candidates if (penalty := one.penalty(scale)) is not None]
    alike = undecided = candidates

    def in_time(pair: _Known) -> float:
        return pair[1].nats + scale.per_e_fold * math.log(pair[0].seconds_per_token)

    alone = list[Candidate]()
    if known:
        surest = min((pair for pair in known if not pair[1].is_guess), key=in_time, default=None)

        def counts(pair: _Known) -> bool:
            if surest is None or not pair[1].is_guess:
                return True
            above = _difference(scale, pair, surest)
            return above.nats < 0 and not above.open

        lowest = min(filter(counts, known), key=in_time)
        alone = [pair[0] for pair in known if pair[0].method == ALONE and in_time(pair) <= in_time(lowest) + _AS_LOW]
        apart = [(pair, _difference(scale, pair, lowest)) for pair in known if pair is not lowest]
        open_ = [(pair, above.nats) for pair, above in apart if above.open and above.nats <= _MARGIN]
        undecided = [lowest[0], *(pair[0] for pair, _ in open_)]
        alike = [lowest[0], *(pair[0] for pair, nats in open_ if nats <= _AS_LOW and counts(pair))]
    alike = alone or alike
    fastest = min(one.seconds_per_token for one in alike)
    near = [one for one in alike if one.seconds_per_token <= _AS_FAST * fastest]
    best = min(near, key=lambda one: (one.parts, one.full_steps, one.seconds_per_token))
    tokens = scale.tokens if hours is None else 3600 * hours / best.seconds_per_token
    time = tokens * best.seconds_per_token / 3600
    return Pick(best, tuple(one for one in undecided if one is not best), scale, tokens, time)


def _fits(candidate: Candidate, scale: LossScale, hours: float | None) -> bool:
    """Whether a round ends within the tokens, and within the hours where these are given."""
    in_time = hours is None or candidate.round_s <= _EXACTLY * 3600 * hours
    return in_time and candidate.round_s <= _EXACTLY * scale.tokens * candidate.seconds_per_token


def _difference(scale: LossScale, one: _Known, other: _Known) -> Range:
    return expected_difference(scale, one[1], other[1], other[0].seconds_per_token / one[0].seconds_per_token)


def best_of_each(choice: Pick, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """The best candidate of each method, with all workers and without some; the best of all stands for its own method."""
    families: dict[tuple[str, bool], list[Candidate]] = {}
    for one in candidates:
        families.setdefault(one.family, []).append(one)
    for family, members in families.items():
        yield choice.best if family == choice.best.family else pick(members, choice.scale).best


def shortlist(choice: Pick, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that a race tries: the choice, the same with fewer and more local steps, and the best of other families.

    Families come in the order of their expected loss. Left out are those whose loss is not known, and those that are expected to
    end more than a tenth of a nat above the choice even at the lower end of their interval.
    """
    known = [one for one in candidates if one.penalty(choice.scale) is not None]
    best, tried = choice.best, [choice.best]
    same_family = [one for one in known if (one.family, one.left_out) == (best.family, best.left_out)]
    for side in (
        max((one.full_steps for one in same_family if one.full_steps < best.full_steps), default=None),
        min((one.full_steps for one in same_family if one.full_steps > best.full_steps), default=None),
    ):
        if side is not None:
            tried.append(pick([one for one in same_family if one.full_steps == side], choice.scale).best)

    def above(candidate: Candidate) -> Range:
        stands = choice.above_best(candidate)
        assert stands is not None
        return stands

    others = [one for one in best_of_each(choice, known) if one.family != best.family]
    tried += sorted(others, key=lambda one: above(one).nats)
    return [one for one in tried if one is best or above(one).nats - above(one).half <= _HOPELESS][:_MOST_RACED]


PLAN_HEADINGS = (
    "method",
    "codec there, back",
    "local steps",
    "computing",
    "hours",
    "tokens",
    "loss (nats)",
    "above the choice (nats)",
)
"""Headings of the columns of `plan_rows`."""
NOT_MEASURED, NOT_FORETOLD, CARRIED = "not measured", "not foretold", "*"


def format_codecs(candidate: Candidate) -> str:
    """The codec of each direction: of what goes to the owners of a mean, and of their sums; one where each message is whole.

    >>> format_codecs(Candidate("DiLoCo", "fp4", "bf16", (30,) * 8, 1.0, 1.0, 0.9, 1.0))
    'fp4, bf16'
    """
    if candidate.method == ALONE:
        return "none"
    whole = candidate.back is None and (candidate.codec not in EXACT_CODECS or candidate.method.startswith("GASLoC"))
    return candidate.codec if whole else f"{candidate.codec}, {candidate.back or candidate.codec}"


def hours_text(choice: Pick, candidate: Candidate) -> str:
    """The hours that a candidate needs for the tokens, with their spread by chance where that is a thousandth or more."""
    hours = choice.hours_of(candidate)
    return spread_text(hours, hours * candidate.spread_s / candidate.round_s if candidate.round_s else 0.0)


def plan_rows(choice: Pick, candidates: Iterable[Candidate]) -> list[tuple[str, ...]]:
    """Candidates as text, for a table under `PLAN_HEADINGS`."""
    rows = list[tuple[str, ...]]()
    for one in candidates:
        most, fewest = one.full_steps, min(one.local_steps)
        loss, above = choice.loss(one), choice.above_best(one)
        stands = "" if above is None else "cannot tell apart" if above.open else str(above)
        mark = "" if choice.carried_from(one) is None else CARRIED
        nats = NOT_MEASURED if loss is None else f"{loss.nats:+z.3f}{mark}"
        if loss is not None and above is not None and not choice.foretold(one):
            nats, stands = NOT_FORETOLD, stands if above.open else "lower" if above.nats < 0 else "higher"
        if one == choice.best:
            stands = "chosen"
        elif not choice.whole_round(one):
            stands = "no whole round"
        rows.append(
            (
                one.name,
                format_codecs(one),
                f"{most:,}" if fewest == most else f"{fewest:,}-{most:,}",
                f"{one.utilisation:.1%}",
                hours_text(choice, one),
                f"{choice.tokens_of(one):.3g}",
                nats,
                stands,
            )
        )
    return rows


def notes_on(choice: Pick, candidates: Iterable[Candidate]) -> list[str]:
    """What words and marks mean in those rows of a plan that have them, a sentence each."""
    known, notes = [one for one in candidates if choice.loss(one) is not None], list[str]()
    if not all(map(choice.foretold, known)):
        notes.append(
            f"{NOT_FORETOLD}: after more than {FAR} times the tokens of the plan, which no measurement reaches, or no lower than "
            "without any training"
        )
    if carried := sorted({(one.method, steps) for one in known if (steps := choice.carried_from(one)) is not None}):
        nearest = ", ".join(f"{method} with {steps}" for method, steps in carried)
        notes.append(
            f"{CARRIED}: carried from the nearest local steps that were measured, over a factor of more than {FAR_STEPS}: "
            f"{nearest}"
        )
    if any(map(choice.is_guess, known)):
        notes.append(
            f"a row with {CARRIED} and fewer rounds than were measured is taken only if it is significantly lower than all others"
        )
    return notes


def leading(choice: Pick, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The rows that are shown: of each family the best, in the order of their expected loss, the choice first.

    Of more than eight the highest are left out, but none of data parallelism with all workers, of one machine and of one site.
    """
    rows = list(best_of_each(choice, candidates))

    def stands(candidate: Candidate) -> tuple[bool, float]:
        above = choice.above_best(candidate)
        return candidate != choice.best, math.inf if above is None else above.nats

    rows.sort(key=stands)
    kept = [one for one in rows if one == choice.best or one.family in _ALWAYS or one.method in (ALONE, SITE_ALONE)]
    kept += [one for one in rows if one not in kept][: _MOST_SHOWN - len(kept)]
    return [one for one in rows if one in kept]


_MOST_SHOWN = 8
_ALWAYS = (("data parallel", False),)
"""Families that are shown in any case."""
