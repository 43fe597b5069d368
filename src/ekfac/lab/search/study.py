"""A search's trials in Optuna's storage: which are waiting, which process runs them, and their results.

A trial is one setting. Processes and machines that share a storage claim waiting trials one by one, by an atomic change
of state. A trial whose process died is closed as failed and its setting queued again, so that nothing finished is
repeated and nothing is lost.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key, option
from ekfac.lab.registry import LabError, missing_plugins
from ekfac.lab.training.records import check_about, check_history
from ekfac.lab.training.runs import Run

optuna.logging.set_verbosity(optuna.logging.WARNING)

# Seconds between heartbeats of a running trial, and seconds without one after which other machines assume it is dead.
SIGN_OF_LIFE = 30.0
SILENCE = 600.0


def open_storage(where: str) -> BaseStorage:
    """Open a storage: ``sqlite:///FILE``, ``postgresql://USER@HOST/NAME``, any SQLAlchemy URL, or ``journal:FILE``.

    Raises:
        LabError: If it cannot be opened.
    """
    try:
        if where.startswith("journal:"):
            from optuna.storages.journal import JournalFileBackend

            file = Path(where.removeprefix("journal:"))
            file.parent.mkdir(parents=True, exist_ok=True)
            return JournalStorage(JournalFileBackend(str(file)))
        if where.startswith("sqlite:///"):
            Path(where.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            # Workers write concurrently; SQLite admits one at a time and the others wait.
            storage = RDBStorage(where, engine_kwargs={"connect_args": {"timeout": 60}})
            sqlalchemy.event.listen(storage.engine, "begin", _lock_at_once)
            return storage
        return RDBStorage(where.replace("postgresql://", "postgresql+psycopg://", 1))
    except Exception as error:
        # SQLAlchemy, its drivers, Optuna and the file system each raise their own exceptions.
        shown = (str(error).splitlines() or [type(error).__name__])[0]
        raise LabError(f"storage {without_password(where)} cannot be opened: {shown}") from error


@contextmanager
def legible(where: str) -> Iterator[None]:
    """Turn errors of a storage, from a damaged file or a lost server, into one line.

    Raises:
        LabError: In place of exceptions of Optuna's storages and SQLAlchemy.
    """
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
        if not any(name.startswith(("optuna.storages.", "sqlalchemy.")) for name in frames):
            raise
        shown = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
        raise LabError(
            f"storage {without_password(where)} cannot be read or written: {shown}; if it is damaged, move it away, "
            "and the same command makes a new one from the existing runs"
        ) from error


def _lock_at_once(connection: sqlalchemy.Connection) -> None:
    # Optuna reads a trial's state and then changes it, under SELECT FOR UPDATE, which SQLite lacks: two workers could
    # claim the same trial. A transaction that starts by locking prevents that.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def without_password(where: str) -> str:
    """Return a storage's URL with its password masked."""
    scheme, sign, rest = where.partition("://")
    login, at, host = rest.rpartition("@")
    return f"{scheme}{sign}{login.split(':')[0]}{at}{host}"


def study_name(config: TrainConfig) -> str:
    """Return the default study of a setting: one per task and method."""
    return f"{config.task}-{config.optimizer}" + ("-bn" if config.batch_norm else "")


class Trials:
    """The trials of one study. Those not made by this library are left alone.

    Args:
        storage: The storage.
        name: The study's name.

    Attributes:
        notes: Trials that were left alone, and why.

    Raises:
        LabError: If the study of that name was not made by this library.
    """

    def __init__(self, storage: BaseStorage, name: str) -> None:
        self.storage = storage
        self.notes: set[str] = set()
        self.study = optuna.create_study(
            storage=storage, study_name=name, load_if_exists=True, pruner=optuna.pruners.MedianPruner()
        )
        self._id = storage.get_study_id_from_name(name)
        if storage.get_study_directions(self._id) != [StudyDirection.MINIMIZE]:
            raise LabError(
                f"study {name!r} does not minimize one number, so it is not one of ekfac sweep; name another"
            )

    def all(self, *states: TrialState) -> list[FrozenTrial]:
        """Return this library's trials in these states (by default all), as currently stored."""
        found = []
        for trial in self.storage.get_all_trials(self._id, deepcopy=False, states=states or None):
            try:
                _check_ours(trial)
            except (LabError, ValueError) as error:
                self.notes.add(f"trial {trial.number} of study {self.study.study_name!r} is left alone: {error}")
            else:
                found.append(trial)
        return found

    def add(self, configs: Sequence[TrainConfig]) -> int:
        """Queue settings without a trial, or with only failed ones; return how many."""
        held = {trial.user_attrs["key"] for trial in self.all() if trial.state != TrialState.FAIL}
        new = [config for config in configs if key(config) not in held]
        for config in new:
            self.study.add_trial(_trial(config, TrialState.WAITING))
        return len(new)

    def release(self) -> int:
        """Close running trials whose process is dead and queue their settings again; return how many."""
        count = 0
        for trial in self.all(TrialState.RUNNING):
            if not _dead(trial):
                continue
            try:
                # If several processes try, only one succeeds: a closed trial cannot be closed again.
                self.storage.set_trial_state_values(self._number_to_id(trial.number), TrialState.FAIL)
            except optuna.exceptions.UpdateFinishedTrialError:
                continue
            self.study.add_trial(_trial(_config(trial), TrialState.WAITING))
            count += 1
        return count

    def take(self) -> optuna.Trial | None:
        """Claim the next waiting trial for this process; return ``None`` if there is none."""
        for trial in self.all(TrialState.WAITING):
            if missing_plugins(_config(trial).plugins):
                # Its plugins are not loaded here: leave it to other workers. A study never causes code to be loaded.
                continue
            identity = self._number_to_id(trial.number)
            try:
                if not self.storage.set_trial_state_values(identity, TrialState.RUNNING):
                    continue
            except optuna.exceptions.UpdateFinishedTrialError:
                continue
            mine = optuna.Trial(self.study, identity)
            mine.set_user_attr("worker", _sign())
            if self._first(trial) != trial.number:
                # Two machines queued the same setting at the same time; the earlier trial counts.
                mine.set_user_attr("error", "the same setting was queued twice")
                self.study.tell(mine, state=TrialState.FAIL)
                continue
            return mine
        return None

    def sign(self, trial: optuna.Trial, config: TrainConfig) -> None:
        """Store a setting in a new trial, with this process as its worker."""
        trial.set_user_attr("key", key(config))
        trial.set_user_attr("setting", {**config.to_dict(), "device": "auto"})
        trial.set_user_attr("worker", _sign())

    def note_waiting(self) -> None:
        """Note the trials that wait for a worker whose command names their plugins."""
        for trial in self.all(TrialState.WAITING):
            if missing := missing_plugins(_config(trial).plugins):
                self.notes.add(f"trial {trial.number} waits for a worker with --plugin {' --plugin '.join(missing)}")

    def _first(self, trial: FrozenTrial) -> int:
        same = [t for t in self.all() if t.user_attrs["key"] == trial.user_attrs["key"]]
        return min(t.number for t in same if t.state != TrialState.FAIL)

    def _number_to_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def finish(self, trial: optuna.Trial, run: Run) -> None:
        """Record the result of a trial. A diverged one is complete, with an infinite loss."""
        trial.set_user_attr("run", _plain(run))
        trial.set_user_attr("diverged", run.status == "diverged")
        self.study.tell(trial, final_loss(run))

    def prune(self, trial: optuna.Trial, run: Run) -> None:
        """Record a trial that was pruned because others were ahead."""
        trial.set_user_attr("run", _plain(run))
        trial.set_user_attr("diverged", False)
        self.study.tell(trial, state=TrialState.PRUNED)

    def fail(self, trial: optuna.Trial, reason: str) -> None:
        """Close a trial without a result; the next :meth:`add` queues its setting again."""
        trial.set_user_attr("error", reason)
        self.study.tell(trial, state=TrialState.FAIL)

    def take_in(self, runs: Sequence[Run]) -> int:
        """Add runs made elsewhere as complete trials; return how many were new.

        Waiting trials of the same settings are closed.
        """
        closed = self.all(TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        held = {trial.user_attrs["key"] for trial in closed}
        new = {key(run.config): run for run in runs if key(run.config) not in held}
        waiting = {trial.user_attrs["key"]: trial.number for trial in self.all(TrialState.WAITING)}
        count = 0
        for name, run in new.items():
            if name not in waiting:
                self.study.add_trial(_trial(run.config, TrialState.COMPLETE, run))
                count += 1
                continue
            identity = self._number_to_id(waiting[name])
            if self.storage.set_trial_state_values(identity, TrialState.RUNNING):
                trial = optuna.Trial(self.study, identity)
                for epoch, loss in reported(run).items():
                    trial.report(loss, epoch)
                self.finish(trial, run)
                count += 1
        return count

    def failures(self) -> dict[str, str]:
        """Return the settings that failed and have no result yet, with the reason."""
        failed = {t.user_attrs["key"]: t.user_attrs.get("error", "its process died") for t in self.all(TrialState.FAIL)}
        held = {trial.user_attrs["key"] for trial in self.all() if trial.state != TrialState.FAIL}
        return {name: reason for name, reason in failed.items() if name not in held}

    def runs(self) -> list[Run]:
        """Return the runs of all trials that have one, read from the storage."""
        found = []
        for trial in self.all(TrialState.COMPLETE, TrialState.PRUNED):
            data = trial.user_attrs["run"]
            config = TrainConfig.from_dict(data["config"])
            found.append(Run(config, data["history"], data["status"], data["about"]))
        return found

    @contextmanager
    def alive(self, trial: optuna.Trial) -> Iterator[None]:
        """Send heartbeats for a trial while it runs, for other machines that share the storage."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(SIGN_OF_LIFE):
                trial.set_user_attr("worker", _sign())

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def final_loss(run: Run) -> float:
    """Return a run's final training loss; infinite if it diverged."""
    loss = run.history[-1]["train_loss"] if run.history else None
    return math.inf if run.status == "diverged" or loss is None else float(loss)


def reported(run: Run) -> dict[int, float]:
    """Return the training loss by epoch, as stored by Optuna."""
    return {record["epoch"]: record["train_loss"] for record in run.history if record["train_loss"] is not None}


def _trial(config: TrainConfig, state: TrialState, run: Run | None = None) -> FrozenTrial:
    params: dict[str, Any] = {}
    distributions: dict[str, BaseDistribution] = {}
    for name in ("lr", "damping"):
        number = option(config, name)
        if isinstance(number, float | int):
            params[name] = float(number)
            distributions[name] = FloatDistribution(min(1e-8, params[name]), max(1e3, params[name]), log=True)
    for name in ("batch_size", "seed"):
        params[name] = int(getattr(config, name))
        distributions[name] = IntDistribution(0, 2**32)
    attributes: dict[str, Any] = {"key": key(config), "setting": {**config.to_dict(), "device": "auto"}}
    if run is not None:
        attributes |= {"run": _plain(run), "diverged": run.status == "diverged"}
    return create_trial(
        state=state,
        value=None if run is None else final_loss(run),
        params=params,
        distributions=distributions,
        user_attrs=attributes,
        intermediate_values=None if run is None else reported(run),
    )


def _check_ours(trial: FrozenTrial) -> None:
    """Refuse a trial that this library did not make, or that was altered.

    Raises:
        LabError: If its settings are invalid.
        ValueError: If anything else is invalid.
    """
    attributes = trial.user_attrs
    if not isinstance(attributes.get("key"), str) or not isinstance(attributes.get("setting"), dict):
        raise ValueError("it was not created by ekfac sweep")
    TrainConfig.from_dict(attributes["setting"])
    worker = attributes.get("worker")
    if worker is not None:
        kinds = {"host": str, "pid": int, "seen": float | int}
        if not isinstance(worker, dict) or not all(isinstance(worker.get(n), kind) for n, kind in kinds.items()):
            raise ValueError(f"its worker is invalid: {worker!r}")
    if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
        run = attributes.get("run")
        if not isinstance(run, dict) or not isinstance(run.get("config"), dict) or not run.get("history"):
            raise ValueError("it has no run")
        TrainConfig.from_dict(run["config"])
        check_history(run["history"])
        check_about(run.get("about"))
        if run.get("status") not in ("finished", "diverged", "interrupted", "unfinished"):
            raise ValueError(f"its status is {run.get('status')!r}")


def _config(trial: FrozenTrial | optuna.Trial) -> TrainConfig:
    return TrainConfig.from_dict(trial.user_attrs["setting"])


def setting(trial: FrozenTrial | optuna.Trial) -> TrainConfig:
    """Return a trial's settings, with this machine's device."""
    return _config(trial).resolved()


def _plain(run: Run) -> dict[str, Any]:
    """Return a run as plain data, without what is only needed in its folder."""
    history = [{name: value for name, value in record.items() if name != "optimizer"} for record in run.history]
    return {"config": run.config.to_dict(), "history": history, "status": run.status, "about": run.about}


def _sign() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "seen": time.time()}


def _started(pid: int) -> str | None:
    """Return the start time of a process in system ticks, which distinguishes it from a later one with the same id.

    ``"gone"`` means a zombie, ``None`` unknown.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "gone" if words[0] in "ZX" else words[19]


def _dead(trial: FrozenTrial) -> bool:
    """Return whether a trial's process is gone; for processes on other machines, whether heartbeats have stopped."""
    worker = trial.user_attrs.get("worker")
    if worker is None:
        # Killed between claiming the trial and signing it, or just about to sign it.
        return trial.datetime_start is not None and time.time() - trial.datetime_start.timestamp() > SILENCE
    if worker["host"] != socket.gethostname():
        return bool(time.time() - worker["seen"] > SILENCE)
    try:
        os.kill(worker["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    started = worker.get("started")
    return started is not None and started != _started(worker["pid"])
