"""A skeleton of the state after a first step: torch.distributed.checkpoint loads only into entries that exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.real import real_shape
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.distributed.shards import any_sharded
from ekfac.optim.distributed.states import make_contiguous
from ekfac.optim.engine import Engine
from ekfac.optim.state.average import FLAGS
from ekfac.optim.statistics.sums import BlockSums, no_scaling
from ekfac.optim.step_size.running_statistics import STATISTICS, norms_of
from ekfac.optim.step_size.weight_average import WeightAverage
from ekfac.optim.types import Rates, StepInputs


@torch.no_grad()
def outline(engine: Engine, rates: Rates, with_momentum: Collection[nn.Parameter]) -> None:
    """Create state with the right names, shapes and dtypes, if there is none yet, from gradients of zero.

    It is dropped once it has been saved, or another state is loaded. Each process does this for the blocks it owns.

    Args:
        engine: The engine.
        rates: The hyper-parameters of a step.
        with_momentum: Parameters with momentum.
    """
    partition, refresher = engine.partition, engine.refresher
    if partition.states and not engine.outlined:
        return
    engine.replicas.together()
    counted = refresher.refreshes, refresher.drift, Counter(refresher.fallbacks)
    for block in filter(partition.owners.mine, partition.blocks):
        gradients = {p: _zeros(p) for p in block.parameters.values()}
        sums = {block: BlockSums(_factors(block), no_scaling(block))} if block.covered else {}
        solves = {block} if block.covered else set()
        inputs = StepInputs(gradients, {}, sums, 1.0, 1.0, solves, blocks=[block])
        engine.update_factors(inputs, sums)
        engine.compute_eigenbases([block], inputs, rates)
        (direction,) = engine.precondition([block], inputs, rates)
        for p, step in direction.steps.items():
            if p in with_momentum:
                state = partition.state(block) if p is block.key else partition.states.setdefault(p, {})
                state["momentum_buffer"] = torch.zeros_like(step, memory_format=torch.contiguous_format)
        make_contiguous(partition.state(block))
    refresher.refreshes, refresher.drift, refresher.fallbacks = counted
    engine.outlined = True


def _zeros(p: Tensor) -> Tensor:
    """Return real zeros in the (unsharded) shape of a parameter."""
    return torch.zeros(real_shape(p), dtype=p.dtype.to_real(), device=p.device)


def _factors(block: Block) -> FactorSums:
    """Return sums for which both factors are the identity."""
    options: dict[str, Any] = {"dtype": block.dtype, "device": block.key.device}

    def one(width: int, diagonal: bool) -> Tensor:
        whole = torch.ones(width, **options) if diagonal else torch.eye(width, **options)
        return whole.expand(block.shape.groups, *whole.shape).contiguous()

    return FactorSums(one(block.shape.inputs, block.diagonal_A), 1, one(block.shape.out, block.diagonal_B))


def drop_outline(engine: Engine) -> None:
    """Remove the skeleton, before there is real state."""
    if engine.outlined:
        engine.outlined = False
        engine.partition.states.clear()
        engine.partition.generation += 1


def outline_average(
    average: WeightAverage, groups: list[dict[str, Any]], default_lr: Any, names: Mapping[nn.Parameter, str]
) -> dict[str, Any] | None:
    """Return the average's entry in a checkpoint, with zeros for everything; None if nothing will be averaged.

    Args:
        average: The average.
        groups: torch's parameter groups.
        default_lr: The default lr if groups with it follow the built-in schedule, else None.
        names: The names of the parameters.
    """
    offsets = {}
    for group in groups:
        on_schedule = not group["lr_named"] and group["lr"] == default_lr and "initial_lr" not in group
        for p in group["params"] if average.wanted or (average.wanted is None and on_schedule) else ():
            if p in names and p.requires_grad and p.dtype.to_real() in (torch.float32, torch.float64):
                offsets[names[p]] = _zeros(p)
    if not offsets:
        return None
    model = average.model
    modules = {} if model is None else {module: name for name, module in model.named_modules()}
    statistics = {
        f"{modules[module]}.{name}": torch.zeros_like(getattr(module, name))
        for module in norms_of(model)
        if any_sharded(names) or _goes_with(module, offsets, names)
        for name in STATISTICS
    }
    flags = dict.fromkeys(FLAGS, False)
    return {**flags, "offsets": offsets, "statistics": statistics, "entries": 0}


def _goes_with(norm: nn.Module, offsets: Collection[str], names: Mapping[nn.Parameter, str]) -> bool:
    """Return whether a norm's statistics are averaged: unless its weights are trained without being averaged."""
    own = [names[p] for p in norm.parameters(recurse=False) if p.requires_grad and p in names]
    return not own or any(name in offsets for name in own)
