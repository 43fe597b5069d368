"""The width of a network by what its inputs carry: a row of 5,000 columns of which one is not zero is not wide."""

from __future__ import annotations

import torch
from torch import Tensor

from ekfac.optim.engine import Engine
from ekfac.optim.step_size.default_lr import width_of
from ekfac.optim.step_size.lr_schedule import LRSchedule


def follow_inputs(schedule: LRSchedule, engine: Engine) -> LRSchedule:
    """Return the built-in schedule for the inputs that linear layers had in the first step, equal on all processes."""
    layers = {block.parameters.get("weight"): block.layer for block in engine.partition.covered}
    counts = {p: layer.nonzero.tolist() for p, layer in layers.items() if p is not None and layer.nonzero is not None}
    nonzero: dict[Tensor, float] = {p: count / rows for p, (count, rows) in counts.items() if rows}
    width = width_of(engine.model)
    # The least sparse inputs count. Processes without a batch have none.
    mine = [-width_of(engine.model, nonzero) if nonzero else 0.0]
    (least,) = engine.options.processes.minimum(
        torch.tensor(mine, dtype=torch.float64, device=engine.partition.device)
    ).tolist()
    return schedule.narrowed(width, -least or width)
