"""Layers that are trained for a while, or not yet."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from ekfac import EKFAC, KFAC, Preconditioner
from loops import X, assert_same, loss_of, mlp, usual


def test_a_discriminator_that_is_frozen_for_the_generators_step_keeps_its_state() -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m, refresh_every=3) for m in models]
    for _ in range(6):
        for model, opt in zip(models, opts, strict=True):
            usual(model, opt)
        models[1].requires_grad_(False)
        models[1](X.clone().requires_grad_()).sum().backward()
        models[1].requires_grad_(True)
    for opt in opts:
        opt.close()  # the last pass has left the weights that are trained there
    assert_same(*models)


def test_a_layer_that_is_frozen_for_a_while_gets_its_state_back() -> None:
    model = mlp()
    opt = EKFAC(model)
    for _ in range(5):
        usual(model, opt)
    known = dict(opt.state[model[0].weight])
    model[0].bias.requires_grad_(False)
    usual(model, opt)
    assert opt.state[model[0].weight]["A"].shape[-1] == 5
    model[0].bias.requires_grad_(True)
    opt.zero_grad()
    loss_of(model).backward()
    assert opt.state[model[0].weight]["A"] is known["A"] and opt.state[model[0].weight]["count"] == known["count"]
    opt.step()
    assert opt.state[model[0].weight]["count"] == 6


def test_a_layer_that_is_frozen_between_the_batches_of_one_step_is_left_alone() -> None:
    """One that is so wide that its calls are kept for the step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))
    opt, x = EKFAC(model), torch.randn(4, 300)
    for _ in range(2):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    known = opt.state[model[0].weight]["A"].clone()
    opt.zero_grad()
    model(x).square().mean().backward()
    assert opt.engine.collector.calls
    model[0].requires_grad_(False)
    model(x).square().mean().backward()
    opt.step()
    opt.load_state_dict(opt.state_dict())
    model[0].requires_grad_(True)
    opt.zero_grad()
    model(x).square().mean().backward()
    assert torch.equal(opt.state[model[0].weight]["A"], known)
    opt.step()
    assert opt.stats()["steps"] == 4


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_layer_that_was_frozen_at_first_is_trained_once_it_is_not(kind: Any) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    opt = kind(model)
    start = model[0].weight.detach().clone()
    usual(model, opt)
    assert torch.equal(model[0].weight, start)
    model[0].requires_grad_(True)
    usual(model, opt)
    assert not torch.equal(model[0].weight, start)


def test_a_preconditioner_follows_too() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    pre = Preconditioner(model)
    model[0].requires_grad_(True)
    loss_of(model).backward()
    before = model[0].weight.grad.clone()
    pre.step()
    assert not torch.equal(model[0].weight.grad, before)


def test_a_checkpoint_of_a_partly_frozen_model_goes_into_the_whole() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    opt = EKFAC(model)
    usual(model, opt)
    other = mlp()
    new = EKFAC(other)
    new.load_state_dict(opt.state_dict())
    usual(other, new)
    assert new.engine.schedule.applied_steps == 2


def test_state_of_a_frozen_layer_is_in_checkpoints_and_copies() -> None:
    model = mlp()
    opt = EKFAC(model, momentum=0.9, refresh_every=3)
    for _ in range(5):
        usual(model, opt)
    model[0].requires_grad_(False)
    usual(model, opt)
    copied = copy.deepcopy(opt)
    other = copy.deepcopy(model)
    loaded = EKFAC(other, momentum=0.9, refresh_every=3)
    loaded.load_state_dict(opt.state_dict())
    for net, o in ((model, opt), (copied.model, copied), (other, loaded)):
        net[0].requires_grad_(True)
        for _ in range(4):
            usual(net, o)
    assert_same(model, copied.model)
    assert_same(model, other)


def test_a_checkpoint_replaces_the_state_of_frozen_layers_too() -> None:
    model = mlp()
    opt = EKFAC(model)
    for _ in range(3):
        usual(model, opt)
    early = copy.deepcopy(opt.state_dict())
    for _ in range(5):
        usual(model, opt)
    model[0].requires_grad_(False)
    usual(model, opt)
    opt.load_state_dict(early)
    model[0].requires_grad_(True)
    loss_of(model).backward()
    assert opt.state[model[0].weight]["count"] == 3


def test_statistics_around_the_first_forward_after_freezing_keep_the_gradients() -> None:
    model = mlp()
    opt = EKFAC(model)
    loss_of(model).backward()
    before = [p.grad.clone() for p in model.parameters()]
    model[0].requires_grad_(False)
    with opt.statistics():
        loss_of(model).backward()
    for p, g in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, g)


def test_an_optimizer_of_frozen_parameters_waits() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    opt = EKFAC(model, params=list(model[0].parameters()))
    usual(model, opt)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    usual(model, opt)
    assert not torch.equal(model[0].weight, before)


def test_freezing_between_backward_and_step_waits_for_the_next_forward() -> None:
    models = [mlp(), mlp()]
    opts = [EKFAC(m) for m in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, opt in zip(models, opts, strict=True):
            usual(model, opt)
            opt.zero_grad()
            loss_of(model).backward()
            if model is models[1]:
                model[0].bias.requires_grad_(False)
            opt.step()
            model[0].bias.requires_grad_(True)
            usual(model, opt)
    assert_same(*models)


def test_damping_must_agree_within_a_layer_that_is_unfrozen() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    groups = [{"params": [model[0].bias], "damping": 0.1}, {"params": [model[0].weight, *model[2].parameters()]}]
    opt = EKFAC(model, params=groups)
    usual(model, opt)
    model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match="within layer '0'"):
        usual(model, opt)
