"""Outputs of layers that are changed in place, and backward passes that begin at them: both are captured in full."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers import assert_same_weights, compare_with_oracle, jittered, mean_loss, parameters_of, sum_loss
from oracle import Layer, factors, find_layers, observe
from paper import EKFAC, KFAC

OPTIONS: dict[str, Any] = {"lr": 0.1, "damping": 0.03, "refresh_every": 2, "factor_decay": 0.6}


class Twice(nn.Module):
    """A pair as a bilinear layer's two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(3, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.tanh())


class First(nn.Module):
    """The first of several outputs; of a cell, after three calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.inner, nn.RNNCellBase):
            return self.inner(x)[0]
        state = None
        for one in x.unbind(1):
            state = self.inner(one, state)
        return state[0] if isinstance(state, tuple) else state


class Changed(nn.Module):
    """A layer whose output is changed in place, as it is or through a view."""

    def __init__(self, layer: nn.Module, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.before, self.layer, self.change = nn.Linear(3, 3), layer, change

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(torch.tanh(self.before(x)))
        found = self.change(y)
        return y if found is None else found


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 4),
    "without bias": lambda: nn.Linear(3, 4, bias=False),
    "bilinear": Twice,
    "LSTM": lambda: First(nn.LSTM(3, 4, batch_first=True)),
    "GRU": lambda: First(nn.GRU(3, 4, batch_first=True, bidirectional=True)),
    "LSTM cell": lambda: First(nn.LSTMCell(3, 4)),
    "GRU cell": lambda: First(nn.GRUCell(3, 4)),
}
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "as it is": lambda y: y.sin_(),
    "flat": lambda y: y.flatten(1).sin_(),
    "transposed": lambda y: y.transpose(0, 1).sin_().transpose(0, 1),
    "a part": lambda y: (y[:, 0].mul_(3.0), y)[1],
    "after another use": lambda y: y.sum(-1, keepdim=True) + y.mul_(3.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_that_are_changed_in_place(layer: str, change: str) -> None:
    torch.manual_seed(0)
    model = jittered(Changed(LAYERS[layer](), CHANGES[change]))
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        y = torch.randn_like(model(x.clone()))
    for options in ({"scaling": "per_example"}, {"optimizer": "KFAC"}):
        compare_with_oracle(copy.deepcopy(model), mean_loss, [[(x, y)], [(x[:4], y[:4])]], **OPTIONS, **options)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_backward_pass_may_begin_at_a_layers_output(layer: str) -> None:
    """By ``y.backward(gradient)``, and within reentrant checkpointing, which does so."""
    torch.manual_seed(0)
    model = jittered(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), LAYERS[layer]()))
    twins = [copy.deepcopy(model) for _ in range(2)]
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    for net in (model, *twins):
        opt = EKFAC(net, scaling="per_example", **OPTIONS)
        for _ in range(3):
            opt.zero_grad()
            if net is model:
                net(x).square().sum().div(6).backward()
            elif net is twins[0]:
                y = net(x)
                y.backward(2 * y.detach() / 6)
            else:
                checkpoint(net[2], net[1](net[0](x)), use_reentrant=True).square().sum().div(6).backward()
            opt.step()
    for twin in twins:
        assert_same_weights(parameters_of(twin), parameters_of(model), 1e-10)


def test_derivatives_of_a_network_whose_layers_give_out_views() -> None:
    """Linear layers on three dimensions do; the curvature of a loss with derivatives is that on two."""
    torch.manual_seed(0)
    model = jittered(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)))
    twin = copy.deepcopy(model)
    for net, shape in ((model, (8, 2)), (twin, (8, 1, 2))):
        opt = KFAC(net, **OPTIONS)
        for seed in range(4):
            x = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            x = x.reshape(shape).requires_grad_()
            opt.zero_grad()
            u = net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope[..., 0].sum(), x, create_graph=True)
            ((bend[..., 0] + slope[..., 1] + u[..., 0]).square().sum() / 8).backward()
            opt.step()
    assert_same_weights(parameters_of(twin), parameters_of(model), 1e-10)


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm1d(4)])
def test_calls_of_a_norm_layer_add_up(norm: Callable[[], nn.Module]) -> None:
    """Its block is exact: the second moment of an example's whole gradient, however often the layer is called."""
    torch.manual_seed(0)
    inner = norm()
    model = jittered(nn.Sequential(nn.Linear(3, 4), inner, nn.Tanh(), nn.Linear(4, 4), inner))
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    opt, _ = compare_with_oracle(model, mean_loss, [[(x, y)]], scaling="kronecker", **{**OPTIONS, "lr": 0.0})
    layer: Layer = next(layer for layer in find_layers(model) if layer.is_norm)
    _, b = factors(*observe(model, mean_loss, [(x, y)], [layer]).calls[layer.key], layer)
    state = opt.state[dict(model.named_parameters())[layer.key]]
    torch.testing.assert_close(state["B"] / state["factor_weight"], b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["kronecker", "KFAC"])
def test_a_scalers_scale_is_exact_in_float64(rule: str) -> None:
    torch.manual_seed(0)
    model = jittered(nn.Linear(3, 4))
    x, y = (torch.randn(7, d, dtype=torch.float64) for d in (3, 4))  # one by seven is no number in float32
    kind, own = (KFAC, {}) if rule == "KFAC" else (EKFAC, {"scaling": rule})
    found = []
    for enabled in (False, True):
        net, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        opt = kind(net, **own, **OPTIONS, loss_reduction="sum", grad_scaler=scaler)
        scaler.scale(sum_loss(net, (x, y))).backward()
        scaler.step(opt)
        found.append({"B": opt.state[net.weight]["B"]} | parameters_of(net))
    assert_same_weights(*found, 1e-14)


class Tied(nn.Module):
    """An output layer that shares its weight with an embedding to which, at times, no gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head, self.live = nn.Embedding(5, 3), nn.Linear(3, 5), 1.0
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(x)) * self.live + 0.5)


def test_a_tied_embedding_to_which_no_gradient_comes_has_no_part_in_the_factors() -> None:
    torch.manual_seed(0)
    model = jittered(Tied())
    x, y = torch.randint(5, (6, 2)), torch.randn(6, 2, 5, dtype=torch.float64)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        net.live = batch[2]
        return mean_loss(net, batch)

    steps = [[(x, y, live)] for live in (1.0, 0.0, 1e-9, 1.0)]
    for options in ({"optimizer": "KFAC"}, {"scaling": "kronecker"}):
        compare_with_oracle(copy.deepcopy(model), loss, steps, **{**OPTIONS, **options})
