"""The width of a network by what its inputs carry: a row of 5,000 columns of which one is not zero is not wide."""

from __future__ import annotations

import torch
from torch import Tensor

from ekfac.optim.engine import Engine
from ekfac.optim.step_size.default_lr import width_of
from ekfac.optim.step_size.lr_schedule import LRSchedule


def follow_inputs(schedule: LRSchedule, engine: Engine) -> LRSchedule:
    """Return the built-in schedule for the inputs that linear layers had in the first step, on all processes."""
    layers = {p: b.layer for b in engine.partition.covered if (p := b.parameters.get("weight")) is not None}
    if not layers:
        return schedule
    unseen = torch.zeros(2, dtype=torch.int64, device=engine.partition.device)
    counts = torch.stack([unseen if of.nonzero is None else of.nonzero.to(unseen) for of in layers.values()])
    found = zip(layers, engine.options.processes.sum(counts).tolist(), strict=True)
    nonzero: dict[Tensor, float] = {p: count / rows for p, (count, rows) in found if rows}
    return schedule.narrowed(width_of(engine.model), width_of(engine.model, nonzero))
