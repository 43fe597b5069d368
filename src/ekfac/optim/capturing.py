"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph`` while Python's collector stands still.

    A model and its optimizer refer to each other, so those of an earlier training are often left to the collector.
    Should it find them just now, their graphs would be destroyed, which is forbidden during a capture and spoils it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if was_on:
            gc.enable()


def first_cause(error: BaseException) -> BaseException:
    """What went wrong first: the end of a spoilt capture raises an error that says only that there was one before."""
    while error.__context__ is not None:
        error = error.__context__
    return error
