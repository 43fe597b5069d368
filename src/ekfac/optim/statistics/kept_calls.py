"""How a step uses the calls that were kept for it: as rows in place of a gradient, and for s*."""

from __future__ import annotations

from torch import Tensor

from ekfac.curvature import statistics
from ekfac.curvature.blocks import Block
from ekfac.optim.statistics.collector import Collector
from ekfac.optim.statistics.factored_gradient import Rows, rows_of
from ekfac.optim.statistics.sums import BlockSums
from ekfac.optim.types import BlockStep, Rates, StepInputs, as_scalar


def rows_in_place(collector: Collector, block: Block, inputs: StepInputs, rates: Rates) -> Rows | None:
    """Return the captured h and delta in place of ``.grad``, if ``.grad`` is certain to be their product.

    It must be unchanged since backward, come from this one backward pass, and have the rows' fingerprint. A scaler
    rules this out: it changes ``.grad`` without bumping its version, and a fingerprint that is near zero by chance
    would not show that the rows are larger by its scale.
    """
    scaler = collector.options.grad_scaler
    if scaler is not None and scaler.is_enabled():
        return None
    kept = inputs.calls[block]
    if len(kept) > 1 or not collector.may_use_rows(block) or not collector.watch.single_pass:
        return None
    parameters = list(block.parameters.values())
    if any(p not in inputs.gradients or collector.watch.touched(p) for p in parameters):
        return None
    if any(rates.of(p).maximize or rates.of(p).l2 for p in parameters):
        return None
    (call,), n = kept[0]
    rows = rows_of(block, call, n)
    return rows if collector.fingerprints.agree(block, rows, [inputs.gradients[p] for p in parameters]) else None


def compute_scalings(collector: Collector, block: Block, inputs: StepInputs, step: BlockStep) -> Tensor | None:
    """Run ComputeScalings of Algorithm 1: s* of this step's examples, in the current basis."""
    sums = inputs.sums.setdefault(block, BlockSums())
    if sums.held:
        assert step.basis is not None
        if isinstance(step.gradient, Rows) and step.gradient.one_each:
            sums.add_scaling(step.gradient.scaling_sum(step.basis))
        else:
            memory = collector.options.numerics.memory_limit
            for calls, count in sums.held:
                sums.add_scaling(statistics.scaling_sum(block, calls, count, step.basis, memory))
        sums.held = []
    if sums.scaling is None:
        return None
    return inputs.masked(sums.scaling * as_scalar(collector.delta_square(inputs), sums.scaling))
