"""u^T G v with two fixed random vectors: a fingerprint of a gradient, cheap to compute from G or from h and delta.

It answers two questions, each with its own tolerance. May h and delta be used in place of G? Only if the fingerprints
agree up to rounding. Does G contain more than the layer's calls account for? Only if they differ by more than the least
precise arithmetic explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import sums_of_positions

#: Two sums count as equal up to this many units of rounding of their terms.
ROUNDING = 1e3
#: Relative differences explained by precision, by the parameters' dtype; float32 may mean TF32 or autocast.
EXPLAINED = {torch.float64: 1e-6, torch.float32: 5e-2}
EXPLAINED_IN_HALF = 0.2

Vectors = tuple[Tensor, Tensor]


def vectors_of(block: Block) -> Vectors:
    """Return u and v of a block, ``[G, O]`` and ``[G, C]``."""
    s = block.shape
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "device": "cpu"}
    u = torch.randn(s.groups, s.out, **options)
    v = torch.randn(s.groups, s.columns, **options)
    return u.to(block.key.device, block.dtype), v.to(block.key.device, block.dtype)


def of_gradient(block: Block, gradients: Sequence[Tensor], vectors: Vectors) -> Tensor:
    """Return u^T G v of gradients in the order of the block's parameters."""
    given = {role: g.to(block.dtype) for role, g in zip(block.parameters, gradients, strict=True)}
    return block.layer.fingerprint(given, *vectors)


def of_calls(block: Block, calls: Sequence[Call], n: int, memory: int, vectors: Vectors) -> Tensor:
    """Return u^T G v of the gradient from a layer's calls, and the size of its terms, as ``[2]``."""
    u, v = vectors
    total = torch.zeros(2, dtype=block.dtype, device=block.key.device)
    with factors.full_precision(block.key.device):
        for d, a in _factors_of_terms(block, calls, n, memory, u, v):
            product = (d * a).reshape(-1)
            total = total + torch.stack([product.sum(), product.norm()])
    return total


def _factors_of_terms(
    block: Block, calls: Sequence[Call], n: int, memory: int, u: Tensor, v: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield delta·u and h·v of all positions."""
    if block.layer.scattered:
        yield block.layer.probe_of_calls(calls, v, u)
        return
    for h, delta in sums_of_positions(block, calls, n, memory):
        yield block.layer.probe(h, delta, v, u)


def of_rows(h: Tensor, delta: Tensor, vectors: Vectors) -> tuple[Tensor, Tensor]:
    """Return u^T G v of G = delta^T h, h ``[G, M, C]`` and delta ``[G, M, O]``, and the sum of its terms' sizes."""
    u, v = vectors
    terms = torch.einsum("gmo,go->gm", delta, u) * torch.einsum("gmc,gc->gm", h, v)
    return terms.sum(), terms.abs().sum()


def same(one: Tensor, other: Tensor, size: Tensor) -> bool:
    """Return whether two fingerprints agree up to rounding; ``size`` is the sum of the terms' sizes."""
    return bool((one - other).abs() <= ROUNDING * torch.finfo(one.dtype).eps * size)


def of_gradient_with_size(block: Block, gradients: Sequence[Tensor], vectors: Vectors) -> Tensor:
    """Return u^T G v of gradients in the order of the block's parameters, and the length of G, as ``[2]``."""
    length = torch.stack([g.double().norm() for g in gradients]).norm()
    return torch.stack([of_gradient(block, gradients, vectors).double(), length])


def differs(block: Block, of_gradient: Tensor, of_calls: Tensor) -> bool:
    """Return whether a gradient differs from what its layer's calls account for by more than precision explains.

    Args:
        block: The block.
        of_gradient: The result of :func:`of_gradient_with_size`.
        of_calls: The result of :func:`of_calls`.
    """
    dtypes = {p.dtype for p in block.parameters.values()}
    half = not dtypes <= set(EXPLAINED)
    if half and block.layer.rough_in_half:
        return False
    (found, length), (captured, size) = of_gradient.tolist(), of_calls.tolist()
    # u^T G v is about as large as G, which bounds its rounding error too.
    size = max(size, abs(captured), abs(found), length)
    tolerance = EXPLAINED_IN_HALF if half else max(EXPLAINED[dtype] for dtype in dtypes)
    return bool(abs(captured - found) > tolerance * size)
