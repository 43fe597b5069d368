"""EKFAC's way with one block: project, rescale by a rule, project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis, carry_moment, carry_second_moment, rotate_columns
from ekfac.optim.damping import Damp
from ekfac.optim.refresh import Refresher
from ekfac.optim.rules import Rule, State, put


@dataclass(frozen=True)
class Rows:
    """The gradient as a sum over captured rows: G = delta^T h, with h ``[G, M, C]`` and delta ``[G, M, O]``."""

    h: Tensor
    delta: Tensor


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
    damping: float | Tensor
    ratio: Tensor | None = None
    left: Tensor | None = None


class EigenMethod:
    """A diagonal method in the Kronecker-factored eigenbasis.

    Args:
        rule: What is done with the projected gradient.
        damp: How s is damped when dividing.
        on_refresh: "carry" takes s to a new basis, "kronecker" restarts it at S_B x S_A.
    """

    #: A change of damping needs nothing to be computed anew.
    damping_is_free = True

    def __init__(self, rule: Rule, damp: Damp, on_refresh: str) -> None:
        self.rule = rule
        self.damp = damp
        self.on_refresh = on_refresh
        self.needs_examples = rule.needs_examples
        self.squares_penalty = rule.squares_penalty
        self.has_alignment = rule.has_alignment

    def basis(self, block: Block, state: State) -> Basis | None:
        """The basis in a block's state; None for a parameter without a Kronecker block."""
        if not block.covered:
            return None
        return Basis(block.shape, state["U_A"], state["U_B"], state["S_A"], state["S_B"])

    def refresh(self, block: Block, state: State, A: Tensor, B: Tensor, damping: float, refresher: Refresher) -> None:
        """Solve for a new basis and take the rule's state there, or start it there."""
        old = self.basis(block, state) if "S_A" in state else None
        new, state["failed_refreshes"] = refresher.solve(block, A, B, old, state.get("failed_refreshes", 0))
        self._take(state, old, new)

    def turn(
        self, block: Block, state: State, A: Tensor, B: Tensor, damping: float, refresher: Refresher,
        turns: tuple[int, int],
    ) -> None:  # fmt: skip
        """Turn the basis towards the factors' own and take the rule's state along."""
        old = self.basis(block, state)
        assert old is not None
        self._take(state, old, refresher.turn(block, A, B, old, turns))

    def _take(self, state: State, old: Basis | None, new: Basis) -> None:
        s = None
        if old is not None and self.on_refresh == "carry" and not self.rule.follows_factors:
            s = carry_second_moment(state["s"], old, new)
        moments = [n for n in self.rule.moments if n in state] if old is not None else []
        carried = {name: carry_moment(state[name], old, new) for name in moments if old is not None}
        for name, value in (("U_A", new.U_A), ("U_B", new.U_B), ("S_A", new.S_A), ("S_B", new.S_B)):
            if value is None:
                state[name] = None
            else:
                put(state, name, value)
        for name, value in carried.items():
            put(state, name, value)
        if s is None:
            self.rule.start(state, new.kronecker())
        else:
            put(state, "s", s)

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


def into_basis(gradient: Tensor | Rows, basis: Basis | None) -> Tensor:
    """U_B^T G U_A, of the gradient or of the rows that it is a sum of, whichever was found to be cheaper."""
    if isinstance(gradient, Tensor):
        return gradient if basis is None else basis.project(gradient)
    assert basis is not None
    delta = gradient.delta if basis.U_B is None else gradient.delta @ basis.U_B
    return delta.mT @ rotate_columns(gradient.h, basis.U_A, basis.shape)


def rows_are_cheaper(block: Block, rows: int) -> bool:
    """Whether projecting M rows of h and delta takes less arithmetic than projecting their product."""
    s = block.shape
    turned_A = 0 if block.diagonal_A else s.inputs
    turned_B = 0 if block.diagonal_B else s.out
    by_rows = rows * (s.columns * turned_A + s.out * turned_B + s.out * s.columns)
    return by_rows < s.out * s.columns * (turned_A + turned_B)
