"""What a checkpoint holds besides torch's own, and how another model's is recognised before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.optim.distributed.states import SOLVER, WholeState
from ekfac.optim.engine import Engine
from ekfac.optim.statistics.partition import fits

VERSION = 4
#: State that is counted in float64 whatever the dtype of the block.
COUNTS = ("count", "examples")


def engine_state(engine: Engine, whole: WholeState) -> dict[str, Any]:
    """Return counters, and names and shapes of the parameters, as plain data."""
    counters = whole.counters
    return {
        "version": VERSION,
        "applied_steps": engine.schedule.applied_steps,
        "skipped_steps": engine.skipped_steps,
        "refreshes": counters["refreshes"],
        "warm_refreshes": counters["warm_refreshes"],
        "residual_drift": whole.drift,
        "fallbacks": {name.removeprefix(SOLVER): n for name, n in counters.items() if name.startswith(SOLVER)},
        "kind": engine.method.kind,
        "lengths_wanted": whole.lengths_wanted,
        "apart": engine.collector.apart,
        "put_away": _put_away(engine, whole),
        "parameters": parameter_shapes(engine),
        "entries": sum(map(len, whole.states.values())),
        "silent": [n for p, n in engine.partition.names.items() if p in engine.partition.silent],
    }


def _put_away(engine: Engine, whole: WholeState) -> list[dict[str, Any]]:
    """Return the state of frozen blocks, by the names of their parameters."""
    names = engine.partition.names
    return [
        {"covered": covered, "parameters": [names[p] for p in key], "state": dict(state)}
        for (covered, key), state in whole.put_away.items()
    ]


def _named(engine: Engine, saved: Any) -> Iterator[tuple[bool, tuple[nn.Parameter, ...], dict[str, Any]]]:
    parameters = {name: p for p, name in engine.partition.names.items()}
    for entry in saved:
        yield entry["covered"], tuple(parameters[name] for name in entry["parameters"]), entry["state"]


def parameter_shapes(engine: Engine) -> dict[str, list[int]]:
    """Return names and shapes of all parameters that the optimizer was given."""
    offered = set(engine.partition.offered)
    return {name: list(p.shape) for p, name in engine.partition.names.items() if p in offered}


def check(engine: Engine, state_dict: Any) -> dict[str, Any]:
    """Refuse a checkpoint that is not this kind's or not this model's; returns what it holds under "ekfac"."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict={state_dict!r} must be what state_dict() gave, a dict")
    groups = state_dict.get("param_groups") or [{}]
    saved = state_dict.get("ekfac", groups[0].get("ekfac"))
    if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
        raise ValueError(f"state_dict holds no state of this library, version {VERSION} (key 'ekfac' missing or other)")
    if saved["kind"] != engine.method.kind:
        names = {"eigenbasis": "EKFAC", "inverse": "KFAC"}
        raise ValueError(f"state_dict is of {names[saved['kind']]}, this is {names[engine.method.kind]}")
    ours, theirs = parameter_shapes(engine), dict(saved["parameters"])
    if ours != theirs:
        missing = [n for n in theirs if n not in ours]
        extra = [n for n in ours if n not in theirs]
        other = [f"{n} {theirs[n]} here {ours[n]}" for n in ours if n in theirs and theirs[n] != ours[n]]
        raise ValueError(
            "state_dict is of another model. Only in the checkpoint: "
            f"{', '.join(missing) or 'nothing'}; only in this model: {', '.join(extra) or 'nothing'}; "
            f"other shapes: {', '.join(other) or 'none'}"
        )
    return {"silent": [], "put_away": [], "fallbacks": {}, **saved}  # torch leaves out what is empty when it flattens


def check_complete(saved: Mapping[str, Any], state_of: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse a checkpoint that has lost state on its way."""
    found, count = sum(map(len, state_of.values())), saved.get("entries", 0)
    if found < count:
        raise ValueError(
            f"state_dict lacks {count - found} of {count} entries of state. torch.distributed.checkpoint.load fills "
            "only what is there: give it the state of an optimizer that has taken steps, or convert the checkpoint "
            "with torch.distributed.checkpoint.format_utils.dcp_to_torch_save and load that"
        )


def outline(engine: Engine) -> None:
    """Name all that a state can hold, where there is none yet: torch loads a flattened state dict by these names."""
    states = engine.partition.states
    if states and not engine.outlined:
        return
    engine.outlined = True
    for block in engine.partition.blocks:
        for p in block.parameters.values():
            states[p] = dict.fromkeys(f.name for f in fields(engine.method_of(block).state_class))


def drop_outline(engine: Engine) -> None:
    """Let go of the names, before there is state."""
    if engine.outlined:
        engine.outlined = False
        engine.partition.states.clear()


def filled(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a flattened state dict did not hold."""
    return {
        name: value for name, value in state.items() if not (value is None or (isinstance(value, dict) and not value))
    }


def check_blocks(engine: Engine, state_of: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse state whose blocks are laid out in another way (sua, max_factor_dim, include, ... differ)."""
    for block in engine.partition.blocks:
        if not fits(block, state_of.get(block.key, {})):
            raise ValueError(
                f"state_dict holds another layout of block '{block.name}'. Construct the optimizer with the same sua, "
                "basis, include, exclude and max_factor_dim as when it was saved"
            )


def adopt(engine: Engine, saved: dict[str, Any], state_of: Mapping[Any, Mapping[str, Any]]) -> None:
    """Put the counters back, after a last check that the blocks are laid out as they were."""
    engine.settle(wait=True)
    partition, refresher = engine.partition, engine.refresher
    before = partition.silent
    partition.silent = {p for p, n in partition.names.items() if n in saved["silent"]}
    if partition.silent != before:
        engine.collector.set_parameters(partition.offered)
    try:
        check_blocks(engine, state_of)
    except ValueError:
        partition.silent = before
        engine.collector.set_parameters(partition.offered)
        raise
    engine.collector.drop()
    engine.collector.watch.lengths_wanted = saved["lengths_wanted"]
    engine.collector.apart = saved.get("apart", 0)
    partition.put_away = {
        (covered, key): (engine.method if covered else engine.elementwise).state_class(
            converted(engine, {key[0]: state})[key[0]]
        )
        for covered, key, state in _named(engine, saved["put_away"])
    }
    engine.schedule.applied_steps = saved["applied_steps"]
    engine.skipped_steps = saved["skipped_steps"]
    partition.generation += 1
    engine.schedule.pending = []
    first = engine.options.processes.rank == 0  # which goes on counting for all: checkpoints have their sum
    refresher.refreshes = saved["refreshes"] if first else 0
    engine.schedule.warm_refreshes = saved["warm_refreshes"] if first else 0
    refresher.drift = torch.tensor(saved["residual_drift"])
    refresher.fallbacks.clear()
    refresher.fallbacks.update(saved["fallbacks"] if first else {})


def converted(engine: Engine, state_of: Mapping[Any, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Copy saved state to the parameters' devices, in their blocks' dtypes: float32 under half precision."""
    blocks = engine.partition.blocks
    dtypes: dict[Tensor, torch.dtype] = {p: block.dtype for block in blocks for p in block.parameters.values()}

    def value(p: Tensor, name: str, given: Any) -> Any:
        if name in COUNTS:  # versions before have kept numbers of examples as plain numbers
            return torch.as_tensor(given, dtype=torch.float64, device=p.device).detach().clone()
        if not isinstance(given, Tensor):
            return given
        if not given.is_floating_point():
            return given.detach().to(p.device, copy=True)
        usual = p.dtype if p.dtype == torch.float64 else torch.float32
        return given.detach().to(p.device, dtypes.get(p, usual), copy=True)

    return {
        p: {name: value(p, name, given) for name, given in state.items() if given is not None}
        for p, state in state_of.items()
    }
