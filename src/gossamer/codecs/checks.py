"""Sentences for options that cannot work, and for payloads that no encoder of ours made."""

from collections.abc import Sequence

from torch import Tensor

from gossamer.errors import ConfigError, TransportError

__all__ = ["inside", "one_of", "whole"]


def one_of(codec: str, option: str, got: object, allowed: Sequence[str]) -> None:
    """Raises ConfigError unless `got` is one of the allowed words."""
    if got not in allowed:
        raise ConfigError(f"{codec} got {option} = {got!r}; allowed are {', '.join(allowed)}: choose one of them")


def whole(codec: str, option: str, got: object, low: int, high: int, *, multiple_of: int = 1) -> None:
    """Raises ConfigError unless `got` is a whole number from `low` to `high`, and a multiple of `multiple_of`."""
    fits = isinstance(got, int) and not isinstance(got, bool) and low <= got <= high and got % multiple_of == 0
    if not fits:
        kind = "whole numbers" if multiple_of == 1 else f"multiples of {multiple_of}"
        raise ConfigError(
            f"{codec} got {option} = {got!r}; allowed are {kind} from {low} to {high}: choose one of them"
        )


def inside(codec: str, indices: Tensor, length: int) -> None:
    """Raises TransportError if an index that came from a peer points behind a chunk of this length."""
    if indices.numel() and int(indices.max()) >= length:
        raise TransportError(
            f"a {codec} payload points at element {int(indices.max())} of a chunk of {length}; only 0 to {length - 1} exist: "
            "the sender is faulty or runs another version, so end its run or make the versions equal"
        )
