"""Performance profiles as in AlgoPerf (Dahl et al., 2023, after Dolan and Moré, 2002)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: The largest ratio in pictures and scores, as in AlgoPerf.
MOST = 4.0


def ratios(reached: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return each method's cost to the target on each task, relative to the best method.

    Args:
        reached: By method, the steps or seconds to the target on each task; infinite if it was not reached.

    Returns:
        By method, the ratio on each task; infinite if the target was not reached.
    """
    best = [min(column) for column in zip(*reached.values(), strict=True)]
    return {
        method: [time / least if math.isfinite(time) else math.inf for time, least in zip(times, best, strict=True)]
        for method, times in reached.items()
    }


def fraction(found: Sequence[float], within: float) -> float:
    """Return the fraction of tasks on which a method took at most ``within`` times as long as the best method."""
    return sum(ratio <= within for ratio in found) / len(found)


def score(found: Sequence[float], most: float = MOST) -> float:
    """Return the profile's mean height from 1 to ``most``: 1 for a method that is the fastest everywhere."""
    return sum(max(0.0, most - ratio) for ratio in found) / ((most - 1) * len(found))


def first_at(places: Sequence[float], values: Sequence[float], target: float) -> float:
    """Return the first place at which a value is at or below the target; infinite if none is."""
    return next((place for place, value in zip(places, values, strict=True) if value <= target), math.inf)
