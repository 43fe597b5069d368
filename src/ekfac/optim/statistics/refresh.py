"""Updates bases, by a full solve or a warm refresh from the current basis, and handles failing solvers."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.eigensolvers import (
    WarmBasis,
    eigh_with_fallback,
    off_diagonal_residual,
    orthogonal_iteration,
    rayleigh,
)
from ekfac.optim.executor import Executor
from ekfac.optim.stacks import Stacks, concatenated
from ekfac.optim.statistics.schedule import NOTHING, START, Schedule
from ekfac.optim.types import Rates, factors_of

#: After this many consecutive failed refreshes a layer is reported by an error.
PATIENCE = 5
#: Rungs of the solvers' ladder worth a warning: a slow device, or the old basis. The other rungs are exact.
WARNED_RUNGS = ("other_device", "kept")
#: At most this many entries of factors are iterated at a time, as iteration makes about eight float64 copies of them.
NUMBERS = 2**24


class Refresher:
    """Updates bases, counts fallbacks, warns once per kind, and gives up on a layer after several failures.

    Args:
        executor: Runs warm refreshes.
        schedule: Receives the outcomes of warm refreshes.
    """

    def __init__(self, executor: Executor, schedule: Schedule) -> None:
        self.executor = executor
        self._schedule = schedule
        self.fallbacks: Counter[str] = Counter()
        self.refreshes = 0
        self.seconds = 0.0
        self.drift: Tensor | None = None
        self._warned: set[str] = set()

    # --- in full ----------------------------------------------------------------------------------------------------

    def solve(self, block: Block, A: Tensor, B: Tensor, old: Basis | None, failures: int) -> tuple[Basis, int]:
        """Return the eigenbasis of the factors, and the number of consecutive failed refreshes."""
        started = time.perf_counter()
        widest = max(A.shape[-1], B.shape[-1])
        with factors.full_precision(A.device), self.executor.fast_products(widest**3):
            U_A, S_A, kept_A = self._side(block, "A", A, block.diagonal_A, None if old is None else old.U_A)
            U_B, S_B, kept_B = self._side(block, "B", B, block.diagonal_B, None if old is None else old.U_B)
        failures = failures + 1 if kept_A or kept_B else 0
        if failures >= PATIENCE:
            raise RuntimeError(
                f"layer '{block.name}': no eigendecomposition of its factors in {failures} refreshes in a row. "
                "Its activations or gradients are likely not finite: lower lr, raise damping, or exclude the layer"
            )
        self.refreshes += 1
        self.seconds += time.perf_counter() - started
        return Basis(block.shape, U_A, U_B, S_A, S_B), failures

    def _side(
        self, block: Block, side: str, matrix: Tensor, diagonal: bool, old: Tensor | None
    ) -> tuple[Tensor | None, Tensor, bool]:
        if diagonal:
            return None, matrix.clamp(min=0), False
        if old is not None:
            self._drifted(off_diagonal_residual(matrix, old).max())
        solved = eigh_with_fallback(matrix, old)
        if solved.rung != "plain":
            self.fallbacks[solved.rung] += 1
            if solved.rung in WARNED_RUNGS and solved.rung not in self._warned:
                self._warned.add(solved.rung)
                warnings.warn(
                    f"layer '{block.name}': the eigendecomposition of {side} fell back to '{solved.rung}'; "
                    "training continues, and opt.stats() counts such cases",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return solved.U, solved.values, solved.rung == "kept"

    def _drifted(self, residual: Tensor) -> None:
        drift = self._drift_on(residual.device)
        # In place: on a side stream, freed memory could be reused before the work there is done.
        drift.copy_(torch.fmax(drift, residual))  # fmax ignores the NaN of a non-finite factor

    def _drift_on(self, device: torch.device) -> Tensor:
        if self.drift is None:
            self.drift = torch.zeros((), dtype=torch.float64, device=device)
        self.drift = self.drift.to(device)
        return self.drift

    # --- warm -------------------------------------------------------------------------------------------------------

    def renewals(self, stacks: Stacks, due: Mapping[Block, tuple[int, int]], rates: Rates) -> Iterable[list[Renewal]]:
        """Return the warm refreshes that are due, one per stack, grouped by device.

        Args:
            stacks: Blocks of one shape together.
            due: The blocks, with the iterations for A and B.
            rates: The hyper-parameters of this step.
        """
        found: dict[torch.device, list[Renewal]] = {}
        for stack in stacks.of(due, lambda block: (due[block], rates.group_of[block.key])):
            near = self._schedule.applied_steps >= START and not any(s.strayed for s in stacks.states(stack))
            damping = rates.of(stack.first.key).damping
            renewal = Renewal(stack.blocks, stack.state, due[stack.first], damping, near)
            found.setdefault(stack.first.key.device, []).append(renewal)
        return found.values()

    def warm(
        self, renewals: Sequence[Renewal], change: Callable[[Renewal, Basis], None], ok: Tensor | None = None
    ) -> None:
        """Refresh bases by orthogonal iteration from the current ones, without waiting for the device.

        A side without iterations keeps its basis; its eigenvalues are updated nonetheless if the method reads them.
        If ``ok`` is 0, the new bases are discarded and not counted.

        Args:
            renewals: The refreshes, all on one device.
            change: Installs a new basis and carries the rule's state over.
            ok: 0 on the device if the step is to be skipped, else 1; None if the host knows that it is not.
        """
        started = time.perf_counter()
        drift = self._drift_on(renewals[0].old.S_A.device)

        def renew() -> tuple[Tensor]:
            widest = max(max(r.old.S_A.shape[-1], r.old.S_B.shape[-1]) for r in renewals)
            with self.executor.fast_products(widest**3):
                new, residuals = self._new_bases(renewals)
                if ok is not None:
                    residuals = torch.where(ok > 0, residuals, torch.nan)
                for renewal, basis in zip(renewals, new, strict=True):
                    change(renewal, basis)
            self._drifted(residuals.nan_to_num(0.0, 0.0, 0.0).clamp(min=0).max().to(drift))
            return (residuals,)

        if ok is None:
            fixed = [drift, *(t for r in renewals for t in r.tensors())]
            key = tuple((r.blocks, r.iterations, r.near, r.values) for r in renewals)
            (residuals,) = self.executor.call("a refresh", key, renew, fixed=fixed)
        else:
            (residuals,) = renew()
        blocks = [block for renewal in renewals for block in renewal.blocks]
        self._schedule.pending.append((blocks, self.executor.read_back(residuals)))
        self.seconds += time.perf_counter() - started

    def _new_bases(self, renewals: Sequence[Renewal]) -> tuple[list[Basis], Tensor]:
        """Return new bases, and the off-diagonal residual of each block's factors in them."""
        with factors.full_precision(renewals[0].old.S_A.device):
            sides = [r.sides() for r in renewals]
            found = iter(self._iterate_all([side for pair in sides for side in pair if side.iterated]))
            warm = [[next(found) if side.iterated else None for side in pair] for pair in sides]
            new = [renewed(r, pair, of) for r, pair, of in zip(renewals, sides, warm, strict=True)]
            return new, torch.cat([residuals_of(*pair) for pair in zip(renewals, warm, strict=True)])

    def _iterate_all(self, sides: list[Side]) -> list[WarmBasis]:
        """Iterate all sides of one width together, in chunks that fit into memory."""
        together: dict[Any, list[int]] = {}
        for index, side in enumerate(sides):
            kind = side.matrix.shape[1:], side.iterations, side.near, side.values, side.matrix.dtype
            together.setdefault(kind, []).append(index)
        found: dict[int, WarmBasis] = {}
        for (shape, *how, _), indices in together.items():
            lengths = [len(sides[i].matrix) for i in indices]
            matrices = concatenated([sides[i].matrix for i in indices])
            bases = concatenated([sides[i].U for i in indices])
            most = max(1, NUMBERS // shape.numel())
            parts = zip(matrices.split(most), bases.split(most), strict=True)
            done = [self._iterate(*part, *how) for part in parts]
            fields = [concatenated(list(field)).split(lengths) for field in zip(*map(fields_of, done), strict=True)]
            found.update({i: WarmBasis(*field) for i, *field in zip(indices, *fields, strict=True)})
        return [found[i] for i in range(len(sides))]

    def _iterate(self, matrix: Tensor, U: Tensor, iterations: int, near: bool, values: bool) -> WarmBasis:
        try:
            return orthogonal_iteration(matrix, U, iterations, near, values)
        except RuntimeError:  # includes torch.linalg.LinAlgError
            if len(matrix) > 1:  # one bad matrix fails the whole batch: try each
                each = zip(matrix.split(1), U.split(1), strict=True)
                done = [fields_of(self._iterate(*one, iterations, near, values)) for one in each]
                return WarmBasis(*(torch.cat(field) for field in zip(*done, strict=True)))
            self.fallbacks["kept"] += 1
            far = matrix.new_full((len(matrix),), torch.inf)
            return WarmBasis(U, rayleigh(matrix, U).clamp(min=0), far, torch.zeros_like(far, dtype=torch.bool))


class Side(NamedTuple):
    """One side of a basis: the factors, ``[G, D, D]``, and the current basis, None if the side is diagonal."""

    matrix: Tensor
    U: Any
    S: Any
    iterations: int
    near: bool
    values: bool

    @property
    def iterated(self) -> bool:
        """Whether this refresh iterates it."""
        return self.U is not None and self.iterations > 0


@dataclass(frozen=True)
class Renewal:
    """A warm refresh of one block, or of several that are stacked.

    Attributes:
        blocks: The blocks.
        state: Their (stacked) state.
        iterations: The iterations for A and B.
        damping: The group's damping.
        near: Whether the current basis is known to be near the factors' eigenbasis.
        old: The current basis, for methods that have one.
        values: Whether the method reads the eigenvalues.
    """

    blocks: tuple[Block, ...]
    state: Any
    iterations: tuple[int, int]
    damping: float | Tensor
    near: bool = False
    old: Any = None
    values: bool = True

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the state that the refresh reads or writes."""
        still = [side for side, n in zip("AB", self.iterations, strict=True) if not (n or self.values)]
        idle = {name for side in still for name in (side, f"U_{side}", f"S_{side}") if f"U_{side}" in self.state}
        return [t for name, t in sorted(self.state.items()) if isinstance(t, Tensor) and name not in idle]

    def sides(self) -> tuple[Side, Side]:
        """Return A and B."""
        o, (n_A, n_B) = self.old, self.iterations
        # A basis not known to be near needs eigenvalues too, to see whether it has come near.
        A, B, values = *factors_of(self.state), self.values or not self.near
        return Side(A, o.U_A, o.S_A, n_A, self.near, values), Side(B, o.U_B, o.S_B, n_B, self.near, values)


def iterated_numbers(due: Mapping[Block, tuple[int, int]]) -> int:
    """Return the number of factor entries that the warm refreshes iterate."""
    return sum(n for b, sides in due.items() for n, times in zip(b.factor_numbers(), sides, strict=True) if times)


def renewed(renewal: Renewal, sides: Sequence[Side], warm: Sequence[WarmBasis | None]) -> Basis:
    """Return the new basis of one or several blocks."""
    found: list[tuple[Tensor | None, Tensor]] = []
    for side, iterated in zip(sides, warm, strict=True):
        if iterated is not None:
            found.append((iterated.U, iterated.values))
        elif side.U is None:
            found.append((None, side.matrix.clamp(min=0)))
        else:
            found.append((side.U, rayleigh(side.matrix, side.U).clamp(min=0) if renewal.values else side.S))
    (U_A, S_A), (U_B, S_B) = found
    return Basis(renewal.old.shape, U_A, U_B, S_A, S_B)


def residuals_of(renewal: Renewal, warm: Sequence[WarmBasis | None]) -> Tensor:
    """Return the largest residual of each block over both sides and all groups.

    It is infinity if an iteration failed, and NOTHING if no side was iterated.
    """
    count = len(renewal.blocks)
    known = [torch.where(w.good, w.residual, torch.inf).view(count, -1).amax(1) for w in warm if w is not None]
    return torch.stack(known).amax(0) if known else renewal.old.S_A.new_full((count,), NOTHING)


def fields_of(warm: WarmBasis) -> tuple[Tensor, ...]:
    """Return the fields of a warm refresh's result."""
    return warm.U, warm.values, warm.residual, warm.good
