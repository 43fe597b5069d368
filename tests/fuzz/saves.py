"""Faults in the middle of a save: no space at any byte, an I/O error, no memory or Ctrl-C at any call.

Afterwards there is the old file or the new one, whole, nothing beside it, and the next save works.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ekfac import Curvature, fisher
from ekfac.lab.train import main
from ekfac.lab.training.runs import RunFolder, load_run
from fuzz.files import CONFIG, run_files
from fuzz.harness import Broken, Fuzzer

FAULTS: dict[str, Callable[[], BaseException]] = {
    "no space": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "I/O error": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "no memory": MemoryError,
    "Ctrl-C": KeyboardInterrupt,
}


class _Calls:
    """Counts the calls of Python functions, and raises at one of them."""

    def __init__(self, at: int | None, fault: Callable[[], BaseException]) -> None:
        self.at, self.fault, self.count = at, fault, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        self.count += event == "call"
        if self.at is not None and self.count == self.at:
            self.at = None
            sys.settrace(None)
            raise self.fault()


@contextlib.contextmanager
def fault_at_call(at: int | None, fault: Callable[[], BaseException]) -> Iterator[_Calls]:
    """Let a call within the block fail; ``None`` only counts them."""
    calls = _Calls(at, fault)
    sys.settrace(calls)  # type: ignore[arg-type]
    try:
        yield calls
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def no_space_from(byte: int) -> Iterator[None]:
    """Let the system refuse to make any file longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@functools.cache
def operators() -> tuple[Curvature, Curvature]:
    """Two that differ."""
    model = nn.Linear(5, 3)
    data = [(torch.arange(20.0).reshape(4, 5) / 20, torch.tensor([0, 1, 2, 0]))]
    return fisher(model, data, "categorical"), fisher(model, [(-data[0][0] + 1, data[0][1])], "categorical")


def attack(chance: random.Random, file: Path, save: Callable[[int], None], read: Callable[[], Any]) -> str:
    """Save 0, then save 1 with a fault; what is there afterwards must be 0 or 1 as a whole."""
    save(0)
    old = read()
    size = file.stat().st_size
    if chance.random() < 0.3:
        kind, byte = "no space at a byte", chance.randrange(size)
        context: Any = no_space_from(byte)
    else:
        with fault_at_call(None, MemoryError) as calls:
            save(0)
        kind = chance.choice(list(FAULTS))
        context = fault_at_call(chance.randrange(1, calls.count + 1), FAULTS[kind])
    raised = False
    try:
        with context:
            save(1)
    except (OSError, MemoryError, KeyboardInterrupt) as error:
        raised = True
        error.__traceback__ = None  # frees what the frames hold, as the end of a program would
    except Exception as error:
        raise Broken(f"{kind}: became {type(error).__name__}: {error}") from error
    if not raised and kind == "no space at a byte":
        raise Broken(f"{kind}: a save without space raised nothing")
    left = [name.name for name in file.parent.iterdir() if name.suffix == ".part" or ".tmp" in name.name]
    if left:
        raise Broken(f"{kind}: left {left} behind")
    try:
        now = read()
    except Exception as error:
        raise Broken(f"{kind}: the file cannot be read any more: {error}") from error
    save(1)
    new = read()
    if now not in (old, new):
        raise Broken(f"{kind}: neither the old nor the new content")
    return f"{kind}, {'new' if now == new and new != old else 'old'} kept"


def save_checkpoint(chance: random.Random, folder: Path) -> str:
    (folder / "checkpoint.pt").write_bytes(run_files()["checkpoint.pt"])
    writer = RunFolder(folder)
    state = writer.load() or {}

    def save(which: int) -> None:
        state["trainer"]["steps_done"] = which
        writer.save(state)

    def read() -> int:
        found = writer.load()
        assert found is not None
        return int(found["trainer"]["steps_done"])

    return attack(chance, writer.checkpoint_file, save, read)


def save_operator(chance: random.Random, folder: Path) -> str:
    file = folder / "G.safetensors"
    return attack(
        chance,
        file,
        lambda which: operators()[which].save(file),
        lambda: Curvature.load(file).dense().flatten().tolist(),
    )


def save_records(chance: random.Random, folder: Path) -> str:
    for name, content in run_files().items():
        (folder / name).write_bytes(content)
    run = load_run(folder)
    writer = RunFolder(folder)

    def save(which: int) -> None:
        writer.start(run.config, run.about, run.history[:1])
        if which:
            writer.add(run.history[1])

    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]
    try:
        return attack(chance, writer.metrics_file, save, lambda: len(load_run(folder).history))
    finally:
        del sys.modules["torch.utils.tensorboard"]
        writer.close()


def train_without_space(chance: random.Random, folder: Path) -> str:
    """A whole command whose disk is full at some byte: one line, 2, the old checkpoint, and it goes on later."""
    out = folder / "run"
    words = [CONFIG.task, "--optimizer", CONFIG.optimizer, "--width", "4", "--limit", "50", "--batch-size", "25"]
    words += ["--device", "cpu", "--epochs", "3", "--out", str(out)]
    resumed = chance.random() < 0.7
    if resumed:
        out.mkdir()
        for name, content in run_files().items():
            (out / name).write_bytes(content)
        words.append("--resume")
    byte = chance.randrange(1, chance.choice((4_000, len(run_files()["checkpoint.pt"]))))
    with no_space_from(byte):
        code, said = train_quietly(words)
    if code != 2 or said.count("\n") != 1 or not said.startswith("error: --out"):
        raise Broken(f"exit {code}: {said[-300:]}")
    left = [file.name for file in out.iterdir() if file.suffix == ".part" or file.name == ".lock"]
    if left:
        raise Broken(f"left behind: {left}")
    if resumed and (out / "checkpoint.pt").read_bytes() != run_files()["checkpoint.pt"]:
        raise Broken("the old checkpoint is gone")
    code, said = train_quietly(words if resumed else [*words, "--overwrite"])
    if code != 0 or len(load_run(out).history) != 4:
        raise Broken(f"the run does not go on: {said[-300:]}")
    return "went on from the old checkpoint" if resumed else "started afresh"


def train_quietly(words: list[str]) -> tuple[int, str]:
    """Run the command in this process; return its exit status and what it said to the user's error stream."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    return code, said.getvalue()


FUZZERS = (
    Fuzzer("save-checkpoint", "a fault in a save leaves a whole checkpoint, old or new", 400, save_checkpoint),
    Fuzzer("save-operator", "a fault in a save leaves a whole operator file, old or new", 400, save_operator),
    Fuzzer("save-records", "a fault in a record leaves config and metrics readable", 400, save_records),
    Fuzzer("disk-full", "a full disk: one line, exit 2, nothing lost", 60, train_without_space),
)
