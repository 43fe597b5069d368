"""The default rule: a step of Adam's size in the eigenbasis, measured by the gradient's noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ekfac import checks
from ekfac.optim.methods.rules import TorchRule, betas_of, blend, bounded, counted, remaining, shortening
from ekfac.optim.types import BlockStep, EigenState


@dataclass(frozen=True)
class Belief(TorchRule):
    r"""AdaBelief (Zhuang et al., 2020) on the coordinates of the eigenbasis, with a floor and two bounds.

    .. math::
        &s \leftarrow \beta_2 s + (1 - \beta_2) \left(\tfrac{1 + \beta_1}{2} (g - \hat m)^2 + \kappa \hat m^2\right),
            \quad m \leftarrow \beta_1 m + (1 - \beta_1) g \\
        &x = \hat m / (\sqrt{\hat s} + \epsilon), \quad x \leftarrow x / \max(1, \mathrm{rms}(x))

    Where gradients are mostly noise this is Adam. Where examples agree, as on a plateau, s is smaller than g^2, and
    those coordinates go further than the others: up to 1 / sqrt(kappa) times as far. The mean square of a block's
    direction is never above 1, so an update is at most lr long in each coordinate on average. A gradient that is far
    longer than those before it is shortened, so that one bad batch does not blind s for hundreds of steps.

    s is carried to a new basis. To restart it at KFAC's eigenvalues diverges where these are off.

    Attributes:
        betas: Decays of m and s; those of a parameter group come first.
        eps: What is added to the square root.
        floor: kappa, the weight of the mean gradient in s; 1 is close to Adam.
        spike: How many times longer than before a gradient may be.
    """

    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    floor: float = 0.05
    spike: float = 10.0

    lr = 0.004
    weight_decay = 0.3
    warms_up = True
    moments = ("m",)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("floor", self.floor, above=0)
        checks.number("spike", self.spike, above=1)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        super().observe(state, step)
        beta1, beta2 = betas_of(self.betas, step)
        if not hasattr(state, "m"):
            state.m = torch.zeros_like(step.g)
        count = counted(state, step.g, step.ok)
        first = count <= 1
        known = state.m / remaining(beta1, count - 1).to(state.m)
        usual = (known.square() + state.s / remaining(beta2, count - 1).to(state.s)).sum()
        factor = shortening(step.seen.square().sum(), self.spike**2 * usual)
        seen = step.seen * factor
        noise = torch.where(first, 0.0, seen - known)
        blend(state.m, step.g * factor, 1 - beta1, step.ok)
        mean = state.m / remaining(beta1, count).to(state.m)
        square = noise.square_().mul_((1 + beta1) / 2).add_(mean.square_().mul_(self.floor))
        blend(state.s, bounded(square), 1 - beta2, step.ok)

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        beta1, beta2 = betas_of(self.betas, step)
        root = (state.s / remaining(beta2, state.count).to(state.s)).sqrt_().add_(self.eps)
        x = (state.m / remaining(beta1, state.count).to(state.m)).div_(root)
        x = x / x.square().mean().sqrt().clamp(min=1)
        return x if step.ok is None else x * step.ok.to(x)

    def second_moment(self, state: EigenState) -> Tensor:
        s = super().second_moment(state)
        return s / remaining(self.betas[1], state.count).to(s) if hasattr(state, "count") else s
