"""Passes over the data: forward passes, the estimate's backward passes, and each layer's calls in them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from ekfac.curvature import fingerprint
from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.capture import Capture
from ekfac.curvature.capture.hooks import inside_backward
from ekfac.curvature.fisher.batches import Batch, Progress, read_batch
from ekfac.curvature.fisher.estimates import Cotangents, Estimate
from ekfac.curvature.fisher.per_example import ExampleGradients
from ekfac.curvature.layers.base import Call

#: Bound in bytes on temporary tensors: a few caches' worth on a CPU, where more is not faster.
MEMORY = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}

#: Receives a block's calls in one forward for one or more backward passes, and whether their inputs were received
#: before: (block, passes, n, again).
PassReceiver = Callable[[Block, Sequence[Sequence[Call]], int, bool], None]

#: Receives rows ``[some, P]`` of per-example gradients.
RowReceiver = Callable[[Tensor], None]


class Data:
    """A model, its data and an estimate: everything that a pass over the data needs.

    Args:
        model: The model.
        batches: A loader or any other iterable of batches.
        estimate: The estimate of the Fisher.
        dtype: The dtype to cast floating-point inputs to; None leaves them.
        progress: The progress bar.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        estimate: Estimate,
        dtype: torch.dtype | None,
        progress: Progress,
    ) -> None:
        self.model = model
        self.batches = batches
        self.estimate = estimate
        self.dtype = dtype
        self.progress = progress
        self.device = next(model.parameters()).device
        self.memory = MEMORY.get(self.device.type, MEMORY["cuda"])
        self._begun: tuple[Any, Iterator[Any]] | None = None

    def read(self) -> Iterator[Batch]:
        """Yield the batches, on the model's device."""
        self.estimate.restart()
        batches = self.batches
        if self._begun is not None:
            batches, self._begun = itertools.chain([self._begun[0]], self._begun[1]), None
        for batch in self.progress.over(batches, self.batches):
            yield self._read_one(batch)

    def _read_one(self, batch: Any) -> Batch:
        return read_batch(batch, self.device, self.dtype, self.estimate.needs_target)

    def _first(self) -> Batch:
        """Return the first batch; the next pass starts with it, so that an iterator loses nothing."""
        if self._begun is None:
            iterator = iter(self.batches)
            try:
                self._begun = next(iterator), iterator
            except StopIteration:
                raise ValueError("there is no data: the loader gave no batch") from None
        return self._read_one(self._begun[0])

    def sweep(
        self,
        blocks: Sequence[Block],
        receive: PassReceiver,
        rows: ExampleGradients | None = None,
        receive_rows: RowReceiver | None = None,
    ) -> int:
        """Make one pass over the data.

        Args:
            blocks: Blocks whose calls are passed to ``receive``.
            receive: See :data:`PassReceiver`.
            rows: Computes per-example gradients, if wanted.
            receive_rows: See :data:`RowReceiver`.

        Returns:
            The number of examples.
        """
        total = 0
        grouped = Grouped(receive, self.memory)
        with captured(self.model, blocks, grouped.receive) as (capture, edges), torch.enable_grad():
            for batch in self.read():
                total += batch.n
                edges.clear()
                with torch.set_grad_enabled(bool(blocks)):
                    output = self.model(*batch.args, **batch.kwargs)
                waiting: list[Cotangents] = []
                for current, last in with_last(self.estimate.passes(output, batch.target, batch.n)):
                    if edges:
                        with capture.separate_statistics():
                            backward(output, current, edges, retain=not last)
                    if rows is None or receive_rows is None:
                        continue
                    waiting.append(current)
                    if last or rows.enough(waiting):
                        with capture.forwards.paused():
                            for piece in rows.rows(batch, waiting):
                                receive_rows(piece)
                        waiting = []
                del output, current
                grouped.finish()
                capture.drop()
        if total == 0:
            raise ValueError("there is no data: the loader gave no batch")
        return total

    def silent_layers(self, blocks: Sequence[Block]) -> list[Block]:
        """Check on the first batch that each layer's calls account for its whole gradient.

        Returns:
            Blocks that have a gradient although their layers are never called.
        """
        batch = self._first()
        if not blocks:
            return []
        seen: dict[Block, Tensor] = {}
        vectors = {block: fingerprint.vectors_of(block) for block in blocks}

        def take(block: Block, calls: list[Call], n: int) -> None:
            seen[block] = fingerprint.of_calls(block, calls, n, self.memory, vectors[block])

        parameters = [p for block in blocks for p in block.parameters.values()]
        with captured(self.model, blocks, take) as (capture, edges), torch.enable_grad():
            output = self.model(*batch.args, **batch.kwargs)
            first = next(self.estimate.passes(output, batch.target, batch.n))
            with capture.separate_statistics():
                found = backward(output, first, [*edges, *parameters], retain=False)[len(edges) :]
            fired = set(capture.fired)
        gradients, nothing = dict(zip(parameters, found, strict=True)), torch.zeros(2, device="cpu")
        silent = [b for b in blocks if b not in fired and any(gradients[p] is not None for p in b.parameters.values())]
        for block in fired:
            given = [torch.zeros_like(p) if (g := gradients[p]) is None else g for p in block.parameters.values()]
            found_here = fingerprint.of_gradient_with_size(block, given, vectors[block])
            if fingerprint.differs(block, found_here, seen.get(block, nothing)):
                raise RuntimeError(
                    f"layer '{block.name}': its gradient is not the one that passed through its calls (its weight is "
                    f"also used elsewhere, or {type(block.layer).__name__}, if it is a class of your own, is wrong "
                    "about h and delta or about the layout of the parameters), so its curvature cannot be captured: "
                    f"exclude=['{block.name}']"
                )
        if silent:
            warnings.warn(
                "these layers have gradients but their forward was never called, so they get their diagonal: "
                + ", ".join(block.name for block in silent),
                RuntimeWarning,
                stacklevel=3,
            )
        return silent


def with_last(items: Iterator[Cotangents]) -> Iterator[tuple[Cotangents, bool]]:
    """Yield each item with whether it is the last."""
    current = next(items, None)
    while current is not None:
        following = next(items, None)
        yield current, following is None
        current = following


class Grouped:
    """Groups the backward passes over one forward, so that work on the inputs is done once for several passes.

    Args:
        receive: Receives each block's passes.
        memory: Half of these bytes may be held; up to twice as many to group three passes of a block.
    """

    def __init__(self, receive: PassReceiver, memory: int) -> None:
        self._receive = receive
        self._memory = memory
        self._held: dict[Block, dict[tuple[int, ...], list[list[Call]]]] = {}
        self._bytes: dict[Block, int] = {}
        self._seen: set[tuple[Block, tuple[int, ...]]] = set()
        self._n = 0

    def receive(self, block: Block, calls: list[Call], n: int) -> None:
        """Hold a pass; when too much is held, pass on the block that gains least from grouping."""
        # Calls arrive in the order of the backward pass, and not every pass reaches all of them.
        calls = sorted(calls, key=lambda call: id(call.x))
        self._n = n
        self._held.setdefault(block, {}).setdefault(tuple(id(call.x) for call in calls), []).append(calls)
        size = sum(call.d.numel() * call.d.element_size() for call in calls)
        self._bytes[block] = self._bytes.get(block, 0) + size
        while (held := sum(self._bytes.values())) > self._memory // 2:
            ready = [b for b in self._held if held > 2 * self._memory or _gain(b) < 1 or self._passes(b) > 2]
            if not ready:
                break
            self._flush(min(ready, key=_gain))

    def _passes(self, block: Block) -> int:
        return sum(len(passes) for passes in self._held[block].values())

    @torch.no_grad()
    def _flush(self, block: Block) -> None:
        self._bytes.pop(block)
        for inputs, passes in self._held.pop(block).items():
            self._receive(block, passes, self._n, (block, inputs) in self._seen)
            self._seen.add((block, inputs))

    def finish(self) -> None:
        """Pass on everything at the end of a forward."""
        for block in list(self._held):
            self._flush(block)
        self._seen.clear()


def _gain(block: Block) -> float:
    """Return what grouping saves (columns of inputs) relative to what it holds (outputs)."""
    return block.shape.columns / block.shape.out


@contextmanager
def captured(
    model: nn.Module, blocks: Sequence[Block], receive: Callable[[Block, list[Call], int], None]
) -> Iterator[tuple[Capture, list[GradientEdge]]]:
    """Pass h and delta to ``receive`` by hooks; yield the edges of the graph at which the deltas arise."""
    edges: list[GradientEdge] = []
    capture = Capture(model, receive)

    def remember(output: Tensor) -> None:
        # The edge remains valid if an in-place activation overwrites the output. Activation checkpointing calls layers
        # again within the backward pass; only the first graph counts.
        if not inside_backward():
            edges.append(get_gradient_edge(output))

    capture.on_output = remember
    try:
        capture.attach(blocks)
        yield capture, edges
    finally:
        capture.close()


def backward(
    output: Any, cotangents: Cotangents, inputs: Sequence[GradientEdge | Tensor], *, retain: bool
) -> tuple[Tensor | None, ...]:
    """Return gradients of the output's tensors, weighted by the cotangents, with respect to ``inputs``."""
    pairs = [
        (leaf, c)
        for leaf, c in zip(tree_leaves(output), cotangents, strict=True)
        if c is not None and leaf.requires_grad
    ]
    if not pairs:
        return (None,) * len(inputs)
    return torch.autograd.grad(
        [leaf for leaf, _ in pairs],
        inputs,  # type: ignore[arg-type]  # a mix of tensors and edges is allowed
        [c for _, c in pairs],
        retain_graph=retain,
        allow_unused=True,
    )
