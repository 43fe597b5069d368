"""The impact of the batch size on KFAC and EKFAC: VGG11 and ResNet34."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ekfac.lab.config import TrainConfig
from ekfac.lab.search.selection import Curve, Envelope, by_method, curves, per_epoch
from ekfac.lab.show.figures import paper, quick, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.cifar import NAMES, of_task, title
from ekfac.lab.show.figures.curves import budgets, draw_curves, has_times, loss_axis, plain_log_ticks
from ekfac.lab.training.runs import Run

OPTIMIZERS = ("kfac", "ekfac", "ekfac-ra")
# Between a method's name and a batch size.
SIZE = ", batch "


def settings() -> list[TrainConfig]:
    """Return the small runs: three batch sizes for VGG11, two for ResNet34."""
    found = []
    for task, sizes in (("vgg11", (50, 100, 250)), ("resnet34", (25, 50))):
        methods = [name for name in quick.FACTORED if name in quick.CIFAR[task]]
        for size in sizes:
            found += quick.cifar(task, methods, first=True, batch_size=size)
    return found


def draw(request: Request) -> Figure:
    """Draw three rows per network: by epoch with a panel per batch size; by iteration and time with one per method."""
    found = {task: curves(paper.of_one_length(filter(_of(task), request.runs))) for task in NAMES}
    found = {task: group for task, group in found.items() if group}
    rows = [row for task, group in found.items() for row in _rows(task, group)]
    looks = style.lines({name for row in rows for panel in row for name in panel.entries if SIZE in name})
    looks |= style.lines({name for row in rows for panel in row for name in panel.entries if SIZE not in name})
    figure, axes = style.panels(len(rows), max(map(len, rows)), height=1.95)
    columns = len(axes) // len(rows)
    for number, row in enumerate(rows):
        for axis in axes[columns * number + len(row) : columns * (number + 1)]:
            axis.set_axis_off()
        for axis, panel in zip(axes[columns * number :], row, strict=False):
            draw_curves(axis, panel.entries, looks)
            loss_axis(axis, list(panel.entries.values()), "train_loss", panel.x)
            axis.set_title(panel.title)
        # Adjacent panels share one scale.
        beside = axes[columns * number : columns * number + len(row)]
        low, high = (bound([axis.get_ylim()[end] for axis in beside]) for end, bound in enumerate((min, max)))
        for axis in beside:
            axis.set_ylim(low, high)
            plain_log_ticks(axis)
    figure.suptitle(title(request, list(found), ": impact of batch size"))
    _legend(figure, looks)
    return figure


def _legend(figure: Figure, looks: Mapping[str, style.Line]) -> None:
    """Draw one legend for colours and markers, and for line styles."""
    handles = {}
    for name in style.ordered(name for name in looks if SIZE not in name):
        handles[name] = Line2D([], [], color=looks[name].color, marker=looks[name].marker, markerfacecolor="white")
    sizes = {int(name.split(SIZE)[1]): look for name, look in looks.items() if SIZE in name}
    for size, look in sorted(sizes.items()):
        handles[f"batch {size}"] = Line2D([], [], color=style.BLACK, linestyle=style.linestyle(look))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, **style.HANDLES)


@dataclass(frozen=True)
class _Panel:
    title: str
    x: str
    entries: dict[str, Envelope]


def _rows(task: str, group: Sequence[Curve]) -> list[list[_Panel]]:
    """Return a network's rows of panels, without the one over time if no run was timed."""
    methods = by_method(group)
    top = []
    for size in sorted({curve.config.batch_size for curve in group}):
        rivals = by_method([curve for curve in group if curve.config.batch_size == size])
        entries = {name: per_epoch(found) for name, found in rivals.items()}
        top.append(_Panel(f"{NAMES[task]}, batch {size}", "epoch", entries))
    rows = [top]
    for x, words in (("step", "by iteration"), ("seconds", "by wall-clock time")):
        row = []
        for name in style.ordered(methods):
            sizes = by_method(methods[name], _with_size)
            entries = {n: per_epoch(g, x=x) if x == "step" else budgets(g) for n, g in sizes.items()}
            row.append(_Panel(f"{NAMES[task]}, {name},\n{words}", x, entries))
        if x == "step" or has_times(group):
            rows.append(row)
    return rows


def _of(task: str) -> Callable[[Run], bool]:
    return lambda run: of_task(task)(run) and run.config.optimizer in OPTIMIZERS


def _with_size(curve: Curve) -> str:
    return f"{curve.label}{SIZE}{curve.config.batch_size}"


def takes(run: Run) -> bool:
    """Return whether a run is of a factored method, without a schedule."""
    return any(_of(task)(run) for task in NAMES)


FIGURES.add(
    "batch-size", FigureSpec("VGG11 and ResNet34 at several batch sizes, by iteration and time", draw, settings, takes)
)
