"""Every codec does what its tags claim, and its payload is what its formula says, to the byte."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from codecs_in_use import VARIANTS
from drifted_rounds import play
from gossamer.codecs import (
    CODECS,
    Codec,
    bf16,
    both_ways,
    cocktail,
    codec_of,
    dct_topk,
    fitted,
    fp4,
    int4,
    int8,
    int8_statistical,
    make_codec,
    packing,
    passes,
    randomk,
    sign,
    topk,
    topk2bit,
)
from gossamer.codecs.blocks import SLAB
from gossamer.codecs.by_part import by_part
from gossamer.codecs.cut import tiles
from gossamer.codecs.dct import dct
from gossamer.codecs.packing import lookup, num_bytes, pack_codes, pack_indices, unpack_codes, unpack_indices
from gossamer.codecs.topk import num_kept
from gossamer.errors import ConfigError, TransportError
from gossamer.layout import Layout, Leaf, layout_of
from gossamer.models.llama import build_model
from gossamer.rules import gasloc
from gossamer.run.config.document import with_settings
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import parse
from gossamer.run.planning.traffic import traffic
from gossamer.settings.options import options_of
from gossamer.testing.drifted_workers import random_vectors
from gossamer.topologies import make_topology
from gossamer.tree import leaves, nbytes

every_codec = pytest.mark.parametrize("codec", [pytest.param(codec, id=name) for name, codec in VARIANTS.items()])
LENGTHS = (0, 1, 2, 3, 63, 64, 65, 255, 1000, 4095, 4096, 4097, 3 * 4096 + 5, SLAB + 4096 + 1)


def tagged(tag: str) -> pytest.MarkDecorator:
    """The codecs for which a tag is set."""
    rows = [pytest.param(codec, id=name) for name, codec in VARIANTS.items() if getattr(codec, tag)]
    assert rows, tag
    return pytest.mark.parametrize("codec", rows)


def gaussian(numel: int, seed: int = 0) -> Tensor:
    """Numbers whose seed is far from all keys, so that what is drawn does not depend on them."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed + 10**9))


def through(codec: Codec, x: Tensor, key: int = 0) -> Tensor:
    """What a receiver makes of x."""
    return codec.decode(codec.encode(x, key), x)


def lost(codec: Codec, x: Tensor, key: int = 0) -> float:
    """||x - x'||² / ||x||²."""
    return ((x - through(codec, x, key)).double().square().sum() / x.double().square().sum()).item()


safe_floats = st.floats(2**-50, 2**50, width=32) | st.floats(-(2**50), -(2**-50), width=32) | st.just(0.0)


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Hard cases for quantizers: few values of any magnitudes, repeated, shuffled, with outliers, of many lengths."""
    numel = draw(st.sampled_from([n for n in LENGTHS if n]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    kind = draw(st.sampled_from(["values", "gauss", "tails", "half a step"]))
    if kind == "values":
        values = torch.tensor(draw(st.lists(safe_floats, min_size=1, max_size=20)))
        x = values[torch.randint(0, len(values), (numel,), generator=generator)]
    elif kind == "gauss":
        x = torch.randn(numel, generator=generator)
    elif kind == "tails":
        x = torch.randn(numel, generator=generator) / torch.rand(numel, generator=generator).clamp(min=1e-6)
    else:  # one large element, and all others where a quantizer loses most of them
        x = torch.full(
            (numel,), draw(st.sampled_from([1 / 14, 1 / 254, 2**-7, 2**-6, 1 / 60])) * draw(st.floats(0.9, 1.1))
        )
        x[numel // 2] = 1.0
    x[0] = x[0] if x.any() else 1.0
    return x


# What tags claim


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "codec", [pytest.param(c, id=name) for name, c in VARIANTS.items() if c.contraction and not c.draws]
)
@settings(max_examples=12, deadline=None)
@given(x=vectors())
@example(x=torch.cat((torch.ones(64), torch.full((4032,), 0.999))))
@example(x=torch.cat((torch.ones(1), torch.full((4095,), 1 / 254))))
def test_a_codec_loses_at_most_the_share_that_its_contraction_leaves(codec, x):
    assert 0 < codec.contraction <= 1
    assert lost(codec, x) <= 1 - codec.contraction + 1e-5


@pytest.mark.parametrize(
    "codec", [pytest.param(c, id=name) for name, c in VARIANTS.items() if c.contraction and c.draws]
)
@pytest.mark.parametrize("kind", ["gauss", "outlier", "even"])
def test_a_codec_that_draws_loses_at_most_that_share_in_the_mean_over_keys(codec, kind):
    x = {
        "gauss": gaussian(1000),
        "outlier": torch.cat((torch.ones(1), torch.full((254,), 2**-7))),
        "even": torch.ones(777),
    }[kind]
    losses = torch.tensor([lost(codec, x, key) for key in range(60)])
    assert losses.mean() - 5 * losses.std() / math.sqrt(60) <= 1 - codec.contraction + 1e-5


@tagged("unbiased")
def test_the_mean_over_keys_of_an_unbiased_codec_is_the_tensor(codec):
    x = gaussian(515)
    draws = torch.stack([through(codec, x, key) for key in range(300)])
    spread = draws.std(0) / math.sqrt(300)
    rare = 10 / 300 * (draws - x).abs().max()  # a jump too improbable to be seen leaves no spread
    assert ((draws.mean(0) - x).abs() <= 5 * spread + rare + 1e-6 * x.abs()).all()


def test_rounding_to_nearest_is_not_unbiased_so_the_test_above_can_fail():
    x = gaussian(515)
    assert (through(fp4(), x) - x).abs().max() > 0.1
    assert not fp4().unbiased


@tagged("linear")
def test_a_linear_codec_is_linear_for_every_key(codec):
    x, y = gaussian(1001).double(), gaussian(1001, 1).double()
    for key in (0, 12345):
        expected = 0.3 * through(codec, x, key) - 2 * through(codec, y, key)
        torch.testing.assert_close(through(codec, 0.3 * x - 2 * y, key), expected)


@tagged("blockwise")
@pytest.mark.parametrize("blocks", [1, 3])
def test_whole_blocks_are_encoded_independently_to_the_last_bit(codec, blocks):
    x = gaussian(max(5 * codec.blockwise, 50) + 3)
    cut = blocks * codec.blockwise
    pieces = torch.cat([through(codec, x[:cut]), through(codec, x[cut:])])
    assert torch.equal(through(codec, x), pieces)


@every_codec
def test_the_key_matters_exactly_when_a_codec_draws(codec):
    x = gaussian(2000)
    assert torch.equal(through(codec, x, 1), through(codec, x, 2)) != codec.draws


@tagged("exact")
def test_an_exact_codec_changes_no_bit(codec):
    x = torch.tensor([1.1, -0.0, math.inf, math.nan, 1e-45])
    assert torch.equal(through(codec, x).view(torch.int32), x.view(torch.int32))


# Payloads


@every_codec
@settings(max_examples=6, deadline=None)
@given(numel=st.integers(0, 30_000))
def test_a_payload_has_the_bytes_that_the_formula_says(codec, numel):
    """Of data, too, as the next test says, which has the lengths that are on edges."""
    payload = codec.encode(torch.empty(numel, device="meta"), 0)
    assert nbytes(payload) == codec.payload_bytes(numel)


@pytest.mark.sampled(16)
@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_of_a_payload_are_known_without_data(codec, dtype):
    for numel in LENGTHS:
        real = leaves(codec.encode(gaussian(numel).to(dtype), 7))
        meta = leaves(codec.encode(torch.empty(numel, dtype=dtype, device="meta"), 0))
        assert all(frame.is_meta and frame.dim() == 1 for frame in meta)
        assert [(f.shape, f.dtype) for f in real] == [(f.shape, f.dtype) for f in meta]
        assert dtype != torch.float32 or nbytes(tuple(real)) == codec.payload_bytes(numel)


def test_two_bit_values_and_their_places_take_14_bits_and_the_whole_140_times_less_than_fp32():
    codec, numel = topk2bit(), 10 * 4096
    payload = codec.encode(gaussian(numel), 0)
    kept = num_kept(numel, 64, 4096)
    assert kept == 640
    assert 8 * (nbytes(payload.indices) + nbytes(payload.codes)) == 14 * kept
    assert 4 * numel / nbytes(payload) >= 141
    assert all(4 * n / codec.payload_bytes(n) >= 140 for n in (4096, 1_000_003, 123_456_789))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("exact", 32),
        ("bf16", 16),
        ("fp16", 16),
        ("int8", 8 + 1 / 128),
        ("int8_statistical", 8),
        ("int4", 4.25),
        ("fp4", 4.0625),
        ("sign", 1 + 1 / 64),
        ("topk", 0.6875),
        ("topk2bit", 0.2265625),
        ("dct_topk", 0.6875),
        ("randomk", 0.5),
        ("cocktail", 0.1825),
    ],
)
def test_bits_per_element_are_those_in_the_documentation(name, bits):
    numel = 10 * 1280 * 1024
    assert 8 * CODECS[name]().payload_bytes(numel) / numel == pytest.approx(bits, rel=2e-4)


def test_every_row_of_the_table_is_named_as_its_codec_and_priced():
    assert all(factory().name == name and factory().payload_bytes for name, factory in CODECS.items())


# What goes in and comes out


@pytest.mark.sampled(16)
@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_arrive_as_zeros_of_the_same_dtype(codec, dtype):
    for numel in LENGTHS:
        x = torch.zeros(numel, dtype=dtype)
        y = through(codec, x)
        assert y.dtype == dtype
        assert torch.equal(x, y)
        assert not y.signbit().any()


@pytest.mark.parametrize("codec", [pytest.param(c, id=name) for name, c in VARIANTS.items() if c.name != "dct_topk"])
def test_a_single_element_arrives_but_for_its_rounding(codec):
    for value in (1.0, -0.3, -12345.0):
        x = torch.tensor([value])
        torch.testing.assert_close(through(codec, x), x, rtol=2**-7, atol=0)


@every_codec
def test_tensors_with_gaps_in_memory_are_encoded_as_those_without(codec):
    x = gaussian(20_001)
    assert not x[::2].is_contiguous()
    assert torch.equal(through(codec, x[::2]), through(codec, x[::2].clone()))
    assert torch.equal(through(codec, x[1:]), through(codec, x[1:].clone()))  # another alignment


@every_codec
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_arrive_as_fp32_does_but_for_their_own_rounding(codec, dtype):
    x = gaussian(5000).to(dtype)
    y = through(codec, x)
    assert y.dtype == dtype
    expected = through(codec, x.float())
    loss = (y.double() - expected.double()).norm() / expected.double().norm()
    assert loss < 2**-7 if dtype != torch.float64 or "bf16" in codec.name else loss < 1e-5


@every_codec
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_a_program_changes_no_bit(codec, kind, monkeypatch):
    monkeypatch.setattr(packing, "_byte_table", packing._byte_table.__wrapped__)  # whose cache would hide it
    for x in random_vectors(1, 1000)[0], random_vectors(1, passes.LONG + 4097)[0].float():
        arrived = codec.decode(codec.encode(x, 3), x)
        torch.set_default_dtype(kind)
        try:
            made = make_codec(codec.name, **codec.options)
            again = made.decode(made.encode(x, 3), x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(arrived, again)


@every_codec
def test_inputs_are_left_alone(codec):
    x = gaussian(5000)
    before, version = x.clone(), x._version
    payload = codec.encode(x, 3)
    frames = [frame.clone() for frame in leaves(payload)]
    codec.decode(payload, x)
    assert torch.equal(x, before)
    assert x._version == version
    assert all(torch.equal(a, b) for a, b in zip(frames, leaves(payload), strict=True))


@pytest.mark.parametrize(  # the others do the same, on other lengths
    "name", [*CODECS, "int8 stochastic", "int4 stochastic", "fp4 stochastic", "topk2bit in runs"]
)
def test_equal_tensors_and_keys_give_equal_payloads_whatever_the_number_of_threads(name):
    codec = VARIANTS[name]
    x = gaussian(SLAB + 77)  # torch divides what is longer than 2¹⁵ among threads
    threads = torch.get_num_threads()
    payloads = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            payload = codec.encode(x, 5)
            payloads.append([*leaves(payload), codec.decode(payload, x)])
    finally:
        torch.set_num_threads(threads)
    for other in payloads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(payloads[0], other, strict=True))


@pytest.mark.sampled(24)
@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_never_arrives_as_one(codec, bad):
    for numel, where in ((1, 0), (40, 7), (9000, 8999), (9000, 4000)):
        x = gaussian(numel)
        clean = through(codec, x)
        x[where] = bad
        y = through(codec, x)
        may_be_left_out = codec.draws and codec.name in ("randomk", "cocktail") and numel > 1
        assert not y[where].isfinite() or (may_be_left_out and y[where] == 0)
        if codec.blockwise:
            block = where // codec.blockwise * codec.blockwise
            others = torch.ones(numel, dtype=torch.bool)
            others[block : block + codec.blockwise] = False
            assert torch.equal(y[others], clean[others])


@every_codec
def test_a_tensor_without_any_number_arrives_without_any(codec):
    y = through(codec, torch.full((5000,), math.nan))
    assert not (y.isfinite() & (y != 0)).any()
    assert y.isnan().any()


@every_codec
def test_the_opposite_tensor_arrives_as_the_opposite(codec):
    if (codec.draws and codec.name in ("int8", "int4")) or codec.name == "int8_statistical":
        return  # these round a draw up or down, and bins have a closed and an open end
    x = gaussian(10_000)
    assert torch.equal(through(codec, -x), -through(codec, x))


IDEMPOTENT = (
    "exact",
    "bf16",
    "fp16",
    "int8",
    "int8 short blocks",
    "int4",
    "int4 in 128",
    "fp4",
    "fp4 short blocks",
    "sign",
    "topk",
    "topk bf16",
    "topk odd",
)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name in IDEMPOTENT])
@settings(max_examples=15, deadline=None)
@given(x=vectors())
def test_encoding_what_arrived_changes_nothing_more(name, x):
    once = through(VARIANTS[name], x)
    assert torch.equal(through(VARIANTS[name], once), once)


# One codec at a time


@pytest.mark.parametrize(
    ("codec", "low", "high"),
    [
        (CODECS["bf16"](), 0.0016, 0.0017),
        (CODECS["int8"](), 0.0083, 0.0091),
        (CODECS["int8_statistical"](), 0.0150, 0.0162),
        (CODECS["int4"](), 0.105, 0.110),
        (CODECS["fp4"](), 0.19, 0.20),
        (fp4(block=64), 0.187, 0.19),
        (fp4(block=4096), 0.19, 0.20),
        (fp4(rounding="stochastic"), 0.27, 0.29),
        (CODECS["sign"](), math.sqrt(1 - 2 / math.pi) - 0.002, math.sqrt(1 - 2 / math.pi) + 0.002),
        (CODECS["topk"](), 0.93, 0.95),
        (CODECS["topk2bit"](), 0.93, 0.95),
    ],
    ids=lambda value: value.name if isinstance(value, Codec) else None,
)
def test_errors_on_gaussian_data_are_those_in_the_documentation(codec, low, high):
    assert low <= math.sqrt(lost(codec, gaussian(300_000))) <= high


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_powers_of_two_are_exact_in_fp4_down_to_the_sixth(rounding):
    powers = torch.tensor([0.0, *(2.0**-j for j in range(7))])
    x = torch.cat((powers, -powers)).repeat(50)
    for scale in (1.0, 0.375, 2.0**40):
        assert torch.equal(through(fp4(rounding=rounding), x * scale), x * scale)


def test_fp4_rounds_to_the_nearest_value_and_ties_away_from_zero():
    levels = torch.tensor([0.0, *(2.0**-j for j in range(6, -1, -1))])
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).pow(4)
    x[::256] = 1.0
    nearest = levels[(x[:, None] - levels).abs().argmin(1)]
    assert torch.equal(through(fp4(), x), nearest)
    ties = (levels[1:] + levels[:-1]) / 2
    assert torch.equal(through(fp4(), torch.cat((torch.ones(1), ties)))[1:], levels[1:])


@given(x=vectors())
@settings(max_examples=15, deadline=None)
def test_fp4_keeps_signs_and_stays_within_a_third_above_a_64th_of_the_largest(x):
    x = x[:256]
    y = through(fp4(), x)
    large = x.abs() >= x.abs().max() * 2**-5
    ratio = y[large & (x != 0)] / x[large & (x != 0)]
    assert ((ratio >= 2 / 3 - 0.01) & (ratio <= 4 / 3 + 0.01)).all()


@settings(max_examples=15, deadline=None)
@given(numel=st.integers(1, 100_000), mean=st.floats(-10, 10), seed=st.integers(0, 1000))
def test_the_statistical_codec_keeps_the_mean_of_the_tensor(numel, mean, seed):
    x = gaussian(numel, seed) + mean
    y = through(int8_statistical(), x)
    assert abs(y.double().mean() - x.double().mean()).item() <= 1e-6 * (1 + abs(mean))


def test_a_constant_tensor_arrives_exactly_through_the_statistical_codec():
    x = torch.full((70_001,), 0.1)
    assert torch.equal(through(int8_statistical(), x), x)


@pytest.mark.parametrize(("k", "chunk"), [(64, 4096), (3, 10), (1, 7), (5, 5)])
def test_topk_keeps_k_of_each_chunk_and_they_are_the_largest(k, chunk):
    x = gaussian(3 * chunk + chunk // 2)
    y = through(topk(k, chunk), x)
    for start in range(0, x.numel(), chunk):
        part, kept = x[start : start + chunk], y[start : start + chunk]
        count = -(-k * part.numel() // chunk)
        assert int((kept != 0).sum()) == count
        assert torch.equal(kept[kept != 0], part[kept != 0])
        assert part[kept != 0].abs().min() >= (part[kept == 0].abs().max() if count < part.numel() else 0)


def test_of_equal_magnitudes_the_first_are_kept():
    x = torch.ones(4096)
    x[1::2] = -1
    x[4000] = 5
    expected = torch.zeros(4096)
    expected[:63] = x[:63]
    expected[4000] = 5
    assert torch.equal(through(topk(), x), expected)


def test_places_are_sent_in_ascending_order():
    payload = topk(k=32, chunk=1024).encode(gaussian(4096), 0)
    places = unpack_indices(payload.indices, 128).view(4, 32)
    assert (places.diff(dim=1) > 0).all()


def test_topk_of_everything_changes_nothing():
    x = gaussian(5000)
    assert torch.equal(through(topk(k=4096), x), x)


def test_two_bit_values_are_the_means_of_two_groups_and_so_keep_the_sum_of_magnitudes():
    x = gaussian(50 * 4096)
    y, kept = through(topk2bit(), x), through(topk(), x)
    assert torch.equal(y.sign(), kept.sign())
    assert len(y[:4096].abs().unique()) == 3  # zero and two magnitudes
    assert y.abs().sum() == pytest.approx(kept.abs().sum().item(), rel=2**-8)
    assert ((y - kept).norm() / kept.norm()).item() < 0.07


def test_the_two_magnitudes_follow_heavy_tails():
    x = (
        gaussian(20 * 4096, 5) / gaussian(3 * 20 * 4096, 6).view(3, -1).square().mean(0).sqrt()
    )  # Student's t, 3 degrees
    y, kept = through(topk2bit(), x), through(topk(), x)
    assert ((y - kept).norm() / kept.norm()).item() < 0.25  # 0.49 if the groups were divided at their mean


def test_the_cosine_transform_is_orthonormal_and_knows_its_waves():
    matrix = dct(torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64), rtol=0, atol=2e-6)
    torch.testing.assert_close(matrix[0], torch.full((64,), 1 / 8))
    assert ((matrix[5].sign().diff() != 0).sum()).item() == 5  # the wave of frequency f crosses zero f times


def test_all_coefficients_give_the_tensor_back_and_fewer_lose_the_energy_of_the_rest():
    x = gaussian(10_000)
    torch.testing.assert_close(through(dct_topk(k=4096), x), x, rtol=0, atol=1e-5)
    payload = dct_topk(k=64).encode(x, 0)
    energy = payload.values.double().square().sum() / x.double().square().sum()
    whole = x[: 2 * 4096]
    kept = dct_topk(k=64).encode(whole, 0).values.double().square().sum() / whole.double().square().sum()
    assert 0 < energy < 1
    assert lost(dct_topk(k=64), whole) == pytest.approx(1 - kept.item(), abs=1e-6)  # Parseval


def test_smooth_tensors_survive_the_transform_where_topk_loses_them():
    grid = torch.linspace(0, 3, 64)
    x = (grid[:, None].cos() + grid.sin()).view(-1)
    assert lost(dct_topk(k=64), x) < 1e-4 < 0.5 < lost(topk(k=64), x)


def test_random_places_depend_on_the_key_alone_and_each_run_has_one():
    codec, key = randomk(one_in=8), (1 << 63) - 1
    x, y = gaussian(1003).abs() + 1, gaussian(1003, 1).abs() + 1
    one, other = through(codec, x, key) != 0, through(codec, y, key) != 0
    assert torch.equal(one, other)
    assert all(int(run.sum()) == 1 for run in one.split(8))
    assert torch.equal(codec.encode(x, key).key, torch.tensor([key]))
    hits = sum((through(codec, x, k) != 0).float() for k in range(800)) / 800
    assert hits[:1000].min() > 1 / 16
    assert hits[:1000].max() < 3 / 16
    assert hits[1000:] == pytest.approx([1 / 3] * 3, abs=0.1)


def test_cocktail_sends_the_largest_of_the_drawn_in_four_bits():
    x = gaussian(30_000)
    drawn = through(randomk(one_in=10), x, 4)
    y = through(cocktail(), x, 4)
    assert int((y != 0).sum()) <= num_kept(3000, 256, 1280)
    assert ((y != 0) <= (drawn != 0)).all()
    assert drawn[y != 0].abs().min() > drawn[(drawn != 0) & (y == 0)].abs().median()
    assert ((y - drawn)[y != 0].norm() / drawn[y != 0].norm()).item() < 0.12


# Tiles


@st.composite
def layouts(draw: st.DrawFn, side: int) -> Layout:
    """Vectors and matrices, some smaller than a tile and some of several, with and without edges."""
    lengths = st.integers(1, 9) | st.sampled_from([side - 1, side, side + 1, 2 * side, 2 * side + 3])
    leaves, start = [], 0
    for name, shape in enumerate(draw(st.lists(st.lists(lengths, max_size=2).map(tuple), min_size=1, max_size=4))):
        leaves.append(Leaf(str(name), shape, start, start + math.prod(shape)))
        start = leaves[-1].stop
    return Layout(tuple(leaves), start)


def tiles_by_hand(layout: Layout, side: int) -> list[Tensor]:
    """The places of the elements of each tile, row by row: of a matrix in squares, of a vector in runs of as many elements."""
    found = []
    for leaf in layout.leaves:
        height, width = leaf.shape if len(leaf.shape) == 2 else (1, leaf.stop - leaf.start)
        high, wide = (side, side) if len(leaf.shape) == 2 else (1, side * side)
        places = torch.arange(leaf.start, leaf.stop).view(height, width)
        corners = itertools.product(range(0, height, high), range(0, width, wide))
        found += [places[top : top + high, left : left + wide].flatten() for top, left in corners]
    return found


@pytest.mark.parametrize(("side", "k"), [(64, 64), (6, 8), (64, 1)])
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 100))
def test_sparselocos_codec_keeps_the_largest_of_every_tile_of_a_matrix_and_run_of_a_vector(side, k, data, seed):
    layout = data.draw(layouts(side))
    codec, alone = fitted(topk2bit(k=k, chunk=side * side), layout), topk2bit(k=k, chunk=side * side, tiles=False)
    x, expected = gaussian(layout.numel, seed), torch.zeros(layout.numel)
    for places in tiles_by_hand(layout, side):
        expected[places] = through(alone, x[places])
    assert torch.equal(through(codec, x), expected)
    payload = codec.encode(x, 0)
    assert nbytes(payload) == codec.payload_bytes(layout.numel)
    kept = sum(math.ceil(k * len(places) / side**2) for places in tiles_by_hand(layout, side))
    assert payload.magnitudes.numel() == 2 * len(tiles_by_hand(layout, side))
    assert nbytes(payload.indices) + nbytes(payload.codes) == math.ceil(1.5 * kept) + math.ceil(kept / 4)
    meta = codec.encode(torch.empty(layout.numel, device="meta"), 0)
    assert [(f.shape, f.dtype) for f in leaves(meta)] == [(f.shape, f.dtype) for f in leaves(payload)]


def test_a_run_of_sparseloco_sends_a_share_of_every_tile_of_every_matrix():
    config = parse(
        with_settings({}, {"method": "sparseloco", "workers": 3, "model.size": "0.2m", "run.local_steps": 2})
    )
    with torch.device("meta"):
        layout = layout_of(build_model(config.model, 256, 16, 0))
    sizes = [len(places) for places in tiles_by_hand(layout, 64)]
    kept = sum(math.ceil(64 * size / 4096) for size in sizes)
    payload = math.ceil(1.5 * kept) + math.ceil(kept / 4) + 4 * len(sizes)
    assert traffic(resolve(config), layout).sent_bytes == 2 * payload != 2 * topk2bit().payload_bytes(layout.numel)


def test_a_large_matrix_is_cut_in_several_passes_as_in_one():
    layout = Layout(
        (Leaf("w", (300, 1000), 0, 300_000),), 300_000
    )  # four rows of tiles and one of edges, 64,000 elements each
    x, expected = gaussian(300_000), torch.zeros(300_000)
    for places in tiles_by_hand(layout, 64):
        expected[places] = through(topk2bit(tiles=False), x[places])
    assert torch.equal(through(fitted(topk2bit(), layout), x), expected)
    assert not torch.equal(through(topk2bit(), x), expected)


@pytest.mark.parametrize(("chunk", "height", "width"), [(4096, 64, 64), (2048, 64, 32), (7, 7, 1), (1, 1, 1)])
def test_a_tile_is_the_rectangle_of_its_elements_nearest_to_a_square(chunk, height, width):
    layout = Layout((Leaf("w", (128, 96), 0, 128 * 96),), 128 * 96)
    first = next(iter(tiles(layout, chunk).views(gaussian(128 * 96))))
    assert first.shape[2:] == (height, width)


def test_a_fitted_codec_is_the_same_by_name_and_options_and_others_do_not_look_at_shapes():
    layout = Layout((Leaf("w", (65, 65), 0, 65 * 65),), 65 * 65)
    codec = fitted(topk2bit(k=8), layout)
    assert (codec.name, codec.options["k"], codec.fit) == ("topk2bit", 8, None)
    assert {name for name, make in CODECS.items() if make().fit is not None} == {"topk2bit"}
    assert fitted(one := int8(), layout) is one
    x = gaussian(1000)  # another length than the layout's, as of a message that is not about the whole fragment
    assert torch.equal(through(codec, x), through(topk2bit(k=8, tiles=False), x))


# Packing


@settings(max_examples=50, deadline=None)
@given(bits=st.sampled_from([1, 2, 4, 8]), numel=st.integers(0, 300), seed=st.integers(0, 1000))
def test_packed_codes_come_back_and_have_no_gaps(bits, numel, seed):
    codes = torch.randint(0, 1 << bits, (numel,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.numel() == num_bytes(numel, bits) == math.ceil(numel * bits / 8)
    assert torch.equal(unpack_codes(packed, bits, numel), codes)
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    assert bytes(packed.tolist()) == number.to_bytes(packed.numel(), "little")
    if bits < 8:
        levels = tuple(1.5 * code for code in range(1 << bits))
        assert torch.equal(lookup(packed, bits, levels)[:numel], codes * 1.5)


@settings(max_examples=50, deadline=None)
@given(indices=st.lists(st.integers(0, 4095), max_size=50))
def test_places_of_12_bits_come_back_from_three_bytes_for_two(indices):
    packed = pack_indices(torch.tensor(indices, dtype=torch.int16))
    assert packed.numel() == math.ceil(1.5 * len(indices))
    assert unpack_indices(packed, len(indices)).tolist() == indices


# Peers and options that cannot be right


@pytest.mark.parametrize("codec", [topk(), topk2bit()], ids=lambda codec: codec.name)
def test_a_place_behind_the_end_of_a_chunk_is_refused(codec):
    x = gaussian(4096 + 10)
    payload = codec.encode(x, 0)
    with pytest.raises(TransportError, match="points at element 4095 of a chunk of 10"):
        codec.decode(payload._replace(indices=torch.full_like(payload.indices, 255)), x)


def test_more_places_than_values_are_refused():
    x = gaussian(5000)
    payload = cocktail().encode(x, 0)
    with pytest.raises(TransportError, match="marks 500 of 500 elements as sent"):
        cocktail().decode(payload._replace(sent=torch.full_like(payload.sent, 255)), x)


@every_codec
def test_any_bytes_of_the_right_shape_decode_to_something_or_are_refused(codec):
    x = gaussian(4096 + 100)
    payload = codec.encode(x, 0)
    generator = torch.Generator().manual_seed(0)
    for frame in leaves(payload):
        if frame.data_ptr() != x.data_ptr():
            raw = frame.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator))
    try:
        y = codec.decode(payload, x)
    except TransportError:
        return
    assert y.shape == x.shape


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: int8(block=12), "codec 'int8' got block = 12, which must be a multiple of 8 from 8 to 65536"),
        (lambda: int4(rounding="up"), "codec 'int4' got rounding = 'up', which must be one of nearest, stochastic"),
        (lambda: fp4(block=0), "codec 'fp4' got block = 0"),
        (lambda: sign(block=True), "codec 'sign' got block = True"),
        (lambda: topk(k=0), "codec 'topk' got k = 0, which must be a whole number from 1 to 4096"),
        (lambda: topk(k=2.5), "codec 'topk' got k = 2.5"),
        (lambda: topk(chunk=5000), "codec 'topk' got chunk = 5000"),
        (lambda: topk(values="int3"), "codec 'topk' got values = 'int3', which must be one of same, fp32, bf16, fp16"),
        (lambda: topk2bit(k=11, chunk=10), "codec 'topk2bit' got k = 11, which must be a whole number from 1 to 10"),
        (lambda: dct_topk(k=5000), "codec 'dct_topk' got k = 5000"),
        (lambda: randomk(one_in=0), "codec 'randomk' got one_in = 0"),
        (lambda: cocktail(block=4), "codec 'cocktail' got block = 4"),
        (
            lambda: topk(k=5, chunk=4),
            "codec 'topk' got k = 5, which must be a whole number from 1 to 4",
        ),
        (lambda: randomk(scaled=1), "codec 'randomk' got scaled = 1, which must be true or false"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_a_sentence(build, sentence):
    with pytest.raises(ConfigError) as caught:
        build()
    assert sentence in str(caught.value)


# In a round


@pytest.mark.parametrize("name", CODECS)
def test_gossip_keeps_the_mean_of_the_workers_under_every_codec(name):
    start = random_vectors(5, 5000, dtype=torch.float32)
    xs, _ = play(gasloc(), make_topology("random", 5), start, 3, codec=CODECS[name]())
    torch.testing.assert_close(sum(xs) / 5, sum(start) / 5, rtol=0, atol=1e-5)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(xs))


OTHER = {
    "block": 16,
    "rounding": "stochastic",
    "k": 3,
    "chunk": 32,
    "values": "bf16",
    "one_in": 7,
    "scaled": True,
    "tiles": False,
}


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_says_all_its_options_and_those_of_its_way_back(name: str) -> None:
    options = options_of(CODECS[name])
    assert make_codec(name).options == {option.name: option.default for option in options}
    given = {option.name: OTHER[option.name] for option in options}
    assert make_codec(name, **given).options == given
    back = both_ways(bf16(), make_codec(name, **given))
    assert back.options == {} and back.back is not None and back.back.options == given


@pytest.mark.parametrize("name", ["int4", "topk2bit", "dct_topk", "randomk", "int8_statistical"])
def test_a_part_alone_is_coded_to_the_bytes_that_it_has_in_a_vector_that_is_coded_by_parts(name):
    def laid(shapes):
        ends = [0, *itertools.accumulate(math.prod(shape) for _, shape in shapes)]
        return Layout(
            tuple(Leaf(*one, a, b) for one, (a, b) in zip(shapes, itertools.pairwise(ends), strict=True)), ends[-1]
        )

    layout = laid([("a.0", (40, 70)), ("b.0", (33,)), ("a.1", (64, 64)), ("b.1", (17, 9)), ("a.2", (5,))])
    plain = codec_of({"name": name, "rounding": "stochastic"} if name == "int4" else name)
    codec, x = by_part(plain, lambda leaf: "ab".index(leaf[0])), gaussian(layout.numel, 3)
    whole = fitted(codec, layout)
    payload = whole.encode(x, 7)
    arrived = whole.decode(payload, x)
    for part, sent in zip("ab", payload, strict=True):
        mine = [leaf for leaf in layout.leaves if leaf.name[0] == part]
        own, theirs = (torch.cat([vector[leaf.start : leaf.stop] for leaf in mine]) for vector in (x, arrived))
        alone = fitted(codec, laid([(leaf.name, leaf.shape) for leaf in mine]))
        (found,) = alone.encode(own, 7)
        assert all(map(torch.equal, leaves(found), leaves(sent)))
        assert torch.equal(alone.decode((found,), own), theirs)
    alike = torch.equal(arrived, through(fitted(plain, layout), x, 7))
    assert alike == (name == "topk2bit")  # which codes tensor by tensor
