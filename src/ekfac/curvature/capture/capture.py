"""Captures the input h of each layer in the forward pass, and its output gradient delta in the backward pass.

A forward hook on every covered module keeps the input and registers a tensor hook on the output. Unlike full backward
hooks, tensor hooks work with in-place activations. Every forward of the model is one :class:`Record` of ``n`` examples.
All calls of a layer within one record are positions of the same examples, so they are passed on together: immediately
if there was one call and the graph is freed, else when the record is complete.

Layers called outside the model's own forward (``model.encode(x)``) share a record until a backward pass reaches it;
``batch(n)`` groups calls that belong together and sets their number of examples.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.attached import ATTACHED
from ekfac.curvature.capture.casts import Casts
from ekfac.curvature.capture.counting import Count, tensors
from ekfac.curvature.capture.derivatives import Origin, Source, call_of, follow, origin_of
from ekfac.curvature.capture.forwards import Forwards
from ekfac.curvature.capture.functional import Entered, Products
from ekfac.curvature.capture.hooks import (
    Anchor,
    BeginHook,
    EndHook,
    EnterHook,
    ForwardHook,
    LeaveHook,
    Mutable,
    anchor,
    inside_backward,
    inside_transform,
    keeps_graph,
    remove_hooks,
    run_hooks_in_compiled_models,
)
from ekfac.curvature.capture.meshes import Mesh, gives_out_pieces, whole
from ekfac.curvature.capture.records import Arrange, Held, Input, Receiver, Record, as_batch, deliver, refuse_changed
from ekfac.curvature.capture.whole import watch_whole
from ekfac.curvature.layers.base import Layer, Reading
from ekfac.curvature.statistics import refuse, refuse_unaligned


class Capture:
    """Hooks on a model that pass h and delta to a receiver; :meth:`attach` registers them.

    Args:
        model: The model whose forward sets the number of examples.
        receive: Called with all calls of a block in one record.
        wanted: Returns whether a block's tensors (for None: any block's) are needed now.
        before_forward: Called before a forward of the model is captured; returns whether to capture it.
        reaches_parameters: Called within a backward pass; returns whether the pass computes gradients of a block's
            parameters (for None: of any), rather than, say, only torch.autograd.grad of an input.
        batch_dim: The dimension of the model's input that is the batch.
        count: Returns the number of examples from the arguments of a forward; by default, the first tensor sets it.
        per_example: Whether statistics need per-example gradients, so that positions of all layers must be assignable
            to examples. Otherwise statistics are sums over positions.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receiver,
        wanted: Callable[[Block | None], bool] = lambda block: True,
        before_forward: Callable[[], bool] = lambda: True,
        reaches_parameters: Callable[[Block | None], bool] = lambda block: True,
        batch_dim: int = 0,
        count: Count | None = None,
        per_example: bool = False,
    ) -> None:
        self.model = model
        self.receive = receive
        self.wanted = wanted
        self.reaches_parameters = reaches_parameters
        self.held, self.batch_dim = Held(), batch_dim
        self.forwards = Forwards(model, before_forward, partial(deliver, receive, self.held), batch_dim, count)
        self.per_example = per_example
        #: The processes that compute layers together with this one (tensor parallelism).
        self.mesh = Mesh()
        self.casts = Casts()
        #: Whether N must be exact in every step; for losses with derivatives, this needs the layers' hooks.
        self.exact_count = True
        #: Called when a forward is quiet, and when a backward pass reaches its output.
        self.on_quiet_forward: Callable[[], None] = lambda: None
        self.on_quiet_backward: Callable[[], None] = lambda: None
        #: Called with each output whose gradient is awaited.
        self.on_output: Callable[[Tensor], None] | None = None
        #: Whether inside ``statistics()``, whose backward passes are not the training loss's.
        self.separate = False
        self.examples = 0
        self.separate_examples = 0
        self.fired: set[Block] = set()
        self._handles: list[RemovableHandle] = []
        #: For hooks in autograd graphs, which live as long as the loss: they must not keep the capture alive.
        self.me = weakref.ref(self)
        weakref.finalize(self, remove_hooks, self._handles)
        weakref.finalize(self, self.forwards.forget).atexit = False
        self.uses: dict[nn.Module, list[tuple[Block, Layer]]] = {}
        self._blocks: set[Block] = set()
        self._layer_hooks = Mutable([])
        #: Whether the compiler has met a hook; compiled code depends on the presence of hooks, so they stay on.
        self.compiled = False
        self._readings: dict[nn.Module, Reading] = {}
        self._products: dict[nn.Module, Products] = {}
        self._entered = Entered()
        #: Whether all backward passes so far went through the model's outputs; None before the first.
        self.by_outputs: bool | None = None
        #: Blocks and input shapes that were checked to have examples.
        self._looked_at: set[tuple[Block, torch.Size]] = set()

    # --- hooks ----------------------------------------------------------------------------------------------------

    def attach(self, blocks: Iterable[Block]) -> None:
        """Register the hooks. Copies of modules inherit them, but they ignore calls of the copies."""
        self._layer_hooks.restore()
        remove_hooks(self._handles)
        self.uses = {}
        for block in blocks:
            for module, layer in block.uses.items():
                self.uses.setdefault(module, []).append((block, layer))
        self._blocks = {block for uses in self.uses.values() for block, _ in uses}
        self.fired &= self._blocks
        if "torch._dynamo" in sys.modules:  # always imported by now if a model is compiled: torch's optimizers do so
            run_hooks_in_compiled_models()
        ATTACHED.add(self)
        self.forwards.closed = False
        me, self._readings, self._products = self.me, {}, {}
        for module, uses in self.uses.items():
            layer = uses[0][1]
            if layer.seen_through_linear:
                self._products[module] = Products(self, module, uses)
                self._handles.append(module.register_forward_pre_hook(EnterHook(me)))
                self._handles.append(module.register_forward_hook(LeaveHook(me), always_call=True))
                continue
            if layer.reading is not None:
                self._readings[module] = layer.reading(module)
            pieces = layer.reading is None and gives_out_pieces(module, self.model)
            self._handles.append(module.register_forward_hook(ForwardHook(me), with_kwargs=True, prepend=pieces))
        self._layer_hooks = Mutable(list(self._handles))
        self._handles.append(self.model.register_forward_pre_hook(BeginHook(me), with_kwargs=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(EndHook(me), always_call=True))

    def close(self) -> None:
        """Remove the hooks and free what was captured; backward passes through existing graphs are ignored."""
        self.forwards.closed = True
        self._layer_hooks.restore()
        remove_hooks(self._handles)
        ATTACHED.discard(self)
        self.drop()

    def drop(self) -> None:
        """Drop everything captured since the last step, including an interrupted forward."""
        if self._entered.stack:
            self._entered.leave_interrupted()
        if self._layer_hooks.away:
            self._layer_hooks.restore()
        forwards, here = self.forwards, self.forwards.here
        for record in forwards.records:
            if record.reached:
                self.by_outputs = record.by_output and self.by_outputs is not False
            record.waiting = {}
            record.listed = record.reached = record.reached_separately = record.kept = record.inner = False
        forwards.records, forwards.reached_by = [], {}
        here.loose, here.quiet = None, False
        if not here.in_batch:
            here.current, here.depth = None, 0
        self.examples = self.separate_examples = 0
        if self.held.now:
            self.held.reset()

    def finish(self) -> None:
        """Pass on everything that waited for the rest of its record."""
        if not self.examples:
            self.examples = self.forwards.adopt_inner()
        for record in self.forwards.records:
            if record.waiting:
                self.forwards.deliver(record)

    # --- the forward pass -----------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start a forward of the model."""
        if self._entered.stack:
            self._entered.leave_interrupted()
        record = self.forwards.begin(args, kwargs)
        quiet = record is not None and record.n is not None and self.nothing_to_learn()
        self.forwards.here.quiet = quiet
        if record is not None:
            record.quiet = quiet
        self._layer_hooks.mute(quiet and not self.compiled)
        if quiet and self.by_outputs:
            self.on_quiet_forward()

    def backward_ended(self) -> None:
        """Count the examples of the last forward if the pass has reached no record: it started inside that forward."""
        record = self.forwards.here.latest or self.forwards.latest
        if record is not None and record.quiet and not record.reached and not self.separate:
            self.by_outputs = False
            self.reach(record)

    def nothing_to_learn(self) -> bool:
        """Return whether this step needs no layer's calls, and every layer has been seen at least once."""
        unsure = not self.by_outputs and (self.exact_count or self.by_outputs is None)
        return not (unsure or self.separate or self.on_output) and self._blocks <= self.fired and not self.wanted(None)

    def end(self, output: Any) -> None:
        """End a forward of the model, also after an exception."""
        self.forwards.here.quiet = False
        self._layer_hooks.restore()
        record = self.forwards.end()
        if record is None:
            return
        me = self.me

        def hook(d: Tensor) -> None:
            if (capture := me()) is not None:
                capture._output_reached(record)

        for tensor in tensors(output):
            if tensor.grad_fn is not None:  # examples count even if no covered layer contributes
                anchor(tensor)[0].register_hook(hook)

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Keep a covered layer's input until its output gradient arrives; return a replacement output, if any."""
        uses = self.uses.get(module)
        if uses is None or not self.forwards.enabled or inside_transform():
            return None
        if module in self._readings:
            if isinstance(output, tuple) and all(isinstance(t, Tensor) for t in output):
                # An LSTM cell's h depends on its c. A copy of c receives only the gradient from outside the cell.
                output = tuple(t.clone() for t in output)
            watch_whole(self, self._readings[module], uses, args, kwargs, output)
            return output
        if isinstance(output, Tensor) and output.requires_grad:
            x = args[0] if args else next(iter(kwargs.values()))
            for block, layer in uses:
                self.watch(block, layer, x, output)
        return None

    def watch(self, block: Block, layer: Layer, x: Tensor, output: Tensor, arrange: Arrange | None = None) -> None:
        """Keep ``x``, the input of a block's product ``output``, until the output's gradient arrives."""
        record = self.forwards.record() if output.requires_grad else None
        if record is None:
            return
        if self.on_output is not None:
            self.on_output(anchor(output)[0])
        n = record.settle(self._leading(layer, x if arrange is None else arrange(x))) if record.n is None else record.n
        if layer.free_dims(x) == 0 and record.counted_by_features(x):
            n = record.n = 1
        self.mesh.note(output)
        given, origin = Input(None), origin_of(x)
        if self.wanted(block):
            kept = whole(self.casts.of(block, layer, x, output.dtype))
            if arrange is None and 0 < self.batch_dim < layer.free_dims(kept) and kept.shape[self.batch_dim] == n:
                arrange = self._batch_first
            given = self.checked(block, layer, kept, n, arrange)
            given.source = Source(x) if origin is not None and layer.linear else None
        self.wait_for(anchor(output), record, block, layer, given, origin)

    def wait_for(self, at: Anchor, record: Record, block: Block, layer: Layer, given: Input, from_: Origin) -> None:
        """Wait for a product's output gradient; if that pass is itself differentiated, follow the new product."""
        (tensor, read), call, me = at, self.number(record, block), self.me

        def hook(d: Tensor) -> None:
            if (capture := me()) is not None:
                if torch.is_grad_enabled() and capture.forwards.enabled:
                    follow(capture, record, block, layer, given, from_, d, read)
                d = d.detach() if read is None else read(d.detach())
                capture.arrived(record, block, layer, given, d if given.x is None else whole(d), call)

        tensor.register_hook(hook)

    def number(self, record: Record, block: Block) -> int:
        """Count a call of a block within a record; return the number of earlier calls."""
        number = record.calls.get(block, 0)
        record.calls[block] = number + 1
        if inside_backward():
            record.recomputed.add(block)
        return number

    def _batch_first(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(self.batch_dim, 0)

    def _leading(self, layer: Layer, x: Tensor) -> int:
        """Guess the number of examples in a layer's input."""
        free = layer.free_dims(x)
        return int(x.size(self.batch_dim if free > self.batch_dim else 0)) if free else 1

    def enter(self, module: nn.Module) -> None:
        """Start watching the products of a module whose hooks do not show them, if any is needed."""
        uses = self.uses.get(module)
        if uses is None or not (self.forwards.enabled and torch.is_grad_enabled()) or inside_transform():
            return
        if any(self.wanted(block) or block not in self.fired for block, _ in uses):
            self._entered.enter(module, self._products[module])

    def leave(self, module: nn.Module) -> None:
        """Stop watching after the module's call."""
        self._entered.leave(module)

    def checked(self, block: Block, layer: Layer, x: Tensor, n: int, arrange: Arrange | None = None) -> Input:
        """Keep an input; if per-example gradients are needed, refuse one whose positions belong to no example."""
        if layer.free_dims(x) == 0:
            arrange = as_batch
        x = x if arrange is None else arrange(x)
        if self.per_example:
            refuse_unaligned(block, layer, x, n)
            if (block, x.shape) not in self._looked_at and layer.shared(x):
                refuse(block, x, "and holds position indices, which all examples share")
            self._looked_at.add((block, x.shape))
        self.held.add(x)
        return Input(x, arrange)

    # --- the backward pass ----------------------------------------------------------------------------------------

    def counts(self, block: Block | None) -> bool:
        """Return whether to capture the current backward pass."""
        return self.forwards.enabled and (self.separate or self.reaches_parameters(block))

    def _output_reached(self, record: Record) -> None:
        """Handle a backward pass that has reached the output of a forward."""
        self.forwards.reach(record)
        if torch.is_grad_enabled():
            self.by_outputs = False  # only layers can tell which gradients a differentiated pass computes
        if self.counts(None):
            record.by_output = True
            self.reach(record)
            if record.quiet and self.by_outputs:
                self.on_quiet_backward()

    def reach(self, record: Record) -> None:
        """Count the examples of a record that a backward pass has reached, once."""
        if not self.separate:
            self.forwards.on_backward()
        self.forwards.reach(record)
        self.forwards.list(record)
        if self.separate:
            if not record.reached_separately:
                record.reached_separately = True
                self.separate_examples += record.examples()
        elif not record.reached:
            record.reached = True
            self.examples += record.examples(matters=bool(self._blocks) or self.exact_count)

    def arrived(self, record: Record, block: Block, layer: Layer, given: Input, d: Tensor, call: int) -> None:
        """Process the gradient of a call's output."""
        if given.x is None and record.reached and block in self.fired and not self.separate:
            self.forwards.reach(record)
            return  # nothing new
        if not self.counts(block):
            return
        self.reach(record)
        self.fired.add(block)
        if (x := given.x) is None:
            return
        if given.changed:
            refuse_changed(block)
        if not (keeps := keeps_graph()):
            given.x = given.source = None
        if not self.wanted(block):
            return
        if given.arrange is not None:
            d = given.arrange(d)
        if not x.numel():
            return  # an expert without tokens
        keep = keeps and not self.separate
        record.kept |= keep
        alone = record.calls[block] == 1 and block not in record.recomputed and not record.inner
        if alone and not keep and not record.waiting.get(block):
            self.receive(block, [call_of(layer, x, d)], record.examples())
            if given.x is None:
                self.held.remove(x)
            return
        waiting = record.waiting.setdefault(block, {})
        before = waiting.get(call)
        waiting[call] = found = call_of(layer, x, d, before)
        self.held.add(found.x if found.d is x else found.d)
        if before is not None:
            self.held.remove(before.x if found.d is x else before.d)

    @contextmanager
    def separate_statistics(self) -> Iterator[None]:
        """Capture backward passes inside separately from the training loss and its examples."""
        self.separate = True
        try:
            yield
            for record in self.forwards.records:
                self.forwards.deliver(record)
        finally:
            self.separate = False
