"""The default rule in three kernels per stack of blocks, where :class:`Belief` itself launches a hundred.

:mod:`ekfac.optim.methods.belief` is the reference, and the fallback without Triton, for other dtypes, and in a block's
first step.
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

#: Device types with kernels.
DEVICES = {"cuda"}
#: Whether the kernels ran in a trial, by device and the rule's constants, which are compiled in.
_known: dict[Hashable, bool] = {}


class FusedBelief(EigenMethod):
    """An :class:`EigenMethod` with the rule :class:`Belief`, with scaling and direction fused."""

    enabled = True  # False in comparisons
    _takes = False  # whether the current step uses the kernels

    def project(self, block: Block, state: EigenState, step: BlockStep) -> None:
        self._takes = self.enabled and fits(self.rule, state, step)
        if not self._takes or step.ratio is not None or step.left is not None:
            super().project(block, state, step)
            return
        step.basis = self.basis(block, state)
        step.g = step.seen = in_basis(step.gradient, step.basis)  # the kernels clamp it

    def update_scaling(self, state: EigenState, step: BlockStep) -> None:
        """Do nothing if the kernels run: they update the scaling together with the direction."""
        if not self._takes:
            super().update_scaling(state, step)

    def rescale(self, block: Block, state: EigenState, step: BlockStep) -> Tensor:
        return launch(self.rule, state, step) if self._takes else super().rescale(block, state, step)


def fused(method: Method[Any]) -> Method[Any]:
    """Return the fused variant of a method, or the method itself if there is none."""
    if type(method) is EigenMethod and type(method.rule) is Belief:
        return FusedBelief(method.rule, method.damp)
    return method


def fits(rule: Any, state: EigenState, step: BlockStep) -> bool:
    """Return whether the kernels can run a step: not a block's first, with contiguous float32 tensors."""
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
    """Return whether the kernels run, from a single trial; warn if they fail though Triton is installed."""
    key = device, (rates.betas or rule.betas)[1], rule.eps, rule.floor, rule.spike, rule.cautious
    if key not in _known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be compiled during recording
        ahead.wait()
        try:
            step, state = BlockStep(torch.ones(1, 1, 1, device=device), 1.0, rates), EigenState()
            step.g = step.seen = step.gradient  # type: ignore[assignment]
            state.m, state.s = torch.ones(2, 1, 1, 1, device=device).unbind()
            state.count, state.examples = torch.ones(2, dtype=torch.float64, device=device).unbind()
            launch(rule, state, step).sum().item()
            _known[key] = True
        except Exception as error:  # any failure falls back to the rule without kernels
            _known[key] = False
            if not isinstance(error, ImportError):  # torch ships Triton only on some systems
                warnings.warn(f"Belief runs without its fused kernels: {error}", RuntimeWarning, stacklevel=2)
    return _known[key]


def launch(rule: Any, state: EigenState, step: BlockStep) -> Tensor:
    """Run :meth:`Belief.observe` and :meth:`Belief.direction` by kernels; return the direction."""
    from ekfac.optim.cuda import kernels as k

    beta_1, beta_2 = step.rates.betas or rule.betas
    g, m, s, count = step.g.contiguous(), state.m, state.s, state.count
    seen = g if step.seen is step.g else step.seen.contiguous()
    # Pass numbers as tensors too, so that no kernel is recompiled for other values.
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
