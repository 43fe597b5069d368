"""Two gloo processes on halves of a batch give the weights of one process on the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Run as a program, once a rank, so that whatever gloo does at exit stays out of the test process.
WORKER = """
import os
import sys

import torch
from torch import distributed as dist
from torch import nn

import ekfac

METHODS = {
    "per_example": (ekfac.EKFAC, {"scaling": "per_example"}),
    "averaged": (ekfac.EKFAC, {"scaling": "per_example", "scaling_decay": 0.8}),
    "running": (ekfac.EKFAC, {"scaling": "running", "kl_clip": 0.01}),
    "kronecker": (ekfac.EKFAC, {"scaling": "kronecker"}),
    "kfac": (ekfac.KFAC, {}),
}


def build(method):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.PReLU(), nn.Linear(4, 3)
    ).double()
    return model, *METHODS[method]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(12, 2, 3, 3, dtype=torch.float64, generator=generator),
        torch.randn(12, 3, dtype=torch.float64, generator=generator),
    )


def loss_of(model, x, y):
    return 0.5 * (model(x) - y).square().sum() / len(x)


def train(method, how, rank, world, out):
    from torch.nn.parallel import DistributedDataParallel

    model, kind, own = build(method)
    options = dict(lr=0.05, damping=0.05, refresh_every=3, momentum=0.9, factor_decay=0.7, **own)
    ddp = DistributedDataParallel(model) if how.startswith("ddp") and world > 1 else None
    opt = kind(model if how != "ddp wrapped" or ddp is None else ddp, **options)
    net = ddp or model
    for step in range(7):
        x, y = (t.chunk(world)[rank] for t in batch(step))
        opt.zero_grad()
        if "accumulated" in how:
            pieces = list(zip(x.chunk(2), y.chunk(2)))
            for number, (x_k, y_k) in enumerate(pieces):
                if ddp is not None and number + 1 < len(pieces):
                    with ddp.no_sync():
                        (loss_of(net, x_k, y_k) / len(pieces)).backward()
                else:
                    (loss_of(net, x_k, y_k) / len(pieces)).backward()
        else:
            loss_of(net, x, y).backward()
        if world > 1 and ddp is None:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        opt.step()
    state = {name: dict(opt.state[p]) for name, p in model.named_parameters()}
    torch.save({"model": model.state_dict(), "state": state}, out)


def main(method, how, rank, world, folder):
    torch.set_num_threads(1)
    rank, world = int(rank), int(world)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    train(method, how, rank, world, f"{folder}/{world}-{rank}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def launch(folder: Path, method: str, how: str, rank: int, world: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "worker.py", method, how, str(rank), str(world), str(folder)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("plain", "per_example"),
        ("plain", "running"),
        ("plain", "kfac"),
        ("plain accumulated", "averaged"),
        ("plain accumulated", "running"),
        ("ddp", "per_example"),
        ("ddp", "running"),
        ("ddp", "kronecker"),
        ("ddp accumulated", "per_example"),
        ("ddp accumulated", "running"),
    ],
)
def test_two_processes_are_one(how: str, method: str, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    for world in (1, 2):
        started = [launch(tmp_path, method, how, rank, world) for rank in range(world)]
        for process in started:
            try:
                said, _ = process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                for other in started:
                    other.kill()
                raise
            assert process.returncode == 0, said
    one, *two = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1-0", "2-0", "2-1"))
    for rank in two:
        for name, expected in one["model"].items():
            error = (rank["model"][name] - expected).abs().max()
            assert error <= 1e-10, f"{name} is off by {error:.3g}"
    for name, kept in two[0]["state"].items():
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, two[1]["state"][name][key]), f"{key} of {name} differs between processes"
