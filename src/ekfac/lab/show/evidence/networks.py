"""VGG11 and ResNet34 on CIFAR-10: the paper's claims, each judged by an explicit rule.

As in the paper, a method's loss at an epoch, or within a time, is that of its best setting for that epoch or time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy

from ekfac.lab.labels import counted
from ekfac.lab.search.selection import Curve, Envelope, best_validation, by_method, curves, per_epoch
from ekfac.lab.show.evidence.claims import UNKNOWN, verdict
from ekfac.lab.show.evidence.record import LOSS, Record, percent, write
from ekfac.lab.show.figures import paper
from ekfac.lab.show.figures.cifar import of_task, usual_batch_size
from ekfac.lab.show.figures.curves import budgets
from ekfac.lab.show.looks import ordered, split
from ekfac.lab.training.runs import Run

BASELINES = ("KFAC", "SGD", "SGD + BN")
# Validation may be below the best baseline's by this much.
GOOD = 0.01
# "Usually" means at this fraction of the epochs.
USUALLY = 0.75


class Holder(Protocol):
    """Anything with runs on CIFAR-10: the record, or new runs."""

    @property
    def cifar(self) -> list[Run]:
        """The runs."""


Judge = Callable[[Holder], str]
Groups = dict[str, list[Curve]]


def groups(runs: Iterable[Run], task: str, scheduled: bool = False, size: int | None = None) -> Groups:
    """Return each method's settings on a network, at a given batch size or the method's own."""
    own = [run for run in runs if of_task(task, scheduled)(run) and not plain_damping(run)]
    if size is not None:
        own = [run for run in own if run.config.batch_size == size]
    found = curves(paper.of_one_length(own))
    found = found if size is not None else usual_batch_size(found)
    named = {split(name)[0]: group for name, group in by_method(found).items()}
    return {name: named[name] for name in ordered(named)}


def plain_damping(run: Run) -> bool:
    """Return whether a factored method of the paper lacks the appendix's damping."""
    return run.config.optimizer in ("ekfac", "ekfac-ra") and run.config.damping_mode == "plain"


def value_at(found: Envelope, x: float) -> float | None:
    """Return the best value up to an epoch or a time; ``None`` before the first."""
    place = int(numpy.searchsorted(found.x, x, side="right")) - 1
    return None if place < 0 else float(found.value[place])


def reached(found: Envelope, loss: float) -> float | None:
    """Return the first epoch or time at which the best reaches a loss; ``None`` if it never does."""
    where = numpy.flatnonzero(found.value <= loss)
    return float(found.x[where[0]]) if len(where) else None


def envelopes(own: Groups, names: Iterable[str]) -> dict[str, Envelope]:
    """Return the best by epoch of some methods, without those that diverged in their first epoch."""
    found = {name: per_epoch(own[name]) for name in names if name in own}
    return {name: envelope for name, envelope in found.items() if len(envelope.x) and envelope.x[-1] > 0}


def ends(own: Groups, names: Iterable[str]) -> tuple[int, dict[str, float]]:
    """Return the last epoch that some methods have in common, and the loss of each there."""
    found = envelopes(own, names)
    last = int(min((envelope.x[-1] for envelope in found.values()), default=0))
    return last, {name: value for name, e in found.items() if (value := value_at(e, last)) is not None}


def until(group: Iterable[Curve], epoch: int) -> list[Curve]:
    """Return settings as if they had stopped after an epoch."""
    return [Curve(tuple(replace(run, history=run.history[: epoch + 1]) for run in curve.runs)) for curve in group]


def by_epoch(task: str, ours: Sequence[str], rivals: Sequence[str] = BASELINES, scheduled: bool = False) -> Judge:
    """Judge that each of ours is below each rival after the last epoch that all have."""

    def judge(record: Holder) -> str:
        own, held, words = groups(record.cifar, task, scheduled), [], []
        for mine in ours:
            last, found = ends(own, (mine, *rivals))
            against = {name: loss for name, loss in found.items() if name != mine}
            if mine in found and against:
                held += [found[mine] < loss for loss in against.values()]
                others = ", ".join(f"{name} {write(loss)}" for name, loss in against.items())
                words.append(f"after {last} epochs: {mine} {write(found[mine])}, {others}")
        return f"{verdict(held)} | training loss {'; '.join(words)}" if held else UNKNOWN

    return judge


def usually(task: str, ours: Sequence[str], rival: str = "KFAC", x: str = "epochs") -> Judge:
    """Judge that the best of ours is below the best of a rival at three quarters of the epochs, or of the times."""
    select = per_epoch if x == "epochs" else budgets

    def judge(record: Holder) -> str:
        own = groups(record.cifar, task)
        if rival not in own or not any(name in own for name in ours):
            return UNKNOWN
        other, held, words = select(own[rival]), [], []
        for name in (name for name in ours if name in own):
            mine = select(own[name])
            if not len(mine.x) or not len(other.x):
                continue
            end = min(mine.x[-1], other.x[-1])
            common = [at for at in numpy.union1d(mine.x, other.x) if 0 < at <= end]
            pairs = [(value_at(mine, at), value_at(other, at)) for at in common]
            below = [a < b for a, b in pairs if a is not None and b is not None]
            held.append(sum(below) >= USUALLY * len(below))
            words.append(f"{name} below {rival} at {sum(below)} of {len(below)} {x}")
        return f"{verdict(held)} | {'; '.join(words)}" if held else UNKNOWN

    return judge


def no_setting_below_all(task: str, ours: Sequence[str], rival: str = "KFAC") -> Judge:
    """Judge that no setting of ours is below all of a rival's at every epoch that the two have."""

    def judge(record: Holder) -> str:
        own = groups(record.cifar, task)
        if rival not in own:
            return UNKNOWN
        other, held, words = per_epoch(own[rival]), [], []
        for name in (name for name in ours if name in own):
            counts = []
            for curve in own[name]:
                mine = per_epoch([curve])
                common = [at for at in mine.x if 0 < at <= other.x[-1]]
                pairs = [(value_at(mine, at), value_at(other, at)) for at in common]
                counts.append((len(common), sum(a < b for a, b in pairs if a is not None and b is not None), curve))
            epochs, below, best = max(counts, key=lambda row: row[:2])
            if epochs:
                held.append(below < epochs)
                words.append(f"{name} at {setting(best)} is below all of {rival}'s at {below} of {epochs} epochs")
        return f"{verdict(held)} | {'; '.join(words)}" if held else UNKNOWN

    return judge


def by_time(task: str, ours: Sequence[str], rivals: Sequence[str] = BASELINES, scheduled: bool = False) -> Judge:
    """Judge that ours reach each rival's loss, at the time when the first of the two ends, sooner than the rival."""

    def judge(record: Holder) -> str:
        own = {name: budgets(group) for name, group in groups(record.cifar, task, scheduled).items()}
        held, words = [], []
        for mine, rival in itertools.product(ours, rivals):
            if not all(name in own and len(own[name].x) for name in (mine, rival)):
                continue
            end = float(min(own[name].x[-1] for name in (mine, rival)))
            loss = value_at(own[rival], end)
            if loss is None:
                continue
            spent, its = reached(own[mine], loss), reached(own[rival], loss)
            held.append(spent is not None and its is not None and spent < its)
            there = spent is not None and spent <= end
            share = f"{write(spent / its)} of its time" if there and spent and its else "not there by then"
            words.append(f"{mine} at the loss of {rival} after {write(end)} s: {share}")
        return f"{verdict(held)} | {'; '.join(words)}" if held else UNKNOWN

    return judge


def accuracies(curve: Curve) -> tuple[float, float]:
    """Return a setting's best validation accuracy, and the test accuracy at that epoch."""
    validation, test = curve.mean("validation_accuracy"), curve.mean("test_accuracy")
    best = int(numpy.nanargmax(validation))
    return float(validation[best]), float(test[best])


def validation(task: str, ours: Sequence[str], rivals: Sequence[str] = BASELINES) -> Judge:
    """Judge that ours, selected on validation, have at least the best rival's accuracy minus one point.

    Each of ours is compared within the epochs that it and all rivals have.
    """

    def judge(record: Holder) -> str:
        own, held, words = groups(record.cifar, task), [], []
        for mine in ours:
            last, there = ends(own, (mine, *rivals))
            chosen = {name: best_validation(until(own[name], last)) for name in there}
            found = {name: accuracies(curve) for name, curve in chosen.items() if curve is not None}
            best = max((at for name, (at, _) in found.items() if name != mine), default=None)
            if best is None or mine not in found:
                continue
            held.append(found[mine][0] >= best - GOOD)
            texts = [
                f"{name} {percent(at)}" + ("" if numpy.isnan(test) else f" (test {percent(test)})")
                for name, (at, test) in found.items()
            ]
            words.append(f"within {last} epochs: " + ", ".join(texts))
        return f"{verdict(held)} | best validation accuracy {'; '.join(words)}" if held else UNKNOWN

    return judge


def _gains(record: Holder, task: str) -> dict[int, dict[str, float]]:
    """Return by batch size KFAC's last loss divided by that of EKFAC and of EKFAC-ra."""
    sizes = sorted({run.config.batch_size or 0 for run in record.cifar if of_task(task)(run)})
    found: dict[int, dict[str, float]] = {}
    for size in sizes:
        own = groups(record.cifar, task, size=size)
        for name in ("EKFAC", "EKFAC-ra"):
            _, losses = ends(own, ("KFAC", name))
            if len(losses) == 2:
                found.setdefault(size, {})[name] = losses["KFAC"] / losses[name]
    return found


def gain_over_sizes(task: str, grows: bool) -> Judge:
    """Judge that the gain over KFAC grows with the batch size, or that there is one at every size."""

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
    """Judge that KFAC at batch 200 is as fast as EKFAC at 500, but not as EKFAC-ra, at the end of the shorter run."""
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


def no_gain_in_time(record: Holder) -> str:
    """Judge that over all batch sizes the best EKFAC on VGG11 is not below the best KFAC in time."""
    runs = [run for run in record.cifar if of_task("vgg11")(run)]
    sizes = sorted({run.config.batch_size or 0 for run in runs if run.config.optimizer == "kfac"})
    found = {}
    for name in ("KFAC", "EKFAC"):
        own = [curve for size in sizes for curve in groups(runs, "vgg11", size=size).get(name, [])]
        found[name] = budgets(own)
    if len(sizes) < 2 or not all(len(envelope.x) for envelope in found.values()):
        return UNKNOWN
    end = float(min(envelope.x[-1] for envelope in found.values()))
    losses = {name: value_at(envelope, end) for name, envelope in found.items()}
    words = ", ".join(f"{name} {write(loss)}" for name, loss in losses.items())
    held = losses["EKFAC"] >= losses["KFAC"]  # type: ignore[operator]
    return f"{verdict([held])} | training loss after {write(end)} s, any batch size: {words}"


def factored_damping(record: Holder) -> str:
    """Judge that the appendix's damping ends below a damping that is only added to the eigenvalues."""
    runs = [r for r in record.cifar if of_task("vgg11")(r) and r.config.optimizer == "ekfac-ra"]
    found = {}
    for name, plain in (("factored", False), ("plain", True)):
        own = curves(paper.of_one_length(run for run in runs if plain_damping(run) == plain))
        own = [curve for curve in own if curve.config.batch_size == 500]
        if own:
            found[name] = per_epoch(own)
    if len(found) < 2:
        return UNKNOWN
    last = float(min(envelope.x[-1] for envelope in found.values()))
    losses = {name: value_at(envelope, last) for name, envelope in found.items()}
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


def setting(curve: Curve) -> str:
    """Return the searched settings; all others are the same for all of a method's runs."""
    values = {name: getattr(curve.config, name) for name in ("lr", "damping")}
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items() if value is not None) or "nothing set"
