"""Full precision for what operators compute, whatever the caller's autocast and TF32 settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ekfac.curvature.factors import full_precision

Method = TypeVar("Method", bound=Callable[..., Any])


def exactly(method: Method) -> Method:
    """Make a method of an operator, or a function of one, multiply in full precision.

    Bases that are computed when first needed are kept, and would keep an autocast's rounding.
    """

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = getattr(next(iter((*args, *kwargs.values())), None), "device", None)
        with full_precision(device if isinstance(device, torch.device) else torch.device("cpu")):
            return method(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
