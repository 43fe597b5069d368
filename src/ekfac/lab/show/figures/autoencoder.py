"""The deep auto-encoder: training loss by epoch and by time, validation loss, sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from ekfac.lab.config import TrainConfig
from ekfac.lab.search.selection import Curve, best_of_each, by_method, curves
from ekfac.lab.show.figures import paper, quick, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.curves import ABOVE, draw_curves, has_times, loss_axis, whole
from ekfac.lab.show.figures.plane import draw_plane, has_plane, loss_at, scale
from ekfac.lab.training.runs import Run

PANELS = {
    "training loss": ("train_loss", "epoch"),
    "wall-clock time": ("train_loss", "seconds"),
    "validation loss": ("validation_loss", "epoch"),
}
PLANE_EPOCH = 20
# The methods in the paper; all others are additions.
PAPER = set(paper.METHODS["autoencoder"])


def settings() -> list[TrainConfig]:
    """Return the small runs: each method at good settings, and a grid for the plane."""
    return [quick.autoencoder(name) for name in quick.AUTOENCODER] + quick.planes()


def draw(request: Request) -> Figure:
    """Draw curves of the best setting of each method, and below them all settings that share one batch size.

    If no run was timed, there is no panel over time.
    """
    best = best_of_each(curves(run for run in request.runs if run.status != "unfinished"))
    groups = by_method(curves(run for run in (*request.runs, *request.grid) if run.status != "unfinished"))
    planes = {name: _one_batch_size(group) for name, group in groups.items() if has_plane(_one_batch_size(group))}
    more = len(best) > len(PAPER)
    height = 3.9 if more else 2.8
    figure = Figure(figsize=(9.0 if more else 7.5, height + 2.8 if planes else height))
    rows = figure.add_gridspec(2 if planes else 1, 1, height_ratios=(height, 2.5) if planes else (1,))
    panels = {heading: panel for heading, panel in PANELS.items() if panel[1] != "seconds" or has_times(best.values())}
    top = rows[0].subgridspec(1, len(panels))
    axes = [figure.add_subplot(top[0, column]) for column in range(len(panels))]
    looks = style.lines(style.ordered(best))
    for number, (axis, (heading, (name, x))) in enumerate(zip(axes, panels.items(), strict=True)):
        entries = {label: whole(curve, name, x, above_floor=True) for label, curve in best.items()}
        draw_curves(axis, entries, looks)
        loss_axis(axis, list(entries.values()), name, x, ABOVE)
        axis.set_title(f"{style.letter(number)} {heading}")
    if planes:
        _planes(figure, rows[1], planes, style.letter(len(panels)))
    added = paper.added("autoencoder", best)
    figure.suptitle(title(request) + (paper.NOTE if added else ""))
    style.share_legend(figure, axes, marked=added)
    return figure


def _planes(figure: Figure, place: SubplotSpec, planes: Mapping[str, Sequence[Curve]], letter: str) -> None:
    names = style.ordered(planes)
    cells = place.subgridspec(1, len(names))
    below = [figure.add_subplot(cells[0, column]) for column in range(len(names))]
    epoch = min(PLANE_EPOCH, max(run.history[-1]["epoch"] for g in planes.values() for c in g for run in c.runs))
    everything = [curve for group in planes.values() for curve in group]
    start = max(float(curve.mean("train_loss")[0]) - curve.floor for curve in everything)
    norm = scale([loss_at(curve, epoch) for curve in everything], start)
    for number, (axis, name) in enumerate(zip(below, names, strict=True)):
        drawn = draw_plane(axis, planes[name], epoch, norm)
        axis.set_title(f"{letter + ' ' if number == 0 else ''}{name}")
        if number:
            axis.set_ylabel("")
    bar = figure.colorbar(drawn, ax=below, pad=0.02, aspect=18)
    bar.set_label(f"training loss above its floor,\nepoch {epoch}")
    style.plain_bar(bar)


def title(request: Request) -> str:
    """Return the title: network and data."""
    datasets = sorted({str(run.config.dataset) for run in request.runs})
    if request.quick:
        return f"Deep auto-encoder\n{quick.NOTE_DIGITS}"
    sizes = {run.config.batch_size for run in request.runs}
    return f"Deep auto-encoder on {', '.join(datasets)}" + (f", batch {sizes.pop()}" if len(sizes) == 1 else "")


def _one_batch_size(group: Sequence[Curve]) -> list[Curve]:
    """Return the settings with the most common batch size and number of epochs."""
    kinds = [(curve.config.batch_size, curve.config.epochs) for curve in group]
    most = max(sorted(set(kinds)), key=kinds.count)
    return [curve for curve, kind in zip(group, kinds, strict=True) if kind == most]


def takes(run: Run) -> bool:
    """Return whether a run belongs to this figure: the auto-encoder's, at the frequencies in its legend."""
    return run.config.task == "autoencoder"


FIGURES.add(
    "autoencoder",
    FigureSpec("auto-encoder: loss by epoch, by time, on validation; sensitivity", draw, settings, takes),
)
