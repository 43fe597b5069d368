"""Searches besides the paper's grid: TPE proposals, pruning by successive halving, and parameter importance."""

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
# Prefix of an axis's parameter in Optuna.
AXIS = "axis:"


@dataclass(frozen=True)
class Search:
    """How settings are proposed and trials pruned; plain data, so that it can be sent to worker processes.

    Attributes:
        base: The common settings, by the name of the study.
        trials: The final number of trials per study; 0 proposes none.
        ranges: Smallest and largest learning rate and damping to propose, log-uniformly.
        axes: Other settings and options, each with its values.
        pruner: ``"median"`` or ``"asha"``.
        seed: Seed of the proposals.
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
            # Without the constant liar, workers that ask at the same time get the same proposal. Each worker has its
            # own random numbers, and new ones when the search is resumed.
            drawn = f"{self.seed} {len(trials.all())} {multiprocessing.current_process().name}"
            seed = random.Random(drawn).randrange(2**32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
            trials.study.sampler = sampler
        if self.pruner == "asha":
            trials.study.pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return what is varied, as Optuna's distributions."""
        found: dict[str, BaseDistribution] = {
            n: FloatDistribution(*bounds, log=True) for n, bounds in self.ranges.items()
        }
        for name, values in self.axes.items():
            found[AXIS + name] = CategoricalDistribution([value if _plain(value) else str(value) for value in values])
        return found

    def ask(self, trials: Trials) -> optuna.Trial | None:
        """Return a new trial with a proposed setting, claimed by this process; ``None`` if there are enough."""
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
    """Return a search between the smallest and largest of the given values.

    Raises:
        LabError: If there is nothing to vary, or ``trials`` is not positive.
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
    """Return the importance of each parameter for the loss, in descending order; empty if unknown.

    It uses the logarithm of the loss; diverged runs count like the worst run that did not diverge.
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
            warnings.simplefilter("ignore")  # Optuna warns about the direction, but low is good here
            found = optuna.importance.get_param_importances(trials.study, params=sorted(varied), target=target)
    except (RuntimeError, ValueError, ImportError):
        return {}
    return {name.removeprefix(AXIS): float(value) for name, value in found.items()}
