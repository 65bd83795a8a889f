"""The table of boundary codecs. To add one, write its own file, and import it and add its row here."""

from collections.abc import Callable

from gossamer.boundaries.contract import Boundary
from gossamer.boundaries.dense import cast as cast
from gossamer.boundaries.dense import dense as dense
from gossamer.boundaries.intk import aqsgd as aqsgd
from gossamer.boundaries.intk import intk as intk
from gossamer.boundaries.projection import projection as projection
from gossamer.boundaries.tahquant import tahquant as tahquant
from gossamer.settings.options import table

__all__ = ["BOUNDARIES", "Boundary"]

BOUNDARIES: dict[str, Callable[..., Boundary]] = table(
    dense,
    cast,
    intk,
    tahquant,
    aqsgd,
    projection,
    kind="boundary codec",
    where="pipeline.forward or pipeline.backward",
)
