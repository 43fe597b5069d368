"""Vectors over a model's parameters: a dict of tensors by name or one flat tensor, single or stacked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ekfac import checks

#: One flat tensor ``[P]`` or a stack of columns ``[P, K]``; or a dict of ``[*shape]``, stacked ``[K, *shape]``.
Vector = Tensor | Mapping[str, Tensor]

#: Converts rows ``[K, P]`` back to the form of the original vector.
Restore = Callable[[Tensor], "Tensor | dict[str, Tensor]"]


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters, in the order of the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def numel(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    def places(self, names: tuple[str, ...]) -> slice | Tensor:
        """Return the indices of some parameters in the flat vector; a slice if they are contiguous."""
        starts: dict[str, int] = {}
        at = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            starts[name] = at
            at += size
        size_of = dict(zip(self.names, self.sizes, strict=True))
        ranges = [(starts[name], starts[name] + size_of[name]) for name in names]
        if all(one[1] == two[0] for one, two in itertools.pairwise(ranges)):
            return slice(ranges[0][0], ranges[-1][1])
        return torch.cat([torch.arange(*r, device="cpu") for r in ranges])

    def unflatten(self, rows: Tensor) -> dict[str, Tensor]:
        """Turn ``[..., P]`` into a dict of ``[..., *shape]``."""
        parts = rows.split(self.sizes, -1)
        return {
            name: part.reshape(*rows.shape[:-1], *shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Turn a dict of ``[*shape]`` or ``[K, *shape]`` into ``[P]`` or ``[K, P]``."""
        checks.instance("the vector", tensors, Mapping, "a dict from parameter name to tensor")
        missing = [name for name in self.names if name not in tensors]
        unknown = [name for name in tensors if name not in self.names]
        if missing or unknown:
            problem = (
                f"misses {', '.join(missing)}" if missing else f"has unknown names: {', '.join(map(str, unknown))}"
            )
            raise ValueError(f"the vector {problem}. Expected the parameters {', '.join(self.names)}")
        stacks = set()
        for name, shape in zip(self.names, self.shapes, strict=True):
            checks.instance(f"the vector's '{name}'", tensors[name], Tensor, f"a tensor of shape {shape}")
            _check_real(f"the vector's '{name}'", tensors[name])
            extra = tensors[name].dim() - len(shape)
            if extra not in (0, 1) or tuple(tensors[name].shape[extra:]) != shape:
                raise ValueError(
                    f"the vector's '{name}' has shape {tuple(tensors[name].shape)}; expected {shape}, or "
                    f"{('K', *shape)} for a stack of K vectors"
                )
            stacks.add(tuple(tensors[name].shape[:extra]))
        if len(stacks) > 1:
            raise ValueError("some of the vector's tensors are stacked and others not, or not by the same number")
        lead = stacks.pop()
        return torch.cat(
            [tensors[name].reshape(*lead, size) for name, size in zip(self.names, self.sizes, strict=True)], -1
        )

    def read(self, v: Vector, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Restore]:
        """Convert any vector or stack to rows ``[K, P]``; also return the function that converts back."""
        if isinstance(v, Mapping):
            flat = self.flatten(v).to(device, dtype)
            if flat.dim() == 1:
                return flat[None], lambda rows: self.unflatten(rows[0])
            return flat, self.unflatten
        checks.instance("the vector", v, Tensor, "a tensor or a dict from parameter name to tensor")
        _check_real("the vector", v)
        if v.dim() not in (1, 2) or v.shape[0] != self.numel:
            raise ValueError(
                f"the vector has shape {tuple(v.shape)}; expected ({self.numel},), or ({self.numel}, K) for K vectors"
            )
        v = v.to(device, dtype)
        return (v[None], lambda rows: rows[0]) if v.dim() == 1 else (v.mT, lambda rows: rows.mT)


def _check_real(what: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        raise ValueError(f"{what} is complex ({tensor.dtype}). Allowed: real numbers")
