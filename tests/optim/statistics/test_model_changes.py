"""A model that is changed after its optimizer was constructed: picked up, or refused by the parameters' names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ekfac import EKFAC, KFAC, PAPER, Preconditioner

KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "default": EKFAC,
    "paper, momentum": lambda m: EKFAC(m, **PAPER, momentum=0.9),
    "KFAC": lambda m: KFAC(m, momentum=0.9),
    "Preconditioner": Preconditioner,
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2), nn.PReLU())


def train(model: nn.Module, opt: Any, steps: int) -> None:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        opt.zero_grad()
        F.mse_loss(model(x.to(dtype)).sum(1).double(), x.sum(1)).backward()
        opt.step()
        if isinstance(opt, Preconditioner):
            sgd.step()


def replace_layer(model: nn.Sequential) -> None:
    model[3] = nn.Linear(5, 2)


def replace_parameter(model: nn.Sequential) -> None:
    model[3].weight = nn.Parameter(torch.randn(2, 5))


def append_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 3))


def add_inside(model: nn.Sequential) -> None:
    model[3].register_module("more", nn.Sequential(nn.Identity(), nn.Linear(2, 2)))


def add_parameter(model: nn.Sequential) -> None:
    model.register_parameter("extra", nn.Parameter(torch.zeros(2)))


def other_shape(model: nn.Sequential) -> None:
    model[3].weight.data, model[3].bias.data = torch.randn(3, 5), torch.randn(3)
    model[3].out_features = 3


REFUSED: dict[Callable[[nn.Sequential], None], str] = {
    replace_layer: r"parameters 3\.weight, 3\.bias were replaced",
    replace_parameter: r"parameters 3\.weight were replaced",
    append_layer: r"parameters 5\.weight, 5\.bias were added",
    add_inside: r"parameters 3\.more\.1\.weight, 3\.more\.1\.bias were added",
    add_parameter: r"parameters extra were added",
    other_shape: r"parameters 3\.weight, 3\.bias have another shape",
}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("change", REFUSED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_what_would_not_be_trained_is_named(kind: str, change: Callable[[nn.Sequential], None], before: int) -> None:
    model = network()
    opt = KINDS[kind](model)
    train(model, opt, before)
    change(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED[change] + ".* since this optimizer was constructed"):
            train(model, opt, 1)
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]), "nothing has moved"
    with KINDS[kind](model) as new:
        train(model, new, 2)


def test_a_layer_that_was_added_can_be_handed_over() -> None:
    model = network()
    opt = EKFAC(model)
    train(model, opt, 2)
    append_layer(model)
    opt.add_param_group({"params": list(model[5].parameters()), "lr": 0.01})
    before = model[5].weight.detach().clone()
    train(model, opt, 2)
    assert not torch.equal(model[5].weight, before) and opt.stats()["steps"] == 4


def test_what_is_frozen_or_was_never_offered_may_change() -> None:
    model = network()
    opt = EKFAC(model, params=list(model[0].parameters()))
    train(model, opt, 2)
    replace_layer(model)
    train(model, opt, 2)
    whole = EKFAC(model)
    train(model, whole, 2)
    model.append(nn.Linear(2, 2).requires_grad_(False))
    train(model, whole, 2)
    assert whole.stats()["steps"] == 4


def test_a_layer_that_was_put_back_trains_on() -> None:
    model = network()
    opt = EKFAC(model)
    train(model, opt, 2)
    layer = model[3]
    replace_layer(model)
    with pytest.raises(RuntimeError, match="were replaced"):
        train(model, opt, 1)
    model[3] = layer
    train(model, opt, 2)
    assert opt.stats()["steps"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_other_modules_around_the_same_parameters_are_picked_up(kind: str) -> None:
    """A layer whose place another takes with the same weights is captured there; an activation may change."""
    model, twin = network(), network()
    opt, alone = KINDS[kind](model), KINDS[kind](twin)
    for net, one in ((model, opt), (twin, alone)):
        train(net, one, 3)
    new = nn.Linear(5, 2)
    new.weight, new.bias = model[3].weight, model[3].bias
    model[3] = new
    for net, one in ((model, opt), (twin, alone)):
        net[1] = nn.ReLU()
        train(net, one, 3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrization_and_a_layer_that_is_gone_are_picked_up(kind: str) -> None:
    model = network()
    opt = KINDS[kind](model)
    train(model, opt, 2)
    parametrize.register_parametrization(model[3], "weight", Doubled())
    before = model[3].parametrizations.weight.original.detach().clone()
    train(model, opt, 2)
    assert not torch.equal(model[3].parametrizations.weight.original, before)
    del model[4]
    train(model, opt, 2)
    opt.state_dict()
    assert opt.stats()["steps"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_longer_part_of_the_model_is_named_once(kind: str) -> None:
    """Its layer may be used outside the model, where nobody would train it."""
    model = network()
    opt = KINDS[kind](model)
    train(model, opt, 2)
    model[3] = nn.Identity()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(model, opt, 3)
    said = [str(warning.message) for warning in told if "no longer" in str(warning.message)]
    assert len(said) == 1 and said[0].startswith("parameters 3.weight, 3.bias are no longer part of the model")
    opt.load_state_dict(opt.state_dict())
    train(model, opt, 1)
    assert opt.stats()["steps"] == 6
    if isinstance(opt, torch.optim.Optimizer):
        with pytest.raises(RuntimeError, match=r"parameters 3\.weight, 3\.bias .* cannot be copied: construct another"):
            copy.deepcopy(opt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrization_is_known_to_who_saves_before_the_next_step(kind: str) -> None:
    model = network()
    opt = KINDS[kind](model)
    train(model, opt, 2)
    parametrize.register_parametrization(model[3], "weight", Doubled())
    assert "3.parametrizations.weight.original" in opt.state_dict()["ekfac"]["parameters"]
    parametrize.register_parametrization(model[0], "weight", Doubled())
    new = copy.deepcopy(opt)
    train(new.model, new, 1)
    assert new.stats()["steps"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_later_parametrization_can_be_saved_and_copied(kind: str) -> None:
    """What the layer had learnt before belongs to no block that the model has now."""
    model = network()
    opt = KINDS[kind](model)
    train(model, opt, 2)
    parametrize.register_parametrization(model[3], "weight", Doubled())
    train(model, opt, 2)
    new = copy.deepcopy(opt)
    new.load_state_dict(opt.state_dict())
    for one in (opt, new):
        train(one.model, one, 3)
    for p, q in zip(model.parameters(), new.model.parameters(), strict=True):
        assert p is not q and torch.equal(p, q)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_cast_trains_on_from_its_state(kind: str) -> None:
    """As a new optimizer of the cast model that loads the state."""
    model = network()
    opt = KINDS[kind](model)
    train(model, opt, 3)
    twin = copy.deepcopy(model).double()
    new = KINDS[kind](twin)
    new.load_state_dict(opt.state_dict())
    model.double()
    for net, one in ((model, opt), (twin, new)):
        train(net, one, 4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert opt.stats()["steps"] == 7
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        train(model, opt, 2)
    assert opt.stats()["steps"] == 13 and all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_cast_between_forward_and_step_is_borne() -> None:
    model = network()
    opt = EKFAC(model)
    train(model, opt, 2)
    opt.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    model.double()
    opt.zero_grad()
    train(model, opt, 2)
    assert opt.stats()["steps"] == 4


class Bypassed(nn.Module):
    """Uses a convolution's weight without calling it, as timm's BEiT does with its packed projection."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.bypassed = nn.Linear(5, 6), nn.Conv1d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x).tanh(), self.bypassed.weight[:, :, 0], self.bypassed.bias)


@pytest.mark.parametrize("scaling", ["belief", "running", "per_example"])
def test_a_layer_that_is_never_called_takes_no_statistics_from_the_others(scaling: str) -> None:
    torch.manual_seed(0)
    model = Bypassed()
    opt = EKFAC(model, lr=1e-3, scaling=scaling)
    x, y = torch.randn(16, 5), torch.randn(16, 4)
    before = model.bypassed.weight.detach().clone()
    (model(x) - y).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="never called, so they get the diagonal method: bypassed"):
        opt.step()
    assert {row.name: row.block != "diagonal" for row in opt.summary().rows}["called"]
    assert not torch.equal(before, model.bypassed.weight)
    first = (model(x) - y).square().mean().item()
    for _ in range(20):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        opt.step()
    assert loss.item() < first
