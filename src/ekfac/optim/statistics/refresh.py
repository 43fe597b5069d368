"""When a basis is renewed, how, and what is done when the solver fails."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ekfac.curvature import factors
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import (
    Basis,
    WarmBasis,
    eigh_with_fallback,
    off_diagonal_residual,
    orthogonal_iteration,
    rayleigh,
)
from ekfac.optim.cuda.replay import Lanes, Replays

#: After this many refreshes in a row without a usable answer the layer is reported by an error.
PATIENCE = 5
#: A warm refresh that leaves more than this of the factor off the diagonal is followed by another one after the next
#: step, and when so many in a row have done so by a full solve.
TOLERANCE = 0.5
TRIES = 3
#: Stands for the residual where no side was iterated.
NOTHING = -1.0
#: So many first steps turn all bases, with the step's own batch among the factors: while these still gain rank, a basis
#: that has not seen a batch takes its gradient for one without curvature. Until step START others follow, each after
#: GROWTH times as many steps: the first bases are stale almost at once.
EARLY = 10
GROWTH = 1.15
START = 300
#: Afterwards A and B are taken in so many shares of the layers, by turns.
SHARES = 4


@dataclass(frozen=True)
class Schedule:
    """When each block's basis is renewed; every one is solved for in full at its first step.

    Attributes:
        every: The interval, in applied steps.
        deterministic: Solve in full for all bases within every ``every``-th step, as Algorithm 1 has it. Otherwise each
            is renewed once in an interval by orthogonal iteration, after a step, one side of one block at a time, so
            that no step pays for all; and all of them within the steps of :func:`early_steps`.
    """

    every: int
    deterministic: bool

    @cached_property
    def _early(self) -> frozenset[int]:
        return frozenset() if self.deterministic else early_steps(self.every)

    def solve(self, applied: int) -> bool:
        """Whether the step after this many applied ones begins with a full solve of all bases."""
        return self.deterministic and applied % self.every == 0

    def turns_within(self, applied: int) -> bool:
        """Whether the step after this many applied ones turns all bases before it uses them."""
        return applied in self._early

    def turns_after(self, applied: int, index: int, blocks: int) -> tuple[int, int]:
        """How many iterations sides A and B of block ``index`` get when this many steps have been applied."""
        if self.deterministic or applied < min(self.every, EARLY):
            return 0, 0
        phases = ((2 * index + side) * self.every // max(1, 2 * blocks) for side in (0, 1))
        A, B = (int((applied + phase) % self.every == 0) for phase in phases)
        return A, B

    def takes_factors(self, applied: int, layer: int, given: int | None) -> bool:
        """Whether A and B of a layer take in the batch of the step after this many applied ones.

        At first they take in every batch, later twelve in an interval, not all layers the same, so that no step pays
        for all. There are a few shares of layers, as every share is another step to capture in a CUDA graph.

        Args:
            applied: How many steps have been applied.
            layer: The layer's place among all of the model.
            given: The user's own interval, at which all layers take in the same batches.
        """
        if given is not None or applied < START:
            return applied % (given or 1) == 0
        interval = max(1, self.every // 12)
        shares = 1 if self.deterministic else min(SHARES, interval)
        return applied % interval == layer % shares * interval // shares


def early_steps(every: int) -> frozenset[int]:
    """The steps, by the number of applied ones before them, that turn all bases before they use them."""
    steps, at = set(range(min(every, EARLY))), float(EARLY)
    while at < START:
        steps.add(round(at))
        at *= GROWTH
    return frozenset(steps)


class Refresher:
    """Renews bases, counts fallbacks, warns once of each kind, and gives up on a layer only after several.

    Args:
        replays: Replays warm refreshes.
        lanes: Are open while a whole step is captured.
    """

    def __init__(self, replays: Replays, lanes: Lanes) -> None:
        self._lanes = lanes
        self._replays = replays
        self.fallbacks: Counter[str] = Counter()
        self.refreshes = 0
        self.warm_refreshes = 0
        self.seconds = 0.0
        self.drift: Tensor | None = None
        self._warned: set[str] = set()
        #: Residuals of blocks that were turned, one each, and when the host may read them.
        self._pending: list[tuple[list[Block], Tensor, torch.cuda.Event | None]] = []
        #: Those of the step that is being captured; the host hears of them after every replay.
        self.captured: dict[Block, Tensor] = {}

    # --- in full ----------------------------------------------------------------------------------------------------

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
        # In place: bases are turned on a stream of their own too, and memory that is freed there is not waited for.
        if self.drift is None or self.drift.device != residual.device:
            self.drift = residual.clone() if self.drift is None else self.drift.to(residual)
        self.drift.copy_(torch.maximum(self.drift.to(residual), residual))

    # --- warm -------------------------------------------------------------------------------------------------------

    def turn(
        self, block: Block, A: Tensor, B: Tensor, old: Basis, turns: tuple[int, int], ok: Tensor | None = None
    ) -> Basis:
        """The basis in use, turned towards the factors' own by orthogonal iteration; nothing waits for the device.

        A side without iterations keeps its basis; its eigenvalues follow the factor all the same. Where ``ok`` is 0 the
        new basis will not be used, and does not count.
        """
        started = time.perf_counter()
        residuals = []
        sides: list[tuple[Tensor | None, Tensor]] = []
        with factors.full_precision(A.device):
            for matrix, U, iterations in ((A, old.U_A, turns[0]), (B, old.U_B, turns[1])):
                if U is None:
                    sides.append((None, matrix.clamp(min=0)))
                    continue
                if not iterations:
                    sides.append((U, rayleigh(matrix, U).clamp(min=0)))
                    continue
                warm = self._iterate(matrix, U, iterations)
                sides.append((warm.U, warm.values))
                residuals.append(torch.where(warm.good, warm.residual, torch.inf))
        (U_A, S_A), (U_B, S_B) = sides
        new = Basis(block.shape, U_A, U_B, S_A, S_B)
        found = torch.stack(residuals).max() if residuals else S_A.new_full((), NOTHING)
        if ok is not None:
            found = torch.where(ok > 0, found, torch.nan)
        if self._lanes.open:
            self.captured[block] = found
        else:
            self.note([block], found[None])
            self.seconds += time.perf_counter() - started
        return new

    def _iterate(self, matrix: Tensor, U: Tensor, iterations: int) -> WarmBasis:
        """:func:`orthogonal_iteration`, replayed where it has been captured, but for steps that are captured whole."""
        if self._lanes.open:
            return orthogonal_iteration(matrix, U, iterations)

        def iterate(matrix: Tensor, U: Tensor) -> tuple[Tensor, ...]:
            warm = orthogonal_iteration(matrix, U, iterations)
            return warm.U, warm.values, warm.residual, warm.good

        return WarmBasis(*self._replays(iterations, iterate, matrix, U))

    def note(self, blocks: list[Block], residuals: Tensor) -> None:
        """Count blocks that were turned, and have the host read their residuals when these are there.

        One is NaN where the basis was left as it was, and NOTHING where no side was iterated.
        """
        self.warm_refreshes += len(blocks)
        self._drifted(residuals.nan_to_num(0.0, 0.0, 0.0).clamp(min=0).max())
        if residuals.device.type != "cuda":
            self._pending.append((blocks, residuals, None))
            return
        answer = torch.empty(residuals.shape, dtype=residuals.dtype, pin_memory=True)
        answer.copy_(residuals, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((blocks, answer, event))

    def heard(self, wait: bool = False) -> list[tuple[Block, bool]]:
        """Blocks whose warm refresh is over, and whether it has brought the basis near the factors' own.

        Args:
            wait: Wait for answers that are not there yet, so that all processes hear them at the same step.
        """
        waiting: list[tuple[list[Block], Tensor, torch.cuda.Event | None]] = []
        found = []
        for blocks, residuals, event in self._pending:
            if event is not None and wait:
                event.synchronize()
            if event is not None and not event.query():
                waiting.append((blocks, residuals, event))
            else:
                for block, residual in zip(blocks, residuals.tolist(), strict=True):
                    if math.isnan(residual):
                        self.warm_refreshes -= 1
                    elif residual != NOTHING:
                        found.append((block, residual <= TOLERANCE))
        self._pending = waiting
        return found

    def forget(self) -> None:
        """Drop answers that the host has not read."""
        self._pending = []

    def close(self) -> None:
        """Let go of what was captured."""
        self._replays.clear()
