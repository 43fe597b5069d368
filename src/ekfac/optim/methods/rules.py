"""Scaling rules: how the projected mini-batch gradient g becomes a direction in the basis. One small class each.

A rule is a dataclass whose fields are its options; what it learns is in the block's state. All rules follow one
protocol, so the engine does not know which one is in use. A new rule is one class, passed as an instance,
``EKFAC(model, scaling=Mine())``, and one line in :mod:`ekfac.optim.methods.factory` to give it a name.

State is changed in place, by :func:`blend`, :func:`overwrite` and :func:`counted`, and nothing waits for the device.
So a CUDA graph can record the step, and a step with a non-finite gradient can be masked (``step.ok``).
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

#: A host number if reading it needs no synchronisation (on a CPU), else a tensor with one number per block.
Number = float | Tensor

#: :class:`Anchored` and KFAC clip gradients to this many times their usual length.
SPIKE = 10.0
#: Packs a Python float as float32.
SINGLE = struct.Struct("f")
#: Cache of :func:`remaining`: all blocks need the same values.
_REMAINING: dict[tuple[float, float, bool], float] = {}


@dataclass(frozen=True)
class Rule(ABC):
    """One way to turn the projected gradient into a direction."""

    #: The class of the rule's state; a rule with further tensors sets a subclass.
    state_class: ClassVar[type[EigenState]] = EigenState
    #: Whether the rule needs s* of this step's examples.
    needs_examples: ClassVar[bool] = False
    #: Whether s is S_B x S_A by definition, so that a new basis always brings a new s.
    follows_factors: ClassVar[bool] = False
    #: Whether s is of the gradient that the step uses, clipped and with the L2 penalty, as in torch's own optimizers.
    #: Otherwise it is of what backward left: g / s grows if both are clipped, m / sqrt(s) does not.
    squares_all: ClassVar[bool] = False
    #: Whether the rule compares the gradient with the last direction.
    compares_gradients: ClassVar[bool] = False
    #: Default lr and weight decay (docs/tuning.md has the evidence). With ``warms_up``, lr is set by the built-in
    #: schedule instead.
    lr: ClassVar[float] = 0.01
    weight_decay: ClassVar[float] = 0.0
    warms_up: ClassVar[bool] = False
    #: Default betas for losses with derivatives of the network inside; None for no change.
    derivative_betas: ClassVar[tuple[float, float] | None] = None
    #: Names of running means kept in the basis, which are carried over to the next one.
    moments: ClassVar[tuple[str, ...]] = ()
    #: Whether the step uses S_A and S_B.
    reads_eigenvalues: ClassVar[bool] = True
    #: Whether the rule can handle ``step.blocks`` blocks of one shape, concatenated along G.
    stacks: ClassVar[bool] = False
    #: Whether everything computed from a bounded gradient, however large, stays finite without masking by ``step.ok``.
    bounds_gradients: ClassVar[bool] = False
    #: Whether coordinates of a direction are of similar size, so that rounding one does not swamp another.
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
        """Return whether s restarts in a new basis; otherwise it is carried over."""
        return self.follows_factors

    def start(self, state: EigenState, known: Tensor, ok: Tensor | None = None) -> None:
        """Initialise s with S_B x S_A of a new basis, or with N g^2 of the first gradient if there is no basis."""
        overwrite(state, "s", bounded(known), ok)

    @abstractmethod
    def observe(self, state: EigenState, step: BlockStep) -> None:
        """Update the state from ``step.seen``, see :attr:`squares_all`, and ``step.s_star`` if needed."""

    def direction(self, state: EigenState, step: BlockStep) -> Tensor:
        """Return g / damped s."""
        return step.g / step.damped(state.s)

    def change_betas(self, state: EigenState, old: tuple[float, float], new: tuple[float, float]) -> None:
        """Rescale m so that its bias-corrected value is unchanged under new betas; s needs no rescaling."""
        if hasattr(state, "m"):
            state.m.mul_(spread(remaining(new[0], state.count) / remaining(old[0], state.count), state.m))

    def second_moment(self, state: EigenState) -> Tensor:
        """Return s in the units of the Fisher matrix."""
        return state.s


# --- changes of state ---------------------------------------------------------------------------------------------


def blend(target: Tensor, value: Tensor, weight: float | Tensor, ok: Tensor | None) -> None:
    """Set target <- (1 - weight) target + weight value in place, unless ``ok`` is 0."""
    if ok is not None:
        weight = ok * weight
    target.lerp_(value, weight.to(target) if isinstance(weight, Tensor) else weight)


def overwrite(state: BlockState, name: str, value: Tensor, ok: Tensor | None = None) -> None:
    """Set a field in place, because CUDA graphs refer to its address, unless ``ok`` is 0."""
    there = state.__dict__.get(name)
    if isinstance(there, Tensor) and there.shape == value.shape and there.dtype == value.dtype:
        there.copy_(value if ok is None else torch.where(ok > 0, value, there))
    else:
        setattr(state, name, value)


def counted(state: EigenState, like: Tensor, ok: Tensor | None, blocks: int = 1) -> Number:
    """Count a step on the device; return the count (one per block if several are stacked)."""
    if not hasattr(state, "count"):
        state.count = torch.zeros(() if blocks == 1 else blocks, dtype=torch.float64, device=like.device)
    count = state.count.add_(1.0 if ok is None else ok)
    if not count.is_cpu:
        return count
    return count.item() if blocks == 1 else shared(count.tolist(), count)


def shared(column: Sequence[float], like: Tensor) -> Number:
    """Return the number that all blocks have in common, or a tensor of all; a float saves several small tensors."""
    first = column[0]
    if all(number == first for number in column):
        return first
    return torch.tensor(column, dtype=torch.float64, device=like.device)


def spread(numbers: Number, over: Tensor) -> Number:
    """Return one number per block, in a dtype and shape that broadcast against the blocks' ``[G, O, C]``."""
    if not isinstance(numbers, Tensor):
        return numbers
    numbers = numbers.to(over)
    if not numbers.dim():
        return numbers
    each = len(over) // len(numbers)
    return (numbers if each == 1 else numbers.repeat_interleave(each)).view(-1, 1, 1)


def square_of(x: Tensor) -> Number:
    """Return the sum of squares of x."""
    flat = x.reshape(-1)
    square = torch.dot(flat, flat)
    return square.item() if x.is_cpu else square


def bounded(square: Tensor) -> Tensor:
    """Clamp a second moment in place: an infinity would never decay from a running average."""
    return square.clamp_(max=torch.finfo(square.dtype).max ** 0.75)


def within_range(g: Tensor) -> Tensor:
    """Clamp a gradient so that its square is within :func:`bounded`'s limit; replace NaN by zero.

    Otherwise g / sqrt(s) for an input of 1e20 (a fill value, for example) would be as large as the input.
    """
    limit = torch.finfo(g.dtype).max ** 0.375
    return g.clamp(-limit, limit).nan_to_num_(nan=0.0)


def squared(g: Tensor, n: float | Tensor = 1.0) -> Tensor:
    """Return N g^2."""
    return bounded(g.square().mul_(n.to(g) if isinstance(n, Tensor) else n))


def shortening(square: Any, limit: Number) -> Number:
    """Return the factor that shortens a vector of this squared length to ``limit``; 1 if shorter, or limit is zero."""
    if not isinstance(limit, Tensor):
        return math.sqrt(limit / square) if 0 < limit < square else 1.0
    factor = (limit / square).sqrt().clamp(max=1).nan_to_num(1.0)
    return torch.where(limit > 0, factor, 1.0)


def remaining(beta: Number, count: Number, root: bool = False) -> Number:
    """Return Adam's bias correction 1 - beta^t (at least 1 - beta), or its square root."""
    if isinstance(beta, Tensor) or isinstance(count, Tensor):
        found: Tensor = (1 - beta**count).clamp(min=1 - beta)
        return found.sqrt() if root else found
    key = beta, count, root
    if key not in _REMAINING:
        if len(_REMAINING) > 100:
            _REMAINING.clear()
        there = torch.tensor(count, dtype=torch.float64, device="cpu")
        power: float = (beta**there).item()  # bit-identical to the result on tensors
        _REMAINING[key] = math.sqrt(max(1 - power, 1 - beta)) if root else max(1 - power, 1 - beta)
    return _REMAINING[key]


def clipped(x: Number, least: float, most: float) -> Number:
    """Clamp a number."""
    return x.clamp(least, most) if isinstance(x, Tensor) else min(max(x, least), most)


def rounded(x: Number, like: Tensor) -> Number:
    """Round a host number to float32 if the tensor is float32."""
    if isinstance(x, Tensor) or like.dtype != torch.float32:
        return x
    try:
        found: float = SINGLE.unpack(SINGLE.pack(x))[0]
        return found
    except OverflowError:
        return math.inf


def mean_gradient(state: EigenState, step: BlockStep, beta: Number, count: Number) -> Tensor:
    """Update m <- beta m + (1 - beta) g; return it divided by 1 - beta^t, or zero if ``ok`` is 0."""
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
        restart: Restart s at S_B x S_A in every new basis; otherwise it is carried over.
    """

    decay: float = 0.95
    restart: bool = False

    def restarts(self) -> bool:
        return self.restart or self.follows_factors


@dataclass(frozen=True)
class Running(KroneckerRule):
    """EKFAC-ra: starts at S_B x S_A, then s <- rho s + (1 - rho) N g^2, with rho the ``decay``.

    It restarts because N g^2 overshoots while the examples' gradients agree; in experiments, restarting is far better.
    """

    restart: bool = True

    def observe(self, state: EigenState, step: BlockStep) -> None:
        blend(state.s, squared(step.seen, step.n), 1 - self.decay, step.ok)


@dataclass(frozen=True)
class PerExample(KroneckerRule):
    """EKFAC: s* of this step's examples alone (``decay=0``, Algorithm 1), or as a bias-corrected running average."""

    decay: float = 0.0

    needs_examples = True

    def elementwise(self) -> Rule:
        """Return EKFAC-ra: N g^2 of a single batch is too noisy to divide by."""
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
        s_star = bounded(s_star.nan_to_num_(nan=torch.inf))  # NaN is inf * 0: the example was too large to square
        blend(state.s, s_star, weight if self.decay else 1.0, step.ok)


@dataclass(frozen=True)
class Kronecker(KroneckerRule):
    """KFAC in its eigenbasis: s = S_B x S_A, renewed at every refresh whatever ``restart``.

    ``decay`` is for parameters that no layer covers, which get EKFAC-ra.
    """

    follows_factors = True

    def elementwise(self) -> Rule:
        """Return EKFAC-ra."""
        return Running(decay=self.decay or Running.decay)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        """Do nothing: s changes only at refreshes."""


@dataclass(frozen=True)
class Anchored(Running):
    """Adam's step with EKFAC-ra's second moment, anchored at KFAC's eigenvalues at every refresh.

    s as in :class:`Running`; m <- beta_1 m + (1 - beta_1) g; the direction is m / sqrt(s / N), which has the size of
    Adam's, with the bias of m corrected.

    Attributes:
        decay: rho of s.
        restart: Restart s in a new basis.
        betas: The first is beta_1; the second is not used.
    """

    decay: float = 0.98
    betas: tuple[float, float] = (0.9, 0.999)

    compares_gradients = True
    moments = ("m",)

    def observe(self, state: EigenState, step: BlockStep) -> None:
        if hasattr(state, "m"):  # clip spikes: unlike s, which restarts, m would remember a bad batch
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
    """Return x.y, x.x and y.y, first for x = g / sqrt(s), y = m / sqrt(s), then for x = g, y = m: ``[2, 3]``."""
    g, m, root = g.reshape(-1), m.reshape(-1), root.reshape(-1)
    pairs = ((g / root, m / root), (g, m))
    return torch.stack([torch.dot(*p) for x, y in pairs for p in ((x, y), (x, x), (y, y))]).view(2, 3)


# --- torch's rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchRule(Rule):
    """One of torch's own rules, on the coordinates: s averages g^2, starts at zero, and is damped only by ``eps``."""

    squares_all = True
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
        if step.ok is not None and hasattr(state, "examples"):  # one kernel; networks can have hundreds of blocks
            state.examples.lerp_(n.to(state.examples).expand_as(state.examples), step.ok.to(state.examples))
            return
        overwrite(state, "examples", n if step.blocks == 1 else n.expand(step.blocks).clone(), step.ok)

    def second_moment(self, state: EigenState) -> Tensor:
        return state.s * spread(state.examples, state.s) if "examples" in state else state.s
