"""The running statistics that a model's batch-norms keep."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

#: Running statistics of batch-norm, which belong to the weights that they were taken with.
VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)


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
