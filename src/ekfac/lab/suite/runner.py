"""Makes the runs that are due, serially or in parallel, within a time budget."""

from __future__ import annotations

import concurrent.futures
import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekfac.lab.data.files import DataError, data_folder
from ekfac.lab.optimizers import build_optimizer
from ekfac.lab.registry import LabError
from ekfac.lab.rivals import MissingPackage
from ekfac.lab.search.plan import worker_pool
from ekfac.lab.suite.config import Suite
from ekfac.lab.suite.jobs import Job
from ekfac.lab.suite.records import Record, Records
from ekfac.lab.suite.selection import due, to_time
from ekfac.lab.suite.training import OutOfTime, train

Due = Callable[[Records], list[Job]]
#: A run on a CPU that computes for a smaller fraction of its time is assumed to share the processor.
ALONE = 0.9


@dataclass(frozen=True)
class Outcome:
    """How the command ended.

    Attributes:
        made: The number of runs made.
        failed: How many of them failed, plus tasks whose data are missing.
        left: Runs that are still due; more may follow after them.
    """

    made: int
    failed: int
    left: int


def usable(suite: Suite, say: Callable[[str], None] = print) -> Suite:
    """Return the suite without methods whose package is not installed, and report those.

    Raises:
        LabError: If an optimizer refuses its options, or no method is left.
    """
    kept = []
    for method in suite.methods.values():
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        places: list[tuple[str, Mapping[str, Any]]] = [(f"method {method.name}", {})]
        for task in suite.tasks.values():
            places.append((f"task {task.name}: method {method.name}", task.methods.get(method.name, {})))
        try:
            for where, override in places:
                try:
                    optimizer = build_optimizer(
                        method.optimizer, model, {**method.options, **override.get("options", {})}
                    )
                except MissingPackage:
                    raise
                except LabError as error:
                    raise LabError(f"{where}: {error}") from error
                if hasattr(optimizer, "close"):
                    optimizer.close()
        except MissingPackage as error:
            say(f"left out: {method.name}: {error}")
            continue
        kept.append(method.name)
    if not kept:
        raise LabError("no method of the suite can be run here")
    return suite.selected(methods=kept)


def run(
    suite: Suite,
    records: Records,
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: int = 1,
    budget: float = math.inf,
    timing: bool = False,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Make every run that is due, and record each at its end.

    Args:
        suite: The suite.
        records: Existing records, to which results are added.
        data_dir: Folder of the data files.
        device: Device; by default a GPU if there is one.
        workers: The number of parallel runs. Only runs made alone, on an otherwise idle processor, count as timed.
        budget: Seconds; when they are over, current runs are dropped, and the same command continues later.
        timing: Repeat each method's best run alone, to time it.
        say: Called with one line per run.

    Raises:
        LabError: If an argument is wrong, or a worker died.
    """
    if workers < 1:
        raise LabError(f"workers must be at least 1, not {workers}")
    if not budget > 0:
        raise LabError(f"budget must be positive, not {budget}")
    if timing and workers > 1:
        raise LabError("runs are timed alone: workers must be 1")
    target = _device(device)

    def wanted(found: Records) -> list[Job]:
        return to_time(suite, found.runs, found.timed) if timing else due(suite, found.runs)

    line = _Line(records, wanted, time.time() + budget, workers, say)
    place = data_folder(data_dir)
    if workers == 1:
        while (job := line.take()) is not None:
            line.put(job, attempt(job, place, target, line.deadline))
    else:
        _side_by_side(line, workers, place, target)
    return Outcome(line.made, line.failures, len(wanted(records)))


def _device(name: str | None) -> torch.device:
    try:
        found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        raise LabError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return found


class _Line:
    """The queue of runs: hands out the next one that can finish in time, and records and reports results."""

    def __init__(
        self, records: Records, wanted: Due, deadline: float, workers: int, say: Callable[[str], None]
    ) -> None:
        self.records, self.wanted, self.deadline, self.workers, self.say = records, wanted, deadline, workers, say
        self.away: set[str] = set()
        self.tried: set[str] = set()
        self.without_data: set[str] = set()
        self.made = self.failures = 0

    def take(self) -> Job | None:
        """Return the next run, or ``None`` if there is none at the moment."""
        left = self.deadline - time.time()
        for job in self.wanted(self.records):
            if job.key in self.away | self.tried or job.plan in self.without_data:
                continue
            if self._seconds(job) < left:
                self.away.add(job.key)
                return job
        return None

    def _seconds(self, job: Job) -> float:
        """Guess a run's duration from others of the same task, preferably with the same method."""
        same = [r for r in self.records.runs.values() if r["task"] == job.plan]
        method = [r["wall"] for r in same if r["method"] == job.method]
        return max(method, default=max((r["wall"] for r in same), default=0.0))

    def put(self, job: Job, record: dict[str, Any] | None) -> None:
        """Add a run's record; ``None`` if time ran out."""
        self.away.discard(job.key)
        self.tried.add(job.key)
        if record is None:
            self.say(f"dropped, out of time: {job.key}")
            return
        if record["status"] == "no data":
            if job.plan not in self.without_data:
                self.failures += 1
                self.say(f"left out: task {job.plan}: {record['error']}")
            self.without_data.add(job.plan)
            return
        record |= {
            "task": job.plan,
            "method": job.method,
            "schedule": job.schedule,
            "rate": job.rate,
            "seed": job.seed,
            "timed": self.workers == 1 and not _disturbed(record),
            "workers": self.workers,
            "job": dict(job.settings),
        }
        self.records.add(record)
        self.made += 1
        self.failures += record["status"] == "failed"
        self.say(tell(record) + (_DISTURBED if self.workers == 1 and _disturbed(record) else ""))


_DISTURBED = "; other work took time on the processor, so its own does not count"


def _disturbed(record: Mapping[str, Any]) -> bool:
    """Return whether a run on a CPU had to wait for its processor."""
    computed = record.get("processor")
    return computed is not None and computed < ALONE * record["wall"]


def _side_by_side(line: _Line, workers: int, data_dir: Path, device: torch.device) -> None:
    running: dict[concurrent.futures.Future[dict[str, Any] | None], Job] = {}
    with worker_pool(workers) as pool:
        try:
            while True:
                while len(running) < workers and (job := line.take()) is not None:
                    running[pool.submit(attempt, job, data_dir, device, line.deadline)] = job
                if not running:
                    return
                over, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in over:
                    line.put(running.pop(future), future.result())
        except concurrent.futures.process.BrokenProcessPool:
            raise LabError("a worker process died; run the same command to resume") from None


def attempt(job: Job, data_dir: Path, device: torch.device, deadline: float) -> dict[str, Any] | None:
    """Make one run; return a record of its error if it fails, and ``None`` if the deadline passes.

    If the task's data are missing, none of its runs can be made; this is reported once and not recorded.
    """
    try:
        return train(job, data_dir, device, deadline)
    except OutOfTime:
        return None
    except DataError as error:
        return {"key": job.key, "status": "no data", "error": str(error)}
    except Exception as error:
        # A failing run (out of memory, for example) must not stop the others.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"key": job.key, "status": "failed", "error": reason}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def tell(record: Record) -> str:
    """Describe in one line how a run ended."""
    name = f"{record['task']:<18} {record['method']:<16} {record['schedule']:<9} {record['rate']:<8g} s{record['seed']}"
    if record["status"] == "failed":
        return f"{name}  failed: {record['error']}"
    last = record["history"][-1]
    measures = [f"train {_number(last['train_loss'])}", f"validation {_number(last['validation_loss'])}"]
    if last.get("validation_accuracy") is not None:
        measures.append(f"{last['validation_accuracy']:.2%}")
    return f"{name}  {record['status']}: {', '.join(measures)}; {record['wall']:.1f} s"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
