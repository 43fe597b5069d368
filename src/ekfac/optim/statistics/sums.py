"""Sums over the examples of one step, across all its backward passes and processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import FactorSums


@dataclass
class BlockSums:
    """The statistics gathered for one block in a step."""

    factors: FactorSums | None = None
    scaling: Tensor | None = None
    fingerprint: Tensor | None = None
    #: Calls that wait for the new basis, in a step that updates it.
    held: list[tuple[list[Call], int]] = field(default_factory=list)

    def add_factors(self, new: FactorSums) -> None:
        """Add another batch's sums."""
        if self.factors is None:
            self.factors = new
        else:
            old = self.factors
            self.factors = FactorSums(old.A + new.A, old.terms + new.terms, old.B + new.B)

    def add_scaling(self, new: Tensor) -> None:
        """Add another batch's squared gradients."""
        self.scaling = new if self.scaling is None else self.scaling + new

    def add_fingerprint(self, new: Tensor) -> None:
        """Add another batch's fingerprint."""
        self.fingerprint = new if self.fingerprint is None else self.fingerprint + new

    def tensors(self) -> list[Tensor]:
        """Return A, B and squared gradients, as far as they exist."""
        found = [] if self.factors is None else [self.factors.A, self.factors.B]
        return found if self.scaling is None else [*found, self.scaling]

    def at(self, places: Iterator[Tensor]) -> BlockSums:
        """Return a copy with other :meth:`tensors`, followed by the number of terms if that is a tensor."""
        f = self.factors
        factors = None if f is None else FactorSums(next(places), f.terms, next(places))
        scaling = None if self.scaling is None else next(places)
        if factors is not None and isinstance(factors.terms, Tensor):
            factors.terms = next(places)
        return BlockSums(factors, scaling)


@dataclass(frozen=True)
class Expected:
    """Which statistics every process gathers for a block in this step; known without communication."""

    factors: bool
    scaling: bool
    fingerprint: bool


def no_scaling(block: Block, device: torch.device | str | None = None) -> Tensor:
    """Return the scaling sum of a process without examples."""
    s = block.shape
    return torch.zeros(s.groups, s.out, s.columns, dtype=block.dtype, device=device or block.key.device)
