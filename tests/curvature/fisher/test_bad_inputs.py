"""Every bad input gets an error that names the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac import fisher

X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0, 1, 1, 0])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def frozen() -> nn.Module:
    network = model()
    for p in network.parameters():
        p.requires_grad_(False)
    return network


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Compares every example with every other."""
    return torch.cdist(output, output).sum() / len(output)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no data": ({"batches": []}, ValueError, "no data"),
    "no data, full": ({"batches": [], "approximation": "full"}, ValueError, "no data"),
    "an empty batch": ({"batches": [(X[:0], Y[:0])]}, ValueError, "at least one example"),
    "an iterator": ({"batches": iter([(X, Y)])}, ValueError, r"read only once.*DataLoader or a\s+list"),
    "a batch of another kind": ({"batches": ["text"]}, TypeError, r"a batch is a str, but must be \(inputs, target\)"),
    "a batch without labels": ({"batches": [X]}, ValueError, "no target"),
    "two targets": ({"batches": [{"x": X, "labels": Y, "y": Y}]}, ValueError, "labels, y"),
    "an unknown loss": ({"loss": "poisson"}, ValueError, "'categorical', 'bernoulli', 'gaussian'"),
    "not a loss": ({"loss": 3}, TypeError, "loss=3 must be a function"),
    "a loss that sums": (
        {"loss": lambda o, t: F.cross_entropy(o, t, reduction="sum")}, ValueError, "neither one loss per example nor",
    ),
    "a loss between examples": ({"loss": contrastive}, ValueError, "contrastive is neither"),
    "a loss per term": (
        {"loss": lambda o, t: o.square()}, ValueError, r"returned shape \(4, 2\) for 4 examples.*shape \(4,\)",
    ),
    "a loss that is no tensor": ({"loss": lambda o, t: 1.0}, TypeError, "must return a tensor, not float"),
    "a loss of nothing": ({"loss": lambda o, t: torch.zeros(())}, ValueError, "does not depend on the model's output"),
    "a loss that is not finite": ({"loss": lambda o, t: o.sum(1) / 0}, ValueError, "not finite"),
    "a label too large": ({"batches": [(X, Y + 1)]}, ValueError, r"label 2 is out of range.*2 classes.*0 to 1"),
    "a negative label": ({"batches": [(X, Y - 1)]}, ValueError, "label -1 is out of range"),
    "labels of another shape": ({"batches": [(X, Y[:3])]}, ValueError, r"shape \(3,\).*expected shape \(4,\)"),
    "labels that are no tensor": ({"batches": [(X, "cat")]}, TypeError, "must be a tensor of labels, not str"),
    "a bernoulli label": (
        {"loss": "bernoulli", "batches": [(X, 2.0 * torch.ones(4, 2))]}, ValueError, "label 2 .*between 0 and 1",
    ),
    "gaussian targets": ({"loss": "gaussian"}, ValueError, r"expected shape \(4, 2\)"),
    "sampled from a function": (
        {"loss": F.cross_entropy, "estimate": "sampled"}, ValueError, "loss=cross_entropy does not define",
    ),
    "exact with class weights": (
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(2)), "estimate": "exact"}, ValueError, "without class weights",
    ),
    "an unknown approximation": ({"approximation": "low-rank"}, ValueError, "'full', 'block', 'diagonal', 'kfac'"),
    "an unknown estimate": ({"estimate": "mc"}, ValueError, "'empirical', 'sampled', 'exact'"),
    "no draws": ({"estimate": "sampled", "draws": 0}, ValueError, "draws=0 must be a whole number >= 1"),
    "a seed": ({"seed": "x"}, ValueError, "seed='x'"),
    "an unknown sharing": ({"sharing": "sum"}, ValueError, "'expand', 'reduce'"),
    "sua and reduce": ({"sua": True, "sharing": "reduce"}, ValueError, "sua=True with sharing='reduce'"),
    "an unknown layer": ({"exclude": "head"}, ValueError, "exclude='head' matches no module.*Layers: 0, 2"),
    "a dtype": ({"dtype": torch.float16}, ValueError, r"dtype=torch\.float16.*torch\.float32, torch\.float64"),
    "a progress": ({"progress": "yes"}, ValueError, "progress='yes' must be True, False or None"),
    "nothing to train": ({"model": frozen}, ValueError, "no trainable parameter"),
    "no model": ({"model": lambda: X}, TypeError, "must be a torch.nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    given, error, message = BAD[name]
    arguments: dict[str, Any] = {"batches": [(X, Y)], "loss": "categorical", **given}
    network = arguments.pop("model", model)()
    if isinstance(network, nn.Module):
        network.train()
    with pytest.raises(error, match=message):
        fisher(network, arguments.pop("batches"), arguments.pop("loss"), **arguments)
    if isinstance(network, nn.Module):  # left as it was found
        assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in network.modules())


VECTORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a vector too long": (lambda: torch.zeros(21), ValueError, r"shape \(21,\); expected \(20,\)"),
    "a stack of rows": (lambda: torch.zeros(3, 20), ValueError, r"shape \(3, 20\).*\(20, K\)"),
    "three dimensions": (lambda: torch.zeros(20, 2, 2), ValueError, r"expected \(20,\)"),
    "a list": (lambda: [0.0] * 20, TypeError, "not list"),
    "a name too few": (lambda: {"0.weight": torch.zeros(3, 3)}, ValueError, r"misses 0\.bias, 2\.weight, 2\.bias"),
    "a name too many": (
        lambda: {**{n: p.detach() for n, p in model().named_parameters()}, "3.bias": X}, ValueError, r"unknown.*3\.b",
    ),
    "a wrong shape": (
        lambda: {n: torch.zeros(2, 5) for n, _ in model().named_parameters()}, ValueError,
        r"'0\.weight' has shape \(2, 5\); expected \(3, 3\)",
    ),
    "stacks of unequal size": (
        lambda: {n: torch.zeros(i + 1, *p.shape) for i, (n, p) in enumerate(model().named_parameters())}, ValueError,
        "not by the same number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("approximation", ["full", "ekfac"])
@pytest.mark.parametrize("name", VECTORS)
def test_bad_vectors(name: str, approximation: str) -> None:
    make, error, message = VECTORS[name]
    G = fisher(model(), [(X, Y)], "categorical", approximation=approximation)
    for operation in (lambda v: G @ v, lambda v: G.solve(v, 0.1), G.quadratic, G.project):
        with pytest.raises(error, match=message):
            operation(make())


@pytest.mark.parametrize("approximation", ["full", "block", "diagonal", "kfac", "ekfac"])
def test_damping_zero_on_a_singular_matrix(approximation: str) -> None:
    """Says which layer, and what to do."""
    network = model()
    x = X.clone()
    x[:, 1] = 0  # a dead input: that column of the first layer never has a gradient
    G = fisher(network, [(x, Y)], "categorical", approximation=approximation)
    v = torch.ones(G.shape[0])
    where = "all parameters" if approximation == "full" else "0"
    for operation in (lambda: G.solve(v), lambda: G.logdet(), lambda: G.power(-1), lambda: G.sample()):
        with pytest.raises(ValueError, match=rf"singular in '{where}'.*pass damping > 0, for example damping="):
            operation()
    assert bool(torch.isfinite(G.solve(v, 1e-3)).all())
    assert bool(torch.isfinite(G.power(0.5).dense()).all())
    for damping in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"damping=.* must be a finite number >= 0"):
            G.solve(v, damping)


def test_a_regular_matrix_needs_no_damping() -> None:
    torch.manual_seed(0)
    network = nn.Linear(3, 2).double()
    data = [torch.randn(50, 3, dtype=torch.float64)]
    for approximation in ("full", "diagonal", "kfac", "ekfac"):
        G = fisher(network, data, "gaussian", approximation=approximation, estimate="exact")
        v = torch.randn(8, dtype=torch.float64)
        torch.testing.assert_close(G @ G.solve(v), v)
        torch.testing.assert_close(G.logdet(), torch.logdet(G.dense()))


def test_other_bad_arguments_of_operations() -> None:
    G = fisher(model(), [(X, Y)], "categorical")
    with pytest.raises(ValueError, match="scale=0 must be a finite number > 0"):
        G.sample(2, damping=0.1, scale=0)
    with pytest.raises(ValueError, match=r"n=1\.5 must be a whole number"):
        G.sample(1.5, damping=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names no parameter"):
        G.restrict("5")
    with pytest.raises(ValueError, match="take the layer whole"):
        G.restrict("0.bias")
    with pytest.raises(ValueError, match="last dimension must be 20"):
        G.unflatten(torch.zeros(19))
