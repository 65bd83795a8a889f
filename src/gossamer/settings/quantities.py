"""Quantities with a unit: `25 Mbit/s`, `20 ms`, `5 h`, `1.7B` where a field of a file or an option takes a number."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_QUANTITY = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+|inf|nan)(?:[eE][+-]?\d+)?)\s*(\D.*)?")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Unit:
    """Marks a number that may be written as text with one of these units.

    Args:
        factors: the value of each unit in the field's base unit.
        example: what errors and the schema show.

    >>> BITS_PER_SECOND.number("25 Mbit/s"), SECONDS.number("20ms"), BYTES.number("16 GiB"), TOKENS.number("1.7B")
    (25000000.0, 0.02, 17179869184.0, 1700000000.0)
    >>> SECONDS.number("20 Mbit")
    Traceback (most recent call last):
        ...
    ValueError: '20 Mbit' is no number with one of the units us, ms, s, min, h, d
    """

    def __init__(self, factors: Mapping[str, float], example: str) -> None:
        self.factors, self.example = factors, example

    def number(self, text: str) -> float:
        """The quantity in the base unit, which is the default. Raises: ValueError for other text."""
        written = _QUANTITY.fullmatch(text.strip())
        factor = {"": 1.0, **self.factors}.get((written[2] or "").strip()) if written else None
        if written is None or factor is None:
            raise ValueError(f"'{text:.40}' is no number with one of the units {', '.join(self.factors)}")
        return float(written[1].replace("_", "")) * factor

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema  # options of commands have units too, and start faster without it

        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, Any]:
        number = handler(schema)
        return {"anyOf": [number, {"type": "string", "examples": [self.example]}]}

    def _read(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        number = self.number(value)
        return int(number) if number.is_integer() else number  # for fields of whole numbers


def _prefixed(*units: str) -> dict[str, float]:
    return {f"{prefix}{unit}": factor for unit in units for prefix, factor in _PREFIXES.items()}


BITS_PER_SECOND = Unit(_prefixed("bit/s", "bps"), "25 Mbit/s")
SECONDS = Unit({"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}, "20 ms")
HOURS = Unit({"min": 1 / 60, "h": 1.0, "d": 24.0}, "2 d")
MINUTES = Unit({"s": 1 / 60, "min": 1.0, "h": 60.0}, "10 min")
BYTES = Unit(_prefixed("B") | {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)}, "16 GiB")
TOKENS = Unit({"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}, "1.7B")
FLOPS = Unit(_prefixed("FLOP/s", "FLOPS"), "9 TFLOPS")
