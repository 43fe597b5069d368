"""Stores operators as safetensors files, so that loading unpickles nothing and runs no code.

The header includes a checksum of the whole file (:mod:`ekfac.sealed`), which detects damage.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ekfac import checks, sealed
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.shapes import BlockShape
from ekfac.curvature.operators.dense import DensePart, LowRankPart, RowsPart
from ekfac.curvature.operators.parts import DiagonalPart, EigenPart, Part
from ekfac.curvature.operators.vectors import Layout

FORMAT = "ekfac curvature 2"
#: The format of older versions, without a checksum.
UNSEALED = "ekfac curvature 1"
KINDS: dict[str, type[Part]] = {
    "diagonal": DiagonalPart,
    "eigen": EigenPart,
    "dense": DensePart,
    "low rank": LowRankPart,
    "rows": RowsPart,
}


def save(
    path: str | os.PathLike[str], approximation: str, layout: Layout, parts: Sequence[Part], examples: int
) -> None:
    """Write the parts' tensors, and everything else as JSON in the file's header.

    Raises:
        OSError: If the file cannot be written; an existing file is then unchanged.
        ValueError: If the path is a folder.
    """
    checks.instance("path", path, (str, os.PathLike), "a file's name")
    if not os.path.basename(path) or os.path.isdir(path):
        raise ValueError(f"path={os.fspath(path)!r} must be a file's name, not a folder's")
    module = _safetensors()
    names = {kind: name for name, kind in KINDS.items()}
    tensors: dict[str, Tensor] = {}
    described = []
    for i, part in enumerate(parts):
        about: dict[str, Any] = {"kind": names[type(part)], "name": part.name, "parameters": part.parameters}
        if isinstance(part, EigenPart):
            s = part.basis.shape
            about["shape"] = [s.groups, s.out, s.inputs, s.taps, s.extra]
        described.append(about)
        tensors |= {f"{i}.{name}": t.detach().contiguous() for name, t in part.tensors().items()}
    header = {
        "approximation": approximation,
        "examples": examples,
        "names": layout.names,
        "shapes": layout.shapes,
        "parts": described,
    }
    metadata = {"format": FORMAT, "curvature": json.dumps(header), "checksum": sealed.BLANK}
    with sealed.beside(path) as part_file:
        try:
            module.save_file(tensors, part_file, metadata=metadata)
        except module.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code), os.fspath(path)) from error
        with part_file.open("r+b") as stream:
            at = sealed.place(_header(stream))
            assert at is not None
            sealed.seal(stream, at)


def load(path: str | os.PathLike[str], device: str | torch.device) -> tuple[str, Layout, list[Part], int]:
    """Read what :func:`save` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged or of another format, or the device is not available.
    """
    checks.instance("path", path, (str, os.PathLike), "a file's name")
    checks.device("device", device)
    try:
        torch.zeros(1, device=device).tolist()  # fails on the meta device too
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"device={str(device)!r} cannot be used: {reason}") from error
    module = _safetensors()
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
    has_seal = _verify(path)
    try:
        with module.safe_open(os.fspath(path), "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except module.SafetensorError as error:
        raise ValueError(f"{os.fspath(path)!r} is not a whole safetensors file: {error}") from error
    if metadata.get("format") not in (FORMAT, UNSEALED):
        raise ValueError(f"{os.fspath(path)!r} holds no curvature in the format {FORMAT!r}")
    if not has_seal:
        if metadata["format"] != UNSEALED or "checksum" in metadata:
            raise ValueError(f"{os.fspath(path)!r} was altered after it was written: its checksum is broken")
        warnings.warn(
            f"{os.fspath(path)!r} has no checksum, as an older version wrote it; damage to it cannot be seen. "
            "Save it again to give it one",
            stacklevel=3,
        )
    try:
        return _assembled(metadata["curvature"], tensors)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)!r} does not describe a curvature: {error!r}") from error


def _header(stream: BinaryIO) -> bytes:
    """Read a safetensors file up to the end of its header."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    length = 8 + int.from_bytes(stream.read(8), "little")
    stream.seek(0)
    return stream.read(min(length, size))


def _verify(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has a checksum; refuse one whose checksum is wrong."""
    with open(path, "rb") as stream:
        header = _header(stream)
        at = sealed.place(header)
        if at is not None and not sealed.intact(stream, at):
            raise ValueError(
                f"{os.fspath(path)!r} is not a whole safetensors file, or was altered after it was written: "
                "its checksum does not match"
            )
        return at is not None


def _assembled(text: str, tensors: dict[str, Tensor]) -> tuple[str, Layout, list[Part], int]:
    """Build the operator that the header describes from the file's tensors."""
    header = json.loads(text)
    layout = Layout(tuple(header["names"]), tuple(tuple(shape) for shape in header["shapes"]))
    sizes = {name: math.prod(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    parts = []
    for i, about in enumerate(header["parts"]):
        own: dict[str, Any] = {
            name.split(".", 1)[1]: t for name, t in tensors.items() if name.split(".", 1)[0] == str(i)
        }
        if about["kind"] == "eigen":
            basis = Basis(
                BlockShape(*about["shape"]), own.pop("U_A", None), own.pop("U_B", None), own.pop("S_A"), own.pop("S_B")
            )
            own["basis"] = basis
        part = KINDS[about["kind"]](about["name"], tuple(about["parameters"]), **own)
        if part.numel != sum(sizes[name] for name in part.parameters):
            raise ValueError(f"the block {part.name!r} has {part.numel} numbers, which its parameters have not")
        parts.append(part)
    covered = sorted(name for part in parts for name in part.parameters if sizes[name])
    if covered != sorted(name for name in sizes if sizes[name]):
        raise ValueError("its blocks do not cover each parameter once")
    return header["approximation"], layout, parts, header["examples"]


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving and loading curvature needs the package safetensors: pip install safetensors"
        ) from error

    class Names:
        save_file = staticmethod(safetensors.torch.save_file)
        safe_open = safetensors.safe_open
        SafetensorError = safetensors.SafetensorError

    return Names
