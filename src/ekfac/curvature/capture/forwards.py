"""Which examples a call belongs to: every forward of the model is a record, and calls outside of one share one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ekfac.curvature.capture.counting import Count, Counted, count_examples
from ekfac.curvature.capture.hooks import calls_under_way, inside_backward, inside_transform
from ekfac.curvature.capture.records import Record


class UnderWay(threading.local):
    """What one thread is in the middle of: another may evaluate the model meanwhile.

    Attributes:
        current: The record of the forward that is under way.
        loose: That of layers that are called without the model's own forward.
        latest: That of the last forward.
        depth: How many forwards of the model are under way within each other.
        in_batch: Whether ``batch()`` is.
        quiet: Whether the forward tells no more than its number of examples, so that hooks on layers do nothing.
    """

    def __init__(self) -> None:
        self.current: Record | None = None
        self.loose: Record | None = None
        self.latest: Record | None = None
        self.depth = 0
        self.in_batch = False
        self.quiet = False


class Forwards:
    """The forwards of a model since the last step, and those that are under way.

    Args:
        model: The model.
        before_forward: Called when a forward is about to be captured; returns whether to.
        hand_on: Called with a record that can receive no more.
        batch_dim: The dimension of the model's input that counts examples.
        count: Returns the number of examples of a forward, from its arguments; by default the first tensor's.
    """

    def __init__(
        self,
        model: nn.Module,
        before_forward: Callable[[], bool],
        hand_on: Callable[[Record], None],
        batch_dim: int,
        count: Count | None,
    ) -> None:
        self.model = model
        self.records: list[Record] = []
        self._before_forward = before_forward
        self.hand_on = hand_on
        #: Called when the model's forward, or ``batch()``, begins with gradients: nothing of it has been computed yet.
        self.on_begin: Callable[[], None] = lambda: None
        #: Called in its place where it is not captured, as the whole model is frozen.
        self.on_frozen: Callable[[], None] = lambda: None
        #: Called whenever a backward pass of the training loss has come to a layer or an output.
        self.on_backward: Callable[[], None] = lambda: None
        self._batch_dim = batch_dim
        self._count_by = count
        self.here = UnderWay()
        self.closed = False
        #: How often each thread has paused.
        self._paused: Counter[int] = Counter()
        #: The record that each backward pass has come to last; torch runs a pass in several threads.
        self.reached_by: dict[int, Record] = {}
        self.latest: Record | None = None

    @property
    def enabled(self) -> bool:
        """Whether forwards and backwards of this thread are captured."""
        if not self._paused or self.closed:
            return not self.closed
        # A thread of torch's own, which runs a part of a backward pass, belongs to whoever has paused.
        ours = not isinstance(threading.current_thread(), threading._DummyThread)
        return ours and threading.get_ident() not in self._paused

    @property
    def any_reached(self) -> bool:
        """Whether a backward pass has come to one."""
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
        """Tell whether there are records of another thread, whose backward pass may be under way."""
        thread = threading.get_ident()
        return any(record.thread != thread for record in self.records)

    def forget(self) -> None:
        """Let go of what records hold: graphs that are still there keep these alive."""
        for record in self.records:
            record.waiting = {}

    def adopt_inner(self) -> int:
        """Count batches whose gradients were differentiated, where there are no others: a penalty on gradients."""
        inner = [record for record in self.records if record.inner and record.reached]
        for record in inner:
            record.inner = False
        return sum(record.examples() for record in inner)

    def list(self, record: Record) -> None:
        """Look after a record; one that was dropped comes back when a backward pass reaches it."""
        if not record.listed:
            record.listed = True
            self.records.append(record)

    def reach(self, record: Record) -> None:
        """Note that the backward pass under way has come to a record."""
        self.reached_by[torch._C._current_graph_task_id()] = record

    @contextmanager
    def batch(self, n: int) -> Iterator[None]:
        """Take all calls inside as of the same ``n`` examples, whether or not the model's own forward is called."""
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
        """Count the examples of a forward of the model that starts; return its record if it gets one."""
        here = self.here
        if here.depth and not here.in_batch and calls_under_way(self.model) < 2:
            here.current, here.depth = None, 0  # the one that it was within has been interrupted
        here.depth += 1
        if here.depth > 1 or not (self.enabled and torch.is_grad_enabled()) or inside_transform():
            return None
        if torch.compiler.is_exporting():
            return None
        if inside_backward():
            # Checkpointing computes a forward again: one that has a record, or, in its reentrant form, one that ran
            # without gradients before.
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
        """Return the record of a forward that has ended, well or by an exception; None if it has none."""
        here = self.here
        here.depth = max(0, here.depth - 1)
        if here.depth:
            return None
        record, here.current = here.current, None
        return record

    def record(self) -> Record | None:
        """Return the record that a call under way belongs to; None if it is not to be captured."""
        here = self.here
        if here.current is not None:
            return here.current
        if inside_backward():  # activation checkpointing calls layers again: the same examples once more
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
        # Records whose graph is gone cannot receive any more: hand them on before their successors add to memory.
        for record in self.records:
            if record.reached and not record.kept and not record.inner:
                self.hand_on(record)
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
