"""Converts layers' inputs and outputs to plain tensors: from shards of tensor parallelism, nested and sparse ones."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class Mesh:
    """The processes that compute layers together on the same examples; known after the first such call."""

    def __init__(self) -> None:
        self._mesh: Any = None

    @property
    def size(self) -> int:
        """The number of processes with the same examples."""
        return 1 if self._mesh is None else int(self._mesh.size())

    @property
    def first(self) -> bool:
        """Whether this is the first of them, which provides the statistics."""
        return self._mesh is None or not any(self._mesh.get_coordinate())

    def note(self, output: Any) -> None:
        """Record the mesh over which a layer's output is distributed, if it is."""
        if type(output) is Tensor or not hasattr(output, "device_mesh"):
            return
        if self._mesh is None:
            self._mesh = output.device_mesh
        if self._mesh != output.device_mesh:
            raise ValueError(
                f"layers are distributed over two meshes, {self._mesh} and {output.device_mesh}. Allowed: tensor "
                "parallelism over one mesh"
            )


def whole(tensor: Any) -> Tensor:
    """Return the full tensor of a sharded or partial DTensor, waiting for it to arrive.

    Nested tensors are concatenated: factors do not depend on how many rows each example has. Sparse ones become dense.
    """
    if tensor.is_nested:
        return torch.cat(tensor.unbind())
    if tensor.layout in SPARSE:
        return cast(Tensor, tensor.to_dense())
    if type(tensor) is not Tensor:
        tensor = tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor
        tensor = tensor.wait() if hasattr(tensor, "wait") else tensor
    found: Tensor = tensor
    return found


def gives_out_pieces(module: nn.Module, model: nn.Module) -> bool:
    """Return whether tensor parallelism may return a module's output in another layout than the module computes.

    It does not if parameters are merely stored in shards, by ``fully_shard`` over one dimension.
    """
    meshes = [p.device_mesh for p in module.parameters(recurse=False) if hasattr(p, "device_mesh")]
    if not meshes:
        return False
    stored = any(hasattr(m, "unshard") for m in model.modules())
    return not stored or any(mesh.ndim > 1 for mesh in meshes)
