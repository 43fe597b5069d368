"""kill -9 at random moments: resuming gives the uninterrupted run, bit for bit."""

import os
import random
import signal
import time

import pytest
import torch

import started
from ekfac.lab.training.run import load_run
from lab.training.test_runs import same, timeless, weights


def start(folder, optimizer, epochs, *more):
    words = ["classifier", "--optimizer", optimizer, "--width", "8", "--limit", "200", "--batch-size", "50"]
    words += ["--epochs", str(epochs), "--device", "cpu", "--out", str(folder), *more]
    if optimizer == "ekfac-ra":
        words += ["--refresh-every", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return started.start(["-m", "ekfac.lab.train", *words], env=environment)


def go_on(folder, optimizer, epochs):
    """Start a run, or go on with it; one that was killed before its first checkpoint is started afresh."""
    return start(folder, optimizer, epochs, "--resume" if (folder / "checkpoint.pt").exists() else "--overwrite")


def lines(folder) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_and_resume(tmp_path, optimizer: str, kills: int, seed: int, epochs: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert start(whole, optimizer, epochs).wait() == 0
    chance = random.Random(seed)
    # Moments are chosen by what the run has written, not by a clock, so that a slow machine is hit just the same:
    # at random epochs, the very first included, and then a random short while later.
    targets = sorted(chance.sample(range(epochs), kills))
    done = 0
    for target in targets:
        process = go_on(cut, optimizer, epochs)
        while lines(cut) < target and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        assert code in (-signal.SIGKILL, 0)  # on a busy machine the last ones may come too late
        done += code != 0
    assert done
    assert len(load_run(cut).history) <= epochs + 1
    assert go_on(cut, optimizer, epochs).wait() == 0
    assert timeless(load_run(cut).history) == timeless(load_run(whole).history)
    assert same(weights(cut), weights(whole))
    states = [torch.load(folder / "checkpoint.pt", weights_only=True)["trainer"]["rng"] for folder in (cut, whole)]
    assert torch.equal(*states)


def test_three_kills(tmp_path):
    kill_and_resume(tmp_path, "ekfac-ra", kills=3, seed=0, epochs=9)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "ekfac-ra"])
def test_twenty_kills(optimizer, tmp_path):
    kill_and_resume(tmp_path, optimizer, kills=20, seed=1, epochs=20)
