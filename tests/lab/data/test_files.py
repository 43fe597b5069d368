"""Data files: found, checked, refused; fetched whole or not at all."""

import codecs
import functools
import hashlib
import http.server
import io
import lzma
import os
import pickle
import tarfile
import threading
from pathlib import Path

import numpy
import pytest

from ekfac.lab.data import files
from ekfac.lab.data.files import DataError, Download, OfficialFile, Source
from lab.conftest import cifar_bytes, mnist_bytes


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
def test_files_are_found_plain_and_compressed_in_every_usual_folder(official, suffix, folder):
    raw = mnist_bytes()
    data_dir = official("mnist", raw, suffix, folder)
    assert files.read("mnist", "test_images", data_dir) == raw["test_images"]
    assert all(answer == "ok" for _, answer in files.verify("mnist", data_dir))


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_truncated_file_is_refused_and_named(official, suffix):
    data_dir = official("mnist", mnist_bytes(), suffix)
    path = data_dir / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*truncated or altered"):
        files.read("mnist", "train_images", data_dir)


def test_one_altered_bit_is_refused(official):
    data_dir = official("mnist", mnist_bytes())
    path = data_dir / "t10k-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="MD5"):
        files.read("mnist", "test_labels", data_dir)


def test_longer_file_is_refused_without_unpacking_it_all(official):
    raw = mnist_bytes()
    data_dir = official("mnist", raw)
    (data_dir / "t10k-labels-idx1-ubyte").write_bytes(raw["test_labels"] + b"x" * 10_000_000)
    with pytest.raises(DataError, match=f"more than {len(raw['test_labels'])} bytes"):
        files.read("mnist", "test_labels", data_dir)


def test_garbage_under_a_compressed_name_is_refused(official):
    data_dir = official("mnist", mnist_bytes(), ".xz")
    (data_dir / "train-labels-idx1-ubyte.xz").write_bytes(b"no xz at all")
    with pytest.raises(DataError, match="cannot be read"):
        files.read("mnist", "train_labels", data_dir)


def test_missing_file_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*ekfac data fetch mnist.*--data-dir"):
        files.read("mnist", "train_images", tmp_path)
    assert {answer == "ok" for _, answer in files.verify("cifar10", tmp_path)} == {False}


def test_data_folder_is_given_or_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EKFAC_DATA", str(tmp_path))
    assert files.data_folder(None) == tmp_path
    assert files.data_folder("elsewhere") == Path("elsewhere")
    monkeypatch.delenv("EKFAC_DATA")
    assert files.data_folder(None) == Path.home() / ".cache" / "ekfac"


class _Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "content",
    [
        _Attack(os.system, "true"),
        _Attack(eval, "1 + 1"),
        _Attack(print, "hello"),
        {"data": _Attack(open, "/etc/hostname")},
        _Attack(codecs.encode, "x", "rot13"),
        _Attack(numpy.load, "x.npy"),
        _Attack(numpy.fromfile, "x.npy"),
        numpy.array([_Attack(os.getcwd)], dtype=object),
    ],
    ids=["system", "eval", "print", "open", "codec", "numpy.load", "numpy.fromfile", "inside an array"],
)
def test_a_pickle_that_tries_to_run_code_is_refused(content):
    with pytest.raises(DataError, match="refused"):
        files.unpickle(pickle.dumps(content))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_and_plain_containers_are_read(protocol):
    batch = {"data": numpy.arange(6, dtype=numpy.uint8).reshape(2, 3), "labels": [1, 2], "more": ("a", b"b", None)}
    found = files.unpickle(pickle.dumps(batch, protocol=protocol))
    assert (found["data"] == batch["data"]).all() and found["labels"] == [1, 2] and found["more"] == ("a", b"b", None)


def test_broken_pickle_is_a_data_error():
    with pytest.raises(DataError, match="not a readable pickle"):
        files.unpickle(b"\x80\x02garbage")


@pytest.fixture
def server(tmp_path):
    """Serve a folder on this machine and give the folder and its address."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def _archive(raw: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in {**raw, "../../outside": b"x"}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _cifar_source(address: str, archive: bytes, raw: dict[str, bytes]) -> Source:
    expected = {name: OfficialFile(name, len(content), _md5(content)) for name, content in raw.items()}
    name = "cifar-10-python.tar.gz"
    addresses = (f"{address}/gone/{name}", f"{address}/{name}")
    return Source(expected, ("cifar10",), (Download(name, _md5(archive), addresses),))


def test_fetch_downloads_checks_and_unpacks_by_official_names_only(server, monkeypatch, tmp_path):
    folder, address = server
    raw = cifar_bytes()
    archive = _archive(raw)
    (folder / "cifar-10-python.tar.gz").write_bytes(archive)
    monkeypatch.setitem(files.SOURCES, "cifar10", _cifar_source(address, archive, raw))
    target = tmp_path / "a" / "b"
    said: list[str] = []
    files.fetch("cifar10", target, said.append)
    assert sorted(p.name for p in (target / "cifar10").iterdir()) == sorted(raw)
    assert len(said) == 2  # the first address failed, the second served
    said.clear()
    files.fetch("cifar10", target, said.append)
    assert said and "already" in said[0]


def test_fetch_of_an_altered_file_leaves_nothing_behind(server, monkeypatch, tmp_path):
    folder, address = server
    raw = cifar_bytes()
    archive = _archive(raw)
    (folder / "cifar-10-python.tar.gz").write_bytes(archive[:-50])
    monkeypatch.setitem(files.SOURCES, "cifar10", _cifar_source(address, archive, raw))
    with pytest.raises(DataError, match=r"cannot download cifar-10-python\.tar\.gz.*MD5"):
        files.fetch("cifar10", tmp_path / "data", lambda text: None)
    assert list((tmp_path / "data" / "cifar10").iterdir()) == []


def test_fetch_copies_the_embedded_digits(tmp_path):
    files.fetch("mnist-5k", tmp_path, lambda text: None)
    assert (tmp_path / "mnist_5k.csv.gz").is_file()
    assert files.find(files.SOURCES["mnist-5k"], files.SOURCES["mnist-5k"].files["all"], tmp_path).parent == tmp_path


def test_fetch_of_an_unknown_dataset_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match="known: mnist-5k, mnist, cifar10"):
        files.fetch("imagenet", tmp_path)


def test_what_takes_long_to_decompress_is_kept_and_checked(official, monkeypatch, tmp_path) -> None:
    raw = cifar_bytes()
    folder = official("cifar10", raw, ".xz")
    monkeypatch.setattr(files, "KEPT_FROM", 1)
    monkeypatch.setenv("EKFAC_CACHE", str(tmp_path / "cache"))
    first = files.read("cifar10", "test_batch", folder)
    (copy,) = (tmp_path / "cache").iterdir()
    opened = []
    real = lzma.open
    monkeypatch.setattr(files.lzma, "open", lambda *words: opened.append(words) or real(*words))
    assert files.read("cifar10", "test_batch", folder) == first == raw["test_batch"] and not opened
    copy.write_bytes(b"altered")
    assert files.read("cifar10", "test_batch", folder) == first and opened, "an altered copy is made anew"
    assert copy.read_bytes() == first
    # Verifying looks at the official file itself, whatever the cache has.
    source = next(path for path in folder.rglob("test_batch*"))
    source.write_bytes(source.read_bytes()[:-20])
    assert dict(files.verify("cifar10", folder))["test_batch"] != "ok"
    # A cache that cannot be written is no error.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EKFAC_CACHE", str(tmp_path / "file"))
    assert files.read("cifar10", "data_batch_1", folder) == raw["data_batch_1"]
