"""Ten random patterns under noise, as two datasets: for machines that have no digits."""

from pathlib import Path

import torch

from ekfac.lab.data.datasets import Dataset, Split, register_dataset

DIGITS, IMAGES = "made-up-digits", "made-up-images"


def _register(name: str, *shape: int) -> None:
    def load(folder: Path) -> Dataset:
        draw = torch.Generator().manual_seed(0)
        patterns = torch.rand(10, *shape, generator=draw)
        y = torch.arange(600) % 10
        x = (patterns[y] + 0.5 * torch.rand(600, *shape, generator=draw)) / 1.5
        return Dataset(name, {"train": Split(x[:500], y[:500]), "validation": Split(x[500:], y[500:])})

    register_dataset(name, load)


_register(DIGITS, 784)
_register(IMAGES, 3, 32, 32)
