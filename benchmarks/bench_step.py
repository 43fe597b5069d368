"""One whole training step (forward, backward, optimizer) of each optimizer, as a ratio to Adam's with batch-norm.

    python benchmarks/bench_step.py [--device cuda] [--tasks autoencoder:200 autoencoder:500 vgg11:500 resnet34:500]
    python benchmarks/bench_step.py --growth     # how the step grows with width, depth and batch
    python benchmarks/bench_step.py --out results/bench

All optimizers of a task are measured in one run, in turns, so that a busy machine disturbs them alike. The mean counts
every step, those that renew a basis too; p50 and p99 are of single steps. Networks train on their task's data, as how
often a basis is renewed depends on these; CIFAR-10 is looked for in EKFAC_DATA, and one batch of random images stands
in for it where it is not found.
"State" is what the optimizer keeps between steps; "peak" the most that network, data, gradients and optimizer took at
one time in the first steps, which are not timed: a solve for the bases and their turning in the first ten steps are
among them. Until step 300 all bases are turned together now and then; --warm-up 310 leaves that out, and so does
--skip-start, which counts the steps before as taken; the steps that follow come in a few kinds, each captured in a CUDA
graph at its third time, and --settle runs so many of them before the clock. With --out, Markdown and JSON go to that
folder.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler that counts bytes on a CPU says nothing

import torch
from clock import Clock
from contenders import (
    ENTRIES,
    WARM_UP,
    WITHOUT_BATCH_NORM,
    Contender,
    on_square_layers,
    on_task,
    package_versions,
    reason,
)

from ekfac.lab.training.runs import machine

MIB = 2**20
TURN = 10  # steps at a time
GROWING = ("Adam", "KFAC", "EKFAC-ra")
DEPTH, WIDTH, BATCH = 2, 500, 200


def measure(contenders: dict[str, Contender], steps: int, device: torch.device, clock: Clock | None = None) -> None:
    """Time ``steps`` steps of each, a few at a time in turns; one that fails drops out."""
    for start in range(0, steps, TURN):
        if clock is not None and start:
            clock.part(f"{start} steps of each")
        for contender in contenders.values():
            if contender.failed is None:
                try:
                    contender.seconds += turn(contender, device)
                except Exception as error:
                    contender.failed = reason(error)


def turn(contender: Contender, device: torch.device) -> list[float]:
    """Time a few steps; on a GPU by events, so that nothing waits in between."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(TURN + 1)]
        events[0].record()
        for event in events[1:]:
            contender.step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    found = []
    for _ in range(TURN):
        started = time.perf_counter()
        contender.step()
        found.append(time.perf_counter() - started)
    return found


def rows_of(contenders: dict[str, Contender], about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row a contender; ratios are to Adam, or without it to the first that went through."""
    by_rank = sorted(contenders, key=lambda name: name not in ("Adam + BN", "Adam"))
    reference = next((statistics.mean(contenders[n].seconds) for n in by_rank if contenders[n].failed is None), None)
    rows = []
    for name, c in contenders.items():
        row = {**about, "optimizer": name, "options": ENTRIES[name].about if name in ENTRIES else ""}
        if c.failed is None and reference is not None:
            mean = statistics.mean(c.seconds)
            row |= {
                "mean_ms": mean * 1e3,
                "ratio": mean / reference,
                "p50_ms": statistics.median(c.seconds) * 1e3,
                "p99_ms": statistics.quantiles(c.seconds, n=100)[98] * 1e3,
                "state_bytes": c.state_bytes(),
                "peak_bytes": c.peak_bytes,
                "steps": len(c.seconds),
                "slow_steps": sum(t > 2 * statistics.median(c.seconds) for t in c.seconds),
            }
        rows.append({**row, "failed": c.failed})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| optimizer | ratio | mean ms | p50 ms | p99 ms | state MiB | peak MiB |", "| --- |" + " ---: |" * 6]
    for row in rows:
        name = row["optimizer"] + (f" ({row['options']})" if row["options"] else "")
        if row["failed"] is not None:
            lines.append(f"| {name} | left out: {row['failed']} | | | | | |")
            continue
        lines.append(
            f"| {name} | {row['ratio']:.2f} | {row['mean_ms']:.2f} | {row['p50_ms']:.2f} | {row['p99_ms']:.2f} "
            f"| {row['state_bytes'] / MIB:.1f} | {row['peak_bytes'] / MIB:.0f} |"
        )
    return "\n".join(lines)


def compare(
    tasks: Sequence[str],
    rivals: Sequence[str],
    steps: int,
    refresh_every: int | None,
    device: torch.device,
    warm_up: int = WARM_UP,
    skip_start: bool = False,
    settle: int = 0,
) -> tuple[list[dict[str, Any]], str]:
    """Measure every optimizer on every task; return the rows and the page."""
    rows, page = [], []
    clock = Clock(len(tasks) * -(-steps // TURN))
    for entry in tasks:
        task, _, batch = entry.partition(":")
        contenders = {r: on_task(task, int(batch), ENTRIES[r], device, refresh_every, warm_up) for r in rivals}
        if skip_start:
            for contender in contenders.values():
                contender.skip_start()
        measure(contenders, settle, device)
        for contender in contenders.values():
            contender.seconds.clear()
        measure(contenders, steps, device, clock)
        clock.part(entry)
        found = rows_of(contenders, {"task": task, "batch": int(batch)})
        without = ", no network with batch-norm" if task in WITHOUT_BATCH_NORM else ""
        page.append(f"## {task}, batch {batch}{without}\n\n{table(found)}")
        print(f"\n{page[-1]}", flush=True)
        rows += found
        del contenders
        release(device)
    return rows, "\n\n".join(page)


def growth(
    steps: int, refresh_every: int, device: torch.device, warm_up: int = WARM_UP
) -> tuple[list[dict[str, Any]], str]:
    """Measure Adam, KFAC and EKFAC-ra on square layers of growing width, depth and batch."""
    widths = [250, 500, 1000, 2000] + ([4000, 8000] if device.type == "cuda" else [])
    depths, batches = [1, 2, 4, 8, 16], [50, 100, 200, 400, 800, 1600]
    sweeps = {
        "width": [(width, DEPTH, BATCH) for width in widths],
        "depth": [(WIDTH, depth, BATCH) for depth in depths],
        "batch": [(WIDTH, DEPTH, batch) for batch in batches],
    }
    rows, page = [], []
    clock = Clock(sum(map(len, sweeps.values())))
    for name, points in sweeps.items():
        heads = "".join(f" {o} ms | ratio | state MiB | peak MiB |" for o in GROWING)
        lines = [f"| {name} |{heads}", "| ---: |" + " ---: |" * 4 * len(GROWING)]
        print(f"\n{name}\n" + "\n".join(lines), flush=True)
        for point in points:
            found = grow(point, steps, refresh_every, device, warm_up)
            rows += [{"sweep": name, **row} for row in found]
            value = dict(zip(("width", "depth", "batch"), point, strict=True))[name]
            lines.append(f"| {value:,} |" + "".join(cells(row) for row in found))
            print(lines[-1], flush=True)
            clock.part(f"{name} {value}")
        fixed = {"width": WIDTH, "depth": DEPTH, "batch": BATCH}
        del fixed[name]
        said = ", ".join(f"{key} {value}" for key, value in fixed.items())
        page.append(f"## With {name} ({said})\n\n" + "\n".join(lines))
    return rows, "\n\n".join(page)


def grow(
    point: tuple[int, int, int], steps: int, refresh_every: int, device: torch.device, warm_up: int
) -> list[dict[str, Any]]:
    """Measure one network; batch-norm is in none of them."""
    entries = {"Adam": ENTRIES["Adam + BN"], "KFAC": ENTRIES["KFAC"], "EKFAC-ra": ENTRIES["EKFAC-ra"]}
    contenders = {name: on_square_layers(*point, entries[name], device, refresh_every, warm_up) for name in GROWING}
    measure(contenders, steps, device)
    width, depth, batch = point
    found = rows_of(contenders, {"width": width, "depth": depth, "batch": batch})
    del contenders
    release(device)
    return found


def cells(row: dict[str, Any]) -> str:
    if row["failed"] is not None:
        return f" {row['failed']} | | | |"
    state, most = row["state_bytes"] / MIB, row["peak_bytes"] / MIB
    return f" {row['mean_ms']:.2f} | {row['ratio']:.2f} | {state:.1f} | {most:.0f} |"


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    found = machine()
    return f"{found['processor']}, {torch.get_num_threads()} of {found['cores']} cores"


def write(folder: Path, name: str, about: dict[str, Any], rows: list[dict[str, Any]], page: str) -> None:
    """Write the page and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    head = f"{about['machine']}; Python {about['python']}; {versions}\n\n`{about['command']}`"
    title = "What a step costs as the network grows" if name.startswith("growth") else "What a step costs"
    (folder / f"{name}.md").write_text(f"# {title}\n\n{head}\n\n{__doc__.split(chr(10) * 2)[-1].strip()}\n\n{page}\n")
    (folder / f"{name}.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    print(f"\nrecorded in {folder / name}.md and .json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="*", default=["autoencoder:200", "autoencoder:500"])
    parser.add_argument("--rivals", nargs="*", default=list(ENTRIES), choices=list(ENTRIES), metavar="NAME")
    parser.add_argument(
        "--steps", type=int, default=None, help="[default: 100 on a CPU, 500 on a GPU; 50 for --growth]"
    )
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before those that are timed")
    parser.add_argument("--skip-start", action="store_true", help="count the first 300 steps as taken")
    parser.add_argument("--settle", type=int, default=0, help="steps that are not timed, after --warm-up")
    parser.add_argument("--refresh-every", type=int, default=None, help="[default: 50; 500 for convolutions]")
    parser.add_argument("--growth", action="store_true", help="cost against width, depth and batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="folder for Markdown and JSON")
    args = parser.parse_args()
    if args.growth and (args.settle or args.skip_start):
        parser.error("--settle and --skip-start are not for --growth")
    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    about = {
        "machine": machine_of(device),
        "python": platform.python_version(),
        "versions": package_versions(),
        "command": f"python benchmarks/bench_step.py {shlex.join(sys.argv[1:])}".strip(),
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    if args.growth:
        every = args.refresh_every or 50
        rows, page = growth(args.steps or every, every, device, args.warm_up)
    else:
        steps = args.steps or (500 if device.type == "cuda" else 100)
        rows, page = compare(
            args.tasks, args.rivals, steps, args.refresh_every, device, args.warm_up, args.skip_start, args.settle
        )
    if args.out is None:
        return
    where = "cpu" if device.type == "cpu" else re.sub(r"\W+", "-", machine_of(device).lower()).strip("-")
    write(args.out, f"{'growth' if args.growth else 'step'}-{where}", about, rows, page)


if __name__ == "__main__":
    main()
