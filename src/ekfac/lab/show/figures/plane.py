"""The (learning rate, damping) plane: how sensitive a method is to its settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from ekfac.lab.labels import option
from ekfac.lab.search.selection import Curve
from ekfac.lab.show.figures import style


def loss_at(curve: Curve, epoch: int, name: str = "train_loss") -> float:
    """Return the loss minus its floor after an epoch, or at the end if earlier; infinite if it diverged."""
    if any(run.status == "diverged" and run.history[-1]["epoch"] <= epoch for run in curve.runs):
        return math.inf
    where = numpy.flatnonzero(curve.mean("epoch") <= epoch)
    value = float(curve.mean(name)[where[-1]]) - curve.floor_of(name)
    return value if math.isfinite(value) else math.inf


def has_plane(candidates: Sequence[Curve]) -> bool:
    """Return whether settings vary in both learning rate and damping."""
    found = [[option(curve.config, name) for curve in candidates] for name in ("lr", "damping")]
    return all(None not in values and len(set(values)) > 1 for values in found)


def scale(losses: Sequence[float], start: float) -> LogNorm:
    """Return a colour scale from the best of some losses to the loss before training."""
    finite = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    low = min(finite, default=start / 2)
    return LogNorm(low, max(start, low * 1.01))


def draw_plane(axis: Axes, candidates: Sequence[Curve], epoch: int, norm: LogNorm) -> Any:
    """Show every setting as a point coloured by its loss; crosses are those that diverged."""
    lrs, dampings = ([float(option(curve.config, name)) for curve in candidates] for name in ("lr", "damping"))
    losses = [loss_at(curve, epoch) for curve in candidates]
    fine = [number for number, loss in enumerate(losses) if math.isfinite(loss)]
    gone = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
    size = 60 if len(candidates) < 40 else 22
    drawn = axis.scatter(
        [lrs[n] for n in fine],
        [dampings[n] for n in fine],
        c=[losses[n] for n in fine],
        norm=norm,
        cmap="cividis_r",
        s=size,
        edgecolors=style.BLACK,
        linewidths=0.4,
        zorder=2,
    )
    axis.scatter([lrs[n] for n in gone], [dampings[n] for n in gone], c=style.RED, marker="x", s=size / 2, zorder=2)
    if fine:
        best = min(fine, key=lambda n: losses[n])
        axis.scatter(lrs[best], dampings[best], s=2.5 * size, facecolors="none", edgecolors=style.RED, linewidths=1.2)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(0.15)
    axis.set_xlabel("learning rate")
    axis.set_ylabel("damping")
    return drawn
