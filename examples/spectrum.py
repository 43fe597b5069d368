"""The spectrum of a trained network's Fisher beside those of its approximations, and how far each is from it.

    python examples/spectrum.py [--out FILE]

A small classifier (49-20-20-10) of real digits, averaged down to 7 x 7 pixels, is trained by Adam. Its Fisher, exact
over the labels, has 1,630 x 1,630 entries: small enough to look at whole.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset

LOOKS = {
    "full": ("black", "-", 2.6),
    "block": ("#0072B2", "--", 1.6),
    "ekfac": ("#D55E00", "-", 1.6),
    "kfac": ("#009E73", "-.", 1.6),
    "diagonal": ("#999999", ":", 1.8),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("runs/spectrum.png"), help="the picture")
out = parser.parse_args().out

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
accuracy = (model(x).argmax(1) == y).double().mean()
print(f"trained: loss {F.cross_entropy(model(x), y):.3f}, accuracy {accuracy:.1%}")

batches = list(zip(x[:2000].split(500), y[:2000].split(500), strict=True))
operators = {name: ekfac.fisher(model, batches, "categorical", approximation=name, estimate="exact") for name in LOOKS}
full, block = operators["full"], operators["block"]
print(f"{'':10}{'':>8}{'':>9}    error against       spectrum's distance from")
print(f"{'':10}{'trace':>8}{'largest':>9}{'full':>10}{'block':>8}{'full':>15}{'block':>8}")
errors = {}
for name, G in operators.items():
    errors[name] = [ekfac.relative_error(truth, G).item() for truth in (full, block)]
    distances = [ekfac.spectrum_distance(truth, G).item() for truth in (full, block)]
    print(
        f"{name:10}{G.trace():8.3f}{G.eigenvalues()[-1]:9.3f}{errors[name][0]:10.3f}{errors[name][1]:8.3f}"
        f"{distances[0]:15.3f}{distances[1]:8.3f}"
    )

figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
for name, (colour, line, width) in LOOKS.items():
    values = operators[name].eigenvalues().flip(0)
    values = values[values > 1e-10 * values[0]]
    left.loglog(range(1, len(values) + 1), values, line, color=colour, linewidth=width, label=name)
left.set(xlabel="rank of the eigenvalue", ylabel="eigenvalue", ylim=(1e-8, None), title="Eigenvalues of the Fisher")
left.legend(frameon=False, title="colours of both panels", alignment="left")
for i, name in enumerate(name for name in LOOKS if name != "full"):
    places = [i, i + 5]
    bars = right.bar(places, errors[name], color=LOOKS[name][0], label=name)
    right.bar_label(bars, fmt="%.2f", fontsize=8)
right.set_xticks([1.5, 6.5], ["against the full Fisher", "against its blocks"])
right.set(ylabel=r"$\|G - H\|_F\ /\ \|G\|_F$", title="Relative error", ylim=(0, 1.1))
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(out, dpi=150)
print(f"picture: {out}")
