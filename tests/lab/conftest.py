"""Small data in the official formats, with the table of expected MD5s set to match."""

import functools
import gzip
import hashlib
import lzma
import pickle
from pathlib import Path

import numpy
import pytest

from ekfac.lab.data import files
from ekfac.lab.data.datasets import DATASETS
from ekfac.lab.data.files import OfficialFile, Source

# Parsed once a test process: the tensors are never changed in place.
DATASETS._items["mnist-5k"] = functools.lru_cache(DATASETS.get("mnist-5k"))

#: Nearly all tests pack the same bytes: half a second each time.
PACKERS = {
    "": bytes,
    ".gz": functools.lru_cache(gzip.compress),
    ".xz": functools.lru_cache(functools.partial(lzma.compress, preset=0)),
}


def idx(array: numpy.ndarray) -> bytes:
    head = (0x800 + array.ndim).to_bytes(4, "big")
    return head + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.astype(numpy.uint8).tobytes()


def mnist_bytes(seed: int = 0) -> dict[str, bytes]:
    random = numpy.random.default_rng(seed)
    raw = {}
    for role, count in (("train", 60), ("test", 20)):
        raw[f"{role}_images"] = idx(random.integers(0, 256, (count, 28, 28)))
        raw[f"{role}_labels"] = idx(numpy.arange(count) % 10)
    return raw


def cifar_bytes(seed: int = 0) -> dict[str, bytes]:
    random = numpy.random.default_rng(seed)
    raw = {}
    for role in files.SOURCES["cifar10"].files:
        batch = {
            "data": random.integers(0, 256, (100, 3072), dtype=numpy.uint8),
            "labels": [n % 10 for n in range(100)],
            "batch_label": role,
            "filenames": [f"{n}.png" for n in range(100)],
        }
        raw[role] = pickle.dumps(batch, protocol=2)
    return raw


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that writes a dataset's files and makes their MD5s the expected ones; it gives the folder."""

    def write(name: str, raw: dict[str, bytes], suffix: str = "", folder: str = "") -> Path:
        source = files.SOURCES[name]
        expected = {
            role: OfficialFile(source.files[role].name, len(content), hashlib.md5(content).hexdigest())
            for role, content in raw.items()
        }
        monkeypatch.setitem(files.SOURCES, name, Source(expected, source.folders, source.downloads, source.package))
        place = tmp_path / "data" / folder
        place.mkdir(parents=True, exist_ok=True)
        for role, content in raw.items():
            (place / (expected[role].name + suffix)).write_bytes(PACKERS[suffix](content))
        return tmp_path / "data"

    return write


@pytest.fixture
def tiny() -> list[str]:
    """Return arguments that make `ekfac train` take a second."""
    return ["classifier", "--width", "8", "--limit", "200", "--batch-size", "50", "--epochs", "2"]
