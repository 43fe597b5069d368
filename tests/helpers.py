"""What the tests of the optimizers share.

Small problems, and the comparison of an optimizer with the oracle.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oracle import Loss, OracleEKFAC
from paper import EKFAC, KFAC

Batch = tuple[Tensor, Tensor]


def jittered(model: nn.Module, scale: float = 0.3) -> nn.Module:
    """The model in float64 with every parameter moved off its special starting value (ones, zeros)."""
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * scale)
    return model


def half_square(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Squared error, summed over an example's outputs, then averaged or summed over examples."""
    total = 0.5 * (output - target).square().sum()
    return total / len(output) if reduction == "mean" else total


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return half_square(model(batch[0]), batch[1])


def sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    return half_square(model(batch[0]), batch[1], "sum")


LOSSES: dict[str, Loss] = {"mean": mean_loss, "sum": sum_loss}


def mlp(*widths: int, bias: bool = True, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (w_in, w_out) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(w_in, w_out, bias=bias)] + ([activation()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers).double()


def batches_for(model: nn.Module, shape: Sequence[int], n: int = 8, steps: int = 3, seed: int = 7) -> list[list[Batch]]:
    """One batch a step: random inputs, and targets of the shape that the model gives out."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(steps):
        x = torch.randn(n, *shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            like = copy.deepcopy(model).eval()(x)
        out.append([(x, torch.randn(like.shape, dtype=torch.float64, generator=generator))])
    return out


def bases_of(opt: torch.optim.Optimizer, model: nn.Module) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """The bases that an optimizer uses now, by the parameter that they are kept under."""
    found = {}
    for name, p in model.named_parameters():
        state = opt.state.get(p, {})
        if "S_A" in state:
            found[name] = tuple(None if state.get(k) is None else state[k].clone() for k in ("U_A", "U_B"))
    return found


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_weights(
    one: Mapping[str, Tensor], two: Mapping[str, Tensor], tolerance: float, what: str = "weights"
) -> None:
    """Equal to ``tolerance``, relative to the largest weight of the parameter where that exceeds one."""
    assert one.keys() == two.keys()
    for name in one:
        scale = max(1.0, float(two[name].abs().max()) if two[name].numel() else 1.0)
        error = float((one[name] - two[name]).abs().max()) if two[name].numel() else 0.0
        assert math.isfinite(error) and error <= tolerance * scale, f"{what}: {name} is off by {error:.3g}"


def backward(model: nn.Module, loss: Loss, micro_batches: Sequence[Any]) -> None:
    for batch in micro_batches:
        loss(model, batch).backward()


def make_pair(
    model: nn.Module, loss: Loss, oracle_model: nn.Module | None = None, **options: Any
) -> tuple[torch.optim.Optimizer, OracleEKFAC]:
    """An optimizer on the model, and the oracle on a copy of it. ``optimizer`` names KFAC or EKFAC, or is a class."""
    kind = options.pop("optimizer", "EKFAC")
    kind = {"EKFAC": EKFAC, "KFAC": KFAC}.get(kind, kind)
    groups = options.pop("groups", None)  # [(names, overrides), ...]
    told = options.pop("oracle_options", {})  # what the oracle is told in place of the optimizer's own options
    oracle_options = {k: v for k, v in options.items() if v is not None and k not in ("anneal", "average")} | told
    per_parameter: dict[str, Any] = {}
    optimizer_options = {k: v for k, v in options.items() if k != "count"}
    if groups is not None:
        named = dict(model.named_parameters())
        optimizer_options["params"] = [{"params": [named[n] for n in names], **own} for names, own in groups]
        per_parameter = {name: own for names, own in groups for name in names}
    if kind is KFAC:
        oracle_options["scaling"] = "inverse"
    twin = copy.deepcopy(model) if oracle_model is None else oracle_model
    oracle = OracleEKFAC(twin, loss, per_parameter=per_parameter, **oracle_options)
    return kind(model, **optimizer_options), oracle


def compare_with_oracle(
    model: nn.Module,
    loss: Loss,
    steps: Sequence[Sequence[Any]],
    *,
    tolerance: float = 1e-9,
    transform: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    oracle_model: nn.Module | None = None,
    oracle_loss: Loss | None = None,
    **options: Any,
) -> tuple[torch.optim.Optimizer, OracleEKFAC]:
    """Train by the optimizer and by the oracle: weights and state must agree after every step.

    ``transform`` is what a user does to ``.grad`` between backward and step. ``oracle_model`` computes the
    same function where the model under test cannot be observed as it is (checkpointing, say).
    """
    opt, oracle = make_pair(model, loss, oracle_model, **options)
    oracle.loss = oracle_loss or loss
    for number, micro_batches in enumerate(steps):
        opt.zero_grad()
        backward(model, loss, micro_batches)
        if transform is not None:
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            for name, g in transform({k: v.clone() for k, v in grads.items()}).items():
                grads[name].copy_(g)
        opt.step()
        bases = None if oracle.scaling == "inverse" else bases_of(opt, model)
        expected = oracle.step(micro_batches, bases=bases, transform=transform)
        got = {name: p for name, p in parameters_of(model).items() if name in expected}
        assert_same_weights(got, expected, tolerance, f"weights after step {number + 1}")
        assert_same_state(opt, model, oracle)
    return opt, oracle


def assert_same_state(
    opt: torch.optim.Optimizer, model: nn.Module, oracle: OracleEKFAC, tolerance: float = 1e-10
) -> None:
    """Factors' running averages and, where the rule keeps it as it is used, s."""
    named = dict(model.named_parameters())
    for key, block in oracle.blocks.items():
        state = opt.state[named[key]]
        # Factors of the current batch alone are needed, and taken, only when a basis is renewed.
        fresh = oracle.factor_decay > 0 or block.fresh
        for name, expected in (("A", block.mean_a), ("B", block.mean_b)) if fresh else ():
            got = state[name] / state["factor_weight"]
            if got.dim() == 2:
                expected = torch.diagonal(expected, dim1=-2, dim2=-1)
            assert got.shape == expected.shape, f"{name} of {key}: {got.shape}, not {expected.shape}"
            error = (got - expected).abs().max()
            assert error <= tolerance * expected.abs().max() + 1e-14, f"{name} of {key} is off by {error:.3g}"
        if oracle.scaling in ("running", "kronecker"):
            assert block.s is not None
            torch.testing.assert_close(
                state["s"], block.s, rtol=100 * tolerance, atol=tolerance * float(block.s.max() + 1)
            )
