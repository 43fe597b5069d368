"""Complex parameters as real numbers: pairs of a real and an imaginary part, as torch's own optimizers see them.

A block has only real numbers. This is where a parameter and its gradient become such, so that nothing else need know.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs, in the same memory; a real one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of :func:`as_real` of a parameter."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def as_complex(pairs: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`as_real`, where ``like`` is complex."""
    return torch.view_as_complex(pairs) if like.is_complex() else pairs


def state_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which what belongs to a parameter is kept: float32 under half precision."""
    return torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one, as real numbers that lie where its ``.grad`` does."""
    assert parameter.grad is not None
    if parameter.grad.is_conj():  # which torch has left to whoever reads it
        parameter.grad = parameter.grad.resolve_conj()
    return as_real(parameter.grad)
