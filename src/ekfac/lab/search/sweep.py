"""A search over settings: several processes and machines work on one storage until no trial is waiting."""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from ekfac.lab.boundary import Stopped, stoppable
from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import describe, key, varied
from ekfac.lab.registry import LabError, load_plugin, loaded_plugins
from ekfac.lab.search.ask import Search
from ekfac.lab.search.plan import run_one, share_cores, stop_of
from ekfac.lab.search.study import Trials, legible, open_storage, setting, study_name
from ekfac.lab.training.run import Progress
from ekfac.lab.training.runs import Run, load_run

# The reason for closing a trial interrupted by Ctrl-C; the same command queues its setting again.
PAUSED = "interrupted"


@dataclass(frozen=True)
class Where:
    """Where a search stores its trials and runs; plain strings, so that it can be sent to worker processes."""

    out: str
    storage: str
    data_dir: str | None = None

    @classmethod
    def of(cls, out: str | Path, storage: str | None = None, data_dir: str | Path | None = None) -> Where:
        """Fill in the default storage: an SQLite file in the search's folder."""
        place = storage or f"sqlite:///{Path(out).absolute() / 'study.db'}"
        return cls(str(out), place, None if data_dir is None else str(data_dir))


@dataclass(frozen=True)
class State:
    """The progress of a search.

    Attributes:
        counts: The number of trials in each state; those interrupted by Ctrl-C are ``paused``.
        diverged: The number of diverged trials.
        best: The lowest training loss so far.
        seconds: The average time of trials that finished here.
        setting: The setting with the lowest loss.
    """

    counts: Mapping[str, int]
    diverged: int
    best: float | None
    seconds: float | None = None
    setting: str = ""

    @property
    def over(self) -> int:
        """The number of settings with a result."""
        return self.counts.get("complete", 0) + self.counts.get("pruned", 0)


def state(studies: Sequence[Trials]) -> State:
    """Count the trials of several studies."""
    counts: Counter[str] = Counter()
    best: tuple[float, FrozenTrial] | None = None
    diverged, spent = 0, []
    for study in studies:
        trials = study.all()
        settled = {t.user_attrs.get("key") for t in trials if t.state != TrialState.FAIL}
        for trial in trials:
            name = trial.state.name.lower()
            if trial.state == TrialState.FAIL and trial.user_attrs.get("error") == PAUSED:
                if trial.user_attrs.get("key") in settled:
                    continue  # it was resumed since
                name = "paused"
            counts[name] += 1
            diverged += bool(trial.user_attrs.get("diverged"))
            if trial.state == TrialState.COMPLETE and trial.value is not None and math.isfinite(trial.value):
                best = min(best or (math.inf, trial), (trial.value, trial), key=lambda pair: pair[0])
            # Trials added from elsewhere have no duration.
            if trial.state == TrialState.COMPLETE and trial.duration and trial.duration.total_seconds() > 0.05:
                spent.append(trial.duration.total_seconds())
    seconds = sum(spent) / len(spent) if spent else None
    setting_of = ""
    if best is not None:
        settings = [t.user_attrs["setting"] for study in studies for t in study.all() if "setting" in t.user_attrs]
        setting_of = describe(TrainConfig.from_dict(best[1].user_attrs["setting"]), varied(settings))
    return State(counts, diverged, None if best is None else best[0], seconds, setting_of)


def sweep(
    configs: Sequence[TrainConfig],
    where: Where,
    *,
    name: str | None = None,
    workers: int = 1,
    devices: Sequence[str] = (),
    prune: bool = False,
    search: Search | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_state: Callable[[State], None] = lambda found: None,
) -> dict[str, Trials]:
    """Run every setting that the studies have no result for yet.

    Args:
        configs: All settings of the search, resolved.
        where: Its folder and storage.
        name: The study's name; by default each task and method has its own.
        workers: The number of processes that run trials in parallel.
        devices: Devices that the workers use in turn; if empty, a GPU if there is one.
        prune: End trials early that are behind the others.
        search: How further settings are proposed, and how trials are pruned.
        on_start: Called once all arguments have been checked.
        on_state: Called from time to time with the progress.

    Returns:
        The studies by name.

    Raises:
        LabError: If an argument is wrong, or the storage cannot be opened or is damaged.
        OSError: If the folder cannot be created.
    """
    if workers < 1:
        raise LabError(f"workers must be at least 1, not {workers}")
    # First, so that a problem with the folder is not reported as one of the storage in it.
    Path(where.out).mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[TrainConfig]] = {}
    for config in configs:
        groups.setdefault(name or study_name(config), []).append(config)
    for label in search.base if search is not None else ():
        groups.setdefault(label, [])
    with legible(where.storage):
        studies = open_studies(where, list(groups))
        on_start()
        for label, study in studies.items():
            study.release()
            study.add(groups[label])
        on_state(state(list(studies.values())))
        if workers == 1:
            tell = _Tell(studies, on_state)
            work(where, list(groups), devices[0] if devices else None, prune, after=tell, search=search)
        else:
            _work_together(where, studies, workers, devices, prune, on_state, search)
        for study in studies.values():
            study.note_waiting()
    return studies


def open_studies(where: Where, names: Sequence[str]) -> dict[str, Trials]:
    """Open studies by name, creating new ones."""
    storage = open_storage(where.storage)
    return {name: Trials(storage, name) for name in names}


def existing_studies(where: Where) -> dict[str, Trials]:
    """Open every study in a storage."""
    storage = open_storage(where.storage)
    return {name: Trials(storage, name) for name in optuna.get_all_study_names(storage)}


class _Tell:
    def __init__(self, studies: Mapping[str, Trials], on_state: Callable[[State], None]) -> None:
        self.studies, self.on_state = list(studies.values()), on_state

    def __call__(self) -> None:
        self.on_state(state(self.studies))


def _work_together(
    where: Where,
    studies: Mapping[str, Trials],
    workers: int,
    devices: Sequence[str],
    prune: bool,
    on_state: Callable[[State], None],
    search: Search | None = None,
) -> None:
    # Spawned, not forked: neither CUDA nor a database connection survives a fork.
    context = multiprocessing.get_context("spawn")
    processes = []
    for number in range(workers):
        device = devices[number % len(devices)] if devices else None
        arguments: tuple[Any, ...] = (where, list(studies), device, prune, workers, loaded_plugins(), search)
        processes.append(context.Process(target=_worker, args=arguments, name=f"worker {number + 1}"))
    for process in processes:
        process.start()
    tell, before = _Tell(studies, on_state), None
    try:
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(1.0 / workers)
            now = state(tell.studies)
            if now != before:
                tell.on_state(now)
                before = now
    except Stopped:
        for process in processes:
            process.terminate()
        raise
    finally:
        # On Ctrl-C the workers get the signal too and close their trials.
        for process in processes:
            process.join()
    dead = [process.name for process in processes if process.exitcode not in (0, 130)]
    if dead:
        raise LabError(f"{', '.join(dead)} of the search died; run the same command to resume")
    if any(process.exitcode == 130 for process in processes):
        raise KeyboardInterrupt


def _worker(
    where: Where,
    names: Sequence[str],
    device: str | None,
    prune: bool,
    workers: int,
    plugins: Sequence[str],
    search: Search | None,
) -> None:
    share_cores(workers)
    try:
        with stoppable():
            for plugin in plugins:
                load_plugin(plugin)
            work(where, names, device, prune, search=search)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def work(
    where: Where,
    names: Sequence[str],
    device: str | None = None,
    prune: bool = False,
    after: Callable[[], None] = lambda: None,
    search: Search | None = None,
) -> None:
    """Claim and run waiting trials until none is left, including those of workers that died meanwhile."""
    studies = list(open_studies(where, names).values())
    if search is not None:
        for study in studies:
            search.prepare(study)
    while True:
        taken = next(((s, trial) for s in studies if (trial := s.take()) is not None), None)
        if taken is None and search is not None:
            taken = next(((s, trial) for s in studies if (trial := search.ask(s)) is not None), None)
        if taken is not None:
            _run(*taken, where, device, prune)
            after()
        elif not sum(study.release() for study in studies):
            return


def _run(trials: Trials, trial: optuna.Trial, where: Where, device: str | None, prune: bool) -> None:
    folder = Path(where.out) / "runs"
    reports = _Reports(trial, prune)
    try:
        config = setting(trial)
        config = config if device is None else replace(config, device=device)
        with trials.alive(trial):
            run = run_one(config, folder, where.data_dir, reports)
    except optuna.TrialPruned:
        trials.prune(trial, load_run(folder / key(config)))
        return
    except Exception as error:
        # A failing setting (out of memory, for example) must not stop the search.
        trials.fail(trial, f"{type(error).__name__}: {error}")
        return
    if run.status == "interrupted":
        trials.fail(trial, PAUSED)
        raise stop_of(run)
    reports.start(run)
    trials.finish(trial, run)


class _Reports(Progress):
    """Reports the loss of every epoch to Optuna once, and ends a trial that should be pruned."""

    def __init__(self, trial: optuna.Trial, prune: bool) -> None:
        self.trial, self.prune = trial, prune
        self._done: set[int] = set()
        self._parent = multiprocessing.parent_process()

    def start(self, run: Run) -> None:
        """Report earlier epochs, from before an interruption or from elsewhere."""
        for record in run.history:
            self._report(record)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Report an epoch."""
        self._report(record)
        if self._parent is not None and not self._parent.is_alive():
            # The search itself was killed; its workers must not continue unnoticed.
            raise KeyboardInterrupt
        if self.prune and self.trial.should_prune():
            raise optuna.TrialPruned

    def _report(self, record: Mapping[str, Any]) -> None:
        if record["train_loss"] is not None and record["epoch"] not in self._done:
            self._done.add(record["epoch"])
            self.trial.report(record["train_loss"], record["epoch"])
