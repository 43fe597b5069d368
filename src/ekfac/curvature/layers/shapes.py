"""The sizes of a block, in a form common to all layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a block's gradient ``[G, O, C]`` with ``C = T * I + E`` columns.

    Attributes:
        groups: G, independent blocks of equal size, processed as a batch.
        out: O, outputs of a group: the side of B.
        inputs: I, inputs of a group: the side of A.
        taps: T, under SUA the number of copies of the inputs, which share A and count as uncorrelated; else 1.
        extra: E, under SUA 1 for a bias column with its own basis; else 0.
    """

    groups: int
    out: int
    inputs: int
    taps: int = 1
    extra: int = 0

    @property
    def columns(self) -> int:
        """C, the number of columns."""
        return self.taps * self.inputs + self.extra

    @property
    def numel(self) -> int:
        """The number of parameters in the block."""
        return self.groups * self.out * self.columns
