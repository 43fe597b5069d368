"""A Laplace approximation: the uncertainty of a trained network from samples of its posterior.

    python examples/laplace.py [--out FILE]

A classifier (196-64-10) is trained on 400 real digits, averaged down to 14 x 14 pixels, until it fits them: accurate,
and too sure of itself. Around its weights the posterior is a Gaussian with precision N G + prior, and ``G.sample``
draws from it, with G by EKFAC, exact over the labels. Predictions are averages over 100 draws of the network
linearised at its weights. The prior is chosen on 1,000 digits; accuracy and calibration are those of 2,000 others,
upright and turned.
"""

import argparse
import math
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset

ANGLES = (0, 15, 30, 45, 60)
PRIORS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
COLOURS = {"trained network": "#0072B2", "Laplace, EKFAC": "#D55E00", "Laplace, diagonal": "#999999"}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("runs/laplace.png"), help="the picture")
out = parser.parse_args().out

torch.manual_seed(0)
splits = load_dataset("mnist-5k").splits


def prepared(pixels: Tensor, angle: float = 0.0) -> Tensor:
    """Digits turned by an angle in degrees, averaged down."""
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    turn = torch.tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(pixels), 2, 3)
    images = pixels.view(-1, 1, 28, 28)
    images = F.grid_sample(images, F.affine_grid(turn, list(images.shape), align_corners=False), align_corners=False)
    return F.avg_pool2d(images, 2).flatten(1)


x, y = prepared(splits["train"].x[:400]), splits["train"].y[:400]
test, test_y = splits["train"].x[400:2400], splits["train"].y[400:2400]
model = nn.Sequential(nn.Linear(196, 64), nn.Tanh(), nn.Linear(64, 10))

optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(200):
    for batch in torch.randperm(len(x)).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
print(f"trained on {len(x)} digits: accuracy {(model(x).argmax(1) == y).float().mean():.1%} on them")
parameters = {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def predictive(G: ekfac.Curvature, prior: float, inputs: Tensor, draws: int = 100) -> Tensor:
    """Mean over draws of softmax(f + J (theta - theta*))."""
    samples = G.sample(draws, damping=prior, scale=len(x), generator=torch.Generator().manual_seed(0))

    def logits(direction: dict[str, Tensor]) -> Tensor:
        value, slope = jvp(lambda p: functional_call(model, p, (inputs,)), (parameters,), (direction,))
        return value + slope

    return vmap(logits)(samples).softmax(-1).mean(0)


def bins(p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share, mean confidence and accuracy of the predictions in each of ten bins of confidence."""
    confidence, guess = p.max(1)
    place = (confidence * 10).long().clamp(max=9)
    count = torch.bincount(place, minlength=10).clamp(min=1)
    sums = [torch.bincount(place, t, minlength=10) / count for t in (confidence, (guess == labels).float())]
    return torch.bincount(place, minlength=10) / len(p), *sums


def scores(p: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Accuracy, negative log-likelihood, and expected calibration error."""
    share, confidence, accuracy = bins(p, labels)
    right = (p.argmax(1) == labels).float().mean()
    nll = -p[torch.arange(len(p)), labels].log().mean()
    return float(right), float(nll), float((share * (confidence - accuracy).abs()).sum())


batches = [(x, y)]
curvatures = {
    "Laplace, EKFAC": ekfac.fisher(model, batches, "categorical", approximation="ekfac", estimate="exact"),
    "Laplace, diagonal": ekfac.fisher(model, batches, "categorical", approximation="diagonal", estimate="exact"),
}
choose, choose_y = prepared(splits["validation"].x), splits["validation"].y
by_prior = {
    name: [scores(predictive(G, prior, choose), choose_y)[1] for prior in PRIORS] for name, G in curvatures.items()
}
priors = {name: PRIORS[found.index(min(found))] for name, found in by_prior.items()}
table = {name: [] for name in COLOURS}
upright = {}
for angle in ANGLES:
    inputs = prepared(test, angle)
    with torch.no_grad():
        predictions = {"trained network": model(inputs).softmax(-1)}
    predictions |= {name: predictive(G, priors[name], inputs) for name, G in curvatures.items()}
    for name, p in predictions.items():
        table[name].append(scores(p, test_y))
    if angle == 0:
        upright = predictions
print(f"{'':18}{'prior':>7}{'accuracy':>10}{'log-loss':>10}{'calibration error':>19}{'  log-loss at 45':>17}")
for name, rows in table.items():
    prior = f"{priors[name]:g}" if name in priors else ""
    accuracy, nll, error = rows[0]
    print(f"{name:18}{prior:>7}{accuracy:10.1%}{nll:10.3f}{error:19.3f}{rows[ANGLES.index(45)][1]:17.3f}")

figure = Figure(figsize=(10, 3.5), layout="constrained")
left, middle, right = figure.subplots(1, 3)
left.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle=":")
for name, p in upright.items():
    share, confidence, accuracy = bins(p, test_y)
    shown = share >= 0.01
    label = f"{name}: error {table[name][0][2]:.3f}"
    left.plot(confidence[shown], accuracy[shown], "o-", color=COLOURS[name], markersize=4, label=label)
left.set(xlabel="confidence", ylabel="accuracy", title="Calibration", xlim=(0.2, 1.02), ylim=(0, 1.15))
left.legend(frameon=False, fontsize=8)
for name, found in by_prior.items():
    middle.semilogx(PRIORS, found, "o-", color=COLOURS[name], markersize=4)
with torch.no_grad():
    before = scores(model(choose).softmax(-1), choose_y)[1]
middle.axhline(before, color=COLOURS["trained network"])
middle.set(xlabel="precision of the prior", ylabel="log-loss", title="Choosing the prior", ylim=(0, None))
for name, rows in table.items():
    right.plot(ANGLES, [row[1] for row in rows], "o-", color=COLOURS[name], markersize=4)
right.set(xlabel="turned by, degrees", ylabel="log-loss", xticks=ANGLES, title="Turned test digits", ylim=(0, None))
for axes in (left, middle, right):
    axes.spines[["top", "right"]].set_visible(False)
out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(out, dpi=150)
print(f"picture: {out}")
