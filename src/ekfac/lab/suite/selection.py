"""Measures of runs, the choice of each method's learning rate, and which runs are still to be made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ekfac.lab.suite.config import Method, Suite, TaskPlan
from ekfac.lab.suite.jobs import Job, cells, make_job, rates
from ekfac.lab.suite.records import Record


def values(record: Record) -> list[float]:
    """Return a run's validation measure at each evaluation, the loss or the error rate; lower is better."""
    accurate = record["measure"] == "accuracy"
    found = []
    for entry in record["history"]:
        value = entry.get("validation_accuracy" if accurate else "validation_loss")
        found.append(math.inf if value is None else 1 - value if accurate else value)
    return found


def worth(record: Record, take: str) -> float:
    """Return a run's measure at its last or its best evaluation; lower is better, infinite if it diverged."""
    if record["status"] != "finished":
        return math.inf
    found = values(record)
    return min(found[1:]) if take == "best" else found[-1]


def rose(record: Record) -> bool:
    """Return whether a run diverged, or ended above its training loss after the first tenth."""
    if record["status"] != "finished":
        return True
    tenth = next(entry for entry in record["history"] if entry["step"] >= record["steps"] / 10)
    return bool(record["history"][-1]["train_loss"] > tenth["train_loss"])


@dataclass
class Cell:
    """All runs of a method on a task with a schedule.

    Attributes:
        task: The task.
        method: The method.
        schedule: The schedule.
        jobs: The jobs, by learning rate and seed.
        runs: The finished runs, likewise.
    """

    task: TaskPlan
    method: Method
    schedule: str
    jobs: Mapping[float, Mapping[int, Job]]
    runs: Mapping[float, Mapping[int, Record]] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        """The learning rates, in the order of the configuration."""
        return list(self.jobs)

    def chosen(self, every_rate: bool, first: int) -> float | None:
        """Return the best learning rate, on the first seed or on the mean of all seeds.

        It is ``None`` while a run needed to decide is missing, and the lowest rate if all diverged.
        """
        if self.method.fixed:
            return self.rates[0]
        found = {}
        for rate, jobs in self.jobs.items():
            deciding = list(jobs) if every_rate else [first]
            runs = self.runs.get(rate, {})
            if any(seed not in runs for seed in deciding):
                return None
            found[rate] = sum(worth(runs[seed], self.task.take) for seed in deciding) / len(deciding)
        if not any(math.isfinite(value) for value in found.values()):
            return min(found)
        return min(found, key=lambda rate: found[rate])


def fill(suite: Suite, runs: Mapping[str, Record]) -> list[Cell]:
    """Return every cell of the suite with its runs."""
    found = []
    for task, method, schedule in cells(suite):
        jobs = {
            rate: {seed: make_job(suite, task, method, schedule, rate, seed) for seed in suite.seeds}
            for rate in rates(task, method)
        }
        done = {
            rate: {seed: runs[job.key] for seed, job in seeds.items() if job.key in runs}
            for rate, seeds in jobs.items()
        }
        found.append(Cell(task, method, schedule, jobs, done))
    return found


def due(suite: Suite, runs: Mapping[str, Record]) -> list[Job]:
    """Return the runs that are still to be made, as far as known now.

    Unless every learning rate is run with every seed, each is run with the first, and the best one with the others.
    """
    found = []
    for cell in fill(suite, runs):
        for rate, jobs in cell.jobs.items():
            for seed, job in jobs.items():
                wanted = suite.every_rate or cell.method.fixed or seed == suite.seeds[0]
                if not wanted:
                    wanted = cell.chosen(False, suite.seeds[0]) == rate
                if wanted and seed not in cell.runs[rate]:
                    found.append(job)
    return found


def to_time(suite: Suite, runs: Mapping[str, Record], timed: Mapping[str, Record]) -> list[Job]:
    """Return the runs to repeat alone for timing: each method's best rate with the first seed."""
    found = []
    for cell in fill(suite, runs):
        rate = cell.chosen(suite.every_rate, suite.seeds[0])
        if rate is not None:
            job = cell.jobs[rate][suite.seeds[0]]
            if job.key in runs and job.key not in timed:
                found.append(job)
    return found
