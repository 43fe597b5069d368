"""EKFAC: steps in a Kronecker-factored eigenbasis, as a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ekfac import checks
from ekfac.optim.distributed.processes import DEFAULT
from ekfac.optim.groups import Groups
from ekfac.optim.methods.factory import eigen_methods, take_rule
from ekfac.optim.methods.rules import Rule
from ekfac.optim.optimizer import Optimizer
from ekfac.optim.options import (
    DAMPING,
    UPDATE,
    Batch,
    Coverage,
    Damping,
    Numerics,
    Refresh,
    StepSize,
    arguments_of,
)
from ekfac.optim.step_size.adaptive_damping import AdaptiveDamping
from ekfac.optim.step_size.default_lr import default_lr, default_warmup, depth_of, width_of
from ekfac.optim.step_size.lr_schedule import make_lr_schedule


class EKFAC(Optimizer):
    r"""An Adam-like step, or one of the paper's, in a Kronecker-factored eigenbasis (George et al., 2018).

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        &A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T
            && \text{every } \texttt{refresh\_every} \text{ steps} \\
        &g = U_B^T G U_A, \quad d = g - m, \quad m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
            s \leftarrow \beta_2 s + (1 - \beta_2) (d^2 + \kappa m^2) \\
        &\theta \leftarrow \theta (1 - \eta \lambda) - \eta \, U_B \, (m / \sqrt{s}) \, U_A^T

    This is the default, ``scaling="belief"``: an Adam-like step in EKFAC's basis. lr and weight_decay mean what they
    mean in AdamW, and torch's schedulers work as usual. ``EKFAC(model, **ekfac.PAPER)`` is the paper's EKFAC-ra, which
    has g / (s + epsilon) instead of m / sqrt(s). :mod:`ekfac.rules` has all rules, and this one in full.

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
        model: The model; its first input dimension is the batch.
        params: torch's parameter groups over the model's parameters, each with its own lr, weight_decay, momentum or
            damping if it sets them; or plain parameters. All parameters by default. Frozen ones are trained once they
            are unfrozen.
        lr: Learning rate eta, a number or a one-element tensor: every step is lr times the direction. By default 0.02
            for networks up to 64 wide and 0.02 sqrt(64 / width) for wider ones, times sqrt(8 / depth) for networks of
            more than 8 layers without normalisation; sparse inputs, such as one-hot rows, count as narrow from the
            second step on. It then warms up over 10 to 150 steps and decays as
            1 / sqrt(1 + t / 100), and between steps the model holds the running average of its weights
            (``StepSize.average``). For losses with derivatives of the network inside, it is twice as large and decays
            as 1 / (1 + t / 200). A torch scheduler, or a rate written into the groups, turns all of this off. Set
            ``lr`` for ``ReduceLROnPlateau``, which cannot be detected in advance.
        betas: Decays of m and s, by default (0.95, 0.95), and (0.98, 0.95) for losses with derivatives. They are kept
            in the parameter groups, where torch's cyclic schedulers find them.
        weight_decay: lambda, as in AdamW. By default 0.3 for weights of two or more dimensions, only where the step
            makes them smaller anyway (cautious weight decay, Chen et al., 2025), and none for embeddings, for other
            parameters, and for losses with derivatives of the network inside.
        total_steps: Length of training in steps: over its last fifth the built-in rate also falls linearly to zero.
            With your own ``lr``, or ``StepSize(decay_steps=None)``, the rate warms up, then decays to zero along a
            cosine, and weights are not averaged.
        damping: epsilon, a positive number, a function of the step, or :class:`AdaptiveDamping`, which adapts it to
            the decrease of the loss and needs a closure in ``step``. The default rule and torch's rules do not use it.
        damping_mode: "spectral" (a fraction of each factor's largest eigenvalue), "relative" (of the layer's mean s),
            "plain" (added to s) or "factored" (the paper's appendix).
        scaling: "belief", "anchored", "running" (the paper's EKFAC-ra), "per_example" (its EKFAC), "kronecker" (KFAC in
            its eigenbasis), torch's "adam", "rmsprop" or "adagrad" in the basis; or a rule with options of its own,
            such as ``ekfac.rules.Running(decay=0.99)``.
        refresh_every: Steps between updates of a basis, by default 20, and 40 after step 300 (always 20 for losses with
            derivatives); sides wider than 1,024 (400 on a CPU) are updated less often.
        momentum: mu, as in torch's SGD.
        nesterov: Use Nesterov's form of momentum.
        decoupled_weight_decay: Shrink the parameters directly (True), or add L2 to the gradient.
        maximize: Maximize the objective instead.
        step_size: What else bounds the length of a step, and weight averaging.
        refresh: How bases are updated, and from which batches A and B are computed.
        coverage: Which layers get a Kronecker block, and of what form.
        batch: How the loss treats a batch.
        numerics: Memory and speed.
        grad_scaler: The ``torch.amp.GradScaler`` in use, so that statistics are unscaled.
        process_group: The ranks that train replicas of the model and share statistics; each owns some of the blocks.
            By default torch's default group, if there is one. None keeps this process on its own.
        **old: Argument names of version 0.1, with a DeprecationWarning.
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
        damping: Damping | AdaptiveDamping = DAMPING,
        damping_mode: str = "spectral",
        scaling: str | Rule = "belief",
        refresh_every: int | None = None,
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
        process_group: Any = DEFAULT,
        **old: Any,
    ) -> None:
        arguments = arguments_of(type(self).__name__, locals())
        rule = take_rule(arguments)
        update, warmup = {name: arguments[name] for name in UPDATE}, None
        if lr is None:
            checks.model(model)
            width = width_of(model)
            update["lr"] = default_lr(width, depth_of(model)) if rule.warms_up else rule.lr
            warmup = default_warmup(width) if rule.warms_up else None
        update["weight_decay"] = rule.weight_decay if weight_decay is None else weight_decay
        # The default decay spares vectors and embeddings, and is cautious: it never opposes a step.
        update |= {"decay_vectors": weight_decay is not None, "cautious_decay": weight_decay is None}
        if hasattr(rule, "betas"):
            update |= {"betas": tuple(rule.betas), "betas_named": betas is not None or isinstance(scaling, Rule)}
        lr_schedule = make_lr_schedule(arguments["step_size"].decay_steps, total_steps, warmup)
        arguments["scaling"] = rule
        super().__init__(model, arguments, update, eigen_methods(rule, damping_mode), lr_schedule)
