"""Keys: the same on every machine, and unrelated for unrelated uses."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.rng import drawing, key, numpy_rng, torch_rng

paths = st.lists(st.integers() | st.text(max_size=5), max_size=4).map(tuple)


def test_keys_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert key(0) == 2631537505891389924
    assert key(7, 3, 120, "data") == 289677804786919885


def test_generators_draw_the_same_numbers_on_every_machine() -> None:
    assert numpy_rng(0, "x").integers(1000, size=4).tolist() == [796, 468, 821, 556]
    assert torch.randint(1000, (4,), generator=torch_rng(0, "x")).tolist() == [541, 699, 223, 776]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**63), one=paths, other=paths)
def test_a_key_depends_on_the_whole_path_and_fits_a_seed(seed: int, one: tuple, other: tuple) -> None:
    assert 0 <= key(seed, *one) < 2**63
    assert (key(seed, *one) == key(seed, *other)) == (one == other)


def test_numbers_and_their_names_and_their_joins_are_different_paths() -> None:
    paths = [(1, 23), (12, 3), (123,), ("1", 23), ("1, 23",), (1, "23"), (1, 23, ""), ()]
    assert len({key(0, *path) for path in paths}) == len(paths)


def test_neighbouring_keys_give_unrelated_numbers() -> None:
    draws = torch.stack([torch.randn(1000, generator=torch_rng(0, worker, "noise")) for worker in range(8)])
    correlation = torch.corrcoef(draws) - torch.eye(8)
    assert correlation.abs().max() < 0.15


def test_threads_that_draw_from_torchs_generator_draw_what_one_alone_would_and_leave_it_as_it_was() -> None:
    def draws(place: int) -> list[torch.Tensor]:
        with drawing(torch.device("cpu"), 5, place):
            return [torch.rand(2) for _ in range(50)]

    alone = [draws(place) for place in range(8)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draws, range(8)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(a, b) for one, other in zip(alone, together, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert not torch.equal(alone[0][0], alone[1][0])


def test_an_error_while_drawing_leaves_the_generator_as_it_was_and_the_next_may_draw() -> None:
    before = torch.get_rng_state()
    with contextlib.suppress(ValueError), drawing(torch.device("cpu"), 5, 0):
        raise ValueError
    with drawing(torch.device("cpu"), 5, 0):
        torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
