"""A bound on lr^2 times the inner product of gradient and direction."""

from __future__ import annotations

import torch
from torch import Tensor

from ekfac.optim.distributed.processes import Processes
from ekfac.optim.step_size.max_change import ALONE, LearningRates, Steps
from ekfac.optim.types import Direction, StepInputs


class KLClip:
    """Shortens all directions by nu = min(1, sqrt(bound / sum lr^2 g^2 / damped s)).

    Args:
        bound: The bound; None for no bound.
    """

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        #: The number of shortened steps, counted on the device.
        self.hits: Tensor | float = 0.0

    def __call__(
        self,
        steps: Steps,
        directions: list[Direction],
        lr_of: LearningRates,
        inputs: StepInputs,
        processes: Processes = ALONE,
    ) -> Steps:
        """Return the steps, shortened if necessary."""
        if self.bound is None or not directions:
            return steps
        gradients = {}
        for d in directions:
            if not d.steps:
                continue
            parameters, dtype = list(d.block.parameters.values()), d.block.dtype
            if d.gradient is None:
                gradients.update({p: inputs.gradients[p].to(dtype) for p in parameters})
            else:
                gradients.update(zip(parameters, d.block.unstack(d.gradient), strict=True))
        # In any orthonormal basis, the sum of g^2 / damped s is the inner product of gradient and direction.
        terms = [(gradients[p] * step).sum() * lr_of[p] ** 2 for p, step in steps.items()]
        none = torch.zeros((), dtype=torch.float64, device=directions[0].block.key.device)
        size = processes.sum(torch.stack([none, *(term.to(none) for term in terms)]).sum())
        # NaN means that a product overflowed: the step is far too long.
        nu = (self.bound / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt().clamp(max=1).nan_to_num(nan=0.0)
        if not isinstance(self.hits, Tensor):
            self.hits = torch.full((), self.hits, device=nu.device)
        self.hits.add_((nu < 1).float())
        return {p: step * nu.to(step) for p, step in steps.items()}
