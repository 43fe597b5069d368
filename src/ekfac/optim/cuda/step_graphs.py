"""Whole optimizer steps as CUDA graphs.

A step of a small network is hundreds of kernels of a few microseconds each, and the host cannot launch them as fast as
the device runs them. The part that the device does is the same from step to step, so it is captured once and replayed:
gradients, captured calls and sums that were taken of calls too large to keep are copied to fixed places first, and
numbers that change live in tensors.

A step is captured when the same one has been run twice; one that differs in anything (a batch of another size, clipped
gradients, a frozen layer, new options in a group) runs as it always does, and is captured in turn when it repeats.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.layers.base import Call
from ekfac.optim.cuda.replay import OwnStream, capturing, form
from ekfac.optim.statistics.refresh import START
from ekfac.optim.types import Work

if TYPE_CHECKING:
    from ekfac.optim.ekfac import EKFAC

#: A step is captured when it has been run this often.
REPEATS = 2
#: At most so many different steps are kept. They share their memory.
LIMIT = 24
#: And so many counted: steps that differ every time, by their damping say, are never captured.
SEEN = 100


@dataclass
class Rates:
    """Numbers of a step that change from step to step, by parameter group: floats, or tensors on the device."""

    lr: list[float | Tensor]
    damping: list[float | Tensor]


@dataclass
class CapturedStep:
    """A graph, and the places that it reads from and answers to."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[list[Tensor], ...]
    rates: Rates
    ok: Tensor
    turned: list[Block]
    residuals: Tensor | None


class StepGraphs:
    """The captured steps of one optimizer."""

    def __init__(self, optimizer: EKFAC) -> None:
        self._optimizer = optimizer
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, CapturedStep] = {}
        self._refused: set[Hashable] = set()
        #: Where inputs of captured steps lie, which are replayed one after another and share them.
        self._places: dict[Hashable, Tensor] = {}
        self._pool: tuple[int, int] | None = None
        self._generation: Hashable = None
        self._own: OwnStream | None = None
        self.replays = 0

    def step(self) -> bool:
        """Do the device's part of a step by replaying it; False where it has to be run."""
        engine = self._optimizer.engine
        if not engine.graphs_possible or engine.applied_steps < 1:
            return False
        engine.settle()
        engine.capture.finish()
        if not (engine.is_plain_step() and self._fits_damping()):
            return False
        generation = engine.generation, engine.applied_steps >= START
        if generation != self._generation:
            # The tensors that captured steps read were replaced, or other kinds of steps follow.
            self.forget()
            self._seen.clear()
            self._refused.clear()
            self._generation = generation
        key = self._signature()
        if key in self._refused:
            return False
        captured = self._captured.get(key)
        if captured is None:
            if len(self._seen) > SEEN:
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= REPEATS or len(self._captured) >= LIMIT:
                return False
            captured = self._capture()
            if captured is None:
                self._refused.add(key)
                return False
            self._captured[key] = captured
        self._replay(captured)
        return True

    def forget(self) -> None:
        """Let go of all captured steps, never of some: with any graph torch frees what others of its stream work in.

        And of their memory and stream: a pool is not opened again once its graphs are gone or one of them was spoilt.
        """
        if self._captured:
            torch.cuda.synchronize()
        self._captured.clear()
        self._places.clear()
        self._pool = self._own = None

    def _fits_damping(self) -> bool:
        """Whether inverses, where there are any, were made for the damping that stands in the groups now."""
        engine = self._optimizer.engine
        if engine.method.damping_is_free:
            return True
        damping_of = self._optimizer._update().damping_of
        return all(engine.state[b.key]["inverted_at"] == damping_of(b) for b in engine.blocks if b.covered)

    def _signature(self) -> Hashable:
        """All that a captured step has built into it."""
        opt = self._optimizer
        engine = opt.engine
        groups = []
        for g in opt.param_groups:
            damping = None if engine.method.damping_is_free else g["damping"]
            groups.append((damping, g["momentum"], g["nesterov"], g["weight_decay"], g["decoupled_weight_decay"],
                           g["maximize"], len(g["params"])))  # fmt: skip
        calls = tuple(
            (block.name, n, engine.wants_factors(block), *((c.layer.mode, form(c.x), form(c.d)) for c in calls))
            for block, kept in engine.stash.items()
            for calls, n in kept
        )
        sums = tuple(
            (block.name, s.factors and s.factors.terms, s.scaling is None, *map(form, s.tensors()))
            for block, s in engine.sums.items()
        )
        places = tuple(p.data_ptr() for p in engine.parameters)
        strides = tuple(p.grad.stride() for p in engine.parameters if p.grad is not None)
        turns = engine.schedule.turns_within(engine.applied_steps)
        return (
            engine.capture.examples, tuple(groups), calls, sums, places, strides, opt.kl_clip.bound, opt.trust, turns
        )  # fmt: skip

    def _inputs(self) -> tuple[list[Tensor], ...]:
        """Gradients, what was captured of calls, and sums."""
        engine = self._optimizer.engine
        gradients = [p.grad for p in engine.parameters if p.grad is not None]
        calls = [t for kept in engine.stash.values() for cs, _ in kept for c in cs for t in (c.x, c.d)]
        return gradients, calls, [t for sums in engine.sums.values() for t in sums.tensors()]

    @torch.no_grad()
    def _capture(self) -> CapturedStep | None:
        opt = self._optimizer
        engine = opt.engine
        device = engine.device
        known = dict(self._places)
        gradients, calls, sums = (
            [_place(known, (kind, i, form(t)), t) for i, t in enumerate(tensors)]
            for kind, tensors in enumerate(self._inputs())
        )
        lr, damping = (_scalars(len(opt.param_groups), device) for _ in range(2))
        rates = Rates(lr, damping if engine.method.damping_is_free else opt._rates().damping)
        work = Work(list(engine.parameters), float(engine.capture.examples), float(engine.capture.examples))
        before = [p.grad for p in engine.parameters], engine.stash, engine.sums, engine.ok
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            if self._pool is None or self._own is None:
                self._pool, self._own = torch.cuda.graph_pool_handle(), OwnStream(device)
            _point(engine.parameters, gradients)
            engine.stash = _with_places(engine.stash, calls)
            places = iter(sums)
            engine.sums = {block: gathered.at(places) for block, gathered in engine.sums.items()}
            with engine.lanes.opened(device), capturing(graph, pool=self._pool, stream=self._own.stream):
                engine.mask_on_device(work)
                opt.compute(work, rates)
                turned = engine.refresher.captured
                residuals = torch.stack([r.double() for r in turned.values()]) if turned else None
            assert engine.ok is not None
            self._places = known
            return CapturedStep(graph, (gradients, calls, sums), rates, engine.ok, list(turned), residuals)
        except Exception as error:  # whatever it is, the step can do without
            warnings.warn(f"cuda_graphs: this step cannot be captured and runs without: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            self.forget()
            return None
        finally:
            _point(engine.parameters, before[0])
            engine.stash, engine.sums, engine.ok = before[1:]
            engine.refresher.captured = {}

    @torch.no_grad()
    def _replay(self, captured: CapturedStep) -> None:
        opt = self._optimizer
        for places, tensors in zip(captured.inputs, self._inputs(), strict=True):
            if tensors:
                torch._foreach_copy_(places, tensors)
        now = opt._rates()
        for place, value in zip((*captured.rates.lr, *captured.rates.damping), (*now.lr, *now.damping), strict=True):
            if isinstance(place, Tensor) and isinstance(value, Tensor) and value.is_cuda:
                place.copy_(value.reshape(()))  # to read it here would make the host wait
            elif isinstance(place, Tensor):
                place.fill_(float(value))
        captured.graph.replay()
        opt.engine.verdicts.expect(captured.ok)
        if captured.residuals is not None:
            opt.engine.refresher.note(captured.turned, captured.residuals)
        self.replays += 1


def _place(known: dict[Hashable, Tensor], key: Hashable, like: Tensor) -> Tensor:
    """The place that is known by a key, or a new one."""
    if key not in known:
        known[key] = torch.empty_like(like)
    return known[key]


def _scalars(count: int, device: torch.device) -> list[float | Tensor]:
    return [torch.zeros((), dtype=torch.float64, device=device) for _ in range(count)]


def _point(parameters: list[nn.Parameter], gradients: list[Tensor] | list[Tensor | None]) -> None:
    """Let every ``.grad`` be another tensor."""
    for p, grad in zip(parameters, gradients, strict=True):
        p.grad = grad


def _with_places(
    stash: dict[Block, list[tuple[list[Call], int]]], places: list[Tensor]
) -> dict[Block, list[tuple[list[Call], int]]]:
    """The same calls with their tensors at fixed places."""
    following = iter(places)
    return {
        block: [([Call(c.layer, next(following), next(following)) for c in calls], n) for calls, n in kept]
        for block, kept in stash.items()
    }
