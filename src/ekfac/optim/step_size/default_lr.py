"""The default learning rate and warm-up, as functions of the network's width."""

from __future__ import annotations

import math

from torch import nn

#: Least and most warm-up steps, and the width per warm-up step: the first bases and second moments come from few
#: batches, and wide ones need more.
RISE = (10, 100, 8)
#: The rate of networks up to ``NARROW`` wide; it decreases with the square root of the width.
LARGEST_RATE = 0.02
NARROW = 64


def width_of(model: nn.Module) -> float:
    """Return a network's width: the geometric mean of the fan-in over all its weights.

    Taps of convolutions count towards the fan-in only in networks without normalisation, which makes the scale of
    outputs independent of the weights'. Further dimensions of complex weights do not count: they are mostly frequencies
    with a matrix each.
    """
    numbers = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    matrices = [p for p in numbers if p.dim() > 1 and p.numel()]
    size = sum(p.numel() for p in matrices)
    normalised = any("norm" in type(module).__name__.lower() for module in model.modules())
    inputs = [p.shape[1] if normalised or p.is_complex() else p.numel() // len(p) for p in matrices]
    return math.exp(sum(p.numel() / size * math.log(n) for p, n in zip(matrices, inputs, strict=True)))


def default_lr(width: float) -> float:
    """Return the default lr: 0.02 sqrt(64 / width), at most 0.02.

    A step moves every weight by about the same amount, but its effect on an output grows with the fan-in.
    """
    return LARGEST_RATE * min(1.0, math.sqrt(NARROW / width))


def default_warmup(width: float) -> int:
    """Return the number of warm-up steps."""
    least, most, columns = RISE
    return min(most, max(least, round(width / columns)))
