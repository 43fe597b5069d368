"""Networks in a plain attribute of a model that registers their parameters elsewhere, as torchrl's losses do."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import ekfac
from ekfac import EKFAC


class Loss(nn.Module):
    """Owns the parameters of a network, which is no submodule."""

    net: nn.Module

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.held = nn.ParameterList(net.parameters())
        self.__dict__["net"] = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def trained(model: nn.Module, opt: EKFAC, steps: int = 30) -> list[Tensor]:
    for t in range(steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(t))
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


def test_they_are_covered_and_trained_as_submodules_are() -> None:
    plain, beside = network(), Loss(network())
    rows = ekfac.summary(beside).rows
    assert [row.name for row in rows] == ["net.0", "net.2", "net.3"]
    assert [row.block for row in rows] == [row.block for row in ekfac.summary(plain).rows]
    torch.testing.assert_close(trained(beside, EKFAC(beside)), trained(plain, EKFAC(plain)), rtol=0, atol=0)


def test_names_in_them_can_be_excluded_and_copies_go_on() -> None:
    model = Loss(network())
    opt = EKFAC(model, coverage=ekfac.Coverage(exclude=["net.3"]))
    assert [row.name for row in opt.summary().rows if row.block != "diagonal"] == ["net.0", "net.2"]
    trained(model, opt, 5)
    other = copy.deepcopy(opt)
    torch.testing.assert_close(trained(other.model, other), trained(model, opt), rtol=0, atol=0)


def test_a_layer_of_the_model_comes_before_one_beside_it() -> None:
    """A second layer on the same weight, of another kind and never called, changes nothing."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    norm = nn.Conv1d(4, 8, 1)
    norm.weight = model[0].weight
    model[1].__dict__["twin"] = norm
    assert [row.name for row in ekfac.summary(model).rows] == ["0", "1"]
