"""Captures modules that are read as a whole (such as recurrent ones), once the gradients of all outputs exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.counting import tensors
from ekfac.curvature.capture.hooks import anchor, keeps_graph
from ekfac.curvature.capture.meshes import whole
from ekfac.curvature.capture.records import Input, refuse_changed
from ekfac.curvature.layers.base import Layer, Reading

if TYPE_CHECKING:
    from ekfac.curvature.capture.capture import Capture


def watch_whole(
    capture: Capture,
    reading: Reading,
    uses: list[tuple[Block, Layer]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
) -> None:
    """Keep what a reading needs of a call until the gradients of all its outputs exist."""
    outputs = [t for t in tensors(output) if t.requires_grad]
    record = capture.forwards.record() if outputs else None
    if record is None:
        return
    kept: list[Tensor] = []
    if record.n is None or any(capture.wanted(block) for block, _ in uses):
        kept = [whole(t.detach()) for t in reading.keep(args, kwargs)]
        record.settle(reading.examples(kept))
    versions = [t._version for t in kept]
    numbers = {block: capture.number(record, block) for block, _ in uses}
    if capture.on_output is not None:
        for tensor in outputs:
            capture.on_output(anchor(tensor)[0])

    me = capture.me
    del capture  # the graph must not keep it alive

    def hook(grads: Sequence[Tensor | None]) -> None:
        if (capture := me()) is None:
            return
        wanted = bool(kept) and any(capture.wanted(block) and capture.counts(block) for block, _ in uses)
        if wanted and versions != [t._version for t in kept]:
            refuse_changed(uses[0][0])
        outputs_gradient = next(g for g in grads if g is not None)
        with torch.no_grad():
            parts = reading.read(kept, [g if g is None else whole(g.detach()) for g in grads]) if wanted else {}
        if not keeps_graph():
            kept.clear()
        for block, layer in uses:
            given, d = Input(None), outputs_gradient
            if layer.part in parts:
                x, d = parts[layer.part]
                given = capture.checked(block, layer, x, record.examples())
            capture.arrived(record, block, layer, given, d, numbers[block])

    when_all_arrive(outputs, hook)


def when_all_arrive(tensors: Sequence[Tensor], hook: Callable[[Sequence[Tensor | None]], None]) -> None:
    """Call a function with the gradients of some tensors, once a backward pass has computed all that it reaches.

    Torch's own ``register_multi_grad_hook`` never fires if the pass begins at one of the tensors.
    """
    anchors = [anchor(t) for t in tensors]
    nodes = [get_gradient_edge(t).node for t, _ in anchors]
    reads = [read for _, read in anchors]  # not the tensors, which the graph would keep alive
    passes: dict[int, tuple[list[Tensor | None], list[int]]] = {}

    def take(index: int, d: Tensor | None) -> None:
        task = torch._C._current_graph_task_id()
        if task not in passes:
            others = [i for i, node in enumerate(nodes) if i != index and torch._C._will_engine_execute_node(node)]
            passes[task] = [None] * len(nodes), [index, *others]
        grads, awaited = passes[task]
        read = reads[index]
        grads[index] = d if d is None or read is None else read(d.detach())
        awaited.remove(index)
        if not awaited:
            del passes[task]
            hook(grads)

    for index, (tensor, _) in enumerate(anchors):
        tensor.register_hook(partial(take, index))
