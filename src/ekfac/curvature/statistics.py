"""From the calls of a block's layers to its sums: A, B, s* and a check that the gradient was seen whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers import Call
from ekfac.curvature.scaling import chunks


@dataclass
class FactorSums:
    """Sums over examples that give A (divided by ``terms``) and B (divided by N)."""

    A: Tensor
    terms: int | Tensor
    B: Tensor


def factor_sums(block: Block, calls: Sequence[Call], n: int, sharing: str, memory: int) -> FactorSums:
    """Sum h h^T and delta delta^T over n examples; several calls of a layer are positions of the same example."""
    A = B = None
    terms = 0
    with factors.full_precision(block.key.device):
        direct = None
        if len(calls) == 1 and sharing == "expand" and not block.diagonal_A:
            direct = calls[0].layer.input_sum_directly(calls[0].x.to(block.dtype), n)
        if direct is not None:
            A, terms = direct
            delta = calls[0].layer.deltas(calls[0].x, calls[0].d.to(block.dtype), n)
            return FactorSums(A, terms, factors.output_sum(delta, sharing, block.diagonal_B))
        for h, delta in positions(block, calls, n, memory):
            a, count = block.layer.input_sum(h, sharing, block.diagonal_A)
            b = factors.output_sum(delta, sharing, block.diagonal_B)
            A, B, terms = (a, b, count) if A is None or B is None else (A + a, B + b, terms + count)
    assert A is not None and B is not None
    return FactorSums(A.to(block.dtype), terms, B)


def scaling_sum(block: Block, calls: Sequence[Call], n: int, basis: Basis, memory: int) -> Tensor:
    """Sum over n examples of the squared gradient in the basis, ``[G, O, C]``."""
    total = None
    with factors.full_precision(block.key.device):
        for h, delta in positions(block, calls, n, memory // 2):
            part = block.layer.scaling_sum(h, delta, basis, memory // 2)
            total = part if total is None else total + part
    assert total is not None
    return total


def probe_sum(block: Block, calls: Sequence[Call], n: int, memory: int, u: Tensor, v: Tensor) -> Tensor:
    """u^T G v of the captured gradient, and the size of its terms, as ``[2]``.

    If ``.grad`` gives another number for u^T G v, part of it did not pass through the layer's calls.
    """
    total = torch.zeros(2, dtype=block.dtype, device=block.key.device)
    with factors.full_precision(block.key.device):
        for h, delta in positions(block, calls, n, memory):
            d, a = block.layer.probe(h, delta, v, u)
            product = (d * a).reshape(-1)
            total = total + torch.stack([product.sum(), product.norm()])
    return total


def positions(block: Block, calls: Sequence[Call], n: int, memory: int) -> Iterator[tuple[Tensor, Tensor]]:
    """h and delta of all calls side by side, a few examples at a time so that they fit into ``memory`` bytes."""
    s = block.shape
    each = 2 * s.groups * (s.columns + s.out) * torch.finfo(block.dtype).bits // 8
    each *= sum(call.layer.positions_per_example(call.d, n) for call in calls)
    splittable = all(call.layer.splittable for call in calls)
    for start, stop in chunks(n, each, memory) if splittable else [(0, n)]:
        parts = [
            call.layer.positions(
                _examples(call.x, start, stop, n, block.dtype),
                _examples(call.d, start, stop, n, block.dtype),
                stop - start,
            )
            for call in calls
        ]
        if len(parts) == 1:
            yield parts[0]
            continue
        parts = _balanced(calls, parts)
        yield torch.cat([h for h, _ in parts], 1), torch.cat([delta for _, delta in parts], 1)


def _examples(tensor: Tensor, start: int, stop: int, n: int, dtype: torch.dtype) -> Tensor:
    k = tensor.shape[0] // n
    part = tensor if (start, stop) == (0, n) else tensor[start * k : stop * k]
    return part.to(dtype) if part.is_floating_point() else part


def _balanced(calls: Sequence[Call], parts: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Give the transposed uses' h the mean square of the direct uses'; every product delta h^T stays as it is."""
    direct = [h for call, (h, _) in zip(calls, parts, strict=True) if not call.layer.transposed]
    turned = [h for call, (h, _) in zip(calls, parts, strict=True) if call.layer.transposed]
    if not direct or not turned:
        return parts

    def mean_square(tensors: list[Tensor]) -> Tensor:
        return torch.stack([t.square().sum() for t in tensors]).sum() / sum(t.numel() for t in tensors)

    size = mean_square(turned)
    c = torch.where(size > 0, mean_square(direct) / size.clamp(min=torch.finfo(size.dtype).tiny), 1.0).sqrt()
    c = torch.where(c > 0, c, 1.0)
    return [
        (h * c, delta / c) if call.layer.transposed else (h, delta)
        for call, (h, delta) in zip(calls, parts, strict=True)
    ]
