"""Python's garbage collector, which takes a tenth of the time of torch's import, and of torch's end half a second."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """A context without garbage collection, for much that is made to stay: imports, or the plan of a million workers.

    The collector would traverse all of it repeatedly, and free nothing.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def subclasses_of(kind: type) -> set[type]:
    """A class and all classes below it.

    >>> {ArithmeticError, OverflowError} < subclasses_of(ArithmeticError)
    True
    """
    below, next_ones = set[type](), [kind]
    while next_ones:
        if (one := next_ones.pop()) not in below:
            below.add(one)
            next_ones += type.__subclasses__(one)
    return below


def instances_of(kinds: set[type]) -> list[Any]:
    """The objects of exactly these classes, wherever they were made.

    By what refers to the classes, as `gc.get_objects` would hold every object of the process for a moment: a `tuple(...)` that
    another thread builds just then would fail with a SystemError.
    Cost: one look at every object of Python, about 0.1 s.

    >>> class Light: ...
    >>> lights = [Light(), Light()]
    >>> len(instances_of({Light}))
    2
    """
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds] if kinds else []
