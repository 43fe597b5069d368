"""Linear layers: ``nn.Linear``, GPT-2's ``Conv1D``, ``nn.Bilinear``, and other products with a matrix.

The matrix may consist of several parameters side by side, such as the two weights and two biases of a recurrent cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac.curvature import factors
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.base import Layer, Reading, square_sum
from ekfac.curvature.layers.recognise import behaves_like, multiplies_with_its_weight
from ekfac.curvature.layers.shapes import BlockShape


def with_ones(h: Tensor, count: int = 1) -> Tensor:
    """Append columns of ones, one for each bias."""
    return torch.cat([h, h.new_ones(*h.shape[:-1], count)], dim=-1)


class LinearLayer(Layer):
    """``nn.Linear`` on input of any rank: the middle dimensions are positions.

    Subclasses define in :meth:`layout` which parameters form the matrix.
    """

    module: Any
    linear = True
    takes_half = True

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False) -> None:
        super().__init__(module, roles)
        widths, biases, out = self.layout()
        edges = list(itertools.accumulate(widths.values(), initial=0))
        spans = {role: slice(*edge) for role, edge in zip(widths, itertools.pairwise(edges), strict=True)}
        #: The input columns of each trained weight.
        self._spans = {role: span for role, span in spans.items() if role in roles}
        self._whole = 0 < len(self._spans) == len(widths)
        self.widths = {role: width for role, width in widths.items() if role in roles}
        self.biases = [role for role in biases if role in roles]
        self.weight_columns = sum(self.widths.values())
        self.shape = BlockShape(1, out, self.weight_columns + len(self.biases))

    def layout(self) -> tuple[Mapping[str, int], Sequence[str], int]:
        """Return the weights with their numbers of columns, in the order of the input's columns; biases; outputs."""
        return {"weight": self.module.in_features}, ["bias"], self.module.out_features

    def free_dims(self, x: Tensor) -> int:
        return x.dim() - 1

    def columns(self, x: Tensor) -> Tensor:
        """Return the columns of an input that belong to trained weights."""
        if self._whole:
            return x
        return torch.cat([x[..., span] for span in self._spans.values()], -1) if self._spans else x[..., :0]

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        h = self.columns(x.reshape(n, -1, 1, x.shape[-1]))
        return (with_ones(h, len(self.biases)) if self.biases else h), self.deltas(x, d, n)

    def deltas(self, x: Tensor, d: Tensor, n: int) -> Tensor:
        return d.reshape(n, -1, 1, d.shape[-1])

    @property
    def direct_inputs(self) -> bool:
        return self._whole and bool(self.biases)

    @property
    def reads_whole_inputs(self) -> bool:
        return self._whole

    def input_sum_directly(self, x: Tensor, n: int, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Compute A, with the biases' rows and columns last, without appending columns of ones to x."""
        rows = x.reshape(-1, x.shape[-1])
        w, dtype = self.weight_columns, torch.promote_types(x.dtype, torch.float32)
        sums = rows.sum(0, dtype=dtype)
        if into is not None:
            factors.outer_sum(rows[:, None], into=into[:, :w, :w])
            into[0, :w, w:] += sums[:, None]
            into[0, w:, :w] += sums
            into[0, w:, w:] += len(rows)
            return into, len(rows)
        d = self.shape.inputs
        A = x.new_empty(1, d, d, dtype=dtype)
        stride, b = (d, 1), d - w  # address the four parts by as_strided: slicing takes longer than filling them
        if rows.dtype == dtype and factors.is_long(rows):
            factors.symmetric_product(rows, A.as_strided((w, w), stride))
        elif rows.dtype == dtype:
            torch.mm(rows.T, rows, out=A.as_strided((w, w), stride))
        else:
            A[:, :w, :w] = factors.half_products(rows[:, None])
        A.as_strided((w, b), stride, w).copy_(sums[:, None])
        A.as_strided((b, w), stride, w * d).copy_(sums)
        A.as_strided((b, b), stride, w * d + w).fill_(len(rows))
        return A, len(rows)

    def batched_input_sums(self, x: Tensor) -> Tensor:
        products = factors.outer_sum(x.transpose(0, 1))
        if not self.biases:
            return products
        w, d = self.weight_columns, self.shape.inputs
        A = products.new_empty(len(x), d, d)
        A[:, :w, :w] = products
        sums = x.sum(1, dtype=A.dtype)
        A[:, :w, w:] = sums[:, :, None]
        A[:, w:, :w] = sums[:, None]
        A[:, w:, w:].fill_(x.shape[1])
        return A

    def direct_scaling(self, x: Tensor, n: int, basis: Basis) -> bool:
        return self.direct_inputs and x.dim() == 2 and len(x) == n and basis.U_A is not None

    def scaling_sum_directly(self, x: Tensor, d: Tensor, basis: Basis) -> Tensor:
        """Compute ((delta U_B)^2)^T ((h U_A)^2) for one position per example, adding the biases' rows of U_A."""
        assert basis.U_A is not None
        w = self.weight_columns
        h = torch.addmm(basis.U_A[0, w:].sum(0), x, basis.U_A[0, :w]).square_()
        delta = self.deltas(x, d, len(x))[:, 0, 0]
        delta = delta.square() if basis.U_B is None else (delta @ basis.U_B[0]).square_()
        return (delta.T @ h)[None]

    def squared_inputs(self, x: Tensor, d: Tensor) -> tuple[Tensor, int]:
        x = self.columns(x)
        rows = d.numel() // d.shape[-1]
        return square_sum(x) + rows * len(self.biases), rows * self.shape.columns

    def matrix(self, weight: Tensor) -> Tensor:
        """Convert a weight to ``[out, in]`` and back: its own inverse."""
        return weight

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [self.matrix(tensors[role]) for role in self.widths]
        parts += [tensors[role][:, None] for role in self.biases]
        return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])[None]

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        pieces = matrix[0].split([*self.widths.values(), *(1 for _ in self.biases)], dim=1)
        out = {role: self.matrix(piece) for role, piece in zip(self.widths, pieces, strict=False)}
        return out | {role: pieces[len(self.widths) + i][:, 0] for i, role in enumerate(self.biases)}

    def stack_all(self, layers: Sequence[Layer], tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        if not self._all_stored_alike(layers):
            return super().stack_all(layers, tensors)
        parts = [torch.stack([self.matrix(own[role]) for own in tensors]) for role in self.widths]
        parts += [torch.stack([own[role] for own in tensors])[..., None] for role in self.biases]
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def unstack_all(self, layers: Sequence[Layer], matrix: Tensor) -> list[dict[str, Tensor]]:
        if not self._all_stored_alike(layers):
            return super().unstack_all(layers, matrix)
        roles, pieces = (
            [*self.widths, *self.biases],
            matrix.split([*self.widths.values(), *(1 for _ in self.biases)], 2),
        )
        each = [
            piece[..., 0].unbind() if role in self.biases else piece.unbind()
            for role, piece in zip(roles, pieces, strict=True)
        ]
        return [
            {role: part if role in self.biases else self.matrix(part) for role, part in zip(roles, parts, strict=True)}
            for parts in zip(*each, strict=True)
        ]

    def _all_stored_alike(self, layers: Sequence[Layer]) -> bool:
        """Return whether layers store their parameters as this one does, under the same names."""
        kind, widths, biases = type(self), self.widths, self.biases
        own = kind.stack is not LinearLayer.stack or kind.unstack is not LinearLayer.unstack
        return not own and all(
            isinstance(layer, kind) and type(layer) is kind and layer.widths == widths and layer.biases == biases
            for layer in layers
        )

    def fingerprint(self, tensors: Mapping[str, Tensor], u: Tensor, v: Tensor) -> Tensor:
        """Sum over parameters one by one: concatenating them would copy the gradient."""
        pieces = v[0].split([*self.widths.values(), *(1 for _ in self.biases)])
        found = torch.zeros((), dtype=u.dtype, device=u.device)
        for role, piece in zip([*self.widths, *self.biases], pieces, strict=True):
            G = tensors[role].to(u.dtype)
            found = found + u[0] @ (G * piece if role in self.biases else self.matrix(G) @ piece)
        return found


class OwnForwardLinearLayer(LinearLayer):
    """A subclass of ``nn.Linear`` that overrides forward but calls ``F.linear`` with its weight."""

    seen_through_linear = True

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        return multiplies_with_its_weight(module)


class Conv1DLayer(LinearLayer):
    """GPT-2's ``Conv1D``: a linear layer whose weight is stored as (in, out)."""

    def layout(self) -> tuple[Mapping[str, int], Sequence[str], int]:
        inputs, out = self.module.weight.shape
        return {"weight": inputs}, ["bias"], out

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.T

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Test whether a module of this name multiplies by a matrix (in, out), without importing transformers."""
        weight, bias = (module._parameters.get(role) for role in ("weight", "bias"))
        if set(module._parameters) != {"weight", "bias"} or weight is None or bias is None or module._modules:
            return False
        if weight.dim() != 2 or bias.shape != weight.shape[1:]:
            return False
        role = module.get_parameter
        return behaves_like(module, weight.shape[0], lambda x: torch.addmm(role("bias"), x, role("weight")))


class ForeignLinearLayer(LinearLayer):
    """A linear layer of another library (PyTorch Geometric), or a subclass with its own product (Falcon)."""

    def layout(self) -> tuple[Mapping[str, int], Sequence[str], int]:
        out, inputs = self.module.weight.shape
        return {"weight": inputs}, ["bias"], out

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Test whether a module of this name multiplies by a matrix (out, in)."""
        weight, bias = (module._parameters.get(role) for role in ("weight", "bias"))
        if weight is None or not set(module._parameters) <= {"weight", "bias"} or module._modules:
            return False
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            return False
        return behaves_like(module, weight.shape[1], lambda x: F.linear(x, weight, bias))


class RowsLayer(Layer):
    """A product with some of a linear layer's rows; the other outputs get no gradient from this call.

    Args:
        whole: The layer of all rows.
        start: The first row.
    """

    linear = True

    def __init__(self, whole: LinearLayer, start: int) -> None:
        super().__init__(whole.module, whole.roles)
        self.whole = whole
        self.start = start
        self.shape = whole.shape

    def free_dims(self, x: Tensor) -> int:
        return self.whole.free_dims(x)

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        h, delta = self.whole.positions(x, d, n)
        return h, F.pad(delta, (self.start, self.shape.out - self.start - delta.shape[-1]))

    def positions_per_example(self, d: Tensor, n: int) -> int:
        return d.numel() // (n * d.shape[-1])

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.whole.stack(tensors)

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return self.whole.unstack(matrix)


class BilinearReading(Reading):
    """Reads ``nn.Bilinear`` as a linear layer of the products of its two inputs' entries."""

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        return list(itertools.chain(args, (kwargs[name] for name in ("input1", "input2") if name in kwargs)))

    def examples(self, kept: Sequence[Tensor]) -> int:
        return len(kept[0])

    def read(self, kept: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, Tensor]]:
        one, two = kept
        (d,) = grads
        assert d is not None
        return {"": ((one[..., :, None] * two[..., None, :]).flatten(-2), d)}


class BilinearLayer(LinearLayer):
    """``nn.Bilinear``: y = x1^T W x2 + b for each output."""

    reading = BilinearReading
    linear = False
    takes_half = False

    def layout(self) -> tuple[Mapping[str, int], Sequence[str], int]:
        m = self.module
        return {"weight": m.in1_features * m.in2_features}, ["bias"], m.out_features

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return super().stack({role: t.flatten(1) if t.dim() == 3 else t for role, t in tensors.items()})

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        m = self.module
        out = super().unstack(matrix)
        return {r: t.unflatten(1, (m.in1_features, m.in2_features)) if r == "weight" else t for r, t in out.items()}

    def fingerprint(self, tensors: Mapping[str, Tensor], u: Tensor, v: Tensor) -> Tensor:
        return super().fingerprint({r: t.flatten(1) if t.dim() == 3 else t for r, t in tensors.items()}, u, v)
