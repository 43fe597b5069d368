"""Which training digits made the network say what it says about a test digit? Influence functions with EKFAC.

Leaving training example n out changes the loss of a test digit, to first order, by g_test^T (G + decay)^-1 g_n / N:
positive if the example helps. To check it, the network is trained again without random tenths of its digits.
"""

import copy

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import ekfac
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.show.picture import publish

DECAY, SUBSETS, LEFT_OUT = 1e-2, 12, 50
torch.manual_seed(0)
splits = load_dataset("mnist-5k").splits
images, y = splits["train"].x[:500], splits["train"].y[:500]
test_images, test_y = (t[::5] for t in splits["validation"])  # they are sorted by label
x, test = (F.avg_pool2d(t.view(-1, 28, 28), 4).flatten(1).double() for t in (images, test_images))
model = nn.Sequential(nn.Linear(49, 24), nn.Tanh(), nn.Linear(24, 10)).double()


def losses(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, parameters, (x,)), y, reduction="none")


def train(model: nn.Module, kept: Tensor) -> dict[str, Tensor]:
    """Train to the very optimum, which is what influence functions are about."""
    options = {"max_iter": 2000, "tolerance_grad": 1e-6, "tolerance_change": 0, "history_size": 50}
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in model.parameters()) * DECAY / 2
        loss = F.cross_entropy(model(x[kept]), y[kept], reduction="sum") / len(x) + decay
        loss.backward()
        return loss

    optimizer.step(closure)
    return {name: p.detach() for name, p in model.named_parameters()}


parameters = train(model, torch.ones(len(x), dtype=torch.bool))
kept = torch.stack([torch.randperm(len(x)) >= LEFT_OUT for _ in range(SUBSETS)])
again = torch.stack([losses(train(copy.deepcopy(model), k), test, test_y) for k in kept])
change = again - losses(parameters, test, test_y)
gradient = vmap(grad(lambda p, x, y: losses(p, x[None], y[None])[0]), in_dims=(None, 0, 0))
of_training, of_test = gradient(parameters, x, y), gradient(parameters, test, test_y)
numbers = {}
for name in ("full", "block", "kfac", "diagonal", "ekfac"):
    G = ekfac.fisher(model, [(x, y)], "categorical", approximation=name, estimate="exact")
    score = G.flatten(of_training) @ G.flatten(G.solve(of_test, DECAY)).T / len(x)  # [training digit, test digit]
    both = torch.stack([(~kept).double() @ score, change])
    both -= both.mean(1, keepdim=True)
    numbers[name] = (both.prod(0).sum(0) / both.square().sum(1).prod(0).sqrt()).mean().item()
    print(f"{name:8} correlation with retraining {numbers[name]:.3f}, mean over {len(test)} test digits")

wrong = model(test).argmax(1) != test_y
chosen = int(losses(parameters, test, test_y).where(wrong, torch.inf).argmin())  # wrong by the least
scores = score[:, chosen]  # EKFAC's, the last


def draw(figure: Figure) -> None:
    cells = [(0, test_images[chosen], f"a {int(test_y[chosen])}, read as {int(model(test[chosen]).argmax())}")]
    for row, most in enumerate((scores.argsort(descending=True)[:5], scores.argsort()[:5])):
        cells += [(6 * row + 1 + i, images[n], f"{int(y[n])}: {scores[n]:+.2f}") for i, n in enumerate(most)]
    axes = figure.subplots(2, 6, subplot_kw={"xticks": [], "yticks": [], "frame_on": False}).flat
    for place, pixels, title in cells:
        axes[place].imshow(pixels.view(28, 28), cmap="gray_r" if figure.get_facecolor()[0] > 0.5 else "gray")
        axes[place].set_title(title, loc="center")
    figure.suptitle("Training digits that help (above) and harm (below) this prediction most", x=0.01, ha="left")


publish("influence", draw, numbers)
