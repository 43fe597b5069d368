"""Records the input h of each layer in the forward pass and the gradient delta of its output in the backward pass.

A forward hook on every covered module keeps the input and puts a tensor hook on the output. Tensor hooks, unlike full
backward hooks, are not disturbed by in-place activations. Every forward of the model is one :class:`Record` of ``n``
examples. All calls of a layer within one record are positions of the same examples, so they are handed on together:
at once where there was one call and the graph is freed, else when the record is complete.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.hooks import (
    BeginHook,
    EndHook,
    ForwardHook,
    calls_under_way,
    inside_backward,
    inside_transform,
    keeps_graph,
    remove_hooks,
    run_hooks_in_compiled_models,
)
from ekfac.curvature.capture.records import Held, Input, Record
from ekfac.curvature.layers.base import Call, Layer

#: Receives all calls of one block in one record, once: (block, calls, n).
Receiver = Callable[[Block, list[Call], int], None]


_ATTACHED: weakref.WeakSet[Capture] = weakref.WeakSet()


class Capture:
    """Hooks on a model that hand h and delta to a receiver; :meth:`attach` puts them on.

    Args:
        model: The model whose forward counts the examples.
        receive: Called with all calls of a block in one record.
        wanted: Whether a block's tensors are needed at this step; otherwise only examples are counted.
        before_forward: Called when a forward of the model is about to be captured; says whether to.
        lands: Called within a backward pass: whether it brings a gradient to a block's parameters (for None: to any of
            the model), and not only to somebody who asks torch.autograd.grad for that of an input.
        batch_dim: The dimension of the model's input that counts examples.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receiver,
        wanted: Callable[[Block], bool] = lambda block: True,
        before_forward: Callable[[], bool] = lambda: True,
        lands: Callable[[Block | None], bool] = lambda block: True,
        batch_dim: int = 0,
    ) -> None:
        self.model = model
        self.receive = receive
        self.wanted = wanted
        self.before_forward = before_forward
        self.lands = lands
        self.batch_dim = batch_dim
        self.enabled = True
        #: Inside ``statistics()``: backward passes that are not the training loss's.
        self.aside = False
        self.examples = 0
        self.examples_aside = 0
        self.fired: set[Block] = set()
        self.held = Held()
        self._records: list[Record] = []
        self._current: Record | None = None
        self._latest: Record | None = None
        self._depth = 0
        #: The backward pass that reached a record last.
        self._task = -1
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove_hooks, self._handles)
        self._uses: dict[nn.Module, list[tuple[Block, Layer]]] = {}

    # --- hooks ----------------------------------------------------------------------------------------------------

    def attach(self, blocks: Iterable[Block]) -> None:
        """Put the hooks on; a module copied from the model carries them too, and they ignore it."""
        remove_hooks(self._handles)
        self._uses = {}
        for block in blocks:
            for module, layer in block.uses.items():
                self._uses.setdefault(module, []).append((block, layer))
        self.fired &= {block for uses in self._uses.values() for block, _ in uses}
        if "torch._dynamo" in sys.modules:  # torch's optimizers import it, so it is there before a model is compiled
            run_hooks_in_compiled_models()
        _ATTACHED.add(self)
        me = weakref.ref(self)
        self._handles += [module.register_forward_hook(ForwardHook(me)) for module in self._uses]
        self._handles.append(self.model.register_forward_pre_hook(BeginHook(me), with_kwargs=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(EndHook(me), always_call=True))

    def close(self) -> None:
        """Remove the hooks and let go of what was captured."""
        remove_hooks(self._handles)
        _ATTACHED.discard(self)
        self.drop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture nothing: forwards inside count no examples."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def drop(self) -> None:
        """Forget what was captured and not used, a forward that somebody interrupted too."""
        for record in self._records:
            record.forget()
        self._records = []
        self._current, self._depth = None, 0
        self.examples = self.examples_aside = 0
        self.held.reset()

    def finish(self) -> None:
        """Hand on everything that waited for the rest of its record."""
        for record in self._records:
            self._hand_on(record)

    # --- the forward pass -----------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward of the model starts: count its examples."""
        if self._depth and calls_under_way(self.model) < 2:  # the one that it was within has been interrupted
            self._current, self._depth = None, 0
        self._depth += 1
        if self._depth > 1 or not (self.enabled and torch.is_grad_enabled()) or inside_transform():
            return
        if inside_backward():
            # Checkpointing computes a forward again: one that has a record, or, in its reentrant form, one that ran
            # without gradients before.
            if self._task == torch._C._current_graph_task_id():
                return
        elif not self.before_forward():
            return
        self._depth = 1
        # Records whose graph is gone cannot receive any more: hand them on before their successors add to memory.
        for record in self._records:
            if record.reached and not record.kept:
                self._hand_on(record)
        self._current = self._latest = Record(self._count(args, kwargs))
        self._list(self._current)

    def _list(self, record: Record) -> None:
        if not record.listed:
            record.listed = True
            self._records.append(record)

    def end(self, output: Any) -> None:
        """A forward of the model ended, well or by an exception."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._current is not None:
            record, self._current = self._current, None
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:  # examples count even where no covered layer takes part
                    tensor.register_hook(lambda d: self._come(record))

    def _count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        tensor = next(_tensors((args, kwargs)), None)
        if tensor is None or tensor.dim() <= self.batch_dim:
            found = "no tensor" if tensor is None else f"first a tensor of shape {tuple(tensor.shape)}"
            raise ValueError(
                f"batch_dim={self.batch_dim}: the model's input must have a tensor whose dimension "
                f"{self.batch_dim} counts examples, but it has {found}"
            )
        return int(tensor.shape[self.batch_dim])

    def called(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """A covered layer was called: keep its input until its output's gradient comes."""
        if not (self.enabled and isinstance(output, Tensor) and output.requires_grad) or inside_transform():
            return
        # Activation checkpointing calls layers again within the backward pass: the same examples once more.
        record = self._current or (self._latest if inside_backward() else None)
        for block, layer in self._uses.get(module, ()):
            if record is None:
                output.register_hook(functools.partial(self._refuse, block))
                continue
            x = inputs[0] if self.wanted(block) else None
            if x is not None:
                if x.dim() == 1 and isinstance(module, nn.Linear):
                    raise ValueError(
                        f"layer '{block.name}': its input has shape {tuple(x.shape)}, without a dimension that counts "
                        "examples: give the model a batch of one, x[None]"
                    )
                x = self._by_example(x.detach(), record.n, block)
                self.held.add(x)
            call = record.calls[block]
            record.calls[block] += 1
            if inside_backward():
                record.recomputed.add(block)
            given = Input(x)

            def hook(
                d: Tensor, r: Record = record, b: Block = block, la: Layer = layer, i: Input = given, c: int = call
            ) -> None:
                self.arrived(r, b, la, i, d.detach(), c)

            output.register_hook(hook)

    def _refuse(self, block: Block, d: Tensor) -> None:
        """A gradient comes to a layer that was called outside a forward of the model."""
        if self.enabled and self.lands(block):
            raise RuntimeError(
                f"layer '{block.name}' was called outside a forward of the model given to the optimizer, so its "
                "examples cannot be counted: call the model itself, or exclude the layer"
            )

    def _by_example(self, tensor: Tensor, n: int, block: Block) -> Tensor:
        """Bring examples to the front, and check that there are k n of them."""
        if self.batch_dim:
            if tensor.dim() <= self.batch_dim or tensor.shape[self.batch_dim] != n:
                raise ValueError(
                    f"layer '{block.name}': its input has shape {tuple(tensor.shape)}, whose dimension "
                    f"batch_dim={self.batch_dim} is not the number of examples, {n}"
                )
            return tensor.movedim(self.batch_dim, 0)
        if n == 0 or tensor.dim() == 0 or tensor.shape[0] % n:
            raise ValueError(
                f"layer '{block.name}': its input has shape {tuple(tensor.shape)}, whose leading dimension is no "
                f"multiple of the number of examples, {n} (the model's input counts them). Layers that mix or share "
                f"examples have no gradient per example: exclude=['{block.name}'] gives it the diagonal method"
            )
        return tensor

    # --- the backward pass ----------------------------------------------------------------------------------------

    def _counts(self, block: Block | None) -> bool:
        """Whether the backward pass under way is to be captured."""
        return self.enabled and (self.aside or self.lands(block))

    def _come(self, record: Record) -> None:
        """A backward pass has come to the output of a forward."""
        self._latest, self._task = record, torch._C._current_graph_task_id()
        if self._counts(None):
            self._reach(record)

    def _reach(self, record: Record) -> None:
        """A backward pass has come to a record: its examples count, once."""
        self._latest, self._task = record, torch._C._current_graph_task_id()
        self._list(record)
        if self.aside:
            if not record.reached_aside:
                record.reached_aside = True
                self.examples_aside += record.n
        elif not record.reached:
            record.reached = True
            self.examples += record.n

    def arrived(self, record: Record, block: Block, layer: Layer, given: Input, d: Tensor, call: int) -> None:
        """The gradient of a call's output is here."""
        if given.x is None and record.reached and block in self.fired and not self.aside:
            self._latest, self._task = record, torch._C._current_graph_task_id()
            return  # nothing that is not known
        if not self._counts(block):
            return
        self._reach(record)
        self.fired.add(block)
        x = given.x
        if x is None:
            return
        if given.changed:
            raise RuntimeError(
                f"layer '{block.name}': its input was changed in place after the layer had read it, so it cannot be "
                f"captured: change a copy, or exclude=['{block.name}']"
            )
        if not keeps_graph():
            given.x = None
        if not self.wanted(block):
            return
        if self.batch_dim:
            d = d.movedim(self.batch_dim, 0)
        keep = keeps_graph() and not self.aside
        record.kept |= keep
        alone = record.calls[block] == 1 and block not in record.recomputed
        if alone and not keep and not record.waiting.get(block):
            self.receive(block, [Call(layer, x, d)], record.n)
            if given.x is None:
                self.held.remove(x)
            return
        waiting = record.waiting.setdefault(block, {})
        if call in waiting:
            self.held.remove(waiting[call].d)
            d = waiting[call].d + d
        self.held.add(d)
        waiting[call] = Call(layer, x, d)

    def _hand_on(self, record: Record) -> None:
        for block, calls in record.waiting.items():
            self.receive(block, list(calls.values()), record.n)
            for call in calls.values():
                self.held.remove(call.x)
                self.held.remove(call.d)
        record.waiting = {}

    @contextmanager
    def statistics_aside(self) -> Iterator[None]:
        """Backward passes inside are not the training loss's: they are captured apart from its examples."""
        self.aside = True
        try:
            yield
            for record in self._records:
                self._hand_on(record)
        finally:
            self.aside = False


@contextmanager
def unseen(model: nn.Module) -> Iterator[None]:
    """No capture that is on the model now sees what happens inside."""
    modules = set(model.modules())
    with ExitStack() as stack:
        for capture in list(_ATTACHED):
            if not modules.isdisjoint(capture._uses):
                stack.enter_context(capture.paused())
        yield


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of nested arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
