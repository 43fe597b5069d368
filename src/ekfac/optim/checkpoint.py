"""What a checkpoint holds besides torch's own, and how another model's is recognised before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.optim.engine import Engine

VERSION = 4


def engine_state(engine: Engine) -> dict[str, Any]:
    """Counters, and names and shapes of the parameters, as plain data."""
    engine.settle(wait=True)
    refresher = engine.refresher
    return {
        "version": VERSION,
        "applied_steps": engine.applied_steps,
        "skipped_steps": engine.skipped_steps,
        "refreshes": refresher.refreshes,
        "warm_refreshes": refresher.warm_refreshes,
        "residual_drift": 0.0 if refresher.drift is None else float(refresher.drift),
        "fallbacks": dict(refresher.fallbacks),
        "parameters": parameter_shapes(engine.blocks),
        "silent": [n for n, p in engine.model.named_parameters() if p in engine.silent],
    }


def parameter_shapes(blocks: Iterable[Block]) -> dict[str, list[int]]:
    """Names and shapes of all trained parameters."""
    return {
        name: list(p.shape)
        for b in blocks
        for name, p in zip(b.parameter_names.values(), b.parameters.values(), strict=True)
    }


def check(engine: Engine, state_dict: Any) -> dict[str, Any]:
    """Refuse a checkpoint that is not this kind's or not this model's; returns what it holds under "ekfac"."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict={state_dict!r} must be what state_dict() gave, a dict")
    saved = state_dict.get("ekfac")
    if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
        raise ValueError(f"state_dict holds no state of this library, version {VERSION} (key 'ekfac' missing or other)")
    ours, theirs = parameter_shapes(engine.blocks), dict(saved["parameters"])
    if ours != theirs:
        missing = [n for n in theirs if n not in ours]
        extra = [n for n in ours if n not in theirs]
        other = [f"{n} {theirs[n]} here {ours[n]}" for n in ours if n in theirs and theirs[n] != ours[n]]
        raise ValueError(
            "state_dict is of another model. Only in the checkpoint: "
            f"{', '.join(missing) or 'nothing'}; only in this model: {', '.join(extra) or 'nothing'}; "
            f"other shapes: {', '.join(other) or 'none'}"
        )
    return dict(saved)


def check_blocks(engine: Engine, state_of: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse state whose blocks are laid out in another way (sua, max_factor_dim, include, ... differ)."""
    for block in engine.blocks:
        s = state_of.get(block.key, {}).get("s")
        A = state_of.get(block.key, {}).get("A")
        shape = block.shape
        expected = (shape.groups, shape.out, shape.columns)
        wrong = isinstance(s, Tensor) and tuple(s.shape) != expected
        if isinstance(A, Tensor):
            wrong |= tuple(A.shape) != (shape.groups, shape.inputs) + (() if block.diagonal_A else (shape.inputs,))
        if wrong or (A is not None and not block.covered):
            raise ValueError(
                f"state_dict holds another layout of block '{block.name}'. Construct the optimizer with the same sua, "
                "basis, include, exclude and max_factor_dim as when it was saved"
            )


def adopt(engine: Engine, saved: dict[str, Any], state_of: Mapping[Any, Mapping[str, Any]]) -> None:
    """Put the counters back, after a last check that the blocks are laid out as they were."""
    engine.aside.join()
    before = engine.silent
    engine.silent = {p for n, p in engine.model.named_parameters() if n in saved["silent"]}
    if engine.silent != before:
        engine.set_parameters(engine.parameters)
    try:
        check_blocks(engine, state_of)
    except ValueError:
        engine.silent = before
        engine.set_parameters(engine.parameters)
        raise
    engine.drop()
    engine.applied_steps = saved["applied_steps"]
    engine.skipped_steps = saved["skipped_steps"]
    engine.generation += 1
    engine.refresher.forget()
    engine.refresher.refreshes = saved["refreshes"]
    engine.refresher.warm_refreshes = saved["warm_refreshes"]
    engine.refresher.drift = torch.tensor(saved["residual_drift"])
    engine.refresher.fallbacks.clear()
    engine.refresher.fallbacks.update(saved["fallbacks"])


def on_device(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of a parameter's state that keeps its dtypes: float32 factors under half-precision parameters."""
    return {k: v.detach().to(device, copy=True) if isinstance(v, Tensor) else v for k, v in state.items()}
