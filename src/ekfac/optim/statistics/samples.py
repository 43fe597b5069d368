"""The part of a batch that A and B are computed from: summed at once, or kept until the step."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ekfac.curvature import factors, statistics
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.base import Call
from ekfac.curvature.layers.derivative import DerivativeLayer
from ekfac.curvature.layers.linear import LinearLayer
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.executor import Executor
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.sums import BlockSums


@dataclass(frozen=True, eq=False)
class Sample:
    """The part of a batch that a block's factors are computed from.

    Attributes:
        calls: The calls, restricted to some of the examples or with all of them.
        n: The number of these examples.
        scale_B: The factor for B that makes up for the examples left out.
        step: The stride: every ``step``-th example is used.
        placed: Whether its tensors are in static buffers.
    """

    calls: tuple[Call, ...]
    n: int
    scale_B: float = 1.0
    step: int = 1
    placed: bool = False

    @functools.cached_property
    def key(self) -> Hashable:
        """Everything that the sums depend on besides the tensors."""
        return self.n, self.scale_B, *((c.layer, c.layer.mode) for c in self.calls)

    @functools.cached_property
    def at_place(self) -> Hashable:
        """The same, including the tensors' addresses: for graphs that read them in place."""
        return self.key, *((t.data_ptr(), t.shape) for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return inputs and output gradients of the calls."""
        return [t for call in self.calls for t in (call.x, call.d)]

    def at(self, tensors: Sequence[Tensor], placed: bool = False) -> Sample:
        """Return a copy with other :meth:`tensors`."""
        calls = (Call(c.layer, *tensors[2 * i : 2 * i + 2]) for i, c in enumerate(self.calls))
        return Sample(tuple(calls), self.n, self.scale_B, self.step, placed)


def sample_of(options: EngineOptions, block: Block, calls: Sequence[Call], n: int) -> Sample:
    """Return the part of a batch that a block's factors need; note whether the loss has derivatives of the network."""
    if len(calls) > 1 and not block.layer.differentiated:
        block.layer.differentiated = any(isinstance(call.layer, DerivativeLayer) for call in calls)
    if options.coverage.sharing != "expand" or block.layer.scattered or not rounds(options, block):
        return Sample(tuple(calls), n)
    if len(calls) == 1 and (thin := calls[0].layer.thinned(calls[0].x, calls[0].d, n)) is not None:
        step, call = thin
        return Sample((call,), len(call.d), n / len(call.d), step)
    step = statistics.stride(block, calls, n)
    if step == 1:
        return Sample(tuple(calls), n)
    some = tuple(Call(c.layer, c.x[::step], c.d[::step]) for c in calls)
    return Sample(some, len(some[0].d), len(calls[0].d) / len(some[0].d), step)


def rounds(options: EngineOptions, block: Block) -> bool:
    """Return whether a block's statistics may be of part of a batch, and of inputs in autocast's dtype."""
    return not options.refresh.deterministic and block.dtype == torch.float32


def factor_sums(options: EngineOptions, block: Block, sample: Sample) -> FactorSums:
    """Sum A and B over a sample."""
    sharing, limit = options.coverage.sharing, options.numerics.memory_limit
    sums = statistics.factor_sums(block, sample.calls, sample.n, sharing, limit, half=rounds(options, block))
    if sample.scale_B != 1:
        sums.B.mul_(sample.scale_B)
    return sums


def factor_sums_by(
    executor: Executor,
    options: EngineOptions,
    block: Block,
    calls: Sequence[Call],
    n: int,
    replay: bool = True,
    first: bool = False,
) -> FactorSums:
    """Sum A and B over a batch.

    Args:
        executor: Runs the computation.
        options: The engine's options.
        block: The block.
        calls: Its calls.
        n: The number of examples.
        replay: Whether a recorded graph may be replayed.
        first: Whether the batch is for the first step, which counts the inputs that are not zero.
    """
    sample = sample_of(options, block, calls, n)
    if first and type(block.layer) is LinearLayer:
        block.layer.nonzero = count_nonzero(sample)
    if not (replay and executor.can_replay) or block.layer.scattered:
        if options.refresh.deterministic:
            return factor_sums(options, block, sample)
        with executor.fast_products(multiplications(block, sample)):
            return factor_sums(options, block, sample)

    def taken(*tensors: Tensor) -> tuple[Any, ...]:
        sums = factor_sums(options, block, sample.at(tensors))
        return sums.A, sums.terms, sums.B

    return FactorSums(*executor.call("taking statistics", (block, sample.key), taken, *sample.tensors()))


def count_nonzero(sample: Sample) -> Tensor | None:
    """Count the inputs that are not zero, and the rows that have any: rows of padding say nothing about others.

    Nor do products in derivatives of the network: that of one input has one column that is not zero.
    """
    inputs = [call.x for call in sample.calls if not isinstance(call.layer, DerivativeLayer)]
    if not inputs:
        return None
    rows = torch.cat([x.count_nonzero(-1).flatten() for x in inputs])
    return torch.stack([rows.sum(), rows.count_nonzero()])


def scaling_sum_by(
    executor: Executor, options: EngineOptions, block: Block, calls: Sequence[Call], n: int, basis: Basis
) -> Tensor:
    """Sum the squared gradients of n examples in a basis, by replaying a graph if possible."""
    sample, memory = Sample(tuple(calls), n), options.numerics.memory_limit
    if not executor.can_replay or block.layer.scattered:
        return statistics.scaling_sum(block, calls, n, basis, memory)

    def taken(*tensors: Tensor) -> tuple[Any, ...]:
        return (statistics.scaling_sum(block, sample.at(tensors).calls, n, basis, memory),)

    fixed = [U for U in (basis.U_A, basis.U_B) if U is not None]
    (found,) = executor.call("taking statistics", (block, "s", sample.key), taken, *sample.tensors(), fixed=fixed)
    return cast(Tensor, found)


class Budget:
    """A budget in bytes for calls that are kept until the step.

    Args:
        limit: The budget.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def reserve(self, block: Block, calls: Sequence[Call]) -> bool:
        """Reserve room for calls of a block; return False if it is used up or the calls cannot be replayed."""
        if block.layer.scattered or not all(c.layer in block.uses.values() for c in calls):
            return False
        size = sum(t.numel() * t.element_size() for c in calls for t in (c.x, c.d))
        if self.taken + size > self.limit:
            return False
        self.taken += size
        return True


def multiplications(block: Block, sample: Sample) -> int:
    """Count the multiplications in a sample's A and B."""
    positions = sum(c.layer.positions_per_example(c.d, sample.n) for c in sample.calls) * sample.n
    return positions * (block.shape.inputs**2 + block.shape.out**2)


def kept_sample(
    executor: Executor, options: EngineOptions, block: Block, calls: Sequence[Call], n: int, index: int
) -> Sample:
    """Copy a sample so that it lasts until the step, into a static buffer if there is room.

    ``index`` is its number among the block's samples of this step.
    """
    key: Any = block, index, n
    for c in calls:
        x, d = c.x, c.d
        key += c.layer, c.layer.mode, x.shape, x.stride(), x.dtype, d.shape, d.stride(), d.dtype
    kept: Sample | None = executor.static_samples.get(key)
    if kept is not None:  # same shapes as before: overwrite the values
        if not calls[0].layer.splittable:
            calls = sample_of(options, block, calls, n).calls
            torch._foreach_copy_(kept.tensors(), [t for c in calls for t in (c.x, c.d)])
            return kept
        for to, call in zip(kept.calls, calls, strict=True):
            to.x.copy_(call.x if kept.step == 1 else call.x[:: kept.step])
            to.d.copy_(call.d if kept.step == 1 else call.d[:: kept.step])
        return kept
    sample = sample_of(options, block, calls, n)
    tensors = sample.tensors()
    half = rounds(options, block) and statistics.takes_half(calls)  # keep inputs in autocast's dtype
    dtypes = [calls[0].d.dtype if half else t.dtype for t in tensors]
    places = executor.static_buffers_for(tensors, dtypes)
    if places is None:
        whole = not all(c.layer.splittable for c in sample.calls)  # too large to copy, and not shared with others
        copies = (t if whole else t.to(dtype, copy=True) for t, dtype in zip(tensors, dtypes, strict=True))
        return sample.at(list(copies))
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    executor.static_samples[key] = sample = sample.at(places, placed=True)
    return sample


@dataclass(frozen=True)
class SampleGroup:
    """Samples of several like blocks, to be summed at once; or all samples of a single block."""

    blocks: tuple[Block, ...]
    samples: tuple[Sequence[Sample], ...]

    @property
    def multiplications(self) -> int:
        """The multiplications in the largest matrix product of one block."""
        return self.blocks[0].multiplications


def group_samples(options: EngineOptions, samples: Mapping[Block, Sequence[Sample]]) -> list[SampleGroup]:
    """Group linear layers of one shape with inputs of one shape, if all positions count equally."""
    expands = options.coverage.sharing == "expand"
    found: dict[Hashable, list[Block]] = {}
    for block, kept in samples.items():
        (first, *others), layer = kept, block.layer
        single = not others and len(first.calls) == 1 and first.calls[0].layer is layer and layer.reads_whole_inputs
        x, d = first.calls[0].x, first.calls[0].d
        form = block.form, type(layer), first.n, first.scale_B, x.shape, x.dtype, d.shape, d.dtype
        found.setdefault(form if expands and single and not block.diagonal_A else block, []).append(block)
    return [SampleGroup(tuple(blocks), tuple(samples[b] for b in blocks)) for blocks in found.values()]


def sums_of_samples(
    executor: Executor, options: EngineOptions, samples: Mapping[Block, Sequence[Sample]]
) -> dict[Block, BlockSums]:
    """Return the sums over samples that were kept."""

    def taken(of: SampleGroup) -> list[BlockSums]:
        if len(of.blocks) > 1:
            calls = [sample.calls[0] for (sample,) in of.samples]
            ((first, *_), *_) = of.samples
            half = rounds(options, of.blocks[0]) and calls[0].d.dtype in factors.HALF
            return [
                BlockSums(sums) for sums in statistics.batched_factor_sums(of.blocks[0], calls, first.scale_B, half)
            ]
        sums = BlockSums()
        for sample in of.samples[0]:
            sums.add_factors(factor_sums(options, of.blocks[0], sample))
        return [sums]

    groups = group_samples(options, {block: kept for block, kept in samples.items() if kept})
    found = executor.parallel(taken, groups) if groups else []
    return {b: one for of, sums in zip(groups, found, strict=True) for b, one in zip(of.blocks, sums, strict=True)}
