"""Error of KFAC and EKFAC against the empirical Fisher over training, and its effect on the direction."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ekfac.lab.show.figures import style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.drift import DAMPING, Drift, errors

RENEW = 100


def draw(request: Request) -> Figure:
    """Draw the relative error, and next to it the angle to the exact natural gradient."""
    found = request.measured("error", lambda: measure(request))
    error, angle = (Drift(found["steps"], found[name]) for name in ("error", "angle"))
    figure, axes = style.panels(1, 2, height=2.6, width=6.5)
    _panel(axes[0], error)
    axes[0].set_ylabel(r"$\Vert G-\hat{G}\Vert_F\;/\;\Vert G\Vert_F$")
    axes[0].set_title("approximation error")
    _panel(axes[1], angle)
    axes[1].set_ylabel(r"angle of $\hat{G}^{-1}\nabla$ to $G^{-1}\nabla$ (degrees)")
    axes[1].set_title(f"direction, damping {DAMPING:g}")
    axes[1].set_ylim(0, max(95, *angle.distances["KFAC"], *angle.distances["EKFAC"]))
    figure.suptitle(f"MNIST classifier ({request.dataset}), basis and inverse refreshed every {RENEW} steps")
    style.share_legend(figure, axes)
    return figure


def measure(request: Request) -> dict[str, Any]:
    """Return the steps, and the errors and angles at each of them."""
    error, angle = errors(request, RENEW)
    return {"renewed_every": RENEW, "steps": error.steps, "error": error.distances, "angle": angle.distances}


def _panel(axis: Axes, drift: Drift) -> None:
    for step in range(0, drift.steps[-1] + 1, RENEW):
        axis.axvline(step, color=style.GREY, linewidth=0.6, linestyle=(0, (2, 2)))
    for name, values in drift.distances.items():
        color, marker = style.FAMILIES[name]
        every = max(1, len(values) // 12)
        axis.plot(drift.steps, values, color=color, marker=marker, markevery=every, markerfacecolor="white", label=name)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("iteration")


FIGURES.add("error", FigureSpec("error of KFAC and EKFAC against the Fisher over training, and the angle", draw))
