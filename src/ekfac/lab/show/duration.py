"""Formats and parses durations."""

from __future__ import annotations

import re

from ekfac.lab.registry import LabError


def duration(seconds: float) -> str:
    """Format seconds: 8 s, 3 min, 1 h 20 min, 3 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes / 1440:.0f} days"


def parse_duration(text: str) -> float:
    """Turn ``2h``, ``10min``, ``90s``, ``1.5d`` or ``1h30m`` into seconds.

    Raises:
        LabError: If it is none of these, or not positive.
    """
    units = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(sec|min|[smhd])", text.strip().lower())
    if not parts or "".join(re.split(r"\d+(?:\.\d+)?\s*(?:sec|min|[smhd])", text.strip().lower())).strip():
        raise LabError(f"budget takes a time such as 2h, 10min or 90s, not {text!r}")
    found = sum(float(number) * units[unit] for number, unit in parts)
    if not found > 0:
        raise LabError(f"budget must be positive, not {text!r}")
    return found
