"""The default learning rate and warm-up, as functions of the network's width and depth."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

#: Least and most warm-up steps, and the width that needs one: the first bases and second moments come from few batches,
#: and wide ones need more.
RISE = (10, 150, 27)
#: The rate of networks up to ``NARROW`` wide; it decreases with the square root of the width.
LARGEST_RATE = 0.02
NARROW = 64
#: In networks without normalisation it also decreases with the square root of the number of layers above ``SHALLOW``.
SHALLOW = 8
#: Inputs of a layer are sparse if more than 7 of 8 are zero. In MNIST's images 4 of 5 are, after a ReLU 1 of 2.
SPARSE = 8


def width_of(model: nn.Module, nonzero: Mapping[Tensor, float] = {}) -> float:
    """Return a network's width: the geometric mean of the fan-in over all its weights.

    Taps of convolutions count towards the fan-in only in networks without normalisation, which makes the scale of
    outputs independent of the weights'. Further dimensions of complex weights do not count: they are mostly frequencies
    with a matrix each. Sparse inputs, such as one-hot rows, count as ``SPARSE`` times those that are not zero: the
    others have no part in a row's output.

    Args:
        model: The network.
        nonzero: For weights whose inputs have been seen, the mean number of inputs in a row that are not zero.
    """
    matrices = [p for p in model.parameters() if is_matrix(p)]
    size = sum(p.numel() for p in matrices)
    plain = not normalises(model)
    inputs: list[float] = [p.numel() // len(p) if plain and not p.is_complex() else p.shape[1] for p in matrices]
    inputs = [min(n, SPARSE * nonzero.get(p, n)) for n, p in zip(inputs, matrices, strict=True)]
    return math.exp(sum(p.numel() / size * math.log(n) for p, n in zip(matrices, inputs, strict=True)))


def depth_of(model: nn.Module) -> int:
    """Return a network's depth: the number of layers that multiply by weights, are trained, and may follow one another.

    Those of a ``ModuleList`` or ``ModuleDict`` count as the deepest of them, as they may be experts, heads or an
    ensemble, side by side; lookups do not count. The depth is 1 where anything is normalised, which keeps what one
    layer changes from growing through the next.
    """
    return 1 if normalises(model) else max(1, _layers(model))


def _layers(module: nn.Module) -> int:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 0
    below = [_layers(child) for child in module.children()]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return max(below, default=0)
    own = any(p.requires_grad and is_matrix(p) for p in module.parameters(recurse=False))
    return own + sum(below)


def is_matrix(p: nn.Parameter) -> bool:
    """Return whether a parameter has inputs and outputs."""
    return p.dim() > 1 and p.numel() > 0 and (p.is_floating_point() or p.is_complex())


def normalises(model: nn.Module) -> bool:
    """Return whether a network has a normalisation layer of any kind."""
    return any("norm" in type(module).__name__.lower() for module in model.modules())


def default_lr(width: float, depth: int = 1) -> float:
    """Return the default lr: 0.02 sqrt(64 / width) sqrt(8 / depth), where neither root is above 1.

    A step moves every weight by about the same amount, but its effect on an output grows with the fan-in and with the
    number of layers that change together.
    """
    return LARGEST_RATE * math.sqrt(min(1.0, NARROW / width) * min(1.0, SHALLOW / depth))


def default_warmup(width: float) -> int:
    """Return the number of warm-up steps: (width / 27)^1.5, at least 10 and at most 150."""
    least, most, narrow = RISE
    return min(most, max(least, round(math.pow(width / narrow, 1.5))))
