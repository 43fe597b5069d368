"""The exact second moments s* of the per-example gradients in the basis.

s*_oc = mean over n of ( sum over s of (U_B^T delta)_o (U_A^T h)_c )^2: summed over positions first, then squared.
"""

from __future__ import annotations

from torch import Tensor

from ekfac.curvature.eigenbasis import Basis, rotate_columns, rotate_rows

#: The cost of reading and writing one entry of a per-example gradient, in multiply-adds (on two CPU cores and on an
#: H200 alike, within a factor of two). It decides between the two algorithms.
ELEMENTWISE_COST = 32


def scaling_sum(h: Tensor, delta: Tensor, basis: Basis, memory: int) -> Tensor:
    """Sum (sum_s (U_B^T delta)(U_A^T h)^T)^2 over n, ``[G, O, C]``, by the cheaper of two exact algorithms.

    Args:
        h: Inputs ``[N, S, G, C]``.
        delta: Output gradients ``[N, S, G, O]``, or ``[passes, N, S, G, O]`` for several backward passes over the same
            inputs, whose squares are summed.
        basis: The basis to project into.
        memory: Bound in bytes on temporary tensors.
    """
    delta = _by_pass(delta)
    h, delta = project_positions(h, delta, basis)
    s, passes = h.shape[1], delta.shape[0]
    if s * (s + 1) // 2 <= passes * (s + ELEMENTWISE_COST):
        return by_gram(h, delta, memory)
    return by_examples(h, delta, memory)


def project_positions(h: Tensor, delta: Tensor, basis: Basis) -> tuple[Tensor, Tensor]:
    """Project h and delta into the basis: rows h^T U_A (per tap) and delta^T U_B."""
    g = h.shape[2]
    h_rows = h.movedim(-2, 0).reshape(g, -1, h.shape[-1])
    d_rows = delta.movedim(-2, 0).reshape(g, -1, delta.shape[-1])
    h_rows = rotate_columns(h_rows, basis.U_A, basis.shape)
    d_rows = rotate_rows(d_rows.mT, basis.U_B).mT
    return (
        h_rows.reshape(g, *h.shape[:2], h.shape[-1]).movedim(0, -2),
        d_rows.reshape(g, *delta.shape[:-2], delta.shape[-1]).movedim(0, -2),
    )


def by_gram(h: Tensor, delta: Tensor, memory: int) -> Tensor:
    """Expand the square over pairs of positions: one product of N S (S + 1) / 2 rows for any number of passes.

    (sum_s d_s h_s)^2 = sum over s <= s' of w (d_s d_s')(h_s h_s'), w = 1 on the diagonal and 2 off it.
    For S = 1 this is (delta^2)^T (h^2).
    """
    delta = _by_pass(delta)
    n, s, g, c = h.shape
    passes, o = delta.shape[0], delta.shape[-1]
    total = h.new_zeros(g, o, c)
    for start, stop in chunks(n, 2 * s * g * (c + (passes + 1) // 2 * o) * h.element_size(), memory):
        for offset in range(s):
            hh = h[start:stop, offset:] * h[start:stop, : s - offset]
            dd = delta[:, start:stop, offset:] * delta[:, start:stop, : s - offset]
            rows_h = hh.flatten(0, 1).transpose(0, 1)
            rows_d = (dd[0] if passes == 1 else dd.sum(0)).flatten(0, 1).transpose(0, 1)
            total.baddbmm_(rows_d.mT, rows_h, alpha=1.0 if offset == 0 else 2.0)
    return total


def by_examples(h: Tensor, delta: Tensor, memory: int) -> Tensor:
    """Square and sum per-example gradients in the basis, a chunk at a time."""
    n, _, g, c = h.shape
    o = delta.shape[-1]
    total = h.new_zeros(g, o, c)
    # A chunk's gradients, their sum, and the copies of strided h and delta that a batched product makes.
    each = 2 * g * o * c + h.shape[1] * g * (c + o)
    for start, stop in chunks(n, each * h.element_size(), memory):
        for d in _by_pass(delta):
            gradients = d[start:stop].permute(0, 2, 3, 1) @ h[start:stop].transpose(1, 2)
            total += gradients.square_().sum(0)
    return total


def _by_pass(delta: Tensor) -> Tensor:
    """Bring one backward pass or several into the form ``[passes, N, S, G, O]``."""
    return delta if delta.dim() == 5 else delta[None]


def chunks(n: int, bytes_each: int, memory: int) -> list[tuple[int, int]]:
    """Split n examples into chunks whose temporaries fit into ``memory`` bytes (at least one example each)."""
    size = max(1, min(n, memory // max(1, bytes_each)))
    return [(start, min(start + size, n)) for start in range(0, n, size)]
