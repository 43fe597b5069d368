"""Losses with derivatives make several products with one weight; this weighs them in A and B."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.curvature.layers.derivative import DerivativeLayer


def weights(
    block: Block, calls: Sequence[Call], counts: Sequence[int | Tensor], inputs: Tensor, outputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weights of each product's sums of h h^T in A, and of delta delta^T in B.

    Args:
        block: The block.
        calls: The products.
        counts: The number of terms in each product's sum of h h^T.
        inputs: The traces of those sums.
        outputs: The traces of the sums of delta delta^T.
    """
    terms = torch.stack([inputs.new_full((), float(count)) for count in counts])
    direct = torch.stack([inputs.new_full((), float(not call.layer.transposed)) for call in calls])
    own, columns = (terms * direct).sum(), float(block.shape.groups * block.shape.inputs)
    mean = torch.where(own > 0, (inputs * direct).sum() / own.clamp(min=1), columns)
    each = inputs / terms
    product = (each * outputs).sum()
    tiny = torch.finfo(product.dtype).tiny
    known = product > tiny
    product, by = product.clamp(min=tiny), mean.clamp(min=tiny)
    # Without any gradient the weights are undefined; B is zero.
    of_A = torch.where(known, outputs * by / (product * terms), direct / own.clamp(min=1))
    return of_A, torch.where(known, each / by, 1.0)


def are_plain_rows(block: Block, calls: Sequence[Call]) -> bool:
    """Return whether all calls have plain rows on a CPU, where reading the weights needs no synchronisation."""
    if block.key.device.type != "cpu" or block.diagonal_A or block.diagonal_B:
        return False
    return all(
        (c.layer.direct_inputs if isinstance(c.layer, DerivativeLayer) else c.layer.reads_whole_inputs)
        and c.x.dtype == c.d.dtype == block.dtype
        for c in calls
    )


def sums_of_rows(block: Block, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
    """Return A and N B for products of plain rows; weights come from norms, so each is added in one pass."""
    rows = [(c.x.reshape(-1, c.x.shape[-1]), c.d.reshape(-1, c.d.shape[-1])) for c in calls]
    inputs, out, w = block.shape.inputs, block.shape.out, rows[0][0].shape[-1]
    # The number of rows with ones for the biases: derivatives have none.
    ones = [0 if isinstance(c.layer, DerivativeLayer) else len(x) for c, (x, _) in zip(calls, rows, strict=True)]
    squares = torch.stack(torch._foreach_norm([t for pair in rows for t in pair])).square_().view(-1, 2)
    traces = squares[:, 0] + (inputs - w) * squares.new_tensor(ones)
    of_A, of_B = weights(block, calls, [len(x) for x, _ in rows], traces, squares[:, 1])
    A, B = squares.new_zeros(1, inputs, inputs), squares.new_zeros(1, out, out)
    within, beside, corner = A[:, :w, :w], A[0, :w, w:], A[0, w:, w:]
    for (x, d), count, a, b in zip(rows, ones, of_A.tolist(), of_B.tolist(), strict=True):
        factors.add_outer_sum(x, within, a)
        factors.add_outer_sum(d, B, b)
        if count and inputs > w:
            beside.add_(x.sum(0)[:, None], alpha=a)
            corner.add_(a * count)
    for matrix in (within, B):
        if factors.is_cut(matrix):
            factors.mirror(matrix)
    A[0, w:, :w] = beside.T
    return A, B
