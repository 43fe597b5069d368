"""Datasets: shapes, splits, scaling; what is malformed is refused."""

import pickle

import numpy
import pytest
import torch

from ekfac.lab.data import files, text
from ekfac.lab.data.datasets import DATASETS, Dataset, Split, hold_out, load_dataset, register_dataset
from ekfac.lab.registry import LabError
from lab.conftest import cifar_bytes, idx, mnist_bytes


def test_the_embedded_digits_are_split_4000_to_1000_in_equal_classes():
    data = load_dataset("mnist-5k")
    train, validation = data.train, data.splits["validation"]
    assert train.x.shape == (4000, 784) and validation.x.shape == (1000, 784)
    assert train.y.bincount().tolist() == [400] * 10 and validation.y.bincount().tolist() == [100] * 10
    assert train.x.min() == 0 and train.x.max() == 1
    assert set(train.y[:10].tolist()) == set(range(10))  # a small --limit sees every class
    rows = {tuple(row.tolist()) for row in (train.x[:, 150:600] * 255).byte()}
    assert not rows & {tuple(row.tolist()) for row in (validation.x[:, 150:600] * 255).byte()}


def test_hold_out_is_stratified_disjoint_and_fixed():
    y = torch.tensor([0, 1, 0, 1, 0, 0, 1, 1, 0, 1])
    train, held = hold_out(y, one_in=5)
    assert held.tolist() == [8, 9]
    assert sorted(train.tolist() + held.tolist()) == list(range(10))


def test_mnist_reads_idx_files_and_validates_on_the_official_test_images(official):
    raw = mnist_bytes()
    data = load_dataset("mnist", official("mnist", raw, ".gz", "mnist"))
    assert data.train.x.shape == (60, 784) and data.splits["validation"].x.shape == (20, 784)
    first = torch.tensor(list(raw["train_images"][16 : 16 + 784])) / 255
    assert torch.equal(data.train.x[0], first)
    assert data.train.y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x00\x08\x01" + mnist_bytes()["train_images"][4:], "not an idx file"),
        (mnist_bytes()["train_images"][:-5], r"holds \d+ bytes"),
        (b"", "not an idx file"),
    ],
)
def test_malformed_idx_is_refused_even_with_the_right_md5(official, content, message):
    data_dir = official("mnist", {**mnist_bytes(), "train_images": content})
    with pytest.raises(LabError, match=message):
        load_dataset("mnist", data_dir)


def test_cifar10_is_held_out_normalised_and_in_channel_order(official):
    raw = cifar_bytes()
    data = load_dataset("cifar10", official("cifar10", raw, ".xz", "cifar10"))
    sizes = {name: len(split.y) for name, split in data.splits.items()}
    assert sizes == {"train": 450, "validation": 50, "test": 100}
    assert data.splits["validation"].y.bincount().tolist() == [5] * 10
    assert torch.allclose(data.train.x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(data.train.x.std((0, 2, 3)), torch.ones(3), atol=1e-5)
    # The stored row is all of red, then green, then blue; undoing the normalisation must give it back.
    stored = torch.from_numpy(pickle.loads(raw["test_batch"])["data"]).view(-1, 3, 32, 32) / 255
    shown = data.splits["test"].x
    slope = (stored.amax((0, 2, 3)) - stored.amin((0, 2, 3))) / (shown.amax((0, 2, 3)) - shown.amin((0, 2, 3)))
    shift = stored.amin((0, 2, 3)) - slope * shown.amin((0, 2, 3))
    assert torch.allclose(shown * slope.view(1, 3, 1, 1) + shift.view(1, 3, 1, 1), stored, atol=1e-5)


@pytest.mark.parametrize("batch", [{"labels": [1]}, {"data": numpy.zeros((2, 7)), "labels": [0, 1]}, [1, 2]])
def test_cifar_batch_without_images_is_refused(official, batch):
    data_dir = official("cifar10", {**cifar_bytes(), "data_batch_3": pickle.dumps(batch, protocol=2)})
    with pytest.raises(LabError, match="data_batch_3"):
        load_dataset("cifar10", data_dir)


def test_a_cifar_pickle_that_runs_code_is_refused_even_with_the_right_md5(official, tmp_path):
    class Attack:
        def __reduce__(self):
            return (tmp_path / "run").touch, ()

    data_dir = official("cifar10", {**cifar_bytes(), "data_batch_1": pickle.dumps(Attack(), protocol=2)})
    with pytest.raises(LabError, match="refused"):
        load_dataset("cifar10", data_dir)
    assert not (tmp_path / "run").exists()


def test_limit_takes_the_first_examples_and_no_more_than_there_are():
    data = Dataset("d", {"train": Split(torch.arange(6.0).view(6, 1), torch.arange(6))})
    assert data.limited(2).train.y.tolist() == [0, 1]
    with pytest.raises(LabError, match="limit 7 is more than the 6"):
        data.limited(7)


def test_unknown_dataset_lists_the_known_ones_and_names_are_not_taken_twice():
    with pytest.raises(LabError, match="unknown dataset 'svhn'; known: mnist-5k, mnist, cifar10"):
        load_dataset("svhn")
    with pytest.raises(LabError, match="already registered"):
        register_dataset("mnist", DATASETS.get("mnist"))


def test_every_source_has_a_dataset_or_a_corpus_of_its_name():
    assert set(files.SOURCES) <= set(DATASETS) | set(text.CORPORA)
    assert idx(numpy.zeros((2, 2))).startswith(b"\x00\x00\x08\x02")
