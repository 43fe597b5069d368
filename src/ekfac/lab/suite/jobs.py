"""One run of the suite as plain data, with the key that identifies it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ekfac.lab.suite.config import Method, Suite, TaskPlan


@dataclass(frozen=True)
class Job:
    """One run: everything that determines its result, and nothing else.

    Attributes:
        plan: The task's name in the configuration.
        method: The method's name in the configuration.
        schedule: ``"own"``, ``"cosine"`` or ``"constant"``.
        rate: The learning rate, or the multiple of the optimizer's default, as in the configuration.
        seed: The seed.
        settings: Everything else, as plain data.
    """

    plan: str
    method: str
    schedule: str
    rate: float
    seed: int
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A readable name, the same on every machine and unique to the run."""
        data = [self.plan, self.method, self.schedule, self.rate, self.seed, self.settings]
        digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.plan}/{self.method}/{self.schedule}/{self.rate:g}/s{self.seed}/{digest}"


def make_job(suite: Suite, task: TaskPlan, method: Method, schedule: str, rate: float, seed: int) -> Job:
    """Return the job of one task with one method, schedule, learning rate and seed."""
    options = {**method.options, **task.methods.get(method.name, {}).get("options", {})}
    if method.decay is not None:
        options["weight_decay"] = method.decay * task.weight_decay
    if not method.relative:
        options["lr"] = rate
    settings = {
        "task": task.task,
        "settings": dict(task.settings),
        "steps": task.steps,
        "epochs": task.epochs,
        "warmup": task.warmup,
        "end": task.end,
        "clip": task.clip,
        "decay_vectors": task.decay_vectors or method.decay is None,
        "take": task.take,
        "optimizer": method.optimizer,
        "options": options,
        "lr_factor": rate if method.relative else 1.0,
        "evaluations": suite.evaluations,
    }
    return Job(task.name, method.name, schedule, rate, seed, settings)


def rates(task: TaskPlan, method: Method) -> tuple[float, ...]:
    """Return the learning rates of a method on a task."""
    return tuple(task.methods.get(method.name, {}).get("lr", method.lr))


def cells(suite: Suite) -> Iterator[tuple[TaskPlan, Method, str]]:
    """Yield every task with every method and schedule."""
    for task in suite.tasks.values():
        for method in suite.methods.values():
            for schedule in method.schedules:
                yield task, method, schedule


def factor(schedule: str, step: int, steps: int, warmup: int, end: float) -> float:
    """Return the factor of the learning rate at a step, counted from 0.

    It is a linear warm-up, then a cosine to the fraction ``end``, or constant; for ``"own"`` it is always 1.
    """
    if schedule == "own":
        return 1.0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, steps - warmup)
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
