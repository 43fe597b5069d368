"""The default rule in three kernels a stack of blocks, where :class:`Belief` itself takes a hundred.

:mod:`ekfac.optim.methods.belief` is what it has to agree with, and what runs where this cannot: without Triton, in
other dtypes, at a block's first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.optim.cuda import ahead
from ekfac.optim.methods.base import Method
from ekfac.optim.methods.belief import Belief
from ekfac.optim.methods.eigenbasis import EigenMethod, in_basis
from ekfac.optim.types import BlockStep, EigenState, GroupRates

#: Where the kernels run.
DEVICES = {"cuda"}
#: Whether they have been seen to run on a device with a rule's numbers, which are built into them.
_known: dict[Hashable, bool] = {}


class FusedBelief(EigenMethod):
    """An :class:`EigenMethod` with the rule :class:`Belief`, scaling and direction in one go."""

    enabled = True  # False to compare
    _takes = False  # whether the kernels take the step that is in hand

    def project(self, block: Block, state: EigenState, step: BlockStep) -> None:
        self._takes = self.enabled and fits(self.rule, state, step)
        if not self._takes or step.ratio is not None or step.left is not None:
            super().project(block, state, step)
            return
        step.basis = self.basis(block, state)
        step.g = step.seen = in_basis(step.gradient, step.basis)  # which the kernels bound

    def update_scaling(self, state: EigenState, step: BlockStep) -> None:
        """Leave it to the kernels, which do it on the way to the direction."""
        if not self._takes:
            super().update_scaling(state, step)

    def rescale(self, block: Block, state: EigenState, step: BlockStep) -> Tensor:
        return launch(self.rule, state, step) if self._takes else super().rescale(block, state, step)


def fused(method: Method[Any]) -> Method[Any]:
    """Return what does the same as a method with fewer kernels; the method itself where there is nothing."""
    if type(method) is EigenMethod and type(method.rule) is Belief:
        return FusedBelief(method.rule, method.damp)
    return method


def fits(rule: Any, state: EigenState, step: BlockStep) -> bool:
    """Tell whether the kernels can take a step: not a block's first, and of float32 tensors that lie as they expect."""
    g, kept = step.gradient, state.__dict__
    if not (isinstance(g, Tensor) and g.device.type in DEVICES and g.dtype == torch.float32 and 0 < g.numel() < 2**31):
        return False
    tensors, numbers = ([kept.get(name) for name in names] for names in (("m", "s"), ("count", "examples")))
    return (
        all(t is not None and t.shape == g.shape and t.dtype == g.dtype and t.is_contiguous() for t in tensors)
        and all(t is not None and t.numel() == step.blocks and t.dtype == torch.float64 for t in numbers)
        and isinstance((step.rates.betas or rule.betas)[1], float)
        and runs_on(g.device, rule, step.rates)
    )


def runs_on(device: torch.device, rule: Any, rates: GroupRates) -> bool:
    """Tell whether the kernels run, from trying them once; warn where they should and do not."""
    key = device, (rates.betas or rule.betas)[1], rule.eps, rule.floor, rule.spike, rule.cautious
    if key not in _known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # no time to compile anything
        ahead.wait()
        try:
            step, state = BlockStep(torch.ones(1, 1, 1, device=device), 1.0, rates), EigenState()
            step.g = step.seen = step.gradient  # type: ignore[assignment]
            state.m, state.s = torch.ones(2, 1, 1, 1, device=device).unbind()
            state.count, state.examples = torch.ones(2, dtype=torch.float64, device=device).unbind()
            launch(rule, state, step).sum().item()
            _known[key] = True
        except Exception as error:  # whatever it is, the rule can do without
            _known[key] = False
            if not isinstance(error, ImportError):  # torch has Triton with it on some systems alone
                warnings.warn(f"Belief runs without kernels of its own: {error}", RuntimeWarning, stacklevel=2)
    return _known[key]


def launch(rule: Any, state: EigenState, step: BlockStep) -> Tensor:
    """Do the work of :meth:`Belief.observe` and :meth:`Belief.direction`; returns the direction."""
    from ekfac.optim.cuda import kernels as k

    beta_1, beta_2 = step.rates.betas or rule.betas
    g, m, s, count = step.g.contiguous(), state.m, state.s, state.count
    seen = g if step.seen is step.g else step.seen.contiguous()
    # Numbers are tensors too: no kernel is compiled anew for another.
    like, given = state.count, (1.0 if step.ok is None else step.ok, beta_1, step.n)
    ok, beta, n = (v.to(like) if isinstance(v, Tensor) else like.new_full((), v) for v in given)
    size = g.numel() // step.blocks
    tiles = -(-size // (k.TILE * k.PARTS))
    grid = -(-size // (k.TILE * tiles)), step.blocks
    x, sums = torch.empty_like(g), g.new_empty(5, step.blocks, k.PARTS)
    lengths, built_in = sums[3:], {"BETA_2": float(beta_2), "CAUTIOUS": rule.cautious, "PARTS": k.PARTS, "TILE": k.TILE}
    with torch.cuda.device_of(g):
        k.measure[grid](seen, m, s, sums, ok, count, state.examples, n, size, tiles, PARTS=k.PARTS, TILE=k.TILE)
        k.update[grid](g, seen, m, s, x, sums, lengths, ok, count, beta, size, tiles,
                       EPS=rule.eps, FLOOR=rule.floor, SPIKE=rule.spike, **built_in)  # fmt: skip
        k.scale[grid](x, lengths, ok, count, beta, size, tiles, **built_in)
    return x
