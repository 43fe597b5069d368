"""When a basis is renewed, and what is done when the solver fails."""

from __future__ import annotations

import time
import warnings
from collections import Counter

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis, eigh_with_fallback, off_diagonal_residual

#: After this many refreshes in a row without a usable answer the layer is reported by an error.
PATIENCE = 5


class EveryN:
    """Renew every basis at the first step and then every n applied steps."""

    def __init__(self, n: int) -> None:
        self.n = n

    def due(self, applied_steps: int) -> bool:
        """Whether the step after this many applied ones renews the bases."""
        return applied_steps % self.n == 0


class Refresher:
    """Solves for bases, counts fallbacks, warns once of each kind, and gives up on a layer only after several."""

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()
        self.refreshes = 0
        self.seconds = 0.0
        self.drift: Tensor | None = None
        self._warned: set[str] = set()

    def solve(self, block: Block, A: Tensor, B: Tensor, old: Basis | None, failures: int) -> tuple[Basis, int]:
        """U_A, S_A, U_B, S_B of the factors, and how many refreshes in a row have now failed."""
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
            drift = off_diagonal_residual(matrix, old).max()
            self.drift = drift if self.drift is None else torch.maximum(self.drift.to(drift), drift)
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
