"""Builds the engine behind EKFAC and Preconditioner from their keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn

from ekfac.optim import options
from ekfac.optim.damping import DAMPING_MODES
from ekfac.optim.eigen import EigenMethod
from ekfac.optim.engine import Engine
from ekfac.optim.options import EngineOptions
from ekfac.optim.rules import RULES, Elementwise, State

#: Decay of s where nothing else is said; "per_example" takes every batch afresh, as Algorithm 1 does.
SCALING_DECAY = 0.95


def check_model(model: Any) -> None:
    """A module with at least one trainable real parameter."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} must be a torch.nn.Module (the model itself, not its parameters)")
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("model has no trainable parameter: nothing to precondition")
    for name, p in trainable:
        if p.is_complex():
            raise ValueError(f"parameter '{name}' is complex ({p.dtype}). Allowed: real parameters")


def build_engine(
    who: str,
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    state: MutableMapping[Tensor, State],
    arguments: dict[str, Any],
) -> Engine:
    """Check :class:`CurvatureArguments` and build the engine with its rule."""
    settings = EngineOptions.from_arguments(
        who, arguments, also=("scaling", "damping_mode", "scaling_decay", "on_refresh")
    )
    scaling = arguments.get("scaling", "running")
    options.one_of("scaling", scaling, RULES)
    mode = arguments.get("damping_mode", "plain")
    options.one_of("damping_mode", mode, DAMPING_MODES)
    on_refresh = arguments.get("on_refresh")
    if on_refresh is None:
        # N g^2 overshoots while all examples pull the same way: measured, EKFAC-ra is far better off forgetting it.
        on_refresh = "carry" if scaling == "per_example" else "kronecker"
    options.one_of("on_refresh", on_refresh, ("carry", "kronecker"))
    decay = arguments.get("scaling_decay")
    if decay is None:
        decay = 0.0 if scaling == "per_example" else SCALING_DECAY
    options.number("scaling_decay", decay, least=0, below=1)
    # N g^2 of a single batch is no scale to divide by, so the diagonal method always averages.
    elementwise = Elementwise(decay if scaling == "running" else decay or SCALING_DECAY)
    damp = DAMPING_MODES[mode]
    return Engine(
        model,
        parameters,
        settings,
        EigenMethod(RULES[scaling](decay), damp, on_refresh),
        EigenMethod(elementwise, damp, on_refresh),
        state,
    )
