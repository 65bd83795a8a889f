"""What candidates are expected to lose: near what was measured, far from it, and by difference."""

from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.report.results import read_results
from gossamer.run.planning.choice import Candidate
from gossamer.run.planning.expected_loss import (
    PUBLISHED,
    Law,
    LossScale,
    Penalty,
    expected_difference,
    penalty,
    read_law,
)
from gossamer.run.planning.measured_losses import EVERY_STEP, MEASURED


def scale(parameters: float = 139_584, workers: int = 8, each: float = 20, vocab_size: int = 256) -> LossScale:
    return LossScale(int(parameters), workers, each * parameters, vocab_size)


def known(at: LossScale, method: str, steps: int, codec: str = "exact") -> Penalty:
    found = penalty(at, method, steps, codec)
    assert found is not None
    return found


def test_differences_are_paired_by_seed_and_turn_round_with_their_sides() -> None:
    at = scale()
    above = expected_difference(at, known(at, "GASLoC 2-Peer", 30), known(at, "DiLoCo", 120))
    assert (round(above.nats, 3), round(above.half, 3)) == (-0.09, 0.037) and not above.open
    again = expected_difference(at, known(at, "DiLoCo", 120), known(at, "GASLoC 2-Peer", 30))
    assert again.nats == pytest.approx(-above.nats) and again.half == pytest.approx(above.half)


def test_at_a_published_size_the_gap_is_the_published_one_and_methods_are_not_significantly_different() -> None:
    at = scale(134e6, vocab_size=32_000)
    data_parallel = known(at, "data parallel", 1)
    above = expected_difference(at, known(at, "DiLoCo", 30), data_parallel)
    assert above.nats == pytest.approx(21.051 * 134e6**-0.1018 - 18.129 * 134e6**-0.0953) and not above.open
    for method, steps in (("GASLoC 2-Peer", 30), ("GASLoC 1-Peer", 120), ("DiLoCo", 120)):
        assert expected_difference(at, known(at, method, steps), known(at, "DiLoCo", 30)).open
    assert at.outside == ["134,000,000 parameters"] and not scale().outside


@pytest.mark.parametrize("far", [scale(1e6), scale(workers=32), scale(each=80)])
def test_an_interval_grows_with_the_distance_from_what_was_measured(far: LossScale) -> None:
    near = scale()
    close, wide = (
        expected_difference(at, known(at, "GASLoC 1-Peer", 30), known(at, "DiLoCo", 30)) for at in (near, far)
    )
    assert wide.half / abs(wide.nats) > 1.5 * close.half / abs(close.nats) and far.outside


def test_both_laws_meet_between_what_was_measured_and_what_was_published() -> None:
    for parameters in (139_584, 35e6):
        below, above = scale(parameters * 0.999), scale(parameters * 1.001)
        for name in ("level", "gap", "per_e_fold"):
            assert getattr(below, name) == pytest.approx(getattr(above, name), rel=0.01), (parameters, name)
    for each in (0.2, 2, 200):
        below, above = (scale(35e6 * part)._replace(tokens=each * 35e6 * part).per_e_fold for part in (0.999, 1.001))
        assert below == pytest.approx(above, rel=0.01), "with as many tokens for each parameter"
    gaps = [scale(parameters).gap / scale(parameters).level for parameters in (1.4e5, 1e6, 1e7, 1e8, 1e9)]
    assert gaps == sorted(gaps, reverse=True), "the gap falls with size"


def test_a_cast_is_exact_a_measured_codec_widens_the_interval_and_any_other_is_not_known() -> None:
    at = scale()
    exact, cast, four = (known(at, "DiLoCo", 30, codec) for codec in ("exact", "bf16", "fp4"))
    assert exact == cast and expected_difference(at, exact, cast) == (0.0, 0.0)
    above = expected_difference(at, four, cast)
    assert (
        above.open and above.nats == pytest.approx(0.0028, abs=1e-4) and above.half == pytest.approx(0.0055, abs=1e-4)
    )
    assert expected_difference(at, known(at, "DiLoCo", 120, "fp4"), known(at, "DiLoCo", 120)).half > above.half
    assert penalty(at, "DiLoCo", 30, "topk") is None and penalty(at, "GASLoC 1-Peer", 30, "fp4") is None
    assert penalty(at, "data parallel", 1, "int8") is None and penalty(at, "sgp", 1, "exact") is None
    gossip = expected_difference(at, known(at, "GASLoC 1-Peer", 30, "int8"), known(at, "GASLoC 1-Peer", 30))
    sparse = expected_difference(at, known(at, "DiLoCo", 30, "topk2bit"), exact)
    assert abs(gossip.nats) < 0.005 < 0.2 < sparse.nats


def test_tokens_that_are_not_read_count_as_loss_in_both_directions() -> None:
    at, one = scale(), known(scale(), "DiLoCo", 30)
    fewer, more = expected_difference(at, one, one, 0.5), expected_difference(at, one, one, 2.0)
    assert fewer.nats == pytest.approx(-more.nats) and fewer.nats > 0 and fewer.half == more.half > 0


LAW = Law(floor=0.9, scale=40.0, power=0.25, tokens=(1e6, 1e8))


@given(st.floats(1.2, 2.0))
def test_a_law_finds_the_tokens_at_which_it_has_a_loss_and_its_slope_there(loss: float) -> None:
    tokens = LAW.tokens_for(loss)
    assert LAW.floor + LAW.scale * tokens**-LAW.power == pytest.approx(loss)
    fewer, more = (LAW.floor + LAW.scale * (tokens * k) ** -LAW.power for k in (0.999, 1.001))
    assert LAW.per_e_fold(tokens) == pytest.approx((fewer - more) / 0.002, rel=1e-3)
    assert scale()._replace(own_per_e_fold=LAW.per_e_fold(tokens)).per_e_fold == LAW.per_e_fold(tokens)
    more = tokens * LAW.times_as_many(loss, 0.1)
    assert LAW.floor + LAW.scale * more**-LAW.power == pytest.approx(loss - 0.1)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (0.9, "the loss to reach is 0.9 and the law has floor = 0.9"),
        (0.95, "was fitted from 1e\\+06"),
        (9.0, "within ten times"),
    ],
)
def test_a_loss_that_a_law_does_not_reach_or_only_far_away_is_refused(loss: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LAW.tokens_for(loss)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("floor = 1.0\nscale = 2.0\npower = 0.2\n", "tokens"),
        ("floor = -1.0\nscale = 2.0\npower = 0.2\ntokens = [1.0, 2.0]\n", "floor"),
        ("floor = 1.0\nscale = 2.0\npower = 0.2\ntokens = [2.0, 1.0]\n", "write the fewest first"),
        ("floor = 1.0\nslope = 2.0\npower = 0.2\ntokens = [1.0, 2.0]\n", "slope"),
        ("floor = \n", "law.toml"),
    ],
)
def test_a_file_that_is_no_law_is_refused_in_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "law.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_law(file)
    with pytest.raises(ConfigError, match="is not a file"):
        read_law(tmp_path / "other.toml")


def longer(times: float, parameters: float = 139_584) -> LossScale:
    return scale(parameters, each=20 * times)._replace(steps=1350 * times)


def test_in_longer_runs_the_gap_is_smaller_and_diloco_with_long_phases_loses_less_of_it() -> None:
    once, twice, four = longer(1), longer(2), longer(4)
    assert four.gap < twice.gap < once.gap and [at.length for at in (once, twice, four)] == pytest.approx([0, 0.5, 1])
    shares = [known(at, "DiLoCo", 120).nats / at.gap for at in (once, twice, four)]
    assert shares[0] > shares[1] > shares[2] > 1 and shares[1] == pytest.approx((shares[0] + shares[2]) / 2)
    assert known(four, "DiLoCo", 30).nats == pytest.approx(four.gap)
    streaming = [known(at, "streaming_diloco", 30).nats / known(at, "DiLoCo", 30).nats for at in (once, four)]
    assert streaming[0] == pytest.approx(streaming[1], rel=0.05), "which was measured at one length"


@pytest.mark.parametrize("times", [1.0, 2.0, 4.0])
def test_an_interval_does_not_jump_with_the_length_of_a_run(times: float) -> None:
    below, above = (
        expected_difference(at, known(at, "GASLoC 2-Peer", 30), known(at, "DiLoCo", 60))
        for at in (longer(times * 0.999), longer(times * 1.001))
    )
    assert below == pytest.approx(above, rel=0.02, abs=1e-4)


def test_a_run_shorter_than_the_measured_ones_loses_as_much_and_a_longer_one_is_doubted_for_what_changes() -> None:
    half, once, four, sixteen = (longer(times) for times in (0.5, 1, 4, 16))
    assert known(half, "DiLoCo", 120).by_seed == known(once, "DiLoCo", 120).by_seed
    assert known(once, "DiLoCo", 120).beyond == known(four, "DiLoCo", 120).beyond == 0
    shares = [known(at, "DiLoCo", 120).nats / at.gap for at in (once, four, sixteen)]
    assert shares[1] == pytest.approx(shares[2])
    doubt = known(sixteen, "DiLoCo", 120).beyond / sixteen.gap
    assert doubt == pytest.approx(shares[0] - shares[1]), "four times as long again changes it as much, at most"


def test_where_the_time_is_the_goal_a_candidate_has_the_steps_that_it_takes_in_it() -> None:
    at = longer(4)._replace(seconds=5400.0)
    fast, slow = (Candidate("DiLoCo", "bf16", None, (120,) * 8, s * 120, 1.0, 0.9, s / 2048) for s in (1.0, 4.0))
    own = [one.penalty(at) for one in (fast, slow)]
    assert own == [known(longer(times)._replace(tokens=at.tokens), "DiLoCo", 120) for times in (4, 1)]


def test_local_steps_that_some_workers_leave_out_widen_an_interval_and_move_no_mean() -> None:
    at = scale()
    even, uneven = (penalty(at, "DiLoCo", 30, "exact", missing) for missing in (0.0, 0.25))
    assert even is not None and uneven is not None and even.nats == uneven.nats
    apart = expected_difference(at, even, uneven)
    assert apart.nats == 0.0 and apart.half == pytest.approx(at.gap / 4)


_SIZES, _TIMES = st.floats(1e5, 1e10), st.floats(0.3, 300)
_METHODS = sorted({*MEASURED} - {"data parallel", *EVERY_STEP})


@given(_SIZES, st.integers(2, 64), _TIMES, st.sampled_from(_METHODS), st.integers(5, 100_000), st.integers(5, 100_000))
@settings(max_examples=300, deadline=None)
def test_more_local_steps_are_never_expected_to_cost_less_from_five_on(
    parameters: float, workers: int, times: float, method: str, some: int, others: int
) -> None:
    at = scale(parameters, workers)._replace(steps=1350 * times)
    fewer, more = (known(at, method, steps).nats for steps in sorted((some, others)))
    assert fewer <= more + 1e-9


@given(_SIZES, st.integers(1, 63), _TIMES, st.integers(5, 5000))
@settings(max_examples=300, deadline=None)
def test_more_workers_are_never_expected_to_lose_less_to_data_parallelism(
    parameters: float, workers: int, times: float, steps: int
) -> None:
    few, many = (
        known(scale(parameters, n)._replace(steps=1350 * times), "DiLoCo", steps).nats for n in (workers, workers + 1)
    )
    assert 0 <= few <= many + 1e-9


RUNS = {
    35e6: {1: 3.482, 2: 3.508, 4: 3.554, 8: 3.621, 0: 3.485},
    550e6: {1: 2.645, 2: 2.657, 4: 2.673, 8: 2.698, 0: 2.653},
    1.3e9: {1: 2.451, 2: 2.464, 4: 2.472, 8: 2.493, 0: 2.460},
    2.4e9: {1: 2.317, 2: 2.323, 4: 2.332, 8: 2.351, 0: 2.326},
    4e9: {1: 2.219, 2: 2.220, 4: 2.230, 0: 2.224},
    10e9: {1: 2.086, 2: 2.086, 4: 2.096, 0: 2.090},
}
"""Losses of DiLoCo with 30 local steps by size and replicas, 0 for data parallelism: arXiv 2503.09799."""


@pytest.mark.parametrize("parameters", RUNS)
def test_what_a_paper_measured_lies_in_the_interval_at_its_size_by_workers(parameters: float) -> None:
    own = RUNS[parameters]
    for n, loss in own.items():
        if n > 1:
            at = scale(parameters, n, vocab_size=32_000)
            gap = expected_difference(at, known(at, "DiLoCo", 30), known(at, "data parallel", 1))
            assert abs(loss - own[0] - gap.nats) <= gap.half, (n, loss - own[0], gap)
            assert parameters > 35e6 or abs(loss - own[0] - gap.nats) < 0.008, "and near it where gaps are large"


@pytest.mark.parametrize("method", PUBLISHED)
def test_from_the_size_of_a_paper_on_a_method_stands_to_diloco_as_it_does_there(method: str) -> None:
    for parameters in (PUBLISHED[method].parameters, 4 * PUBLISHED[method].parameters):
        at = scale(parameters, 4, vocab_size=32_000)
        stands = expected_difference(at, known(at, method, 30), known(at, "DiLoCo", 30))
        assert stands.nats == pytest.approx(PUBLISHED[method].share * at.level, abs=1e-9)
        assert stands.half >= PUBLISHED[method].half * at.level


@pytest.mark.parametrize("method", sorted(EVERY_STEP))
def test_what_exchanges_at_every_step_pays_for_no_few_rounds_and_has_no_loss_with_more_local_steps(method: str) -> None:
    for parameters in (139_584, 5e6, 35e6, 1e9):
        short, long = scale(parameters)._replace(steps=1350), scale(parameters)._replace(steps=5400)
        assert (
            known(short, method, 1).few_rounds == 0.0 < known(short, method, 1).nats < known(short, "DiLoCo", 30).nats
        )
        assert known(long, method, 1).nats / long.gap > known(short, method, 1).nats / short.gap, "its lead shrinks"
        assert penalty(short, method, 2, "topk") is None


def test_one_worker_has_no_gap_and_two_in_pairs_are_everyone() -> None:
    for parameters in (139_584, 5e6, 1e9):
        alone, two = scale(parameters, 1), scale(parameters, 2)
        assert alone.gap == known(alone, "DiLoCo", 480).nats == known(alone, "data parallel", 1).nats == 0
        assert known(two, "GASLoC 1-Peer", 60) == known(two, "DiLoCo", 60)
        assert known(scale(parameters, 4), "GASLoC 1-Peer", 60) != known(scale(parameters, 4), "DiLoCo", 60)


def test_one_local_step_is_the_worst_at_published_sizes_and_the_best_where_it_was_measured_so() -> None:
    small, large = scale(), scale(35e6)
    assert known(small, "DiLoCo", 1).nats < known(small, "DiLoCo", 5).nats
    assert known(large, "DiLoCo", 1).nats >= known(large, "DiLoCo", 120).nats * (1 - 1e-9)
    assert known(large, "DiLoCo", 1).beyond > 0


def test_few_rounds_have_a_price_of_at_most_what_all_workers_gain_together() -> None:
    at = scale(134e6, 2, vocab_size=32_000)._replace(steps=1e6)
    losses = [known(at, "DiLoCo", steps) for steps in (480, 50_000, 200_000, 1_000_000)]
    assert losses[0].few_rounds == 0 < min(one.few_rounds for one in losses[1:])
    assert losses[0].nats < losses[1].nats < losses[2].nats
    assert all(one.beyond >= one.few_rounds for one in losses), "which is doubt"
    assert losses[3].nats == pytest.approx(at.per_e_fold * 0.6931, rel=1e-3), "one round is what each reads alone"
    measured = longer(4)
    assert known(measured, "DiLoCo", 120).few_rounds == 0, "where the price was measured"


def paired(stem: str, one: str, other: str, **at: object) -> float:
    """The mean difference of two arms in committed outcomes, seed by seed."""
    file = Path(__file__).parents[3] / "docs" / "results" / "evidence" / f"{stem}.jsonl"
    some = [row for row in read_results(file) if all(row.at.get(key) == value for key, value in at.items())]
    losses = {(row.method, row.seed): row.row["loss"] for row in some}
    seeds = [seed for method, seed in losses if method == one and (other, seed) in losses]
    return fmean(losses[one, seed] - losses[other, seed] for seed in seeds)


@pytest.mark.parametrize(
    ("stem", "one", "other", "at", "methods"),
    [
        ("tuned_again-prose", "GASLoC 2-Peer", "DiLoCo", scale(), ("GASLoC 2-Peer", "DiLoCo")),
        ("tuned_again-prose", "GASLoC 1-Peer", "DiLoCo", scale(), ("GASLoC 1-Peer", "DiLoCo")),
        ("size-870k", "GASLoC 1-Peer", "DiLoCo", scale(869_504), ("GASLoC 1-Peer", "DiLoCo")),
        ("cells_tuned-n32", "GASLoC 2-Peer", "DiLoCo", scale(workers=32), ("GASLoC 2-Peer", "DiLoCo")),
    ],
)
def test_runs_on_another_text_at_another_size_and_with_more_workers_lie_in_the_interval(
    stem: str, one: str, other: str, at: LossScale, methods: tuple[str, str]
) -> None:
    first, second = (known(at, method, 30) for method in methods)
    stands = expected_difference(at, first, second)
    assert abs(paired(stem, one, other) - stands.nats) <= stands.half
