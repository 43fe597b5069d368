"""The style of figures: one colour per method, distinguishable without colour too, legible in print."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ekfac.lab.show.looks import BLACK, BLUE, FAMILIES, GREEN, GREY, ORANGE, RED, SKY, Line, lines, ordered

__all__ = ["BLACK", "BLUE", "FAMILIES", "GREEN", "GREY", "ORANGE", "RED", "SKY", "Line", "lines", "ordered"]

_LINES: Sequence[Any] = ["-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1))]
# Markers at both ends of a legend's line leave its dashes visible.
HANDLES: Any = {"handlelength": 4.0, "numpoints": 2, "frameon": False}
DAGGER = " †"

SETTINGS: Any = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "figure.titlesize": 9.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    # The same picture gives the same file.
    "svg.hashsalt": "ekfac",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw with these settings, and restore the caller's."""
    with matplotlib.rc_context(SETTINGS):
        yield


def linestyle(look: Line) -> Any:
    """Return matplotlib's line style of a curve."""
    return _LINES[look.variant % len(_LINES)]


def panels(rows: int, columns: int, height: float = 2.2, width: float = 7.5) -> tuple[Figure, list[Axes]]:
    """Return a figure as wide as a page of text, with its panels row by row."""
    # Without pyplot, which would keep the figure alive and might open a window.
    figure = Figure(figsize=(width, height * rows + 0.5))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def letter(number: int) -> str:
    """Return the name of a panel: ``(a)``, ``(b)``, ..."""
    return f"({'abcdefghijkl'[number]})"


def plain_bar(bar: Colorbar) -> None:
    """Write out the numbers of a logarithmic colour bar."""
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    # Only some of those between decades, as they would overlap.
    bar.ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else ""))
    bar.ax.tick_params(which="both", labelsize=6.5)


def share_legend(figure: Figure, axes: Sequence[Axes], columns: int = 5, marked: Collection[str] = ()) -> None:
    """Put one legend for all panels below them; marked entries get a dagger."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        names = ordered(entries)
        figure.legend(
            [entries[name] for name in names],
            [name + DAGGER if name in marked else name for name in names],
            loc="outside lower center",
            ncols=min(columns, len(names)),
            **HANDLES,
        )
