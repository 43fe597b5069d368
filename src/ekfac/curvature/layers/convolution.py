"""Convolutions of one to three dimensions, plain and transposed, with groups, and their SUA form.

h is the flattened receptive field at each output position, including padding. A transposed convolution is a plain
convolution of its input with stride - 1 zeros inserted between pixels, so its receptive field is defined likewise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac.curvature import factors
from ekfac.curvature.layers.base import Layer
from ekfac.curvature.layers.shapes import BlockShape

Convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TransposedConvs = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """View the receptive fields of x ``[M, channels, *size]`` as ``[M, channels, *positions, *kernel]``."""
    steps = x.stride()[2:]
    out = [(length - d * (k - 1) - 1) // s + 1
           for length, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]  # fmt: skip
    return x.as_strided(
        (*x.shape[:2], *out, *kernel),
        (
            *x.stride()[:2],
            *(step * s for step, s in zip(steps, stride, strict=True)),
            *(step * d for step, d in zip(steps, dilation, strict=True)),
        ),
    )


class _ConvolutionBase(Layer):
    """Common code of plain and transposed convolutions: windows become positions, weights become columns."""

    module: Any
    linear = True

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False) -> None:
        super().__init__(module, roles, sua=sua)
        m = self.module
        self.kernel: tuple[int, ...] = tuple(m.kernel_size)
        #: For each input size, how many (window, tap) pairs cover each pixel; cached on the device.
        self._weights: dict[tuple[int, ...], tuple[Tensor, int]] = {}
        self.groups: int = m.groups
        self.channels: int = m.in_channels // m.groups
        self.taps = 1
        for k in self.kernel:
            self.taps *= k
        bias = "bias" in roles
        out = m.out_channels // m.groups
        self.weight_columns = self.taps * self.channels if "weight" in roles else 0
        if self.sua and "weight" in roles:
            self.shape = BlockShape(m.groups, out, self.channels, taps=self.taps, extra=int(bias))
        else:
            self.sua = False
            self.shape = BlockShape(m.groups, out, self.weight_columns + bias)

    def free_dims(self, x: Tensor) -> int:
        return x.dim() - 1 - len(self.kernel)

    @abstractmethod
    def padded(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """Return the input that windows are taken from: padded and, for a transposed convolution, dilated by zeros."""

    @abstractmethod
    def fields(self, x: Tensor, out: Sequence[int]) -> Tensor:
        """Return receptive fields ``[M, channels, *positions, *kernel]`` in the order of the weight's taps."""

    def aligned(self, d: Tensor) -> Tensor:
        """Return the output's gradient with its positions in the order of :meth:`fields`."""
        return d

    def deltas(self, x: Tensor, d: Tensor, n: int) -> Tensor:
        s = self.shape
        by_group = self.aligned(d).reshape(d.shape[0], s.groups, s.out, -1)
        return by_group.permute(0, 3, 1, 2).reshape(n, -1, s.groups, s.out)

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        m, out, s = d.shape[0], d.shape[2:], self.shape
        delta = self.deltas(x, d, n)
        if not self.weight_columns:
            return delta.new_ones(n, delta.shape[1], s.groups, 1), delta
        fields = self.fields(x, out).unflatten(1, (s.groups, self.channels))
        dims = len(self.kernel)
        at, taps = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
        order = [1, *taps, 2, 0, *at] if self.sua else [1, 2, *taps, 0, *at]
        columns = (*self.kernel, self.channels) if self.sua else (self.channels, *self.kernel)
        # Write h once, including the bias column: it is the largest tensor of all, and a copy would double it. Writing
        # by columns is three to nine times faster than by rows, as adjacent positions are adjacent in x too.
        h = x.new_empty(s.groups, s.columns, m, *out)
        h[:, : self.weight_columns].unflatten(1, columns).copy_(fields.permute(order))
        if "bias" in self.roles:
            h[:, -1] = 1
        return h.view(s.groups, s.columns, n, -1).permute(2, 3, 0, 1), delta

    def _columns(self, weight: Tensor) -> Tensor:
        """Turn ``[G, O, channels, taps]`` into ``[G, O, C]``: tap-major under SUA, else in the weight's order."""
        return (weight.transpose(2, 3) if self.sua else weight).reshape(self.groups, self.shape.out, -1)

    def _weight(self, columns: Tensor) -> Tensor:
        """Undo :meth:`_columns`."""
        if self.sua:
            return columns.reshape(self.groups, self.shape.out, self.taps, self.channels).transpose(2, 3)
        return columns.reshape(self.groups, self.shape.out, self.channels, self.taps)

    @abstractmethod
    def grouped(self, weight: Tensor) -> Tensor:
        """Return the weight as ``[G, O, channels, taps]``."""

    @abstractmethod
    def ungrouped(self, weight: Tensor) -> Tensor:
        """Undo :meth:`grouped`."""

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [self._columns(self.grouped(tensors["weight"]))] if self.weight_columns else []
        if "bias" in self.roles:
            parts.append(tensors["bias"].reshape(self.groups, self.shape.out, 1))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        out = {}
        if self.weight_columns:
            out["weight"] = self.ungrouped(self._weight(matrix[..., : self.weight_columns]))
        if "bias" in self.roles:
            out["bias"] = matrix[..., -1].reshape(-1)
        return out


class ConvolutionLayer(_ConvolutionBase):
    """``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``."""

    def padded(self, x: Tensor, out: Sequence[int]) -> Tensor:
        mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
        return F.pad(x, self.module._reversed_padding_repeated_twice, mode=mode)

    def fields(self, x: Tensor, out: Sequence[int]) -> Tensor:
        return windows(self.padded(x, out), self.kernel, self.module.stride, self.module.dilation)

    @property
    def direct_inputs(self) -> bool:
        return self.sua

    def input_sum_directly(self, x: Tensor, n: int, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Compute SUA's A without unfolding, weighting each pixel by the number of window taps that cover it."""
        if self.module.padding_mode != "zeros":
            x = self.padded(x, ())
        size = tuple(x.shape[2:])
        if size not in self._weights or self._weights[size][0].device != x.device:
            root, positions = self._meetings(size)
            self._weights[size] = (root.to(x), positions)
        root, positions = self._weights[size]
        rows = (x * root.to(x.dtype)).reshape(x.shape[0], self.groups, self.channels, -1)
        terms = x.shape[0] * positions * self.taps
        if factors.by_example(rows.shape[-1], self.channels, x.device):
            return factors.position_sum(rows.permute(0, 3, 1, 2), into=into), terms
        rows = rows.permute(1, 2, 0, 3).reshape(self.groups, self.channels, -1)
        return (rows @ rows.mT if into is None else into.baddbmm_(rows, rows.mT)), terms

    def _meetings(self, size: Sequence[int]) -> tuple[Tensor, int]:
        """Return the square root of the number of (window, tap) pairs that cover each pixel, and the number of windows.

        ``size`` is without zero padding, which adds nothing to A but counts in its number of terms.
        """
        m = self.module
        pads = m._reversed_padding_repeated_twice if m.padding_mode == "zeros" else [0, 0] * len(size)
        meets = torch.ones((), dtype=torch.float64, device="cpu")
        positions = 1
        for axis, (length, k, s, d) in enumerate(zip(size, self.kernel, m.stride, m.dilation, strict=True)):
            before, after = pads[2 * (len(size) - 1 - axis) :][:2]
            whole = before + length + after
            out = (whole - d * (k - 1) - 1) // s + 1
            positions *= out
            hits = torch.zeros(whole, dtype=torch.float64, device="cpu")
            for tap in range(k):
                hits[tap * d : tap * d + (out - 1) * s + 1 : s] += 1
            meets = meets[..., None] * hits[before : before + length]
        return meets.sqrt(), positions

    def grouped(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, self.shape.out, self.channels, self.taps)

    def ungrouped(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.module.weight.shape)


class TransposedConvolutionLayer(_ConvolutionBase):
    """``nn.ConvTranspose1d``, ``nn.ConvTranspose2d``, ``nn.ConvTranspose3d``."""

    def padded(self, x: Tensor, out: Sequence[int]) -> Tensor:
        m = self.module
        spread = x.new_zeros(
            *x.shape[:2], *((length - 1) * s + 1 for length, s in zip(x.shape[2:], m.stride, strict=True))
        )
        spread[(slice(None), slice(None), *(slice(None, None, s) for s in m.stride))] = x
        pads: list[int] = []
        for axis in reversed(range(len(self.kernel))):
            reach = m.dilation[axis] * (self.kernel[axis] - 1)
            before = reach - m.padding[axis]
            # Any remainder comes from output_padding or an explicit output_size.
            pads += [before, out[axis] + reach - before - spread.shape[2 + axis]]
        return F.pad(spread, pads)

    def fields(self, x: Tensor, out: Sequence[int]) -> Tensor:
        # A transposed convolution applies its kernel reversed. Flipping the input instead reverses the taps without
        # copying all receptive fields; it also reverses positions, so the output's gradient is flipped as well.
        dims = len(self.kernel)
        reverse = self.padded(x, out).flip(tuple(range(2, 2 + dims)))
        return windows(reverse, self.kernel, (1,) * dims, self.module.dilation)

    def aligned(self, d: Tensor) -> Tensor:
        return d.flip(tuple(range(2, d.dim())))

    def grouped(self, weight: Tensor) -> Tensor:
        by_group = weight.reshape(self.groups, self.channels, self.shape.out, self.taps)
        return by_group.transpose(1, 2)

    def ungrouped(self, weight: Tensor) -> Tensor:
        return weight.transpose(1, 2).reshape(self.module.weight.shape)
