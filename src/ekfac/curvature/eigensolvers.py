"""Eigenvectors of a factor: by a full solve with fallbacks, or by orthogonal iteration from the current basis."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

#: The solvers in the order in which they are tried; ``opt.stats()`` counts them by these names.
RUNGS = ("plain", "shifted", "float64", "other_device", "kept")
#: Columns per panel in Cholesky QR.
PANEL = 256


@dataclass(frozen=True)
class Eigendecomposition:
    """U ``[G, D, D]``, the eigenvalues ``[G, D]`` (clamped at zero), and the rung of the ladder that succeeded."""

    U: Tensor
    values: Tensor
    rung: str


def eigh_with_fallback(
    matrix: Tensor, previous: Tensor | None = None, *, symmetric: bool = False
) -> Eigendecomposition:
    """Decompose symmetric ``[G, D, D]`` into eigenvalues and eigenvectors, with fallbacks.

    ``torch.linalg.eigh`` fails on matrices from real training: it raises, or returns NaN without raising. Every result
    is checked (finite, residual, orthogonality), and the next rung is tried if it fails: the matrix as it is, shifted
    by 1e-6 mean(diag), in float64, on the other device, and finally the previous basis (initially the identity) with
    eigenvalues diag(U^T A U).

    Args:
        matrix: The factor; it is symmetrised here.
        previous: The current basis, kept if all solvers fail.
        symmetric: Whether the factor is exactly symmetric, so that no copy is needed.
    """
    if not symmetric:
        matrix = (matrix + matrix.mT).div_(2)
    if bool(torch.isfinite(matrix).all()):
        for rung, attempt in _LADDER:
            if rung == "other_device" and not (matrix.is_cuda or torch.cuda.is_available()):
                continue
            try:
                values, U = attempt(matrix)
            except RuntimeError:  # includes torch.linalg.LinAlgError
                continue
            values, U = values.to(matrix), U.to(matrix)
            if is_eigendecomposition(matrix, U, values):
                return Eigendecomposition(U, values.clamp(min=0), rung)
    if previous is None:
        previous = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix).contiguous()
    U = previous
    return Eigendecomposition(U, rayleigh(matrix, U).nan_to_num(0.0, 0.0, 0.0).clamp(min=0), "kept")


def is_eigendecomposition(matrix: Tensor, U: Tensor, values: Tensor) -> bool:
    """Check that A = U S U^T and U U^T = 1 hold to working precision, and all is finite (one synchronisation).

    Both are tested on a few fixed random vectors z: for any error E, the expectation of ||E z||^2 is ||E||_F^2, and
    thin products are cheap.
    """
    d = matrix.shape[-1]
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(d, 8, generator=generator, dtype=torch.float64, device="cpu").to(matrix)
    y = U.mT @ z
    residual = (matrix @ z - U @ (values[..., None] * y)).norm(dim=(-2, -1)) / 8**0.5
    drift = (U @ y - z).norm(dim=(-2, -1)) / 8**0.5
    tolerance = 1e3 * torch.finfo(matrix.dtype).eps
    bound = matrix.norm(dim=(-2, -1)) * tolerance + torch.finfo(matrix.dtype).tiny
    return bool(((residual <= bound) & (drift <= tolerance * d**0.5)).all())


def rayleigh(matrix: Tensor, U: Tensor) -> Tensor:
    """Return diag(U^T A U), ``[G, D]``: Rayleigh quotients in a basis that need not be A's eigenbasis."""
    return ((matrix @ U) * U).sum(-2)


def off_diagonal_residual(matrix: Tensor, U: Tensor) -> Tensor:
    """Return ||offdiag(U^T A U)|| / ||A|| per group: how far the basis has drifted from A's eigenbasis."""
    largest = matrix.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    matrix = matrix / largest  # otherwise squares of its entries might overflow
    return _off_diagonal(U.mT @ matrix @ U, matrix)


def _off_diagonal(rotated: Tensor, matrix: Tensor) -> Tensor:
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    size: Tensor = matrix.norm(dim=(-2, -1)).clamp(min=torch.finfo(matrix.dtype).tiny)
    residual: Tensor = off.norm(dim=(-2, -1)) / size
    return residual


def _plain(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, U = torch.linalg.eigh(matrix.double() if _double_is_cheap(matrix.device) else matrix)
    return values, U


@functools.lru_cache
def _double_is_cheap(device: torch.device) -> bool:
    """Return whether float64 solves are as fast as float32 (faster at sizes 200 to 700), as on data-centre GPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in {(8, 0), (9, 0), (10, 0)}


def _shifted(matrix: Tensor) -> tuple[Tensor, Tensor]:
    shift = 1e-6 * matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    values, U = torch.linalg.eigh(matrix + torch.diag_embed(shift.expand(-1, matrix.shape[-1])))
    return values - shift, U


def _double(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return _plain(matrix.double())


def _other_device(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return _plain(matrix.double().to("cpu" if matrix.is_cuda else "cuda"))


_LADDER = (("plain", _plain), ("shifted", _shifted), ("float64", _double), ("other_device", _other_device))


# --- a warm refresh ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmBasis:
    """The result of orthogonal iteration.

    Attributes:
        U: The new bases, ``[G, D, D]``, orthonormal.
        values: diag(U^T A U), ``[G, D]``, clamped at zero.
        residual: ||offdiag(U^T A U)|| / ||A||, ``[G]``.
        good: Whether the iteration stayed finite, ``[G]``; otherwise U is the initial basis.
    """

    U: Tensor
    values: Tensor
    residual: Tensor
    good: Tensor


def orthogonal_iteration(
    matrix: Tensor, U: Tensor, iterations: int = 1, near: bool = False, values: bool = True
) -> WarmBasis:
    """Rotate bases towards the eigenvectors of ``[G, D, D]``: U <- Q with A U = Q R, without synchronising.

    Eigenvalues are in ascending order, as from ``torch.linalg.eigh``, so QR runs from the last column to the first. A
    shift of the diagonal preserves directions in A's null space.

    Args:
        matrix: A.
        U: The initial bases.
        iterations: The number of iterations.
        near: Whether the bases are near A's eigenbasis, so that one pass of Cholesky QR suffices on a GPU.
        values: Whether to compute eigenvalues in the new bases. Otherwise they are those of the last iteration's
            initial bases, which come for free, and the residual is estimated from some columns.
    """
    double = _double_is_cheap(matrix.device)
    A = matrix.double() if double else matrix
    A = (A + A.mT).div_(2)
    shift = (1e-7 if double else 1e-5) * A.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None]
    Q = U.to(A)
    found = None
    for _ in range(iterations):
        Y = torch.baddbmm(shift[:, None] * Q, A, Q)
        found = None if values else (Y * Q).sum(-2) - shift
        Y = Y.flip(-1)
        mend = not near or matrix.dtype == torch.float64
        Q = (_cholesky_qr(Y, 1 if near else 2, mend) if double else torch.linalg.qr(Y)[0]).flip(-1)
    good = torch.isfinite(torch.linalg.vector_norm(Q, dim=(-2, -1)))
    Q = torch.where(good[:, None, None], Q, U.to(A))
    size = torch.linalg.vector_norm(A, dim=(-2, -1))
    if found is None:
        found = rayleigh(A, Q)
        # U preserves the norm, so the off-diagonal part is what the diagonal leaves of it.
        off = (size.square() - found.square().sum(-1)).clamp_(min=0).sqrt_()
    else:
        off = _off_diagonal_of_columns(A, Q)
    residual = off / size.clamp(min=torch.finfo(A.dtype).tiny)
    found = found.nan_to_num(0.0, 0.0, 0.0).clamp_(min=0)
    return WarmBasis(Q.to(matrix), found.to(matrix), residual.to(matrix), good)


def _off_diagonal_of_columns(A: Tensor, U: Tensor, top: int = 64, others: int = 64) -> Tensor:
    """Estimate ||offdiag(U^T A U)|| from the last columns, which matter most, and a sample of the others; ``[G]``."""
    columns = U.shape[-1]
    stride = max(1, -(-(columns - top) // others))
    rest = max(0, columns - top)
    some = torch.cat([U[..., rest:], U[..., :rest:stride]], -1)
    product = A @ some
    squares = (product.square().sum(-2) - (product * some).sum(-2).square()).clamp_(min=0)
    last = columns - rest
    return (squares[:, :last].sum(-1) + stride * squares[:, last:].sum(-1)).sqrt_()


def _cholesky_qr(Y: Tensor, passes: int = 2, mend: bool = True) -> Tensor:
    """Return the Q of Y = Q R from the Cholesky factor of Y^T Y, twice as fast as Householder QR on a GPU.

    Columns are first normalised, which improves the conditioning and does not change Q. A first pass with a shifted
    product helps if they are nearly dependent, as while a running average still gains rank. A Newton step restores
    orthogonality lost in float64; Q is NaN if too much was lost.

    Args:
        Y: ``[G, D, D]``, float64.
        passes: One or two.
        mend: Whether to take the Newton step. Without it, the loss of orthogonality, tested on a few vectors, must be
            below float32's precision.
    """
    eye = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device)
    for shift in (1e-12, 0.0)[-passes:]:
        Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True)
        gram = Y.mT @ Y
        gram.diagonal(dim1=-2, dim2=-1).add_(shift)
        Y, info = _divided_by_factor(Y, gram)
    if mend:
        gram = Y.mT @ Y
        lost, most = (gram - eye).abs().amax((-2, -1)), 1e-3
        Y = torch.baddbmm(Y, Y, gram, beta=1.5, alpha=-0.5)
    else:
        # Fixed vectors, as random ones could not be drawn in a CUDA graph.
        z = torch.cos(torch.arange(8 * len(eye), dtype=Y.dtype, device=Y.device).square()).view(-1, 8)
        lost, most = (Y.mT @ (Y @ z) - z).abs().amax((-2, -1)), 1e-6
    return Y.masked_fill_(((info != 0) | ~(lost < most))[:, None, None], float("nan"))


def _divided_by_factor(Y: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return Y R^-1 with R^T R the Cholesky factorisation of ``gram``, and info (0 on success), ``[G]``.

    It proceeds by block columns, so that nearly all work is matrix products: at a thousand columns, cuSOLVER's batched
    factorisations and triangular solves are several times slower.
    """
    columns = Y.shape[-1]
    L, Q = torch.empty_like(gram), torch.empty_like(Y)
    info = torch.zeros(len(Y), dtype=torch.int32, device=Y.device)
    for start in range(0, columns, PANEL):
        here, end = slice(start, start + PANEL), min(start + PANEL, columns)
        left, panel, column = L[:, here, :start].mT, gram[:, start:, here], Y[..., here]
        if start:
            panel = torch.baddbmm(panel, L[:, start:, :start], left, alpha=-1)
            column = torch.baddbmm(column, Q[..., :start], left, alpha=-1)
        corner, failed = torch.linalg.cholesky_ex(panel[:, : end - start])
        inverse = _inverse(corner).mT
        torch.matmul(column, inverse, out=Q[..., here])
        L[:, here, here] = corner
        torch.matmul(panel[:, end - start :], inverse, out=L[:, end:, here])
        info = info | failed
    return Q, info


def _inverse(L: Tensor) -> Tensor:
    """Return the inverses of small lower triangular matrices.

    torch solves up to eight of them one by one; a batch of nine takes a quarter of that time (H200, 256 columns).
    """
    count, eye = len(L), torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    several = L.repeat(-(-9 // count), 1, 1) if L.is_cuda and 2 < count < 9 else L
    inverses: Tensor = torch.linalg.solve_triangular(several, eye.expand_as(several), upper=False)
    return inverses[:count]
