"""Damaged files: a flipped bit, a changed byte, a cut, an insertion. Each must be refused, by a clear error."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import torch
from torch import nn

from ekfac import Curvature, fisher
from ekfac.lab.registry import LabError
from ekfac.lab.training.run import TrainConfig, train
from ekfac.lab.training.runs import RunFolder, load_run
from fuzz.harness import Broken, Fuzzer

CONFIG = TrainConfig("classifier", "ekfac-ra", width=4, limit=50, batch_size=25, epochs=1, device="cpu")


@functools.cache
def run_files() -> dict[str, bytes]:
    """The files of a small finished run, made once."""
    with tempfile.TemporaryDirectory() as folder:
        train(CONFIG, folder)
        names = ("config.json", "metrics.jsonl", "checkpoint.pt")
        return {name: (Path(folder) / name).read_bytes() for name in names}


@functools.cache
def operator_files() -> dict[str, bytes]:
    """One operator a kind, made once."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
    data = [(torch.randn(6, 1, 4, 4, generator=generator), torch.randint(3, (6,), generator=generator))]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for approximation in ("full", "block", "diagonal", "kfac", "ekfac"):
            file = Path(folder) / approximation
            fisher(model, data, "categorical", approximation=approximation).save(file)
            found[approximation] = file.read_bytes()
    return found


def damaged(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Change a file in one place, as a disk, a network or a hand might."""
    how = chance.choice(("flip", "flip", "flip", "byte", "cut", "insert", "drop"))
    at = chance.randrange(len(content))
    if how == "flip":
        changed = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    elif how == "byte":
        changed = content[:at] + bytes([(content[at] + chance.randrange(1, 256)) % 256]) + content[at + 1 :]
    elif how == "cut":
        changed = content[:at]
    elif how == "insert":
        changed = content[:at] + chance.randbytes(chance.randrange(1, 9)) + content[at:]
    else:
        changed = content[:at] + content[at + chance.randrange(1, 9) :]
    return changed, how


def check_run_file(chance: random.Random, folder: Path, name: str) -> str:
    changed, how = damaged(run_files()[name], chance)
    for other, content in run_files().items():
        (folder / other).write_bytes(changed if other == name else content)
    try:
        if name == "checkpoint.pt":
            RunFolder(folder).load()
        else:
            found = load_run(folder)
    except LabError as error:
        if "\n" in str(error):
            raise Broken(f"the error has more than one line: {error!r}") from error
        return f"{name}, {how}"
    if name == "metrics.jsonl" and _is_torn(changed, how):
        # What a kill leaves: whole lines, or one cut short at the end. They are read as the run's beginning.
        whole = [line for line in run_files()[name].split(b"\n") if line]
        if len(found.history) <= len(whole):
            return f"{name}, {how} at its end"
    raise Broken(f"{how} in {name} was not noticed")


def _is_torn(changed: bytes, how: str) -> bool:
    original = run_files()["metrics.jsonl"]
    return how in ("cut", "drop") and original.startswith(changed)


def flip_checkpoint(chance: random.Random, folder: Path) -> str:
    return check_run_file(chance, folder, "checkpoint.pt")


def flip_config(chance: random.Random, folder: Path) -> str:
    return check_run_file(chance, folder, "config.json")


def flip_metrics(chance: random.Random, folder: Path) -> str:
    return check_run_file(chance, folder, "metrics.jsonl")


def flip_operator(chance: random.Random, folder: Path) -> str:
    kind = chance.choice(list(operator_files()))
    changed, how = damaged(operator_files()[kind], chance)
    file = folder / "G.safetensors"
    file.write_bytes(changed)
    try:
        Curvature.load(file)
    except ValueError as error:
        if str(file) not in str(error):
            raise Broken(f"the error does not name the file: {error}") from error
        return f"{kind}, {how}"
    raise Broken(f"{how} in an operator ({kind}) was not noticed")


FUZZERS = (
    Fuzzer("checkpoint", "a damaged checkpoint.pt is refused", 500, flip_checkpoint),
    Fuzzer("operator", "a damaged operator file is refused", 500, flip_operator),
    Fuzzer("config", "a damaged config.json is refused", 500, flip_config),
    Fuzzer("metrics", "a damaged metrics.jsonl is refused", 500, flip_metrics),
)
