"""Checks of arguments: every error names the argument, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from torch import Tensor


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """A name from a list."""
    options = list(allowed)
    if value not in options:
        raise ValueError(f"{name}={value!r} is not known. Allowed: {', '.join(map(repr, options))}")


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """A finite number within bounds; a one-element tensor counts as its number where the host can read it freely."""
    allowed = "a finite number"
    if above is not None:
        allowed += f" > {above:g}"
    if least is not None:
        allowed += f" >= {least:g}"
    if below is not None:
        allowed += f" and < {below:g}"
    if most is not None:
        allowed += f" and <= {most:g}"
    given = value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}={value!r} must be {allowed}, not a tensor of shape {tuple(value.shape)}")
        if value.device.type != "cpu":
            return
        value = value.item()
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    good = good and (above is None or value > above) and (least is None or value >= least)
    if not (good and (below is None or value < below) and (most is None or value <= most)):
        raise ValueError(f"{name}={given!r} must be {allowed}")


def integer(name: str, value: Any, *, least: int) -> None:
    """A whole number from ``least`` on."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number >= {least}")


def flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def patterns(name: str, value: Any) -> list[str]:
    """A name or pattern, or a sequence of them."""
    items = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name}={value!r} must be a name or pattern of layers, or a list of them")
    return items


def decays(name: str, value: Any) -> None:
    """Two numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be two numbers >= 0 and < 1")
    for item in value:
        number(name, item, least=0, below=1)
