"""The default rule in three kernels a stack of blocks, where :class:`Belief` itself takes a hundred.

:mod:`ekfac.optim.methods.belief` is what it has to agree with, and what runs where this cannot: without Triton, in
other dtypes, at a block's first step.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.optim.methods.belief import Belief
from ekfac.optim.methods.eigenbasis import EigenMethod, in_basis
from ekfac.optim.types import BlockStep, EigenState

#: Where the kernels run.
DEVICES = {"cuda"}
#: Whether they have been seen to run on a device, with the numbers that are built into them.
_known: dict[tuple[torch.device, Belief, float], bool] = {}


class FusedBelief(EigenMethod):
    """An :class:`EigenMethod` with the rule :class:`Belief`, scaling and direction in one go.

    Args:
        plain: The method.
    """

    #: For comparisons.
    enabled = True

    def __init__(self, plain: EigenMethod) -> None:
        super().__init__(plain.rule, plain.damp)
        #: Whether the kernels take the step that is in hand.
        self._takes = False

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
        if not self._takes:
            return super().rescale(block, state, step)
        assert isinstance(self.rule, Belief)
        return observe_and_direct(self.rule, state, step)


def fused(method: Any) -> Any:
    """Return what does the same as a method with fewer kernels; the method itself where there is nothing."""
    if type(method) is EigenMethod and type(method.rule) is Belief:
        return FusedBelief(method)
    return method


def fits(rule: Any, state: EigenState, step: BlockStep) -> bool:
    """Tell whether the kernels can take a step: a later one, of float32 tensors that lie as they expect."""
    g, kept = step.gradient, state.__dict__
    if not (isinstance(g, Tensor) and g.device.type in DEVICES and g.dtype == torch.float32 and 0 < g.numel() < 2**31):
        return False
    for name in ("m", "s"):
        t = kept.get(name)
        if t is None or t.shape != g.shape or t.dtype != g.dtype or not t.is_contiguous():
            return False
    for name in ("count", "examples"):
        t = kept.get(name)
        if t is None or t.numel() != step.blocks or t.dtype != torch.float64 or not t.is_contiguous():
            return False
    beta_2 = (step.rates.betas or rule.betas)[1]
    return isinstance(beta_2, float) and runs_on(g.device, rule, beta_2)


def runs_on(device: torch.device, rule: Belief, beta_2: float) -> bool:
    """Tell whether the kernels run, from trying them once; warn where they should and do not."""
    key = device, rule, beta_2
    if key not in _known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # no time to compile anything
        try:
            _try(device, rule, beta_2)
            _known[key] = True
        except ImportError:  # torch for a GPU comes with Triton on Linux alone
            _known[key] = False
        except Exception as error:  # whatever it is, the rule can do without
            _known[key] = False
            warnings.warn(f"the kernels of {type(rule).__name__} cannot be compiled and are done without: {error}",
                          RuntimeWarning, stacklevel=2)  # fmt: skip
    return _known[key]


def _try(device: torch.device, rule: Belief, beta_2: float) -> None:
    one = torch.ones((), dtype=torch.float64, device=device)
    g, m, s = torch.ones(3, 1, 1, 1, device=device).unbind()
    launch(rule, beta_2, (g, g, m, s), one, one, one.clone(), one.clone(), one, 1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def observe_and_direct(rule: Belief, state: EigenState, step: BlockStep) -> Tensor:
    """Do the work of :meth:`Belief.observe` and :meth:`Belief.direction`."""
    beta_1, beta_2 = step.rates.betas or rule.betas
    g = step.g.contiguous()
    seen = g if step.seen is step.g else step.seen.contiguous()
    ok, beta, n = (_on_device(number, g) for number in (1.0 if step.ok is None else step.ok, beta_1, step.n))
    return launch(rule, beta_2, (g, seen, state.m, state.s), ok, beta, state.count, state.examples, n, step.blocks)


def _on_device(number: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a float64 tensor, by which no kernel is compiled anew."""
    if isinstance(number, Tensor):
        return number.to(like.device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=like.device)


def launch(
    rule: Belief, beta_2: float, tensors: tuple[Tensor, ...], ok: Tensor, beta: Tensor, count: Tensor,
    examples: Tensor, n: Tensor, blocks: int,
) -> Tensor:  # fmt: skip
    """Launch the kernels.

    Args:
        rule: The rule.
        beta_2: The decay of s.
        tensors: g, the same as backward left it, m and s.
        ok: 0 for a step that must change nothing.
        beta: The decay of m.
        count: How many steps each block has taken.
        examples: Where the number of examples is kept, for each block.
        n: The number of examples.
        blocks: How many blocks there are in each tensor.

    Returns:
        The direction.
    """
    from ekfac.optim.cuda import kernels as k

    g, seen, m, s = tensors
    size = g.numel() // blocks
    all_tiles = -(-size // k.TILE)
    tiles = -(-all_tiles // k.PARTS)
    grid, sizes = (-(-all_tiles // tiles), blocks), {"PARTS": k.PARTS, "TILE": k.TILE}
    x, sums = torch.empty_like(g), g.new_empty(5, blocks, k.PARTS)
    lengths = sums[3:]
    fixed = {"BETA_2": beta_2, "CAUTIOUS": rule.cautious}
    with torch.cuda.device_of(g):
        k.measure[grid](seen, m, s, sums, ok, count, examples, n, size, tiles, **sizes)
        k.update[grid](g, seen, m, s, x, sums, lengths, ok, count, beta, size, tiles,
                       EPS=rule.eps, FLOOR=rule.floor, SPIKE=rule.spike, **fixed, **sizes)  # fmt: skip
        k.scale[grid](x, lengths, ok, count, beta, size, tiles, **fixed, **sizes)
    return x
