"""Compiles Triton kernels in the background while the first batch is processed, since that takes seconds.

Nothing here touches the device or has to succeed: kernels that are not ready at their first launch are compiled then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from typing import Any

import torch

from ekfac.optim.methods.belief import Belief

#: Running threads, and everything whose compilation was ever started.
_running: list[threading.Thread] = []
_started: set[object] = set()


def compile_ahead(device: torch.device, rule: Any) -> None:
    """Start threads that compile the kernels of a rule's steps, if it has any for this device."""
    if type(rule) is not Belief or device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return
    if (key := (device, rule)) in _started:
        return
    _started.add(key)
    for function in (_rule, _update):
        thread = threading.Thread(target=_quietly, args=(function, rule), name="ekfac compiles kernels")
        thread.start()
        _running.append(thread)


def wait() -> None:
    """Wait for all running compilations."""
    while _running:
        _running.pop().join()


def _quietly(function: Any, rule: Any) -> None:
    with contextlib.suppress(Exception):  # the first launch will raise it again
        function(rule)


def _rule(rule: Any) -> None:
    from ekfac.optim.cuda import kernels as k

    single, double = torch.float32, torch.float64
    shared = {"BETA_2": float(rule.betas[1]), "CAUTIOUS": rule.cautious, "PARTS": k.PARTS, "TILE": k.TILE}
    own = {"EPS": rule.eps, "FLOOR": rule.floor, "SPIKE": rule.spike}
    _compile(k.measure, [*[single] * 4, *[double] * 4, 1, 1], {"PARTS": k.PARTS, "TILE": k.TILE})
    _compile(k.update, [*[single] * 7, *[double] * 3, 1, 1], {**own, **shared})
    _compile(k.scale, [*[single] * 2, *[double] * 3, 1, 1], shared)


def _update(rule: Any) -> None:
    from ekfac.optim.cuda import update_kernels as k

    _compile(k.update, [torch.int64, *[torch.float64] * 4], {"TILE": k.TILE})


def _compile(kernel: Any, arguments: list[Any], built_in: dict[str, Any]) -> None:
    """Compile a kernel, and the C function that launches it, for arguments of these types."""
    from triton.runtime import driver

    compiled = kernel.warmup(*arguments, grid=(1, 1), **built_in)
    driver.active.launcher_cls(compiled.src, compiled.metadata)
