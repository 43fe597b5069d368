"""The blocks of a block-diagonal matrix: their interface, and the two structured kinds.

Every part is U diag(values) U^T with an orthogonal U, so products, solves, powers, roots and samples are all functions
of the eigenvalues, :meth:`Part.apply`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from ekfac.curvature.eigenbasis import Basis, rotate_columns, rotate_rows

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Part(ABC):
    """A symmetric positive semi-definite matrix over the parameters of one layer (or of all of them).

    Vectors are rows ``[K, p]``, the part's parameters concatenated.

    Attributes:
        name: The layer's name.
        parameters: Names of its parameters.
    """

    name: str
    parameters: tuple[str, ...]

    @property
    @abstractmethod
    def numel(self) -> int:
        """p, the number of parameters."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return all p eigenvalues, in the order of the basis."""

    @abstractmethod
    def apply(self, rows: Tensor, f: Function) -> Tensor:
        """Return U diag(f(values)) U^T v for every row v."""

    @abstractmethod
    def mapped(self, f: Function) -> Part:
        """Return the same basis with the eigenvalues f(values)."""

    @abstractmethod
    def project(self, rows: Tensor) -> Tensor:
        """Return U^T v for every row v: coordinates in the order of ``values``."""

    @abstractmethod
    def unproject(self, rows: Tensor) -> Tensor:
        """Return U x for every row x."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the p diagonal entries in parameter space."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by name."""

    def matmul(self, rows: Tensor) -> Tensor:
        """Multiply every row by the matrix."""
        return self.apply(rows, lambda values: values)

    def trace(self) -> Tensor:
        """Sum the eigenvalues."""
        return self.values().sum()

    def square_norm(self) -> Tensor:
        """Return the squared Frobenius norm."""
        return self.values().square().sum()

    def dense(self) -> Tensor:
        """Return the matrix ``[p, p]``."""
        reference = self.values()
        matrix = self.matmul(torch.eye(self.numel, dtype=reference.dtype, device=reference.device))
        return (matrix + matrix.mT) / 2

    def coordinate_shape(self) -> tuple[int, ...]:
        """Return the shape of the coordinates that ``project`` returns in a dict."""
        return (self.numel,)

    def cut(self, parameters: tuple[str, ...], places: Tensor) -> Part | None:
        """Restrict the part to some of its parameters, at ``places``; return None if it cannot be split."""
        return None

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast all tensors, like ``Tensor.to``."""
        moved: dict[str, Any] = {name: t.to(*args, **kwargs) for name, t in self.tensors().items()}
        return replace(self, **moved)


@dataclass(frozen=True, eq=False)
class DiagonalPart(Part):
    """A diagonal matrix."""

    entries: Tensor

    @property
    def numel(self) -> int:
        return len(self.entries)

    def values(self) -> Tensor:
        return self.entries

    def apply(self, rows: Tensor, f: Function) -> Tensor:
        return rows * f(self.entries)

    def mapped(self, f: Function) -> Part:
        return replace(self, entries=f(self.entries))

    def project(self, rows: Tensor) -> Tensor:
        return rows

    def unproject(self, rows: Tensor) -> Tensor:
        return rows

    def diagonal(self) -> Tensor:
        return self.entries

    def cut(self, parameters: tuple[str, ...], places: Tensor) -> Part:
        return replace(self, parameters=parameters, entries=self.entries[places.to(self.entries.device)])

    def tensors(self) -> dict[str, Tensor]:
        return {"entries": self.entries}


@dataclass(frozen=True, eq=False)
class EigenPart(Part):
    """(U_B x U_A) diag(s) (U_B x U_A)^T: KFAC with s = S_B x S_A, EKFAC with s = s*.

    Attributes:
        basis: U_A, U_B and the eigenvalues S_A, S_B of the factors.
        s: ``[G, O, C]``.
        order: The index into the flat vector of each entry of ``[G, O, C]``; None if the orders agree.
    """

    basis: Basis
    s: Tensor
    order: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.s.numel()

    def values(self) -> Tensor:
        return self.s.reshape(-1)

    def apply(self, rows: Tensor, f: Function) -> Tensor:
        return self.unproject(self.project(rows) * f(self.values()))

    def mapped(self, f: Function) -> Part:
        return replace(self, s=f(self.s))

    def project(self, rows: Tensor) -> Tensor:
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        return self._rotated(rows, self.basis.U_A, self.basis.U_B)

    def unproject(self, rows: Tensor) -> Tensor:
        U_A, U_B = (None if U is None else U.mT for U in (self.basis.U_A, self.basis.U_B))
        rotated = self._rotated(rows, U_A, U_B)
        if self.order is None:
            return rotated
        return torch.empty_like(rotated).index_copy_(1, self.order.long(), rotated)

    def _rotated(self, rows: Tensor, U_A: Tensor | None, U_B: Tensor | None) -> Tensor:
        """Return ``U_B^T X U_A`` for a stack of X."""
        shape, k = self.basis.shape, len(rows)
        matrices = rows.reshape(k, shape.groups, shape.out, shape.columns)
        # Multiply all rows of the stack by U_A in one product per group.
        by_group = matrices.transpose(0, 1).reshape(shape.groups, k * shape.out, shape.columns)
        by_group = rotate_columns(by_group, U_A, shape)
        matrices = by_group.reshape(shape.groups, k, shape.out, shape.columns).transpose(0, 1)
        return rotate_rows(matrices, U_B).reshape(k, -1)

    def diagonal(self) -> Tensor:
        """Return (U_B * U_B) s (U_A * U_A)^T, in the parameters' order."""
        U_A, U_B = (None if U is None else U.square().mT for U in (self.basis.U_A, self.basis.U_B))
        return self._in_parameter_order(rotate_columns(rotate_rows(self.s, U_B), U_A, self.basis.shape).reshape(-1))

    def _in_parameter_order(self, entries: Tensor) -> Tensor:
        return entries if self.order is None else torch.empty_like(entries).index_copy_(0, self.order.long(), entries)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A = U_A S_A U_A^T and B = U_B S_B U_B^T; a diagonal side is a vector."""
        b = self.basis
        A, B = (S if U is None else (U * S[:, None, :]) @ U.mT for U, S in ((b.U_A, b.S_A), (b.U_B, b.S_B)))
        return A, B

    def coordinate_shape(self) -> tuple[int, ...]:
        return tuple(self.s.shape)

    def tensors(self) -> dict[str, Tensor]:
        b = self.basis
        named = {"s": self.s, "order": self.order, "U_A": b.U_A, "U_B": b.U_B, "S_A": b.S_A, "S_B": b.S_B}
        return {name: t for name, t in named.items() if t is not None}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        s = self.s.to(*args, **kwargs)
        order = None if self.order is None else self.order.to(s.device)
        return replace(self, basis=self.basis.to(s), s=s, order=order)
