"""The library's defaults against tuned rivals, one row per task: by epoch, by time, on validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ekfac.lab.registry import LabError
from ekfac.lab.search.selection import Curve, best_of_each, by_method, curves
from ekfac.lab.show.figures import quick, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.curves import ABOVE, draw_curves, has_times, loss_axis, whole
from ekfac.lab.training.runs import Run

NAMES = {"autoencoder": "Auto-encoder", "classifier": "Classifier", "vgg11": "VGG11", "resnet34": "ResNet34"}
NAMES |= {"charlm": "Transformer"}


def chosen(runs: Iterable[Run]) -> dict[str, dict[str, Curve]]:
    """Return the methods of each task with at least two, each at the setting with the lowest final training loss."""
    found: dict[str, dict[str, Curve]] = {}
    finished = curves(run for run in runs if run.status != "unfinished")
    for task, group in by_method(finished, lambda curve: str(curve.config.task)).items():
        found[task] = best_of_each(group)
    order = [*NAMES, *found]
    return {task: found[task] for task in sorted(found, key=order.index) if len(found[task]) > 1}


def draw(request: Request) -> Figure:
    """Draw three panels per task, or two if no run was timed; bands are standard errors of the mean over seeds."""
    tasks = chosen(request.runs)
    if not tasks:
        raise LabError("figure comparison needs runs of at least two methods on one task")
    timed = has_times(curve for best in tasks.values() for curve in best.values())
    columns = 3 if timed else 2
    figure, axes = style.panels(len(tasks), columns, height=2.15, width=3.0 * columns)
    looks = style.lines({name for best in tasks.values() for name in best})
    for row, (task, best) in enumerate(tasks.items()):
        left, *middle, right = axes[columns * row : columns * (row + 1)]
        dataset = next(iter(best.values())).config.dataset
        floor = any(curve.floor > 0 for curve in best.values())
        for axis, x in zip((left, *middle), ("epoch", "seconds"), strict=False):
            if x == "seconds" and not has_times(best.values()):
                axis.set_axis_off()
                continue
            entries = {
                name: whole(curve, "train_loss", x, above_floor=True, standard_error=True)
                for name, curve in best.items()
            }
            draw_curves(axis, entries, looks)
            loss_axis(axis, list(entries.values()), "train_loss", x, ABOVE if floor else "")
            how = "by training time" if x == "seconds" else f"{NAMES.get(task, task)} on {dataset}, by epoch"
            axis.set_title(how)
        _validation(right, best, looks)
    note = f"\n{quick.NOTE_COMPARISON}" if request.quick else " at the best of their settings"
    figure.suptitle(f"EKFAC with the library's defaults beside rivals{note}")
    style.share_legend(figure, axes)
    return figure


def _validation(axis: Axes, best: Mapping[str, Curve], looks: Mapping[str, style.Line]) -> None:
    """Draw accuracy if the task has one, else the loss."""
    accurate = any(run.history[-1].get("validation_accuracy") is not None for c in best.values() for run in c.runs)
    name = "validation_accuracy" if accurate else "validation_loss"
    entries = {n: whole(c, name, "epoch", above_floor=True, standard_error=True) for n, c in best.items()}
    draw_curves(axis, entries, looks)
    axis.set_title("validation")
    if not accurate:
        loss_axis(axis, list(entries.values()), name, "epoch", ABOVE)
        return
    # Leave out the low values of the first epochs, which would compress the differences that matter.
    ends = [float(entry.value[-1]) for entry in entries.values() if len(entry.value)]
    tops = [float(entry.value.max()) for entry in entries.values() if len(entry.value)]
    span = max(tops) - min(ends)
    axis.set_ylim(max(0.0, min(ends) - 1.5 * span - 0.01), max(tops) + 0.1 * span + 0.005)
    axis.set_xlabel("epoch")
    axis.set_ylabel("validation accuracy")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.yaxis.set_major_formatter(PercentFormatter(1))


FIGURES.add(
    "comparison",
    FigureSpec("the defaults against tuned rivals, every task among the runs", draw, quick.comparison),
)
