"""Numbers that the host computes for itself on a CPU are those that a device would."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ekfac.curvature.statistics import FactorSums
from ekfac.optim.methods.rules import clipped, remaining, rounded, shortening
from ekfac.optim.statistics.averages import Addition, weigh
from ekfac.optim.statistics.gradients import FEW, largest_magnitudes
from ekfac.optim.types import EigenState


class Alone:
    """A stack of one block."""

    def __init__(self, old: bool) -> None:
        self.state = EigenState()
        if old:
            values = {"A": torch.eye(3)[None], "B": torch.eye(2)[None], "factor_weight": torch.tensor(4.0)}
            self.state.__dict__.update({name: value.double() for name, value in values.items()})


def weighed(scale: float, terms: int, old: bool, on_device: bool) -> list[Tensor]:
    torch.manual_seed(0)
    h, d = torch.randn(6, 3, dtype=torch.float64) * scale, torch.randn(6, 2, dtype=torch.float64)
    addition = Addition(Alone(old), [FactorSums((h.T @ h)[None], terms, (d.T @ d)[None])])  # type: ignore[arg-type]
    bad = torch.zeros((), dtype=torch.bool) if on_device else None  # with which the device has to do it
    weigh([addition], 6.0, 6.0, bad, bounded=True)
    return [addition.A, addition.B, addition.weight]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("scale", "terms"), [(1.0, 6), (1.0, 7), (50.0, 6), (1e200, 6), (math.nan, 6), (1.0, 0)])
def test_a_batch_weighs_the_same(scale: float, terms: int, old: bool) -> None:
    for ours, theirs in zip(weighed(scale, terms, old, False), weighed(scale, terms, old, True), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("numbers", [1, FEW, FEW + 1, 5 * FEW])
def test_largest_magnitudes(numbers: int) -> None:
    x = torch.randn(3, numbers, generator=torch.Generator().manual_seed(0))
    x[2, -1] = math.nan
    found = largest_magnitudes([*x.unbind(), -x[0].abs(), torch.zeros(0)])
    assert [f.item() for f in found[:2]] == [x[0].abs().max(), x[1].abs().max()]
    assert math.isnan(found[2]) and found[3] == found[0] and found[4] == 0
    assert largest_magnitudes([]) == []


@pytest.mark.parametrize("count", [0.0, 1.0, 2.0, 37.0, 1000.0])
def test_what_averages_are_divided_by(count: float) -> None:
    tensor = torch.tensor(count, dtype=torch.float64)
    for root in (False, True):
        assert remaining(0.95, count, root) == remaining(0.95, tensor, root)


def test_shortening_and_rounding() -> None:
    numbers = [0.0, 1e-300, 0.3, 7.0, 1e300, math.inf, math.nan]
    for square in numbers:
        for limit in numbers:
            tensors = (torch.tensor(x, dtype=torch.float64) for x in (square, limit))
            assert shortening(square, limit) == shortening(*tensors), (square, limit)
    single = torch.zeros((), dtype=torch.float32)
    assert rounded(0.1, single) == single.add(0.1).item() != 0.1
    assert rounded(0.1, single.double()) == 0.1 and rounded(1e39, single) == math.inf
    assert clipped(3.0, 0, 2) == 2 == clipped(torch.tensor(3.0), 0, 2)
