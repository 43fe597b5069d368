"""Optimizers by name, for the lab; plugins can add to them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

import ekfac
from ekfac.lab import rivals
from ekfac.lab.registry import LabError, Registry
from ekfac.lab.schedule_free import schedule_free
from ekfac.optim.options import FLAT, GROUPS, into_groups, out_of_groups


class Trains(Protocol):
    """The interface that the training loop needs; every ``torch.optim.Optimizer`` has it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters, each with its ``lr``."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def step(self) -> Any:
        """Update the parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return all state as plain data."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state."""


@dataclass(frozen=True)
class OptimizerEntry:
    """How to construct an optimizer, with the lab's default options."""

    build: Callable[..., Trains]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""


OPTIMIZERS: Registry[OptimizerEntry] = Registry("optimizer", plugins=True)


def register_optimizer(
    name: str, build: Callable[..., Trains], defaults: Mapping[str, Any] | None = None, about: str = ""
) -> OptimizerEntry:
    """Register an optimizer for every command of the lab.

    Args:
        name: The name.
        build: ``build(model, **options)`` returns the optimizer. Its signature defines the options.
        defaults: Options to use unless the task or the user sets them.
        about: One line for listings.
    """
    return OPTIMIZERS.add(name, OptimizerEntry(build, dict(defaults or {}), about))


def build_optimizer(name: str, model: nn.Module, options: Mapping[str, Any]) -> Trains:
    """Construct an optimizer by name.

    Raises:
        LabError: If the name or an option is unknown, or the optimizer refuses a value.
    """
    check_options(name, options)
    try:
        return OPTIMIZERS.get(name).build(model, **options)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        # Other libraries' optimizers do not always name the value that they refuse.
        named = any(option in str(error) for option in options)
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise LabError(f"optimizer {name}: {error}{'' if named or not given else f' ({given})'}") from error


def check_options(name: str, options: Iterable[str]) -> None:
    """Refuse options that an optimizer does not have.

    Raises:
        LabError: If the name of the optimizer or of an option is unknown.
    """
    known = _options(OPTIMIZERS.get(name).build)
    for option in options:
        if known is not None and option not in known:
            raise LabError(f"optimizer {name} has no option {option!r}; it has: {', '.join(sorted(known))}")


def _options(build: Callable[..., Trains]) -> set[str] | None:
    """Return the option names in a signature, or ``None`` if it takes any."""
    parameters = list(inspect.signature(build).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}


def of_parameters(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Trains]:
    """Turn a torch optimizer, constructed from parameters, into a ``build`` that takes the model."""

    def build(model: nn.Module, **options: Any) -> Trains:
        return optimizer([p for p in model.parameters() if p.requires_grad], **options)

    signature = inspect.signature(optimizer)
    listed = [p for p in signature.parameters.values() if p.name not in ("capturable", "differentiable")]
    build.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return build


def of_model(optimizer: Callable[..., Trains], *step_size: str) -> Callable[..., Trains]:
    """Turn an optimizer of the library into a ``build`` whose options are plain data, without groups.

    Args:
        optimizer: EKFAC or KFAC.
        *step_size: Options of ``StepSize`` to list with the optimizer's own, by their plain names.
    """

    def build(model: nn.Module, **options: Any) -> Trains:
        with warnings.catch_warnings():  # rules' options also have their old names
            warnings.simplefilter("ignore", DeprecationWarning)
            return optimizer(model, **into_groups(options))

    signature = inspect.signature(optimizer)
    hidden = {*GROUPS, "scaling", "damping_mode", "refresh_every", "grad_scaler"}
    listed = [p for p in signature.parameters.values() if p.name not in hidden]
    default = signature.parameters["step_size"].default
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(default, FLAT[name][1]))
        for name in step_size
    ]
    listed[-1:-1] = more
    build.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return build


EKFAC = of_model(ekfac.EKFAC, "anneal", "pace", "trust", "kl_clip")
#: With the defaults of an earlier version made explicit, as in recorded runs.
PAPER = {"pace": None, "trust": None, **out_of_groups(ekfac.PAPER)}

register_optimizer("sgd", of_parameters(torch.optim.SGD), {"lr": 0.01, "momentum": 0.9}, "SGD with momentum 0.9")
register_optimizer("adam", of_parameters(torch.optim.Adam), {"lr": 1e-3}, "Adam")
register_optimizer("adamw", of_parameters(torch.optim.AdamW), {"lr": 1e-3}, "AdamW")
register_optimizer("muon", rivals.muon, {"lr": 3e-3}, "Muon for weight matrices, AdamW for the rest")
register_optimizer("soap", rivals.soap, {"lr": 3e-3}, "SOAP, from the package pytorch_optimizer")
register_optimizer("schedule-free", schedule_free, {"lr": 2.5e-3}, "Schedule-Free AdamW")
register_optimizer(
    "kfac",
    of_model(ekfac.KFAC, "kl_clip"),
    {"lr": 0.1, "damping": 0.1, "momentum": 0.9, "kl_clip": 1.0},
    "KFAC, inverse form",
)
register_optimizer(
    "ekfac",
    EKFAC,
    {**PAPER, "scaling": "per_example", "damping": 1e-2},
    "EKFAC: second moments of each batch's examples",
)
register_optimizer(
    "ekfac-ra",
    EKFAC,
    PAPER,
    "EKFAC-ra: running average of squared gradients",
)
register_optimizer("ekfac-default", EKFAC, about="EKFAC(model) with the library's own defaults")
