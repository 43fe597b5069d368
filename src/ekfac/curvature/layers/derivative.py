"""A product with a layer's weight that a derivative of the network makes, where a loss has derivatives inside.

The layer computes y = W x + b. A backward pass that is itself differentiated computes dx = W^T dy, and the gradient of
the loss with respect to W has a further term, dy v^T with v the gradient of the loss with respect to dx. It is the
layer's own outer product of delta and h, with dy for delta and v for h, and no bias. The next derivative computes W v,
and so on: every one is a further position of its example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.layers.base import Layer
from ekfac.curvature.layers.linear import LinearLayer


class DerivativeLayer(Layer):
    """Positions of a layer that a derivative has made: those of the layer itself, without a bias.

    Args:
        whole: The layer.
        transposed: Whether the product is with W^T, so that what it is given is delta and what comes back is h.
    """

    linear = True

    def __init__(self, whole: Layer, transposed: bool) -> None:
        super().__init__(whole.module, whole.roles)
        self.whole = whole
        self.shape = whole.shape
        self.transposed = transposed  # type: ignore[misc]

    @classmethod
    def after(cls, layer: Layer) -> DerivativeLayer:
        """Return the product that the derivative of a layer's product makes; one object for each."""
        whole = layer.whole if isinstance(layer, DerivativeLayer) else layer
        known = cast(dict[bool, DerivativeLayer], whole.__dict__.setdefault("derivatives", {}))
        transposed = not layer.transposed
        if transposed not in known:
            known[transposed] = cls(whole, transposed)
        return known[transposed]

    def free_dims(self, x: Tensor) -> int:
        return self.whole.free_dims(x)

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        h, delta = self.whole.positions(x, d, n)
        return h * self._weight_columns(h), delta

    def deltas(self, x: Tensor, d: Tensor, n: int) -> Tensor:
        return self.whole.deltas(x, d, n)

    @property
    def direct_inputs(self) -> bool:
        return isinstance(self.whole, LinearLayer) and self.whole.reads_whole_inputs

    def input_sum_directly(self, x: Tensor, n: int, into: Tensor | None = None) -> tuple[Tensor, int]:
        rows, A = x.reshape(-1, 1, x.shape[-1]), x.new_zeros(1, self.shape.inputs, self.shape.inputs)
        A[:, : x.shape[-1], : x.shape[-1]] = factors.outer_sum(rows)
        return (A if into is None else into.add_(A)), len(rows)

    def positions_per_example(self, d: Tensor, n: int) -> int:
        return self.whole.positions_per_example(d, n)

    def _weight_columns(self, like: Tensor) -> Tensor:
        """Return 1 in the columns of weights and 0 in those of biases, ``[G, C]``."""
        parameters = {role: self.module.get_parameter(role) for role in self.roles}
        return self.whole.stack({r: torch.full_like(p, p.dim() > 1) for r, p in parameters.items()})[:, 0].to(like)

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.whole.stack(tensors)

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return self.whole.unstack(matrix)
