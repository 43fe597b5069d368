"""Decides which steps solve for bases, refresh them warm, or update A and B."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from ekfac.curvature.blocks import Block
from ekfac.optim.executor import Readback
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.partition import Partition, identity
from ekfac.optim.statistics.sums import Expected
from ekfac.optim.types import BlockState

if TYPE_CHECKING:
    from ekfac.optim.methods.base import Method

#: The first EARLY steps refresh all bases after adding their own batch to the factors: while these still gain rank, a
#: stale basis shows no curvature along a new batch's gradient. Further early refreshes follow until step START, at step
#: numbers that grow by the factor GROWTH, because the first bases go stale quickly.
EARLY = 10
GROWTH = 1.15
START = 100
#: A and B are updated in each of the first DENSE steps, then BATCHES times per interval, and after SETTLED steps
#: LATER_BATCHES times.
DENSE = 20
BATCHES = 4
SETTLED = 300
LATER_BATCHES = 2
#: The default interval, and how many times longer it is after SETTLED steps.
INTERVAL = 20
LATER = 2
#: Sides wider than this are refreshed less often, by the square of their width, because the cost grows with its cube.
WIDE_SIDES = {"cuda": 1024}
WIDE_SIDE = 400
#: A warm refresh that strayed is repeated after the next step; after TRIES in a row there is a full solve.
TRIES = 3
#: A warm refresh has strayed if the factor's relative off-diagonal residual exceeds this.
TOLERANCE = 0.5
#: The residual if no side was iterated.
NOTHING = -1.0

#: The state of a block that has none yet.
NOTHING_YET = BlockState()
#: What decides when a block is refreshed: part, number of parts, stretches, strayed; see :meth:`Intervals.warm_after`.
Kind = tuple[int, int, tuple[int, int], int]


@dataclass(frozen=True)
class Intervals:
    """Which steps update bases and factors. Steps are counted when applied; every basis starts with a full solve.

    Attributes:
        every: The interval, in applied steps.
        deterministic: Solve in full for all bases within every ``every``-th step, as in Algorithm 1. Otherwise each is
            refreshed warm once per interval, after a step, one part of the network at a time, so that no step pays for
            all; and all of them within the steps of :func:`early_steps`.
        derivatives: Update A and B once per interval, just before a refresh: with derivatives in the loss, a batch is
            several times as expensive and has several times as many positions per example.
        later: The interval is this many times longer after SETTLED steps.
    """

    every: int
    deterministic: bool
    derivatives: bool = False
    later: int = 1

    def warm_after(
        self, applied: int, index: int, parts: int, stretches: tuple[int, int] = (1, 1), strayed: int = 0
    ) -> tuple[int, int]:
        """Return the number of iterations for A and B after this many applied steps.

        Args:
            applied: The number of applied steps.
            index: The part of the network that the blocks are in.
            parts: The number of parts.
            stretches: The factors by which the intervals of A and B are longer than usual.
            strayed: The number of consecutive warm refreshes that strayed.
        """
        if strayed:
            return (1, 1) if strayed < TRIES else (0, 0)  # then the next step solves in full
        if self.deterministic or applied < min(self.every, EARLY):
            return 0, 0
        iterations = []
        for stretch in stretches:
            interval = self.every * stretch * (self.later if applied >= SETTLED else 1)
            phase = index * interval // parts
            iterations.append(int((applied + phase) % interval == 0))
        return iterations[0], iterations[1]

    def takes_factors(self, applied: int, given: int | None) -> bool:
        """Return whether the step after this many applied ones updates A and B.

        Args:
            applied: The number of applied steps.
            given: ``factor_every``.
        """
        if given is None and self.derivatives:
            return (applied + 1) % self.every == 0
        if given is None:
            batches = BATCHES if applied < SETTLED or self.deterministic else LATER_BATCHES
            every = self.every * (self.later if applied >= SETTLED else 1)
            given = 1 if applied < DENSE else max(1, every // batches)
        return applied % given == 0


@dataclass(frozen=True)
class Calm:
    """Blocks of which none has strayed: nothing is due while no kind of them is.

    Attributes:
        version: The generation of the partition, and the intervals.
        kinds: The distinct kinds of blocks.
    """

    version: tuple[int, Intervals]
    kinds: set[Kind]


@cache
def early_steps(every: int, stretch: int = 1) -> frozenset[int]:
    """Return the early steps (counted by applied steps before them) that refresh a basis before using it."""
    steps, at = set(range(min(every, max(1, EARLY // stretch)))), float(EARLY)
    while at < START:
        steps.add(round(at))
        at *= GROWTH**stretch
    return frozenset(steps)


def stretches(block: Block, device: str | None = None) -> tuple[int, int]:
    """Return the factors by which a block's intervals for A and B are longer than usual, on its device by default."""
    wide = WIDE_SIDES.get(device or block.key.device.type, WIDE_SIDE)
    A, B = (max(1, round((width / wide) ** 2)) for width in (block.shape.inputs, block.shape.out))
    return 1 if block.diagonal_A else A, 1 if block.diagonal_B else B


class Stretches(dict[Block, tuple[int, int]]):
    """A cache of :func:`stretches`."""

    def __missing__(self, block: Block) -> tuple[int, int]:
        self[block] = stretches(block)
        return self[block]


class Schedule:
    """Knows what the current step does with each block.

    Args:
        options: The refresh interval, and when A and B are updated.
        method: The method for blocks that a layer covers.
        partition: The blocks and their state.
    """

    def __init__(self, options: EngineOptions, method: Method[Any], partition: Partition) -> None:
        self.applied_steps = 0
        self.warm_refreshes = 0
        #: Residuals of warm refreshes, one per block, that the host has not read yet.
        self.pending: list[tuple[list[Block], Readback]] = []
        self._options = options
        self._refresh = options.refresh
        self._stretches = Stretches()
        self._method = method
        self._partition = partition
        #: Whether losses are known to have derivatives of the network inside.
        self.derivatives = False
        #: What :meth:`due` has found, and for which step and partition.
        self._solves: set[Block] = set()
        self._warm: dict[Block, tuple[int, int]] = {}
        self._due_at: tuple[int, int] | None = None
        #: For :meth:`advance`, while no block has strayed.
        self._calm: Calm | None = None
        #: Whether the host may learn late that a step with warm refreshes was skipped; not if that would have changed
        #: what the next forward pass captures.
        self.maskable = (
            method.masks_refreshes
            and not method.needs_examples
            and options.refresh.factor_every in (None, 1)
            and options.refresh.factor_decay > 0
        )

    @cached_property
    def intervals(self) -> Intervals:
        """Which steps update bases and factors."""
        given, deterministic = self._options.refresh_every, self._refresh.deterministic
        fixed = given is not None or deterministic or self.derivatives
        return Intervals(given or INTERVAL, deterministic, self.derivatives, 1 if fixed else LATER)

    @property
    def factor_decay(self) -> float:
        """The weight of the past in A and B; with derivatives in the loss, one batch replaces BATCHES others."""
        r = self._refresh
        return r.factor_decay**BATCHES if self.derivatives and r.factor_every is None else r.factor_decay

    def set_derivatives(self, derivatives: bool) -> None:
        """Switch to the schedule for losses with derivatives, or back."""
        self.derivatives = derivatives
        self.__dict__.pop("intervals", None)
        self._due_at = None

    def due(self) -> tuple[set[Block], dict[Block, tuple[int, int]]]:
        """Find which bases this step updates before it uses them.

        Returns:
            The blocks to solve in full, and those to refresh warm, with the iterations for A and B.
        """
        now = self.applied_steps, self._partition.generation
        if self._due_at != now or self._solves:  # bases to solve for may exist by now
            self._due_at, (self._solves, self._warm) = now, self._find_due(self._partition.covered)
        return self._solves, self._warm

    def _find_due(self, blocks: Iterable[Block]) -> tuple[set[Block], dict[Block, tuple[int, int]]]:
        states, t, every = self._partition.states, self.applied_steps, self.intervals.every
        deterministic = self.intervals.deterministic
        solves, warm = set(), {}
        for block in blocks:
            state = states.get(block.key, NOTHING_YET)
            if state.strayed >= TRIES or not (hasattr(state, self._method.derived) or self._ready_elsewhere(block)):
                solves.add(block)
            elif deterministic:
                if t % every == 0:
                    solves.add(block)
            elif t < START:
                A, B = self._stretches[block]
                iterations = int(t in early_steps(every, A)), int(t in early_steps(every, B))
                if any(iterations):
                    warm[block] = iterations
        return solves, warm

    def _ready_elsewhere(self, block: Block) -> bool:
        """Return whether another process has the block's basis."""
        found = self._partition.ready_elsewhere
        return bool(found) and identity(block) in found

    def renews(self, block: Block) -> bool:
        """Return whether this step computes a new basis before using it."""
        return block.covered and any(block in found for found in self.due())

    def takes_all(self) -> bool:
        """Return whether this step updates A and B of every block."""
        r = self._refresh
        return r.factor_decay > 0 and self.intervals.takes_factors(self.applied_steps, r.factor_every)

    def takes_factors(self, block: Block) -> bool:
        """Return whether this step updates the block's A and B."""
        if self.takes_all() or self.renews(block):
            return True
        if self._refresh.factor_decay > 0:
            return False
        strayed = self._partition.states.get(block.key, NOTHING_YET).strayed
        at = self._partition.covered[block], self._partition.parts, self._stretches[block], strayed
        return any(self.intervals.warm_after(self.applied_steps + 1, *at))

    def takes_any(self) -> bool:
        """Return whether this step updates A and B of any block."""
        if self.takes_all() or any(self.due()):
            return True
        return self._refresh.factor_decay == 0 and any(map(self.takes_factors, self._partition.covered))

    def expected(self, unverified: Container[Block]) -> dict[Block, Expected]:
        """Return what every process gathers for each block in this step; ``unverified`` ones also a fingerprint."""
        examples = self._method.needs_examples
        return {
            block: Expected(self.takes_factors(block), examples and not self.renews(block), block in unverified)
            for block in self._partition.covered
        }

    def poll(self, wait: bool) -> None:
        """Read the outcomes of warm refreshes.

        Args:
            wait: Wait for outcomes that have not arrived, so that all processes read them at the same step.
        """
        waiting = []
        for blocks, readback in self.pending:
            if readback.late and not readback.ready(wait):
                waiting.append((blocks, readback))
                continue
            for block, residual in zip(blocks, readback.value.tolist(), strict=True):
                self.warm_refreshes += not math.isnan(residual)
                state = self._partition.states.get(block.key, NOTHING_YET)
                if hasattr(state, self._method.derived) and not math.isnan(residual) and residual != NOTHING:
                    state.near = residual <= TOLERANCE and getattr(state, "near", True)
                    self._calm = None
        self.pending = waiting

    def advance(self) -> list[tuple[Block, tuple[int, int]]]:
        """Count this step and the outcomes of warm refreshes, on which the next step's hooks depend.

        Returns:
            The blocks to refresh warm after this step, with the iterations for A and B.
        """
        t, intervals, calm = self.applied_steps + 1, self.intervals, self._calm
        due: list[tuple[Block, tuple[int, int]]] = []
        version = self._partition.generation, intervals
        if calm is None or calm.version != version or any(any(intervals.warm_after(t, *kind)) for kind in calm.kinds):
            due, kinds = self._due_after(t)
            alone = self._partition.owners.size == 1
            self._calm = Calm(version, kinds) if alone and not any(strayed for *_, strayed in kinds) else None
        self.applied_steps = t
        # Not with several processes: one without a batch could not have noticed.
        fixed = self.derivatives or self._refresh.deterministic or self._partition.owners.size > 1
        if not fixed and any(block.layer.differentiated for block in self._partition.covered):
            self.set_derivatives(True)
        return due

    def _due_after(self, t: int) -> tuple[list[tuple[Block, tuple[int, int]]], set[Kind]]:
        """Count the outcomes of warm refreshes; return the blocks to refresh after t steps, and all blocks' kinds."""
        states = self._partition.states
        due: list[tuple[Block, tuple[int, int]]] = []
        known: dict[Kind, tuple[int, int]] = {}  # most blocks are of one kind
        for block, index in self._partition.covered.items():
            state: dict[str, Any] = getattr(states.get(block.key), "__dict__", {})
            if "near" in state:
                state["strayed"] = 0 if state.pop("near") else state.get("strayed", 0) + 1
            kind = index, self._partition.parts, self._stretches[block], state.get("strayed", 0)
            if (iterations := known.get(kind)) is None:
                iterations = known[kind] = self.intervals.warm_after(t, *kind)
            if any(iterations) and (self._method.derived in state or self._ready_elsewhere(block)):
                due.append((block, iterations))
        return due, set(known)
