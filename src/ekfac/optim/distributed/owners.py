"""Assigns each block to an owner: the only process to hold its state and compute its basis, direction and update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from ekfac.curvature.blocks import Block
from ekfac.optim.distributed.processes import Processes

#: The cost of a refresh in units of d^3, and the steps between refreshes.
REFRESH = 10
INTERVAL = 50


class Owners:
    """The owners of parameters; all parameters of a block have the same one.

    Args:
        processes: The processes.
        numbers: Returns the size of a block's state, in numbers.
    """

    def __init__(self, processes: Processes, numbers: Callable[[Block], int]) -> None:
        self.processes = processes
        self._numbers = numbers
        self._owner: dict[nn.Parameter, int] = {}
        #: The number of processes, and the load of each so far: arithmetic and bytes.
        self.size = 1
        self._loads: list[tuple[float, float]] = []

    def forget(self) -> None:
        """Remove all owners."""
        self.size, self._owner, self._loads = 1, {}, []

    def assign(self, blocks: Iterable[Block]) -> None:
        """Assign an owner to every parameter without one, based on the blocks as if nothing were frozen.

        Blocks are assigned by decreasing cost, each to the process with the least load in arithmetic and bytes.
        All processes get the same result without communicating.
        """
        if self.processes.size != self.size:
            self.size = self.processes.size
            self._owner, self._loads = {}, [(0.0, 0.0)] * self.size
        new = [b for b in blocks if not any(p in self._owner for p in b.parameters.values())]
        if self.size == 1 or not new:
            return
        costs = {b: (arithmetic(b), float(self._numbers(b) * b.dtype.itemsize)) for b in new}
        # As fractions of the total, so that arithmetic and bytes can be compared.
        totals = [sum(c[i] for c in costs.values()) + sum(load[i] for load in self._loads) or 1.0 for i in (0, 1)]
        fractions = {b: (c[0] / totals[0], c[1] / totals[1]) for b, c in costs.items()}
        loads = [(a / totals[0], n / totals[1]) for a, n in self._loads]
        for block in sorted(new, key=lambda b: -max(fractions[b])):
            after = [(a + fractions[block][0], n + fractions[block][1]) for a, n in loads]
            owner = min(range(self.size), key=lambda r: (max(after[r]), sum(after[r]), r))
            loads[owner] = after[owner]
            self._loads[owner] = tuple(x + y for x, y in zip(self._loads[owner], costs[block], strict=True))  # type: ignore[assignment]
            self._owner.update(dict.fromkeys(block.parameters.values(), owner))

    def of(self, block: Block) -> int:
        """Return the rank, within the group, of a block's owner."""
        return self.of_parameter(block.key)

    def of_parameter(self, parameter: nn.Parameter) -> int:
        """Return the rank, within the group, that updates a parameter."""
        return self._owner.get(parameter, 0) if self.size > 1 else self.processes.rank

    def mine(self, block: Block) -> bool:
        """Return whether this process owns a block."""
        return self.size == 1 or self.of(block) == self.processes.rank


def arithmetic(block: Block) -> float:
    """Estimate the multiplications of a block per step, including refreshes on average."""
    s = block.shape
    A, B = (0 if block.diagonal_A else s.inputs), (0 if block.diagonal_B else s.out)
    project = 2 * s.numel * (A + B)
    refresh = REFRESH * s.groups * (A**3 + B**3) / INTERVAL
    return s.numel + (project + refresh if block.covered else 0)
