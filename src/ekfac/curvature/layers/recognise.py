"""Recognises other libraries' modules by their behaviour, without importing those libraries."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

#: Cached results, by module.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_MULTIPLIES: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def behaves_like(module: nn.Module, features: int, *expected: Callable[[Tensor], Tensor]) -> bool:
    """Test whether a module's forward agrees with one of these functions on two rows, up to rounding.

    Hooks are bypassed, and no random numbers are drawn. On the meta device the answer is yes.
    """
    if module not in _KNOWN:
        _KNOWN[module] = _compare(module, features, expected)
    return _KNOWN[module]


@torch.no_grad()
def _compare(module: nn.Module, features: int, expected: Iterable[Callable[[Tensor], Tensor]]) -> bool:
    like = next(module.parameters())
    if like.is_meta or features == 0:
        return True
    x = torch.arange(2.0 * features, device=like.device).add(1).sin().reshape(2, features).to(like.dtype)
    with stand_ins(module):
        try:
            found = type(module).forward(module, x)
        except Exception:  # not a function of a single tensor of this shape
            return False
        compared = [function(x).double() for function in expected]
    eps = max(torch.finfo(like.dtype).eps, torch.finfo(torch.float32).eps)  # many compute in float32 whatever the dtype
    for right in compared:
        if not isinstance(found, Tensor) or found.shape != right.shape:
            return False
        if bool((found.double() - right).abs().max() <= 8 * eps**0.75 * (1 + right.abs().max())):
            return True
    return False


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[None]:
    """Replace a module's sharded parameters by plain ones with arbitrary values for a while."""
    sharded = {name: p for name, p in module._parameters.items() if p is not None and hasattr(p, "device_mesh")}
    for name, p in sharded.items():
        numbers = torch.arange(p.numel(), device=p.device).sin().reshape(p.shape).to(p.dtype)
        module._parameters[name] = nn.Parameter(numbers)
    try:
        yield
    finally:
        module._parameters.update(sharded)


class _OwnWeight(TorchFunctionMode):
    """Records whether ``F.linear`` or ``F.embedding`` is called with a given weight."""

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.embedding):
            given = args[1] if len(args) > 1 else kwargs.get("weight")
            self.seen |= given is not None and given is self.weight
        return func(*args, **kwargs)


@torch.no_grad()
def multiplies_with_its_weight(module: nn.Module) -> bool:
    """Test whether a subclass of Linear or Embedding passes its weight unchanged to torch's function."""
    if module not in _MULTIPLIES:
        weight = module._parameters.get("weight")
        if weight is None:
            return False
        _MULTIPLIES[module] = False
        if not weight.is_meta:
            is_linear = isinstance(module, nn.Linear)
            width, dtype = (weight.shape[1], weight.dtype) if is_linear else (1, torch.long)
            x = torch.zeros(1, width, dtype=dtype, device=weight.device)
            with torch.random.fork_rng(devices=[]), stand_ins(module), _OwnWeight(module._parameters["weight"]) as mode:
                try:
                    type(module).forward(module, x)
                except Exception:  # it expects other inputs
                    return False
            _MULTIPLIES[module] = mode.seen
    return _MULTIPLIES[module]


def takes_one_tensor(module: nn.Module) -> bool:
    """Return whether the module's forward takes exactly one argument."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())
    return len(parameters) == 2 and parameters[1].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
