"""Which training digits made the network say what it says about a test digit? Influence functions with EKFAC.

    python examples/influence.py [--out FILE]

Leaving training example n out changes the loss of a test digit, to first order, by

    g_test^T (G + weight decay)^-1 g_n / N        positive: the example helps, without it the loss would be larger

where G is the Fisher of the trained network and g are gradients. A classifier (49-24-10) is trained on 500 real digits,
averaged down to 7 x 7 pixels; G is EKFAC's, exact over the labels. The scores are then checked against the truth: the
network is trained again without random tenths of its digits, and the change of the loss of each of 200 test digits is
compared with the sum of the scores of what was left out.
"""

import argparse
import copy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset

WEIGHT_DECAY = 1e-2
SUBSETS, SIZE = 30, 50

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("runs/influence.png"), help="the picture")
out = parser.parse_args().out

torch.manual_seed(0)
splits = load_dataset("mnist-5k").splits
images, y = splits["train"].x[:500], splits["train"].y[:500]
test_images, test_y = (t[::5] for t in splits["validation"])  # they are sorted by label


def small(pixels: Tensor) -> Tensor:
    return F.avg_pool2d(pixels.view(-1, 28, 28), 4).flatten(1).double()


x, test_x = small(images), small(test_images)
n = len(x)
model = nn.Sequential(nn.Linear(49, 24), nn.Tanh(), nn.Linear(24, 10)).double()


def losses(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, parameters, (x,)), y, reduction="none")


def train(model: nn.Module, kept: Tensor) -> float:
    """Train to the very optimum, which is what influence functions are about; gives the largest slope that is left."""
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=2000,
        tolerance_grad=1e-6,
        tolerance_change=0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in parameters) * WEIGHT_DECAY / 2
        loss = F.cross_entropy(model(x[kept]), y[kept], reduction="sum") / n + decay
        loss.backward()
        return loss

    optimizer.step(closure)
    return max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)


slope = train(model, torch.ones(n, dtype=torch.bool))
parameters = {name: p.detach() for name, p in model.named_parameters()}
right = model(test_x).argmax(1) == test_y
print(f"trained on {n} digits: gradient {slope:.1e}, test accuracy {right.double().mean():.1%}")

# The test digit: the one that is wrong by the least.
margin = losses(parameters, test_x, test_y).detach()
margin[right] = torch.inf
chosen = int(margin.argmin())
say, truth = int(model(test_x[chosen : chosen + 1]).argmax()), int(test_y[chosen])
print(f"test digit {chosen}: a {truth}, taken for a {say}")

gradient = vmap(grad(lambda p, x, y: losses(p, x[None], y[None])[0]), in_dims=(None, 0, 0))
of_training, of_test = gradient(parameters, x, y), gradient(parameters, test_x, test_y)


def scores(approximation: str) -> Tensor:
    """Influence [training digit, test digit]."""
    G = ekfac.fisher(model, [(x, y)], "categorical", approximation=approximation, estimate="exact")
    return G.flatten(of_training) @ G.flatten(G.solve(of_test, WEIGHT_DECAY)).T / n


# The truth: train again without random subsets.
weights = torch.ones(SUBSETS, n).double()
rows, slope = [], 0.0
for weight in weights:
    weight[torch.randperm(n)[:SIZE]] = 0
    again = copy.deepcopy(model)
    slope = max(slope, train(again, weight > 0))
    rows.append(losses(dict(again.named_parameters()), test_x, test_y).detach())
change = torch.stack(rows) - losses(parameters, test_x, test_y)
print(f"trained again without {SIZE} of them, {SUBSETS} times: gradient at most {slope:.1e}")


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Of each column of one with that of the other."""
    a, b = (t - t.mean(0) for t in (a, b))
    return (a * b).sum(0) / (a.square().sum(0) * b.square().sum(0)).sqrt()


print(f"correlation with the truth, mean over {len(test_x)} test digits")
print(f"{'':10}{'linear':>8}{'rank':>8}")
found = {name: scores(name) for name in ("full", "block", "ekfac", "kfac", "diagonal")}
guesses = {name: (1 - weights) @ score for name, score in found.items()}
for name, guess in guesses.items():
    ranks = correlation(*(t.argsort(0).argsort(0).double() for t in (guess, change)))
    print(f"{name:10}{correlation(guess, change).mean():8.3f}{ranks.mean():8.3f}")
score = found["ekfac"][:, chosen]
order = score.argsort()

figure = Figure(figsize=(10, 3.3), layout="constrained")
digits, plot = figure.subfigures(1, 2, width_ratios=[1.55, 1])
grid = digits.add_gridspec(2, 6, width_ratios=[1.7, *[1] * 5])


def show(place: object, pixels: Tensor, title: str) -> None:
    axes = digits.add_subplot(place)
    axes.imshow(pixels.view(28, 28), cmap="gray_r")
    axes.set_title(title, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])


show(grid[:, 0], test_images[chosen], f"test digit: a {truth},\ntaken for a {say}")
for row, (places, what) in enumerate(((order.flip(0)[:5], "helpful"), (order[:5], "harmful"))):
    for column, place in enumerate(places.tolist()):
        kind = f"most {what}\n" if column == 0 else "\n"
        show(grid[row, 1 + column], images[place], f"{kind}{int(y[place])}: {score[place]:+.2f}")
digits.supxlabel("training digits: label and score", fontsize=8)
axes = plot.subplots()
axes.axline((0, 0), slope=1, color="#999999", linewidth=1)
for name, colour, fill in (("full", "#0072B2", "none"), ("ekfac", "#D55E00", "#D55E00")):
    guess, truth = guesses[name][:, chosen], change[:, chosen]
    label = f"{name}: correlation {correlation(guess, truth):.2f}"
    axes.plot(guess, truth, "o", color=colour, markerfacecolor=fill, markersize=4, label=label)
axes.set(xlabel="sum of the scores left out", ylabel="change of the test digit's loss")
axes.set_title(f"{SUBSETS} times without {SIZE} random digits", fontsize=10)
axes.legend(frameon=False, fontsize=8, loc="upper left", handletextpad=0, borderaxespad=0)
axes.spines[["top", "right"]].set_visible(False)
out.parent.mkdir(parents=True, exist_ok=True)
figure.savefig(out, dpi=150)
print(f"picture: {out}")
