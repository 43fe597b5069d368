"""Warnings of an optimizer's first step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.summary import low_coverage


def warn_in_first_step(blocks: Sequence[Block], parameters: Iterable[nn.Parameter]) -> None:
    """Give the warnings: few parameters have a Kronecker block, or opacus is in use."""
    for text in (low_coverage(blocks), not_private(parameters)):
        if text:
            warnings.warn(text, UserWarning, stacklevel=3)


def not_private(parameters: Iterable[nn.Parameter]) -> str | None:
    """Return a warning if opacus is in use (it sets ``grad_sample`` on parameters): steps are not private."""
    if not any(hasattr(p, "grad_sample") for p in parameters):
        return None
    return (
        "opacus computes per-example gradients of this model. Its clipping and noise affect only .grad, but this "
        "optimizer's statistics come from the examples themselves, so its steps are not differentially private. If "
        "they have to be, use an optimizer that reads only .grad, such as torch's AdamW"
    )
