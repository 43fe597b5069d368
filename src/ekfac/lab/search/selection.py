"""Selects hyper-parameters: by final loss, at each epoch, at each time budget, by validation.

Everything works on curves: one setting with all its seeds. A run that diverged may be the best at an early epoch, but
never at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
from numpy.typing import NDArray

from ekfac.lab.labels import method, touched, without_seed
from ekfac.lab.training.runs import Run

Array = NDArray[numpy.float64]
Index = NDArray[numpy.int64]


@dataclass(frozen=True)
class Curve:
    """One setting with all its seeds.

    Attributes:
        runs: Its runs, one per seed.
    """

    runs: tuple[Run, ...]
    _tables: dict[str, Array] = field(default_factory=dict, repr=False, compare=False)

    @property
    def config(self) -> Any:
        """The settings, with the first run's seed."""
        return self.runs[0].config

    @property
    def label(self) -> str:
        """The method's name."""
        return method(self.config)

    @property
    def length(self) -> int:
        """The number of records that all of its runs have."""
        return min(len(run.history) for run in self.runs)

    @property
    def floor(self) -> float:
        """The smallest possible training loss."""
        return self.floor_of("train_loss")

    def floor_of(self, name: str) -> float:
        """Return the smallest possible value of a loss, such as ``"validation_loss"``; zero for other quantities."""
        floors = self.runs[0].about.get("floor") or {}
        return float(floors.get(name.split("_")[0], 0.0)) if "loss" in name else 0.0

    @property
    def timed(self) -> Curve | None:
        """The same setting with only the runs whose seconds count; ``None`` if there are none."""
        runs = tuple(run for run in self.runs if run.timed)
        return self if runs == self.runs else Curve(runs) if runs else None

    @property
    def finished(self) -> bool:
        """Whether every seed finished without diverging."""
        return all(run.status == "finished" for run in self.runs)

    def table(self, name: str) -> Array:
        """Return a quantity of every seed at every record, [seeds, records]; NaN if missing.

        From the record at which a run diverged, losses count as infinite and accuracies as zero.
        """
        if name in self._tables:
            return self._tables[name]
        worst = 0.0 if name.endswith("accuracy") else math.inf
        values = numpy.full((len(self.runs), self.length), numpy.nan)
        for row, run in enumerate(self.runs):
            for column, record in enumerate(run.history[: self.length]):
                value = record.get(name)
                if record["diverged"] and name.endswith(("loss", "loss_mean", "accuracy")):
                    value = worst
                if value is not None:
                    values[row, column] = value
        self._tables[name] = values
        return values

    def mean(self, name: str) -> Array:
        """Return a quantity at every record, averaged over seeds."""
        return numpy.asarray(self.table(name).mean(0))

    def spread(self, name: str) -> tuple[Array, Array]:
        """Return the smallest and the largest value over the seeds at every record."""
        table = self.table(name)
        return table.min(0), table.max(0)

    def standard_error(self, name: str) -> Array:
        """Return the standard error of the mean over seeds at every record; zero for a single seed."""
        table = self.table(name)
        if len(table) < 2:
            return numpy.zeros(table.shape[1])
        with numpy.errstate(invalid="ignore"):
            return numpy.asarray(table.std(0, ddof=1) / math.sqrt(len(table)))


def curves(runs: Iterable[Run]) -> list[Curve]:
    """Group the seeds of each setting; runs without records are left out.

    If a seed was run twice, one run counts, preferably a timed one.
    """
    groups: dict[Any, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.timed):
        if run.history:
            groups.setdefault(without_seed(run.config), {})[run.config.seed] = run
    return [Curve(tuple(run for _, run in sorted(group.items()))) for group in groups.values()]


def whole_seeds(runs: Iterable[Run]) -> list[Run]:
    """Drop seeds that were stopped earlier than another seed of their setting, unless they diverged.

    Otherwise the mean over seeds would jump where one ends, and a shortened run would count as another setting.
    """
    given = list(runs)
    longest: dict[Any, int] = {}
    for run in given:
        setting = _without_length(run)
        longest[setting] = max(longest.get(setting, 0), len(run.history))
    return [r for r in given if r.status == "diverged" or len(r.history) == longest[_without_length(r)]]


def _without_length(run: Run) -> Any:
    return without_seed(replace(run.config, epochs=1))


def by_method(
    found: Iterable[Curve], name: Callable[[Curve], str] = lambda curve: curve.label
) -> dict[str, list[Curve]]:
    """Group curves by a name, by default their method's."""
    groups: dict[str, list[Curve]] = {}
    for curve in found:
        groups.setdefault(name(curve), []).append(curve)
    return groups


def last(curve: Curve, name: str = "train_loss") -> float:
    """Return a quantity at a setting's last record; infinite (an accuracy: zero) if a seed diverged."""
    value = float(curve.mean(name)[-1])
    return (0.0 if name.endswith("accuracy") else math.inf) if math.isnan(value) else value


def best_final(candidates: Sequence[Curve], name: str = "train_loss") -> Curve | None:
    """Return the setting with the lowest final loss; ``None`` if none finished."""
    whole = [curve for curve in candidates if curve.finished and math.isfinite(last(curve, name))]
    return min(whole, key=lambda curve: last(curve, name), default=None)


def final_settings(candidates: Sequence[Curve]) -> list[Curve]:
    """Return the settings that a method is judged by, without those that were only tried in a search.

    These are the settings with the most epochs; among them, only the timed ones if some are timed and others are not.
    """
    most = max((curve.config.epochs or 0 for curve in candidates), default=0)
    longest = [curve for curve in candidates if (curve.config.epochs or 0) == most]
    return [curve for curve in longest if curve.timed is not None] or longest


def best_of_each(found: Iterable[Curve]) -> dict[str, Curve]:
    """Return each method's final setting with the lowest final loss; methods without one are left out.

    For the library's defaults, only unchanged ones count.
    """
    candidates = by_method(curve for curve in found if not touched(curve.config))
    best = {name: best_final(final_settings(group)) for name, group in candidates.items()}
    return {name: curve for name, curve in best.items() if curve is not None}


def best_validation(candidates: Sequence[Curve]) -> Curve | None:
    """Return the setting with the best validation at any epoch: highest accuracy, if any; ties go to lowest loss."""
    scored: list[tuple[float, float, int, Curve]] = []
    for curve in candidates:
        accuracy, loss = curve.mean("validation_accuracy"), curve.mean("validation_loss")
        score = 1 - accuracy if not numpy.isnan(accuracy).all() else loss
        usable, losses = score[numpy.isfinite(score)], loss[numpy.isfinite(loss)]
        if len(usable):
            scored.append((float(usable.min()), float(losses.min(initial=math.inf)), len(scored), curve))
    return min(scored)[3] if scored else None


@dataclass(frozen=True)
class Envelope:
    """The best value of several settings at each x, and the setting that has it.

    Attributes:
        x: Epochs, steps or seconds.
        value: The best mean over seeds at each x.
        low: The smallest value over the chosen setting's seeds.
        high: The largest.
        chosen: The chosen setting.
    """

    x: Array
    value: Array
    low: Array
    high: Array
    chosen: list[Curve]


def per_epoch(candidates: Sequence[Curve], name: str = "train_loss", x: str = "epoch") -> Envelope:
    """Choose, at each epoch, the setting with the lowest loss at that epoch.

    Args:
        candidates: Settings of one method.
        name: The quantity to choose by and to show.
        x: The axis: ``"epoch"``, or ``"step"`` if all have the same batch size.
    """
    positions = numpy.unique(numpy.concatenate([curve.mean(x) for curve in candidates]))

    def index(curve: Curve) -> Index:
        own = curve.mean(x)
        place = numpy.clip(numpy.searchsorted(own, positions), 0, len(own) - 1)
        return numpy.where(own[place] == positions, place, -1)

    return _envelope(candidates, positions, index, name)


def per_time(
    candidates: Sequence[Curve],
    name: str = "train_loss",
    budgets: Sequence[float] | None = None,
    x: str = "seconds",
) -> Envelope:
    """Choose, at each time budget, the setting whose loss at its last record within the budget is lowest.

    A setting that ended before the budget competes with its last loss.

    Args:
        candidates: Settings of one method.
        name: The quantity to choose by and to show.
        budgets: Seconds of training; by default every time at which a setting has a record, but at most a thousand
            evenly spaced ones.
        x: The unit of the budget: ``"seconds"``, or ``"step"`` for settings of different batch sizes.
    """
    if budgets is None:
        times = numpy.unique(numpy.concatenate([curve.mean(x) for curve in candidates]))
        budgets = list(times) if len(times) <= 1000 else list(numpy.linspace(times[0], times[-1], 1000))
    positions = numpy.asarray(budgets, dtype=float)

    def index(curve: Curve) -> Index:
        return numpy.searchsorted(curve.mean(x), positions, side="right") - 1

    return _envelope(candidates, positions, index, name)


def _envelope(candidates: Sequence[Curve], positions: Array, index: Callable[[Curve], Index], name: str) -> Envelope:
    """Choose the best at each position; ``index`` returns which record of a curve counts there, -1 for none."""
    places = numpy.array([index(curve) for curve in candidates])
    means = [curve.mean(name) for curve in candidates]
    values = numpy.array([numpy.where(at >= 0, mean[at], math.inf) for at, mean in zip(places, means, strict=True)])
    values = numpy.where(numpy.isfinite(values), values, math.inf)
    best = values.argmin(0)
    columns = numpy.flatnonzero(numpy.isfinite(values.min(0)))
    bounds = [curve.spread(name) for curve in candidates]
    low, high = (numpy.array([bounds[best[c]][side][places[best[c], c]] for c in columns]) for side in (0, 1))
    chosen = [candidates[best[c]] for c in columns]
    return Envelope(positions[columns], values[best[columns], columns], low, high, chosen)


def time_to_reach(curve: Curve, loss: float, x: str = "seconds", name: str = "train_loss") -> float | None:
    """Return how long a setting took to reach a loss, interpolating linearly between records; ``None`` if never."""
    values, positions = curve.mean(name), curve.mean(x)
    reached = numpy.flatnonzero(values <= loss)
    if not len(reached):
        return None
    index = int(reached[0])
    if index == 0 or not math.isfinite(values[index - 1]):
        return float(positions[index])
    fraction = (values[index - 1] - loss) / (values[index - 1] - values[index])
    return float(positions[index - 1] + fraction * (positions[index] - positions[index - 1]))
