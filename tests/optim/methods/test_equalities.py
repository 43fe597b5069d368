"""Equal by definition: pairs of methods that must give the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_same_weights, batches_for, half_square, jittered, mean_loss, mlp, parameters_of
from oracle import per_example_gradients
from paper import EKFAC, KFAC, Preconditioner


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(1)
    convolutional = nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2))
    return {"mlp": (mlp(4, 6, 3), (4,)), "cnn": (jittered(convolutional, 0.1), (2, 2, 2))}


def train(model: nn.Module, opt: Any, steps: list[Any], second: Any = None) -> dict[str, Tensor]:
    for (batch,) in steps:
        (second or opt).zero_grad()
        mean_loss(model, batch).backward()
        opt.step()
        if second is not None:
            second.step()
    return parameters_of(model)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_kfac_without_pi_is_the_kronecker_rule_with_factored_damping(name: str, sharing: str) -> None:
    weights = []
    for kind, own in (
        (KFAC, {"pi_correction": False}),
        (EKFAC, {"scaling": "kronecker", "damping_mode": "factored"}),
    ):
        model, shape = networks()[name]
        opt = kind(model, lr=0.05, damping=0.01, refresh_every=3, momentum=0.5, sharing=sharing, **own)
        weights.append(train(model, opt, batches_for(model, shape, n=30, steps=10)))
    assert_same_weights(*weights, 1e-9)


def test_pi_matters() -> None:
    weights = []
    for pi_correction in (False, True):
        model, shape = networks()["mlp"]
        opt = KFAC(model, lr=0.05, damping=0.01, refresh_every=3, pi_correction=pi_correction)
        weights.append(train(model, opt, batches_for(model, shape, n=30, steps=3)))
    assert any(not torch.allclose(weights[0][k], weights[1][k], rtol=1e-3) for k in weights[0])


@pytest.mark.parametrize("scaling", ["running", "per_example", "kronecker"])
@pytest.mark.parametrize("momentum", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {}])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_preconditioner_and_sgd(name: str, momentum: dict[str, Any], scaling: str) -> None:
    options = {"scaling": scaling, "damping": 0.01, "refresh_every": 4}
    weights = []
    for split in (False, True):
        model, shape = networks()[name]
        steps = batches_for(model, shape, n=20, steps=10)
        if split:
            first, second = (
                Preconditioner(model, **options),
                torch.optim.SGD(model.parameters(), lr=0.05, **momentum),
            )
            weights.append(train(model, first, steps, second))
        else:
            weights.append(train(model, EKFAC(model, lr=0.05, **momentum, **options), steps))
    assert_same_weights(*weights, 1e-12)


def test_preconditioner_replaces_the_gradient_in_place() -> None:
    model, shape = networks()["mlp"]
    pre = Preconditioner(model, damping=0.01)
    ((batch,),) = batches_for(model, shape, steps=1)
    mean_loss(model, batch).backward()
    before = {name: (p.grad, p.grad.data_ptr(), p.grad.clone()) for name, p in model.named_parameters()}
    weights = parameters_of(model)
    pre.step()
    for name, p in model.named_parameters():
        grad, pointer, old = before[name]
        assert p.grad is grad and p.grad.data_ptr() == pointer
        assert not torch.equal(p.grad, old)
        assert torch.equal(p, weights[name])


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_preconditioner_works_before_any_optimizer(optimizer: type[torch.optim.Optimizer]) -> None:
    """The other optimizer sees the preconditioned gradient and nothing else."""
    model, shape = networks()["mlp"]
    steps = batches_for(model, shape, n=20, steps=6)
    pre, opt = Preconditioner(model, damping=0.1, refresh_every=2), optimizer(model.parameters(), lr=0.01)
    gradients, weights = [], []
    for (batch,) in steps:
        opt.zero_grad()
        mean_loss(model, batch).backward()
        pre.step()
        gradients.append([p.grad.clone() for p in model.parameters()])
        opt.step()
        weights.append(parameters_of(model))
    twin, _ = networks()["mlp"]
    opt = optimizer(twin.parameters(), lr=0.01)
    for grads, expected in zip(gradients, weights, strict=True):
        for p, g in zip(twin.parameters(), grads, strict=True):
            p.grad = g
        opt.step()
        assert_same_weights(parameters_of(twin), expected, 1e-14)


@pytest.mark.parametrize("scaling", ["per_example", "running", "kronecker"])
def test_in_the_identity_basis_each_rule_is_its_direct_formula(scaling: str) -> None:
    rho, eps, lr, refresh_every = 0.8, 0.01, 0.1, 3
    model = mlp(4, 3)
    steps = batches_for(model, (4,), n=7, steps=7)
    opt = EKFAC(
        model,
        lr=lr,
        scaling=scaling,
        basis="identity",
        damping=eps,
        refresh_every=refresh_every,
        factor_decay=0.0,
        scaling_decay=0.0 if scaling == "per_example" else rho,
        on_refresh="carry",
    )
    s = None
    for number, ((x, y),) in enumerate(steps):
        with opt.paused():
            gradients = per_example_gradients(model, half_square, x, y)
        g_n = torch.cat([gradients["0.weight"], gradients["0.bias"].unsqueeze(-1)], -1)
        g = g_n.mean(0)
        with torch.no_grad():
            delta, h = model(x) - y, torch.cat([x, torch.ones_like(x[:, :1])], 1)
        kronecker = torch.outer(delta.square().mean(0), h.square().mean(0))
        if scaling == "per_example":
            s = g_n.square().mean(0)
        elif scaling == "kronecker":
            s = kronecker if number % refresh_every == 0 else s
        else:
            s = rho * (kronecker if s is None else s) + (1 - rho) * len(x) * g.square()
        assert s is not None
        expected = torch.cat([model[0].weight, model[0].bias.unsqueeze(-1)], 1).detach() - lr * g / (s + eps)
        opt.zero_grad()
        mean_loss(model, (x, y)).backward()
        opt.step()
        got = torch.cat([model[0].weight, model[0].bias.unsqueeze(-1)], 1)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.rounding
def test_running_on_linear_layers_is_what_the_authors_code_does() -> None:
    """Their equations, written afresh.

    Xx^T and gg^T of the refreshing batch, m2 restarted, N g^2 averaged.
    """
    alpha, eps, lr, refresh_every, n = 0.9, 0.01, 0.05, 4, 30
    model, twin = mlp(4, 5, 3), mlp(4, 5, 3)
    twin.load_state_dict(model.state_dict())
    opt = EKFAC(
        model,
        lr=lr,
        scaling="running",
        scaling_decay=alpha,
        damping=eps,
        refresh_every=refresh_every,
        factor_decay=0.0,
        on_refresh="kronecker",
    )
    layers = [twin[0], twin[2]]
    kept: dict[int, dict[str, Tensor]] = {0: {}, 1: {}}
    for number, ((x, y),) in enumerate(batches_for(model, (4,), n=n, steps=10)):
        opt.zero_grad()
        mean_loss(model, (x, y)).backward()
        opt.step()

        pre = layers[0](x)
        hidden = torch.tanh(pre)
        output = layers[1](hidden)
        pre.retain_grad()
        output.retain_grad()
        twin.zero_grad()
        half_square(output, y).backward()
        for index, (layer, given, out) in enumerate(((layers[0], x, pre), (layers[1], hidden, output))):
            state = kept[index]
            gy = out.grad * n
            ones = torch.cat([given.detach(), torch.ones_like(given[:, :1])], 1)
            if number % refresh_every == 0:
                e_x, state["kfe_x"] = torch.linalg.eigh(ones.T @ ones / n)
                e_g, state["kfe_gy"] = torch.linalg.eigh(gy.T @ gy / n)
                state["m2"] = torch.outer(e_g, e_x)
            g = torch.cat([layer.weight.grad, layer.bias.grad.unsqueeze(1)], 1)
            g_kfe = state["kfe_gy"].T @ g @ state["kfe_x"]
            state["m2"] = alpha * state["m2"] + (1 - alpha) * n * g_kfe**2
            update = state["kfe_gy"] @ (g_kfe / (state["m2"] + eps)) @ state["kfe_x"].T
            with torch.no_grad():
                layer.weight.sub_(lr * update[:, :-1])
                layer.bias.sub_(lr * update[:, -1])
        assert_same_weights(parameters_of(model), parameters_of(twin), 1e-9)
