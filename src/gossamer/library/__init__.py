"""Gossamer in an existing training loop: the user's model, inner optimizer and data, and three more lines.

`Outer` is all that a loop needs; `gossamer.outer_loop` calls it after each step of an optimizer. `gossamer.method` gives
it the parts of a method by name.
"""

from gossamer.library.metrics import OuterMetrics
from gossamer.library.outer import Outer
from gossamer.library.parts import OuterMethod, OuterOptions, Reduction
from gossamer.library.saved import OuterState

__all__ = ["Outer", "OuterMethod", "OuterMetrics", "OuterOptions", "OuterState", "Reduction"]
