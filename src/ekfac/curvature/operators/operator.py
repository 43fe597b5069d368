"""Curvature: a matrix over all trained parameters of a model, as a linear operator."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Self

from ekfac import checks
from ekfac.curvature.blocks import matches
from ekfac.curvature.operators import storage
from ekfac.curvature.operators.parts import Function, Part
from ekfac.curvature.operators.precision import exactly
from ekfac.curvature.operators.vectors import Layout, Vector


class Curvature:
    r"""A symmetric positive semi-definite matrix G over the trained parameters of a model.

    .. math::
        G = \frac1N \sum_n E[g_n g_n^T] \approx U \operatorname{diag}(s) U^T, \quad
        U = U_B \otimes U_A \text{ for every layer}

    A vector is a flat tensor ``[P]`` in the order of ``named_parameters()``, or a dict from parameter name to tensor;
    results have the same form. A stack of K vectors is ``[P, K]``, or a dict of ``[K, *shape]``, as returned by
    ``torch.func.vmap``. Scalars are 0-dim tensors.

    Returned by :func:`ekfac.fisher`, ``opt.curvature()`` and :meth:`load`.

    Attributes:
        approximation: "full", "block", "diagonal", "kfac" or "ekfac".
        layout: Names and shapes of the parameters.
        parts: The blocks.
        examples: The number of examples behind it (0 if unknown).
    """

    def __init__(self, approximation: str, layout: Layout, parts: Sequence[Part], examples: int) -> None:
        self.approximation = approximation
        self.layout = layout
        self.parts = tuple(parts)
        self.examples = examples
        self._places = [layout.places(part.parameters) for part in self.parts]

    @property
    def shape(self) -> tuple[int, int]:
        """``(P, P)``."""
        return (self.layout.numel, self.layout.numel)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors, and of results."""
        return self._reference().dtype

    @property
    def device(self) -> torch.device:
        """The device of its tensors, and of results."""
        return self._reference().device

    def _reference(self) -> Tensor:
        return next(t for t in self.parts[0].tensors().values() if t.is_floating_point())

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the blocks."""
        return tuple(part.name for part in self.parts)

    def __repr__(self) -> str:
        return (
            f"Curvature({self.approximation}, {self.layout.numel:,} parameters in {len(self.parts)} "
            f"block{'s' if len(self.parts) > 1 else ''}, {self.dtype}, {self.device})"
        )

    # --- vectors --------------------------------------------------------------------------------------------------

    def flatten(self, v: Mapping[str, Tensor]) -> Tensor:
        """Turn a dict of ``[*shape]`` or ``[K, *shape]`` into ``[P]`` or ``[K, P]``."""
        return self.layout.flatten(v)

    def unflatten(self, v: Tensor) -> dict[str, Tensor]:
        """Turn ``[P]`` or ``[K, P]`` into a dict of ``[*shape]`` or ``[K, *shape]``."""
        checks.instance("the vector", v, Tensor, f"a tensor whose last dimension is {self.layout.numel}")
        if v.shape[-1:] != (self.layout.numel,):
            raise ValueError(f"the vector has shape {tuple(v.shape)}; its last dimension must be {self.layout.numel}")
        return self.layout.unflatten(v)

    def _each(self, rows: Tensor, do: Callable[[Part, Tensor], Tensor]) -> Tensor:
        out = torch.empty_like(rows)
        for part, places in zip(self.parts, self._places, strict=True):
            out[:, places] = do(part, rows[:, places])
        return out

    def _transformed(self, v: Vector, do: Callable[[Part, Tensor], Tensor]) -> Any:
        rows, restore = self.layout.read(v, self.dtype, self.device)
        return restore(self._each(rows, do))

    # --- products, solves, powers -----------------------------------------------------------------------------------

    @overload
    def __matmul__(self, v: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    @exactly
    def __matmul__(self, v: Vector) -> Tensor | dict[str, Tensor]:
        """Return G v, for one vector or a stack."""
        return self._transformed(v, lambda part, rows: part.matmul(rows))  # type: ignore[no-any-return]

    @overload
    def solve(self, v: Tensor, damping: float = 0.0) -> Tensor: ...
    @overload
    def solve(self, v: Mapping[str, Tensor], damping: float = 0.0) -> dict[str, Tensor]: ...
    @exactly
    def solve(self, v: Vector, damping: float = 0.0) -> Tensor | dict[str, Tensor]:
        """Return (G + damping)^-1 v, for one vector or a stack."""
        damping = self._checked(damping, inverse=True)
        return self._transformed(v, lambda part, rows: part.apply(rows, lambda s: rows.new_ones(()) / (s + damping)))  # type: ignore[no-any-return]

    @exactly
    def power(self, p: float, damping: float = 0.0) -> Curvature:
        """Return (G + damping)^p as an operator."""
        checks.number("p", p)
        damping = self._checked(damping, inverse=p < 0)
        return self._mapped(lambda s: (s + damping).pow(p))

    def _mapped(self, f: Function) -> Curvature:
        return type(self)(self.approximation, self.layout, [part.mapped(f) for part in self.parts], self.examples)

    @exactly
    def quadratic(self, v: Vector) -> Tensor:
        """Return v^T G v; for a stack, one number per vector."""
        rows, _ = self.layout.read(v, self.dtype, self.device)
        products = (rows * self._each(rows, lambda part, r: part.matmul(r))).sum(1)
        stacked = v.dim() == 2 if isinstance(v, Tensor) else v[self.layout.names[0]].dim() > len(self.layout.shapes[0])
        return products if stacked else products[0]

    # --- numbers --------------------------------------------------------------------------------------------------

    @exactly
    def trace(self) -> Tensor:
        """Sum the eigenvalues."""
        return self._sum(lambda part: part.trace())

    @exactly
    def norm(self) -> Tensor:
        """Return the Frobenius norm."""
        return self._sum(lambda part: part.square_norm()).sqrt()

    @exactly
    def logdet(self, damping: float = 0.0) -> Tensor:
        """Return log det(G + damping)."""
        damping = self._checked(damping, inverse=True)
        return self._sum(lambda part: (part.values() + damping).log().sum())

    def _sum(self, of: Callable[[Part], Tensor]) -> Tensor:
        return torch.stack([of(part) for part in self.parts]).sum()

    def _checked(self, damping: float, *, inverse: bool) -> float:
        """Check damping and return it as a float; refuse zero if the inverse is needed and the matrix is singular."""
        checks.number("damping", damping, least=0)
        damping = float(damping)
        if damping > 0 or not inverse:
            return damping
        for part in self.parts:
            values = part.values()
            largest, smallest = float(values.max()), float(values.min())
            if smallest <= largest * part.numel * torch.finfo(values.dtype).eps:
                advice = 1e-3 * float(values.mean()) or 1e-3
                raise ValueError(
                    f"damping=0 and the matrix is singular in '{part.name}' (eigenvalues from {smallest:.3g} to "
                    f"{largest:.3g}): pass damping > 0, for example damping={advice:.1g}"
                )
        return damping

    # --- spectrum -------------------------------------------------------------------------------------------------

    @exactly
    def eigenvalues(self) -> Tensor:
        """Return all P eigenvalues, in ascending order."""
        return torch.cat([part.values() for part in self.parts]).sort().values

    @exactly
    def spectrum(self) -> dict[str, Tensor]:
        """Return the eigenvalues by block, in the order and shape of the coordinates from :meth:`project`."""
        return {part.name: part.values().reshape(part.coordinate_shape()) for part in self.parts}

    @overload
    def project(self, v: Tensor) -> Tensor: ...
    @overload
    def project(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    @exactly
    def project(self, v: Vector) -> Tensor | dict[str, Tensor]:
        """Return U^T v: coordinates in the eigenbasis.

        For a flat vector, the blocks' coordinates are concatenated in the order of ``layers``. For a dict, the result
        is a dict by block name; those of KFAC and EKFAC are ``U_B^T V U_A`` with shape ``[groups, out, in]``.
        """
        rows, restore = self.layout.read(v, self.dtype, self.device)
        parts = [part.project(rows[:, places]) for part, places in zip(self.parts, self._places, strict=True)]
        if isinstance(v, Tensor):
            return restore(torch.cat(parts, 1))
        lead = () if v[self.layout.names[0]].dim() == len(self.layout.shapes[0]) else (len(rows),)
        return {
            part.name: x.reshape(*lead, *part.coordinate_shape()) for part, x in zip(self.parts, parts, strict=True)
        }

    @overload
    def unproject(self, x: Tensor) -> Tensor: ...
    @overload
    def unproject(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    @exactly
    def unproject(self, x: Vector) -> Tensor | dict[str, Tensor]:
        """Return U x: undo :meth:`project`."""
        shapes = tuple(part.coordinate_shape() for part in self.parts)
        rows, restore = Layout(self.layers, shapes).read(x, self.dtype, self.device)
        out = torch.empty_like(rows)
        pieces = rows.split([part.numel for part in self.parts], 1)
        for part, places, piece in zip(self.parts, self._places, pieces, strict=True):
            out[:, places] = part.unproject(piece)
        if isinstance(x, Tensor):
            return restore(out)
        stacked = x[self.layers[0]].dim() > len(shapes[0])
        return self.layout.unflatten(out if stacked else out[0])

    # --- matrices and samples -----------------------------------------------------------------------------------------

    @exactly
    def diagonal(self) -> Tensor:
        """Return the P diagonal entries, flat."""
        out = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        for part, places in zip(self.parts, self._places, strict=True):
            out[places] = part.diagonal()
        return out

    @exactly
    def dense(self) -> Tensor:
        """Return the matrix ``[P, P]``, for tests and small networks."""
        out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for part, places in zip(self.parts, self._places, strict=True):
            if isinstance(places, slice):
                out[places, places] = part.dense()
            else:
                out[places[:, None], places] = part.dense()
        return out

    @exactly
    def sample(
        self, n: int | None = None, damping: float = 0.0, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Draw from a Gaussian with mean zero and precision scale G + damping.

        Args:
            n: The number of draws, stacked ``[n, *shape]``; None for a single, unstacked draw.
            damping: Added to every eigenvalue; in a Laplace approximation, the prior's precision.
            scale: A factor of G; in a Laplace approximation, the number of training examples.
            generator: The random number generator.
        """
        checks.number("scale", scale, above=0)
        if n is not None:
            checks.integer("n", n, least=0)
        if generator is not None:
            checks.instance("generator", generator, torch.Generator, "a torch.Generator, or None")
        damping = self._checked(damping, inverse=True)
        z = torch.randn(
            1 if n is None else n,
            self.layout.numel,
            generator=generator,
            dtype=self.dtype,
            device=self.device if generator is None else generator.device,
        ).to(self.device)
        rows = self._each(z, lambda part, r: part.apply(r, lambda s: (scale * s + damping).rsqrt()))
        return self.layout.unflatten(rows[0] if n is None else rows)

    # --- pieces, places, files ----------------------------------------------------------------------------------------

    @exactly
    def restrict(self, layers: str | Sequence[str]) -> Curvature:
        """Return the matrix restricted to the parameters of some layers.

        Args:
            layers: Names or patterns of layers or parameters. With KFAC and EKFAC, layers cannot be split.
        """
        patterns = checks.patterns("layers", layers)
        chosen = [name for name in self.layout.names if matches(name, patterns)]
        if not chosen:
            raise ValueError(f"layers={layers!r} names no parameter. Parameters: {', '.join(self.layout.names)}")
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        parts: list[Part] = []
        for part in self.parts:
            wanted = tuple(name for name in part.parameters if name in chosen)
            if wanted == part.parameters:
                parts.append(part)
            elif wanted:
                inside = Layout(part.parameters, tuple(shapes[name] for name in part.parameters))
                places = torch.arange(part.numel, device="cpu")
                places = torch.cat([places[inside.places((name,))] for name in wanted])
                cut = part.cut(wanted, places)
                if cut is None:
                    raise ValueError(
                        f"layers={layers!r} takes {', '.join(wanted)} of the block '{part.name}', which mixes "
                        f"{', '.join(part.parameters)}: take the layer whole"
                    )
                parts.append(cut)
        return type(self)(
            self.approximation, Layout(tuple(chosen), tuple(shapes[n] for n in chosen)), parts, self.examples
        )

    def to(self, *args: Any, **kwargs: Any) -> Curvature:
        """Move to a device or cast to a dtype, like ``Tensor.to``."""
        return type(self)(
            self.approximation, self.layout, [part.to(*args, **kwargs) for part in self.parts], self.examples
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a safetensors file."""
        storage.save(path, self.approximation, self.layout, self.parts, self.examples)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Self:
        """Load what :meth:`save` wrote, without executing any code from the file."""
        return cls(*storage.load(path, device))
