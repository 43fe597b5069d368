"""Panels of curves over epochs, steps or seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator, NullFormatter

from ekfac.lab.search.selection import Curve, Envelope, per_time
from ekfac.lab.show.figures import style

AXES = {"epoch": "epoch", "step": "iteration", "seconds": "training time (s)"}
NAMES = {"train_loss": "training loss", "validation_loss": "validation loss"}
ABOVE = " above floor"
# If times differ by more than this factor, the axis is logarithmic.
LONG = 4.0
# Values up to this many times a curve's start stay in the panel; those of diverging settings do not.
ROOM = 10.0


def whole(curve: Curve, name: str, x: str, *, above_floor: bool = False, standard_error: bool = False) -> Envelope:
    """Return one setting's curve, with its spread over seeds (over time, only over timed seeds).

    Args:
        curve: The setting.
        name: The quantity to show.
        x: ``"epoch"``, ``"step"`` or ``"seconds"``.
        above_floor: Subtract the smallest possible value.
        standard_error: Make the band the mean plus or minus its standard error, not the range over seeds.
    """
    if x == "seconds":
        timed = curve.timed
        if timed is None:
            return _nothing()
        curve = timed
    floor = curve.floor_of(name) if above_floor else 0.0
    value = curve.mean(name) - floor
    error = curve.standard_error(name)
    low, high = (value - error, value + error) if standard_error else (bound - floor for bound in curve.spread(name))
    keep = numpy.isfinite(value)
    return Envelope(curve.mean(x)[keep], value[keep], low[keep], high[keep], [curve] * int(keep.sum()))


def has_times(found: Iterable[Curve]) -> bool:
    """Return whether any of some settings was timed; otherwise the panel over time is left out."""
    return any(curve.timed is not None for curve in found)


def budgets(candidates: Sequence[Curve], name: str = "train_loss") -> Envelope:
    """Return the best of the timed settings at each time budget, with points only where it changes."""
    timed = [curve.timed for curve in candidates if curve.timed is not None]
    if not timed:
        return _nothing()
    found = per_time(timed, name)
    keep = numpy.concatenate([[True], found.value[1:] != found.value[:-1]])[: len(found.x)]
    chosen = [curve for curve, kept in zip(found.chosen, keep, strict=True) if kept]
    return Envelope(found.x[keep], found.value[keep], found.low[keep], found.high[keep], chosen)


def trained(found: Envelope) -> Envelope:
    """Return a curve without the untrained network, whose loss with batch-norm is arbitrary."""
    keep = found.x > 0
    chosen = [curve for curve, kept in zip(found.chosen, keep, strict=True) if kept]
    return Envelope(found.x[keep], found.value[keep], found.low[keep], found.high[keep], chosen)


def _nothing() -> Envelope:
    empty = numpy.empty(0)
    return Envelope(empty, empty, empty, empty, [])


def draw_curves(
    axis: Axes,
    found: Mapping[str, Envelope],
    looks: Mapping[str, style.Line],
    *,
    linestyle: Any = None,
    label: bool = True,
) -> None:
    """Draw curves, each with a band from the lowest to the highest seed if there are several."""
    for number, name in enumerate(style.ordered(found)):
        curve, look = found[name], looks[name]
        if not len(curve.x):
            continue
        # Stagger the markers of overlapping curves.
        every = max(1, len(curve.x) // 6)
        axis.plot(
            curve.x,
            curve.value,
            color=look.color,
            marker=look.marker,
            linestyle=style.linestyle(look) if linestyle is None else linestyle,
            markevery=(number % every, every),
            markerfacecolor="white",
            label=name if label else None,
        )
        if (curve.low < curve.high).any():
            axis.fill_between(curve.x, curve.low, curve.high, color=look.color, alpha=0.18, linewidth=0)


def loss_axis(axis: Axes, found: Sequence[Envelope], name: str, x: str, above: str = "") -> None:
    """Label a panel of losses: logarithmic, with plain numbers."""
    axis.set_yscale("log")
    values = numpy.concatenate([c.value for c in found if len(c.value)] or [numpy.ones(1)])
    values = values[numpy.isfinite(values) & (values > 0)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.1, 1.0)
    # Values of diverging settings would compress everything of interest into a corner.
    start = max((float(c.value[0]) for c in found if len(c.value)), default=high)
    high = min(high, ROOM * start)
    axis.set_ylim(low / 1.15, high * 1.15)
    plain_log_ticks(axis)
    axis.set_xlabel(AXES[x])
    axis.set_ylabel(NAMES.get(name, name) + above)
    ends = [float(c.x[-1]) for c in found if len(c.x)]
    if x == "seconds" and len(ends) > 1 and max(ends) > LONG * min(ends):
        # One slow method would compress all others into a corner. A logarithmic axis has no time zero.
        axis.set_xscale("log", nonpositive="mask")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(_Plain())
        axis.xaxis.set_minor_formatter(NullFormatter())
    if x != "seconds":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def plain_log_ticks(axis: Axes) -> None:
    """Write out a logarithmic axis's numbers, and enough of them even within one decade."""
    low, high = axis.get_ylim()
    wide = high / low > 60
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=12))
    axis.yaxis.set_minor_locator(LogLocator(subs=[float(n) for n in range(2, 10)], numticks=12))
    axis.yaxis.set_minor_formatter(NullFormatter())
    if low >= 1e-3 and high < 1e5:
        axis.yaxis.set_major_formatter(_Plain())


class _Plain(LogFormatter):
    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}"
