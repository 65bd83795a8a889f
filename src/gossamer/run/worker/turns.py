"""Coordination of a user's forward passes in the threads of a simulation: concurrent, or in turns.

Torch's generator belongs to the process. A forward pass that draws from it needs it alone, seeded for its place (`rng.drawing`);
one that draws nothing needs no lock. The first forward and backward pass of any replica determine the kind. Later ones
are checked: a draw changes the generators' state, as they are not seeded or restored concurrently.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from gossamer import rng

log = logging.getLogger("gossamer")
T = TypeVar("T")


class Turns:
    """Shared by all replicas and probes of a simulation.

    A call that may have drawn although the first ones did not is repeated under the lock, from its initial buffers, and
    so are concurrent ones; from then on all take turns. So results equal those of a run that always took turns, if
    calls depend only on parameters, buffers, batch and generators.

    Args:
        always: whether all calls take turns, for functions that are not safe in several threads.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._at_once: bool | None = False if always else None
        """Whether calls run concurrently; None until the first backward pass has ended."""
        self._has_drawn = False
        self._running, self._change = 0, threading.Condition()
        """The number of calls running without the lock, and the condition that guards it and `_at_once`."""
        self._state: Any = None
        """The generators' state when the first of the running calls began."""

    def call(
        self,
        act: Callable[[], T],
        alone: Callable[[], AbstractContextManager[None]],
        keep: Callable[[], Callable[[], None]],
    ) -> T:
        """The result of a forward pass.

        Args:
            alone: a context for a call in its turn, while `rng.TURN` is held.
            keep: copies what a call may change, and returns a function that restores it.
        """
        while True:
            if self._begin():
                try:
                    restore = keep()
                    result = act()
                finally:
                    drew = self._end()
                if not drew:
                    return result
                del result
                restore()
            with rng.TURN:
                if self._at_once:
                    continue  # decided by another thread meanwhile: under the lock it would draw concurrently with others
                # Calls that began without the lock must end first: one of them may draw while this one is seeded.
                with self._change:
                    self._change.wait_for(lambda: self._running == 0)
                with alone():
                    before = rng.generators_state()
                    result = act()
                    self._has_drawn = self._has_drawn or before != rng.generators_state()
                return result

    def learn(self, recomputes: bool) -> None:
        """Decides, after a backward pass and with `rng.TURN` held, how forward passes run from now on.

        Args:
            recomputes: whether it recomputed forward passes, for which it sets and restores the generator: then a
                concurrent draw could not be detected.
        """
        with self._change:
            if self._at_once is None or recomputes:
                self._at_once = not (self._has_drawn or recomputes)

    def _begin(self) -> bool:
        """Whether the call may run without the lock; then it counts as running until `_end`."""
        with self._change:
            if not self._at_once:
                return False
            if self._running == 0:
                self._state = rng.generators_state()
            self._running += 1
            return True

    def _end(self) -> bool:
        """Whether the call that ends may have drawn: it or a concurrent one has, and the generators cannot show which."""
        with self._change:
            if self._at_once and rng.generators_state() != self._state:
                self._at_once = False
                log.warning(
                    "a forward pass drew random numbers, which the first one did not: forward passes of your model and loss take "
                    "turns from here on, with the same numbers as if they always had, and keep about three cores busy; set "
                    "run.take_turns = true to let them from the start"
                )
            self._running -= 1
            self._change.notify_all()
            return not self._at_once
