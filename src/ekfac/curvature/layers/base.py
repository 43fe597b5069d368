"""How a layer turns its input and output gradient into h and delta, and lays out its gradient as matrices.

Every covered layer is brought into one form. Its gradient is a stack of matrices ``[G, O, C]``:

* ``G`` groups: 1, or the groups of a grouped convolution, or the units of a normalisation layer;
* ``O`` outputs of a group;
* ``C = T * I + E`` columns: ``T`` taps (1 unless SUA) of ``I`` inputs each, and ``E = 1`` extra column, used only for
  the bias under SUA, where it has a basis of its own. Otherwise a bias is the last of the ``I`` inputs.

An example's gradient is the sum over positions ``s`` of ``delta_s h_s^T``, with ``h`` of shape ``[N, S, G, C]`` and
``delta`` of shape ``[N, S, G, O]``. A new kind of layer is one subclass of :class:`Layer` and one line in
``kinds.KINDS``. A module whose parameters form several blocks (attention, recurrent layers) has several *parts*;
:attr:`Layer.reading` and :attr:`Layer.seen_through_linear` set how their h and delta are captured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ekfac.curvature import factors, scaling
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.shapes import BlockShape
from ekfac.curvature.real import real_shape


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input, the gradient of its output, and the layer that reads them."""

    layer: Layer
    x: Tensor
    d: Tensor


class Reading(ABC):
    """Reads the calls of a module whose h and delta are not simply its input and output gradient.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @abstractmethod
    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of a call that :meth:`read` will need."""

    @abstractmethod
    def examples(self, kept: Sequence[Tensor]) -> int:
        """Guess the number of examples in a call, for models whose input does not show it."""

    @abstractmethod
    def read(self, kept: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return x and d of every part, examples first.

        Args:
            kept: What :meth:`keep` returned, detached.
            grads: The gradients of the module's output tensors, in order; None if there is none.
        """


class Layer(ABC):
    """One kind of module, or one part of it, whose gradient is ``delta h^T`` summed over positions.

    Args:
        module: The module whose calls are read.
        roles: Names of the module's trained parameters ("weight", "bias").
        sua: Whether to treat a convolution's taps as uncorrelated.
    """

    #: A bias column is last in I; E is 1 only if SUA gives the bias its own basis.
    shape: BlockShape
    #: Whether A is diagonal by construction; its basis is then the identity, and it is kept as a vector.
    diagonal_inputs: ClassVar[bool] = False
    #: Whether this use is with the transposed weight (an embedding tied to an output layer).
    transposed: ClassVar[bool] = False
    #: Whether the output is the product of the weight with the input, or windows of it, plus a bias.
    linear: ClassVar[bool] = False
    #: Whether the sums for A and B can be computed from half-precision inputs and output gradients.
    takes_half: ClassVar[bool] = False
    #: Whether torch sums the gradients of half-precision parameters in half precision, so that they are inaccurate.
    rough_in_half: ClassVar[bool] = False
    #: Whether examples can be processed in chunks (not in batch-norm, where they interact).
    splittable: ClassVar[bool] = True
    #: Whether several calls are summed, as positions are, instead of lying side by side as further positions.
    adds_calls: ClassVar[bool] = False
    #: Reads a call if h and delta do not follow from the first input and the only output's gradient; one for all parts.
    reading: ClassVar[type[Reading] | None] = None
    #: Whether calls are captured where the module calls ``F.linear`` with its parameters, as hooks do not see them.
    seen_through_linear: ClassVar[bool] = False
    #: Whether groups have separate rows, so that :meth:`sums_of_calls` and :meth:`probe_of_calls` replace
    #: :meth:`positions`.
    scattered: ClassVar[bool] = False
    #: Describes modules that :meth:`supports` refuses, for :func:`ekfac.summary`.
    unsupported_form: ClassVar[str] = "no block in this form"
    #: Which part of the module this is; empty if it has only one.
    part: str = ""
    #: Whether a loss with derivatives of the network, and so further products with the weight, was seen.
    differentiated: bool = False
    #: Of a linear layer's last inputs before the first step: the number that are not zero, and of rows that have any.
    nonzero: Tensor | None = None

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False) -> None:
        self.module = module
        self.roles = roles
        self.sua = sua

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Return whether this class can represent the module exactly."""
        return True

    @classmethod
    def parts(cls, module: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the names of the parameters of each part; every part has its own block."""
        return {"": ("weight", "bias")}

    @classmethod
    def of_part(cls, module: nn.Module, part: str, roles: frozenset[str], *, sua: bool = False) -> Layer:
        """Return the layer of one part of a module."""
        return cls(module, roles, sua=sua)

    def has_examples(self, x: Tensor, n: int) -> bool:
        """Return whether an input's leading dimension consists of n examples, each with one or more positions."""
        return n > 0 and len(x) % n == 0

    def shared(self, x: Tensor) -> bool:
        """Return whether an input's values show that all examples share it (such as position indices)."""
        return False

    def free_dims(self, x: Tensor) -> int:
        """Return the number of leading dimensions of an input that are examples and positions, not features."""
        return 1

    @property
    def mode(self) -> Hashable:
        """Everything besides a call that h and delta depend on: training mode and the buffers' addresses."""
        module = self.module
        if not module._buffers:
            return module.training
        return module.training, *[b.data_ptr() for b in module._buffers.values() if b is not None]

    @abstractmethod
    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return h ``[n, S, G, C]`` and delta ``[n, S, G, O]`` of ``n`` examples (x has leading dimension k n)."""

    def deltas(self, x: Tensor, d: Tensor, n: int) -> Tensor:
        """Return delta alone, for callers that do not need h."""
        return self.positions(x, d, n)[1]

    @abstractmethod
    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Lay out tensors shaped like the trained parameters as ``[G, O, C]``."""

    @abstractmethod
    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`stack`."""

    def stack_all(self, layers: Sequence[Layer], tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Lay out the tensors of several layers of this one's shape, concatenated along G."""
        return torch.cat([layer.stack(own) for layer, own in zip(layers, tensors, strict=True)])

    def unstack_all(self, layers: Sequence[Layer], matrix: Tensor) -> list[dict[str, Tensor]]:
        """Undo :meth:`stack_all`."""
        parts = matrix.split(self.shape.groups)
        return [layer.unstack(part) for layer, part in zip(layers, parts, strict=True)]

    def describe(self) -> str:
        """Describe in a few words how the block is represented."""
        s = self.shape
        inputs = f"{s.inputs}" + (f" (x {s.taps} taps)" if s.taps > 1 else "")
        return f"kronecker {inputs} x {s.out}" + (f", {s.groups} groups" if s.groups > 1 else "")

    def positions_per_example(self, d: Tensor, n: int) -> int:
        """Return S, the number of positions per example in this call."""
        return d.numel() // (n * self.shape.groups * self.shape.out)

    def numbers_per_position(self) -> int:
        """Return the number of entries of h and delta at one position of one example."""
        return self.shape.groups * (self.shape.columns + self.shape.out)

    @property
    def direct_inputs(self) -> bool:
        """Whether :meth:`input_sum_directly` can compute A without forming h."""
        return False

    @property
    def reads_whole_inputs(self) -> bool:
        """Whether all of the input enters h as it is, so that half-precision inputs can be used directly."""
        return False

    def input_sum_directly(self, x: Tensor, n: int, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Sum h h^T over examples, positions and taps, from the input itself; return the number of terms too."""
        raise NotImplementedError(f"{type(self).__name__} has direct_inputs, so it must have input_sum_directly")

    def thinned(self, x: Tensor, d: Tensor, n: int) -> tuple[int, Call] | None:
        """Return a stride and every stride-th example of a call that is not splittable; None to use all of them."""
        return None

    def batched_input_sums(self, x: Tensor) -> Tensor:
        """Sum h h^T over the rows of several layers' inputs, ``[layers, rows, in]``."""
        raise NotImplementedError(f"{type(self).__name__} reads_whole_inputs, so it must have batched_input_sums")

    def input_sum(self, h: Tensor, sharing: str, diagonal: bool, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Sum h h^T over examples (and positions and taps), added to ``into``; return the number of terms too."""
        return factors.input_sum(h, self.shape, sharing, diagonal, into)

    def sums_of_calls(
        self, calls: Sequence[Call], dtype: torch.dtype, diagonal_A: bool, diagonal_B: bool
    ) -> tuple[Tensor, int, Tensor]:
        """Return A's sum, its number of terms, and B's sum."""
        raise NotImplementedError(f"{type(self).__name__} is scattered, so it must have sums_of_calls")

    def probe_of_calls(self, calls: Sequence[Call], columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`probe` for all rows of some calls."""
        raise NotImplementedError(f"{type(self).__name__} is scattered, so it must have probe_of_calls")

    def squared_inputs(self, x: Tensor, d: Tensor) -> tuple[Tensor, int]:
        """Sum h^2 over all positions, and count its entries; needed for kinds that can share a tied weight."""
        h, _ = self.positions(x, d, len(x))
        return square_sum(h), h.numel()

    def scaling_sum(self, h: Tensor, delta: Tensor, basis: Basis, memory: int) -> Tensor:
        """Sum the squared gradient in the basis over examples, ``[G, O, C]``."""
        return scaling.scaling_sum(h, delta, basis, memory)

    def direct_scaling(self, x: Tensor, n: int, basis: Basis) -> bool:
        """Return whether :meth:`scaling_sum_directly` supports this input."""
        return False

    def scaling_sum_directly(self, x: Tensor, d: Tensor, basis: Basis) -> Tensor:
        """Compute :meth:`scaling_sum` from a call's own tensors, without forming h."""
        raise NotImplementedError(f"{type(self).__name__} has direct_scaling, so it must have scaling_sum_directly")

    def fingerprint(self, tensors: Mapping[str, Tensor], u: Tensor, v: Tensor) -> Tensor:
        """Return u^T G v of tensors shaped like the trained parameters, u ``[G, O]`` and v ``[G, C]``."""
        return torch.einsum("go,goc,gc->", u, self.stack(tensors), v)

    def probe(self, h: Tensor, delta: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors ``delta·rows`` and ``h·columns`` of the terms of ``sum_n rows^T (delta h^T) columns``."""
        return torch.einsum("nsgo,go->nsg", delta, rows), torch.einsum("nsgc,gc->nsg", h, columns)


def square_sum(x: Tensor) -> Tensor:
    """Sum x^2, in at least float32, without a copy."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square()


def with_ones(h: Tensor) -> Tensor:
    """Append the bias column of ones."""
    return torch.cat([h, h.new_ones(*h.shape[:-1], 1)], dim=-1)


class ElementwiseLayer(Layer):
    """A parameter without a Kronecker block: the basis is the identity."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(nn.Identity(), frozenset({"parameter"}))
        self.parameter_shape = real_shape(parameter)
        self.shape = BlockShape(1, 1, math.prod(self.parameter_shape))

    def describe(self) -> str:
        return "diagonal"

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("a parameter without a layer has no positions")

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["parameter"].reshape(1, 1, -1)

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return {"parameter": matrix.reshape(self.parameter_shape)}
