"""Gradients that no backward pass of the model has left: from torch.func, Reptile, PCGrad."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac import EKFAC, KFAC, Preconditioner
from loops import X, Y, assert_same, loss_of, mlp, usual


def functional_gradient(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.grad(lambda p: F.cross_entropy(torch.func.functional_call(model, p, (X,)), Y))(parameters)


def put(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.grad = gradients[name]


@pytest.mark.parametrize("options", [{}, {"scaling": "running"}, {"scaling": "per_example"}])
def test_statistics_apart_and_a_functional_gradient_train_as_a_backward_pass_does(options: dict[str, Any]) -> None:
    models = [mlp().double(), mlp().double()]
    opts = [EKFAC(m, **options) for m in models]
    x = X.double()
    for _ in range(4):
        opts[0].zero_grad()
        F.cross_entropy(models[0](x), Y).backward()
        opts[0].step()
        opts[1].zero_grad()
        with opts[1].statistics():
            F.cross_entropy(models[1](x), Y).backward()
        parameters = {name: p.detach() for name, p in models[1].named_parameters()}
        put(
            models[1],
            torch.func.grad(lambda p: F.cross_entropy(torch.func.functional_call(models[1], p, (x,)), Y))(parameters),
        )
        opts[1].step()
    assert_same(*models)


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
@pytest.mark.parametrize("options", [{}, {"scaling": "running"}, {"scaling": "per_example"}])
def test_the_last_bases_are_kept_between_statistics(kind: Any, options: dict[str, Any]) -> None:
    if kind is KFAC and options:
        pytest.skip("KFAC has no rule")
    model = mlp()
    opt = kind(model, lr=1e-2 if kind is EKFAC and not options else 1e-3, **options)
    losses = []
    for step in range(24):
        if step % 8 == 0:
            with opt.statistics():
                loss_of(model).backward()
        put(model, functional_gradient(model))
        opt.step()
        opt.zero_grad()
        losses.append(loss_of(model).item())
    assert opt.stats()["steps"] == 24
    assert losses[-1] < losses[0]
    again = kind(copy.deepcopy(model), **options)
    again.load_state_dict(opt.state_dict())
    put(again.model, functional_gradient(again.model))
    again.step()


def test_without_any_statistics_it_says_how_to_take_them() -> None:
    model = mlp()
    for make in (EKFAC, Preconditioner):
        opt = make(model)
        put(model, functional_gradient(model))
        with pytest.raises(RuntimeError, match=r"with opt\.statistics\(\): loss_fn\(model\(x\), y\)\.backward\(\)"):
            opt.step()


def test_reptile_trains() -> None:
    """The meta-gradient is how far an inner optimizer has gone, on the same model."""
    model = mlp()
    opt, before = EKFAC(model, lr=3e-3), loss_of(model).item()
    for _ in range(20):
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            inner.zero_grad()
            loss_of(model).backward()
            inner.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.grad = start[name] - p
                p.copy_(start[name])
        opt.step()
    assert loss_of(model).item() < before


def projected(gradients: list[list[Tensor]]) -> list[Tensor]:
    """PCGrad: each task's gradient without what conflicts with the others'."""
    found = []
    for i, own in enumerate(gradients):
        flat = torch.cat([g.reshape(-1) for g in own])
        for j, other in enumerate(gradients):
            others = torch.cat([g.reshape(-1) for g in other])
            product = flat @ others
            if i != j and product < 0:
                flat = flat - product / others.square().sum() * others
        found.append(flat)
    total = sum(found[1:], found[0])
    return [t.view_as(g) for t, g in zip(total.split([g.numel() for g in gradients[0]]), gradients[0], strict=True)]


def test_pcgrad_by_autograd_grad_trains_with_statistics_of_the_sum() -> None:
    model = mlp()
    opt, before = EKFAC(model, lr=1e-2), loss_of(model).item()
    parameters = list(model.parameters())
    for _ in range(20):
        opt.zero_grad()
        out = model(X)
        losses = [F.cross_entropy(out, Y), F.mse_loss(out, torch.zeros_like(out))]
        with opt.statistics():
            sum(losses).backward(retain_graph=True)
        gradients = [list(torch.autograd.grad(loss, parameters, retain_graph=True)) for loss in losses]
        for p, g in zip(parameters, projected(gradients), strict=True):
            p.grad = g
        opt.step()
    assert loss_of(model).item() < before


def test_pcgrad_by_backward_trains() -> None:
    model = mlp()
    opt, before = EKFAC(model, lr=1e-2), loss_of(model).item()
    for _ in range(20):
        out = model(X)
        gradients = []
        for loss in (F.cross_entropy(out, Y), F.mse_loss(out, torch.zeros_like(out))):
            opt.zero_grad()
            loss.backward(retain_graph=True)
            gradients.append([p.grad.clone() for p in model.parameters()])
        for p, g in zip(model.parameters(), projected(gradients), strict=True):
            p.grad = g
        opt.step()
    assert loss_of(model).item() < before


def test_a_usual_step_after_them_is_a_usual_step() -> None:
    model = mlp()
    opt = EKFAC(model)
    with opt.statistics():
        loss_of(model).backward()
    put(model, functional_gradient(model))
    opt.step()
    usual(model, opt)
    assert opt.stats()["steps"] == 2
