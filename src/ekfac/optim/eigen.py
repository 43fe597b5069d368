"""EKFAC's way with one block: project, rescale by a rule, project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis, carry_moment, carry_second_moment
from ekfac.optim.damping import Damp
from ekfac.optim.refresh import Refresher
from ekfac.optim.rules import Rule, State


@dataclass(frozen=True)
class Step:
    """What a block's step needs besides its gradient.

    Attributes:
        n: The number of examples.
        s_star: s* of the examples, for rules that need it.
        ok: 0 on the device when the step must change nothing; None where that is known not to be so.
        damping: epsilon.
        ratio: What a gradient that was rescaled as a whole must be multiplied by to be as backward left it.
        left: That gradient itself, where its parts were not rescaled alike.
    """

    n: float | Tensor
    s_star: Tensor | None
    ok: Tensor | None
    damping: float
    ratio: Tensor | None = None
    left: Tensor | None = None


class EigenMethod:
    """A diagonal method in the Kronecker-factored eigenbasis.

    Args:
        rule: What is done with the projected gradient.
        damp: How s is damped when dividing.
        on_refresh: "carry" takes s to a new basis, "kronecker" restarts it at S_B x S_A.
    """

    def __init__(self, rule: Rule, damp: Damp, on_refresh: str) -> None:
        self.rule = rule
        self.damp = damp
        self.on_refresh = on_refresh
        self.needs_examples = rule.needs_examples

    def basis(self, block: Block, state: State) -> Basis | None:
        """The basis in a block's state; None for a parameter without a Kronecker block."""
        if not block.covered:
            return None
        return Basis(block.shape, state["U_A"], state["U_B"], state["S_A"], state["S_B"])

    def refresh(self, block: Block, state: State, A: Tensor, B: Tensor, damping: float, refresher: Refresher) -> None:
        """Solve for a new basis and take the rule's state there, or start it there."""
        old = self.basis(block, state) if "S_A" in state else None
        new, state["failed_refreshes"] = refresher.solve(block, A, B, old, state.get("failed_refreshes", 0))
        state.update(U_A=new.U_A, U_B=new.U_B, S_A=new.S_A, S_B=new.S_B)
        if old is None or self.on_refresh == "kronecker" or self.rule.follows_factors:
            self.rule.start(state, new.kronecker())
        else:
            state["s"] = carry_second_moment(state["s"], old, new)
        if old is not None:
            for name in self.rule.moments:
                state[name] = carry_moment(state[name], old, new)

    def direction(self, block: Block, state: State, gradient: Tensor, step: Step) -> Tensor:
        """U_B (g / damped s) U_A^T, after the rule has seen the gradient as backward left it."""
        basis = self.basis(block, state)
        g = gradient if basis is None else basis.project(gradient)
        seen = g
        if step.ratio is not None:
            seen = g * step.ratio
        elif step.left is not None:
            seen = step.left if basis is None else basis.project(step.left)
        self.rule.observe(state, seen, step.n, step.s_star, step.ok)
        x = self.rule.direction(state, g, lambda s: self.damp(s, step.damping, basis))
        return x if basis is None else basis.unproject(x)

    def undo(self, state: State) -> None:
        """A step turned out to have changed nothing."""
        self.rule.undo(state)
