"""Losses that have derivatives of the network inside: the products with weights that those derivatives make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.hooks import Read
from ekfac.curvature.capture.records import Input, Record
from ekfac.curvature.layers.base import Call, Layer
from ekfac.curvature.layers.derivative import DerivativeLayer

if TYPE_CHECKING:
    from ekfac.curvature.capture.capture import Capture


#: Where an input comes from: a node of autograd's graph, or itself; None where it has no gradient.
Origin = Node | Tensor | None


def origin_of(x: Tensor) -> Origin:
    """Return where an input comes from; that holds on to no other tensor."""
    return (x.grad_fn or x) if x.requires_grad else None


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
    """Watch the product of the weight with ``d``, which a pass that is differentiated has brought.

    What the product is cannot be seen, but the gradient of the layer's input can, of which it is a part: the gradient
    of the one is that of the other. Where the pass does not come to that, it is after the weight's: an inner batch's.
    """
    if not _comes_to(origin):
        record.inner |= not (capture.separate or capture.reaches_parameters(block))
        return
    source = given.source
    if source is None:
        return
    task, arrange = torch._C._current_graph_task_id(), given.arrange

    def hook(product: Tensor) -> None:
        handle.remove()
        if torch._C._current_graph_task_id() == task and product.requires_grad:
            detached = d.detach() if read is None else read(d.detach())
            further = Input(detached if arrange is None else arrange(detached), arrange)
            further.source, further.read = d if d.requires_grad else None, read
            capture.held.add(detached)
            after = DerivativeLayer.after(layer)
            capture.wait_for((product, given.read), record, block, after, further, origin_of(d))

    handle = source.register_hook(hook)


def _comes_to(origin: Origin) -> bool:
    """Tell whether the pass under way will come to where an input comes from."""
    if origin is None:
        return False
    try:
        node = get_gradient_edge(origin).node if isinstance(origin, Tensor) else origin
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True  # it is what the pass was asked for


def call_of(layer: Layer, x: Tensor, d: Tensor, before: Call | None = None) -> Call:
    """Return the call of a layer that was given ``x`` and whose output has the gradient ``d``.

    Args:
        layer: The layer.
        x: What it was given.
        d: What has come back.
        before: The same call, if an earlier pass has come to it.
    """
    if layer.transposed and isinstance(layer, DerivativeLayer):
        return Call(layer, d if before is None else before.x + d, x)
    return Call(layer, x, d if before is None else before.d + d)
