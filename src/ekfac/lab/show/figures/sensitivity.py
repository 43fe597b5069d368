"""How much a method's result depends on its settings: heat maps over learning rate and damping, lines over the rate."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

from ekfac.lab.labels import option
from ekfac.lab.registry import LabError
from ekfac.lab.search.selection import Array, Curve, by_method, curves, final_settings
from ekfac.lab.show.figures import quick, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.plane import loss_at
from ekfac.lab.training.runs import Run

LOSS = "train_loss_mean"
NEAR = 1.25
# Final losses are clipped to this many times the best of all; beyond, colours would show little.
REACH = 30.0
COLORS = "cividis_r"


@dataclass(frozen=True)
class Grid:
    """A method's losses minus their floor at every learning rate and damping.

    Attributes:
        lrs: The columns.
        dampings: The rows; a single zero for a method without damping.
        losses: [dampings, lrs]; infinite if it diverged, NaN if it was not run.
    """

    lrs: list[float]
    dampings: list[float]
    losses: Array

    @property
    def tried(self) -> int:
        """The number of settings that were run."""
        return int((~numpy.isnan(self.losses)).sum())

    @property
    def best(self) -> float:
        """The lowest loss minus its floor."""
        return float(numpy.nanmin(self.losses))

    @property
    def near(self) -> int:
        """The number of settings that end within :data:`NEAR` times the best."""
        return int((self.losses <= NEAR * self.best).sum()) if math.isfinite(self.best) else 0

    @property
    def diverged(self) -> int:
        """The number of settings that diverged."""
        return int(numpy.isinf(self.losses).sum())


def grid(candidates: Sequence[Curve]) -> Grid:
    """Arrange a method's settings on their grid."""
    points = {(_number(curve, "lr"), _number(curve, "damping")): curve for curve in candidates}
    lrs = sorted({lr for lr, _ in points})
    dampings = sorted({damping for _, damping in points})
    losses = numpy.full((len(dampings), len(lrs)), numpy.nan)
    for (lr, damping), curve in points.items():
        losses[dampings.index(damping), lrs.index(lr)] = loss_at(curve, curve.config.epochs, LOSS)
    return Grid(lrs, dampings, losses)


def _number(curve: Curve, name: str) -> float:
    value = option(curve.config, name)
    # Rounded, so that a number computed in two ways is one column. Without damping there is one row.
    return 0.0 if value is None else float(f"{float(value):.3g}")


def grids(runs: Sequence[Run]) -> tuple[dict[str, Grid], dict[str, Grid]]:
    """Return the methods that were run over learning rate and damping, and those over the rate only."""
    groups = by_method(curves(runs))
    found = {name: grid(final_settings(groups[name])) for name in style.ordered(groups)}
    planes = {name: one for name, one in found.items() if len(one.dampings) > 1 and len(one.lrs) > 1}
    lines = {name: one for name, one in found.items() if len(one.dampings) == 1 and len(one.lrs) > 1}
    return planes, lines


def draw(request: Request) -> Figure:
    """Draw a heat map for each method with damping, and rows for the others, on one colour scale."""
    planes, lines = grids([run for run in request.runs if run.status != "unfinished"])
    if not planes and not lines:
        raise LabError("figure sensitivity needs runs of one method at several learning rates")
    widths = [*(1.0 for _ in planes), *([1.15] if lines else [])]
    figure = Figure(figsize=(max(4.2, 0.8 + 2.25 * sum(widths)), 3.5))
    axes = list(figure.subplots(1, len(widths), squeeze=False, width_ratios=widths).flat)
    finite = [one.best for one in (*planes.values(), *lines.values()) if math.isfinite(one.best)]
    low = min(finite, default=1.0)
    norm = LogNorm(low, REACH * low, clip=True)
    for axis, (name, one) in zip(axes, planes.items(), strict=False):
        _heat(axis, one, norm)
        axis.set_title(f"{name}\n{_share(one)}")
        axis.set_xticks(range(len(one.lrs)), [_short(lr) for lr in one.lrs])
        axis.set_yticks(range(len(one.dampings)), [_short(damping) for damping in one.dampings])
        axis.set_xlabel("learning rate")
    if planes:
        axes[0].set_ylabel("damping")
    if lines:
        _strip(axes[-1], lines, norm)
    bar = figure.colorbar(ScalarMappable(norm, COLORS), ax=axes, pad=0.01, aspect=22, extend="max")
    epochs = max((run.config.epochs or 0 for run in request.runs), default=0)
    bar.set_label(f"training loss above its floor,\nmean over epoch {epochs}")
    style.plain_bar(bar)
    datasets = ", ".join(sorted({str(run.config.dataset) for run in request.runs}))
    sizes = ", ".join(str(size) for size in sorted({run.config.batch_size or 0 for run in request.runs}))
    note = quick.NOTE_DIGITS if request.quick else f"{datasets}, batch {sizes}, {epochs} epochs"
    title = f"Settings that end within {NEAR:g} times a method's own best loss above its floor: auto-encoder, {note}"
    # At this size a line has about thirteen letters per inch.
    lines_of_title = textwrap.wrap(title, round(13 * figure.get_figwidth()))
    figure.suptitle("\n".join([*lines_of_title, "ring: the method's best; cross: diverged"]))
    return figure


def _share(one: Grid) -> str:
    return f"{one.near} of {one.tried} within {NEAR:g}x"


def _short(value: float) -> str:
    """Format a setting with one digit if that is accurate enough: 0.00333 as 0.003."""
    near = float(f"{value:.1g}")
    return f"{near if abs(near - value) < 0.12 * value else value:.2g}"


def _brief(loss: float) -> str:
    """Format a loss to fit into a cell."""
    return f"{loss:.3g}" if loss < 999.5 else f"{loss / 1000:.2g}k"


def _heat(axis: Axes, one: Grid, norm: LogNorm) -> None:
    shown = numpy.ma.masked_invalid(one.losses)
    axis.imshow(shown, norm=norm, cmap=COLORS, origin="lower", aspect="auto")
    axis.grid(False)
    for (row, column), loss in numpy.ndenumerate(one.losses):
        write = partial(axis.text, column, row, ha="center", va="center", fontsize=6.5)
        if math.isinf(loss):
            write("✕", color=style.RED, fontsize=10)
        elif math.isfinite(loss):
            write(_brief(loss), color="white" if norm(loss) > 0.45 else style.BLACK)
        if loss == one.best and math.isfinite(loss):
            ring = Ellipse((column, row), 0.94, 0.94, fill=False, edgecolor=style.RED, linewidth=1.6)
            axis.add_patch(ring)


def _strip(axis: Axes, lines: Mapping[str, Grid], norm: LogNorm) -> None:
    """Draw the methods without damping, one row each, with the learning rates written into the cells."""
    names = list(lines)[::-1]
    columns = max(len(one.lrs) for one in lines.values())
    everything = numpy.full((len(names), columns), numpy.nan)
    for row, name in enumerate(names):
        everything[row, : len(lines[name].lrs)] = lines[name].losses[0]
    axis.imshow(numpy.ma.masked_invalid(everything), norm=norm, cmap=COLORS, origin="lower", aspect="auto")
    axis.grid(False)
    for row, name in enumerate(names):
        one = lines[name]
        for column, (lr, loss) in enumerate(zip(one.lrs, one.losses[0], strict=True)):
            dark = math.isfinite(loss) and norm(loss) > 0.45
            color = "white" if dark else style.BLACK
            write = partial(axis.text, column, ha="center", va="center", fontsize=6.5)
            if math.isinf(loss):
                write(y=row, s="✕", color=style.RED, fontsize=10)
            else:
                write(y=row, s=_brief(loss), color=color)
            write(y=row - 0.33, s=_short(lr), color=color, fontsize=5.5)
            if loss == one.best and math.isfinite(loss):
                axis.add_patch(Ellipse((column, row), 0.94, 0.5, fill=False, edgecolor=style.RED, linewidth=1.6))
    axis.set_xticks([])
    axis.set_yticks(range(len(names)), [f"{name}\n{lines[name].near} of {lines[name].tried}" for name in names])
    axis.set_xlabel("learning rate in each cell")
    axis.set_title(f"by learning rate alone:\nhow many within {NEAR:g}x")


def takes(run: Run) -> bool:
    """Return whether a run is the auto-encoder's."""
    return run.config.task == "autoencoder"


FIGURES.add(
    "sensitivity",
    FigureSpec("auto-encoder: final loss over learning rate and damping, one scale", draw, quick.sensitivity, takes),
)
