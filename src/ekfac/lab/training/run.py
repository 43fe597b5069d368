"""Training runs, recorded in a folder and resumable after a kill at any time (bit for bit on a CPU)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ekfac.lab.config import TrainConfig
from ekfac.lab.data.datasets import Dataset, load_dataset
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.training.ranks import Follower, Ranks, from_torchrun
from ekfac.lab.training.records import check_history
from ekfac.lab.training.runs import Run, RunFolder, load_run, machine, read_config, versions
from ekfac.lab.training.trainer import Trainer, given

__all__ = ["Progress", "Run", "TrainConfig", "launch", "load_run", "train"]


class Progress:
    """Receives the progress of a run and does nothing; displays are subclasses."""

    def start(self, run: Run) -> None:
        """Start showing the run, which may continue after the epochs in its history."""

    def step(self, step: int, steps: int) -> None:
        """Show that ``step`` of this epoch's ``steps`` are done. Called at every step, so it must be fast."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show a finished and recorded epoch."""

    def end(self, run: Run) -> None:
        """Show how the run ended, according to its status."""


def train(
    config: TrainConfig,
    out: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    checkpoints: bool | Literal["last"] = True,
    checkpoint_every: int | None = None,
    keep_best: bool = False,
    progress: Progress | None = None,
    data: Dataset | None = None,
    initial: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Run:
    """Train a network and return the run.

    Args:
        config: The settings; those that are ``None`` get their defaults.
        out: Folder to record the run in.
        data_dir: Folder of the official data files.
        resume: Continue from the checkpoint in ``out``, or start if there is none yet.
        overwrite: Remove an existing run in ``out``.
        checkpoints: Save one after every epoch; without, an interrupted run cannot be resumed. ``"last"``: save only
            after the last epoch, so that more epochs can follow.
        checkpoint_every: Also save one every this many steps within an epoch.
        keep_best: Keep the checkpoint of the epoch with the best validation, in ``best.pt``.
        progress: Receives the progress.
        data: The dataset, if already loaded, on any device.
        initial: The record of the untrained network, if known from a run with the same start.
        ranks: The processes that train together, each of which calls this; one by default.

    Raises:
        LabError: If a setting or the data are wrong, ``out`` contains a run and neither flag is given, another process
            is working in it, or the run already has more epochs than requested.
    """
    _check_flags(resume, overwrite)
    config = config.resolved()
    ranks = ranks or Ranks()
    writes = ranks.rank == 0
    folder = None if out is None else (RunFolder if writes else Follower)(Path(out))
    try:
        if folder is not None and writes and folder.path.exists():
            _open(folder, config, resume, overwrite)
        run, trainer = _prepare(config, folder, data_dir, resume, data, ranks)
        ranks.meet()  # wait until all have read the folder, before it changes
        if folder is not None and writes and not folder.lock.held:
            # Created only now, so that bad input leaves no folder behind; another process may have been faster.
            _open(folder, config, False, overwrite)
        saving = Saving(checkpoints is True, checkpoint_every, keep_best, last=checkpoints == "last")
        if not run.history and initial is not None:
            trainer.start_from(initial)
        return _train(run, trainer, folder, overwrite, saving, progress if progress and writes else Progress())
    finally:
        if folder is not None:
            folder.close()


def _prepare(
    config: TrainConfig,
    folder: RunFolder | None,
    data_dir: str | Path | None,
    resume: bool,
    data: Dataset | None,
    ranks: Ranks,
) -> tuple[Run, Trainer]:
    """Build the network, and load the checkpoint if resuming from one."""
    run = Run(config, path=None if folder is None else folder.path)
    checkpoint = folder.load(run.notes) if folder is not None and resume else None
    trainer = Trainer(config, data or load_dataset(given(config.dataset), data_dir), ranks)
    if checkpoint is not None:
        _check_same_data(run.path, trainer)
        try:
            if "config" in checkpoint and (other := _difference(TrainConfig.from_dict(checkpoint["config"]), config)):
                raise ValueError(f"it belongs to a run with {other}")
            run.history = check_history(checkpoint["history"])
            trainer.load_state_dict(checkpoint["trainer"])
        except (LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise LabError(f"{run.path}/checkpoint.pt does not fit this run: {reason}") from error
        if trainer.epoch > given(config.epochs):
            raise LabError(f"epochs must be at least {trainer.epoch}, as many as {run.path} has, not {config.epochs}")
    run.about = about(config, trainer, data_dir)
    return run, trainer


@dataclass(frozen=True)
class Saving:
    """Which checkpoints to save; see :func:`train`."""

    each_epoch: bool = True
    every: int | None = None
    best: bool = False
    last: bool = False

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise LabError(f"checkpoint_every must be at least 1, not {self.every}")


def _train(
    run: Run, trainer: Trainer, folder: RunFolder | None, overwrite: bool, saving: Saving, progress: Progress
) -> Run:
    try:
        if folder is not None:
            if overwrite:
                folder.clear()
            folder.start(run.config, run.about, run.history)
        progress.start(run)
        _loop(trainer, run, folder, progress, saving)
    except KeyboardInterrupt as stop:
        run.status = "interrupted"
        run.stopped_by = getattr(stop, "signal", None)
        run.resumable = folder is not None and folder.checkpoint_file.exists()
    finally:
        trainer.close()
        if folder is not None:
            folder.close()
    progress.end(run)
    return run


def launch(
    settings: Mapping[str, Any],
    out: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int | None = None,
    keep_best: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Call :func:`train` with settings from a command line; under torchrun, on all its processes.

    With ``resume``, settings that were not given come from the folder, and there must be a checkpoint: otherwise the
    existing run would be lost.

    Raises:
        LabError: As in :func:`train`, or if there is nothing to resume.
    """
    _check_flags(resume, overwrite)
    for plugin in settings.get("plugins", ()):
        load_plugin(plugin)
    if resume and out is None:
        raise LabError("--resume needs the folder of the run: --out")
    if resume and out is not None:
        stored = read_config(Path(out))[0]
        if not RunFolder(Path(out)).checkpoint_file.exists():
            raise LabError(f"{out} has no checkpoint; --overwrite starts again")
        settings = {**stored.to_dict(), **settings}
    config = TrainConfig.from_dict(settings)
    more: dict[str, Any] = {"checkpoint_every": checkpoint_every, "keep_best": keep_best, "progress": progress}
    ranks = from_torchrun(config.device)
    run = train(config, out, data_dir=data_dir, resume=resume, overwrite=overwrite, ranks=ranks, **more)
    for note in run.notes if ranks.rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    return run


def _loop(trainer: Trainer, run: Run, folder: RunFolder | None, progress: Progress, saving: Saving) -> None:
    def state() -> dict[str, Any]:
        return {"trainer": trainer.state_dict(), "history": run.history, "config": trainer.config.to_dict()}

    def on_step(step: int, steps: int) -> None:
        if folder is not None and saving.every is not None and step % saving.every == 0 and step < steps:
            folder.save(state())
        progress.step(step, steps)

    def add(record: dict[str, Any]) -> None:
        run.history.append(record)
        if folder is not None:
            folder.add(record)
            if trainer.step_losses:
                losses = torch.stack(trainer.step_losses).tolist()
                folder.add_steps(losses, record["step"] - len(losses))
            last = saving.last and trainer.epoch == trainer.config.epochs
            if (saving.each_epoch and trainer.epoch > 0) or last:
                folder.save(state())
            if saving.best and trainer.epoch > 0 and epochs_since_best(run.history[1:]) == 0:
                folder.save_best(state())
        progress.epoch(record)

    if not run.history:
        add(trainer.initial_record())
    patience = trainer.config.patience
    while not _over(run.history[-1]) and trainer.epoch < given(trainer.config.epochs):
        record = trainer.train_epoch(on_step)
        if patience is not None and epochs_since_best([*run.history, record]) >= patience:
            record["stopped"] = True
        add(record)
    run.status = "diverged" if run.history[-1]["diverged"] else "finished"


def _over(record: Mapping[str, Any]) -> bool:
    return bool(record["diverged"] or record.get("stopped"))


def epochs_since_best(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of epochs since the best validation: the highest accuracy, ties broken by the lowest loss.

    A network on a plateau always guesses one class; a decrease of its loss still counts as an improvement.
    """

    def error(record: Mapping[str, Any]) -> tuple[float, float]:
        accuracy, loss = record.get("validation_accuracy"), record.get("validation_loss")
        return (math.inf if accuracy is None else -accuracy, math.inf if loss is None else loss)

    best = min(range(len(history)), key=lambda place: error(history[place]))
    return len(history) - 1 - best


def about(config: TrainConfig, trainer: Trainer, data_dir: str | Path | None = None) -> dict[str, Any]:
    """Return what config.json contains besides the settings."""
    folder = None if data_dir is None else str(Path(data_dir).resolve())
    return {
        "command": config.command(),
        **({} if folder is None else {"data_dir": folder}),
        "versions": versions(),
        "machine": machine(),
        **({} if trainer.ranks.size == 1 else {"processes": trainer.ranks.size}),
        "parameters": trainer.parameters,
        "examples": {name: len(split.y) for name, split in trainer.data.splits.items()},
        "floor": trainer.floors,
        **({} if trainer.data.sha256 is None else {"data_sha256": trainer.data.sha256}),
    }


def _check_flags(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise LabError("resume and overwrite cannot both be set")


def _open(folder: RunFolder, config: TrainConfig, resume: bool, overwrite: bool) -> None:
    """Acquire a folder and check that a run may be written there, before anything is changed."""
    path = folder.path
    if path.exists() and not path.is_dir():
        raise LabError(f"{path} is not a folder")
    folder.lock.acquire()
    if not folder.holds_run() or overwrite:
        return
    if not resume:
        raise LabError(f"{path} already holds a run; --resume continues it, --overwrite removes it")
    if folder.config_file.exists() and (other := _difference(read_config(path)[0], config)):
        raise LabError(f"{path} holds a run with {other}; resume it without changing it")


def _difference(stored: TrainConfig, config: TrainConfig) -> str | None:
    """Return a setting that differs; only the device may, and the number of epochs unless there is a cosine."""
    old, new = (json.loads(json.dumps(of.to_dict())) for of in (stored, config))
    # A plugin's file may be elsewhere now; it was already checked that one of its name is loaded.
    free = ("device", "plugins") if config.cosine else ("device", "plugins", "epochs")
    other = (name for name, value in new.items() if name not in free and value != old[name])
    return next((f"{name} {old[name]!r}, not {new[name]!r}" for name in other), None)


def _check_same_data(path: Path | None, trainer: Trainer) -> None:
    """Refuse to resume with different data, if a dataset differs between machines."""
    if path is not None and read_config(path)[1].get("data_sha256") != trainer.data.sha256:
        raise LabError(f"{path} holds a run on different data of {trainer.data.name}: the sha256 differs")
