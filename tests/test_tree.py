"""Trees: nested tuples of tensors, walked left to right."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.tree import leaves, map_leaves, nbytes, shares_storage


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
