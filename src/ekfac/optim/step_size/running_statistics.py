"""The running statistics of a model's batch-norms."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

#: Names of batch-norm's running statistics.
VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)
#: A norm and the name of one of its running statistics.
Place = tuple[nn.Module, str]


class Buffers:
    """Running statistics of one dtype on one device, concatenated in flat tensors, variances last.

    Args:
        places: The modules and names of the statistics.
        statistics: z - x of each; its entries are replaced by views of a flat tensor.
    """

    def __init__(self, places: Sequence[Place], statistics: dict[Place, Tensor]) -> None:
        self.places = sorted(places, key=lambda place: place[1] == VARIANCE)
        self.now: list[Tensor] = [getattr(module, name) for module, name in self.places]
        sizes = [b.numel() for b in self.now]
        self._means = sum(size for size, (_, name) in zip(sizes, self.places, strict=True) if name != VARIANCE)
        flat = self.now[0].new_zeros(4, sum(sizes))
        self._x, self._d, self._z, self._fractions = flat.unbind()
        self._shown, kept, self._moved, self._divisors = (
            [part.view_as(b) for part, b in zip(one.split(sizes), self.now, strict=True)] for one in flat.unbind()
        )
        torch._foreach_copy_(kept, [statistics[place].to(b) for place, b in zip(self.places, self.now, strict=True)])
        statistics.update(zip(self.places, kept, strict=True))
        #: x of each.
        self.shown = dict(zip(self.places, self._shown, strict=True))
        self._modules = [module for module, _ in self.places]
        self._divided_for: list[Any] = []

    def unchanged(self) -> bool:
        """Return whether the modules still hold the same buffers; moving or casting a model replaces them."""
        return all(map(operator.is_, self.now, [module._buffers.get(name) for module, name in self.places]))

    def to_training(self) -> None:
        """Save x from the modules, and put z = x + d there."""
        torch._foreach_copy_(self._shown, self.now)
        torch.add(self._x, self._d, out=self._z)
        self._z[self._means :].clamp_min_(0)
        torch._foreach_copy_(self.now, self._moved)

    def average(self, forwards: int, calls: Mapping[nn.Module, int], weight: float, ok: Tensor | None) -> None:
        """Include the statistics b of a step's batches in x <- x + c (b - x), and put x into the modules.

        b follows from what the modules did: z' = z + f (b - z), with f their momentum (more after several batches).

        Args:
            forwards: The number of forward passes.
            calls: The number of batches per forward of each norm, if not one.
            weight: c.
            ok: 0 on the device if the step was skipped, else 1; None if the host knows.
        """
        self._divide_for([forwards, *(getattr(module, "momentum", None) for module in self._modules)], calls)
        torch._foreach_copy_(self._moved, self.now)
        self._z.sub_(self._x)  # z' - x: the next d, except for the change of x
        moved = (self._z - self._d).div_(self._fractions).add_(self._d)  # b - x
        moved.mul_(weight if ok is None else (weight * ok).to(moved))
        torch.sub(self._z, moved, out=self._d)
        self._x.add_(moved)
        self._x[self._means :].clamp_min_(0)
        torch._foreach_copy_(self.now, self._shown)

    def find_shown(self, shown: Mapping[Place, Tensor]) -> None:
        """Set x."""
        torch._foreach_copy_(self._shown, [shown[place] for place in self.places])

    def _divide_for(self, key: list[Any], calls: Mapping[nn.Module, int]) -> None:
        if key != self._divided_for:
            for divisor, module in zip(self._divisors, self._modules, strict=True):
                divisor.fill_(fraction(module, key[0] * calls.get(module, 1)))
            self._divided_for = key


def buffers_at(places: Sequence[Place], statistics: dict[Place, Tensor]) -> list[Buffers]:
    """Group running statistics by dtype and device."""
    kinds: dict[object, list[Place]] = {}
    for module, name in places:
        b = getattr(module, name)
        kinds.setdefault((b.dtype, b.device), []).append((module, name))
    return [Buffers(alike, statistics) for alike in kinds.values()]


def fraction(module: nn.Module, batches: int) -> float:
    """Return the weight of the last batches in a norm's running statistics; 1 if it keeps a cumulative mean."""
    momentum = getattr(module, "momentum", None)
    return 1.0 if momentum is None or not batches else 1 - (1 - momentum) ** batches or 1.0


def batches_of(module: nn.Module) -> int:
    """Return the number of batches a norm has seen; 0 if it does not count them."""
    counted = getattr(module, "num_batches_tracked", None)
    return int(counted) if isinstance(counted, Tensor) else 0


def norms_of(model: nn.Module | None) -> list[nn.Module]:
    """Return a model's modules with running statistics."""
    modules = [] if model is None else list(model.modules())
    return [m for m in modules if isinstance(m, _NormBase) and isinstance(m.running_mean, Tensor)]
