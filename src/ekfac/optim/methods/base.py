"""The interface of a method: EKFAC's is in :mod:`.eigenbasis`, KFAC's in :mod:`.inverse`."""

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
        kind: The method's name in checkpoints.
        derived: A field of the state that is set once a basis (or inverse) has been computed from the factors.
        approximation: The name of its curvature as an operator, "ekfac" or "kfac".
        needs_examples: Whether it needs s* of a step's examples.
        squares_all: Whether the gradient that is squared is clipped and has the L2 penalty.
        compares_gradients: Whether it compares the gradient with the last direction.
        damping_is_free: Whether damping can change without recomputing anything.
        masks_refreshes: Whether a warm refresh respects the mask ``ok``.
        stacks: Whether it can handle several blocks of one shape at once.
        bounds_gradients: Whether it tolerates a non-finite gradient where ``ok`` is 0.
        reads_eigenvalues: Whether a step uses the factors' eigenvalues or inverses.
    """

    kind: str
    derived: str
    approximation: str
    needs_examples: bool
    squares_all: bool
    compares_gradients: bool
    damping_is_free: bool
    masks_refreshes: bool
    stacks: bool
    bounds_gradients: bool
    reads_eigenvalues: bool

    @property
    def for_wide(self) -> Method[S] | None:
        """A variant for wide blocks on a CPU, equal up to rounding; None if there is none."""

    @property
    def state_class(self) -> type[BlockState]:
        """The class of a block's state."""

    def numbers(self, block: Block) -> int:
        """Count the numbers stored for a block between steps, without momentum and counts."""

    def refresh(self, block: Block, state: S, A: Tensor, B: Tensor, damping: float, refresher: Refresher) -> None:
        """Recompute the basis (or inverse) from the factors; the host may wait for the device."""

    def warm_refresh(self, renewals: Sequence[Renewal], refresher: Refresher, ok: Tensor | None = None) -> None:
        """Update the basis (or inverse) towards the current factors; the host must not wait for the device."""

    def basis(self, block: Block, state: S) -> Basis | None:
        """Return the basis in which to compute s*."""

    def project(self, block: Block, state: S, step: BlockStep) -> None:
        """Project the gradient into the basis: ``step.g`` and, for the scaling, ``step.seen``."""

    def update_scaling(self, state: S, step: BlockStep) -> None:
        """Update the scaling s from the step's gradient or s*."""

    def rescale(self, block: Block, state: S, step: BlockStep) -> Tensor:
        """Divide by the damped scaling."""

    def project_back(self, x: Tensor, step: BlockStep) -> Tensor:
        """Project back from the basis: the preconditioned gradient, ``[G, O, C]``."""

    def quadratic_form(self, block: Block, state: S, D: Tensor) -> Tensor:
        """Return d^T C d for a change D of the block, ``[G, O, C]``, with the undamped curvature in use."""

    def part(self, block: Block, state: S) -> Part | None:
        """Return the curvature in use as a part of an operator; None if it is that of the factors."""

    def seed(self, block: Block, state: S, part: Part) -> None:
        """Start from a part of an operator, whose factors are already in ``state``."""
