"""How an outer update is carried out: span by span, or in one compiled pass."""

import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.rules import Context, Rule
from gossamer.topologies.mixing import Hear, Row
from gossamer.tree import Tree, leaves

__all__ = ["PLAIN", "Kernel", "compiled", "hear_and_recv"]

CHUNK = 1 << 15  # small enough that the temporaries of an elementwise update stay in the cache


class Kernel(NamedTuple):
    """How `hear` and `recv` are carried out, and on how many elements at a time."""

    run: Callable[..., None]
    chunk: int


def hear_and_recv(
    rule: Rule, hear: Hear, x: Tensor, s: Tree, told: Tree, others: tuple[Tree, ...], i: int, row: Row, ctx: Context
) -> None:
    """Hears the others, numbered by their place in the row, and writes the outer update into `x` and `s`."""
    old = [x, *leaves(s), *leaves(told)]
    # A rule may keep an input as new state, the old anchor as "previous" say: save it before it is written over.
    new = [
        t.clone() if any(t is kept for kept in old) else t
        for t in _updated(rule, hear, x, s, told, others, i, row, ctx)
    ]
    for target, value in zip([x, *leaves(s)], new, strict=True):
        target.copy_(value)


def _updated(
    rule: Rule, hear: Hear, x: Tensor, s: Tree, told: Tree, others: tuple[Tree, ...], i: int, row: Row, ctx: Context
) -> list[Tensor]:
    messages = dict(zip((j for j, _ in row if j != i), others, strict=True))
    return leaves(rule.recv(x, s, told, hear(told, messages, i, row), ctx))


PLAIN = Kernel(hear_and_recv, CHUNK)


@functools.cache
def compiled() -> Kernel:
    """The kernel that does a whole elementwise update in one pass over the memory, bitwise equal to the plain one.

    Raises: ConfigError when there is no C++ compiler. Cost: some seconds of compilation at its first use.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"run.compile = true needs a C++ compiler and '{compiler}' is not there; install it or set false"
        )
    one = torch.ones(())

    def fused(rule: Rule, hear: Hear, x: Tensor, s: Tree, *rest: Any) -> None:
        # The compiler takes an input kept as state for that input's memory, even through a clone, and hands out what was
        # written there since; times a one it cannot see through is free inside the pass and changes no bit.
        new = [t * one for t in _updated(rule, hear, x, s, *rest)]
        for target, value in zip([x, *leaves(s)], new, strict=True):
            target.copy_(value)

    in_one_pass = torch.compile(fused, dynamic=True)

    def run(rule: Rule, *rest: Any) -> None:
        if rule.elementwise and rule.compiles:
            *others, ctx = rest
            in_one_pass(rule, *others, ctx._replace(layout=Layout((), 0)))  # names in a layout would be compiled in
        else:
            hear_and_recv(rule, *rest)

    return Kernel(run, sys.maxsize)
