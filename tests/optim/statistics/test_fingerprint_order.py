"""Ranks compare fingerprints of gradients, block by block, in an order that does not depend on where blocks lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from ekfac.optim.statistics.fingerprints import Fingerprints
from paper import EKFAC


class Ordered(set):
    """A set that is gone through in an order of its own."""

    turned = False

    def __iter__(self) -> Iterator[Any]:
        found = sorted(set.__iter__(self), key=lambda block: list(block.parameter_names.values()))
        return iter(found[::-1] if self.turned else found)


def test_blocks_of_one_name_have_one_order() -> None:
    """A weight that two layers share is a block, and so is each layer's bias, the first under the weight's name."""
    orders = []
    for turned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        model[2].weight = model[0].weight
        opt = EKFAC(model, scaling="running")
        fingerprints = opt.engine.collector.fingerprints
        fingerprints.unverified = Ordered(fingerprints.unverified)
        fingerprints.unverified.turned = turned
        model(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 2  # as an average over ranks does, so that what backward has left is what is compared
        seen: list[list[Any]] = []

        def noted(self: Fingerprints, blocks: list[Any], seen: list[Any] = seen) -> list[Any]:
            seen.append([tuple(block.parameter_names.values()) for block in blocks])
            return [self.left[block] for block in blocks]

        with mock.patch.object(Fingerprints, "_as_backward_left_them", noted):
            opt.step()
        orders.append(seen)
    assert orders[0] == orders[1] and len(orders[0][0]) == 3
