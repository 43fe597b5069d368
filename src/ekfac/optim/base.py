"""What EKFAC, KFAC and Preconditioner share: an engine on a model, and everything around a step."""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from ekfac import checks
from ekfac.curvature.blocks import Block
from ekfac.curvature.operators import Curvature
from ekfac.curvature.summary import Summary, summarise
from ekfac.optim.engine import Engine
from ekfac.optim.state import exchange


class Base:
    """An engine on a model."""

    model: nn.Module
    engine: Engine

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a call without a model, by an error that says so."""
        checks.constructs(cls.__name__, args, kwargs)
        checks.outside_inference_mode(f"{cls.__name__}()")
        return super().__new__(cls)

    def statistics(self) -> AbstractContextManager[None]:
        """Take factors and s* from backward passes inside instead of the training loss; leave ``.grad`` alone.

        For the true Fisher: ``with opt.statistics(): sampled_loss.backward(retain_graph=True)``.
        """
        return self.engine.collector.statistics()

    def batch(self, n: int) -> AbstractContextManager[None]:
        """Set the number of examples to ``n`` for all layers called inside, even if the model itself is not called."""
        return self.engine.collector.capture.forwards.batch(n)

    def paused(self) -> AbstractContextManager[None]:
        """Capture nothing from forward and backward passes inside."""
        return self.engine.collector.capture.forwards.paused()

    def attach_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Unscale statistics by a GradScaler that was created later, for example by a framework."""
        self.engine.attach_scaler(scaler)

    def summary(self) -> Summary:
        """Show which block covers each parameter, its factor sizes and its memory, on this process and on its owner."""
        engine, owners = self.engine, self.engine.partition.owners

        def numbers(block: Block) -> int:
            return engine.method_of(block).numbers(block)

        def here(block: Block) -> int:
            if owners.mine(block):
                return numbers(block)
            if not (block.covered and engine.method.needs_examples):
                return 0
            return block.eigen_numbers() - sum(block.factor_numbers())  # a copy of the basis, to compute s* in

        return summarise(engine.partition.blocks, numbers, owners.of if owners.size > 1 else lambda block: None, here)

    def curvature(self) -> Curvature:
        """Return a snapshot of the current curvature as an operator: products, solves, spectrum."""
        return exchange.curvature(self.engine)

    def seed(self, operator: Curvature) -> None:
        """Start from a KFAC or EKFAC operator of the same model."""
        exchange.seed(self.engine, operator)

    def close(self) -> None:
        """Remove the hooks from the model and free recorded CUDA graphs."""
        self.engine.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} has hooks on its model and cannot be pickled: save its state_dict() and the "
            "model's, or copy both with copy.deepcopy, whose .model is the copy"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a model; if a copy is already in progress (a model that holds its own optimizer), complete it now."""
    new = copy.deepcopy(model, memo)
    if "_modules" in vars(new):
        return new
    vars(new).update({name: copy.deepcopy(value, memo) for name, value in vars(model).items()})
    for name, child in model._modules.items():
        if child is not None and name not in new._modules:
            new._modules[name] = copied(child, memo)
    return new


def read_by_method_of(kind: type) -> bool:
    """Return whether the property that calls this is being read by a method of an object of class ``kind``."""
    return isinstance(sys._getframe(2).f_locals.get("self"), kind)
