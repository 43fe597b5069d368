"""Scale and shift of normalisation layers: an exact 2 x 2 block per unit.

A unit's gradient in one example is the sum over positions of delta (x̂, 1). This vector takes the role of delta, with
h = 1. Then A = [1] and B is the exact second moment of the unit's gradient, so the Kronecker product, its eigenvalues
and s* are all exact.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac.curvature.layers.base import Call, Layer
from ekfac.curvature.layers.recognise import behaves_like, takes_one_tensor
from ekfac.curvature.layers.shapes import BlockShape


class NormLayer(Layer):
    """Common code of normalisation layers; subclasses define x̂ and which dimensions are units."""

    module: Any
    rough_in_half = True
    adds_calls = True

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False) -> None:
        super().__init__(module, roles)
        parameter = next(p for name, p in module.named_parameters(recurse=False) if name in roles)
        self.unit_shape = parameter.shape
        self.shape = BlockShape(parameter.numel(), len(roles), 1)

    def describe(self) -> str:
        side = len(self.roles)
        return f"exact {side} x {side} block for each of {self.shape.groups} units"

    @abstractmethod
    def normalised(self, x: Tensor) -> Tensor:
        """Return x̂: the input after normalisation, before scale and shift."""

    def by_unit(self, x: Tensor, n: int) -> Tensor:
        """Reshape to ``[n, positions, units]``, if units are the trailing dimensions."""
        return x.reshape(n, -1, self.shape.groups)

    def free_dims(self, x: Tensor) -> int:
        return x.dim() - len(self.unit_shape)

    def positions_per_example(self, d: Tensor, n: int) -> int:
        return d.numel() // (n * self.shape.groups)

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        delta = self.by_unit(d, n)
        parts = []
        if "weight" in self.roles:
            parts.append((delta * self.by_unit(self.normalised(x), n)).sum(1))
        if "bias" in self.roles:
            parts.append(delta.sum(1))
        gradient = torch.stack(parts, dim=-1)[:, None]
        return gradient.new_ones(n, 1, self.shape.groups, 1), gradient

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([tensors[r].reshape(-1) for r in ("weight", "bias") if r in self.roles], -1)[..., None]

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        roles = [r for r in ("weight", "bias") if r in self.roles]
        return {role: matrix[:, i, 0].reshape(self.unit_shape) for i, role in enumerate(roles)}


class LayerNormLayer(NormLayer):
    """``nn.LayerNorm``."""

    def normalised(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)


class RMSNormLayer(NormLayer):
    """``nn.RMSNorm``."""

    def normalised(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.module.normalized_shape, eps=self.module.eps)


class ForeignRMSNormLayer(NormLayer):
    """RMSNorm in other libraries (T5's LayerNorm, Llama's, Gemma's): scale, or 1 + scale, times x̂."""

    def normalised(self, x: Tensor) -> Tensor:
        return rms_normalised(x, self.module)

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Test whether a module with a vector of scales and an epsilon divides by the root mean square."""
        weight = module._parameters.get("weight")
        if set(module._parameters) != {"weight"} or weight is None or weight.dim() != 1 or module._modules:
            return False
        if _epsilon(module) is None or not takes_one_tensor(module):
            return False
        return behaves_like(
            module,
            len(weight),
            lambda x: module.get_parameter("weight") * rms_normalised(x, module),
            lambda x: (1 + module.get_parameter("weight")) * rms_normalised(x, module),
        )


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def rms_normalised(x: Tensor, module: nn.Module) -> Tensor:
    """Divide x by its root mean square, in at least float32, as all of them do."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    epsilon = _epsilon(module)
    assert epsilon is not None
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


class ChannelNormLayer(NormLayer):
    """Layers whose units are the channels, dimension 1."""

    def free_dims(self, x: Tensor) -> int:
        return 1

    def by_unit(self, x: Tensor, n: int) -> Tensor:
        return x.reshape(x.shape[0], self.shape.groups, -1).transpose(1, 2).reshape(n, -1, self.shape.groups)


class GroupNormLayer(ChannelNormLayer):
    """``nn.GroupNorm``."""

    def normalised(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.module.num_groups, eps=self.module.eps)


#: The number of examples that suffices for batch-norm's blocks.
EXAMPLES = 32


class BatchNormLayer(ChannelNormLayer):
    """``nn.BatchNorm1d``, ``nn.BatchNorm2d``, ``nn.BatchNorm3d``; x̂ depends on the whole batch's statistics."""

    splittable = False

    def normalised(self, x: Tensor) -> Tensor:
        m = self.module
        if m.training or m.running_mean is None:
            return F.batch_norm(x, None, None, training=True, eps=m.eps)
        return F.batch_norm(x, m.running_mean.to(x), m.running_var.to(x), training=False, eps=m.eps)

    @functools.cached_property
    def reads_normalised(self) -> Layer:
        """The layer that reads inputs which are already normalised."""
        return NormalisedLayer(self.module, self.roles)

    def thinned(self, x: Tensor, d: Tensor, n: int) -> tuple[int, Call] | None:
        """Compute the batch's statistics from all examples, but normalise only those that are kept."""
        m, step = self.module, n // EXAMPLES
        step = step - 1 + step % 2
        if step < 3 or len(x) != n or len(d) != n:
            return None
        wide, shape = torch.promote_types(x.dtype, torch.float32), (1, -1, *[1] * (x.dim() - 2))
        if not (m.training or m.running_mean is None):
            mean, invstd = m.running_mean.to(wide), (m.running_var.to(wide) + m.eps).rsqrt()
        elif x.is_cuda:
            mean, invstd = torch.batch_norm_stats(x, m.eps)
        else:
            var, mean = torch.var_mean(x.to(wide), [0, *range(2, x.dim())], correction=0)
            invstd = (var + m.eps).rsqrt()
        normalised = (x[::step] - mean.view(shape)) * invstd.view(shape)  # promoted to the mean's wider dtype
        return step, Call(self.reads_normalised, normalised.to(x.dtype), d[::step])


class NormalisedLayer(ChannelNormLayer):
    """Batch-norm whose inputs are already normalised."""

    def normalised(self, x: Tensor) -> Tensor:
        return x
