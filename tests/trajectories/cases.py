"""The table of cases: every rule on every network, and every option and way of training on one that it matters for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ekfac import PAPER, AdaptiveDamping


@dataclass(frozen=True)
class Case:
    """One trajectory.

    Attributes:
        network: A name of ``networks.NETWORKS``.
        optimizer: "EKFAC", "KFAC", or "Preconditioner", which torch's SGD follows.
        options: Keyword arguments of the optimizer.
        loop: A name of ``run.LOOPS``: what is done with a batch.
        steps: How many.
        saved: Before which step a full record holds a checkpoint; None for none.
    """

    network: str = "mlp"
    optimizer: str = "EKFAC"
    options: Mapping[str, Any] = field(default_factory=dict)
    loop: str = "plain"
    steps: int = 13
    saved: int | None = None


NETWORKS = ("mlp", "conv", "batchnorm", "transformer", "recurrent")
#: Rules beside the default, with what makes them learn on these networks; damping is that of their kind.
RULES: dict[str, dict[str, Any]] = {
    "running": {"lr": 0.05, "damping": 1e-2, "damping_mode": "plain"},
    "per_example": {"lr": 0.05, "damping": 1e-2, "damping_mode": "plain"},
    "kronecker": {"lr": 0.05, "damping": 1e-2, "damping_mode": "factored"},
    "adam": {"eps": 1e-6},
    "rmsprop": {"eps": 1e-6},
    "adagrad": {"lr": 0.03, "eps": 1e-6},
}
PAPER_4 = {**PAPER, "refresh_every": 4, "lr": 0.05, "damping": 1e-2}
KFAC_4 = {"refresh_every": 4, "lr": 0.05, "damping": 1e-2}
PLAIN = {key: PAPER_4[key] for key in ("scaling", "damping", "damping_mode", "refresh_every")} | {"deterministic": True}


def rules() -> dict[str, Case]:
    """Every rule and every optimizer on every kind of network, and the default on two kinds more."""
    found = {}
    for network in (*NETWORKS, "tied", "transposed"):
        found[f"default, {network}"] = Case(network, steps=15, saved=8)
        found[f"paper, {network}"] = Case(network, options={**PAPER_4, "momentum": 0.5}, saved=8)
        found[f"kfac, {network}"] = Case(network, "KFAC", {**KFAC_4, "momentum": 0.5}, saved=8)
    for network in NETWORKS:
        found[f"default, refresh_every=3, {network}"] = Case(network, options={"refresh_every": 3})
        found[f"preconditioner, {network}"] = Case(network, "Preconditioner", PLAIN, saved=6)
        for rule, options in RULES.items():
            found[f"{rule}, {network}"] = Case(network, options={"scaling": rule, "refresh_every": 3, **options})
    return found


def options() -> dict[str, Case]:
    """One option at a time, beside the default or the paper's settings."""
    default: dict[str, tuple[str, dict[str, Any]]] = {
        "deterministic": ("mlp", {"deterministic": True, "refresh_every": 4}),
        "deterministic, refresh_every=1": ("conv", {"deterministic": True, "refresh_every": 1}),
        "damping_mode=relative": ("mlp", {"damping_mode": "relative", "damping": 1e-3}),
        "damping_mode=plain": ("mlp", {"damping_mode": "plain", "damping": 1e-3}),
        "damping_mode=factored": ("mlp", {"damping_mode": "factored", "damping": 1e-3}),
        "on_refresh=carry": ("mlp", {"on_refresh": "carry", "refresh_every": 3}),
        "sua": ("conv", {"sua": True, "refresh_every": 4}),
        "sharing=reduce": ("conv", {"sharing": "reduce", "refresh_every": 4}),
        "momentum": ("mlp", {"momentum": 0.8, "refresh_every": 4}),
        "nesterov": ("mlp", {"momentum": 0.8, "nesterov": True, "refresh_every": 4}),
        "decoupled weight decay": ("mlp", {"weight_decay": 1.0, "refresh_every": 4}),
        "l2": ("mlp", {"weight_decay": 0.1, "decoupled_weight_decay": False, "refresh_every": 4}),
        "kl_clip": ("mlp", {"kl_clip": 1e-5, "refresh_every": 4}),
        "no pace": ("mlp", {"pace": None, "refresh_every": 4}),
        "trust": ("mlp", {"trust": 0.01, "pace": None, "lr": 0.1, "refresh_every": 4}),
        "anneal": ("mlp", {"anneal": 5.0, "pace": None, "refresh_every": 4}),
        "betas": ("mlp", {"betas": (0.5, 0.99), "refresh_every": 4}),
        "scaling_decay": ("mlp", {"scaling_decay": 0.7, "refresh_every": 4}),
        "factor_decay": ("mlp", {"factor_decay": 0.5, "refresh_every": 4}),
        "factor_every": ("mlp", {"factor_every": 3, "refresh_every": 4}),
        "identity": ("mlp", {"basis": "identity"}),
        "max_factor_dim": ("conv", {"max_factor_dim": 10, "refresh_every": 4}),
        "exclude": ("mlp", {"exclude": ["2"], "refresh_every": 4}),
        "include": ("transformer", {"include": ["up", "down", "tokens"], "refresh_every": 4}),
        "batch_dim": ("batch second", {"batch_dim": 1, "refresh_every": 4}),
        "damping function": ("mlp", {"damping": lambda step: 0.1 / (1 + step), "refresh_every": 4}),
    }
    paper: dict[str, tuple[str, dict[str, Any]]] = {
        "as it is": ("mlp", dict(PAPER)),
        "refresh_every=1": ("mlp", {"refresh_every": 1}),
        "warm": ("conv", {"deterministic": False}),
        "damping_mode=factored": ("conv", {"damping_mode": "factored"}),
        "damping_mode=relative": ("conv", {"damping_mode": "relative", "damping": 0.1}),
        "damping_mode=spectral": ("conv", {"damping_mode": "spectral"}),
        "on_refresh=carry": ("conv", {"on_refresh": "carry"}),
        "on_refresh=carry, warm": ("transformer", {"on_refresh": "carry", "deterministic": False}),
        "factor_decay=0": ("mlp", {"factor_decay": 0.0}),
        "factor_every=2": ("mlp", {"factor_every": 2, "refresh_every": 3}),
        "sua": ("conv", {"sua": True}),
        "sua, warm": ("conv", {"sua": True, "deterministic": False}),
        "sharing=reduce": ("conv", {"sharing": "reduce"}),
        "nesterov": ("conv", {"momentum": 0.8, "nesterov": True}),
        "decoupled weight decay": ("conv", {"weight_decay": 0.5}),
        "l2": ("conv", {"weight_decay": 0.05, "decoupled_weight_decay": False}),
        "l2, per_example": ("mlp", {"weight_decay": 0.05, "decoupled_weight_decay": False, "scaling": "per_example"}),
        "l2, adam": ("mlp", {"weight_decay": 0.05, "decoupled_weight_decay": False, "scaling": "adam", "eps": 1e-6}),
        "kl_clip": ("conv", {"kl_clip": 1e-3, "momentum": 0.5}),
        "trust": ("conv", {"trust": 0.05}),
        "per_example, averaged": ("conv", {"scaling": "per_example", "scaling_decay": 0.8}),
        "per_example, restarted": ("conv", {"scaling": "per_example", "scaling_decay": 0.8, "on_refresh": "kronecker"}),
        "per_example, reduce": ("recurrent", {"scaling": "per_example", "sharing": "reduce"}),
        # Summed over places the gradients of keys are zero, as softmax does not see what all keys have in common.
        "reduce, embeddings": ("transformer", {"sharing": "reduce", "exclude": ["key"]}),
        "per_example, sua": ("conv", {"scaling": "per_example", "sua": True}),
        "per_example, little memory": ("conv", {"scaling": "per_example", "memory_limit": 2**15}),
        "adam, carried": ("conv", {"scaling": "adam", "betas": (0.8, 0.9), "eps": 1e-6, "lr": 0.01}),
        "rmsprop, alpha": ("conv", {"scaling": "rmsprop", "alpha": 0.8, "eps": 1e-6, "lr": 0.01}),
        "identity": ("mlp", {"basis": "identity"}),
        "max_factor_dim": ("batchnorm", {"max_factor_dim": 7}),
    }
    kfac: dict[str, tuple[str, dict[str, Any]]] = {
        "as it is": ("mlp", {"refresh_every": 50, "lr": 0.01, "damping": 1e-3}),
        "no pi": ("mlp", {"pi_correction": False}),
        "no pi, conv": ("conv", {"pi_correction": False}),
        "deterministic": ("conv", {"deterministic": True}),
        "sua": ("conv", {"sua": True}),
        "sharing=reduce": ("conv", {"sharing": "reduce"}),
        "max_factor_dim": ("mlp", {"max_factor_dim": 7}),
        "kl_clip": ("conv", {"kl_clip": 1e-3}),
        "nesterov, weight decay": ("conv", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.5}),
        "l2": ("conv", {"weight_decay": 0.05, "decoupled_weight_decay": False}),
        "damping function": ("conv", {"damping": lambda step: 0.1 / (1 + step)}),
    }
    return {
        **{f"default: {name}": Case(network, options=own) for name, (network, own) in default.items()},
        **{f"paper: {name}": Case(network, options={**PAPER_4, **own}) for name, (network, own) in paper.items()},
        **{f"kfac: {name}": Case(network, "KFAC", {**KFAC_4, **own}) for name, (network, own) in kfac.items()},
        "preconditioner: as it is": Case("conv", "Preconditioner"),
        "preconditioner: per_example": Case("conv", "Preconditioner", {**PLAIN, "scaling": "per_example"}),
    }


def ways() -> dict[str, Case]:
    """Ways of training that are not one backward pass and one step, each with three optimizers."""
    small = {"refresh_every": 4}
    found = {}
    for loop in ("accumulated", "sizes", "clipped", "frozen", "statistics", "groups", "schedule", "skipped", "dropped"):
        saved = 8 if loop in ("frozen", "groups", "clipped") else None
        found[f"default, {loop}"] = Case("conv", options=small, loop=loop, saved=saved)
        found[f"paper, {loop}"] = Case("mlp", options=PAPER_4, loop=loop, saved=saved)
        found[f"kfac, {loop}"] = Case("mlp", "KFAC", KFAC_4, loop=loop, saved=saved)
    for loop in ("accumulated", "sizes", "clipped", "statistics"):
        per_example = {**PAPER_4, "scaling": "per_example"}
        found[f"per_example, {loop}"] = Case("conv", options=per_example, loop=loop)
        found[f"preconditioner, {loop}"] = Case("mlp", "Preconditioner", PLAIN, loop=loop)
    for name, own in {"default": small, "paper": PAPER_4, "per_example": {**PAPER_4, "scaling": "per_example"}}.items():
        found[f"{name}, sum"] = Case("conv", options={**own, "loss_reduction": "sum"}, loop="summed")
        found[f"{name}, maximize"] = Case("conv", options={**own, "maximize": True}, loop="negated")
        found[f"{name}, grad_scaler"] = Case("mlp", options=own, loop="scaled")
    adaptive = {
        "paper": Case(options={**PAPER_4, "momentum": 0.5}),
        "paper, long steps": Case("conv", options={**PAPER_4, "lr": 0.8}),
        "paper, warm": Case("conv", options={**PAPER_4, "deterministic": False}),
        "kfac": Case(optimizer="KFAC", options=KFAC_4),
    }
    for name, case in adaptive.items():
        given = {**case.options, "damping": AdaptiveDamping(start=1e-2, every=3)}
        found[f"{name}, adaptive damping"] = Case(case.network, case.optimizer, given, "closure", saved=8)
    # Batches smaller than the layers are wide, whose gradients are taken from their rows; large ones come before them.
    for name, own in {"default": small, "paper": PAPER_4, "per_example": {**PAPER_4, "scaling": "per_example"}}.items():
        found[f"{name}, rows"] = Case("wide", options=own, loop="shrinking")
    found["kfac, rows"] = Case("wide", "KFAC", KFAC_4, loop="shrinking")
    found["default, seeded"] = Case("mlp", options=small, loop="seeded")
    # Beyond step 300 factors are taken from some batches only, layers by turns.
    found["default, long"] = Case(
        "mlp", options={"refresh_every": 50, "weight_decay": 0.0}, loop="cycling", steps=312, saved=304
    )
    return found


CASES: dict[str, Case] = {**rules(), **options(), **ways()}
