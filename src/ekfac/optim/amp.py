"""Steps that a ``torch.amp.GradScaler`` takes.

The scaler multiplies the loss, hence ``.grad`` and what was captured; it divides ``.grad`` alone. So it has to be
known here (``grad_scaler=``), or s would be too large by the square of the scale. An optimizer that has
``_step_supports_amp_scaling`` is told by the scaler, in two attributes, whether ``.grad`` is finite and whether it
still has to be divided.
"""

from __future__ import annotations

from typing import Any

import torch


def may_step(optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
    """Whether a step may be taken: not if the scaler has found infinity; ``.grad`` is unscaled after this.

    Args:
        optimizer: The optimizer; has ``found_inf`` and ``grad_scale`` where a scaler has called its step.
        scaler: The scaler that it was given, or None.

    Raises:
        RuntimeError: If a scaler has called that it was not given.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return True
    if scaler is None:
        raise RuntimeError(
            f"a GradScaler has called step(), so captured gradients are scaled by a number that is not known here: "
            f"pass it as {type(optimizer).__name__}(model, grad_scaler=scaler)"
        )
    if getattr(optimizer, "grad_scale", None) is not None:  # not yet unscaled
        scaler.unscale_(optimizer)
    return not bool(found > 0)
