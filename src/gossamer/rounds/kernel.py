"""Execution of an outer update: span by span, or in one compiled pass."""

import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.layout import Layout
from gossamer.rules import Context, Rule
from gossamer.topologies.mixing import Combine, Row
from gossamer.tree import Tree, leaves, map_leaves

CHUNK = 1 << 16  # temporaries of 256 kB stay in a cache of 1 MB or more; smaller ones pay more for the calls of Python


class Decoded(NamedTuple):
    """The messages that a worker combines in a round: its own and the received ones, all decoded."""

    own: Tree
    """This worker's message as the others decode it."""
    received: tuple[Tree, ...]
    """The messages of its peers, in the order of the row."""
    me: int
    """The number of this worker in the row."""
    row: Row
    """The weights, by number; any numbering will do."""

    def combined(self, combine: Combine) -> Tree:
        """The result of `combine` on them."""
        numbers = (j for j, _ in self.row if j != self.me)
        return combine(self.own, dict(zip(numbers, self.received, strict=True)), self.me, self.row)


_Update = Callable[[Rule, Combine, Tensor, Tree, Decoded, Context], None]


class Kernel(NamedTuple):
    """The implementation of combine and outer update, and its chunk size."""

    run: _Update
    chunk: int

    def chunk_on(self, device: torch.device) -> int:
        """Elements processed at a time on this device; all of them on an accelerator, where every piece costs kernel
        launches.

        Pieces of 2^15 would cost 30,000 Python calls for 10^9 parameters.
        """
        return self.chunk if device.type == "cpu" else sys.maxsize


@functools.cache
def _keep_freed_memory() -> None:
    """Lets the C library keep freed temporaries: else it returns them to the system, and faulting in fresh pages takes
    four times as long as the update. glibc raises its threshold to the largest piece below 32 MB that was ever freed.
    """
    torch.empty(4 << 20)


def outer_update(rule: Rule, combine: Combine, x: Tensor, s: Tree, messages: Decoded, ctx: Context) -> None:
    """Combines the messages, and writes the outer update into `x` and `s`."""
    _keep_freed_memory()
    old = [x, *leaves(s), *leaves(messages.own)]
    # A rule may keep an input as new state, the old anchor as "previous" say: save it before it is overwritten.
    new = [
        t.clone() if any(t is kept for kept in old) else t
        for t in leaves(rule.recv(x, s, messages.own, messages.combined(combine), ctx))
    ]
    for target, value in zip([x, *leaves(s)], new, strict=True):
        target.copy_(value)


def cut(rule: Rule, tree: Tree, a: int, b: int) -> Tree:
    """Elements a to b of every tensor of a tree; the whole tree for a rule that is not elementwise."""
    return map_leaves(lambda t: t[a:b], tree) if rule.elementwise else tree


def update_spans(kernel: Kernel, rule: Rule, device: torch.device, start: int, stop: int) -> list[tuple[int, int]]:
    """The pieces an update may be done in: chunks that stay in the cache if the rule is elementwise, else the whole."""
    if not rule.elementwise:
        return [(start, stop)]
    chunk = kernel.chunk_on(device)
    return [(a, min(a + chunk, stop)) for a in range(start, stop, chunk)]


PLAIN = Kernel(outer_update, CHUNK)


def must_have_compiler(key: str) -> None:
    """Raises ConfigError when a key of a run file asks for compilation and there is no C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"{key} = true needs a C++ compiler and '{compiler}' is not there; install it or set false")


@functools.cache
def compiled() -> Kernel:
    """The kernel that does a whole elementwise update in one pass over the memory, bitwise equal to the plain one.

    Raises: ConfigError when there is no C++ compiler. Cost: some seconds of compilation at its first use.
    """
    must_have_compiler("run.compile")
    one = torch.ones(())

    def fused(rule: Rule, combine: Combine, x: Tensor, s: Tree, messages: Decoded, ctx: Context) -> None:
        # The compiler aliases an input kept as state with that input's memory, even through a clone, and returns later
        # writes; multiplying by a one that is opaque to it prevents this, is free inside the pass and exact.
        updated = rule.recv(x, s, messages.own, messages.combined(combine), ctx)
        new = [t * one for t in leaves(updated)]
        for target, value in zip([x, *leaves(s)], new, strict=True):
            target.copy_(value)

    in_one_pass: _Update = torch.compile(fused, dynamic=True)

    def run(rule: Rule, combine: Combine, x: Tensor, s: Tree, messages: Decoded, ctx: Context) -> None:
        if rule.elementwise and rule.compiles:
            # The names in a layout would be compiled in.
            in_one_pass(rule, combine, x, s, messages, ctx._replace(layout=Layout((), 0)))
        else:
            outer_update(rule, combine, x, s, messages, ctx)

    return Kernel(run, sys.maxsize)
