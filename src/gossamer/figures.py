"""An experiment's outcome over what it swept: one table and one figure, drawn from the summaries of its runs."""

from dataclasses import dataclass

from gossamer.errors import ConfigError

__all__ = ["Figure"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What the `[figure]` table of an experiment file asks for: final loss over one swept key or two, or the time to a target."""

    x: str | tuple[str, ...] = ()
    """The swept key along the axis; of several, the one that a variant sweeps."""
    y: str = ""
    """A second swept key: a heat map for each variant in place of curves."""
    log_x: bool = False
    target: str = ""
    """A variant: when every other is first as good as this one ended, on every network."""

    def __post_init__(self) -> None:
        if bool(self.x) == bool(self.target):
            raise ConfigError(
                f"figure has x = {self.x!r} and target = {self.target!r} but needs one of the two: "
                "a swept key for x, or a variant's label for target"
            )
        if self.y and not self.x:
            raise ConfigError(f"figure.y is '{self.y}' without an x; name the other swept key as x")

    @property
    def keys(self) -> tuple[str, ...]:
        """`x` as a tuple."""
        return (self.x,) if isinstance(self.x, str) else self.x
