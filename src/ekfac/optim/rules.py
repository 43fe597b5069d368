"""Scaling rules: what is done with the projected mini-batch gradient g in the basis. One small class each.

A rule keeps its tensors in the block's state, under ``s`` and names of its own. All rules see the same protocol, so
the step loop does not know which one is in use. A new rule is one class here and one line in ``RULES``.

Every method takes ``ok``: None where the step is known to be good, or a 0-dim tensor that is 0 on the device when the
gradient was not finite; then nothing may change, without the host ever looking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

State = dict[str, Any]


def blend(target: Tensor, value: Tensor, weight: float, ok: Tensor | None) -> None:
    """target <- (1 - weight) target + weight value, in place; untouched where ``ok`` is 0."""
    target.lerp_(value, weight if ok is None else (ok * weight).to(target))


class Rule(ABC):
    """One way to turn the projected gradient into a direction.

    Args:
        decay: Weight of the past in running averages.
    """

    #: Whether the rule needs s* of this step's examples.
    needs_examples: ClassVar[bool] = False
    #: Whether s is S_B x S_A by definition, so that a new basis always brings a new s.
    follows_factors: ClassVar[bool] = False
    #: Names of means that live in the basis and turn with it.
    moments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def start(self, state: State, kronecker: Tensor) -> None:
        """Begin in a new basis with the eigenvalues S_B x S_A that came with it."""
        state["s"] = kronecker

    @abstractmethod
    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        """Take in the gradient as backward left it, over n examples, and s* where the rule needs it."""

    def direction(self, state: State, g: Tensor, damp: Callable[[Tensor], Tensor]) -> Tensor:
        """g / damped s."""
        return g / damp(state["s"])

    def undo(self, state: State) -> None:
        """Take back what the host counted in a step that turned out to have changed nothing."""
        return


class PerExample(Rule):
    """EKFAC: s* of this step's examples, afresh (``decay=0``, Algorithm 1) or as a bias-corrected average."""

    needs_examples = True

    def start(self, state: State, kronecker: Tensor) -> None:
        state["s"] = kronecker
        state["observed"] = 0

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        if s_star is None:
            return
        # The average's weights 1 - decay, (1 - decay) decay, ... are divided by their sum 1 - decay^t.
        state["observed"] += 1
        weight = (1 - self.decay) / (1 - self.decay ** state["observed"])
        blend(state["s"], s_star, weight, ok)

    def undo(self, state: State) -> None:
        state["observed"] = max(0, state.get("observed", 0) - 1)


class Running(Rule):
    """EKFAC-ra: starts at S_B x S_A, then s <- rho s + (1 - rho) N g^2."""

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        s = state["s"]
        if ok is None and isinstance(n, float):
            s.mul_(self.decay).addcmul_(g, g, value=(1 - self.decay) * n)
        else:
            blend(s, g.square() * n, 1 - self.decay, ok)


class Kronecker(Rule):
    """KFAC, seen in its eigenbasis: s = S_B x S_A until the next refresh."""

    follows_factors = True

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        """Nothing to learn between refreshes."""


class Elementwise(Running):
    """Parameters without a Kronecker block: :class:`Running` in the identity basis, started at the first N g^2."""

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        if "s" not in state:
            state["s"] = torch.zeros_like(g)
            blend(state["s"], g.square() * n, 1.0, ok)
        else:
            super().observe(state, g, n, s_star, ok)


RULES: dict[str, type[Rule]] = {"per_example": PerExample, "running": Running, "kronecker": Kronecker}
