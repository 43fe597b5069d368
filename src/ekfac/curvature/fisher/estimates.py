"""Estimates of the Fisher (empirical, sampled, exact), as gradients with respect to a model's output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ekfac.curvature.fisher.likelihoods import Likelihood, Loss, likelihood_of

ESTIMATES = ("empirical", "sampled", "exact")

#: A gradient with respect to each tensor of the model's output, or None.
Cotangents = list[Tensor | None]


class Estimate:
    """Computes the gradients that represent an example in the Fisher.

    Args:
        loss: A function of (output, target), a likelihood's name or one of torch's losses.
        kind: "empirical", "sampled" or "exact".
        draws: The number of labels drawn per example, for "sampled".
        seed: The seed of the draws; every pass over the data draws the same labels.
    """

    def __init__(self, loss: Loss, kind: str, draws: int, seed: int) -> None:
        if kind not in ESTIMATES:
            raise ValueError(f"estimate={kind!r} is not known. Allowed: {', '.join(map(repr, ESTIMATES))}")
        for name, value, least in (("draws", draws, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number >= {least}")
        self.loss = loss
        self.kind = kind
        self.draws = draws
        self.seed = seed
        self.likelihood: Likelihood | None = likelihood_of(loss)
        if self.likelihood is None and kind != "empirical":
            raise ValueError(
                f"estimate={kind!r} needs the distribution of labels, and loss={_described(loss)} does not define it. "
                "Allowed: loss='categorical', 'bernoulli', 'gaussian', or torch's CrossEntropyLoss, BCEWithLogitsLoss "
                "(without class weights or label smoothing) or MSELoss"
            )
        self._generator: torch.Generator | None = None
        self._checked = False

    @property
    def needs_target(self) -> bool:
        """Whether the labels of the data are used."""
        return self.kind == "empirical"

    def restart(self) -> None:
        """Reset the random draws for a new pass over the data."""
        self._generator = None

    def passes(self, output: Any, target: Any, n: int) -> Iterator[Cotangents]:
        """Yield gradients with respect to the output's tensors, one list per backward pass."""
        leaves, spec = tree_flatten(output)
        if self.likelihood is None:
            apart = [
                leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
                for leaf in leaves
            ]
            total = self._function_total(tree_unflatten(apart, spec), target, n)
            yield _gradients(total, apart)
            return
        z = logits_of(output)
        if z.dim() == 0 or z.shape[0] % n or not z.numel():
            raise ValueError(
                f"the model's output has shape {tuple(z.shape)}, and must hold numbers in a leading dimension that "
                f"is a multiple of the number of examples, {n}"
            )
        for gradient in self._by_likelihood(self.likelihood, z.detach(), target, n):
            yield [gradient if leaf is z else None for leaf in leaves]

    def _by_likelihood(self, likelihood: Likelihood, z: Tensor, target: Any, n: int) -> Iterator[Tensor]:
        if self.kind == "empirical":
            if not isinstance(target, Tensor):
                raise TypeError(f"the target of a batch must be a tensor of labels, not {type(target).__name__}")
            likelihood.check(z, target)
            gradient = likelihood.gradient(z, target, n)
            if not bool(torch.isfinite(gradient).all()):
                raise ValueError("the gradient of a batch's loss is not finite")
            yield gradient
            return
        if not bool(torch.isfinite(z).all()):
            raise ValueError(f"the model's output is not finite, which estimate={self.kind!r} needs to be")
        live = likelihood.live_terms(z, target)
        if self.kind == "exact":
            yield from likelihood.columns(z, live, n)
            return
        if self._generator is None:
            self._generator = torch.Generator(z.device).manual_seed(self.seed)
        for _ in range(self.draws):
            yield likelihood.draw(z, live, n, self._generator) / math.sqrt(self.draws)

    def _function_total(self, output: Any, target: Any, n: int) -> Tensor:
        """Sum l_n over examples, from a function that returns one loss per example or their mean."""
        assert callable(self.loss)
        value = self.loss(output, target)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss={_described(self.loss)} must return a tensor, not {type(value).__name__}")
        if isinstance(self.loss, nn.Module) and getattr(self.loss, "reduction", "mean") != "mean":
            return value.sum()
        if value.dim() and value.shape != (n,):
            raise ValueError(
                f"loss={_described(self.loss)} returned shape {tuple(value.shape)} for {n} examples. It must return "
                f"one loss per example, shape ({n},), or their mean, a scalar"
            )
        if not self._checked:
            self._check_mean(output, target, value.detach(), n)
            self._checked = True
        return value.sum() if value.dim() else value * n

    def _check_mean(self, output: Any, target: Any, value: Tensor, n: int) -> None:
        """Refuse a loss that is a sum: repeating every example doubles it, but leaves per-example losses and means."""

        def twice(t: Tensor) -> Tensor:
            return torch.cat([t, t]) if t.dim() and t.shape[0] % n == 0 else t

        assert callable(self.loss)
        with torch.no_grad():
            doubled = self.loss(tree_map_only(Tensor, twice, output), tree_map_only(Tensor, twice, target))
        if value.dim():
            doubled = doubled[:n]
        tolerance = 1e-3 if value.dtype in (torch.float16, torch.bfloat16) else 1e-5
        if not torch.allclose(doubled, value, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise ValueError(
                f"loss={_described(self.loss)} is neither one loss per example nor their mean: with every example of a "
                f"batch given twice it changed from {float(value.sum()):.6g} to {float(doubled.sum()):.6g}. Divide "
                "a sum by the number of examples; a loss that compares examples with each other has no such Fisher"
            )


def logits_of(output: Any) -> Tensor:
    """Return the output tensor, or the ``logits`` of an object or a mapping."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    if not isinstance(output, Tensor):
        raise TypeError("the model must return a tensor, or something with 'logits', for a likelihood to be read")
    return output


def _gradients(total: Tensor, leaves: list[Any]) -> Cotangents:
    if not bool(torch.isfinite(total)):
        raise ValueError(f"the loss of a batch is not finite ({float(total.detach())})")
    if not total.requires_grad:
        raise ValueError("the loss does not depend on the model's output")
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    return [next(found) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]


def _described(loss: Loss) -> str:
    return repr(loss) if isinstance(loss, (str, nn.Module)) else getattr(loss, "__name__", repr(loss))
