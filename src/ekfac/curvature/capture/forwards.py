"""Which examples a call belongs to: every forward of the model is a record, and calls outside of one share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ekfac.curvature.capture.counting import Count, Counted, count_examples
from ekfac.curvature.capture.hooks import calls_under_way, inside_backward, inside_transform
from ekfac.curvature.capture.records import Record


class Forwards:
    """The forwards of a model since the last step, and the one that is under way.

    Args:
        model: The model.
        before_forward: Called when a forward is about to be captured; says whether to.
        hand_on: Called with a record that can receive no more.
        batch_dim: The dimension of the model's input that counts examples.
        count: Says how many examples a forward has, from its arguments; by default the first tensor does.
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
        self.enabled = True
        self.records: list[Record] = []
        #: The record that a backward pass, or before one a forward, has come to last, and that backward pass.
        self.latest: Record | None = None
        self.task = -1
        self._before_forward = before_forward
        self.hand_on = hand_on
        self._batch_dim = batch_dim
        self._count_by = count
        self.current: Record | None = None
        #: Of layers that are called without the model's own forward.
        self.loose: Record | None = None
        self.depth = 0
        self.in_batch = False

    def adopt_inner(self) -> int:
        """Count batches whose gradients were differentiated, as there is no other: a penalty on gradients, say."""
        inner = [record for record in self.records if record.inner and record.reached]
        for record in inner:
            record.inner = False
        return sum(record.examples() for record in inner)

    def list(self, record: Record) -> None:
        """Look after a record; one that was dropped comes back when a backward pass reaches it."""
        if not record.listed:
            record.listed = True
            self.records.append(record)

    @contextmanager
    def batch(self, n: int) -> Iterator[None]:
        """Take all calls inside as of the same ``n`` examples, whether or not the model's own forward is called."""
        if self.in_batch:
            raise RuntimeError("batch() cannot be used within batch()")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"batch(n={n!r}): n must be a whole number of examples, at least 1")
        self.current, self.depth, self.in_batch = None, 1, True
        try:
            if self.enabled and torch.is_grad_enabled() and self._before_forward():
                self.current = self._new(Counted(n))
            yield
        finally:
            self.current, self.depth, self.in_batch = None, 0, False

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Record | None:
        """Count the examples of a forward of the model that starts; return its record if it gets one."""
        if self.depth and not self.in_batch and calls_under_way(self.model) < 2:
            self.current, self.depth = None, 0  # the one that it was within has been interrupted
        self.depth += 1
        if self.depth > 1 or not (self.enabled and torch.is_grad_enabled()) or inside_transform():
            return None
        if torch.compiler.is_exporting():
            return None
        if inside_backward():
            # Checkpointing computes a forward again: one that has a record, or, in its reentrant form, one that ran
            # without gradients before.
            if self.task == torch._C._current_graph_task_id():
                return None
        elif not self._before_forward():
            return None
        self.depth = 1
        self.current = self._new(self._count(args, kwargs))
        return self.current

    def end(self) -> Record | None:
        """Return the record of a forward that has ended, well or by an exception; None if it has none."""
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return None
        record, self.current = self.current, None
        return record

    def record(self) -> Record | None:
        """Return the record that a call under way belongs to; None if it is not to be captured."""
        if self.current is not None:
            return self.current
        if inside_backward() and self.latest is not None:
            return self.latest  # activation checkpointing calls layers again: the same examples once more
        if self.depth:
            return None
        if self.loose is None or self.loose.reached:
            if not self._before_forward():
                return None
            self.loose = self._new(Counted(None))
        return self.loose

    def _new(self, counted: Counted) -> Record:
        # Records whose graph is gone cannot receive any more: hand them on before their successors add to memory.
        for record in self.records:
            if record.reached and not record.kept and not record.inner:
                self.hand_on(record)
        record = self.latest = Record(counted)
        self.list(record)
        return record

    def _count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Counted:
        if self._count_by is None:
            return count_examples(args, kwargs, self._batch_dim)
        n = self._count_by(*args, **kwargs)
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"count= returned {n!r}, but must return how many examples the model is called with")
        return Counted(n)
