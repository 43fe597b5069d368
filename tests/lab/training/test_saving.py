"""Checkpoints within an epoch and of the best one, early stopping, and what other programs are told."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.registry import load_plugin
from ekfac.lab.training.loggers import Several, numbers, with_loggers
from ekfac.lab.training.run import Progress, epochs_since_best, load_run, train
from ekfac.lab.training.runs import Run

PLUGIN = str(Path(__file__).parents[1] / "tiny_plugin.py")
load_plugin(PLUGIN)
SMALL = TrainConfig("classifier", "ekfac-ra", width=8, limit=200, batch_size=20, epochs=2, device="cpu", seed=3)


class Cut(Progress):
    """Ctrl-C in the middle of an epoch."""

    def __init__(self, epoch: int, step: int) -> None:
        self.where, self.epochs = (epoch, step), 0

    def epoch(self, record: Any) -> None:
        self.epochs = record["epoch"]

    def step(self, step: int, steps: int) -> None:
        if (self.epochs, step) == self.where:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", [(0, 5), (1, 8)])
def test_a_run_cut_within_an_epoch_goes_on_from_there_bit_for_bit(tmp_path: Path, where: tuple[int, int]) -> None:
    whole = train(SMALL, tmp_path / "whole")
    cut = train(SMALL, tmp_path / "cut", checkpoint_every=3, progress=Cut(*where))
    assert cut.status == "interrupted"
    steps: list[int] = []

    class Count(Progress):
        def step(self, step: int, count: int) -> None:
            steps.append(step)

    again = train(SMALL, tmp_path / "cut", resume=True, checkpoint_every=3, progress=Count())
    assert steps[0] == where[1] // 3 * 3 + 1, "it goes on from the last checkpoint within the epoch"
    for name in ("train_loss", "train_loss_mean", "validation_loss", "step"):
        assert [r[name] for r in again.history] == [r[name] for r in whole.history], name
    assert again.history[-1]["seconds"] > 0
    with pytest.raises(LabError, match="checkpoint_every must be at least 1"):
        train(SMALL, tmp_path / "no", checkpoint_every=0)


def test_the_checkpoint_of_the_best_epoch_is_kept(tmp_path: Path) -> None:
    run = train(TrainConfig("tiny", "sgd", lr=0.1, epochs=4, device="cpu", plugins=(PLUGIN,)), tmp_path, keep_best=True)
    state = torch.load(tmp_path / "best.pt", weights_only=True)
    errors = [math.inf if r["validation_loss"] is None else r["validation_loss"] for r in run.history]
    if run.history[-1]["validation_accuracy"] is not None:
        errors = [-r["validation_accuracy"] for r in run.history]
    best = errors.index(min(errors[1:]), 1) if min(errors[1:]) < errors[0] else None
    assert best is None or state["trainer"]["epoch"] == best == len(state["history"]) - 1
    worse = TrainConfig("tiny", "sgd", lr=30.0, epochs=2, device="cpu", plugins=(PLUGIN,))
    train(worse, tmp_path / "worse", keep_best=True)
    assert (tmp_path / "worse" / "best.pt").exists(), "the best of those that were trained, be it a bad one"


def test_a_run_that_gets_no_better_is_ended_and_is_over(tmp_path: Path) -> None:
    config = TrainConfig("tiny", "sgd", lr=1e-12, epochs=50, patience=3, device="cpu", plugins=(PLUGIN,))
    run = train(config, tmp_path)
    assert run.status == "finished" and 3 <= run.history[-1]["epoch"] < 50 and run.history[-1]["stopped"]
    again = load_run(tmp_path)
    assert again.status == "finished" and len(train(config, tmp_path, resume=True).history) == len(run.history)
    with pytest.raises(LabError, match="patience must be at least 1"):
        TrainConfig("tiny", "sgd", patience=0).resolved()
    # Runs without it keep the names of their folders.
    plain = TrainConfig("classifier", "sgd", device="cpu").resolved()
    assert key(plain) != key(TrainConfig("classifier", "sgd", device="cpu", patience=3).resolved())


def test_how_long_ago_the_best_was() -> None:
    def record(loss: float | None, accuracy: float | None = None) -> dict[str, Any]:
        return {"validation_loss": loss, "validation_accuracy": accuracy}

    assert epochs_since_best([record(3), record(1), record(2), record(None)]) == 2
    assert epochs_since_best([record(3, 0.1), record(5, 0.9), record(1, 0.8)]) == 1
    assert epochs_since_best([record(1)]) == 0
    assert epochs_since_best([record(3, 0.1), record(2, 0.1), record(1, 0.1)]) == 0, "a plateau of the accuracy"
    assert epochs_since_best([record(3, 0.1), record(2, None), record(1, None)]) == 2, "not a number is not better"


def test_tensorboard_has_every_step_and_the_settings(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(SMALL, tmp_path)
    board = events.EventAccumulator(str(tmp_path)).Reload()
    losses = board.Scalars("batch_loss")
    assert [event.step for event in losses] == list(range(1, 21))
    mean = sum(event.value for event in losses[:10]) / 10
    assert mean == pytest.approx(run.history[1]["train_loss_mean"], rel=1e-5)
    assert [event.step for event in board.Scalars("train_loss")] == [0, 10, 20]
    assert "train_loss" in board.Tags()["scalars"]
    assert board.summary_metadata["_hparams_/session_start_info"]


def test_several_are_told_the_same() -> None:
    told: list[str] = []

    class Tell(Progress):
        def start(self, run: Run) -> None:
            told.append("start")

        def step(self, step: int, steps: int) -> None:
            told.append("step")

        def epoch(self, record: Any) -> None:
            told.append("epoch")

        def end(self, run: Run) -> None:
            told.append("end")

    config = TrainConfig("tiny", "sgd", lr=0.1, epochs=1, device="cpu", plugins=(PLUGIN,))
    train(config, progress=Several([Tell(), Tell()]))
    assert told[:4] == ["start", "start", "epoch", "epoch"] and told[-2:] == ["end", "end"] and "step" in told
    assert numbers({"a": 1, "b": None, "c": True, "optimizer": {"x": 2.0}}) == {"a": 1.0, "optimizer/x": 2.0}
    with pytest.raises(LabError, match="log must be one of wandb, mlflow, not 'paper'"):
        with_loggers(["paper"], Progress())


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = TrainConfig("tiny", "sgd", lr=0.1, epochs=2, device="cpu", plugins=(PLUGIN,))
    run = train(config, tmp_path / "run", progress=with_loggers(["wandb"], Progress()))
    assert run.status == "finished"
    file = next((tmp_path / "run").rglob("offline-run-*/*.wandb"))
    for _ in range(200):  # its own process writes, and is not done when finish() returns
        content = file.read_bytes()
        if b"validation_loss" in content:
            break
        time.sleep(0.1)
    assert b"validation_loss" in content and key(run.config).encode() in content


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "ml").as_uri())
    config = TrainConfig("tiny", "sgd", lr=0.1, epochs=2, device="cpu", plugins=(PLUGIN,))
    run = train(config, progress=with_loggers(["mlflow"], Progress()))
    (file,) = (tmp_path / "ml").rglob("metrics/train_loss")
    values = [float(line.split()[1]) for line in file.read_text().splitlines()]
    assert values == pytest.approx([r["train_loss"] for r in run.history])
    (name,) = (tmp_path / "ml").rglob("params/optimizer")
    assert name.read_text() == "sgd"


def test_a_logger_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(LabError, match=r"--log wandb needs the package wandb: pip install 'ekfac\[wandb\]'"):
        with_loggers(["wandb"], Progress())
