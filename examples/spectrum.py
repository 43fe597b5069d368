"""The spectrum of a trained network's Fisher beside those of its approximations, and how far each is from it.

A small classifier (49-20-20-10) of real digits, averaged down to 7 x 7 pixels, is trained by Adam. Its Fisher, exact
over the labels, has 1,630 x 1,630 entries: small enough to look at whole.
"""

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.show.picture import COLOURS, publish

NAMES = {"full": "full", "block": "block", "ekfac": "EKFAC", "kfac": "KFAC", "diagonal": "diagonal"}
torch.manual_seed(0)
data = load_dataset("mnist-5k").train
x = F.avg_pool2d(data.x.view(-1, 28, 28), 4).flatten(1).double()
y = data.y
model = nn.Sequential(nn.Linear(49, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 10)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(20):
    for batch in torch.randperm(len(x)).split(200):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

batches = list(zip(x[:2000].split(500), y[:2000].split(500), strict=True))
operators = {
    name: ekfac.fisher(model, batches, "categorical", approximation=key, estimate="exact")
    for key, name in NAMES.items()
}
numbers = {}
print(f"{'':10}{'trace':>8}{'error against full':>20}{'against block':>15}{'spectrum from full':>20}{'from block':>12}")
for name, G in operators.items():
    truths = operators["full"], operators["block"]
    errors = [ekfac.relative_error(truth, G).item() for truth in truths]
    distances = [ekfac.spectrum_distance(truth, G).item() for truth in truths]
    found = (G.trace().item(), *errors, *distances)
    keys = ("trace", "error_full", "error_block", "distance_full", "distance_block")
    numbers[name] = dict(zip(keys, found, strict=True))
    print(f"{name:10}{found[0]:8.3f}{found[1]:20.3f}{found[2]:15.3f}{found[3]:20.3f}{found[4]:12.3f}")


def draw(figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for name, place in {
        "full": (90, 4e-4),
        "EKFAC": (200, 1.2e-1),
        "KFAC": (40, 3e-1),
        "diagonal": (1.3, 6e-2),
    }.items():
        values = operators[name].eigenvalues().flip(0)
        values = values[values > 1e-8]
        left.loglog(range(1, len(values) + 1), values, color=COLOURS.get(name, "C9"))
        left.text(*place, name, color=COLOURS.get(name, "C9"), fontweight="bold")
    left.set(
        xlabel="rank of the eigenvalue",
        ylabel="eigenvalue",
        ylim=(1e-6, 10),
        title="KFAC and EKFAC follow the spectrum;\nthe diagonal does not",
    )
    shown = ("EKFAC", "KFAC", "diagonal")
    bars = right.bar(shown, [numbers[name]["error_block"] for name in shown], color=[COLOURS[name] for name in shown])
    right.bar_label(bars, fmt="%.2f")
    right.set(yticks=[], title="Relative error within layers:\nEKFAC's is the smallest")
    right.spines["left"].set_visible(False)


publish("spectrum", draw, numbers)
