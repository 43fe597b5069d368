"""A and B as averages over steps, each batch weighted by its number of examples."""

from __future__ import annotations

import torch
from torch import Tensor

from ekfac.optim.statistics.partition import Partition
from ekfac.optim.types import BlockState, StepInputs, as_scalar


def average_factors(partition: Partition, inputs: StepInputs, square: float | Tensor, decay: float) -> None:
    """Take a step's sums into A and B. Numerators and denominator are kept apart.

    Args:
        partition: Has the blocks' state.
        inputs: What the step has gathered.
        square: What squared captured gradients, summed, are multiplied by to be the mean of squared delta_n.
        decay: Weight of the past.
    """
    n, ok = inputs.n_statistics, inputs.ok
    totals: list[Tensor] = []
    batch: list[Tensor] = []
    for block, gathered in inputs.sums.items():
        f = gathered.factors
        if f is None:
            continue
        state: BlockState = partition.state(block)
        weight: float | Tensor = n
        terms: float | Tensor = float(f.terms) if not isinstance(f.terms, Tensor) else f.terms
        if isinstance(terms, Tensor):
            weight, terms = n * (terms > 0), terms.clamp(min=1)
        A, B = f.A.mul_(as_scalar(weight / terms, f.A)), f.B.mul_(as_scalar(weight * square, f.B))
        W = weight.to(A) if isinstance(weight, Tensor) else A.new_full((), weight)
        # An input so large that its square is not finite would stay in the average for ever.
        bad = ~torch.isfinite(_trace(A) + _trace(B))
        bad = bad if inputs.bad is None else bad | inputs.bad
        if bad.device.type != "cpu" or bad:
            A, B, W = (x.masked_fill(bad, 0.0) for x in (A, B, W))
        if "A" not in state:
            state.A, state.B, state.factor_weight = A, B, W.clone()
        else:
            totals += [state.A, state.B, state.factor_weight]
            batch += [A, B, W]
    if totals:
        torch._foreach_mul_(totals, decay if ok is None else (1 + (decay - 1) * ok).to(totals[0]))
        torch._foreach_add_(totals, batch)


def factors_of(state: BlockState) -> tuple[Tensor, Tensor]:
    """A and B as they stand."""
    weight = state.factor_weight.clamp(min=torch.finfo(state.A.dtype).tiny)
    return state.A / weight, state.B / weight


def _trace(factor: Tensor) -> Tensor:
    """Of ``[G, D, D]``, or ``[G, D]`` where it is kept diagonal; over all groups."""
    return (factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)).sum()
