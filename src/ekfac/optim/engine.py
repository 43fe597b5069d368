"""From what the backward passes left to a direction for every parameter: Algorithm 1 without its last line.

    batch -> capture -> factors -> basis -> scaling -> direction
             h, delta   A, B       U_A,U_B   s          U_B (g / s) U_A^T

The engine owns no hyper-parameter of the update; EKFAC, KFAC and Preconditioner are built on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ekfac.curvature import statistics
from ekfac.curvature.blocks import Block
from ekfac.curvature.summary import Summary, summarise
from ekfac.optim.cuda.nonfinite import Verdicts
from ekfac.optim.cuda.replay import Replays
from ekfac.optim.methods.base import Method, Step
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.methods.rules import State
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.collector import Intake
from ekfac.optim.statistics.factored_gradient import Rows, rows_of
from ekfac.optim.statistics.gradients import largest_magnitudes, stacked_gradient
from ekfac.optim.statistics.partition import widest
from ekfac.optim.statistics.refresh import Refresher
from ekfac.optim.statistics.sums import BlockSums, average_factors, reduced_zeros, world_size
from ekfac.optim.types import Direction, Update, Work, as_scalar

#: After so many skipped steps without another between them the user hears of it.
SKIPPED_IN_A_ROW = 20


class Engine(Intake):
    """Turns the gradients of a model into directions.

    Args:
        model: The model; its forward counts examples.
        parameters: Those that are trained.
        settings: Checked options.
        method: What is done with blocks that a layer covers.
        elementwise: What is done with the rest.
        state: Where each block keeps its tensors, by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        settings: EngineOptions,
        method: Method,
        elementwise: EigenMethod,
        state: MutableMapping[Tensor, State],
    ) -> None:
        super().__init__(model, parameters, settings, method, state)
        self.elementwise = elementwise
        self.refresher = Refresher(Replays("a refresh", settings.cuda_graphs), self.lanes)
        self.verdicts = Verdicts()
        self.skipped_steps = 0
        #: After how many applied steps the last one was skipped, and how many were skipped there.
        self._skipped_at = (0, 0)
        #: The mask of the step under way, see :mod:`ekfac.optim.cuda.nonfinite`.
        self.ok: Tensor | None = None

    def method_of(self, block: Block) -> Method:
        """The method that serves a block."""
        return self.method if block.covered else self.elementwise

    def summary(self) -> Summary:
        """Which block covers each parameter, its factor sizes and its memory."""
        return summarise(self.blocks, lambda block: self.method_of(block).numbers(block))

    def settle(self, wait: bool = False) -> None:
        """Correct the host's counts if the last step turns out to have been skipped; hear of bases that were turned."""
        self.aside.join()
        if self.verdicts.settle():
            self.applied_steps -= 1
            self._skipped()
        for block, near in self.refresher.heard(wait or world_size() > 1):
            state = self.state.get(block.key, {})
            if self.method.ready(state):
                state["near"] = near and state.get("near", True)

    def _skipped(self) -> None:
        """Count a step that changed nothing; say so if there has been nothing else for a while."""
        self.skipped_steps += 1
        at, row = self._skipped_at
        self._skipped_at = self.applied_steps, row + 1 if at == self.applied_steps else 1
        if self._skipped_at[1] == SKIPPED_IN_A_ROW:
            warnings.warn(
                f"the last {SKIPPED_IN_A_ROW} steps were skipped, as their gradients were not finite: weights or data "
                "hold NaN or infinity, or the loss overflows. opt.stats()['skipped_steps'] counts them",
                RuntimeWarning,
                stacklevel=4,
            )

    def _count_strays(self) -> None:
        """Take in what was heard of bases: between two steps, as what a step captures depends on it."""
        for block in self._index:
            state = self.state.get(block.key, {})
            if (near := state.pop("near", None)) is not None:
                strayed = state.pop("strayed", 0)
                if not near:
                    state["strayed"] = strayed + 1

    def directions(self, update: Update) -> list[Direction] | None:
        """One pass of Algorithm 1 over all layers; None if the step is skipped because a gradient is not finite."""
        work = self.prepare()
        if work is None:
            return []
        if not self.judge(work):
            return None
        return self.compute(work, update)

    def prepare(self) -> Work | None:
        """What the host can check before anything is computed; None if there is no gradient."""
        self.settle()
        live = [p for p in self.parameters if p.grad is not None]
        if not live:
            self.drop()
            return None
        self._check_gradients(live)
        self.capture.finish()
        self._check_captured()
        return Work(live)

    @torch.no_grad()
    def judge(self, work: Work) -> bool:
        """Whether to go on: all gradients are finite, or a mask on the device will see to it that nothing changes."""
        sizes, left = self.watch.sizes(work.live)
        go, self.ok = self.verdicts.judge(sizes, at_once=self._waits(work))
        work.bad = None if self.ok is None else self.ok == 0
        if not go:
            self._skipped()
            self.drop()
            return False
        self._take_stash()
        work.n, work.n_statistics = self._gather()
        self._check_statistics(work, dict(zip(work.live, sizes, strict=True)))
        self.fingerprints.check(self.sums, self.watch, self._loss_scale())
        work.rescaled = self.watch.rescaling(work.live, sizes, left, self._loss_scale())
        return True

    def _waits(self, work: Work) -> bool:
        """Whether a layer that has a gradient begins the step with a solve, for which the host waits anyway."""
        live = set(work.live)
        waits = self._due if self.masks_turns else self._renews
        return any(waits(b) for b in self.blocks if not live.isdisjoint(b.parameters.values()))

    def _check_statistics(self, work: Work, sizes: Mapping[nn.Parameter, Tensor]) -> None:
        """A layer of whose factors nothing is known yet is left alone if its gradient is zero, else refused."""
        for block in self._index:
            gathered = self.sums.get(block)
            if "A" in self.state.get(block.key, {}) or (gathered is not None and gathered.factors is not None):
                continue
            given = [sizes[p] for p in block.parameters.values() if p in sizes]
            if any(bool(size > 0) for size in given):
                raise RuntimeError(
                    f"layer '{block.name}' has a gradient, but no backward pass that was captured has come to it yet: "
                    f"let the loss inside opt.statistics() reach it, or exclude=['{block.name}']"
                )
            work.unknown.add(block)

    def mask_on_device(self, work: Work) -> None:
        """What :meth:`judge` does, where the host must not look at all."""
        self.ok = self.verdicts.mask(largest_magnitudes([p.grad for p in work.live if p.grad is not None]))
        work.bad = self.ok == 0
        self._take_stash()

    @torch.no_grad()
    def compute(self, work: Work, update: Update) -> list[Direction]:
        """The part of a step that the device does: factors, bases, scalings, directions."""
        self._update_factors(work)
        known = [b for b in self.blocks if b not in work.unknown]
        blocks = [b for b in known if any(p.grad is not None for p in b.parameters.values())]
        return self.lanes([partial(self._direct, b, work, update) for b in blocks], list(map(widest, blocks)))

    def _direct(self, block: Block, work: Work, update: Update) -> Direction:
        """A block's own part of :meth:`compute`, which no other's depends on."""
        state, damping, renews = self.state[block.key], update.damping_of(block), self._renews(block)
        if self._due(block):
            self._compute_eigenbasis(block, state, float(damping))
        elif renews:
            self._turn_eigenbasis(block, damping, (1, 1), self.ok)
        method = self.method_of(block)
        mean = world_size() / work.n if self.settings.loss_reduction == "sum" else 1.0
        rows = self._rows(block, work, update)
        s_star = self._compute_scaling(block, state, work, renews, rows)
        gradient: Tensor | Rows | None = rows
        ratio = left = None
        if gradient is None:
            gradient, ratio, left = stacked_gradient(block, work, update, mean, method.squares_penalty)
        step = Step(work.n, s_star, self.ok, damping, ratio, left)
        P = method.direction(block, state, gradient, step)

        def preconditioned(given: Tensor | Rows = gradient) -> Tensor:
            return given if isinstance(given, Tensor) else stacked_gradient(block, work, update, mean, False)[0]

        return Direction(block, block.unstack(P), preconditioned)

    def finish(self, update: Update) -> None:
        """The step is done: count it, turn the bases that are due, and let go of what was captured."""
        self._count_strays()
        ready = self.method.ready
        turning = [(b, turns) for b in self._index if any(turns := self._turns(b)) and ready(self.state[b.key])]
        self.drop()
        self.applied_steps += 1
        if not turning:
            return
        with self.aside.work(self.device):
            for block, turns in turning:
                self._turn_eigenbasis(block, update.damping_of(block), turns)

    def close(self) -> None:
        """Remove all hooks from the model and let go of what was captured."""
        super().close()
        self.refresher.close()

    def _delta_square(self, n: float | Tensor) -> float | Tensor:
        """What the sum of squared captured gradients is multiplied by to be the mean of squared delta_n.

        Under a mean loss delta_n is N times the captured gradient; a process averages over its own examples, so with
        W processes it is N / W times. Under a sum it is the captured gradient itself.
        """
        scale = self._loss_scale()
        if self.settings.loss_reduction == "sum":
            return 1 / (n * scale * scale)
        w = world_size()
        return n / (w * w * scale * scale)

    def _update_factors(self, work: Work) -> None:
        """A and B as averages over steps, each batch weighted by its N."""
        square = self._delta_square(work.n_statistics)
        average_factors(self.sums, self.state, work, square, self.settings.factor_decay, self.ok)

    def _compute_eigenbasis(self, block: Block, state: State, damping: float) -> None:
        """Algorithm 1, ComputeEigenBasis: U_A, S_A and U_B, S_B of the factors."""
        A, B = self.factors(block)
        state.pop("strayed", None)
        state.pop("near", None)
        self.method.refresh(block, state, A, B, damping, self.refresher)

    @torch.no_grad()
    def _turn_eigenbasis(
        self, block: Block, damping: float | Tensor, turns: tuple[int, int], ok: Tensor | None = None
    ) -> None:
        """ComputeEigenBasis from the basis in use, the host never waiting."""
        A, B = self.factors(block)
        self.method.turn(block, self.state[block.key], A, B, damping, self.refresher, turns, ok)

    def factors(self, block: Block) -> tuple[Tensor, Tensor]:
        """A and B as they stand."""
        state = self.state[block.key]
        weight = state["factor_weight"].clamp(min=torch.finfo(block.dtype).tiny)
        return state["A"] / weight, state["B"] / weight

    def _compute_scaling(self, block: Block, state: State, work: Work, due: bool, rows: Rows | None) -> Tensor | None:
        """Algorithm 1, ComputeScalings: s* of this step's examples, in the basis that is now in use."""
        if not (block.covered and self.method.needs_examples):
            return None
        sums = self.sums.setdefault(block, BlockSums())
        if sums.held:
            basis = self.method.basis(block, state)
            assert basis is not None
            if rows is not None and rows.one_each:
                sums.add_scaling(rows.scaling_sum(basis))
            else:
                for calls, count in sums.held:
                    sums.add_scaling(statistics.scaling_sum(block, calls, count, basis, self.settings.memory_limit))
            sums.held = []
        if world_size() > 1 and due:
            sums.scaling = reduced_zeros(block) if sums.scaling is None else sums.scaling.contiguous()
            dist.all_reduce(sums.scaling)
        if sums.scaling is None:
            return None
        return work.masked(sums.scaling * as_scalar(self._delta_square(work.n_statistics), sums.scaling))

    def _rows(self, block: Block, work: Work, update: Update) -> Rows | None:
        """The captured h and delta in place of ``.grad``, where it is certain that ``.grad`` is their product.

        Nobody may have touched it, it must come from this one backward pass, and it must have the rows' fingerprint.
        """
        kept = self.stash.get(block)
        if kept is None or len(kept) > 1 or not self._may_use_rows(block) or not self.watch.single_pass:
            return None
        parameters = list(block.parameters.values())
        if any(p in work.rescaled or p.grad is None or update.maximize_of(p) or update.l2_of(p) for p in parameters):
            return None
        (call,), n = kept[0]
        rows = rows_of(block, call, n)
        return rows if self.fingerprints.agree(block, rows) else None
