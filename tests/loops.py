"""A small classifier, and the ordinary way of training it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def usual(model: nn.Module, opt: Any, **backward: bool) -> None:
    opt.zero_grad()
    loss_of(model).backward(**backward)
    opt.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
