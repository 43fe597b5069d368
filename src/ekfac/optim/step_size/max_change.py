"""A bound on the relative change of the weights in one step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor, nn

from ekfac.optim.distributed.processes import Processes
from ekfac.optim.types import Direction

#: Lower bound on the root mean square of theta, so that weights can leave zero.
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

    lr is each parameter's own. L is the number of blocks with weights (matrices). The root mean square of theta counts
    as at least ``FLOOR``.

    Args:
        directions: The directions of all blocks; those that other processes update have no steps.
        lr_of: The learning rate of each parameter.
        max_change: The bound.
        gradients: Parameters that have a gradient.
        processes: The processes that share the blocks.
        weights: The tensors to be updated, where they are not the parameters themselves.

    Returns:
        This process's shortened directions, by parameter; and the factor of each block, 0 for a zero direction, or
        ``None`` if there is nothing to shorten.
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
        # A block that does not move, for lack of a gradient or with lr = 0, has factor 0.
        found.update(zip(indices, torch.where(length > 0, factors, 0.0).unbind(), strict=True))
        for block, factor in zip(alike, factors.unbind(), strict=True):
            steps.update({p: step * factor for p, step in block})
    none = torch.zeros((), dtype=torch.float64, device=directions[0].block.key.device)
    return steps, processes.sum(torch.stack([found.get(index, none).to(none) for index in range(len(blocks))]))


def _of_one_kind(blocks: list[list[Pair]]) -> list[list[int]]:
    """Group blocks with the same number of parameters, device and dtype, so that one kernel serves all."""
    kinds: dict[object, list[int]] = {}
    for index, block in enumerate(blocks):
        kinds.setdefault(tuple((step.device, step.dtype) for _, step in block), []).append(index)
    return [alike for kind, alike in kinds.items() if kind]


def _by_block(norms: Sequence[Tensor], blocks: int) -> Tensor:
    """Combine the norms of consecutive parameters into one norm per block."""
    found: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)).view(blocks, -1), dim=1)
    return found
