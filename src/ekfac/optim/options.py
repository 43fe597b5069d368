"""The arguments of EKFAC, KFAC and Preconditioner, grouped in dataclasses that check themselves.

Frequently used options are arguments of their own: lr, betas, weight_decay, damping, scaling, refresh_every. The rest
is in :class:`StepSize`, :class:`Refresh`, :class:`Coverage`, :class:`Batch` and :class:`Numerics`. The flat names of
version 0.1, such as ``trust=1.0`` for ``step_size=StepSize(max_change=1.0)``, still work, with a DeprecationWarning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ekfac import checks
from ekfac.curvature.blocks import MAX_FACTOR_DIM
from ekfac.optim.distributed.processes import DEFAULT, Processes

Damping = float | Callable[[int], float]

#: epsilon of EKFAC and Preconditioner: a fraction of each factor's largest eigenvalue; docs/tuning.md has the evidence.
DAMPING = 1e-8
#: The largest lr, decay or damping: anything larger overflows float32 in the first product.
LARGEST = 1e30


@dataclass(frozen=True, repr=False)
class Group:
    """Options that belong together; ``repr`` omits those at their defaults."""

    def __repr__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


@dataclass(frozen=True, repr=False)
class StepSize(Group):
    """What bounds the length of a step besides lr, and weight averaging.

    Attributes:
        average: Hold the running average of the weights in the parameters between steps, from the end of a step to the
            next forward pass with gradients, so that it is what you evaluate and save. It replaces a rate that decays
            to zero. None averages only with the built-in schedule, that is, if neither lr nor decay_steps is set.
        decay_steps: The learning rate decays as lr / sqrt(1 + t / decay_steps) over steps t, unless total_steps is
            known. "auto" is the built-in schedule if no lr is set; None turns the decay off.
        max_change: Bound on the relative change ``|update| / |theta|`` of all L layers' weights together in one step,
            before momentum: each layer's update is shortened to at most max_change / L. None for no bound.
        lr_fraction: The fraction of lr that the first step takes, at most 1, under scaling="anchored". Later steps take
            more while gradients agree with the last direction and less when they point back, up to lr. None for the
            full lr from the start.
        kl_clip: Bound on lr^2 sum g p over all parameters; directions p are shortened to meet it. If p is g / damped s,
            as in the paper, that is twice the KL divergence of the step. None for no bound.
    """

    average: bool | None = None
    decay_steps: float | str | None = "auto"
    max_change: float | None = None
    lr_fraction: float | None = None
    kl_clip: float | None = None

    def __post_init__(self) -> None:
        if self.average is not None:
            checks.flag("average", self.average)
        if self.lr_fraction is not None:
            checks.number("lr_fraction", self.lr_fraction, above=0, most=1)
        if self.decay_steps is not None and self.decay_steps != "auto":
            checks.number("decay_steps", self.decay_steps, above=0)
        for name in ("max_change", "kl_clip"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), above=0)


@dataclass(frozen=True, repr=False)
class Refresh(Group):
    """How bases (inverses) are updated, and from which batches the factors are computed.

    Attributes:
        deterministic: Solve for all bases in full within every ``refresh_every``-th step, as in Algorithm 1. By default
            they are updated between steps, one layer at a time, by orthogonal iteration from the current basis, so that
            no step waits for a solver. Early in training, when bases change fast, they are updated more often.
        factor_decay: Weight of the past in A and B; 0 uses the current batch alone.
        factor_every: Update A and B every ``factor_every`` steps. By default every step until step 20, then every
            ``refresh_every // 4`` steps, after step 300 every ``refresh_every // 2``. For losses with derivatives, once
            in ``refresh_every`` steps.
    """

    deterministic: bool = False
    factor_decay: float = 0.95
    factor_every: int | None = None

    def __post_init__(self) -> None:
        checks.flag("deterministic", self.deterministic)
        checks.number("factor_decay", self.factor_decay, least=0, below=1)
        if self.factor_every is not None:
            checks.integer("factor_every", self.factor_every, least=1)


@dataclass(frozen=True, repr=False)
class Coverage(Group):
    """Which layers get a Kronecker block, and of what form.

    Attributes:
        include: Names or patterns of layers to cover; all by default.
        exclude: Names or patterns of layers to leave to the diagonal method.
        unsupported: "diagonal" trains parameters without a block by the diagonal method; "error" refuses them, as well
            as weights that are also used outside their layers.
        max_factor_dim: A side wider than this is kept diagonal; None for no limit.
        sua: Treat the taps of a convolution as uncorrelated. None does so if it reads more than 512 numbers per
            position, because its factors would otherwise dominate the cost; never with sharing="reduce".
        sharing: "expand" or "reduce": how positions of one example enter A and B.
        basis: "kronecker", or "identity" for the plain diagonal method.
    """

    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] = ()
    unsupported: str = "diagonal"
    max_factor_dim: int | None = MAX_FACTOR_DIM
    sua: bool | None = None
    sharing: str = "expand"
    basis: str = "kronecker"

    def __post_init__(self) -> None:
        checks.one_of("unsupported", self.unsupported, ("diagonal", "error"))
        checks.one_of("sharing", self.sharing, ("expand", "reduce"))
        checks.one_of("basis", self.basis, ("kronecker", "identity"))
        if self.max_factor_dim is not None:
            checks.integer("max_factor_dim", self.max_factor_dim, least=1)
        if self.sua is not None:
            checks.flag("sua", self.sua)
        if self.sua and self.sharing == "reduce":
            raise ValueError("sua=True with sharing='reduce' is not defined. Allowed: sua=True with sharing='expand'")
        if self.include is not None:
            object.__setattr__(self, "include", tuple(checks.patterns("include", self.include)))
        object.__setattr__(self, "exclude", tuple(checks.patterns("exclude", self.exclude)))


@dataclass(frozen=True, repr=False)
class Batch(Group):
    """How the loss treats a batch.

    Attributes:
        reduction: "mean" or "sum": how the loss reduces over examples.
        dim: The dimension of the model's input that counts examples.
        count: A function of the model's arguments that returns the number of examples, if the first tensor among them
            does not show it. By default it is read off that tensor or, if there is none, the first layer's input.
    """

    reduction: str = "mean"
    dim: int = 0
    count: Callable[..., int] | None = None

    def __post_init__(self) -> None:
        checks.one_of("reduction", self.reduction, ("mean", "sum"))
        checks.integer("dim", self.dim, least=0)
        if self.count is not None and not callable(self.count):
            raise ValueError(f"count={checks.shown(self.count)} must be a function of the model's arguments, or None")


@dataclass(frozen=True, repr=False)
class Numerics(Group):
    """Memory and speed.

    Attributes:
        memory_limit: Bound in bytes on temporary tensors while A, B or s* of a layer are computed, not counting
            captured tensors and the sums themselves. At least one example is processed at a time.
        cuda_graphs: Record repeated steps as CUDA graphs, one per batch size.
    """

    memory_limit: int = 2**28
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        checks.integer("memory_limit", self.memory_limit, least=1)
        checks.flag("cuda_graphs", self.cuda_graphs)


#: Arguments that hold a group.
GROUPS: dict[str, type[Group]] = {
    "step_size": StepSize,
    "refresh": Refresh,
    "coverage": Coverage,
    "batch": Batch,
    "numerics": Numerics,
}

#: Flat names of version 0.1 that differ from the field's name.
RENAMED = {
    "lr_fraction": "pace",
    "max_change": "trust",
    "decay_steps": "anneal",
    "reduction": "loss_reduction",
    "dim": "batch_dim",
}

#: Every flat name of version 0.1, with its group and field.
FLAT: dict[str, tuple[str, str]] = {
    RENAMED.get(f.name, f.name): (group, f.name) for group, kind in GROUPS.items() for f in fields(kind)
}

#: Flat names of rule options in version 0.1, and the rules' field names.
RULE_OPTIONS = {"scaling_decay": "decay", "on_refresh": "restart", "alpha": "alpha", "eps": "eps"}

#: The paper's settings that differ from the defaults: ``EKFAC(model, **PAPER)`` is its EKFAC-ra.
PAPER: dict[str, Any] = {
    "scaling": "running",
    "lr": 0.01,
    "damping": 1e-3,
    "damping_mode": "plain",
    "refresh_every": 50,
    "refresh": Refresh(deterministic=True, factor_every=1),
    "step_size": StepSize(decay_steps=None),
}

#: Arguments of EKFAC and KFAC that are defaults of parameter groups.
UPDATE = ("lr", "weight_decay", "damping", "momentum", "nesterov", "decoupled_weight_decay", "maximize")


@dataclass(frozen=True)
class EngineOptions:
    """The engine's options."""

    refresh_every: int | None = None
    refresh: Refresh = Refresh()
    coverage: Coverage = Coverage()
    batch: Batch = Batch()
    numerics: Numerics = Numerics()
    grad_scaler: torch.amp.GradScaler | None = field(default=None, compare=False)
    process_group: Any = field(default=DEFAULT, compare=False)
    #: The ranks that share statistics.
    processes: Processes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.refresh_every is not None:
            checks.integer("refresh_every", self.refresh_every, least=1)
        for name in ("refresh", "coverage", "batch", "numerics"):
            check_group(name, getattr(self, name))
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "scale"):
            raise ValueError(f"grad_scaler={checks.shown(self.grad_scaler)} must be a torch.amp.GradScaler or None")
        object.__setattr__(self, "processes", Processes(self.process_group))

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> EngineOptions:
        """Return the options among the arguments of an optimizer."""
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.init})


def check_group(name: str, value: Any) -> None:
    """Require an argument to be an instance of its group."""
    if not isinstance(value, GROUPS[name]):
        kind = GROUPS[name].__name__
        raise TypeError(f"{name}={checks.shown(value)} must be a {kind}, e.g. {name}={kind}()")


#: What ``locals()`` holds at the beginning of an optimizer's ``__init__`` besides its keyword arguments.
NOT_KEYWORDS = ("self", "model", "old", "__class__")


def arguments_of(who: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a constructor; put those with flat names into groups, with a DeprecationWarning.

    Args:
        who: The class being constructed, for messages.
        found: ``locals()`` at the beginning of its ``__init__``, whose ``**old`` holds the flat names.
    """
    given = {name: value for name, value in found.items() if name not in NOT_KEYWORDS}
    known, old = set(given), found["old"]
    allowed = {name for name, (group, _) in FLAT.items() if group in known}
    allowed |= set(RULE_OPTIONS) if "scaling" in known else set()
    if unknown := sorted(set(old) - allowed):
        names = ", ".join(sorted(known | allowed))
        raise TypeError(f"{who} has no argument {', '.join(map(repr, unknown))}. Allowed: {names}")
    arguments = into_groups({**given, **old})
    for name in GROUPS.keys() & arguments.keys():
        check_group(name, arguments[name])
    instead: dict[str, list[str]] = {}
    for name in old:
        group, option = FLAT[name] if name in FLAT else ("scaling", RULE_OPTIONS[name])
        kind = GROUPS[group].__name__ if name in FLAT else "<rule>"
        instead.setdefault(f"{group}={kind}", []).append(f"{option}=...")
    if instead:
        better = ", ".join(f"{start}({', '.join(options)})" for start, options in instead.items())
        warnings.warn(f"{', '.join(old)}: write {who}(model, {better})", DeprecationWarning, stacklevel=3)
    return arguments


def into_groups(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Move flat arguments into their groups; leave all others, such as options of rules."""
    found = {name: value for name, value in arguments.items() if name not in FLAT}
    for name in (n for n in arguments if n in FLAT):
        group, option = FLAT[name]
        before = found.get(group, GROUPS[group]())
        check_group(group, before)
        try:
            found[group] = replace(before, **{option: arguments[name]})
        except (ValueError, TypeError) as error:  # it has the field's name; the caller used the flat one
            raise type(error)(str(error).replace(option, name)) from None
    return found


def out_of_groups(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as plain data: every field of a group that is not at its default, by its flat name."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if not isinstance(value, Group):
            found[name] = value
            continue
        for f in fields(value):
            if getattr(value, f.name) != f.default:
                found[RENAMED.get(f.name, f.name)] = getattr(value, f.name)
    return found


def damping(name: str, value: Any, step: int = 0) -> float:
    """Require a positive number, or a function of the step that returns one; return its value at ``step``."""
    if isinstance(value, type):
        raise ValueError(
            f"{name}={value!r} is a class. Allowed: a number > 0, a function of the step, AdaptiveDamping()"
        )
    if callable(value):
        current = value(step)
        checks.number(f"{name}({step})", current, above=0, most=LARGEST)
        return float(current)
    checks.number(name, value, above=0, most=LARGEST)
    return float(value)
