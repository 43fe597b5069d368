"""The auto-encoder on the 5,000 digits, 1,000 steps: the paper's optimizers, each at its best of a small grid.

    python benchmarks/digits.py --device cuda --workers 8 --out results/digits

Every method's grid is screened with seed 0 for 400 steps; the setting with the lowest training loss (a full pass
after the last step) is then run with five other seeds. Written: ``digits.jsonl`` (every run, as it ends; runs found
there are not repeated) and ``digits.md`` (the table).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.optimizers import build_optimizer
from ekfac.lab.tasks import TASKS

STEPS = 1000
SCREENING = 400
BATCHES = (50, 200)
FINAL_SEEDS = (1, 2, 3, 4, 5)
MARKS = (10, 20, 50, 100, 200, 300, 400, 500, 700, 1000)


def grid(optimizer: str, **axes: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """All combinations of the given options."""
    return [(optimizer, dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


RUNNING = grid(
    "ekfac-ra",
    lr=[0.01, 0.03],
    damping=[1e-3, 3e-3, 1e-2],
    scaling=["running"],
    refresh_every=[25],
    on_refresh=["kronecker"],
)
METHODS: dict[str, tuple[bool, list[tuple[str, dict[str, Any]]]]] = {
    "SGD + BN": (True, grid("sgd", lr=[1e-3, 3e-3, 1e-2, 3e-2], momentum=[0.9])),
    "Adam + BN": (True, grid("adam", lr=[1e-3, 3e-3, 1e-2, 3e-2])),
    "KFAC": (
        False,
        grid("kfac", lr=[0.03, 0.1], damping=[3e-2, 1e-1, 3e-1], momentum=[0.9], kl_clip=[1.0], refresh_every=[25]),
    ),
    "EKFAC": (
        False,
        grid("ekfac", lr=[0.01, 0.03], damping=[3e-3, 1e-2, 3e-2], scaling=["per_example"], refresh_every=[25]),
    ),
    "EKFAC-ra": (False, RUNNING),
    "EKFAC-ra, s carried": (False, [(name, {**options, "on_refresh": "carry"}) for name, options in RUNNING]),
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train one setting and return its losses above the floor."""
    torch.set_num_threads(1)
    device = torch.device(job["device"])
    task = TASKS.get("autoencoder")
    data = load_dataset("mnist-5k", job["data_dir"]).to(device, torch.float32)
    x_train, y_train = data.train
    x_validation, y_validation = data.splits["validation"]
    floors = [task.floor(x.double()).mean().item() for x in (x_train, x_validation)]  # type: ignore[misc]
    torch.manual_seed(job["seed"])
    model = task.build(task.width, job["batch_norm"]).to(device)
    optimizer = build_optimizer(job["optimizer"], model, job["options"])
    order = torch.Generator().manual_seed(job["seed"])
    curve: dict[int, float] = {}

    @torch.no_grad()
    def above_floor() -> tuple[float, float]:
        model.eval()
        losses = [
            task.losses(model(x), x, y).mean().item() for x, y in ((x_train, y_train), (x_validation, y_validation))
        ]
        model.train()
        return losses[0] - floors[0], losses[1] - floors[1]

    step, diverged = 0, False
    batch, steps = job["batch"], job["steps"]
    try:
        while step < steps and not diverged:
            for index in torch.randperm(len(x_train), generator=order).to(device).split(batch):
                if len(index) < batch or step == steps:
                    break
                x, y = x_train[index], y_train[index]
                optimizer.zero_grad()
                task.losses(model(x), x, y).mean().backward()
                optimizer.step()
                step += 1
                if step in MARKS or step == steps:
                    curve[step], validation = above_floor()
                    diverged = not math.isfinite(curve[step])
                    if diverged:
                        break
    except RuntimeError as error:
        if "finite" not in str(error):
            raise
        diverged = True
    final = math.inf if diverged else curve[steps]
    stats = getattr(optimizer, "stats", dict)()
    return {**job, "train": final, "validation": math.inf if diverged else validation, "curve": curve,
            "diverged": diverged, "stats": stats}  # fmt: skip


def key(job: dict[str, Any]) -> str:
    """What makes a run the same run."""
    return json.dumps([job[k] for k in ("method", "optimizer", "options", "batch", "seed", "steps")], sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", type=Path, default=Path("out/digits"))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--table", action="store_true", help="only write the table anew from the records in --out")
    parser.add_argument(
        "--single", metavar="JSON", help="run one setting and print it: optimizer, options, batch, steps"
    )
    args = parser.parse_args()
    if args.single:
        job = {"method": "single", "batch_norm": False, "batch": 200, "seed": 0, "steps": 200, "phase": "single"}
        print(json.dumps(run({**job, "device": args.device, "data_dir": args.data_dir, **json.loads(args.single)})))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    base = {"device": args.device, "data_dir": args.data_dir}
    jobs = [
        {**base, "method": name, "batch_norm": METHODS[name][0], "optimizer": optimizer, "options": options,
         "batch": batch, "seed": 0, "steps": SCREENING, "phase": "grid"}
        for name in args.methods
        for batch in BATCHES
        for optimizer, options in METHODS[name][1]
    ]  # fmt: skip
    record = args.out / "digits.jsonl"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    started = time.perf_counter()

    def run_all(pool: ProcessPoolExecutor, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        known = {key(r): r for r in done}
        futures = [pool.submit(run, job) for job in wanted if key(job) not in known and not args.table]
        results = [known[key(job)] for job in wanted if key(job) in known]
        with record.open("a") as file:
            for future in as_completed(futures):
                result = {k: v for k, v in future.result().items() if k not in base}
                results.append(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
        print(f"{len(results)} runs, {time.perf_counter() - started:.0f} s", flush=True)
        return results

    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        screened = run_all(pool, jobs)
        best = {
            (name, batch): min(
                (r for r in screened if (r["method"], r["batch"]) == (name, batch)), key=lambda r: r["train"]
            )
            for name in args.methods
            for batch in BATCHES
        }
        chosen = [{**base, **{k: b[k] for k in jobs[0] if k not in base}} for b in best.values()]
        finals = run_all(
            pool, [{**c, "seed": s, "steps": STEPS, "phase": "final"} for s in FINAL_SEEDS for c in chosen]
        )
    if not args.table:
        about = {
            "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": f"python {shlex.join(sys.argv)}",
        }
        (args.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    about = json.loads((args.out / "about.json").read_text())
    table = markdown(args.methods, best, finals, about)
    (args.out / "digits.md").write_text(table)
    print(table)


def markdown(methods: list[str], best: dict[Any, Any], finals: list[dict[str, Any]], about: dict[str, str]) -> str:
    """The table: training and validation loss above the floor after the last step, mean and standard error."""
    lines = [
        f"# The auto-encoder on the 5,000 digits, {STEPS} steps",
        "",
        "Loss above the floor (the pixels' own entropy), per image; mean and standard error of five seeds at the best",
        f"setting of each method's grid (seed 0, {SCREENING} steps).",
        f"{about['machine']}, torch {about['torch']}: `{about['command']}`.",
        "",
        "| method | settings tried | batch | train | validation | setting |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for batch in BATCHES:
        for name in methods:
            mine = [r for r in finals if (r["method"], r["batch"]) == (name, batch)]
            cells = []
            for key in ("train", "validation"):
                values = [r[key] for r in mine]
                cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}")
            options = ", ".join(f"{k} {v}" for k, v in best[name, batch]["options"].items() if k != "scaling")
            lines.append(f"| {name} | {len(METHODS[name][1])} | {batch} | {cells[0]} | {cells[1]} | {options} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
