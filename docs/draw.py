"""Draw the README's picture from recorded runs: ``python docs/draw.py``, for light and for dark pages.

It shows the paper's five methods alone. ``make figures`` draws everything else.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
# The tables' settings at batch 200 (docs/mnist.md), by the start of the folders' names; colours as in all figures.
METHODS = {
    "autoencoder-kfac-": ("KFAC", "#d55e00"),
    "autoencoder-sgd-bn-lr0.01-": ("SGD + batch-norm", "#777777"),
    "autoencoder-adam-bn-lr0.001-": ("Adam + batch-norm", "#e69f00"),
    "autoencoder-ekfac-lr": ("EKFAC", "#0072b2"),
    "autoencoder-ekfac-ra-lr": ("EKFAC-ra", "#009e73"),
}


def curves() -> dict[str, list[float]]:
    """Mean training loss above the pixels' entropy over five seeds, epoch by epoch."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for folder in sorted((ROOT / "results" / "mnist").glob("[fs][ie][ne]*s/*-b200-*")):
        for start, (name, _) in METHODS.items():
            about = json.loads((folder / "config.json").read_text())
            if not folder.name.startswith(start) or about["config"]["epochs"] != 20:
                continue
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            floor = about["about"]["floor"]["train"]
            found[name].append([line["train_loss_mean"] - floor for line in lines if line["epoch"]])
    assert all(len(runs) == 5 for runs in found.values()), {name: len(runs) for name, runs in found.items()}
    return {name: [mean(values) for values in zip(*runs, strict=True)] for name, runs in found.items()}


def draw(file: Path, ink: str, paper: str) -> None:
    """Draw one form of the picture."""
    found = curves()
    style = {"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": ink}
    with plt.rc_context({**style, "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(8, 4), facecolor=paper)
        axes.set_facecolor(paper)
        last = 0.0
        for name, colour in sorted(METHODS.values(), key=lambda method: found[method[0]][-1]):
            values = found[name]
            axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=2.5)
            place = max(values[-1], last * 1.16)  # labels do not overlap
            axes.text(20.3, place, f"{name}  {values[-1]:.1f}", color=colour, va="center", fontweight="bold")
            last = place
        axes.set(yscale="log", ylim=(9, 120), xlim=(1, 20), xlabel="epoch", xticks=[1, 5, 10, 15, 20])
        axes.set_yticks([10, 20, 50, 100], ["10", "20", "50", "100"])
        axes.minorticks_off()
        axes.set_ylabel("training loss minus its lower bound")
        title = "EKFAC and EKFAC-ra end below Adam, SGD and KFAC (MNIST auto-encoder, batch 200)"
        axes.set_title(title, loc="left", fontsize=11.5)
        axes.grid(axis="y", alpha=0.25)
        figure.savefig(file, dpi=150, bbox_inches="tight", facecolor=paper)
        plt.close(figure)


if __name__ == "__main__":
    images = ROOT / "docs" / "images"
    draw(images / "paper-methods.png", "#222222", "#ffffff")
    draw(images / "paper-methods-dark.png", "#dddddd", "#131416")
