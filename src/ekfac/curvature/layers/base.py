"""What a layer makes of its input and of its output's gradient: h, delta and the layout of its gradient.

Every covered layer is brought into one form. Its gradient is a stack of matrices ``[G, O, C]``:

* ``G`` groups: 1, or the groups of a grouped convolution, or the units of a normalisation layer;
* ``O`` outputs of a group;
* ``C = T * I + E`` columns: ``T`` taps (1 unless SUA) of ``I`` inputs each, and ``E = 1`` extra column, used only for
  the bias under SUA, where it has a basis of its own. Otherwise a bias is the last of the ``I`` inputs.

An example's gradient is the sum over positions ``s`` of ``delta_s h_s^T``, with ``h`` of shape ``[N, S, G, C]`` and
``delta`` of shape ``[N, S, G, O]``. A new kind of layer is one subclass of :class:`Layer` and one line in
``blocks.KINDS``. A module whose parameters make several blocks (attention, recurrent layers) has several *parts*; how
capture gets at their h and delta is set by :attr:`Layer.reading` and :attr:`Layer.seen_through_linear`.
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
    """Reads the calls of a module whose h and delta are not simply its input and the gradient of its output.

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
        """Guess how many examples a call has; for models whose input does not tell."""

    @abstractmethod
    def read(self, kept: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return x and d of every part, examples first.

        Args:
            kept: What :meth:`keep` returned, detached.
            grads: The gradients of the module's output tensors, in their order; None where there is none.
        """


class Layer(ABC):
    """One kind of module, or one part of it, seen as ``delta h^T`` summed over positions.

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
    #: The output is the product of the weight with the input, or with windows of it, and a bias.
    linear: ClassVar[bool] = False
    #: Sums for A and B can be taken of half-precision inputs and output gradients as they are.
    takes_half: ClassVar[bool] = False
    #: torch sums this kind's gradients in half precision where its parameters are, so that they are only roughly right.
    rough_in_half: ClassVar[bool] = False
    #: Examples can be read a few at a time (not where they meet in the batch's statistics).
    splittable: ClassVar[bool] = True
    #: What reads a call, where it is not the first input and the gradient of the only output; one for all parts.
    reading: ClassVar[type[Reading] | None] = None
    #: The module hides its products from hooks: they are seen where it calls ``F.linear`` with its parameters.
    seen_through_linear: ClassVar[bool] = False
    #: Each group has rows of its own: :meth:`sums_of_calls` and :meth:`probe_of_calls` stand for :meth:`positions`.
    scattered: ClassVar[bool] = False
    #: What modules have that :meth:`supports` refuses, for :func:`ekfac.summary`.
    unsupported_form: ClassVar[str] = "no block in this form"
    #: Which part of the module this is; "" where it has only one.
    part: str = ""
    #: Whether a loss was seen that has derivatives of the network inside, and so further products with the weight.
    differentiated: bool = False

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False) -> None:
        self.module = module
        self.roles = roles
        self.sua = sua

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Tell whether this class can represent the module exactly."""
        return True

    @classmethod
    def parts(cls, module: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the parameters of each part that has a block of its own, by their names in the module."""
        return {"": ("weight", "bias")}

    @classmethod
    def of_part(cls, module: nn.Module, part: str, roles: frozenset[str], *, sua: bool = False) -> Layer:
        """Return the layer of one part of a module."""
        return cls(module, roles, sua=sua)

    def has_examples(self, x: Tensor, n: int) -> bool:
        """Tell whether an input's leading dimension counts n examples, or their positions, example by example."""
        return n > 0 and len(x) % n == 0

    def shared(self, x: Tensor) -> bool:
        """Tell whether an input is seen to be one that all examples share; reads its numbers."""
        return False

    def free_dims(self, x: Tensor) -> int:
        """Return how many leading dimensions of an input count examples and positions, and not features."""
        return 1

    @property
    def mode(self) -> Hashable:
        """What the layer makes of a call depends on besides the call: whether it trains, and where its buffers lie."""
        module = self.module
        if not module._buffers:
            return module.training
        return module.training, *[b.data_ptr() for b in module._buffers.values() if b is not None]

    @abstractmethod
    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return h ``[n, S, G, C]`` and delta ``[n, S, G, O]`` of ``n`` examples (leading dimension k n)."""

    def deltas(self, x: Tensor, d: Tensor, n: int) -> Tensor:
        """Return delta alone, for callers that have h already or do not need it."""
        return self.positions(x, d, n)[1]

    @abstractmethod
    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Bring tensors shaped like the trained parameters into the form ``[G, O, C]``."""

    @abstractmethod
    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`stack`."""

    def stack_all(self, layers: Sequence[Layer], tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Bring the tensors of several layers of this one's shape into that form, one below the other."""
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
        """Return the number S of positions that one example has in this call."""
        return d.numel() // (n * self.shape.groups * self.shape.out)

    def numbers_per_position(self) -> int:
        """Return how many numbers h and delta take at one position of one example."""
        return self.shape.groups * (self.shape.columns + self.shape.out)

    @property
    def direct_inputs(self) -> bool:
        """Whether :meth:`input_sum_directly` knows a way to A without forming h."""
        return False

    @property
    def reads_whole_inputs(self) -> bool:
        """Whether it knows a way that is worth it for half-precision inputs alone."""
        return False

    def input_sum_directly(self, x: Tensor, n: int, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Sum h h^T over examples, positions and taps, from the input itself; return the number of terms too."""
        raise NotImplementedError(f"{type(self).__name__} has direct_inputs, so it must have input_sum_directly")

    def thinned(self, x: Tensor, d: Tensor, n: int) -> tuple[int, Call] | None:
        """Return every so many-th example of a call that is not splittable, and its stride; None for all of them."""
        return None

    def inputs_of_alike(self, x: Tensor) -> Tensor:
        """Sum h h^T over the rows of several layers' inputs, ``[layers, rows, in]``."""
        raise NotImplementedError(f"{type(self).__name__} reads_whole_inputs, so it must have inputs_of_alike")

    def input_sum(self, h: Tensor, sharing: str, diagonal: bool, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Sum h h^T over examples (and positions and taps), added to ``into``; return the number of terms too."""
        return factors.input_sum(h, self.shape, sharing, diagonal, into)

    def sums_of_calls(
        self, calls: Sequence[Call], dtype: torch.dtype, diagonal_A: bool, diagonal_B: bool
    ) -> tuple[Tensor, int, Tensor]:
        """Return the sum that gives A, the number of its terms, and the sum that gives B."""
        raise NotImplementedError(f"{type(self).__name__} is scattered, so it must have sums_of_calls")

    def probe_of_calls(self, calls: Sequence[Call], columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`probe` of all rows of some calls."""
        raise NotImplementedError(f"{type(self).__name__} is scattered, so it must have probe_of_calls")

    def squared_inputs(self, x: Tensor, d: Tensor) -> tuple[Tensor, int]:
        """Sum h^2 over all positions, and count its entries; for kinds that a tied weight may join."""
        h, _ = self.positions(x, d, len(x))
        return square_sum(h), h.numel()

    def scaling_sum(self, h: Tensor, delta: Tensor, basis: Basis, memory: int) -> Tensor:
        """Sum the squared gradient in the basis over examples, ``[G, O, C]``."""
        return scaling.scaling_sum(h, delta, basis, memory)

    def direct_scaling(self, x: Tensor, n: int, basis: Basis) -> bool:
        """Tell whether :meth:`scaling_sum_directly` can take this input."""
        return False

    def scaling_sum_directly(self, x: Tensor, d: Tensor, basis: Basis) -> Tensor:
        """Compute :meth:`scaling_sum` from a call's own tensors, where h need not be written out."""
        raise NotImplementedError(f"{type(self).__name__} has direct_scaling, so it must have scaling_sum_directly")

    def fingerprint(self, tensors: Mapping[str, Tensor], u: Tensor, v: Tensor) -> Tensor:
        """Return u^T G v of tensors shaped like the trained parameters, u ``[G, O]`` and v ``[G, C]``."""
        return torch.einsum("go,goc,gc->", u, self.stack(tensors), v)

    def probe(self, h: Tensor, delta: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors ``delta·rows`` and ``h·columns`` of the terms of ``sum_n rows^T (delta h^T) columns``."""
        return torch.einsum("nsgo,go->nsg", delta, rows), torch.einsum("nsgc,gc->nsg", h, columns)


def square_sum(x: Tensor) -> Tensor:
    """Sum x^2, in float32 at the least, without a copy."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.square()


def with_ones(h: Tensor) -> Tensor:
    """Append the bias column of ones."""
    return torch.cat([h, h.new_ones(*h.shape[:-1], 1)], dim=-1)


class ElementwiseLayer(Layer):
    """A parameter without a Kronecker block: every entry is a unit of its own, in the identity basis."""

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
