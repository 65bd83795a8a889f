"""Pictures by matplotlib: their style, and figures as SVG."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

__all__ = ["FAINT", "INK", "chart_style", "line_style", "plain_axes", "svg"]

INK, FAINT = "#2b2b2b", "#d9d9d9"
_COLOURS = ("#1f6f9f", "#d2691e", "#3f8f5b", "#8a5aa8", "#b8476b", "#8c7a3d", "#4a4a4a", "#2aa3a3")
_DASHES = ((), (5, 2), (1, 1.5), (5, 1.5, 1, 1.5))


@contextlib.contextmanager
def chart_style() -> Iterator[None]:
    """Matplotlib settings for making and writing figures; with a fixed salt, equal figures give equal bytes."""
    import matplotlib

    with matplotlib.rc_context(
        {"svg.hashsalt": "gossamer", "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}
    ):
        yield


def plain_axes(axes: Any, x_label: str, *, grid: bool = True) -> None:
    """Removes everything from the axes that nobody reads."""
    axes.set_xlabel(x_label, color=INK)
    if grid:
        axes.grid(which="both", color=FAINT, linewidth=0.6)
    axes.tick_params(which="both", colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def svg(figure: Any) -> bytes:
    """A matplotlib figure as SVG, without a date."""
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


def line_style(place: int) -> tuple[str, Any]:
    """Colour and line style of the run at this place: all colours solid first, then dashed."""
    dashes = _DASHES[place // len(_COLOURS) % len(_DASHES)]
    return _COLOURS[place % len(_COLOURS)], (0, dashes) if dashes else "-"
