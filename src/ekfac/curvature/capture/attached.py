"""The captures that are attached to models."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ekfac.curvature.capture.capture import Capture

ATTACHED: weakref.WeakSet[Capture] = weakref.WeakSet()


@contextmanager
def unseen(model: nn.Module) -> Iterator[None]:
    """Pause all captures that are attached to the model."""
    modules = set(model.modules())
    with ExitStack() as stack:
        for capture in list(ATTACHED):
            if not modules.isdisjoint(capture.uses):
                stack.enter_context(capture.forwards.paused())
        yield
