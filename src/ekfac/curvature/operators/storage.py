"""Operators in files: safetensors, so that nothing is unpickled and no code runs when one is read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.shapes import BlockShape
from ekfac.curvature.operators.dense import DensePart, LowRankPart, RowsPart
from ekfac.curvature.operators.parts import DiagonalPart, EigenPart, Part
from ekfac.curvature.operators.vectors import Layout

FORMAT = "ekfac curvature 1"
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
    """Write the parts' tensors, and what is not a tensor as JSON in the file's header."""
    save_file = _safetensors().save_file
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
    # Written beside and moved into place, so that a broken run leaves no half a file.
    partial = f"{os.fspath(path)}.partial"
    try:
        save_file(tensors, partial, metadata={"format": FORMAT, "curvature": json.dumps(header)})
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def load(path: str | os.PathLike[str], device: str | torch.device) -> tuple[str, Layout, list[Part], int]:
    """Read what :func:`save` wrote."""
    module = _safetensors()
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
    try:
        with module.safe_open(os.fspath(path), "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except module.SafetensorError as error:
        raise ValueError(f"{os.fspath(path)!r} is not a whole safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)!r} holds no curvature in the format {FORMAT!r}")
    header = json.loads(metadata["curvature"])
    layout = Layout(tuple(header["names"]), tuple(tuple(shape) for shape in header["shapes"]))
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
        parts.append(KINDS[about["kind"]](about["name"], tuple(about["parameters"]), **own))
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
