"""VGG11 and ResNet34 on CIFAR-10: tables, and the paper's claims, each judged by a rule that is written down.

As in the paper, a method's loss at an epoch, or within a time, is that of its best setting for that epoch or time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy

from ekfac.lab.labels import counted
from ekfac.lab.search.selection import Curve, Envelope, best_validation, by_method, curves, per_epoch
from ekfac.lab.show.evidence.claims import UNKNOWN, verdict
from ekfac.lab.show.evidence.record import LOSS, MISSING, Record, percent, table, tried, write
from ekfac.lab.show.figures import paper
from ekfac.lab.show.figures.cifar import NAMES, of_task, usual_batch_size
from ekfac.lab.show.figures.curves import budgets
from ekfac.lab.show.figures.style import DAGGER
from ekfac.lab.show.looks import ordered, split
from ekfac.lab.training.runs import Run

BASELINES = ("KFAC", "SGD", "SGD + BN")
EPOCHS = (1, 2, 3, 5, 8, 10, 12, 15, 20, 30, 50, 100)
# Validation as good as the best baseline's, less this.
GOOD = 0.01
# "Usually": at so many of the epochs.
USUALLY = 0.75


class Holder(Protocol):
    """What has runs on CIFAR-10: the record, or runs just made."""

    @property
    def cifar(self) -> list[Run]:
        """The runs."""


Judge = Callable[[Holder], str]
Groups = dict[str, list[Curve]]


def groups(runs: Iterable[Run], task: str, scheduled: bool = False, size: int | None = None) -> Groups:
    """Return each method's settings on a network, at a batch size or at the method's own."""
    own = [run for run in runs if of_task(task, scheduled)(run) and not _plain_damping(run)]
    if size is not None:
        own = [run for run in own if run.config.batch_size == size]
    found = curves(paper.of_one_length(own))
    found = found if size is not None else usual_batch_size(found)
    named = {split(name)[0]: group for name, group in by_method(found).items()}
    return {name: named[name] for name in ordered(named)}


def _plain_damping(run: Run) -> bool:
    """Tell whether a factored method of the paper is without the appendix's damping."""
    return run.config.optimizer in ("ekfac", "ekfac-ra") and run.config.damping_mode == "plain"


def value_at(found: Envelope, x: float) -> float | None:
    """Return the best there was by an epoch or a time; ``None`` before the first."""
    place = int(numpy.searchsorted(found.x, x, side="right")) - 1
    return None if place < 0 else float(found.value[place])


def reached(found: Envelope, loss: float) -> float | None:
    """Return the first epoch or time at which the best is down at a loss; ``None`` if it never is."""
    where = numpy.flatnonzero(found.value <= loss)
    return float(found.x[where[0]]) if len(where) else None


def _ends(own: Groups, names: Sequence[str]) -> tuple[int, dict[str, float]]:
    """Return the last epoch that some methods have in common, and the loss of each there."""
    found = {name: per_epoch(own[name]) for name in names if name in own}
    found = {name: envelope for name, envelope in found.items() if len(envelope.x)}
    if not found:
        return 0, {}
    last = int(min(envelope.x[-1] for envelope in found.values()))
    return last, {name: value for name, e in found.items() if (value := value_at(e, last)) is not None}


def by_epoch(task: str, ours: Sequence[str], rivals: Sequence[str] = BASELINES, scheduled: bool = False) -> Judge:
    """Judge that ours are below each rival after the last epoch that all have."""

    def judge(record: Holder) -> str:
        last, found = _ends(groups(record.cifar, task, scheduled), (*ours, *rivals))
        pairs = [(mine, rival) for mine in ours for rival in rivals if mine in found and rival in found]
        if not pairs:
            return UNKNOWN
        words = ", ".join(f"{name} {write(value)}" for name, value in found.items())
        return f"{verdict(found[a] < found[b] for a, b in pairs)} | training loss after {last} epochs: {words}"

    return judge


def usually(task: str, ours: Sequence[str], rival: str = "KFAC") -> Judge:
    """Judge that the best of ours is below the best of a rival at three quarters of the epochs."""

    def judge(record: Holder) -> str:
        own = groups(record.cifar, task)
        if rival not in own or not any(name in own for name in ours):
            return UNKNOWN
        other, held, words = per_epoch(own[rival]), [], []
        for name in (name for name in ours if name in own):
            mine = per_epoch(own[name])
            common = [x for x in mine.x if x > 0 and x <= other.x[-1]]
            below = [value_at(mine, x) < value_at(other, x) for x in common]  # type: ignore[operator]
            held.append(sum(below) >= USUALLY * len(below))
            words.append(f"{name} below {rival} at {sum(below)} of {len(below)} epochs")
        return f"{verdict(held)} | {'; '.join(words)}"

    return judge


def by_time(task: str, ours: Sequence[str], rivals: Sequence[str] = BASELINES, scheduled: bool = False) -> Judge:
    """Judge that ours are down at each rival's last loss sooner than the rival."""

    def judge(record: Holder) -> str:
        own = {name: budgets(group) for name, group in groups(record.cifar, task, scheduled).items()}
        held, words = [], []
        for mine, rival in itertools.product(ours, rivals):
            if not all(name in own and len(own[name].x) for name in (mine, rival)):
                continue
            loss = float(own[rival].value[-1])
            spent, its = reached(own[mine], loss), reached(own[rival], loss)
            held.append(spent is not None and its is not None and spent < its)
            share = "never there" if spent is None or not its else f"{write(spent / its)} of its time"
            words.append(f"{mine} at {rival}'s last loss: {share}")
        return f"{verdict(held)} | {'; '.join(words)}" if held else UNKNOWN

    return judge


def _accuracies(curve: Curve) -> tuple[float, float]:
    """Return a setting's best validation accuracy, and the test accuracy at that epoch."""
    validation, test = curve.mean("validation_accuracy"), curve.mean("test_accuracy")
    best = int(numpy.nanargmax(validation))
    return float(validation[best]), float(test[best])


def validation(task: str, ours: Sequence[str], rivals: Sequence[str] = BASELINES) -> Judge:
    """Judge that ours, selected on validation, are within a point of the best rival's accuracy or above."""

    def judge(record: Holder) -> str:
        own = groups(record.cifar, task)
        chosen = {name: best_validation(own[name]) for name in (*ours, *rivals) if name in own}
        found = {name: _accuracies(curve) for name, curve in chosen.items() if curve is not None}
        best = max((found[name][0] for name in rivals if name in found), default=None)
        mine = [found[name][0] for name in ours if name in found]
        if best is None or not mine:
            return UNKNOWN
        words = ", ".join(
            f"{name} {percent(at)}" + ("" if numpy.isnan(test) else f" (test {percent(test)})")
            for name, (at, test) in found.items()
        )
        return f"{verdict(value >= best - GOOD for value in mine)} | best validation accuracy: {words}"

    return judge


def _gains(record: Holder, task: str) -> dict[int, dict[str, float]]:
    """Return by batch size KFAC's last loss over that of EKFAC and of EKFAC-ra."""
    sizes = sorted({run.config.batch_size or 0 for run in record.cifar if of_task(task)(run)})
    found: dict[int, dict[str, float]] = {}
    for size in sizes:
        own = groups(record.cifar, task, size=size)
        for name in ("EKFAC", "EKFAC-ra"):
            _, ends = _ends(own, ("KFAC", name))
            if len(ends) == 2:
                found.setdefault(size, {})[name] = ends["KFAC"] / ends[name]
    return found


def gain_over_sizes(task: str, grows: bool) -> Judge:
    """Judge how the gain over KFAC goes with the batch size: that it grows, or that there is one at every size."""

    def judge(record: Holder) -> str:
        gains = _gains(record, task)
        if len(gains) < 2:
            return UNKNOWN
        held: list[bool] = []
        for name in ("EKFAC", "EKFAC-ra"):
            values = [found[name] for found in gains.values() if name in found]
            held += [b > a for a, b in itertools.pairwise(values)] if grows else [value > 1 for value in values]
        words = [
            f"batch {size}: " + ", ".join(f"{name} {write(gain)}" for name, gain in found.items())
            for size, found in gains.items()
        ]
        return f"{verdict(held)} | KFAC's last loss over theirs: {'; '.join(words)}"

    return judge


def small_batches_catch_up(record: Holder) -> str:
    """Judge that KFAC at batch 200 is as fast as EKFAC at 500, and not as EKFAC-ra: at the shorter one's time."""
    kfac = groups(record.cifar, "vgg11", size=200).get("KFAC")
    own = groups(record.cifar, "vgg11", size=500)
    if kfac is None or "EKFAC" not in own or "EKFAC-ra" not in own:
        return UNKNOWN
    rival, held, words = budgets(kfac), [], []
    for name, behind in (("EKFAC", False), ("EKFAC-ra", True)):
        mine = budgets(own[name])
        if not len(mine.x) or not len(rival.x):
            return UNKNOWN
        time = float(min(mine.x[-1], rival.x[-1]))
        losses = value_at(mine, time), value_at(rival, time)
        held.append((losses[0] < losses[1]) == behind)  # type: ignore[operator]
        words.append(f"after {write(time)} s {name} {write(losses[0])}, KFAC at batch 200 {write(losses[1])}")
    return f"{verdict(held)} | {'; '.join(words)}"


def factored_damping(record: Holder) -> str:
    """Judge that the appendix's damping ends below a damping that is only added to the eigenvalues."""
    runs = [r for r in record.cifar if of_task("vgg11")(r) and r.config.optimizer == "ekfac-ra"]
    ends = {}
    for name, plain in (("factored", False), ("plain", True)):
        own = curves(paper.of_one_length(run for run in runs if _plain_damping(run) == plain))
        own = [curve for curve in own if curve.config.batch_size == 500]
        if own:
            ends[name] = per_epoch(own)
    if len(ends) < 2:
        return UNKNOWN
    last = float(min(found.x[-1] for found in ends.values()))
    losses = {name: value_at(found, last) for name, found in ends.items()}
    words = ", ".join(f"{name} {write(value)}" for name, value in losses.items())
    held = losses["factored"] < losses["plain"]  # type: ignore[operator]
    return f"{verdict([held])} | EKFAC-ra on VGG11 after {last:g} epochs: {words}"


def every_step(record: Record) -> str:
    """Judge that KFAC that inverts at every update is below the amortised one after as many epochs."""
    searched = [run for run in record.runs("cifar/every-step") if run.config.refresh_every == 1]
    amortised = [r for r in record.frequency if r.config.optimizer == "kfac" and r.config.refresh_every == 50]
    every = searched or [r for r in record.frequency if r.config.optimizer == "kfac" and r.config.refresh_every == 1]
    if not every or not amortised:
        return UNKNOWN
    found = {"every update": per_epoch(curves(every), LOSS), "every 50": per_epoch(curves(amortised), LOSS)}
    last = float(min(one.x[-1] for one in found.values()))
    floor = curves(every)[0].floor
    losses = {name: (value_at(one, last) or 0.0) - floor for name, one in found.items()}
    settings = counted(len(curves(every)), "setting")
    words = ", ".join(f"{name} {write(value)}" for name, value in losses.items())
    held = losses["every update"] < losses["every 50"]
    return f"{verdict([held])} | loss above floor after {last:g} epochs: {words}; {settings} tried at every update"


def training(record: Holder, task: str, scheduled: bool = False) -> str:
    """Tabulate the best loss at some epochs, and the setting that has the last."""
    own = groups(record.cifar, task, scheduled)
    if not own:
        return MISSING
    found = {name: per_epoch(group) for name, group in own.items()}
    last = max(float(envelope.x[-1]) for envelope in found.values())
    shown = [epoch for epoch in EPOCHS if epoch < last] + [int(last)]
    runs = [run for run in record.cifar if of_task(task, scheduled)(run)]
    counts = {split(name)[0]: count for name, count in tried(runs).items()}
    rows = []
    for name, envelope in found.items():
        final, timed = envelope.chosen[-1], envelope.chosen[-1].timed
        losses = [write(value_at(envelope, e)) if envelope.x[-1] >= e else "" for e in shown]
        error = float(final.standard_error("train_loss")[-1]) if len(final.runs) > 1 else None
        losses[-1] = write(float(envelope.value[-1]), error) if envelope.x[-1] >= last else ""
        each = None if timed is None else float(timed.mean("seconds")[-1] / timed.mean("epoch")[-1])
        marked = name + (DAGGER if paper.added(task, [name]) else "")
        rows.append([marked, *losses, write(each), _setting(final), str(counts[name]), str(len(final.runs))])
    return table(["", *map(str, shown), "seconds an epoch", "setting", "tried", "seeds"], rows)


def _setting(curve: Curve) -> str:
    """Return what was searched; all else is the same for all of a method's runs."""
    values = {name: getattr(curve.config, name) for name in ("lr", "damping")}
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items() if value is not None) or "nothing set"


def accuracy(record: Holder, task: str) -> str:
    """Tabulate accuracies at the epoch that validates best, of the setting that does."""
    own = groups(record.cifar, task)
    rows = []
    for name, group in own.items():
        best = best_validation(group)
        if best is not None:
            place = int(numpy.nanargmax(best.mean("validation_accuracy")))
            names = ("train_accuracy", "validation_accuracy", "test_accuracy")
            errors = [float(best.standard_error(n)[place]) if len(best.runs) > 1 else None for n in names]
            cells = [percent(float(best.mean(n)[place]), e) for n, e in zip(names, errors, strict=True)]
            marked = name + (DAGGER if paper.added(task, [name]) else "")
            epoch = f"{int(best.mean('epoch')[place])}"
            rows.append([marked, *cells, epoch, _setting(best)])
    return table(["", "training", "validation", "test", "at epoch", "setting"], rows) if rows else MISSING


def sizes(record: Holder, task: str) -> str:
    """Tabulate the last loss by method and batch size."""
    rows = []
    for size in sorted({run.config.batch_size or 0 for run in record.cifar if of_task(task)(run)}):
        own = {n: g for n, g in groups(record.cifar, task, size=size).items() if n in paper.FACTORED}
        if len(own) > 1:
            last, ends = _ends(own, paper.FACTORED)
            rows.append([str(size), str(last), *(write(ends.get(name)) for name in paper.FACTORED)])
    return table(["batch", "epochs", *paper.FACTORED], rows) if rows else MISSING


TASKS = tuple(NAMES)
