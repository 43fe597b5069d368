"""Checks of arguments: every error names the argument, its value and what is allowed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

#: The most characters of a value that a message shows.
LONGEST = 100


def shown(value: Any) -> str:
    """Format a value for a message: tensors by their shapes, anything else in at most a line."""
    if isinstance(value, Tensor):
        return f"<tensor of shape {tuple(value.shape)}>" if value.numel() != 1 else repr(value)
    if isinstance(value, nn.Module):
        return f"<{type(value).__name__}>"
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        items = value.values() if isinstance(value, Mapping) else value
        if not all(isinstance(item, (str, int, float, type(None))) for item in items):
            return f"<{type(value).__name__} of {len(value)}>"
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def listed(names: Sequence[str], most: int = 8) -> str:
    """Format names for a message: only the first few."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Require a name from a list."""
    options = list(allowed)
    if not any(isinstance(value, type(option)) and value == option for option in options):
        raise ValueError(f"{name}={shown(value)} is not known. Allowed: {', '.join(map(repr, options))}")


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Require a finite number within bounds, or a one-element tensor, which is checked only if it is on the CPU."""
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
            raise ValueError(f"{name}={shown(value)} must be {allowed}, not a tensor of shape {tuple(value.shape)}")
        if value.device.type != "cpu":
            return
        value = value.item()
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must be {allowed}, not a whole number beyond the range of float64")
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    good = good and (above is None or value > above) and (least is None or value >= least)
    if not (good and (below is None or value < below) and (most is None or value <= most)):
        raise ValueError(f"{name}={shown(given)} must be {allowed}")


def integer(name: str, value: Any, *, least: int) -> None:
    """Require a whole number, at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={shown(value)} must be a whole number >= {least}")


def flag(name: str, value: Any) -> None:
    """Require True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be True or False")


def patterns(name: str, value: Any) -> list[str]:
    """Require a name or pattern, or a sequence of them."""
    single = isinstance(value, str | Tensor) or not isinstance(value, Iterable)
    items = [value] if single else list(value)
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name}={shown(value)} must be a name or pattern of layers, or a list of them")
    return items


def instance(name: str, value: Any, kind: type | tuple[type, ...], allowed: str) -> None:
    """Require an object of a type.

    Raises:
        TypeError: If it is not; the message names the argument, its type and what is allowed.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {allowed}, not {type(value).__name__}")


def device(name: str, value: Any) -> torch.device:
    """Require a device or a device's name."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}={shown(value)} must be a device such as 'cpu' or 'cuda:0'") from error


def decays(name: str, value: Any) -> None:
    """Require two numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name}={shown(value)} must be two numbers >= 0 and < 1")
    for item in value:
        number(name, item, least=0, below=1)


#: The remedy if only parameters are available.
THE_MODEL = (
    "Pass the model itself, EKFAC(model, lr=...), and parameter groups as params=; where a framework would build the "
    "optimizer from parameters, build it yourself and hand it over, as in Trainer(optimizers=(EKFAC(model), None))"
)


def outside_inference_mode(who: str) -> None:
    """Refuse inference mode, whose tensors could not be changed later."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{who} inside torch.inference_mode(), whose tensors cannot be changed outside it. Allowed: torch.no_grad()"
        )


def constructs(who: str, args: tuple[Any, ...], given: Iterable[str]) -> None:
    """Require a model as the only positional argument."""
    if not args and "model" not in given:
        raise TypeError(f"{who}() is missing the argument model. {THE_MODEL}")
    if len(args) > 1:
        second = shown(args[1]) if not hasattr(args[1], "__next__") else f"<{type(args[1]).__name__}>"
        raise TypeError(f"{who}(model, {second}): only the model is positional, name the rest: params=, lr=")


def trainable(value: Any) -> list[tuple[str, nn.Parameter]]:
    """Return a module's trainable parameters by name; require that it is a module and that they have shapes."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"model={shown(value)} must be a torch.nn.Module. {THE_MODEL}")
    found = [(name, p) for name, p in value.named_parameters() if p.requires_grad]
    for name, p in found:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"parameter '{name}' has no shape yet: call the model once on a batch, then construct this"
            )
    return found


def model(value: Any, there: bool = True) -> None:
    """Require a module with trainable parameters; with ``there``, none on the meta device."""
    found = trainable(value)
    if isinstance(value, torch.jit.ScriptModule):
        raise TypeError(
            "model is a ScriptModule, whose layers' inputs cannot be captured: train the original module, and script "
            "that after training and opt.close(). Or wrap it, as nn.Sequential(model), to train it without bases"
        )
    for name, p in found:
        if p.is_meta and there:
            raise ValueError(
                f"parameter '{name}' is on the device 'meta', where it has no values: materialize it first"
            )
        if p.is_conj():
            raise ValueError(
                f"parameter '{name}' is the conjugate of another tensor, whose memory it shares: make it from "
                "tensor.resolve_conj()"
            )
    if not any(p.numel() for _, p in found):
        raise ValueError("model has no trainable parameter: nothing to precondition")


def real(who: str, value: nn.Module) -> None:
    """Refuse complex parameters, over which no curvature is defined here."""
    for name, p in value.named_parameters():
        if p.requires_grad and p.is_complex():
            raise ValueError(
                f"{who}: parameter '{name}' is complex ({p.dtype}). Allowed: real parameters (torch.view_as_real), or "
                "frozen complex ones, p.requires_grad_(False)"
            )
