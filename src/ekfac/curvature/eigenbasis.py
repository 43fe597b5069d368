"""The Kronecker-factored eigenbasis: projecting into it, and carrying state over to a new one.

A = U_A S_A U_A^T, B = U_B S_B U_B^T. Into the basis: ``U_B^T G U_A``; back: ``U_B X U_A^T``.
If a side is kept diagonal, its U is the identity and is stored as ``None``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ekfac.curvature.layers.shapes import BlockShape

#: Multiplies ``[G, M, K]`` by ``[G, K, N]``.
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Basis:
    """A block's eigenbasis U_A, U_B with the eigenvalues S_A ``[G, I]`` and S_B ``[G, O]``."""

    shape: BlockShape
    U_A: Tensor | None
    U_B: Tensor | None
    S_A: Tensor
    S_B: Tensor
    #: The matrix product to use.
    times: Product = torch.matmul

    def project(self, matrix: Tensor) -> Tensor:
        """Return ``U_B^T G U_A``."""
        if self.U_A is not None and self.U_B is not None and self.shape.taps == 1 and not self.shape.extra:
            return self.times(self.times(self.U_B.mT, matrix), self.U_A)  # the general case, without its overhead
        return rotate_columns(rotate_rows(matrix, self.U_B, self.times), self.U_A, self.shape, self.times)

    def unproject(self, matrix: Tensor) -> Tensor:
        """Return ``U_B X U_A^T``."""
        if self.U_A is not None and self.U_B is not None and self.shape.taps == 1 and not self.shape.extra:
            return self.times(self.times(self.U_B, matrix), self.U_A.mT)
        U_A = None if self.U_A is None else self.U_A.mT
        U_B = None if self.U_B is None else self.U_B.mT
        return rotate_columns(rotate_rows(matrix, U_B, self.times), U_A, self.shape, self.times)

    def column_values(self) -> Tensor:
        """Return S_A for each of the C columns: repeated for every tap, 1 for the extra bias column."""
        values = self.S_A.repeat(1, self.shape.taps)
        return torch.cat([values, values.new_ones(values.shape[0], 1)], 1) if self.shape.extra else values

    def kronecker(self) -> Tensor:
        """Return S_B x S_A, the eigenvalues that KFAC assigns to the basis, ``[G, O, C]``."""
        return self.S_B[:, :, None] * self.column_values()[:, None, :]

    def to(self, like: Tensor) -> Basis:
        """Convert the basis to the dtype and device of a tensor."""
        move = {k: None if t is None else t.to(like) for k, t in (("U_A", self.U_A), ("U_B", self.U_B))}
        return Basis(self.shape, move["U_A"], move["U_B"], self.S_A.to(like), self.S_B.to(like), self.times)


def rotate_rows(matrix: Tensor, U: Tensor | None, times: Product = torch.matmul) -> Tensor:
    """Return ``U^T X`` for X ``[G, O, C]``."""
    return matrix if U is None else times(U.mT, matrix)


def rotate_columns(matrix: Tensor, U: Tensor | None, shape: BlockShape, times: Product = torch.matmul) -> Tensor:
    """Return ``X U`` for X ``[G, rows, C]``: every tap is multiplied by U, the extra column is unchanged."""
    if U is None:
        return matrix
    if shape.taps == 1 and not shape.extra:
        return times(matrix, U)
    g, rows, _ = matrix.shape
    width = shape.taps * shape.inputs
    channels = matrix[..., :width].reshape(g, rows * shape.taps, shape.inputs)
    rotated = times(channels, U).reshape(g, rows, width)
    return torch.cat([rotated, matrix[..., width:]], dim=-1) if shape.extra else rotated


#: R_B and R_A.
Rotations = tuple[Tensor | None, Tensor | None]


def changes_of_basis(old: Basis, new: Basis) -> Rotations:
    """Return R_B and R_A from one basis to another."""
    return change_of_basis(old.U_B, new.U_B), change_of_basis(old.U_A, new.U_A)


def change_of_basis(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Return R = V^T U from the old basis U to the new basis V; None if they are the same."""
    if old is new:
        return None
    if old is None:
        return new.mT  # type: ignore[union-attr]
    return old if new is None else new.mT @ old


def carry_second_moment(s: Tensor, old: Basis, new: Basis, rotations: Rotations | None = None) -> Tensor:
    """Return the diagonal of the old approximation in the new basis: (R_B * R_B) s (R_A * R_A)^T.

    It is non-negative, preserves the sum, and does not depend on the order or signs of eigenvectors.
    """
    R_B, R_A = changes_of_basis(old, new) if rotations is None else rotations
    s = rotate_rows(s, None if R_B is None else R_B.square().mT)
    return rotate_columns(s, None if R_A is None else R_A.square().mT, old.shape)


def carry_moment(m: Tensor, old: Basis, new: Basis, rotations: Rotations | None = None) -> Tensor:
    """Transform a mean from the old basis to the new one: R_B m R_A^T."""
    R_B, R_A = changes_of_basis(old, new) if rotations is None else rotations
    return rotate_columns(rotate_rows(m, None if R_B is None else R_B.mT), None if R_A is None else R_A.mT, old.shape)
