"""Functions as CUDA graphs."""

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

#: At most so many functions of one kind are recorded.
MOST = 300


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record a CUDA graph: ``torch.cuda.graph``, made to stand what else goes on in the process.

    Python's collector stands still: models and optimizers of an earlier training are often left to it, and their
    graphs, destroyed just now, would spoil this one. Other threads (those that pin memory, for example) do not count.
    When recording fails, torch leaves its stream the current one, and its last error hides the first: the stream is
    put back, and the first error is raised.
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
    """Return what a CUDA graph takes for granted of a tensor."""
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


class Places:
    """Where what a backward pass leaves waits for the step: at the same addresses every time, for a graph to read.

    Args:
        limit: Bytes that they may take. Where they would take more there are none at all, from then on.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        #: Whether there are any.
        self.open = True

    def of(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor] | None:
        """Return new places for copies of tensors, of these dtypes; None if there is no room."""
        pairs = list(zip(tensors, dtypes, strict=True))
        self._taken += sum(t.numel() * dtype.itemsize for t, dtype in pairs)
        self.open = self.open and self._taken <= self._limit
        return [torch.empty_like(t, dtype=dtype) for t, dtype in pairs] if self.open else None

    def clear(self) -> None:
        """Begin again: nobody uses them any more."""
        self._taken = 0


class Replays:
    """Functions of tensors as CUDA graphs: many small kernels, slow to launch, become one.

    One is recorded at its third call with tensors of the same form. From then on these are copied to fixed places, and
    what it returns from others; graphs share both, and all memory, as they are replayed one after another.

    Args:
        what: What they do, for a warning.
        enabled: Record.
        memory: Bytes that the places may take; what does not fit is run. None for any.
    """

    def __init__(self, what: str, enabled: bool, memory: int | None = None) -> None:
        self.what = what
        self.enabled = enabled
        self._memory = memory
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, ...]]] = {}
        #: Where each finds tensors that are not copied.
        self._fixed: dict[Hashable, list[int]] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._record_on: dict[torch.device, tuple[OwnStream, tuple[int, int]]] = {}
        #: Where one was replayed last.
        self._stream: torch.cuda.Stream | None = None

    def clear(self) -> None:
        """Let go of all graphs and their memory."""
        if self._graphs:
            torch.cuda.synchronize()
        for kept in (self._graphs, self._places, self._record_on, self._fixed):
            kept.clear()
        self._stream = None

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Any, ...]], *given: Tensor, fixed: Sequence[Tensor] = ()
    ) -> tuple[Any, ...]:
        """Return what the function returns: tensors, and what does not change from call to call.

        Args:
            key: All that it does besides depends on.
            function: Is given the tensors.
            *given: The tensors.
            fixed: Others that it reads and writes where they are. Once one of them has moved, everything is recorded
                anew.
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
        """Record a function that was called often enough; returns whether that was done."""
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
        except Exception as error:  # whatever it is, the function can do without
            self.enabled = False
            self.clear()
            warnings.warn(f"cuda_graphs: {self.what} cannot be recorded and runs without: {error}", RuntimeWarning,
                          stacklevel=2)  # fmt: skip
            return False
        self._graphs[key] = graph, places, returned
        return True

    def _placed(self, place: Hashable, value: Any) -> Any:
        """Return a tensor copied to its place; what is none as it is."""
        if not isinstance(value, Tensor):
            return value
        if place not in self._places:
            self._places[place] = torch.empty_like(value)
        return self._places[place].copy_(value)


def _numbered(what: str, values: Sequence[Any]) -> list[tuple[Hashable, Any]]:
    """Return values with their places' names."""
    return [((what, i, form(v) if isinstance(v, Tensor) else None), v) for i, v in enumerate(values)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
