"""Draw the pages' pictures from the record, in a light form and a dark one: ``python docs/draw.py [NAME ...]``.

Each has one message, in its title, and at most five curves, labelled at their ends. ``make gallery`` draws those of the
examples; ``ekfac figure`` draws the paper's figures as the paper has them.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ekfac.lab.search.selection import Curve, best_validation, per_epoch
from ekfac.lab.show.evidence.network_tables import runs_for
from ekfac.lab.show.evidence.networks import groups
from ekfac.lab.show.evidence.pages import CIFAR
from ekfac.lab.show.evidence.record import LOSS, Record, chosen
from ekfac.lab.show.evidence.suites import results
from ekfac.lab.show.figures import make
from ekfac.lab.show.figures.curves import budgets, trained
from ekfac.lab.show.figures.sensitivity import NEAR, grids
from ekfac.lab.show.picture import COLOURS, label_ends, save
from ekfac.lab.suite import selection

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
OLD = "EKFAC (defaults)"
NAMES = {OLD: "version 0.1"}
SHOWN = ("KFAC freq=50", "Adam + BN", "EKFAC freq=50", "EKFAC-ra freq=50", OLD)
TASKS = {
    "classifier": "classifier, MNIST",
    "vgg11": "VGG11, CIFAR-10",
    "resnet34": "ResNet34, CIFAR-10",
    "charlm": "transformer, text",
}


@cache
def record() -> Record:
    """Return the record, read once."""
    return Record(ROOT / "results")


def shown(label: str) -> str:
    """Return a method's name as pictures show it."""
    return NAMES.get(label, label.split(" freq=")[0].replace("+ BN", "+ batch-norm"))


def colour(label: str) -> str:
    """Return a method's colour, the same with batch-norm and without."""
    return COLOURS[shown(label).split(" +")[0]]


def plot(axes: Axes, curve: Curve, label: str, measure: str = LOSS, x: str = "epoch") -> None:
    """Draw a setting's mean over seeds from epoch 1 on, above its floor."""
    if x == "seconds":
        assert curve.timed is not None
        curve = curve.timed
    rows = curve.mean("epoch") >= 1
    values = curve.mean(measure)[rows] - curve.floor_of(measure)
    axes.plot(curve.mean(x)[rows], values, color=colour(label), label=shown(label))


def log_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """Give a logarithmic axis plain numbers."""
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.2)


RIVALS = {"EKFAC(model)": ("ekfac", "C0"), "Muon": ("muon", "C5"), "SOAP": ("soap", "C6")}


def crossing(run: Mapping[str, Any], target: float) -> float:
    """Return after what part of its steps a run is at a target: between two evaluations by a straight line."""
    steps, found = [row["step"] / run["steps"] for row in run["history"]], selection.values(run)
    for place, value in enumerate(found):
        if value <= target:
            before = found[place - 1] if place else value
            part = (before - target) / (before - value) if before > value and math.isfinite(before) else 1.0
            return float(steps[place - 1] + part * (steps[place] - steps[place - 1])) if place else 0.0
    return math.inf


def default(figure: Figure) -> None:
    """The README's picture: on each task of the suite, after what part of AdamW's steps AdamW's result is reached."""
    found = results(record())
    assert found is not None
    parts: dict[str, dict[str, float]] = {}
    for task, row in found.table.items():
        if "adamw" not in row:
            continue
        label = found.suite.tasks[task].label
        parts[label] = {}
        for name, (method, _) in RIVALS.items():
            if method in row:
                reached = [crossing(run, row["adamw"].mean) for run in row[method].runs.values()]
                parts[label][name] = statistics.median(reached)
    tasks = sorted(parts, key=lambda label: -parts[label]["EKFAC(model)"])
    axes = figure.subplots()
    for column, (name, (_, look)) in enumerate(RIVALS.items()):
        for place, label in enumerate(tasks):
            part = parts[label].get(name)
            if part is not None:
                never = not math.isfinite(part)
                mark = {"marker": "x", "markersize": 7} if never else {"marker": "o", "markersize": 8}
                where = 1.08 + 0.03 * column if never else part
                axes.plot([where], [place], color=look, linestyle="", clip_on=False, zorder=5 - column, **mark)
        axes.plot([], [], "o", color=look, label=name)
    axes.axvline(1, color="C1", linewidth=1.6)
    axes.text(0.99, len(tasks) - 0.35, "AdamW", color="C1", fontweight="bold", ha="right")
    axes.text(1.12, len(tasks) - 0.35, "never", ha="center")
    for place in range(len(tasks)):
        axes.axhline(place, color="C7", linewidth=0.5, alpha=0.35, zorder=0)
    axes.set(xlim=(0, 1.0), ylim=(-0.6, len(tasks) - 0.5), xlabel="steps taken, as a fraction of AdamW's")
    axes.set_yticks(range(len(tasks)), tasks)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(loc="lower right", framealpha=1, edgecolor="none", bbox_to_anchor=(0.985, 0.0))
    title = (
        f"EKFAC(model) reaches AdamW's final validation result\nin a fraction of the steps on all {len(tasks)} tasks"
    )
    axes.set_title(title)


def paper_methods(figure: Figure) -> None:
    """The paper's five methods at batch 200."""
    axes = figure.subplots()
    found = record().autoencoder(200)
    for name in ("KFAC freq=50", "SGD + BN", "Adam + BN", "EKFAC freq=50", "EKFAC-ra freq=50"):
        plot(axes, found[name], name)
    log_axis(axes, (10, 20, 50, 100))
    axes.set(ylim=(9, 120), xlim=(1, 20), xlabel="epoch", xticks=(1, 5, 10, 15, 20))
    axes.set_ylabel("training loss minus its lower bound")
    axes.set_title("EKFAC and EKFAC-ra end below Adam, SGD and KFAC\n(the paper's auto-encoder on MNIST, batch 200)")
    label_ends(axes, numbers=".1f")


def autoencoder(figure: Figure, size: int, title: str) -> None:
    """Three panels: by epoch, by time, on validation."""
    panels = figure.subplots(1, 3, sharey=True)
    found = record().autoencoder(size)
    what = (
        ("by epoch", LOSS, "epoch"),
        ("by time", LOSS, "seconds"),
        ("validation, by epoch", "validation_loss", "epoch"),
    )
    for axes, (heading, measure, x) in zip(panels, what, strict=True):
        for name in SHOWN:
            plot(axes, found[name], name, measure, x)
        axes.set_title(heading, loc="center", fontsize=10.5)
        axes.set_xlabel("seconds" if x == "seconds" else "epoch")
    log_axis(panels[0], (10, 20, 50, 100, 200))
    for axes in panels[1:]:
        axes.grid(axis="y", alpha=0.2)
        axes.minorticks_off()
    panels[0].set(ylim=(6.5, 300), ylabel="loss minus its lower bound")
    label_ends(panels[2])
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5)


def comparison(figure: Figure) -> None:
    """Training loss above, accuracy below, a column a task."""
    panels = figure.subplots(2, len(TASKS))
    for column, (task, heading) in enumerate(TASKS.items()):
        above, below = panels[:, column]
        best = chosen(record().runs(f"comparison/{task}"))
        for name, curve in best.items():
            plot(above, curve, name)
            plot(below, curve, name, "validation_accuracy")
        above.set_yscale("log")
        if task == "charlm":
            log_axis(above, (1, 1.5, 2))
        above.minorticks_off()
        above.grid(visible=False)
        above.set_title(heading, loc="center", fontsize=10.5)
        ends = [float(curve.mean("validation_accuracy")[-1]) for curve in best.values()]
        below.set(xlabel="epoch", ylim=(min(ends) - 0.06, max(ends) + 0.02))
        below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panels[0, 0].set_ylabel("training loss")
    panels[1, 0].set_ylabel("validation accuracy")
    label_ends(panels[0, -1], gap=0.11)
    label_ends(panels[1, -1], gap=0.11)
    figure.suptitle("Version 0.1 fits best on four tasks; Muon and SOAP validate better on ResNet34", x=0.01, ha="left")


def frequency(figure: Figure) -> None:
    """A panel a method, a curve an interval."""
    best = chosen(record().frequency)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(panels, ("KFAC", "EKFAC", "EKFAC-ra"), strict=True):
        for every, alpha in ((1, 0.35), (50, 1.0), (100, 0.75), (500, 0.5)):
            curve = best[f"{name} freq={every}"]
            rows = curve.mean("epoch") >= 1
            values = curve.mean(LOSS)[rows] - curve.floor
            style = {50: "-", 100: "--", 500: "-.", 1: ":"}[every]
            axes.plot(
                curve.mean("epoch")[rows], values, style, color=COLOURS[name], alpha=alpha, label=f"every {every}"
            )
        axes.set_title(name, loc="center", fontsize=10.5)
        axes.set_xlabel("epoch")
        axes.set_xticks((1, 10, 20))
        axes.minorticks_off()
        axes.grid(axis="y", alpha=0.2)
    log_axis(panels[0], (10, 20, 50, 100, 200, 500))
    panels[0].set_ylabel("training loss minus its lower bound")
    for axes in panels:
        label_ends(axes)
    figure.suptitle("Rare refreshes cost EKFAC little, KFAC and EKFAC-ra more", x=0.01, ha="left", fontsize=11.5)


def sensitivity(figure: Figure) -> None:
    """A map of losses over learning rate and damping, a panel a method."""
    planes, _ = grids(record().grid)
    panels = figure.subplots(1, len(planes))
    low = min(one.best for one in planes.values())
    for axes, (name, one) in zip(panels, planes.items(), strict=True):
        axes.imshow(one.losses, cmap="cividis_r", norm=LogNorm(low, 20 * low, clip=True), aspect="auto", origin="lower")
        for (row, column), loss in numpy.ndenumerate(one.losses):
            bold = "bold" if loss == one.best else "normal"
            ink = "white" if loss > 5 * low else "black"
            text = f"{loss:.0f}" if loss < 1000 else f"{loss / 1000:.0f}k"
            axes.text(column, row, text, ha="center", va="center", color=ink, fontweight=bold, fontsize=9)
        axes.set_xticks(range(len(one.lrs)), [f"{lr:g}" for lr in one.lrs])
        axes.set_yticks(range(len(one.dampings)), [f"{damping:g}" for damping in one.dampings])
        axes.set_title(f"{shown(name)}: {one.near} of {one.tried}", loc="center", fontsize=10.5)
        axes.set_xlabel("learning rate")
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("damping")
    title = f"How many of 25 settings end within {NEAR:g} times the best loss, which is in bold"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5)


def drift(figure: Figure, measure: str, ylabel: str, title: str) -> None:
    """What was measured while the classifier trains and the basis is refreshed every 100 steps."""
    found = record().measures.get("error")
    assert found is not None
    axes = figure.subplots()
    for name in ("KFAC", "EKFAC"):
        axes.plot(found["steps"], found[measure][name], color=COLOURS[name], label=name)
    for step in range(0, found["steps"][-1] + 1, found["renewed_every"]):
        axes.axvline(step, color="C7", linewidth=0.6, linestyle=(0, (2, 2)))
    axes.set(xlabel="step (dotted: the basis is refreshed)", ylabel=ylabel, ylim=(0, None), title=title)
    label_ends(axes)


def spectra(figure: Figure) -> None:
    """Distance of each spectrum to the true one, in the initial basis."""
    found = record().measures.get("frequency")
    assert found is not None
    axes = figure.subplots()
    for name, values in found["distances"].items():
        shares = numpy.array(values) / numpy.array(found["norms"])
        axes.semilogy(found["steps"][1:], shares[1:], color=COLOURS[name], label=name)
    axes.set(xlabel="step", ylabel="distance to the true spectrum\n(relative to its norm)")
    axes.set_title("With a fixed basis, EKFAC's spectrum is closer to the true one\nthan KFAC's; EKFAC-ra's is not")
    label_ends(axes)


CUT = "one seed; runs were cut by time: a dot is the last epoch, or second, that a method has"
NETWORKS = {
    "vgg11": (
        "VGG11: EKFAC and EKFAC-ra train below KFAC; EKFAC(model) generalises best",
        ("SGD", "Adam + BN", "KFAC", "EKFAC", "EKFAC-ra", OLD),
        (1e-4, 1e-3, 1e-2, 0.1, 1),
    ),
    "resnet34": (
        "ResNet34: EKFAC(model), with its defaults, trains fastest and generalises best",
        ("SGD + BN", "Adam + BN", "KFAC", "EKFAC-ra", OLD),
        (1e-4, 1e-3, 1e-2, 0.1, 1),
    ),
}


def network(figure: Figure, task: str) -> None:
    """Three panels: loss by epoch, by time, best accuracy; each at the settings selected for what it shows."""
    title, names, ticks = NETWORKS[task]
    own = groups(record().cifar, task)

    def drawn(name: str) -> tuple[str, str]:
        return ("EKFAC(model)", "C9") if name == OLD else (shown(name), colour(name))

    by_epoch, by_time, accuracy = figure.subplots(1, 3, width_ratios=(1, 1, 1))
    longest = max(float(per_epoch(own[name]).x[-1]) for name in names)
    for name in names:
        for axes, select in ((by_epoch, per_epoch), (by_time, budgets)):
            found = trained(select(own[name]))
            short = select is per_epoch and found.x[-1] < longest / 2
            label, its = drawn(name)
            label += f", {found.x[-1]:.0f} epochs" if short else ""
            axes.plot(found.x, found.value, label=label, color=its, linewidth=1.8)
            axes.plot(found.x[-1:], found.value[-1:], ".", markersize=9, color=its)
    for axes, heading, x in (
        (by_epoch, "(a) training loss by epoch", "epoch"),
        (by_time, "(b) by time", "seconds"),
    ):
        axes.set_title(heading, loc="center", fontsize=10.5)
        axes.set_xlabel(x)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        log_axis(axes, ticks)
        axes.set_ylim(axes.get_ylim()[0], 2)
    label_ends(by_epoch, margin=True)
    best = {name: best_validation(curves) for name, curves in own.items()}
    ends = {name: 100 * max(one.mean("validation_accuracy")) for name, one in best.items() if one is not None}
    ends = {name: value for name, value in ends.items() if value > 20}  # what diverged is at chance
    low, high = min(ends.values()), max(ends.values())
    for place, (name, value) in enumerate(sorted(ends.items(), key=lambda item: item[1])):
        label, its = drawn(name)
        accuracy.plot(value, place, "o", color=its)
        text = f"{label}  {value:.1f} %"
        left = value > (low + high) / 2 and high - low > 10
        where = {"xytext": (-8 if left else 8, 0), "textcoords": "offset points", "ha": "right" if left else "left"}
        accuracy.annotate(text, (value, place), va="center", fontsize=9.5, **where)
    accuracy.set(xlim=(low - 2, max(high + 2, low + 16)), ylim=(-0.7, len(ends) - 0.3), yticks=(), xlabel="%")
    accuracy.spines["left"].set_visible(False)
    accuracy.set_title("(c) best validation accuracy", loc="center", fontsize=10.5)
    seeds = CUT.replace("one seed", "one seed, plain SGD three") if "SGD" in names else CUT
    figure.suptitle(f"{title}\n({seeds})", x=0.01, ha="left", fontsize=11.5)


def darken(file: Path) -> None:
    """Write the dark form of a picture by turning its lightness around; hues stay."""
    pixels = numpy.asarray(Image.open(file).convert("RGB")).astype(float)
    turned = pixels + 255 - pixels.max(2, keepdims=True) - pixels.min(2, keepdims=True)
    paper = numpy.array((0x13, 0x14, 0x16))
    shown = (paper + turned * (255 - paper) / 255).round().astype("uint8")
    Image.fromarray(shown).save(file.with_name(f"{file.stem}-dark.png"))


Draw = Callable[[Figure], None]
PICTURES: dict[str, tuple[Draw, tuple[float, float]]] = {
    "default": (default, (7.6, 4.6)),
    "paper-methods": (paper_methods, (7, 3.8)),
    "autoencoder-200": (
        partial(autoencoder, size=200, title="Batch 200: EKFAC-ra ends below KFAC and Adam, by epoch and by time"),
        (9, 3.6),
    ),
    "autoencoder-500": (
        partial(
            autoencoder, size=500, title="Batch 500: EKFAC stays on the plateau on most seeds, EKFAC-ra never does"
        ),
        (9, 3.6),
    ),
    "comparison": (comparison, (10, 5)),
    "frequency": (frequency, (9, 3.6)),
    "sensitivity": (sensitivity, (9, 3.4)),
    "error": (
        partial(
            drift,
            measure="error",
            ylabel="relative error",
            title="Between refreshes, EKFAC drifts from the Fisher less than KFAC",
        ),
        (7, 3.4),
    ),
    "angle": (
        partial(
            drift,
            measure="angle",
            ylabel="degrees",
            title="Angle to the exact step: EKFAC is clearly better only at the start",
        ),
        (7, 3.4),
    ),
    "spectra": (spectra, (7, 3.4)),
}
PICTURES |= {name: (partial(network, task=name), (11, 3.7)) for name in NETWORKS if groups(record().cifar, name)}
# Drawn as the lab draws them.
LAB = ("rescaling", "correlation", "convolution")


def main(names: Sequence[str]) -> None:
    """Draw all pictures, or those named."""
    for name, (draw, size) in PICTURES.items():
        if not names or name in names:
            save(draw, IMAGES / f"{name}.png", size)
    wanted = [name for name in LAB if not names or name in names]
    if wanted:
        measures = record().measures.file
        for made in make(wanted, IMAGES, dataset="mnist", measures=measures, formats=("png",)):
            darken(made.files[0])
    for name in (name for name in CIFAR if name not in NETWORKS):
        runs = runs_for(record(), name)
        if runs and (not names or name in names):
            (made,) = make([name], IMAGES, runs=runs, formats=("png",))
            darken(made.files[0])


if __name__ == "__main__":
    main(sys.argv[1:])
