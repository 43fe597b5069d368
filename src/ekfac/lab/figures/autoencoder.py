"""The deep auto-encoder: training loss by epoch and by time, validation loss, sensitivity."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ekfac.lab.config import TrainConfig
from ekfac.lab.figures import quick, style
from ekfac.lab.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.figures.curves import draw_curves, loss_axis, whole
from ekfac.lab.figures.plane import draw_plane, has_plane, loss_at, scale
from ekfac.lab.runs import Run
from ekfac.lab.selection import Curve, best_final, by_method, curves

PANELS = (("train_loss", "epoch"), ("train_loss", "seconds"), ("validation_loss", "epoch"))
TITLES = ("(a) training loss", "(b) wall-clock time", "(c) validation loss")
PLANE_EPOCH = 20


def settings() -> list[TrainConfig]:
    """Return the small runs: each method at settings that suit it, and a grid for the plane."""
    return [quick.autoencoder(name) for name in quick.AUTOENCODER] + quick.planes()


def draw(request: Request) -> Figure:
    """Draw (a) to (c) from the best setting of each method, (d) from all settings that share one batch size."""
    found = curves(run for run in request.runs if run.status != "unfinished")
    groups = {name: group for name, group in by_method(found).items() if best_final(_longest(group)) is not None}
    best = {name: best_final(_longest(group)) for name, group in groups.items()}
    planes = {name: _one_batch_size(group) for name, group in groups.items() if has_plane(_one_batch_size(group))}
    names = style.ordered(planes)
    figure = Figure(figsize=(7.5, 5.6 if planes else 2.8))
    rows = figure.add_gridspec(2 if planes else 1, 1, height_ratios=(1.15, 1) if planes else (1,))
    top = rows[0].subgridspec(1, 3)
    axes = [figure.add_subplot(top[0, column]) for column in range(3)]
    looks = style.lines(style.ordered(best))
    for axis, (name, x), heading in zip(axes, PANELS, TITLES, strict=True):
        entries = {label: whole(curve, name, x) for label, curve in best.items() if curve is not None}
        draw_curves(axis, entries, looks)
        floor = found[0].runs[0].about["floor"].get(name.split("_")[0], 0.0) if found else 0.0
        loss_axis(axis, list(entries.values()), name, x, floor)
        axis.set_title(heading)
    if planes:
        bottom = rows[1].subgridspec(1, len(names))
        below = [figure.add_subplot(bottom[0, column]) for column in range(len(names))]
        epoch = min(PLANE_EPOCH, max(run.history[-1]["epoch"] for g in planes.values() for c in g for run in c.runs))
        losses = [loss_at(curve, epoch) for group in planes.values() for curve in group]
        start = max(float(curve.mean("train_loss")[0]) for group in planes.values() for curve in group)
        norm = scale(losses, start)
        for number, (axis, name) in enumerate(zip(below, names, strict=True)):
            drawn = draw_plane(axis, planes[name], epoch, norm)
            axis.set_title(f"{'(d) ' if number == 0 else ''}{name}")
            if number:
                axis.set_ylabel("")
        bar = figure.colorbar(drawn, ax=below, pad=0.02, aspect=18)
        bar.set_label(f"training loss, epoch {epoch}")
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.tick_params(which="both", labelsize=6.5)
    figure.suptitle(title(request))
    style.share_legend(figure, axes)
    return figure


def title(request: Request) -> str:
    """Say what was trained on what."""
    datasets = sorted({str(run.config.dataset) for run in request.runs})
    return "Deep auto-encoder" + (f"\n{quick.NOTE_DIGITS}" if request.quick else f" on {', '.join(datasets)}")


def _longest(group: Sequence[Curve]) -> list[Curve]:
    """Leave out settings that were run for fewer epochs than others, such as those of the plane."""
    most = max(curve.config.epochs or 0 for curve in group)
    return [curve for curve in group if curve.config.epochs == most]


def _one_batch_size(group: Sequence[Curve]) -> list[Curve]:
    """Return the settings of the batch size that most of them have, and of the number of epochs that most have."""
    kinds = [(curve.config.batch_size, curve.config.epochs) for curve in group]
    most = max(sorted(set(kinds)), key=kinds.count)
    return [curve for curve, kind in zip(group, kinds, strict=True) if kind == most]


def takes(run: Run) -> bool:
    """Tell whether a run belongs to this figure: the auto-encoder's, at the frequencies that share its legend."""
    return run.config.task == "autoencoder"


FIGURES.add(
    "autoencoder",
    FigureSpec("auto-encoder: loss by epoch, by time, on validation; sensitivity", draw, settings, takes),
)
