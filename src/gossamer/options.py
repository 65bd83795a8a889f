"""Sentences for options that cannot work; every factory of a rule, codec, topology or server checks its own before training."""

from collections.abc import Sequence

from gossamer.errors import ConfigError

__all__ = ["one_of", "whole", "within"]


def one_of(owner: str, option: str, got: object, allowed: Sequence[str]) -> None:
    """Raises ConfigError unless `got` is one of the allowed words."""
    if got not in allowed:
        raise ConfigError(f"{owner} got {option} = {got!r}; allowed are {', '.join(allowed)}: choose one of them")


def whole(owner: str, option: str, got: object, low: int, high: int | None = None, *, multiple_of: int = 1) -> None:
    """Raises ConfigError unless `got` is a whole number from `low` on, up to `high` if given, and a multiple of `multiple_of`."""
    if type(got) is not int or got < low or (high is not None and got > high) or got % multiple_of:
        kind = "whole numbers" if multiple_of == 1 else f"multiples of {multiple_of}"
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{owner} got {option} = {got!r}; allowed are {kind} {span}: choose one of them")


def within(
    owner: str, option: str, got: float, low: float, high: float, *, low_open: bool = False, high_closed: bool = False,
    other: str = "",
) -> None:  # fmt: skip
    """Raises ConfigError unless `got` is a number in [low, high); without low if `low_open`, with high if `high_closed`.

    Args: `other` is a word that its owner takes as well.
    """
    is_number = isinstance(got, (int, float)) and not isinstance(got, bool)
    if not is_number or not (low < got if low_open else low <= got) or not (got <= high if high_closed else got < high):
        span = f"{'(' if low_open else '['}{low:g}, {high:g}{']' if high_closed else ')'}"
        word = f' or "{other}"' if other else ""
        raise ConfigError(
            f"{owner} got {option} = {got!r}; allowed is {span}{word}: choose a value in that range{word}"
        )
