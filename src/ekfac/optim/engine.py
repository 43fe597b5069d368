"""Algorithm 1 without its last line: from captured statistics and gradients to a direction for every parameter.

    batch -> capture -> factors -> basis -> scaling -> direction
             h, delta   A, B       U_A,U_B   s          U_B (g / s) U_A^T

The engine has a partition (what is trained), a schedule (what is due when), a collector (gradients and statistics of
the last backward passes), a refresher (how bases are updated) and an executor (how the work of a step is run). It owns
no hyper-parameter of the update; EKFAC, KFAC and Preconditioner are built on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ekfac.curvature.blocks import Block
from ekfac.optim.cuda.executor import make_executor  # or, slower: from ekfac.optim.executor import make_executor
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.distributed.replicas import Replicas
from ekfac.optim.methods.base import Method
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.options import EngineOptions
from ekfac.optim.stacks import Stack, Stacks, block_step
from ekfac.optim.statistics.averages import update_averages
from ekfac.optim.statistics.collector import Collector
from ekfac.optim.statistics.fingerprints import is_strict
from ekfac.optim.statistics.kept_calls import compute_scalings, rows_in_place
from ekfac.optim.statistics.partition import Partition
from ekfac.optim.statistics.refresh import Refresher, iterated_numbers
from ekfac.optim.statistics.schedule import Schedule
from ekfac.optim.statistics.skipped import SkippedSteps
from ekfac.optim.statistics.sums import BlockSums
from ekfac.optim.types import BlockStep, Direction, Rates, StepInputs, factors_of

#: Up to 10^8 entries below this stay far from the limits of float32 in any orthonormal basis.
SMALL = 1e10
#: Applies the directions of a step: (inputs, directions, rates).
Apply = Callable[[StepInputs, list[Direction], Rates], None]


class Engine:
    """Turns the gradients of a model into directions.

    Args:
        model: The model; its forward pass shows the number of examples.
        parameters: The parameters to train.
        options: Checked options.
        method: The method for blocks that a layer covers.
        elementwise: The method for all other parameters.
        state: The optimizer's state; each block's is under its first parameter.
        whole_steps: Whether :meth:`step` includes the update of the parameters, so that a CUDA graph can record it.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        options: EngineOptions,
        method: Method[Any],
        elementwise: EigenMethod,
        state: MutableMapping[Tensor, Any],
        whole_steps: bool,
    ) -> None:
        self.model = model
        self.options = options
        self.method = method
        self.elementwise = elementwise
        # No part holds a strong reference to the engine, so no cycle keeps it (and the model) alive.
        me = weakref.proxy(self)
        owners = Owners(options.processes, lambda block: me.method_of(block).numbers(block))
        self.partition = Partition(
            model, options.coverage, state, lambda block: me.method_of(block).state_class, owners,
            through=not is_strict(method, options.coverage),
        )  # fmt: skip
        self.stacks = Stacks(self.partition, lambda block: me.method_of(block).stacks)
        self.schedule = Schedule(options, method, self.partition)
        parameters, self._whole_steps = list(parameters), whole_steps
        self.executor = make_executor(options, whole_steps, parameters)
        self.executor.prepare(method)
        self.refresher = Refresher(self.executor, self.schedule)
        replace_executor = partial(Engine._replace_executor, me)
        self.collector = Collector(options, method, self.partition, self.schedule, self.executor, replace_executor)
        self.collector.set_parameters(parameters)
        self.replicas = Replicas(me)
        self.skipped = SkippedSteps()
        #: Whether the state is only a skeleton for torch.distributed.checkpoint to load into; see ``state/outline.py``.
        self.outlined = False

    def method_of(self, block: Block) -> Method[Any]:
        """Return the method of a block."""
        return self.method if block.covered else self.elementwise

    # --- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, rates: Rates, apply: Apply) -> bool | None:
        """Run Algorithm 1 over all blocks and pass the directions to ``apply``.

        Returns:
            True if the step was taken, False if a gradient is not finite, None if there are no gradients.
        """
        together, replays = self.shares(), False
        inputs = self.replicas.begin(rates) if together else self.collector.inputs()
        if not isinstance(inputs, StepInputs):
            return inputs
        if not together:
            if self.executor.can_replay:
                renews = bool(inputs.solves or inputs.warm)
                if not renews and self.executor.replay(self, inputs, rates, apply):
                    return True
                # What remains of a step may have been recorded even if the whole of it was not.
                replays = renews or bool(inputs.samples) or any(of.factors for of in inputs.sums.values())
            if not self.check_finite(inputs):
                return False
        self.collector.collect(inputs)
        if together:
            self.replicas.verify(inputs)
        elif inputs.touched or self.collector.fingerprints.unverified:
            self.collector.verify(inputs)
        # Factors; bases, if due; then scalings and directions, of each block by the process that owns it.
        if any(of.factors for of in inputs.sums.values()):
            self.update_factors(inputs, inputs.sums)
        by = self.replicas if together else self
        if inputs.solves or inputs.warm:
            by.compute_eigenbases(inputs.blocks, inputs, rates)
        if not (replays and self.executor.replay(self, inputs, rates, apply)):
            apply(inputs, by.precondition(inputs.blocks, inputs, rates), rates)
        if together:
            self.replicas.hand_round(inputs)
        return True

    def update_factors(self, inputs: StepInputs, sums: Mapping[Block, BlockSums]) -> None:
        """Update A = E[h h^T] and B = E[delta delta^T], running averages, with a step's sums, which this takes."""
        factors = {block: of.factors for block, of in sums.items() if of.factors is not None}
        n, square = inputs.n_statistics, self.collector.delta_square(inputs)
        decay, shrinks = self.schedule.factor_decay, self.schedule.derivatives
        bounded = not self.options.refresh.deterministic
        update_averages(self.stacks, factors, n, square, decay, bounded, inputs.ok, shrinks)
        for of in sums.values():
            of.factors = None

    def compute_eigenbases(self, blocks: Sequence[Block], inputs: StepInputs, rates: Rates) -> None:
        """Run ComputeEigenBasis where due: U_A, S_A and U_B, S_B from the factors, solved in full or refreshed warm."""
        for block in blocks:
            if block in inputs.solves:
                state = self.partition.states[block.key]
                state.strayed = 0
                state.pop("near", None)
                damping = float(rates.of(block.key).damping)
                self.method.refresh(block, state, *factors_of(state), damping, self.refresher)
        self.warm_refresh({block: inputs.warm[block] for block in blocks if block in inputs.warm}, rates, inputs.ok)

    def precondition(self, blocks: Sequence[Block], inputs: StepInputs, rates: Rates) -> list[Direction]:
        """Run the second half of Algorithm 1, scalings and directions; blocks are independent of each other."""

        def kind(block: Block) -> Hashable:
            by_rows = block in inputs.calls and self.collector.may_use_rows(block)
            return None if by_rows else rates.group_of[block.key]

        stacks = self.stacks.of(blocks, kind)
        found = self.executor.parallel(lambda stack: self.precondition_stack(stack, inputs, rates), stacks)
        of_block = {direction.block: direction for directions in found for direction in directions}
        return [of_block[block] for block in blocks]

    def precondition_stack(self, stack: Stack, inputs: StepInputs, rates: Rates) -> list[Direction]:
        """Run the second half of Algorithm 1 for one block, or for several of one shape."""
        block, state = stack.first, stack.state
        method = self.executor.method(self.method if block.covered else self.elementwise, block)

        # Project the gradient, or its factors h and delta if that is cheaper.
        rows = rows_in_place(self.collector, block, inputs, rates) if block in inputs.calls else None
        if rows is None:
            step = block_step(stack.blocks, inputs, rates, method.squares_all, method.bounds_gradients)
        else:
            step = BlockStep(rows, inputs.n, rates.of(block.key), inputs.ok, small=inputs.small)
        method.project(block, state, step)

        # Update the scaling, from the gradient or from per-example gradients.
        if block.covered and method.needs_examples:
            step.s_star = compute_scalings(self.collector, block, inputs, step)
        method.update_scaling(state, step)

        # Rescale and project back.
        P = method.project_back(method.rescale(block, state, step), step)
        if len(stack.blocks) > 1:
            self.stacks.update_views(stack)
        return stack.directions(P, step, inputs.gradients, rates.keeps_gradients)

    # --- checks before a step ---------------------------------------------------------------------------------------

    def shares(self) -> bool:
        """Return whether other processes take part in this step."""
        running = dist.is_available() and dist.is_initialized()
        return (running or self.partition.owners.size > 1) and self.replicas.together()

    def check_finite(self, inputs: StepInputs) -> bool:
        """Return whether to continue: all gradients are finite, or a mask on the device (``ok``) guards every write."""
        waits = inputs.solves if self.schedule.maskable else {*inputs.solves, *inputs.warm}
        wait = any(p in inputs.gradients for block in waits for p in block.parameters.values())
        self.collector.watch.measure(inputs)
        go, inputs.ok = self.executor.check_finite(list(inputs.sizes.values()), wait)
        inputs.bad = None if inputs.ok is None else inputs.ok == 0
        scaled = isinstance(inputs.mean, Tensor) or inputs.mean != 1 or bool(inputs.touched)
        inputs.small = self.executor.largest_gradient < SMALL and not scaled
        if not go:
            self.skip()
        return go

    # --- between steps --------------------------------------------------------------------------------------------

    def settle(self, wait: bool = False) -> bool:
        """Read back the outcome of the last step and of its warm refreshes; return whether the step was skipped."""
        skipped = self.executor.settle()
        if skipped:
            self.schedule.applied_steps -= 1
            self.skipped.count(self.schedule.applied_steps)
        if self.schedule.pending:
            self.schedule.poll(wait or self.shares())
        return skipped

    def skip(self) -> None:
        """Skip the step: a gradient is not finite."""
        self.skipped.count(self.schedule.applied_steps)
        self.collector.drop()

    @torch.no_grad()
    def finish(self, rates: Rates) -> None:
        """End a step: count it, drop what was captured, and start the warm refreshes that are due."""
        due = dict(self.schedule.advance())
        self.collector.watch.used = self.collector.watch.newest
        self.collector.drop()
        if due and self.shares():
            self.replicas.refresh(due, rates)
        elif due:
            with self.executor.overlapped(self.partition.device, iterated_numbers(due)):
                self.warm_refresh(due, rates)
        if self.partition.owners.size > 1:
            self.replicas.look_ahead()

    def warm_refresh(self, due: Mapping[Block, tuple[int, int]], rates: Rates, ok: Tensor | None = None) -> None:
        """Refresh bases by orthogonal iteration; ``due`` holds the number of iterations of each block's A and B."""
        for together in self.refresher.renewals(self.stacks, due, rates):
            self.method.warm_refresh(together, self.refresher, ok)

    def _replace_executor(self) -> None:
        """Make a new executor, after the model was moved to another device or the options were changed."""
        self.settle(wait=True)  # read back what the old one still has
        self.executor = make_executor(self.options, self._whole_steps, self.partition.offered)
        self.refresher.executor = self.collector.executor = self.executor

    def attach_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Unscale all statistics captured from now on by this scaler."""
        self.options = self.collector.options = replace(self.options, grad_scaler=scaler)
        self._replace_executor()  # the choice of executor depends on the scaler

    def close(self) -> None:
        """Remove all hooks from the model and free what was captured."""
        self.executor.join()
        self.executor.close()
        self.collector.close()
