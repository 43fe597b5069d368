"""Operators in files, parameters without numbers, junk where a tensor belongs, and what a step's peak takes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ekfac
from allocations import allocated
from ekfac import EKFAC, KFAC, Curvature, Preconditioner, fisher, sealed
from ekfac.curvature.operators import storage
from fuzz.files import operator_files


def test_an_operator_of_an_older_version_is_read_with_a_warning(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = tmp_path / "G.safetensors"
    file.write_bytes(operator_files()["ekfac"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = Curvature.load(file)
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        metadata = opened.metadata()
    assert metadata["format"] == storage.FORMAT
    del metadata["checksum"]
    save_file(tensors, file, metadata={**metadata, "format": storage.UNSEALED})
    with pytest.warns(UserWarning, match="has no checksum, as an older version wrote it"):
        assert torch.equal(Curvature.load(file).eigenvalues(), before.eigenvalues())
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ValueError, match="was altered after it was written: its checksum is broken"):
        Curvature.load(file)


def test_a_header_that_does_not_describe_its_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = tmp_path / "G.safetensors"
    file.write_bytes(operator_files()["diagonal"])
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        header = json.loads(opened.metadata()["curvature"])
    for change in ({"names": header["names"][:-1]}, {"parts": header["parts"][:-1]}, {"shapes": 3}, {"parts": [{}]}):
        text = json.dumps({**header, **change})
        save_file(tensors, file, metadata={"format": storage.UNSEALED, "curvature": text})
        with (
            pytest.warns(UserWarning, match="no checksum"),
            pytest.raises(ValueError, match="not describe a curvature"),
        ):
            Curvature.load(file)


def test_every_bit_of_a_short_sealed_file_counts() -> None:
    content = sealed.dumps({"a": 1, "b": [None, "x"]})
    assert sealed.loads(content) == ({"a": 1, "b": [None, "x"]}, True)
    for at in range(len(content)):
        for bit in range(8):
            changed = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            with pytest.raises(ValueError):  # noqa: PT011 - of JSON, of text, or of the seal
                sealed.loads(changed)


EMPTY = {
    "no outputs": lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 0)),
    "nothing between": lambda: nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 2)),
    "no inputs": lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(0, 2)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("kind", [EKFAC, KFAC, Preconditioner])
def test_parameters_without_numbers_are_borne(name: str, kind: type) -> None:
    model = EMPTY[name]()

    def loss(x: torch.Tensor) -> torch.Tensor:
        if name == "no inputs":
            return model[0](x).square().sum(1).mean() + model[1](x[:, :0]).square().sum(1).mean()
        return model(x).square().sum(1).mean() + model[0](x).square().sum(1).mean()

    before = {n: p.clone() for n, p in model.named_parameters()}
    with kind(model) as opt:
        for _ in range(3):
            opt.zero_grad()
            loss(torch.randn(6, 4)).backward()
            opt.step()
            if kind is Preconditioner:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
        opt.load_state_dict(opt.state_dict())
        assert all(row.numbers for row in opt.summary().rows)
    for n, p in model.named_parameters():
        assert bool(torch.isfinite(p).all())
        if p.numel() and p.grad is not None and p.grad.any():
            assert not torch.equal(p, before[n])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_fisher_bears_parameters_without_numbers(tmp_path: Path) -> None:
    model = EMPTY["nothing between"]()
    data = [(torch.randn(6, 4), torch.randint(2, (6,)))]
    for approximation in ("full", "block", "diagonal", "kfac", "ekfac"):
        G = fisher(model, data, "categorical", approximation=approximation)
        v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        assert {name: t.shape for name, t in (G @ v).items()} == {name: t.shape for name, t in v.items()}
        stacked = {name: torch.stack([t, 2 * t]) for name, t in v.items()}
        torch.testing.assert_close((G @ stacked)["1.bias"][1], 2 * (G @ v)["1.bias"])
        G.save(tmp_path / "G")
        torch.testing.assert_close(Curvature.load(tmp_path / "G") @ v, G @ v)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([0.9], "params contains 0.9"),
        (["weight"], "params contains 'weight'"),
        ([], "params is empty"),
        (b"x", "params contains"),
    ],
)
def test_what_is_no_parameter_is_named(params: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        EKFAC(nn.Linear(3, 2), params=params)


def test_models_that_cannot_be_read_are_named() -> None:
    data = [(torch.randn(6, 4), torch.randint(2, (6,)))]
    for model, words in (
        (nn.LazyLinear(2), "'weight' has no shape yet"),
        (nn.Linear(4, 2, device="meta"), "'weight' is on the device 'meta'"),
        (nn.Linear(4, 0, bias=False), "no trainable parameter"),
    ):
        for make in (EKFAC, KFAC, lambda m: fisher(m, data, "categorical")):
            with pytest.raises(ValueError, match=words):
                make(model)
    with pytest.raises(ValueError, match="'weight' is complex"):
        fisher(nn.Linear(4, 2).to(torch.complex64), data, "categorical")


def test_fisher_with_no_covered_layer() -> None:
    data = [(torch.randn(6, 4), torch.randint(2, (6,)))]
    model = nn.Linear(4, 2)
    for approximation in ("diagonal", "kfac", "ekfac"):
        G = fisher(model, data, "categorical", approximation=approximation, include=[])
        whole = fisher(model, data, "categorical", approximation="diagonal")
        torch.testing.assert_close(G.diagonal(), whole.diagonal())


@pytest.mark.parametrize(("inputs", "outputs"), [(400, 400), (600, 150), (150, 600)])
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_the_peak_that_the_summary_tells_bounds_a_step(kind: type, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(inputs, outputs), torch.randn(8, inputs)
    with kind(model) as opt:
        held = 0

        def step() -> None:
            opt.zero_grad(set_to_none=False)
            model(x).square().sum(1).mean().backward()
            opt.step()

        model(x).sum().backward()
        for _ in range(3):
            peak, left, _ = allocated(step)
            table = opt.summary()
            # The gradient and the few activations are the model's own; the rest is what the table speaks of.
            own = 2 * sum(p.numel() * p.element_size() for p in model.parameters()) + 2**20
            assert held + peak <= table.peak + own
            held += left
        assert table.peak > table.bytes and "at the peak of a step" in str(table)
    assert ekfac.summary(model).peak > ekfac.summary(model).bytes
