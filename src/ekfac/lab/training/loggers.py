"""Logs runs to Weights & Biases and MLflow, if their packages are installed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ekfac.lab.labels import key, method
from ekfac.lab.registry import LabError
from ekfac.lab.training.run import Progress
from ekfac.lab.training.runs import Run

PROJECT = "ekfac"


class Several(Progress):
    """Forwards to several displays or loggers."""

    def __init__(self, parts: Sequence[Progress]) -> None:
        self.parts = list(parts)

    def start(self, run: Run) -> None:
        """Pass it on."""
        for part in self.parts:
            part.start(run)

    def step(self, step: int, steps: int) -> None:
        """Pass it on."""
        for part in self.parts:
            part.step(step, steps)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Pass it on."""
        for part in self.parts:
            part.epoch(record)

    def end(self, run: Run) -> None:
        """Pass it on."""
        for part in self.parts:
            part.end(run)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, with the optimizer's under its name."""
    found: dict[str, float] = {}
    for name, value in record.items():
        inner = {f"{name}/{part}": v for part, v in value.items()} if isinstance(value, Mapping) else {name: value}
        found |= {n: float(v) for n, v in inner.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return found


class Wandb(Progress):
    """Logs to Weights & Biases; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self) -> None:
        self._package = _imported("wandb")
        self._run: Any = None

    def start(self, run: Run) -> None:
        """Begin a run of theirs, and log what was done before."""
        self._run = self._package.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=key(run.config),
            group=method(run.config),
            config={**run.config.to_dict(), "parameters": run.about.get("parameters")},
            dir=None if run.path is None else str(run.path),
        )
        for record in run.history:
            self.epoch(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Log an epoch."""
        self._run.log(numbers(record), step=record["epoch"])

    def end(self, run: Run) -> None:
        """Say how it ended."""
        self._run.summary["status"] = run.status
        self._run.finish(exit_code=0 if run.status == "finished" else 1)


class Mlflow(Progress):
    """Logs to MLflow, at MLFLOW_TRACKING_URI."""

    def __init__(self) -> None:
        self._package = _imported("mlflow")

    def start(self, run: Run) -> None:
        """Begin a run of theirs, and log what was done before."""
        self._package.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self._package.start_run(run_name=key(run.config))
        self._package.log_params({name: str(value)[:500] for name, value in run.config.to_dict().items()})
        for record in run.history:
            self.epoch(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Log an epoch."""
        named = {name.replace("/", "."): value for name, value in numbers(record).items()}
        self._package.log_metrics(named, step=record["epoch"])

    def end(self, run: Run) -> None:
        """Say how it ended."""
        self._package.set_tag("status", run.status)
        self._package.end_run("FINISHED" if run.status == "finished" else "FAILED")


LOGGERS: dict[str, type[Progress]] = {"wandb": Wandb, "mlflow": Mlflow}


def with_loggers(names: Sequence[str], progress: Progress) -> Progress:
    """Return a display that forwards to these loggers too.

    Raises:
        LabError: If a name is unknown or its package is not installed.
    """
    for name in names:
        if name not in LOGGERS:
            raise LabError(f"log must be one of {', '.join(LOGGERS)}, not {name!r}")
    return Several([progress, *(LOGGERS[name]() for name in dict.fromkeys(names))]) if names else progress


def _imported(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise LabError(f"--log {name} needs the package {name}: pip install 'ekfac[{name}]'") from None
