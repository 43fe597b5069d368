"""What the optimizers take, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ekfac
from ekfac import EKFAC
from loops import X, Y, mlp, usual


@pytest.mark.parametrize("given", [lambda m: m.parameters(), lambda m: list(m.named_parameters())])
def test_params_takes_plain_parameters(given: Callable[[nn.Module], Any]) -> None:
    model = mlp()
    opt = EKFAC(model, params=given(model))
    assert [len(group["params"]) for group in opt.param_groups] == [4]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (lambda m: {"params": m.parameters()}, TypeError, "params is of type dict. Allowed: a list of dicts"),
        (lambda m: m[0].weight, TypeError, "params is of type Parameter"),
        (lambda m: 3, TypeError, "params is of type int"),
        (lambda m: [{"lr": 0.1}], ValueError, r"params contains a group of keys \['lr'\]"),
        (lambda m: [{"params": m.parameters()}, 3], ValueError, "params contains a group of type int"),
        (lambda m: [{"params": m.parameters(), "refresh_every": 5}], ValueError, "a group cannot set refresh_every"),
        (lambda m: [*m.parameters(), nn.Parameter(torch.ones(2))], ValueError, r"\(2,\) .* nn.ModuleList"),
    ],
)
def test_bad_params(given: Callable[[nn.Module], Any], kind: type[Exception], message: str) -> None:
    model = mlp()
    with pytest.raises(kind, match=message):
        EKFAC(model, params=given(model))


def test_wide_convolutions_are_taken_tap_by_tap_and_very_wide_sides_diagonal() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 64, 3), nn.Conv2d(64, 8, 3), nn.ConvTranspose2d(8, 4, 3), nn.ConvTranspose2d(64, 4, 3),
        nn.Conv2d(600, 4, 1), nn.Linear(600, 2), nn.Linear(2, 10_001, bias=False),
    )  # fmt: skip
    rows = EKFAC(model).summary().rows
    assert ["taps" in row.block for row in rows] == [False, True, False, True, False, False, False]
    assert [row.B for row in rows][-1] == "10001"
    assert [(row.A, row.B) for row in ekfac.summary(model).rows] == [(row.A, row.B) for row in rows]
    assert not any("taps" in row.block for row in EKFAC(model, sua=False, max_factor_dim=None).summary().rows)
    assert not any("taps" in row.block for row in EKFAC(model, sharing="reduce").summary().rows)


def test_numbers_of_numpy_are_numbers() -> None:
    opt = EKFAC(mlp(), lr=np.float32(0.1), refresh_every=np.int64(5))
    usual(opt.model, opt)


@pytest.mark.parametrize("look", [EKFAC, ekfac.summary, ekfac.plan])
def test_a_lazy_layer_is_refused(look: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"parameter '0.weight' has no shape yet"):
        look(nn.Sequential(nn.LazyLinear(3)))


def test_curvature_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        ekfac.fisher(mlp(), [(X, Y)], "categorical", approximation="kfac")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"exclude": 3}, "exclude=3"), ({"max_factor_dim": 0}, "max_factor_dim=0"), ({"sua": "x"}, "sua='x'")],
)
def test_bad_arguments_of_fisher(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ekfac.fisher(mlp(), [(X, Y)], "categorical", **options)
