"""Whole trainings of the networks that people train, their start included: time, memory and use of the chip.

    python benchmarks/bench_networks.py [gpt29 gpt92 vit resnet18 resnet34 autoencoder] [--short] [--out FOLDER]

AdamW (fused), torch's Muon, SOAP where pytorch_optimizer is there, and ``EKFAC(model)``, all eager and in turns in one
process, on one random batch; then AdamW's whole step in a CUDA graph beside ``ekfac.graphed``. ``--short`` takes 400
steps of each, else 1,000. The peak is that of a run's first turn, its start among it, less what the others hold then.
"Use" is the arithmetic of the model's own passes, as torch counts it, in a second, over what the chip can do in that
dtype.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contenders import captured_whole
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.networks.convolutional import resnet18
from ekfac.lab.networks.paper import autoencoder, resnet34
from ekfac.lab.networks.transformers import GPT, ViT
from ekfac.lab.training.runs import machine

MIB = 2**20
#: Operations a second of an H200's tensor cores, dense: bfloat16, and TF32 for float32.
CHIP = {True: 989e12, False: 494e12}
MARKS = (100, 300)


@dataclass
class Network:
    """A network, its batch and its loss; ``half`` runs it under autocast."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Tensor, tuple[Tensor, ...]], Tensor]
    half: bool = True


def _next_token(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), batch[0].roll(-1, 1).flatten())


def _classes(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(output.float(), torch.arange(len(output), device=output.device) % output.shape[-1])


def _pixels(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, batch[0], reduction="sum") / len(output)


def networks(tiny: bool) -> dict[str, Network]:
    """Return the networks; ``tiny`` ones of the same build, to try the program."""
    vocabulary, context, n = (50, 8, 2) if tiny else (8192, 256, 64)

    def gpt(width: int, layers: int) -> Callable[[], nn.Module]:
        w, k = (16, 2) if tiny else (width, layers)
        return lambda: GPT(vocabulary, context, w, k, max(1, w // 64), 0.0)

    def tokens() -> tuple[Tensor, ...]:
        return (torch.randint(vocabulary, (n, context)),)

    def pictures(count: int, size: int) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (torch.randn(2 if tiny else count, 3, size, size),)

    side, width = (32, 4) if tiny else (224, 64)
    vit = (lambda: ViT(32, 16, 12, 2, 1, 10)) if tiny else (lambda: ViT(224, 16, 384, 12, 6, 1000))
    return {
        "gpt29": Network(gpt(512, 8), tokens, _next_token),
        "gpt92": Network(gpt(768, 12), tokens, _next_token),
        "vit": Network(vit, pictures(64, side), _classes),
        "resnet18": Network(lambda: resnet18(width), pictures(256, 32), _classes),
        "resnet34": Network(lambda: resnet34(width, batch_norm=True), pictures(256, 32), _classes),
        "autoencoder": Network(
            lambda: autoencoder(40 if tiny else 1000), lambda: (torch.rand(8 if tiny else 200, 784),), _pixels, False
        ),
    }


class Together:
    """Several optimizers as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        """Step."""
        for part in self.parts:
            part.step()


def _muon(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    if not matrices:
        raise ValueError("no matrices")
    adamw = [torch.optim.AdamW(rest, lr=1e-3, fused=True)] if rest else []
    return Together(torch.optim.Muon(matrices, lr=1e-3), *adamw)


def _soap(model: nn.Module) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW (fused)": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "Muon": _muon,
    "SOAP": _soap,
    "EKFAC(model)": lambda model: ekfac.EKFAC(model),
    "AdamW, captured": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True),
    "EKFAC(model), graphed": lambda model: ekfac.EKFAC(model),
}


@dataclass
class Run:
    """One optimizer on a network: its step, and the seconds that each turn took."""

    step: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    peak: int = 0


def started(network: Network, label: str, device: torch.device) -> Callable[[], None]:
    """Return a training step of a new model and the named optimizer."""
    torch.manual_seed(0)
    model, batch = network.make().to(device), tuple(t.to(device) for t in network.batch())
    optimizer = OPTIMIZERS[label](model)

    def backward(*batch: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=network.half, cache_enabled="captured" not in label):
            output = model(*batch)
        network.loss(output, batch).backward()

    def step() -> None:
        optimizer.zero_grad()
        backward(*batch)
        optimizer.step()

    if "graphed" in label:
        graphed = ekfac.graphed(optimizer, backward)
        return lambda: graphed(*batch)
    if "captured" not in label:
        return step
    if device.type != "cuda":
        raise ValueError("only a GPU has graphs")
    return captured_whole(step, optimizer)


def turn(run: Run, steps: int, device: torch.device) -> None:
    """Take some steps, timed as a whole."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        run.step()
    if cuda:
        torch.cuda.synchronize()
    run.seconds.append(time.perf_counter() - began)


def measure(
    name: str, network: Network, labels: Sequence[str], steps: int, at_a_time: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each optimizer."""
    runs, failed, cuda = {}, {}, device.type == "cuda"
    for label in labels:
        try:
            before = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            run = Run(started(network, label, device))
            turn(run, at_a_time, device)
            run.peak = torch.cuda.max_memory_allocated() - before if cuda else 0
            runs[label] = run
        except (ImportError, AttributeError, ValueError, RuntimeError) as error:
            failed[label] = f"{type(error).__name__}: {error}"
    for _ in range(steps // at_a_time - 1):
        for run in runs.values():
            turn(run, at_a_time, device)
    with torch.device("meta"):
        shapes = network.make()
    own = ekfac.plan(shapes, tuple(t.to("meta") for t in network.batch())).model or 0.0
    rows = []
    for label, run in runs.items():
        row: dict[str, Any] = {"network": name, "optimizer": label, "peak_mib": run.peak / MIB}
        edges = [0, *(m for m in MARKS if m < steps), steps]
        for a, b in itertools.pairwise(edges):
            of = run.seconds[a // at_a_time : b // at_a_time]
            row[f"{a}-{b}"] = 1e3 * sum(of) / max(1, len(of) * at_a_time)
        row["mean"] = 1e3 * sum(run.seconds) / steps
        row["use"] = own / (row["mean"] / 1e3) / CHIP[network.half]
        rows.append(row)
    return rows + [{"network": name, "optimizer": label, "failed": why} for label, why in failed.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as Markdown, times with their ratio to the first optimizer's, captured ones to captured AdamW's."""
    spans = [key for key in rows[0] if "-" in key]
    lines = ["| network | optimizer | " + " | ".join(f"{s}, ms" for s in spans) + " | mean, ms | peak, MiB | use |"]
    lines.append("| --- | --- |" + " ---: |" * (len(spans) + 3))
    first: dict[str, Any] = {}
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['network']} | {row['optimizer']} | {row['failed']} |" + " |" * (len(spans) + 2))
            continue
        first = row if row["network"] != first.get("network") or row["optimizer"] == "AdamW, captured" else first
        times = [f"{row[k]:.2f} ({row[k] / first[k]:.2f})" for k in (*spans, "mean")]
        share = f" ({row['peak_mib'] / first['peak_mib']:.2f})" if first["peak_mib"] else ""
        cells = [row["network"], row["optimizer"], *times, f"{row['peak_mib']:.0f}{share}", f"{100 * row['use']:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    """Measure what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(networks(True)), help="all by default")
    parser.add_argument("--short", action="store_true", help="400 steps instead of 1,000")
    parser.add_argument(
        "--only", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS), help="these optimizers"
    )
    parser.add_argument("--steps", type=int, help="so many")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to try the program")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a folder for networks.md and networks.json")
    given = parser.parse_args(words)
    known, device = networks(given.tiny), torch.device(given.device)
    steps = given.steps or (400 if given.short else 1000)
    rows = []
    for name in given.networks:
        rows += measure(name, known[name], given.only, steps, min(50, steps), device)
        print(table(rows), flush=True)
        gc.collect()
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        about = {"machine": machine(), "torch": torch.__version__, "steps": steps, "device": str(device)}
        (given.out / "networks.json").write_text(
            json.dumps({"about": about, "rows": rows}, indent=1, default=str) + "\n"
        )
        (given.out / "networks.md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
