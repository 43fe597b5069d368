"""VGG11 and ResNet34 on CIFAR-10: by epoch, by wall-clock, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ekfac.lab.search.selection import Curve, best_validation, by_method, curves, per_epoch
from ekfac.lab.show.figures import paper, quick, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.curves import budgets, draw_curves, has_times, loss_axis, trained, whole
from ekfac.lab.tasks import TASKS
from ekfac.lab.training.runs import Run

NAMES = {"vgg11": "VGG11", "resnet34": "ResNet34"}
DATA = {"cifar10": "CIFAR-10"}


def of_task(task: str, scheduled: bool = False) -> Callable[[Run], bool]:
    """Return a test for runs of a task, with or without a learning-rate schedule."""
    return lambda run: run.config.task == task and (run.config.halve_every is not None) == scheduled


def usual_batch_size(found: Sequence[Curve]) -> list[Curve]:
    """Keep each method's runs at the task's batch size for it, if there are any."""
    kept = []
    for group in by_method(found).values():
        usual = []
        for curve in group:
            task = TASKS.get(curve.config.task)
            size = task.settings.get(curve.config.optimizer, {}).get("batch_size", task.batch_size)
            usual += [curve] if curve.config.batch_size == size else []
        kept += usual or group
    return kept


def title(request: Request, tasks: Sequence[str], what: str = "") -> str:
    """Return the title: networks and data."""
    names = " and ".join(NAMES[task] for task in tasks)
    if request.quick:
        return f"{names}{what}\n{quick.NOTE_CIFAR}"
    data = sorted({DATA.get(str(run.config.dataset), str(run.config.dataset)) for run in request.runs})
    return f"{names} on {', '.join(data) or 'CIFAR-10'}{what}"


def draw(task: str) -> Callable[[Request], Figure]:
    """Return a function that draws a network's three panels, or two if no run was timed."""

    def figure_of(request: Request) -> Figure:
        groups = by_method(usual_batch_size(curves(paper.of_one_length(filter(of_task(task), request.runs)))))
        # A method that diverged within the first epoch has no curve; it is named among what is missing.
        groups = {name: group for name, group in groups.items() if len(trained(per_epoch(group)).x)}
        looks = style.lines(style.ordered(groups))
        timed = has_times(curve for group in groups.values() for curve in group)
        panels = {"epoch": "training loss", "seconds": "wall-clock time"} if timed else {"epoch": "training loss"}
        figure, axes = style.panels(1, len(panels) + 1, height=2.9)
        for number, (axis, (x, heading)) in enumerate(zip(axes, panels.items(), strict=False)):
            select = per_epoch if x == "epoch" else budgets
            entries = {name: trained(select(group)) for name, group in groups.items()}
            draw_curves(axis, entries, looks)
            loss_axis(axis, list(entries.values()), "train_loss", x)
            axis.set_title(f"{style.letter(number)} {heading}")
        last = axes[-1]
        best = {name: best_validation(group) for name, group in groups.items()}
        for name, line in (("train_accuracy", "-"), ("validation_accuracy", (0, (4, 2)))):
            entries = {label: whole(curve, name, "epoch") for label, curve in best.items() if curve is not None}
            draw_curves(last, entries, looks, linestyle=line, label=False)
        last.set_title(f"{style.letter(len(panels))} accuracy\n(solid is train, dash is validation)")
        last.set_xlabel("epoch")
        last.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        last.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        added = paper.added(task, groups)
        figure.suptitle(title(request, [task]) + (paper.NOTE if added else ""))
        style.share_legend(figure, axes, columns=4, marked=added)
        return figure

    return figure_of


for _task in NAMES:
    FIGURES.add(
        _task,
        FigureSpec(
            f"{NAMES[_task]}: selected per epoch, per time budget, on validation",
            draw(_task),
            lambda task=_task: quick.cifar(task),  # type: ignore[misc]
            of_task(_task),
        ),
    )
