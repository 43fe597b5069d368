"""One run by several processes, as torchrun starts them: the run of one process, recorded once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import started
from ekfac.lab.train import main
from ekfac.lab.training.ranks import Ranks
from ekfac.lab.training.runs import load_run

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]

SMALL = ["--limit", "200", "--batch-size", "50", "--device", "cpu"]
#: Every task, as small as it gets.
TASKS = {
    "autoencoder": ["--width", "10"],
    "classifier": [],
    "deep": [],
    "vgg11": ["--dataset", "mnist-5k-padded", "--width", "4"],
    "resnet34": ["--dataset", "mnist-5k-padded", "--width", "4"],
    "charlm": ["--width", "16"],
}
#: Several command lines, one after the other.
WORKER = """
import json, sys
import ekfac.lab.data.padded
from ekfac.lab.train import main
from ekfac.lab.training.ranks import leave
leave(max(map(main, json.loads(sys.argv[1]))))
"""


def torchrun(ranks: int, *words: str) -> str:
    """Run the command in so many processes; returns what they printed."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = started.run([*start, "-m", "ekfac", *words], env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def as_torchrun(ranks: int, *words: str, fails: bool = False) -> str:
    """Start so many processes with what torchrun tells them, forked from one that has imported torch."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "OMP_NUM_THREADS": 1}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    environments = [{**told, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    processes = [
        started.start(words, env={**os.environ, **{name: str(value) for name, value in environment.items()}})
        for environment in environments
    ]
    said = [process.communicate() for process in processes]
    assert all((process.returncode != 0) == fails for process in processes), said
    return said[0][1 if fails else 0]


def train_together(ranks: int, *lines: list[str]) -> None:
    """Run command lines of ``ekfac.lab.train`` in so many processes."""
    as_torchrun(ranks, "-c", WORKER, json.dumps(lines))


def checkpoint(folder: Path) -> Any:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["trainer"]


def assert_same_run(found: Path, expected: Path) -> None:
    one, other = checkpoint(found), checkpoint(expected)
    for name, value in other["model"].items():
        assert torch.allclose(one["model"][name], value, rtol=0, atol=1e-10), name
    for mine, theirs in zip(load_run(found).history, load_run(expected).history, strict=True):
        for name in ("step", "train_loss", "train_loss_mean", "validation_loss", "validation_accuracy"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-10), name


def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    """Stopped after some epochs, and gone on with by one process; and the other way round."""
    lines = {
        optimizer: ["classifier", "--optimizer", optimizer, "--dtype", "float64", *SMALL, "--batch-size", "45"]
        for optimizer in ("adam", "kfac")
    }
    alone, two, back = (tmp_path / name for name in ("alone", "two", "back"))
    train_together(2, *([*line, "--epochs", "2", "--out", str(two / name)] for name, line in lines.items()))
    for name, line in lines.items():
        assert main([*line, "--epochs", "3", "--out", str(alone / name)]) == 0
        assert main(["--resume", "--out", str(two / name), "--epochs", "3"]) == 0
        assert_same_run(two / name, alone / name)
        assert main([*line, "--epochs", "1", "--out", str(back / name)]) == 0
    more = ["--epochs", "3", "--checkpoint-every", "1"]
    train_together(2, *(["--resume", "--out", str(back / name), *more] for name in lines))
    for name in lines:
        assert_same_run(back / name, alone / name)
        assert json.loads((back / name / "config.json").read_text())["about"]["processes"] == 2


def test_every_task_trains_on_two_processes(tmp_path: Path) -> None:
    more = ["--optimizer", "ekfac-default", "--epochs", "1"]
    train_together(2, *([task, *SMALL, *own, *more, "--out", str(tmp_path / task)] for task, own in TASKS.items()))
    for task in TASKS:
        run = load_run(tmp_path / task)
        assert run.status == "finished", task
        assert run.history[-1]["train_loss"] < run.history[0]["train_loss"], task


def test_the_command_under_torchrun_talks_once(tmp_path: Path) -> None:
    line = ["train", "classifier", *SMALL, "--epochs", "1", "--batch-norm", "--seeds", "0,1", "--keep-best", "--json"]
    said = torchrun(2, *line, "--tag", "two", "--out", str(tmp_path / "runs"))
    assert [run["status"] for run in json.loads(said)] == ["finished", "finished"]
    refused = as_torchrun(2, "-m", "ekfac", *line, "--out", str(tmp_path / "runs"), fails=True)
    assert "already holds a run" in refused


def test_a_batch_that_leaves_a_process_without_example_is_refused() -> None:
    with pytest.raises(Exception, match="batch_size 3 is less than the 4 processes"):
        Ranks(0, 4).check(3)
    assert [Ranks(rank, 3).part(list(range(8))) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
