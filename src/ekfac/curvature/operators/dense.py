"""Exact parts: a dense matrix, or the gradients themselves if they are fewer than the parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ekfac.curvature.eigensolvers import eigh_with_fallback
from ekfac.curvature.operators.parts import Function, Part


@dataclass(frozen=True, eq=False)
class DensePart(Part):
    """A matrix ``[p, p]``; its eigenvectors are computed when first needed."""

    matrix: Tensor

    @property
    def numel(self) -> int:
        return len(self.matrix)

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        solved = eigh_with_fallback(self.matrix[None])
        return solved.values[0], solved.U[0]

    def values(self) -> Tensor:
        return self._eigen[0]

    def apply(self, rows: Tensor, f: Function) -> Tensor:
        values, U = self._eigen
        return ((rows @ U) * f(values)) @ U.mT

    def matmul(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix

    def mapped(self, f: Function) -> Part:
        values, U = self._eigen
        return replace(self, matrix=(U * f(values)) @ U.mT)

    def project(self, rows: Tensor) -> Tensor:
        return rows @ self._eigen[1]

    def unproject(self, rows: Tensor) -> Tensor:
        return rows @ self._eigen[1].mT

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def trace(self) -> Tensor:
        return self.matrix.trace()

    def square_norm(self) -> Tensor:
        return self.matrix.square().sum()

    def dense(self) -> Tensor:
        return self.matrix

    def cut(self, parameters: tuple[str, ...], places: Tensor) -> Part:
        places = places.to(self.matrix.device)
        return replace(self, parameters=parameters, matrix=self.matrix[places][:, places])

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}


@dataclass(frozen=True, eq=False)
class LowRankPart(Part):
    """U diag(inside) U^T + rest (1 - U U^T), with r orthonormal columns U ``[p, r]``."""

    U: Tensor
    inside: Tensor
    rest: Tensor

    @property
    def numel(self) -> int:
        return len(self.U)

    def values(self) -> Tensor:
        return torch.cat([self.inside, self.rest.expand(self.numel - len(self.inside))])

    def apply(self, rows: Tensor, f: Function) -> Tensor:
        outside = f(self.rest)
        return rows * outside + ((rows @ self.U) * (f(self.inside) - outside)) @ self.U.mT

    def mapped(self, f: Function) -> Part:
        return replace(self, inside=f(self.inside), rest=f(self.rest))

    @cached_property
    def _whole_basis(self) -> Tensor:
        """U, completed by orthonormal columns to a square matrix."""
        Q, _ = torch.linalg.qr(self.U, mode="complete")
        return torch.cat([self.U, Q[:, len(self.inside) :]], 1)

    def project(self, rows: Tensor) -> Tensor:
        return rows @ self._whole_basis

    def unproject(self, rows: Tensor) -> Tensor:
        return rows @ self._whole_basis.mT

    def diagonal(self) -> Tensor:
        return self.rest + self.U.square() @ (self.inside - self.rest)

    def cut(self, parameters: tuple[str, ...], places: Tensor) -> Part:
        places = places.to(self.U.device)
        rows = self.U[places]
        eye = torch.eye(len(places), dtype=rows.dtype, device=rows.device)
        return DensePart(self.name, parameters, (rows * (self.inside - self.rest)) @ rows.mT + self.rest * eye)

    def tensors(self) -> dict[str, Tensor]:
        return {"U": self.U, "inside": self.inside, "rest": self.rest}


@dataclass(frozen=True, eq=False)
class RowsPart(Part):
    """R^T R, given by its rows R ``[r, p]`` with r < p: per-example gradients divided by sqrt(N).

    Norm, trace and eigenvalues come from the smaller Gram matrix R R^T, which has the same nonzero eigenvalues.
    Everything else comes from the singular vectors of R.
    """

    rows: Tensor

    @property
    def numel(self) -> int:
        return self.rows.shape[1]

    @cached_property
    def gram(self) -> Tensor:
        """R R^T in float64, computed in chunks of columns."""
        r, p = self.rows.shape
        total = torch.zeros(r, r, dtype=torch.float64, device=self.rows.device)
        width = max(1, 2**22 // max(1, r))
        for start in range(0, p, width):
            piece = self.rows[:, start : start + width].double()
            total.addmm_(piece, piece.mT)
        return total

    @cached_property
    def spectral(self) -> LowRankPart:
        """The same matrix in terms of its eigenvectors."""
        # R^T = Q T, then an SVD of the small T: cheaper than an SVD of R, and as accurate.
        Q, T = torch.linalg.qr(self.rows.mT)
        V, singular, _ = torch.linalg.svd(T)
        zero = torch.zeros((), dtype=singular.dtype, device=singular.device)
        return LowRankPart(self.name, self.parameters, Q @ V, singular.square(), zero)

    @cached_property
    def _values(self) -> Tensor:
        values = torch.linalg.eigvalsh(self.gram).clamp(min=0).to(self.rows.dtype).flip(0)
        return torch.cat([values, values.new_zeros(self.numel - len(values))])

    def values(self) -> Tensor:
        return self._values

    def apply(self, rows: Tensor, f: Function) -> Tensor:
        return self.spectral.apply(rows, f)

    def matmul(self, rows: Tensor) -> Tensor:
        return (rows @ self.rows.mT) @ self.rows

    def mapped(self, f: Function) -> Part:
        return self.spectral.mapped(f)

    def project(self, rows: Tensor) -> Tensor:
        return self.spectral.project(rows)

    def unproject(self, rows: Tensor) -> Tensor:
        return self.spectral.unproject(rows)

    def diagonal(self) -> Tensor:
        return self.rows.square().sum(0)

    def trace(self) -> Tensor:
        return self.rows.square().sum()

    def square_norm(self) -> Tensor:
        return self.gram.square().sum().to(self.rows.dtype)

    def dense(self) -> Tensor:
        return self.rows.mT @ self.rows

    def cut(self, parameters: tuple[str, ...], places: Tensor) -> Part:
        rows = self.rows[:, places.to(self.rows.device)]
        if rows.shape[0] < rows.shape[1]:
            return replace(self, parameters=parameters, rows=rows)
        return DensePart(self.name, parameters, rows.mT @ rows)

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.rows}


class SecondMoment:
    """Accumulates g g^T over rows g: stores the rows while they are fewer than p, then the matrix.

    Args:
        name: The layer's name.
        parameters: Names of its parameters.
        numel: p.
    """

    def __init__(self, name: str, parameters: tuple[str, ...], numel: int) -> None:
        self.name = name
        self.parameters = parameters
        self.numel = numel
        self._rows: list[Tensor] = []
        self._count = 0
        self._matrix: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add rows ``[some, p]``."""
        if self._matrix is None:
            self._rows.append(rows)
            self._count += len(rows)
            if self._count < self.numel:
                return
            self._matrix = rows.new_zeros(self.numel, self.numel)
            waiting, self._rows = self._rows, []
        else:
            waiting = [rows]
        for piece in waiting:
            self._matrix.addmm_(piece.mT, piece)

    def part(self, n: int) -> Part:
        """Return the mean over n examples as a part."""
        if self._matrix is not None:
            return DensePart(self.name, self.parameters, self._matrix / n)
        return RowsPart(self.name, self.parameters, torch.cat(self._rows) / n**0.5)
