"""Records the input h of each layer in the forward pass and the gradient delta of its output in the backward pass.

A forward hook on every covered module keeps the input and puts a tensor hook on the output. Tensor hooks, unlike full
backward hooks, are not disturbed by in-place activations. Every forward of the model is one :class:`Record` of ``n``
examples. All calls of a layer within one record are positions of the same examples, so they are handed on together:
at once where there was one call and the graph is freed, else when the record is complete.

Layers that are called without the model's own forward (``model.encode(x)``) share a record until a backward pass
reaches it; ``batch(n)`` groups the calls that belong together, and gives their number of examples.
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
from ekfac.curvature.capture.counting import Count, tensors
from ekfac.curvature.capture.derivatives import Origin, call_of, follow, origin_of
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
from ekfac.curvature.capture.records import Arrange, Held, Input, Receiver, Record, as_batch, hand_on, refuse_changed
from ekfac.curvature.capture.whole import watch_whole
from ekfac.curvature.layers.base import Layer, Reading
from ekfac.curvature.statistics import refuse, refuse_unaligned


class Capture:
    """Hooks on a model that hand h and delta to a receiver; :meth:`attach` puts them on.

    Args:
        model: The model whose forward counts the examples.
        receive: Called with all calls of a block in one record.
        wanted: Whether a block's tensors (for None: any block's) are needed now; else only examples are counted.
        before_forward: Called when a forward of the model is about to be captured; returns whether to.
        reaches_parameters: Called within a backward pass: whether it brings a gradient to a block's parameters (for
            None: to any of the model), and not only to somebody who asks torch.autograd.grad for that of an input.
        batch_dim: The dimension of the model's input that counts examples.
        count: Returns the number of examples of a forward, from its arguments; by default the first tensor's.
        per_example: Whether statistics need each example's own gradient, so that positions of all layers must be
            assignable to examples. Otherwise they are sums over positions, whoever these belong to.
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
        self.forwards = Forwards(model, before_forward, partial(hand_on, receive, self.held), batch_dim, count)
        self.per_example = per_example
        #: Who computes the layers together with this process.
        self.mesh = Mesh()
        self.exact_count = True  # N, at every step: of losses of derivatives only layers' hooks can tell it
        #: Told that a forward is quiet, and that a backward pass has come to its output.
        self.on_quiet: Callable[[bool], None] = lambda come: None
        #: Told each tensor whose gradient is waited for.
        self.on_output: Callable[[Tensor], None] | None = None
        #: Inside ``statistics()``: backward passes that are not the training loss's.
        self.separate = False
        self.examples = 0
        self.separate_examples = 0
        self.fired: set[Block] = set()
        self._handles: list[RemovableHandle] = []
        #: What a graph holds: as long as somebody holds on to a loss, its graph is there, and the hooks in it.
        self.me = weakref.ref(self)
        weakref.finalize(self, remove_hooks, self._handles)
        weakref.finalize(self, self.forwards.forget).atexit = False
        self.uses: dict[nn.Module, list[tuple[Block, Layer]]] = {}
        self._blocks: set[Block] = set()
        self._layer_hooks = Mutable([])
        #: Whether the compiler has come by a hook: what it has made of the model depends on there being hooks.
        self.compiled = False
        self._readings: dict[nn.Module, Reading] = {}
        self._products: dict[nn.Module, Products] = {}
        self._entered = Entered()
        #: Whether a backward pass that came to a record has always come by the model's outputs; None before the first.
        self.by_outputs: bool | None = None
        #: Blocks and shapes of inputs that have been found to have examples.
        self._looked_at: set[tuple[Block, torch.Size]] = set()

    # --- hooks ----------------------------------------------------------------------------------------------------

    def attach(self, blocks: Iterable[Block]) -> None:
        """Put the hooks on; a module copied from the model carries them too, and they ignore it."""
        self._layer_hooks.restore()
        remove_hooks(self._handles)
        self.uses = {}
        for block in blocks:
            for module, layer in block.uses.items():
                self.uses.setdefault(module, []).append((block, layer))
        self._blocks = {block for uses in self.uses.values() for block, _ in uses}
        self.fired &= self._blocks
        if "torch._dynamo" in sys.modules:  # torch's optimizers import it, so it is there before a model is compiled
            run_hooks_in_compiled_models()
        ATTACHED.add(self)
        self.forwards.closed = False
        me = self.me
        self._readings, self._products = {}, {}
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
        """Remove the hooks and let go of what was captured; graphs that are still there are of no interest."""
        self.forwards.closed = True
        self._layer_hooks.restore()
        remove_hooks(self._handles)
        ATTACHED.discard(self)
        self.drop()

    def drop(self) -> None:
        """Forget what was captured and not used, a forward that somebody interrupted too."""
        if self._entered.under_way:
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
        """Hand on everything that waited for the rest of its record."""
        if not self.examples:
            self.examples = self.forwards.adopt_inner()
        for record in self.forwards.records:
            if record.waiting:
                self.forwards.hand_on(record)

    # --- the forward pass -----------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a forward of the model starts."""
        if self._entered.under_way:
            self._entered.leave_interrupted()
        record = self.forwards.begin(args, kwargs)
        quiet = record is not None and record.n is not None and self.nothing_to_learn()
        self.forwards.here.quiet = quiet
        if record is not None:
            record.quiet = quiet
        self._layer_hooks.mute(quiet and not self.compiled)
        if quiet and self.by_outputs:
            self.on_quiet(False)

    def passed(self) -> None:
        """Note that a backward pass has brought gradients: one that came to no record began inside the last forward."""
        record = self.forwards.here.latest or self.forwards.latest
        if record is not None and record.quiet and not record.reached and not self.separate:
            self.by_outputs = False
            self.reach(record)

    def nothing_to_learn(self) -> bool:
        """Tell whether no layer's calls are needed at this step, and none waits to be seen for the first time."""
        unsure = not self.by_outputs and (self.exact_count or self.by_outputs is None)
        return not (unsure or self.separate or self.on_output) and self._blocks <= self.fired and not self.wanted(None)

    def end(self, output: Any) -> None:
        """Note that a forward of the model has ended, well or by an exception."""
        self.forwards.here.quiet = False
        self._layer_hooks.restore()
        record = self.forwards.end()
        if record is None:
            return
        me = self.me

        def hook(d: Tensor) -> None:
            if (capture := me()) is not None:
                capture._come(record)

        for tensor in tensors(output):
            if tensor.grad_fn is not None:  # examples count even where no covered layer takes part
                anchor(tensor)[0].register_hook(hook)

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Keep a covered layer's input until its output's gradient comes; return what to give out."""
        uses = self.uses.get(module)
        if uses is None or not self.forwards.enabled or inside_transform():
            return None
        if module in self._readings:
            if isinstance(output, tuple) and all(isinstance(t, Tensor) for t in output):
                # A cell's new state is made of its new memory: only a copy has the gradient that comes from outside.
                output = tuple(t.clone() for t in output)
            watch_whole(self, self._readings[module], uses, args, kwargs, output)
            return output
        if isinstance(output, Tensor) and output.requires_grad:
            x = args[0] if args else next(iter(kwargs.values()))
            for block, layer in uses:
                self.watch(block, layer, x, output)
        return None

    def watch(self, block: Block, layer: Layer, x: Tensor, output: Tensor, arrange: Arrange | None = None) -> None:
        """Keep ``x``, the input of a block's product ``output``, until the gradient of the output comes."""
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
            source = x if origin is not None and layer.linear else None
            x = whole(x.detach())
            if arrange is None and 0 < self.batch_dim < layer.free_dims(x) and x.shape[self.batch_dim] == n:
                arrange = self._batch_first
            given = self.checked(block, layer, x, n, arrange)
            given.source = source
        self.wait_for(anchor(output), record, block, layer, given, origin)

    def wait_for(self, at: Anchor, record: Record, block: Block, layer: Layer, given: Input, from_: Origin) -> None:
        """Wait for the gradient of a product's output; that of a pass that is differentiated makes another product."""
        (output, read), call, me = at, self.number(record, block), self.me

        def hook(d: Tensor) -> None:
            if (capture := me()) is not None:
                if torch.is_grad_enabled() and capture.forwards.enabled:
                    follow(capture, record, block, layer, given, from_, d, read)
                d = d.detach() if read is None else read(d.detach())
                capture.arrived(record, block, layer, given, d if given.x is None else whole(d), call)

        output.register_hook(hook)

    def number(self, record: Record, block: Block) -> int:
        """Count a call of a block within a record; return how many there were before."""
        number = record.calls.get(block, 0)
        record.calls[block] = number + 1
        if inside_backward():
            record.recomputed.add(block)
        return number

    def _batch_first(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(self.batch_dim, 0)

    def _leading(self, layer: Layer, x: Tensor) -> int:
        """Guess how many examples a layer's input has."""
        free = layer.free_dims(x)
        return int(x.size(self.batch_dim if free > self.batch_dim else 0)) if free else 1

    def enter(self, module: nn.Module) -> None:
        """Watch the products of a module that hides them and is about to be called, if any is needed."""
        uses = self.uses.get(module)
        if uses is None or not (self.forwards.enabled and torch.is_grad_enabled()) or inside_transform():
            return
        if any(self.wanted(block) or block not in self.fired for block, _ in uses):
            self._entered.enter(module, self._products[module])

    def leave(self, module: nn.Module) -> None:
        """Stop watching: the module has been called."""
        self._entered.leave(module)

    def checked(self, block: Block, layer: Layer, x: Tensor, n: int, arrange: Arrange | None = None) -> Input:
        """Keep an input; refuse one whose positions belong to no example, where that matters."""
        if layer.free_dims(x) == 0:
            arrange = as_batch
        x = x if arrange is None else arrange(x)
        if self.per_example:
            refuse_unaligned(block, layer, x, n)
            if (block, x.shape) not in self._looked_at and layer.shared(x):
                refuse(block, x, "and counts up, as positions that all examples share do")
            self._looked_at.add((block, x.shape))
        self.held.add(x)
        return Input(x, arrange)

    # --- the backward pass ----------------------------------------------------------------------------------------

    def counts(self, block: Block | None) -> bool:
        """Tell whether the backward pass under way is to be captured."""
        return self.forwards.enabled and (self.separate or self.reaches_parameters(block))

    def _come(self, record: Record) -> None:
        """Note that a backward pass has come to the output of a forward."""
        self.forwards.reach(record)
        if torch.is_grad_enabled():
            self.by_outputs = False  # which gradients a differentiated pass is after, only layers can tell
        if self.counts(None):
            record.by_output = True
            self.reach(record)
            if record.quiet and self.by_outputs:
                self.on_quiet(True)

    def reach(self, record: Record) -> None:
        """Count the examples of a record that a backward pass has come to, once."""
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
        """Take the gradient of a call's output."""
        if given.x is None and record.reached and block in self.fired and not self.separate:
            self.forwards.reach(record)
            return  # nothing that is not known
        if not self.counts(block):
            return
        self.reach(record)
        self.fired.add(block)
        x = given.x
        if x is None:
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
            return  # an expert that no token was sent to
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
        """Capture backward passes inside apart from the training loss and its examples."""
        self.separate = True
        try:
            yield
            for record in self.forwards.records:
                self.forwards.hand_on(record)
        finally:
            self.separate = False
