"""Whether ``.grad`` is what the layers' calls account for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set

from torch import Tensor, nn

from ekfac.curvature import fingerprint
from ekfac.curvature.blocks import Block
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.types import StepInputs

#: Gradients that are touched before every step, by clipping say, are given up on after so many.
TRIES = 20


class Fingerprints:
    """Compares ``.grad`` with what the layers' calls account for."""

    def __init__(self) -> None:
        #: Blocks that have not been compared yet.
        self.unverified: set[Block] = set()
        #: How often somebody had touched the gradients of a block before they could be compared.
        self._touched: Counter[Block] = Counter()
        self._vectors: dict[Block, fingerprint.Vectors] = {}

    def vectors(self, block: Block) -> fingerprint.Vectors:
        """Return u and v of a block, made once."""
        if block not in self._vectors:
            self._vectors[block] = fingerprint.vectors_of(block)
        return self._vectors[block]

    def forget(self) -> None:
        """Let go of what is in the parameters' dtype and on their device: both have changed."""
        self._vectors.clear()

    def agree(self, block: Block, rows: Rows, gradients: list[Tensor]) -> bool:
        """Tell whether the gradient of a linear layer is the product of its rows, up to rounding."""
        vectors = self.vectors(block)
        found, size = fingerprint.of_rows(rows.h, rows.delta, vectors)
        return fingerprint.same(fingerprint.of_gradient(block, gradients, vectors), found, size)

    def verify(
        self,
        inputs: StepInputs,
        touched: Set[nn.Parameter],
        loss_scale: float | Tensor,
        here: Callable[[Block], bool] = lambda block: True,
    ) -> None:
        """Raise if ``.grad`` holds more than what the layers' calls account for; once for every block.

        Args:
            inputs: What the step has gathered.
            touched: Parameters whose gradients were changed since backward left them, on any process.
            loss_scale: What a GradScaler has multiplied the loss by.
            here: Whether a block's gradient is whole on this process; otherwise another one compares it.
        """
        for block in list(self.unverified):
            of_calls = inputs.sums[block].fingerprint if block in inputs.sums else None
            if of_calls is None:
                continue
            parameters = list(block.parameters.values())
            if any(p not in inputs.gradients or p in touched for p in parameters):
                self._touched[block] += 1
                if self._touched[block] == TRIES:
                    self.unverified.discard(block)
                continue
            if not here(block):
                self.unverified.discard(block)
                continue
            # A scaler has unscaled .grad by now (in a way that leaves no trace in its version), not what was captured.
            gradients = [inputs.gradients[p] * loss_scale for p in parameters]
            if fingerprint.differs(block, gradients, of_calls / inputs.batches, self.vectors(block)):
                raise RuntimeError(
                    f"layer '{block.name}': its .grad is not the gradient that passed through its calls. The loss uses "
                    "torch.autograd.grad inside, or the weight is also used elsewhere (a penalty on it, say: use "
                    "weight_decay), or a hook on it or a change of .grad.data has altered it; or, for a kind of layer "
                    f"of your own, {type(block.layer).__name__} says wrongly what its h and delta are or how its "
                    "parameters lie in the matrix (positions, layout, matrix, stack). So its curvature cannot "
                    f"be captured: exclude=['{block.name}'], or take statistics in opt.statistics() from another loss. "
                    "Where a GradScaler is in use, pass it as grad_scaler="
                )
            self.unverified.discard(block)
