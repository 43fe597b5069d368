"""Collects the covered blocks' statistics from the backward passes since the last step.

Statistics are computed as soon as a layer's calls are complete, so that the calls can be freed; if the step itself can
make better use of the calls, they are kept for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature import fingerprint
from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.capture import Capture
from ekfac.curvature.layers.base import Call
from ekfac.optim.distributed.overlap import Overlap
from ekfac.optim.executor import Executor
from ekfac.optim.methods.base import Method
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics import takeover
from ekfac.optim.statistics.factored_gradient import may_use_rows, rows_are_cheaper
from ekfac.optim.statistics.fingerprints import Fingerprints
from ekfac.optim.statistics.first_step import warn_in_first_step
from ekfac.optim.statistics.gradients import GradientWatch, made_real
from ekfac.optim.statistics.partition import Partition, identity, only
from ekfac.optim.statistics.reach import Reach
from ekfac.optim.statistics.refused import refuse_sparse, refuse_unless_empty, refuse_unreached
from ekfac.optim.statistics.samples import (
    Budget,
    Sample,
    factor_sums_by,
    kept_sample,
    rounds,
    scaling_sum_by,
    sums_of_samples,
)
from ekfac.optim.statistics.schedule import Schedule
from ekfac.optim.statistics.sums import BlockSums
from ekfac.optim.types import KeptCalls, StepInputs


class Collector:
    """Gathers what a step will need.

    Args:
        options: Checked options.
        method: The method for blocks that a layer covers.
        partition: The blocks.
        schedule: Knows what the step will need of each block.
        executor: Computes the statistics.
        on_moved: Called when the model has moved to another kind of device.
    """

    def __init__(
        self,
        options: EngineOptions,
        method: Method[Any],
        partition: Partition,
        schedule: Schedule,
        executor: Executor,
        on_moved: Callable[[], None],
    ) -> None:
        self.options, self._method, self._partition = options, method, partition
        self._schedule, self.executor = schedule, executor
        self._on_moved = on_moved
        #: Called when the model has changed, with the new parameter for every one that was replaced.
        self.on_changed: Callable[[dict[nn.Parameter, nn.Parameter]], None] = lambda new: None
        self.fingerprints = Fingerprints(options, method)
        self.watch = GradientWatch([], options.processes, self.fingerprints)
        self.reach = Reach(partition, self.watch)
        self.overlap = Overlap(partition.owners)
        #: Gathered for this step so far: statistics; calls that the step itself processes, in the order in which they
        #: came; and samples that the step sums, eagerly or in a replay.
        self.sums: dict[Block, BlockSums] = {}
        self.calls: dict[Block, KeptCalls] = {}
        self.samples: dict[Block, list[Sample]] = {}
        self._budget = Budget(options.numerics.memory_limit)
        #: Whether this step's statistics come from ``statistics()``, not the training loss; and the number of examples
        #: in the last ``statistics()``, from which on gradients may come from anywhere.
        self.separate = False
        self.separate_examples = 0
        #: Blocks that were last called several times or with many rows, so that projecting the gradient was cheaper.
        self._by_gradient: set[Block] = set()
        #: A cache of :func:`may_use_rows`.
        self._by_rows: dict[Block, bool] = {}
        #: Whether the first step's warnings were given.
        self._warned = False
        #: Whether the hooks are on: until it is closed, or another optimizer has taken over.
        self.active = True
        me = weakref.proxy(self)  # the capture must not keep this alive
        receive, wanted = partial(Collector._receive, me), partial(Collector._wanted, me)
        self.capture = Capture(
            partition.model, receive, wanted, partial(Collector._before_forward, me), self.reach.reaches_parameters,
            options.batch.dim, options.batch.count,
            per_example=method.needs_examples or options.coverage.sharing == "reduce",
        )  # fmt: skip
        self.capture.exact_count = self.fingerprints.strict or options.batch.reduction == "sum"
        if not method.needs_examples:
            self.capture.casts.may_keep = partial(rounds, options)
        self.capture.on_quiet_forward, self.capture.on_quiet_backward = self.watch.mute, self.watch.backward_runs
        self.watch.on_end = self.capture.me
        self.capture.forwards.on_backward = partial(Collector._before_backward, me)

    def set_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train these parameters from now on."""
        self.executor.join()
        assigned = self._partition.assign(parameters)
        self.fingerprints.unverified |= {block for block in assigned.new if not block.through}
        if self._partition.problem:  # the model has changed: there is nothing to compare gradients with
            self.fingerprints.unverified.clear()
        if assigned.recast:
            self.fingerprints.forget()
            self.drop()
        if assigned.moved:
            self._on_moved()
        if self.active:
            self.capture.attach(self._partition.blocks)
            self.watch.attach(self._partition.parameters)
        self._by_rows, known = {}, set(self._partition.blocks)
        self.sums, self.calls = only(known, self.sums), only(known, self.calls)
        self.samples = only(known, self.samples)

    def follow(self) -> None:
        """Adapt to changes of the model: frozen, cast or moved parameters, and those that ``fully_shard`` replaced."""
        if self._partition.is_replaced():
            new = self._partition.replace()
            self.drop()
            self.fingerprints.unverified.clear()
            self.on_changed(new)
            self.set_parameters([new[p] for p in self._partition.offered])
        elif not (self._partition.is_frozen() or self._partition.is_current() or self._partition.is_exchanged()):
            self.set_parameters(self.offered)
            self.on_changed({})

    @property
    def offered(self) -> list[nn.Parameter]:
        """The parameters that the optimizer was given."""
        return self._partition.offered

    def activate(self, active: bool) -> None:
        """Attach the hooks, or remove them and free what was captured."""
        self.active = active
        if active:
            self.set_parameters(self.offered)
        else:
            self.drop()
            self.capture.close()
            self.watch.close()

    # --- during forward and backward ------------------------------------------------------------------------------

    def _before_forward(self) -> bool:
        """Drop captured data if its gradients were cleared since, for example after a scaler skipped their step.

        Return whether to capture: not if the whole model is frozen, like the discriminator in a generator's step.
        """
        self.follow()
        if self._partition.is_frozen() or self._partition.problem:  # the step will raise the problem
            return False
        if self.capture.forwards.busy_elsewhere():  # do not interfere with a pass of another thread
            return True
        self.watch.before_forward()
        if self.capture.examples and not self.capture.separate and self.watch.cleared:
            self.drop()
        return True

    def _before_backward(self) -> None:
        """Drop captured data of earlier passes if gradients were cleared after the forward pass."""
        if self.watch.before_backward() and self.capture.examples:
            self.drop()

    def _wanted(self, block: Block | None) -> bool:
        if block is None:
            any_needed = self._method.needs_examples or self.fingerprints.unverified or self._schedule.takes_any()
            return bool(any_needed) or any(map(self.may_use_rows, self._partition.covered.keys() - self._by_gradient))
        if self._method.needs_examples or block in self.fingerprints.unverified or self._schedule.takes_factors(block):
            return True
        return self.may_use_rows(block) and block not in self._by_gradient

    @torch.no_grad()
    def _receive(self, block: Block, calls: list[Call], n: int) -> None:
        """Process all calls of a block in one forward pass of the model, and free them unless the step needs them."""
        if self.separate and not self.capture.separate:
            return
        if self.capture.mesh.first:
            self._keep_or_sum(block, calls, n)
        if n and self._partition.owners.size > 1:
            self.overlap.received(block, self.sums)

    def _keep_or_sum(self, block: Block, calls: list[Call], n: int) -> None:
        """Keep calls for the step, or a sample of them, or add them to the block's sums."""
        if not n:  # output gradients of a double backward: they contribute to .grad, but are no batch of their own
            if block in self.fingerprints.unverified:
                self._add_fingerprint(self.sums, block, calls, n)
            return
        if self._keeps_for_step(block, calls, n):
            self._by_gradient.discard(block)
            self.calls.setdefault(block, []).append((calls, n))
            self.capture.held.add_calls(calls)
            return
        self._by_gradient.add(block)
        if block in self.calls and self.may_use_rows(block):  # the step can use the rows of one batch only
            for earlier, count in self.calls.pop(block):
                self._add_to_sums(self.sums, block, earlier, count, hold=self._schedule.renews(block))
                self.capture.held.remove_calls(earlier)
        if not self._keep_sample(block, calls, n):
            self._add_to_sums(self.sums, block, calls, n, hold=self._schedule.renews(block))

    def _keep_sample(self, block: Block, calls: list[Call], n: int) -> bool:
        """Keep what the factors need until the step, which sums all blocks at once; return whether that was done."""
        if self.separate or block in self.sums or block.layer.scattered or block in self.fingerprints.unverified:
            return False
        if self._method.needs_examples or not self.executor.defers_statistics:
            return False
        if self._schedule.renews(block) or not self._schedule.takes_factors(block):
            return False
        others = self.samples.setdefault(block, [])
        others.append(kept_sample(self.executor, self.options, block, calls, n, len(others)))
        return True

    def may_use_rows(self, block: Block) -> bool:
        """Return whether it can be verified that a block's gradient is the product of its rows."""
        if block not in self._by_rows:
            self._by_rows[block] = may_use_rows(block, self.options)
        return self._by_rows[block] and not self.capture.separate and self.options.processes.size == 1

    def _keeps_for_step(self, block: Block, calls: list[Call], n: int) -> bool:
        """Return whether to keep a block's calls for the step: if it makes better use of them, and they are small."""
        if self.capture.separate or block in self.sums:
            return False
        if self._method.needs_examples and self.executor.defers_statistics:  # the step's graph includes factors and s*
            return not self._schedule.renews(block) and self._budget.reserve(block, calls)
        if not self.may_use_rows(block) or block in self.calls or len(calls) > 1:
            return False
        count = calls[0].d.numel() // calls[0].d.shape[-1]
        return rows_are_cheaper(block, count, self._method.needs_examples and count == n)

    def _add_to_sums(
        self, sums: dict[Block, BlockSums], block: Block, calls: list[Call], n: int, hold: bool, replay: bool = True
    ) -> None:
        """Add calls to a block's sums; ``hold`` keeps them for s* in a basis that this step has yet to compute."""
        gathered = sums.setdefault(block, BlockSums())
        if self._schedule.takes_factors(block):
            first = not self._schedule.applied_steps
            gathered.add_factors(factor_sums_by(self.executor, self.options, block, calls, n, replay, first))
        if block in self.fingerprints.unverified and not self.capture.separate:
            self._add_fingerprint(sums, block, calls, n)
        if self._method.needs_examples:
            if hold:
                gathered.held.append((calls, n))
                self.capture.held.add_calls(calls)
            else:
                self.executor.join()
                basis = self._method.basis(block, self._partition.state(block))
                assert basis is not None
                gathered.add_scaling(scaling_sum_by(self.executor, self.options, block, calls, n, basis))

    def _add_fingerprint(self, sums: dict[Block, BlockSums], block: Block, calls: list[Call], n: int) -> None:
        memory, vectors = self.options.numerics.memory_limit, self.fingerprints.vectors(block)
        sums.setdefault(block, BlockSums()).add_fingerprint(fingerprint.of_calls(block, calls, n, memory, vectors))

    @contextmanager
    def statistics(self) -> Iterator[None]:
        """Take factors and s* from backward passes inside instead of the training loss; leave ``.grad`` alone."""
        if not self.separate:
            self.sums, self.calls, self.samples, self.separate = {}, {}, {}, True
            self.overlap.forget()
        with self.watch.set_aside(self._partition.offered), self.capture.separate_statistics():
            yield

    def drop(self) -> None:
        """Drop everything captured since the last step."""
        self.capture.drop()
        self.watch.forget()
        self.reach.accumulators = {}  # at every step, as accumulators are bound to the stream they were made on
        self.sums, self.calls, self.samples, self.separate, self._budget.taken = {}, {}, {}, False, 0
        if self._partition.owners.size > 1:
            self.overlap.forget()

    def close(self) -> None:
        """Remove all hooks from the model and free what was captured."""
        self.activate(False)
        takeover.unregister(self)

    # --- when the step begins -------------------------------------------------------------------------------------

    def inputs(self) -> StepInputs | None:
        """Return the step's inputs as far as the host knows them without computing anything; None without gradients."""
        if not self.active or torch.is_inference_mode_enabled():
            takeover.refuse(self)
        if self.watch.hooks.away:
            self.watch.catch_up()
        gradients = {p: g for p in self._partition.parameters if (g := p.grad) is not None}
        doubtful = self._partition.problem or not gradients or not self.capture.examples
        if doubtful and not self._partition.is_current():
            self.set_parameters(self.offered)  # functional_call, for example, had temporarily put others there
        if self._partition.problem:
            takeover.refuse_changed(self._partition.problem)
        if not gradients:
            self.drop()
            return None
        if {g.layout for g in gradients.values()} != {torch.strided}:
            refuse_sparse(self._partition.names, gradients)
        processes, covered = self._partition.owners.size, self._partition.covered
        if not self._warned:
            warn_in_first_step(self._partition.blocks, self._partition.parameters)
        self._warned = True
        self.capture.finish()
        self.separate_examples = self.capture.separate_examples or self.separate_examples
        n = float(self.capture.examples or self.separate_examples)
        if n == 0 and not (covered or self.capture.exact_count or self.capture.forwards.any_reached):
            n = 1.0  # any number will do: nothing reads it
        if n == 0 and processes == 1:
            used = self.watch.used_by_last_step(gradients)
            refuse_unless_empty(self.capture.forwards.any_reached, gradients.values(), used)
            self.drop()
            return None
        uncalled = (b for b in covered if b not in self.capture.fired)
        silent = [b for b in uncalled if not gradients.keys().isdisjoint(b.parameters.values())]
        if silent and processes == 1 and (self.capture.examples or self.capture.separate_examples):
            self._partition.give_up_on(silent)
            self.set_parameters(self.offered)
        found = StepInputs(gradients, self.calls, self.sums, n, n, *self._schedule.due(), self.samples)
        found.batches = 1 if processes == 1 else processes // self.capture.mesh.size
        if self.options.batch.reduction == "sum" and n:
            found.mean = found.batches / n
        return made_real(found, self._partition.complex) if self._partition.complex else found

    def collect(self, inputs: StepInputs) -> None:
        """Process kept calls, sum all statistics over processes, and find the blocks that the step changes.

        A layer without any factors yet is skipped if its gradient is zero, and refused otherwise.
        """
        if inputs.calls:
            self.sum_kept_calls(inputs)
        if inputs.samples:
            inputs.sums.update(sums_of_samples(self.executor, self.options, inputs.samples))
            inputs.samples = {}
        if self.separate:
            inputs.n_statistics = float(self.capture.separate_examples)
        if self._partition.owners.size > 1:
            expected = self._schedule.expected(() if self.separate else self.fingerprints.unverified)
            found = self.overlap.share(inputs, expected, self.capture.mesh.first, self._partition)
            inputs.n, inputs.n_statistics = found
            if self.options.batch.reduction == "sum":
                inputs.mean = inputs.batches / inputs.n
        unknown = set()
        for block in self._partition.covered:
            gathered, state = inputs.sums.get(block), self._partition.states.get(block.key)
            here = hasattr(state, "A") or (gathered is not None and gathered.factors is not None)
            if here or identity(block) in self._partition.factors_elsewhere:
                continue
            if any(bool(inputs.sizes[p] > 0) for p in block.parameters.values() if p in inputs.sizes):
                refuse_unreached(block.name)
            unknown.add(block)
        known = [block for block in self._partition.blocks if block not in unknown]
        inputs.blocks = [b for b in known if not inputs.gradients.keys().isdisjoint(b.parameters.values())]

    def sum_kept_calls(self, inputs: StepInputs) -> None:
        """Compute the statistics of calls that were kept for the step."""

        def take(block: Block) -> None:
            for calls, n in inputs.calls[block]:
                self._add_to_sums(inputs.sums, block, calls, n, hold=True, replay=False)

        self.executor.parallel(take, list(inputs.calls))

    def verify(self, inputs: StepInputs) -> None:
        """Check that gradients are the products of the captured calls, and find rescalings to undo."""
        if self.fingerprints.unverified:
            self.fingerprints.verify(inputs, set(inputs.touched), self.loss_scale())
        if inputs.touched and not self._method.squares_all:
            inputs.rescaled = self.watch.rescaling(inputs, self.loss_scale())

    def loss_scale(self) -> float | Tensor:
        """Return the scale by which a GradScaler multiplied the loss."""
        scaler = self.options.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return scaler.scale(torch.ones((), dtype=self._partition.dtype, device=self._partition.device))

    # --- within the step ------------------------------------------------------------------------------------------

    def delta_square(self, inputs: StepInputs) -> float | Tensor:
        """Return the factor that turns the sum of squared captured gradients into the mean of squared delta_n.

        Under a mean loss delta_n is N times the captured gradient; a process averages over its own examples, so with
        W processes it is N / W times. Under a sum it is the captured gradient itself.
        """
        n, w = inputs.n_statistics, inputs.batches
        scale = 1.0 if self.options.grad_scaler is None else self.loss_scale()
        if self.options.batch.reduction == "sum":
            return 1 / (n * scale * scale)
        return n / (w * w * scale * scale)
