"""The suite's results: each method at its best learning rate, targets, and the cost to reach them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ekfac.lab.suite.config import Method, Suite, TaskPlan
from ekfac.lab.suite.profile import first_at
from ekfac.lab.suite.records import Record, Records
from ekfac.lab.suite.selection import Cell, fill, rose, values, worth

SETS = ("cosine", "constant")


@dataclass(frozen=True)
class Result:
    """A method on a task with a schedule, at its best learning rate.

    Attributes:
        task: The task.
        method: The method.
        schedule: The schedule.
        rate: The chosen learning rate.
        edge: Whether it is the lowest or highest of several.
        runs: The runs at that rate, by seed.
        mean: Mean over seeds of the final measure; lower is better.
        error: Its standard error; ``None`` with one seed.
        made: The number of runs at any rate.
        diverged: How many of these had a non-finite loss.
        risen: How many of these diverged or ended above their training loss after the first tenth.
    """

    task: TaskPlan
    method: Method
    schedule: str
    rate: float
    edge: bool
    runs: Mapping[int, Record]
    mean: float
    error: float | None
    made: int
    diverged: int
    risen: int

    @property
    def accurate(self) -> bool:
        """Whether the measure is accuracy."""
        return bool(next(iter(self.runs.values()))["measure"] == "accuracy")

    def reached(self, target: float, what: str = "step") -> float:
        """Return the median over seeds of the steps to a target; infinite if most seeds did not reach it."""
        return statistics.median(reached(run, target, what) for run in self.runs.values())


def reached(run: Record, target: float, what: str) -> float:
    """Return the steps or seconds of a run's first evaluation (after the start) at or below a target."""
    places = [entry[what] for entry in run["history"]]
    return first_at(places[1:], values(run)[1:], target)


def summarise(cell: Cell, suite: Suite) -> Result | None:
    """Return a cell's result, or ``None`` while the learning rate is undecided or runs are missing."""
    rate = cell.chosen(suite.every_rate, suite.seeds[0])
    if rate is None or not cell.runs[rate]:
        return None
    runs = cell.runs[rate]
    found = [worth(run, cell.task.take) for run in runs.values()]
    error = None
    if len(found) > 1 and all(map(math.isfinite, found)):
        error = statistics.stdev(found) / math.sqrt(len(found))
    every = [run for seeds in cell.runs.values() for run in seeds.values()]
    return Result(
        cell.task,
        cell.method,
        cell.schedule,
        rate,
        len(cell.rates) > 1 and not cell.method.fixed and rate in (min(cell.rates), max(cell.rates)),
        runs,
        sum(found) / len(found),
        error,
        len(every),
        sum(run["status"] == "diverged" for run in every),
        sum(rose(run) for run in every),
    )


class Results:
    """All results of one set: every method with the set's schedule, or with its only one.

    Attributes:
        schedule: The set: ``"cosine"`` or ``"constant"``.
        methods: The methods with at least one result.
        table: Results by task and method name.
        targets: By task, the value to reach (lower is better), if the target's method has a result.
        complete: Tasks on which all methods have a result.
    """

    def __init__(self, suite: Suite, records: Records, schedule: str) -> None:
        self.suite, self.schedule, self._timed = suite, schedule, records.timed
        self.table: dict[str, dict[str, Result]] = {name: {} for name in suite.tasks}
        self.targets: dict[str, float] = {}
        for cell in fill(suite, records.runs):
            target = (cell.method.name, cell.schedule) == (suite.target.method, suite.target.schedule)
            shown = cell.schedule == _schedule(cell.method, schedule)
            result = summarise(cell, suite) if target or shown else None
            if result is None:
                continue
            if shown:
                self.table[cell.task.name][cell.method.name] = result
            if target and math.isfinite(result.mean):
                self.targets[cell.task.name] = result.mean * (1 + suite.target.within)
        self.methods = [m for m in suite.methods.values() if any(m.name in row for row in self.table.values())]
        self.complete = [name for name, row in self.table.items() if row and len(row) == len(self.methods)]

    def own(self) -> bool:
        """Return whether the set has results that other sets do not show: those of a method with several schedules.

        It is always true for the set of the target's schedule.
        """
        if self.schedule == self.suite.target.schedule:
            return bool(self.methods)
        found = [result for row in self.table.values() for result in row.values()]
        return any(r.schedule == self.schedule and len(r.method.schedules) > 1 for r in found)

    def steps(self) -> tuple[list[str], dict[str, list[float]]]:
        """Return the tasks with a target and all methods, and the steps to it by method."""
        tasks = [name for name in self.complete if name in self.targets]
        return tasks, {m.name: [self.table[t][m.name].reached(self.targets[t]) for t in tasks] for m in self.methods}

    def seconds(self) -> tuple[list[str], dict[str, list[float]]]:
        """Return the tasks on which every method was also run alone, and the seconds to the target by method."""
        found: dict[str, dict[str, float]] = {}
        for task in (name for name in self.complete if name in self.targets):
            for method in self.methods:
                run = self._alone(self.table[task][method.name])
                if run is not None:
                    found.setdefault(task, {})[method.name] = reached(run, self.targets[task], "seconds")
        tasks = [task for task, row in found.items() if len(row) == len(self.methods)]
        return tasks, {m.name: [found[t][m.name] for t in tasks] for m in self.methods}

    def _alone(self, result: Result) -> Record | None:
        """Return a result's timed run, of the first seed that has one."""
        keys = [run["key"] for run in result.runs.values()]
        return next((self._timed[key] for key in keys if key in self._timed), None)


def _schedule(method: Method, wanted: str) -> str | None:
    """Return a method's schedule in a set: the set's, else its only one."""
    if wanted in method.schedules or not method.schedules:
        return wanted
    return method.schedules[0]


@dataclass(frozen=True)
class Standing:
    """How one of our methods compares with the best rival, task by task.

    Attributes:
        ahead: Tasks on which it is ahead of every rival.
        level: Tasks on which it is behind by no more than one standard error of the best rival's mean.
        behind: The other tasks.
        worst: Tasks on which every rival is ahead of it.
    """

    ahead: Sequence[str]
    level: Sequence[str]
    behind: Sequence[str]
    worst: Sequence[str]


def standing(results: Results, name: str) -> Standing:
    """Compare a method with the best rival, on every task that both it and a rival have run."""
    ahead, level, behind, worst = [], [], [], []
    for task, row in results.table.items():
        rivals = [result for method, result in row.items() if not results.suite.methods[method].ours]
        if not rivals or name not in row:
            continue
        mine, best = row[name].mean, min(rivals, key=lambda result: result.mean)
        if mine < best.mean:
            ahead.append(task)
        elif mine <= best.mean + (best.error or 0.0):
            level.append(task)
        else:
            behind.append(task)
        if mine > max(result.mean for result in rivals) or mine == math.inf:
            worst.append(task)
    return Standing(ahead, level, behind, worst)
