"""Captures modules that are read as a whole (such as recurrent ones), once the gradients of all outputs exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.counting import tensors
from ekfac.curvature.capture.hooks import keeps_graph
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
            capture.on_output(tensor)

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

    register_multi_grad_hook(outputs, hook)
