"""Builds the engine behind EKFAC and Preconditioner from their keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ekfac.optim import options
from ekfac.optim.engine import Engine
from ekfac.optim.methods.damping import DAMPING_MODES
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.methods.rules import RULES, Running, State
from ekfac.optim.options import EngineOptions

#: Decay of s where nothing else is said; "per_example" takes every batch afresh, as Algorithm 1 does.
SCALING_DECAY = 0.95
DECAYS = {"anchored": 0.98, "per_example": 0.0}
#: Rules whose s restarts at S_B x S_A in a new basis unless something else is asked for: N g^2 overshoots while all
#: examples pull the same way, and measured, both are far better off forgetting it.
RESTARTED = ("anchored", "running")
#: Torch's rules, which start at zero and correct for that: a restart has no meaning there.
TORCH_RULES = ("adam", "rmsprop", "adagrad")


def check_model(model: Any) -> None:
    """A module with at least one trainable real parameter."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} must be a torch.nn.Module (the model itself, not its parameters)")
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("model has no trainable parameter: nothing to precondition")
    for name, p in trainable:
        if isinstance(p, UninitializedParameter):
            raise ValueError(
                f"parameter '{name}' has no shape yet: call the model once on a batch, then construct this"
            )
        if p.is_complex():
            raise ValueError(f"parameter '{name}' is complex ({p.dtype}). Allowed: real parameters")


def build_engine(
    who: str,
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    state: MutableMapping[Tensor, State],
    arguments: dict[str, Any],
    also: Iterable[str],
) -> Engine:
    """Check :class:`CurvatureArguments` and build the engine with its rule; ``also`` are other arguments of ``who``."""
    own = ("scaling", "damping_mode", "scaling_decay", "on_refresh", "betas", "alpha", "eps")
    settings = EngineOptions.from_arguments(who, arguments, also=(*own, *also))
    scaling = arguments.get("scaling", "anchored")
    options.one_of("scaling", scaling, RULES)
    mode = arguments.get("damping_mode", "spectral")
    options.one_of("damping_mode", mode, DAMPING_MODES)
    on_refresh = arguments.get("on_refresh")
    if on_refresh is None:
        on_refresh = "kronecker" if scaling in RESTARTED else "carry"
    options.one_of("on_refresh", on_refresh, ("carry",) if scaling in TORCH_RULES else ("carry", "kronecker"))
    decay = arguments.get("scaling_decay")
    if decay is None:
        decay = DECAYS.get(scaling, SCALING_DECAY)
    options.number("scaling_decay", decay, least=0, below=1)
    betas = arguments.get("betas", (0.9, 0.999))
    options.decays("betas", betas)
    alpha = arguments.get("alpha", 0.99)
    options.number("alpha", alpha, least=0, below=1)
    eps = arguments.get("eps")
    if eps is None:
        eps = 1e-10 if scaling == "adagrad" else 1e-8
    options.number("eps", eps, above=0)
    rule = RULES[scaling](alpha if scaling == "rmsprop" else decay, tuple(betas), eps)
    # N g^2 of a single batch is no scale to divide by, so the diagonal method always averages.
    plain = rule if scaling in (*TORCH_RULES, "anchored", "running") else Running(decay or SCALING_DECAY)
    damp = DAMPING_MODES[mode]
    return Engine(
        model,
        parameters,
        settings,
        EigenMethod(rule, damp, on_refresh),
        EigenMethod(plain, damp, on_refresh),
        state,
    )
