"""Searches beside the paper's grid: settings proposed by TPE, trials ended by successive halving; what mattered."""

from __future__ import annotations

import math
import multiprocessing
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import LabError
from ekfac.lab.search.space import on_axes
from ekfac.lab.search.study import Trials, study_name

SAMPLERS = ("grid", "tpe")
PRUNERS = ("median", "asha")
# As Optuna calls the parameter of an axis.
AXIS = "axis:"


@dataclass(frozen=True)
class Search:
    """How settings are proposed and trials ended; plain data, so that worker processes can be handed it.

    Attributes:
        base: What all settings have in common, by the name of the study.
        trials: How many each study is to have in the end; 0 proposes none.
        ranges: Smallest and largest learning rate and damping to propose, log-uniform.
        axes: Other settings and options, each with its values.
        pruner: ``"median"`` or ``"asha"``.
        seed: Of the proposals.
    """

    base: Mapping[str, TrainConfig] = field(default_factory=dict)
    trials: int = 0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    pruner: str = "median"
    seed: int = 0

    def prepare(self, trials: Trials) -> None:
        """Give a study its sampler and its pruner."""
        if self.trials:
            # Without the liar, workers that ask at the same moment get the same proposal; and each draws for itself,
            # and anew when the search goes on.
            drawn = f"{self.seed} {len(trials.all())} {multiprocessing.current_process().name}"
            seed = random.Random(drawn).randrange(2**32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
            trials.study.sampler = sampler
        if self.pruner == "asha":
            trials.study.pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return what is varied, as Optuna has it."""
        found: dict[str, BaseDistribution] = {
            n: FloatDistribution(*bounds, log=True) for n, bounds in self.ranges.items()
        }
        for name, values in self.axes.items():
            found[AXIS + name] = CategoricalDistribution([value if _plain(value) else str(value) for value in values])
        return found

    def ask(self, trials: Trials) -> optuna.Trial | None:
        """Return a new trial with a proposed setting, taken for this process; ``None`` if there are enough."""
        base = self.base.get(trials.study.study_name)
        if base is None or len([t for t in trials.all() if t.state != TrialState.FAIL]) >= self.trials:
            return None
        try:
            trial = trials.study.ask(self.distributions())
        except ValueError as error:
            raise LabError(
                f"study {trials.study.study_name!r} was searched over other values ({error}); name another with --study"
            ) from error
        numbers = {name: float(f"{trial.params[name]:.6g}") for name in self.ranges}
        chosen = {
            name: next(v for v in values if (v if _plain(v) else str(v)) == trial.params[AXIS + name])
            for name, values in self.axes.items()
        }
        config = replace(on_axes(base, chosen), **numbers).resolved()  # type: ignore[arg-type]
        trials.sign(trial, config)
        return trial


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def proposals(
    base: TrainConfig,
    trials: int,
    lrs: Sequence[float],
    dampings: Sequence[float],
    axes: Mapping[str, Sequence[Any]],
    name: str | None,
    pruner: str,
    seed: int,
) -> Search:
    """Return a search between the smallest and the largest of the given values.

    Raises:
        LabError: If a range is a single point and there is nothing else to vary, or ``trials`` is not positive.
    """
    if trials < 1:
        raise LabError(f"trials must be at least 1, not {trials}")
    ranges = {n: (min(v), max(v)) for n, v in (("lr", lrs), ("damping", dampings)) if v and min(v) < max(v)}
    if not ranges and not axes:
        raise LabError("there is nothing for tpe to vary: --lr and --damping take two values, its bounds, or more")
    single = {n: v[0] for n, v in (("lr", lrs), ("damping", dampings)) if v and n not in ranges}
    base = replace(base, **single)  # type: ignore[arg-type]
    return Search({name or study_name(base): base}, trials, ranges, axes, pruner, seed)


def importance(trials: Trials) -> dict[str, float]:
    """Return how much of the difference between losses each parameter explains, the largest first; empty if unknown.

    By the logarithm of the loss; what diverged counts as the largest that did not.
    """
    whole = [t for t in trials.all(TrialState.COMPLETE) if t.value is not None and t.value > 0]
    finite = [t.value for t in whole if t.value is not None and math.isfinite(t.value)]
    if len(finite) < 4:
        return {}
    worst = max(finite)

    def target(trial: FrozenTrial) -> float:
        value = worst if trial.value is None or not math.isfinite(trial.value) else trial.value
        return math.log10(max(value, 1e-300))

    varied = [n for n in set.intersection(*(set(t.params) for t in whole)) if len({t.params[n] for t in whole}) > 1]
    if not varied:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that low is good is what is meant
            found = optuna.importance.get_param_importances(trials.study, params=sorted(varied), target=target)
    except (RuntimeError, ValueError, ImportError):
        return {}
    return {name.removeprefix(AXIS): float(value) for name, value in found.items()}
