"""Carrying second moments to a new basis, and a solver that does not give up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ekfac.curvature.eigenbasis import (
    Basis,
    carry_moment,
    carry_second_moment,
)
from ekfac.curvature.eigensolvers import eigh_with_fallback, is_eigendecomposition
from ekfac.curvature.layers.shapes import BlockShape
from oracle import carried


def orthogonal(groups: int, size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(groups, size, size, dtype=torch.float64))[0]


def basis(shape: BlockShape, u_a: Tensor | None, u_b: Tensor | None) -> Basis:
    ones = torch.ones(shape.groups, 1, dtype=torch.float64)
    return Basis(shape, u_a, u_b, ones.expand(-1, shape.inputs), ones.expand(-1, shape.out))


def over_columns(u: Tensor, shape: BlockShape) -> Tensor:
    last = [torch.ones(1, 1, dtype=u.dtype)] if shape.extra else []
    return torch.stack([torch.block_diag(*[g] * shape.taps, *last) for g in u])


shapes = st.builds(
    BlockShape,
    groups=st.integers(1, 3),
    out=st.integers(1, 4),
    inputs=st.integers(1, 4),
    taps=st.integers(1, 3),
    extra=st.integers(0, 1),
)


@given(shape=shapes, seed=st.integers(0, 999))
def test_carrying_s(shape: BlockShape, seed: int) -> None:
    torch.manual_seed(seed)
    g, i, o = shape.groups, shape.inputs, shape.out
    old, new = ((orthogonal(g, i), orthogonal(g, o)) for _ in range(2))
    s = torch.rand(g, o, shape.columns, dtype=torch.float64)
    got = carry_second_moment(s, basis(shape, *old), basis(shape, *new))

    dense = carried(s, (over_columns(old[0], shape), old[1]), (over_columns(new[0], shape), new[1]))
    torch.testing.assert_close(got, dense, rtol=1e-10, atol=1e-12)
    assert (got >= 0).all()
    torch.testing.assert_close(got.sum((1, 2)), s.sum((1, 2)), rtol=1e-10, atol=1e-12)

    unchanged = carry_second_moment(s, basis(shape, *old), basis(shape, *old))
    torch.testing.assert_close(unchanged, s, rtol=1e-10, atol=1e-12)

    # The old basis in another order and with other signs, s in the same order: nothing changes.
    order, signs = torch.randperm(o), torch.where(torch.rand(o) < 0.5, -1.0, 1.0).double()
    shuffled = basis(shape, old[0], old[1][..., order] * signs)
    torch.testing.assert_close(
        carry_second_moment(s[:, order], shuffled, basis(shape, *new)), got, rtol=1e-10, atol=1e-12
    )

    # The new basis in another order: the same numbers in that order, whatever the signs.
    ordered = basis(shape, new[0], new[1][..., order] * signs)
    torch.testing.assert_close(
        carry_second_moment(s, basis(shape, *old), ordered), got[:, order], rtol=1e-10, atol=1e-12
    )


@given(shape=shapes, seed=st.integers(0, 999), sides=st.sampled_from(["A", "B", "neither"]))
def test_a_diagonal_side_is_the_identity(shape: BlockShape, seed: int, sides: str) -> None:
    torch.manual_seed(seed)
    g, i, o = shape.groups, shape.inputs, shape.out
    eye_a, eye_b = (torch.eye(k, dtype=torch.float64).expand(g, k, k) for k in (i, o))
    old, new = ((orthogonal(g, i), orthogonal(g, o)) for _ in range(2))
    if sides in ("A", "neither"):
        old, new = (eye_a, old[1]), (eye_a, new[1])
    if sides in ("B", "neither"):
        old, new = (old[0], eye_b), (new[0], eye_b)
    s = torch.rand(g, o, shape.columns, dtype=torch.float64)
    without = [
        basis(shape, None if sides in ("A", "neither") else a, None if sides in ("B", "neither") else b)
        for a, b in (old, new)
    ]
    with_eye = [basis(shape, a, b) for a, b in (old, new)]
    for carry in (carry_second_moment, carry_moment):
        torch.testing.assert_close(carry(s, *without), carry(s, *with_eye), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(without[0].project(s), with_eye[0].project(s), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(without[0].unproject(s), with_eye[0].unproject(s), rtol=1e-12, atol=1e-13)


@given(shape=shapes, seed=st.integers(0, 999))
def test_moments_turn_with_the_basis(shape: BlockShape, seed: int) -> None:
    torch.manual_seed(seed)
    g = shape.groups
    old, new = (basis(shape, orthogonal(g, shape.inputs), orthogonal(g, shape.out)) for _ in range(2))
    m = torch.randn(g, shape.out, shape.columns, dtype=torch.float64)
    # The same matrix in parameter space, whichever basis its coordinates are written in.
    torch.testing.assert_close(new.unproject(carry_moment(m, old, new)), old.unproject(m), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(old.unproject(old.project(m)), m, rtol=1e-10, atol=1e-12)


def test_projection_is_the_papers_way_round() -> None:
    """U_B^T G U_A with bases that are not symmetric, so that a transposed one would show."""
    torch.manual_seed(0)
    shape = BlockShape(groups=1, out=3, inputs=4)
    u_a, u_b = orthogonal(1, 4), orthogonal(1, 3)
    g = torch.randn(1, 3, 4, dtype=torch.float64)
    projected = basis(shape, u_a, u_b).project(g)
    torch.testing.assert_close(projected[0], u_b[0].T @ g[0] @ u_a[0], rtol=1e-12, atol=1e-13)
    assert not torch.allclose(projected[0], u_b[0] @ g[0] @ u_a[0].T)


# ------------------------------------------------------------------------------------------------ the solver


def covariance(size: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(rank, size, dtype=torch.float64)
    x[:, : size // 4] = 0  # dead inputs make null rows
    return (x.T @ x / rank).to(dtype)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "rank"), [(1, 1), (2, 1), (40, 7), (100, 300)])
def test_solver_decomposes_and_clamps(size: int, rank: int, dtype: torch.dtype) -> None:
    matrix = covariance(size, rank, dtype)
    found = eigh_with_fallback(matrix)
    assert is_eigendecomposition(matrix, found.U, found.values)
    assert (found.values >= 0).all()
    rebuilt = found.U @ torch.diag_embed(found.values) @ found.U.mT
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(rebuilt, matrix, rtol=0, atol=tolerance * float(matrix.norm()))


@pytest.mark.parametrize("failure", ["raises", "NaN", "wrong"])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_solver_climbs_past_failures(monkeypatch: pytest.MonkeyPatch, failure: str, failures: int) -> None:
    """The first answers raise, are NaN, or are wrong without a word.

    The next rung answers, down to the kept basis.
    """
    real, calls = torch.linalg.eigh, []

    def broken(matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(matrix)
        if len(calls) > failures:
            return real(matrix)
        if failure == "raises":
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        values, vectors = real(matrix)
        return (values, vectors * float("nan")) if failure == "NaN" else (values, vectors.mT)

    monkeypatch.setattr(torch.linalg, "eigh", broken)
    matrix = covariance(12, 30)
    previous = torch.linalg.qr(torch.randn(1, 12, 12))[0]
    found = eigh_with_fallback(matrix, previous)
    assert found.rung != "plain"
    assert torch.isfinite(found.U).all() and torch.isfinite(found.values).all()
    if found.rung == "kept":
        assert torch.equal(found.U, previous)
        expected = torch.diagonal(previous.mT @ matrix @ previous, dim1=-2, dim2=-1).clamp(min=0)
        torch.testing.assert_close(found.values, expected)
    else:
        assert is_eigendecomposition(matrix, found.U, found.values)


def test_solver_keeps_the_old_basis_of_a_factor_that_is_not_finite() -> None:
    matrix = covariance(5, 9)
    matrix[0, 2, 3] = float("inf")
    previous = torch.linalg.qr(torch.randn(1, 5, 5))[0]
    found = eigh_with_fallback(matrix, previous)
    assert found.rung == "kept" and torch.equal(found.U, previous) and torch.isfinite(found.values).all()


def test_solver_takes_the_symmetric_part() -> None:
    matrix = covariance(6, 20, torch.float64)
    skew = torch.randn(1, 6, 6, dtype=torch.float64)
    found = eigh_with_fallback(matrix + skew - skew.mT)
    assert is_eigendecomposition(matrix, found.U, found.values)


@pytest.mark.parametrize("size", [2, 30, 400])
@pytest.mark.parametrize("fault", ["two columns exchanged", "one column a little long", "one turned a little", "NaN"])
def test_one_wrong_eigenvector_is_noticed(size: int, fault: str) -> None:
    matrix = covariance(size, 2 * size)
    values, U = torch.linalg.eigh(matrix)
    assert is_eigendecomposition(matrix, U, values)
    if fault == "two columns exchanged":
        U[..., [0, -1]] = U[..., [-1, 0]]
    elif fault == "one column a little long":
        U[..., -1] *= 1.05
    elif fault == "one turned a little":
        U[..., -1] += 0.05 * U[..., 0]
    else:
        U[0, size // 2, -1] = float("nan")
    assert not is_eigendecomposition(matrix, U, values)
