"""Checks that ``.grad`` is what the layers' calls account for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature import fingerprint
from ekfac.curvature.blocks import Block
from ekfac.optim.distributed.shards import is_sharded
from ekfac.optim.methods.base import Method
from ekfac.optim.options import Coverage, EngineOptions
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.types import StepInputs


class Fingerprints:
    """Compares ``.grad``, as backward left it, with what the layers' calls account for.

    If they differ, there is an error, or only a warning if the rule takes nothing but a basis from the calls: it uses
    ``.grad`` as a whole, and any basis will do. For a custom kind of layer it is always an error, because the class is
    most likely wrong.

    Args:
        options: Checked options.
        method: The method for blocks that a layer covers.
    """

    def __init__(self, options: EngineOptions, method: Method[Any]) -> None:
        self._processes = options.processes
        self.strict = is_strict(method, options.coverage)
        #: Blocks that have not been compared yet.
        self.unverified: set[Block] = set()
        #: Fingerprints of their gradients at the end of the last backward pass, before clipping or unscaling.
        self.left: dict[Block, Tensor] = {}
        self._vectors: dict[Block, fingerprint.Vectors] = {}

    def vectors(self, block: Block) -> fingerprint.Vectors:
        """Return u and v of a block, cached."""
        if block not in self._vectors:
            self._vectors[block] = fingerprint.vectors_of(block)
        return self._vectors[block]

    def forget(self) -> None:
        """Drop cached vectors, after the parameters' dtype or device has changed."""
        self._vectors.clear()

    def agree(self, block: Block, rows: Rows, gradients: list[Tensor]) -> bool:
        """Return whether the gradient of a linear layer is the product of its rows, up to rounding."""
        vectors = self.vectors(block)
        found, size = fingerprint.of_rows(rows.h, rows.delta, vectors)
        return fingerprint.same(fingerprint.of_gradient(block, gradients, vectors), found, size)

    def note(self) -> None:
        """Record the fingerprints of unverified gradients at the end of a backward pass."""
        for block in self.unverified:
            gradients = [p.grad for p in block.parameters.values() if p.grad is not None and not p.grad.is_sparse]
            if len(gradients) == len(block.parameters):
                self.left[block] = fingerprint.of_gradient_with_size(block, gradients, self.vectors(block))

    def verify(
        self,
        inputs: StepInputs,
        touched: Set[nn.Parameter],
        loss_scale: float | Tensor,
        here: Callable[[Block], bool] = lambda block: True,
    ) -> None:
        """Raise or warn if ``.grad`` is not what the layers' calls account for; once per block.

        Args:
            inputs: What the step has gathered.
            touched: Parameters whose gradients were changed after backward, on any process.
            loss_scale: The scale by which a GradScaler multiplied the loss.
            here: Whether this process holds a block's whole gradient; otherwise another one compares it.
        """
        found: dict[Block, Tensor] = {}
        left = []
        # In the same order on every process; where a weight is shared its bias is a block of the same name.
        for block in sorted(self.unverified, key=lambda block: (block.name, *block.parameter_names.values())):
            of_calls = inputs.sums[block].fingerprint if block in inputs.sums else None
            parameters = list(block.parameters.values())
            if of_calls is None or any(p not in inputs.gradients for p in parameters):
                continue
            if any(p in touched for p in parameters):
                if any(map(is_sharded, parameters)):
                    continue  # shards have no recorded fingerprint; a later step may compare it
                left.append(block)
            if not here(block):
                self.unverified.discard(block)
                continue
            # By now a scaler has unscaled .grad (without bumping its version), but not the captured tensors.
            given = [inputs.gradients[p] * loss_scale for p in parameters]
            found[block] = fingerprint.of_gradient_with_size(block, given, self.vectors(block))
        if left:
            noted = self._as_backward_left_them(left)
            found |= {b: one for b, one in zip(left, noted, strict=True) if b in found and bool(one[1] > 0)}
        more = []
        for block, of_gradient in found.items():
            of_calls = inputs.sums[block].fingerprint
            assert of_calls is not None
            if fingerprint.differs(block, of_gradient, of_calls / inputs.batches):
                if self.strict or not type(block.layer).__module__.startswith("ekfac."):
                    raise RuntimeError(_refusal(block))
                more.append(block.name)
            self.unverified.discard(block)
        if more:
            warnings.warn(_warning(more), RuntimeWarning, stacklevel=2)

    def _as_backward_left_them(self, blocks: list[Block]) -> list[Tensor]:
        """Return recorded fingerprints of gradients, 0 if there is none, averaged over processes."""
        none = torch.zeros(2, dtype=torch.float64, device=blocks[0].key.device)
        noted = torch.stack([self.left.get(block, none) for block in blocks])
        return list(self._processes.sum(noted) / self._processes.size)


def is_strict(method: Method[Any], coverage: Coverage) -> bool:
    """Return whether ``.grad`` must be what the calls account for: the rule takes more from them than a basis."""
    return method.needs_examples or method.reads_eigenvalues or coverage.unsupported == "error"


def _refusal(block: Block) -> str:
    return (
        f"layer '{block.name}': its .grad is not the gradient that passed through its calls. Either the weight is "
        "also used elsewhere (for tied weights such as x @ embedding.weight.T, use a layer: head.weight = "
        "embedding.weight; for a penalty, use weight_decay); or a hook or a change of .grad.data has altered the "
        "gradient; or it was computed in another way; or, for a kind of layer of your own, "
        f"{type(block.layer).__name__} is wrong about h and delta or about the layout of the parameters (positions, "
        "layout, matrix, stack). So the layer's curvature cannot be captured: exclude it, "
        f"coverage=ekfac.Coverage(exclude=['{block.name}']), or capture it from a loss of your choice, "
        "with opt.statistics(): loss.backward(). If you use a GradScaler, pass it as grad_scaler="
    )


def _warning(names: list[str]) -> str:
    layers = f"layer '{names[0]}': its .grad is" if len(names) == 1 else f"layers {', '.join(names)}: their .grad is"
    return (
        f"{layers} not only the gradient that passed through the calls: the weight is also used elsewhere (in a "
        "penalty, or by hand, x @ embedding.weight.T), or a hook changes its gradient. Training continues: all of "
        ".grad is used, in a basis computed from the calls. To leave such layers to the diagonal method: "
        f"coverage=ekfac.Coverage(exclude={names!r}); to make this an error: Coverage(unsupported='error')"
    )
