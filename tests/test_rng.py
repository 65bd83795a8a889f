"""Keys: the same on every machine, and unrelated for unrelated uses."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.rng import key, numpy_rng, torch_rng

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
