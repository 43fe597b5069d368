"""Records functions as CUDA graphs and replays them."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ekfac.optim.cuda.streams import OwnStream

#: At most this many functions of one kind are recorded.
MOST = 300


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record a CUDA graph like ``torch.cuda.graph``, but robust against other activity in the process.

    Python's garbage collector is paused: it could destroy graphs of an earlier training, which would invalidate this
    recording. Calls by other threads (those that pin memory, for example) are allowed. If recording fails, torch leaves
    its own stream current, and its last error hides the first; this restores the stream and raises the first error.
    """
    stream, collects = torch.cuda.current_stream(), gc.isenabled()
    first: Exception | None = None
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            try:
                yield
            except Exception as error:
                first = error
                raise
    except Exception as last:
        raise (first or last) from None
    finally:
        torch.cuda.set_stream(stream)
        if collects:
            gc.enable()


def form(tensor: Tensor) -> Hashable:
    """Return the properties of a tensor that a CUDA graph depends on, except its address."""
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


class StaticBuffers:
    """Static buffers, with fixed addresses for a graph to read, in which captured tensors wait for the step.

    Args:
        limit: The budget in bytes. Once it is exceeded, no more buffers are handed out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        #: Whether the budget has not been exceeded.
        self.open = True

    def of(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor] | None:
        """Return new buffers for copies of tensors in these dtypes; None if there is no room."""
        pairs = list(zip(tensors, dtypes, strict=True))
        self._taken += sum(t.numel() * dtype.itemsize for t, dtype in pairs)
        self.open = self.open and self._taken <= self._limit
        return [torch.empty_like(t, dtype=dtype) for t, dtype in pairs] if self.open else None

    def clear(self) -> None:
        """Reset the count, as no buffer is in use any more."""
        self._taken = 0


class Replays:
    """Functions of tensors as CUDA graphs: one launch in place of many small kernels.

    A function is recorded at its third call with tensors of the same form. From then on, its arguments are copied to
    static buffers and its results from others. Graphs share these buffers and all other memory, as they are replayed
    one at a time.

    Args:
        what: What the functions do, for a warning.
        enabled: Whether to record.
        memory: Budget in bytes for the buffers; functions that do not fit run eagerly. None for no limit.
    """

    def __init__(self, what: str, enabled: bool, memory: int | None = None) -> None:
        self.what = what
        self.enabled = enabled
        self._memory = memory
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, ...]]] = {}
        #: The addresses of each function's fixed tensors.
        self._fixed: dict[Hashable, list[int]] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._record_on: dict[torch.device, tuple[OwnStream, tuple[int, int]]] = {}
        #: The stream of the last replay.
        self._stream: torch.cuda.Stream | None = None

    def clear(self) -> None:
        """Free all graphs and their memory."""
        if self._graphs:
            torch.cuda.synchronize()
        for kept in (self._graphs, self._places, self._record_on, self._fixed):
            kept.clear()
        self._stream = None

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Any, ...]], *given: Tensor, fixed: Sequence[Tensor] = ()
    ) -> tuple[Any, ...]:
        """Call the function or replay it; what it returns besides tensors must be the same in every call.

        Args:
            key: Everything that the function depends on besides the tensors.
            function: A function of the tensors.
            *given: The tensors.
            fixed: Further tensors that it reads and writes in place. If the address of one changes, all graphs are
                recorded anew.
        """
        first = (given or fixed)[0]
        if not (self.enabled and first.is_cuda) or torch.cuda.is_current_stream_capturing():
            return function(*given)
        device = first.device
        key = key, *map(form, (*given, *fixed))
        at = [t.data_ptr() for t in fixed]
        if self._fixed.setdefault(key, at) != at:
            self.clear()
            self._seen.clear()
            self._fixed[key] = at
        if key not in self._graphs and not self._record(key, function, given, device):
            return function(*given)
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        graph, places, returned = self._graphs[key]
        if places:
            torch._foreach_copy_(places, list(given))
        graph.replay()
        return tuple(r.clone() if isinstance(r, Tensor) else r for r in returned)

    def _record(
        self, key: Hashable, function: Callable[..., tuple[Any, ...]], given: Sequence[Tensor], device: torch.device
    ) -> bool:
        """Record a function that was called often enough; return whether that was done."""
        if key in self._seen or len(self._seen) < MOST:
            self._seen[key] += 1
        if self._seen[key] < 3:
            return False
        new = {place: t for place, t in _numbered("given", given) if place not in self._places}
        if self._memory is not None and sum(map(_bytes, (*self._places.values(), *new.values()))) > self._memory:
            return False
        self._places.update({place: torch.empty_like(t) for place, t in new.items()})
        places = [self._places[place] for place, _ in _numbered("given", given)]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            if device not in self._record_on:
                self._record_on[device] = OwnStream(device), torch.cuda.graph_pool_handle()
            own, pool = self._record_on[device]
            with recording(graph, pool=pool, stream=own.stream):
                returned = tuple(self._placed(place, r) for place, r in _numbered("returned", function(*places)))
        except Exception as error:  # any failure falls back to running eagerly
            self.enabled = False
            self.clear()
            warnings.warn(f"cuda_graphs: {self.what} cannot be recorded and runs eagerly: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            return False
        self._graphs[key] = graph, places, returned
        return True

    def _placed(self, place: Hashable, value: Any) -> Any:
        """Copy a tensor to its static buffer; return anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if place not in self._places:
            self._places[place] = torch.empty_like(value)
        return self._places[place].copy_(value)


def _numbered(what: str, values: Sequence[Any]) -> list[tuple[Hashable, Any]]:
    """Pair values with the keys of their buffers."""
    return [((what, i, form(v) if isinstance(v, Tensor) else None), v) for i, v in enumerate(values)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
