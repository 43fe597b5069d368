"""A and B as averages over steps: what a batch adds to them, and how much it weighs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.stacks import Stack, Stacks

#: How many times the average's trace that of a batch may be.
OUTLIER = 100.0


def take_in(
    stacks: Stacks,
    sums: Mapping[Block, FactorSums],
    n: float | Tensor,
    square: float | Tensor,
    decay: float,
    bounded: bool,
    ok: Tensor | None,
    shrinks: bool = False,
) -> None:
    """Take a step's sums into A and B, each batch weighted by its N. Numerators and denominator are kept apart.

    Args:
        stacks: The blocks.
        sums: Of each block; they are changed.
        n: The number of examples.
        square: What squared output gradients are multiplied by.
        decay: The weight of the past.
        bounded: See :func:`weigh`.
        ok: 0 on the device in a step that must change nothing; None where that is known not to be so.
        shrinks: See :func:`shrink_past`.
    """
    if not sums:
        return
    found = stacks.of(sums, lambda block: isinstance(sums[block].terms, Tensor))
    additions = [Addition(stack, [sums[block] for block in stack.blocks]) for stack in found]
    for of in alike(additions):
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
                stacks.hand_down(a.stack)


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
        each = joined([first.new_full((length,), t) for t, length in runs])  # nothing comes from the host
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


def weigh_on_host(a: Addition, n: float, square: float, bounded: bool) -> None:
    """Do what :func:`weigh` does for one block in the host's numbers, for which it need not wait on a CPU."""
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
    """Bring the average to the size of a batch that is smaller, each side by its trace.

    The residuals of an equation fall by orders of magnitude within the memory of the average, which would go on to be
    that of its first batches; so the past tells the shape, and the batch the size.
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
    """Return each addition with its A, and each with its B; or those that they are added to."""
    of = [(a, a.old if old else a) for a in additions]
    return [(a, x.A) for a, x in of], [(a, x.B) for a, x in of]


def joined(tensors: list[Tensor]) -> Tensor:
    """Put tensors one below the other; a single one stays as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


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
