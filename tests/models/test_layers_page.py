"""docs/layers.md: its code runs, its table of kinds is true, and its numbers are those of the recorded runs."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ekfac import summary
from ekfac.curvature import blocks
from paper import EKFAC

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "layers.md").read_text()


@pytest.fixture
def page() -> Iterator[tuple[dict[str, Any], str]]:
    """What the page's Python defines when run from top to bottom, and what it prints."""
    before = dict(blocks.KINDS)
    namespace: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
            exec(code, namespace)
    yield namespace, printed.getvalue()
    blocks.KINDS.clear()
    blocks.KINDS.update(before)


def test_the_pages_code_runs_and_prints_what_it_shows(page: tuple[dict[str, Any], str]) -> None:
    _, printed = page
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    assert shown in printed


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize("scaling", ["running", "per_example"])
@pytest.mark.parametrize("kind", ["Conv1DLayer", "TransposedLayer"])
def test_a_kind_of_ones_own_is_as_exact_as_a_built_in_one(
    page: tuple[dict[str, Any], str], kind: str, scaling: str, frozen: str | None
) -> None:
    """GPT-2's Conv1D, registered in either of the page's ways, trains exactly as the Linear layer that it is."""
    Conv1D = page[0]["Conv1D"]
    blocks.KINDS[Conv1D] = page[0][kind]
    torch.manual_seed(0)
    own = nn.Sequential(Conv1D(4, 6), nn.GELU(), Conv1D(6, 2)).double()
    linear = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)).double()
    optimizers = []
    for a, b in zip(own, linear, strict=True):
        if isinstance(b, nn.Linear):
            with torch.no_grad():
                b.weight.copy_(a.weight.T)
                b.bias.copy_(a.bias)
            for m in (a, b):
                if frozen is not None:
                    getattr(m, frozen).requires_grad_(False)
    for model in (own, linear):
        opt = EKFAC(model, lr=0.1, scaling=scaling, damping=0.1, refresh_every=2)
        assert not any(row.block == "diagonal" for row in opt.summary().rows)
        optimizers.append(opt)
    for _ in range(5):
        x, y = torch.randn(12, 3, 4, dtype=torch.float64), torch.randn(12, 3, 2, dtype=torch.float64)
        for model, opt in zip((own, linear), optimizers, strict=True):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
    for a, b in zip(own, linear, strict=True):
        if isinstance(b, nn.Linear):
            torch.testing.assert_close(a.weight.T, b.weight, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(a.bias, b.bias, rtol=1e-9, atol=1e-11)


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class OwnProduct(nn.Linear):
    """As Falcon's: a product with its weight that is not torch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Masked(nn.Linear):
    """What it multiplies with is not its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.tril(), self.bias)


class Untouched(nn.Linear):
    """A subclass that leaves forward alone."""


KINDS: list[tuple[nn.Module, str]] = [
    (nn.Linear(3, 2), "kronecker 4 x 2"),
    (Untouched(3, 2), "kronecker 4 x 2"),
    (nn.Conv1d(4, 2, 3), "kronecker 13 x 2"),
    (nn.Conv2d(4, 2, 3, padding="same", padding_mode="circular"), "kronecker 37 x 2"),
    (nn.Conv3d(1, 2, 2, dilation=2), "kronecker 9 x 2"),
    (nn.Conv2d(4, 4, 3, groups=4), "kronecker 10 x 1, 4 groups"),
    (nn.ConvTranspose1d(4, 2, 3), "kronecker 13 x 2"),
    (nn.ConvTranspose2d(4, 2, 3, output_padding=1, stride=2), "kronecker 37 x 2"),
    (nn.ConvTranspose3d(4, 2, 1), "kronecker 5 x 2"),
    (nn.Embedding(9, 3), "kronecker 9 x 3, A diagonal"),
    (nn.LayerNorm(5), "exact 2 x 2 block for each of 5 units"),
    (nn.RMSNorm(5), "exact 1 x 1 block for each of 5 units"),
    (nn.GroupNorm(2, 4), "exact 2 x 2 block for each of 4 units"),
    (nn.BatchNorm1d(4), "exact 2 x 2 block for each of 4 units"),
    (nn.BatchNorm2d(4), "exact 2 x 2 block for each of 4 units"),
    (nn.BatchNorm3d(4), "exact 2 x 2 block for each of 4 units"),
    (nn.LSTM(3, 2), "kronecker 7 x 8"),
    (nn.LSTM(3, 2, bias=False), "kronecker 5 x 8"),
    (nn.RNN(3, 2), "kronecker 7 x 2"),
    (nn.GRU(2, 2), "kronecker 3 x 6"),
    (nn.LSTMCell(3, 2), "kronecker 7 x 8"),
    (nn.GRUCell(2, 2), "kronecker 3 x 6"),
    (nn.RNNCell(3, 2), "kronecker 7 x 2"),
    (nn.EmbeddingBag(9, 3), "kronecker 9 x 3, A diagonal"),
    (nn.Bilinear(3, 2, 2), "kronecker 7 x 2"),
    (OwnForward(3, 2), "kronecker 4 x 2"),
    (OwnProduct(3, 2), "kronecker 4 x 2"),
    *(
        (module, "diagonal")
        for module in (
            nn.LSTM(3, 2, num_layers=2, dropout=0.1),
            nn.InstanceNorm2d(3, affine=True),
            nn.PReLU(),
            nn.Embedding(9, 3, sparse=True),
            nn.EmbeddingBag(9, 3, mode="max"),
            Masked(3, 2),
        )
    ),
]


@pytest.mark.parametrize(("module", "how"), KINDS, ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "")
def test_the_table_of_kinds(module: nn.Module, how: str) -> None:
    rows = summary(nn.Sequential(module)).rows
    assert {row.block for row in rows} == {how}
    kind = type(module)
    if kind.__module__.startswith("torch.nn"):
        assert kind.__name__ in PAGE or kind.__name__[-2:] in ("1d", "2d", "3d")
    assert sum(row.numbers for row in rows) == sum(p.numel() for p in module.parameters())


def test_attention_has_a_block_for_each_projection() -> None:
    how = {row.name: row.block for row in summary(nn.Sequential(nn.MultiheadAttention(4, 2, vdim=3))).rows}
    assert how == {
        "0.q_proj": "kronecker 4 x 4", "0.k_proj": "kronecker 4 x 4", "0.v_proj": "kronecker 3 x 4",
        "0.in_proj_bias": "kronecker 1 x 12", "0.out_proj": "kronecker 5 x 4",
    }  # fmt: skip
    how = {row.name: row.block for row in summary(nn.Sequential(nn.MultiheadAttention(4, 2, add_bias_kv=True))).rows}
    assert how == {
        "0.in_proj": "kronecker 5 x 12", "0.out_proj": "kronecker 5 x 4", "0.bias_k": "diagonal",
        "0.bias_v": "diagonal",
    }  # fmt: skip


def test_a_weight_under_a_norm_is_covered_and_under_other_parametrizations_its_bias_alone() -> None:
    ways = nn.utils.parametrizations
    layers = [
        ways.weight_norm(nn.Linear(4, 5)),
        ways.spectral_norm(nn.Conv2d(2, 5, 2)),
        ways.orthogonal(nn.Linear(5, 5)),
    ]
    how = {row.name: row.block for row in summary(nn.Sequential(*layers)).rows}
    made = " (the weight is computed from it)"
    assert how == {
        "0": "kronecker 5 x 5" + made, "0.parametrizations.weight.original0": "diagonal",
        "1": "kronecker 9 x 5" + made,
        "2": "kronecker 1 x 5", "2.parametrizations.weight.original": "diagonal",
    }  # fmt: skip


def test_the_numbers_are_those_of_the_recorded_runs() -> None:
    recorded = (ROOT / "results" / "models.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", recorded, re.M)
    assert len(tables) == 2 and tables[1] in PAGE, "half precision; the five kinds are in the record alone"
