"""The rule :class:`~ekfac.optim.methods.belief.Belief` in three Triton kernels. Imported only if Triton is installed.

Tensors of several blocks are concatenated, ``size`` numbers each. A block is divided into at most PARTS parts of
``tiles`` tiles. Each part stores its partial sums separately, and they are always added in the same order, so results
are deterministic. Numbers that belong to a block are float64. One compilation serves all blocks, whatever their sizes
and addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ekfac.optim.methods.belief import FAINT, LARGEST, LEAST

#: Numbers per tile, and the largest number of programs per block.
TILE, PARTS = 1024, 512

_LARGEST, _FAINT, _LEAST = tl.constexpr(LARGEST), tl.constexpr(FAINT), tl.constexpr(LEAST)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# The limits of ``within_range`` and ``bounded``.
_RANGE = tl.constexpr(torch.finfo(torch.float32).max ** 0.375)
_SQUARE = tl.constexpr(torch.finfo(torch.float32).max ** 0.75)


@triton.jit
def _in_range(g):
    return tl.minimum(tl.maximum(tl.where(g == g, g, 0.0), -_RANGE), _RANGE)


@triton.jit
def _remaining(beta, count):
    power = tl.where(count > 0, tl.exp(count * tl.log(beta)), 1.0)
    return tl.maximum(1.0 - power, 1.0 - beta)


@triton.jit
def _total(sums, block, row: tl.constexpr, rows: tl.constexpr, parts, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    found = tl.load(sums + (block * rows + row) * PARTS + at, mask=at < parts, other=0.0)
    return tl.sum(found.to(tl.float64), 0)


@triton.jit(do_not_specialize=["seen", "m", "s", "sums", "ok", "count", "examples", "n", "size", "tiles"])
def measure(seen, m, s, sums, ok, count, examples, n, size, tiles, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Sum m^2, s and seen^2 of each part, and count the step."""
    part, block = tl.program_id(0), tl.program_id(1)
    start = block.to(tl.int64) * size
    of_m, of_s, of_g = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for tile in range(tiles):
        at = (part * tiles + tile) * TILE + tl.arange(0, TILE)
        inside = at < size
        mean = tl.load(m + start + at, mask=inside, other=0.0)
        g = _in_range(tl.load(seen + start + at, mask=inside, other=0.0))
        of_m += mean * mean
        of_s += tl.abs(tl.load(s + start + at, mask=inside, other=0.0))
        of_g += g * g
    place = sums + block * 3 * PARTS + part
    tl.store(place, tl.sum(of_m, 0))
    tl.store(place + PARTS, tl.sum(of_s, 0))
    tl.store(place + 2 * PARTS, tl.sum(of_g, 0))
    counts = (part == 0) & (tl.load(ok) > 0)
    tl.store(count + block, tl.load(count + block) + 1.0, mask=counts)
    tl.store(examples + block, tl.load(n), mask=counts)


@triton.jit(do_not_specialize=["g", "seen", "m", "s", "x", "sums", "lengths", "ok", "count", "beta", "size", "tiles"])
def update(
    g, seen, m, s, x, sums, lengths, ok, count, beta, size, tiles, BETA_2: tl.constexpr, EPS: tl.constexpr,
    FLOOR: tl.constexpr, SPIKE: tl.constexpr, CAUTIOUS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update m and s; compute m / sqrt(s) and its squared length, before and after skipping coordinates."""
    part, block, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    start = block.to(tl.int64) * size
    good = tl.load(ok) > 0
    t, beta_1, beta_2 = tl.load(count + block), tl.load(beta), tl.full((), BETA_2, tl.float64)
    before = _remaining(beta_1, t - 1.0)
    usual = _total(sums, block, 0, 3, parts, PARTS) / (before * before)
    usual += _total(sums, block, 1, 3, parts, PARTS) / _remaining(beta_2, t - 1.0)
    square, limit = _total(sums, block, 2, 3, parts, PARTS), usual * (SPIKE * SPIKE)
    shortens = (limit > 0) & (square > limit)
    factor = tl.where(shortens, tl.sqrt(limit / tl.where(shortens, square, 1.0)), 1.0)
    weight = tl.where(t > 1.0, tl.sqrt((1.0 + beta_1) * 0.5), 0.0)
    # Coefficients of coordinates.
    noise_m, noise_g = (-weight / before).to(tl.float32), (weight * factor).to(tl.float32)
    old, new, take = beta_1.to(tl.float32), ((1.0 - beta_1) * factor).to(tl.float32), (1.0 - beta_2).to(tl.float32)
    floor = (tl.sqrt(tl.full((), FLOOR, tl.float64)) / _remaining(beta_1, t)).to(tl.float32)
    root = tl.sqrt((usual + square) / size.to(tl.float64))
    eps = (tl.sqrt(_remaining(beta_2, t)) * tl.minimum(tl.maximum(root / _FAINT, _LEAST), 1.0) * EPS).to(tl.float32)
    whole, left = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for tile in range(tiles):
        at = (part * tiles + tile) * TILE + tl.arange(0, TILE)
        inside = at < size
        gradient = _in_range(tl.load(g + start + at, mask=inside, other=0.0))
        as_left = _in_range(tl.load(seen + start + at, mask=inside, other=0.0))
        mean = tl.load(m + start + at, mask=inside, other=0.0)
        scaling = tl.load(s + start + at, mask=inside, other=0.0)
        noise = mean * noise_m + as_left * noise_g
        mean = tl.where(good, mean * old + gradient * new, mean)
        least = mean * floor
        value = tl.minimum(noise * noise + least * least, _SQUARE)
        scaling = tl.where(good, scaling + take * (value - scaling), scaling)
        tl.store(m + start + at, mean, mask=inside)
        tl.store(s + start + at, scaling, mask=inside)
        found = tl.where(inside, mean / (tl.sqrt_rn(scaling) + eps), 0.0)  # eps may round to zero
        whole += found * found
        if CAUTIOUS:
            found = tl.where(found * gradient < 0, 0.0, found)
            left += found * found
        tl.store(x + start + at, found, mask=inside)
    place = lengths + block * 2 * PARTS + part
    tl.store(place, tl.sum(whole, 0))
    tl.store(place + PARTS, tl.sum(left, 0))


@triton.jit(do_not_specialize=["x", "lengths", "ok", "count", "beta", "size", "tiles"])
def scale(
    x, lengths, ok, count, beta, size, tiles,
    BETA_2: tl.constexpr, CAUTIOUS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply x by the block's factor: bias corrections and the bound."""
    part, block, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    start = block.to(tl.int64) * size
    t = tl.load(count + block)
    corrected = tl.sqrt(_remaining(tl.full((), BETA_2, tl.float64), t)) / _remaining(tl.load(beta), t)
    length = tl.sqrt(_total(lengths, block, 0, 2, parts, PARTS))
    enlarged = tl.full((), 1.0, tl.float64)
    if CAUTIOUS:
        left = tl.sqrt(_total(lengths, block, 1, 2, parts, PARTS))
        enlarged = tl.minimum(length / tl.maximum(left, _TINY), _LARGEST)
        length = left * enlarged
    length = length * corrected / tl.sqrt(size.to(tl.float64))
    factor = tl.where(tl.load(ok) > 0, corrected * enlarged / tl.maximum(length, 1.0), 0.0).to(tl.float32)
    for tile in range(tiles):
        at = (part * tiles + tile) * TILE + tl.arange(0, TILE)
        inside = at < size
        tl.store(x + start + at, tl.load(x + start + at, mask=inside, other=0.0) * factor, mask=inside)
