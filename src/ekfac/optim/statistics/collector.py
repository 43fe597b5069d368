"""What the backward passes since the last step have left of the covered blocks.

Statistics are taken as soon as a layer's calls are complete, so that these can go; where the step itself can use the
calls better they are kept for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ekfac.optim.stacks import Stacks
from ekfac.optim.statistics import ownership
from ekfac.optim.statistics.averages import take_in
from ekfac.optim.statistics.factored_gradient import may_use_rows, rows_are_cheaper
from ekfac.optim.statistics.fingerprints import Fingerprints
from ekfac.optim.statistics.gradients import GradientWatch, made_real
from ekfac.optim.statistics.partition import Partition, members, only
from ekfac.optim.statistics.reach import Reach
from ekfac.optim.statistics.refused import refuse_sparse, refuse_unless_empty
from ekfac.optim.statistics.roster import warn_at_first
from ekfac.optim.statistics.samples import Room, Sample, factor_sums_by, kept_sample, scaling_sum_by, sums_of_samples
from ekfac.optim.statistics.schedule import Schedule
from ekfac.optim.statistics.sums import BlockSums
from ekfac.optim.types import KeptCalls, StepInputs


class Collector:
    """Gathers what a step will need.

    Args:
        options: Checked options.
        method: What is done with blocks that a layer covers.
        partition: The blocks.
        stacks: Those of one shape together.
        schedule: Knows what the step will need of each.
        executor: Runs what takes the statistics.
        moved: Called when the model is found on another kind of device.
    """

    def __init__(
        self,
        options: EngineOptions,
        method: Method[Any],
        partition: Partition,
        stacks: Stacks,
        schedule: Schedule,
        executor: Executor,
        moved: Callable[[], None],
    ) -> None:
        self.options = options
        self._method = method
        self._partition = partition
        self._stacks, self._schedule, self.executor = stacks, schedule, executor
        self._moved = moved
        #: Told, where the model is found to have changed, the new parameter for every one that was replaced.
        self.on_changed: Callable[[dict[nn.Parameter, nn.Parameter]], None] = lambda new: None
        self.fingerprints = Fingerprints(options, method)
        self.watch = GradientWatch([], options.processes, self.fingerprints)
        self.reach = Reach(partition, self.watch)
        self.overlap = Overlap(partition.owners)
        self.sums: dict[Block, BlockSums] = {}  #: What has been gathered for this step so far.
        #: Calls whose statistics are taken in the step itself, in the order in which they came.
        self.calls: dict[Block, KeptCalls] = {}
        self._room = Room(options.numerics.memory_limit)
        #: Samples whose sums the step takes, by itself or by a replay.
        self.samples: dict[Block, list[Sample]] = {}
        #: Blocks whose gradient, when last looked at, was no product of few rows: called several times, or with many.
        self._by_gradient: set[Block] = set()
        self._by_rows: dict[Block, bool] = {}  # what may_use_rows has told
        self.separate = False  #: Whether this step's statistics come from ``statistics()``, not the training loss.
        self.apart = 0  #: Examples in the last ``statistics()``; from then on gradients may come from anywhere.
        self._told = False  # what the first step tells
        #: Whether the hooks are on: until it is closed, or another optimizer has taken over.
        self.active = True
        me = weakref.proxy(self)  # whom the capture must not keep alive
        receive, wanted = partial(Collector._receive, me), partial(Collector._wanted, me)
        self.capture = Capture(
            partition.model, receive, wanted, partial(Collector._before_forward, me), self.reach.reaches_parameters,
            options.batch.dim, options.batch.count,
            per_example=method.needs_examples or options.coverage.sharing == "reduce",
        )  # fmt: skip
        self.capture.exact_count = self.fingerprints.strict or options.batch.reduction == "sum"
        self.watch.on_end, self.capture.on_quiet = self.capture.me, self.watch.quiet
        self.capture.forwards.on_backward = partial(Collector._before_backward, me)

    def set_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train these parameters from now on."""
        self.executor.join()
        assigned = self._partition.assign(parameters)
        self.fingerprints.unverified |= assigned.new
        if self._partition.problem:  # nothing of what the model has now can be compared
            self.fingerprints.unverified.clear()
        if assigned.recast:
            self.fingerprints.forget()
            self.drop()
        if assigned.moved:
            self._moved()
        if self.active:
            self.capture.attach(self._partition.blocks)
            self.watch.attach(self._partition.parameters)
        self._by_rows, known = {}, set(self._partition.blocks)
        self.sums, self.calls = only(known, self.sums), only(known, self.calls)
        self.samples = only(known, self.samples)

    def follow(self) -> None:
        """Go on with the model as it is now, and with what ``fully_shard``, say, has put in its parameters' place."""
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
        """Put the hooks on, or take them off and let go of what was captured."""
        self.active = active
        if active:
            self.set_parameters(self.offered)
        else:
            self.drop()
            self.capture.close()
            self.watch.close()

    # --- during forward and backward ------------------------------------------------------------------------------

    def _before_forward(self) -> bool:
        """Drop what belongs to gradients that somebody else has cleared: a scaler skipped their step, say.

        Returns whether to capture: not where the whole model is frozen, as another's adversary.
        """
        self.follow()
        if self._partition.is_frozen():
            return False
        if self._partition.problem:  # which the step will tell
            return False
        if self.capture.forwards.busy_elsewhere():  # what another thread has under way is its own affair
            return True
        self.watch.before_forward()
        if self.capture.examples and not self.capture.separate and self.watch.cleared:
            self.drop()
        return True

    def _before_backward(self) -> None:
        """Drop the same where the gradients are cleared only after the forward."""
        if self.watch.before_backward() and self.capture.examples:
            self.drop()

    def _wanted(self, block: Block | None) -> bool:
        if block is None:
            needed = self._method.needs_examples or self.fingerprints.unverified or self._schedule.takes_any()
            return bool(needed) or any(map(self.may_use_rows, self._partition.covered.keys() - self._by_gradient))
        usual = self._method.needs_examples or block in self.fingerprints.unverified or self._schedule.takes_all()
        usual = usual or self._schedule.takes_factors(block)
        return usual or (self.may_use_rows(block) and block not in self._by_gradient)

    @torch.no_grad()
    def _receive(self, block: Block, calls: list[Call], n: int) -> None:
        """Take a block's statistics from all its calls in one forward of the model; then the calls can go."""
        if self.separate and not self.capture.separate:
            return
        if self.capture.mesh.first:
            self._gather(block, calls, n)
        if n and self._partition.owners.size > 1:
            self.overlap.received(block, self.sums)

    def _gather(self, block: Block, calls: list[Call], n: int) -> None:
        if not n:  # gradients that were differentiated on the way to .grad: a part of it, and no batch of their own
            if block in self.fingerprints.unverified:
                self._take_fingerprint(self.sums, block, calls, n)
            return
        if self._keeps_for_step(block, calls, n):
            self._by_gradient.discard(block)
            self.calls.setdefault(block, []).append((calls, n))
            self.capture.held.add_calls(calls)
            return
        self._by_gradient.add(block)
        if block in self.calls and self.may_use_rows(block):  # rows of several batches are of no use to the step
            for earlier, count in self.calls.pop(block):
                self._take(self.sums, block, earlier, count, hold=self._schedule.renews(block))
                self.capture.held.remove_calls(earlier)
        if not self._keeps_sample(block, calls, n):
            self._take(self.sums, block, calls, n, hold=self._schedule.renews(block))

    def _keeps_sample(self, block: Block, calls: list[Call], n: int) -> bool:
        """Keep what the factors need until the step, which takes the sums of all blocks at once."""
        if self.separate or block in self.sums or block.layer.scattered or block in self.fingerprints.unverified:
            return False
        if self._method.needs_examples or not self.executor.waits:
            return False
        if self._schedule.renews(block) or not self._schedule.takes_factors(block):
            return False
        others = self.samples.setdefault(block, [])
        others.append(kept_sample(self.executor, self.options, block, calls, n, len(others)))
        return True

    def may_use_rows(self, block: Block) -> bool:
        """Tell whether the gradient of a block can be known to be the product of its rows."""
        if block not in self._by_rows:
            self._by_rows[block] = may_use_rows(block, self.options)
        return self._by_rows[block] and not self.capture.separate and self.options.processes.size == 1

    def _keeps_for_step(self, block: Block, calls: list[Call], n: int) -> bool:
        """Tell whether a block's calls are kept until the step: where it can use them better, and they are small."""
        if self.capture.separate or block in self.sums:
            return False
        if self._method.needs_examples and self.executor.waits:  # factors and s* are part of the step's replay
            return not self._schedule.renews(block) and self._room.takes(block, calls)
        if not self.may_use_rows(block) or block in self.calls or len(calls) > 1:
            return False
        count = calls[0].d.numel() // calls[0].d.shape[-1]
        return rows_are_cheaper(block, count, self._method.needs_examples and count == n)

    def _take(
        self, sums: dict[Block, BlockSums], block: Block, calls: list[Call], n: int, hold: bool, replay: bool = True
    ) -> None:
        """Add calls to a block's sums; ``hold`` keeps them for s* in a basis that is not known yet."""
        gathered = sums.setdefault(block, BlockSums())
        if self._schedule.takes_factors(block):
            gathered.add_factors(factor_sums_by(self.executor, self.options, block, calls, n, replay))
        if block in self.fingerprints.unverified and not self.capture.separate:
            self._take_fingerprint(sums, block, calls, n)
        if self._method.needs_examples:
            if hold:
                gathered.held.append((calls, n))
                self.capture.held.add_calls(calls)
            else:
                self.executor.join()
                basis = self._method.basis(block, self._partition.state(block))
                assert basis is not None
                gathered.add_scaling(scaling_sum_by(self.executor, self.options, block, calls, n, basis))

    def _take_fingerprint(self, sums: dict[Block, BlockSums], block: Block, calls: list[Call], n: int) -> None:
        own = self.options.numerics.memory_limit, self.fingerprints.vectors(block)
        sums.setdefault(block, BlockSums()).add_fingerprint(fingerprint.of_calls(block, calls, n, *own))

    @contextmanager
    def statistics(self) -> Iterator[None]:
        """Take factors and s* from backward passes inside, in place of the training loss's; leave ``.grad`` alone."""
        if not self.separate:
            self.sums, self.calls, self.samples, self.separate = {}, {}, {}, True
            self.overlap.forget()
        with self.watch.set_aside(self._partition.offered), self.capture.separate_statistics():
            yield

    def drop(self) -> None:
        """Forget what was captured and not used."""
        self.capture.drop()
        self.watch.forget()
        self.reach.accumulators = {}  # no longer than a step: they hold on to the stream on which they were made
        self.sums, self.calls, self.samples, self.separate, self._room.taken = {}, {}, {}, False, 0
        if self._partition.owners.size > 1:
            self.overlap.forget()

    def close(self) -> None:
        """Remove all hooks from the model and let go of what was captured."""
        self.activate(False)
        ownership.unregister(self)

    # --- when the step begins -------------------------------------------------------------------------------------

    def inputs(self) -> StepInputs | None:
        """Return what the host can know before anything is computed; None if there is no gradient."""
        if not self.active or torch.is_inference_mode_enabled():
            ownership.refuse(self)
        if self.watch.hooks.away:
            self.watch.catch_up()
        gradients = {p: g for p in self._partition.parameters if (g := p.grad) is not None}
        doubtful = self._partition.problem or not gradients or not self.capture.examples
        if doubtful and not self._partition.is_current():
            self.set_parameters(self.offered)  # functional_call, say, had put others there for a while
        if self._partition.problem:
            ownership.refuse_changed(self._partition.problem)
        if not gradients:
            self.drop()
            return None
        if {g.layout for g in gradients.values()} != {torch.strided}:
            refuse_sparse(self._partition.names, gradients)
        processes, covered = self._partition.owners.size, self._partition.covered
        if not self._told:
            warn_at_first(self._partition.blocks, self._partition.parameters)
        self._told = True
        self.capture.finish()
        self.apart = self.capture.separate_examples or self.apart
        n, mean = float(self.capture.examples or self.apart), 1.0
        if n == 0 and not (covered or self.capture.exact_count or self.capture.forwards.any_reached):
            n = 1.0  # nothing reads it
        if n == 0 and processes == 1:
            used = self.watch.used_before(gradients)
            refuse_unless_empty(self.capture.forwards.any_reached, gradients.values(), used)
            self.drop()
            return None
        unheard = covered.keys() - self.capture.fired
        silent = [b for b in covered if b in unheard and not gradients.keys().isdisjoint(b.parameters.values())]
        if silent and processes == 1 and (self.capture.examples or self.capture.separate_examples):
            self._partition.give_up_on(silent)
            self.set_parameters(self.offered)
        batches = 1 if processes == 1 else processes // self.capture.mesh.size
        if self.options.batch.reduction == "sum" and n:
            mean = batches / n
        solves, warm = self._schedule.due()
        found = StepInputs(gradients, self.calls, self.sums, n, n, solves, warm, processes, batches, mean, self.samples)
        return made_real(found, self._partition.complex) if self._partition.complex else found

    def collect(self, inputs: StepInputs) -> None:
        """Take the statistics of calls that were kept, sum all of them over processes, and find what the step changes.

        A layer of whose factors nothing is known yet is left alone if its gradient is zero, else refused.
        """
        if inputs.calls:
            self.take_calls(inputs)
        if inputs.samples:
            inputs.sums.update(sums_of_samples(self.executor, self.options, inputs.samples))
            inputs.samples = {}
        if self.separate:
            inputs.n_statistics = float(self.capture.separate_examples)
        if inputs.processes > 1:
            expected = self._schedule.expected(() if self.separate else self.fingerprints.unverified)
            self.overlap.share(inputs, expected, self.capture.mesh.first, self._partition)
            if self.options.batch.reduction == "sum":
                inputs.mean = inputs.batches / inputs.n
        for block in self._partition.covered:
            gathered, state = inputs.sums.get(block), self._partition.states.get(block.key)
            here = hasattr(state, "A") or (gathered is not None and gathered.factors is not None)
            if here or members(block) in self._partition.factors_elsewhere:
                continue
            if any(bool(inputs.sizes[p] > 0) for p in block.parameters.values() if p in inputs.sizes):
                raise RuntimeError(
                    f"layer '{block.name}' has a gradient, but no backward pass that was captured has come to it yet: "
                    f"let the loss inside opt.statistics() reach it, or exclude=['{block.name}']"
                )
            inputs.unknown.add(block)
        known = [block for block in self._partition.blocks if block not in inputs.unknown]
        inputs.blocks = [b for b in known if not inputs.gradients.keys().isdisjoint(b.parameters.values())]

    def take_calls(self, inputs: StepInputs) -> None:
        """Take the statistics of calls that were kept for the step."""

        def take(block: Block) -> None:
            for calls, n in inputs.calls[block]:
                self._take(inputs.sums, block, calls, n, hold=True, replay=False)

        self.executor.parallel(take, list(inputs.calls))

    def verify(self, inputs: StepInputs) -> None:
        """Check that gradients are those that passed through the calls, and find what was done to them since."""
        if self.fingerprints.unverified:
            self.fingerprints.verify(inputs, set(inputs.touched), self.loss_scale())
        if inputs.touched:
            inputs.rescaled = self.watch.rescaling(inputs, self.loss_scale())

    def loss_scale(self) -> float | Tensor:
        """Return what a GradScaler has multiplied the loss by."""
        scaler = self.options.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return scaler.scale(torch.ones((), dtype=self._partition.dtype, device=self._partition.device))

    # --- within the step ------------------------------------------------------------------------------------------

    def delta_square(self, inputs: StepInputs) -> float | Tensor:
        """Return what the sum of squared captured gradients is multiplied by to be the mean of squared delta_n.

        Under a mean loss delta_n is N times the captured gradient; a process averages over its own examples, so with
        W processes it is N / W times. Under a sum it is the captured gradient itself.
        """
        n, w = inputs.n_statistics, inputs.batches
        scale = 1.0 if self.options.grad_scaler is None else self.loss_scale()
        if self.options.batch.reduction == "sum":
            return 1 / (n * scale * scale)
        return n / (w * w * scale * scale)

    def update_factors(self, inputs: StepInputs, sums: Mapping[Block, BlockSums]) -> None:
        """Take a step's sums into A and B, of those blocks that have some."""
        n, square, bounded = inputs.n_statistics, self.delta_square(inputs), not self.options.refresh.deterministic
        factors = {block: of.factors for block, of in sums.items() if of.factors is not None}
        decay, shrinks = self._schedule.factor_decay, self._schedule.derivatives
        take_in(self._stacks, factors, n, square, decay, bounded, inputs.ok, shrinks)
