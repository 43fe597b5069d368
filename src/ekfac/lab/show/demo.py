"""The demo: optimizers train one network on the bundled digits, each for the same time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import Dataset, load_dataset
from ekfac.lab.training.run import about
from ekfac.lab.training.runs import Run, RunFolder
from ekfac.lab.training.trainer import Trainer, given

# Without batch-norm, which would make the network easier to train; --batch-norm adds it for Adam.
_DEEP = {
    "SGD": TrainConfig("deep", "sgd", lr=0.1),
    "Adam": TrainConfig("deep", "adam", lr=1e-2),
    "EKFAC": TrainConfig("deep", "ekfac-default"),
}
_DEEP_RATES = (
    "Adam's rate is the best of 0.003, 0.01 and 0.03 by training loss after 15 s of one core with seed 0. "
    "SGD leaves the plateau neither with 0.1 nor with 0.5."
)
# A quarter of the paper's width, so that each takes some hundred steps in this time on two CPU cores.
WIDTH = 250
_PAPER = {
    "SGD + BN": TrainConfig("autoencoder", "sgd", batch_norm=True, width=WIDTH, lr=0.01),
    "Adam + BN": TrainConfig("autoencoder", "adam", batch_norm=True, width=WIDTH, lr=3e-3),
    "KFAC": TrainConfig("autoencoder", "kfac", width=WIDTH, lr=0.1, damping=0.1, refresh_every=10),
    "EKFAC": TrainConfig("autoencoder", "ekfac", width=WIDTH, lr=0.01, damping=3e-3, refresh_every=10),
    "EKFAC-ra": TrainConfig("autoencoder", "ekfac-ra", width=WIDTH, lr=0.03, damping=1e-3, refresh_every=10),
    "EKFAC (defaults)": TrainConfig("autoencoder", "ekfac-default", width=WIDTH),
}


@dataclass(frozen=True)
class Race:
    """A network on real digits, and the optimizers that train it.

    Attributes:
        title: A description.
        entrants: Settings by name.
        seconds: Default training time for each.
        rates: How the settings were chosen.
        threads: CPU threads; ``None`` for torch's default.
    """

    title: str
    entrants: Mapping[str, TrainConfig]
    seconds: float
    rates: str = ""
    threads: int | None = None


RACES = {
    "deep": Race(
        "eight sigmoid layers, no batch-norm, 4,000 digits, batch 500, one thread", _DEEP, 15.0, _DEEP_RATES, 1
    ),
    "autoencoder": Race(f"the paper's auto-encoder at width {WIDTH}, 4,000 digits, batch 200", _PAPER, 20.0),
}
FIRST = "deep"
#: A race that got less than this fraction of a core is reported to have run on a busy machine.
BUSY = 0.7


@dataclass(frozen=True)
class Standing:
    """One optimizer's result: its loss minus the floor where all are compared, and its rank."""

    name: str
    status: str
    steps: int
    milliseconds: float
    loss_by_step: float | None
    loss_by_time: float | None
    place_by_step: int | None
    place_by_time: int | None


@dataclass(frozen=True)
class Verdict:
    """The ranking after the same number of steps, and after the same time."""

    steps: int
    seconds: float
    standings: list[Standing]


def race(
    entrants: Mapping[str, TrainConfig],
    seconds: float,
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    seed: int = 0,
    max_epochs: int = 10_000,
    threads: int | None = None,
    on_epoch: Callable[[str, Run], None] = lambda name, run: None,
) -> dict[str, Run]:
    """Train each entrant for the same time, always continuing with the one that has had least.

    Args:
        entrants: Settings by name.
        seconds: Training time for each, without evaluation.
        out: Folder in which each entrant gets its own run folder.
        data_dir: Folder of the data files.
        seed: Seed of all entrants.
        max_epochs: End an entrant after this many epochs even if time is left.
        threads: CPU threads during the race: layers of 50 units gain nothing from two, and lose much on a busy machine.
        on_epoch: Called after each epoch of each entrant.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _race(entrants, seconds, out, data_dir, seed, max_epochs, on_epoch)
    finally:
        torch.set_num_threads(before)


def _race(
    entrants: Mapping[str, TrainConfig],
    seconds: float,
    out: str | Path | None,
    data_dir: str | Path | None,
    seed: int,
    max_epochs: int,
    on_epoch: Callable[[str, Run], None],
) -> dict[str, Run]:
    trainers: dict[str, Trainer] = {}
    data: dict[str, Dataset] = {}
    runs: dict[str, Run] = {}
    folders: dict[str, RunFolder] = {}
    for name, given_config in entrants.items():
        config = replace(given_config, seed=seed, epochs=max_epochs).resolved()
        dataset = given(config.dataset)
        data[dataset] = data.get(dataset) or load_dataset(dataset, data_dir)
        trainers[name] = Trainer(config, data[dataset])
        runs[name] = Run(config, about={**about(config, trainers[name], data_dir), "race_seconds": seconds})
        if out is not None:
            runs[name].path = path = Path(out) / re.sub(r"[^a-z0-9+-]", "", name.lower().replace(" (", "-"))
            folders[name] = RunFolder(path)
            folders[name].clear()
            folders[name].start(config, runs[name].about, [])
        _add(name, trainers[name].initial_record(), runs, folders)
        on_epoch(name, runs[name])
    racing = [name for name in trainers if not runs[name].history[-1]["diverged"]]
    try:
        while racing:
            name = min(racing, key=lambda candidate: trainers[candidate].seconds)
            record = trainers[name].train_epoch()
            _add(name, record, runs, folders)
            if record["diverged"] or record["seconds"] >= seconds or record["epoch"] >= max_epochs:
                racing.remove(name)
                runs[name].status = "diverged" if record["diverged"] else "finished"
                trainers[name].close()
            on_epoch(name, runs[name])
    finally:
        for name, folder in folders.items():
            _settle(runs[name], folder)
    return runs


def _settle(run: Run, folder: RunFolder) -> None:
    """Record a run with the number of epochs that it had time for, so that it can be repeated."""
    run.config = replace(run.config, epochs=max(1, run.history[-1]["epoch"]))
    run.about["command"] = run.config.command()
    folder.write_config(run.config, run.about)
    folder.close()


def _add(name: str, record: dict[str, Any], runs: Mapping[str, Run], folders: Mapping[str, RunFolder]) -> None:
    runs[name].history.append(record)
    if name in folders:
        folders[name].add(record)


def what_was_set(entrants: Mapping[str, TrainConfig]) -> str:
    """Describe what was set for each; everything else is the optimizer's default."""
    names = ("lr", "damping", "refresh_every")
    said = []
    for name, config in entrants.items():
        values = [f"{one.replace('_', ' ')} {value:g}" for one in names if (value := getattr(config, one)) is not None]
        values += [f"{one} {value}" for one, value in config.options.items()]
        said.append(f"{name}: {', '.join(values) or 'defaults'}")
    return f"Settings: {'; '.join(said)}."


def busy(wall: float, cpu: float) -> str:
    """Return a warning if the machine was busy, as seconds are then not comparable."""
    if cpu >= BUSY * wall:
        return ""
    return f"The machine was busy: this had a core for {cpu:.0f} of {wall:.0f} s. Run it again when it is idle."


def points(run: Run, x: str) -> list[tuple[float, float]]:
    """Return a run's curve: ``x`` ("step" or "seconds") against the training loss minus its floor."""
    floor = run.about["floor"].get("train", 0.0)
    return [(r[x], r["train_loss"] - floor) for r in run.history if r["train_loss"] is not None]


def verdict(runs: Mapping[str, Run]) -> Verdict:
    """Compare at the largest number of steps, and at the longest time, that all reached which did not diverge."""
    whole = [run for run in runs.values() if run.status != "diverged"] or list(runs.values())
    steps = min(run.history[-1]["step"] for run in whole)
    seconds = min(run.history[-1]["seconds"] for run in whole)
    by_step = {name: _at(run, "step", steps) for name, run in runs.items()}
    by_time = {name: _at(run, "seconds", seconds) for name, run in runs.items()}
    places = [_places(by_step), _places(by_time)]
    standings = [
        Standing(
            name,
            run.status,
            run.history[-1]["step"],
            1000 * run.history[-1]["seconds"] / max(1, run.history[-1]["step"]),
            by_step[name],
            by_time[name],
            places[0].get(name),
            places[1].get(name),
        )
        for name, run in runs.items()
    ]
    return Verdict(steps, seconds, standings)


def _at(run: Run, x: str, where: float) -> float | None:
    """Return the loss minus its floor at the last record not after ``where``."""
    if run.status == "diverged":
        return None
    return [loss for position, loss in points(run, x) if position <= where][-1]


def _places(losses: Mapping[str, float | None]) -> dict[str, int]:
    ordered: Sequence[tuple[float, str]] = sorted((loss, name) for name, loss in losses.items() if loss is not None)
    return {name: place + 1 for place, (_, name) in enumerate(ordered)}


def sentence(result: Verdict) -> str:
    """Describe the ranking in words."""
    first_by_step = [s.name for s in result.standings if s.place_by_step == 1]
    first_by_time = [s.name for s in result.standings if s.place_by_time == 1]
    if not first_by_step or not first_by_time:
        return "Every optimizer diverged."
    ahead = f"After {result.steps} steps {first_by_step[0]} is ahead; after {result.seconds:.0f} s of training "
    return ahead + ("it is still ahead." if first_by_step == first_by_time else f"{first_by_time[0]} is.")
