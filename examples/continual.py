"""Continual learning: five tasks in a row, and a quadratic penalty that keeps what was learnt before.

Each task is the same real digits (14 x 14 pixels) with their pixels in another fixed order. After each task the Fisher
G at the weights theta* is kept, and later tasks add strength / 2 (theta - theta*)^T G (theta - theta*) to their loss.
With G diagonal this is elastic weight consolidation (EWC); with G by EKFAC, in its eigenbasis, it is rotated EWC.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.show.picture import COLOURS, label_ends, publish

TASKS, EPOCHS = 5, 5
# For each the best strength of 1, 3, 10, 30, 100, 300, tried with eight epochs a task.
METHODS = {"no penalty": (None, 0.0), "diagonal": ("diagonal", 30.0), "EKFAC": ("ekfac", 10.0)}
splits = load_dataset("mnist-5k").splits
generator = torch.Generator().manual_seed(0)
orders = [torch.randperm(196, generator=generator) for _ in range(TASKS)]


def task(split: str, number: int) -> tuple[Tensor, Tensor]:
    pixels, y = splits[split]
    return F.avg_pool2d(pixels.view(-1, 28, 28), 2).flatten(1)[:, orders[number]], y


def learn(approximation: str | None, strength: float) -> list[Tensor]:
    """Train on all tasks in turn; after each, accuracy on those so far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(196, 100), nn.Tanh(), nn.Linear(100, 10))
    past: list[tuple[ekfac.Curvature, dict[str, Tensor]]] = []
    accuracy = []
    for number in range(TASKS):
        x, y = task("train", number)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(EPOCHS):
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
            tests = [task("validation", seen) for seen in range(number + 1)]
            accuracy.append(torch.stack([(model(x).argmax(1) == y).float().mean() for x, y in tests]))
    return accuracy


results = {name: learn(*method) for name, method in METHODS.items()}
numbers = {}
for name, found in results.items():
    numbers[name] = {"mean": found[-1].mean().item(), "first": found[-1][0].item()}
    each = "  ".join(f"{a:.1%}" for a in found[-1])
    print(f"{name:12} after the last task: mean {numbers[name]['mean']:.1%}, on each {each}")


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    for name, found in results.items():
        means = [float(a.mean()) for a in found]
        axes.plot(range(1, TASKS + 1), means, "o-", color=COLOURS.get(name, "C7"), label=name)
    axes.set(xlabel="tasks learnt", ylabel="mean accuracy on them", xticks=range(1, TASKS + 1))
    axes.set_title("A penalty in EKFAC's basis forgets least")
    label_ends(axes, numbers=".1%")


publish("continual", draw, numbers)
