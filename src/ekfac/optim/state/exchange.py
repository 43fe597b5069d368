"""Converts an optimizer's state to a curvature operator, and starts an optimizer from one."""

from __future__ import annotations

from typing import Any

import torch

from ekfac import checks
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.fisher import eigenvectors, order_of, plain_basis
from ekfac.curvature.operators.operator import Curvature
from ekfac.curvature.operators.parts import DiagonalPart, EigenPart, Part
from ekfac.curvature.operators.vectors import Layout
from ekfac.optim.distributed.states import block_states, keep_own
from ekfac.optim.engine import Engine
from ekfac.optim.types import factors_of


@torch.no_grad()
def curvature(engine: Engine) -> Curvature:
    """Return a snapshot of the bases and scalings in use; for KFAC, which has none, the eigenbases of A and B."""
    checks.real("curvature()", engine.model)
    engine.settle()
    states = block_states(engine)
    if not any("s" in state or "A" in state for state in states.values()):
        raise RuntimeError("there is no curvature yet: it is learnt in the first step")
    weight = max((float(state.get("factor_weight", 0.0)) for state in states.values()), default=0.0)
    parts = [_part(engine, block, states[block.key]) for block in engine.partition.blocks]
    return Curvature(engine.method.approximation, _layout(engine), parts, round(weight))


def _part(engine: Engine, block: Block, state: Any) -> Part:
    found = engine.method_of(block).part(block, state)
    if found is not None:
        return found
    names = tuple(block.parameter_names.values())
    if not block.covered:
        return DiagonalPart(block.name, names, plain_basis(block, 0.0).kronecker().reshape(-1))
    if "A" not in state:  # no gradient has reached this layer
        basis = plain_basis(block, 0.0)
    else:
        A, B = factors_of(state)
        U_A, S_A = eigenvectors(block, "A", A, block.diagonal_A)
        U_B, S_B = eigenvectors(block, "B", B, block.diagonal_B)
        basis = Basis(block.shape, U_A, U_B, S_A, S_B)
    return EigenPart(block.name, names, basis, basis.kronecker(), order_of(block))


@torch.no_grad()
def seed(engine: Engine, operator: Curvature) -> None:
    """Start from a KFAC or EKFAC operator; its factors count in the running averages like a batch of its examples.

    Everything is checked before anything is changed.
    """
    if not isinstance(operator, Curvature):
        raise ValueError(
            f"operator is of type {type(operator).__name__}. Allowed: what fisher() or curvature() returns"
        )
    checks.real("seed()", engine.model)
    given = {part.parameters: part for part in operator.parts}
    matched: list[tuple[Block, Part]] = []
    for block in engine.partition.blocks:
        part = given.pop(tuple(block.parameter_names.values()), None)
        if part is None:
            raise ValueError(f"the operator has no block for '{block.name}'. Its blocks: {', '.join(operator.layers)}")
        if not block.covered:
            fits = isinstance(part, DiagonalPart) and part.numel == block.shape.numel
        else:
            fits = (
                isinstance(part, EigenPart)
                and part.basis.shape == block.shape
                and (part.basis.U_A is None, part.basis.U_B is None) == (block.diagonal_A, block.diagonal_B)
            )
        if not fits:
            raise ValueError(
                f"the operator's block '{part.name}' does not fit this optimizer's, which is {block.describe()}. "
                "Allowed: a 'kfac' or 'ekfac' operator of the same model, made with the same sua, include, exclude and "
                "max_factor_dim"
            )
        for name, tensor in part.tensors().items():
            if not bool(torch.isfinite(tensor.to(block.dtype)).all()):
                raise ValueError(f"the operator's block '{part.name}', {name!r}: is not finite in {block.dtype}")
        matched.append((block, part))
    if given:
        raise ValueError(
            f"the operator has blocks that are not trained here: {', '.join(p.name for p in given.values())}"
        )
    engine.settle(wait=True)
    engine.collector.drop()
    engine.schedule.pending = []
    engine.partition.generation += 1
    for block, part in matched:
        _seed_block(engine, block, part.to(device=block.key.device, dtype=block.dtype), float(operator.examples or 1))
    keep_own(engine)


def _seed_block(engine: Engine, block: Block, part: Part, weight: float) -> None:
    method, states = engine.method_of(block), engine.partition.states
    before = states.get(block.key, {})
    state = states[block.key] = method.state_class({n: before[n] for n in ("momentum_buffer",) if n in before})
    if isinstance(part, EigenPart):
        A, B = part.factors()
        state.A, state.B = A * weight, B * weight
        state.factor_weight = torch.tensor(weight, dtype=block.dtype, device=A.device)
    method.seed(block, state, part)


def _layout(engine: Engine) -> Layout:
    """Return the trained parameters in the order of ``named_parameters()``."""
    trained = {name for block in engine.partition.blocks for name in block.parameter_names.values()}
    shapes = {name: tuple(p.shape) for name, p in engine.model.named_parameters() if name in trained}
    return Layout(tuple(shapes), tuple(shapes.values()))
