"""What is due when: full solves, warm refreshes, and the batches that A and B take in."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from ekfac.curvature.blocks import Block
from ekfac.optim.executor import Answer
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.partition import Partition, members
from ekfac.optim.statistics.sums import Expected
from ekfac.optim.types import BlockState

if TYPE_CHECKING:
    from ekfac.optim.methods.base import Method

#: So many first steps refresh all bases, with the step's own batch among the factors: while these still gain rank, a
#: basis that has not seen a batch takes its gradient for one without curvature. Until step START others follow, each
#: after GROWTH times as many steps: the first bases are stale almost at once.
EARLY = 10
GROWTH = 1.15
START = 100
#: So many first steps take their batches into A and B; then so many in an interval, and fewer after SETTLED steps.
DENSE = 20
BATCHES = 4
SETTLED = 300
LATER_BATCHES = 2
#: The interval where none is given: orthogonal iteration is cheap beside a step on a GPU, and dear on a CPU.
INTERVALS = {"cuda": 20}
INTERVAL = 50
#: How many times longer that is after SETTLED steps.
LATER_INTERVALS = {"cuda": 2}
#: The same for losses with derivatives, whose steps are dear themselves and whose curvature changes faster.
INTERVAL_OF_DERIVATIVES = 20
#: A side wider than this is refreshed more rarely, by the square of its width: the price goes with the cube.
WIDE_SIDES = {"cuda": 1024}
WIDE_SIDE = 400
#: A warm refresh that has strayed is followed by another after the next step, and so many in a row by a full solve.
TRIES = 3
#: A warm refresh that leaves more than this of the factor off the diagonal has strayed.
TOLERANCE = 0.5
#: Stands for what it leaves where no side was iterated.
NOTHING = -1.0

#: Stands for the state of a block that has none yet.
NOTHING_YET = BlockState()


@dataclass(frozen=True)
class Intervals:
    """Which steps renew which bases, by the number of applied ones; every basis is solved for at its first step.

    Attributes:
        every: The interval, in applied steps.
        deterministic: Solve in full for all bases within every ``every``-th step, as Algorithm 1 has it. Otherwise each
            is renewed once in an interval by orthogonal iteration, after a step, one part of the network at a time, so
            that no step pays for all; and all of them within the steps of :func:`early_steps`.
        derivatives: Take in one batch an interval, the last before a refresh: a loss with derivatives makes a batch
            several times dearer, and has several times as many positions an example.
        later: How many times longer the interval is after SETTLED steps.
    """

    every: int
    deterministic: bool
    derivatives: bool = False
    later: int = 1

    def warm_after(
        self, applied: int, index: int, parts: int, stretches: tuple[int, int] = (1, 1), strayed: int = 0
    ) -> tuple[int, int]:
        """Return how many iterations the sides A and B of blocks get when this many steps have been applied.

        Args:
            applied: How many steps have been applied.
            index: The number of the part of the network that the blocks are in.
            parts: How many parts there are.
            stretches: How many times longer than usual the two intervals are.
            strayed: How many warm refreshes in a row have strayed.
        """
        if strayed:
            return (1, 1) if strayed < TRIES else (0, 0)  # the next step solves for it
        if self.deterministic or applied < min(self.every, EARLY):
            return 0, 0
        iterations = []
        for stretch in stretches:
            interval = self.every * stretch * (self.later if applied >= SETTLED else 1)
            phase = index * interval // parts
            iterations.append(int((applied + phase) % interval == 0))
        return iterations[0], iterations[1]

    def takes_factors(self, applied: int, given: int | None) -> bool:
        """Tell whether A and B take in the batch of the step after this many applied ones: at first all, later some.

        Args:
            applied: How many steps have been applied.
            given: The user's own interval.
        """
        if given is None and self.derivatives:
            return (applied + 1) % self.every == 0
        if given is None:
            batches = BATCHES if applied < SETTLED or self.deterministic else LATER_BATCHES
            every = self.every * (self.later if applied >= SETTLED else 1)
            given = 1 if applied < DENSE else max(1, every // batches)
        return applied % given == 0


@cache
def early_steps(every: int, stretch: int = 1) -> frozenset[int]:
    """Return the steps, by the number of applied ones before them, that refresh a side before they use it."""
    steps, at = set(range(min(every, max(1, EARLY // stretch)))), float(EARLY)
    while at < START:
        steps.add(round(at))
        at *= GROWTH**stretch
    return frozenset(steps)


def stretches(block: Block) -> tuple[int, int]:
    """Return how many times longer than usual the intervals of a block's sides A and B are."""
    wide = WIDE_SIDES.get(block.key.device.type, WIDE_SIDE)
    A, B = (max(1, round((width / wide) ** 2)) for width in (block.shape.inputs, block.shape.out))
    return 1 if block.diagonal_A else A, 1 if block.diagonal_B else B


class Stretches(dict[Block, tuple[int, int]]):
    """What :func:`stretches` returns of each block, once it has been asked for."""

    def __missing__(self, block: Block) -> tuple[int, int]:
        self[block] = stretches(block)
        return self[block]


class Schedule:
    """Knows what the step under way does with each block.

    Args:
        options: The interval, and which batches A and B take in.
        method: What is done with blocks that a layer covers.
        partition: The blocks and their state.
    """

    def __init__(self, options: EngineOptions, method: Method[Any], partition: Partition) -> None:
        self.applied_steps = 0
        self.warm_refreshes = 0
        #: What warm refreshes have left off the diagonal, one number a block, and the host has not read.
        self.pending: list[tuple[list[Block], Answer]] = []
        self._options = options
        self._refresh = options.refresh
        self._stretches = Stretches()
        self._method = method
        self._partition = partition
        #: Whether losses are known to have derivatives of the network inside.
        self.derivatives = False
        #: What is due at a step, and at which: asked for many times.
        self._due: tuple[tuple[int, int], set[Block], dict[Block, tuple[int, int]]] | None = None
        #: What blocks have in common that the intervals ask for, since none of them has strayed or waits to be counted,
        #: and what that rests on.
        self._calm: tuple[int, Intervals, set[Any]] | None = None
        #: Whether a step that refreshes bases may be found later to be one that changes nothing: not where the next
        #: forward pass would have taken something else, had that been known.
        self.maskable = (
            method.masks_refreshes
            and not method.needs_examples
            and options.refresh.factor_every in (None, 1)
            and options.refresh.factor_decay > 0
        )

    @cached_property
    def intervals(self) -> Intervals:
        """Which steps renew which bases; asked for when the device is known."""
        kind, given = self._partition.device.type, self._options.refresh_every
        deterministic = self._refresh.deterministic
        usual = INTERVALS.get(kind, INTERVAL)
        every = given or (min(usual, INTERVAL_OF_DERIVATIVES) if self.derivatives else usual)
        fixed = given is not None or deterministic or self.derivatives
        return Intervals(every, deterministic, self.derivatives, 1 if fixed else LATER_INTERVALS.get(kind, 1))

    @property
    def factor_decay(self) -> float:
        """What the past weighs in A and B beside a batch; one of a loss with derivatives stands for BATCHES others."""
        r = self._refresh
        return r.factor_decay**BATCHES if self.derivatives and r.factor_every is None else r.factor_decay

    def set_derivatives(self, derivatives: bool) -> None:
        """Go on as for losses with derivatives, or as for others."""
        self.derivatives = derivatives
        self.__dict__.pop("intervals", None)
        self._due = None

    def due(self) -> tuple[set[Block], dict[Block, tuple[int, int]]]:
        """Find what this step does with the bases of covered blocks before it uses them.

        Returns:
            The blocks to solve for in full, and those to refresh, warm, with the iterations of their two sides.
        """
        known = self.applied_steps, self._partition.generation
        if self._due is None or self._due[0] != known or self._due[1]:  # blocks to solve for may be there by now
            self._due = known, *self._find_due(self._partition.covered)
        return self._due[1], self._due[2]

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
        """Tell whether another process has the block's basis."""
        found = self._partition.ready_elsewhere
        return bool(found) and members(block) in found

    def renews(self, block: Block) -> bool:
        """Tell whether this step uses a basis that is not known before it."""
        return block.covered and any(block in found for found in self.due())

    def takes_all(self) -> bool:
        """Tell whether this step takes its batch into every block's A and B, whatever is due."""
        r = self._refresh
        return r.factor_decay > 0 and self.intervals.takes_factors(self.applied_steps, r.factor_every)

    def takes_factors(self, block: Block) -> bool:
        """Tell whether this step takes its batch into the block's A and B."""
        if self.takes_all() or self.renews(block):
            return True
        if self._refresh.factor_decay > 0:
            return False
        strayed = self._partition.states.get(block.key, NOTHING_YET).strayed
        at = self._partition.covered[block], self._partition.parts, self._stretches[block], strayed
        return any(self.intervals.warm_after(self.applied_steps + 1, *at))

    def takes_any(self) -> bool:
        """Tell whether this step takes its batch into any A and B."""
        if self.takes_all() or any(self.due()):
            return True
        return self._refresh.factor_decay == 0 and any(map(self.takes_factors, self._partition.covered))

    def expected(self, unverified: Container[Block]) -> dict[Block, Expected]:
        """Return what every process gathers for each block at this step; some have a gradient to be verified."""
        examples = self._method.needs_examples
        return {
            block: Expected(self.takes_factors(block), examples and not self.renews(block), block in unverified)
            for block in self._partition.covered
        }

    def poll(self, wait: bool) -> None:
        """Read how warm refreshes went.

        Args:
            wait: Wait for answers that are not there yet, so that all processes have them at the same step.
        """
        waiting = []
        for blocks, answer in self.pending:
            if answer.late and not answer.ready(wait):
                waiting.append((blocks, answer))
                continue
            for block, residual in zip(blocks, answer.value.tolist(), strict=True):
                self.warm_refreshes += not math.isnan(residual)
                state = self._partition.states.get(block.key, NOTHING_YET)
                if hasattr(state, self._method.derived) and not math.isnan(residual) and residual != NOTHING:
                    state.near = residual <= TOLERANCE and getattr(state, "near", True)
                    self._calm = None
        self.pending = waiting

    def advance(self) -> list[tuple[Block, tuple[int, int]]]:
        """Count this step, and what is known of warm refreshes: before the next one, whose hooks depend on it.

        Returns:
            The blocks to refresh after this step, warm, and the iterations of their two sides.
        """
        found, states, derived, t = [], self._partition.states, self._method.derived, self.applied_steps + 1
        known: dict[Any, tuple[int, int]] = {}  # most blocks are alike
        calm, at = self._calm, (self._partition.generation, self.intervals)
        still = calm is not None and calm[:2] == at and not any(any(self.intervals.warm_after(t, *k)) for k in calm[2])
        for block, index in () if still else self._partition.covered.items():
            state: dict[str, Any] = getattr(states.get(block.key), "__dict__", {})
            if "near" in state:
                state["strayed"] = 0 if state.pop("near") else state.get("strayed", 0) + 1
            kind = index, self._partition.parts, self._stretches[block], state.get("strayed", 0)
            if (iterations := known.get(kind)) is None:
                iterations = known[kind] = self.intervals.warm_after(t, *kind)
            if any(iterations) and (derived in state or self._ready_elsewhere(block)):
                found.append((block, iterations))
        if not still:
            alone = self._partition.owners.size == 1
            self._calm = (*at, set(known)) if alone and not any(strayed for *_, strayed in known) else None
        self.applied_steps = t
        # Not with several processes: another one may have had no batch to see it in.
        fixed = self.derivatives or self._refresh.deterministic or self._partition.owners.size > 1
        if not fixed and any(block.layer.differentiated for block in self._partition.covered):
            self.set_derivatives(True)
        return found
