"""Sums over the examples of one step, over all its backward passes and over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import FactorSums


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


def bytes_of(calls: list[Call]) -> int:
    """Return the bytes of calls' inputs and output gradients."""
    return sum(t.numel() * t.element_size() for call in calls for t in (call.x, call.d))


@dataclass(frozen=True)
class Expected:
    """What every process gathers for a block at this step; known to all without asking."""

    factors: bool
    scaling: bool
    fingerprint: bool


def reduce_over_processes(
    sums: dict[Block, BlockSums], expected: dict[Block, Expected], counts: list[int], device: torch.device
) -> list[Tensor]:
    """Sum factors, scalings, fingerprints and counts over all processes: one reduction a dtype, none read by the host.

    A process in which a layer saw no example contributes zeros, so that all take part in the same reduction.
    """
    parts: dict[torch.dtype, list[Tensor]] = {}
    for block, what in expected.items():
        entry = sums.setdefault(block, BlockSums())
        shape = block.shape
        options: dict[str, Any] = {"dtype": block.dtype, "device": block.key.device}
        mine = parts.setdefault(block.dtype, [])
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
            entry.scaling = reduced_zeros(block) if entry.scaling is None else entry.scaling.contiguous()
            mine.append(entry.scaling)
        if what.fingerprint:
            entry.fingerprint = torch.zeros(2, **options) if entry.fingerprint is None else entry.fingerprint
            mine.append(entry.fingerprint)
    totals = [torch.tensor(float(c), dtype=torch.float64, device=device) for c in counts]
    parts.setdefault(torch.float64, []).extend(totals)
    for tensors in parts.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return totals


def reduced_zeros(block: Block) -> Tensor:
    """Return the scaling sum of a process that saw no example."""
    s = block.shape
    return torch.zeros(s.groups, s.out, s.columns, dtype=block.dtype, device=block.key.device)


def differ_between_processes(numbers: list[Tensor | None], device: torch.device) -> Tensor:
    """Find which numbers differ between processes, as a mask that all of them agree on.

    None counts as zero, so that all take part in the same reduction.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    mine = torch.stack([zero if n is None else n.to(zero) for n in numbers])
    extremes = torch.cat([mine, -mine])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, smallest = extremes[: len(numbers)], -extremes[len(numbers) :]
    return largest - smallest > 1e-6 * largest
