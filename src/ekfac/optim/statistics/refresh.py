"""How a basis is renewed: by a full solve, or warm, from the basis in use; and what is done when a solver fails."""

from __future__ import annotations

import time
import warnings
from collections import Counter

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
from ekfac.optim.statistics.schedule import NOTHING, Schedule

#: After this many refreshes in a row without a usable answer the layer is reported by an error.
PATIENCE = 5


class Refresher:
    """Renews bases, counts fallbacks, warns once of each kind, and gives up on a layer only after several.

    Args:
        executor: Runs what a warm refresh computes.
        schedule: Is told how warm refreshes went.
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
        """Return U_A, S_A, U_B, S_B of the factors, and how many refreshes in a row have now failed."""
        started = time.perf_counter()
        with factors.full_precision(A.device):
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
            if solved.rung not in self._warned:
                self._warned.add(solved.rung)
                warnings.warn(
                    f"layer '{block.name}': the eigendecomposition of {side} fell back to '{solved.rung}'; "
                    "training goes on, and opt.stats() counts such cases",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return solved.U, solved.values, solved.rung == "kept"

    def _drifted(self, residual: Tensor) -> None:
        # In place: a warm refresh may run on a side stream, and memory that is freed there is not waited for.
        if self.drift is None or self.drift.device != residual.device:
            self.drift = residual.clone() if self.drift is None else self.drift.to(residual)
        self.drift.copy_(torch.maximum(self.drift.to(residual), residual))

    # --- warm -------------------------------------------------------------------------------------------------------

    def warm(
        self, block: Block, A: Tensor, B: Tensor, old: Basis, iterations: tuple[int, int], ok: Tensor | None = None
    ) -> Basis:
        """Bring the basis in use nearer to the factors' own by orthogonal iteration; nothing waits for the device.

        A side without iterations keeps its basis; its eigenvalues follow the factor all the same. Where ``ok`` is 0 the
        new basis will not be used, and does not count.
        """
        started = time.perf_counter()
        residuals = []
        sides: list[tuple[Tensor | None, Tensor]] = []
        with factors.full_precision(A.device):
            for matrix, U, count in ((A, old.U_A, iterations[0]), (B, old.U_B, iterations[1])):
                if U is None:
                    sides.append((None, matrix.clamp(min=0)))
                    continue
                if not count:
                    sides.append((U, rayleigh(matrix, U).clamp(min=0)))
                    continue
                warm = self._iterate(matrix, U, count)
                sides.append((warm.U, warm.values))
                residuals.append(torch.where(warm.good, warm.residual, torch.inf))
        (U_A, S_A), (U_B, S_B) = sides
        new = Basis(block.shape, U_A, U_B, S_A, S_B)
        found = torch.stack(residuals).max() if residuals else S_A.new_full((), NOTHING)
        if ok is not None:
            found = torch.where(ok > 0, found, torch.nan)
        if self.executor.recorded is not None:  # a CUDA graph of the whole step, which enqueues it at every replay
            self.executor.recorded[block] = found
        else:
            self.enqueue([block], found[None])
            self.seconds += time.perf_counter() - started
        return new

    def _iterate(self, matrix: Tensor, U: Tensor, iterations: int) -> WarmBasis:
        def iterate(matrix: Tensor, U: Tensor) -> tuple[Tensor, ...]:
            warm = orthogonal_iteration(matrix, U, iterations)
            return warm.U, warm.values, warm.residual, warm.good

        try:
            return WarmBasis(*self.executor.call("a refresh", iterations, iterate, matrix, U))
        except RuntimeError:  # torch.linalg.LinAlgError is one
            self.fallbacks["kept"] += 1
            far = matrix.new_full((), torch.inf)
            return WarmBasis(U, rayleigh(matrix, U).clamp(min=0), far, torch.zeros_like(far, dtype=torch.bool))

    def enqueue(self, blocks: list[Block], residuals: Tensor) -> None:
        """Have the host read the residuals of warm refreshes when these are there.

        One is NaN where the basis was left as it was, and NOTHING where no side was iterated.
        """
        self._drifted(residuals.nan_to_num(0.0, 0.0, 0.0).clamp(min=0).max())
        self._schedule.pending.append((blocks, self.executor.answer(residuals)))
