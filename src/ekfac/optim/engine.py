"""From what the backward passes left to a direction for every parameter: Algorithm 1 without its last line.

    batch -> capture -> factors -> basis -> scaling -> direction
             h, delta   A, B       U_A,U_B   s          U_B (g / s) U_A^T

The engine has a partition (what is trained), a schedule (what is due when), a collector (what backward left), a
refresher (how bases are renewed) and an executor (how the parts of a step are run). It owns no hyper-parameter of the
update; EKFAC, KFAC and Preconditioner are built on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.factors import no_autocast, tensor_cores
from ekfac.optim.cuda.executor import CudaExecutor as Executor  # or, slower: from ekfac.optim.executor import Executor
from ekfac.optim.distributed.replicas import Replicas
from ekfac.optim.methods.base import Method
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.averages import average_factors, factors_of
from ekfac.optim.statistics.collector import Collector, widest
from ekfac.optim.statistics.gradients import block_step
from ekfac.optim.statistics.partition import Partition
from ekfac.optim.statistics.refresh import Refresher
from ekfac.optim.statistics.schedule import Schedule
from ekfac.optim.types import BlockStep, Direction, Rates, StepInputs

#: After so many skipped steps without another between them the user is warned.
SKIPPED_IN_A_ROW = 20

#: Does something with the directions of a step: (inputs, directions, rates).
Apply = Callable[[StepInputs, list[Direction], Rates], None]


class Engine:
    """Turns the gradients of a model into directions.

    Args:
        model: The model; its forward counts examples.
        parameters: Those that are trained.
        options: Checked options.
        method: What is done with blocks that a layer covers.
        elementwise: What is done with the rest.
        state: Where each block keeps its tensors, by parameter.
        whole_steps: Whether the update of the parameters is part of :meth:`step`, so that a CUDA graph can hold it.
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
        self.partition = Partition(
            model,
            options,
            state,
            lambda block: self.method_of(block).state_class,
            lambda block: self.method_of(block).numbers(block),
        )
        self.schedule = Schedule(options, method, self.partition)
        self.executor = Executor(options, whole_steps)
        self.refresher = Refresher(self.executor)
        self.collector = Collector(options, method, self.partition, self.schedule, self.executor)
        self.collector.set_parameters(parameters)
        self.replicas = Replicas(self)
        self.skipped_steps = 0
        #: After how many applied steps the last one was skipped, and how many were skipped there.
        self._skipped_at = (0, 0)

    def method_of(self, block: Block) -> Method[Any]:
        """The method that serves a block."""
        return self.method if block.covered else self.elementwise

    # --- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, rates: Rates, apply: Apply) -> bool | None:
        """Do Algorithm 1 over all blocks, and with their directions what ``apply`` says.

        Returns:
            Whether it was done: False if a gradient is not finite, None if there is none.
        """

        def compute(inputs: StepInputs, rates: Rates) -> None:
            apply(inputs, self.directions(inputs, rates), rates)

        if self.replicas.together():
            return self.replicas.step(rates, compute)
        inputs = self.collector.inputs()
        if inputs is None:
            return None
        if self.executor.replay(self, inputs, rates, compute):
            return True
        sizes, left = self.collector.watch.sizes(list(inputs.gradients))
        if not self.check_finite(inputs, sizes):
            return False
        self.collector.collect(inputs, dict(zip(inputs.gradients, sizes, strict=True)))
        self.collector.verify(inputs, sizes, left)
        compute(inputs, rates)
        return True

    def check_finite(self, inputs: StepInputs, sizes: list[Tensor]) -> bool:
        """Tell whether to go on: all gradients are finite, or a mask will see to it that nothing changes."""
        live = [b for b in self.partition.blocks if any(p in inputs.gradients for p in b.parameters.values())]
        go, inputs.ok = self.executor.check_finite(sizes, wait=any(map(self.schedule.waits, live)))
        inputs.bad = None if inputs.ok is None else inputs.ok == 0
        if not go:
            self.skip()
        return go

    def directions(self, inputs: StepInputs, rates: Rates) -> list[Direction]:
        """Factors, bases, scalings, directions: the part of a step that the device does."""
        square = self.collector.delta_square(inputs.n_statistics)
        exact = self.options.deterministic
        average_factors(self.partition, inputs, square, self.options.factor_decay, bounded=not exact)
        known = [b for b in self.partition.blocks if b not in inputs.unknown]
        blocks = [b for b in known if any(p in inputs.gradients for p in b.parameters.values())]
        parts = [partial(self.precondition_block, block, inputs, rates) for block in blocks]
        with (no_autocast if exact else tensor_cores)(self.partition.device):
            if self.replicas.together():
                return self.replicas.directions(blocks, inputs, rates)
            return self.executor.parallel(parts, list(map(widest, blocks)))

    def precondition_block(self, block: Block, inputs: StepInputs, rates: Rates) -> Direction:
        """Algorithm 1 for one block, which no other's depends on."""
        if self.schedule.renews(block):
            self.compute_eigenbasis(block, inputs, rates)
        return self.direction(block, inputs, rates)

    def direction(self, block: Block, inputs: StepInputs, rates: Rates) -> Direction:
        """Algorithm 1 for one block with its basis as it stands."""
        method, state = self.method_of(block), self.partition.state(block)
        step = self._block_step(block, inputs, rates)
        method.project(block, state, step)
        step.s_star = self.collector.scaling(block, inputs, step)
        method.update_scaling(state, step)
        P = method.project_back(method.rescale(block, state, step), step)
        G = step.gradient if isinstance(step.gradient, Tensor) else partial(self._whole_gradient, block, inputs, rates)
        moving = [p in inputs.gradients for p in block.parameters.values()]
        return Direction(block, block.unstack(P), G, moving, step.products)

    def no_direction(self, block: Block, inputs: StepInputs) -> Direction:
        """A block that another process updates."""
        moving = [p in inputs.gradients for p in block.parameters.values()]
        return Direction(block, [], block.key.new_empty(0), moving)

    def compute_eigenbasis(self, block: Block, inputs: StepInputs, rates: Rates) -> None:
        """Algorithm 1, ComputeEigenBasis: U_A, S_A and U_B, S_B of the factors, by a full solve or warm."""
        state = self.partition.state(block)
        (A, B), damping = factors_of(state), rates.of(block.key).damping
        if self.schedule.solves(block):
            state.strayed = 0
            state.pop("near", None)
            self.method.refresh(block, state, A, B, float(damping), self.refresher)
        else:
            iterations = self.schedule.iterations_within(block)
            self.method.warm_refresh(block, state, A, B, damping, self.refresher, iterations, inputs.ok)

    def _block_step(self, block: Block, inputs: StepInputs, rates: Rates) -> BlockStep:
        """What is preconditioned: ``.grad``, or the rows that it is the product of where these are cheaper."""
        rows = self.collector.rows(block, inputs, rates)
        if rows is not None:
            return BlockStep(rows, inputs.n, rates.of(block.key), inputs.ok)
        return block_step(block, inputs, rates, self._mean(inputs), self.method_of(block).squares_penalty)

    def _whole_gradient(self, block: Block, inputs: StepInputs, rates: Rates) -> Tensor:
        gradient = block_step(block, inputs, rates, self._mean(inputs), squares_penalty=False).gradient
        assert isinstance(gradient, Tensor)
        return gradient

    def _mean(self, inputs: StepInputs) -> float | Tensor:
        """What gradients are multiplied by to be those of a mean over examples."""
        return self.options.processes.size / inputs.n if self.options.loss_reduction == "sum" else 1.0

    # --- between steps --------------------------------------------------------------------------------------------

    def settle(self, wait: bool = False) -> None:
        """Begin a step: learn whether the last one was skipped, and how its warm refreshes went."""
        self.executor.join()
        self.read_verdict()
        if self.refresher.pending:
            for block, near in self.refresher.poll(wait or self.options.processes.size > 1):
                state = self.partition.peek(block)
                if self.method.ready(state):
                    state.near = near and state.get("near", True)

    def read_verdict(self) -> bool:
        """Correct the counts if the last step turns out to have been skipped; returns whether it has."""
        skipped = self.executor.was_skipped()
        if skipped:
            self.schedule.applied_steps -= 1
            self._count_skipped()
        return skipped

    def skip(self) -> None:
        """Leave everything as it is: a gradient is not finite."""
        self._count_skipped()
        self.collector.drop()

    def _count_skipped(self) -> None:
        """Count a step that changed nothing; warn if there has been nothing else for a while."""
        self.skipped_steps += 1
        applied, (at, row) = self.schedule.applied_steps, self._skipped_at
        self._skipped_at = applied, row + 1 if at == applied else 1
        if self._skipped_at[1] == SKIPPED_IN_A_ROW:
            warnings.warn(
                f"the last {SKIPPED_IN_A_ROW} steps were skipped, as their gradients were not finite: weights or data "
                "hold NaN or infinity, or the loss overflows. opt.stats()['skipped_steps'] counts them",
                RuntimeWarning,
                stacklevel=4,
            )

    @torch.no_grad()
    def finish(self, rates: Rates) -> None:
        """End a step: count it, let go of what was captured, and refresh the bases that are due, warm."""
        self.schedule.count_strays()
        due = [(b, n) for b in self.partition.covered if any(n := self.schedule.iterations_after(b))]
        self.collector.drop()
        self.schedule.applied_steps += 1
        ready = [(b, n) for b, n in due if self.schedule.ready(b)]
        if not ready:
            return
        if self.replicas.together():
            self.replicas.refresh(ready, rates)
            return
        with self.executor.beside(self.partition.device):
            for block, iterations in ready:
                self.warm_refresh(block, iterations, rates)

    def warm_refresh(self, block: Block, iterations: tuple[int, int], rates: Rates) -> None:
        """Bring a block's basis nearer to its factors' own, between two steps."""
        state, damping = self.partition.state(block), rates.of(block.key).damping
        self.method.warm_refresh(block, state, *factors_of(state), damping, self.refresher, iterations)

    def close(self) -> None:
        """Remove all hooks from the model and let go of what was captured."""
        self.executor.join()
        self.executor.close()
        self.collector.close()
