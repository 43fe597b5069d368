"""Decides which optimizer has its hooks on: of several that train the same parameters, the last constructed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from ekfac import checks

if TYPE_CHECKING:
    from ekfac.optim.statistics.collector import Collector

#: The collectors of all open optimizers, in order of construction.
_LIVE: list[weakref.ref[Collector]] = []

CLOSED = "step() after close(), which has removed the hooks from the model: construct another optimizer"
TAKEN_OVER = (
    "step(): an optimizer that was constructed later trains the same parameters, and has taken over the hooks on the "
    "model. Take steps with that one; or close() or delete it, and this one gets them back"
)


def refuse(collector: Collector) -> NoReturn:
    """Raise an error that explains why an optimizer cannot take a step, or has no hooks."""
    if torch.is_inference_mode_enabled():
        checks.outside_inference_mode("step()")
    raise RuntimeError(TAKEN_OVER if any(ref() is collector for ref in _LIVE) else CLOSED)


def refuse_changed(problem: str) -> NoReturn:
    """Raise an error: the model has changed since the optimizer was constructed."""
    raise RuntimeError(
        f"step(): {problem} since this optimizer was constructed, and would not be trained. Construct another one now; "
        "for parameters that were added, opt.add_param_group({'params': ...}) suffices"
    )


def register(collector: Collector) -> None:
    """Let a new optimizer take over the hooks on its parameters, until it is closed."""
    if not any(ref() is collector for ref in _LIVE):
        _LIVE.append(weakref.ref(collector, lambda _: _share_out()))
    _share_out()


def unregister(collector: Collector) -> None:
    """Remove a closed optimizer; an earlier one on the same parameters gets its hooks back."""
    _LIVE[:] = [ref for ref in _LIVE if ref() not in (None, collector)]
    _share_out()


def _share_out() -> None:
    taken: set[nn.Parameter] = set()
    for collector in reversed([found for ref in _LIVE if (found := ref()) is not None]):
        free = taken.isdisjoint(collector.offered)
        taken.update(collector.offered if free else ())
        if free != collector.active:
            collector.activate(free)
