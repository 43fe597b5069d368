"""The bundled digits in the shape of CIFAR-10, to try convolutional networks without a download."""

from __future__ import annotations

from pathlib import Path

from torch.nn import functional

from ekfac.lab.data.datasets import DATASETS, Dataset, Split, register_dataset

NAME = "mnist-5k-padded"


def padded_digits(folder: Path) -> Dataset:
    """Return mnist-5k zero-padded from 28 x 28 to 32 x 32, repeated on three channels, normalised."""
    digits = DATASETS.get("mnist-5k")(folder)
    mean, std = digits.train.x.mean(), digits.train.x.std()
    splits = {}
    for name, (x, y) in digits.splits.items():
        image = functional.pad(x.view(-1, 1, 28, 28), (2, 2, 2, 2))
        splits[name] = Split(((image - mean) / std).expand(-1, 3, -1, -1).contiguous(), y)
    return Dataset(NAME, splits)


register_dataset(NAME, padded_digits)
