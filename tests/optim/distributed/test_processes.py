"""Two gloo processes on halves of a batch give the weights of one process on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import started

# Run as a program, once a rank, so that whatever gloo does at exit stays out of the test process; the single process
# that they are compared with is this one.
ROOT = str(Path(__file__).parents[2])  # the workers import the tests' optimizers

WORKER = """
import contextlib
import os
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ekfac
import paper
from ekfac.optim.statistics.schedule import START
from ekfac.optim.executor import Executor

METHODS = {
    "per_example": (paper.EKFAC, {"scaling": "per_example"}),
    "averaged": (paper.EKFAC, {"scaling": "per_example", "scaling_decay": 0.8}),
    "running": (paper.EKFAC, {"scaling": "running", "kl_clip": 0.01}),
    "kronecker": (paper.EKFAC, {"scaling": "kronecker"}),
    "kfac": (paper.KFAC, {}),
    "default": (ekfac.EKFAC, {"eps": 1e-4}),  # where a gradient is zero, its rounding is divided by eps
    "diagonal": (ekfac.EKFAC, {"exclude": "*", "eps": 1e-4}),
    "default, s* of each batch": (ekfac.EKFAC, {"scaling": "per_example"}),
    "adaptive": (paper.EKFAC, {"damping": ekfac.AdaptiveDamping(start=0.05, every=2), "lr": 0.5}),
}
# How gradients are averaged, whether they are accumulated or clipped, and the method.
CASES = [
    ("by hand", "once", "per_example"),
    ("by hand", "once", "running"),
    ("by hand", "once", "kfac"),
    ("by hand", "accumulated", "averaged"),
    ("by hand", "accumulated", "running"),
    ("ddp", "once", "per_example"),
    ("ddp", "once", "running"),
    ("ddp", "once", "kronecker"),
    ("ddp", "accumulated", "per_example"),
    ("ddp", "accumulated", "running"),
    ("ddp", "clipped", "running"),
    ("ddp", "clipped", "kfac"),
    ("ddp", "clipped", "default"),
    ("ddp", "clipped", "averaged"),
    ("by hand", "once", "default"),
    ("ddp", "once", "diagonal"),
    ("ddp", "accumulated", "default"),
    ("ddp", "once", "default, s* of each batch"),
    ("by hand", "once", "adaptive"),
    ("ddp", "accumulated", "adaptive"),
    ("ddp", "clipped", "adaptive"),
]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(24, 2, 3, 3, dtype=torch.float64, generator=generator),
        torch.randn(24, 3, dtype=torch.float64, generator=generator),
    )


def loss_of(model, x, y):
    return 0.5 * (model(x) - y).square().sum() / len(x)


def state_of(opt, model):
    kept = opt.state_dict()["state"]  # of all owners
    return {name: kept.get(index, {}) for index, (name, _) in enumerate(model.named_parameters())}


def train(averaging, how, method, rank=0, world=1):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.PReLU(), nn.Linear(4, 3)
    ).double()
    kind, own = METHODS[method]
    ddp = DistributedDataParallel(model) if averaging == "ddp" and world > 1 else None
    opt = kind(model, **{"lr": 0.05, "damping": 0.05, "refresh_every": 3, "momentum": 0.9, "factor_decay": 0.7, **own})
    net = ddp or model
    for step in range(7):
        x, y = (t.chunk(world)[rank] for t in batch(step))
        pieces = [(x, y)] if how != "accumulated" else list(zip(x.chunk(2), y.chunk(2)))

        def closure():
            opt.zero_grad()
            total = 0.0
            for k, piece in enumerate(pieces):
                last = ddp is None or k == len(pieces) - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = loss_of(net, *piece) / len(pieces)
                    loss.backward()
                total += loss.item()
            if world > 1 and ddp is None:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
            if how == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return total

        opt.step(closure)
    state = state_of(opt, model)
    damping = torch.tensor([opt.stats()["damping"]], dtype=torch.float64)
    opt.close()
    return {"model": {**model.state_dict(), "damping": damping}, "state": state}


class Late(Executor):
    # As on a GPU: a mask now, the verdict only when the next step asks.
    bad = False

    def check_finite(self, sizes, wait):
        good = all(bool(torch.isfinite(size)) for size in sizes)
        if wait:
            return good, None
        self.bad = not good
        return True, torch.tensor(float(good), dtype=torch.float64)

    def settle(self):
        bad, self.bad = self.bad, False
        return bad


def skip_after_the_start(rank, world):
    # A batch that is not finite when layers take their statistics by turns: whose turn it is, is heard late.
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())]).double()
    opt = ekfac.EKFAC(model, refresh_every=48, lr=1e-3)
    opt.engine.executor = Late(opt.engine.options, whole_steps=True)
    for step in range(30):
        if step == 12:
            opt.engine.schedule.applied_steps = START
        generator = torch.Generator().manual_seed(world * step + rank)
        x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        if step == 17:
            x[0, 0] = float("nan")
        opt.zero_grad()
        model(x).square().sum(1).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
    assert opt.stats()["skipped_steps"] == 1
    return state_of(opt, model)


def main(rank, world, folder):
    torch.set_num_threads(1)
    rank, world = int(rank), int(world)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ends = {"/".join(case): train(*case, rank, world) for case in CASES}
    ends["skip"] = {"state": skip_after_the_start(rank, world)}
    torch.save(ends, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""
worker: dict[str, Any] = {"__name__": "worker"}
exec(WORKER, worker)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes ended with, for all cases: one start of the two serves them all."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    (folder / "worker.py").write_text(WORKER)
    both = [started.start(["worker.py", rank, 2, folder], cwd=folder) for rank in range(2)]
    said = []
    try:
        for process in both:
            said += process.communicate(timeout=300)
    finally:
        for process in both:
            process.kill()
    assert all(process.returncode == 0 for process in both), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.over_a_second
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("case", worker["CASES"], ids="/".join)
def test_two_processes_are_one(case: tuple[str, str, str], ends: list[dict[str, Any]]) -> None:
    expected = worker["train"](*case)["model"]
    first, second = (end["/".join(case)] for end in ends)
    for end in (first, second):
        for name, value in expected.items():
            error = (end["model"][name] - value).abs().max()
            assert error <= 1e-10, f"{name} is off by {error:.3g}"
    assert_same_state(first, second)


def assert_same_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert any(first["state"].values())
    for name, kept in first["state"].items():
        assert kept.keys() == second["state"][name].keys()
        for key, value in kept.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, second["state"][name][key]), f"{key} of {name} differs between processes"


@pytest.mark.over_a_second
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_processes_stay_the_same_after_a_skipped_step(ends: list[dict[str, Any]]) -> None:
    assert_same_state(*(end["skip"] for end in ends))
