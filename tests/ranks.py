"""Starting ranks, and comparing what they end with."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import started

TESTS = Path(__file__).parent

Ends = dict[str, list[Any]]


def run_ranks(file: str, world: int, scenarios: tuple[str, ...], folder: Path) -> Ends:
    """What every rank ended with, by scenario: one start of the ranks serves them all."""
    done = started.run([__file__, file, world, folder, ",".join(scenarios)], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
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
