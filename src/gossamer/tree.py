"""Nested tuples of tensors: messages on the wire and the state of rules."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that topologies, which have types of messages, work without torch
    from torch import Tensor

Tree = Any
"""A tensor, or a (named) tuple of trees; `()` is the tree without tensors."""


def leaves(tree: Tree) -> "list[Tensor]":
    """The tensors of a tree, left to right.

    >>> import torch
    >>> [t.item() for t in leaves((torch.tensor(1), (torch.tensor(2), ())))]
    [1, 2]
    """
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def map_leaves(fn: "Callable[..., Tensor]", tree: Tree, *others: Tree) -> Tree:
    """`fn` of each tensor of a tree and of the corresponding tensors of the others; named tuples keep their type.

    >>> import torch
    >>> map_leaves(lambda a, b: a + b, (torch.tensor(1), ()), (torch.tensor(2), ()))
    (tensor(3), ())
    """
    if not isinstance(tree, tuple):
        return fn(tree, *others)
    parts = [map_leaves(fn, *row) for row in zip(tree, *others, strict=True)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


def refill(like: Tree, tensors: "Iterable[Tensor]") -> Tree:
    """A tree of the same structure with these tensors as its leaves.

    >>> import torch
    >>> refill((torch.tensor(1), ()), [torch.tensor(5)])
    (tensor(5), ())
    """
    supply = iter(tensors)
    return map_leaves(lambda _: next(supply), like)


def must_fit(saved: Sequence[Any], like: "Sequence[Tensor]") -> None:
    """Raises ValueError unless the saved values are tensors with the shapes and dtypes of `like`, in order.

    >>> import torch
    >>> must_fit([torch.zeros(2)], [torch.zeros(3)])
    Traceback (most recent call last):
        ...
    ValueError: a tensor of (2,) torch.float32 for (3,) torch.float32
    """
    from torch import Tensor

    if len(saved) != len(like):
        raise ValueError(f"{len(saved)} tensors for {len(like)}")
    for value, tensor in zip(saved, like, strict=True):
        if not isinstance(value, Tensor):
            raise ValueError(f"{type(value).__name__} for a tensor")
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(f"a tensor of {tuple(value.shape)} {value.dtype} for {tuple(tensor.shape)} {tensor.dtype}")


def nbytes(tree: Tree) -> int:
    """The bytes of the tensors of a tree: the cost of a payload."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def shares_storage(tree: Tree, x: "Tensor") -> bool:
    """Whether any tensor of the tree is a view of the memory of `x`."""
    address = x.untyped_storage().data_ptr()
    return any(leaf.untyped_storage().data_ptr() == address for leaf in leaves(tree))
