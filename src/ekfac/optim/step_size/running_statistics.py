"""The average of a model's running statistics (of its batch-norms), beside the average of its weights."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

#: Names of batch-norm's running statistics.
VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)
#: A norm and the name of one of its running statistics.
Place = tuple[nn.Module, str]

#: Which average each norm's statistics belong to: several optimizers may train parts of one model.
_TAKEN_BY: weakref.WeakKeyDictionary[nn.Module, weakref.ref[AveragedStatistics]] = weakref.WeakKeyDictionary()


class AveragedStatistics:
    """The average x of running statistics.

    They belong to the weights that they were computed with, so x has its own: the average of the batches' statistics,
    with the same weights c as the weights' average. The modules' own, which start at 0 and 1 and lag by about ten
    batches, belong to z. Norms whose weights are trained but not averaged keep their own.
    """

    def __init__(self) -> None:
        #: z - x by module and name, and x while the modules hold z.
        self.offsets: dict[Place, Tensor] = {}
        self.shown: dict[Place, Tensor] = {}
        self._buffers: list[Buffers] = []
        #: The places of :attr:`_buffers`, in two orders.
        self._places: tuple[list[Place], ...] = ()
        #: Modules with running statistics and the batches each had seen at the first forward (None before it); after
        #: the first step also the batches per forward. Reading these counters makes the host wait, so it is done once.
        self.norms: dict[nn.Module, int] | None = None
        self._calls: dict[nn.Module, int] | None = None
        #: Forward passes in training mode since the last step.
        self._forwards = 0
        #: Whether the state was loaded from a checkpoint made between forward and step: it then holds z' - x instead of
        #: z - x, from which x has to be recovered.
        self._found_amid = False

    def before_forward(self, model: nn.Module | None, trains: bool) -> None:
        """Count a forward pass."""
        self._forwards += trains
        self.find_shown()
        if self.norms is None:
            self.norms = {module: batches_of(module) for module in norms_of(model)}

    def find_shown(self) -> None:
        """Recover x after a checkpoint that was made between forward and step."""
        if self._found_amid:
            self._found_amid = False
            self.shown = {(m, name): getattr(m, name) - d for (m, name), d in self.offsets.items() if m.training}

    def to_training(self) -> None:
        """Put z into the modules."""
        places = [place for place in self.offsets if place[0].training]
        if places:
            self.shown = {}
            for buffers in self._buffers_at(places):
                buffers.to_training()
                self.shown |= buffers.shown

    def rest(self) -> None:
        """Put x into the modules, as if there had been no forward pass."""
        if self.shown:
            torch._foreach_copy_([getattr(module, name) for module, name in self.shown], list(self.shown.values()))
        self.shown = {}

    def end_step(self, weight: float, ok: Tensor | None, weights: Set[nn.Parameter], sharded: bool) -> None:
        """Include the batches' statistics, d <- (1 - c) (z - x), and put x into the modules.

        Args:
            weight: c; 0 if the step was not taken.
            ok: 0 on the device if the step was skipped, else 1; None if the host knows.
            weights: The weights with an average.
            sharded: Whether they are sharded over ranks.
        """
        forwards, self._forwards = self._forwards, 0
        norms = self.norms or {}
        if self._calls is None:
            seen = {module: batches_of(module) - before for module, before in norms.items()}
            self._calls = {module: max(1, batches // max(1, forwards)) for module, batches in seen.items()}
        if norms and len(self.shown) < len(STATISTICS) * sum([module.training for module in norms]):
            fresh = [m for m in norms if m.training and (m, VARIANCE) not in self.offsets]
            new = [(m, name) for m in fresh if self._takes(m, weights, sharded) for name in STATISTICS]
            self.offsets.update((place, torch.zeros_like(getattr(*place))) for place in new)
        if self.shown:
            for buffers in self._buffers_at(list(self.shown)):
                if any(map(operator.is_not, buffers.shown.values(), [self.shown[place] for place in buffers.places])):
                    buffers.find_shown(self.shown)
                buffers.average(forwards, self._calls, weight, ok)
            self.shown = {}

    def _takes(self, norm: nn.Module, weights: Set[nn.Parameter], sharded: bool) -> bool:
        """Return whether to average a norm's statistics: if its weights are averaged, or else unless others do."""
        own = [] if sharded else [p for p in norm.parameters(recurse=False) if p.requires_grad]
        other = _TAKEN_BY.get(norm, lambda: None)()
        others = other is not None and other is not self and (norm, VARIANCE) in other.offsets
        if weights.isdisjoint(own) if own else others:
            return False
        if other is not None and others:
            other._leave(norm)
        _TAKEN_BY[norm] = weakref.ref(self)
        return True

    def leave(self, weights: Set[nn.Parameter]) -> None:
        """Stop averaging the statistics of norms that have any of these weights."""
        for norm in {m for m, _ in self.offsets if not weights.isdisjoint(m.parameters(recurse=False))}:
            self._leave(norm)

    def _leave(self, norm: nn.Module) -> None:
        for name in STATISTICS:
            self.offsets.pop((norm, name), None)
            self.shown.pop((norm, name), None)

    def adopt(self, offsets: dict[Place, Tensor], amid: bool) -> None:
        """Replace the state by that of a checkpoint, which may have been made between forward and step."""
        self.offsets, self.shown, self._found_amid = offsets, {}, amid
        self._buffers, self._places = [], ()

    def _buffers_at(self, places: list[Place]) -> list[Buffers]:
        if places not in self._places or not all(buffers.unchanged() for buffers in self._buffers):
            self._buffers = buffers_at(places, self.offsets)
            self._places = places, [place for buffers in self._buffers for place in buffers.places]
        return self._buffers


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
