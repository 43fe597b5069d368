"""Solve a two-dimensional Poisson equation with a network, by a loss that contains derivatives.

-Laplace u = 2 pi^2 sin(pi x) sin(pi y) on the unit square, u = 0 on its edges; u = sin(pi x) sin(pi y).
benchmarks/pinn.py does it in five dimensions, beside other optimizers.
"""

import math

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import ekfac
from ekfac.lab.show.picture import COLOURS, label_ends, publish

STEPS, EVERY = 150, 10


def solution(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x).prod(1)


def points(n: int) -> tuple[Tensor, Tensor]:
    """New points inside and on the edges."""
    edges = torch.rand(n // 4, 2)
    edges[torch.arange(n // 4), torch.randint(2, (n // 4,))] = torch.randint(2, (n // 4,)).float()
    return torch.rand(n, 2).requires_grad_(), edges


def loss(net: nn.Module) -> Tensor:
    """The mean squared residual of the equation and of the values on the edges."""
    x, edges = points(200)
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    laplacian = sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))
    return (laplacian + 2 * math.pi**2 * solution(x)).square().mean() + 100 * net(edges).square().mean()


def error(net: nn.Module) -> float:
    """The relative L2 error."""
    x = torch.rand(4000, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return ((net(x)[:, 0] - solution(x)).norm() / solution(x).norm()).item()


curves: dict[str, list[float]] = {}
for name in ("Adam", "EKFAC"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    if name == "Adam":
        opt: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    else:
        opt = ekfac.EKFAC(net, lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    for step in range(STEPS):
        opt.zero_grad()
        loss(net).backward()
        opt.step()
        schedule.step()
        if (step + 1) % EVERY == 0:
            curves.setdefault(name, []).append(error(net))
    print(f"{name}: relative L2 error {error(net):.4f} after {STEPS} steps")


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    for name, values in curves.items():
        axes.semilogy(range(EVERY, STEPS + 1, EVERY), values, color=COLOURS[name], label=name)
    best = min(curves, key=lambda name: curves[name][-1])
    axes.set(xlabel="step", ylabel="relative error", title=f"A Poisson equation: {best} ends closer")
    axes.set_yticks([0.1, 0.2, 0.5, 1], ["0.1", "0.2", "0.5", "1"])
    axes.minorticks_off()
    label_ends(axes, numbers=".3f")


publish("pinn", draw, {name: values[-1] for name, values in curves.items()})
