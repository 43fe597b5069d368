"""Reads data: splits batches into model arguments and target, and shows a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

#: Keys under which a mapping's target is looked up.
TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Batch:
    """The model's arguments, the target (None if there is none), and the number n of examples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    n: int


def read_batch(batch: Any, device: torch.device, dtype: torch.dtype | None, needs_target: bool) -> Batch:
    """Split a batch into the model's arguments and the target, on the model's device.

    A sequence is (inputs, target) or (input, input, ..., target), where inputs may be a sequence or a mapping. A
    mapping has its target under "labels", "label", "targets", "target" or "y"; the rest are keyword arguments of the
    model. A single tensor has no target.

    Args:
        batch: The batch from the loader.
        device: The model's device.
        dtype: The dtype to cast floating-point tensors to; None leaves them.
        needs_target: Whether a batch without a target is an error.
    """

    def move(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() else None, non_blocking=True)

    target = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Tensor):
        args = (batch,)
    elif isinstance(batch, Mapping):
        found = [key for key in TARGET_KEYS if key in batch]
        if len(found) > 1:
            raise ValueError(f"a batch has several keys that could be its target: {', '.join(found)}. Keep one")
        target = batch[found[0]] if found else None
        kwargs = {key: value for key, value in batch.items() if key not in found}
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        *inputs, target = batch
        args = tuple(inputs)
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            args, kwargs = (), dict(inputs[0])
        elif len(inputs) == 1 and isinstance(inputs[0], (tuple, list)):
            args = tuple(inputs[0])
    else:
        raise TypeError(
            f"a batch is a {type(batch).__name__}, but must be (inputs, target), a mapping with its target under one "
            f"of {', '.join(TARGET_KEYS)}, or a tensor of inputs where no target is needed"
        )
    if needs_target and target is None:
        raise ValueError(
            "a batch has no target, which the labels given (estimate='empirical') need. Allowed: (inputs, target), or "
            f"a mapping with its target under one of {', '.join(TARGET_KEYS)}"
        )
    if not kwargs and isinstance(target, Tensor) and all(isinstance(x, Tensor) for x in args):
        args, target = tuple(move(x) for x in args), move(target)  # fast path for the usual case
    else:
        args, kwargs, target = tree_map_only(Tensor, move, (args, kwargs, target))
    first = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
    if first is None or first.dim() == 0 or first.shape[0] == 0:
        raise ValueError("a batch has no tensor of inputs whose first dimension counts at least one example")
    return Batch(args, kwargs, target, int(first.shape[0]))


class Progress:
    """A progress bar: always, never, or on a terminal after three seconds.

    Args:
        wanted: True, False, or None for "when it takes long".
        passes: The number of passes over the data.
    """

    PATIENCE = 3.0

    def __init__(self, wanted: bool | None, passes: int) -> None:
        if wanted is not None and not isinstance(wanted, bool):
            raise ValueError(f"progress={wanted!r} must be True, False or None (when it takes long)")
        self.wanted = sys.stderr.isatty() if wanted is None else wanted
        self.begun = time.monotonic() + (self.PATIENCE if wanted is None else 0.0)
        self.passes = passes
        self.current = 0
        self._width = 0

    def over(self, batches: Iterable[Any], whole: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches and show progress; ``whole`` may have a length."""
        self.current += 1
        total = len(whole) if isinstance(whole, Sized) else None
        for i, batch in enumerate(batches):
            self._show(i, total)
            yield batch
        if self.current == self.passes and self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)

    def _show(self, done: int, total: int | None) -> None:
        if not self.wanted or time.monotonic() < self.begun:
            return
        text = f"fisher: pass {self.current} of {self.passes}, batch {done + 1}"
        if total:
            filled = 24 * (done + 1) // total
            text += f" of {total} [{'#' * filled}{'.' * (24 - filled)}]"
        self._width = max(self._width, len(text))
        print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
