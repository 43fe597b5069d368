"""The sums that give A and B: added to earlier ones, by strips where the matrix is large, without a column of ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ekfac.curvature import factors, statistics
from ekfac.curvature.blocks import find_blocks
from ekfac.curvature.layers.base import Call, Layer
from ekfac.curvature.layers.linear import LinearLayer


@pytest.mark.parametrize("width", [3, 255, 256, 257, 300, 511])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("memory", [10**4, 10**9])
def test_sums_over_batches_are_sums_of_outer_products(width: int, bias: bool, memory: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(width, 260, bias=bias).double()
    (block,) = find_blocks(model)
    batches = [(torch.randn(n, 2, width).double(), torch.randn(3, n, 2, 260).double()) for n in (5, 1, 9)]
    into = None
    for x, ds in batches:
        passes = [[Call(block.layer, x, d)] for d in ds]
        alone = statistics.factor_sums(block, passes[0], len(x), "expand", memory, passes[1:])
        rows = torch.cat([x, torch.ones(len(x), 2, 1).double()], -1) if bias else x
        rows = rows.flatten(0, 1)
        torch.testing.assert_close(alone.A[0], rows.T @ rows)
        torch.testing.assert_close(alone.B[0], ds.flatten(0, 2).T @ ds.flatten(0, 2))
        assert alone.terms == len(rows)
        into = statistics.factor_sums(block, passes[0], len(x), "expand", memory, passes[1:], into)
    assert into is not None
    into.mirror()
    rows = torch.cat([x.flatten(0, 1) for x, _ in batches])
    rows = torch.cat([rows, torch.ones(len(rows), 1).double()], -1) if bias else rows
    deltas = torch.cat([ds.flatten(0, 2) for _, ds in batches])
    torch.testing.assert_close(into.A[0], rows.T @ rows)
    torch.testing.assert_close(into.B[0], deltas.T @ deltas)
    assert into.terms == len(rows)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("diagonal", [False, True])
def test_adding_to_an_earlier_sum(groups: int, diagonal: bool) -> None:
    torch.manual_seed(0)
    one, two = (torch.randn(m, groups, 270).double() for m in (7, 11))
    expected = factors.outer_sum(torch.cat([one, two]), diagonal)
    total = factors.outer_sum(one, diagonal)
    assert factors.outer_sum(two, diagonal, into=total) is total
    torch.testing.assert_close(total if diagonal else factors.mirror(total), expected)


@pytest.mark.parametrize("rows", [513, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_the_sum_of_long_rows_is_taken_in_strips(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 257).double()
    assert factors.is_long(x) == (rows > 500)
    torch.testing.assert_close(factors.outer_sum(x[:, None])[0], x.T @ x)
    layer = LinearLayer(nn.Linear(257, 2, bias), frozenset({"weight", "bias"} if bias else {"weight"}))
    h = torch.cat([x, x.new_ones(rows, int(bias))], 1)
    torch.testing.assert_close(layer.input_sum_directly(x, rows)[0][0], h.T @ h)


CONVOLUTIONS = [
    {},
    {"padding": 2, "stride": 2, "dilation": 2},
    {"padding": "same", "kernel_size": (2, 3)},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": 1, "groups": 2, "bias": False},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("sua", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_example_by_example_is_the_same_sum(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sua: bool, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(4, 6, **{"kernel_size": 3, **options}).double()
    (block,) = find_blocks(model, sua=sua)
    x = torch.randn(5, 4, 9, 11).double().to(memory_format=layout)
    d = torch.randn(model(x).shape).double().to(memory_format=layout)
    # What the sums are, by torch's own unfolding.
    mode = "constant" if model.padding_mode == "zeros" else model.padding_mode
    padded = nn.functional.pad(x, model._reversed_padding_repeated_twice, mode=mode)
    fields = nn.functional.unfold(padded, model.kernel_size, model.dilation, stride=model.stride)
    fields = fields.view(5, model.groups, 4 // model.groups, -1, fields.shape[-1])
    if sua:
        A = torch.einsum("ngcts,ngdts->gcd", fields, fields)
    else:
        rows = fields.flatten(2, 3)
        rows = torch.cat([rows, torch.ones_like(rows[:, :, :1])], 2) if model.bias is not None else rows
        A = torch.einsum("ngcs,ngds->gcd", rows, rows)
    deltas = d.reshape(5, model.groups, 6 // model.groups, -1)
    B = torch.einsum("ngcs,ngds->gcd", deltas, deltas)
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(factors, "BY_EXAMPLE", devices)
        calls = [Call(block.layer, x, d)]
        found = statistics.factor_sums(block, calls, 5, "expand", 10**9)
        twice = statistics.factor_sums(block, calls, 5, "expand", 2000, into=found)
        twice.mirror()
        torch.testing.assert_close(twice.A, 2 * A)
        torch.testing.assert_close(twice.B, 2 * B)


@pytest.mark.parametrize("bias", [False, True])
def test_what_a_kind_need_not_say_of_its_inputs_comes_from_their_positions(bias: bool) -> None:
    torch.manual_seed(0)
    (block,) = find_blocks(nn.Linear(3, 2, bias=bias).double())
    x, d = torch.randn(5, 4, 3).double(), torch.randn(5, 4, 2).double()
    (found, entries), (expected, count) = Layer.squared_inputs(block.layer, x, d), block.layer.squared_inputs(x, d)
    torch.testing.assert_close(found, expected)
    assert entries == count == 20 * (3 + bias)
