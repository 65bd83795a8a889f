"""Sentences for options that cannot work; every rule factory checks its own before any training."""

from collections.abc import Sequence

from gossamer.errors import ConfigError

__all__ = ["at_least", "one_of", "within"]


def one_of(rule: str, option: str, got: object, allowed: Sequence[str]) -> None:
    """Raises ConfigError unless `got` is one of the allowed words."""
    if got not in allowed:
        raise ConfigError(f"{rule} got {option} = {got!r}; allowed are {', '.join(allowed)}: choose one of them")


def at_least(rule: str, option: str, got: object, low: int) -> None:
    """Raises ConfigError unless `got` is a whole number of at least `low`."""
    if type(got) is not int or got < low:
        raise ConfigError(
            f"{rule} got {option} = {got!r}; allowed are whole numbers of at least {low}: choose one of those"
        )


def within(
    rule: str, option: str, got: float, low: float, high: float, *, low_open: bool = False, high_closed: bool = False
) -> None:
    """Raises ConfigError unless `got` is a number in [low, high); without low if `low_open`, with high if `high_closed`."""
    is_number = isinstance(got, (int, float)) and not isinstance(got, bool)
    if not is_number or not (low < got if low_open else low <= got) or not (got <= high if high_closed else got < high):
        span = f"{'(' if low_open else '['}{low:g}, {high:g}{']' if high_closed else ')'}"
        raise ConfigError(f"{rule} got {option} = {got!r}; allowed is {span}: choose a value in that range")
