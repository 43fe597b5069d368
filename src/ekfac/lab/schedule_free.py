"""Schedule-Free AdamW (Defazio et al., "The Road Less Scheduled", 2024)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """AdamW without a schedule: gradients are evaluated at y, steps are taken on z, and the result is the average x.

    At step t, with gradient g at y:

        v <- beta2 v + (1 - beta2) g^2
        z <- z - lr g / (sqrt(v / (1 - beta2^t)) + eps) - lr weight_decay y
        x <- (1 - c) x + c z,  c = w_t / sum of w,  w_t = (the largest lr so far)^2
        y <- beta1 x + (1 - beta1) z

    This matches the authors' package from version 1.3 on; the paper applies the bias correction of v to lr instead, and
    so to the weights w too. The parameters hold y during training; call :meth:`eval` before evaluating or saving them,
    and :meth:`train` before the next step. For warm-up, change the groups' ``lr``.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: beta1 mixes x and z, beta2 averages squared gradients.
        eps: Added to the square root.
        weight_decay: Weight decay, evaluated at y.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not (0 < betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas must be in (0, 1) and [0, 1), not {tuple(betas)}")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "steps": 0, "lr_max": 0.0, "weight_sum": 0.0, "training": True})

    @torch.no_grad()
    def eval(self) -> None:
        """Switch the parameters to x."""
        for group, p, state in self._switched(training=False):
            if state:
                p.copy_(state["x"])
            group["training"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Switch the parameters back to y."""
        for group, p, state in self._switched(training=True):
            if state:
                p.copy_(torch.lerp(state["z"], state["x"], group["betas"][0]))
            group["training"] = True

    def _switched(self, training: bool) -> list[tuple[dict[str, Any], Tensor, dict[str, Tensor]]]:
        """Return the parameters of groups in the other mode, with group and state."""
        groups = [group for group in self.param_groups if group["training"] is not training]
        return [(group, p, self.state.get(p, {})) for group in groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Raises:
            RuntimeError: If the parameters hold x.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("the parameters hold the average x: call train() before step()")
            beta1, beta2 = group["betas"]
            group["steps"] += 1
            lr = group["lr"]
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            c = weight / group["weight_sum"] if group["weight_sum"] else 0.0
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "z" not in self.state[p]:
                    self.state[p].update(z=p.clone(), x=p.clone(), v=torch.zeros_like(p))
            x, z, v = ([self.state[p][name] for p in parameters] for name in ("x", "z", "v"))
            g = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, g, g, 1 - beta2)
            root = torch._foreach_div(v, 1 - beta2 ** group["steps"])
            torch._foreach_sqrt_(root)
            torch._foreach_add_(root, group["eps"])
            if group["weight_decay"]:
                torch._foreach_add_(z, parameters, alpha=-lr * group["weight_decay"])
            torch._foreach_addcdiv_(z, g, root, -lr)
            torch._foreach_lerp_(x, z, c)
            torch._foreach_copy_(parameters, torch._foreach_lerp(z, x, beta1))
        return loss


def schedule_free(
    model: nn.Module,
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Make Schedule-Free AdamW, from the authors' package ``schedulefree`` if installed, else from the class above."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    try:
        package = importlib.import_module("schedulefree")
    except ImportError:
        return ScheduleFreeAdamW(parameters, **options)  # type: ignore[arg-type]
    found: torch.optim.Optimizer = package.AdamWScheduleFree(parameters, **options)
    return found
