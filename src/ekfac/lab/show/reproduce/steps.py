"""From a name to a verdict: choose a level that fits the budget, run, draw, judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ekfac import sealed
from ekfac.lab.config import TrainConfig
from ekfac.lab.data.files import DataError
from ekfac.lab.labels import counted
from ekfac.lab.registry import LabError
from ekfac.lab.search.cifar import Program
from ekfac.lab.search.space import unique
from ekfac.lab.show.duration import duration
from ekfac.lab.show.evidence.record import MISSING
from ekfac.lab.show.figures import make
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.show.reproduce import cost
from ekfac.lab.show.reproduce.catalogue import EXPERIMENTS, Experiment
from ekfac.lab.show.reproduce.claims import Fresh
from ekfac.lab.training.runs import Run

FILE = "reproduce.json"
# With fewer epochs than this, a method that is slow at first cannot be judged.
LEAST_EPOCHS = 2


@dataclass(frozen=True)
class Plan:
    """The runs to make, and an estimate of their time here.

    Attributes:
        name: The experiment.
        level: ``full``, ``grid``, ``known``, ``short`` (as known, with fewer epochs) or ``quick``; ``search`` for
            successive halving, ``recorded`` for existing runs, ``computed`` if nothing is trained.
        configs: The runs.
        seconds: An estimate of their total time if run serially here.
        why: Why this level was chosen, in words.
    """

    name: str
    level: str
    configs: tuple[TrainConfig, ...]
    seconds: float
    why: str

    @property
    def experiment(self) -> Experiment:
        """The experiment."""
        return EXPERIMENTS.get(self.name)

    def text(self) -> str:
        """Describe the plan in a few lines."""
        if self.level == "computed":
            return f"{self.name} ({self.experiment.where}): computed on the spot, nothing is trained"
        if self.level == "search":
            return f"{self.name} ({self.experiment.where}), level search: {duration(self.seconds)}\n{self.why}"
        epochs = sorted({config.epochs or 0 for config in self.configs})
        spans = f"{epochs[0]} to {epochs[-1]}" if len(epochs) > 1 else f"{epochs[0]}"
        return (
            f"{self.name} ({self.experiment.where}), level {self.level}: {counted(len(self.configs), 'run')} "
            f"of {spans} epochs, about {duration(self.seconds)} here, one at a time\n{self.why}"
        )


@dataclass(frozen=True)
class Result:
    """The result: the figure's files, what it lacks, and a verdict for each claim."""

    plan: Plan
    files: tuple[Path, ...]
    lacks: tuple[str, ...]
    verdicts: tuple[tuple[str, str, str], ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "name": self.plan.name,
            "level": self.plan.level,
            "runs": len(self.plan.configs),
            "estimated_seconds": self.plan.seconds,
            "training_seconds": self.seconds,
            "files": [str(file) for file in self.files],
            "lacks": list(self.lacks),
            "claims": [{"claim": c, "verdict": v, "numbers": n} for c, v, n in self.verdicts],
        }


def make_plan(
    name: str,
    *,
    level: str | None = None,
    budget: float | None = None,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Choose what to run.

    Args:
        name: An experiment of the catalogue.
        level: The level; chosen by the budget if not given.
        budget: Seconds; the most thorough level that fits is chosen, if necessary with fewer epochs. Without a budget,
            it is ``known``.
        data_dir: Folder of the data files.
        say: Called with lines of progress.

    Raises:
        LabError: If a name is unknown, the data are missing, or nothing fits the budget.
    """
    experiment = EXPERIMENTS.get(name)
    if not experiment.levels:
        return Plan(name, "computed", (), 0.0, "")
    if level is not None:
        if level not in experiment.levels:
            raise LabError(f"level must be one of {', '.join(experiment.levels)} for {name}, not {level!r}")
        return _costed(name, level, experiment.settings(level), data_dir, say, "The level was asked for.")
    if budget is None:
        words = "Each method at its known setting; --level full is the paper's whole search, --budget sets a limit."
        return _costed(name, "known", experiment.settings("known"), data_dir, say, words)
    if experiment.halving:
        return Plan(name, "search", (), budget, _halving(name, budget))
    return _fitted(name, experiment, budget, data_dir, say)


def _halving(name: str, budget: float) -> str:
    """Describe what a search by successive halving does with its time."""
    sizes = Program([name], budget).sizes
    words = [
        f"{task}: {size.tries} settings a method at most, finals of {size.epochs[-1]} epochs, "
        f"{counted(size.seeds, 'seed')}"
        for task, size in sizes.items()
        if name in (task, "schedule", "batch-size")
    ]
    return "As much as the time allows, the most important first.\n" + "\n".join(words)


def _fitted(
    name: str, experiment: Experiment, budget: float, data_dir: str | Path | None, say: Callable[[str], None]
) -> Plan:
    limit = duration(budget)

    def plan_of(level: str, why: str = f"The most that fits {limit}.") -> Plan:
        return _costed(name, level, experiment.settings(level), data_dir, say, why)

    # From the known settings upwards: if one level does not fit, larger ones do not either.
    plan, fits = plan_of("known"), None
    for level in ("known", "grid", "full"):
        if level in experiment.levels:
            plan = plan if level == "known" else plan_of(level)
            if plan.seconds > budget:
                break
            fits = plan
    if fits is not None:
        return fits
    most = max(config.epochs or 0 for config in plan.configs)
    epochs = int(most * budget / plan.seconds)
    if epochs >= LEAST_EPOCHS:
        shorter = [replace(config, epochs=min(config.epochs or epochs, epochs)) for config in plan.configs]
        why = f"{duration(plan.seconds)} would be needed for {most} epochs; {epochs} fit {limit}."
        return _costed(name, "short", unique(shorter), data_dir, say, why)
    if "quick" in experiment.levels:
        plan = plan_of("quick", f"Only small runs fit {limit}.")
        if plan.seconds <= budget:
            return plan
    raise LabError(f"budget {limit} is too small for {name}: its smallest level takes {duration(plan.seconds)}")


def _costed(
    name: str,
    level: str,
    configs: Sequence[TrainConfig],
    data_dir: str | Path | None,
    say: Callable[[str], None],
    why: str,
) -> Plan:
    try:
        seconds = sum(cost.seconds_of(configs, data_dir, say))
    except DataError as error:
        if "quick" in EXPERIMENTS.get(name).levels and level != "quick":
            raise DataError(f"{error}. Small runs need no files: --level quick") from error
        raise
    return Plan(name, level, tuple(configs), seconds, why)


def finish(
    plan: Plan,
    runs: Sequence[Run],
    out: str | Path,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Draw the figure and judge the claims, and write both to ``out``; ``say`` receives lines of progress."""
    folder = Path(out)
    experiment = plan.experiment
    measures = folder / "measures.json"
    small = plan.level == "quick"
    dataset = "mnist" if experiment.dataset == "mnist" and not small else "mnist-5k"
    # One picture per batch size, if the figure shows a single one.
    sizes: list[int | None] = [None]
    if experiment.figure == "autoencoder":
        sizes = sorted({run.config.batch_size or 0 for run in runs})  # type: ignore[assignment]
    files: list[Path] = []
    lacks: list[str] = []
    for size in sizes:
        own = [run for run in runs if size in (None, run.config.batch_size)]
        suffix = "" if size is None or len(sizes) == 1 else f"-{size}"
        (made,) = make(
            [experiment.figure],
            folder,
            runs=own,
            small=small,
            dataset=dataset,
            data_dir=data_dir,
            measures=measures,
            suffix=suffix,
            say=say,
        )
        files += made.files
        lacks += [part for part in made.lacks if part not in lacks]
    record = Fresh(runs, Measures(measures if measures.exists() else None, quick=small), folder)
    verdicts = []
    for claim in experiment.claims:
        verdict, _, numbers = claim.judge(record).partition(" | ")
        answer = "not judged: the runs for it are not there" if verdict == MISSING else verdict.strip("* ")
        verdicts.append((claim.text, answer, numbers))
    seconds = sum(run.history[-1]["seconds"] for run in runs if run.history)
    result = Result(plan, tuple(files), tuple(lacks), tuple(verdicts), seconds)
    sealed.write(folder / FILE, sealed.dumps(result.to_dict(), indent=2))
    return result


def keep(plan: Plan, out: str | Path) -> None:
    """Store a plan, so that the same command continues with it."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{n: v for n, v in config.to_dict().items() if n != "device"} for config in plan.configs]
    content = {"name": plan.name, "level": plan.level, "seconds": plan.seconds, "why": plan.why, "configs": rows}
    sealed.write(folder / "plan.json", sealed.dumps(content))


def kept(name: str, out: str | Path) -> Plan | None:
    """Return the plan stored in a folder; ``None`` if there is none.

    Raises:
        LabError: If it is broken, or of another experiment.
    """
    file = Path(out) / "plan.json"
    if not file.exists():
        return None
    try:
        data, _ = sealed.loads(file.read_bytes())
        configs = tuple(TrainConfig.from_dict(row).resolved() for row in data["configs"])
        plan = Plan(str(data["name"]), str(data["level"]), configs, float(data["seconds"]), str(data["why"]))
    except (OSError, ValueError, LookupError, TypeError, json.JSONDecodeError) as error:
        raise LabError(f"{file} cannot be read: {error}") from error
    if plan.name != name:
        raise LabError(f"{out} holds the reproduction of {plan.name}, not of {name}; name another folder with --out")
    return plan
