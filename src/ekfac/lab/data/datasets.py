"""Datasets by name, as tensors: MNIST, Fashion-MNIST, CIFAR-10, Python's sources, and plugins'."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ekfac.lab.data import files, text
from ekfac.lab.data.files import DataError
from ekfac.lab.registry import LabError, Registry, calling


class Split(NamedTuple):
    """Examples and labels, one row per example."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Dataset:
    """The splits of a dataset: ``train``, ``validation``, and ``test`` if there is one.

    ``sha256`` is for data that differ between machines; runs record it.
    """

    name: str
    splits: Mapping[str, Split]
    sha256: str | None = None

    @property
    def train(self) -> Split:
        """The training examples."""
        return self.splits["train"]

    def limited(self, examples: int) -> Dataset:
        """Return the dataset with only the first training examples.

        Raises:
            LabError: If there are fewer.
        """
        x, y = self.train
        if examples > len(x):
            raise LabError(f"limit {examples} is more than the {len(x)} training examples of {self.name}")
        return replace(self, splits={**self.splits, "train": Split(x[:examples], y[:examples])})

    def to(self, device: torch.device, dtype: torch.dtype) -> Dataset:
        """Move the dataset to a device, one tensor per split, so that a batch is an index select.

        Integers, such as characters, keep their dtype.
        """

        def moved(x: Tensor) -> Tensor:
            return x.to(device, dtype) if x.is_floating_point() else x.to(device)

        return replace(self, splits={name: Split(moved(x), y.to(device)) for name, (x, y) in self.splits.items()})


DATASETS: Registry[Callable[[Path], Dataset]] = Registry("dataset", plugins=True)


def register_dataset(name: str, load: Callable[[Path], Dataset]) -> Callable[[Path], Dataset]:
    """Register a dataset; ``load(folder)`` gets the data folder and returns the dataset on the CPU."""
    return DATASETS.add(name, load)


def load_dataset(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a dataset by name.

    Args:
        name: A registered name.
        data_dir: The folder of its official files; by default ``EKFAC_DATA``, else ``~/.cache/ekfac``.

    Raises:
        LabError: If the name is unknown, or a file is missing or not the official one.
    """
    with calling(f"dataset {name}: load(folder)"):
        found: Any = DATASETS.get(name)(files.data_folder(data_dir))
    if not isinstance(found, Dataset) or "train" not in found.splits:
        what = f"the splits {', '.join(found.splits)}" if isinstance(found, Dataset) else f"a {type(found).__name__}"
        raise LabError(f"dataset {name}: load(folder) returned {what}. Allowed: a Dataset with a split 'train'")
    for split, parts in found.splits.items():
        for part in parts:
            if not isinstance(part, Tensor):
                raise LabError(f"dataset {name}, {split}: a {type(part).__name__}. Allowed: Split(x, y) of two tensors")
    return found


def hold_out(y: Tensor, one_in: int) -> tuple[Tensor, Tensor]:
    """Split indices into training and held-out ones: every n-th of each class, in file order.

    The split is stratified and fixed, without random numbers that could differ between versions.
    """
    held = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        held[torch.nonzero(y == label).flatten()[one_in - 1 :: one_in]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def _pixels(raw: Tensor) -> Tensor:
    return raw.float() / 255


def _mnist_5k(folder: Path) -> Dataset:
    import numpy

    raw = files.read("mnist-5k", "all", folder)
    table = torch.from_numpy(numpy.array(raw.replace(b"\n", b",").rstrip(b",").split(b","), dtype=numpy.uint8))
    table = table.view(-1, 785)
    x, y = _pixels(table[:, :-1]), table[:, -1].long()
    train, validation = hold_out(y, one_in=5)
    # The file is sorted by digit; interleave so that the first few hundred examples contain every class.
    train = train.view(10, -1).T.flatten()
    return Dataset("mnist-5k", {"train": Split(x[train], y[train]), "validation": Split(x[validation], y[validation])})


def _idx(name: str, role: str, folder: Path, magic: int) -> Tensor:
    """Parse an idx file: a magic number, one big-endian size per dimension, then bytes."""
    raw = files.read(name, role, folder)
    if int.from_bytes(raw[:4], "big") != magic:
        raise DataError(f"{role} of {name} is not an idx file of the expected kind")
    rank = magic & 0xFF
    shape = [int.from_bytes(raw[4 + 4 * d : 8 + 4 * d], "big") for d in range(rank)]
    body = torch.frombuffer(bytearray(raw[4 + 4 * rank :]), dtype=torch.uint8)
    if math.prod(shape) != len(body):
        raise DataError(f"{role} of {name} declares shape {shape} but holds {len(body)} bytes")
    return body.view(shape)


def _idx_images(name: str, folder: Path) -> Dataset:
    splits = {}
    for split, source in (("train", "train"), ("validation", "test")):
        images = _idx(name, f"{source}_images", folder, magic=0x803)
        labels = _idx(name, f"{source}_labels", folder, magic=0x801)
        splits[split] = Split(_pixels(images).flatten(1), labels.long())
    return Dataset(name, splits)


def _mnist(folder: Path) -> Dataset:
    return _idx_images("mnist", folder)


def _fashion_mnist(folder: Path) -> Dataset:
    return _idx_images("fashion-mnist", folder)


def _cifar_batch(role: str, folder: Path) -> Split:
    batch = files.unpickle(files.read("cifar10", role, folder))
    try:
        x = torch.from_numpy(batch["data"]).view(-1, 3, 32, 32)
        return Split(x, torch.tensor(batch["labels"], dtype=torch.int64))
    except (KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{role} of cifar10 does not hold images and labels: {error!r}") from error


def _cifar10(folder: Path) -> Dataset:
    batches = [_cifar_batch(f"data_batch_{number}", folder) for number in range(1, 6)]
    x, y = torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])
    test = _cifar_batch("test_batch", folder)
    train, validation = hold_out(y, one_in=10)
    pixels = _pixels(x[train])
    mean, std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)

    def normalised(own: Tensor) -> Tensor:
        return own.sub_(mean).div_(std)

    return Dataset(
        "cifar10",
        {
            "train": Split(normalised(pixels), y[train]),
            "validation": Split(normalised(_pixels(x[validation])), y[validation]),
            "test": Split(normalised(_pixels(test.x)), test.y),
        },
    )


def _cifar10_20k(folder: Path) -> Dataset:
    """Read only the first two training files of CIFAR-10: 15,000 training and 5,000 validation images."""
    batches = [_cifar_batch(f"data_batch_{number}", folder) for number in (1, 2)]
    x, y = _pixels(torch.cat([batch.x for batch in batches])), torch.cat([batch.y for batch in batches])
    cut = len(x) * 3 // 4
    mean, std = x[:cut].mean((0, 2, 3), keepdim=True), x[:cut].std((0, 2, 3), keepdim=True)
    x = (x - mean) / std
    return Dataset("cifar10-20k", {"train": Split(x[:cut], y[:cut]), "validation": Split(x[cut:], y[cut:])})


def _stdlib(folder: Path) -> Dataset:
    """Read sources of the running Python's standard library in blocks of 128 characters; every tenth is held out."""
    characters = text.library_text()
    x, y = text.blocks(text.encode(characters), 128)
    held = torch.arange(len(x)) % 10 == 9
    splits = {"train": Split(x[~held], y[~held]), "validation": Split(x[held], y[held])}
    return Dataset("stdlib", splits, hashlib.sha256(characters.encode()).hexdigest())


register_dataset("mnist-5k", _mnist_5k)
register_dataset("mnist", _mnist)
register_dataset("cifar10", _cifar10)
register_dataset("cifar10-20k", _cifar10_20k)
register_dataset("fashion-mnist", _fashion_mnist)
register_dataset("stdlib", _stdlib)
