"""Scalars about the engine, for any logger."""

from __future__ import annotations

from ekfac.curvature.eigensolvers import RUNGS
from ekfac.optim.engine import Engine


def engine_stats(engine: Engine) -> dict[str, float]:
    """Return counts of steps, refreshes and solver fallbacks, and the drift of bases, as plain numbers (synchronises).

    ``captured_bytes`` is the peak memory of captured inputs and output gradients so far; a tensor that several layers
    read counts once. Autograd keeps most of these tensors for the backward pass anyway.
    """
    engine.settle(wait=True)
    refresher = engine.refresher
    stats = {
        "steps": float(engine.schedule.applied_steps),
        "skipped_steps": float(engine.skipped.total),
        "captured_bytes": float(engine.collector.capture.held.peak),
        "refreshes": float(refresher.refreshes),
        "warm_refreshes": float(engine.schedule.warm_refreshes),
        "refresh_seconds": refresher.seconds,
        "residual_drift": 0.0 if refresher.drift is None else float(refresher.drift),
    }
    stats["solver_fallbacks"] = float(sum(refresher.fallbacks.values()))
    stats.update({f"solver_{rung}": float(refresher.fallbacks[rung]) for rung in RUNGS[1:]})
    return stats
