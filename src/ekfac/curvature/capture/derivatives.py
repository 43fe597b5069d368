"""Captures products with weights that are made by derivatives of the network inside the loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.hooks import Read
from ekfac.curvature.capture.records import Input, Record
from ekfac.curvature.layers.base import Call, Layer
from ekfac.curvature.layers.derivative import DerivativeLayer

if TYPE_CHECKING:
    from ekfac.curvature.capture.capture import Capture


#: Where an input comes from: a node of autograd's graph, or a leaf tensor; None if it needs no gradient.
Origin = Node | Tensor | None


def origin_of(x: Tensor) -> Origin:
    """Return where an input comes from, without keeping the input itself alive."""
    return (x.grad_fn or x) if x.requires_grad else None


class Source:
    """An input within autograd's graph, whose gradient can be watched; it is not kept alive for that."""

    def __init__(self, x: Tensor) -> None:
        self._origin = origin_of(x)
        self._number = x.output_nr
        self._tensor = weakref.ref(x)

    def watch(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call ``hook`` with the gradient."""
        if (x := self._tensor()) is not None:
            handle: RemovableHandle = x.register_hook(hook)
            return handle
        assert isinstance(self._origin, Node)
        return self._origin.register_prehook(lambda gradients: hook(gradients[self._number]))


def follow(
    capture: Capture,
    record: Record,
    block: Block,
    layer: Layer,
    given: Input,
    origin: Origin,
    d: Tensor,
    read: Read | None,
) -> None:
    """Watch the product of the weight with ``d``, the output gradient in a pass that is itself differentiated.

    The product cannot be observed, but it is a summand of the input's gradient, so the gradients with respect to both
    are equal. A pass that does not reach the input computes the weight's gradient, as for an inner batch (MAML).
    """
    if not _is_reached(origin):
        record.inner |= not (capture.separate or capture.reaches_parameters(block))
        return
    source = given.source
    if source is None:
        return
    task, arrange = torch._C._current_graph_task_id(), given.arrange

    def hook(product: Tensor | None) -> None:
        handle.remove()
        if torch._C._current_graph_task_id() == task and product is not None and product.requires_grad:
            detached = d.detach() if read is None else read(d.detach())
            further = Input(detached if arrange is None else arrange(detached), arrange)
            further.source, further.read = Source(d) if d.requires_grad else None, read
            capture.held.add(detached)
            after = DerivativeLayer.after(layer)
            capture.wait_for((product, given.read), record, block, after, further, origin_of(d))

    handle = source.watch(hook)


def _is_reached(origin: Origin) -> bool:
    """Return whether the current pass will reach the origin of an input."""
    if origin is None:
        return False
    try:
        node = get_gradient_edge(origin).node if isinstance(origin, Tensor) else origin
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True  # it is an input of torch.autograd.grad


def call_of(layer: Layer, x: Tensor, d: Tensor, before: Call | None = None) -> Call:
    """Return the call of a layer with input ``x`` and output gradient ``d``.

    Args:
        layer: The layer.
        x: Its input.
        d: Its output gradient.
        before: The same call from an earlier backward pass, whose gradient is added.
    """
    if layer.transposed and isinstance(layer, DerivativeLayer):
        return Call(layer, d if before is None else before.x + d, x)
    return Call(layer, x, d if before is None else before.d + d)
