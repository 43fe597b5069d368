"""Files, devices and dtypes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ekfac import Curvature, fisher
from fisher_cases import Case, cases


def same_bits(one: Tensor, two: Tensor) -> bool:
    return (one.dtype, one.shape) == (two.dtype, two.shape) and torch.equal(one, two)


@pytest.mark.rounding
@settings(max_examples=12)
@given(
    case=cases(),
    approximation=st.sampled_from(["full", "block", "diagonal", "kfac", "ekfac"]),
    sua=st.booleans(),
    power=st.booleans(),
)
def test_a_file_gives_back_the_operator(
    tmp_path_factory: pytest.TempPathFactory, case: Case, approximation: str, sua: bool, power: bool
) -> None:
    G = fisher(case.model, case.data, case.loss, approximation=approximation, sua=sua)
    if power:
        G = G.power(-0.5, 0.1)
    path = tmp_path_factory.mktemp("curvature") / "G.safetensors"
    G.save(path)
    H = Curvature.load(path)
    assert H.approximation == G.approximation and H.layout == G.layout
    assert H.layers == G.layers and H.examples == G.examples == sum(len(x) for x, _ in case.data)
    for one, two in zip(G.parts, H.parts, strict=True):
        assert (type(one), one.name, one.parameters) == (type(two), two.name, two.parameters)
        stored, found = one.tensors(), two.tensors()
        assert stored.keys() == found.keys() and all(same_bits(found[name], t) for name, t in stored.items())
    # Equal numbers that lie elsewhere in memory may have a product that differs in its last bits.
    v = torch.randn(G.shape[0], dtype=torch.float64)
    for do in (lambda C: C.dense(), lambda C: C.solve(v, 0.1), lambda C: C.project(v)):
        expected = do(G)
        torch.testing.assert_close(do(H), expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    assert [p.name for p in path.parent.iterdir()] == ["G.safetensors"]


def small() -> Curvature:
    torch.manual_seed(0)
    return fisher(nn.Linear(3, 2), [(torch.randn(8, 3), torch.randint(2, (8,)))], "categorical")


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        Curvature.load(tmp_path / "nothing.safetensors")
    path = tmp_path / "G.safetensors"
    small().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        Curvature.load(path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="holds no curvature"):
        Curvature.load(path)


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"(?i)no such file"):
        small().save(tmp_path / "no folder" / "G.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.over_a_second
def test_only_torch_is_needed_and_the_error_says_what_is_missing(tmp_path: Path) -> None:
    script = """
import sys
class Refuse:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("safetensors", "numpy", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch, ekfac
G = ekfac.fisher(torch.nn.Linear(3, 2), [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))], "categorical")
try:
    G.save(sys.argv[1])
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "G.safetensors")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "pip install safetensors" in done.stdout


@pytest.mark.parametrize("approximation", ["full", "block", "diagonal", "kfac", "ekfac"])
def test_casting(approximation: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = [(torch.randn(9, 3), torch.randint(2, (9,))) for _ in range(3)]
    G = fisher(model, data, "categorical", approximation=approximation)
    assert G.dtype == torch.float32
    H = G.to(torch.float64)
    assert H.dtype == torch.float64 and G.dtype == torch.float32
    assert torch.equal(H.dense().float(), G.dense()) or torch.allclose(H.dense().float(), G.dense(), atol=1e-6)
    assert (H @ torch.ones(G.shape[0])).dtype == torch.float64
    # Computed in float64 on a copy: the model itself stays as it is, and so do the inputs.
    exact = fisher(model, data, "categorical", approximation=approximation, dtype=torch.float64)
    assert exact.dtype == torch.float64 and next(model.parameters()).dtype == torch.float32
    torch.testing.assert_close(exact.trace().float(), G.trace(), rtol=1e-4, atol=0)
    by_hand = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    by_hand.load_state_dict(model.state_dict())
    reference = fisher(by_hand, [(x.double(), y) for x, y in data], "categorical", approximation=approximation)
    torch.testing.assert_close(exact.dense(), reference.dense())


@pytest.mark.gpu
@pytest.mark.parametrize("approximation", ["full", "block", "diagonal", "kfac", "ekfac"])
@pytest.mark.parametrize("estimate", ["empirical", "sampled", "exact"])
def test_on_the_gpu(approximation: str, estimate: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()
    data = [(torch.randn(30, 1, 6, 6, dtype=torch.float64), torch.randint(4, (30,))) for _ in range(3)]
    here = fisher(model, data, "categorical", approximation=approximation, estimate=estimate)
    there = fisher(model, data, "categorical", approximation=approximation, estimate=estimate, device="cuda")
    assert there.device.type == "cuda" and next(model.parameters()).device.type == "cpu"
    if estimate != "sampled":  # another device draws other labels
        torch.testing.assert_close(there.dense().cpu(), here.dense(), rtol=1e-7, atol=1e-10)
    there.save(tmp_path / "G.safetensors")
    back = Curvature.load(tmp_path / "G.safetensors", device="cuda")
    v = torch.randn(back.shape[0], dtype=torch.float64, device="cuda")
    torch.testing.assert_close(back.solve(v, 0.1), there.solve(v, 0.1))
    assert there.to("cpu").device.type == "cpu"
    assert there.sample(2, damping=0.1)["0.weight"].device.type == "cuda"


@pytest.mark.parametrize("path", ["", ".", "folder", "folder/"])
def test_a_folder_is_no_name_of_a_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(ValueError, match=f"path='{path}' must be a file's name, not a folder's"):
        small().save(path)
    assert [file.name for file in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.parametrize(
    "device",
    ["meta", pytest.param("cuda:0", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is there"))],
)
def test_a_device_that_is_not_there_is_named(device: str, tmp_path: Path) -> None:
    small().save(tmp_path / "g")
    with pytest.raises(ValueError, match=f"device='{device}' cannot be used: "):
        Curvature.load(tmp_path / "g", device=device)
