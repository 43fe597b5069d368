"""Sums over the examples of one step, over all its backward passes and over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ekfac.curvature import statistics
from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.executor import Executor
from ekfac.optim.options import EngineOptions

if TYPE_CHECKING:
    from ekfac.optim.stacks import Stack

#: How many times the average's trace that of a batch may be.
OUTLIER = 100.0


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


class Addition:
    """What a batch adds to the numerators A and B of one block or of several that are stacked, and to the denominator.

    Args:
        stack: The blocks.
        sums: Their sums over the batch; they are changed.
    """

    def __init__(self, stack: Stack, sums: list[FactorSums]) -> None:
        self.stack = stack
        #: Their state, if it has factors.
        self.old: Any = stack.state if hasattr(stack.state, "A") else None
        alone = len(sums) == 1
        self.A = sums[0].A if alone else torch.cat([f.A for f in sums])
        self.B = sums[0].B if alone else torch.cat([f.B for f in sums])
        #: How many terms each block's A has; a tensor where only the device knows.
        self.terms = [f.terms for f in sums]
        #: What each block adds to the denominator.
        self.weight = self.A.new_empty(() if alone else len(sums))

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is added to."""
        return self.old.A, self.old.B, self.old.factor_weight


def alike(additions: list[Addition]) -> list[list[Addition]]:
    """Return together what can be weighed together: on one device, in one dtype, with factors already or without."""
    found: dict[Any, list[Addition]] = {}
    for a in additions:
        found.setdefault((a.A.device, a.A.dtype, a.old is None), []).append(a)
    return list(found.values())


def weigh(
    additions: list[Addition], n: float | Tensor, square: float | Tensor, bad: Tensor | None, bounded: bool
) -> None:
    """Multiply sums by what makes them additions; all blocks' numbers are computed at once.

    Args:
        additions: What is added; all of them are :func:`alike`.
        n: The number of examples.
        square: What squared output gradients are multiplied by.
        bad: True on the device in a step that must change nothing.
        bounded: Scale a batch whose trace is above OUTLIER times the average's down to that, so that an outlier does
            not fill the factors for hundreds of steps.
    """
    first, counts = additions[0].A, [len(a.terms) for a in additions]
    terms = [t for a in additions for t in a.terms]
    if any(isinstance(t, Tensor) for t in terms):
        each = torch.stack([torch.as_tensor(t, dtype=first.dtype, device=first.device) for t in terms])
        weights, each = (each > 0) * as_number(n, first), each.clamp(min=1)
    else:
        each = torch.tensor([float(t) for t in terms], dtype=first.dtype).to(first.device, non_blocking=True)
        weights = torch.ones_like(each) * as_number(n, first)
    by = torch.stack([weights / each, weights * as_number(square, first)])
    new = torch.stack([torch.cat([traces(x, a.weight) for a, x in side]) for side in sides(additions)]) * by
    if bounded and additions[0].old is not None:
        old = torch.stack([torch.cat([traces(x, a.weight) for a, x in side]) for side in sides(additions, old=True)])
        past = torch.cat([a.old.factor_weight.reshape(-1) for a in additions])
        limit = OUTLIER * old / past.clamp(min=torch.finfo(first.dtype).tiny) * weights
        by = by * torch.where(limit > 0, (limit / new).clamp(max=1).nan_to_num(1.0), 1.0)
    # An input so large that its square is not finite would stay in the average for ever.
    spoilt = ~torch.isfinite(new).all(0)
    spoilt = spoilt if bad is None else spoilt | bad
    by, weights = by.masked_fill(spoilt, 0.0), weights.masked_fill(spoilt, 0.0)
    holes = first.device.type != "cpu" or bool(spoilt.any())  # NaN times zero is NaN
    for index, a in enumerate(additions):
        start = sum(counts[:index])
        mine = slice(start, start + counts[index])
        a.weight.copy_(weights[mine].view_as(a.weight))
        for matrix, numbers in ((a.A, by[0, mine]), (a.B, by[1, mine])):
            matrix.mul_(over(numbers, matrix))
            if holes:
                matrix.nan_to_num_(0.0, 0.0, 0.0)


def sides(additions: list[Addition], old: bool = False) -> tuple[list[tuple[Addition, Tensor]], ...]:
    """Return each addition with its A, and each with its B; or those that they are added to."""
    of = [(a, a.old if old else a) for a in additions]
    return [(a, x.A) for a, x in of], [(a, x.B) for a, x in of]


def as_number(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a number, or a tensor of one in the dtype of another."""
    return value.to(like) if isinstance(value, Tensor) else value


def over(numbers: Tensor, factors: Tensor) -> Tensor:
    """Return one number a block, in the shape in which it multiplies their factors."""
    if len(numbers) < len(factors):
        numbers = numbers.repeat_interleave(len(factors) // len(numbers))
    return numbers.view(-1, *(1 for _ in factors.shape[1:]))


def traces(factors: Tensor, like: Tensor) -> Tensor:
    """Return the trace of each block's factor, over all its groups; as many as there are numbers in ``like``."""
    diagonals = factors if factors.dim() == 2 else factors.diagonal(dim1=-2, dim2=-1)
    return diagonals.reshape(like.numel(), -1).sum(1)


def factor_sums(
    executor: Executor, options: EngineOptions, block: Block, calls: list[Call], n: int, replay: bool
) -> FactorSums:
    """Take A and B of a block's calls, of no more rows than these need.

    Args:
        executor: Runs it.
        options: The engine's.
        block: The block.
        calls: Its calls.
        n: The number of examples.
        replay: Whether an earlier run may be replayed.
    """
    before, sharing = len(calls[0].d), options.coverage.sharing
    inexact = not options.refresh.deterministic and block.dtype == torch.float32
    if inexact and sharing == "expand":
        calls, n = statistics.sampled(block, calls, n)
    more = before / len(calls[0].d)

    def taken(*tensors: Tensor) -> tuple[Any, ...]:
        given = [Call(c.layer, *tensors[2 * i : 2 * i + 2]) for i, c in enumerate(calls)]
        limit = options.numerics.memory_limit
        sums = statistics.factor_sums(block, given, n, sharing, limit, half=inexact)
        return sums.A, sums.terms, sums.B if more == 1 else sums.B.mul_(more)

    tensors = [t for call in calls for t in (call.x, call.d)]
    if not replay or block.layer.scattered:
        return FactorSums(*taken(*tensors))
    key = (block, n, more, *((c.layer, c.layer.mode) for c in calls))
    return FactorSums(*executor.call("taking statistics", key, taken, *tensors))
