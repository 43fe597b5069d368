"""VGG11 and ResNet34 with a learning rate that is halved every 20 epochs."""

from __future__ import annotations

from matplotlib.figure import Figure

from ekfac.lab.config import TrainConfig
from ekfac.lab.search.selection import by_method, curves, per_epoch
from ekfac.lab.show.figures import paper, quick, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.cifar import NAMES, of_task, title, usual_batch_size
from ekfac.lab.show.figures.curves import budgets, draw_curves, has_times, loss_axis
from ekfac.lab.training.runs import Run


def settings() -> list[TrainConfig]:
    """Return the small runs: halved every 2 epochs, since they are 4 or 5 epochs long."""
    found = []
    for task in NAMES:
        methods = [name for name in quick.CIFAR[task] if name not in ("SGD", "EKFAC")]
        found += quick.cifar(task, methods, first=True, halve_every=2)
    return found


def draw(request: Request) -> Figure:
    """Draw a row of two panels per network: by epoch and, if runs were timed, by wall-clock, selected for each."""
    tasks = [task for task in NAMES if any(map(of_task(task, scheduled=True), request.runs))] or list(NAMES)
    groups = {
        task: by_method(
            usual_batch_size(curves(paper.of_one_length(filter(of_task(task, scheduled=True), request.runs))))
        )
        for task in tasks
    }
    timed = has_times(curve for group in groups.values() for found in group.values() for curve in found)
    axes_of = ("epoch", "seconds") if timed else ("epoch",)
    figure, axes = style.panels(len(tasks), len(axes_of), height=2.3, width=6.5 if timed else 4.0)
    looks = style.lines(style.ordered({name for group in groups.values() for name in group}))
    for row, task in enumerate(tasks):
        for column, x in enumerate(axes_of):
            place = len(axes_of) * row + column
            axis = axes[place]
            entries = {n: (per_epoch if x == "epoch" else budgets)(group) for n, group in groups[task].items()}
            draw_curves(axis, entries, looks)
            loss_axis(axis, list(entries.values()), "train_loss", x)
            what = "training loss" if x == "epoch" else "wall-clock time"
            axis.set_title(f"{style.letter(place)} {NAMES[task]}, {what}")
    every = {run.config.task: run.config.halve_every for run in request.runs if takes(run)}
    epochs = " or ".join(dict.fromkeys(str(every[task]) for task in NAMES if task in every))
    note = f", learning rate halved every {epochs} epochs" if every else ""
    added = paper.added("schedule", {name for group in groups.values() for name in group})
    figure.suptitle(title(request, tasks, note) + (paper.NOTE if added else ""))
    style.share_legend(figure, axes, columns=3, marked=added)
    return figure


def takes(run: Run) -> bool:
    """Return whether a run has a schedule."""
    return run.config.task in NAMES and run.config.halve_every is not None


FIGURES.add("schedule", FigureSpec("VGG11 and ResNet34, learning rate halved every 20 epochs", draw, settings, takes))
