"""Keeps a layer's input in the dtype that autocast computes in."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.factors import HALF
from ekfac.curvature.layers.base import Layer


class Casts:
    """Inputs that autocast copied: autograd keeps the copy, so the input itself would be kept for the capture alone."""

    def __init__(self) -> None:
        #: Returns whether a block's statistics may be of inputs in autocast's dtype.
        self.may_keep: Callable[[Block], bool] = lambda block: False
        self._last: tuple[Callable[[], Any], int, Callable[[], Any]] = (lambda: None), 0, (lambda: None)

    def of(self, block: Block, layer: Layer, x: Tensor, computed: torch.dtype) -> Tensor:
        """Return the input to keep; layers that read one input one after the other share its copy."""
        copied = computed in HALF and x.dtype == torch.float32
        if not (copied and layer.takes_half and self.may_keep(block)):
            return x.detach()
        if x.is_inference():  # nothing would show that it was changed in place since
            return x.to(computed)
        before, version, cast = self._last
        found: Tensor | None = cast()
        if found is None or before() is not x or version != x._version or found.dtype != computed:
            found = x.detach().to(computed)
            self._last = weakref.ref(x), x._version, weakref.ref(found)
        return found
