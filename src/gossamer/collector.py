"""Python's garbage collector, which takes a tenth of the time of torch's import, and of torch's end half a second."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
