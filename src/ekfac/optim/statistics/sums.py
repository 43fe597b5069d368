"""Sums over the examples of one step, over all its backward passes and over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.distributed.owners import Owners


@dataclass
class BlockSums:
    """What a step has gathered for one block."""

    factors: FactorSums | None = None
    scaling: Tensor | None = None
    fingerprint: Tensor | None = None
    #: Calls that wait for the new basis of a step that refreshes it.
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
        """Return A, B and squared gradients, those of them that there are."""
        found = [] if self.factors is None else [self.factors.A, self.factors.B]
        return found if self.scaling is None else [*found, self.scaling]

    def at(self, places: Iterator[Tensor]) -> BlockSums:
        """Return the same with its :meth:`tensors` at other places."""
        f = self.factors
        factors = None if f is None else FactorSums(next(places), f.terms, next(places))
        return BlockSums(factors, None if self.scaling is None else next(places))


@dataclass(frozen=True)
class Expected:
    """What every process gathers for a block at this step; known to all without asking."""

    factors: bool
    scaling: bool
    fingerprint: bool


def reduce_over_processes(
    owners: Owners,
    sums: dict[Block, BlockSums],
    expected: dict[Block, Expected],
    counts: list[int],
    device: torch.device,
) -> list[Tensor]:
    """Sum factors and scalings over processes, for their owners, and fingerprints and counts, for all.

    A process in which a layer saw no example contributes zeros, so that all take part in the same reductions. Nothing
    is read by the host.
    """
    to_owners: dict[int, list[Tensor]] = {}
    small = [torch.tensor([float(c) for c in counts], dtype=torch.float64, device=device)]
    marked: list[BlockSums] = []
    for block, what in expected.items():
        entry = sums.setdefault(block, BlockSums())
        shape, mine = block.shape, to_owners.setdefault(owners.of(block), [])
        options: dict[str, Any] = {"dtype": block.dtype, "device": block.key.device}
        if what.factors:
            if entry.factors is None:
                sides = [(shape.inputs, block.diagonal_A), (shape.out, block.diagonal_B)]
                A, B = (torch.zeros(shape.groups, *([d] if diag else [d, d]), **options) for d, diag in sides)
                entry.factors = FactorSums(A, 0, B)
            old = entry.factors
            terms = torch.as_tensor(float(old.terms), **options)
            entry.factors = FactorSums(old.A.contiguous(), terms, old.B.contiguous())
            mine += [entry.factors.A, terms, entry.factors.B]
        else:
            # Backward may have run before the last step was known to be skipped, and counted one step too many.
            entry.factors = None
        if what.scaling:
            entry.scaling = no_scaling(block) if entry.scaling is None else entry.scaling.contiguous()
            mine.append(entry.scaling)
        if what.fingerprint:
            none = torch.zeros(2, **options) if entry.fingerprint is None else entry.fingerprint
            small.append(none.to(small[0]))
            marked.append(entry)
    owners.processes.sum_to_owners(to_owners)
    totals, *fingerprints = owners.processes.sum(torch.cat(small)).split([len(s) for s in small])
    for entry, total in zip(marked, fingerprints, strict=True):
        entry.fingerprint = total
    for block in expected:
        if not owners.mine(block):
            sums[block].factors = sums[block].scaling = None
    return list(totals.unbind())


def no_scaling(block: Block) -> Tensor:
    """Return the scaling sum of a process that saw no example."""
    s = block.shape
    return torch.zeros(s.groups, s.out, s.columns, dtype=block.dtype, device=block.key.device)
