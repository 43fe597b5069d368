"""The suite's pictures: performance profiles, and every task's validation curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from ekfac.lab.show.figures import style
from ekfac.lab.suite.profile import MOST, fraction, ratios
from ekfac.lab.suite.results import Result, Results
from ekfac.lab.suite.selection import values

SETS = {"cosine": "warm-up and cosine", "constant": "constant learning rate"}


def draw(results: Results, place: Path) -> list[tuple[str, str]]:
    """Draw a set's pictures as SVG and PNG; return titles and file names, the SVG's."""
    found = []
    with style.styled():
        figures = {
            "profile": ("Performance profiles", profiles(results)),
            "curves": ("Validation by step", curves(results)),
        }
        for name, (title, figure) in figures.items():
            if figure is None:
                continue
            for suffix in (".svg", ".png"):
                file = place / f"{name}-{results.schedule}{suffix}"
                figure.savefig(file, dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
            found.append((title, f"{name}-{results.schedule}.svg"))
    return found


def profiles(results: Results) -> Figure | None:
    """Draw the fraction of tasks over r: by steps, and by time if every method was timed."""
    kinds = {"steps": results.steps(), "time": results.seconds()}
    shown = {name: reached for name, (tasks, reached) in kinds.items() if tasks}
    if not shown:
        return None
    figure, axes = style.panels(1, len(shown), height=2.8, width=4.2 * len(shown) + 0.6)
    looks = style.lines([method.label for method in results.methods])
    for axis, (name, reached) in zip(axes, shown.items(), strict=True):
        found = {results.suite.methods[key].label: value for key, value in ratios(reached).items()}
        _profile(axis, found, looks)
        axis.set_xlabel(f"r: {name} to target, relative to the fastest method")
        axis.set_title(f"{style.letter(list(shown).index(name))} by {name}, {len(kinds[name][0])} tasks")
    axes[0].set_ylabel("fraction of tasks at target")
    target = results.suite.target
    figure.suptitle(
        f"Performance profiles, {SETS[results.schedule]}\n"
        f"target: final validation of {results.suite.methods[target.method].label} within {100 * target.within:g} %"
    )
    style.share_legend(figure, axes, columns=4)
    return figure


def _profile(axis: Axes, found: Mapping[str, Sequence[float]], looks: Mapping[str, style.Line]) -> None:
    # Shift overlapping lines slightly, so that each can be seen.
    spread = 0.006
    for place, label in enumerate(style.ordered(found)):
        mine = found[label]
        ends = sorted({1.0, MOST, *(ratio for ratio in mine if ratio <= MOST)})
        heights = [fraction(mine, r) + spread * (place - len(found) / 2) for r in ends]
        look = looks[label]
        axis.step(
            ends,
            heights,
            where="post",
            color=look.color,
            marker=look.marker,
            markevery=[0],
            clip_on=False,
            linestyle=style.linestyle(look),
            label=label,
        )
    axis.set_xscale("log", base=2)
    axis.set_xlim(1, MOST)
    axis.set_ylim(-0.03, 1.03)
    axis.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(PercentFormatter(1))


def curves(results: Results) -> Figure | None:
    """Draw one panel per task: the validation measure by step, mean over seeds, each method at its best rate."""
    tasks = [name for name, row in results.table.items() if row]
    if not tasks:
        return None
    columns = min(3, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    figure, axes = style.panels(rows, columns, height=1.9, width=2.9 * columns)
    looks = style.lines([method.label for method in results.methods])
    for axis, name in zip(axes, tasks, strict=False):
        _task(axis, results.table[name], looks)
        if name in results.targets:
            axis.axhline(results.targets[name], color=style.GREY, linewidth=0.8, linestyle=":")
        axis.set_title(results.suite.tasks[name].label)
    for axis in axes[len(tasks) :]:
        axis.set_axis_off()
    figure.suptitle(f"Validation by step, {SETS[results.schedule]}: loss, or fraction of errors; dotted: the target")
    style.share_legend(figure, axes, columns=4)
    return figure


def _task(axis: Axes, row: Mapping[str, Result], looks: Mapping[str, style.Line]) -> None:
    seen: list[float] = []
    accurate = any(result.accurate for result in row.values())
    for result in row.values():
        runs = [run for run in result.runs.values() if run["status"] == "finished"]
        if not runs:
            continue
        steps = [entry["step"] for entry in runs[0]["history"]][1:]
        mean = numpy.mean([values(run) for run in runs], axis=0)[1:]
        look = looks[result.method.label]
        axis.plot(
            steps,
            mean,
            color=look.color,
            marker=look.marker,
            markevery=max(1, len(steps) // 5),
            linestyle=style.linestyle(look),
            label=result.method.label,
        )
        seen += [float(value) for value in mean[len(mean) // 4 :]]
    if seen and min(seen) > 0:
        axis.set_yscale("log")
        # The limits ignore the first quarter, which would compress the differences that matter.
        room = (max(seen) / min(seen)) ** 0.08 if max(seen) > min(seen) else 1.1
        axis.set_ylim(min(seen) / room, max(seen) * room)
    percent = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")
    number = FuncFormatter(lambda value, _: f"{value:.3g}")
    axis.yaxis.set_major_formatter(percent if accurate else number)
    axis.yaxis.set_minor_formatter(percent if accurate else number)
    axis.tick_params(axis="y", which="minor", labelsize=6)
    axis.set_xlabel("step")
