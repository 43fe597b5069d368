"""Who has the hooks on a model's parameters: of several optimizers that train the same ones, the last."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from ekfac import checks

if TYPE_CHECKING:
    from ekfac.optim.statistics.collector import Collector

#: Those that are not closed, the last constructed at the end.
_LIVE: list[weakref.ref[Collector]] = []

CLOSED = "step() after close(), which has removed the hooks from the model: construct another optimizer"
TAKEN_OVER = (
    "step(): an optimizer that was constructed later trains the same parameters, and has taken over the hooks on the "
    "model. Take steps with that one; or close() it, or delete it, and this one has them again"
)


def refuse(collector: Collector) -> NoReturn:
    """Raise an error that tells why an optimizer cannot take a step here, or has no hooks."""
    if torch.is_inference_mode_enabled():
        checks.outside_inference_mode("step()")
    raise RuntimeError(TAKEN_OVER if any(ref() is collector for ref in _LIVE) else CLOSED)


def refuse_changed(problem: str) -> NoReturn:
    """Raise an error: the model is not the one that the optimizer was given."""
    raise RuntimeError(
        f"step(): {problem} since this optimizer was constructed, and would not be trained. Construct another one now; "
        "for parameters that were added, opt.add_param_group({'params': ...}) will do"
    )


def register(collector: Collector) -> None:
    """Let a new optimizer take over the hooks on its parameters; those who had them get them back when it is closed."""
    if not any(ref() is collector for ref in _LIVE):
        _LIVE.append(weakref.ref(collector, lambda _: _share_out()))
    _share_out()


def unregister(collector: Collector) -> None:
    """Let go of an optimizer that is closed; whoever had its hooks before has them again."""
    _LIVE[:] = [ref for ref in _LIVE if ref() not in (None, collector)]
    _share_out()


def _share_out() -> None:
    taken: set[nn.Parameter] = set()
    for collector in reversed([found for ref in _LIVE if (found := ref()) is not None]):
        free = taken.isdisjoint(collector.offered)
        taken.update(collector.offered if free else ())
        if free != collector.active:
            collector.activate(free)
