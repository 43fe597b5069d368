"""One whole training step (forward, backward, optimizer) of each optimizer, as a ratio to Adam's with batch-norm.

    python benchmarks/bench_step.py [--device cuda] [--tasks autoencoder:200 autoencoder:500 vgg11:500 resnet34:500]

All optimizers of a task are measured in one run, in turns, so that a busy machine disturbs them alike. The mean counts
every step, those that renew a basis too; p50 and p99 are of single steps. Data are random: only time is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.optimizers import build_optimizer
from ekfac.lab.tasks import TASKS

CONVOLUTIONAL = {"sua": True, "damping": 1e-2, "refresh_every": 500}
RIVALS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "Adam + BN": ("adam", True, {"lr": 1e-4}),
    "SGD + BN": ("sgd", True, {"lr": 1e-4}),
    "KFAC": ("kfac", False, {"lr": 1e-4, "damping": 1e-2}),
    "EKFAC": ("ekfac", False, {"lr": 1e-4, "damping": 1e-2, "scaling": "per_example"}),
    "EKFAC-ra": ("ekfac-ra", False, {"lr": 1e-4, "damping": 1e-2, "scaling": "running"}),
}


@dataclass
class Contender:
    """One network and optimizer, and the seconds that its steps took."""

    step: Callable[[], None]
    state_bytes: Callable[[], int]
    seconds: list[float] = field(default_factory=list)


def contender(task_name: str, batch: int, rival: str, device: torch.device, refresh_every: int | None) -> Contender:
    """Set a rival up on a task."""
    name, batch_norm, options = RIVALS[rival]
    task = TASKS.get(task_name)
    if name.startswith(("kfac", "ekfac")):
        if task_name in ("vgg11", "resnet34"):
            options = {**options, **CONVOLUTIONAL}
        else:
            options = {**options, "refresh_every": 50}
        if refresh_every is not None:
            options = {**options, "refresh_every": refresh_every}
    torch.manual_seed(0)
    model = task.build(task.width, batch_norm).to(device)
    optimizer = build_optimizer(name, model, options)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, *task.input_shape, generator=generator).to(device)
    y = torch.randint(10, (batch,), generator=generator).to(device)

    def step() -> None:
        optimizer.zero_grad()
        task.losses(model(x), x, y).mean().backward()
        optimizer.step()

    def state_bytes() -> int:
        tensors = [t for s in getattr(optimizer, "state", {}).values() for t in s.values() if torch.is_tensor(t)]
        return sum(t.numel() * t.element_size() for t in tensors)

    return Contender(step, state_bytes)


def measure(contenders: dict[str, Contender], steps: int, device: torch.device) -> None:
    """Time ``steps`` steps of each, ten at a time in turns; on a GPU by events, so that nothing waits in between."""
    cuda = device.type == "cuda"
    for _ in range(0, steps, 10):
        for c in contenders.values():
            if cuda:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
                events[0].record()
                for event in events[1:]:
                    c.step()
                    event.record()
                torch.cuda.synchronize()
                c.seconds += [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
            else:
                for _ in range(10):
                    started = time.perf_counter()
                    c.step()
                    c.seconds.append(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="*", default=["autoencoder:200", "autoencoder:500"])
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--refresh-every", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="also write the rows as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    command = f"python {shlex.join(sys.argv)}"
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}\n{command}")
    rows = []
    for entry in args.tasks:
        task, _, batch = entry.partition(":")
        contenders = {r: contender(task, int(batch), r, device, args.refresh_every) for r in args.rivals}
        for c in contenders.values():  # the first step compiles, allocates and solves for the first bases
            for _ in range(3):
                c.step()
        measure(contenders, args.steps, device)
        reference = statistics.mean(contenders[args.rivals[0]].seconds)
        print(f"\n{task}, batch {batch}\n{'':14}{'mean ms':>9}{'ratio':>8}{'p50 ms':>9}{'p99 ms':>9}{'state MiB':>11}")
        for name, c in contenders.items():
            mean = statistics.mean(c.seconds)
            p50, p99 = statistics.median(c.seconds), statistics.quantiles(c.seconds, n=100)[98]
            row = {
                "task": task, "batch": int(batch), "optimizer": name, "mean_ms": mean * 1e3, "ratio": mean / reference,
                "p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "state_bytes": c.state_bytes(),
            }  # fmt: skip
            rows.append(row)
            print(f"{name:14}{mean * 1e3:9.2f}{mean / reference:8.2f}{p50 * 1e3:9.2f}{p99 * 1e3:9.2f}"
                  f"{row['state_bytes'] / 2**20:11.1f}", flush=True)  # fmt: skip
        del contenders
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": machine, "torch": torch.__version__, "command": command}
        args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
