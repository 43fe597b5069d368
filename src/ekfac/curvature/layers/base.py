"""What a layer makes of its input and of its output's gradient: h, delta and the layout of its gradient.

Every covered layer is brought into one form. Its gradient is a stack of matrices ``[G, O, C]``:

* ``G`` groups: 1, or the groups of a grouped convolution, or the units of a normalisation layer;
* ``O`` outputs of a group;
* ``C = T * I + E`` columns: ``T`` taps (1 unless SUA) of ``I`` inputs each, and ``E = 1`` extra column, used only for
  the bias under SUA, where it has a basis of its own. Otherwise a bias is the last of the ``I`` inputs.

An example's gradient is the sum over positions ``s`` of ``delta_s h_s^T``, with ``h`` of shape ``[N, S, G, C]`` and
``delta`` of shape ``[N, S, G, O]``. A new kind of layer is one subclass of :class:`Layer` and one line in
``blocks.KINDS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ekfac.curvature import factors, scaling
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.shapes import BlockShape


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input, the gradient of its output, and the layer that reads them."""

    layer: Layer
    x: Tensor
    d: Tensor


class Layer(ABC):
    """One kind of module, seen as ``delta h^T`` summed over positions.

    Args:
        module: The module whose calls are read.
        roles: Names of the module's parameters that are trained ("weight", "bias").
        sua: Whether a convolution's taps are taken as uncorrelated.
    """

    #: The bias column is last in I; E is 1 only where SUA gives the bias a basis of its own.
    shape: BlockShape
    #: A is diagonal by construction, so its basis is the identity and it is kept as a vector.
    diagonal_inputs: ClassVar[bool] = False
    #: This use enters the weight transposed (an embedding tied to an output layer).
    transposed: ClassVar[bool] = False
    #: torch sums this kind's gradients in half precision where its parameters are, so that they are only roughly right.
    rough_in_half: ClassVar[bool] = False
    #: Examples can be read a few at a time (not where they meet in the batch's statistics).
    splittable: ClassVar[bool] = True

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False) -> None:
        self.module = module
        self.roles = roles
        self.sua = sua

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Whether this class can represent the module exactly."""
        return True

    @property
    def mode(self) -> Hashable:
        """What the layer makes of a call depends on besides the call: whether it trains, and where its buffers lie."""
        buffers = self.module._buffers.values()
        return self.module.training, *(b.data_ptr() for b in buffers if b is not None)

    @abstractmethod
    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return h ``[n, S, G, C]`` and delta ``[n, S, G, O]`` of ``n`` examples (leading dimension k n)."""

    def deltas(self, x: Tensor, d: Tensor, n: int) -> Tensor:
        """Delta alone, for callers that have h already or do not need it."""
        return self.positions(x, d, n)[1]

    @abstractmethod
    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Bring tensors shaped like the trained parameters into the form ``[G, O, C]``."""

    @abstractmethod
    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`stack`."""

    def describe(self) -> str:
        """Say in a few words how the block is represented."""
        s = self.shape
        inputs = f"{s.inputs}" + (f" (x {s.taps} taps)" if s.taps > 1 else "")
        return f"kronecker {inputs} x {s.out}" + (f", {s.groups} groups" if s.groups > 1 else "")

    def positions_per_example(self, d: Tensor, n: int) -> int:
        """The number S of positions that one example has in this call."""
        return d.numel() // (n * self.shape.groups * self.shape.out)

    def numbers_per_position(self) -> int:
        """How many numbers h and delta take at one position of one example."""
        return self.shape.groups * (self.shape.columns + self.shape.out)

    @property
    def direct_inputs(self) -> bool:
        """Whether :meth:`input_sum_directly` knows a way to A without forming h."""
        return False

    def input_sum_directly(self, x: Tensor, n: int, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Sum of h h^T over examples, positions and taps, and the number of its terms, from the input itself."""
        raise NotImplementedError(f"{type(self).__name__} has direct_inputs, so it must have input_sum_directly")

    def input_sum(self, h: Tensor, sharing: str, diagonal: bool, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Sum of h h^T over examples (and positions and taps), added to ``into``, and the number of its terms."""
        return factors.input_sum(h, self.shape, sharing, diagonal, into)

    def squared_inputs(self, x: Tensor, d: Tensor) -> tuple[Tensor, int]:
        """Sum of h^2 over all positions and the number of its entries; for kinds that a tied weight may join."""
        h, _ = self.positions(x, d, len(x))
        return square_sum(h), h.numel()

    def scaling_sum(self, h: Tensor, delta: Tensor, basis: Basis, memory: int) -> Tensor:
        """Sum over examples of the squared gradient in the basis, ``[G, O, C]``."""
        return scaling.scaling_sum(h, delta, basis, memory)

    def direct_scaling(self, x: Tensor, n: int, basis: Basis) -> bool:
        """Whether :meth:`scaling_sum_directly` can take this input."""
        return False

    def scaling_sum_directly(self, x: Tensor, d: Tensor, basis: Basis) -> Tensor:
        """:meth:`scaling_sum` from a call's own tensors, where h need not be written out."""
        raise NotImplementedError(f"{type(self).__name__} has direct_scaling, so it must have scaling_sum_directly")

    def probe(self, h: Tensor, delta: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Terms of ``sum_n rows^T (delta h^T) columns``: the factors ``delta·rows`` and ``h·columns``."""
        return torch.einsum("nsgo,go->nsg", delta, rows), torch.einsum("nsgc,gc->nsg", h, columns)


def square_sum(x: Tensor) -> Tensor:
    """Sum of x^2, in float32 at the least, without a copy."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square()


def with_ones(h: Tensor) -> Tensor:
    """Append the bias column of ones."""
    return torch.cat([h, h.new_ones(*h.shape[:-1], 1)], dim=-1)


class LinearLayer(Layer):
    """``nn.Linear`` on input of any rank: the middle dimensions are positions."""

    def __init__(self, module: nn.Linear, roles: frozenset[str], *, sua: bool = False) -> None:
        super().__init__(module, roles)
        self.weight_columns = module.in_features if "weight" in roles else 0
        self.shape = BlockShape(1, module.out_features, self.weight_columns + ("bias" in roles))

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        h = x.reshape(n, -1, 1, x.shape[-1])[..., : self.weight_columns]
        return (with_ones(h) if "bias" in self.roles else h), d.reshape(n, -1, 1, d.shape[-1])

    def deltas(self, x: Tensor, d: Tensor, n: int) -> Tensor:
        return d.reshape(n, -1, 1, d.shape[-1])

    @property
    def direct_inputs(self) -> bool:
        return self.shape.columns > 1 and "bias" in self.roles

    def input_sum_directly(self, x: Tensor, n: int, into: Tensor | None = None) -> tuple[Tensor, int]:
        """A with its last row and column, which belong to the bias, without writing a column of ones beside x."""
        rows = x.reshape(-1, x.shape[-1])
        sums = rows.sum(0)
        if into is not None:
            factors.outer_sum(rows[:, None], into=into[:, :-1, :-1])
            into[0, :-1, -1] += sums
            into[0, -1, :-1] += sums
            into[0, -1, -1] += len(rows)
            return into, len(rows)
        A = x.new_empty(1, self.shape.inputs, self.shape.inputs)
        torch.mm(rows.T, rows, out=A[0, :-1, :-1])
        A[0, :-1, -1] = A[0, -1, :-1] = sums
        A[0, -1, -1].fill_(len(rows))  # an assignment would copy a number from the host
        return A, len(rows)

    def direct_scaling(self, x: Tensor, n: int, basis: Basis) -> bool:
        return self.direct_inputs and x.dim() == 2 and len(x) == n and basis.U_A is not None

    def scaling_sum_directly(self, x: Tensor, d: Tensor, basis: Basis) -> Tensor:
        """((delta U_B)^2)^T ((h U_A)^2) with one position an example, the bias's row of U_A added to the product."""
        assert basis.U_A is not None
        h = torch.addmm(basis.U_A[0, -1], x, basis.U_A[0, :-1]).square_()
        delta = d.square() if basis.U_B is None else (d @ basis.U_B[0]).square_()
        return (delta.T @ h)[None]

    def squared_inputs(self, x: Tensor, d: Tensor) -> tuple[Tensor, int]:
        rows = x.numel() // x.shape[-1]
        ones = rows if "bias" in self.roles else 0
        return square_sum(x) + ones, rows * self.shape.columns

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        parts = [tensors["weight"]] if "weight" in self.roles else []
        if "bias" in self.roles:
            parts.append(tensors["bias"][:, None])
        return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])[None]

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        out = {}
        if "weight" in self.roles:
            out["weight"] = matrix[0, :, : self.weight_columns]
        if "bias" in self.roles:
            out["bias"] = matrix[0, :, -1]
        return out


class ElementwiseLayer(Layer):
    """A parameter without a Kronecker block: every entry is a unit of its own, in the identity basis."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(nn.Identity(), frozenset({"parameter"}))
        self.parameter_shape = parameter.shape
        self.shape = BlockShape(1, 1, parameter.numel())

    def describe(self) -> str:
        return "diagonal"

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("a parameter without a layer has no positions")

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["parameter"].reshape(1, 1, -1)

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return {"parameter": matrix.reshape(self.parameter_shape)}
