"""The default rule: a step of Adam's size in the eigenbasis, scaled by the gradient's noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ekfac import checks
from ekfac.optim.methods.rules import (
    Number,
    TorchRule,
    blend,
    bounded,
    clipped,
    counted,
    remaining,
    rounded,
    shared,
    shortening,
    spread,
)
from ekfac.optim.types import BlockStep, EigenState

#: The largest factor by which the remaining coordinates are enlarged to make up for skipped ones.
LARGEST = 2.0
#: In blocks whose gradients have a smaller root mean square than this, eps is reduced in proportion, down to the
#: fraction ``LEAST``. Otherwise layers that get almost no gradient would stand still: in a network of twenty plain
#: layers with torch's initial weights it is 1e-12.
FAINT, LEAST = 1e-6, 1e-10


@dataclass(frozen=True)
class Belief(TorchRule):
    r"""AdaBelief (Zhuang et al., 2020) on the coordinates of the eigenbasis, with a floor and two bounds.

    .. math::
        &d = g - \hat m, \quad m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
            s \leftarrow \beta_2 s + (1 - \beta_2) \left(\tfrac{1 + \beta_1}{2} d^2 + \kappa \hat m^2\right) \\
        &x = \hat m / (\sqrt{\hat s} + \epsilon), \quad x_{ij} \leftarrow 0 \text{ where } x_{ij} g_{ij} < 0
            \text{ at equal length}, \quad
            x \leftarrow x / \max(1, \mathrm{rms}(x))

    Where gradients are mostly noise, this is Adam. Where examples agree, as on a plateau, s is smaller than g^2, and
    steps in those coordinates are larger: up to 1 / sqrt(kappa) times as large. Coordinates in which the mean and the
    latest gradient differ in sign are skipped (cautious optimizers, Liang et al., 2024). The mean square of a block's
    direction is never above 1, so the root mean square of an update is at most lr. A gradient far longer than usual is
    clipped, so that one bad batch does not inflate s for hundreds of steps.

    s is carried over to a new basis. Restarting it at KFAC's eigenvalues diverges if these are inaccurate.

    Attributes:
        betas: Decays of m and s; those of a parameter group take precedence.
        eps: Added to the square root; less for blocks whose gradients are below 1e-6.
        floor: kappa, the weight of the mean gradient in s; 1 is close to Adam.
        spike: Clip a gradient to this many times its usual length.
        cautious: Skip coordinates in which the mean and the latest gradient differ in sign.
    """

    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    floor: float = 0.005
    spike: float = 10.0
    cautious: bool = True

    weight_decay = 0.3
    warms_up = True
    derivative_betas = (0.98, 0.95)
    moments = ("m",)
    bounds_gradients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("floor", self.floor, above=0)
        checks.number("spike", self.spike, above=1)
        checks.flag("cautious", self.cautious)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        super().observe(state, step)
        beta1, beta2 = step.rates.betas or self.betas
        if not hasattr(state, "m"):
            state.m = torch.zeros_like(step.g)
        g, seen, m, s, ok = step.g, step.seen, state.m, state.s, step.ok
        count = step.count = counted(state, g, ok, step.blocks)

        size = seen.numel() // step.blocks

        def weights(count: Number, length: Number, length_of_m: Number, sum_of_s: Number) -> tuple[Number, ...]:
            bias = remaining(beta1, count - 1)  # of m from before this step
            mean = length_of_m / bias
            usual = mean * mean + sum_of_s / remaining(beta2, count - 1)
            clip = shortening(rounded(length * length, seen), self.spike**2 * usual)
            weight = clipped(count - 1, 0, 1) * ((1 + beta1) / 2) ** 0.5  # 0 in the first step, where there is no m yet
            eps = self.eps * clipped(((usual + length * length) / size) ** 0.5 / FAINT, LEAST, 1)
            return -weight / bias, weight * clip, clip, self.floor**0.5 / remaining(beta1, count), eps

        lengths = norms(seen, step.blocks), norms(m, step.blocks), norms(s, step.blocks, 1)
        of_m, of_g, clip, of_mean, step.eps = by_block(weights, count, *lengths)
        d = add_product(m * spread(of_m, m), seen, of_g)  # sqrt((1 + beta_1) / 2) (g - m)
        # m <- beta_1 m + (1 - beta_1) g
        fresh = 1 - beta1 if ok is None else (1 - beta1) * ok
        add_product(m.mul_(spread(1 - fresh, m)), g, fresh * clip)
        # s <- beta_2 s + (1 - beta_2) (d^2 + kappa m^2)
        square = add_product(d.square_(), m, of_mean * of_mean, m)
        blend(s, square if step.small else bounded(square), 1 - beta2, ok)

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        beta1, beta2 = step.rates.betas or self.betas
        m, s = state.m, state.s
        count = step.count
        root = remaining(beta2, count, root=True)
        x = m / s.sqrt().add_(spread(step.eps * root, s))
        length = left = norms(x, step.blocks)
        if self.cautious:
            against = (x * step.g).lt_(0)  # 1 where the signs differ; masked_fill would be ten times slower on a CPU
            left = norms(x.addcmul_(x, against, value=-1), step.blocks)

        # Bias corrections and bounds, combined into one factor per block.
        def correction(count: Number, root: Number, length: Number, left: Number) -> tuple[Number]:
            factor = start = root / remaining(beta1, count)
            if self.cautious:
                enlarged = rounded(length / clipped(left, torch.finfo(x.dtype).tiny, torch.inf), x)
                enlarged = clipped(enlarged, 0, LARGEST)
                length, factor = rounded(left * enlarged, x), factor * enlarged
            length = rounded(length / rounded((x.numel() // step.blocks) ** 0.5, x), x) * start
            return (factor / clipped(length, 1, torch.inf),)

        (factor,) = by_block(correction, count, root, length, left)
        return x.mul_(spread(factor if step.ok is None else factor * step.ok, x))

    def second_moment(self, state: EigenState) -> Tensor:
        s = super().second_moment(state)
        return s / spread(remaining(self.betas[1], state.count), s) if hasattr(state, "count") else s


def norms(x: Tensor, blocks: int, order: int = 2) -> Number:
    """Return the norm of each block's part of x; for order 1, x must have no negative entries."""
    rows = x.reshape(-1) if blocks == 1 else x.reshape(blocks, -1)
    # Torch's norm of order 1 takes 15 times as long as the sum.
    lengths = rows.sum(-1) if order == 1 else torch.linalg.vector_norm(rows, dim=-1)
    return lengths.item() if x.is_cpu and blocks == 1 else lengths


def by_block(function: Callable[..., tuple[Number, ...]], *numbers: Number) -> Sequence[Number]:
    """Call a function of numbers; on a CPU block by block, because floats are faster than small tensors."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    if not (tensors and tensors[0].is_cpu):
        return function(*numbers)
    blocks = len(tensors[0])
    columns = [number.tolist() if isinstance(number, Tensor) else [number] * blocks for number in numbers]
    found = [function(*each) for each in zip(*columns, strict=True)]
    return [shared(column, tensors[0]) for column in zip(*found, strict=True)]


def add_product(target: Tensor, x: Tensor, number: Number, y: Tensor | None = None) -> Tensor:
    """Add ``number`` (one for all blocks, or one per block) times x, or times x y, in place."""
    factor = spread(number, x)
    if isinstance(factor, Tensor):
        return target.addcmul_(x if y is None else x * y, factor)
    return target.add_(x, alpha=factor) if y is None else target.addcmul_(x, y, value=factor)
