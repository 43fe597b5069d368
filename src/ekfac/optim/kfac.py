"""KFAC in inverse form: the baseline for EKFAC, on the same engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ekfac import checks
from ekfac.optim.distributed.processes import DEFAULT
from ekfac.optim.groups import Groups
from ekfac.optim.methods.damping import plain
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.methods.inverse import InverseMethod
from ekfac.optim.methods.rules import Running
from ekfac.optim.optimizer import Optimizer
from ekfac.optim.options import (
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
from ekfac.optim.step_size.lr_schedule import make_lr_schedule


class KFAC(Optimizer):
    r"""KFAC in inverse form (Martens and Grosse, 2015; Grosse and Martens, 2016).

    .. math::
        P = (B + \sqrt{\epsilon} / \pi \, I)^{-1} \, G \, (A + \pi \sqrt{\epsilon} \, I)^{-1}, \quad
        \pi = \sqrt{\frac{\operatorname{tr} A / \dim A}{\operatorname{tr} B / \dim B}}

    Unless ``refresh`` is deterministic, a gradient more than 10 times as long as usual is clipped to that length.
    With ``pi_correction=False`` it equals ``EKFAC(scaling="kronecker", damping_mode="factored")``.

    Args:
        model: The model; its first input dimension is the batch.
        params: torch's parameter groups over the model's parameters.
        lr: Learning rate.
        weight_decay: Weight decay.
        damping: epsilon, a positive number, a function of the step, or :class:`AdaptiveDamping`; a change
            updates the inverses at once.
        pi_correction: Balance the damping between A and B.
        refresh_every: Steps between updates of the inverses, by default 20, and 40 after step 300.
        momentum: mu, as in torch's SGD.
        nesterov: Use Nesterov's form of momentum.
        decoupled_weight_decay: Shrink the parameters directly (True), or add L2 to the gradient.
        maximize: Maximize the objective instead.
        step_size: What else bounds the length of a step: nothing by default.
        refresh: How inverses are updated, and from which batches A and B are computed.
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
        lr: float | Tensor = 0.01,
        weight_decay: float = 0.0,
        damping: Damping | AdaptiveDamping = 1e-3,
        pi_correction: bool = True,
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
        arguments = arguments_of("KFAC", locals())
        checks.flag("pi_correction", pi_correction)
        if arguments["coverage"].basis != "kronecker":
            raise TypeError("basis='identity': KFAC's inverse form has no basis. Allowed: basis='kronecker'")
        exact = arguments["refresh"].deterministic
        methods = InverseMethod(pi_correction, exact), EigenMethod(Running(), plain)
        update = {name: arguments[name] for name in UPDATE} | {"decay_vectors": True, "cautious_decay": False}
        lr_schedule = make_lr_schedule(arguments["step_size"].decay_steps, None, None)
        super().__init__(model, arguments, update, methods, lr_schedule)
