"""EKFAC: natural gradient descent in a Kronecker-factored eigenbasis, as a torch optimizer."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import Unpack

from ekfac.optim import options
from ekfac.optim.factory import build_engine
from ekfac.optim.groups import Groups
from ekfac.optim.optimizer import Optimizer
from ekfac.optim.options import CurvatureArguments, Damping
from ekfac.optim.step_size.adaptive_damping import AdaptiveDamping
from ekfac.optim.step_size.lr_fraction import LRFraction

#: Measured defaults; docs/tuning.md has the evidence.
LR = 0.01
ANNEAL = 300.0
TRUST = 1.0
PACE = 0.03


class EKFAC(Optimizer):
    r"""Natural gradient descent in a Kronecker-factored eigenbasis (George et al., 2018).

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        &A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T, \quad s = S_B S_A^T
            && \text{every } \texttt{refresh\_every} \text{ steps} \\
        &g = U_B^T G U_A, \quad s \leftarrow \rho s + (1 - \rho) N g^2, \quad
            m \leftarrow \beta m + (1 - \beta) g \\
        &p = U_B \, (m / \sqrt{s_\epsilon / N}) \, U_A^T, \quad
            \theta \leftarrow \theta - \eta \, p / \sqrt{1 + t / \texttt{anneal}}

    This is the default, ``scaling="anchored"``: a step of Adam's size, with second moments that start at KFAC's
    eigenvalues in every new basis; s with a subscript is damped (see :mod:`ekfac.optim.methods.damping`).
    ``EKFAC(model, **ekfac.PAPER)`` is the paper's EKFAC-ra, which has g / (s + \epsilon) in place of the fraction;
    other rules are in :mod:`ekfac.optim.methods.rules`.

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
        lr: Learning rate, a number or a one-element tensor.
        anneal: The learning rate falls as lr / sqrt(1 + t / anneal) over steps t; None keeps it as it is, for use with
            a schedule of your own.
        pace: The share of lr that the first step takes, at most 1, under scaling="anchored"; later steps take more
            while gradients keep agreeing with the last direction, less when they point back, up to lr. None for lr at
            all times.
        trust: Bound on the relative change |update| / |theta| of all L layers' weights together in one step, before
            momentum: each layer's update is shortened to trust / L at the most. None for no bound.
        damping: epsilon, a positive number, a function of the step, or :class:`AdaptiveDamping`, which finds it from
            how far the loss falls; then ``step`` needs a closure.
        momentum: mu, as in torch's SGD.
        nesterov: Use Nesterov's form of momentum.
        weight_decay: Weight decay.
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
        lr: float | Tensor = LR,
        anneal: float | None = ANNEAL,
        pace: float | None = PACE,
        trust: float | None = TRUST,
        damping: Damping | AdaptiveDamping = options.DAMPING,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        kl_clip: float | None = None,
        **arguments: Unpack[CurvatureArguments],
    ) -> None:
        update = {
            "lr": lr,
            "damping": damping,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        length = {"kl_clip": kl_clip, "anneal": anneal, "trust": trust, "pace": pace}
        also = options.keywords(EKFAC.__init__)
        super().__init__(
            model,
            params,
            update,
            lambda parameters, state: build_engine(
                type(self).__name__, model, parameters, state, dict(arguments), also, whole_steps=True
            ),
            {**update, **length, **arguments},
            anneal=anneal,
            lr_fraction=pace,
            max_change=trust,
            kl_clip=kl_clip,
        )
        if not self.engine.method.compares_gradients:
            self.lr_fraction = LRFraction()
