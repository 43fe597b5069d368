"""Full, diagonal, KFAC and EKFAC rescaling of a real Fisher of two parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import ekfac
from ekfac.lab.data.datasets import Split, load_dataset
from ekfac.lab.show.figures import style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request

LABEL = 0
# The top rows and left columns of two patches of 4 x 4 pixels, on the digit's left side.
PATCHES = ((8, 8), (20, 8))


def draw(request: Request) -> Figure:
    """Draw the ellipse of G and, for each approximation, two arrows as long as the square roots of its eigenvalues.

    An arrow ends in a perpendicular bar. The bar touches the ellipse if the scaling is the true second moment along the
    arrow, q^T G q; KFAC's do not.
    """
    found = request.measured("rescaling", lambda: measure(request))
    G = torch.tensor(found["G"], dtype=torch.float64)
    colors = {"full": style.GREEN, "diagonal": style.ORANGE, "KFAC": style.RED, "EKFAC": style.BLUE}
    figure, axes = style.panels(1, 4, height=2.4)
    reach = 0.0
    for axis, (name, color) in zip(axes, colors.items(), strict=True):
        directions, values = (torch.tensor(part, dtype=torch.float64) for part in found["axes"][name])
        _ellipse(axis, G)
        _arrows(axis, directions, values, color)
        reach = max(reach, float(values.max().sqrt()), float(torch.linalg.eigvalsh(G).max().sqrt()))
        axis.set_title(f"{name}\nerror {found['error'][name]:.0%}")
        axis.set_xlabel(r"$\nabla_{\theta_1}$")
    axes[0].set_ylabel(r"$\nabla_{\theta_2}$")
    for axis in axes:
        axis.set_xlim(-1.15 * reach, 1.15 * reach)
        axis.set_ylim(-1.15 * reach, 1.15 * reach)
        axis.set_aspect("equal")
        axis.set_xticks([0])
        axis.set_yticks([0])
    figure.suptitle(
        "What each approximation divides the gradient by: bars touch the ellipse if it is the true second moment\n"
        f"(a logistic unit with two inputs that tells {LABEL} from other digits, {request.dataset})"
    )
    return figure


def measure(request: Request) -> dict[str, Any]:
    """Return the Fisher, and each approximation's axes, scaling along them, and error."""
    model, data = two_parameters(request)
    names = {"full": "full", "diagonal": "diagonal", "KFAC": "kfac", "EKFAC": "ekfac"}
    operators = {name: fisher(model, data, kind) for name, kind in names.items()}
    G = operators["full"]
    return {
        "G": G.dense().double().tolist(),
        "axes": {name: [part.tolist() for part in axes_of(operator)] for name, operator in operators.items()},
        "error": {name: float(ekfac.relative_error(G, operator)) for name, operator in operators.items()},
    }


def two_parameters(request: Request) -> tuple[nn.Linear, Split]:
    """Return a logistic unit with two weights, fitted to recognise one digit from two patches of its image."""
    x, y = load_dataset(request.dataset, request.data_dir).train
    images, target = x.view(-1, 28, 28), (y == LABEL).to(x.dtype)[:, None]
    pixels = torch.stack([images[:, r : r + 4, c : c + 4].mean((1, 2)) for r, c in PATCHES], 1)
    unit = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(unit.weight)
    optimizer = torch.optim.LBFGS(unit.parameters(), max_iter=50)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(unit(pixels), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    return unit, Split(pixels, target)


def fisher(model: nn.Module, data: Split, approximation: str) -> ekfac.Curvature:
    """Return the empirical Fisher of the unit."""
    return ekfac.fisher(model, [tuple(data)], "bernoulli", approximation=approximation, progress=False)


def axes_of(operator: ekfac.Curvature) -> tuple[Tensor, Tensor]:
    """Return an operator's two eigenvectors, as columns, and its eigenvalues in the same order."""
    directions = operator.unproject(torch.eye(2))
    values = torch.stack([operator.quadratic(directions[:, n]) for n in range(2)])
    return directions.double(), values.double()


def _ellipse(axis: Axes, G: Tensor) -> None:
    values, vectors = torch.linalg.eigh(G)
    angles = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()])
    points = vectors @ (values.clamp(min=0).sqrt()[:, None] * circle)
    axis.fill(*points.numpy(), facecolor=style.GREEN, alpha=0.15)
    axis.plot(*points.numpy(), color=style.GREEN, linewidth=1)


def _arrows(axis: Axes, directions: Tensor, values: Tensor, color: str) -> None:
    lengths = values.clamp(min=0).sqrt()
    bar = 0.35 * float(lengths.max())
    for number in range(2):
        q, length = directions[:, number].numpy(), float(lengths[number])
        # Choose the direction of an axis that points up or right.
        q = -q if q[1] < -1e-9 or (abs(q[1]) < 1e-9 and q[0] < 0) else q
        tip, side = (q[0] * length, q[1] * length), (-q[1] * bar, q[0] * bar)
        axis.annotate(
            "", tip, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
        )
        axis.plot([tip[0] - side[0], tip[0] + side[0]], [tip[1] - side[1], tip[1] + side[1]], color=color, linewidth=1)


FIGURES.add("rescaling", FigureSpec("four rescalings of a real 2-parameter Fisher, as ellipse and arrows", draw))
