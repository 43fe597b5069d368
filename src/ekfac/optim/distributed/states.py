"""Gathers the state of all owners, and keeps each process's part of it: checkpoints do not depend on ownership."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ekfac.optim.statistics.partition import Identity, identity
from ekfac.optim.types import BlockState

if TYPE_CHECKING:
    from ekfac.optim.engine import Engine

#: Fields that all processes keep of every block, as the schedule depends on them.
SCHEDULED = ("strayed", "near")
#: Fields that they also keep if they compute s* of their own examples.
BASES = ("U_A", "U_B", "S_A", "S_B")

#: Prefix of fallbacks among the counters.
SOLVER = "solver_"


class States(defaultdict[Tensor, Any]):
    """``optimizer.state`` of this process, by parameter.

    For a parameter that another process owns, it returns the names of the state's fields, each with None, because
    torch.distributed.checkpoint unflattens a state dict by the names in ``optimizer.state[parameter]``.
    """

    def __init__(self) -> None:
        super().__init__(dict)
        self._engine: Callable[[], Engine | None] = lambda: None

    def follow(self, engine: Engine) -> None:
        """Look up owners in this engine."""
        self._engine = weakref.ref(engine)

    def __getitem__(self, parameter: Tensor) -> Any:
        engine = self._engine()
        if engine is None or engine.partition.owners.size == 1:
            return super().__getitem__(parameter)
        partition, rank = engine.partition, engine.options.processes.rank
        for block in partition.blocks if partition.owners.of_parameter(parameter) != rank else ():  # type: ignore[arg-type]
            if any(parameter is p for p in block.parameters.values()):
                return dict.fromkeys(field.name for field in fields(engine.method_of(block).state_class))
        return super().__getitem__(parameter)

    def __bool__(self) -> bool:
        return any(map(len, self.values()))  # a block's state may exist but be empty

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())


@dataclass(frozen=True)
class WholeState:
    """The complete state, as a single process would have it.

    Attributes:
        states: The state by parameter.
        put_away: The state of frozen blocks.
        counters: Counts of refreshes and solver fallbacks.
        drift: The largest drift of a basis.
        lengths_wanted: Whether gradients are changed between backward and step.
    """

    states: dict[nn.Parameter, dict[str, Any]]
    put_away: dict[Identity, dict[str, Any]]
    counters: Counter[str]
    drift: float
    lengths_wanted: bool


def whole_state(engine: Engine) -> WholeState:
    """Gather the state of all owners on every process; all processes must call this."""
    engine.options.processes.meet("state_dict()")
    engine.settle(wait=True)
    engine.replicas.together()
    partition, owners, processes = engine.partition, engine.partition.owners, engine.options.processes
    refresher, watch = engine.refresher, engine.collector.watch
    names = partition.offered_names()
    places: dict[Any, Any] = {("", (p,)): partition.states.get(p) for p in partition.offered}
    places |= {(covered, key): state for (covered, key), state in partition.put_away.items()}
    mine = {
        place: {} if state is None else dict(state)
        for place, state in places.items()
        if owners.size == 1 or owners.of_parameter(place[1][0]) == processes.rank
    }
    counters = Counter({"refreshes": refresher.refreshes, "warm_refreshes": engine.schedule.warm_refreshes})
    counters.update({SOLVER + rung: n for rung, n in refresher.fallbacks.items()})
    drift = 0.0 if refresher.drift is None else float(refresher.drift)
    if processes.size == 1:
        found = mine
    else:
        described = {_named(names, place): _without_tensors(state) for place, state in mine.items()}
        everyone = processes.gather((described, dict(counters), drift, watch.lengths_wanted))
        counters = sum((Counter(c) for _, c, _, _ in everyone), Counter())
        drift = max(d for _, _, d, _ in everyone)
        found, tensors = {}, dict[int, list[Tensor]]()
        for rank, (theirs, _, _, _) in enumerate(everyone):
            for place in places:
                if (name := _named(names, place)) in theirs:
                    found[place] = mine[place] if rank == processes.rank else _allocated(theirs[name], place[1][0])
                    tensors.setdefault(rank, []).extend(t for t in found[place].values() if isinstance(t, Tensor))
        processes.broadcast(tensors)
        watch.lengths_wanted = any(wanted for _, _, _, wanted in everyone)
    return WholeState(
        {place[1][0]: found[place] for place in places if place[0] == "" and found.get(place)},
        {place: found[place] for place in places if place[0] != "" and place in found},
        counters,
        drift,
        watch.lengths_wanted,
    )


def keep_own(engine: Engine) -> None:
    """Drop state that other processes own, after this one got the complete state, for example from a checkpoint."""
    partition, owners = engine.partition, engine.partition.owners
    partition.factors_elsewhere.clear()
    partition.ready_elsewhere.clear()
    if not engine.replicas.together():
        return
    kept = (*SCHEDULED, *BASES) if engine.method.needs_examples else SCHEDULED
    blocks = {block.key: block for block in partition.blocks}
    for p in partition.offered:
        if owners.of_parameter(p) == engine.options.processes.rank:
            make_contiguous(partition.states.get(p, {}))
            continue
        if p in blocks:
            block = blocks[p]
            state = partition.state(block)
            ready = block.covered and hasattr(state, engine.method.derived)
            partition.note_elsewhere(identity(block), factors="A" in state, ready=ready)
            partition.states[p] = type(state)({name: state[name] for name in kept if name in state})
        else:
            partition.states.pop(p, None)
    for (covered, key), state in list(partition.put_away.items()):
        if owners.of_parameter(key[0]) != engine.options.processes.rank:
            ready = covered and hasattr(state, engine.method.derived)
            partition.note_elsewhere((covered, key), factors="A" in state, ready=ready)
            partition.put_away[covered, key] = type(state)({name: state[name] for name in kept if name in state})


def make_contiguous(state: MutableMapping[str, Any]) -> None:
    """Make a block's tensors contiguous: torch.distributed.checkpoint corrupts others when it broadcasts them."""
    for name, value in list(state.items()):
        if isinstance(value, Tensor) and not value.is_contiguous():
            state[name] = value.contiguous()


def block_states(engine: Engine) -> dict[nn.Parameter, BlockState]:
    """Return the state of every block, by its first parameter; gathered if several processes share the blocks."""
    if not engine.replicas.together():
        states: Any = engine.partition.states
    else:
        states = whole_state(engine).states
    return {b.key: engine.method_of(b).state_class(states.get(b.key)) for b in engine.partition.blocks}


def _named(names: Mapping[nn.Parameter, str], place: tuple[Any, tuple[nn.Parameter, ...]]) -> tuple[Any, ...]:
    return place[0], tuple(names[p] for p in place[1])


def _without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    # With strides, because the rounding of products depends on them.
    return {
        n: (tuple(v.shape), torch.empty_like(v, device="meta").stride(), v.dtype) if isinstance(v, Tensor) else v
        for n, v in state.items()
    }


def _allocated(described: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    return {
        name: torch.empty_strided(*value[:2], dtype=value[2], device=like.device) if isinstance(value, tuple) else value
        for name, value in described.items()
    }
