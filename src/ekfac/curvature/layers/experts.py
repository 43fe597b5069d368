"""Experts in one parameter: a stack of matrices ``[E, out, in]`` or ``[E, in, out]``, one for each expert.

Each expert is a group of its own. Its A is the mean over the tokens that were sent to it, its B the sum over them, as
if it were a linear layer by itself; a batch that sends it none counts as zeros in the averages over steps. Which token
belongs to which example is not known here, so there are no per-example gradients.
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
    """Tell whether the matrices are stored as (in, out): by the module's own flag, or by its hidden size."""
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    first = next(iter(stacks(module).values()))
    return bool(first.shape[1] == hidden != first.shape[2])


class ExpertsLayer(Layer):
    """One stack of matrices."""

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
        """Tell whether there are stacks, all of as many matrices."""
        return len({len(p) for p in stacks(module).values()}) == 1

    @classmethod
    def parts(cls, module: nn.Module) -> Mapping[str, Sequence[str]]:
        return {name: (name,) for name in stacks(module)}

    def matrices(self, tensor: Tensor) -> Tensor:
        """Return a stack as ``[E, out, in]``, and the inverse of that."""
        return tensor.mT if self.stored_transposed else tensor

    def free_dims(self, x: Tensor) -> int:
        return x.dim() - 1

    def has_examples(self, x: Tensor, n: int) -> bool:
        return False

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("the rows of experts are summed group by group")

    def groups(self, call: Call) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Return the experts that a call concerns, each with its rows of x and d."""
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
        # So that what is divided by the number of all rows is each expert's mean over its own.
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
        where: The expert that all rows are for, or where the rows of each end.
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
