"""Mixtures of experts in one parameter: a stack of matrices ``[E, out, in]`` or ``[E, in, out]``, one per expert.

Each expert is a group. Its A is the mean over the tokens routed to it, and its B the sum over them, as in a separate
linear layer; a batch without tokens for it counts as zeros in the averages over steps. It is unknown which token
belongs to which example, so there are no per-example gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature import factors
from ekfac.curvature.layers.base import Call, Layer
from ekfac.curvature.layers.shapes import BlockShape


def stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that are stacks of matrices."""
    return {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 3}


def inputs_first(module: Any) -> bool:
    """Return whether the matrices are stored as (in, out), according to the module's flag or its hidden size."""
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    first = next(iter(stacks(module).values()))
    return bool(first.shape[1] == hidden != first.shape[2])


class ExpertsLayer(Layer):
    """One stack of expert matrices."""

    module: Any
    seen_through_linear = True
    scattered = True

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False) -> None:
        super().__init__(module, roles)
        (self.part,) = roles
        self.stored_transposed = inputs_first(module)
        groups, out, inputs = self.matrices(stacks(module)[self.part]).shape
        self.shape = BlockShape(groups, out, inputs)

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Return whether the module has stacks, all with the same number of matrices."""
        return len({len(p) for p in stacks(module).values()}) == 1

    @classmethod
    def parts(cls, module: nn.Module) -> Mapping[str, Sequence[str]]:
        return {name: (name,) for name in stacks(module)}

    def matrices(self, tensor: Tensor) -> Tensor:
        """Convert a stack to ``[E, out, in]`` and back: its own inverse."""
        return tensor.mT if self.stored_transposed else tensor

    def free_dims(self, x: Tensor) -> int:
        return x.dim() - 1

    def has_examples(self, x: Tensor, n: int) -> bool:
        return False

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("the rows of experts are summed group by group")

    def groups(self, call: Call) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the experts of a call, each with its rows of x and d."""
        assert isinstance(call.layer, RowsOfExperts)
        x, d = (t.reshape(-1, t.shape[-1]) for t in (call.x, call.d))
        if isinstance(call.layer.where, int):
            yield call.layer.where, x, d
            return
        start = 0
        for group, end in enumerate(call.layer.where.tolist()):
            if end > start:
                yield group, x[start:end], d[start:end]
            start = end

    def sums_of_calls(
        self, calls: Sequence[Call], dtype: torch.dtype, diagonal_A: bool, diagonal_B: bool
    ) -> tuple[Tensor, int, Tensor]:
        s, like = self.shape, calls[0].d
        A, B = (
            torch.zeros(s.groups, *([side] if diagonal else [side, side]), dtype=dtype, device=like.device)
            for side, diagonal in ((s.inputs, diagonal_A), (s.out, diagonal_B))
        )
        rows = [0] * s.groups
        for call in calls:
            for group, x, d in self.groups(call):
                A[group] += factors.outer_sum(x.to(dtype)[:, None], diagonal_A)[0]
                B[group] += factors.outer_sum(d.to(dtype)[:, None], diagonal_B)[0]
                rows[group] += len(x)
        # Weighted so that dividing by the total number of rows gives each expert's mean over its own.
        total = sum(rows)
        weights = torch.tensor([total / max(1, count) for count in rows], dtype=dtype, device=like.device)
        return A * weights.reshape(-1, *(1 for _ in A.shape[1:])), total, B

    def probe_of_calls(self, calls: Sequence[Call], columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        found = [
            ((d.to(rows.dtype) @ rows[group]), (x.to(rows.dtype) @ columns[group]))
            for call in calls
            for group, x, d in self.groups(call)
        ]
        return torch.cat([d for d, _ in found]), torch.cat([x for _, x in found])

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.matrices(tensors[self.part])

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return {self.part: self.matrices(matrix)}


class RowsOfExperts(Layer):
    """A product of rows with some of the experts' matrices.

    Args:
        whole: The layer of all experts.
        where: The expert of all rows, or the end of each expert's rows.
    """

    def __init__(self, whole: ExpertsLayer, where: int | Tensor) -> None:
        super().__init__(whole.module, whole.roles)
        self.whole = whole
        self.where = where
        self.shape = whole.shape

    def free_dims(self, x: Tensor) -> int:
        return self.whole.free_dims(x)

    def has_examples(self, x: Tensor, n: int) -> bool:
        return False

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return self.whole.positions(x, d, n)

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self.whole.stack(tensors)

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return self.whole.unstack(matrix)
