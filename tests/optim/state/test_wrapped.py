"""A checkpoint goes from a wrapped model to a plain one and back: compiled, in part or whole, or in DataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ekfac
from ekfac import EKFAC, KFAC


def plain() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    return nn.Sequential(body, nn.Linear(8, 3)).double()


def compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]


def parallel() -> nn.Module:
    return nn.DataParallel(plain())


def compiled_in_part() -> nn.Module:
    model = plain()
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[index]
    return model


def bare(model: nn.Module) -> dict[str, Any]:
    return {n.replace("_orig_mod.", "").replace("module.", ""): v for n, v in model.state_dict().items()}


def train(model: nn.Module, opt: Any, steps: range) -> None:
    for t in steps:
        chance = torch.Generator().manual_seed(t)
        x = torch.randn(16, 6, generator=chance, dtype=torch.float64)
        opt.zero_grad()
        F.cross_entropy(model(x), torch.randint(3, (16,), generator=chance)).backward()
        opt.step()


FORMS = [plain, compiled, parallel, compiled_in_part]


@pytest.mark.parametrize("start", FORMS)
@pytest.mark.parametrize("end", FORMS)
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_a_checkpoint_goes_into_the_model_with_another_wrapper_or_none(
    start: Callable[[], nn.Module], end: Callable[[], nn.Module], kind: Any
) -> None:
    model, other = start(), end()
    opt = kind(model)
    train(model, opt, range(6))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(bare(model))
    other.load_state_dict(dict(zip(other.state_dict(), weights.values(), strict=True)))
    new = kind(other)
    new.load_state_dict(saved)
    for m, o in ((model, opt), (other, new)):
        train(m, o, range(6, 10))
    ends = bare(model), bare(other)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_what_the_average_keeps_is_found_again() -> None:
    model = plain()
    opt = EKFAC(model)
    for t in range(14):
        train(model, opt, range(t, t + 1))
    model[0][0].requires_grad_(False)  # type: ignore[index]
    F.cross_entropy(model(torch.randn(16, 6, dtype=torch.float64)), torch.randint(3, (16,))).backward()
    saved = copy.deepcopy(opt.state_dict())
    average = saved["ekfac"]["average"]
    assert average["resting"] and average["offsets"] and average["statistics"]
    other = compiled()
    other.load_state_dict({f"_orig_mod.{n}": v for n, v in model.state_dict().items()})
    new = EKFAC(other)
    new.load_state_dict(saved)
    found = new.state_dict()["ekfac"]["average"]
    for part in ("offsets", "statistics"):
        assert found[part].keys() == {f"_orig_mod.{n}" for n in average[part]}
    assert found["resting"] == [f"_orig_mod.{n}" for n in average["resting"]]


def test_a_preconditioner_s_checkpoint_too() -> None:
    x = torch.randn(16, 6, dtype=torch.float64)
    model = plain()
    whitened = ekfac.Preconditioner(model)
    model(x).square().mean().backward()
    whitened.step()
    other = compiled()
    new = ekfac.Preconditioner(other)
    new.load_state_dict(whitened.state_dict())
    assert new.state_dict()["state"].keys() == {f"_orig_mod.{n}" for n in whitened.state_dict()["state"]}


def test_names_that_are_others_are_refused_as_before() -> None:
    model = plain()
    opt = EKFAC(model)
    train(model, opt, range(3))
    renamed = nn.ModuleDict({"body": model[0], "head": model[1]})  # type: ignore[index]
    with pytest.raises(ValueError, match=r"another model.*only in this model: body\.0\.weight"):
        EKFAC(renamed).load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": {}, "opt": {}}, r"keys model, opt: pass what this optimizer's state_dict\(\) returned"),
        ({"state": {}, "param_groups": []}, "another optimizer's: start with a new one"),
        ({"ekfac": {"version": 3}}, "version 3 of its format"),
    ],
)
def test_what_is_no_state_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EKFAC(plain()).load_state_dict(given)


@pytest.mark.parametrize("damage", ["blocks", "put_away", "silent", "average", "parameters"])
def test_damaged_names_are_still_refused(damage: str) -> None:
    model = plain()
    opt = EKFAC(model)
    train(model, opt, range(3))
    saved = copy.deepcopy(opt.state_dict())
    saved["ekfac"][damage] = ["module.other", 3, {"parameters": 7}]
    with pytest.raises(ValueError, match="state_dict"):
        EKFAC(compiled()).load_state_dict(saved)
