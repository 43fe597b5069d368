"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph``, made to stand what else goes on in the process.

    Python's collector stands still: models and optimizers of an earlier training are often left to it, and their
    graphs, destroyed just now, would spoil this one. What other threads do, those that pin memory say, does not count.
    When a capture fails, torch leaves its stream the current one, and its last error says only that there was another:
    the stream is put back, and the first error is raised.
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
