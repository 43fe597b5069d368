"""torch's own rules, on the coordinates of the eigenbasis."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ekfac.optim.methods.rules import TorchRule, blend, bounded, counted, mean_gradient, remaining, spread, squared
from ekfac.optim.types import BlockStep, EigenState


@dataclass(frozen=True)
class Adam(TorchRule):
    """torch's Adam: m and v = s are averages of g and g^2, both corrected for their start at 0."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    moments = ("m",)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        super().observe(state, step)
        blend(state.s, squared(step.seen), 1 - (step.rates.betas or self.betas)[1], step.ok)

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        beta1, beta2 = step.rates.betas or self.betas
        count = counted(state, step.g, step.ok, step.blocks)
        mean = mean_gradient(state, step, beta1, count)
        root = spread(remaining(beta2, count, root=True), step.g)
        return mean / (state.s.sqrt() / root).add_(self.eps)

    def second_moment(self, state: EigenState) -> Tensor:
        s = super().second_moment(state)
        if "count" in state:
            s = s / spread(remaining(self.betas[1], state.count), s)
        return s


@dataclass(frozen=True)
class RMSProp(TorchRule):
    """torch's RMSprop: v = s <- alpha v + (1 - alpha) g^2."""

    alpha: float = 0.99
    eps: float = 1e-8

    def observe(self, state: EigenState, step: BlockStep) -> None:
        super().observe(state, step)
        blend(state.s, squared(step.seen), 1 - self.alpha, step.ok)

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        return step.g / state.s.sqrt().add_(self.eps)


@dataclass(frozen=True)
class Adagrad(TorchRule):
    """torch's Adagrad: s is the sum of all g^2 so far."""

    eps: float = 1e-10

    def observe(self, state: EigenState, step: BlockStep) -> None:
        super().observe(state, step)
        square = squared(step.seen)
        state.s.add_(square if step.ok is None else square * step.ok.to(square))
        bounded(state.s)

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        return step.g / state.s.sqrt().add_(self.eps)
