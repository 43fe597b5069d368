"""Wide blocks on a CPU: the fastest products available, in as much precision as they need.

Projecting into the basis needs float32: small coordinates would be lost in the rounding of large ones. Projecting back
a direction whose coordinates are of similar size tolerates bfloat16: the rounding error is 0.3 % of it, in no
particular direction, far less than the noise of a batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.factors import multiplies_bfloat16
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.types import BlockStep, EigenState


def single_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b; a batch of one by mm, because oneDNN copies transposed matrices in a batch."""
    return torch.mm(a[0], b[0])[None] if len(a) == 1 else a @ b


class WideEigenMethod(EigenMethod):
    """:class:`EigenMethod` for wide blocks in float32 on a CPU."""

    def basis(self, block: Block, state: EigenState) -> Basis | None:
        found = super().basis(block, state)
        return None if found is None else replace(found, times=single_product)

    def project_back(self, x: Tensor, step: BlockStep) -> Tensor:
        if step.basis is None or not self.rule.even or not multiplies_bfloat16():
            return super().project_back(x, step)
        rounded = x.bfloat16()
        return step.basis.to(rounded).unproject(rounded).float()
