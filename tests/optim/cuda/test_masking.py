"""A bad step on a GPU is found out late and masked on the device; here the same path is driven on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
import paper
from ekfac.optim.executor import Executor


class Late(Executor):
    """Answers as on a GPU: a mask now, the verdict only when the next step asks."""

    bad = False

    def check_finite(self, sizes: list[Tensor], wait: bool) -> tuple[bool, Tensor | None]:
        good = all(bool(torch.isfinite(size)) for size in sizes)
        if wait:
            return good, None
        self.bad = not good
        return True, torch.tensor(float(good), dtype=torch.float64)

    def settle(self) -> bool:
        bad, self.bad = self.bad, False
        return bad


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scaling": "per_example", "scaling_decay": 0.9},
    {"scaling": "kronecker", "loss_reduction": "sum"},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3},
    {"momentum": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": False, "damping": 0.1},
    {"scaling": "anchored", "momentum": 0.9, "pace": 0.1, "trust": 1.0, "lr": 1e-3},
    {"scaling": "adam", "momentum": 0.9, "on_refresh": "carry", "lr": 1e-3, "eps": 1e-3},
    {"scaling": "belief", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "lr": 1e-3, "eps": 1e-3},
    {"scaling": "belief", "lr": 1e-3, "eps": 1e-3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("poisoned", [6, 9], ids=["inside an interval", "before a refresh"])
def test_a_masked_step_changes_what_a_skipped_one_changes(options: dict[str, Any], value: float, poisoned: int) -> None:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)).double()
    y = x.argmax(1)

    def train(late: bool) -> tuple[Tensor, dict[str, float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False)).double()
        opt = paper.EKFAC(model, **{"lr": 0.02, "refresh_every": 5, **options})
        if late:
            opt.engine.executor = Late(opt.engine.options, whole_steps=True)
        for step in range(14):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if step == poisoned:
                grad = model[2].weight.grad
                assert grad is not None
                grad[0, 0] = value
            opt.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), opt.stats()

    at_once, stats = train(late=False)
    masked, late_stats = train(late=True)
    assert stats["skipped_steps"] == late_stats["skipped_steps"] == 1
    assert stats["steps"] == late_stats["steps"] == 13
    torch.testing.assert_close(masked, at_once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", ["belief", "anchored", "running", "adam"])
def test_a_masked_step_leaves_zeros_to_the_optimizer_that_follows(scaling: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    pre = ekfac.Preconditioner(model, scaling=scaling, deterministic=True)
    pre.engine.executor = Late(pre.engine.options, whole_steps=False)
    for step in range(4):
        pre.zero_grad()
        model(torch.randn(32, 6).double()).square().sum(1).mean().backward()
        if step == 3:
            model.weight.grad[0, 0] = float("nan")
        assert pre.step()
        assert all(bool((p.grad == 0).all()) is (step == 3) for p in model.parameters())
    assert pre.stats()["skipped_steps"] == 1
