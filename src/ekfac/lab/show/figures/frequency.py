"""The interval between updates of basis or inverse: training loss, and drift of the spectra from the true one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ekfac.lab.data.files import DataError
from ekfac.lab.search.selection import Curve, best_of_each, curves
from ekfac.lab.show.figures import quick, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.curves import ABOVE, draw_curves, has_times, loss_axis, plain_log_ticks, whole
from ekfac.lab.show.figures.drift import Drift, spectra
from ekfac.lab.training.runs import Run

OPTIMIZERS = ("kfac", "ekfac", "ekfac-ra")


def draw(request: Request) -> Figure:
    """Draw losses from runs at several frequencies, if there are any, and spectra, which are computed here."""
    best = best_of_each(curves(filter(takes, request.runs)))
    panels = {"epoch": "training loss", "seconds": "wall-clock time"} if best else {}
    if not has_times(best.values()):
        panels.pop("seconds", None)
    drift = _drift(request, needed=not panels)
    count = len(panels) + (drift is not None)
    figure, axes = style.panels(1, count, height=3.0, width=(4.5, 6.5, 7.5)[count - 1])
    _losses(axes[: len(panels)], best, panels)
    if drift is not None:
        _spectra(axes[-1], drift, style.letter(len(panels)))
    datasets = ", ".join(sorted({str(run.config.dataset) for run in request.runs})) or request.dataset
    note = f" on {datasets}"
    if request.quick:
        note = f"\n{quick.NOTE_DIGITS}; the spectra at full size"
    figure.suptitle(f"How often the basis is refreshed, deep auto-encoder{note}")
    style.share_legend(figure, axes[: len(panels)], columns=3)
    return figure


def _drift(request: Request, needed: bool) -> Drift | None:
    """Return the spectra's drift; ``None`` if its data are missing and there are runs to show without it."""
    try:
        return measured(request)
    except DataError as error:
        if needed:
            raise
        request.lacks.append(f"the spectra's panel: {error}")
        return None


def _losses(axes: Sequence[Axes], best: Mapping[str, Curve], panels: Mapping[str, str]) -> None:
    looks = style.lines(best)
    for number, (axis, (x, heading)) in enumerate(zip(axes, panels.items(), strict=True)):
        entries = {name: whole(curve, "train_loss", x, above_floor=True) for name, curve in best.items()}
        draw_curves(axis, entries, looks)
        loss_axis(axis, list(entries.values()), "train_loss", x, ABOVE)
        axis.set_title(f"{style.letter(number)} {heading}")


def measured(request: Request) -> Drift:
    """Return the spectra's drift, on the runs' dataset if there are runs."""
    datasets = {str(run.config.dataset) for run in request.runs}
    if len(datasets) == 1 and not request.quick:
        request = replace(request, dataset=datasets.pop())

    def compute() -> dict[str, Any]:
        drift = spectra(request)
        return {"steps": drift.steps, "distances": drift.distances, "norms": drift.norms}

    found = request.measured("frequency", compute)
    return Drift(found["steps"], found["distances"])


def _spectra(axis: Axes, drift: Drift, letter: str) -> None:
    for name, values in drift.distances.items():
        color, marker = style.FAMILIES[name]
        every = max(1, len(values) // 8)
        axis.plot(drift.steps, values, color=color, marker=marker, markevery=every, markerfacecolor="white", label=name)
    axis.set_yscale("log")
    plain_log_ticks(axis)
    axis.set_xlabel("iteration")
    axis.set_ylabel(r"$l_2$ distance to the spectrum of $G$")
    axis.set_title(f"{letter} spectra of the 4th layer,\nbasis of the start")
    axis.legend(loc="best", frameon=True)


def takes(run: Run) -> bool:
    """Return whether a run is the auto-encoder's by a factored method."""
    return run.config.task == "autoencoder" and run.config.optimizer in OPTIMIZERS


FIGURES.add(
    "frequency",
    FigureSpec(
        "KFAC, EKFAC, EKFAC-ra refreshed every 1, 50, ... steps; drift of spectra",
        draw,
        quick.frequencies,
        takes,
        alone=True,
    ),
)
