"""Whole optimizer steps as CUDA graphs.

A step of a small network is hundreds of kernels of a few microseconds each, and the host cannot launch them as fast as
the device runs them. The part that the device does is the same from step to step, so it is recorded once and replayed:
gradients, captured calls and sums that were taken of calls too large to keep are copied to fixed places first, and
numbers that change live in tensors.

A step is recorded when the same one has been run twice; one that differs in anything (a batch of another size, clipped
gradients, a frozen layer, new options in a group) runs as it always does, and is recorded when it repeats.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.optim.cuda.replay import form, recording
from ekfac.optim.cuda.streams import OwnStream
from ekfac.optim.statistics.gradients import largest_magnitudes
from ekfac.optim.statistics.schedule import START
from ekfac.optim.statistics.sums import BlockSums
from ekfac.optim.types import KeptCalls, Rates, StepInputs

if TYPE_CHECKING:
    from ekfac.optim.cuda.executor import CudaExecutor
    from ekfac.optim.engine import Apply, Engine

#: A step is recorded when it has been run this often.
REPEATS = 2
#: At most so many different steps are kept. They share their memory.
LIMIT = 24
#: And so many counted: steps that differ every time, by their damping say, are never recorded.
SEEN = 100


@dataclass
class RecordedStep:
    """A graph, and the places that it reads from and answers to."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    rates: Rates


class StepGraphs:
    """The recorded steps of one optimizer."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._seen: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, RecordedStep] = {}
        self._refused: set[Hashable] = set()
        #: Where inputs of recorded steps lie, which are replayed one after another and share them.
        self._places: dict[Hashable, Tensor] = {}
        self._pool: tuple[int, int] | None = None
        self._generation: Hashable = None
        self._own: OwnStream | None = None
        self.replays = 0

    def step(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> bool:
        """Do the device's part of a step by replaying it; False where it has to be run."""
        applied = engine.schedule.applied_steps
        if applied < 1 or not (is_plain(engine, inputs) and fits_damping(engine, rates)):
            return False
        generation = engine.partition.generation, applied >= START
        if generation != self._generation:
            # The tensors that recorded steps read were replaced, or other kinds of steps follow.
            self.forget()
            self._seen.clear()
            self._refused.clear()
            self._generation = generation
        key = signature(engine, inputs, rates)
        if key in self._refused:
            return False
        recorded = self._recorded.get(key)
        if recorded is None:
            if len(self._seen) > SEEN:
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= REPEATS or len(self._recorded) >= LIMIT:
                return False
            recorded = self._record(engine, inputs, rates, apply)
            if recorded is None:
                self._refused.add(key)
                return False
            self._recorded[key] = recorded
        self._replay(engine, recorded, inputs, rates)
        return True

    def forget(self) -> None:
        """Let go of all recorded steps, never of some: with any graph torch frees what others of its stream work in.

        And of their memory and stream: a pool is not opened again once its graphs are gone or one of them was spoilt.
        """
        if self._recorded:
            torch.cuda.synchronize()
        self._recorded.clear()
        self._places.clear()
        self._pool = self._own = None

    def run(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> None:
        """Do a step without the host: what is recorded."""
        inputs.ok = self._executor.mask.mask(largest_magnitudes(list(inputs.gradients.values())))
        inputs.bad = inputs.ok == 0
        engine.collector.take_calls(inputs)
        apply(inputs, engine.directions(inputs, rates), rates)

    @torch.no_grad()
    def _record(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> RecordedStep | None:
        device, known = engine.partition.device, dict(self._places)
        placed = at_places(inputs, known)
        groups = [
            replace(
                g,
                lr=_scalar(device),
                damping=_scalar(device) if engine.method.damping_is_free else g.damping,
                betas=None if g.betas is None else (_scalar(device), g.betas[1]),
            )
            for g in rates.groups
        ]
        placed_rates = replace(rates, groups=groups)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # A step adds to its sums: the places stay, and what is made of them is the graph's own.
        working = replace(placed, sums=copied(placed))
        try:
            if self._pool is None or self._own is None:
                self._pool, self._own = torch.cuda.graph_pool_handle(), OwnStream(device)
            with (
                self._executor.recording(device),
                recording(graph, pool=self._pool, stream=self._own.stream),
            ):
                self.run(engine, working, placed_rates, apply)
            self._places, placed.ok = known, working.ok
            return RecordedStep(graph, placed, placed_rates)
        except Exception as error:  # whatever it is, the step can do without
            warnings.warn(f"cuda_graphs: this step cannot be recorded and runs without: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            self.forget()
            return None

    @torch.no_grad()
    def _replay(self, engine: Engine, recorded: RecordedStep, inputs: StepInputs, rates: Rates) -> None:
        for places, tensors in zip(tensors_of(recorded.inputs), tensors_of(inputs), strict=True):
            if tensors:
                torch._foreach_copy_(places, tensors)
        for place, now in zip(recorded.rates.groups, rates.groups, strict=True):
            _fill(place.lr, now.lr)
            _fill(place.damping, now.damping)
            if place.betas is not None and now.betas is not None:
                _fill(place.betas[0], now.betas[0])
        recorded.graph.replay()
        assert recorded.inputs.ok is not None
        self._executor.mask.expect(recorded.inputs.ok)
        self.replays += 1


def is_plain(engine: Engine, inputs: StepInputs) -> bool:
    """Tell whether a step has nothing that only the host can do, so that a graph may hold it.

    All parameters have gradients as backward left them, no basis is renewed, and no layer waits to be verified.
    """
    collector, partition = engine.collector, engine.partition
    return (
        not collector.separate
        and all(s.fingerprint is None and not s.held for s in inputs.sums.values())
        and not (inputs.solves or inputs.warm)
        and not any(b in collector.fingerprints.unverified for b in partition.covered)
        and all(p in inputs.gradients for p in partition.parameters)
        and not any(map(collector.watch.touched, partition.parameters))
        and all(b in collector.capture.fired for b in partition.covered)
    )


def fits_damping(engine: Engine, rates: Rates) -> bool:
    """Tell whether inverses, where there are any, were made for the damping that stands in the groups now."""
    if engine.method.damping_is_free:
        return True
    states = engine.partition.states
    return all(states[b.key].inverted_at == rates.of(b.key).damping for b in engine.partition.covered)


def signature(engine: Engine, inputs: StepInputs, rates: Rates) -> Hashable:
    """Return all that a recorded step has built into it."""
    free = engine.method.damping_is_free
    groups = tuple((None if free else g.damping, g.l2, g.maximize) for g in rates.groups)
    calls = tuple(
        (block.name, n, engine.schedule.takes_factors(block), *((c.layer.mode, form(c.x), form(c.d)) for c in calls))
        for block, kept in inputs.calls.items()
        for calls, n in kept
    )
    sums = tuple(
        (block.name, s.factors and s.factors.terms, s.scaling is None, *map(form, s.tensors()))
        for block, s in inputs.sums.items()
    )
    places = tuple((p.data_ptr(), g.stride()) for p, g in inputs.gradients.items())
    return inputs.n, groups, rates.fixed, calls, sums, places


def tensors_of(inputs: StepInputs) -> tuple[list[Tensor], ...]:
    """Gradients, what was captured of calls, and sums."""
    calls = [t for kept in inputs.calls.values() for cs, _ in kept for c in cs for t in (c.x, c.d)]
    return list(inputs.gradients.values()), calls, [t for sums in inputs.sums.values() for t in sums.tensors()]


def at_places(inputs: StepInputs, known: dict[Hashable, Tensor]) -> StepInputs:
    """Return the same inputs with their tensors at fixed places; new ones are added to those that are known."""
    gradients, calls, sums = (
        iter([_place(known, (kind, i, form(t)), t) for i, t in enumerate(tensors)])
        for kind, tensors in enumerate(tensors_of(inputs))
    )
    kept: dict[Block, KeptCalls] = {
        block: [([Call(c.layer, next(calls), next(calls)) for c in cs], n) for cs, n in kept]
        for block, kept in inputs.calls.items()
    }
    return StepInputs(
        {p: next(gradients) for p in inputs.gradients},
        kept,
        {block: gathered.at(sums) for block, gathered in inputs.sums.items()},
        inputs.n,
        inputs.n_statistics,
        warm=inputs.warm,
        mean=inputs.mean,
    )


def copied(inputs: StepInputs) -> dict[Block, BlockSums]:
    """Return the sums, with the same tensors."""
    return {block: sums.at(iter(sums.tensors())) for block, sums in inputs.sums.items()}


def _place(known: dict[Hashable, Tensor], key: Hashable, like: Tensor) -> Tensor:
    """Return the place that is known by a key, or a new one."""
    if key not in known:
        known[key] = torch.empty_like(like)
    return known[key]


def _scalar(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _fill(place: float | Tensor, value: float | Tensor) -> None:
    if isinstance(place, Tensor) and isinstance(value, Tensor) and value.is_cuda:
        place.copy_(value.reshape(()))  # to read it here would make the host wait
    elif isinstance(place, Tensor):
        place.fill_(float(value))
