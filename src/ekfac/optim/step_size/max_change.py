"""A bound on the relative change of the weights in one step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor, nn

from ekfac.optim.distributed.processes import Processes
from ekfac.optim.types import Direction

#: The least that the root mean square of weights counts as.
FLOOR = 1e-3

ALONE = Processes(None)

Pair = tuple[nn.Parameter, Tensor]
Steps = dict[nn.Parameter, Tensor]
LearningRates = Mapping[nn.Parameter, "float | Tensor"]


def bound_change(
    directions: list[Direction],
    lr_of: LearningRates,
    max_change: float,
    gradients: Container[nn.Parameter] = (),
    processes: Processes = ALONE,
    weights: Mapping[nn.Parameter, Tensor] = {},
) -> tuple[Steps, Tensor | None]:
    """Shorten each block's direction so that |lr p| <= (max_change / L) |theta|.

    lr is each parameter's own. L counts the blocks that hold weights. The root mean square of theta counts as at least
    ``FLOOR``, so that weights can leave zero.

    Args:
        directions: Of all blocks; those that other processes update have no steps.
        lr_of: The learning rate of each parameter.
        max_change: The bound.
        gradients: Parameters that have a gradient.
        processes: Who updates the others.
        weights: What is changed, where that is not the parameter itself.

    Returns:
        The directions that this process has, by parameter, and what each of all was multiplied by, 0 where it is zero;
        ``None`` where there is nothing to shorten.
    """
    blocks = [list(d.steps.items()) for d in directions]
    moving = [d.steps or [p for p in d.block.parameters.values() if p in gradients] for d in directions]
    if not any(moving):
        return {}, None
    most = max_change / max(1, sum(any(p.dim() > 1 for p in block) for block in moving))
    steps: Steps = {}
    found: dict[int, Tensor] = {}
    for indices in _of_one_kind(blocks):
        alike = [blocks[index] for index in indices]
        flat = [pair for block in alike for pair in block]
        norms = torch._foreach_norm([step for _, step in flat])
        length = _by_block([norm * lr_of[p] for norm, (p, _) in zip(norms, flat, strict=True)], len(alike))
        theta = _by_block(torch._foreach_norm([weights.get(p, p).detach() for p, _ in flat]), len(alike))
        floors = [FLOOR * sum(step.numel() for _, step in block) ** 0.5 for block in alike]
        theta = torch.stack(torch._foreach_clamp_min(list(theta.unbind()), floors))
        factors = (most * theta / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(max=1).to(flat[0][1])
        # A block that does not move, for want of a gradient or with a learning rate of 0, takes no step of any length.
        found.update(zip(indices, torch.where(length > 0, factors, 0.0).unbind(), strict=True))
        for block, factor in zip(alike, factors.unbind(), strict=True):
            steps.update({p: step * factor for p, step in block})
    none = torch.zeros((), dtype=torch.float64, device=directions[0].block.key.device)
    return steps, processes.sum(torch.stack([found.get(index, none).to(none) for index in range(len(blocks))]))


def _of_one_kind(blocks: list[list[Pair]]) -> list[list[int]]:
    """Group blocks with the same number of parameters on the same device in the same dtype: one kernel serves all."""
    kinds: dict[object, list[int]] = {}
    for index, block in enumerate(blocks):
        kinds.setdefault(tuple((step.device, step.dtype) for _, step in block), []).append(index)
    return [alike for kind, alike in kinds.items() if kind]


def _by_block(norms: Sequence[Tensor], blocks: int) -> Tensor:
    """Return one norm a block, of those of its parameters, which follow each other."""
    found: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)).view(blocks, -1), dim=1)
    return found
