"""Sentences for options that cannot work; every rule factory checks its own before any training."""

from collections.abc import Sequence

from gossamer.errors import ConfigError

__all__ = ["one_of", "within"]


def one_of(rule: str, option: str, got: object, allowed: Sequence[str]) -> None:
    """Raises ConfigError unless `got` is one of the allowed words."""
    if got not in allowed:
        raise ConfigError(f"{rule} got {option} = {got!r}; allowed are {', '.join(allowed)}: choose one of them")


def within(rule: str, option: str, got: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Raises ConfigError unless `got` is a number in [low, high), or in (low, high) with `low_open`."""
    is_number = isinstance(got, (int, float)) and not isinstance(got, bool)
    if not is_number or not (low < got < high if low_open else low <= got < high):
        bracket = "(" if low_open else "["
        raise ConfigError(
            f"{rule} got {option} = {got!r}; allowed is {bracket}{low:g}, {high:g}): choose a value in that range"
        )
