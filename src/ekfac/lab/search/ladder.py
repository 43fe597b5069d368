"""A search by successive halving for a given time: many settings for an epoch, the best for more, then other seeds.

A program is a list of stages, the most important first. Each stage names the runs it wants and how long they are to be;
whatever it wants goes on from where an earlier stage left it. Workers take the first run that is wanted and not there,
until the program or the time is over. All that is known is in the runs' folders: the same program started again goes
on, and nothing is run twice. Needs torch and numpy alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.registry import LabError
from ekfac.lab.search.workers import Workers
from ekfac.lab.training.runs import Run, RunFolder, load_run
from ekfac.lab.training.trainer import given

# What a run's config.json says besides its own length: that of the finals of the search that it is part of.
SEARCHED = "epochs_of_finals"
# Between neighbours of the lattice that is climbed.
FACTOR = math.sqrt(10)
# Seconds after the end that a worker may take to stop.
PATIENCE = 30.0


@dataclass
class Group:
    """A method on a network: what all its runs have in common, and the grid where its search begins.

    Attributes:
        name: What it is called in lines of progress.
        base: The setting without learning rate and damping. Its epochs are the most that there will ever be.
        lrs: Learning rates of the grid; none for a method that is not searched.
        dampings: Dampings of the grid; none where there is no damping.
        seeds: The seeds of the final setting; the search has the first.
        most: So many settings at most are tried.
        failed: Folders of settings that could not be run.
        runs: What there is so far, by folder.
    """

    name: str
    base: TrainConfig
    lrs: Sequence[float] = ()
    dampings: Sequence[float] = ()
    seeds: Sequence[int] = (0,)
    most: int = 24
    failed: set[str] = field(default_factory=set)
    runs: dict[str, Run] = field(default_factory=dict)
    _made: dict[tuple[Any, ...], TrainConfig] = field(default_factory=dict, repr=False)

    def at(self, lr: float | None, damping: float | None, seed: int | None = None) -> TrainConfig:
        """Return a setting of the group, rounded so that the same point reached twice is the same setting."""
        own = self.seeds[0] if seed is None else seed
        rounded = [None if value is None else float(f"{value:.2g}") for value in (lr, damping)]
        place = (*rounded, own)
        if place not in self._made:
            changes: dict[str, Any] = {
                name: value for name, value in zip(("lr", "damping"), rounded, strict=True) if value is not None
            }
            self._made[place] = replace(self.base, **changes, seed=own).resolved()
        return self._made[place]

    @property
    def cautious(self) -> TrainConfig:
        """A setting that will not diverge, for what does not depend on the setting."""
        return self.at(min(self.lrs, default=None), max(self.dampings, default=None))

    def grid(self) -> list[TrainConfig]:
        """Return the settings where the search begins."""
        pairs = itertools.product(self.lrs or (None,), self.dampings or (None,))
        return [self.at(lr, damping) for lr, damping in pairs]

    def around(self, config: TrainConfig) -> list[TrainConfig]:
        """Return a setting's neighbours on the lattice, one step up and down in learning rate and in damping."""
        found = []
        for up in (1 / FACTOR, FACTOR):
            if self.lrs:
                found.append(self.at(given(config.lr) * up, config.damping if self.dampings else None))
            if self.dampings:
                found.append(self.at(config.lr if self.lrs else None, given(config.damping) * up))
        return found

    def reached(self, config: TrainConfig) -> int:
        """Return how many epochs a setting was trained for; one that diverged or failed needs no more."""
        run = self.runs.get(name_of(config))
        if name_of(config) in self.failed:
            return 10**9
        if run is None or not run.history:
            return -1
        return 10**9 if run.status == "diverged" else int(run.history[-1]["epoch"])

    def loss(self, config: TrainConfig, epoch: int) -> float:
        """Return a setting's training loss after an epoch; infinite if it diverged or was not trained so long."""
        run = self.runs.get(name_of(config))
        if run is None or len(run.history) <= epoch or run.history[epoch]["diverged"]:
            return math.inf
        value = run.history[epoch]["train_loss"]
        return math.inf if value is None else float(value)

    def tried(self) -> list[TrainConfig]:
        """Return the settings of the search that were tried, without other seeds."""
        own = [run.config for run in self.runs.values() if run.config.seed == self.seeds[0]]
        return [self.at(config.lr, config.damping) for config in own]

    def ranked(self, epoch: int) -> list[TrainConfig]:
        """Return the settings that were trained for so long and did not diverge, the best first."""
        scored = [(self.loss(config, epoch), name_of(config), config) for config in self.tried()]
        return [config for loss, _, config in sorted(scored, key=lambda row: row[:2]) if math.isfinite(loss)]


_names: dict[int, tuple[TrainConfig, str]] = {}


def name_of(config: TrainConfig) -> str:
    """Return a setting's folder; worked out once for each object, since a program asks for it again and again."""
    known = _names.get(id(config))
    if known is None or known[0] is not config:
        known = _names[id(config)] = (config, key(config))
    return known[1]


Wanted = list[tuple[Group, TrainConfig, int]]


@dataclass
class Stage:
    """What is wanted of a group, once the stages that it ``needs`` have what they want.

    Attributes:
        what: ``"grid"``, ``"around"`` (climb: neighbours of the best until it has them all), ``"best"`` or ``"seeds"``.
        group: Whose runs these are.
        epochs: How long they are to be.
        by: The epoch at which the best are chosen.
        keep: How many of the best.
        needs: Stages that come before.
        source: The group whose best settings are taken; the same unless given.
    """

    what: str
    group: Group
    epochs: int
    by: int = 0
    keep: int = 1
    needs: tuple[Stage, ...] = ()
    source: Group | None = None
    _done: bool = False

    def wanted(self) -> Wanted | None:
        """Return the runs it wants, ``None`` while it is not known which."""
        if not all(stage.complete() for stage in self.needs):
            return None
        group, source = self.group, self.source or self.group
        if self.what == "grid":
            return [(group, config, self.epochs) for config in group.grid()]
        best = source.ranked(self.by)
        if self.what == "around":
            if not best or not group.lrs or len(group.tried()) >= group.most:
                return []
            return [(group, config, self.epochs) for config in group.around(best[0])]
        seeds = group.seeds[1:] if self.what == "seeds" else group.seeds[:1]
        same = [] if not group.lrs and source is group else best[: self.keep]
        found = [group.at(config.lr, config.damping, seed) for config in same for seed in seeds]
        if not group.lrs and source is group:  # nothing is searched
            found = [group.at(None, None, seed) for seed in seeds]
        return [(group, config, self.epochs) for config in found]

    def missing(self) -> Wanted | None:
        """Return the runs that it wants and that are not there, or not as long."""
        wanted = self.wanted()
        if wanted is None:
            return None
        return [(group, config, epochs) for group, config, epochs in wanted if group.reached(config) < epochs]

    def complete(self) -> bool:
        """Tell whether all that it wants is there."""
        # What is there stays there.
        self._done = self._done or self.missing() == []
        return self._done


@dataclass
class Ladder:
    """A program, the folder of its runs, and how much of it is done.

    Attributes:
        stages: What is wanted, the most important first.
        out: The folder of the runs.
        lanes: What part of the workers takes a task's runs first, where there are other tasks; all others take what
            comes first.
    """

    stages: Sequence[Stage]
    out: Path
    lanes: Mapping[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """The groups of all stages."""
        return list({stage.group.name: stage.group for stage in self.stages}.values())

    def load(self) -> None:
        """Read what is there already."""
        there = {file.parent.name: load_run(file.parent) for file in sorted(self.out.glob("*/config.json"))}
        for group in self.groups:
            base = group.base.resolved()
            group.runs |= {name: run for name, run in there.items() if _belongs(run.config, base)}

    def next(self, running: Iterable[str], prefer: str | None = None) -> tuple[Group, TrainConfig, int] | None:
        """Return the first run that is wanted, not there and not running; of a task first, where one is preferred."""
        busy, other = {*running}, None
        for stage in self.stages:
            if stage.complete():
                continue
            for group, config, epochs in stage.missing() or ():
                if name_of(config) not in busy:
                    if prefer in (None, config.task):
                        return group, config, epochs
                    other = other or (group, config, epochs)
        return other

    def run(
        self,
        seconds: float,
        workers: int,
        data_dir: str | Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> bool:
        """Run what is wanted until all is done or time is over; return whether all is done.

        Args:
            seconds: The time there is.
            workers: Processes side by side.
            data_dir: Folder of the data files.
            say: Is told of every run.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self.load()
        start = time.time()
        end = start + seconds
        tasks = {group.base.task for group in self.groups}
        parts = self.lanes.items() if len(tasks) > 1 else ()
        lanes = [task for task, part in parts if task in tasks for _ in range(round(part * workers))]
        staff = Workers(workers)
        running: dict[concurrent.futures.Future[str], tuple[int, Group, TrainConfig, int]] = {}
        try:
            while True:
                free = [n for n in range(workers) if n not in {job[0] for job in running.values()}]
                for worker in free if time.time() < end else ():
                    prefer = lanes[worker] if worker < len(lanes) else None
                    chosen = self.next((name_of(job[2]) for job in running.values()), prefer)
                    if chosen is None:
                        break
                    group, config, epochs = chosen
                    job = (replace(config, epochs=epochs), self.out / name_of(config), data_dir, end)
                    running[staff.submit(worker, *job)] = (worker, group, config, epochs)
                if not running:
                    break
                left = max(1.0, end + PATIENCE - time.time())
                done, _ = concurrent.futures.wait(running, left, concurrent.futures.FIRST_COMPLETED)
                if not done and time.time() > end + PATIENCE:
                    raise TimeoutError("a worker did not end in time")
                for future in done:
                    worker, group, config, epochs = running.pop(future)
                    how = self._take_in(future, staff, worker, group, config)
                    say(f"{time.time() - start:6.1f} s  {group.name}  {_words(config)}  {epochs} epochs: {how}")
        except TimeoutError as error:
            say(str(error))
            staff.close(at_once=True)
            return False
        except BaseException:
            staff.close(at_once=True)
            raise
        staff.close(at_once=False)
        return self.next(()) is None

    def _take_in(
        self, future: concurrent.futures.Future[str], staff: Workers, worker: int, group: Group, config: TrainConfig
    ) -> str:
        name = name_of(config)
        try:
            how = future.result()
        except Exception as error:
            # One setting that fails must not end the others; after a CUDA error its process is of no more use.
            self.failed[name] = how = f"failed, {type(error).__name__}: {error}".splitlines()[0][:200]
            group.failed.add(name)
            staff.restart(worker)
        with contextlib.suppress(LabError):
            group.runs[name] = load_run(self.out / name)
        self._tidy(group)
        losses = [record["train_loss"] for record in group.runs[name].history] if name in group.runs else []
        return how + (f", loss {losses[-1]:.4g}" if losses and losses[-1] is not None else "")

    def _tidy(self, group: Group) -> None:
        """Remove the checkpoints of settings that no later stage goes on with: they would fill a disk."""
        for stage in self.stages:
            if stage.group is group and stage.what == "best" and stage.source is None:
                wanted = stage.wanted()
                kept = None if wanted is None else {name_of(config) for _, config, _ in wanted}
                for config in group.tried() if kept is not None else ():
                    if name_of(config) not in (kept or ()):
                        (self.out / name_of(config) / "checkpoint.pt").unlink(missing_ok=True)

    def settle(self) -> list[Run]:
        """Let every run say how long it is and how long the finals are; remove what has no epoch, return the rest."""
        self.load()
        found = []
        for group in self.groups:
            for name, run in sorted(group.runs.items()):
                epochs = run.history[-1]["epoch"] if run.history else 0
                if epochs == 0 and run.status != "diverged":
                    shutil.rmtree(self.out / name)
                    continue
                cut = epochs != run.config.epochs and run.status != "diverged"
                config = replace(run.config, epochs=epochs) if cut else run.config
                about = {**run.about, "command": config.command(), SEARCHED: group.base.epochs}
                if about != run.about or cut:
                    RunFolder(self.out / name).write_config(config, about)
                    run = group.runs[name] = load_run(self.out / name)
                found.append(run)
        return found

    def remaining(self) -> list[str]:
        """Say what of the program is not done, a line a stage."""
        lines = []
        for stage in self.stages:
            missing = stage.missing()
            name = f"{stage.group.name}: {stage.what} to {stage.epochs} epochs"
            if missing is None:
                lines.append(f"{name}, not begun")
            elif missing:
                lines.append(f"{name}, {len(missing)} of {len(stage.wanted() or ())} missing")
        return lines


def _belongs(config: TrainConfig, base: TrainConfig) -> bool:
    """Tell whether a run is of a group: but for what is searched, its settings are the group's."""
    own = replace(base, lr=config.lr, damping=config.damping, seed=config.seed, epochs=config.epochs)
    mine, its = own.to_dict(), config.to_dict()
    return all(mine[name] == its[name] for name in mine if name not in ("device", "plugins"))


def _words(config: TrainConfig) -> str:
    found = [f"{name} {getattr(config, name):.3g}" for name in ("lr", "damping") if getattr(config, name) is not None]
    return ", ".join([*found, f"seed {config.seed}"])
