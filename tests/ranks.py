"""Starting ranks, and comparing what they end with."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import started

TESTS = Path(__file__).parent

Ends = dict[str, list[Any]]


def common_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all workers of this run of the tests share, so that none does again what another has."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Have a folder to oneself; a worker that dies lets go of it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_ranks(file: str, world: int, scenarios: tuple[str, ...], folder: Path) -> Ends:
    """What every rank ended with, by scenario: one start of the ranks serves them all, and all who name the folder."""
    done = folder / f"{world}-done"
    with one_at_a_time(folder):
        if not done.exists():
            ran = started.run([__file__, file, world, folder, ",".join(scenarios)], timeout=600)
            assert ran.returncode == 0, ran.stdout + ran.stderr
            done.touch()
    ends = [torch.load(folder / f"{world}-{rank}.pt", weights_only=True) for rank in range(world)]
    return {name: [end.get(name, {"traceback": "not reached"}) for end in ends] for name in scenarios}


def fork_ranks(file: str, world: int, folder: str, scenarios: str) -> int:
    """Import what the ranks need once, and become them; returns how many have failed."""
    worker = importlib.import_module(file.removesuffix(".py"))
    ranks = {}
    for rank in range(world):
        child = os.fork()
        if not child:
            try:
                worker.main(rank, world, folder, scenarios.split(","))
            finally:
                os._exit(1)  # it does not return
        ranks[child] = rank
    failed = 0
    while ranks:
        child, status = os.wait()
        del ranks[child]
        if status:
            failed += 1
            for other in ranks:  # which would wait for it
                os.kill(other, signal.SIGKILL)
    return failed


def of(ends: Ends, scenario: str) -> list[Any]:
    for rank, end in enumerate(ends[scenario]):
        assert "traceback" not in end, f"rank {rank}: {end['traceback']}"
    return ends[scenario]


def assert_equal(one: Any, two: Any, where: str = "") -> None:
    """Plain data that is the same, tensors to the bit."""
    assert type(one) is type(two), where
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_equal(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for index, (x, y) in enumerate(zip(one, two, strict=True)):
            assert_equal(x, y, f"{where}/{index}")
    elif isinstance(one, Tensor):
        assert torch.equal(one, two), f"{where} differs by {(one - two).abs().max()}"
    else:
        assert one == two, where


def assert_replicas(ends: list[Any]) -> None:
    for rank, end in enumerate(ends[1:], 1):
        for part in ("model", "state"):
            assert_equal(ends[0][part], end[part], f"rank {rank}: {part}")


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = float((found[name] - value).abs().max())
        assert error <= 1e-10, f"{name} is off by {error:.3g}"


if __name__ == "__main__":
    sys.exit(fork_ranks(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
