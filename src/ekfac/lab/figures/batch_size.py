"""The impact of the batch size on KFAC and EKFAC: VGG11 and ResNet34."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ekfac.lab.config import TrainConfig
from ekfac.lab.figures import quick, style
from ekfac.lab.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.figures.cifar import NAMES, of_task, title
from ekfac.lab.figures.curves import budgets, draw_curves, loss_axis
from ekfac.lab.runs import Run
from ekfac.lab.selection import Curve, Envelope, by_method, curves, per_epoch

OPTIMIZERS = ("kfac", "ekfac", "ekfac-ra")


def settings() -> list[TrainConfig]:
    """Return the small runs: three batch sizes for VGG11, two for ResNet34."""
    found = []
    for task, sizes in (("vgg11", (50, 100, 250)), ("resnet34", (25, 50))):
        methods = [name for name in quick.FACTORED if name in quick.CIFAR[task]]
        for size in sizes:
            found += quick.cifar(task, methods, first=True, batch_size=size)
    return found


def draw(request: Request) -> Figure:
    """Draw two rows a network: by epoch, one panel a batch size; then by iteration and by wall-clock, all sizes."""
    found = {task: curves(filter(_of(task), request.runs)) for task in NAMES}
    found = {task: group for task, group in found.items() if group}
    plain = style.lines(style.ordered({curve.label for group in found.values() for curve in group}))
    figure, axes = style.panels(2 * len(found), 3, height=1.95)
    for row, (task, group) in enumerate(found.items()):
        top, bottom = axes[6 * row : 6 * row + 3], axes[6 * row + 3 : 6 * row + 6]
        sized = style.lines({_with_size(curve) for curve in group})
        sizes = sorted({curve.config.batch_size for curve in group})
        for axis, size in zip(top, sizes, strict=False):
            rivals = by_method([curve for curve in group if curve.config.batch_size == size])
            _panel(axis, {name: per_epoch(g) for name, g in rivals.items()}, plain, "epoch", label=False)
            axis.set_title(f"{NAMES[task]}, batch {size}")
        for axis in top[len(sizes) :]:
            axis.set_axis_off()
        everything = by_method(group, _with_size)
        _panel(bottom[0], {n: per_epoch(g, x="step") for n, g in everything.items()}, sized, "step", label=True)
        bottom[0].set_title(f"{NAMES[task]}, by iteration")
        _panel(bottom[1], {n: budgets(g) for n, g in everything.items()}, sized, "seconds", label=False)
        bottom[1].set_title(f"{NAMES[task]}, by wall-clock time")
        bottom[2].set_axis_off()
        handles, labels = bottom[0].get_legend_handles_labels()
        bottom[2].legend(handles, labels, loc="center left", **style.HANDLES)
    figure.suptitle(title(request, list(found), ": impact of batch size"))
    return figure


def _panel(axis: Axes, entries: dict[str, Envelope], looks: dict[str, style.Line], x: str, label: bool) -> None:
    draw_curves(axis, entries, looks, label=label)
    loss_axis(axis, list(entries.values()), "train_loss", x)


def _of(task: str) -> Callable[[Run], bool]:
    return lambda run: of_task(task)(run) and run.config.optimizer in OPTIMIZERS


def _with_size(curve: Curve) -> str:
    return f"{curve.label}, batch {curve.config.batch_size}"


def takes(run: Run) -> bool:
    """Tell whether a run is of a factored method, without a schedule."""
    return any(_of(task)(run) for task in NAMES)


FIGURES.add(
    "batch-size", FigureSpec("VGG11 and ResNet34 at several batch sizes, by iteration and time", draw, settings, takes)
)
