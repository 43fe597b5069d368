"""What is due when, where a loss has derivatives of the network inside."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekfac import EKFAC, Refresh, StepSize, rules
from ekfac.optim.statistics.schedule import BATCHES, INTERVAL, START


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def slopes(model: nn.Module) -> Tensor:
    """The slope of a solution has to have the length one."""
    x = torch.randn(16, 3, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.square().sum(1) - 1).square().mean() + model(x.detach()).square().mean()


def values(model: nn.Module) -> Tensor:
    """No derivative."""
    return (model(torch.randn(16, 3, dtype=torch.float64)) - 1).square().mean()


def train(model: nn.Module, opt: EKFAC, loss: Callable[[nn.Module], Tensor], steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        loss(model).backward()
        opt.step()


def test_one_batch_an_interval_is_taken_in_and_the_bases_follow_it_at_once() -> None:
    model = network()
    opt = EKFAC(model)
    train(model, opt, slopes, START)
    state = opt.state[model.get_parameter("0.weight")]
    taken, renewed = [], []
    for t in range(START, START + 2 * INTERVAL):
        weight, basis = state["factor_weight"].clone(), state["U_A"].clone()
        train(model, opt, slopes, 1)
        if not torch.equal(weight, state["factor_weight"]):
            taken.append(t)
            # The past counts as little as after the batches that an interval of another loss has.
            torch.testing.assert_close(state["factor_weight"], weight * 0.95**BATCHES + 32)
        if not torch.equal(basis, state["U_A"]):
            renewed.append(t)
    expected = [START + INTERVAL - 1, START + 2 * INTERVAL - 1]
    assert taken == renewed == expected


def test_losses_without_derivatives_are_as_they_were() -> None:
    model = network()
    opt = EKFAC(model)
    train(model, opt, values, 2)
    assert not opt.engine.schedule.derivatives
    assert opt.engine.schedule.intervals.every == INTERVAL
    assert opt.engine.schedule.factor_decay == 0.95
    assert opt.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(("options", "every"), [({}, INTERVAL), ({"refresh_every": 7}, 7)])
def test_what_is_set_holds_for_losses_with_derivatives_too(options: dict[str, Any], every: int) -> None:
    model = network()
    opt = EKFAC(model, **options, refresh=Refresh(factor_decay=0.9, factor_every=3))
    train(model, opt, slopes, 2)
    assert opt.engine.schedule.intervals.every == every
    assert opt.engine.schedule.factor_decay == 0.9
    assert [t for t in range(10) if opt.engine.schedule.intervals.takes_factors(t, 3)] == [0, 3, 6, 9]


def test_deterministic_bases_are_as_in_the_paper() -> None:
    model = network()
    opt = EKFAC(model, refresh=Refresh(deterministic=True))
    train(model, opt, slopes, 2)
    assert not opt.engine.schedule.derivatives


@pytest.mark.parametrize(("given", "left"), [(None, 0.0), (0.1, 0.1)])
def test_only_a_decay_that_was_asked_for_pulls_at_a_solution(given: float | None, left: float) -> None:
    model = network()
    opt = EKFAC(model, weight_decay=given)
    train(model, opt, slopes, 1)
    assert opt.param_groups[0]["weight_decay"] == left
    opt.param_groups[0]["weight_decay"] = 0.2
    train(model, opt, slopes, 1)
    assert opt.param_groups[0]["weight_decay"] == 0.2


LONG = (0.98, 0.95)


@pytest.mark.parametrize(
    ("loss", "options", "left"),
    [
        (slopes, {}, LONG),
        (values, {}, (0.95, 0.95)),
        (slopes, {"betas": (0.95, 0.95)}, (0.95, 0.95)),
        (slopes, {"scaling": rules.Belief()}, (0.95, 0.95)),
        (slopes, {"scaling": "adam"}, (0.9, 0.999)),
        (slopes, {"own": {"betas": (0.95, 0.95)}}, (0.95, 0.95)),
        (slopes, {"own": {"lr": 0.01}}, LONG),
    ],
)
def test_the_mean_of_a_loss_with_derivatives_is_longer_unless_betas_are_set(
    loss: Callable[[nn.Module], Tensor], options: dict[str, Any], left: tuple[float, float]
) -> None:
    model, options = network(), dict(options)
    opt = EKFAC(model, params=[{"params": model.parameters(), **options.pop("own", {})}], **options)
    train(model, opt, loss, 2)
    assert opt.param_groups[0]["betas"] == left
    again = EKFAC(model, params=[{"params": model.parameters()}], **options)
    again.load_state_dict(deepcopy(opt.state_dict()))
    train(model, again, loss, 1)
    assert again.param_groups[0]["betas"] == left


@pytest.mark.parametrize("own", [{}, {"betas": (0.9, 0.95), "weight_decay": 0.1}])
@pytest.mark.parametrize("loss", [slopes, values])
def test_a_group_that_is_added_later_has_what_suits_the_loss_too(
    loss: Callable[[nn.Module], Tensor], own: dict[str, Any]
) -> None:
    model: Any = network()
    opt = EKFAC(model, params=model[0].parameters())
    train(model, opt, loss, 3)
    opt.add_param_group({"params": model[2].parameters(), **own})
    suits = {"betas": LONG, "weight_decay": 0.0} if loss is slopes else {"betas": (0.95, 0.95), "weight_decay": 0.3}
    usual = {name: opt.param_groups[0][name] for name in suits}
    assert usual == suits
    assert {name: opt.param_groups[1][name] for name in usual} == {**usual, **own}
    train(model, opt, loss, 3)
    assert opt.stats()["steps"] == 6


def test_a_decay_that_somebody_has_written_into_a_group_stays() -> None:
    model = network()
    opt = EKFAC(model)
    opt.param_groups[0]["weight_decay"] = 0.1
    train(model, opt, slopes, 3)
    assert opt.param_groups[0]["weight_decay"] == 0.1


def test_the_mean_of_a_layer_that_is_frozen_meanwhile_is_longer_too() -> None:
    model: Any = network()
    opt = EKFAC(model)
    train(model, opt, values, 6)
    mean = opt.state[model[2].weight]["m"].clone() / (1 - 0.95**6)
    model[2].requires_grad_(False)
    train(model, opt, slopes, 2)
    model[2].requires_grad_(True)
    values(model)  # the forward brings the state back
    state = opt.state[model[2].weight]
    torch.testing.assert_close(state["m"] / (1 - 0.98**6), mean)


@pytest.mark.parametrize(
    ("loss", "options", "rate"),
    [
        (slopes, {}, 0.04 / (1 + 40 / 200)),
        (values, {}, 0.02 / (1 + 40 / 100) ** 0.5),
        (slopes, {"lr": 0.01}, 0.01),
        (slopes, {"total_steps": 80}, 0.04 / (1 + 40 / 200)),
        (slopes, {"total_steps": 44}, 0.04 / (1 + 40 / 200) * (4 / 8.8)),
        (slopes, {"total_steps": 80, "lr": 0.01}, 0.01 * 0.5),
        (slopes, {"total_steps": 80, "step_size": StepSize(decay_steps=None)}, 0.02 * 0.5),
        (slopes, {"step_size": StepSize(decay_steps=40)}, 0.02 / 2**0.5),
    ],
)
def test_the_built_in_rate_is_larger_at_first_and_falls_faster(
    loss: Callable[[nn.Module], Tensor], options: dict[str, Any], rate: float
) -> None:
    model = network()
    opt = EKFAC(model, **options)
    train(model, opt, loss, 40)
    assert opt._rates().groups[0].lr == pytest.approx(rate)


def test_it_is_as_if_these_betas_had_been_set() -> None:
    found = []
    for options in ({}, {"betas": LONG}):
        model = network()
        opt = EKFAC(model, lr=0.01, weight_decay=0.0, **options)
        torch.manual_seed(1)
        train(model, opt, slopes, 12)
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)


def test_a_run_goes_on_from_a_checkpoint_as_it_was() -> None:
    model = network()
    opt = EKFAC(model)
    train(model, opt, slopes, 25)
    other = deepcopy(model)
    saved = deepcopy(opt.state_dict())
    again = EKFAC(other)
    again.load_state_dict(saved)
    for trained, one in ((model, opt), (other, again)):
        torch.manual_seed(1)
        train(trained, one, slopes, 40)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_checkpoints_of_before_say_nothing_of_derivatives() -> None:
    model = network()
    opt = EKFAC(model)
    train(model, opt, slopes, 2)
    saved = opt.state_dict()
    del saved["ekfac"]["derivatives"]
    again = EKFAC(model)
    again.load_state_dict(saved)
    assert not again.engine.schedule.derivatives
    saved["ekfac"]["derivatives"] = "yes"
    with pytest.raises(ValueError, match="'derivatives'"):
        again.load_state_dict(saved)


def test_an_inner_batch_whose_gradients_are_differentiated_is_no_equation() -> None:
    """Second-order MAML: the derivatives are those of weights, and part of no example's loss."""
    model = network()
    opt = EKFAC(model)
    names = [name for name, _ in model.named_parameters()]
    for _ in range(2):
        opt.zero_grad()
        inner = torch.autograd.grad(values(model), list(model.parameters()), create_graph=True)
        changed = [p - 0.1 * g for p, g in zip(model.parameters(), inner, strict=True)]
        x = torch.randn(16, 3, dtype=torch.float64)
        out = torch.func.functional_call(model, dict(zip(names, changed, strict=True)), (x,))
        (out - 1).square().mean().backward()
        opt.step()
    assert not opt.engine.schedule.derivatives


def test_the_average_has_the_size_of_its_smaller_batches_and_the_shape_of_all() -> None:
    """Residuals fall by orders of magnitude: the first batches would otherwise be all that the average is made of."""
    model = network()
    opt = EKFAC(model, lr=0.0)
    for scale in (1.0, 1.0, 1e-3):
        opt.zero_grad()
        (scale * slopes(model)).backward()
        opt.step()
    state = opt.state[model.get_parameter("0.weight")]
    B, weight = state["B"][0].clone(), state["factor_weight"].clone()
    opt.zero_grad()
    (1e-3 * slopes(model)).backward()
    opt.step()
    # Had the past kept its size, the batch would be a millionth of it, and nothing would have moved but the size.
    before, after = B / weight, state["B"][0] / state["factor_weight"]
    assert 0.1 < after.trace() / before.trace() < 10.0
    assert (after / after.trace() - before / before.trace()).norm() > 1e-3
