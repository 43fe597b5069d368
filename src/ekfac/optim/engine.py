"""From what the backward passes left to a direction for every parameter: Algorithm 1 without its last line.

    batch -> capture -> factors -> basis -> scaling -> direction
             h, delta   A, B       U_A,U_B   s          U_B (g / s) U_A^T

The engine owns no hyper-parameter of the update; EKFAC, KFAC and Preconditioner are built on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ekfac.curvature import statistics
from ekfac.curvature.blocks import Block, find_blocks
from ekfac.curvature.capture import Capture
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers import Call, LinearLayer
from ekfac.optim import options
from ekfac.optim.accumulate import (
    BlockSums,
    Expected,
    differ_between_processes,
    reduce_over_processes,
    reduced_zeros,
    world_size,
)
from ekfac.optim.eigen import EigenMethod, Rows, Step, rows_are_cheaper
from ekfac.optim.gradients import GradientWatch, largest_magnitudes
from ekfac.optim.options import EngineOptions
from ekfac.optim.refresh import Refresher, Schedule
from ekfac.optim.rules import State
from ekfac.optim.skipping import Verdicts


class Method(Protocol):
    """How one block's gradient becomes a direction; EKFAC's is :class:`EigenMethod`."""

    needs_examples: bool
    squares_penalty: bool
    has_alignment: bool
    damping_is_free: bool

    def refresh(self, block: Block, state: State, A: Tensor, B: Tensor, damping: float, refresher: Refresher) -> None:
        """Compute anew what is derived from the factors; the host may wait."""

    def turn(
        self, block: Block, state: State, A: Tensor, B: Tensor, damping: float, refresher: Refresher,
        turns: tuple[int, int],
    ) -> None:  # fmt: skip
        """Bring what is derived from the factors nearer to them; the host must not wait."""

    def basis(self, block: Block, state: State) -> Basis | None:
        """The basis that s* is to be taken in."""

    def direction(self, block: Block, state: State, gradient: Tensor | Rows, step: Step) -> Tensor:
        """The preconditioned gradient, ``[G, O, C]``."""


@dataclass(frozen=True)
class Direction:
    """A block's preconditioned gradient as a list in the order of its parameters, and what it was made of."""

    block: Block
    steps: list[Tensor]
    preconditioned: Callable[[], Tensor]

    @property
    def gradients(self) -> list[Tensor]:
        """What was preconditioned, in the order of the block's parameters."""
        return self.block.unstack(self.preconditioned())


@dataclass(frozen=True)
class Update:
    """What the optimizer asks of a step: per block or parameter, from its groups."""

    damping_of: Callable[[Block], float | Tensor]
    l2_of: Callable[[nn.Parameter], float] = lambda p: 0.0
    maximize_of: Callable[[nn.Parameter], bool] = lambda p: False


@dataclass
class Work:
    """What a step found on the host before it computes: see :meth:`Engine.prepare`."""

    live: list[nn.Parameter]
    n: float | Tensor = 0.0
    n_statistics: float | Tensor = 0.0
    rescaled: dict[nn.Parameter, Tensor] = field(default_factory=dict)


class Engine:
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
        self.model = model
        self.settings = settings
        self.method = method
        self.elementwise = elementwise
        self.state = state
        self.schedule = Schedule(settings.refresh_every, settings.deterministic)
        self.refresher = Refresher(settings.cuda_graphs)
        self.verdicts = Verdicts()
        self.applied_steps = 0
        self.skipped_steps = 0
        #: The mask of the step under way, see :mod:`ekfac.optim.skipping`.
        self.ok: Tensor | None = None
        self._bad: Tensor | None = None
        self.generation = 0
        self._index: dict[Block, int] = {}
        self.parameters: list[nn.Parameter] = []
        self.blocks: list[Block] = []
        self._layout: tuple[bool, ...] = ()
        self.silent: set[nn.Parameter] = set()
        self._unprobed: set[Block] = set()
        self._probes: dict[Block, tuple[Tensor, Tensor]] = {}
        self._sums: dict[Block, BlockSums] = {}
        #: Calls whose statistics are taken in the step itself, in the order in which they came.
        self.stash: dict[Block, list[tuple[list[Call], int]]] = {}
        self._stashed_bytes = 0
        self._aside_used = False
        self.capture = Capture(model, self._receive, self._wanted, self._before_forward, settings.batch_dim)
        self.watch = GradientWatch([])
        self.set_parameters(parameters)

    # --- what is covered ------------------------------------------------------------------------------------------

    def blocks_of(self, parameters: Iterable[nn.Parameter]) -> list[Block]:
        """The blocks that these parameters would be assigned to."""
        s = self.settings
        return find_blocks(
            self.model,
            parameters,
            include=s.include,
            exclude=s.exclude,
            sua=s.sua,
            max_factor_dim=s.max_factor_dim,
            identity=s.basis == "identity",
            unsupported=s.unsupported,
            silent=self.silent,
        )

    def set_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assign the trained parameters to blocks. Blocks that stay as they were keep their state."""
        chosen = list(parameters)
        blocks = self.blocks_of(chosen)
        before = {tuple(b.parameters.values()): b for b in self.blocks}
        for i, block in enumerate(blocks):
            known = before.get(tuple(block.parameters.values()))
            if known is not None and known.covered == block.covered:
                blocks[i] = known
            else:
                for parameter in block.parameters.values():
                    self._forget(parameter)
        self.parameters = chosen
        self.blocks = blocks
        #: Grows whenever tensors that a captured step may hold on to were replaced.
        self.generation += 1
        self._index = {b: i for i, b in enumerate(b for b in blocks if b.covered)}
        self._unprobed |= {b for b in blocks if b.covered and b not in before.values()}
        self._layout = tuple(p.requires_grad for p in chosen)
        self.capture.attach(blocks)
        self.watch.attach(chosen)
        self._sums = {b: s for b, s in self._sums.items() if b in set(blocks)}

    def _forget(self, parameter: nn.Parameter) -> None:
        momentum = self.state.get(parameter, {}).get("momentum_buffer")
        self.state.pop(parameter, None)
        if momentum is not None:
            self.state[parameter]["momentum_buffer"] = momentum

    def check_layout(self) -> None:
        """Follow parameters that were frozen or unfrozen; such a layer starts anew."""
        if tuple(p.requires_grad for p in self.parameters) != self._layout:
            self.set_parameters(self.parameters)

    def _before_forward(self) -> None:
        """Drop what belongs to gradients that somebody else has cleared: a scaler skipped their step, say."""
        self.check_layout()
        self.watch.before_forward()
        if self.capture.examples and not self.capture.aside and self.watch.nothing_there:
            self.drop()

    def method_of(self, block: Block) -> Method:
        """The method that serves a block."""
        return self.method if block.covered else self.elementwise

    # --- capture --------------------------------------------------------------------------------------------------

    def _due(self, block: Block) -> bool:
        """Whether this step begins with a full solve for the block's basis."""
        if not block.covered:
            return False
        state = self.state.get(block.key, {})
        return "S_A" not in state or state.get("strayed", False) or self.schedule.solve(self.applied_steps)

    def _renews(self, block: Block) -> bool:
        """Whether this step uses a basis that is not known before it."""
        return self._due(block) or (block.covered and self.schedule.turns_within(self.applied_steps))

    def _turns(self, block: Block) -> tuple[int, int]:
        """How many iterations the two sides of the block's basis get after this step."""
        return self.schedule.turns_after(self.applied_steps + 1, self._index[block], len(self._index))

    def _wants_factors(self, block: Block) -> bool:
        if self.settings.factor_decay > 0 and self.applied_steps % self.settings.factor_interval == 0:
            return True
        return self._renews(block) or (self.settings.factor_decay == 0 and any(self._turns(block)))

    def _wanted(self, block: Block) -> bool:
        return (
            self.method.needs_examples
            or self._wants_factors(block)
            or block in self._unprobed
            or self._may_use_rows(block)
        )

    @torch.no_grad()
    def _receive(self, block: Block, calls: list[Call], n: int) -> None:
        """Take a block's statistics from all its calls in one forward of the model; then the calls can go."""
        if self._aside_used and not self.capture.aside:
            return
        if self._keeps_for_step(block, calls):
            self.stash.setdefault(block, []).append((calls, n))
            self._hold(calls)
        else:
            self._take(block, calls, n, hold=self._renews(block))

    def _hold(self, calls: list[Call]) -> None:
        for call in calls:
            self.capture.held.add(call.x)
            self.capture.held.add(call.d)

    def _may_use_rows(self, block: Block) -> bool:
        """Whether the gradient might be projected row by row: see :meth:`_rows`."""
        return (
            block.key.device.type == "cpu"
            and self.settings.loss_reduction == "mean"
            and isinstance(block.layer, LinearLayer)
            and len(block.uses) == 1
            and world_size() == 1
            and not self.capture.aside
        )

    def _keeps_for_step(self, block: Block, calls: list[Call]) -> bool:
        """Whether a block's calls are kept until the step: where it can use them better, and they are small."""
        if self.capture.aside or block in self._unprobed or len(calls) > 1:
            return False
        if self._may_use_rows(block):
            return rows_are_cheaper(block, calls[0].d.numel() // calls[0].d.shape[-1])
        if not self.graphs_possible:
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
            and self.parameters[0].is_cuda
            and self.settings.grad_scaler is None
            and world_size() == 1
        )

    def _take(self, block: Block, calls: list[Call], n: int, hold: bool) -> None:
        """Add calls to a block's sums; ``hold`` keeps them for s* in a basis that is not known yet."""
        sums = self._sums.setdefault(block, BlockSums())
        memory = self.settings.memory_limit
        if self._wants_factors(block):
            sums.add_factors(statistics.factor_sums(block, calls, n, self.settings.sharing, memory))
        if block in self._unprobed and not self.capture.aside:
            sums.add_probe(statistics.probe_sum(block, calls, n, memory, *self._probe_vectors(block)))
        if self.method.needs_examples:
            if hold:
                sums.held.append((calls, n))
                self._hold(calls)
            else:
                basis = self.method.basis(block, self.state[block.key])
                assert basis is not None
                sums.add_scaling(statistics.scaling_sum(block, calls, n, basis, memory))

    @contextmanager
    def statistics(self) -> Iterator[None]:
        """Backward passes inside give factors and s*, in place of the training loss's, and leave ``.grad`` alone."""
        saved = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        if not self._aside_used:
            self._sums = {}
            self.stash = {}
            self._aside_used = True
        self.watch.enabled = False
        try:
            with self.capture.statistics_aside():
                yield
        finally:
            self.watch.enabled = True
            for p, grad in zip(self.parameters, saved, strict=True):
                p.grad = grad

    def drop(self) -> None:
        """Forget what was captured and not used."""
        self.capture.drop()
        self.watch.forget()
        self._sums = {}
        self.stash = {}
        self._stashed_bytes = 0
        self._aside_used = False

    def close(self) -> None:
        """Remove all hooks from the model and let go of what was captured."""
        self.drop()
        self.capture.close()
        self.watch.close()

    # --- the step -------------------------------------------------------------------------------------------------

    def settle(self, wait: bool = False) -> None:
        """Correct the host's counts if the last step turns out to have been skipped; hear of bases that strayed."""
        if self.verdicts.settle():
            self.applied_steps -= 1
            self.skipped_steps += 1
        for block in self.refresher.strayed(wait or world_size() > 1):
            self.state[block.key]["strayed"] = True

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
        self.check_layout()
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
        go, self.ok = self.verdicts.judge(sizes, at_once=any(map(self._renews, self.blocks)))
        self._bad = None if self.ok is None else self.ok == 0
        if not go:
            self.skipped_steps += 1
            self.drop()
            return False
        self._take_stash()
        work.n, work.n_statistics = self._gather()
        self._check_probes()
        work.rescaled = self._rescaling(work.live, sizes, left)
        return True

    def is_plain_step(self) -> bool:
        """Whether the step has nothing that only the eager way can do, so that a graph may hold it.

        All parameters have gradients as backward left them, no basis is solved for, no layer waits for its probe, and
        no statistics stand outside the stash.
        """
        self.check_layout()
        return (
            bool(self.capture.examples)
            and not self._aside_used
            and not self._sums
            and not any(b in self._unprobed or self._renews(b) for b in self._index)
            and all(p.grad is not None and p.grad.layout == torch.strided for p in self.parameters)
            and not any(map(self.watch.touched, self.parameters))
            and all(b in self.capture.fired for b in self._index)
        )

    def mask_on_device(self, work: Work) -> None:
        """What :meth:`judge` does, where the host must not look at all."""
        self.ok = self.verdicts.mask(largest_magnitudes([p.grad for p in work.live if p.grad is not None]))
        self._bad = self.ok == 0
        self._take_stash()

    def forget_sums(self) -> None:
        """Drop sums that a capture has left: their tensors were never computed."""
        self._sums = {}

    def _take_stash(self) -> None:
        for block, kept in self.stash.items():
            for calls, n in kept:
                self._take(block, calls, n, hold=True)

    @torch.no_grad()
    def compute(self, work: Work, update: Update) -> list[Direction]:
        """The part of a step that the device does: factors, bases, scalings, directions."""
        self._update_factors(work.n_statistics)
        results = []
        for block in self.blocks:
            if all(p.grad is None for p in block.parameters.values()):
                continue
            state, damping = self.state[block.key], update.damping_of(block)
            renews = self._renews(block)
            if self._due(block):
                self._compute_eigenbasis(block, state, float(damping))
            elif renews:
                self._turn_eigenbasis(block, float(damping), (1, 1))
            s_star = self._compute_scaling(block, state, work.n_statistics, renews)
            method = self.method_of(block)
            gradient: Tensor | Rows | None = self._rows(block, work, update)
            ratio = left = None
            if gradient is None:
                gradient, ratio, left = self._gradient(block, work, update, method.squares_penalty)
            step = Step(work.n, s_star, self.ok, damping, ratio, left)
            P = method.direction(block, state, gradient, step)

            def preconditioned(block: Block = block, given: Tensor | Rows = gradient) -> Tensor:
                return given if isinstance(given, Tensor) else self._gradient(block, work, update, False)[0]

            results.append(Direction(block, block.unstack(P), preconditioned))
        return results

    def finish(self, update: Update) -> None:
        """The step is done: count it, turn the bases that are due, and let go of what was captured."""
        turning = [(b, turns) for b in self._index if any(turns := self._turns(b)) and "S_A" in self.state[b.key]]
        self.drop()
        self.applied_steps += 1
        for block, turns in turning:
            self._turn_eigenbasis(block, float(update.damping_of(block)), turns)

    def _check_gradients(self, live: list[nn.Parameter]) -> None:
        for p in live:
            if p.grad is not None and p.grad.layout != torch.strided:
                name = next((name for name, q in self.model.named_parameters() if q is p), "?")
                options.gradient(name, p.grad)

    def _check_captured(self) -> None:
        """A layer that has a gradient but was never seen to fire is reported, and gets the diagonal method."""
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
        self.set_parameters(self.parameters)

    def _expected(self, block: Block) -> Expected:
        aside = self._aside_used
        scaling = self.method.needs_examples and not self._renews(block)
        return Expected(self._wants_factors(block), scaling, block in self._unprobed and not aside)

    def _gather(self) -> tuple[float | Tensor, float | Tensor]:
        """N of the gradient and N of the statistics, over all processes, after summing the statistics over them."""
        counts = [
            self.capture.examples,
            self.capture.examples_aside if self._aside_used else self.capture.examples,
        ]
        if world_size() == 1:
            return float(counts[0]), float(counts[1])
        expected = {b: self._expected(b) for b in self.blocks if b.covered}
        n, n_statistics = reduce_over_processes(self._sums, expected, counts)
        return n, n_statistics

    def _loss_scale(self) -> float | Tensor:
        scaler = self.settings.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return 1.0
        return scaler.scale(torch.ones((), device=self.parameters[0].device))

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

    def _update_factors(self, n: float | Tensor) -> None:
        """A and B as averages over steps, each batch weighted by its N; numerators and denominator are kept apart."""
        rho = self.settings.factor_decay
        square = self._delta_square(n)
        totals: list[Tensor] = []
        batch: list[Tensor] = []
        for block in self.blocks:
            sums = self._sums.get(block)
            if sums is None or sums.factors is None:
                continue
            state, f = self.state[block.key], sums.factors
            weight: float | Tensor = n
            terms: float | Tensor = float(f.terms) if not isinstance(f.terms, Tensor) else f.terms
            if isinstance(terms, Tensor):
                weight, terms = n * (terms > 0), terms.clamp(min=1)
            A, B = f.A.mul_(as_scalar(weight / terms, f.A)), f.B.mul_(as_scalar(weight * square, f.B))
            W = weight.to(A) if isinstance(weight, Tensor) else A.new_full((), weight)
            A, B, W = self._masked(A), self._masked(B), self._masked(W)
            if "A" not in state:
                state.update(A=A, B=B, factor_weight=W.clone())
            else:
                totals += [state["A"], state["B"], state["factor_weight"]]
                batch += [A, B, W]
        if totals:
            if self.ok is None:
                torch._foreach_mul_(totals, rho)
            else:
                torch._foreach_mul_(totals, (1 + (rho - 1) * self.ok).to(totals[0]))
            torch._foreach_add_(totals, batch)

    def _compute_eigenbasis(self, block: Block, state: State, damping: float) -> None:
        """Algorithm 1, ComputeEigenBasis: U_A, S_A and U_B, S_B of the factors."""
        A, B = self.factors(block)
        state.pop("strayed", None)
        self.method.refresh(block, state, A, B, damping, self.refresher)

    @torch.no_grad()
    def _turn_eigenbasis(self, block: Block, damping: float, turns: tuple[int, int]) -> None:
        """ComputeEigenBasis off the critical path: from the basis in use, for the steps that follow."""
        A, B = self.factors(block)
        self.method.turn(block, self.state[block.key], A, B, damping, self.refresher, turns)

    def factors(self, block: Block) -> tuple[Tensor, Tensor]:
        """A and B as they stand."""
        state = self.state[block.key]
        weight = state["factor_weight"].clamp(min=torch.finfo(block.dtype).tiny)
        return state["A"] / weight, state["B"] / weight

    def _compute_scaling(self, block: Block, state: State, n: float | Tensor, due: bool) -> Tensor | None:
        """Algorithm 1, ComputeScalings: s* of this step's examples, in the basis that is now in use."""
        if not (block.covered and self.method.needs_examples):
            return None
        sums = self._sums.setdefault(block, BlockSums())
        if sums.held:
            basis = self.method.basis(block, state)
            assert basis is not None
            for calls, count in sums.held:
                sums.add_scaling(statistics.scaling_sum(block, calls, count, basis, self.settings.memory_limit))
            sums.held = []
        if world_size() > 1 and due:
            sums.scaling = reduced_zeros(block) if sums.scaling is None else sums.scaling.contiguous()
            dist.all_reduce(sums.scaling)
        if sums.scaling is None:
            return None
        s_star = sums.scaling * as_scalar(self._delta_square(n), sums.scaling)
        return self._masked(s_star)

    def _rows(self, block: Block, work: Work, update: Update) -> Rows | None:
        """The captured h and delta in place of ``.grad``, where it is certain that ``.grad`` is their product.

        Projecting N rows costs N (in^2 + out^2 + in out), projecting their product in out (in + out). Nobody may have
        touched ``.grad``, it must come from this one backward pass, and it must have the rows' fingerprint u^T G v.
        """
        kept = self.stash.get(block)
        if kept is None or len(kept) > 1 or not self._may_use_rows(block) or not self.watch.single_pass:
            return None
        parameters = list(block.parameters.values())
        if any(p in work.rescaled or p.grad is None or update.maximize_of(p) or update.l2_of(p) for p in parameters):
            return None
        (call,), n = kept[0]
        h, delta = call.layer.positions(call.x.to(block.dtype), call.d.to(block.dtype), n)
        rows = Rows(h.flatten(0, 1).transpose(0, 1), delta.flatten(0, 1).transpose(0, 1))
        return rows if self._fingerprints_agree(block, rows) else None

    def _fingerprints_agree(self, block: Block, rows: Rows) -> bool:
        u, v = self._probe_vectors(block)
        found = sum(
            torch.einsum("go,goc,gc->", u, self._grad_view(block, role), v[..., columns])
            for role, columns in self._columns(block)
        )
        products = torch.einsum("gmo,go->gm", rows.delta, u) * torch.einsum("gmc,gc->gm", rows.h, v)
        bound = 1e3 * torch.finfo(block.dtype).eps * products.abs().sum()
        return bool((found - products.sum()).abs() <= bound)

    def _columns(self, block: Block) -> list[tuple[str, slice]]:
        width = block.shape.columns - ("bias" in block.parameters)
        places = {"weight": slice(0, width), "bias": slice(width, width + 1)}
        return [(role, places[role]) for role in block.parameters]

    def _grad_view(self, block: Block, role: str) -> Tensor:
        grad = block.parameters[role].grad
        assert grad is not None
        return grad.to(block.dtype).reshape(1, block.shape.out, -1)

    def _gradient(
        self, block: Block, work: Work, update: Update, squares_penalty: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What is preconditioned, ``[G, O, C]``, and how it differs from the gradient as backward left it.

        The first is ``.grad`` as it stands (divided by N under a sum loss), with L2 penalty and sign. If it was
        rescaled as a whole, the second is the factor that undoes it; if it differs in other ways, the third is the
        gradient as backward left it. The scaling is fed with that, so that clipping never enlarges an update. Torch's
        own rules square the penalty too (``squares_penalty``).
        """
        rescaled, l2_of, maximize_of = work.rescaled, update.l2_of, update.maximize_of
        parameters = list(block.parameters.values())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to(block.dtype) for p in parameters]
        if self.settings.loss_reduction == "sum":
            gradients = [g * as_scalar(world_size() / work.n, g) for g in gradients]
        G = block.stack(gradients)
        ratio = left = None
        if len(parameters) == 1 and parameters[0] in rescaled:
            ratio = rescaled[parameters[0]].to(block.dtype)
        elif any(p in rescaled for p in parameters):
            left = block.stack(g * rescaled.get(p, 1.0) for p, g in zip(parameters, gradients, strict=True))
        if any(maximize_of(p) or l2_of(p) for p in parameters):
            whole = left if left is not None else G if ratio is None else G * ratio
            penalty = block.stack(l2_of(p) * p.to(block.dtype) for p in parameters)
            sign = block.stack(torch.full_like(g, -1.0 if maximize_of(p) else 1.0)
                               for p, g in zip(parameters, gradients, strict=True))  # fmt: skip
            G = sign * G + penalty
            left, ratio = (sign * whole + penalty if squares_penalty else whole), None
        ratio = None if ratio is None else self._masked(ratio)
        return self._masked(G), ratio, None if left is None else self._masked(left)

    def _masked(self, tensor: Tensor) -> Tensor:
        """The tensor, or zeros in a step that must change nothing."""
        return tensor if self._bad is None else tensor.masked_fill(self._bad, 0.0)

    def _rescaling(
        self, live: list[nn.Parameter], sizes: list[Tensor], left: list[Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """For gradients that were touched since backward: how much larger they were when it left them."""
        scale = self._loss_scale()
        ratios = {
            p: torch.where(now > 0, before / (now * scale).clamp(min=torch.finfo(now.dtype).tiny), 1.0)
            for p, now, before in zip(live, sizes, left, strict=True)
            if self.watch.touched(p)
        }
        if world_size() > 1:
            # Gradients that differed between processes when backward left them were averaged by hand since: that is
            # no rescaling, and what the average was before a further clipping is not known.
            noted = dict(zip(live, left, strict=True))
            apart = differ_between_processes([noted.get(p) for p in self.parameters], self.parameters[0].device)
            for p, by_hand in zip(self.parameters, apart, strict=True):
                if p in ratios:
                    ratios[p] = torch.where(by_hand, 1.0, ratios[p])
        return ratios

    # --- did all of the gradient pass through the layers? -----------------------------------------------------------

    def _probe_vectors(self, block: Block) -> tuple[Tensor, Tensor]:
        """Two fixed random vectors u, v; u^T G v is a fingerprint of the gradient."""
        if block in self._probes:
            return self._probes[block]
        generator = torch.Generator().manual_seed(0)
        s = block.shape
        u = torch.randn(s.groups, s.out, generator=generator, dtype=torch.float64)
        v = torch.randn(s.groups, s.columns, generator=generator, dtype=torch.float64)
        like = torch.empty(0, dtype=block.dtype, device=block.key.device)
        self._probes[block] = (u.to(like), v.to(like))
        return self._probes[block]

    def _check_probes(self) -> None:
        """Raise if ``.grad`` holds more than what the layers' calls account for; once for every block."""
        for block in list(self._unprobed):
            sums = self._sums.get(block)
            if sums is None or sums.probe is None:
                continue
            self._unprobed.discard(block)
            if any(p.grad is None or self.watch.touched(p) for p in block.parameters.values()):
                continue
            half = any(p.dtype in (torch.float16, torch.bfloat16) for p in block.parameters.values())
            if half and block.layer.rough_in_half:
                continue
            u, v = self._probe_vectors(block)
            G = block.stack([p.grad for p in block.parameters.values() if p.grad is not None])
            captured, size = (sums.probe / world_size()).tolist()
            # A scaler has unscaled .grad by now (in a way that leaves no trace in its version), not what was captured.
            G = G * self._loss_scale()
            found = float(torch.einsum("go,goc,gc->", u, G, v))
            exact = all(p.dtype == torch.float64 for p in block.parameters.values())
            tolerance = 1e-6 if exact else 5e-2
            # u^T G v is about as large as G itself, and so is what rounding makes of it.
            if abs(captured - found) > tolerance * max(size, abs(captured), abs(found), float(G.norm())):
                raise RuntimeError(
                    f"layer '{block.name}': its .grad is not the gradient that passed through its calls. The loss uses "
                    "torch.autograd.grad inside, or the weight is also used elsewhere, so its curvature cannot be "
                    f"captured: exclude=['{block.name}'], or take statistics in opt.statistics() from another loss. "
                    "Where a GradScaler is in use, pass it as grad_scaler="
                )


def as_scalar(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number, or a 0-dim tensor in the dtype and on the device of ``like``."""
    return value.to(like) if isinstance(value, Tensor) else float(value)
