"""Products with a layer's weight from derivatives of the network inside the loss.

The layer computes y = W x + b. A backward pass that is itself differentiated computes dx = W^T dy, which adds a term
dy v^T to the gradient of the loss with respect to W, where v is the gradient of the loss with respect to dx. This is an
outer product of delta = dy and h = v, without a bias. The next derivative computes W v, and so on: each such product is
a further position of its example.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.layers.base import Layer
from ekfac.curvature.layers.linear import LinearLayer


class DerivativeLayer(Layer):
    """The positions of a layer in a derivative: like those of the layer itself, but without a bias.

    Args:
        whole: The layer.
        transposed: Whether the product is with W^T, so that its input is delta and its output gradient is h.
    """

    linear = True

    def __init__(self, whole: Layer, transposed: bool) -> None:
        super().__init__(whole.module, whole.roles)
        self._whole = weakref.ref(whole)  # which holds this one: a reference cycle would keep the model alive
        self.shape = whole.shape
        self.transposed = transposed  # type: ignore[misc]

    @property
    def whole(self) -> Layer:
        """The layer."""
        whole = self._whole()
        assert whole is not None
        return whole

    @classmethod
    def after(cls, layer: Layer) -> DerivativeLayer:
        """Return the layer of the product that differentiating this layer's product makes; cached."""
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
