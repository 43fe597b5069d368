"""A line chart in plain text, for the terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

# Marks for curves whose own letters are all taken.
SPARE = "*o+#%@&123456789"


def chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    width: int = 72,
    height: int = 16,
) -> str:
    """Draw curves over a common x axis, y on a logarithmic scale.

    Args:
        series: Points (x, y) by name; those with a y that is not positive and finite are left out.
        x_label: The label of x.
        y_label: The label of y.
        width: Columns of the plot itself.
        height: Rows of the plot itself.

    Returns:
        Lines of text: the plot, its axes, and the legend.
    """
    curves = {
        name: [(x, math.log10(y)) for x, y in points if math.isfinite(y) and y > 0] for name, points in series.items()
    }
    flat = [point for points in curves.values() for point in points]
    if not flat:
        return "(nothing to draw)"
    x_low, x_high = min(x for x, _ in flat), max(x for x, _ in flat)
    y_low, y_high = min(y for _, y in flat), max(y for _, y in flat)
    grid = [[" "] * width for _ in range(height)]
    letters = marks(curves)
    for name, points in curves.items():
        mark = letters[name]
        for column, y in _columns(points, x_low, x_high, width):
            row = round((y_high - y) / ((y_high - y_low) or 1) * (height - 1))
            grid[row][column] = mark
    lines = [f"{y_label} (log scale)"]
    for row, cells in enumerate(grid):
        y = y_high - (y_high - y_low) * row / (height - 1)
        tick = f"{10**y:8.3g}" if row % 5 == 0 or row == height - 1 else " " * 8
        lines.append(f"{tick} |{''.join(cells)}")
    lines.append(" " * 9 + "+" + "-" * width)
    ends = f"{x_low:.4g}", f"{x_high:.4g}"
    lines.append(" " * 10 + ends[0] + x_label.center(width - len(ends[0]) - len(ends[1])) + ends[1])
    entries = [f"{letters[name]} {name}" for name in curves]
    lines += _wrapped(entries, width)
    return "\n".join(lines)


def marks(names: Iterable[str]) -> dict[str, str]:
    """Assign every curve a letter of its name: the first that is free, lower case before upper case."""
    found: dict[str, str] = {}
    for name in names:
        letters = [letter for letter in name if letter.isalnum() and letter.isascii()]
        wanted = [form for letter in letters for form in (letter.lower(), letter.upper())]
        taken = set(found.values())
        found[name] = next((mark for mark in [*wanted, *SPARE] if mark not in taken), "?")
    return found


def _wrapped(entries: Sequence[str], width: int) -> list[str]:
    """Wrap the legend's entries to the width of the plot; a longer entry is cut."""
    lines: list[str] = []
    for entry in (entry[:width] for entry in entries):
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1] += "   " + entry
        else:
            lines.append(entry)
    return [" " * 10 + line for line in lines]


def _columns(points: Sequence[tuple[float, float]], x_low: float, x_high: float, width: int) -> list[tuple[int, float]]:
    """Return a curve's value at each of its columns, interpolating linearly between its points."""
    found = []
    span = (x_high - x_low) or 1.0
    for column in range(width):
        x = x_low + span * column / (width - 1)
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if x0 <= x <= x1:
                fraction = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
                found.append((column, y0 + fraction * (y1 - y0)))
                break
    return found
