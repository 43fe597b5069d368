"""Five kinds of networks, 200 steps each: EKFAC beside AdamW; and EKFAC in half precision beside float32.

    python benchmarks/models.py --out results

Each optimizer is searched over three learning rates with seed 0; the one with the lowest training loss (mean of the
last 25 batches) is run with three other seeds. The table gives the median of those three: training loss, loss on 1,000
held-out examples in evaluation mode, milliseconds a step. Written: ``models.json`` (every run) and ``models.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekfac import EKFAC

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from zoo import PROBLEMS  # the networks that the tests train

STEPS, BATCH, LAST = 200, 64, 25
MODELS = {
    "gpt": "GPT, tied embeddings (characters)",
    "vit": "ViT (digits)",
    "mobilenet": "MobileNet, depthwise (digits)",
    "unet": "U-Net, transposed convolutions (denoising)",
    "resnet": "ResNet, batch-norm (digits)",
}
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2)],
    "EKFAC": [{"lr": lr, "kl_clip": 0.01, "refresh_every": 10} for lr in (0.03, 0.1, 0.3)],
}
MODES = ("float32", "bf16 parameters", "autocast bf16", "autocast fp16 + GradScaler")


def build_optimizer(name: str, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """One of the two, on a model."""
    return EKFAC(model, **options) if name == "EKFAC" else torch.optim.AdamW(model.parameters(), **options)


def train(name: str, optimizer: str, options: dict[str, Any], seed: int, mode: str = "float32") -> dict[str, Any]:
    """Train one network; returns its losses and how long a step took."""
    torch.manual_seed(seed)
    problem = PROBLEMS[name]
    model = problem.build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    if mode == "bf16 parameters":
        model = model.bfloat16()
    half = {"autocast bf16": torch.bfloat16, "autocast fp16 + GradScaler": torch.float16}.get(mode)
    scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)
    if half is torch.float16:
        options = {**options, "grad_scaler": scaler}
    opt = build_optimizer(optimizer, model, options)
    losses, seconds = [], []
    for (x, y), _ in zip(problem.batches(BATCH, seed), range(STEPS), strict=False):
        started = time.perf_counter()
        opt.zero_grad()
        given = x.bfloat16() if mode == "bf16 parameters" and x.is_floating_point() else x
        with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
            output = model(given)
        loss = problem.loss(output.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    model.eval()
    held = problem.batches(250, 1, "validation")
    with torch.no_grad():
        parts = []
        for x, y in (next(held) for _ in range(4)):
            given = x.bfloat16() if mode == "bf16 parameters" and x.is_floating_point() else x
            parts.append(problem.loss(model(given).float(), y).item())
    return {
        "model": name,
        "optimizer": optimizer,
        "mode": mode,
        "options": {k: v for k, v in options.items() if k != "grad_scaler"},
        "seed": seed,
        "first": losses[0],
        "losses": [round(loss, 4) for loss in losses],
        "train": statistics.fmean(losses[-LAST:]),
        "held_out": statistics.fmean(parts),
        "ms": 1000 * statistics.median(seconds),
        "all_moved": all(not torch.equal(p.float(), before[n]) for n, p in model.named_parameters()),
        "captured_bytes": opt.stats()["captured_bytes"] if isinstance(opt, EKFAC) else None,
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    align = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, align, *rows])


def compare(runs: list[dict[str, Any]]) -> str:
    """EKFAC beside AdamW: search, then three seeds."""
    rows = []
    for name, title in MODELS.items():
        cells: list[list[str]] = []
        for optimizer, settings in OPTIMIZERS.items():
            found = [train(name, optimizer, options, seed=0) for options in settings]
            best = min(found, key=lambda r: r["train"] if r["train"] == r["train"] else float("inf"))
            final = [train(name, optimizer, best["options"], seed) for seed in (1, 2, 3)]
            runs += found + final
            assert all(r["all_moved"] for r in final), f"{name}: a parameter did not move"
            middle = {key: statistics.median(r[key] for r in final) for key in ("train", "held_out", "ms", "first")}
            cells.append(
                [
                    f"{best['options']['lr']:g}",
                    f"{middle['train']:.3f}",
                    f"{middle['held_out']:.3f}",
                    f"{middle['ms']:.0f}",
                ]
            )
            print(name, optimizer, *cells[-1], flush=True)
        (lr_a, train_a, held_a, ms_a), (lr_e, train_e, held_e, ms_e) = cells
        rows.append([title, f"{middle['first']:.2f}", train_a, train_e, held_a, held_e, lr_a, lr_e, ms_a, ms_e])
    head = ["network", "start", "AdamW", "EKFAC", "AdamW, held out", "EKFAC, held out", "lr", "lr", "ms", "ms"]
    return table(head, rows)


def half_precision(runs: list[dict[str, Any]]) -> str:
    """The same 200 steps in each precision."""
    rows = []
    for name, title in (("cnn", "CNN (digits)"), ("gpt", "GPT (characters)")):
        for mode in MODES:
            run = train(name, "EKFAC", {"lr": 0.03, "kl_clip": 0.01, "refresh_every": 10}, 1, mode)
            runs.append(run)
            captured = f"{run['captured_bytes'] / 2**20:.2f}"
            rows.append([title, mode, f"{run['train']:.3f}", f"{run['held_out']:.3f}", captured])
            print(name, *rows[-1][1:], flush=True)
    return table(["network", "precision", "training loss", "held out", "captured tensors, MiB"], rows)


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for models.json and models.md")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runs: list[dict[str, Any]] = []
    networks, halves = compare(runs), half_precision(runs)
    machine = f"{platform.machine()}, {arguments.threads} CPU thread, torch {torch.__version__}"
    command = shlex.join(["python", *sys.argv])
    text = f"""# Networks of five kinds, and half precision

{machine}. Command: `{command}`

## EKFAC beside AdamW, {STEPS} steps, batch {BATCH}

Mean training loss of the last {LAST} batches and loss on 1,000 held-out examples, median of three seeds. The learning
rate of each is the best of three ({", ".join(f"{o['lr']:g}" for o in OPTIMIZERS["AdamW"])} for AdamW,
{", ".join(f"{o['lr']:g}" for o in OPTIMIZERS["EKFAC"])} for EKFAC, which has `kl_clip=0.01, refresh_every=10` and
defaults otherwise), by training loss with another seed. Every parameter of every network moved. Milliseconds are
medians of whole steps on a machine that did other work too.

{networks}

## EKFAC in half precision, {STEPS} steps, batch {BATCH}

`lr=0.03, kl_clip=0.01, refresh_every=10`. Captured tensors: `opt.stats()["captured_bytes"]`.

{halves}
"""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "models.md").write_text(text)
    record = {"machine": machine, "command": command, "runs": runs}
    (arguments.out / "models.json").write_text(json.dumps(record, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
