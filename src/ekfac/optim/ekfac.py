"""EKFAC: natural gradient descent in a Kronecker-factored eigenbasis, as a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ekfac.optim.engine import Engine
from ekfac.optim.groups import Groups
from ekfac.optim.methods.factory import eigen_methods, take_rule
from ekfac.optim.methods.rules import Rule
from ekfac.optim.optimizer import Optimizer
from ekfac.optim.options import (
    DAMPING,
    Batch,
    Coverage,
    Damping,
    EngineOptions,
    Numerics,
    Refresh,
    StepSize,
    with_old_names,
)
from ekfac.optim.step_size.adaptive_damping import AdaptiveDamping

#: A measured default; docs/tuning.md has the evidence.
LR = 0.01


class EKFAC(Optimizer):
    r"""Natural gradient descent in a Kronecker-factored eigenbasis (George et al., 2018).

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        &A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T, \quad s = S_B S_A^T
            && \text{every } \texttt{refresh\_every} \text{ steps} \\
        &g = U_B^T G U_A, \quad s \leftarrow \rho s + (1 - \rho) N g^2, \quad
            m \leftarrow \beta m + (1 - \beta) g \\
        &p = U_B \, (m / \sqrt{s_\epsilon / N}) \, U_A^T, \quad
            \theta \leftarrow \theta - \eta \, p / \sqrt{1 + t / 300}

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
        betas: Decays of m and, for "adam", of s; the rule's own by default.
        weight_decay: Weight decay.
        damping: epsilon, a positive number, a function of the step, or :class:`AdaptiveDamping`, which finds it from
            how far the loss falls; then ``step`` needs a closure.
        damping_mode: "spectral" (a fraction of each factor's largest eigenvalue), "relative" (of the layer's mean s),
            "plain" (added to s) or "factored" (the paper's appendix). Torch's rules know no damping, only ``eps``.
        scaling: "anchored", "running" (the paper's EKFAC-ra), "per_example" (its EKFAC), "kronecker" (KFAC in its
            eigenbasis), torch's "adam", "rmsprop" or "adagrad" in the basis; or a rule with options of its own, such
            as ``ekfac.rules.Running(decay=0.99)``.
        refresh_every: Renew the bases every so many applied steps.
        momentum: mu, as in torch's SGD.
        nesterov: Use Nesterov's form of momentum.
        decoupled_weight_decay: Shrink the parameters directly (True), or add L2 to the gradient.
        maximize: Ascend instead.
        step_size: What bounds the length of a step besides lr.
        refresh: How bases are renewed, and which batches A and B take in.
        coverage: Which layers get a Kronecker block, and of what form.
        batch: What a batch is to the loss.
        numerics: Memory and speed.
        grad_scaler: The ``torch.amp.GradScaler`` in use, so that statistics are unscaled.
        **old: Names from before there were groups, with a DeprecationWarning.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Groups | None = None,
        lr: float | Tensor = LR,
        betas: tuple[float, float] | None = None,
        weight_decay: float = 0.0,
        damping: Damping | AdaptiveDamping = DAMPING,
        damping_mode: str = "spectral",
        scaling: str | Rule = "anchored",
        refresh_every: int = 50,
        momentum: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        step_size: StepSize = StepSize(),
        refresh: Refresh = Refresh(),
        coverage: Coverage = Coverage(),
        batch: Batch = Batch(),
        numerics: Numerics = Numerics(),
        grad_scaler: torch.amp.GradScaler | None = None,
        **old: Any,
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
        given = {
            "betas": betas,
            "damping_mode": damping_mode,
            "scaling": scaling,
            "refresh_every": refresh_every,
            "step_size": step_size,
            "refresh": refresh,
            "coverage": coverage,
            "batch": batch,
            "numerics": numerics,
            "grad_scaler": grad_scaler,
        }
        arguments = with_old_names(type(self).__name__, given, old, {*update, *given, "params"})

        def make_engine(parameters: list[nn.Parameter], state: Any) -> Engine:
            methods = eigen_methods(rule, mode)
            return Engine(model, parameters, EngineOptions(**arguments), *methods, state, whole_steps=True)

        rule, mode, step_size = take_rule(arguments), arguments.pop("damping_mode"), arguments.pop("step_size")
        others = {"scaling": rule, "damping_mode": mode, **arguments}
        super().__init__(model, params, update, make_engine, others, step_size)
