"""Autocast, dtypes, checkpoints, and what an optimizer leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac import EKFAC, KFAC
from loops import X, Y, assert_same, loss_of, mlp, usual


@pytest.mark.parametrize(
    "build",
    [EKFAC, KFAC, lambda m: EKFAC(m, **ekfac.PAPER), lambda m: EKFAC(m, scaling="per_example")],
    ids=["default", "KFAC", "paper", "per_example"],
)
def test_the_step_may_be_taken_inside_autocast(build: Callable[[nn.Module], Any]) -> None:
    models = [mlp(), mlp()]
    opts = [build(m) for m in models]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            opts[0].zero_grad()
            loss = loss_of(models[0])
            loss.backward()
            opts[0].step()
        opts[1].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(models[1])
        loss.backward()
        opts[1].step()
    assert_same(*models)


@pytest.mark.parametrize("start", [torch.float32, torch.float64])
@pytest.mark.parametrize("end", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_checkpoint_goes_into_another_dtype(kind: Any, start: torch.dtype, end: torch.dtype) -> None:
    model = mlp().to(start)
    opt = kind(model, momentum=0.9)

    def step(model: nn.Module, opt: Any, dtype: torch.dtype) -> None:
        opt.zero_grad()
        F.cross_entropy(model(X.to(dtype)).float(), Y).backward()
        opt.step()

    for _ in range(3):
        step(model, opt, start)
    other = mlp().to(end)
    other.load_state_dict(model.state_dict())
    new = kind(other, momentum=0.9)
    new.load_state_dict(opt.state_dict())
    step(other, new, end)
    step(model, opt, start)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q.float(), rtol=0.05, atol=0.02)


def test_kfac_goes_on_with_the_factors_of_its_last_refresh() -> None:
    def build(model: nn.Module) -> KFAC:
        return KFAC(model, damping=lambda t: 1e-2 * 0.5 ** ((t + 5) // 10), refresh_every=4)

    model = mlp().double()
    opt = build(model)

    def steps(model: nn.Module, opt: Any, count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            F.cross_entropy(model(X.double()), Y).backward()
            opt.step()

    steps(model, opt, 7)
    other = copy.deepcopy(model)
    new = build(other)
    new.load_state_dict(opt.state_dict())
    steps(model, opt, 20)
    steps(other, new, 20)
    assert_same(model, other)


def test_the_second_look_of_adaptive_damping_is_inside_autocast_too() -> None:
    model = mlp()
    opt = EKFAC(model, **{**ekfac.PAPER, "damping": ekfac.AdaptiveDamping(start=1.0, every=1)})
    dtypes = []

    def closure() -> Tensor:
        opt.zero_grad()
        out = model(X)
        dtypes.append(out.dtype)
        loss = F.cross_entropy(out.float(), Y)
        loss.backward()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        opt.step(closure)
    assert dtypes == [torch.bfloat16] * 2


def test_a_checkpoint_with_other_groups_changes_nothing() -> None:
    model = mlp()
    two = EKFAC(model, params=[{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    usual(model, two)
    other = mlp()
    one = EKFAC(other)
    with pytest.raises(ValueError, match="state_dict has groups of 2, 2 parameters, this optimizer of 4"):
        one.load_state_dict(two.state_dict())
    assert one.stats()["steps"] == 0 and not one.state


def test_checkpoints_of_the_other_method_are_refused() -> None:
    model = mlp()
    opt = KFAC(model)
    usual(model, opt)
    with pytest.raises(ValueError, match="state_dict is of KFAC, this is EKFAC"):
        EKFAC(mlp()).load_state_dict(opt.state_dict())


def test_an_optimizer_says_that_it_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"save opt\.state_dict"):
        pickle.dumps(EKFAC(mlp()))
    copy.deepcopy(EKFAC(mlp()))


def test_optimizers_that_are_gone_leave_no_hooks() -> None:
    model = mlp()
    for _ in range(3):
        opt = EKFAC(model)
        usual(model, opt)
        del opt
    gc.collect()
    assert not model[0]._forward_hooks and not model._forward_hooks and not model._forward_pre_hooks
    assert not model[0].weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_an_input_whose_square_overflows_is_not_remembered(kind: Any) -> None:
    model = mlp()
    opt = kind(model, refresh_every=5)
    usual(model, opt)
    opt.zero_grad()
    x = X.clone()
    x[0] = 1e25
    F.cross_entropy(model(x), Y).backward()
    opt.step()
    for _ in range(20):
        usual(model, opt)
    assert torch.isfinite(opt.state[model[0].weight]["A"]).all()
    assert loss_of(model) < 1.2


def test_many_skipped_steps_in_a_row_are_said_once() -> None:
    model = mlp()
    opt = EKFAC(model)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            usual(model, opt)
    assert [w for w in caught if "steps were skipped" in str(w.message)][1:] == []
    assert any("the last 20 steps were skipped" in str(w.message) for w in caught)
