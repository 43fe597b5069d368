"""Checks that a model still has the parameters that its optimizer was given, and no others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ekfac import checks
from ekfac.curvature.blocks import Block
from ekfac.curvature.summary import low_coverage


class Roster:
    """Detects and names changes in a model's parameters.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        #: Names and shapes of all parameters that the model ever had, and whether all of them are trained.
        self._seen: dict[nn.Parameter, tuple[str, torch.Size]] = {}
        self._all_trained = True
        #: Lost parameters that the user was warned of.
        self._gone: list[str] = []

    def compare(self, offered: list[nn.Parameter]) -> str:
        """Return how the model has changed, if that prevents steps; warn if parameters are gone without replacement."""
        now = {p: (name, p.shape) for name, p in self._model.named_parameters()}
        if not self._seen:
            self._seen, self._all_trained = now, set(now) <= set(offered)
        lost = [self._seen[p][0] for p in offered if p in self._seen and p not in now]
        fresh = [n for p, (n, _) in now.items() if p not in self._seen and p.requires_grad and p not in set(offered)]
        replaced = [name for name in fresh if name in lost]
        added = [name for name in fresh if self._all_trained and name not in lost]
        other = [n for p, (n, shape) in now.items() if p in self._seen and self._seen[p][1] != shape]
        self._seen |= {p: now[p] for p in offered if p in now and p not in self._seen}
        self._warn_of([name for name in lost if name not in replaced])
        changes = {"were replaced": replaced, "were added to the model": added, "have another shape": other}
        return "; ".join(f"parameters {checks.listed(names)} {what}" for what, names in changes.items() if names)

    def _warn_of(self, gone: list[str]) -> None:
        if gone and gone != self._gone:
            warnings.warn(
                f"parameters {checks.listed(gone)} are no longer part of the model, and are no longer trained. If they "
                "are used outside it, construct another optimizer for a module that contains them too",
                RuntimeWarning,
                stacklevel=3,
            )
        self._gone = gone


def warn_at_first(blocks: Sequence[Block], parameters: Iterable[nn.Parameter]) -> None:
    """Give warnings in the first step: low coverage, and no differential privacy."""
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
