"""Solve u'' = -pi^2 sin(pi x), u(0) = u(1) = 0, with a network: a loss that has derivatives inside.

The layers' curvature is that of the network's own output, taken from a loss that EKFAC can read (``opt.statistics``).
"""

import math

import torch
from torch import Tensor, nn

import ekfac

STEPS = 300
x = torch.linspace(0, 1, 64)[:, None].requires_grad_()
ends = torch.tensor([[0.0], [1.0]])


def residual(net: nn.Module) -> Tensor:
    u = net(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second + math.pi**2 * torch.sin(math.pi * x)).square().mean() + 100 * net(ends).square().mean()


def error(net: nn.Module) -> float:
    with torch.no_grad():
        return (net(x) - torch.sin(math.pi * x)).abs().max().item()


for name in ("Adam", "EKFAC"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    if name == "Adam":
        adam = torch.optim.Adam(net.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
        for _ in range(STEPS):
            adam.zero_grad()
            residual(net).backward()
            adam.step()
            schedule.step()
    else:
        with ekfac.EKFAC(net, total_steps=STEPS, weight_decay=0.0) as opt:
            for _ in range(STEPS):
                opt.zero_grad()
                with opt.statistics():
                    u = net(x.detach())
                    (0.5 * (u - (u.detach() + torch.randn_like(u))).square().sum(1)).mean().backward()
                residual(net).backward()
                opt.step()
    print(f"{name}: largest error {error(net):.4f} after {STEPS} steps")
