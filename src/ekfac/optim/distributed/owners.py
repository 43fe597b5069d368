"""Which process owns a block: it alone keeps the block's state and computes its basis, direction and update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from ekfac.curvature.blocks import Block
from ekfac.optim.distributed.processes import Processes

#: What a refresh costs, in units of d^3, and every how many steps there is one.
REFRESH = 10
INTERVAL = 50


class Owners:
    """Owners of parameters. Blocks are made of parameters that have the same one.

    Args:
        processes: Who takes part.
        numbers: How many numbers are kept for a block.
    """

    def __init__(self, processes: Processes, numbers: Callable[[Block], int]) -> None:
        self.processes = processes
        self._numbers = numbers
        self._owner: dict[nn.Parameter, int] = {}
        #: For how many processes, and what each of them has so far: arithmetic and bytes.
        self.size = 1
        self._loads: list[tuple[float, float]] = []

    def forget(self) -> None:
        """Let nobody own anything."""
        self.size, self._owner, self._loads = 1, {}, []

    def assign(self, blocks: Iterable[Block]) -> None:
        """Give every parameter that has none an owner; by the blocks as they are when nothing is frozen.

        The heaviest first, each to the process that is then the least loaded by arithmetic and by bytes. All processes
        come to the same result without asking one another.
        """
        if self.processes.size != self.size:
            self.size = self.processes.size
            self._owner, self._loads = {}, [(0.0, 0.0)] * self.size
        new = [b for b in blocks if not any(p in self._owner for p in b.parameters.values())]
        if self.size == 1 or not new:
            return
        costs = {b: (arithmetic(b), float(self._numbers(b) * b.dtype.itemsize)) for b in new}
        # Fractions of the whole, so that the two can be compared.
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
        """Tell whether this process owns a block."""
        return self.size == 1 or self.of(block) == self.processes.rank


def arithmetic(block: Block) -> float:
    """Estimate how many products a step takes for a block, refreshes spread over the steps between them."""
    s = block.shape
    A, B = (0 if block.diagonal_A else s.inputs), (0 if block.diagonal_B else s.out)
    project = 2 * s.numel * (A + B)
    refresh = REFRESH * s.groups * (A**3 + B**3) / INTERVAL
    return s.numel + (project + refresh if block.covered else 0)
