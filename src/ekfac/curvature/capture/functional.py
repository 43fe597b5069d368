"""Captures products that a module computes by torch's functions with its own parameters, which hooks cannot see."""

from __future__ import annotations

import threading
import types
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.hooks import active_calls
from ekfac.curvature.layers.base import Layer
from ekfac.curvature.layers.experts import ExpertsLayer, RowsOfExperts
from ekfac.curvature.layers.linear import LinearLayer, RowsLayer

if TYPE_CHECKING:
    from ekfac.curvature.capture.capture import Capture


def _attention() -> types.FunctionType:
    """Return a copy of torch's attention function whose inner calls reach a ``TorchFunctionMode``.

    The original dispatches to the mode as a whole. The copy is made anew each time, to call the current functions in
    ``torch.nn.functional``.
    """
    original = F.multi_head_attention_forward
    names = {**vars(F), "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


#: Products with a stack of matrices ``[E, in, out]``, or one of them.
_STACKED = {torch.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, torch._grouped_mm}
_STACKED |= {F.grouped_mm} if hasattr(F, "grouped_mm") else set()


class Entered(threading.local):
    """The modules whose products this thread watches, in the order of their calls."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Products]] = []

    def enter(self, module: nn.Module, products: Products) -> None:
        """Start watching the products of a module before its call."""
        products.__enter__()  # type: ignore[no-untyped-call]
        self.stack.append((module, products))

    def leave(self, module: nn.Module) -> None:
        """Stop watching after the module's call."""
        if self.stack and self.stack[-1][0] is module:
            _, products = self.stack.pop()
            products.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def leave_interrupted(self) -> None:
        """Stop watching modules whose calls were interrupted (by Ctrl-C), so that their LeaveHook did not run."""
        while self.stack and not active_calls(self.stack[-1][0]):
            self.leave(self.stack[-1][0])


class Attention(threading.local):
    """The number of examples in this thread's current attention call; None outside of one."""

    examples: int | None = None


class Products(TorchFunctionMode):
    """While entered, passes each product with a module's parameter, or with some of its rows, to the capture.

    Args:
        capture: The capture.
        module: The module.
        uses: The module's blocks.
    """

    def __init__(self, capture: Capture, module: nn.Module, uses: list[tuple[Block, Layer]]) -> None:
        super().__init__()
        self._capture = weakref.ref(capture)
        #: The places of each block's parameters, because fully_shard replaces the parameters during calls.
        self._places = [
            (module.get_submodule(role.rpartition(".")[0])._parameters, role.rpartition(".")[2], block, layer)
            for block, layer in uses
            for role in block.parameters
        ]
        self._rows: dict[tuple[Block, int], Layer] = {}
        #: Attention has time first, and flattens time and batch before its last projection.
        self._attention = Attention()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            self._attention.examples = query.shape[1] if query.dim() == 3 else 1
            with self:
                return _attention()(*args, **kwargs)
        output = func(*args, **kwargs)
        if func is F.linear or func is F.embedding:
            self._seen(output, *args[:3], **kwargs)
        elif func in _STACKED and all(isinstance(t, Tensor) and t.dim() > 1 for t in args[:2]):
            self._seen(output, args[0], args[1].mT, where=args[2] if len(args) > 2 else kwargs.get("offs"))
        return output

    def _seen(
        self,
        output: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Any = None,
        where: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Handle ``output`` = ``input`` times ``weight``, ``[out, in]`` or a stack of such matrices."""
        capture = self._capture()
        if capture is None:
            return
        examples = self._attention.examples
        arrange = None if examples is None else partial(_examples_first, examples)
        if where is None and weight.dim() == input.dim() == 3:  # a stack of inputs too, one per matrix
            where = torch.arange(1, len(weight) + 1, device="cpu") * input.shape[1]
        found = self._find(weight, where)
        if found is not None:
            capture.watch(*found, input, output, arrange)
        shift = self._find(bias, None) if isinstance(bias, Tensor) else None
        # If the weight is not the block's own (but a masked copy, for example), neither is the product.
        if shift is not None and not (isinstance(shift[1], LinearLayer) and shift[1].widths) and shift != found:
            capture.watch(*shift, input, output, arrange)

    def _find(self, tensor: Tensor, where: Tensor | None) -> tuple[Block, Layer] | None:
        """Find the block of a parameter, or of the parameter of which a tensor is a view of some rows."""
        held = {id(places.get(name)): (block, layer) for places, name, block, layer in self._places}
        base = tensor if id(tensor) in held else tensor._base
        if base is None or id(base) not in held:
            return None
        block, layer = held[id(base)]
        start = tensor.storage_offset() - base.storage_offset()
        if isinstance(layer, ExpertsLayer):
            whole = layer.matrices(base)
            if tensor.shape[-2:] != whole.shape[-2:] or tensor.stride()[-2:] != whole.stride()[-2:]:
                return None
            if tensor.dim() == 2:
                return block, RowsOfExperts(layer, start // base.stride(0))
            return None if where is None or len(tensor) != len(base) else (block, RowsOfExperts(layer, where))
        if tensor.stride() != base.stride():
            return None
        start //= max(1, base.stride(0))
        if start == 0 and len(tensor) == len(base):
            return block, layer
        if not isinstance(layer, LinearLayer):
            return None
        return block, self._rows.setdefault((block, start), RowsLayer(layer, start))


def _examples_first(examples: int, tensor: Tensor) -> Tensor:
    """Bring the N examples of ``[T, N, D]`` or ``[T N, D]`` to the front."""
    return tensor.reshape(-1, examples or 1, tensor.shape[-1]).transpose(0, 1)
