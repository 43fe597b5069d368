"""VGG11 and ResNet34 on CIFAR-10: the tables of the page, from recorded runs only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from ekfac.lab.search.ladder import FACTOR
from ekfac.lab.search.selection import Curve, best_validation
from ekfac.lab.show.evidence.networks import Groups, Holder, ends, envelopes, groups, setting, value_at
from ekfac.lab.show.evidence.record import MISSING, percent, table, tried, write
from ekfac.lab.show.figures import FIGURES, paper
from ekfac.lab.show.figures.cifar import NAMES, of_task
from ekfac.lab.show.figures.style import DAGGER
from ekfac.lab.show.looks import split
from ekfac.lab.training.runs import Run

TASKS = tuple(NAMES)
EPOCHS = (1, 3, 5, 10, 20, 30, 50, 100)


def runs_for(record: Holder, name: str) -> list[Run]:
    """Return the recorded runs of a figure on CIFAR-10; none for batch sizes if there is only one."""
    found = [run for run in record.cifar if FIGURES.get(name).takes(run)]
    one_size = len({(run.config.task, run.config.batch_size) for run in found}) <= len({r.config.task for r in found})
    return [] if name == "batch-size" and one_size else found


def training(record: Holder, task: str, scheduled: bool = False) -> str:
    """Tabulate the best loss at some epochs, and the setting with the last.

    The last epoch that all methods have is among them, in bold: only up to there can all be compared.
    """
    own = groups(record.cifar, task, scheduled)
    if not own:
        return MISSING
    found = envelopes(own, own)
    common, last = (int(bound((e.x[-1] for e in found.values()), default=0)) for bound in (min, max))
    shown = sorted({*(epoch for epoch in EPOCHS if epoch < last), common, last})
    counts = _tried(record, task, scheduled)
    rows = []
    for name, envelope in found.items():
        final, timed, end = envelope.chosen[-1], envelope.chosen[-1].timed, int(envelope.x[-1])
        losses = [write(value_at(envelope, epoch)) if epoch <= end else "" for epoch in shown]
        if end in shown and len(final.runs) > 1:
            error = float(final.standard_error("train_loss")[-1])
            losses[shown.index(end)] = write(float(envelope.value[-1]), error)
        each = None if timed is None else float(timed.mean("seconds")[-1] / timed.mean("epoch")[-1])
        about = [setting(final), counts[name], _tried_around(own[name], final), str(len(final.runs))]
        rows.append([_marked(name, task), *losses, str(end), write(each), *about])
    head = ["loss after epoch", *(f"**{epoch}**" if epoch == common else str(epoch) for epoch in shown), "epochs shown"]
    head += ["seconds an epoch", "setting", "tried", "neighbours tried", "seeds"]
    return table(head, rows + _gone(own, task, len(head)))


def _gone(own: Groups, task: str, columns: int) -> list[list[str]]:
    """Return rows for methods that diverged in their first epoch."""
    names = [name for name in own if name not in envelopes(own, own)]
    return [[_marked(name, task), "diverged in epoch 1", *[""] * (columns - 2)] for name in names]


def _marked(name: str, task: str) -> str:
    return name + (DAGGER if paper.added(task, [name]) else "")


def _tried(record: Holder, task: str, scheduled: bool) -> dict[str, str]:
    """Count the settings that were tried for each method; if only one, there was no search."""
    runs = [run for run in record.cifar if of_task(task, scheduled)(run)]
    return {split(name)[0]: str(count) if count > 1 else "no search" for name, count in tried(runs).items()}


def _tried_around(group: Sequence[Curve], best: Curve) -> str:
    """Return how many of a setting's neighbours, half a decade away, were tried; fewer than all means an edge."""
    there = {_point(curve.config.lr, curve.config.damping) for curve in group}
    lr, damping = best.config.lr, best.config.damping
    if len(there) < 2 or lr is None:
        return ""
    around = [_point(lr * up, damping) for up in (1 / FACTOR, FACTOR)]
    if damping is not None:
        around += [_point(lr, damping * up) for up in (1 / FACTOR, FACTOR)]
    return f"{sum(point in there for point in around)} of {len(around)}"


def _point(*values: float | None) -> tuple[float | None, ...]:
    return tuple(None if value is None else float(f"{value:.2g}") for value in values)


def accuracy(record: Holder, task: str) -> str:
    """Tabulate accuracies of the setting with the best validation, at its best epoch."""
    own = groups(record.cifar, task)
    rows = []
    for name in envelopes(own, own):
        best = best_validation(own[name])
        if best is not None:
            place = int(numpy.nanargmax(best.mean("validation_accuracy")))
            names = ("train_accuracy", "validation_accuracy", "test_accuracy")
            errors = [float(best.standard_error(n)[place]) if len(best.runs) > 1 else None for n in names]
            cells = [percent(float(best.mean(n)[place]), e) for n, e in zip(names, errors, strict=True)]
            epoch = f"{int(best.mean('epoch')[place])} of {int(best.mean('epoch')[-1])}"
            rows.append([_marked(name, task), *cells, epoch, setting(best)])
    if not rows:
        return MISSING
    head = ["accuracy", "training", "validation", "test", "at epoch", "setting"]
    return table(head, rows + _gone(own, task, len(head)))


def sizes(record: Holder, task: str) -> str:
    """Tabulate the last loss by method and batch size; nothing if there is only one size."""
    rows = []
    for size in sorted({run.config.batch_size or 0 for run in record.cifar if of_task(task)(run)}):
        own = {n: g for n, g in groups(record.cifar, task, size=size).items() if n in paper.FACTORED}
        if len(own) > 1:
            last, losses = ends(own, paper.FACTORED)
            rows.append([str(size), str(last), *(write(losses.get(name)) for name in paper.FACTORED)])
    return table(["batch", "epochs", *paper.FACTORED], rows) if len(rows) > 1 else MISSING
