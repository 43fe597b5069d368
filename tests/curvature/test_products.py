"""How the products that a loss with derivatives makes with one weight count in A and B."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ekfac.curvature import products
from ekfac.curvature.blocks import Block, find_blocks
from ekfac.curvature.layers.base import Call
from ekfac.curvature.layers.derivative import DerivativeLayer
from ekfac.curvature.statistics import factor_sums

N = 7


def calls_of(block: Block, dtype: torch.dtype, own: bool) -> list[Call]:
    """Products of all kinds, with sides of any size, the layer's own call among them or not."""
    generator = torch.Generator().manual_seed(0)
    first = DerivativeLayer.after(block.layer)
    layers = [*([block.layer] if own else []), first, DerivativeLayer.after(first), first]
    out, inputs = block.parameters["weight"].shape

    def rows(width: int, size: float) -> torch.Tensor:
        return size * torch.randn(N, width, generator=generator, dtype=dtype)

    return [Call(layer, rows(inputs, 1.0 + i), rows(out, 0.1 * i + 0.1)) for i, layer in enumerate(layers)]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "out"), [(5, 3), (300, 3), (4, 270)])
def test_rows_that_are_added_where_they_are_give_the_sums_of_each_product(
    monkeypatch: pytest.MonkeyPatch, inputs: int, out: int, bias: bool, own: bool
) -> None:
    model = nn.Sequential(nn.Linear(inputs, out, bias=bias)).double()
    (block,) = find_blocks(model, model.parameters())
    calls = calls_of(block, torch.float64, own)
    assert products.are_plain_rows(block, calls)
    added = factor_sums(block, calls, N, "expand", 2**28)
    monkeypatch.setattr(products, "are_plain_rows", lambda block, calls: False)
    one_by_one = factor_sums(block, calls, N, "expand", 2**28)
    torch.testing.assert_close(added.A, one_by_one.A)
    torch.testing.assert_close(added.B, one_by_one.B)
    assert added.terms == one_by_one.terms


def test_rows_of_another_dtype_are_not_added_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    (block,) = find_blocks(model, model.parameters())
    assert products.are_plain_rows(block, calls_of(block, torch.float32, own=True))
    assert not products.are_plain_rows(block, calls_of(block, torch.bfloat16, own=True))
