"""Boundary codecs: what crosses the cut between two stages of a pipeline, and what its bytes say."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.boundaries import BOUNDARIES, Boundary, aqsgd, cast, dense, intk, projection, tahquant
from gossamer.boundaries.ends import BoundaryEnd, through
from gossamer.boundaries.tahquant import hadamard
from gossamer.errors import CheckpointError

SHAPE = (3, 8, 64)
EVERY = [
    dense(),
    cast(),
    cast(dtype="fp16"),
    intk(),
    intk(bits=2, group=8),
    intk(bits=2, zero=False),
    intk(bits=8),
    tahquant(),
    tahquant(tile=8, high_share=0.5),
    tahquant(granularity="token", tile=16),
    tahquant(bits=8, low_bits=7),
    projection(width=56),
]


def hidden(seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(rotated: int, seed: int = 0) -> Tensor:
    """Tiles of 64 of which the first so many are dominated by one element, and no others."""
    h = hidden(seed).clamp(-1.5, 1.5).view(-1, 64)
    h[:, 5], h[:, 6] = 1.5, 1.5
    h[:rotated, 9] = 10.0
    return h.view(SHAPE)


@pytest.mark.parametrize("boundary", EVERY, ids=str)
def test_what_arrives_is_close_has_the_shape_and_follows_from_the_bytes(boundary: Boundary):
    h = hidden()
    payload = boundary.encode(h)
    assert payload.dtype == torch.uint8 and payload.dim() == 1
    arrived = boundary.decode(payload, h)
    assert arrived.shape == h.shape and arrived.dtype == h.dtype
    assert torch.equal(arrived, boundary.decode(boundary.encode(h.clone()), torch.empty_like(h)))
    error = (arrived - h).norm() / h.norm()
    assert error == 0.0 if boundary.exact else 0 < error < 0.6
    assert (
        payload.numel() == boundary.most_bytes(SHAPE)
        if boundary.fixed
        else payload.numel() <= boundary.most_bytes(SHAPE)
    )
    zeros = torch.zeros(SHAPE)
    assert torch.equal(boundary.decode(boundary.encode(zeros), zeros), zeros)


@pytest.mark.parametrize("boundary", [intk(), intk(zero=False), tahquant(), tahquant(granularity="token")], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_arrive_as_a_number(boundary: Boundary, poison: float):
    h = hidden()
    h[1, 2, 3] = poison
    arrived = boundary.decode(boundary.encode(h), h)
    assert arrived[1, 2, :32].isnan().all()
    assert arrived[0].isfinite().all() and arrived[2].isfinite().all()


def test_levels_without_zero_are_those_of_the_authors_and_lose_less_where_bits_are_few():
    h, losses = hidden(shape=(4, 64, 64)), dict[tuple[int, bool], float]()
    for bits in (2, 6):
        for zero in (True, False):
            boundary = intk(bits=bits, zero=zero)
            losses[bits, zero] = float((boundary.decode(boundary.encode(h), h) - h).norm() / h.norm())
    assert losses[2, False] < 0.7 * losses[2, True] and 0.97 < losses[6, False] / losses[6, True] < 1.0
    four = torch.tensor([[[-1.0, -0.4, 0.2, 0.9]]])
    found = intk(bits=2, group=4, zero=False)
    assert torch.allclose(found.decode(found.encode(four), four), torch.tensor([-3.0, -1.0, 1.0, 3.0]) / 3)


@pytest.mark.parametrize("boundary", [b for b in EVERY if not b.remembers], ids=str)
def test_a_payload_of_another_length_is_refused(boundary: Boundary):
    payload = boundary.encode(hidden())
    for wrong in (payload[:-1], torch.cat((payload, payload[:1])), payload[:0]):
        with pytest.raises(ValueError, match="payload"):
            boundary.decode(wrong, hidden())


@given(st.integers(0, 24), st.sampled_from(["tile", "token"]))
def test_a_payload_of_tahquant_is_as_long_as_its_formula_for_each_share_of_rotated_tiles(
    rotated: int, granularity: Literal["tile", "token"]
):
    boundary = tahquant(granularity=granularity)
    payload = boundary.encode(with_outliers(rotated))
    tiles, low = 24, 5 if granularity == "tile" else 3 * int(8 * (1 - 0.8))
    by_hand = 3 + 3 + 24 * low + 32 * (tiles - low) + 4 * tiles + math.ceil(6 * rotated / 8)
    assert payload.numel() == by_hand


def test_hadamard_is_symmetric_and_orthonormal_with_a_constant_first_row():
    for size in (8, 64, 256):
        h = hadamard(size).double()
        torch.testing.assert_close(h @ h, torch.eye(size, dtype=torch.float64), atol=1e-6, rtol=0)
        assert torch.equal(h, h.T) and len(h[0].unique()) == 1


def test_the_pivot_takes_an_outlier_up_that_plain_tiles_and_a_rotation_without_it_keep():
    tiles = torch.randn(1000, 64, generator=torch.Generator().manual_seed(3)) * 0.1
    tiles[:, 17] = 10.0
    h = tiles.view(10, 100, 64)

    def without_pivot(y: Tensor) -> Tensor:
        z = y.amin(1, keepdim=True)
        s = (y.amax(1, keepdim=True) - z) / 15
        return ((y - z) / s).round() * s + z

    def error(arrived: Tensor) -> float:
        return float((arrived.view(1000, 64) - tiles).square().mean())

    boundary = tahquant(high_share=1.0)
    ours = error(boundary.decode(boundary.encode(h), h))
    assert error(without_pivot(tiles)) >= 100 * ours
    assert error(without_pivot(tiles @ hadamard(64)) @ hadamard(64)) >= 10 * ours


@given(st.integers(0, 1000))
def test_the_error_of_a_tile_is_at_most_half_a_step_per_element(seed: int):
    h = with_outliers(seed % 25, seed)
    boundary = tahquant(high_share=1.0)
    error = (boundary.decode(boundary.encode(h), h) - h).view(-1, 64).norm(dim=1)
    rotated = h.view(-1, 64).clone()
    outlier = rotated[:, 9] == 10.0
    rotated[outlier, 9], rotated[outlier, 0] = rotated[outlier, 0], 10.0
    rotated[outlier] = rotated[outlier] @ hadamard(64)
    step = (rotated.amax(1) - rotated.amin(1)) / 15
    assert (error <= 8 * step / 2 * 1.01 + 8 * 2**-10 * rotated.abs().amax(1)).all()


def test_tiles_of_low_entropy_have_the_fewer_bits():
    h = torch.ones(1, 1, 5 * 64) + hidden(1, (1, 1, 5 * 64)) * 0.1
    h[0, 0, 128:192] *= torch.linspace(0.01, 1.0, 64) ** 3  # the third tile is uneven
    boundary = tahquant()
    assert boundary.encode(h)[0] == 0b00100


def test_of_each_sequence_the_tokens_of_low_entropy_have_the_fewer_bits():
    h = torch.ones(2, 5, 64) + hidden(1, (2, 5, 64)) * 0.1
    h[0, 3] *= torch.linspace(0.01, 1.0, 64) ** 3  # uneven, as is one token of the other sequence
    h[1, 1] *= torch.linspace(0.01, 1.0, 64) ** 3
    payload = tahquant(granularity="token", high_share=0.75).encode(h)
    assert (payload[0], payload[1]) == (0b0100_1000, 0b0), "tokens 3 and 6 of ten"


@pytest.mark.parametrize(("times", "rotated"), [(1.99, False), (2.0, True), (2.01, True)])
def test_a_tile_is_rotated_where_its_largest_element_is_at_least_twice_the_next(times: float, rotated: bool):
    h = torch.ones(1, 1, 64)
    h[0, 0, 5] = -times
    payload = tahquant().encode(h)
    assert payload[1] == rotated
    assert payload.numel() == 38 + rotated, "the position of its pivot is a byte more"


def test_a_constant_tile_arrives_as_it_is():
    h = torch.full(SHAPE, -3.25)
    boundary = tahquant()
    assert torch.equal(boundary.decode(boundary.encode(h), h), h)


def test_both_ends_of_aqsgd_remember_the_same_and_come_closer_with_every_visit():
    sender, receiver = BoundaryEnd(aqsgd(), SHAPE), BoundaryEnd(aqsgd(), SHAPE)
    h, errors = hidden(), list[float]()
    for _ in range(5):
        (length,) = receiver.payload_bytes([[7, 3, 9]])
        payload = sender.encode(h, [7, 3, 9])
        assert payload.numel() == length
        arrived = receiver.decode(payload, h, [7, 3, 9])
        assert all(torch.equal(sender.memory[k], receiver.memory[k]) for k in (7, 3, 9))
        errors.append(float((arrived - h).norm()))
    assert errors[0] == 0.0, "a first visit is sent whole"
    moved = h + 0.3 * hidden(5)
    for _ in range(3):
        arrived = receiver.decode(sender.encode(moved, [7, 3, 9]), h, [7, 3, 9])
        errors.append(float((arrived - moved).norm()))
    assert errors[-3] > 0
    assert errors[-2] <= errors[-3] / 8 and errors[-1] <= errors[-2] / 8, "by half a step of seven"
    again_bytes = aqsgd().again_bytes
    assert again_bytes is not None
    first, again = aqsgd().most_bytes(SHAPE), again_bytes(SHAPE)
    assert (first, again) == (4 * math.prod(SHAPE), math.prod(SHAPE) // 2 + 2 * 3 * 64)
    assert sender.sent_bytes == first + 7 * again


def test_a_boundary_end_continues_from_its_checkpoint_and_refuses_another():
    one, other = BoundaryEnd(aqsgd(), SHAPE), BoundaryEnd(aqsgd(), SHAPE)
    one.cross(hidden(), [0, 1, 2])
    other.restore(one.state())
    assert torch.equal(one.cross(hidden(1), [2, 1, 0]), other.cross(hidden(1), [2, 1, 0]))
    with pytest.raises(CheckpointError, match=r"does not hold messages of shape \[4, 64\]"):
        BoundaryEnd(aqsgd(), (3, 4, 64)).restore(one.state())
    halves = {**one.state(), "messages": [message.half() for message in one.state()["messages"]]}
    with pytest.raises(CheckpointError, match="in fp32"):
        other.restore(halves)


def test_the_gradient_of_what_arrived_is_that_of_what_was_sent_through_a_separate_codec():
    h = hidden().requires_grad_()
    there, back = BoundaryEnd(tahquant(), SHAPE), BoundaryEnd(intk(), SHAPE)
    arrived = through(h * 2, there, back, [0, 1, 2])
    gradient = hidden(2)
    (found,) = torch.autograd.grad(arrived, h, gradient)
    assert torch.equal(arrived, BoundaryEnd(tahquant(), SHAPE).cross(h.detach() * 2, [0, 1, 2]))
    assert torch.equal(found, BoundaryEnd(intk(), SHAPE).cross(gradient, [0, 1, 2]) * 2)
    assert back.sent_bytes == intk().most_bytes(SHAPE)
    assert there.sent_bytes == tahquant().encode(h.detach() * 2).numel() + 8


def test_a_projection_keeps_a_fixed_subspace_and_loses_the_rest_and_at_full_width_nothing():
    h, some, whole = hidden(), projection(width=16), projection(width=64)
    inside = some.decode(some.encode(h), h)
    torch.testing.assert_close(some.decode(some.encode(inside), inside), inside)  # idempotent
    torch.testing.assert_close(some.decode(some.encode(h - inside), h), torch.zeros_like(h), atol=1e-5, rtol=0)
    assert torch.linalg.matrix_rank(inside.view(-1, 64)) == 16
    torch.testing.assert_close(whole.decode(whole.encode(h), h), h)
    basis = some.decode(torch.eye(16).view(torch.uint8).flatten(), torch.empty(1, 16, 64))[0]
    torch.testing.assert_close(basis @ basis.T, torch.eye(16), atol=1e-6, rtol=0)


def test_every_boundary_has_a_row_and_is_tried_here():
    assert {boundary.name for boundary in EVERY} | {"aqsgd"} == {*BOUNDARIES}
