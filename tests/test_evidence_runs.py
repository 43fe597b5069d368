"""The experiments behind the pages: what is run, what is chosen, and what a cut leaves behind."""

import os
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import started

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import evidence

from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.training.runs import load_run
from processes import alive, children, wait_until

TINY = {"width": 8, "limit": 100, "epochs": 1, "dataset": "mnist-5k", "batch_size": 50, "device": "cpu"}


def tiny(part: str, results: Path) -> list[tuple[str, TrainConfig]]:
    return [(place, replace(config, **TINY).resolved()) for place, config in evidence.PARTS[part](results)]


def test_every_method_gets_the_same_number_of_trials(tmp_path):
    tried = Counter(c.optimizer for _, c in evidence.mnist_search(tmp_path))
    assert set(tried.values()) == {8} and "ekfac-default" not in tried
    for task in evidence.COMPARED:
        tried = Counter(c.optimizer for _, c in evidence.PARTS[f"{task}-search"](tmp_path))
        assert tried == {"sgd": 8, "adamw": 8, "muon": 8, "soap": 8}


def test_the_grids_have_their_centre_and_five_by_five_points(tmp_path):
    grids = Counter(c.optimizer for _, c in evidence.sensitivity(tmp_path))
    assert grids == {"ekfac-default": 25, "ekfac-ra": 25, "kfac": 25, "adam": 5, "muon": 5, "soap": 5}
    defaults = [(c.lr, c.damping) for _, c in evidence.sensitivity(tmp_path) if c.optimizer == "ekfac-default"]
    assert (0.01, 1e-8) in defaults and len(set(defaults)) == 25


@pytest.mark.parametrize("part", ["mnist-search", "sensitivity", *(f"{task}-search" for task in evidence.COMPARED)])
def test_every_setting_is_possible(part, tmp_path):
    for _, config in evidence.PARTS[part](tmp_path):
        config.resolved()


def test_runs_are_recorded_once_and_the_best_is_taken_further(tmp_path, monkeypatch):
    place = "mnist/search"
    jobs = [job for job in tiny("mnist-search", tmp_path) if job[1].optimizer == "sgd"][:2]
    for job in jobs:
        assert "finished" in evidence.run(job, tmp_path, None, time.time() + 600)
        assert "there already" in evidence.run(job, tmp_path, None, time.time() + 600)
        assert sorted(f.name for f in (tmp_path / place / key(job[1])).iterdir()) == ["config.json", "metrics.jsonl"]
    assert "there already" in evidence.run(jobs[0], tmp_path, None, time.time() + 600, again=True), "the same sources"
    monkeypatch.setattr(evidence, "source_digest", lambda: "other")
    assert "finished" in evidence.run(jobs[0], tmp_path, None, time.time() + 600, again=True)
    losses = {job[1].lr: load_run(tmp_path / place / key(job[1])).history[-1]["train_loss_mean"] for job in jobs}
    (best,) = evidence.best_of(tmp_path / place, epochs=1)
    assert best.lr == min(losses, key=losses.get)


def test_what_is_cut_short_leaves_nothing_behind(tmp_path, monkeypatch):
    job = tiny("mnist-search", tmp_path)[0]
    assert "no time left" in evidence.run(job, tmp_path, None, time.time() - 1)

    def late(self, record):
        raise TimeoutError

    monkeypatch.setattr(evidence.Deadline, "epoch", late)
    assert "cut short" in evidence.run(job, tmp_path, None, time.time() + 600)
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(how, tmp_path):
    results, changes = tmp_path / "results", [f"{name}={value}" for name, value in {**TINY, "epochs": 10**6}.items()]
    words = [evidence.__file__, "mnist-search", "--only", "sgd", "--workers", "2", "--results", str(results)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = started.start([*words, "--set", *changes], env=environment, forks=True)
    try:
        wait_until(lambda: len(list(results.rglob("metrics.jsonl"))) == 2 or process.poll() is not None)
        workers = children(process.pid)
        assert len(workers) >= 2
        process.send_signal(how)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    wait_until(lambda: not any(alive(worker) for worker in workers))
    if how != signal.SIGKILL:
        assert process.returncode == 130 and error.startswith("interrupted") and error.count("\n") == 1
        assert not list(results.rglob("config.json"))


def test_a_run_that_was_killed_is_run_again(tmp_path):
    place, config = job = tiny("mnist-search", tmp_path)[0]
    assert "finished" in evidence.run(job, tmp_path, None, time.time() + 600)
    metrics = tmp_path / place / key(config) / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.splitlines(keepends=True)[0])
    assert "finished" in evidence.run(job, tmp_path, None, time.time() + 600)
    assert metrics.read_text().count("\n") == whole.count("\n") == 2


def test_finals_want_the_machine_to_themselves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evidence.py", "mnist-finals", "--workers", "2", "--results", str(tmp_path)])
    with pytest.raises(SystemExit):
        evidence.main()
    assert "finals are timed" in capsys.readouterr().err
