"""Sees the products that a module computes by ``F.linear`` with its own parameters, where no hook can."""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Layer
from ekfac.curvature.layers.linear import LinearLayer, RowsLayer

if TYPE_CHECKING:
    from ekfac.curvature.capture.capture import Capture

#: torch's attention hands itself over as a whole to whoever watches its calls; this copy goes on to its own calls.
_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
_attention.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


class Products(TorchFunctionMode):
    """While entered, hands each product with a parameter of a module, or with some of its rows, to the capture.

    Args:
        capture: Who is told.
        uses: The module's blocks.
    """

    def __init__(self, capture: Capture, uses: list[tuple[Block, Layer]]) -> None:
        super().__init__()
        self._capture = weakref.ref(capture)
        self._of = {id(p): (block, layer) for block, layer in uses for p in block.parameters.values()}
        self._rows: dict[tuple[Block, int], Layer] = {}
        #: Attention puts time first, and flattens it with the examples before its last projection.
        self._examples = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            self._examples = query.shape[1] if query.dim() == 3 else 1
            with self:
                return _attention(*args, **kwargs)
        output = func(*args, **kwargs)
        if func is F.linear:
            self._seen(output, *args, **kwargs)
        return output

    def _seen(self, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        capture = self._capture()
        told: set[Block] = set()
        for tensor in (weight, bias):
            found = None if tensor is None else self._find(tensor)
            if capture is not None and found is not None and found[0] not in told:
                told.add(found[0])
                capture.watch(*found, input, output, self._arrange)

    def _arrange(self, tensor: Tensor) -> Tensor:
        """``[T, N, D]`` or ``[T N, D]`` with its examples first."""
        return tensor.reshape(-1, self._examples, tensor.shape[-1]).transpose(0, 1)

    def _find(self, tensor: Tensor) -> tuple[Block, Layer] | None:
        """The block of a parameter, or of the parameter that a tensor is some rows of."""
        if id(tensor) in self._of:
            return self._of[id(tensor)]
        base = tensor._base
        if base is None or id(base) not in self._of or tensor.stride() != base.stride():
            return None
        block, layer = self._of[id(base)]
        start = (tensor.storage_offset() - base.storage_offset()) // max(1, base.stride(0))
        if start == 0 and len(tensor) == len(base):
            return block, layer
        assert isinstance(layer, LinearLayer)
        return block, self._rows.setdefault((block, start), RowsLayer(layer, start))
