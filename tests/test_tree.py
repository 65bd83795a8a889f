"""Trees: nested tuples of tensors, walked left to right."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.tree import leaves, map_leaves, must_fit, nbytes, refill, shares_storage


class State(NamedTuple):
    """An outer state like those of the rules."""

    anchor: Tensor
    momentum: tuple[Tensor, ...]


shapes = st.recursive(
    st.integers(0, 4), lambda parts: st.lists(parts, max_size=3).map(tuple) | st.tuples(parts, parts), max_leaves=8
)


def grown(shape: Any) -> Any:
    """The tree that has a tensor of k elements where the shape has the number k."""
    return torch.arange(float(shape)) if isinstance(shape, int) else tuple(map(grown, shape))


def numbers(shape: Any) -> list[int]:
    """The numbers of a nested tuple, left to right."""
    return [shape] if isinstance(shape, int) else [number for part in shape for number in numbers(part)]


@settings(max_examples=50, deadline=None)
@given(shape=shapes)
def test_leaves_come_left_to_right_and_maps_keep_the_form(shape: Any) -> None:
    tree = grown(shape)
    assert [leaf.numel() for leaf in leaves(tree)] == numbers(shape)
    mapped = map_leaves(lambda t, u: t + u, tree, tree)
    assert [leaf.tolist() for leaf in leaves(mapped)] == [(2 * leaf).tolist() for leaf in leaves(tree)]
    assert map_leaves(Tensor.numel, tree) == shape
    assert nbytes(tree) == 4 * sum(numbers(shape))


def test_a_named_tuple_stays_what_it_is() -> None:
    state = State(torch.ones(2), (torch.ones(3), torch.ones(1)))
    doubled = map_leaves(lambda t: 2 * t, state)
    assert type(doubled) is State
    assert doubled.anchor.tolist() == [2.0, 2.0]
    assert type(doubled.momentum) is tuple


def test_trees_of_different_form_do_not_map_onto_each_other() -> None:
    with pytest.raises(ValueError, match="shorter"):
        map_leaves(torch.add, (torch.ones(1), torch.ones(1)), (torch.ones(1),))


def test_bytes_follow_the_dtype() -> None:
    assert nbytes((torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64), ())) == 3 * 2 + 2 * 8


def test_a_view_shares_storage_and_a_copy_does_not() -> None:
    x = torch.arange(4.0)
    assert shares_storage((torch.ones(1), (x[2:],)), x)
    assert not shares_storage((torch.ones(1), x.clone()), x)
    assert not shares_storage((), x)


@settings(max_examples=50, deadline=None)
@given(shape=shapes)
def test_a_tree_refilled_with_its_own_leaves_is_the_same(shape: Any) -> None:
    tree = grown(shape)
    again = refill(tree, leaves(tree))
    assert numbers(shape) == [leaf.numel() for leaf in leaves(again)]
    assert all(a is b for a, b in zip(leaves(tree), leaves(again), strict=True))


@pytest.mark.parametrize(
    ("saved", "sentence"),
    [
        ([], "0 tensors for 1"),
        ([3], "int for a tensor"),
        ([torch.zeros(3)], r"a tensor of \(3,\) torch.float32 for \(2,\) torch.float32"),
        ([torch.zeros(2).double()], "torch.float64 for"),
    ],
)
def test_what_was_saved_and_cannot_take_the_place_is_named(saved: list[Any], sentence: str) -> None:
    must_fit([torch.ones(2)], [torch.zeros(2)])
    with pytest.raises(ValueError, match=sentence):
        must_fit(saved, [torch.zeros(2)])
