"""u^T G v: one fingerprint, taken of a gradient, of calls or of rows, and one verdict."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac.curvature import fingerprint
from ekfac.curvature.blocks import KINDS, find_blocks
from ekfac.curvature.layers.base import Call
from ekfac.curvature.layers.linear import LinearLayer
from ekfac.optim.statistics.factored_gradient import rows_of


class Reused(nn.Module):
    """A linear layer whose weight is used once more, past the layer: its gradient is 1 + part times what passed it."""

    def __init__(self, part: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(12, 3, bias=False, dtype=dtype), part

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.part * (F.linear(x, self.layer.weight) - F.linear(x, self.layer.weight.detach()))


def refused_by_optimizer(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    with ekfac.EKFAC(model, scaling="running") as opt:
        F.cross_entropy(model(x), y).backward()
        try:
            opt.step()
        except RuntimeError as error:
            return "is not the gradient that passed through its calls" in str(error)
    return False


def refused_by_fisher(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    try:
        ekfac.fisher(model, [(x, y)], "categorical", approximation="kfac", estimate="empirical")
    except RuntimeError as error:
        return "its gradient is not the one that passed through its calls" in str(error)
    return False


@pytest.mark.parametrize(
    ("dtype", "part", "refused"),
    [
        (torch.float64, 1e-9, False),
        (torch.float64, 1e-4, True),
        (torch.float32, 1e-3, False),
        (torch.float32, 0.5, True),
        (torch.bfloat16, 0.1, False),
        (torch.bfloat16, 1.0, True),
    ],
)
def test_optimizer_and_fisher_judge_alike(dtype: torch.dtype, part: float, refused: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 12, dtype=dtype), torch.randint(3, (64,))
    model = Reused(part, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = refused_by_optimizer(model, x, y), refused_by_fisher(model, x, y)
    assert found == (refused, refused)


def test_gradient_calls_and_rows_have_one_fingerprint() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    (block,) = find_blocks(model)
    x = torch.randn(9, 5).double()
    output = model(x)
    output.retain_grad()
    output.square().sum().backward()
    vectors = fingerprint.vectors_of(block)
    gradients = [p.grad for p in block.parameters.values() if p.grad is not None]
    call = Call(block.layer, x, output.grad)
    by_rows = rows_of(block, call, 9)
    of_rows, size = fingerprint.of_rows(by_rows.h, by_rows.delta, vectors)
    of_gradient = fingerprint.of_gradient(block, gradients, vectors)
    of_calls = fingerprint.of_calls(block, [call], 9, 2**20, vectors)
    torch.testing.assert_close(of_gradient, of_rows)
    torch.testing.assert_close(of_gradient, of_calls[0])
    assert fingerprint.same(of_gradient, of_rows, size)
    assert not fingerprint.differs(block, fingerprint.of_gradient_with_size(block, gradients, vectors), of_calls)
    gradients[0][0, 0] += 1e-3
    changed = fingerprint.of_gradient(block, gradients, vectors)
    assert not fingerprint.same(changed, of_rows, size)
    assert fingerprint.differs(block, fingerprint.of_gradient_with_size(block, gradients, vectors), of_calls)


class Transposed(nn.Module):
    """A linear layer whose weight is stored as (in, out), square, so that no shape tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Forgetful(LinearLayer):
    """Says nothing of how the weight is stored."""

    def layout(self) -> tuple[dict[str, int], list[str], int]:
        return {"weight": 6}, [], 6


class Right(Forgetful):
    def matrix(self, weight: Tensor) -> Tensor:
        return weight.T


@pytest.mark.parametrize(("kind", "wrong"), [(Forgetful, True), (Right, False)])
def test_a_layer_class_that_is_wrong_is_named(
    kind: type[LinearLayer], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, Transposed, kind)
    torch.manual_seed(0)
    model, x, y = Transposed(), torch.randn(8, 6).double(), torch.randint(6, (8,))

    def told() -> contextlib.AbstractContextManager[object]:
        return pytest.raises(RuntimeError, match=r"Forgetful.* is wrong about") if wrong else contextlib.nullcontext()

    with told(), ekfac.EKFAC(model) as opt:
        F.cross_entropy(model(x), y).backward()
        opt.step()
    with told():
        ekfac.fisher(model, [(x, y)], "categorical", approximation="kfac", estimate="empirical")
