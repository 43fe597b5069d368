"""Times steps on an otherwise idle machine, so that runs made in parallel can be plotted over time.

The time of a step does not depend on learning rate and damping. So a few steps of each kind of run are timed, one kind
after another with nothing else running, and written to ``paces.json`` in the folder above the runs. Readers of the runs
count their steps at that pace; the seconds measured while sharing the machine stay in their files.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ekfac import sealed
from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import Dataset, Split, load_dataset
from ekfac.lab.labels import option
from ekfac.lab.registry import LabError
from ekfac.lab.training.runs import Run, machine, versions
from ekfac.lab.training.trainer import Trainer, given

FILE = "paces.json"
# Marks a run whose seconds are counted in this way.
PACED = "paced"
# The number of consecutive steps to time, in three parts, each starting with a refresh. The first part is discarded, as
# graphs are recorded in it. There is no evaluation in between, since steps right after one may take longer.
STEPS = {"cuda": 96, "cpu": 24}
_FIELDS = ("task", "optimizer", "batch_norm", "dataset", "width", "batch_size", "damping_mode", "sua", "dtype")


@dataclass(frozen=True)
class Pace:
    """Seconds per step and per refresh, and the steps between refreshes."""

    step: float
    renewal: float = 0.0
    every: int | None = None

    def seconds(self, steps: int) -> float:
        """Return the seconds of this many steps, the first of which refreshes."""
        renewals = 0 if self.every is None or steps == 0 else (steps - 1) // self.every + 1
        return steps * self.step + renewals * self.renewal


def kind(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that the time of a step depends on."""
    every = option(config, "refresh_every")
    return {**{name: getattr(config, name) for name in _FIELDS}, "refresh_every": every}


def label(config: TrainConfig) -> str:
    """Return the same as one line, as a key."""
    return json.dumps(kind(config), sort_keys=True)


def measure(config: TrainConfig, data: Dataset) -> Pace:
    """Time some consecutive steps of a setting; the machine must be idle otherwise."""
    every = option(config, "refresh_every")
    size = given(config.batch_size)
    steps = min(STEPS.get(str(config.device).split(":")[0], STEPS["cpu"]), len(data.train.x) // size)
    if steps < 1:
        raise LabError(f"batch_size {size} is more than the {len(data.train.x)} training examples of {data.name}")
    part = max(1, steps // 3)
    half, renewed = part // 2, isinstance(every, int)
    own = replace(config, limit=None, epochs=1, refresh_every=part if renewed else config.refresh_every)
    trainer = Trainer(own, replace(data, splits={"train": Split(*(each[: steps * size] for each in data.train))}))
    # The steps at which a part begins, is half over or ends; the host synchronises only there.
    marks = {0, part, part + half, 2 * part, 2 * part + half, 3 * part, steps}
    at = {0: time.perf_counter()}

    def on_step(step: int, _: int) -> None:
        if step in marks:
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            at[step] = time.perf_counter()

    try:
        trainer.train_epoch(on_step)
    finally:
        trainer.close()
    return _pace(at, part, every if renewed else None) if steps >= 6 else Pace(at[steps] / steps - at[0] / steps)


def _pace(at: dict[int, float], part: int, every: int | None) -> Pace:
    """Return the time per step and per refresh, from the times at which the parts began, were half over and ended."""
    if every is None:
        return Pace((at[3 * part] - at[2 * part]) / part)
    half = part // 2
    usual = statistics.fmean(at[start + part] - at[start + half] for start in (part, 2 * part)) / (part - half)
    renewing = statistics.fmean(at[start + half] - at[start] for start in (part, 2 * part))
    return Pace(usual, max(0.0, renewing - half * usual), every)


def measure_all(
    configs: Iterable[TrainConfig],
    folder: str | Path,
    data_dir: str | Path | None = None,
    load: Callable[[str], Dataset] | None = None,
    say: Callable[[str], None] = lambda line: None,
    until: float = math.inf,
    again: bool = False,
) -> dict[str, Pace]:
    """Time every kind of run without a pace in ``folder``, one after another, and return all paces.

    Args:
        configs: The runs, resolved.
        folder: The folder above the runs.
        data_dir: Folder of the data files.
        load: Loads a dataset by name; by default from ``data_dir``.
        say: Called with lines of progress.
        until: Start no further kind after this time.
        again: Time kinds again that already have a pace.
    """
    wanted = {label(config): config for config in configs}
    found = read(folder)
    for name, config in wanted.items():
        if (name in found and not again) or time.time() > until:
            continue
        dataset = given(config.dataset)
        what = f"{config.task}, {config.optimizer}{' + BN' if config.batch_norm else ''}, batch {config.batch_size}"
        data = load(dataset) if load else load_dataset(dataset, data_dir)
        try:
            found[name] = pace = measure(config, data)
        except (RuntimeError, LabError) as error:  # out of memory, for example; its runs then have no seconds
            say(f"alone: {what}: {error}".splitlines()[0])
            continue
        renewals = f", a renewal {1e3 * pace.renewal:.3g} ms" if pace.every else ""
        say(f"alone: {what}: {1e3 * pace.step:.3g} ms a step{renewals}")
        write(folder, found)
    return found


def write(folder: str | Path, paces: dict[str, Pace]) -> None:
    """Write paces to a folder, with the machine they were measured on."""
    rows = [{"kind": json.loads(name), **asdict(pace)} for name, pace in sorted(paces.items())]
    alone = {**machine(), "processes": 1}
    Path(folder).mkdir(parents=True, exist_ok=True)
    content = {"machine": alone, "versions": versions(), "paces": rows}
    sealed.write(Path(folder) / FILE, sealed.dumps(content, indent=1))


def read(folder: str | Path) -> dict[str, Pace]:
    """Return a folder's paces; none if there is no such file.

    Raises:
        LabError: If the file is broken.
    """
    file = Path(folder) / FILE
    if not file.exists():
        return {}
    try:
        content, _ = sealed.loads(file.read_bytes())
        return {
            json.dumps(row["kind"], sort_keys=True): Pace(
                float(row["step"]), float(row["renewal"]), None if row["every"] is None else int(row["every"])
            )
            for row in content["paces"]
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LabError(f"{file} cannot be read: {error}") from error


def apply(run: Run, paces: dict[str, Pace]) -> None:
    """Replace a run's seconds by its steps at the pace of its kind, if known, and mark it as timed."""
    pace = paces.get(label(run.config))
    if pace is None:
        return
    run.history = [{**record, "seconds": pace.seconds(record["step"])} for record in run.history]
    run.about = {**run.about, PACED: True}
    run.timed = True


def apply_all(runs: Sequence[Run]) -> None:
    """Apply paces to all runs whose folder, or the one above it, has some."""
    known: dict[Path, dict[str, Pace]] = {}
    for run in runs:
        if run.path is None:
            continue
        for place in list(run.path.resolve().parents)[:2]:
            if place not in known:
                known[place] = read(place)
            apply(run, known[place])
