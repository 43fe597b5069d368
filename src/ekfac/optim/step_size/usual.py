"""The rate and the warm-up that a network gets where nobody sets them: both go with its width."""

from __future__ import annotations

import math

from torch import nn

#: Fewest and most steps over which the built-in rate rises, and how many columns are worth one of them: the first bases
#: and second moments rest on few batches, and wide ones need more.
RISE = (10, 100, 8)
#: The rate of networks up to ``NARROW`` wide; wider ones get less, by the square root.
LARGEST_RATE = 0.02
NARROW = 64


def width_of(model: nn.Module) -> float:
    """Return how wide a network is: the geometric mean, over all its weights, of how many an output sums over.

    Taps of convolutions count where nothing is normalised; where something is, its scale is not that of the weights.
    Further dimensions of complex weights do not: mostly they are frequencies, each with a matrix of its own.
    """
    numbers = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    matrices = [p for p in numbers if p.dim() > 1 and p.numel()]
    size = sum(p.numel() for p in matrices)
    normalised = any("norm" in type(module).__name__.lower() for module in model.modules())
    inputs = [p.shape[1] if normalised or p.is_complex() else p.numel() // len(p) for p in matrices]
    return math.exp(sum(p.numel() / size * math.log(n) for p, n in zip(matrices, inputs, strict=True)))


def usual_rate(width: float) -> float:
    """Return the rate for a network: 0.02 sqrt(64 / width), at most 0.02.

    A step moves every weight by about the same amount, but what that does to an output grows with how many weights the
    output sums over.
    """
    return LARGEST_RATE * min(1.0, math.sqrt(NARROW / width))


def usual_warmup(width: float) -> int:
    """Return the steps over which the rate of a network rises."""
    least, most, columns = RISE
    return min(most, max(least, round(width / columns)))
