"""Checks that a model still has the parameters that its optimizer was given, and no others."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ekfac import checks


class ModelChanges:
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
