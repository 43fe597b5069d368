"""What the engine asks of a method: EKFAC's, in :mod:`.eigenbasis`, or KFAC's, in :mod:`.inverse`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.operators.parts import Part
from ekfac.optim.statistics.refresh import Refresher, Renewal
from ekfac.optim.types import BlockState, BlockStep

S = TypeVar("S", bound=BlockState, contravariant=True)


class Method(Protocol[S]):
    """How one block's gradient becomes a direction.

    Attributes:
        kind: What checkpoints call the method.
        derived: The field of the state that is there once something was derived from the factors.
        approximation: What an operator of its curvature is called, "ekfac" or "kfac".
        needs_examples: Whether it needs s* of a step's examples.
        squares_penalty: Whether an L2 penalty counts as part of the gradient whose square is taken.
        compares_gradients: Whether it compares the gradient with the last direction.
        damping_is_free: Whether a change of damping needs nothing to be computed anew.
        masks_refreshes: Whether a warm refresh changes nothing where ``ok`` is 0.
        stacks: Whether it can take several blocks of one shape at once.
        bounds_gradients: Whether it bears a gradient that is not finite, where ``ok`` is 0.
        reads_eigenvalues: Whether eigenvalues of the factors, or their inverses, have a part in a step.
    """

    kind: str
    derived: str
    approximation: str
    needs_examples: bool
    squares_penalty: bool
    compares_gradients: bool
    damping_is_free: bool
    masks_refreshes: bool
    stacks: bool
    bounds_gradients: bool
    reads_eigenvalues: bool

    @property
    def for_wide(self) -> Method[S] | None:
        """What does the same for wide blocks on a CPU, up to rounding; None where that is nothing else."""

    @property
    def state_class(self) -> type[BlockState]:
        """What it keeps of a block."""

    def numbers(self, block: Block) -> int:
        """Count the numbers that are kept for a block between steps, momentum and counts left out."""

    def refresh(self, block: Block, state: S, A: Tensor, B: Tensor, damping: float, refresher: Refresher) -> None:
        """Compute anew what is derived from the factors; the host may wait."""

    def warm_refresh(self, renewals: Sequence[Renewal], refresher: Refresher, ok: Tensor | None = None) -> None:
        """Bring what is derived from the factors nearer to them; the host must not wait."""

    def basis(self, block: Block, state: S) -> Basis | None:
        """Return the basis that s* is to be taken in."""

    def project(self, block: Block, state: S, step: BlockStep) -> None:
        """Bring the gradient into the basis: ``step.g`` and, as backward left it, ``step.seen``."""

    def update_scaling(self, state: S, step: BlockStep) -> None:
        """Take the step's gradient, or s*, into the scaling s."""

    def rescale(self, block: Block, state: S, step: BlockStep) -> Tensor:
        """Divide by the damped scaling."""

    def project_back(self, x: Tensor, step: BlockStep) -> Tensor:
        """Return from the basis: the preconditioned gradient, ``[G, O, C]``."""

    def quadratic_form(self, block: Block, state: S, D: Tensor) -> Tensor:
        """Return d^T C d for a change D of the block, ``[G, O, C]``, with the curvature in use, not damped."""

    def part(self, block: Block, state: S) -> Part | None:
        """Return the curvature in use as a part of an operator; None where it is that of the factors."""

    def seed(self, block: Block, state: S, part: Part) -> None:
        """Start from a part of an operator; the factors in ``state`` are the part's already."""
