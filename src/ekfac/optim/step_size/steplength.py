"""How long a step is: pace multiplies the learning rate, trust and the KL clip shorten directions that are too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ekfac.optim import options
from ekfac.optim.engine import Engine
from ekfac.optim.methods.rules import alignment
from ekfac.optim.types import Direction

#: How fast the pace answers to alignments, and after how many steps it answers half as fast.
PACE_RATE = 2.0
PACE_STEPS = 50.0
PACE_LEAST = 1e-4
#: How many steps "of late" are.
LATE_STEPS = 20
TRUST_FLOOR = 1e-3

Pair = tuple[nn.Parameter, Tensor]
Steps = dict[nn.Parameter, Tensor]
LearningRates = Mapping[nn.Parameter, "float | Tensor"]


class Pace:
    """The share of lr that a step takes: more while gradients agree with the last direction, less when they point back.

    pace <- min(1, pace exp(r c)), with r = PACE_RATE / (1 + (t / PACE_STEPS)^2) and c the mean of the
    :func:`alignment` of the blocks that the step changes. A step that was too long is followed by a gradient that
    points back, and c < 0. The pace settles in the first steps and hardly moves later: batches of one epoch have no
    example in common, so their gradients' noise points back a little at any step length.

    What it has settled at is multiplied by min(1, sqrt(e / E)), where e is the size of gradients of late, |g|^2 in the
    geometric mean over blocks, and E that over a quarter of all steps so far. A step of Adam's size does not get
    shorter when gradients do: a network that fits all its examples would go on about the minimum at the same speed,
    until an example that it disturbs throws it out again.

    What trust leaves of a step is not of the length that the pace says. So a block that it shortens is no reason for
    longer steps, however parallel its gradients are, and what no block could take is taken back from the pace, as
    fully as alignments count at the time. Else it winds up to 1 while trust alone bounds the steps, and has settled by
    the time that it matters.

    Args:
        start: The share of the first step; None for all of lr at all times.
    """

    def __init__(self, start: float | None = None) -> None:
        if start is not None:
            options.number("pace", start, above=0, most=1)
        self.start = start
        #: The share of the next step, t, e and E, changed in place: a captured step holds on to their address.
        self._next: Tensor | None = None

    def take(self, engine: Engine, directions: list[Direction]) -> float | Tensor:
        """The share of lr that this step takes."""
        if self.start is None:
            return 1.0
        if self._next is None:
            self.load([self.start, 0.0], engine.device)
        assert self._next is not None
        share, t, late, long = self._next
        now = share.clone()
        found = _products(engine, directions)
        if found is not None:
            ok = 1.0 if engine.ok is None else engine.ok
            size = _geometric_mean(found[:, 1, 1])
            count = (t + ok).clamp(min=1)
            weight = (1 / count).clamp(min=1 / LATE_STEPS)
            late.lerp_(size, ok * weight)
            long.lerp_(size, ok * torch.minimum(weight, 4 / count))
            now *= (late / long).sqrt().nan_to_num(1.0, 1.0, 1.0).clamp(max=1)
        return now if now.is_cuda else float(now)

    def follow(self, engine: Engine, directions: list[Direction], factors: Tensor | None) -> None:
        """Set the share of the next step, by the alignments that this one has found and what trust has left of it.

        Args:
            engine: Has the alignments.
            directions: This step's.
            factors: What :func:`trusted` has multiplied each of them by; ``None`` where it has not.
        """
        if self._next is None or self.start is None:
            return
        share, t = self._next[:2]
        factors = None if factors is None else factors.to(share).nan_to_num(0.0)
        weight = 1 / (1 + (t / PACE_STEPS) ** 2)
        found = _products(engine, directions)
        if found is not None:
            ok = 1.0 if engine.ok is None else engine.ok
            rate = PACE_RATE * ok * weight
            # One by one: a list as an index is copied from the host, which a captured step cannot do.
            known = _with_products(engine, directions)
            whole = None if factors is None else torch.stack([factors[index] for index in known]) >= 1
            share.mul_((rate * alignment(found, whole).mean()).exp()).clamp_(max=1.0)
            t.add_(ok)
        if factors is not None:
            most = factors.amax()
            share.mul_(torch.where(most > 0, most, 1.0) ** weight)
        share.clamp_(min=PACE_LEAST)

    @property
    def share(self) -> float:
        """The share of lr that the next step takes, but for what gradients that have become small take from it."""
        return float(self.start or 1.0) if self._next is None else float(self._next[0])

    def save(self) -> list[float] | None:
        """Share, t, e and E as numbers, for a checkpoint; None before the first step."""
        return None if self._next is None else self._next.tolist()

    def load(self, saved: list[float] | None, device: torch.device) -> None:
        """Take back what :meth:`save` gave."""
        if saved is None or self.start is None:
            self._next = None
        else:
            self._next = torch.tensor([*saved, 0.0, 0.0][:4], dtype=torch.float64, device=device)


def _with_products(engine: Engine, directions: list[Direction]) -> list[int]:
    """Those of the directions that something is known of how far gradients agree with."""
    return [index for index, d in enumerate(directions) if "products" in engine.state[d.block.key]]


def _products(engine: Engine, directions: list[Direction]) -> Tensor | None:
    """What alignments are made of, ``[blocks, 2, 3]``; ``None`` if nothing is known yet."""
    found = [engine.state[directions[index].block.key]["products"] for index in _with_products(engine, directions)]
    return torch.stack([one.to(found[0]) for one in found]).double().to(engine.device) if found else None


def _geometric_mean(sizes: Tensor) -> Tensor:
    """Over those that are positive and finite; 0 if there are none."""
    counts = torch.isfinite(sizes) & (sizes > 0)
    logs = torch.where(counts, sizes, 1.0).log().sum() / counts.sum().clamp(min=1)
    return torch.where(counts.any(), logs.exp(), 0.0)


def trusted(directions: list[Direction], lr_of: LearningRates, trust: float | None) -> tuple[Steps, Tensor | None]:
    """All directions by parameter, each block's shortened so that |lr p| <= (trust / L) |theta|.

    lr is each parameter's own. L counts the blocks that hold weights. The root mean square of theta counts as at least
    ``TRUST_FLOOR``, so that weights can leave zero.

    Returns:
        The steps, and what each direction was multiplied by, 0 where it is zero; ``None`` where there is no trust or
        nothing to shorten.
    """
    blocks = [
        [(p, step) for p, step in zip(d.block.parameters.values(), d.steps, strict=True) if p.grad is not None]
        for d in directions
    ]
    if trust is None or not any(blocks):
        return {p: step for block in blocks for p, step in block}, None
    share = trust / max(1, sum(any(p.dim() > 1 for p, _ in block) for block in blocks))
    steps: Steps = {}
    found: dict[int, Tensor] = {}
    for indices in _of_one_kind(blocks):
        alike = [blocks[index] for index in indices]
        flat = [pair for block in alike for pair in block]
        norms = torch._foreach_norm([step for _, step in flat])
        length = _by_block([norm * lr_of[p] for norm, (p, _) in zip(norms, flat, strict=True)], len(alike))
        theta = _by_block(torch._foreach_norm([p.detach() for p, _ in flat]), len(alike))
        floors = [TRUST_FLOOR * sum(p.numel() for p, _ in block) ** 0.5 for block in alike]
        theta = torch.stack(torch._foreach_clamp_min(list(theta.unbind()), floors))
        factors = (share * theta / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(max=1).to(flat[0][1])
        # A block that does not move, for want of a gradient or with a learning rate of 0, takes no step of any length.
        found.update(zip(indices, torch.where(length > 0, factors, 0.0).unbind(), strict=True))
        for block, factor in zip(alike, factors.unbind(), strict=True):
            steps.update({p: step * factor for p, step in block})
    first = next(iter(found.values()))
    none = torch.zeros_like(first)
    return steps, torch.stack([found.get(index, none).to(first) for index in range(len(blocks))])


def _of_one_kind(blocks: list[list[Pair]]) -> list[list[int]]:
    """Which have the same number of parameters on the same device in the same dtype, so that one kernel serves all."""
    kinds: dict[object, list[int]] = {}
    for index, block in enumerate(blocks):
        kinds.setdefault(tuple((step.device, step.dtype) for _, step in block), []).append(index)
    return [alike for kind, alike in kinds.items() if kind]


def _by_block(norms: Sequence[Tensor], blocks: int) -> Tensor:
    """One norm a block of those of its parameters, which follow each other."""
    found: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)).view(blocks, -1), dim=1)
    return found


class KLClip:
    """Shortens all directions by nu = min(1, sqrt(bound / sum lr^2 g^2 / damped s)).

    Args:
        bound: The bound; None for none.
    """

    def __init__(self, bound: float | None) -> None:
        if bound is not None:
            options.number("kl_clip", bound, above=0)
        self.bound = bound
        #: How many steps were shortened, counted on the device.
        self.hits: Tensor | float = 0.0

    def __call__(self, steps: Steps, directions: list[Direction], lr_of: LearningRates) -> Steps:
        """The steps, shortened where they have to be."""
        if self.bound is None or not steps:
            return steps
        gradients = {p: g for d in directions for p, g in zip(d.block.parameters.values(), d.gradients, strict=True)}
        # In any orthonormal basis g^2 / damped s summed is the inner product of gradient and direction.
        terms = [(gradients[p] * step).sum() * lr_of[p] ** 2 for p, step in steps.items()]
        size = torch.stack([term.to(terms[0]) for term in terms]).sum()
        nu = (self.bound / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt().clamp(max=1)
        if not isinstance(self.hits, Tensor):
            self.hits = torch.full((), self.hits, device=nu.device)
        self.hits.add_((nu < 1).float())
        return {p: step * nu.to(step) for p, step in steps.items()}
