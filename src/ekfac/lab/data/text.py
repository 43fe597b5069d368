"""Text as tokens: sources of the running Python's standard library, and two corpora for language models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ekfac.lab.data import files
from ekfac.lab.data.files import DataError

# Large pure-Python modules that exist since 3.10; one that is a package, or missing, is skipped.
MODULES = (
    "_collections_abc", "_pydecimal", "_pyio", "_strptime", "argparse", "ast", "base64", "bdb", "calendar", "codecs",
    "configparser", "contextlib", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "fractions", "ftplib",
    "functools", "gettext", "gzip", "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes",
    "optparse", "os", "pdb", "pickle", "pickletools", "pkgutil", "platform", "plistlib", "pprint", "pstats", "random",
    "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "tokenize", "trace", "traceback", "typing", "uuid", "warnings", "weakref",
)  # fmt: skip
# A newline and the printable ASCII characters; the same for every version of Python.
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
MOST = 2_000_000
LEAST = 100_000


def library_text(folder: Path | None = None) -> str:
    """Return the modules' concatenated sources, restricted to the characters of :data:`VOCABULARY`.

    Args:
        folder: The folder of the modules; by default the running Python's.

    Raises:
        DataError: If there are too few, as in a Python that ships only compiled modules.
    """
    folder = folder or Path(os.path.dirname(os.__file__))
    sources = [folder / f"{module}.py" for module in sorted(MODULES)]
    text = "".join(file.read_text("utf-8", errors="replace").expandtabs(4) for file in sources if file.is_file())
    kept = text.translate({ord(c): None for c in set(text) - set(VOCABULARY)})[:MOST]
    if len(kept) < LEAST:
        raise DataError(f"stdlib: {folder} holds {len(kept):,} characters of Python's own sources; needs {LEAST:,}")
    return kept


def encode(text: str) -> Tensor:
    """Return each character's index in :data:`VOCABULARY`."""
    codes = torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8).long()
    return torch.where(codes == ord("\n"), 0, codes - 31)


def blocks(codes: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Split codes into blocks of inputs and next characters; drop the remainder."""
    whole = (len(codes) - 1) // length * length
    return codes[:whole].view(-1, length), codes[1 : whole + 1].view(-1, length)


class Corpus(NamedTuple):
    """Two streams of tokens, and the size of the vocabulary."""

    train: Tensor
    validation: Tensor
    vocabulary: int


def shakespeare(folder: Path) -> Corpus:
    """Return nanoGPT's character-level Shakespeare: 65 sorted characters, the last tenth for validation."""
    text = files.read("shakespeare", "all", folder).decode("utf-8")
    place = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([place[character] for character in text])
    cut = int(0.9 * len(tokens))
    return Corpus(tokens[:cut], tokens[cut:], len(place))


#: The number of validation tokens at the end of the BPE corpus, and its vocabulary.
BPE_VALIDATION, BPE_VOCABULARY = 800_000, 8192


def bpe(folder: Path) -> Corpus:
    """Return the dictionary and kernel corpus in 8,192 BPE tokens, the last 800,000 for validation.

    In a shorter stream, the last tenth is for validation.
    """
    raw = files.read("bpe", "all", folder)
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint16).long()
    cut = len(tokens) - min(BPE_VALIDATION, len(tokens) // 10)
    return Corpus(tokens[:cut], tokens[cut:], BPE_VOCABULARY)


#: Corpora by the name of their files.
CORPORA = {"shakespeare": shakespeare, "bpe": bpe}
