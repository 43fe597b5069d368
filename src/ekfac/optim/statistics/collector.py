"""What the backward passes since the last step have left of the covered blocks: the engine up to the step.

Statistics are taken as soon as a layer's calls are complete, so that these can go; where the step itself can use the
calls better they wait for it in the stash.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ekfac.curvature import statistics
from ekfac.curvature.blocks import Block
from ekfac.curvature.capture.capture import Capture
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import FactorSums
from ekfac.curvature.summary import low_coverage
from ekfac.optim.cuda.replay import Lanes, Replays
from ekfac.optim.cuda.side_stream import Aside
from ekfac.optim.methods.base import Method
from ekfac.optim.methods.rules import State
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.factored_gradient import may_use_rows, rows_are_cheaper
from ekfac.optim.statistics.fingerprints import Fingerprints
from ekfac.optim.statistics.gradients import GradientWatch
from ekfac.optim.statistics.partition import Coverage, widest
from ekfac.optim.statistics.sums import BlockSums, Expected, reduce_over_processes, world_size


class Intake(Coverage):
    """Gathers the statistics of the blocks that a step will need.

    Args:
        model: The model; its forward counts examples.
        parameters: Those that are trained.
        settings: Checked options.
        method: What is done with blocks that a layer covers.
        state: Where each block keeps its tensors, by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        settings: EngineOptions,
        method: Method,
        state: MutableMapping[Tensor, State],
    ) -> None:
        super().__init__(model, settings, method, state)
        #: What adds to each parameter's ``.grad`` in a backward pass.
        self._accumulators: dict[nn.Parameter, Node] = {}
        self.fingerprints = Fingerprints()
        #: What has been gathered for this step so far.
        self.sums: dict[Block, BlockSums] = {}
        #: Calls whose statistics are taken in the step itself, in the order in which they came.
        self.stash: dict[Block, list[tuple[list[Call], int]]] = {}
        self._stashed_bytes = 0
        self._aside_used = False
        #: Whether low coverage has been told, if there was any to tell.
        self._told_coverage = False
        self.aside = Aside(settings.cuda_graphs)
        self.lanes = Lanes()
        self._replays = Replays("taking statistics", settings.cuda_graphs, settings.memory_limit)
        self.capture = Capture(
            model,
            self._receive,
            self._wanted,
            self._before_forward,
            self._lands,
            settings.batch_dim,
            settings.count,
            per_example=method.needs_examples or settings.sharing == "reduce",
        )
        self.watch = GradientWatch([])
        self.set_parameters(parameters)

    def set_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train these parameters from now on."""
        self.fingerprints.unprobed |= self.assign(parameters)
        self.capture.attach(self.blocks)
        self.watch.attach(self.parameters)
        self.sums = {b: s for b, s in self.sums.items() if b in set(self.blocks)}

    def _before_forward(self) -> bool:
        """Drop what belongs to gradients that somebody else has cleared: a scaler skipped their step, say.

        Returns:
            Whether to capture: not where the whole model is frozen, as another's adversary.
        """
        layout = tuple(p.requires_grad for p in self.offered)
        if not any(layout):
            return False
        if layout != self._layout:
            self.set_parameters(self.offered)
        self.watch.before_forward()
        if self.capture.examples and not self.capture.aside and self.watch.nothing_there:
            self.drop()
        return True

    def _lands(self, block: Block | None) -> bool:
        """Whether the backward pass under way brings a gradient to a block's parameters, or to any of the model's."""
        return any(map(self._reached, self._everything if block is None else block.parameters.values()))

    def _reached(self, parameter: nn.Parameter) -> bool:
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
            self.method.needs_examples
            or self.wants_factors(block)
            or block in self.fingerprints.unprobed
            or self._may_use_rows(block)
        )

    # --- taking it ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _receive(self, block: Block, calls: list[Call], n: int) -> None:
        """Take a block's statistics from all its calls in one forward of the model; then the calls can go."""
        if self._aside_used and not self.capture.aside:
            return
        if self._keeps_for_step(block, calls, n):
            self.stash.setdefault(block, []).append((calls, n))
            self._hold(calls)
            return
        if self._may_use_rows(block):  # rows of several batches are of no use to the step
            for earlier, count in self.stash.pop(block, []):
                self._take(block, earlier, count, hold=self._renews(block))
                for call in earlier:
                    self.capture.held.remove(call.x)
                    self.capture.held.remove(call.d)
        self._take(block, calls, n, hold=self._renews(block))

    def _hold(self, calls: list[Call]) -> None:
        for call in calls:
            self.capture.held.add(call.x)
            self.capture.held.add(call.d)

    def _may_use_rows(self, block: Block) -> bool:
        return may_use_rows(block, self.settings) and not self.capture.aside

    def _keeps_for_step(self, block: Block, calls: list[Call], n: int) -> bool:
        """Whether a block's calls are kept until the step: where it can use them better, and they are small."""
        if self.capture.aside or len(calls) > 1:
            return False
        if self._may_use_rows(block):
            if block in self.stash or block in self.sums:
                return False
            count = calls[0].d.numel() // calls[0].d.shape[-1]
            return rows_are_cheaper(block, count, self.method.needs_examples and count == n)
        if not self.graphs_possible or block in self.fingerprints.unprobed or block.layer.scattered:
            return False
        size = sum(t.numel() * t.element_size() for call in calls for t in (call.x, call.d))
        if self._stashed_bytes + size > self.settings.memory_limit:
            return False
        self._stashed_bytes += size
        return True

    @property
    def graphs_possible(self) -> bool:
        """Whether steps may be captured in CUDA graphs."""
        return (
            self.settings.cuda_graphs
            and self.device.type == "cuda"
            and self.settings.grad_scaler is None
            and world_size() == 1
        )

    def _take(self, block: Block, calls: list[Call], n: int, hold: bool) -> None:
        """Add calls to a block's sums; ``hold`` keeps them for s* in a basis that is not known yet."""
        sums = self.sums.setdefault(block, BlockSums())
        memory = self.settings.memory_limit
        if self.wants_factors(block):
            sums.add_factors(self._factor_sums(block, calls, n))
        if block in self.fingerprints.unprobed and not self.capture.aside:
            sums.add_probe(statistics.probe_sum(block, calls, n, memory, *self.fingerprints.vectors(block)))
        if self.method.needs_examples:
            if hold:
                sums.held.append((calls, n))
                self._hold(calls)
            else:
                self.aside.join()
                basis = self.method.basis(block, self.state[block.key])
                assert basis is not None
                sums.add_scaling(statistics.scaling_sum(block, calls, n, basis, memory))

    def _factor_sums(self, block: Block, calls: list[Call], n: int) -> FactorSums:
        """The sums of A and B; replayed where that has been captured, but for calls that the step itself takes."""
        s = self.settings

        def taken(*tensors: Tensor) -> tuple[Any, ...]:
            given = [Call(c.layer, *tensors[2 * i : 2 * i + 2]) for i, c in enumerate(calls)] if tensors else calls
            sums = statistics.factor_sums(block, given, n, s.sharing, s.memory_limit)
            return sums.A, sums.terms, sums.B

        tensors = [t for call in calls for t in (call.x, call.d)]
        if block in self.stash or not self.graphs_possible or block.layer.scattered:
            return FactorSums(*taken())
        return FactorSums(*self._replays((block, n, *((c.layer, c.layer.mode) for c in calls)), taken, *tensors))

    @contextmanager
    def statistics(self) -> Iterator[None]:
        """Backward passes inside give factors and s*, in place of the training loss's, and leave ``.grad`` alone."""
        saved = [(p, p.grad) for p in self.offered]
        for p, _ in saved:
            p.grad = None
        if not self._aside_used:
            self.sums = {}
            self.stash = {}
            self._aside_used = True
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
        self._accumulators = {}  # not for longer than a step: they hold on to the stream on which they were made
        self.sums = {}
        self.stash = {}
        self._stashed_bytes = 0
        self._aside_used = False

    def close(self) -> None:
        """Remove all hooks from the model and let go of what was captured."""
        self.aside.join()
        self._replays.clear()
        self.drop()
        self.capture.close()
        self.watch.close()

    # --- when the step begins -------------------------------------------------------------------------------------

    def _check_gradients(self, live: list[nn.Parameter]) -> None:
        for p in live:
            if p.grad is not None and p.grad.layout != torch.strided:
                name = next((name for name, q in self.model.named_parameters() if q is p), "?")
                raise ValueError(f"parameter '{name}': its gradient is {p.grad.layout}. Allowed: dense gradients")

    def _check_captured(self) -> None:
        """A layer that has a gradient but was never seen to fire is reported, and gets the diagonal method."""
        if not self._told_coverage:
            self._told_coverage = True
            if (text := low_coverage(self.blocks)) is not None:
                warnings.warn(text, UserWarning, stacklevel=2)
        if self.capture.examples == 0:
            raise RuntimeError(
                "step() found gradients but no captured examples. Call the model that was given to the optimizer (not "
                "a copy), with gradients on, outside paused(); zero_grad() after backward also drops what was captured"
            )
        missing = [
            b
            for b in self.blocks
            if b.covered and b not in self.capture.fired and any(p.grad is not None for p in b.parameters.values())
        ]
        if not missing or world_size() > 1:
            return
        warnings.warn(
            "these layers have gradients but their forward was never called, so they get the diagonal method: "
            + ", ".join(b.name for b in missing),
            RuntimeWarning,
            stacklevel=2,
        )
        self.silent.update(p for b in missing for p in b.parameters.values())
        self.set_parameters(self.offered)

    def is_plain_step(self) -> bool:
        """Whether the step has nothing that only the eager way can do, so that a graph may hold it.

        All parameters have gradients as backward left them, no basis is solved for, or turned where that takes much
        memory, and no layer waits for its probe.
        """
        return (
            bool(self.capture.examples)
            and not self._aside_used
            and all(s.probe is None and not s.held for s in self.sums.values())
            and not any(b in self.fingerprints.unprobed or self._due(b) for b in self._index)
            and (self._turns_small() or not self.schedule.turns_within(self.applied_steps))
            and all(p.grad is not None and p.grad.layout == torch.strided for p in self.parameters)
            and not any(map(self.watch.touched, self.parameters))
            and all(b in self.capture.fired for b in self._index)
        )

    def _take_stash(self) -> None:
        def take(block: Block) -> None:
            for calls, n in self.stash[block]:
                self._take(block, calls, n, hold=True)

        self.lanes([partial(take, block) for block in self.stash], list(map(widest, self.stash)))

    def _expected(self, block: Block) -> Expected:
        aside = self._aside_used
        scaling = self.method.needs_examples and not self._renews(block)
        return Expected(self.wants_factors(block), scaling, block in self.fingerprints.unprobed and not aside)

    def _gather(self) -> tuple[float | Tensor, float | Tensor]:
        """N of the gradient and N of the statistics, over all processes, after summing the statistics over them."""
        counts = [
            self.capture.examples,
            self.capture.examples_aside if self._aside_used else self.capture.examples,
        ]
        if world_size() == 1:
            return float(counts[0]), float(counts[1])
        expected = {b: self._expected(b) for b in self.blocks if b.covered}
        n, n_statistics = reduce_over_processes(self.sums, expected, counts, self.device)
        return n, n_statistics

    def _loss_scale(self) -> float | Tensor:
        scaler = self.settings.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return scaler.scale(torch.ones((), device=self.device))
