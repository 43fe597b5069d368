"""Damping: what is added to s when dividing by it. It is never part of stored state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ekfac.curvature.eigenbasis import Basis

#: A damping mode: (s, epsilon, basis) -> damped s. The basis is None for parameters without a Kronecker block.
Damp = Callable[[Tensor, "float | Tensor", "Basis | None"], Tensor]


def plain(s: Tensor, epsilon: float | Tensor, basis: Basis | None) -> Tensor:
    """Return s + epsilon."""
    return s + epsilon


def factored(s: Tensor, epsilon: float | Tensor, basis: Basis | None) -> Tensor:
    """Return s + epsilon + sqrt(epsilon) (S_A x 1 + 1 x S_B), the paper's appendix C.

    For s = S_B x S_A this is (S_B + sqrt(epsilon)) x (S_A + sqrt(epsilon)): KFAC's damping of each factor.
    """
    if basis is None:
        return s + epsilon
    root = epsilon**0.5
    rows = (root * basis.S_B + epsilon)[:, :, None]
    return s + rows + (root * basis.column_values())[:, None, :]


def relative(s: Tensor, epsilon: float | Tensor, basis: Basis | None) -> Tensor:
    """Return s + epsilon mean(s), mean over the layer, with a floor that keeps a layer without gradient finite."""
    return s + (epsilon * s.mean()).clamp(min=torch.finfo(s.dtype).tiny)


def spectral(s: Tensor, epsilon: float | Tensor, basis: Basis | None) -> Tensor:
    """Return s + (S_B + epsilon |B|) x (S_A + epsilon |A|) - S_B x S_A, with |.| the largest eigenvalue.

    For s = S_B x S_A it lifts each factor's spectrum by a fraction of its own largest eigenvalue, whatever the units of
    loss and inputs. The eigenvalues of a layer span so many decades that a single number for all of them, as in the
    other modes, either swamps the small ones or lets rounding noise through.
    """
    if basis is None:
        return s + (epsilon * s.amax()).clamp(min=torch.finfo(s.dtype).tiny)
    tiny = torch.finfo(s.dtype).tiny ** 0.5
    columns = basis.column_values()
    A = (epsilon * columns.amax(-1)).clamp(min=tiny)[:, None, None]
    B = (epsilon * basis.S_B.amax(-1)).clamp(min=tiny)[:, None, None]
    return torch.addcmul(s, basis.S_B[:, :, None] + B, A).addcmul_(B, columns[:, None, :])


DAMPING_MODES: dict[str, Damp] = {"plain": plain, "factored": factored, "relative": relative, "spectral": spectral}
