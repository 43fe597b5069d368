"""The update of a whole list of parameters as one Triton kernel. Imported only if Triton is installed.

A kernel cannot take a list of pointers, so a table holds the addresses of each parameter, its step and its offset, one
row per parameter. At most PARTS programs share the tiles of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ekfac.optim.types import CLEAR

#: Numbers per tile, and the largest number of programs per parameter.
TILE, PARTS = 1024, 256
#: Numbers per row of the table: addresses of parameter, step and offset (0 for none), number of entries, the two inner
#: sizes of the step and its three strides, decay (float64), flags (1: cautious decay, 2: leave the average in the
#: parameter), and the group.
COLUMNS = 12

_CLEAR = tl.constexpr(CLEAR)
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _floats(address):
    """Return an address as a float pointer, aligned to 16 bytes wherever that matters."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _take(parameter, steps, offsets, at, inside, plain, averaged, layout, numbers):
    middle, inner, outer_stride, middle_stride, stride = layout
    rate, remaining, shrink, ramp, cautious, shows, good = numbers
    if plain:
        step = tl.load(steps + at, mask=inside)
    else:
        line = at // inner
        where = (at % inner).to(tl.int64) * stride + (line % middle).to(tl.int64) * middle_stride
        step = tl.load(steps + where + (line // middle).to(tl.int64) * outer_stride, mask=inside)
    old = tl.load(parameter + at, mask=inside)
    toward = tl.where(old > 0, step, tl.where(old < 0, -step, 0.0))
    part = tl.minimum(tl.maximum(toward, 0.0), _CLEAR) * ramp
    new = old + old * tl.where(cautious, part, shrink)
    new = tl.where(good, new - rate * step, old)
    if averaged:
        d = tl.load(offsets + at, mask=inside)
        d = tl.where(good, (d + (new - old)) * remaining, d)
        tl.store(offsets + at, d, mask=inside)
        new = tl.where(shows, new - d, new)
    tl.store(parameter + at, new, mask=inside)


@triton.jit(do_not_specialize=["table", "decays", "lrs", "ok", "weight"])
def update(table, decays, lrs, ok, weight, TILE: tl.constexpr):
    """Set theta <- theta (1 - lr decay) - lr step, d <- (1 - c) (d + change of theta); store theta - d if it shows."""
    row = table + tl.program_id(1) * _COLUMNS
    address, offset, size = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3).to(tl.int32)
    middle, inner, stride = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32), tl.load(row + 8)
    layout = (middle, inner, tl.load(row + 6), tl.load(row + 7), stride)
    lr = tl.load(lrs + tl.load(row + 11))
    amount, remaining = lr * tl.load(decays + tl.program_id(1) * _COLUMNS + 9), 1.0 - tl.load(weight)
    shrink, ramp, flags = (-amount).to(tl.float32), (-amount / _CLEAR).to(tl.float32), tl.load(row + 10)
    good, cautious, shows = tl.load(ok) > 0, (flags & 1) != 0, (flags & 2) != 0
    numbers = (lr.to(tl.float32), remaining.to(tl.float32), shrink, ramp, cautious, shows, good)
    parameter, steps, offsets = _floats(tl.load(row)), _floats(address), _floats(offset)
    plain, averaged = (inner == size) & (stride == 1) & (address % 16 == 0), offset != 0
    end = tl.where(good | (shows & averaged), size, 0)  # a skipped step still swaps the average in
    for start in range(tl.program_id(0) * TILE, end, tl.num_programs(0) * TILE):
        at = start + tl.arange(0, TILE)
        if start + TILE <= size:
            _take(parameter, steps, offsets, at, None, plain, averaged, layout, numbers)
        else:
            _take(parameter, steps, offsets, at, at < size, plain, averaged, layout, numbers)
