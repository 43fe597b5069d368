"""Scaling rules: what is done with the projected mini-batch gradient g in the basis. One small class each.

A rule is a dataclass whose fields are its options, with its own defaults; what it learns is in the block's state. All
rules follow one protocol, so the engine does not know which one is in use. A new rule is one class, which may be given
as it is, ``EKFAC(model, scaling=Mine())``, and one line in :mod:`ekfac.optim.methods.factory` if it is to have a name.

State is changed in place, by :func:`blend`, :func:`overwrite` and :func:`counted`, and nothing waits for the device:
so a CUDA graph can hold the step, and a step with a gradient that is not finite changes nothing (``step.ok``).
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ekfac import checks
from ekfac.optim.types import BlockState, BlockStep, EigenState, as_scalar

#: A number, of the host where that need not wait for it: on a CPU. Else on the device, one for each of several blocks.
Number = float | Tensor

#: How many times longer than before a gradient may be under :class:`Anchored`.
SPIKE = 10.0
#: The host's form of a float32.
SINGLE = struct.Struct("f")
#: What :func:`remaining` has found for the host: all blocks ask for the same.
_REMAINING: dict[tuple[float, float, bool], float] = {}


@dataclass(frozen=True)
class Rule(ABC):
    """One way to turn the projected gradient into a direction."""

    #: What the rule keeps; a rule with further tensors names a subclass.
    state_class: ClassVar[type[EigenState]] = EigenState
    #: Whether the rule needs s* of this step's examples.
    needs_examples: ClassVar[bool] = False
    #: Whether s is S_B x S_A by definition, so that a new basis always brings a new s.
    follows_factors: ClassVar[bool] = False
    #: Whether an L2 penalty counts as part of the gradient whose square is taken, as in torch's own optimizers.
    squares_penalty: ClassVar[bool] = False
    #: Whether the rule compares the gradient with the last direction.
    compares_gradients: ClassVar[bool] = False
    #: lr and weight decay where none is given (docs/tuning.md has the evidence); with ``warms_up`` that lr
    #: rises at first and then falls.
    lr: ClassVar[float] = 0.01
    weight_decay: ClassVar[float] = 0.0
    warms_up: ClassVar[bool] = False
    #: The betas for losses with derivatives of the network inside, where none are given; None for the usual ones.
    of_derivatives: ClassVar[tuple[float, float] | None] = None
    #: Names of means that live in the basis and are carried to the next one.
    moments: ClassVar[tuple[str, ...]] = ()
    #: Whether S_A and S_B have a part in the step.
    reads_eigenvalues: ClassVar[bool] = True
    #: Whether the rule can take several blocks of one shape at once, ``step.blocks`` of them one below the other.
    stacks: ClassVar[bool] = False
    #: Whether all that becomes of a finite gradient, however large, is finite before it is masked by ``step.ok``.
    bounds_gradients: ClassVar[bool] = False
    #: Whether coordinates of a direction are all of about one size, so that rounding one does not drown another.
    even: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "restart":
                checks.flag(option.name, value)
            elif option.name == "eps":
                checks.number(option.name, value, above=0)
                object.__setattr__(self, option.name, float(value))
            elif option.name == "betas":
                checks.decays(option.name, value)
            elif option.name in ("decay", "alpha"):
                checks.number(option.name, value, least=0, below=1)

    def elementwise(self) -> Rule:
        """Return the rule for parameters that no layer covers."""
        return self

    def restarts(self) -> bool:
        """Tell whether s starts anew in a new basis; otherwise it is carried there."""
        return self.follows_factors

    def start(self, state: EigenState, known: Tensor, ok: Tensor | None = None) -> None:
        """Begin with what is known of s: S_B x S_A of a new basis, or N g^2 of the first gradient without one."""
        overwrite(state, "s", bounded(known), ok)

    @abstractmethod
    def observe(self, state: EigenState, step: BlockStep) -> None:
        """Take in ``step.seen``, the gradient as backward left it, and ``step.s_star`` where the rule needs it."""

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        """Return g / damped s."""
        return step.g / step.damped(state.s)

    def change_betas(self, state: EigenState, old: tuple[float, float], new: tuple[float, float]) -> None:
        """Have m stand for the same mean when its decay becomes another; that of s stays."""
        if hasattr(state, "m"):
            state.m.mul_(spread(remaining(new[0], state.count) / remaining(old[0], state.count), state.m))

    def second_moment(self, state: EigenState) -> Tensor:
        """Return s in the units of the Fisher matrix."""
        return state.s


# --- changes of state ---------------------------------------------------------------------------------------------


def blend(target: Tensor, value: Tensor, weight: float | Tensor, ok: Tensor | None) -> None:
    """Set target <- (1 - weight) target + weight value, in place; not where ``ok`` is 0."""
    if ok is not None:
        weight = ok * weight
    target.lerp_(value, weight.to(target) if isinstance(weight, Tensor) else weight)


def overwrite(state: BlockState, name: str, value: Tensor, ok: Tensor | None = None) -> None:
    """Write a tensor over the one that is there: a CUDA graph holds on to its address. Not where ``ok`` is 0."""
    there = state.__dict__.get(name)
    if isinstance(there, Tensor) and there.shape == value.shape and there.dtype == value.dtype:
        there.copy_(value if ok is None else torch.where(ok > 0, value, there))
    else:
        setattr(state, name, value)


def counted(state: EigenState, like: Tensor, ok: Tensor | None, blocks: int = 1) -> Number:
    """Count a step on the device; returns how many have been counted, for each of several blocks."""
    if not hasattr(state, "count"):
        state.count = torch.zeros(() if blocks == 1 else blocks, dtype=torch.float64, device=like.device)
    count = state.count.add_(1.0 if ok is None else ok)
    if not count.is_cpu:
        return count
    return count.item() if blocks == 1 else shared(count.tolist(), count)


def shared(column: Sequence[float], like: Tensor) -> Number:
    """Return the number that all blocks have, or else a tensor of all: a float spares several small tensors."""
    first = column[0]
    if all(number == first for number in column):
        return first
    return torch.tensor(column, dtype=torch.float64, device=like.device)


def spread(numbers: Number, over: Tensor) -> Number:
    """Return one number a block, in the dtype and shape in which it multiplies the blocks' ``[G, O, C]``."""
    if not isinstance(numbers, Tensor):
        return numbers
    numbers = numbers.to(over)
    if not numbers.dim():
        return numbers
    each = len(over) // len(numbers)
    return (numbers if each == 1 else numbers.repeat_interleave(each)).view(-1, 1, 1)


def square_of(x: Tensor) -> Number:
    """Return x.x of all its numbers."""
    flat = x.reshape(-1)
    square = torch.dot(flat, flat)
    return square.item() if x.is_cpu else square


def bounded(square: Tensor) -> Tensor:
    """Keep a second moment from overflowing, in place: infinity would never fade from a running average."""
    return square.clamp_(max=torch.finfo(square.dtype).max ** 0.75)


def within_range(g: Tensor) -> Tensor:
    """Bound a gradient so that its square is within :func:`bounded`'s limit; what overflowed before is zero.

    Otherwise g / sqrt(s) of an input of 1e20 (a fill value, for example) would be as large as the input.
    """
    limit = torch.finfo(g.dtype).max ** 0.375
    return g.clamp(-limit, limit).nan_to_num_(nan=0.0)


def squared(g: Tensor, n: float | Tensor = 1.0) -> Tensor:
    """Return N g^2."""
    return bounded(g.square().mul_(n.to(g) if isinstance(n, Tensor) else n))


def shortening(square: Any, limit: Number) -> Number:
    """Return the factor that brings a squared length down to ``limit``; 1 if it is below, or nothing is known."""
    if not isinstance(limit, Tensor):
        return math.sqrt(limit / square) if 0 < limit < square else 1.0
    factor = (limit / square).sqrt().clamp(max=1).nan_to_num(1.0)
    return torch.where(limit > 0, factor, 1.0)


def remaining(beta: Number, count: Number, root: bool = False) -> Number:
    """Return 1 - beta^t, which an average that began at zero is divided by, at least 1 - beta; or its square root."""
    if isinstance(beta, Tensor) or isinstance(count, Tensor):
        found: Tensor = (1 - beta**count).clamp(min=1 - beta)
        return found.sqrt() if root else found
    key = beta, count, root
    if key not in _REMAINING:
        if len(_REMAINING) > 100:
            _REMAINING.clear()
        there = torch.tensor(count, dtype=torch.float64, device="cpu")
        power: float = (beta**there).item()  # to the last bit as on the device
        _REMAINING[key] = math.sqrt(max(1 - power, 1 - beta)) if root else max(1 - power, 1 - beta)
    return _REMAINING[key]


def clipped(x: Number, least: float, most: float) -> Number:
    """Return a number within bounds."""
    return x.clamp(least, most) if isinstance(x, Tensor) else min(max(x, least), most)


def rounded(x: Number, like: Tensor) -> Number:
    """Return a number of the host as it would be in the dtype of a tensor."""
    if isinstance(x, Tensor) or like.dtype != torch.float32:
        return x
    try:
        found: float = SINGLE.unpack(SINGLE.pack(x))[0]
        return found
    except OverflowError:
        return math.inf


def mean_gradient(state: EigenState, step: BlockStep, beta: Number, count: Number) -> Tensor:
    """Update m <- beta m + (1 - beta) g; return it divided by 1 - beta^t, zero where ``ok`` is 0."""
    g, ok = step.g, step.ok
    if not hasattr(state, "m"):
        state.m = torch.zeros_like(g)
    blend(state.m, g, 1 - beta, ok)
    weight = remaining(beta, count)
    return state.m / spread(weight, g) if ok is None else state.m * spread(ok / weight, g)


# --- EKFAC's rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KroneckerRule(Rule):
    """A rule whose s begins at S_B x S_A.

    Attributes:
        decay: Weight of the past in s.
        restart: Restart s at S_B x S_A in every new basis; otherwise it is carried there.
    """

    decay: float = 0.95
    restart: bool = False

    def restarts(self) -> bool:
        return self.restart or self.follows_factors


@dataclass(frozen=True)
class Running(KroneckerRule):
    """EKFAC-ra: starts at S_B x S_A, then s <- rho s + (1 - rho) N g^2, with rho the ``decay``.

    It restarts, as N g^2 overshoots while all examples pull the same way: measured, it is far better to forget it.
    """

    restart: bool = True

    def observe(self, state: EigenState, step: BlockStep) -> None:
        blend(state.s, squared(step.seen, step.n), 1 - self.decay, step.ok)


@dataclass(frozen=True)
class PerExample(KroneckerRule):
    """EKFAC: s* of this step's examples, afresh (``decay=0``, Algorithm 1) or as a bias-corrected average."""

    decay: float = 0.0

    needs_examples = True

    def elementwise(self) -> Rule:
        """Return EKFAC-ra: N g^2 of a single batch is no scale to divide by."""
        return Running(decay=self.decay or Running.decay)

    def start(self, state: EigenState, known: Tensor, ok: Tensor | None = None) -> None:
        super().start(state, known, ok)
        overwrite(state, "count", torch.zeros((), dtype=torch.float64, device=known.device), ok)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        s_star = step.s_star
        if s_star is None:
            return
        # The average's weights 1 - decay, (1 - decay) decay, ... are divided by their sum 1 - decay^t.
        weight = (1 - self.decay) / remaining(self.decay, counted(state, s_star, step.ok))
        s_star = bounded(s_star.nan_to_num_(nan=torch.inf))  # infinity times zero: the example was too large to square
        blend(state.s, s_star, weight if self.decay else 1.0, step.ok)


@dataclass(frozen=True)
class Kronecker(KroneckerRule):
    """KFAC, seen in its eigenbasis: s = S_B x S_A until the next refresh, which brings a new s whatever ``restart``.

    ``decay`` is for parameters that no layer covers, which get EKFAC-ra.
    """

    follows_factors = True

    def elementwise(self) -> Rule:
        """Return EKFAC-ra."""
        return Running(decay=self.decay or Running.decay)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        """Learn nothing between refreshes."""


@dataclass(frozen=True)
class Anchored(Running):
    """Adam's step with EKFAC-ra's second moment, anchored at KFAC's eigenvalues at every refresh.

    s as in :class:`Running`; m <- beta_1 m + (1 - beta_1) g; the direction is m / sqrt(s / N), which has the size of
    Adam's, with the bias of m corrected.

    Attributes:
        decay: rho of s.
        restart: Restart s in a new basis.
        betas: beta_1 is the first; the second is not used.
    """

    decay: float = 0.98
    betas: tuple[float, float] = (0.9, 0.999)

    compares_gradients = True
    moments = ("m",)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        if hasattr(state, "m"):  # m would hold on to a bad batch, and s begins anew in the next basis
            total: Number = state.s.sum().item() if state.s.is_cpu else state.s.sum()
            usual = square_of(state.m) + total / as_scalar(step.n, state.s)
            factor = shortening(square_of(step.seen), SPIKE**2 * usual)
            same = step.seen is step.g
            if isinstance(factor, Tensor) or factor != 1:
                step.g = step.g * factor
                step.seen = step.g if same else step.seen * factor
        super().observe(state, step)

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        g, n = step.g, step.n
        root = step.damped(state.s).sqrt_()
        if step.rates.compares and hasattr(state, "m"):
            step.products = products(g, state.m, root)
        mean = mean_gradient(state, step, (step.rates.betas or self.betas)[0], counted(state, g, step.ok))
        return mean / root.div_(n.to(g).sqrt() if isinstance(n, Tensor) else n**0.5)


def products(g: Tensor, m: Tensor, root: Tensor) -> Tensor:
    """Return x.y, x.x and y.y of x = g / sqrt(s) and y = m / sqrt(s), and of x = g and y = m: ``[2, 3]``."""
    g, m, root = g.reshape(-1), m.reshape(-1), root.reshape(-1)
    pairs = ((g / root, m / root), (g, m))
    return torch.stack([torch.dot(*p) for x, y in pairs for p in ((x, y), (x, x), (y, y))]).view(2, 3)


# --- torch's rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchRule(Rule):
    """One of torch's own, on the coordinates: s is of g^2, starts at zero, and knows no damping but ``eps``."""

    squares_penalty = True
    reads_eigenvalues = False
    stacks = True
    even = True

    def start(self, state: EigenState, known: Tensor, ok: Tensor | None = None) -> None:
        overwrite(state, "s", torch.zeros_like(known), ok)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        if step.ok is None and not isinstance(step.n, Tensor) and hasattr(state, "examples"):
            state.examples.fill_(step.n)
            return
        n = step.n if isinstance(step.n, Tensor) else torch.full((), step.n, dtype=torch.float64, device=step.g.device)
        if step.ok is not None and hasattr(state, "examples"):  # one kernel, where there are hundreds of such
            state.examples.lerp_(n.to(state.examples).expand_as(state.examples), step.ok.to(state.examples))
            return
        overwrite(state, "examples", n if step.blocks == 1 else n.expand(step.blocks).clone(), step.ok)

    def second_moment(self, state: EigenState) -> Tensor:
        return state.s * spread(state.examples, state.s) if "examples" in state else state.s
