"""A search by successive halving within a time budget: many settings for an epoch, the best for more, then more seeds.

A program is a list of stages, the most important first. Each stage names the runs it wants and their length; a run
continues from where an earlier stage left it. Workers take the first run that is wanted and missing, until the program
is done or time is up. All state is in the runs' folders: the same program started again continues, and nothing is run
twice. Needs only torch and numpy.
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

# The entry of a run's config.json with the length of the finals of its search.
SEARCHED = "epochs_of_finals"
# The factor between neighbours on the lattice for hill climbing.
FACTOR = math.sqrt(10)
# Seconds that a worker may take to stop after time is up.
PATIENCE = 30.0


@dataclass
class Group:
    """A method on a network: the common settings of its runs, and the grid where its search starts.

    Attributes:
        name: Its name in lines of progress.
        base: The setting without learning rate and damping. Its epochs are the maximum.
        lrs: Learning rates of the grid; none for a method that is not searched.
        dampings: Dampings of the grid; none for a method without damping.
        seeds: The seeds of the final setting; the search uses the first.
        most: The most settings to try.
        failed: Folders of settings that could not be run.
        runs: The runs so far, by folder.
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
        """A setting that will not diverge, for measurements that do not depend on the setting."""
        return self.at(min(self.lrs, default=None), max(self.dampings, default=None))

    def grid(self) -> list[TrainConfig]:
        """Return the settings where the search starts."""
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
        """Return how many epochs a setting was trained for; one that diverged or failed counts as complete."""
        run = self.runs.get(name_of(config))
        if name_of(config) in self.failed:
            return 10**9
        if run is None or not run.history:
            return -1
        return 10**9 if run.status == "diverged" else int(run.history[-1]["epoch"])

    def loss(self, config: TrainConfig, epoch: int) -> float:
        """Return a setting's training loss after an epoch; infinite if it diverged or was not trained that long."""
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
        """Return the settings that were trained for this long and did not diverge, the best first."""
        scored = [(self.loss(config, epoch), name_of(config), config) for config in self.tried()]
        return [config for loss, _, config in sorted(scored, key=lambda row: row[:2]) if math.isfinite(loss)]


_names: dict[int, tuple[TrainConfig, str]] = {}


def name_of(config: TrainConfig) -> str:
    """Return a setting's folder; cached, since a program asks for it many times."""
    known = _names.get(id(config))
    if known is None or known[0] is not config:
        known = _names[id(config)] = (config, key(config))
    return known[1]


Wanted = list[tuple[Group, TrainConfig, int]]


@dataclass
class Stage:
    """The runs wanted of a group, once the stages that it ``needs`` are complete.

    Attributes:
        what: ``"grid"``, ``"around"`` (climb: neighbours of the best until all were tried), ``"best"`` or ``"seeds"``.
        group: The group of the runs.
        epochs: The length of the runs.
        by: The epoch at which the best are chosen.
        keep: The number of best settings to keep.
        needs: Stages that come before.
        source: The group whose best settings are used; the same unless given.
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
        """Return the wanted runs, or ``None`` while they are not known."""
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
        """Return the wanted runs that are missing or too short."""
        wanted = self.wanted()
        if wanted is None:
            return None
        return [(group, config, epochs) for group, config, epochs in wanted if group.reached(config) < epochs]

    def complete(self) -> bool:
        """Return whether all wanted runs exist."""
        # Once complete, it stays complete.
        self._done = self._done or self.missing() == []
        return self._done


@dataclass
class Ladder:
    """A program, the folder of its runs, and its progress.

    Attributes:
        stages: The stages, the most important first.
        out: The folder of the runs.
        lanes: By task, the fraction of workers that prefer its runs if there are other tasks; all others take whatever
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
        """Read existing runs."""
        there = {file.parent.name: load_run(file.parent) for file in sorted(self.out.glob("*/config.json"))}
        for group in self.groups:
            base = group.base.resolved()
            group.runs |= {name: run for name, run in there.items() if _belongs(run.config, base)}

    def next(self, running: Iterable[str], prefer: str | None = None) -> tuple[Group, TrainConfig, int] | None:
        """Return the first run that is wanted, missing and not running, preferably of the preferred task."""
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
        """Make the wanted runs until all are done or time is up; return whether all are done.

        Args:
            seconds: The time budget.
            workers: The number of parallel processes.
            data_dir: Folder of the data files.
            say: Called with a line for every run.
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
            # A failing setting must not stop the others; after a CUDA error its process is unusable.
            self.failed[name] = how = f"failed, {type(error).__name__}: {error}".splitlines()[0][:200]
            group.failed.add(name)
            staff.restart(worker)
        with contextlib.suppress(LabError):
            group.runs[name] = load_run(self.out / name)
        self._tidy(group)
        losses = [record["train_loss"] for record in group.runs[name].history] if name in group.runs else []
        return how + (f", loss {losses[-1]:.4g}" if losses and losses[-1] is not None else "")

    def _tidy(self, group: Group) -> None:
        """Remove checkpoints of settings that no later stage continues: they would fill the disk."""
        for stage in self.stages:
            if stage.group is group and stage.what == "best" and stage.source is None:
                wanted = stage.wanted()
                kept = None if wanted is None else {name_of(config) for _, config, _ in wanted}
                for config in group.tried() if kept is not None else ():
                    if name_of(config) not in (kept or ()):
                        (self.out / name_of(config) / "checkpoint.pt").unlink(missing_ok=True)

    def settle(self) -> list[Run]:
        """Write every run's length, and the finals', into its config; remove runs without an epoch, return the rest."""
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
        """Describe what is left of the program, one line per stage."""
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
    """Return whether a run belongs to a group: its settings are the group's, except for those searched."""
    own = replace(base, lr=config.lr, damping=config.damping, seed=config.seed, epochs=config.epochs)
    mine, its = own.to_dict(), config.to_dict()
    return all(mine[name] == its[name] for name in mine if name not in ("device", "plugins"))


def _words(config: TrainConfig) -> str:
    found = [f"{name} {getattr(config, name):.3g}" for name in ("lr", "damping") if getattr(config, name) is not None]
    return ", ".join([*found, f"seed {config.seed}"])
