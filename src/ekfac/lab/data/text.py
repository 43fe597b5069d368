"""Text that is on every machine: sources of the running Python's own standard library, as characters."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ekfac.lab.data.files import DataError

# Big modules of pure Python that have been there from 3.10 on; one that is a package, or gone, is passed over.
MODULES = (
    "_collections_abc", "_pydecimal", "_pyio", "_strptime", "argparse", "ast", "base64", "bdb", "calendar", "codecs",
    "configparser", "contextlib", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "fractions", "ftplib",
    "functools", "gettext", "gzip", "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes",
    "optparse", "os", "pdb", "pickle", "pickletools", "pkgutil", "platform", "plistlib", "pprint", "pstats", "random",
    "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "tokenize", "trace", "traceback", "typing", "uuid", "warnings", "weakref",
)  # fmt: skip
# A newline and the printable characters of ASCII, by number; the same for every version of Python.
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
MOST = 2_000_000
LEAST = 100_000


def library_text(folder: Path | None = None) -> str:
    """Return the modules' sources one after the other, in the characters of :data:`VOCABULARY` alone.

    Args:
        folder: Where the modules are; by default, where the running Python has its own.

    Raises:
        DataError: If hardly any are there, as in a Python that ships compiled modules only.
    """
    folder = folder or Path(os.path.dirname(os.__file__))
    sources = [folder / f"{module}.py" for module in sorted(MODULES)]
    text = "".join(file.read_text("utf-8", errors="replace").expandtabs(4) for file in sources if file.is_file())
    kept = text.translate({ord(c): None for c in set(text) - set(VOCABULARY)})[:MOST]
    if len(kept) < LEAST:
        raise DataError(f"stdlib: {folder} holds {len(kept):,} characters of Python's own sources; needs {LEAST:,}")
    return kept


def encode(text: str) -> Tensor:
    """Return each character's place in :data:`VOCABULARY`."""
    codes = torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8).long()
    return torch.where(codes == ord("\n"), 0, codes - 31)


def blocks(codes: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut codes into blocks, each with what follows every one of its characters; what is left over is dropped."""
    whole = (len(codes) - 1) // length * length
    return codes[:whole].view(-1, length), codes[1 : whole + 1].view(-1, length)
