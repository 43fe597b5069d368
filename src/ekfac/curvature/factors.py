"""The Kronecker factors A and B: sums over a batch, in full precision.

With h ``[N, S, G, C]`` and delta ``[N, S, G, O]``:

* ``sharing="expand"``: A = mean over n and s of h h^T, B = mean over n, sum over s, of delta delta^T;
* ``sharing="reduce"``: A = mean_n (mean_s h)(mean_s h)^T, B = mean_n (sum_s delta)(sum_s delta)^T.

This module computes only the sums; their divisors are known once all examples of a step have arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.layers.shapes import BlockShape

#: Half-precision dtypes.
HALF = (torch.bfloat16, torch.float16)
#: Whether torch can return the product of half-precision matrices in float32.
TAKES_HALF = hasattr(torch.ops.aten.bmm, "dtype")
#: Products of at most this many columns are not worth a cuBLAS call per group.
FEW = 2
#: The setting by which torch uses oneDNN for float32 products. oneDNN may round operands to bfloat16 on a CPU with AMX;
#: on others it computes in float32.
ONEDNN = "bf16"
#: On a CPU, a symmetric product with at least this many columns and numbers in its operand is computed in strips.
CUT, LONG = 256, 2**17
#: Devices on which products over very many rows are computed per example and then summed.
BY_EXAMPLE = ("cuda",)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Multiply in the dtypes of the operands."""
    # Entering autocast costs as much as a small layer's statistics, so do it only if there is something to undo.
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Multiply in full float32, without autocast, whatever the user's settings.

    In TF32, a true eigenvalue of 0.1 next to one of 2.5e6 comes out as -6, which makes the basis useless.
    """
    return _products(device, "ieee") if device.type == "cuda" else no_autocast(device)


def tensor_cores(device: torch.device) -> AbstractContextManager[None]:
    """Multiply float32 with operands rounded to TF32 and sums in float32, without autocast.

    Exact for operands that come from bfloat16 or float16, whose mantissas are no longer than TF32's.
    """
    return _products(device, "tf32") if device.type == "cuda" else no_autocast(device)


@contextmanager
def _products(device: torch.device, precision: str) -> Iterator[None]:
    with no_autocast(device):
        matmul: Any = torch.backends.cuda.matmul
        if matmul.fp32_precision == precision:
            yield
            return
        with _set(matmul, precision):
            yield


@contextmanager
def _set(matmul: Any, precision: str) -> Iterator[None]:
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


@contextmanager
def by_onednn() -> Iterator[None]:
    """Use oneDNN for float32 products on a CPU, without autocast: in full precision, but not bit-identical to MKL."""
    backend: Any = torch.backends.mkldnn
    with no_autocast(torch.device("cpu")), _set(backend.matmul, ONEDNN):
        yield


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL, torch's default, on this CPU, and as accurately.

    On AMD CPUs with AVX-512 it takes less than half the time, because MKL uses only half the vector width there.
    """
    cpu = capabilities()
    if "AMD" not in cpu.get("cpu_name", "") or cpu.get("amx_tile", True) or not torch.backends.mkl.is_available():
        return False
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0), device="cpu")
    with by_onednn():
        found = x @ x
    exact = x.double() @ x.double()
    return bool((found - exact).norm() < 1e-5 * exact.norm())


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16 products, and torch uses them."""
    cpu = capabilities()
    return bool(cpu.get("avx512_bf16", False) or cpu.get("amx_bf16", False))


def capabilities() -> dict[str, Any]:
    """Return torch's record of this CPU's features; empty if torch does not use AVX-512 and oneDNN."""
    used = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)() if used else {}
    return known


def outer_sum(rows: Tensor, diagonal: bool = False, into: Tensor | None = None) -> Tensor:
    """Sum r r^T over rows ``[M, G, D]``: ``[G, D, D]``, or its diagonal ``[G, D]``.

    If ``into`` is given, the sum is added to it; then only its upper half is valid until :func:`mirror` is called.
    """
    if diagonal:
        squares = (
            rows.square().sum(0)
            if rows.dtype not in HALF
            else torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32).square()
        )
        return squares if into is None else into.add_(squares)
    if rows.dtype in HALF:
        total = half_products(rows)
        return total if into is None else into.add_(total)
    if rows.shape[2] <= FEW and rows.is_cuda:
        total = (rows[..., :, None] * rows[..., None, :]).sum(0)
        return total if into is None else into.add_(total)
    if rows.shape[1] == 1:
        flat = rows[:, 0]
        if into is None:
            if not is_long(flat):
                return (flat.T @ flat)[None]
            return symmetric_product(flat, flat.new_empty(flat.shape[1], flat.shape[1]))[None]
        return add_outer_sum(flat, into)
    by_group = rows.transpose(0, 1).contiguous()  # one copy here saves two within the product
    return by_group.mT @ by_group if into is None else into.baddbmm_(by_group.mT, by_group)


def add_outer_sum(rows: Tensor, into: Tensor, weight: float = 1.0) -> Tensor:
    """Add a weighted sum of r r^T over rows ``[M, D]`` to ``[1, D, D]``, like :func:`outer_sum` with ``into``."""
    if not is_cut(into):
        into[0].addmm_(rows.T, rows, alpha=weight)
        return into
    for strip in _strips(into):
        into[0, strip, strip.start :].addmm_(rows[:, strip].T, rows[:, strip.start :], alpha=weight)
    return into


def is_long(rows: Tensor) -> bool:
    """Return whether rows ``[M, D]`` are so many, and so wide, that the sum of r r^T is best taken in strips."""
    return rows.device.type == "cpu" and rows.shape[1] >= CUT and rows.numel() >= LONG


def symmetric_product(rows: Tensor, total: Tensor) -> Tensor:
    """Write the sum of r r^T over rows ``[M, D]`` into ``[D, D]``: strips of the upper half, copied to the lower."""
    for strip in _strips(total[None]):
        torch.mm(rows[:, strip].T, rows[:, strip.start :], out=total[strip, strip.start :])
        total[strip.stop :, strip] = total[strip, strip.stop :].T
    return total


def half_products(rows: Tensor) -> Tensor:
    """Sum r r^T over half-precision rows ``[M, G, D]`` in float32, where products of two such numbers are exact."""
    by_group = rows.transpose(0, 1)
    if rows.is_cuda and TAKES_HALF:
        return torch.bmm(by_group.mT, by_group, out_dtype=torch.float32)
    by_group = by_group.float()
    return by_group.mT @ by_group


def by_example(positions: int, columns: int, device: torch.device) -> bool:
    """Return whether a sum over positions is faster as one product per example."""
    return device.type in BY_EXAMPLE and positions >= columns


def position_sum(rows: Tensor, diagonal: bool = False, into: Tensor | None = None) -> Tensor:
    """Return :func:`outer_sum` over examples and positions ``[N, S, G, D]``.

    A product over half a million rows of 64 columns has a single output tile, which leaves a GPU mostly idle. One
    product per example fills it, reads a convolution's layout without a copy, and its results are no larger than the
    rows.
    """
    n, s, g, d = rows.shape
    if diagonal or not by_example(s, d, rows.device):
        return outer_sum(rows.flatten(0, 1), diagonal, into)
    each = rows.permute(0, 2, 3, 1).flatten(0, 1)
    total = (each @ each.mT).unflatten(0, (n, g)).sum(0)
    return total if into is None else into.add_(total)


def mirror(matrix: Tensor) -> Tensor:
    """Copy the upper half of ``[G, D, D]`` onto the lower, in place."""
    for strip in _strips(matrix):
        matrix[:, strip.stop :, strip] = matrix[:, strip, strip.stop :].mT
        square = matrix[:, strip, strip]
        square.copy_(square.triu() + square.triu(1).mT)
    return matrix


def is_cut(matrix: Tensor) -> bool:
    """Return whether a symmetric product is computed in strips, so that :func:`mirror` is needed."""
    return matrix.device.type == "cpu" and matrix.shape[0] == 1 and matrix.shape[-1] >= CUT


def _strips(matrix: Tensor) -> list[slice]:
    """Divide a large symmetric product on a CPU into strips that start at the diagonal: five eighths of the work."""
    d = matrix.shape[-1]
    width = -(-d // 4) if is_cut(matrix) else d
    return [slice(start, min(start + width, d)) for start in range(0, d, width)]


def input_sum(
    h: Tensor, shape: BlockShape, sharing: str, diagonal: bool, into: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return A's sum and its number of terms.

    Under SUA, channel vectors are summed over taps too; the extra bias column, with A = [1], is left out.
    """
    n, s, g, _ = h.shape
    if sharing == "reduce":
        return outer_sum(h.mean(1), diagonal, into), n
    if shape.taps == 1 and not shape.extra:
        return position_sum(h, diagonal, into), n * s
    channels = h[..., : shape.taps * shape.inputs].reshape(n * s, g, shape.taps, shape.inputs)
    rows = channels.transpose(1, 2).reshape(n * s * shape.taps, g, shape.inputs)
    return outer_sum(rows, diagonal, into), n * s * shape.taps


def output_sum(delta: Tensor, sharing: str, diagonal: bool, into: Tensor | None = None) -> Tensor:
    """Return B's sum, to be divided by N (positions are summed in both conventions)."""
    if sharing == "reduce":
        return outer_sum(delta.sum(1), diagonal, into)
    return position_sum(delta, diagonal, into)
