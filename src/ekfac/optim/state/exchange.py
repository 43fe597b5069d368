"""Between an optimizer's state and curvature as an object: hand out what was learnt, or start from it."""

from __future__ import annotations

import torch

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.fisher import eigenvectors, order_of, plain_basis
from ekfac.curvature.operators.operator import Curvature
from ekfac.curvature.operators.parts import DiagonalPart, EigenPart, Part
from ekfac.curvature.operators.vectors import Layout
from ekfac.optim.engine import Engine
from ekfac.optim.methods.eigenbasis import EigenMethod


@torch.no_grad()
def curvature(engine: Engine) -> Curvature:
    """A snapshot of the bases and scalings in use; of KFAC, which has none, those of its factors A and B."""
    engine.settle()
    states = {block: engine.state.get(block.key, {}) for block in engine.blocks}
    if not any("s" in state or "A" in state for state in states.values()):
        raise RuntimeError("there is no curvature yet: it is learnt in the first step")
    weight = max((float(state.get("factor_weight", 0.0)) for state in states.values()), default=0.0)
    kind = "ekfac" if isinstance(engine.method, EigenMethod) and not engine.method.rule.follows_factors else "kfac"
    return Curvature(kind, _layout(engine), [_part(engine, block) for block in engine.blocks], round(weight))


def _part(engine: Engine, block: Block) -> Part:
    state = engine.state.get(block.key, {})
    names = tuple(block.parameter_names.values())
    if not block.covered:
        s = plain_basis(block, 0.0).kronecker() if "s" not in state else engine.elementwise.rule.second_moment(state)
        s = s.reshape(-1).clone()
        return DiagonalPart(block.name, names, s)
    if isinstance(engine.method, EigenMethod) and engine.method.ready(state):
        basis = engine.method.basis(block, state)
        assert basis is not None
        s = engine.method.rule.second_moment(state).clone()
        clones = [None if t is None else t.clone() for t in (basis.U_A, basis.U_B, basis.S_A, basis.S_B)]
        return EigenPart(block.name, names, Basis(block.shape, *clones), s, order_of(block))  # type: ignore[arg-type]
    if "A" not in state:  # no gradient has reached this layer
        basis = plain_basis(block, 0.0)
    else:
        A, B = engine.factors(block)
        U_A, S_A = eigenvectors(block, "A", A, block.diagonal_A)
        U_B, S_B = eigenvectors(block, "B", B, block.diagonal_B)
        basis = Basis(block.shape, U_A, U_B, S_A, S_B)
    return EigenPart(block.name, names, basis, basis.kronecker(), order_of(block))


@torch.no_grad()
def seed(engine: Engine, operator: Curvature) -> None:
    """Start from a KFAC or EKFAC operator: its factors enter the running averages as a batch of its examples would.

    Everything is checked before anything is changed.
    """
    given = {part.parameters: part for part in operator.parts}
    matched: list[tuple[Block, Part]] = []
    for block in engine.blocks:
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
        matched.append((block, part))
    if given:
        raise ValueError(
            f"the operator has blocks that are not trained here: {', '.join(p.name for p in given.values())}"
        )
    engine.settle(wait=True)
    engine.drop()
    engine.refresher.forget()
    engine.generation += 1
    for block, part in matched:
        _seed_block(engine, block, part.to(device=block.key.device, dtype=block.dtype), float(operator.examples or 1))


def _seed_block(engine: Engine, block: Block, part: Part, weight: float) -> None:
    state = engine.state[block.key]
    momentum = state.get("momentum_buffer")
    state.clear()
    if momentum is not None:
        state["momentum_buffer"] = momentum
    if isinstance(part, DiagonalPart):
        state["s"] = part.entries.reshape(1, 1, -1).clone()
        return
    assert isinstance(part, EigenPart)
    A, B = part.factors()
    state.update(A=A * weight, B=B * weight, factor_weight=torch.tensor(weight, dtype=block.dtype, device=A.device))
    method = engine.method
    if not isinstance(method, EigenMethod):
        return  # KFAC inverts the factors at its next step
    b = part.basis
    parts = {"U_A": b.U_A, "U_B": b.U_B, "S_A": b.S_A, "S_B": b.S_B}
    state.update({name: None if t is None else t.clone() for name, t in parts.items()}, failed_refreshes=0)
    method.rule.start(state, b.kronecker() if method.rule.follows_factors else part.s.clone())
    if method.needs_examples:
        state["count"].fill_(1)  # so that the seed counts as one step's s*, and is averaged with the next


def _layout(engine: Engine) -> Layout:
    """The trained parameters in the order of ``named_parameters()``."""
    trained = {name for block in engine.blocks for name in block.parameter_names.values()}
    shapes = {name: tuple(p.shape) for name, p in engine.model.named_parameters() if name in trained}
    return Layout(tuple(shapes), tuple(shapes.values()))
