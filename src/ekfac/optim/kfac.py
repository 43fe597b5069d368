"""KFAC in inverse form: the rival that EKFAC is measured against, on the same engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from ekfac.optim import options
from ekfac.optim.engine import Engine
from ekfac.optim.groups import Groups
from ekfac.optim.methods.damping import plain
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.methods.inverse import InverseMethod
from ekfac.optim.methods.rules import Running
from ekfac.optim.optimizer import Optimizer
from ekfac.optim.options import CaptureArguments, Damping, EngineOptions
from ekfac.optim.step_size.adaptive_damping import AdaptiveDamping


class KFAC(Optimizer):
    r"""KFAC in inverse form (Martens and Grosse, 2015; Grosse and Martens, 2016).

    .. math::
        P = (B + \sqrt{\epsilon} / \pi \, I)^{-1} \, G \, (A + \pi \sqrt{\epsilon} \, I)^{-1}, \quad
        \pi = \sqrt{\frac{\operatorname{tr} A / \dim A}{\operatorname{tr} B / \dim B}}

    With ``pi_correction=False`` it equals ``EKFAC(scaling="kronecker", damping_mode="factored")``.

    Args:
        model: The model; its forward counts the examples.
        params: torch's parameter groups over the model's parameters.
        lr: Learning rate.
        damping: epsilon, a positive number, a function of the step, or :class:`AdaptiveDamping`; a change re-inverts
            at once.
        momentum: mu, as in torch's SGD.
        nesterov: Use Nesterov's form of momentum.
        weight_decay: Weight decay.
        decoupled_weight_decay: Shrink the parameters directly (True), or add L2 to the gradient.
        maximize: Ascend instead.
        kl_clip: Bound on lr^2 times the inner product of gradient and direction.
        pi_correction: Balance the damping between A and B.
        **arguments: See :class:`ekfac.optim.options.CaptureArguments`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Groups | None = None,
        lr: float | Tensor = 0.01,
        damping: Damping | AdaptiveDamping = 1e-3,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        kl_clip: float | None = None,
        pi_correction: bool = True,
        **arguments: Unpack[CaptureArguments],
    ) -> None:
        options.flag("pi_correction", pi_correction)
        update = {
            "lr": lr,
            "damping": damping,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }

        def make_engine(parameters: list[nn.Parameter], state: Any) -> Engine:
            settings = EngineOptions.from_arguments("KFAC", dict(arguments), also=options.keywords(KFAC.__init__))
            if settings.basis != "kronecker":
                raise TypeError("KFAC has no argument 'basis': its inverse form has no basis")
            method, elementwise = InverseMethod(pi_correction), EigenMethod(Running(), plain)
            return Engine(model, parameters, settings, method, elementwise, state, whole_steps=True)

        everything = {**update, "kl_clip": kl_clip, "pi_correction": pi_correction, **arguments}
        super().__init__(model, params, update, make_engine, everything, kl_clip=kl_clip)
