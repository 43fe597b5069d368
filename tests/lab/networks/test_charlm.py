"""Characters of Python's own library, and the transformer that learns them."""

import hashlib
import json
import math

import pytest
import torch

import ekfac
from ekfac.cli import main as cli
from ekfac.lab.data import text
from ekfac.lab.data.datasets import Dataset, Split, load_dataset
from ekfac.lab.networks.charlm import character_correct, character_cross_entropy, charlm
from ekfac.lab.registry import LabError
from ekfac.lab.tasks import TASKS
from ekfac.lab.training.run import TrainConfig, train

TINY = {"width": 8, "limit": 40, "batch_size": 20, "epochs": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr(text, "MODULES", ("_pydecimal", "argparse"))
    monkeypatch.setattr(text, "MOST", text.LEAST)


@pytest.fixture(scope="module")
def whole_text():
    return text.library_text()


def decode(codes: torch.Tensor) -> str:
    return "".join(text.VOCABULARY[code] for code in codes.tolist())


def test_the_text_is_pythons_and_comes_back_from_its_codes(whole_text):
    assert 1_000_000 < len(whole_text) <= 2_000_000
    assert "class ArgumentParser" in whole_text and set(whole_text) <= set(text.VOCABULARY)
    assert decode(text.encode(whole_text[:5000])) == whole_text[:5000]


def test_blocks_are_split_nine_to_one_and_followed_by_the_next_character():
    data = load_dataset("stdlib")
    characters = text.library_text()
    train_split, held = data.train, data.splits["validation"]
    assert len(held.x) == (len(train_split.x) + len(held.x)) // 10
    assert decode(train_split.x[0]) == characters[:128] and decode(train_split.y[0]) == characters[1:129]
    assert decode(held.x[0]) == characters[9 * 128 : 10 * 128]
    assert data.sha256 == hashlib.sha256(characters.encode()).hexdigest()
    assert data.to(torch.device("cpu"), torch.float64).train.x.dtype == torch.int64


def test_a_python_without_sources_says_so(tmp_path):
    (tmp_path / "argparse.py").write_text("pass\n")
    with pytest.raises(LabError, match="holds 5 characters of Python's own sources"):
        text.library_text(tmp_path)


def test_characters_outside_the_vocabulary_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LEAST", 0)
    (tmp_path / "argparse.py").write_bytes("é = 1\r\n\tx\f\n".encode())
    assert text.library_text(tmp_path) == " = 1\n    x\n"


def test_no_position_sees_what_follows_it():
    torch.manual_seed(0)
    model = charlm(8).double()
    x = torch.randint(96, (2, 128))
    y = x.clone()
    y[:, 70:] = torch.randint(96, (2, 58))
    a, b = model(x), model(y)
    assert a.shape == (2, 128, 96)
    assert torch.allclose(a[:, :70], b[:, :70]) and not torch.allclose(a[:, 70:], b[:, 70:])
    assert character_cross_entropy(a, x, x).mean().item() == pytest.approx(math.log(96), rel=0.05)


def test_the_loss_is_the_mean_over_an_examples_characters():
    output, y = torch.randn(3, 5, 96), torch.randint(96, (3, 5))
    expected = -output.log_softmax(2).gather(2, y[..., None]).squeeze(2).mean(1)
    assert torch.allclose(character_cross_entropy(output, y, y), expected)
    output[0] = torch.nn.functional.one_hot(y[0], 96) * 100.0
    assert character_correct(output, y)[0] == 1


@pytest.mark.parametrize("width", [1, 6, 8])
def test_any_width_is_built_and_covered(width):
    summary = ekfac.summary(charlm(width))
    assert not [row.name for row in summary.rows if row.block == "diagonal"]


def test_its_size_and_its_one_refusal():
    assert sum(p.numel() for p in TASKS.get("charlm").build(128, False).parameters()) == 834_400
    with pytest.raises(LabError, match="no variant with batch-norm"):
        charlm(8, batch_norm=True)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap", "kfac", "ekfac", "ekfac-ra"])
def test_it_trains_with(optimizer):
    careful = {"lr": 1e-3, "damping": 0.1} if "kfac" in optimizer else {}
    run = train(TrainConfig("charlm", optimizer, **TINY, **careful))
    assert run.status == "finished" and 0 <= run.history[-1]["validation_accuracy"] <= 1
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]


def test_the_command_records_the_hash_and_resumes_on_the_same_text_only(tmp_path, monkeypatch, capsys):
    words = ["train", "charlm", "--width", "8", "--limit", "40", "--batch-size", "20", "--out", str(tmp_path)]
    assert cli.run([*words, "--epochs", "1", "--optimizer", "adamw"]) == 0
    about = json.loads((tmp_path / "config.json").read_text())["about"]
    assert about["data_sha256"] == load_dataset("stdlib").sha256
    assert cli.run(["train", "--resume", "--out", str(tmp_path), "--epochs", "2"]) == 0
    monkeypatch.setattr(text, "MOST", text.LEAST + 1)
    assert cli.run(["train", "--resume", "--out", str(tmp_path), "--epochs", "3"]) == 2
    assert "run on different data of stdlib" in capsys.readouterr().err


def test_a_dataset_of_pictures_has_no_hash():
    assert Dataset("d", {"train": Split(torch.zeros(2, 1), torch.zeros(2))}).sha256 is None
