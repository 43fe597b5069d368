"""Continual learning: five tasks in a row, and a quadratic penalty that keeps what was learnt before.

    python examples/continual.py [--out FILE] [--strengths 1 10 100 ...]

Each task is the same real digits (14 x 14 pixels) with their pixels in another fixed random order. After each task the
Fisher G at the weights theta* is kept, and later tasks are trained with the penalty

    strength / 2 (theta - theta*)^T G (theta - theta*)

for every task before. With G diagonal this is elastic weight consolidation (EWC); with G in its eigenbasis, by EKFAC,
it is rotated EWC. Each method has the best of the strengths given, by its mean accuracy over all tasks at the end; the
defaults are the best of 1, 3, 10, 30, 100 and 300.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset

TASKS = 5
COLOURS = {"no penalty": "#999999", "diagonal (EWC)": "#0072B2", "EKFAC (rotated EWC)": "#D55E00"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("runs/continual.png"), help="the picture")
parser.add_argument("--strengths", type=float, nargs="+", help="to try; by default the best found")
options = parser.parse_args()

splits = load_dataset("mnist-5k").splits
generator = torch.Generator().manual_seed(0)
orders = [torch.randperm(196, generator=generator) for _ in range(TASKS)]


def task(split: str, number: int) -> tuple[Tensor, Tensor]:
    pixels, y = splits[split]
    x = F.avg_pool2d(pixels.view(-1, 28, 28), 2).flatten(1)
    return x[:, orders[number]], y


def learn(approximation: str | None, strength: float) -> Tensor:
    """Train on all tasks in turn: accuracy [after task, on task], 0 where a task is still to come."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(196, 100), nn.Tanh(), nn.Linear(100, 10))
    past: list[tuple[ekfac.Curvature, dict[str, Tensor]]] = []
    accuracy = torch.zeros(TASKS, TASKS)
    for number in range(TASKS):
        x, y = task("train", number)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(8):
            for batch in torch.randperm(len(x)).split(100):
                loss = F.cross_entropy(model(x[batch]), y[batch])
                for G, old in past:
                    away = {name: p - old[name] for name, p in model.named_parameters()}
                    loss = loss + 0.5 * strength * G.quadratic(away)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        if approximation is not None:
            batches = list(zip(x.split(500), y.split(500), strict=True))
            G = ekfac.fisher(model, batches, "categorical", approximation=approximation, estimate="exact")
            past.append((G, {name: p.detach().clone() for name, p in model.named_parameters()}))
        with torch.no_grad():
            for seen in range(number + 1):
                test_x, test_y = task("validation", seen)
                accuracy[number, seen] = (model(test_x).argmax(1) == test_y).float().mean()
    return accuracy


def best(approximation: str, known: float) -> tuple[Tensor, float]:
    tried = {strength: learn(approximation, strength) for strength in options.strengths or [known]}
    for strength, found in tried.items():
        if len(tried) > 1:
            print(f"  {approximation}, strength {strength:g}: mean accuracy {found[-1].mean():.1%}")
    strength = max(tried, key=lambda s: float(tried[s][-1].mean()))
    return tried[strength], strength


results = {"no penalty": (learn(None, 0.0), 0.0)}
results["diagonal (EWC)"] = best("diagonal", 30.0)
results["EKFAC (rotated EWC)"] = best("ekfac", 10.0)
print(f"{'after the last task':22}{'strength':>9}{'mean':>8}   on each task")
for name, (found, strength) in results.items():
    each = "  ".join(f"{a:.1%}" for a in found[-1])
    print(f"{name:22}{strength:9g}{found[-1].mean():8.1%}   {each}")

figure = Figure(figsize=(9, 3.4), layout="constrained")
left, right = figure.subplots(1, 2, sharey=True)
seen = range(1, TASKS + 1)
for name, (found, _) in results.items():
    means = [float(found[i, : i + 1].mean()) for i in range(TASKS)]
    left.plot(seen, means, "o-", color=COLOURS[name], label=name)
    right.plot(seen, found[-1], "o-", color=COLOURS[name])
left.set(xlabel="tasks learnt", ylabel="accuracy", title="Mean over the tasks learnt so far", xticks=seen)
right.set(xlabel="task", title="On each task, after the last", xticks=seen, ylim=(0.2, 1))
left.legend(frameon=False, fontsize=8, loc="lower left")
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
options.out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(options.out, dpi=150)
print(f"picture: {options.out}")
