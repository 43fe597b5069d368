"""How much memory a piece of code takes, from the allocator's own events: temporaries inside kernels are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def allocated(function: Callable[[], Any]) -> tuple[int, int, Any]:
    """Run a function on the CPU: the peak of what it allocated, what is left of it at the end (bytes), its result."""
    torch.empty(1)  # whatever torch sets up at its first allocation
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now, result
