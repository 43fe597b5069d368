"""EKFAC: natural gradient descent in a Kronecker-factored eigenbasis, as a torch optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from ekfac.optim import options
from ekfac.optim.factory import build_engine, make_rule
from ekfac.optim.groups import Groups
from ekfac.optim.methods.belief import Belief
from ekfac.optim.optimizer import Optimizer
from ekfac.optim.options import CurvatureArguments, Damping
from ekfac.optim.step_size.adaptive_damping import AdaptiveDamping
from ekfac.optim.step_size.lr_fraction import LRFraction
from ekfac.optim.step_size.rate import ANNEAL, WARMUP, RateCourse

#: Measured defaults; docs/tuning.md has the evidence.
LR = 0.004
WEIGHT_DECAY = 0.3
#: The learning rate of the rules that divide by s, as the paper's do.
PAPER_LR = 0.01


class EKFAC(Optimizer):
    r"""Natural gradient descent in a Kronecker-factored eigenbasis (George et al., 2018).

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        &A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T
            && \text{every } \texttt{refresh\_every} \text{ steps} \\
        &g = U_B^T G U_A, \quad m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
            s \leftarrow \beta_2 s + (1 - \beta_2) ((g - m)^2 + \kappa m^2) \\
        &\theta \leftarrow \theta (1 - \eta \lambda) - \eta \, U_B \, (m / \sqrt{s}) \, U_A^T

    This is the default, ``scaling="belief"``: an Adam-like step in EKFAC's basis. lr and weight_decay mean what they
    mean in AdamW, and torch's schedulers are obeyed. ``EKFAC(model, **ekfac.PAPER)`` is the paper's EKFAC-ra, which
    has g / (s + \epsilon) in place of the fraction; other rules are in :mod:`ekfac.optim.methods.rules`.

    Example:
        >>> import torch, ekfac
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> opt = ekfac.EKFAC(model)
        >>> x, y = torch.randn(32, 4), torch.randint(2, (32,))
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     opt.step()

    Args:
        model: The model; its forward counts the examples.
        params: torch's parameter groups over the model's parameters, for an lr, weight_decay, momentum or damping
            of their own, or some parameters; all by default. Those that are frozen wait until they are not.
        lr: Learning rate eta, a number or a one-element tensor: every step is lr times the direction. By default 0.004,
            which rises over 100 steps and then falls as 1 / sqrt(1 + t / 100), unless one of torch's schedulers has it
            or somebody writes another into the groups. Name it for ``ReduceLROnPlateau``, which cannot be seen before.
        betas: Decays of m and s, by default (0.95, 0.95); they live in the parameter groups, where torch's cyclic
            schedulers find them.
        weight_decay: lambda, as in AdamW. By default 0.3 for weights of two or more dimensions and none for the rest.
        total_steps: The length of the training: the rate then falls to zero along a cosine, after a warm-up.
        anneal: Let the rate fall as lr / sqrt(1 + t / anneal) over steps t; None for no built-in course at all.
        pace: The share of lr that the first step takes, at most 1, under scaling="anchored"; later steps take more
            while gradients keep agreeing with the last direction, less when they point back, up to lr. None for lr at
            all times.
        trust: Bound on the relative change |update| / |theta| of all L layers' weights together in one step, before
            momentum: each layer's update is shortened to trust / L at the most. None for no bound.
        damping: epsilon, a positive number, a function of the step, or :class:`AdaptiveDamping`, which finds it from
            how far the loss falls; then ``step`` needs a closure.
        momentum: mu, as in torch's SGD.
        nesterov: Use Nesterov's form of momentum.
        decoupled_weight_decay: Shrink the parameters directly (True), or add L2 to the gradient.
        maximize: Ascend instead.
        kl_clip: Bound on lr^2 sum g p over all parameters; directions p are shortened to keep it. Where p is g / damped
            s, as in the paper, that is twice the KL divergence of the step.
        **arguments: See :class:`ekfac.optim.options.CurvatureArguments`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Groups | None = None,
        lr: float | Tensor | None = None,
        betas: tuple[float, float] | None = None,
        weight_decay: float | None = None,
        total_steps: int | None = None,
        anneal: float | str | None = "auto",
        pace: float | None = None,
        trust: float | None = None,
        damping: Damping | AdaptiveDamping = options.DAMPING,
        momentum: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        kl_clip: float | None = None,
        **arguments: Unpack[CurvatureArguments],
    ) -> None:
        rule = make_rule({**arguments, "betas": betas})
        adaptive = isinstance(rule, Belief)
        update: dict[str, Any] = {
            "lr": (LR if adaptive else PAPER_LR) if lr is None else lr,
            "damping": damping,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": (WEIGHT_DECAY if adaptive else 0.0) if weight_decay is None else weight_decay,
            "decay_vectors": weight_decay is not None,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        if hasattr(rule, "betas"):
            update["betas"] = tuple(rule.betas)
        own = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "total_steps": total_steps, "anneal": anneal,
            "trust": trust, "pace": pace, "damping": damping, "momentum": momentum, "nesterov": nesterov,
            "decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize, "kl_clip": kl_clip,
        }  # fmt: skip
        also = options.keywords(EKFAC.__init__)
        super().__init__(
            model,
            params,
            update,
            lambda parameters, state: build_engine(
                type(self).__name__, model, parameters, state, {**arguments, "betas": betas}, also, whole_steps=True
            ),
            {**own, **arguments},
            course=course_of(anneal, total_steps, automatic=lr is None and adaptive),
            lr_fraction=pace,
            max_change=trust,
            kl_clip=kl_clip,
        )
        if not self.engine.method.compares_gradients:
            self.lr_fraction = LRFraction()


def course_of(anneal: Any, total_steps: int | None, automatic: bool) -> RateCourse:
    """The built-in course of the rate: where the user has given neither a rate nor one, warm-up and a slow fall."""
    if total_steps is not None:
        return RateCourse(WARMUP, None, total_steps)
    if anneal == "auto":
        return RateCourse(WARMUP, ANNEAL, automatic=True) if automatic else RateCourse()
    return RateCourse(0, anneal)
