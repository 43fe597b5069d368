"""KFAC for one block: products with the inverses of the damped factors."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis, rotate_columns, rotate_rows
from ekfac.curvature.operators.parts import Part
from ekfac.optim.methods.rules import SPIKE, blend, bounded, overwrite, shortening
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.statistics.refresh import PATIENCE, Refresher, Renewal
from ekfac.optim.types import BlockStep, InverseState, factors_of

#: The usual length of gradients, beyond SPIKE times of which they are clipped, is a running average with this decay.
DECAY = 0.95


class InverseMethod:
    """(B + sqrt(eps)/pi I)^-1 G (A + pi sqrt(eps) I)^-1: two products per step.

    The inverted factors are not stored at first. When damping changes, they are recovered by inverting the inverses
    and subtracting the old damping; from then on they are stored, as damping is likely to change again.

    Args:
        pi_correction: Balance the damping between A and B by pi = sqrt((tr A / dim A) / (tr B / dim B)), or use pi = 1.
        exact: Never clip gradients.
    """

    kind = "inverse"
    derived = "inverse_A"
    approximation = "kfac"
    state_class = InverseState
    needs_examples = False
    squares_all = False
    compares_gradients = False
    damping_is_free = False
    masks_refreshes = False
    bounds_gradients = False
    reads_eigenvalues = True
    for_wide = None
    stacks = False

    def __init__(self, pi_correction: bool, exact: bool = False) -> None:
        self.pi_correction = pi_correction
        self.exact = exact
        self.keeps_factors = False

    def numbers(self, block: Block) -> int:
        """Count the numbers stored for a block: factors, inverses and, under SUA, a further inverse for the bias."""
        A, B = block.factor_numbers()
        return 2 * A + (3 if block.shape.extra else 2) * B

    def basis(self, block: Block, state: InverseState) -> Basis | None:
        """Return None: KFAC has no basis."""
        return None

    def refresh(
        self, block: Block, state: InverseState, A: Tensor, B: Tensor, damping: float, refresher: Refresher
    ) -> None:
        """Invert the factors of this refresh."""
        self._invert(block, state, A, B, damping, refresher)

    def warm_refresh(self, renewals: Sequence[Renewal], refresher: Refresher, ok: Tensor | None = None) -> None:
        """Invert without waiting for the outcome; if it fails, the device keeps the old inverse."""
        for r in renewals:
            if r.iterations[0]:
                self._invert(r.blocks[0], r.state, *factors_of(r.state), float(r.damping), refresher, wait=False)

    def _invert(
        self, block: Block, state: InverseState, A: Tensor, B: Tensor, damping: float,
        refresher: Refresher | None = None, wait: bool = True,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        pi = pi_of(A, B) if self.pi_correction else A.new_ones(len(A))
        root = math.sqrt(damping)
        good = True
        with factors.full_precision(A.device):
            if block.shape.extra:
                overwrite(state, "inverse_extra", self._inverse_of_bias(block, state, B, root, wait))
            for side, factor, added in (("A", A, pi * root), ("B", B, root / pi)):
                old = (state[f"inverse_{side}"], state[f"added_{side}"]) if f"inverse_{side}" in state else None
                inverse, added, worked = damped_inverse(factor, added, old, wait)
                overwrite(state, f"inverse_{side}", inverse)
                overwrite(state, f"added_{side}", added)
                if self.keeps_factors or f"inverted_{side}" in state:
                    overwrite(state, f"inverted_{side}", factor)
                good = good and worked
        # Failures count only in full refreshes: after others the next attempt comes soon.
        failures = 0 if good else state.failed_refreshes + (refresher is not None and wait)
        if failures >= PATIENCE:
            raise RuntimeError(
                f"layer '{block.name}': no inverse of its factors in {failures} refreshes in a row. "
                "Its activations or gradients are likely not finite: lower lr, raise damping, or exclude the layer"
            )
        state.inverted_at, state.failed_refreshes = damping, failures
        if refresher is not None:
            refresher.refreshes += 1
            refresher.seconds += time.perf_counter() - started
            if not good:
                refresher.fallbacks["kept"] += 1

    def _inverted(self, state: InverseState) -> tuple[Tensor, Tensor]:
        """Return the A and B behind the current inverses."""
        self.keeps_factors = True
        for side, current in zip("AB", factors_of(state), strict=True):
            if f"inverted_{side}" not in state:
                inverse, added = state[f"inverse_{side}"], state[f"added_{side}"]
                with factors.full_precision(inverse.device):
                    found = inverse_of_inverse(inverse, added)
                state[f"inverted_{side}"] = current if found is None else found
        return state.inverted_A, state.inverted_B

    def _inverse_of_bias(self, block: Block, state: InverseState, B: Tensor, root: float, wait: bool) -> Tensor:
        """Invert for SUA's bias, a block with A = [1] and its own pi: (B + root / pi I)^-1 / (1 + pi root)."""
        pi = pi_of(B.new_ones(len(B), 1), B) if self.pi_correction else B.new_ones(len(B))
        columns = (slice(None), None) if block.diagonal_B else (slice(None), None, None)
        previous, added = state.get("inverse_extra"), root / pi
        shrink = (1 + pi * root)[columns]
        old = None if previous is None else (previous * shrink, added)
        inverse, _, good = damped_inverse(B, added, old, wait)
        return inverse / shrink if good or previous is None else previous

    def project(self, block: Block, state: InverseState, step: BlockStep) -> None:
        """Invert again if damping has changed; there is nothing to project."""
        if state.inverted_at != step.rates.damping:
            self._invert(block, state, *self._inverted(state), float(step.rates.damping))

    def update_scaling(self, state: InverseState, step: BlockStep) -> None:
        """Clip a gradient that is far longer than usual, for which the inverses are too large.

        The gradient becomes zero if the first batch was too large to be squared, which leaves the factors empty.
        """
        if self.exact:
            return
        G = step.gradient
        square = (G.square_norm() if isinstance(G, Rows) else G.square().sum()).nan_to_num(torch.inf, torch.inf)
        if hasattr(state, "usual"):
            limit = SPIKE**2 * state.usual
            factor = shortening(square, limit)
            blend(
                state.usual, bounded(torch.where(limit > 0, torch.minimum(square, limit), square)), 1 - DECAY, step.ok
            )
        else:
            factor = (state.factor_weight > 0).to(square)
            square = bounded(square) * factor
            state.usual = square if step.ok is None else square * step.ok.to(square)
        step.gradient = Rows(G.h, G.delta * factor, G.one_each) if isinstance(G, Rows) else G * factor

    def rescale(self, block: Block, state: InverseState, step: BlockStep) -> Tensor:
        """Return B^-1 G A^-1, with the damped inverses."""
        A, B, gradient = state.inverse_A, state.inverse_B, step.gradient
        if isinstance(gradient, Rows):
            delta: Tensor = gradient.delta * B[:, None, :] if block.diagonal_B else gradient.delta @ B
            h: Tensor = gradient.h * A[:, None, :] if block.diagonal_A else gradient.h @ A
            return delta.mT @ h
        return kronecker_product(block, gradient, A, B, state.get("inverse_extra"))

    def project_back(self, x: Tensor, step: BlockStep) -> Tensor:
        """Return x: there is nothing to project back from."""
        return x

    def part(self, block: Block, state: InverseState) -> Part | None:
        """Return None: its curvature is that of the factors."""
        return None

    def seed(self, block: Block, state: InverseState, part: Part) -> None:
        """Do nothing: the next step inverts the factors."""

    def quadratic_form(self, block: Block, state: InverseState, D: Tensor) -> Tensor:
        """Return d^T C d with C = A x B, the factors behind the current inverses."""
        A, B = self._inverted(state)
        return (D * kronecker_product(block, D, A, B, B)).sum()


def kronecker_product(block: Block, X: Tensor, A: Tensor, B: Tensor, extra: Tensor | None) -> Tensor:
    """Return B X A, where a diagonal side is a vector; SUA's bias column is multiplied by ``extra`` instead."""
    product = X * B[:, :, None] if block.diagonal_B else rotate_rows(X, B)
    if block.diagonal_A:
        columns = A.repeat(1, block.shape.taps)
        if block.shape.extra:
            columns = torch.cat([columns, columns.new_ones(columns.shape[0], 1)], 1)
        product = product * columns[:, None, :]
    else:
        product = rotate_columns(product, A, block.shape)
    if block.shape.extra and extra is not None:
        bias = X[..., -1:]
        bias = bias * extra[:, :, None] if block.diagonal_B else rotate_rows(bias, extra)
        product = torch.cat([product[..., :-1], bias], -1)
    return product


def pi_of(A: Tensor, B: Tensor) -> Tensor:
    """Return sqrt((tr A / dim A) / (tr B / dim B)) of every group, or 1 if either trace is zero or not finite.

    A factor is ``[G, D, D]``, or ``[G, D]`` if it is kept diagonal.
    """
    mean_A, mean_B = (M.mean(-1) if M.dim() == 2 else M.diagonal(dim1=-2, dim2=-1).mean(-1) for M in (A, B))
    pi = (mean_A / mean_B).sqrt()
    return torch.where(torch.isfinite(pi) & (pi > 0), pi, 1.0)


def damped_inverse(
    matrix: Tensor, added: Tensor, old: tuple[Tensor, Tensor] | None, wait: bool = True
) -> tuple[Tensor, Tensor, bool]:
    """Return (M + added I)^-1 by Cholesky in float32, then float64, then by eigenvalues; if all fail, the old inverse.

    If inputs have a large offset, rounding can make M indefinite by more than ``added``. The eigenvalue solver then
    treats negative eigenvalues, which are mere rounding, as zero. A diagonal M is inverted entry by entry. With
    ``wait=False`` on a GPU there is a single attempt; the device chooses between its result and the old inverse, and
    the host assumes success.

    Args:
        matrix: M, ``[G, D, D]``, or ``[G, D]`` if diagonal.
        added: The damping, one number per group.
        old: The inverse in use and its damping; None if there is none yet.
        wait: Whether to wait for the device to learn whether it succeeded.

    Returns:
        The inverse, its damping, and whether it is a new one.
    """
    if matrix.dim() == 2:
        return 1 / (matrix + added[:, None]), added, True
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    damped = (matrix + matrix.mT) / 2 + added[:, None, None] * eye
    if not wait and old is not None and matrix.is_cuda:
        inverse, good = by_cholesky(damped)
        return torch.where(good, inverse, old[0]), torch.where(good, added, old[1]), True
    for attempt in (by_cholesky, by_cholesky_in_double, partial(by_eigenvalues, added=added)):
        inverse, good = attempt(damped)
        if bool(good):
            return inverse.to(matrix), added, True
    return (*(old or (eye.expand_as(matrix) / added[:, None, None], added)), False)


def by_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse of a symmetric matrix, and whether that succeeded, 0-dim."""
    try:
        factor, info = torch.linalg.cholesky_ex(matrix)
        inverse = torch.cholesky_inverse(factor)
    except RuntimeError:  # torch raises if the factor is nearly singular
        return torch.full_like(matrix, float("nan")), torch.zeros((), dtype=torch.bool, device=matrix.device)
    return inverse, (info == 0).all() & torch.isfinite(inverse).all()


def by_cholesky_in_double(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`by_cholesky`, computed in float64."""
    return by_cholesky(matrix.double())


def by_eigenvalues(damped: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Return (M + added I)^-1 with M's negative eigenvalues set to zero, and whether that succeeded."""
    try:
        values, U = torch.linalg.eigh(damped.double())
    except RuntimeError:
        return damped, torch.zeros((), dtype=torch.bool, device=damped.device)
    floor = added.double()[:, None]
    inverse: Tensor = (U / values.clamp(min=floor)[:, None]) @ U.mT
    return inverse, torch.isfinite(inverse).all() & (floor > 0).all()


def inverse_of_inverse(inverse: Tensor, added: Tensor) -> Tensor | None:
    """Recover M from (M + added I)^-1, in float64; None if that fails."""
    if inverse.dim() == 2:
        return 1 / inverse - added[:, None]
    eye = torch.eye(inverse.shape[-1], dtype=torch.float64, device=inverse.device)
    try:
        damped: Tensor = torch.linalg.inv(inverse.double())
    except RuntimeError:  # includes torch.linalg.LinAlgError
        return None
    found = (damped - added[:, None, None] * eye).to(inverse)
    return found if bool(torch.isfinite(found).all()) else None
