"""What a checkpoint holds besides torch's entries; checks that refuse another model's before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ekfac import checks
from ekfac.curvature.blocks import Block
from ekfac.curvature.real import real_shape, state_dtype
from ekfac.optim.distributed.states import SOLVER, WholeState
from ekfac.optim.engine import Engine
from ekfac.optim.state.validation import (
    LAYOUT,
    check_count,
    check_number,
    check_state,
    check_tensor,
    refuse,
)
from ekfac.optim.state.wrapped import named_as_here, saved_in
from ekfac.optim.statistics.partition import COUNTS, Identity, identity
from ekfac.optim.types import without_empty

VERSION = 4


def engine_state(engine: Engine, whole: WholeState) -> dict[str, Any]:
    """Return counters, and names and shapes of the parameters, as plain data."""
    counters = whole.counters
    return {
        "version": VERSION,
        "applied_steps": engine.schedule.applied_steps,
        "skipped_steps": engine.skipped.total,
        "refreshes": counters["refreshes"],
        "warm_refreshes": counters["warm_refreshes"],
        "residual_drift": whole.drift,
        "fallbacks": {name.removeprefix(SOLVER): n for name, n in counters.items() if name.startswith(SOLVER)},
        "kind": engine.method.kind,
        "lengths_wanted": whole.lengths_wanted,
        "settings": settings_of(engine),
        "blocks": [_block_of(b.covered, b.parameter_names.values()) for b in engine.partition.blocks],
        "apart": engine.collector.separate_examples,
        "derivatives": engine.schedule.derivatives,
        "put_away": _put_away(engine, whole),
        "parameters": parameter_shapes(engine),
        "entries": 0 if engine.outlined else sum(len(without_empty(state)) for state in whole.states.values()),
        "silent": [n for p, n in engine.partition.names.items() if p in engine.partition.silent],
    }


def settings_of(engine: Engine) -> dict[str, str]:
    """Return settings that the state depends on but does not show."""
    o, rule = engine.options, getattr(engine.method, "rule", engine.method)
    return {"rule": type(rule).__name__, "reduction": o.batch.reduction, "sharing": o.coverage.sharing}


def _block_of(covered: bool, names: Iterable[str]) -> dict[str, Any]:
    return {"covered": covered, "parameters": list(names)}


def _put_away(engine: Engine, whole: WholeState) -> list[dict[str, Any]]:
    """Return the state of frozen blocks, with the names of their parameters, if the model still has these."""
    names = engine.partition.names
    return [
        {**_block_of(covered, (names[p] for p in key)), "state": dict(state)}
        for (covered, key), state in whole.put_away.items()
        if engine.partition.block_with((covered, key)) is not None
    ]


def parameter_shapes(engine: Engine) -> dict[str, list[int]]:
    """Return names and shapes of all parameters that the optimizer was given."""
    offered = set(engine.partition.offered)
    return {name: list(p.shape) for p, name in engine.partition.names.items() if p in offered}


def as_named_here(engine: Engine, state_dict: Any) -> Any:
    """Rename a checkpoint's parameters to the model's current names, with or without a wrapper's prefix."""
    return named_as_here(engine.model, parameter_shapes(engine), state_dict)


@dataclass(frozen=True)
class Loaded:
    """The checked content of a checkpoint, ready to be adopted.

    Attributes:
        saved: Counters and settings.
        silent: Parameters whose layers are never called.
        states: By parameter, the state of blocks that are trained now, and all momentum.
        put_away: The state of blocks that are frozen now.
    """

    saved: dict[str, Any]
    silent: set[nn.Parameter]
    states: dict[Tensor, dict[str, Any]]
    put_away: dict[Identity, dict[str, Any]]


def check(engine: Engine, state_dict: Any) -> dict[str, Any]:
    """Refuse a checkpoint of another kind of optimizer or another model; return its entry "ekfac"."""
    checks.outside_inference_mode("load_state_dict()")
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state_dict={state_dict!r} must be what state_dict() gave, a dict")
    saved = saved_in(state_dict)
    if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
        raise ValueError(_no_state(state_dict, saved))
    # torch drops empty entries when it flattens a state dict; "derivatives" is missing in older checkpoints.
    saved = {"silent": [], "put_away": [], "fallbacks": {}, "derivatives": False, **saved}
    names = {"eigenbasis": "EKFAC", "inverse": "KFAC"}
    if saved.get("kind") != engine.method.kind:
        given = saved.get("kind")
        of = names.get(given, repr(given)) if isinstance(given, str) else repr(given)
        raise ValueError(f"state_dict is of {of}, this is {names[engine.method.kind]}")
    _check_model(engine, saved)
    if "settings" in saved:  # missing in older checkpoints
        mine, theirs = settings_of(engine), _mapping("'settings'", saved["settings"])
        for name, value in mine.items():
            if theirs.get(name) != value:
                refuse(
                    f"'settings', {name!r}",
                    f"it was saved with {name}={theirs.get(name)!r}, this optimizer has {value!r}: construct it with "
                    "the settings of the saved one",
                )
    for name in ("applied_steps", "skipped_steps", "refreshes", "warm_refreshes"):
        check_count(repr(name), saved.get(name))
    check_number("'residual_drift'", saved.get("residual_drift"), least=0)
    for rung, count in _mapping("'fallbacks'", saved.get("fallbacks")).items():
        check_count(f"'fallbacks', {rung!r}", count)
    for name in ("lengths_wanted", "derivatives"):
        if not isinstance(saved.get(name), bool):
            refuse(repr(name), f"is {saved.get(name)!r}. Allowed: True or False")
    return dict(saved)


def _no_state(state_dict: Mapping[Any, Any], saved: Any) -> str:
    """Describe a dict that has no state of this version."""
    keys = [str(key) for key in state_dict]
    if isinstance(saved, Mapping):
        what = f"is of version {str(saved.get('version'))[:20]} of its format"
    elif {"state", "param_groups"} <= set(keys):
        what = "is another optimizer's: start with a new one, the model's weights suffice"
    else:
        what = f"has the keys {', '.join(keys[:5])[:100] or '(none)'}: pass what this optimizer's state_dict() returned"
    return f"state_dict holds no state of this library, version {VERSION} (key 'ekfac' missing or other); it {what}"


def _check_model(engine: Engine, saved: Mapping[str, Any]) -> None:
    ours, theirs = parameter_shapes(engine), dict(_mapping("'parameters'", saved.get("parameters")))
    if ours != theirs:
        missing = [str(n) for n in theirs if n not in ours]
        extra = [n for n in ours if n not in theirs]
        other = [f"{n} {theirs[n]} here {ours[n]}" for n in ours if n in theirs and theirs[n] != ours[n]]
        raise ValueError(
            "state_dict is of another model. Only in the checkpoint: "
            f"{', '.join(missing) or 'nothing'}; only in this model: {', '.join(extra) or 'nothing'}; "
            f"other shapes: {', '.join(other) or 'none'}"
        )


def _mapping(where: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        refuse(where, f"is {str(value)[:60]!r} of type {type(value).__name__}. Allowed: a dict")
    return value


def prepare(engine: Engine, saved: dict[str, Any], state_of: Mapping[nn.Parameter, Any]) -> Loaded:
    """Check all state and match it with blocks, without changing the optimizer.

    A layer that was frozen when the checkpoint was saved and is trained now gets its state back. The state of one that
    was trained then and is frozen now is put away until it is trained again.

    Args:
        engine: The engine.
        saved: What :func:`check` returned.
        state_of: The state of every parameter.
    """
    names = engine.partition.offered_names()
    if is_blank(saved):
        state_of = {}
    state_of = {p: without_empty(_mapping(f"parameter '{names[p]}'", state)) for p, state in state_of.items()}
    check_complete(saved, state_of)
    listed = saved.get("silent")
    if not isinstance(listed, (list, tuple)) or not all(n in names.values() for n in listed if isinstance(n, str)):
        refuse("'silent'", f"is {listed!r}. Allowed: names of parameters")
    partition = engine.partition
    silent = {p for p, name in names.items() if name in listed}
    now = {identity(b): b for b in partition.blocks_of(partition.offered, silent=silent)}
    found: dict[Identity, tuple[Block, Mapping[str, Any]]] = {}
    momenta: dict[Tensor, dict[str, Any]] = {}
    for p, state in state_of.items():
        if (buffer := state.get("momentum_buffer")) is not None:
            where = f"parameter '{names[p]}', 'momentum_buffer'"
            check_tensor(where, "momentum_buffer", buffer, real_shape(p), state_dtype(p))
            momenta[p] = {"momentum_buffer": buffer}
    for block in _saved_blocks(engine, saved, now, silent):
        own = {n: v for n, v in state_of.get(block.key, {}).items() if n != "momentum_buffer" and v is not None}
        if own:
            found[identity(block)] = block, own
    for place, entry in enumerate(_listed("'put_away'", saved.get("put_away"))):
        block = _block_named(engine, f"'put_away', entry {place}", entry, now)
        away = _mapping(f"'put_away', block '{block.name}'", entry.get("state"))
        found.setdefault(identity(block), (block, without_empty(away)))
    firsts = {block.key for block, _ in found.values()} | (names.keys() - partition.names.keys())
    for p, state in state_of.items():
        if p not in firsts and (more := [str(n) for n, v in state.items() if n != "momentum_buffer" and v is not None]):
            refuse(f"parameter '{names[p]}'", f"has {', '.join(more)}, but no block has it first; {LAYOUT}")
    states, put_away = momenta, dict[Identity, dict[str, Any]]()
    for who, (block, state) in found.items():
        check_state(block, state, {f.name for f in fields(engine.method_of(block).state_class)})
        if who in now:
            states.setdefault(block.key, {}).update(state)
        else:
            put_away[who] = converted({block.key: state})[block.key]
    return Loaded(saved, silent, converted(states), put_away)


def _saved_blocks(
    engine: Engine, saved: Mapping[str, Any], now: Mapping[Identity, Block], silent: set[nn.Parameter]
) -> list[Block]:
    """Return the blocks that were trained when the checkpoint was saved."""
    if "blocks" in saved:
        entries = enumerate(_listed("'blocks'", saved["blocks"]))
        return [_block_named(engine, f"'blocks', entry {place}", entry, now) for place, entry in entries]
    # Older versions did not record it: take today's, and those that would exist if nothing were frozen.
    partition, keys = engine.partition, {block.key for block in now.values()}
    unfrozen = partition.blocks_of(partition.offered, frozen=True, silent=silent)
    return [*now.values(), *(block for block in unfrozen if block.key not in keys)]


def _listed(where: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        refuse(where, f"is of type {type(value).__name__}. Allowed: a list of dicts")
    return value


def _block_named(engine: Engine, where: str, entry: Mapping[str, Any], now: Mapping[Identity, Block]) -> Block:
    """Return the block of these parameters, trained now or frozen."""
    partition = engine.partition
    names = {name: p for p, name in partition.names.items()}
    covered, listed, offered = entry.get("covered"), entry.get("parameters"), set(partition.offered)
    good = isinstance(covered, bool) and isinstance(listed, list) and listed and all(isinstance(n, str) for n in listed)
    if not good or not all(n in names and names[n] in offered for n in listed or ()):
        refuse(where, f"covered={covered!r}, parameters={listed!r} is no block of this model")
    assert isinstance(listed, list) and isinstance(covered, bool)
    key = covered, tuple(names[n] for n in listed)
    block = now.get(key) or partition.block_with(key)
    return block or refuse(where, f"{', '.join(listed)} are no block of this optimizer; {LAYOUT}")


def is_blank(saved: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint is of an optimizer without state; its entries are then only placeholders."""
    return bool(saved.get("entries") == 0 and saved.get("applied_steps") == 0)


def check_complete(saved: Mapping[str, Any], state_of: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse a checkpoint that has fewer entries than were saved."""
    found, count = sum(map(len, state_of.values())), saved.get("entries", 0)
    check_count("'entries'", count)
    if found < count:
        raise ValueError(
            f"state_dict lacks {count - found} of {count} entries of state. torch.distributed.checkpoint.load fills "
            "only existing entries: give it the state of an optimizer that has taken steps, or convert the checkpoint "
            "with torch.distributed.checkpoint.format_utils.dcp_to_torch_save and load that"
        )


def adopt(engine: Engine, loaded: Loaded) -> None:
    """Adopt a checkpoint, except for blocks' states, which :meth:`Partition.take_states` adopts."""
    engine.settle(wait=True)
    partition, refresher, saved = engine.partition, engine.refresher, loaded.saved
    if partition.silent != loaded.silent or not partition.is_current():
        partition.silent = loaded.silent
        engine.collector.set_parameters(partition.offered)
    engine.collector.drop()
    engine.collector.watch.lengths_wanted = saved["lengths_wanted"]
    engine.collector.separate_examples = saved.get("apart", 0)
    partition.put_away = {
        (covered, key): (engine.method if covered else engine.elementwise).state_class(state)
        for (covered, key), state in loaded.put_away.items()
    }
    engine.schedule.applied_steps = saved["applied_steps"]
    engine.schedule.set_derivatives(saved["derivatives"])
    engine.skipped.total = saved["skipped_steps"]
    partition.generation += 1
    engine.schedule.pending = []
    first = engine.options.processes.rank == 0  # only rank 0 continues the counts: checkpoints hold sums over ranks
    refresher.refreshes = saved["refreshes"] if first else 0
    engine.schedule.warm_refreshes = saved["warm_refreshes"] if first else 0
    refresher.drift = torch.tensor(float(saved["residual_drift"]), dtype=torch.float64, device="cpu")
    refresher.fallbacks.clear()
    refresher.fallbacks.update(saved["fallbacks"] if first else {})


def converted(state_of: Mapping[Any, Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """Copy saved state to the parameters' devices, in the dtype of a block's state: float32 under half precision."""

    def value(p: Tensor, name: str, given: Any) -> Any:
        if name in COUNTS:  # older versions stored these as plain numbers
            return torch.as_tensor(given, dtype=torch.float64, device=p.device).detach().clone()
        if not isinstance(given, Tensor):
            return given
        if not given.is_floating_point():
            return given.detach().to(p.device, copy=True)
        return given.detach().to(p.device, state_dtype(p), copy=True)

    return {
        p: {name: value(p, name, given) for name, given in state.items() if given is not None}
        for p, state in state_of.items()
    }
