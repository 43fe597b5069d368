"""Assigns calls to records: every forward of the model has one, and calls outside of a forward share one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ekfac.curvature.capture.counting import Count, Counted, count_examples
from ekfac.curvature.capture.hooks import active_calls, inside_backward, inside_transform
from ekfac.curvature.capture.records import Record


class ThreadState(threading.local):
    """The state of one thread; another may evaluate the model at the same time.

    Attributes:
        current: The record of the current forward.
        loose: The record of layers called outside the model's forward.
        latest: The record of the last forward.
        depth: The depth of nested forwards of the model.
        in_batch: Whether inside ``batch()``.
        quiet: Whether only the number of examples is needed, so that hooks on layers do nothing.
    """

    def __init__(self) -> None:
        self.current: Record | None = None
        self.loose: Record | None = None
        self.latest: Record | None = None
        self.depth = 0
        self.in_batch = False
        self.quiet = False


class Forwards:
    """The forwards of a model since the last step, including current ones.

    Args:
        model: The model.
        before_forward: Called before a forward is captured; returns whether to capture it.
        deliver: Called with a record that is complete.
        batch_dim: The dimension of the model's input that is the batch.
        count: Returns the number of examples from the arguments of a forward; by default, the first tensor sets it.
    """

    def __init__(
        self,
        model: nn.Module,
        before_forward: Callable[[], bool],
        deliver: Callable[[Record], None],
        batch_dim: int,
        count: Count | None,
    ) -> None:
        self.model = model
        self.records: list[Record] = []
        self._before_forward = before_forward
        self.deliver = deliver
        #: Called before the model's forward with gradients, or ``batch()``, computes anything.
        self.on_begin: Callable[[], None] = lambda: None
        #: Called before the model's forward without gradients.
        self.on_preview: Callable[[], None] = lambda: None
        #: Called instead if the forward is not captured because the whole model is frozen.
        self.on_frozen: Callable[[], None] = lambda: None
        #: Called whenever a backward pass of the training loss reaches a layer or an output.
        self.on_backward: Callable[[], None] = lambda: None
        self._batch_dim = batch_dim
        self._count_by = count
        self.here = ThreadState()
        self.closed = False
        #: The depth of nested ``paused()``, by thread.
        self._paused: Counter[int] = Counter()
        #: The last record that each backward pass has reached, by pass, as torch runs a pass in several threads.
        self.reached_by: dict[int, Record] = {}
        self.latest: Record | None = None

    @property
    def enabled(self) -> bool:
        """Whether forward and backward passes of this thread are captured."""
        if not self._paused or self.closed:
            return not self.closed
        # autograd's own threads are assumed to work for the thread that has paused.
        ours = not isinstance(threading.current_thread(), threading._DummyThread)
        return ours and threading.get_ident() not in self._paused

    @property
    def any_reached(self) -> bool:
        """Whether a backward pass has reached any record."""
        return any(record.reached for record in self.records)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture nothing of this thread."""
        thread = threading.get_ident()
        self._paused[thread] += 1
        try:
            yield
        finally:
            self._paused[thread] -= 1
            if not self._paused[thread]:
                del self._paused[thread]

    def busy_elsewhere(self) -> bool:
        """Return whether there are records of another thread, whose backward pass may be running."""
        thread = threading.get_ident()
        return any(record.thread != thread for record in self.records)

    def forget(self) -> None:
        """Free the tensors in records, which live as long as the graphs."""
        for record in self.records:
            record.waiting = {}

    def adopt_inner(self) -> int:
        """Count batches whose gradients were differentiated, if there are no others (as with a gradient penalty)."""
        inner = [record for record in self.records if record.inner and record.reached]
        for record in inner:
            record.inner = False
        return sum(record.examples() for record in inner)

    def list(self, record: Record) -> None:
        """Track a record; a dropped one is tracked again when a backward pass reaches it."""
        if not record.listed:
            record.listed = True
            self.records.append(record)

    def reach(self, record: Record) -> None:
        """Record that the current backward pass has reached a record."""
        self.reached_by[torch._C._current_graph_task_id()] = record

    @contextmanager
    def batch(self, n: int) -> Iterator[None]:
        """Assign all calls inside to the same ``n`` examples, whether or not the model's own forward is called."""
        here = self.here
        if here.in_batch:
            raise RuntimeError("batch() cannot be used within batch()")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"batch(n={n!r}): n must be a whole number of examples, at least 1")
        here.current, here.depth, here.in_batch = None, 1, True
        try:
            if self.enabled and torch.is_grad_enabled() and self._before_forward():
                self.on_begin()
                here.current = self._new(Counted(n))
            yield
        finally:
            here.current, here.depth, here.in_batch = None, 0, False

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Record | None:
        """Start a forward of the model and count its examples; return its record if it gets one."""
        here = self.here
        if here.depth and not here.in_batch and active_calls(self.model) < 2:
            here.current, here.depth = None, 0  # the enclosing forward was interrupted
        here.depth += 1
        if here.depth == 1 and self.enabled and not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            self.on_preview()
        if here.depth > 1 or not (self.enabled and torch.is_grad_enabled()) or inside_transform():
            return None
        if torch.compiler.is_exporting():
            return None
        if inside_backward():
            # Activation checkpointing recomputes a forward. In its reentrant form, that forward ran without gradients
            # before and has no record yet.
            if torch._C._current_graph_task_id() in self.reached_by:
                return None
        elif not self._before_forward():
            self.on_frozen()
            return None
        else:
            self.on_begin()
        here.depth = 1
        here.current = self._new(self._count(args, kwargs))
        return here.current

    def end(self) -> Record | None:
        """End a forward, also after an exception; return its record, if it has one."""
        here = self.here
        here.depth = max(0, here.depth - 1)
        if here.depth:
            return None
        record, here.current = here.current, None
        return record

    def record(self) -> Record | None:
        """Return the record that the current call belongs to; None if it is not to be captured."""
        here = self.here
        if here.current is not None:
            return here.current
        if inside_backward():  # activation checkpointing calls layers again, on the same examples
            latest = self.reached_by.get(torch._C._current_graph_task_id()) or here.latest or self.latest
            if latest is not None:
                return latest
        if here.depth:
            return None
        if here.loose is None or here.loose.reached:
            if not self._before_forward():
                return None
            here.loose = self._new(Counted(None))
        return here.loose

    def _new(self, counted: Counted) -> Record:
        # Records whose graph is gone are complete: pass them on to free memory before new ones add to it.
        for record in self.records:
            if record.reached and not record.kept and not record.inner:
                self.deliver(record)
        record = self.here.latest = self.latest = Record(counted)
        self.list(record)
        return record

    def _count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Counted:
        if self._count_by is None:
            return count_examples(args, kwargs, self._batch_dim)
        n = self._count_by(*args, **kwargs)
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"count= returned {n!r}, but must return how many examples the model is called with")
        return Counted(n)
