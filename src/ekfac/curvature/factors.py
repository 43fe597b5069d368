"""The Kronecker factors A and B: sums over a batch, in full precision.

With h ``[N, S, G, C]`` and delta ``[N, S, G, O]``:

* ``sharing="expand"``: A = mean over n and s of h h^T, B = mean over n, sum over s, of delta delta^T;
* ``sharing="reduce"``: A = mean_n (mean_s h)(mean_s h)^T, B = mean_n (sum_s delta)(sum_s delta)^T.

Here only the sums are taken; what they are divided by is known when all examples of a step are in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.layers.shapes import BlockShape

#: What tensor cores multiply fastest.
HALF = (torch.bfloat16, torch.float16)
#: Whether torch gives the product of such matrices in float32.
TAKES_HALF = hasattr(torch.ops.aten.bmm, "dtype")
#: Products of so few columns are not worth a call of cuBLAS for every group.
FEW = 2
#: What has torch ask oneDNN for products of float32. It may round their operands where a CPU multiplies matrices of
#: bfloat16 by itself (AMX), and computes in float32 where it does not.
ONEDNN = "bf16"
#: A symmetric product with so many columns is taken in strips on a CPU, where its operands have so many numbers.
CUT, LONG = 256, 2**17
#: Devices on which a product over very many rows is taken example by example, and summed.
BY_EXAMPLE = ("cuda",)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Multiply in the dtypes of the operands."""
    # Entering autocast costs as much as a small layer's statistics: only where there is something to undo.
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Multiply in full float32, without autocast, whatever the user's flags are.

    In TF32 a true eigenvalue of 0.1 beside one of 2.5e6 comes out as -6: no basis survives that.
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
    """Have oneDNN do products of float32 on a CPU, without autocast: to full precision, with other last bits."""
    backend: Any = torch.backends.mkldnn
    with no_autocast(torch.device("cpu")), _set(backend.matmul, ONEDNN):
        yield


@functools.cache
def onednn_is_faster() -> bool:
    """Tell whether oneDNN multiplies float32 on this CPU faster than MKL, which torch asks, and as exactly.

    On AMD's CPUs with AVX-512 it takes less than half of the time: MKL uses half of their vectors' width.
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
    """Tell whether this CPU has instructions of its own for products of bfloat16, and torch uses them."""
    cpu = capabilities()
    return bool(cpu.get("avx512_bf16", False) or cpu.get("amx_bf16", False))


def capabilities() -> dict[str, Any]:
    """Return what torch knows of this CPU; nothing where it does not use AVX-512 and oneDNN."""
    used = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)() if used else {}
    return known


def outer_sum(rows: Tensor, diagonal: bool = False, into: Tensor | None = None) -> Tensor:
    """Sum r r^T over rows ``[M, G, D]``: ``[G, D, D]``, or its diagonal ``[G, D]``.

    Added to ``into`` where that is given; then only the upper half is sure to be right until :func:`mirror` is called.
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
    by_group = rows.transpose(0, 1).contiguous()  # one copy here, or two inside the product
    return by_group.mT @ by_group if into is None else into.baddbmm_(by_group.mT, by_group)


def add_outer_sum(rows: Tensor, into: Tensor, weight: float = 1.0) -> Tensor:
    """Add the sum of r r^T over rows ``[M, D]``, times a weight, to ``[1, D, D]``, as :func:`outer_sum` does."""
    if not is_cut(into):
        into[0].addmm_(rows.T, rows, alpha=weight)
        return into
    for strip in _strips(into):
        into[0, strip, strip.start :].addmm_(rows[:, strip].T, rows[:, strip.start :], alpha=weight)
    return into


def is_long(rows: Tensor) -> bool:
    """Tell whether rows ``[M, D]`` are so many, and so wide, that the sum of r r^T is best taken in strips."""
    return rows.device.type == "cpu" and rows.shape[1] >= CUT and rows.numel() >= LONG


def symmetric_product(rows: Tensor, total: Tensor) -> Tensor:
    """Write the sum of r r^T over rows ``[M, D]`` into ``[D, D]``: strips of the upper half, copied to the lower."""
    for strip in _strips(total[None]):
        torch.mm(rows[:, strip].T, rows[:, strip.start :], out=total[strip, strip.start :])
        total[strip.stop :, strip] = total[strip, strip.stop :].T
    return total


def half_products(rows: Tensor) -> Tensor:
    """Sum r r^T over half-precision rows ``[M, G, D]`` in float32: products of two such numbers are exact there."""
    by_group = rows.transpose(0, 1)
    if rows.is_cuda and TAKES_HALF:
        return torch.bmm(by_group.mT, by_group, out_dtype=torch.float32)
    by_group = by_group.float()
    return by_group.mT @ by_group


def by_example(positions: int, columns: int, device: torch.device) -> bool:
    """Tell whether one product for each example is the better way to a sum over positions."""
    return device.type in BY_EXAMPLE and positions >= columns


def position_sum(rows: Tensor, diagonal: bool = False, into: Tensor | None = None) -> Tensor:
    """Return :func:`outer_sum` over examples and positions ``[N, S, G, D]``.

    Half a million rows of 64 columns make one product of a single tile, which keeps a GPU waiting. One product an
    example fills it, takes a convolution's own layout without a copy, and its results are no larger than the rows.
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
    """Tell whether a symmetric product is taken in strips, so that :func:`mirror` is due."""
    return matrix.device.type == "cpu" and matrix.shape[0] == 1 and matrix.shape[-1] >= CUT


def _strips(matrix: Tensor) -> list[slice]:
    """Cut a large symmetric product into strips from the diagonal on, on a CPU: five eighths of the work."""
    d = matrix.shape[-1]
    width = -(-d // 4) if is_cut(matrix) else d
    return [slice(start, min(start + width, d)) for start in range(0, d, width)]


def input_sum(
    h: Tensor, shape: BlockShape, sharing: str, diagonal: bool, into: Tensor | None = None
) -> tuple[Tensor, int]:
    """Return the sum that gives A, and how many terms it has.

    SUA's channel vectors are summed over taps too; its extra bias column has A = [1] and no part in this.
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
    """Return the sum that gives B once divided by N (over positions it is a sum in both conventions)."""
    if sharing == "reduce":
        return outer_sum(delta.sum(1), diagonal, into)
    return position_sum(delta, diagonal, into)
