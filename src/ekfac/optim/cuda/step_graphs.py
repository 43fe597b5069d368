"""The second half of a step, from gradients to new parameters, as a CUDA graph.

It launches hundreds of kernels of a few microseconds each, faster than the host can launch them. They are the same from
step to step, so they are recorded once and replayed. Gradients, and captured calls if a rule needs per-example
gradients, are first copied to static buffers; numbers that change are stored in tensors. The graph also updates A and B
if the captured tensors that this takes are small enough to be kept until the step. Updates of bases are not part of it.

A step that differs in what a graph has baked in (a frozen layer, new options in a group) has another :func:`signature`.
One whose gradients were clipped runs eagerly if the rule undoes that for s. The states of a signature:

    counted     It runs eagerly, until it has done so REPEATS times; then it is recorded.
    recorded    It is replayed.
    refused     Its recording failed: it runs eagerly.

All are forgotten when the partition has a new generation, because its tensors were replaced. A failed recording makes
the recorded ones counted again, because all share one pool. While one is recorded (``executor.records``), the parts of
the step run on parallel streams, what has graphs of its own is recorded with the rest, and the update's table of
pointers is not filled yet.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.optim.cuda.replay import form, recording
from ekfac.optim.cuda.streams import OwnStream
from ekfac.optim.cuda.update import Table
from ekfac.optim.statistics.gradients import largest_magnitudes
from ekfac.optim.statistics.samples import sums_of_samples
from ekfac.optim.statistics.sums import BlockSums
from ekfac.optim.types import ADDRESS, KeptCalls, Rates, StepInputs

if TYPE_CHECKING:
    from ekfac.optim.cuda.executor import CudaExecutor
    from ekfac.optim.engine import Apply, Engine

#: A step is recorded after it has run this many times.
REPEATS = 2
#: The largest number of recorded steps. They share their memory.
LIMIT = 24
#: The most entries of already summed factors that are copied for a replay.
MOST = 2**24
#: The most signatures counted: steps that differ every time, for example in their damping, are never recorded.
SEEN = 100


@dataclass
class RecordedStep:
    """A graph with its static inputs."""

    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    numbers: Tensor
    table: Table
    #: Whether it leaves the average in the parameters.
    shows: bool


class StepGraphs:
    """The recorded steps of one optimizer."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._seen: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, RecordedStep] = {}
        self._refused: set[Hashable] = set()
        #: Static buffers for the inputs of recorded steps, which share them, as they are replayed one at a time.
        self._places: dict[Hashable, Tensor] = {}
        self._pool: tuple[int, int] | None = None
        self._generation = -1
        self._own: OwnStream | None = None
        self.replays = 0

    def step(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> bool:
        """Precondition and update by replaying a recorded step; return False if the step has to run eagerly."""
        if engine.schedule.applied_steps < 1 or not (is_plain(engine, inputs) and fits_damping(engine, rates)):
            return False
        if engine.partition.generation != self._generation:
            # Tensors that recorded steps refer to were replaced.
            self.forget()
            self._executor.free_static_buffers()
            self._seen.clear()
            self._refused.clear()
            self._generation = engine.partition.generation
        key = signature(engine, inputs, rates)
        recorded = self._recorded.get(key)
        if recorded is None:
            if key in self._refused:
                return False
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
        self._replay(recorded, inputs, rates)
        return True

    def forget(self) -> None:
        """Drop all recorded steps, with their memory pool and stream.

        Never only some: destroying a graph frees the cuBLAS workspace of its stream, which the others use. And a pool
        cannot be reused once its graphs are gone or a recording in it has failed.
        """
        if self._recorded:
            torch.cuda.synchronize()
        self._recorded.clear()
        self._places.clear()
        self._pool = self._own = None

    def run(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> None:
        """Run the second half of a step; this is what a graph records."""
        inputs.ok = self._executor.mask.mask(largest_magnitudes(list(inputs.gradients.values())))
        inputs.bad = inputs.ok == 0
        inputs.sums = {block: replace(of) for block, of in inputs.sums.items()}  # what follows changes these
        if inputs.calls:
            engine.collector.sum_kept_calls(inputs)
        sums = {**inputs.sums, **sums_of_samples(self._executor, engine.options, inputs.samples)}
        if any(of.factors for of in sums.values()):
            engine.update_factors(inputs, sums)
        apply(inputs, engine.precondition(engine.partition.blocks, inputs, rates), rates)  # all blocks have gradients

    @torch.no_grad()
    def _record(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> RecordedStep | None:
        device, known = engine.partition.device, dict(self._places)
        numbers = torch.zeros(len(numbers_of(inputs, rates)), dtype=torch.float64, device=device)
        free = engine.method.damping_is_free
        placed, placed_rates = at_places(inputs, rates, known, iter(numbers.unbind()), free)
        table = self._executor.table = Table(len(inputs.gradients), device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            if self._pool is None or self._own is None:
                self._pool, self._own = torch.cuda.graph_pool_handle(), OwnStream(device)
            with (
                self._executor.streams.opened(device),
                recording(graph, pool=self._pool, stream=self._own.stream),
            ):
                working, self._executor.average_shown = replace(placed), False
                self.run(engine, working, placed_rates, apply)
            self._places, placed.ok = known, working.ok
            table.fill()
            return RecordedStep(graph, placed, numbers, table, self._executor.average_shown)
        except Exception as error:  # any failure falls back to running eagerly
            warnings.warn(f"cuda_graphs: this step cannot be recorded and runs eagerly: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            self.forget()
            self._executor.average_shown = False
            return None

    @torch.no_grad()
    def _replay(self, recorded: RecordedStep, inputs: StepInputs, rates: Rates) -> None:
        torch._foreach_copy_(list(tensors_of(recorded.inputs)), list(tensors_of(inputs)))
        values = numbers_of(inputs, rates)
        known = torch.tensor([0.0 if isinstance(v, Tensor) else v for v in values], dtype=torch.float64)
        recorded.numbers.copy_(known, non_blocking=True)
        for i, value in enumerate(values):
            if isinstance(value, Tensor):
                recorded.numbers[i].copy_(value.reshape(()))  # reading it would synchronise
        recorded.graph.replay()
        assert recorded.inputs.ok is not None
        self._executor.mask.expect(recorded.inputs.ok)
        self._executor.average_shown = recorded.shows
        self.replays += 1


def is_plain(engine: Engine, inputs: StepInputs) -> bool:
    """Return whether a step can be recorded, because nothing in it needs the host.

    All parameters have gradients, unchanged since backward if the rule undoes changes, and no layer has yet to be
    verified or needs a new basis.
    """
    collector, partition = engine.collector, engine.partition
    return (
        not collector.separate
        and (engine.method.squares_all or not collector.watch.any_touched())
        and not any(map(collector.may_use_rows, inputs.calls))
        and all(s.fingerprint is None and not s.held for s in inputs.sums.values())
        and all(s.placed for kept in inputs.samples.values() for s in kept)
        and all(hasattr(partition.states.get(b.key), "A") for b in (*inputs.samples, *inputs.calls, *inputs.sums))
        and len(inputs.blocks) in (0, len(partition.blocks))  # none yet (see Collector.collect), or all
        and sum(t.numel() for s in inputs.sums.values() if s.factors for t in s.tensors()) <= MOST
        and partition.covered.keys().isdisjoint(collector.fingerprints.unverified)
        and len(inputs.gradients) == len(partition.parameters)
        and partition.covered.keys() <= collector.capture.fired
    )


def fits_damping(engine: Engine, rates: Rates) -> bool:
    """Return whether inverses, if any, were computed for the groups' current damping."""
    if engine.method.damping_is_free:
        return True
    states = engine.partition.states
    return all(states[b.key].inverted_at == rates.of(b.key).damping for b in engine.partition.covered)


def signature(engine: Engine, inputs: StepInputs, rates: Rates) -> Hashable:
    """Return everything that a recorded step has baked in."""
    free = engine.method.damping_is_free
    groups = tuple((None if free else g.damping, g.l2, g.maximize) for g in rates.groups)
    taken = [(block, s, s.tensors()) for block, s in inputs.sums.items()]
    sums = tuple((block, _terms(s), s.scaling is None, *map(form, tensors)) for block, s, tensors in taken if tensors)
    places = tuple(map(ADDRESS, inputs.gradients)), *[(g.stride(), g.dtype) for g in inputs.gradients.values()]
    samples = tuple((block, *(s.at_place for s in kept)) for block, kept in inputs.samples.items())
    calls = tuple(
        (block, n, engine.schedule.takes_factors(block), *((c.layer, c.layer.mode, form(c.x), form(c.d)) for c in kept))
        for block, batches in inputs.calls.items()
        for kept, n in batches
    )
    return groups, rates.fixed, sums, calls, places, inputs.mean == 1.0, samples


def _terms(sums: BlockSums) -> Hashable:
    """Return the number of terms in A if the host knows it; None if there is no A."""
    factors = sums.factors
    return None if factors is None else "on the device" if isinstance(factors.terms, Tensor) else factors.terms


def tensors_of(inputs: StepInputs) -> Iterator[Tensor]:
    """Return the tensors of a step's inputs: gradients, calls and sums."""
    yield from inputs.gradients.values()
    yield from (t for kept in inputs.calls.values() for calls, _ in kept for c in calls for t in (c.x, c.d))
    for s in inputs.sums.values():
        yield from s.tensors()
        if s.factors is not None and isinstance(s.factors.terms, Tensor):
            yield s.factors.terms


def numbers_of(inputs: StepInputs, rates: Rates) -> list[float | Tensor]:
    """Return the numbers that change from step to step, in a fixed order."""
    found = [inputs.n, inputs.n_statistics, inputs.mean, rates.average_weight]
    for group in rates.groups:
        found += [group.lr, group.damping, 0.0 if group.betas is None else group.betas[0]]
    return found


def at_places(
    inputs: StepInputs, rates: Rates, known: dict[Hashable, Tensor], numbers: Iterator[Tensor], damping_is_free: bool
) -> tuple[StepInputs, Rates]:
    """Return inputs and rates with static buffers in place of their tensors and numbers.

    Args:
        inputs: The inputs.
        rates: The rates.
        known: The existing buffers; new ones are added.
        numbers: Buffers for :func:`numbers_of`.
        damping_is_free: Whether damping may change between replays.
    """
    places = iter([_place(known, (i, form(t)), t) for i, t in enumerate(tensors_of(inputs))])
    gradients = {p: next(places) for p in inputs.gradients}
    calls: dict[Block, KeptCalls] = {
        block: [([Call(c.layer, next(places), next(places)) for c in kept], n) for kept, n in batches]
        for block, batches in inputs.calls.items()
    }
    sums = {block: s.at(places) for block, s in inputs.sums.items()}
    n, n_statistics, mean, average_weight = (next(numbers) for _ in range(4))
    placed = StepInputs(gradients, calls, sums, n, n_statistics, mean=1.0 if inputs.mean == 1.0 else mean)
    placed.samples, placed.weights = inputs.samples, inputs.weights  # already in static buffers
    groups = []
    for group in rates.groups:
        lr, damping, beta = next(numbers), next(numbers), next(numbers)
        betas = None if group.betas is None else (beta, group.betas[1])
        groups.append(replace(group, lr=lr, damping=damping if damping_is_free else group.damping, betas=betas))
    return placed, replace(rates, groups=groups, average_weight=average_weight)


def _place(known: dict[Hashable, Tensor], key: Hashable, like: Tensor) -> Tensor:
    """Return the buffer of a key; allocate it if it is new."""
    if key not in known:
        known[key] = torch.empty_like(like)
    return known[key]
