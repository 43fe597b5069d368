"""Files that are written atomically, and verified by a checksum when they are read.

Every file that the library reads back has a seal, ``sha256:`` and 64 hex digits: the digest of the whole file with
these digits replaced by zeros. JSON and the header of safetensors have it in a field ``checksum``; an archive has it
at its end, as the archive's comment. Other programs can read the files as usual.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

DIGITS = 64
BLANK = "sha256:" + DIGITS * "0"
_FIELD = re.compile(rb'"checksum": ?"sha256:(?=[0-9a-f]{64}")')
_FIRST = re.compile(rb"\s*\{\s*" + _FIELD.pattern)
# Matches a seal at the start of a text even if its characters were damaged.
_SHAPE = re.compile(rb'\s*\{\s*"[^"]{8}": ?"[^"]{71}"')
_CHUNK = 2**20


class Altered(ValueError):
    """A file was altered after it was written."""


def place(header: bytes) -> int | None:
    """Return the offset of a seal's digits in the header of a file, or ``None`` if there is no seal."""
    found = _FIELD.search(header)
    return _end(found)


def _end(found: re.Match[bytes] | None) -> int | None:
    return None if found is None else found.end()


def digest(stream: BinaryIO, at: int) -> bytes:
    """Return the digest of a whole file whose seal's digits are at offset ``at``."""
    found = hashlib.sha256()
    stream.seek(0)
    left = at
    while left and (chunk := stream.read(min(left, _CHUNK))):
        found.update(chunk)
        left -= len(chunk)
    found.update(DIGITS * b"0")
    stream.seek(at + DIGITS)
    while chunk := stream.read(_CHUNK):
        found.update(chunk)
    return found.hexdigest().encode()


def seal(stream: BinaryIO, at: int) -> None:
    """Write the digits into a file that is otherwise complete."""
    found = digest(stream, at)
    stream.seek(at)
    stream.write(found)


def intact(stream: BinaryIO, at: int) -> bool:
    """Return whether a file matches its seal."""
    found = digest(stream, at)
    stream.seek(at)
    return stream.read(DIGITS) == found


def dumps(data: dict[str, Any], indent: int | None = None) -> bytes:
    """Return sealed JSON, on one line unless indented, with a newline at the end.

    Raises:
        ValueError: If a number is not finite, or ``data`` has a field ``checksum`` of its own.
    """
    if "checksum" in data:
        raise ValueError("data has a field 'checksum' already")
    text = (json.dumps({"checksum": BLANK, **data}, indent=indent, allow_nan=False) + "\n").encode()
    at = _end(_FIRST.match(text))
    assert at is not None
    return text[:at] + hashlib.sha256(text).hexdigest().encode() + text[at + DIGITS :]


def loads(text: bytes) -> tuple[Any, bool]:
    """Parse sealed JSON; return its data without the seal, and whether it had one.

    Raises:
        Altered: If it does not match its seal.
        ValueError: If it is not JSON.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    at = _end(_FIRST.match(text))
    if at is not None:
        found = hashlib.sha256(text[:at] + DIGITS * b"0" + text[at + DIGITS :]).hexdigest().encode()
        if found != text[at : at + DIGITS]:
            raise Altered("it was altered after it was written: its checksum does not match")
    if at is None and (_SHAPE.match(text) or (isinstance(data, dict) and "checksum" in data)):
        raise Altered("it was altered after it was written: its checksum is broken")
    if at is not None:
        del data["checksum"]
    return data, at is not None


@contextlib.contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the name of a temporary file, and move that file to ``path`` when the block succeeds.

    If the block fails, ``path`` is unchanged and the temporary file is removed. If the process is killed, ``path`` is
    unchanged too, but the temporary file, whose name ends in ``.part``, remains.

    Raises:
        OSError: If the file cannot be written; the error names ``path``.
    """
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        yield part
        with part.open("r+b") as stream:
            os.fsync(stream.fileno())
        part.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        cause = refusal(error)
        if cause is None:
            raise
        if cause.filename is None or str(cause.filename) == str(part):
            cause.filename = str(target)
        raise cause from None
    _sync_folder(target.parent)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` when the block succeeds; see :func:`beside`."""
    with beside(path) as part, part.open("w+b") as stream:
        yield stream


def refusal(error: BaseException | None) -> OSError | None:
    """Return the OSError behind an exception, even if torch has wrapped it; None if there is none."""
    for _ in range(8):
        if error is None or isinstance(error, OSError):
            return error
        if not isinstance(error, RuntimeError):
            return None
        error = error.__cause__ or error.__context__
    return None


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file's content atomically."""
    with replacing(path) as stream:
        stream.write(content)


def _sync_folder(folder: Path) -> None:
    """Flush a folder, if the system allows it, so that a new name survives a loss of power."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
