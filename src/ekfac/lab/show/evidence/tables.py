"""The tables of the pages, from recorded runs only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ekfac.lab.labels import describe
from ekfac.lab.search.selection import Curve, time_to_reach
from ekfac.lab.show.evidence.record import (
    LOSS,
    MISSING,
    Record,
    at_end,
    at_epoch,
    chosen,
    lost,
    percent,
    table,
    tried,
    write,
)
from ekfac.lab.show.figures.autoencoder import PAPER
from ekfac.lab.show.figures.sensitivity import NEAR, Grid, grids
from ekfac.lab.show.figures.style import DAGGER
from ekfac.lab.show.looks import split
from ekfac.lab.training.runs import Run

EPOCHS = (1, 2, 3, 5, 10, 20)
BASELINE = "Adam + BN"
DEFAULTS = "EKFAC (defaults)"
# From the grid around each method's best, with one seed.
DOUBLE_DAGGER = " ‡"
#: Returns the loss of a baseline that others are to reach.
Goal = Callable[[Curve], float]


def epochs(record: Record, batch_size: int) -> str:
    """Tabulate the training loss minus its floor by epoch, then the full pass and the validation loss at the end."""
    best = record.shown(batch_size)
    if not record.autoencoder(batch_size):
        return MISSING
    grid = record.from_grid(batch_size)
    counts = tried([*record.runs("mnist/search"), *record.mnist])
    counts |= {name: count for name, count in tried(record.grid).items() if name in grid}
    shown = [epoch for epoch in EPOCHS if any(not math.isnan(at_epoch(curve, epoch)[0]) for curve in best.values())]
    rows = []
    for name, curve in best.items():
        losses = [write(*at_epoch(curve, epoch)) for epoch in shown]
        ends = [write(*at_end(curve, quantity)) for quantity in ("train_loss", "validation_loss")]
        about = [_setting(curve, "lr", "damping"), _tries(name, counts), str(len(curve.runs))]
        rows.append([_marked(name) + (DOUBLE_DAGGER if name in grid else ""), *losses, *ends, *about])
    head = ["loss after epoch", *map(str, shown), "full pass", "validation", "setting", "tried", "seeds"]
    gone = {_marked(name): reason for name, reason in lost(record.mnist_at(batch_size)).items()}
    return table(head, rows + _gone(gone, len(head)))


def _tries(name: str, counts: Mapping[str, int]) -> str:
    """Return how many settings were tried, or "no search" for the defaults."""
    return "no search" if name == DEFAULTS else str(counts[name])


def _setting(curve: Curve, *names: str) -> str:
    """Describe a setting in one line, with its learning rate schedule if it has one."""
    config = curve.config
    halved = [f"halved every {config.halve_every} epochs"] if config.halve_every else []
    cosine = ["cosine"] if getattr(config, "cosine", False) else []
    return ", ".join([describe(config, names), *halved, *cosine])


def _gone(reasons: Mapping[str, str], columns: int) -> list[list[str]]:
    """Return rows for methods without results, with the reason."""
    return [[name, reason, *[""] * (columns - 2)] for name, reason in reasons.items()]


def times(record: Record, batch_size: int) -> str:
    """Tabulate seconds per epoch, and how soon each method reaches the final loss of Adam with batch-norm."""
    best = record.autoencoder(batch_size)
    return _times(best, best.get(BASELINE), f"{BASELINE}'s end", final)


def _times(best: dict[str, Curve], baseline: Curve | None, goal: str, loss: Goal) -> str:
    own = None if baseline is None else baseline.timed
    if own is None:
        return MISSING
    rows = []
    for name, curve in best.items():
        timed = curve.timed
        if timed is None:
            continue
        ratios = [write(ratio(timed, own, x, loss)) or "never" for x in ("epoch", "seconds")]
        each = float(timed.mean("seconds")[-1] / timed.mean("epoch")[-1])
        rows.append([name, write(each), *ratios])
    return table(["method", "seconds an epoch", f"epochs to {goal}", f"time to {goal}"], rows)


def final(curve: Curve) -> float:
    """Return the training loss after the last epoch, from a full pass."""
    return float(curve.mean("train_loss")[-1])


def lowest(curve: Curve) -> float:
    """Return the lowest training loss after any epoch, from a full pass; with batch-norm the last one may jump up."""
    return float(curve.mean("train_loss").min())


def ratio(curve: Curve, baseline: Curve, x: str = "seconds", goal: Goal = final) -> float | None:
    """Return the time (or epochs) that a setting takes to reach a baseline's loss, as a fraction of the baseline's."""
    loss = goal(baseline)
    mine, own = (time_to_reach(each, loss, x) for each in (curve, baseline))
    return None if mine is None or not own else mine / own


def frequency(record: Record) -> str:
    """Tabulate the loss by method and refresh interval, after the last common epoch and at the end."""
    best = chosen(record.frequency)
    if not best:
        return MISSING
    common = min(int(curve.mean("epoch")[-1]) for curve in best.values())
    rows = []
    for name, curve in best.items():
        family, every = split(name)
        timed = curve.timed
        each = None if timed is None else float(timed.mean("seconds")[-1] / timed.mean("epoch")[-1])
        losses = [write(*at_epoch(curve, common)), write(*at_end(curve)), str(int(curve.mean("epoch")[-1]))]
        rows.append([family, every.replace(" freq=", ""), *losses, write(each), str(len(curve.runs))])
    at = f"loss after {common} epochs"
    head = ["method", "steps between refreshes", at, "loss at the end", "epochs", "seconds an epoch", "seeds"]
    return table(head, rows)


def sensitivity(record: Record) -> str:
    """Count how many settings around the best end near it."""
    planes, lines = grids(record.grid)
    if not planes and not lines:
        return MISSING
    rows = [[_marked(name), *_shares(one)] for name, one in {**planes, **lines}.items()]
    return table(["method", f"within {NEAR:g}x of its best", "diverged", "best loss above floor", "median"], rows)


def _shares(one: Grid) -> list[str]:
    median = statistics.median(float(loss) for loss in one.losses.flat if not math.isnan(loss))
    middle = write(median) if math.isfinite(median) else "diverged"
    return [f"{one.near} of {one.tried}", str(one.diverged), write(one.best), middle]


def comparison(record: Record, task: str) -> str:
    """Tabulate each method's final training and validation results on one task."""
    runs = record.runs(f"comparison/{task}")
    best = chosen(runs)
    if not best:
        return MISSING
    counts = tried(runs)
    accurate = any(at_end(curve, "validation_accuracy")[0] > 0 for curve in best.values())
    rows = []
    for name, curve in best.items():
        cells = [write(*at_end(curve, quantity)) for quantity in (LOSS, "train_loss", "validation_loss")]
        if accurate:
            cells.append(percent(*at_end(curve, "validation_accuracy")))
        settings = _setting(curve, "lr", "batch_size")
        about = [str(int(curve.mean("epoch")[-1])), settings, _tries(name, counts), str(len(curve.runs))]
        rows.append([name, *cells, *about])
    head = ["method", "training loss", "full pass", "validation loss", *(["accuracy"] if accurate else [])]
    head += ["epochs", "setting", "tried", "seeds"]
    return table(head, rows + _gone(lost(runs), len(head)))


def comparison_times(record: Record, task: str) -> str:
    """Tabulate, for one task, seconds per epoch and how soon each method reaches AdamW's lowest loss."""
    best = chosen(record.runs(f"comparison/{task}"))
    return _times(best, adamw(best), "AdamW's lowest", lowest)


def adamw(best: dict[str, Curve]) -> Curve | None:
    """Return AdamW's curve with or without batch-norm, whichever ends lower."""
    found = [curve for name, curve in best.items() if split(name)[0] in ("AdamW", "AdamW + BN")]
    return min(found, key=lambda curve: float(curve.mean("train_loss")[-1]), default=None)


def machine(record: Record, places: Sequence[str]) -> str:
    """Return the machines and versions of torch with which the runs in some folders were made."""
    return _machines(record.runs(*places))


def _machines(runs: Iterable[Run]) -> str:
    found = set()
    for run in runs:
        hardware = run.about.get("machine", {})
        found.add(f"{hardware.get('gpu') or hardware.get('processor')}, torch {run.about['versions']['torch']}")
    return "; ".join(sorted(found)) or MISSING


def measured(record: Record) -> str:
    """Tabulate the measurements of the approximations themselves."""
    rows = []
    correlation, error = (record.measures.get(name) for name in ("correlation", "error"))
    if correlation is not None:
        values = [write(correlation[name]) for name in ("parameter_space", "eigenbasis")]
        rows.append(["mean absolute correlation off the diagonal", f"{values[0]} (parameters)", f"{values[1]} (basis)"])
    if error is not None:
        for name, words in (("error", "relative error"), ("angle", "angle to the exact step, degrees")):
            means = [f"{write(_mean(error[name][each]))} ({each})" for each in ("KFAC", "EKFAC")]
            rows.append([f"{words}, mean over training", *means])
    return table(["measure", "before, or KFAC", "after, or EKFAC"], rows) if rows else MISSING


def spectra(record: Record) -> str:
    """Tabulate the distance of each approximation's spectrum from the true one, at some steps."""
    found = record.measures.get("frequency")
    if found is None:
        return MISSING
    names = list(found["distances"])
    columns = [relative(found, name) for name in names]
    rows = [
        [str(step), *(write(column[place]) for column in [*columns, found["norms"]])]
        for place, step in enumerate(found["steps"])
        if step % 100 == 0 or step == 50
    ]
    return table(["step", *names, "norm of the true spectrum"], rows, words=0)


def relative(spectra: Mapping[str, Any], name: str) -> list[float]:
    """Return a spectrum's distances from the true one, relative to the true one's norm."""
    pairs = zip(spectra["distances"][name], spectra["norms"], strict=True)
    return [distance / norm for distance, norm in pairs]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _marked(name: str) -> str:
    return name if split(name)[0] in PAPER else name + DAGGER
