"""Scaling rules: what is done with the projected mini-batch gradient g in the basis. One small class each.

A rule keeps its tensors in the block's state, under ``s`` and names of its own. All rules see the same protocol, so
the step loop does not know which one is in use. A new rule is one class here and one line in ``RULES``.

Every method takes ``ok``: None where the step is known to be good, or a 0-dim tensor that is 0 on the device when the
gradient was not finite; then nothing may change, without the host ever looking. State is changed in place, and counts
live on the device too, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

#: The most that the whitened cosine says, either way: at PACE_RATE 2 the next step is a tenth longer or shorter.
#: A batch that is seen again and again agrees with itself even when steps have become too long.
SAY = 0.05

State = dict[str, Any]
Damped = Callable[[Tensor], Tensor]


def blend(target: Tensor, value: Tensor, weight: float | Tensor, ok: Tensor | None) -> None:
    """target <- (1 - weight) target + weight value, in place; untouched where ``ok`` is 0."""
    if ok is not None:
        weight = ok * weight
    target.lerp_(value, weight.to(target) if isinstance(weight, Tensor) else weight)


def bounded(square: Tensor) -> Tensor:
    """A second moment, in place, kept from overflowing: infinity would never fade from a running average."""
    return square.clamp_(max=torch.finfo(square.dtype).max ** 0.75)


def squared(g: Tensor, n: float | Tensor = 1.0) -> Tensor:
    """N g^2."""
    return bounded(g.square().mul_(n.to(g) if isinstance(n, Tensor) else n))


class Rule(ABC):
    """One way to turn the projected gradient into a direction.

    Args:
        decay: Weight of the past in running averages of second moments.
        betas: Adam's two decays.
        eps: What torch's rules add to the square root.
    """

    #: Whether the rule needs s* of this step's examples.
    needs_examples: ClassVar[bool] = False
    #: Whether s is S_B x S_A by definition, so that a new basis always brings a new s.
    follows_factors: ClassVar[bool] = False
    #: Whether an L2 penalty counts as part of the gradient whose square is taken, as in torch's own optimizers.
    squares_penalty: ClassVar[bool] = False
    #: Whether the rule says how far the gradient agrees with the last direction.
    has_alignment: ClassVar[bool] = False
    #: Names of means that live in the basis and turn with it.
    moments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, decay: float = 0.95, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.decay = decay
        self.beta1, self.beta2 = betas
        self.eps = eps

    def start(self, state: State, kronecker: Tensor, ok: Tensor | None = None) -> None:
        """Begin in a new basis with the eigenvalues S_B x S_A that came with it."""
        put(state, "s", bounded(kronecker), ok)

    def begin(self, state: State, g: Tensor, n: float | Tensor, ok: Tensor | None) -> None:
        """Begin without a basis, at the first gradient of a parameter that no layer covers."""
        state["s"] = torch.zeros_like(g)
        blend(state["s"], squared(g, n), 1.0, ok)

    @abstractmethod
    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        """Take in the gradient as backward left it, over n examples, and s* where the rule needs it."""

    def direction(self, state: State, g: Tensor, n: float | Tensor, ok: Tensor | None, damped: Damped) -> Tensor:
        """g / damped s."""
        return g / damped(state["s"])

    def second_moment(self, state: State) -> Tensor:
        """s in the units of the Fisher matrix."""
        s: Tensor = state["s"]
        return s


def put(state: State, name: str, value: Tensor, ok: Tensor | None = None) -> None:
    """Write a tensor into a block's state, over the one that is there: a captured step holds on to its address.

    Where ``ok`` is 0 it stays as it is.
    """
    there = state.get(name)
    if isinstance(there, Tensor) and there.shape == value.shape and there.dtype == value.dtype:
        there.copy_(value if ok is None else torch.where(ok > 0, value, there))
    else:
        state[name] = value


def counted(state: State, like: Tensor, ok: Tensor | None) -> Tensor:
    """Count a step on the device; returns how many have been counted."""
    if "count" not in state:
        state["count"] = torch.zeros((), dtype=torch.float64, device=like.device)
    count: Tensor = state["count"]
    return count.add_(1.0 if ok is None else ok)


class PerExample(Rule):
    """EKFAC: s* of this step's examples, afresh (``decay=0``, Algorithm 1) or as a bias-corrected average."""

    needs_examples = True

    def start(self, state: State, kronecker: Tensor, ok: Tensor | None = None) -> None:
        super().start(state, kronecker, ok)
        put(state, "count", torch.zeros((), dtype=torch.float64, device=kronecker.device), ok)

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        if s_star is None:
            return
        # The average's weights 1 - decay, (1 - decay) decay, ... are divided by their sum 1 - decay^t.
        weight = (1 - self.decay) / (1 - self.decay ** counted(state, s_star, ok)).clamp(min=1 - self.decay)
        blend(state["s"], bounded(s_star), weight if self.decay else 1.0, ok)


class Running(Rule):
    """EKFAC-ra: starts at S_B x S_A, then s <- rho s + (1 - rho) N g^2."""

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        blend(state["s"], squared(g, n), 1 - self.decay, ok)


class Kronecker(Rule):
    """KFAC, seen in its eigenbasis: s = S_B x S_A until the next refresh."""

    follows_factors = True

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        """Nothing to learn between refreshes."""


class Anchored(Running):
    """Adam's step with EKFAC-ra's second moment, anchored at KFAC's eigenvalues at every refresh.

    s as in :class:`Running`; m <- beta_1 m + (1 - beta_1) g; the direction is m / sqrt(s / N), which has the size of
    Adam's, with the bias of m corrected. What tells how far g still agrees with the last direction is kept in
    ``products``.
    """

    has_alignment = True
    moments = ("m",)

    def direction(self, state: State, g: Tensor, n: float | Tensor, ok: Tensor | None, damped: Damped) -> Tensor:
        root = damped(state["s"]).sqrt_()
        if "m" in state:
            put(state, "products", products(g, state["m"], root))
        mean = mean_gradient(state, g, self.beta1, counted(state, g, ok), ok)
        return mean / root.div_(n.to(g).sqrt() if isinstance(n, Tensor) else n**0.5)


def products(g: Tensor, m: Tensor, root: Tensor) -> Tensor:
    """x.y, x.x and y.y of x = g / sqrt(s) and y = m / sqrt(s), and of x = g and y = m: ``[2, 3]``."""
    g, m, root = g.reshape(-1), m.reshape(-1), root.reshape(-1)
    pairs = ((g / root, m / root), (g, m))
    return torch.stack([torch.dot(*p) for x, y in pairs for p in ((x, y), (x, x), (y, y))]).view(2, 3)


def alignment(found: Tensor, whole: Tensor | None = None) -> Tensor:
    """How far g agrees with the last direction: cos(g / sqrt(s), m / sqrt(s)) within SAY, + max(0, cos(g, m) - 1/2).

    In the whitened cosine every coordinate has the same say; in the plain one the few directions of large curvature
    decide, and these point back long before the many others have got anywhere. But gradients that are nearly parallel
    even there say that steps are far too short.

    Args:
        found: The :func:`products` of any number of blocks, ``[..., 2, 3]``.
        whole: Whether each takes its whole step, or trust a part of it; the last term is for those that do.
    """
    xy, xx, yy = found.unbind(-1)
    # One root after the other: the product of two squares leaves float32 where gradients are large or small.
    cosine = (xy * xx.rsqrt() * yy.rsqrt()).nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1)
    whitened, plain = cosine.unbind(-1)
    parallel = (plain - 0.5).clamp(min=0)
    return whitened.clamp(-SAY, SAY) + (parallel if whole is None else parallel * whole)


def mean_gradient(state: State, g: Tensor, beta: float, count: Tensor, ok: Tensor | None) -> Tensor:
    """m <- beta m + (1 - beta) g, divided by 1 - beta^t; zero where ``ok`` is 0."""
    if "m" not in state:
        state["m"] = torch.zeros_like(g)
    blend(state["m"], g, 1 - beta, ok)
    m: Tensor = state["m"]
    weight = (1 - beta**count).clamp(min=1 - beta)
    return m / weight.to(g) if ok is None else m * (ok / weight).to(g)


class Adam(Rule):
    """torch's Adam on the coordinates: m and v = s are averages of g and g^2, both corrected for their start at 0."""

    squares_penalty = True
    moments: ClassVar[tuple[str, ...]] = ("m",)

    def start(self, state: State, kronecker: Tensor, ok: Tensor | None = None) -> None:
        put(state, "s", torch.zeros_like(kronecker), ok)

    def begin(self, state: State, g: Tensor, n: float | Tensor, ok: Tensor | None) -> None:
        state["s"] = torch.zeros_like(g)

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        state["examples"] = n
        blend(state["s"], squared(g), 1 - self.beta2, ok)

    def direction(self, state: State, g: Tensor, n: float | Tensor, ok: Tensor | None, damped: Damped) -> Tensor:
        count = counted(state, g, ok)
        mean = mean_gradient(state, g, self.beta1, count, ok)
        root = (1 - self.beta2**count).clamp(min=1 - self.beta2).sqrt().to(g)
        v: Tensor = state["s"]
        return mean / (v.sqrt() / root).add_(self.eps)

    def second_moment(self, state: State) -> Tensor:
        s: Tensor = state["s"] * state.get("examples", 1.0)
        if "count" in state:
            s = s / (1 - self.beta2 ** state["count"]).clamp(min=1 - self.beta2).to(s)
        return s


class RMSProp(Adam):
    """torch's RMSprop on the coordinates: v = s <- alpha v + (1 - alpha) g^2, alpha being ``decay``."""

    moments = ()

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        state["examples"] = n
        blend(state["s"], squared(g), 1 - self.decay, ok)

    def direction(self, state: State, g: Tensor, n: float | Tensor, ok: Tensor | None, damped: Damped) -> Tensor:
        v: Tensor = state["s"]
        return g / v.sqrt().add_(self.eps)


class Adagrad(RMSProp):
    """torch's Adagrad on the coordinates: s is the sum of all g^2 so far."""

    def observe(self, state: State, g: Tensor, n: float | Tensor, s_star: Tensor | None, ok: Tensor | None) -> None:
        state["examples"] = n
        state["s"].add_(squared(g) if ok is None else squared(g) * ok.to(g))
        bounded(state["s"])


RULES: dict[str, type[Rule]] = {
    "anchored": Anchored,
    "running": Running,
    "per_example": PerExample,
    "kronecker": Kronecker,
    "adam": Adam,
    "rmsprop": RMSProp,
    "adagrad": Adagrad,
}
