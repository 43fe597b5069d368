"""EKFAC's way with one block: project, rescale by a rule, project back."""

from __future__ import annotations

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis, carry_moment, carry_second_moment
from ekfac.optim.methods.base import Step
from ekfac.optim.methods.damping import Damp
from ekfac.optim.methods.rules import Rule, State, put
from ekfac.optim.statistics.factored_gradient import Rows, into_basis
from ekfac.optim.statistics.refresh import Refresher


class EigenMethod:
    """A diagonal method in the Kronecker-factored eigenbasis.

    Args:
        rule: What is done with the projected gradient.
        damp: How s is damped when dividing.
        on_refresh: "carry" takes s to a new basis, "kronecker" restarts it at S_B x S_A.
    """

    #: A change of damping needs nothing to be computed anew.
    damping_is_free = True

    #: A step that must change nothing leaves the basis too, without the host.
    masks_turns = True

    def __init__(self, rule: Rule, damp: Damp, on_refresh: str) -> None:
        self.rule = rule
        self.damp = damp
        self.on_refresh = on_refresh
        self.needs_examples = rule.needs_examples
        self.squares_penalty = rule.squares_penalty
        self.has_alignment = rule.has_alignment

    def ready(self, state: State) -> bool:
        """Whether there is a basis."""
        return "S_A" in state

    def numbers(self, block: Block) -> int:
        """Numbers kept for a block: factors, bases, eigenvalues, and what the rule keeps."""
        own = (1 + len(self.rule.moments)) * block.shape.numel
        return own + block.eigen_numbers() if block.covered else own

    def basis(self, block: Block, state: State) -> Basis | None:
        """The basis in a block's state; None for a parameter without a Kronecker block."""
        if not block.covered:
            return None
        return Basis(block.shape, state["U_A"], state["U_B"], state["S_A"], state["S_B"])

    def refresh(self, block: Block, state: State, A: Tensor, B: Tensor, damping: float, refresher: Refresher) -> None:
        """Solve for a new basis and take the rule's state there, or start it there."""
        old = self.basis(block, state) if self.ready(state) else None
        new, state["failed_refreshes"] = refresher.solve(block, A, B, old, state.get("failed_refreshes", 0))
        self._take(state, old, new)

    def turn(
        self, block: Block, state: State, A: Tensor, B: Tensor, damping: float | Tensor, refresher: Refresher,
        turns: tuple[int, int], ok: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Turn the basis towards the factors' own and take the rule's state along."""
        old = self.basis(block, state)
        assert old is not None
        self._take(state, old, refresher.turn(block, A, B, old, turns, ok), ok)

    def _take(self, state: State, old: Basis | None, new: Basis, ok: Tensor | None = None) -> None:
        s = None
        if old is not None and self.on_refresh == "carry" and not self.rule.follows_factors:
            s = carry_second_moment(state["s"], old, new)
        moments = [n for n in self.rule.moments if n in state] if old is not None else []
        carried = {name: carry_moment(state[name], old, new) for name in moments if old is not None}
        for name, value in (("U_A", new.U_A), ("U_B", new.U_B), ("S_A", new.S_A), ("S_B", new.S_B)):
            if value is None:
                state[name] = None
            else:
                put(state, name, value, ok)
        for name, value in carried.items():
            put(state, name, value, ok)
        if s is None:
            self.rule.start(state, new.kronecker(), ok)
        else:
            put(state, "s", s, ok)

    def direction(self, block: Block, state: State, gradient: Tensor | Rows, step: Step) -> Tensor:
        """U_B (g / damped s) U_A^T, after the rule has seen the gradient as backward left it."""
        basis = self.basis(block, state)
        g = into_basis(gradient, basis)
        seen = g
        if step.ratio is not None:
            seen = g * step.ratio
        elif step.left is not None:
            seen = into_basis(step.left, basis)
        if "s" not in state:
            self.rule.begin(state, seen, step.n, step.ok)
        self.rule.observe(state, seen, step.n, step.s_star, step.ok)
        x = self.rule.direction(state, g, step.n, step.ok, lambda s: self.damp(s, step.damping, basis))
        return x if basis is None else basis.unproject(x)

    def bend(self, block: Block, state: State, D: Tensor) -> Tensor:
        """d^T C d: the sum of s x^2 in the basis."""
        return (self.rule.second_moment(state) * into_basis(D, self.basis(block, state)).square()).sum()
