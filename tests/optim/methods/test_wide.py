"""Wide blocks on a CPU: other products, up to rounding; nothing else where exactness is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac.curvature import factors
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.shapes import BlockShape
from ekfac.optim import executor
from ekfac.optim.methods import wide


def trained(dtype: torch.dtype = torch.float32, steps: int = 12, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)
    with ekfac.EKFAC(model, **options) as opt:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(8, 20, generator=generator), torch.randint(5, (8,), generator=generator)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
            opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.fixture
def everything_is_wide(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if these small layers were wide and this CPU multiplied bfloat16; lists what came back rounded."""
    seen: list[str] = []

    def fast() -> bool:
        seen.append("back")
        return True

    monkeypatch.setattr(executor, "WIDE", 1)
    monkeypatch.setattr(wide, "multiplies_bfloat16", fast)
    return seen


def test_a_direction_that_comes_back_in_bfloat16_is_the_same_but_for_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = BlockShape(1, 60, 80)
    U_A, U_B = (torch.linalg.qr(torch.randn(1, d, d, generator=generator))[0] for d in (80, 60))
    basis = Basis(shape, U_A, U_B, torch.ones(1, 80), torch.ones(1, 60), wide.single_product)
    x = torch.randn(1, 60, 80, generator=generator)
    exact = basis.unproject(x)
    rounded = basis.to(x.bfloat16()).unproject(x.bfloat16()).float()
    assert 0 < (rounded - exact).norm() < 0.006 * exact.norm()


def test_wide_blocks_train_as_others_do(everything_is_wide: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = torch.cat([p.flatten() for p in trained(steps=2)])
    assert everything_is_wide
    monkeypatch.undo()
    usual = torch.cat([p.flatten() for p in trained(steps=2)])
    assert 0 < (rounded - usual).norm() < 0.01 * usual.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float64},
        {"refresh": ekfac.Refresh(deterministic=True)},
        {"refresh": ekfac.Refresh(deterministic=True), "scaling": "anchored"},
    ],
)
def test_where_exactness_is_asked_for_nothing_changes(
    options: dict[str, Any], everything_is_wide: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_ones = trained(**options)
    assert not everything_is_wide
    monkeypatch.undo()
    for p, q in zip(trained(**options), wide_ones, strict=True):
        assert torch.equal(p, q)


def test_rules_whose_coordinates_differ_in_size_are_not_rounded(everything_is_wide: list[str]) -> None:
    trained(scaling="running", damping=1e-3)
    assert not everything_is_wide


def test_what_is_chosen_for_its_speed_is_as_precise() -> None:
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ x.double()
    if factors.onednn_is_faster():
        with factors.by_onednn():
            assert (x @ x - exact).norm() < 1e-5 * exact.norm()
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), factors.by_onednn():
        raise ZeroDivisionError
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("cpu", [{}, {"cpu_name": "Intel", "amx_tile": False}, {"cpu_name": "AMD EPYC"}])
def test_another_cpu_keeps_the_usual_products(cpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "capabilities", lambda: cpu)
    assert not factors.onednn_is_faster.__wrapped__()
    assert not factors.multiplies_bfloat16.__wrapped__()
