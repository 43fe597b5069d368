"""The fraction of lr that a step uses, adapted to how far gradients agree with the last direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ekfac import checks
from ekfac.optim.types import Direction

#: How fast the fraction responds to alignments, the number of steps after which it responds half as fast, and its
#: lower bound.
RATE = 2.0
STEPS = 50.0
LEAST = 1e-4
#: The number of steps behind the recent gradient size e.
LATE_STEPS = 20
#: Largest contribution of one step's whitened cosine: at RATE 2 the next step is a tenth longer or shorter. A batch
#: that is used repeatedly agrees with itself even when steps have become too long.
MAX_COSINE = 0.05


class LRFraction:
    """The fraction of lr that a step uses: more while gradients agree with the last direction, less when they do not.

    f <- min(1, f exp(r c)), with r = RATE / (1 + (t / STEPS)^2) and c the mean of the :func:`alignment` of the blocks
    that the step changes. A step that was too long is followed by a gradient that points back, and c < 0. The fraction
    settles in the first steps and hardly moves later: batches of one epoch have no example in common, so the noise in
    their gradients points back a little at any step length.

    The settled fraction is multiplied by min(1, sqrt(e / E)), where e is the recent |g|^2 in the geometric mean over
    blocks, and E its average over a quarter of all steps so far. A step of Adam's size does not get shorter when
    gradients do. Without this factor, a network that fits all its examples would keep circling the minimum at the same
    speed, until a large gradient throws it out again.

    A step that :mod:`~ekfac.optim.step_size.max_change` has shortened is shorter than this fraction of lr. So shortened
    blocks do not increase the fraction, however parallel their gradients are, and the factor by which every block was
    shortened is applied to the fraction too, to the degree that alignments count at the time. Otherwise the fraction
    would grow to 1 while only the other bound limits steps, and would have settled by the time it matters.

    Args:
        start: The fraction of the first step; None for the full lr at all times.
    """

    def __init__(self, start: float | None = None) -> None:
        self.start = start
        #: The fraction of the next step, t, e and E; changed in place, because CUDA graphs refer to their address.
        self._next: Tensor | None = None

    def take(self, directions: list[Direction], ok: Tensor | None) -> float | Tensor:
        """Return the fraction of lr that this step uses."""
        if self.start is None:
            return 1.0
        if self._next is None:
            if not directions:
                return self.start
            self.load([self.start, 0.0], directions[0].block.key.device)
        assert self._next is not None
        fraction, t, late, long = self._next
        now = fraction.clone()
        found = _products(directions, self._next.device)
        if found is not None:
            counts = 1.0 if ok is None else ok
            size = _geometric_mean(found[:, 1, 1])
            count = (t + counts).clamp(min=1)
            weight = (1 / count).clamp(min=1 / LATE_STEPS)
            late.lerp_(size, counts * weight)
            long.lerp_(size, counts * torch.minimum(weight, 4 / count))
            now *= (late / long).sqrt().nan_to_num(1.0, 1.0, 1.0).clamp(max=1)
        return now if now.is_cuda else float(now)

    def follow(self, directions: list[Direction], factors: Tensor | None, ok: Tensor | None) -> None:
        """Set the fraction of the next step from this step's alignments and how far its directions were shortened.

        Args:
            directions: This step's directions.
            factors: The factor by which each was shortened; ``None`` if there is no bound.
            ok: 0 on the device if the step is to be skipped, else 1; None if the host knows that it is not.
        """
        if self._next is None or self.start is None:
            return
        fraction, t = self._next[:2]
        factors = None if factors is None else factors.to(fraction).nan_to_num(0.0)
        weight = 1 / (1 + (t / STEPS) ** 2)
        found = _products(directions, self._next.device)
        if found is not None:
            counts = 1.0 if ok is None else ok
            rate = RATE * counts * weight
            # One by one: indexing by a list copies it from the host, which a CUDA graph cannot record.
            known = [index for index, d in enumerate(directions) if d.products is not None]
            whole = None if factors is None else torch.stack([factors[index] for index in known]) >= 1
            fraction.mul_((rate * alignment(found, whole).mean()).exp()).clamp_(max=1.0)
            t.add_(counts)
        if factors is not None:
            most = factors.amax()
            fraction.mul_(torch.where(most > 0, most, 1.0) ** weight)
        fraction.clamp_(min=LEAST)

    @property
    def fraction(self) -> float:
        """The fraction of lr that the next step uses, without the factor sqrt(e / E)."""
        return float(self.start or 1.0) if self._next is None else float(self._next[0])

    def save(self) -> list[float] | None:
        """Return the fraction, t, e and E as numbers, for a checkpoint; None before the first step."""
        return None if self._next is None else self._next.tolist()

    def check(self, saved: Any) -> None:
        """Refuse what :meth:`save` cannot have returned."""
        good = saved is None or (isinstance(saved, list) and 1 <= len(saved) <= 4)
        for value in saved or () if good else ():
            checks.number("state_dict, 'pace'", value, least=0)
        if not good or (saved and saved[0] > 1):
            raise ValueError(f"state_dict, 'pace': {str(saved)[:80]} must be up to four numbers, the first at most 1")

    def load(self, saved: list[float] | None, device: torch.device) -> None:
        """Restore what :meth:`save` returned."""
        if saved is None or self.start is None:
            self._next = None
        else:
            self._next = torch.tensor([*saved, 0.0, 0.0][:4], dtype=torch.float64, device=device)


def alignment(found: Tensor, whole: Tensor | None = None) -> Tensor:
    """Return the alignment of g and m: cos(g / sqrt(s), m / sqrt(s)), clamped, + max(0, cos(g, m) - 1/2).

    The whitened cosine weighs all coordinates equally. The plain one is dominated by the few directions of large
    curvature, which point back long before the others have made progress. But if gradients are nearly parallel even
    there, steps are far too short.

    Args:
        found: The :func:`~ekfac.optim.methods.rules.products` of any number of blocks, ``[..., 2, 3]``.
        whole: Whether each block's step was not shortened; the last term counts only for those.
    """
    xy, xx, yy = found.unbind(-1)
    # Two separate roots: the product of two squared lengths can leave float32's range.
    cosine = (xy * xx.rsqrt() * yy.rsqrt()).nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1)
    whitened, plain = cosine.unbind(-1)
    parallel = (plain - 0.5).clamp(min=0)
    return whitened.clamp(-MAX_COSINE, MAX_COSINE) + (parallel if whole is None else parallel * whole)


def _products(directions: list[Direction], device: torch.device) -> Tensor | None:
    """Stack the blocks' inner products, ``[blocks, 2, 3]``; ``None`` if there are none yet."""
    found = [d.products for d in directions if d.products is not None]
    return torch.stack([one.to(found[0]) for one in found]).double().to(device) if found else None


def _geometric_mean(sizes: Tensor) -> Tensor:
    """Return the geometric mean of the positive, finite sizes; 0 if there are none."""
    counts = torch.isfinite(sizes) & (sizes > 0)
    logs = torch.where(counts, sizes, 1.0).log().sum() / counts.sum().clamp(min=1)
    return torch.where(counts.any(), logs.exp(), 0.0)
