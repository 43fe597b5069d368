"""u^T G v with two fixed random vectors: a fingerprint of a gradient, cheap to take of it or of what it is a sum of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.statistics.gradients import GradientWatch
from ekfac.optim.statistics.sums import BlockSums, world_size

#: Gradients that are touched before every step, by clipping say, are given up on after so many.
TRIES = 20


class Fingerprints:
    """Compares ``.grad`` with what the layers' calls account for."""

    def __init__(self) -> None:
        #: Blocks that have not been compared yet.
        self.unprobed: set[Block] = set()
        #: How often somebody had touched the gradients of a block before they could be compared.
        self._touched: Counter[Block] = Counter()
        self._vectors: dict[Block, tuple[Tensor, Tensor]] = {}

    def vectors(self, block: Block) -> tuple[Tensor, Tensor]:
        """u and v of a block, ``[G, O]`` and ``[G, C]``."""
        if block not in self._vectors:
            generator = torch.Generator().manual_seed(0)
            s = block.shape
            u = torch.randn(s.groups, s.out, generator=generator, dtype=torch.float64)
            v = torch.randn(s.groups, s.columns, generator=generator, dtype=torch.float64)
            like = torch.empty(0, dtype=block.dtype, device=block.key.device)
            self._vectors[block] = (u.to(like), v.to(like))
        return self._vectors[block]

    def agree(self, block: Block, rows: Rows) -> bool:
        """Whether the ``.grad`` of a linear layer has the fingerprint of the product of its rows, up to rounding."""
        u, v = self.vectors(block)
        found = block.layer.fingerprint({r: p.grad for r, p in block.parameters.items() if p.grad is not None}, u, v)
        products = torch.einsum("gmo,go->gm", rows.delta, u) * torch.einsum("gmc,gc->gm", rows.h, v)
        bound = 1e3 * torch.finfo(block.dtype).eps * products.abs().sum()
        return bool((found - products.sum()).abs() <= bound)

    def check(self, sums: Mapping[Block, BlockSums], watch: GradientWatch, loss_scale: float | Tensor) -> None:
        """Raise if ``.grad`` holds more than what the layers' calls account for; once for every block."""
        for block in list(self.unprobed):
            probe = sums[block].probe if block in sums else None
            if probe is None:
                continue
            if any(p.grad is None or watch.touched(p) for p in block.parameters.values()):
                self._touched[block] += 1
                if self._touched[block] == TRIES:
                    self.unprobed.discard(block)
                continue
            half = any(p.dtype in (torch.float16, torch.bfloat16) for p in block.parameters.values())
            if half and block.layer.rough_in_half:
                self.unprobed.discard(block)
                continue
            u, v = self.vectors(block)
            G = block.stack([p.grad for p in block.parameters.values() if p.grad is not None])
            captured, size = (probe / world_size()).tolist()
            # A scaler has unscaled .grad by now (in a way that leaves no trace in its version), not what was captured.
            G = G * loss_scale
            found = float(torch.einsum("go,goc,gc->", u, G, v))
            exact = all(p.dtype == torch.float64 for p in block.parameters.values())
            tolerance = 1e-6 if exact else 5e-2
            # u^T G v is about as large as G itself, and so is what rounding makes of it.
            if abs(captured - found) > tolerance * max(size, abs(captured), abs(found), float(G.norm())):
                raise RuntimeError(
                    f"layer '{block.name}': its .grad is not the gradient that passed through its calls. The loss uses "
                    "torch.autograd.grad inside, or the weight is also used elsewhere (a penalty on it, say: use "
                    "weight_decay), or a hook on it or a change of .grad.data has altered it. So its curvature cannot "
                    f"be captured: exclude=['{block.name}'], or take statistics in opt.statistics() from another loss. "
                    "Where a GradScaler is in use, pass it as grad_scaler="
                )
            self.unprobed.discard(block)
