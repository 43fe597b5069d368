"""One run: trains a task with a method for its full length, with evaluations on the way."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekfac.lab.optimizers import Trains, build_optimizer
from ekfac.lab.suite.jobs import Job, factor
from ekfac.lab.suite.tasks import TASKS, Context, Problem
from ekfac.lab.training.runs import machine, versions

FORMAT = 1
# The number of batches to recompute batch-norm's statistics after weights were replaced by their average; for small
# data, four passes.
CALIBRATION = 50


class OutOfTime(Exception):
    """The deadline of a run has passed; its results are dropped."""


def train(job: Job, data_dir: Path, device: torch.device, deadline: float = math.inf) -> dict[str, Any]:
    """Make one run.

    Args:
        job: The job.
        data_dir: Folder of the data files.
        device: Device to train on.
        deadline: When to give up, in seconds since the epoch.

    Returns:
        Its record, as plain data: ``status`` is ``"finished"`` or ``"diverged"``; ``history`` has the measures at
        evenly spaced steps, with the seconds of training so far (without evaluations). ``wall`` is the total time, and
        ``processor``, on a CPU, the processor time of all threads.

    Raises:
        OutOfTime: If the deadline passes.
    """
    began, computed = time.monotonic(), time.process_time()
    settings = job.settings
    problem = TASKS.get(settings["task"])(Context(data_dir, device, job.seed), **settings["settings"])
    steps = settings["steps"] or max(1, round(settings["epochs"] * _epoch(problem, settings["task"])))
    optimizer = build_optimizer(settings["optimizer"], problem.model, settings["options"])
    scale_rate(optimizer, settings["lr_factor"])
    if not settings["decay_vectors"]:
        spare_vectors(optimizer)
    try:
        history, finite = _loop(job, problem, optimizer, steps, deadline)
        stats: dict[str, float] = optimizer.stats() if finite and hasattr(optimizer, "stats") else {}
    finally:
        if hasattr(optimizer, "close"):
            optimizer.close()
    return {
        "format": FORMAT,
        "key": job.key,
        "status": "finished" if finite else "diverged",
        "measure": problem.measure,
        "steps": steps,
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "history": history,
        "stats": {name: value for name, value in stats.items() if math.isfinite(value)},
        "wall": round(time.monotonic() - began, 3),
        "processor": round(time.process_time() - computed, 3) if device.type == "cpu" else None,
        "versions": versions(),
        "machine": machine(),
    }


def scale_rate(optimizer: Trains, times: float) -> None:
    """Multiply an optimizer's default lr.

    The groups' lr and the default change together, because an lr that differs from the default would turn off the
    optimizer's built-in schedule.
    """
    for holder in (*optimizer.param_groups, getattr(optimizer, "defaults", {})):
        if "lr" in holder:
            holder["lr"] = holder["lr"] * times


def _epoch(problem: Problem, task: str) -> int:
    if problem.epoch is None:
        raise ValueError(f"task {task} has no epochs: set steps")
    return problem.epoch


def _loop(
    job: Job, problem: Problem, optimizer: Trains, steps: int, deadline: float
) -> tuple[list[dict[str, Any]], bool]:
    """Train; return the measures and whether all of them are finite."""
    settings, model, device = job.settings, problem.model, problem.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    base = [group["lr"] for group in optimizer.param_groups]
    if job.schedule != "own":
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["initial_lr"] = lr  # set by torch's schedulers; marks this lr as scheduled
    count = settings["evaluations"]
    due = {round(part * steps / count) for part in range(1, count + 1)}
    batches = problem.batches(job.seed)
    # Dropout's random numbers must not depend on how many were drawn to build the network.
    torch.manual_seed(job.seed + 1)
    history: list[dict[str, Any]] = [{"step": 0, "seconds": 0.0, **_measured(problem, optimizer)}]
    total, seen = torch.zeros((), device=device), 0
    seconds, start = 0.0, _now(device)
    model.train()
    for step, batch in zip(range(steps), batches, strict=False):
        if time.time() > deadline:
            raise OutOfTime(job.key)
        if job.schedule != "own":
            fraction = factor(job.schedule, step, steps, settings["warmup"], settings["end"])
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * fraction
        optimizer.zero_grad()
        loss = problem.loss(batch)
        loss.backward()
        if settings["clip"] is not None:
            nn.utils.clip_grad_norm_(parameters, settings["clip"])
        optimizer.step()
        total += loss.detach()
        seen += 1
        if step + 1 in due:
            seconds += _now(device) - start
            entry: dict[str, Any] = {"step": step + 1, "seconds": round(seconds, 4), "batch_loss": total.item() / seen}
            entry |= _measured(problem, optimizer)
            if not all(math.isfinite(value) for value in entry.values()):
                history.append({name: value if math.isfinite(value) else None for name, value in entry.items()})
                return history, False
            history.append(entry)
            total, seen, start = torch.zeros_like(total), 0, _now(device)
    return history, True


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _measured(problem: Problem, optimizer: Trains) -> dict[str, float]:
    with averaged(problem, optimizer):
        return problem.evaluate()


@contextlib.contextmanager
def averaged(problem: Problem, optimizer: Trains) -> Iterator[None]:
    """Switch the network to the weights to evaluate: for a schedule-free optimizer, their average.

    Batch-norm's running statistics belong to other weights then, so they are recomputed from training batches.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    optimizer.eval()
    norms = [m for m in problem.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms and any(optimizer.state.values()):  # type: ignore[attr-defined]
        problem.model.train()
        with torch.no_grad():
            count = min(CALIBRATION, 4 * (problem.epoch or CALIBRATION))
            for batch in itertools.islice(problem.batches(problem.seed + 100_000), count):
                problem.loss(batch)
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]


def spare_vectors(optimizer: Trains) -> None:
    """Turn off weight decay for biases and norms, by splitting each group into its matrices and the rest."""
    parts: list[Any] = getattr(optimizer, "optimizers", [optimizer])
    for part in parts:
        for group in list(part.param_groups):
            vectors = [index for index, p in enumerate(group["params"]) if p.ndim < 2]
            matrices = [index for index, p in enumerate(group["params"]) if p.ndim >= 2]
            lists = {name: group[name] for name in ("params", "param_names") if name in group}
            if not group.get("weight_decay") or not vectors:
                continue
            if not matrices:
                group["weight_decay"] = 0.0
                continue
            spared = {name: [values[index] for index in vectors] for name, values in lists.items()}
            part.param_groups.append({**group, **spared, "weight_decay": 0.0})
            group.update({name: [values[index] for index in matrices] for name, values in lists.items()})
