"""Distances between two curvatures, and correlations of gradients in parameter space and in an eigenbasis.

If both matrices have the same blocks, they are compared block by block, in float64. A matrix given by its gradients is
never formed: with rows R, ||G||^2 = ||R R^T||^2 and <G, H> = sum over rows r of r^T H r.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from ekfac import checks
from ekfac.curvature.eigenbasis import carry_second_moment
from ekfac.curvature.operators.dense import DensePart, RowsPart
from ekfac.curvature.operators.operator import Curvature
from ekfac.curvature.operators.parts import DiagonalPart, EigenPart, Part
from ekfac.curvature.operators.precision import exactly

#: The number of vectors multiplied at once.
WIDTH = 256


@overload
def relative_error(G: Curvature, H: Curvature, *, by_layer: Literal[False] = False) -> Tensor: ...
@overload
def relative_error(G: Curvature, H: Curvature, *, by_layer: Literal[True]) -> dict[str, Tensor]: ...
@exactly
def relative_error(G: Curvature, H: Curvature, *, by_layer: bool = False) -> Tensor | dict[str, Tensor]:
    """Return ||G - H||_F / ||G||_F, where G is the reference.

    Args:
        G: The matrix that is approximated.
        H: The approximation.
        by_layer: Return a dict with the error of every block; both must have the same blocks.
    """
    pairs = _pairs(G, H)
    if by_layer:
        if pairs is None:
            raise ValueError(f"by_layer=True needs the same blocks: {', '.join(G.layers)} and {', '.join(H.layers)}")
        return {g.name: _ratio(_square_distance(g, h), g.square_norm()) for g, h in pairs}
    if pairs is None:
        return _ratio(_square_distance(_Whole(G), _Whole(H)), G.norm().double().square())
    distance = torch.stack([_square_distance(g, h) for g, h in pairs]).sum()
    return _ratio(distance, G.norm().double().square())


@overload
def spectrum_distance(G: Curvature, H: Curvature, *, by_layer: Literal[False] = False) -> Tensor: ...
@overload
def spectrum_distance(G: Curvature, H: Curvature, *, by_layer: Literal[True]) -> dict[str, Tensor]: ...
@exactly
def spectrum_distance(G: Curvature, H: Curvature, *, by_layer: bool = False) -> Tensor | dict[str, Tensor]:
    """Return the l2 distance of two matrices' sorted eigenvalues, block by block if they have the same blocks.

    Args:
        G: One matrix.
        H: The other.
        by_layer: Return a dict with the distance of every block; both must have the same blocks.
    """
    pairs = _pairs(G, H)
    if pairs is None:
        if by_layer:
            raise ValueError(f"by_layer=True needs the same blocks: {', '.join(G.layers)} and {', '.join(H.layers)}")
        return (G.eigenvalues().double() - H.eigenvalues().double().to(G.device)).square().sum().sqrt()
    distances: dict[str, Tensor] = {
        g.name: (_sorted(g) - _sorted(h).to(G.device)).square().sum().sqrt() for g, h in pairs
    }
    if by_layer:
        return distances
    return torch.stack(list(distances.values())).square().sum().sqrt()


@exactly
def correlation(
    G: Curvature, coordinates: Tensor | Iterable[int] | Mapping[str, Tensor], basis: Curvature | None = None
) -> Tensor:
    """Return G_ij / sqrt(G_ii G_jj) for chosen coordinates, in parameter space or in a basis.

    Args:
        G: The matrix, usually "full" or "block".
        coordinates: Indices into the flat vector; or a dict from the name of a parameter (with a basis, of a block) to
            indices within it.
        basis: An operator whose eigenbasis to use; None for parameter space.

    Returns:
        A matrix with ones on its diagonal, in the order of the coordinates. Rows of coordinates with a zero gradient
        are zero.
    """
    checks.instance("G", G, Curvature, "a Curvature")
    if basis is not None:
        checks.instance("basis", basis, Curvature, "a Curvature, or None")
    if basis is not None and basis.layout != G.layout:
        raise ValueError("basis and G are over different parameters")
    if isinstance(coordinates, Mapping):
        names = G.layout.names if basis is None else basis.layers
        sizes = G.layout.sizes if basis is None else [part.numel for part in basis.parts]
        starts = dict(zip(names, [sum(sizes[:i]) for i in range(len(sizes))], strict=True))
        unknown = [name for name in coordinates if name not in starts]
        if unknown:
            raise ValueError(
                f"coordinates has unknown names: {', '.join(map(str, unknown))}. Known: {', '.join(names)}"
            )
        found = [starts[name] + _places(at) for name, at in coordinates.items()]
        places = torch.cat(found or [_places(())])
    else:
        places = _places(coordinates)
    if places.numel() == 0 or int(places.min()) < 0 or int(places.max()) >= G.layout.numel:
        raise ValueError(f"coordinates must be whole numbers from 0 to {G.layout.numel - 1}, and not none")
    vectors = torch.zeros(G.layout.numel, len(places), dtype=G.dtype, device=G.device)
    vectors[places, torch.arange(len(places), device="cpu")] = 1
    if basis is not None:
        vectors = basis.unproject(vectors).to(vectors)
    moments = vectors.mT @ (G @ vectors)
    size = moments.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(size > 0, 1 / size, 0.0)
    return moments * inverse[:, None] * inverse


def _places(coordinates: Tensor | Iterable[int]) -> Tensor:
    """Return indices as a vector."""
    try:
        given = coordinates if isinstance(coordinates, Tensor) else list(coordinates)
        found = torch.as_tensor(given, device="cpu").reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"coordinates={coordinates!r} must be whole numbers: places in the flat vector") from error
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        raise TypeError(f"coordinates are of dtype {found.dtype} and must be whole numbers: places in the flat vector")
    return found


class _Whole:
    """A whole operator with the interface of a part."""

    def __init__(self, operator: Curvature) -> None:
        self.operator = operator
        self.numel = operator.layout.numel

    def matmul(self, rows: Tensor) -> Tensor:
        return (self.operator @ rows.mT).mT

    def square_norm(self) -> Tensor:
        return self.operator.norm().double().square()

    def diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def rows(self) -> RowsPart | None:
        only = self.operator.parts[0]
        return only if len(self.operator.parts) == 1 and isinstance(only, RowsPart) else None

    def to(self, dtype: torch.dtype) -> _Whole:
        return _Whole(self.operator.to(dtype))


def _pairs(G: Curvature, H: Curvature) -> list[tuple[Part, Part]] | None:
    """Pair blocks over the same parameters; None if the matrices have different blocks."""
    for name, one in (("G", G), ("H", H)):
        checks.instance(name, one, Curvature, "a Curvature")
    if G.layout != H.layout:
        raise ValueError("the two matrices are over different parameters")
    others = {part.parameters: part for part in H.parts}
    if len(G.parts) != len(H.parts) or any(part.parameters not in others for part in G.parts):
        return None
    return [(part, others[part.parameters]) for part in G.parts]


def _square_distance(g: Part | _Whole, h: Part | _Whole) -> Tensor:
    """Return ||g - h||^2 by the best method for the two representations."""
    for one, two in ((g, h), (h, g)):
        rows = one.rows() if isinstance(one, _Whole) else one
        if isinstance(rows, RowsPart):
            return _from_rows(rows, two)
    if isinstance(g, EigenPart) and isinstance(h, EigenPart):
        if g.basis.U_A is h.basis.U_A and g.basis.U_B is h.basis.U_B:
            return (g.s - h.s).double().square().sum()
        return _between_bases(g.to(torch.float64), h.to(torch.float64))
    for one, two in ((g, h), (h, g)):
        if isinstance(one, DiagonalPart):
            d, diagonal = one.entries.double(), two.diagonal().double()
            off = two.square_norm().double() - diagonal.square().sum()
            return (d - diagonal).square().sum() + off.clamp(min=0)
    return _by_columns(g, h)


def _from_rows(one: RowsPart, two: Part | _Whole) -> Tensor:
    exact = two.to(torch.float64)
    inner = torch.zeros((), dtype=torch.float64, device=one.rows.device)
    for piece in one.rows.split(WIDTH):
        piece = piece.double()
        inner += (piece * exact.matmul(piece)).sum()
    return one.gram.square().sum() - 2 * inner + exact.square_norm().double()


def _between_bases(g: EigenPart, h: EigenPart) -> Tensor:
    """Return ||g - h||^2 from diag(g) in h's basis, (R_B * R_B) s_g (R_A * R_A)^T with R the change of basis."""
    carried = carry_second_moment(g.s, g.basis, h.basis)
    # The distance of h from the diagonal of g in h's basis, plus the off-diagonal part of g.
    return (carried - h.s).square().sum() + (g.s.square().sum() - carried.square().sum()).clamp(min=0)


def _by_columns(g: Part | _Whole, h: Part | _Whole) -> Tensor:
    if isinstance(g, DensePart) and isinstance(h, DensePart):
        return (g.matrix.double() - h.matrix.double()).square().sum()
    g, h = g.to(torch.float64), h.to(torch.float64)
    device = g.diagonal().device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, g.numel, WIDTH):
        stop = min(start + WIDTH, g.numel)
        unit = torch.zeros(stop - start, g.numel, dtype=torch.float64, device=device)
        unit[:, start:stop] = torch.eye(stop - start, dtype=torch.float64, device=device)
        total += (g.matmul(unit) - h.matmul(unit)).square().sum()
    return total


def _ratio(square_distance: Tensor, square_norm: Tensor) -> Tensor:
    return (square_distance.clamp(min=0) / square_norm.to(square_distance)).sqrt()


def _sorted(part: Part) -> Tensor:
    return part.values().double().sort().values
