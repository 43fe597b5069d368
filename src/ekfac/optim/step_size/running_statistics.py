"""The running statistics that a model's batch-norms keep."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

#: Running statistics of batch-norm, which belong to the weights that they were taken with.
VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)
#: A norm and the name of one of its running statistics.
Place = tuple[nn.Module, str]


class Buffers:
    """Running statistics in lists, as torch takes many tensors at once, with room for two copies of each.

    Args:
        places: Where they are.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self.now: list[Tensor] = [getattr(module, name) for module, name in places]
        self.copies = [torch.empty_like(b) for b in self.now]
        self.moved = [torch.empty_like(b) for b in self.now]
        self.variances = [b for b, (_, name) in zip(self.now, places, strict=True) if name == VARIANCE]

    def hold(self, places: Sequence[Place]) -> bool:
        """Tell whether these are what is at some places: a model that is moved or cast gets others."""
        if self.places != places:
            return False
        return all(map(operator.is_, self.now, [module._buffers.get(name) for module, name in places]))

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors on the devices and in the dtypes of these."""
        pairs = zip(tensors, self.now, strict=True)
        return [t if t.dtype == b.dtype and t.device == b.device else t.to(b) for t, b in pairs]


def fraction(module: nn.Module, batches: int) -> float:
    """Return how much of a norm's running statistics is from its last batches; all where it keeps a plain mean."""
    momentum = getattr(module, "momentum", None)
    return 1.0 if momentum is None or not batches else 1 - (1 - momentum) ** batches or 1.0


def batches_of(module: nn.Module) -> int:
    """Return how many batches a norm has seen; 0 where it does not count them."""
    counted = getattr(module, "num_batches_tracked", None)
    return int(counted) if isinstance(counted, Tensor) else 0


def norms_of(model: nn.Module | None) -> list[nn.Module]:
    """Return the modules of a model that keep running statistics."""
    modules = [] if model is None else list(model.modules())
    return [m for m in modules if isinstance(m, _NormBase) and isinstance(m.running_mean, Tensor)]
