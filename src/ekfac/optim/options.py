"""The arguments that EKFAC, KFAC and Preconditioner share, and checks of those that are all optimizers' own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch

from ekfac.checks import decays as decays
from ekfac.checks import flag as flag
from ekfac.checks import integer as integer
from ekfac.checks import number as number
from ekfac.checks import one_of as one_of
from ekfac.checks import patterns as patterns
from ekfac.curvature.blocks import MAX_FACTOR_DIM
from ekfac.optim.distributed.processes import DEFAULT, Processes


def damping(name: str, value: Any, step: int = 0) -> float:
    """A positive number, or a function of the step that gives one; returns the number for ``step``."""
    if isinstance(value, type):
        raise ValueError(
            f"{name}={value!r} is a class. Allowed: a number > 0, a function of the step, AdaptiveDamping()"
        )
    if callable(value):
        current = value(step)
        number(f"{name}({step})", current, above=0)
        return float(current)
    number(name, value, above=0)
    return float(value)


def keywords(function: Callable[..., Any]) -> set[str]:
    """The names of a function's keyword arguments."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


Damping = float | Callable[[int], float]


class CaptureArguments(TypedDict, total=False):
    """Arguments that EKFAC, KFAC and Preconditioner share: what is captured, and when bases are renewed.

    Attributes:
        refresh_every: Renew the bases (inverses) every so many applied steps; sides wider than 1,024 more rarely.
            Default 20 on a GPU, 50 on a CPU.
        deterministic: Solve in full for all bases (inverses) within every ``refresh_every``-th step, as Algorithm 1 has
            it. By default they are renewed between steps, one layer after another, by orthogonal iteration from the
            basis in use (and soon after the start, when they change fast), so that no step waits for a solver.
        factor_decay: Weight of the past in A and B; 0 uses the current batch alone. Default 0.95.
        factor_every: Take A and B from every so many steps' batches. Default 1 until step 20, then
            ``refresh_every // 4``, at least 1, layers by turns in up to four shares (at once if ``deterministic``).
        sharing: "expand" (default) or "reduce", how positions of one example enter A and B.
        sua: Take the taps of a convolution as uncorrelated. Default None: where it reads more than 512 numbers at a
            position, whose factors would cost more than all else; never with sharing="reduce".
        loss_reduction: "mean" (default) or "sum", over examples.
        batch_dim: The dimension of the model's input that counts examples. Default 0.
        include: Names or patterns of layers to cover; all by default.
        exclude: Names or patterns of layers to leave to the diagonal method.
        unsupported: "diagonal" (default), or "error" to refuse parameters that no block covers.
        max_factor_dim: A side wider than this is kept diagonal; None for no limit. Default 4,096.
        memory_limit: Bytes that temporary tensors may take at a time while A, B or s* of a layer are computed, beside
            what was captured and the sums themselves. One example at a time is the least. Default 256 MiB.
        cuda_graphs: Capture repeated steps in CUDA graphs (one a batch size). Default True.
        grad_scaler: The ``torch.amp.GradScaler`` in use, so that statistics are unscaled.
        process_group: The ranks that train replicas of the model and share statistics; each owns some of the blocks.
            By default the default group, if torch.distributed runs. None for none: this process is on its own.
    """

    refresh_every: int | None
    deterministic: bool
    factor_decay: float
    factor_every: int | None
    sharing: str
    sua: bool | None
    loss_reduction: str
    batch_dim: int
    include: str | Sequence[str] | None
    exclude: str | Sequence[str]
    unsupported: str
    max_factor_dim: int | None
    memory_limit: int
    cuda_graphs: bool
    grad_scaler: torch.amp.GradScaler | None
    process_group: Any


class CurvatureArguments(CaptureArguments, total=False):
    """Arguments that EKFAC and Preconditioner share besides those of :class:`CaptureArguments`.

    Attributes:
        scaling: "belief" (default), "anchored", "running" (the paper's EKFAC-ra), "per_example" (its EKFAC),
            "kronecker" (KFAC in its eigenbasis), or torch's "adam", "rmsprop", "adagrad" in the basis; or a rule itself
            (see :mod:`ekfac.optim.methods.rules`).
        damping_mode: "spectral" (a share of each factor's largest eigenvalue, default), "relative" (of the layer's
            mean s), "plain" (added to s) or "factored" (the paper's appendix). Torch's rules know no damping, only
            ``eps``.
        scaling_decay: Weight of the past in s. Default 0.98 for "anchored", 0.95 for "running", 0 for "per_example".
        alpha: Decay of "rmsprop". Default 0.99.
        eps: What "adam", "rmsprop" (1e-8) and "adagrad" (1e-10) add to the square root.
        on_refresh: "kronecker" restarts s at S_B x S_A in a new basis (default of "anchored" and "running"), "carry"
            takes it there (default of the others).
        basis: "kronecker" (default), or "identity" for the plain diagonal method.
    """

    scaling: Any
    damping_mode: str
    scaling_decay: float | None
    alpha: float
    eps: float | None
    on_refresh: str | None
    basis: str


#: epsilon of EKFAC and Preconditioner: a share of each factor's largest eigenvalue; docs/tuning.md has the evidence.
DAMPING = 1e-8

#: What the paper does, where it differs from the defaults: ``EKFAC(model, **PAPER)`` is its EKFAC-ra.
PAPER: dict[str, Any] = {
    "scaling": "running",
    "lr": 0.01,
    "damping": 1e-3,
    "damping_mode": "plain",
    "refresh_every": 50,
    "factor_every": 1,
    "deterministic": True,
    "anneal": None,
    "trust": None,
    "pace": None,
}


@dataclass(frozen=True)
class EngineOptions:
    """The checked form of :class:`CaptureArguments`, with its defaults."""

    refresh_every: int | None = None
    deterministic: bool = False
    factor_decay: float = 0.95
    factor_every: int | None = None
    sharing: str = "expand"
    sua: bool | None = None
    basis: str = "kronecker"
    loss_reduction: str = "mean"
    batch_dim: int = 0
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] = ()
    unsupported: str = "diagonal"
    max_factor_dim: int | None = MAX_FACTOR_DIM
    memory_limit: int = 2**28
    cuda_graphs: bool = True
    grad_scaler: torch.amp.GradScaler | None = None
    process_group: Any = DEFAULT

    def __post_init__(self) -> None:
        if self.refresh_every is not None:
            integer("refresh_every", self.refresh_every, least=1)
        flag("deterministic", self.deterministic)
        flag("cuda_graphs", self.cuda_graphs)
        number("factor_decay", self.factor_decay, least=0, below=1)
        if self.factor_every is not None:
            integer("factor_every", self.factor_every, least=1)
        one_of("sharing", self.sharing, ("expand", "reduce"))
        if self.sua is None and self.sharing == "reduce":
            object.__setattr__(self, "sua", False)
        if self.sua is not None:
            flag("sua", self.sua)
        one_of("basis", self.basis, ("kronecker", "identity"))
        one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        integer("batch_dim", self.batch_dim, least=0)
        one_of("unsupported", self.unsupported, ("diagonal", "error"))
        if self.max_factor_dim is not None:
            integer("max_factor_dim", self.max_factor_dim, least=1)
        integer("memory_limit", self.memory_limit, least=1)
        if self.sua and self.sharing == "reduce":
            raise ValueError("sua=True with sharing='reduce' is not defined. Allowed: sua=True with sharing='expand'")
        if self.include is not None:
            object.__setattr__(self, "include", patterns("include", self.include))
        object.__setattr__(self, "exclude", patterns("exclude", self.exclude))
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "scale"):
            raise ValueError(f"grad_scaler={self.grad_scaler!r} must be a torch.amp.GradScaler or None")
        Processes(self.process_group)

    @property
    def processes(self) -> Processes:
        """The ranks that share statistics."""
        return Processes(self.process_group)

    @classmethod
    def from_arguments(cls, who: str, arguments: dict[str, Any], also: Iterable[str] = ()) -> EngineOptions:
        """Take what belongs here from keyword arguments; unknown names are refused with a list of the known.

        Args:
            who: The class that they were given to.
            arguments: The arguments.
            also: Names that the class knows besides.
        """
        own = {f.name for f in fields(cls)}
        unknown = sorted(set(arguments) - own - set(also))
        if unknown:
            raise TypeError(
                f"{who} has no argument {', '.join(map(repr, unknown))}. Allowed: {', '.join(sorted(own | set(also)))}"
            )
        return cls(**{name: value for name, value in arguments.items() if name in own})
