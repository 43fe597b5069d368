"""A gradient in factored form, G = delta^T h: with few rows, projecting h and delta is cheaper than projecting G.

Projecting N rows costs N (in^2 + out^2 + in out), projecting G costs in out (in + out). If s* is needed, the rows are
projected in any case, and the gradient costs only N in out more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis, rotate_columns
from ekfac.curvature.layers.base import Call
from ekfac.curvature.layers.linear import LinearLayer
from ekfac.curvature.statistics import rows_if_unaligned
from ekfac.optim.options import EngineOptions

#: The overhead of using rows (hooks, a fingerprint, blocks handled one by one), in multiplications.
CALLS = 2**24


@dataclass
class Rows:
    """G = delta^T h, with h ``[G, M, C]`` and delta ``[G, M, O]``.

    Attributes:
        one_each: Whether every example has exactly one row, so that s* is a sum over rows.
    """

    h: Tensor
    delta: Tensor
    one_each: bool
    _inside: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def projected(self, basis: Basis) -> tuple[Tensor, Tensor]:
        """Return delta U_B and h U_A; cached, as rows live for one step, which has one basis."""
        if self._inside is None:
            delta = self.delta if basis.U_B is None else basis.times(self.delta, basis.U_B)
            self._inside = delta, rotate_columns(self.h, basis.U_A, basis.shape, basis.times)
        return self._inside

    def in_basis(self, basis: Basis) -> Tensor:
        """Return U_B^T G U_A."""
        delta, h = self.projected(basis)
        return basis.times(delta.mT, h)

    def square_norm(self) -> Tensor:
        """Return |G|^2, from inner products of rows."""
        return ((self.h @ self.h.mT) * (self.delta @ self.delta.mT)).sum()

    def scaling_sum(self, basis: Basis) -> Tensor:
        """Return ((delta U_B)^2)^T ((h U_A)^2): s* up to a factor, if every example has one row."""
        delta, h = self.projected(basis)
        return delta.square().mT @ h.square()


def rows_of(block: Block, call: Call, n: int) -> Rows:
    """Return the rows of a call over n examples."""
    rows = rows_if_unaligned(call, n)
    h, delta = call.layer.positions(call.x.to(block.dtype), call.d.to(block.dtype), rows)
    one_each = rows == n and h.shape[1] == 1
    return Rows(h.flatten(0, 1).transpose(0, 1), delta.flatten(0, 1).transpose(0, 1), one_each)


def may_use_rows(block: Block, options: EngineOptions) -> bool:
    """Return whether it can be verified that a block's gradient is the product of its rows."""
    return (
        block.key.device.type == "cpu"
        and options.batch.reduction == "mean"
        and isinstance(block.layer, LinearLayer)
        and len(block.uses) == 1
        and not block.through
        and options.processes.size == 1
    )


def rows_are_cheaper(block: Block, rows: int, projected_anyway: bool = False) -> bool:
    """Return whether projecting M rows of h and delta takes less time than projecting their product.

    Args:
        block: The block.
        rows: M.
        projected_anyway: Whether the rows are projected for s* in any case.
    """
    s = block.shape
    rotated_A = 0 if block.diagonal_A else s.inputs
    rotated_B = 0 if block.diagonal_B else s.out
    by_rows = rows * s.out * s.columns
    if not projected_anyway:
        by_rows += rows * (s.columns * rotated_A + s.out * rotated_B) + CALLS
    return by_rows < s.out * s.columns * (rotated_A + rotated_B)
