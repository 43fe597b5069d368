"""EKFAC for one block: project, update the scaling, rescale by a rule, project back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis, carry_moment, carry_second_moment, changes_of_basis
from ekfac.curvature.factors import tensor_cores
from ekfac.curvature.fisher import order_of
from ekfac.curvature.operators.parts import DiagonalPart, EigenPart, Part
from ekfac.optim.methods.damping import Damp
from ekfac.optim.methods.rules import Rule, overwrite, squared, within_range
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.statistics.refresh import Refresher, Renewal
from ekfac.optim.types import BlockStep, EigenState


class EigenMethod:
    """A diagonal method in the Kronecker-factored eigenbasis.

    Args:
        rule: Turns the projected gradient into a direction.
        damp: How s is damped when dividing.
        for_wide: The variant for wide blocks on a CPU.
    """

    kind = "eigenbasis"
    derived = "S_A"
    damping_is_free = True
    masks_refreshes = True

    def __init__(self, rule: Rule, damp: Damp, for_wide: EigenMethod | None = None) -> None:
        self.for_wide = for_wide
        self.rule = rule
        self.damp = damp
        self.approximation = "kfac" if rule.follows_factors else "ekfac"
        self.state_class = rule.state_class
        self.needs_examples = rule.needs_examples
        self.squares_all = rule.squares_all
        self.compares_gradients = rule.compares_gradients
        self.stacks = rule.stacks
        self.bounds_gradients = rule.bounds_gradients
        self.reads_eigenvalues = rule.reads_eigenvalues

    def numbers(self, block: Block) -> int:
        """Count the numbers stored for a block: factors, bases, eigenvalues, and the rule's state."""
        own = (1 + len(self.rule.moments)) * block.shape.numel
        return own + block.eigen_numbers() if block.covered else own

    def basis(self, block: Block, state: EigenState) -> Basis | None:
        """Return the basis in a block's state; None for a parameter without a Kronecker block."""
        if not block.covered:
            return None
        kept = state.__dict__
        # bmm, because all operands have three dimensions: broadcasting would take longer than a small product.
        return Basis(block.shape, kept.get("U_A"), kept.get("U_B"), state.S_A, state.S_B, torch.bmm)

    # --- a new basis ----------------------------------------------------------------------------------------------

    def refresh(
        self, block: Block, state: EigenState, A: Tensor, B: Tensor, damping: float, refresher: Refresher
    ) -> None:
        """Solve for a new basis, and carry the rule's state over to it or start the rule there."""
        old = self.basis(block, state) if hasattr(state, self.derived) else None
        new, state.failed_refreshes = refresher.solve(block, A, B, old, state.failed_refreshes)
        self._change_basis(state, old, new)

    def warm_refresh(self, renewals: Sequence[Renewal], refresher: Refresher, ok: Tensor | None = None) -> None:
        """Refresh bases by orthogonal iteration and carry the rule's state over."""
        values = self.rule.reads_eigenvalues
        renewals = [replace(r, old=self.basis(r.blocks[0], r.state), values=values) for r in renewals]

        def change(renewal: Renewal, new: Basis) -> None:
            with tensor_cores(new.S_A.device):  # TF32 suffices to carry moments, though not to compute bases
                self._change_basis(renewal.state, renewal.old, new, ok)

        refresher.warm(renewals, change, ok)

    def _change_basis(self, state: EigenState, old: Basis | None, new: Basis, ok: Tensor | None = None) -> None:
        rule, carried = self.rule, {}
        if old is not None:
            rotations = changes_of_basis(old, new)
            carried = {name: carry_moment(state[name], old, new, rotations) for name in rule.moments if name in state}
            if not rule.restarts():
                carried["s"] = carry_second_moment(state.s, old, new, rotations)
        vectors = {"U_A": new.U_A, "U_B": new.U_B, "S_A": new.S_A, "S_B": new.S_B}
        for name, value in {**vectors, **carried}.items():
            if value is not None:
                overwrite(state, name, value, ok)
        if "s" not in carried:
            rule.start(state, new.kronecker(), ok)

    # --- a step ---------------------------------------------------------------------------------------------------

    def project(self, block: Block, state: EigenState, step: BlockStep) -> None:
        """Compute g = U_B^T G U_A, and the same for the gradient that updates the scaling."""
        basis = step.basis = self.basis(block, state)
        gradient = step.gradient
        if basis is not None and isinstance(gradient, Tensor):
            step.g = basis.project(gradient)
        else:
            step.g = in_basis(gradient, basis)
        if not step.small:
            step.g = within_range(step.g)
        step.seen = step.g
        if step.ratio is not None:
            step.seen = step.g * step.ratio
        elif step.left is not None:
            step.seen = within_range(in_basis(step.left, basis))
        epsilon = step.rates.damping  # capturing step itself would make a reference cycle that keeps its tensors alive
        step.damped = lambda s: self.damp(s, epsilon, basis)

    def update_scaling(self, state: EigenState, step: BlockStep) -> None:
        """Let the rule observe the gradient."""
        if not hasattr(state, "s"):  # the first gradient of a parameter that no layer covers
            self.rule.start(state, squared(step.seen, step.n))
        self.rule.observe(state, step)

    def rescale(self, block: Block, state: EigenState, step: BlockStep) -> Tensor:
        """Return the rule's direction: g / damped s, for example."""
        return self.rule.direction(state, step)

    def project_back(self, x: Tensor, step: BlockStep) -> Tensor:
        """Return U_B x U_A^T."""
        return x if step.basis is None else step.basis.unproject(x)

    # --- the curvature in use -------------------------------------------------------------------------------------

    def quadratic_form(self, block: Block, state: EigenState, D: Tensor) -> Tensor:
        """Return d^T C d: the sum of s x^2 in the basis."""
        basis = self.basis(block, state)
        x = D if basis is None else basis.project(D)
        return (self.rule.second_moment(state) * x.square()).sum()

    def part(self, block: Block, state: EigenState) -> Part | None:
        """Return a copy of basis and scaling; None before there is one."""
        names = tuple(block.parameter_names.values())
        if not hasattr(state, "s"):
            return None
        s = self.rule.second_moment(state).clone()
        if not block.covered:
            return DiagonalPart(block.name, names, s.reshape(-1))
        basis = self.basis(block, state)
        assert basis is not None
        U_A, U_B = (None if U is None else U.clone() for U in (basis.U_A, basis.U_B))
        copied = Basis(block.shape, U_A, U_B, basis.S_A.clone(), basis.S_B.clone())
        return EigenPart(block.name, names, copied, s, order_of(block))

    def seed(self, block: Block, state: EigenState, part: Part) -> None:
        """Adopt a part's basis and scaling."""
        if isinstance(part, DiagonalPart):
            state.s = part.entries.reshape(1, 1, -1).clone()
            return
        assert isinstance(part, EigenPart)
        b = part.basis
        for name, value in (("U_A", b.U_A), ("U_B", b.U_B), ("S_A", b.S_A), ("S_B", b.S_B)):
            if value is not None:
                state[name] = value.clone()
        self.rule.start(state, b.kronecker() if self.rule.follows_factors else part.s.clone())
        if self.needs_examples:
            state.count.fill_(1)  # the seed counts as the s* of one step in the average


def in_basis(gradient: Tensor | Rows, basis: Basis | None) -> Tensor:
    """Return U_B^T G U_A, or G itself if there is no basis."""
    if isinstance(gradient, Rows):
        assert basis is not None
        return gradient.in_basis(basis)
    return gradient if basis is None else basis.project(gradient)
