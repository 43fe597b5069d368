"""Training steps that replay forward and backward pass as a CUDA graph whenever the optimizer needs only gradients."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ekfac.optim.cuda.replay import form, recording
from ekfac.optim.cuda.streams import OwnStream
from ekfac.optim.optimizer import Optimizer

#: A pass is recorded after it has run this many times.
REPEATS = 3


@dataclass(frozen=True)
class RecordedPass:
    """A recorded forward and backward pass, with its static inputs, outputs and gradients."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: Any
    gradients: dict[nn.Parameter, Tensor]
    examples: int


class GraphedStep:
    """Takes training steps; see :func:`graphed`."""

    def __init__(self, optimizer: Optimizer, backward: Callable[..., Any]) -> None:
        self.optimizer = optimizer
        self.backward = backward
        #: The number of replayed passes.
        self.replays = 0
        self._enabled = True
        self._seen: Counter[Hashable] = Counter()
        self._examples: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, RecordedPass] = {}
        self._own: tuple[OwnStream, tuple[int, int]] | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Take one step; return what ``backward`` returns, detached."""
        self.optimizer.zero_grad()
        key = self._key(inputs) if self._enabled and self._needs_gradients_alone(inputs) else None
        recorded = None if key is None else self._recorded.get(key) or self._record(key, inputs)
        if recorded is None:
            outputs = tree_map(_detached, self.backward(*inputs))
            self._note(key)
        else:
            outputs = self._replay(recorded, inputs)
        self.optimizer.step()
        return outputs

    def _needs_gradients_alone(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether this step needs no statistics, and everything in it can be recorded."""
        engine, options = self.optimizer.engine, self.optimizer.engine.options
        return (
            engine.partition.device.type == "cuda"
            and options.numerics.cuda_graphs
            and options.grad_scaler is None
            and not engine.shares()
            and engine.collector.capture.nothing_to_learn()
            and all(isinstance(t, Tensor) and t.is_cuda for t in inputs)
        )

    def _key(self, inputs: Sequence[Tensor]) -> Hashable:
        """Return everything that a recorded pass depends on."""
        partition = self.optimizer.engine.partition
        return partition.model.training, partition.generation, *map(form, inputs)

    def _note(self, key: Hashable) -> None:
        """Count a pass that ran eagerly, with its number of examples."""
        collector = self.optimizer.engine.collector
        if any(map(collector.watch.touched, collector.watch.parameters)):
            self._give_up("it changes gradients after its backward pass; do so in a hook, or call opt.step() yourself")
        if key is not None:
            self._seen[key] += 1
            self._examples[key] = collector.capture.examples

    def _record(self, key: Hashable, inputs: Sequence[Tensor]) -> RecordedPass | None:
        """Record a pass that has run often enough; return None if it is to run eagerly."""
        if self._seen[key] < REPEATS:
            return None
        collector, device = self.optimizer.engine.collector, inputs[0].device
        places = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        if self._own is None:
            self._own = OwnStream(device), torch.cuda.graph_pool_handle()
        own, pool = self._own
        collector.watch.enabled = False  # gradients have no values while recording
        try:
            with self.optimizer.paused(), recording(graph, pool=pool, stream=own.stream):
                outputs = tree_map(_detached, self.backward(*places))
        except Exception as error:  # any failure falls back to running eagerly
            self._give_up(str(error))
            self.optimizer.zero_grad()
            return None
        finally:
            collector.watch.enabled = True
        gradients = {p: p.grad for p in collector.watch.parameters if p.grad is not None}
        self.optimizer.zero_grad()
        recorded = RecordedPass(graph, places, outputs, gradients, self._examples[key])
        return self._recorded.setdefault(key, recorded)

    def _replay(self, recorded: RecordedPass, inputs: Sequence[Tensor]) -> Any:
        capture = self.optimizer.engine.collector.capture
        with torch.no_grad():
            torch._foreach_copy_(list(recorded.inputs), list(inputs))
        with self.optimizer.batch(recorded.examples):  # count the examples, as a forward pass would
            recorded.graph.replay()
        for p, gradient in recorded.gradients.items():
            p.grad = gradient
        assert capture.forwards.latest is not None
        capture.reach(capture.forwards.latest)
        self.replays += 1
        return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, recorded.outputs)

    def _give_up(self, why: str) -> None:
        self._enabled = False
        self._recorded.clear()
        self._own = None
        warnings.warn(f"graphed: this step cannot be recorded and runs eagerly: {why}", RuntimeWarning, stacklevel=4)


def graphed(optimizer: Optimizer, backward: Callable[..., Any]) -> GraphedStep:
    """Turn forward, backward and update into one call that replays CUDA graphs where possible.

    In most steps the optimizer needs only the gradient. Their forward and backward pass is recorded once and replayed,
    which frees small networks from Python's overhead. Steps that collect statistics run eagerly, as does everything on
    a CPU. Results are the same::

        def backward(x, y):
            loss = loss_fn(model(x), y)
            loss.backward()
            return loss

        step = ekfac.graphed(opt, backward)
        for x, y in loader:
            loss = step(x, y)

    ``backward`` must meet the requirements of CUDA graphs: its arguments are tensors on the GPU, it does the same
    operations every time, and it never synchronises. Each shape of batch is recorded separately.

    Args:
        optimizer: An :class:`~ekfac.EKFAC` or :class:`~ekfac.KFAC`.
        backward: Computes a loss of its tensor arguments, calls ``backward()`` and returns the loss, or anything that
            holds tensors. Gradients are cleared before it, and the step is taken after it.

    Returns:
        A function of the same arguments that takes a training step and returns what ``backward`` does, detached.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"graphed(optimizer={type(optimizer).__name__}): must be an ekfac.EKFAC or ekfac.KFAC")
    if not callable(backward):
        raise TypeError(f"graphed(backward={backward!r}): must be a function that computes a loss and calls backward()")
    return GraphedStep(optimizer, backward)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
