"""A small classifier, and the ordinary way of training it."""

from __future__ import annotations

from collections.abc import Callable
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


class Last(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return (out[0] if isinstance(out, tuple) else out)[:, -1]


#: Small networks of several kinds, and the shape of an example.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2), nn.PReLU()), (4,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(inplace=True), nn.Flatten()), (1, 3, 3)),
    "recurrent": (lambda: Last(nn.LSTM(3, 4, batch_first=True)), (5, 3)),
    "attention": (lambda: Last(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)), (5, 4)),
}
