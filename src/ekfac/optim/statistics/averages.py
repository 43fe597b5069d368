"""A and B as weighted averages over steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.stacks import Stack, Stacks, concatenated

#: The largest ratio of a batch's trace to the average's; larger batches are scaled down.
OUTLIER = 100.0


def update_averages(
    stacks: Stacks,
    sums: Mapping[Block, FactorSums],
    n: float | Tensor,
    square: float | Tensor,
    decay: float,
    bounded: bool,
    ok: Tensor | None,
    shrinks: bool = False,
) -> None:
    """Add a step's sums to A and B, each batch weighted by its N. Numerators and denominator are stored separately.

    Args:
        stacks: The blocks.
        sums: The sums of each block; modified in place.
        n: The number of examples.
        square: The factor for squared output gradients.
        decay: The weight of the past.
        bounded: See :func:`weigh`.
        ok: 0 on the device if the step is to be skipped, else 1; None if the host knows that it is not.
        shrinks: See :func:`shrink_past`.
    """
    if not sums:
        return
    found = stacks.of(sums, lambda block: isinstance(sums[block].terms, Tensor))
    additions = [Addition(stack, [sums[block] for block in stack.blocks]) for stack in found]
    for of in group_additions(additions):
        weigh(of, n, square, None if ok is None else ok == 0, bounded)
    known = [a for a in additions if a.old is not None]
    if shrinks:
        for a in known:
            shrink_past(a, ok)
    if known:
        totals = [total for a in known for total in a.totals()]
        torch._foreach_mul_(totals, decay if ok is None else (1 + (decay - 1) * ok).to(totals[0]))
        torch._foreach_add_(totals, [new for a in known for new in (a.A, a.B, a.weight)])
    for a in additions:
        if a.old is None:
            a.stack.state.A, a.stack.state.B, a.stack.state.factor_weight = a.A, a.B, a.weight.clone()
            if len(a.stack.blocks) > 1:
                stacks.update_views(a.stack)


class Addition:
    """What a batch adds to the numerators A and B, and to the denominator, of a stack of blocks.

    Args:
        stack: The blocks.
        sums: Their sums over the batch; modified in place.
    """

    def __init__(self, stack: Stack, sums: list[FactorSums]) -> None:
        self.stack = stack
        #: Their state, if it already has factors.
        self.old: Any = stack.state if hasattr(stack.state, "A") else None
        alone = len(sums) == 1
        self.A = sums[0].A if alone else torch.cat([f.A for f in sums])
        self.B = sums[0].B if alone else torch.cat([f.B for f in sums])
        #: The number of terms in each block's A; a tensor if only the device knows it.
        self.terms = [f.terms for f in sums]
        #: Each block's addition to the denominator.
        self.weight = self.A.new_empty(() if alone else len(sums))

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the running sums A, B and the denominator."""
        return self.old.A, self.old.B, self.old.factor_weight


def group_additions(additions: list[Addition]) -> list[list[Addition]]:
    """Group additions that can be weighed together: same device, same dtype, all with existing factors or none."""
    found: dict[Any, list[Addition]] = {}
    for a in additions:
        found.setdefault((a.A.device, a.A.dtype, a.old is None), []).append(a)
    return list(found.values())


def weigh(
    additions: list[Addition], n: float | Tensor, square: float | Tensor, bad: Tensor | None, bounded: bool
) -> None:
    """Scale the sums to N times the batch's averages, in place; the factors of all blocks are computed at once.

    Args:
        additions: Additions that are grouped by :func:`group_additions`.
        n: The number of examples.
        square: The factor for squared output gradients.
        bad: True on the device if the step is to be skipped.
        bounded: Scale a batch down if its trace exceeds OUTLIER times the average's, so that an outlier does not
            dominate the factors for hundreds of steps.
    """
    first, counts = additions[0].A, [len(a.terms) for a in additions]
    terms = [t for a in additions for t in a.terms]
    known = not any(isinstance(number, Tensor) for number in (n, square, *terms))
    if known and first.device.type == "cpu" and bad is None and len(terms) == len(additions):
        for a in additions:
            weigh_on_host(a, float(n), float(square), bounded)
        return
    if any(isinstance(t, Tensor) for t in terms):
        each = torch.stack([torch.as_tensor(t, dtype=first.dtype, device=first.device) for t in terms])
        weights, each = (each > 0) * as_number(n, first), each.clamp(min=1)
    else:
        runs = [(float(t), len(list(same))) for t, same in itertools.groupby(terms)]
        each = concatenated([first.new_full((length,), t) for t, length in runs])  # avoids a copy from the host
        weights = torch.ones_like(each) * as_number(n, first)
    by = torch.stack([weights / each, weights * as_number(square, first)])
    new = torch.stack([torch.cat([traces(x, a.weight) for a, x in side]) for side in sides(additions)]) * by
    if bounded and additions[0].old is not None:
        old = torch.stack([torch.cat([traces(x, a.weight) for a, x in side]) for side in sides(additions, old=True)])
        past = torch.cat([a.old.factor_weight.reshape(-1) for a in additions])
        limit = OUTLIER * old / past.clamp(min=torch.finfo(first.dtype).tiny) * weights
        by = by * torch.where(limit > 0, (limit / new).clamp(max=1).nan_to_num(1.0), 1.0)
    # A non-finite square would stay in the average for ever.
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


def weigh_on_host(a: Addition, n: float, square: float, bounded: bool) -> None:
    """Do the same as :func:`weigh` for one block on a CPU, in Python floats."""
    kept, (terms,) = torch.finfo(a.A.dtype), a.terms
    by = [n / float(terms) if terms else math.inf, n * square]
    sizes = [float(traces(new, a.weight)) * number for new, number in zip((a.A, a.B), by, strict=True)]
    if bounded and a.old is not None:
        past = max(float(a.old.factor_weight), float(kept.tiny))
        for side, old in enumerate((a.old.A, a.old.B)):
            limit = OUTLIER * float(traces(old, a.weight)) / past * n
            by[side] *= limit / sizes[side] if 0 < limit < sizes[side] else 1.0
    spoilt = not all(size <= float(kept.max) for size in sizes)
    a.weight.fill_(0.0 if spoilt else n)
    for new, number in zip((a.A, a.B), by, strict=True):
        new.mul_(0.0 if spoilt else number)
        if spoilt:
            new.nan_to_num_(0.0, 0.0, 0.0)


def shrink_past(a: Addition, ok: Tensor | None) -> None:
    """Scale the average down to the trace of a smaller batch, each side separately.

    The residuals of an equation can fall by orders of magnitude within the memory of the average, which its first
    batches would then dominate. So the past determines the factor's shape, and the batch its size.
    """
    tiny = torch.finfo(a.A.dtype).tiny
    for old, new in ((a.old.A, a.A), (a.old.B, a.B)):
        now, past = (
            traces(new, a.weight) * a.old.factor_weight.reshape(-1),
            traces(old, a.weight) * a.weight.reshape(-1),
        )
        ratio = torch.where(now > tiny, (now / past.clamp(min=tiny)).clamp(max=1.0), 1.0)
        old.mul_(over(ratio if ok is None else torch.where(ok > 0, ratio, 1.0), old))


def sides(additions: list[Addition], old: bool = False) -> tuple[list[tuple[Addition, Tensor]], ...]:
    """Pair each addition with its A, and each with its B (or with the running sums, if ``old``)."""
    of = [(a, a.old if old else a) for a in additions]
    return [(a, x.A) for a, x in of], [(a, x.B) for a, x in of]


def as_number(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a number, or a one-element tensor converted to the dtype and device of ``like``."""
    return value.to(like) if isinstance(value, Tensor) else value


def over(numbers: Tensor, factors: Tensor) -> Tensor:
    """Reshape one number per block to broadcast against the blocks' factors."""
    if len(numbers) < len(factors):
        numbers = numbers.repeat_interleave(len(factors) // len(numbers))
    return numbers.view(-1, *(1 for _ in factors.shape[1:]))


def traces(factors: Tensor, like: Tensor) -> Tensor:
    """Return the trace of each block's factor, summed over its groups; ``like`` has one number per block."""
    diagonals = factors if factors.dim() == 2 else factors.diagonal(dim1=-2, dim2=-1)
    return diagonals.reshape(like.numel(), -1).sum(1)
