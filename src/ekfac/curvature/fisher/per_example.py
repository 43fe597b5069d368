"""Per-example gradients of any module, for exact matrices and for parameters that no layer covers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from ekfac.curvature.fisher.batches import Batch
from ekfac.curvature.fisher.estimates import Cotangents


class ExampleGradients:
    """Rows ``[examples x passes, P]``: each example's gradient in each backward pass, parameters concatenated.

    ``torch.func.vmap`` processes several examples at once. A module that it cannot trace is called with one at a time,
    and so is one whose gradients it gets wrong, as it does a PReLU's slope's.

    Args:
        model: The model.
        names: The parameters whose gradients are needed.
        memory: Bound in bytes on the rows yielded at once.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], memory: int) -> None:
        self.model = model
        self.memory = memory
        everything = dict(model.named_parameters())
        self.parameters = {name: everything[name] for name in names}
        self.size = sum(p.numel() for p in self.parameters.values())
        self.device = next(model.parameters()).device
        self.one_at_a_time = False
        self._checked = False

    def enough(self, passes: Sequence[Cotangents]) -> bool:
        """Return whether these passes fill the memory, with a single example's rows or by themselves."""
        mine = sum(c.numel() * c.element_size() for one in passes for c in one if c is not None)
        return len(passes) * self._each >= self.memory or 2 * mine >= self.memory

    @property
    def _each(self) -> int:
        """Bytes per row, including vmap's temporaries."""
        return 3 * self.size * max(p.element_size() for p in self.parameters.values())

    @property
    def _tolerance(self) -> float:
        """Relative differences explained by precision: that of the parameters, or of autocast."""
        dtypes = {p.dtype for p in self.parameters.values()}
        if torch.is_autocast_enabled(self.device.type):
            dtypes.add(torch.get_autocast_dtype(self.device.type))
        return min(0.1, 1e3 * max(torch.finfo(dtype).eps for dtype in dtypes))

    def rows(self, batch: Batch, passes: Sequence[Cotangents]) -> Iterator[Tensor]:
        """Yield all rows of a batch for some backward passes, in pieces."""
        at_once = max(1, min(batch.n, self.memory // max(1, len(passes) * self._each)))
        total, length = torch.zeros(self.size, dtype=torch.float64, device=self.device), 0.0
        for start in range(0, batch.n, at_once):
            piece = self._piece(batch, passes, start, min(start + at_once, batch.n))
            if not self._checked:
                total += piece.double().sum(0)
                length += float(piece.double().norm(dim=1).sum())
            yield piece
        if not self._checked:
            self._check(batch, passes, total, length)
            self._checked = True

    def _piece(self, batch: Batch, passes: Sequence[Cotangents], start: int, stop: int) -> Tensor:
        # Find batch dimensions in the whole batch: a piece's size could coincide with another dimension.
        dims = tree_map(lambda x: 0 if _by_example(x, batch.n) else None, (batch.args, batch.kwargs))
        inputs = _select((batch.args, batch.kwargs), dims, slice(start, stop))
        cotangents = [
            None if leaf[0] is None else torch.stack([_split(c, batch.n)[start:stop] for c in leaf if c is not None], 1)
            for leaf in zip(*passes, strict=True)
        ]
        if not self.one_at_a_time:
            try:
                rows = self._by_vmap(inputs, dims, cotangents)
                if self._checked or self._agrees(rows, inputs, dims, cotangents, stop - start):
                    return rows
                why = "it gives other gradients than a backward pass of one example"
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                why = str(error).partition("\n")[0] or type(error).__name__
            warnings.warn(
                "torch.func.vmap cannot trace this model, so its per-example gradients are computed one example at a "
                f"time, which is slow: {why}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.one_at_a_time = True
        return self._by_loop(inputs, dims, cotangents, stop - start)

    def _by_vmap(self, inputs: Any, dims: Any, cotangents: list[Tensor | None]) -> Tensor:
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        live = [c for c in cotangents if c is not None]

        def of_one(args: Any, kwargs: Any, cs: list[Tensor]) -> Tensor:
            args, kwargs = _select((args, kwargs), dims, None)

            def outputs(trained: dict[str, Tensor]) -> tuple[Tensor, ...]:
                leaves = tree_leaves(functional_call(self.model, trained, args, kwargs))
                return tuple(leaf for leaf, c in zip(leaves, cotangents, strict=True) if c is not None)

            pull: Callable[..., Any] = vjp(outputs, parameters)[1]
            (gradients,) = vmap(pull)(tuple(cs))
            return torch.cat([gradients[name].flatten(1) for name in parameters], 1)

        together: Callable[..., Tensor] = vmap(of_one, in_dims=(dims[0], dims[1], 0), randomness="different")
        return together(*inputs, live).flatten(0, 1).detach()

    def _agrees(self, rows: Tensor, inputs: Any, dims: Any, cotangents: list[Tensor | None], n: int) -> bool:
        """Return whether n examples have as many rows as the first, and its rows are those of its backward passes."""
        first = self._by_loop(inputs, dims, cotangents, 1).double()
        error = float((rows[: len(first)] - first).norm())
        return len(rows) == n * len(first) and error <= self._tolerance * float(first.norm())

    def _by_loop(self, inputs: Any, dims: Any, cotangents: list[Tensor | None], n: int) -> Tensor:
        wanted = list(self.parameters.values())
        rows = []
        for i in range(n):
            args, kwargs = _select(inputs, dims, slice(i, i + 1))
            with torch.enable_grad():
                leaves = tree_leaves(self.model(*args, **kwargs))
            pairs = [(leaf, c[i]) for leaf, c in zip(leaves, cotangents, strict=True) if c is not None]
            passes = len(pairs[0][1])
            for k in range(passes):
                gradients = torch.autograd.grad(
                    [leaf for leaf, _ in pairs],
                    wanted,
                    [c[k] for _, c in pairs],
                    retain_graph=k < passes - 1,
                    allow_unused=True,
                )
                rows.append(_flat(wanted, gradients))
        return torch.stack(rows)

    def _check(self, batch: Batch, passes: Sequence[Cotangents], total: Tensor, length: float) -> None:
        """Check that rows sum to the batch's gradient, which fails if examples interact within the model."""
        wanted = list(self.parameters.values())
        with torch.enable_grad():
            leaves = tree_leaves(self.model(*batch.args, **batch.kwargs))
        sums = [
            None if leaf[0] is None else torch.stack([c for c in leaf if c is not None]).sum(0)
            for leaf in zip(*passes, strict=True)
        ]
        pairs = [(leaf, c) for leaf, c in zip(leaves, sums, strict=True) if c is not None]
        found = torch.autograd.grad([leaf for leaf, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
        if float((total - _flat(wanted, found).double()).norm()) > self._tolerance * length:
            raise ValueError(
                "per-example gradients do not sum to the gradient of their batch: examples interact within the model "
                "(as in batch normalisation without running statistics), so there is no Fisher of this kind"
            )


def _by_example(x: Any, n: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n


def _select(inputs: Any, dims: Any, which: slice | None) -> Any:
    """Select some examples of all inputs with a batch dimension; with None, add a batch dimension of one instead."""
    return tree_map(lambda x, dim: x if dim is None else x[which], inputs, dims)


def _split(cotangent: Tensor, n: int) -> Tensor:
    """Reshape ``[k n, ...]`` to ``[n, k, ...]``, the entries of each example."""
    return cotangent.reshape(n, cotangent.shape[0] // n, *cotangent.shape[1:])


def _flat(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Concatenate gradients, with zeros for missing ones."""
    pairs = zip(parameters, gradients, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).detach().flatten() for p, g in pairs])
