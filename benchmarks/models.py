"""Five kinds of networks, 200 steps each: EKFAC beside AdamW; and EKFAC in half precision beside float32.

    python benchmarks/models.py --out results

Each optimizer is searched over four learning rates with seed 0; the one with the lowest training loss (mean of the
last 25 batches) is run with three other seeds. The table gives the median of those three: training loss, and loss on
1,000 held-out examples in evaluation mode. Written: ``models.json`` (every run) and ``models.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekfac import EKFAC, KFAC

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from zoo import PROBLEMS  # the networks that the tests train

Run = dict[str, Any]
STEPS, BATCH, LAST = 200, 64, 25
MODELS = {
    "gpt": "GPT, tied embeddings (characters)",
    "vit": "ViT (digits)",
    "mobilenet": "MobileNet, depthwise (digits)",
    "unet": "U-Net, transposed convolutions (denoising)",
    "resnet": "ResNet, batch-norm (digits)",
}
SHARED = {"kl_clip": 0.01, "refresh_every": 10}
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2, 3e-2)],
    "EKFAC": [{"lr": lr, **SHARED} for lr in (0.01, 0.03, 0.1, 0.3)],
    "EKFAC, s carried": [{"lr": lr, **SHARED, "on_refresh": "carry"} for lr in (0.01, 0.03, 0.1, 0.3)],
}
MODES = ("float32", "bf16 parameters", "autocast bf16", "autocast fp16 + GradScaler")


def build_optimizer(name: str, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """One of them, on a model."""
    return torch.optim.AdamW(model.parameters(), **options) if name == "AdamW" else EKFAC(model, **options)


def train(name: str, optimizer: str, options: dict[str, Any], seed: int, mode: str = "float32") -> Run:
    """Train one network; returns its losses."""
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
    losses = []
    for (x, y), _ in zip(problem.batches(BATCH, seed), range(STEPS), strict=False):
        opt.zero_grad()
        given = x.bfloat16() if mode == "bf16 parameters" and x.is_floating_point() else x
        with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
            output = model(given)
        loss = problem.loss(output.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
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
        "all_moved": all(not torch.equal(p.float(), before[n]) for n, p in model.named_parameters()),
        "captured_bytes": opt.stats()["captured_bytes"] if isinstance(opt, EKFAC | KFAC) else None,
    }


class Runs:
    """The runs made so far, recorded as they are made; one that is recorded is not made again."""

    def __init__(self, file: Path, threads: int) -> None:
        self.file = file
        self.record: dict[str, Any] = {
            "machine": f"{platform.machine()}, {threads} CPU thread, torch {torch.__version__}",
            "command": shlex.join(["python", *sys.argv]),
            "runs": [],
        }
        if file.exists():
            self.record["runs"] = json.loads(file.read_text())["runs"]

    def get(
        self, name: str, optimizer: str, options: dict[str, Any], seed: int, mode: str = "float32"
    ) -> dict[str, Any]:
        """A run, from the record or fresh."""
        what = {"model": name, "optimizer": optimizer, "mode": mode, "options": options, "seed": seed}
        for run in self.record["runs"]:
            if all(run[key] == value for key, value in what.items()):
                return dict(run)
        run = train(name, optimizer, options, seed, mode)
        self.record["runs"].append(run)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.record, separators=(",", ":")) + "\n")
        print(name, optimizer, mode, options, seed, f"{run['train']:.4f}", flush=True)
        return run


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    align = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, align, *rows])


def networks_table(runs: Runs) -> str:
    """EKFAC beside AdamW: each at its best learning rate, medians of three other seeds."""
    rows = []
    for name, title in MODELS.items():
        columns: dict[str, list[str]] = {"train": [], "held_out": [], "lr": []}
        for optimizer, settings in OPTIMIZERS.items():
            found = [runs.get(name, optimizer, options, seed=0) for options in settings]
            best = min(found, key=lambda r: r["train"] if r["train"] == r["train"] else float("inf"))["options"]
            final = [runs.get(name, optimizer, best, seed) for seed in (1, 2, 3)]
            assert all(r["all_moved"] for r in final), f"{name}: a parameter did not move"
            for key in ("train", "held_out"):
                columns[key].append(f"{statistics.median(r[key] for r in final):.3f}")
            columns["lr"].append(f"{best['lr']:g}")
        start = statistics.median(r["first"] for r in final)
        rows.append([title, f"{start:.2f}", *columns["train"], *columns["held_out"], *columns["lr"]])
    heads = [f"{o}{what}" for what in ("", "; held out", "; lr") for o in OPTIMIZERS]
    return table(["network", "start", *heads], rows)


def precision_table(runs: Runs) -> str:
    """The same 200 steps in each precision."""
    rows = []
    for name, title in (("cnn", "CNN (digits)"), ("gpt", "GPT (characters)")):
        for mode in MODES:
            r = runs.get(name, "EKFAC", {"lr": 0.03, **SHARED}, 1, mode)
            captured = f"{r['captured_bytes'] / 2**20:.2f}"
            rows.append([title, mode, f"{r['train']:.3f}", f"{r['held_out']:.3f}", captured])
    return table(["network", "precision", "training loss", "held out", "captured tensors, MiB"], rows)


def main() -> None:
    """Make the runs that are not recorded yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for models.json and models.md")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runs = Runs(arguments.out / "models.json", arguments.threads)
    rates = {name: ", ".join(f"{o['lr']:g}" for o in options) for name, options in OPTIMIZERS.items()}
    networks, precisions = networks_table(runs), precision_table(runs)
    text = f"""# Networks of five kinds, and half precision

{runs.record["machine"]}. Command: `{runs.record["command"]}`

## EKFAC beside AdamW, {STEPS} steps, batch {BATCH}

Mean training loss of the last {LAST} batches and loss on 1,000 held-out examples, medians of three seeds. The learning
rate of each is the best of four ({rates["AdamW"]} for AdamW; {rates["EKFAC"]} for EKFAC, which has
`kl_clip=0.01, refresh_every=10` and defaults otherwise; "s carried": `on_refresh="carry"`), by training loss with
another seed. Every parameter of every network moved.

{networks}

## EKFAC in half precision, {STEPS} steps, batch {BATCH}

`lr=0.03, kl_clip=0.01, refresh_every=10`. Captured tensors: `opt.stats()["captured_bytes"]`.

{precisions}
"""
    (arguments.out / "models.md").write_text(text)


if __name__ == "__main__":
    main()
