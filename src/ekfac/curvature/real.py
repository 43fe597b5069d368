"""Complex parameters as pairs of real numbers, as in torch's own optimizers.

Blocks contain only real numbers. Parameters and gradients are converted here, so no other code deals with complex ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real pairs; return a real one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of :func:`as_real` of a parameter."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def as_complex(pairs: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`as_real` if ``like`` is complex."""
    return torch.view_as_complex(pairs) if like.is_complex() else pairs


def state_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state: float64 for double precision, else float32."""
    return torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32


def gradient_of(parameter: Tensor) -> Tensor:
    """Return a parameter's existing gradient as real numbers that share memory with ``.grad``."""
    assert parameter.grad is not None
    if parameter.grad.is_conj():  # torch conjugates lazily
        parameter.grad = parameter.grad.resolve_conj()
    return as_real(parameter.grad)
