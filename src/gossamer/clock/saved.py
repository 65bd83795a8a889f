"""The state of an event loop as plain data for a checkpoint, and back.

A state is a named tuple of numbers, tensors and further tuples. Written, each named tuple is a dict of its fields.
Input is untrusted: every field must have the type that its tuple declares, and indices and tensors must fit the run.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

T = TypeVar("T")


def as_dicts(value: Any) -> Any:
    """The value with a dict of its fields in the place of each named tuple.

    >>> from gossamer.clock.events import Absence
    >>> as_dicts([Absence(1.5, 0, "leave")])
    [{'time_s': 1.5, 'worker': 0, 'change': 'leave'}]
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: as_dicts(part) for name, part in zip(value._fields, value, strict=True)}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, dict):
        return {key: as_dicts(part) for key, part in value.items()}
    return [as_dicts(part) for part in value] if isinstance(value, list | tuple) else value


def rebuilt(kind: type[T], value: Any) -> T:
    """The named tuple of this kind from the output of `as_dicts`. Raises ValueError for anything else.

    >>> from gossamer.clock.events import Absence
    >>> rebuilt(Absence, {"time_s": 1.5, "worker": 0, "change": "leave"})
    Absence(time_s=1.5, worker=0, change='leave')
    """
    return _adapter(kind).validate_python(value)


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))


def within(value: Any, **limits: int) -> None:
    """Raises ValueError where a field of these names, anywhere in the value, is not from 0 to below its limit."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, part in zip(value._fields, value, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            if name in limits and not 0 <= part < limits[name]:
                raise ValueError(f"{name} {part} in {type(value).__name__}, of {limits[name]}")
            within(part, **limits)
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            within(part, **limits)


def tensors_of(value: Any) -> Iterable[Tensor]:
    """All tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)
