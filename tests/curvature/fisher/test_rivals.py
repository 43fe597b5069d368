"""The same matrices by two independent libraries, where these are right: curvlinops and nngeometry, in float64.

Left out on purpose: grouped convolutions (both average over the groups), and nngeometry's KFAC of a Linear on 3-D input
(too large by the number of positions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekfac import fisher

Data = list[tuple[Tensor, Tensor]]


def mlp() -> tuple[nn.Module, Data]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Sigmoid(), nn.Linear(4, 3))
    return model.double(), [(torch.randn(n, 6, dtype=torch.float64), torch.randint(3, (n,))) for n in (8, 8, 8)]


def cnn() -> tuple[nn.Module, Data]:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return model.double(), [(torch.randn(n, 2, 6, 6, dtype=torch.float64), torch.randint(3, (n,))) for n in (16, 16)]


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Data]]] = {"mlp": mlp, "cnn": cnn}

network = pytest.mark.parametrize("network", NETWORKS)


def close(got: Tensor, expected: Tensor) -> None:
    error = float((got - expected).norm() / expected.norm())
    assert error < 1e-5, f"relative error {error:.3g}"


def regression(data: Data) -> Data:
    return [(x, torch.randn(len(x), 3, dtype=torch.float64)) for x, _ in data]


def curvlinops_dense(name: str, model: nn.Module, loss: nn.Module, data: Data, **options: Any) -> Tensor:
    curvlinops = pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch is not installed")
    operator = getattr(curvlinops, name)(
        model, loss, list(model.parameters()), data, check_deterministic=False, **options
    )
    return torch.as_tensor(operator @ torch.eye(operator.shape[0], dtype=torch.float64))


FISHER_TYPE = {"empirical": "empirical", "exact": "type-2"}


@network
@pytest.mark.parametrize("estimate", ["empirical", "exact"])
@pytest.mark.parametrize("approximation", ["kfac", "ekfac"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_by_curvlinops(network: str, estimate: str, approximation: str, sharing: str) -> None:
    model, data = NETWORKS[network]()
    loss = nn.CrossEntropyLoss()
    options = {"fisher_type": FISHER_TYPE[estimate], "kfac_approx": sharing, "separate_weight_and_bias": False}
    theirs = curvlinops_dense(f"{approximation.upper()}LinearOperator", model, loss, data, **options)
    ours = fisher(model, data, loss, approximation=approximation, estimate=estimate, sharing=sharing)
    close(ours.dense(), theirs)


@network
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum")], ids=["mean", "sum"])
@pytest.mark.parametrize("approximation", ["kfac", "ekfac", "full"])
def test_regression_by_curvlinops(network: str, loss: nn.MSELoss, approximation: str) -> None:
    model, data = NETWORKS[network]()
    data = regression(data)
    if approximation == "full":
        theirs = curvlinops_dense("GGNLinearOperator", model, loss, data)
    else:
        options = {"fisher_type": "type-2", "separate_weight_and_bias": False}
        theirs = curvlinops_dense(f"{approximation.upper()}LinearOperator", model, loss, data, **options)
    if loss.reduction == "sum":
        theirs = theirs / sum(len(x) for x, _ in data)  # theirs sums over examples too; ours is always their mean
    close(fisher(model, data, loss, approximation=approximation, estimate="exact").dense(), theirs)


@network
def test_full_matrices_by_curvlinops(network: str) -> None:
    model, data = NETWORKS[network]()
    loss = nn.CrossEntropyLoss()
    ggn = curvlinops_dense("GGNLinearOperator", model, loss, data)
    close(fisher(model, data, loss, approximation="full", estimate="exact").dense(), ggn)
    empirical = curvlinops_dense("EFLinearOperator", model, loss, data)
    close(fisher(model, data, loss, approximation="full", estimate="empirical").dense(), empirical)


@network
@pytest.mark.parametrize(
    ("approximation", "name"), [("kfac", "PMatKFAC"), ("ekfac", "PMatEKFAC"), ("full", "PMatDense")]
)
@pytest.mark.parametrize("variant", ["classif_logits", "regression"])
def test_nngeometry(network: str, approximation: str, name: str, variant: str) -> None:
    nngeometry = pytest.importorskip("nngeometry.object", reason="nngeometry is not installed")
    metrics = pytest.importorskip("nngeometry.metrics", reason="nngeometry is not installed")
    model, data = NETWORKS[network]()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(data[0][0]))
    # Its classif_logits makes a matrix of the default dtype, whatever the model's.
    torch.set_default_dtype(torch.float64)
    try:
        theirs = metrics.FIM(model, loader, getattr(nngeometry, name), variant=variant)
        if approximation == "ekfac":
            theirs.update_diag(loader)
    finally:
        torch.set_default_dtype(torch.float32)
    loss = "categorical" if variant == "classif_logits" else "gaussian"
    ours = fisher(model, loader, loss, approximation=approximation, estimate="exact")
    close(ours.dense(), theirs.to_torch().detach())
