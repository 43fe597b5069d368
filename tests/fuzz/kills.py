"""kill -9 in the middle of writes: what is left is whole, of one moment, and the next process goes on from it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.training.runs import RunFolder, load_run
from fuzz.files import run_files
from fuzz.harness import Broken, Fuzzer

KILLS = 10


def write_for_ever(out: Path, made: Path) -> None:
    """Write epoch after epoch, as training does but without a pause, so that a kill lands in a write."""
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]
    run = load_run(made)
    folder = RunFolder(out)
    old = folder.load()
    history: list[dict[str, Any]] = [] if old is None else old["history"]
    folder.start(run.config, run.about, history)
    for epoch in range(len(history), 1_000_000):
        history.append({**run.history[-1], "epoch": epoch})
        folder.add(history[-1])
        folder.save({"trainer": {"w": torch.full((50_000,), float(epoch))}, "history": history})


def kill(chance: random.Random, folder: Path) -> str:
    """Several processes one after another, each killed at a random moment; what each leaves is checked."""
    out, made = folder / "run", folder / "made"
    made.mkdir()
    for name, content in run_files().items():
        (made / name).write_bytes(content)
    amid = 0
    for _ in range(KILLS):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(out, made)
            finally:
                os._exit(1)
        time.sleep(0.02 + chance.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] != signal.SIGKILL:
            raise Broken("a writer ended by itself")
        amid += bool(list(out.glob("*.part"))) if out.exists() else 0
        if (out / "config.json").exists():
            check(out)
    return f"{amid} of {KILLS} kills left half a file beside the whole one"


def check(out: Path) -> None:
    """Everything can be read, is of one moment, and belongs to nobody."""
    run = load_run(out)
    checkpoint = RunFolder(out).load()
    saved = 0 if checkpoint is None else len(checkpoint["history"])
    if not saved <= len(run.history) <= saved + 1:
        raise Broken(f"{len(run.history)} records beside a checkpoint of {saved}")
    if checkpoint is not None and not bool((checkpoint["trainer"]["w"] == saved - 1).all()):
        raise Broken("the checkpoint is of no single epoch")
    lock = RunFolder(out).lock
    lock.acquire()
    lock.release()


FUZZERS = (Fuzzer("kills", f"kill -9 while files are written: nothing is lost ({KILLS} kills a try)", 10, kill),)
