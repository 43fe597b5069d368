"""Copies of a model that holds its own optimizer, as agents and Lightning modules do: they belong together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekfac import EKFAC, KFAC, Preconditioner
from loops import usual

KINDS: dict[str, Callable[[nn.Module], Any]] = {"EKFAC": EKFAC, "KFAC": KFAC}


class Held(nn.Module):
    """Holds its optimizer, or has one of its parts hold it."""

    def __init__(self, kind: Callable[[nn.Module], Any], where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.parts = nn.Linear(5, 8), nn.Sequential(nn.Tanh(), nn.Tanh())
        if where == "beside":
            self.optimizer = kind(self.first)
        self.last = nn.Linear(8, 3)
        whole = kind(self) if where != "beside" else None
        if where == "itself":
            self.optimizer = whole
        elif where == "in a list":
            self.optimizers = [whole]
        elif where == "in a part":
            self.parts[0].optimizer = whole

    @property
    def held(self) -> Any:
        for holder in (self, self.parts[0]):
            if hasattr(holder, "optimizer"):
                return holder.optimizer
        return self.optimizers[0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.parts(self.first(x)))
        return out


@pytest.mark.parametrize("copy_of", ["model", "optimizer", "both"])
@pytest.mark.parametrize("where", ["itself", "in a list", "in a part", "beside"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_belong_together_and_go_on_alike(kind: str, where: str, copy_of: str) -> None:
    model = Held(KINDS[kind], where)
    opt = model.held
    for _ in range(4):
        usual(model, opt)
    if copy_of == "optimizer":
        new_opt = copy.deepcopy(opt)
        new = new_opt.model
        if where == "beside":
            assert new is not model.first
            return
    else:
        new = copy.deepcopy(model) if copy_of == "model" else copy.deepcopy((opt, model))[1]
        new_opt = new.held
    assert new_opt is new.held is not opt
    assert new_opt.model is (new.first if where == "beside" else new)
    assert list(new.state_dict()) == list(model.state_dict()) and [*map(type, new.modules())] == [
        *map(type, model.modules())
    ]
    for one, its in ((model, opt), (new, new_opt)):
        for _ in range(4):
            usual(one, its)
    for p, q in zip(model.parameters(), new.parameters(), strict=True):
        assert p is not q and torch.equal(p, q)


def test_a_scheduler_that_is_held_too_drives_the_copy() -> None:
    model = Held(EKFAC, "itself")
    model.scheduler = torch.optim.lr_scheduler.StepLR(model.held, 1)
    new = copy.deepcopy(model)
    assert new.scheduler.optimizer is new.held is not model.held
    usual(new, new.held)
    new.scheduler.step()
    assert new.held.param_groups[0]["lr"] < model.held.param_groups[0]["lr"]


def test_a_preconditioner_that_is_held_is_copied_with_its_model() -> None:
    model = Held(Preconditioner, "itself")
    usual(model, model.held)
    new = copy.deepcopy(model)
    assert new.held is not model.held and new.held.model is new
    usual(new, new.held)


def test_an_average_of_a_model_that_holds_its_optimizer() -> None:
    model = Held(EKFAC, "itself")
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        usual(model, model.held)
        average.update_parameters(model)
    assert all(bool(p.isfinite().all()) for p in average.parameters())
