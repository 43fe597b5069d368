"""Refuses gradients that a step cannot use."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from ekfac.optim.distributed.processes import Processes

#: For gradients without captured examples.
NO_EXAMPLES = (
    "step() found gradients but no captured examples. Call the model that was given to the optimizer, or its layers, "
    "as model(x): not a copy, a traced or exported form, nor layer.forward(x); with gradients enabled, outside "
    "paused(); zero_grad() after backward also drops what was captured. Derivatives of the model inside a loss are "
    "captured with torch.autograd.grad(..., create_graph=True), but not with torch.func. If gradients come from "
    "elsewhere (torch.func.grad, Reptile), collect statistics separately, at every step or every few: "
    "with opt.statistics(): loss_fn(model(x), y).backward()"
)

#: For gradients that the last step has already used.
USED = (
    "step() found the gradients that the last step used, and no backward pass since: nothing was changed. Call "
    "zero_grad() and backward() before every step. (Lightning's StochasticWeightAveraging takes such a step at its end)"
)


def refuse_sparse(names: Mapping[nn.Parameter, str], gradients: Mapping[nn.Parameter, Tensor]) -> NoReturn:
    """Raise an error that names the parameter with a sparse gradient."""
    name, layout = next((names[p], g.layout) for p, g in gradients.items() if g.layout != torch.strided)
    raise ValueError(
        f"parameter '{name}': its gradient is {layout}. Allowed: dense gradients, as of nn.Embedding(..., sparse=False)"
    )


def refuse_unreached(layer: str) -> NoReturn:
    """Raise an error: a layer has a gradient, and no statistics."""
    raise RuntimeError(
        f"layer '{layer}' has a gradient, but no captured backward pass has reached it yet: make sure that the loss "
        f"inside opt.statistics() depends on it, or exclude=['{layer}']"
    )


def refuse_unless_empty(reached: bool, gradients: Iterable[Tensor], used: bool) -> None:
    """Raise because no example was captured, unless the batch was empty, which leaves gradients of zero or NaN.

    Args:
        reached: Whether a backward pass has reached the model.
        gradients: All gradients.
        used: Whether the last step has already used them; then only warn.
    """
    if used:
        warnings.warn(USED, RuntimeWarning, stacklevel=5)
    elif not reached or any(bool((g.isfinite() & (g != 0)).any()) for g in gradients):
        raise RuntimeError(NO_EXAMPLES)


def refuse_unless_used(processes: Processes, used: bool, device: torch.device) -> None:
    """Raise on all processes because none captured an example; only warn if all have the last step's gradients."""
    if not processes.minimum(torch.tensor(float(used), device=device)):
        raise RuntimeError(NO_EXAMPLES)
    warnings.warn(USED, RuntimeWarning, stacklevel=5)
