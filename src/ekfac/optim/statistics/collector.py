"""What the backward passes since the last step have left of the covered blocks.

Statistics are taken as soon as a layer's calls are complete, so that these can go; where the step itself can use the
calls better they are kept for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ekfac.curvature import fingerprint, statistics
from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.capture import Capture
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.distributed.agreement import refuse_sharded
from ekfac.optim.executor import Executor
from ekfac.optim.methods.base import Method
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.factored_gradient import Rows, may_use_rows, rows_are_cheaper, rows_of
from ekfac.optim.statistics.fingerprints import Fingerprints
from ekfac.optim.statistics.gradients import GradientWatch
from ekfac.optim.statistics.partition import Partition, members
from ekfac.optim.statistics.schedule import Schedule
from ekfac.optim.statistics.sums import BlockSums, Expected, reduce_over_processes
from ekfac.optim.types import BlockStep, KeptCalls, Rates, StepInputs, as_scalar


class Collector:
    """Gathers what a step will need.

    Args:
        options: Checked options.
        method: What is done with blocks that a layer covers.
        partition: The blocks.
        schedule: Knows what the step will need of each.
        executor: Runs what takes the statistics.
    """

    def __init__(
        self,
        options: EngineOptions,
        method: Method[Any],
        partition: Partition,
        schedule: Schedule,
        executor: Executor,
    ) -> None:
        self._options = options
        self._method = method
        self._partition = partition
        self._schedule = schedule
        self.executor = executor
        #: What adds to each parameter's ``.grad`` in a backward pass.
        self._accumulators: dict[nn.Parameter, Node] = {}
        self.fingerprints = Fingerprints(options.processes)
        #: What has been gathered for this step so far.
        self.sums: dict[Block, BlockSums] = {}
        #: Calls whose statistics are taken in the step itself, in the order in which they came.
        self.calls: dict[Block, KeptCalls] = {}
        #: Whether this step's statistics come from ``statistics()`` and not from the training loss.
        self.separate = False
        self.capture = Capture(
            partition.model, self._receive, self._wanted, self._before_forward, self._reaches_parameters,
            options.batch_dim,
        )  # fmt: skip
        self.watch = GradientWatch([], options.processes)

    def set_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train these parameters from now on."""
        self.fingerprints.unverified |= self._partition.assign(parameters)
        self.capture.attach(self._partition.blocks)
        self.watch.attach(self._partition.parameters)
        self.sums = {b: s for b, s in self.sums.items() if b in set(self._partition.blocks)}

    # --- during forward and backward ------------------------------------------------------------------------------

    def _before_forward(self) -> bool:
        """Drop what belongs to gradients that somebody else has cleared: a scaler skipped their step, say.

        Returns:
            Whether to capture: not where the whole model is frozen, as another's adversary.
        """
        if self._partition.is_frozen():
            return False
        if not self._partition.is_current():
            self.set_parameters(self._partition.offered)
        self.watch.before_forward()
        if self.capture.examples and not self.capture.aside and self.watch.nothing_there:
            self.drop()
        return True

    def _reaches_parameters(self, block: Block | None) -> bool:
        """Whether the backward pass under way brings a gradient to a block's parameters, or to any of the model's."""
        return any(map(self._reaches, self._partition.everything if block is None else block.parameters.values()))

    def _reaches(self, parameter: nn.Parameter) -> bool:
        if not parameter.requires_grad:
            return False
        known = self._accumulators.get(parameter)
        try:
            if known is not None and torch._C._will_engine_execute_node(known):
                return True
            # The first time, or the parameter's memory was replaced since and with it what adds to its gradient.
            found = self._accumulators[parameter] = get_gradient_edge(parameter).node
            return bool(torch._C._will_engine_execute_node(found))
        except RuntimeError:
            return True  # torch.autograd.grad of the parameter itself, which somebody may put into .grad

    def _wanted(self, block: Block) -> bool:
        return (
            self._method.needs_examples
            or self._schedule.takes_factors(block)
            or block in self.fingerprints.unverified
            or self._may_use_rows(block)
        )

    @torch.no_grad()
    def _receive(self, block: Block, calls: list[Call], n: int) -> None:
        """Take a block's statistics from all its calls in one forward of the model; then the calls can go."""
        if self.separate and not self.capture.aside:
            return
        if self._keeps_for_step(block, calls, n):
            self.calls.setdefault(block, []).append((calls, n))
            self._hold(calls)
            return
        if self._may_use_rows(block):  # rows of several batches are of no use to the step
            for earlier, count in self.calls.pop(block, []):
                self._take(self.sums, block, earlier, count, hold=self._schedule.renews(block))
                for call in earlier:
                    self.capture.held.remove(call.x)
                    self.capture.held.remove(call.d)
        self._take(self.sums, block, calls, n, hold=self._schedule.renews(block))

    def _hold(self, calls: list[Call]) -> None:
        for call in calls:
            self.capture.held.add(call.x)
            self.capture.held.add(call.d)

    def _may_use_rows(self, block: Block) -> bool:
        return may_use_rows(block, self._options) and not self.capture.aside

    def _keeps_for_step(self, block: Block, calls: list[Call], n: int) -> bool:
        """Whether a block's calls are kept until the step: where it can use them better, and they are small."""
        if self.capture.aside or len(calls) > 1:
            return False
        if self._may_use_rows(block):
            if block in self.calls or block in self.sums:
                return False
            count = calls[0].d.numel() // calls[0].d.shape[-1]
            return rows_are_cheaper(block, count, self._method.needs_examples and count == n)
        return block not in self.fingerprints.unverified and self.executor.keeps_calls(calls)

    def _take(
        self, sums: dict[Block, BlockSums], block: Block, calls: list[Call], n: int, hold: bool, replay: bool = True
    ) -> None:
        """Add calls to a block's sums; ``hold`` keeps them for s* in a basis that is not known yet."""
        gathered = sums.setdefault(block, BlockSums())
        memory = self._options.memory_limit
        if self._schedule.takes_factors(block):
            gathered.add_factors(self._factor_sums(block, calls, n, replay))
        if block in self.fingerprints.unverified and not self.capture.aside:
            vectors = self.fingerprints.vectors(block)
            gathered.add_fingerprint(fingerprint.of_calls(block, calls, n, memory, vectors))
        if self._method.needs_examples:
            if hold:
                gathered.held.append((calls, n))
                self._hold(calls)
            else:
                self.executor.join()
                basis = self._method.basis(block, self._partition.state(block))
                assert basis is not None
                gathered.add_scaling(statistics.scaling_sum(block, calls, n, basis, memory))

    def _factor_sums(self, block: Block, calls: list[Call], n: int, replay: bool) -> FactorSums:
        o = self._options

        def taken(*tensors: Tensor) -> tuple[Any, ...]:
            given = [Call(c.layer, *tensors[2 * i : 2 * i + 2]) for i, c in enumerate(calls)]
            sampled = not o.deterministic and block.dtype == torch.float32
            sums = statistics.factor_sums(block, given, n, o.sharing, o.memory_limit, sampled=sampled)
            return sums.A, sums.terms, sums.B

        tensors = [t for call in calls for t in (call.x, call.d)]
        if not replay:
            return FactorSums(*taken(*tensors))
        key = (block, n, *((c.layer, c.layer.mode) for c in calls))
        return FactorSums(*self.executor.call("taking statistics", key, taken, *tensors))

    @contextmanager
    def statistics(self) -> Iterator[None]:
        """Backward passes inside give factors and s*, in place of the training loss's, and leave ``.grad`` alone."""
        saved = [(p, p.grad) for p in self._partition.offered]
        for p, _ in saved:
            p.grad = None
        if not self.separate:
            self.sums, self.calls, self.separate = {}, {}, True
        self.watch.enabled = False
        try:
            with self.capture.statistics_aside():
                yield
        finally:
            self.watch.enabled = True
            for p, grad in saved:
                p.grad = grad

    def drop(self) -> None:
        """Forget what was captured and not used."""
        self.capture.drop()
        self.watch.forget()
        self.executor.drop()
        self._accumulators = {}  # not for longer than a step: they hold on to the stream on which they were made
        self.sums, self.calls, self.separate = {}, {}, False

    def close(self) -> None:
        """Remove all hooks from the model and let go of what was captured."""
        self.drop()
        self.capture.close()
        self.watch.close()

    # --- when the step begins -------------------------------------------------------------------------------------

    def inputs(self) -> StepInputs | None:
        """What the host can know before anything is computed; None if there is no gradient."""
        gradients = {p: p.grad for p in self._partition.parameters if p.grad is not None}
        if not gradients or not self.capture.examples:
            refuse_sharded(self._partition.model)
        if not gradients:
            self.drop()
            return None
        self._check_gradients(gradients)
        self.capture.finish()
        self._check_captured(gradients)
        n = float(self.capture.examples)
        return StepInputs(gradients, self.calls, self.sums, n, n)

    def _check_gradients(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        for p, gradient in gradients.items():
            if gradient.layout != torch.strided:
                name = next((name for name, q in self._partition.model.named_parameters() if q is p), "?")
                raise ValueError(f"parameter '{name}': its gradient is {gradient.layout}. Allowed: dense gradients")

    def _check_captured(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """A layer that has a gradient but was never seen to fire is reported, and gets the diagonal method."""
        alone = self._options.processes.size == 1
        if self.capture.examples == 0 and alone:
            raise self.no_examples()
        missing = [
            b
            for b in self._partition.covered
            if b not in self.capture.fired and any(p in gradients for p in b.parameters.values())
        ]
        if not missing or not alone:
            return
        warnings.warn(
            "these layers have gradients but their forward was never called, so they get the diagonal method: "
            + ", ".join(b.name for b in missing),
            RuntimeWarning,
            stacklevel=2,
        )
        self._partition.silent.update(p for b in missing for p in b.parameters.values())
        self.set_parameters(self._partition.offered)

    def no_examples(self) -> RuntimeError:
        """What is wrong where there are gradients but nothing was captured."""
        return RuntimeError(
            "step() found gradients but no captured examples. Call the model that was given to the optimizer (not "
            "a copy), with gradients on, outside paused(); zero_grad() after backward also drops what was captured"
        )

    def collect(self, inputs: StepInputs, sizes: dict[nn.Parameter, Tensor]) -> None:
        """Take the statistics of calls that were kept, and sum all of them over processes.

        A layer of whose factors nothing is known yet is left alone if its gradient is zero, else refused.
        """
        self.take_calls(inputs)
        if self.separate:
            inputs.n_statistics = float(self.capture.examples_aside)
        partition = self._partition
        if self._options.processes.size > 1:
            counts = [self.capture.examples, int(inputs.n_statistics)]
            expected = {b: self._expected(b) for b in partition.covered}
            totals = reduce_over_processes(partition.owners, inputs.sums, expected, counts, partition.device)
            inputs.n, inputs.n_statistics = totals
            for block in partition.covered:
                if not partition.owners.mine(block):
                    partition.note_elsewhere(members(block), factors=expected[block].factors)
        for block in partition.covered:
            gathered = inputs.sums.get(block)
            if partition.has_factors(block) or (gathered is not None and gathered.factors is not None):
                continue
            if any(bool(sizes[p] > 0) for p in block.parameters.values() if p in sizes):
                raise RuntimeError(
                    f"layer '{block.name}' has a gradient, but no backward pass that was captured has come to it yet: "
                    f"let the loss inside opt.statistics() reach it, or exclude=['{block.name}']"
                )
            inputs.unknown.add(block)

    def take_calls(self, inputs: StepInputs) -> None:
        """Take the statistics of calls that were kept for the step."""

        def take(block: Block) -> None:
            for calls, n in inputs.calls[block]:
                self._take(inputs.sums, block, calls, n, hold=True, replay=False)

        blocks = list(inputs.calls)
        self.executor.parallel([partial(take, block) for block in blocks], list(map(widest, blocks)))

    def _expected(self, block: Block) -> Expected:
        scaling = self._method.needs_examples and not self._schedule.renews(block)
        unverified = block in self.fingerprints.unverified and not self.separate
        return Expected(self._schedule.takes_factors(block), scaling, unverified)

    def verify(self, inputs: StepInputs, sizes: list[Tensor], left: list[Tensor]) -> None:
        """Check that gradients are those that passed through the calls, and find what was done to them since."""
        scale = self.loss_scale()
        self.fingerprints.verify(inputs, self.watch.touched, scale)
        inputs.rescaled = self.watch.rescaling(list(inputs.gradients), sizes, left, scale)

    def loss_scale(self) -> float | Tensor:
        """What a GradScaler has multiplied the loss by."""
        scaler = self._options.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return scaler.scale(torch.ones((), device=self._partition.device))

    # --- within the step ------------------------------------------------------------------------------------------

    def delta_square(self, n: float | Tensor) -> float | Tensor:
        """What the sum of squared captured gradients is multiplied by to be the mean of squared delta_n.

        Under a mean loss delta_n is N times the captured gradient; a process averages over its own examples, so with
        W processes it is N / W times. Under a sum it is the captured gradient itself.
        """
        scale = self.loss_scale()
        if self._options.loss_reduction == "sum":
            return 1 / (n * scale * scale)
        w = self._options.processes.size
        return n / (w * w * scale * scale)

    def rows(self, block: Block, inputs: StepInputs, rates: Rates) -> Rows | None:
        """The captured h and delta in place of ``.grad``, where it is certain that ``.grad`` is their product.

        Nobody may have touched it, it must come from this one backward pass, and it must have the rows' fingerprint.
        """
        kept = inputs.calls.get(block)
        if kept is None or len(kept) > 1 or not self._may_use_rows(block) or not self.watch.single_pass:
            return None
        parameters = list(block.parameters.values())
        if any(p in inputs.rescaled or p not in inputs.gradients for p in parameters):
            return None
        if any(rates.of(p).maximize or rates.of(p).l2 for p in parameters):
            return None
        (call,), n = kept[0]
        rows = rows_of(block, call, n)
        return rows if self.fingerprints.agree(block, rows, [inputs.gradients[p] for p in parameters]) else None

    def scaling(self, block: Block, inputs: StepInputs, step: BlockStep) -> Tensor | None:
        """Algorithm 1, ComputeScalings: s* of this step's examples, in the basis that is now in use."""
        if not (block.covered and self._method.needs_examples):
            return None
        sums = inputs.sums.setdefault(block, BlockSums())
        if sums.held:
            assert step.basis is not None
            if isinstance(step.gradient, Rows) and step.gradient.one_each:
                sums.add_scaling(step.gradient.scaling_sum(step.basis))
            else:
                memory = self._options.memory_limit
                for calls, count in sums.held:
                    sums.add_scaling(statistics.scaling_sum(block, calls, count, step.basis, memory))
            sums.held = []
        if sums.scaling is None:
            return None
        return inputs.masked(sums.scaling * as_scalar(self.delta_square(inputs.n_statistics), sums.scaling))


def widest(block: Block) -> int:
    """The numbers of the largest of a block's matrices: its gradient, A or B."""
    return max(block.shape.numel, *block.factor_numbers())
