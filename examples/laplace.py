"""A Laplace approximation: the uncertainty of a trained network from samples of its posterior.

A classifier fits 400 real digits and is too sure of itself. The posterior around its weights is a Gaussian of precision
N G + prior, and `G.sample` draws from it. Predictions are averages over 100 draws of the linearised network.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.show.picture import publish

torch.manual_seed(0)
splits = load_dataset("mnist-5k").splits
digits, choose = (F.avg_pool2d(splits[n].x.view(-1, 28, 28), 2).flatten(1) for n in ("train", "validation"))
labels, choose_y = splits["train"].y, splits["validation"].y
x, y, test, test_y = digits[:400], labels[:400], digits[400:2400], labels[400:2400]
model = nn.Sequential(nn.Linear(196, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(200):
    for batch in torch.randperm(len(x)).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
parameters = {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def predictive(G: ekfac.Curvature, prior: float, inputs: Tensor) -> Tensor:
    """Mean over draws of softmax(f + J (theta - theta*))."""
    samples = G.sample(100, damping=prior, scale=len(x), generator=torch.Generator().manual_seed(0))

    def logits(direction: dict[str, Tensor]) -> Tensor:
        value, slope = jvp(lambda p: functional_call(model, p, (inputs,)), (parameters,), (direction,))
        return value + slope

    return vmap(logits)(samples).softmax(-1).mean(0)


def bins(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Share, mean confidence and accuracy of the test predictions, in ten bins of confidence."""
    confidence, guess = p.max(1)
    place = (confidence * 10).long().clamp(max=9)
    count = torch.bincount(place, minlength=10)
    sums = [torch.bincount(place, t, minlength=10) for t in (confidence, (guess == test_y).float())]
    return count / len(p), sums[0] / count.clamp(min=1), sums[1] / count.clamp(min=1)


G, D = (
    ekfac.fisher(model, [(x, y)], "categorical", approximation=name, estimate="exact") for name in ("ekfac", "diagonal")
)
prior = min((3, 10, 30, 100), key=lambda prior: F.nll_loss(predictive(G, prior, choose).log(), choose_y).item())
found = {"trained network": model(test).softmax(-1).detach(), "Laplace, EKFAC": predictive(G, prior, test)}
found["Laplace, diagonal"] = predictive(D, prior, test)
numbers: dict[str, object] = {"prior": prior}
for name, p in found.items():
    share, confidence, accuracy = bins(p)
    right = (p.argmax(1) == test_y).float().mean().item()
    scores = [right, F.nll_loss(p.log(), test_y).item(), (share @ (confidence - accuracy).abs()).item()]
    numbers[name] = dict(zip(("accuracy", "log_loss", "calibration"), scores, strict=True))
    print(f"{name:17} accuracy {scores[0]:.1%}, log-loss {scores[1]:.3f}, calibration error {scores[2]:.3f}")


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    axes.axline((0, 0), slope=1, linestyle=":", color="C9", linewidth=1)
    for (name, p), colour, place in zip(found.items(), ("C7", "C0"), ((0.72, 0.45), (0.47, 0.68)), strict=False):
        share, confidence, accuracy = bins(p)
        axes.plot(confidence[share >= 0.01], accuracy[share >= 0.01], "o-", color=colour)
        axes.text(*place, name, color=colour, fontweight="bold")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0.3, 1.0), ylim=(0.2, 1.02))
    axes.set_title("With Laplace, confidence matches accuracy")


publish("laplace", draw, numbers)
