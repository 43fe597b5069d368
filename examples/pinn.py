"""Solve a two-dimensional Poisson equation with a network: a loss that has derivatives inside needs nothing set.

-Laplace u = 2 pi^2 sin(pi x) sin(pi y) on the unit square, u = 0 on its edges; u = sin(pi x) sin(pi y).
benchmarks/pinn.py does it in five dimensions, beside other optimizers.
"""

import math

import torch
from torch import Tensor, nn

import ekfac

STEPS = 150


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


for name in ("Adam", "EKFAC"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    if name == "Adam":
        opt: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    else:
        opt = ekfac.EKFAC(net, lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    for _ in range(STEPS):
        opt.zero_grad()
        loss(net).backward()
        opt.step()
        schedule.step()
    print(f"{name}: relative L2 error {error(net):.4f} after {STEPS} steps")
